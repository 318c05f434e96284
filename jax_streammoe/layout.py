"""Byte formulas of a rank's ring: the Python twin of cc/protocol/ring.h, with the same names and order.

Contract: `ring_layout(shape)` equals `make_ring_layout` of the header for every shape; a test compares them
over many random shapes. Python needs the numbers before anything is compiled or allocated (`ring_bytes`) and
to read a ring for inspection. Trade-off: two spellings of one fact, pinned by that test, instead of a
compiled module for planning.
"""

from __future__ import annotations

import dataclasses

from .config import MoEConfig, at_least

LINE_BYTES = 128
ERROR_BYTES = 512
SCALE_COLUMNS = 128
ROW_BLOCK = 128  # rows of an expert that a CUDA kernel works on together


@dataclasses.dataclass(frozen=True)
class RingShape:
    """What the size of a ring depends on: R, S, C, H, K, bytes of one activation element, and P pool rows.

    On a GPU also L and I: the kernels' tables and activations lie in the ring, and payload by token, not in slots.
    """

    num_ranks: int
    num_slots: int
    chunk_tokens: int
    hidden: int
    top_k: int
    itemsize: int
    pool_tokens: int
    num_experts: int = 0
    intermediate: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            least = 0 if field.name in ("num_experts", "intermediate") else 1
            object.__setattr__(self, field.name, at_least(field.name, getattr(self, field.name), least))

    @property
    def on_gpu(self) -> bool:
        """Whether the experts of the ring are CUDA kernels."""
        return self.num_experts > 0


def align_line(num_bytes: int) -> int:
    """Returns `num_bytes` rounded up to a 128-byte line."""
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES


