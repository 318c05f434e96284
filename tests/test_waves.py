"""Chunk and wave plans: known cases, and the properties every plan has, over random calls."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jax_streammoe.waves import (
    CPU,
    ChunkPlan,
    CostModel,
    chunk_bounds,
    plan_chunks,
    plan_waves,
    validate_publication_order,
)

pytestmark = pytest.mark.core

FINE = CostModel(rows_per_wave=512, min_carry_rows=256)
calls = st.fixed_dictionaries(
    {
        "num_tokens": st.integers(0, 400) | st.integers(0, 40000),
        "ring_chunk_tokens": st.integers(1, 64) | st.sampled_from([256, 1024]),
        "num_slots": st.integers(1, 12),
        "top_k": st.integers(1, 8),
        "num_experts": st.sampled_from([1, 4, 8, 128]),
        "num_ranks": st.sampled_from([1, 2, 4]),
        "cost": st.sampled_from([FINE, CPU(8), CPU(128), CostModel(32, 16, max_waves=7)]),
        "chunks": st.none() | st.just("auto") | st.integers(1, 40),
        "schedule": st.sampled_from(["packed", "chunk"]),
    }
)


def make_plan(call):
    call = dict(call)
    macro = min(call["num_tokens"], call["ring_chunk_tokens"] * call["num_slots"])
    assume(call["num_tokens"] <= 200 * call["ring_chunk_tokens"] * call["num_slots"])
    if isinstance(call["chunks"], int):
        call["chunks"] = max(call["chunks"], -(-macro // call["ring_chunk_tokens"]))
    return plan_chunks(call.pop("num_tokens"), **call)


@given(calls)
def test_chunks_cover_every_token_once_in_order_and_fit(call):
    plan, tokens, limit = make_plan(call), call["num_tokens"], call["ring_chunk_tokens"]
    assert 1 <= plan.chunk_tokens <= limit
    at = 0
    for n in range(plan.num_chunks):
        start, stop = chunk_bounds(plan, tokens, n)
        assert start == at and 0 <= stop - start <= plan.chunk_tokens
        assert start // max(1, plan.macro_tokens) == plan.macro_of(n) or start == stop
        at = stop
    assert at == tokens
    macro_starts = [0, *plan.macro_ends[:-1]]
    per_macro = [end - start for start, end in zip(macro_starts, plan.macro_ends, strict=True)]
    assert len(per_macro) == max(1, -(-tokens // (limit * call["num_slots"])))
    if tokens and isinstance(call["chunks"], int):
        assert len(set(per_macro)) == 1
    if call["chunks"] is None:
        assert plan.num_chunks == max(1, -(-tokens // limit))
    if call["chunks"] == "auto":
        fewest = -(-plan.macro_tokens // limit)
        assert len(set(per_macro)) == 1 and (per_macro[0] in (1, 2, 4, 8) or per_macro[0] == fewest > 8)


@given(calls)
def test_waves_are_non_empty_within_the_slots_and_seal_every_macro_chunk(call):
    plan = make_plan(call)
    starts = (0, *plan.wave_ends[:-1])
    assert all(0 < end - start <= call["num_slots"] for start, end in zip(starts, plan.wave_ends, strict=True))
    assert plan.wave_ends[-1] == plan.macro_ends[-1] == plan.num_chunks
    assert set(plan.macro_ends) <= set(plan.wave_ends)
    assert sum(map(plan.is_final_wave, range(len(plan.wave_ends)))) == len(plan.macro_ends)
    if call["schedule"] == "chunk":
        assert plan.wave_ends == tuple(range(1, plan.num_chunks + 1))
    for n in range(plan.num_chunks):
        wave = plan.wave_of(n)
        assert starts[wave] <= n < plan.wave_ends[wave]


@given(calls, st.randoms(use_true_random=False))
def test_every_legal_order_ends_and_in_order_is_always_legal(call, random):
    plan, slots = make_plan(call), call["num_slots"]
    assume(plan.num_chunks <= 60)
    for n in range(plan.num_chunks):
        validate_publication_order(plan, range(n), n, num_slots=slots)
    published = set()
    while len(published) < plan.num_chunks:
        legal = [n for n in range(plan.num_chunks) if n not in published and _is_legal(plan, published, n, slots)]
        assert legal, (plan, published)
        published.add(random.choice(legal))


@given(calls)
def test_publication_order_agrees_with_its_definition(call):
    plan, slots = make_plan(call), call["num_slots"]
    assume(plan.num_chunks <= 60)
    for n in range(plan.num_chunks):
        for missing in range(plan.num_chunks):
            published = set(range(plan.num_chunks)) - {missing, n}
            reused = n - slots
            waits_for_wave = reused >= 0 and missing < plan.wave_ends[plan.wave_of(reused)]
            waits_for_macro = plan.macro_of(missing) < plan.macro_of(n)
            assert _is_legal(plan, published, n, slots) == (not (waits_for_wave or waits_for_macro) or missing == n)


def _is_legal(plan, published, chunk, num_slots):
    try:
        validate_publication_order(plan, published, chunk, num_slots=num_slots)
    except ValueError:
        return False
    return True


QWEN = {"top_k": 8, "num_experts": 128, "cost": FINE}
MIXTRAL = {"top_k": 2, "num_experts": 8, "cost": FINE}


@pytest.mark.parametrize(
    ("tokens", "chunk_tokens", "slots", "options", "want"),
    [
        # r = 512 rows per expert: one wave, and auto takes the fewest chunks that fit
        (8192, 1024, 8, {**QWEN, "chunks": None}, (1024, (8,), (8,))),
        (8192, 1024, 8, {**QWEN, "chunks": "auto"}, (1024, (8,), (8,))),
        (8192, 4096, 2, {**QWEN, "chunks": "auto"}, (4096, (2,), (2,))),
        (8192, 8192, 1, {**QWEN, "chunks": "auto"}, (8192, (1,), (1,))),
        # r = 1024 on two ranks: two waves, four chunks
        (8192, 4096, 4, {**QWEN, "num_ranks": 2, "chunks": "auto"}, (2048, (4,), (2, 4))),
        # r = 2048: four waves, eight chunks
        (8192, 8192, 8, {**MIXTRAL, "chunks": "auto"}, (1024, (8,), (2, 4, 6, 8))),
        (8192, 1024, 8, {**MIXTRAL, "chunks": None}, (1024, (8,), (2, 4, 6, 8))),
        # three waves would like six chunks: four is the next below
        (6144, 8192, 8, {**MIXTRAL, "chunks": "auto"}, (1536, (4,), (1, 2, 4))),
        # a decode batch is one chunk
        (64, 1024, 8, {**QWEN, "chunks": "auto"}, (64, (1,), (1,))),
        # more chunks than slots: progress adds a boundary
        (8192, 1024, 8, {**QWEN, "chunks": 16}, (512, (16,), (8, 16))),
        # two macro-chunks, the second partial
        (10000, 1024, 8, {**QWEN, "chunks": None}, (1024, (8, 10), (8, 10))),
        (10000, 1024, 8, {**QWEN, "chunks": 8}, (1024, (8, 16), (8, 16))),
        # more slots than eight: auto cannot go below them
        (16384, 1024, 16, {**QWEN, "chunks": "auto"}, (1024, (16,), (8, 16))),
        # a last chunk that is empty
        (9, 4, 4, {**QWEN, "chunks": 8}, (2, (8,), (4, 8))),
        (0, 1024, 8, {**QWEN, "chunks": "auto"}, (1024, (1,), (1,))),
        (0, 1024, 8, {**QWEN, "chunks": None}, (1024, (1,), (1,))),
        (0, 1024, 8, {**QWEN, "chunks": 4}, (1024, (1,), (1,))),
        (8192, 2048, 4, {**MIXTRAL, "chunks": None, "single_wave": True}, (2048, (4,), (4,))),
        (8192, 2048, 4, {**MIXTRAL, "chunks": None, "schedule": "chunk"}, (2048, (4,), (1, 2, 3, 4))),
        (64, 16, 4, {"top_k": 2, "num_experts": 4, "cost": CPU(8), "chunks": None}, (16, (4,), (1, 2, 3, 4))),
    ],
)
def test_known_plans(tokens, chunk_tokens, slots, options, want):
    plan = plan_chunks(tokens, ring_chunk_tokens=chunk_tokens, num_slots=slots, **options)
    assert (plan.chunk_tokens, plan.macro_ends, plan.wave_ends) == want


def test_plans_are_hashable_values():
    a, b = (plan_chunks(100, ring_chunk_tokens=16, num_slots=4, **QWEN) for _ in range(2))
    assert a == b and hash(a) == hash(b) and isinstance(a, ChunkPlan)


def test_cost_models():
    assert (FINE.rows_per_wave, FINE.min_carry_rows, FINE.max_waves, FINE.producer_sms) == (512, 256, 4, 0)
    assert CPU(64) == CostModel(64, 64, max_waves=4)
    with pytest.raises(ValueError, match=r"^rows_per_wave must be at least 1, got 0$"):
        CostModel(0, 1)


def test_plan_waves_over_several_macro_chunks():
    # r = 2048 then 256 rows per expert
    ends = plan_waves([8, 1], [8192, 1024], num_slots=8, **MIXTRAL)
    assert ends == (2, 4, 6, 8, 9)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"chunks": 3},
            "chunks must be at least 8, so that a chunk of 8192 tokens / chunks fits the ring's chunk_tokens "
            "= 1024, got 3 of 2731 tokens",
        ),
        ({"chunks": 0}, "chunks must be at least 1, got 0"),
        ({"chunks": "many"}, "chunks must be None, an int or \"auto\", got 'many'"),
        ({"schedule": "eager"}, "schedule must be one of packed, chunk, got 'eager'"),
        ({"num_tokens": -1}, "num_tokens must be at least 0, got -1"),
        ({"ring_chunk_tokens": 0}, "chunk_tokens must be at least 1, got 0"),
        ({"num_slots": 0}, "num_slots must be at least 1, got 0"),
        (
            {"num_tokens": 8193, "single_wave": True},
            "capacity needs all tokens of the call in the ring: num_tokens must be at most num_slots * "
            "chunk_tokens = 8192, got 8193",
        ),
        (
            {"chunks": 9, "single_wave": True},
            "capacity needs one slot per chunk: chunks must be at most 8, got 9",
        ),
    ],
)
def test_refusals(options, text):
    call = {"num_tokens": 8192, "ring_chunk_tokens": 1024, "num_slots": 8, **QWEN, **options}
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        plan_chunks(call.pop("num_tokens"), **call)


def test_chunks_of_the_wrong_type():
    with pytest.raises(TypeError, match=r"^chunks must be an int, got 2\.0 of type float$"):
        plan_chunks(64, ring_chunk_tokens=64, num_slots=1, chunks=2.0, **QWEN)


def test_publication_errors_say_what_to_publish_first():
    plan = plan_chunks(12, ring_chunk_tokens=1, num_slots=4, chunks=None, **QWEN)  # macro-chunks of 4
    wide = plan_chunks(8, ring_chunk_tokens=4, num_slots=2, chunks=4, **QWEN)  # 4 chunks over 2 slots, waves of 2
    assert plan.macro_ends == (4, 8, 12) and wide.wave_ends == (2, 4)
    with pytest.raises(ValueError, match=re.escape(
        "chunk 4 belongs to macro-chunk 1, which shares the ring's pool of 4 slots with the one before: "
        "publish chunks [1, 3] first"
    )):  # fmt: skip
        validate_publication_order(plan, {0, 2}, 4, num_slots=4)
    with pytest.raises(ValueError, match=re.escape(
        "chunk 2 reuses the slot of chunk 0 in a ring of 2 slots, and the wave that frees it ends with chunk "
        "1: publish chunks [1] first"
    )):  # fmt: skip
        validate_publication_order(wide, {0, 3}, 2, num_slots=2)
    with pytest.raises(ValueError, match=r"^chunk must be in 0\.\.3, got 4$"):
        validate_publication_order(wide, set(), 4, num_slots=2)
    with pytest.raises(ValueError, match=r"^chunk must be in 0\.\.3, got -1$"):
        chunk_bounds(wide, 8, -1)


def test_plans_need_no_jax():
    """waves.py itself imports nothing of JAX; `config`, which it shares a check with, only names dtypes."""
    source = (Path(__file__).parents[1] / "jax_streammoe/waves.py").read_text()
    assert not re.search(r"^\s*(import|from) (jax|numpy)", source, re.MULTILINE)
    subprocess.run([sys.executable, "-c", "import jax_streammoe.waves"], check=True, cwd=Path(__file__).parents[1])
