"""How a call is cut: macro-chunks, chunks and waves, as pure functions of static numbers. No JAX here.

Contract: every rank computes the same plan from the same arguments. A macro-chunk is what the ring's S slots
of C tokens can hold; a chunk is what is published at once; a wave is the run of chunks whose rows an expert
computes in one pass over its weights. All ends are exclusive chunk indices. Trade-off: chunks are cheap and
waves are not (each pass reads the weights again), so waves follow the cost model, and more are added only
where a wave would span more chunks than there are slots: that chunk could never be published.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence
from typing import Literal

from .config import as_int, at_least

AUTO_CHUNKS = (1, 2, 4, 8)  # per macro-chunk; every publication costs launches, more than 8 never pays
SCHEDULES = ("packed", "chunk")


@dataclasses.dataclass(frozen=True)
class CostModel:
    """What one pass over an expert's weights needs to be worth its reads.

    rows_per_wave: rows per local expert that one wave should have; min_carry_rows: a non-final wave computes
    an expert only with at least this many pending rows, and carries the rest; max_waves: per macro-chunk,
    before boundaries that progress needs; chunks_per_wave: that "auto" cuts; producer_sms: of a GPU, left to the
    producer by waves that run beside it.
    """

    rows_per_wave: int
    min_carry_rows: int
    max_waves: int = 4
    chunks_per_wave: int = 2
    producer_sms: int = 0

    def __post_init__(self) -> None:
        for name in ("rows_per_wave", "min_carry_rows", "max_waves", "chunks_per_wave"):
            object.__setattr__(self, name, at_least(name, getattr(self, name), 1))
        object.__setattr__(self, "producer_sms", at_least("producer_sms", self.producer_sms, 0))


def CPU(block_m: int) -> CostModel:
    """Returns the cost model of the CPU backend: full blocks of `block_m` rows are as good as it gets."""
    return CostModel(rows_per_wave=block_m, min_carry_rows=block_m)


@dataclasses.dataclass(frozen=True)
class ChunkPlan:
    """The cut of one call; frozen and hashable.

    chunk_tokens: tokens of a full chunk, at most the ring's C. macro_tokens: tokens of a full macro-chunk.
    num_chunks: static and equal on all ranks, empty chunks included. macro_ends, wave_ends: exclusive chunk
    indices, ascending, the last equals num_chunks; every macro end is a wave end (the seal).
    """

    chunk_tokens: int
    macro_tokens: int
    num_chunks: int
    macro_ends: tuple[int, ...]
    wave_ends: tuple[int, ...]

    def macro_of(self, chunk: int) -> int:
        """Returns the index of the macro-chunk that contains `chunk`."""
        return sum(end <= chunk for end in self.macro_ends)

    def wave_of(self, chunk: int) -> int:
        """Returns the index of the wave that contains `chunk`."""
        return sum(end <= chunk for end in self.wave_ends)

    def is_final_wave(self, wave: int) -> bool:
        """Whether `wave` seals its macro-chunk: it computes every pending row and carries none."""
        return self.wave_ends[wave] in self.macro_ends


def plan_chunks(
    num_tokens: int,
    *,
    ring_chunk_tokens: int,
    num_slots: int,
    top_k: int,
    num_experts: int,
    num_ranks: int = 1,
    cost: CostModel,
    chunks: int | Literal["auto"] | None = "auto",
    schedule: str = "packed",
    single_wave: bool = False,
) -> ChunkPlan:
    """Returns the chunk and wave plan of a call over `num_tokens` tokens per rank.

    A macro-chunk is M = min(T, S*C) tokens. `chunks=None` cuts it into chunks of C tokens, an int n into n
    chunks of ceil(M/n) tokens (the last may be partial or empty), "auto" into 1, 2, 4 or 8: the fewest that
    fit C when the cost model predicts no gain, `chunks_per_wave` per wave otherwise. T = 0 gives one empty chunk.

    Arguments:
      num_tokens: T, the static token count, equal on all ranks.
      ring_chunk_tokens, num_slots: C and S of the ring.
      top_k, num_experts, num_ranks: K, E and R; r = T*K*R/E is the expected rows per local expert.
      cost: the backend's cost model.
      schedule: "packed" (waves from the cost model) or "chunk" (one wave per chunk).
      single_wave: the whole call is one wave, as a capacity needs; then T <= S*C and at most S chunks.

    Raises:
      ValueError: chunks would exceed C, an unknown word, or `single_wave` cannot be met.
    """
    tokens = at_least("num_tokens", num_tokens, 0)
    limit = at_least("chunk_tokens", ring_chunk_tokens, 1)
    slots = at_least("num_slots", num_slots, 1)
    macro_tokens = min(tokens, slots * limit)
    if tokens == 0:
        per_macro, chunk_tokens, sizes = 1, limit, [0]
    else:
        sizes = [min(macro_tokens, tokens - start) for start in range(0, tokens, macro_tokens)]
        load = _rows(macro_tokens, top_k=top_k, num_experts=num_experts, num_ranks=num_ranks)
        per_macro, chunk_tokens = _cut(macro_tokens, limit, chunks, load, cost)
    if chunks is None:
        counts = [max(1, _ceil_div(size, chunk_tokens)) for size in sizes]
    else:
        counts = [per_macro] * len(sizes)
    if single_wave:
        if len(sizes) > 1:
            raise ValueError(
                f"capacity needs all tokens of the call in the ring: num_tokens must be at most num_slots * "
                f"chunk_tokens = {slots * limit}, got {tokens}"
            )
        if counts[0] > slots:
            raise ValueError(f"capacity needs one slot per chunk: chunks must be at most {slots}, got {counts[0]}")
        ends: tuple[int, ...] = (counts[0],)
    else:
        ends = plan_waves(
            counts, sizes, num_slots=slots, top_k=top_k, num_experts=num_experts, num_ranks=num_ranks,
            cost=cost, schedule=schedule,
        )  # fmt: skip
    macro_ends = tuple(itertools.accumulate(counts))
    return ChunkPlan(chunk_tokens, macro_tokens, macro_ends[-1], macro_ends, ends)


def plan_waves(
    macro_chunks: Sequence[int],
    macro_tokens: Sequence[int],
    *,
    num_slots: int,
    top_k: int,
    num_experts: int,
    num_ranks: int = 1,
    cost: CostModel,
    schedule: str = "packed",
) -> tuple[int, ...]:
    """Returns the exclusive wave ends of macro-chunks with the given chunk and token counts.

    "packed": w = clamp(floor(r / rows_per_wave), 1, max_waves) waves per macro-chunk, evenly spread, then
    more until no wave spans more than `num_slots` chunks. "chunk": one wave per chunk. The last wave of a
    macro-chunk ends with it. Raises ValueError for an unknown schedule.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    ends: list[int] = []
    base = 0
    for num_chunks, tokens in zip(macro_chunks, macro_tokens, strict=True):
        if schedule == "chunk":
            waves = num_chunks
        else:
            load = _rows(tokens, top_k=top_k, num_experts=num_experts, num_ranks=num_ranks)
            waves = min(num_chunks, max(1, min(load // cost.rows_per_wave, cost.max_waves)))
        start = 0
        for end in _spread(num_chunks, waves):
            pieces = _ceil_div(end - start, num_slots)
            ends.extend(base + start + piece for piece in _spread(end - start, pieces))
            start = end
        base += num_chunks
    return tuple(ends)


def chunk_bounds(plan: ChunkPlan, num_tokens: int, chunk: int) -> tuple[int, int]:
    """Returns `(start, stop)`, the tokens of `chunk`, clipped to its macro-chunk and to `num_tokens`.

    An empty chunk has start == stop. Raises ValueError when `chunk` is outside the plan.
    """
    _check_chunk(plan, chunk)
    macro = plan.macro_of(chunk)
    first = plan.macro_ends[macro - 1] if macro else 0
    stop_of_macro = min(num_tokens, (macro + 1) * plan.macro_tokens)
    start = min(macro * plan.macro_tokens + (chunk - first) * plan.chunk_tokens, stop_of_macro)
    return start, min(start + plan.chunk_tokens, stop_of_macro)


def validate_publication_order(plan: ChunkPlan, published: Collection[int], chunk: int, *, num_slots: int) -> None:
    """Raises ValueError when publishing `chunk` next could wait for a kernel that is not enqueued yet.

    `published` holds the chunks whose routing and layout are both published. A wave is enqueued once all
    chunks up to its end are. Publishing n reuses the slot of chunk n - S, so the wave of n - S must be
    enqueued; a chunk of a later macro-chunk needs all earlier macro-chunks, whose rows share its pool.
    """
    _check_chunk(plan, chunk)
    macro = plan.macro_of(chunk)
    if macro:
        missing = _missing(published, plan.macro_ends[macro - 1])
        if missing:
            raise ValueError(
                f"chunk {chunk} belongs to macro-chunk {macro}, which shares the ring's pool of {num_slots} "
                f"slots with the one before: publish chunks {missing} first"
            )
    if chunk >= num_slots:
        end = plan.wave_ends[plan.wave_of(chunk - num_slots)]
        missing = _missing(published, end)
        if missing:
            raise ValueError(
                f"chunk {chunk} reuses the slot of chunk {chunk - num_slots} in a ring of {num_slots} slots, "
                f"and the wave that frees it ends with chunk {end - 1}: publish chunks {missing} first"
            )


def _cut(macro_tokens: int, limit: int, chunks: int | str | None, load: int, cost: CostModel) -> tuple[int, int]:
    """Returns (chunks per macro-chunk, tokens per chunk) of a non-empty macro-chunk."""
    fewest = _ceil_div(macro_tokens, limit)
    if chunks is None:
        return fewest, limit
    if isinstance(chunks, str):
        if chunks != "auto":
            raise ValueError(f'chunks must be None, an int or "auto", got {chunks!r}')
        wanted = 1
        if cost.max_waves > 1 and load >= 2 * cost.rows_per_wave:
            wanted = cost.chunks_per_wave * min(load // cost.rows_per_wave, cost.max_waves)
        wanted = max(n for n in AUTO_CHUNKS if n <= wanted)
        count = next((n for n in AUTO_CHUNKS if n >= max(fewest, wanted)), fewest)
    else:
        count = at_least("chunks", chunks, 1)
        if count < fewest:
            raise ValueError(
                f"chunks must be at least {fewest}, so that a chunk of {macro_tokens} tokens / chunks fits "
                f"the ring's chunk_tokens = {limit}, got {count} of {_ceil_div(macro_tokens, count)} tokens"
            )
    return count, _ceil_div(macro_tokens, count)


def _rows(tokens: int, *, top_k: int, num_experts: int, num_ranks: int) -> int:
    """Expected rows per local expert, floor(T*K*R/E)."""
    return tokens * top_k * num_ranks // num_experts


def _spread(length: int, parts: int) -> list[int]:
    """Exclusive ends of `parts` nearly equal, non-empty parts of `length` items."""
    return [(part + 1) * length // parts for part in range(parts)]


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _missing(published: Collection[int], end: int) -> list[int]:
    return [n for n in range(end) if n not in published]


def _check_chunk(plan: ChunkPlan, chunk: int) -> None:
    if not 0 <= as_int("chunk", chunk) < plan.num_chunks:
        raise ValueError(f"chunk must be in 0..{plan.num_chunks - 1}, got {chunk}")