def most_row_blocks(pairs: int, experts: int) -> int:
    """Returns the blocks of 128 rows that `pairs` routes to `experts` experts can fill, each one's last being
    partial."""
    return max(1, (pairs + min(pairs, experts) * (ROW_BLOCK - 1)) // ROW_BLOCK)


def ring_layout(shape: RingShape) -> dict[str, int]:
    """Returns byte offsets of every region of one rank's ring, in memory order, and `total`.

    `slot_*` are offsets inside a slot; slot s starts at `slots + s * slot_stride`. Word [r][s] of a table
    lies at `table + (r * num_slots + s) * 128`.
    """
    words = shape.num_ranks * shape.num_slots * LINE_BYTES
    macro_tokens = shape.num_slots * shape.chunk_tokens
    row = shape.hidden * shape.itemsize
    scales = -(-shape.hidden // SCALE_COLUMNS)
    slot_tokens = 0 if shape.on_gpu else shape.chunk_tokens
    slot, slot_stride = _stack(
        0,
        slot_x=align_line(slot_tokens * row),
        slot_x_scale=align_line(slot_tokens * scales * 4),
        slot_topk_ids=align_line(slot_tokens * shape.top_k * 4),
        slot_topk_weights=align_line(slot_tokens * shape.top_k * 4),
        slot_route_descriptor=LINE_BYTES,
        slot_layout_descriptor=LINE_BYTES,
    )
    control, slots = _stack(
        0,
        header=LINE_BYTES,
        call=LINE_BYTES,
        peers=align_line(shape.num_ranks * 8) if shape.on_gpu else 0,
        route_ready=words,
        layout_ready=words,
        consumed=words,
        done=shape.num_ranks * LINE_BYTES,
        abort=shape.num_ranks * LINE_BYTES,
        error=ERROR_BYTES,
    )
    pool, total = _stack(
        slots + shape.num_slots * slot_stride,
        token_pool=align_line(shape.pool_tokens * row),
        combine_rows=align_line(macro_tokens * shape.top_k * row),
        combine_ids=align_line(macro_tokens * shape.top_k * 4),
        combine_weights=align_line(macro_tokens * shape.top_k * 4),
        combine_flags=align_line(macro_tokens * shape.top_k),
        **_work(shape),
    )
    return {**control, "slots": slots, "slot_stride": slot_stride, **slot, **pool, "total": total}


def _work(shape: RingShape) -> dict[str, int]:
    """Bytes of what the kernels of a GPU keep in the ring; nothing on the host."""
    if not shape.on_gpu:
        return dict(stats=0, routes=0, computed=0, plan=0, activations=0)
    experts = shape.num_experts
    pairs = shape.num_ranks * shape.num_slots * shape.chunk_tokens * shape.top_k
    blocks = most_row_blocks(pairs, experts)
    activations = align_line(blocks * ROW_BLOCK * shape.intermediate * shape.itemsize)
    if shape.num_ranks > 1:  # in their place, during a backward: gradients of y and of the weights
        pool = align_line(shape.pool_tokens * shape.hidden * shape.itemsize)
        weights = align_line(shape.num_slots * shape.chunk_tokens * shape.top_k * 4)
        activations = max(activations, pool + weights)
    return dict(
        stats=align_line((experts + 3) * 4),
        routes=align_line(pairs * 4) if shape.num_ranks > 1 else 0,
        computed=align_line(2 * experts * 4),
        plan=align_line(blocks * (ROW_BLOCK * 4 + 16) + 130 * (experts + 1) * 4 + 4096),
        activations=activations,
    )


def default_pool_tokens(*, num_ranks: int, num_slots: int, chunk_tokens: int) -> int:
    """Returns R*S*C, the tokens of one macro-chunk of all ranks: the most that can wait for one rank's
    experts."""
    return num_ranks * num_slots * chunk_tokens


def ring_shape(
    config: MoEConfig, *, chunk_tokens: int, num_slots: int, num_ranks: int, pool_tokens: int | None = None,
    platform: str = "cpu",
) -> RingShape:  # fmt: skip
    """Returns the RingShape of `config`; `pool_tokens=None` is the dropless worst case R*S*C."""
    if platform not in ("cpu", "cuda"):
        raise ValueError(f'platform must be "cpu" or "cuda", got {platform!r}')
    on_gpu, num_experts = platform == "cuda", config.local_experts(at_least("num_ranks", num_ranks, 1))
    for name, size in (("num_slots", num_slots), ("chunk_tokens", chunk_tokens)):
        at_least(name, size, 1)
    if pool_tokens is None:
        pool_tokens = default_pool_tokens(num_ranks=num_ranks, num_slots=num_slots, chunk_tokens=chunk_tokens)
    return RingShape(
        num_ranks=num_ranks,
        num_slots=num_slots,
        chunk_tokens=chunk_tokens,
        hidden=config.hidden,
        top_k=config.top_k,
        itemsize=config.itemsize,
        pool_tokens=pool_tokens,
        num_experts=num_experts if on_gpu else 0,
        intermediate=config.intermediate if on_gpu else 0,
    )


def ring_bytes(
    config: MoEConfig, *, chunk_tokens: int, num_slots: int, num_ranks: int, pool_tokens: int | None = None,
    platform: str = "cpu",
) -> int:  # fmt: skip
    """Returns the bytes of one rank's ring, which depend on S*C and not on the tokens of a call.

    On the CPU about `S*C * H * itemsize * (1 + R + K)`: slots, the pool of waiting tokens and the combine rows. With
    platform="cuda" `S*C * itemsize * (H * (R + K) + R * K * I)`, and a block of 128 rows of I for each local expert:
    the token pool, the combine rows and the activations. Arguments as in `make_ring`; `pool_tokens` is the token rows
    the rank can hold for its experts, by default the dropless worst case R*S*C. Raises ValueError or TypeError naming a
    size that is not a positive int.
    """
    shape = ring_shape(
        config, chunk_tokens=chunk_tokens, num_slots=num_slots, num_ranks=num_ranks, pool_tokens=pool_tokens,
        platform=platform,
    )  # fmt: skip
    return ring_layout(shape)["total"]


def _stack(start: int, **regions: int) -> tuple[dict[str, int], int]:
    """Lays regions of the given bytes one after the other; returns their offsets and the end."""
    offsets, at = {}, start
    for name, num_bytes in regions.items():
        offsets[name] = at
        at += num_bytes
    return offsets, at
