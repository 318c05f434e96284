"""The ring's byte formulas: the Python twin equals the compiled header, regions are aligned and do not
overlap."""

from __future__ import annotations

import dataclasses
import itertools
import re

import _jax_streammoe
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_streammoe.config import MoEConfig
from jax_streammoe.layout import (
    LINE_BYTES,
    RingShape,
    align_line,
    default_pool_tokens,
    ring_bytes,
    ring_layout,
    ring_shape,
)

pytestmark = pytest.mark.core
shapes = st.builds(
    RingShape,
    num_ranks=st.integers(1, 72),
    num_slots=st.integers(1, 64),
    chunk_tokens=st.integers(1, 8192),
    hidden=st.integers(1, 2048).map(lambda n: 8 * n),
    top_k=st.integers(1, 32),
    itemsize=st.sampled_from([1, 2, 4]),
    pool_tokens=st.integers(1, 2**20),
)
SLOT = [
    "slot_x",
    "slot_x_scale",
    "slot_topk_ids",
    "slot_topk_weights",
    "slot_route_descriptor",
    "slot_layout_descriptor",
]
CONTROL = ["header", "route_ready", "layout_ready", "consumed", "done", "abort", "error", "slots"]
POOL = ["token_pool", "combine_rows", "combine_ids", "combine_weights", "combine_flags", "total"]


on_gpu = st.tuples(shapes, st.integers(1, 512), st.integers(1, 1024).map(lambda n: 8 * n)).map(
    lambda t: dataclasses.replace(
        t[0], pool_tokens=t[0].num_ranks * t[0].num_slots * t[0].chunk_tokens, num_experts=t[1], intermediate=t[2]
    )
)


@given(shapes | on_gpu)
def test_python_equals_the_compiled_header(shape):
    assert ring_layout(shape) == dict(_jax_streammoe.ring_layout(dataclasses.asdict(shape)))


@given(shapes)
def test_regions_are_aligned_ordered_and_hold_their_content(shape):
    r, s, c, h, k = shape.num_ranks, shape.num_slots, shape.chunk_tokens, shape.hidden, shape.top_k
    at = ring_layout(shape)
    assert all(offset % LINE_BYTES == 0 for offset in at.values())
    room = {a: at[b] - at[a] for names in (CONTROL, POOL) for a, b in itertools.pairwise(names)}
    room |= {a: at[b] - at[a] for a, b in zip(SLOT, [*SLOT[1:], "slot_stride"], strict=True)}
    for table in ("route_ready", "layout_ready", "consumed"):
        assert room[table] == r * s * LINE_BYTES
    assert room["done"] == room["abort"] == r * LINE_BYTES
    assert room["slot_x"] >= c * h * shape.itemsize
    assert room["slot_x_scale"] >= c * -(-h // 128) * 4
    assert room["slot_topk_ids"] >= c * k * 4 and room["slot_topk_weights"] >= c * k * 4
    assert at["token_pool"] == at["slots"] + s * at["slot_stride"]
    assert room["token_pool"] >= shape.pool_tokens * h * shape.itemsize
    assert room["combine_rows"] >= s * c * k * h * shape.itemsize
    assert room["combine_ids"] >= s * c * k * 4 and room["combine_weights"] >= s * c * k * 4
    assert room["combine_flags"] >= s * c * k
    assert at["header"] == at["slot_x"] == 0


def test_beyond_31_bits():
    shape = RingShape(num_ranks=8, num_slots=8, chunk_tokens=4096, hidden=8192, top_k=8, itemsize=2, pool_tokens=2**18)
    assert ring_layout(shape) == dict(_jax_streammoe.ring_layout(dataclasses.asdict(shape)))
    assert ring_layout(shape)["total"] > 2**33


def test_ring_bytes_defaults_to_the_dropless_pool():
    cfg = MoEConfig(8, 2, 64, 32, dtype=jnp.float32)
    sizes = {"chunk_tokens": 16, "num_slots": 4, "num_ranks": 2}
    assert default_pool_tokens(**sizes) == 128
    shape = ring_shape(cfg, **sizes)
    assert shape == RingShape(2, 4, 16, 64, 2, 4, 128)
    assert ring_bytes(cfg, **sizes) == ring_layout(shape)["total"]
    smaller = ring_bytes(cfg, **sizes, pool_tokens=64)
    assert ring_bytes(cfg, **sizes) - smaller == 64 * 64 * 4


@pytest.mark.parametrize(("given_bytes", "want"), [(0, 0), (1, 128), (128, 128), (129, 256)])
def test_align_line(given_bytes, want):
    assert align_line(given_bytes) == want


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"chunk_tokens": 0}, ValueError, "chunk_tokens must be at least 1, got 0"),
        ({"num_slots": 2.5}, TypeError, "num_slots must be an int, got 2.5 of type float"),
        ({"num_ranks": -1}, ValueError, "num_ranks must be at least 1, got -1"),
        ({"pool_tokens": 0}, ValueError, "pool_tokens must be at least 1, got 0"),
    ],
)
def test_refusals(changes, error, text):
    sizes = {"chunk_tokens": 16, "num_slots": 4, "num_ranks": 2} | changes
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        ring_bytes(MoEConfig(8, 2, 64, 32), **sizes)


def test_ring_bytes_knows_two_platforms_and_whole_experts():
    config = MoEConfig(6, 2, 16, 8, dtype=jnp.bfloat16)
    sizes = dict(chunk_tokens=4, num_slots=2)
    with pytest.raises(ValueError, match=r'^platform must be "cpu" or "cuda", got \'gpu\'$'):
        ring_bytes(config, num_ranks=1, platform="gpu", **sizes)
    with pytest.raises(ValueError, match="num_experts"):
        ring_bytes(config, num_ranks=4, **sizes)
    with pytest.raises(TypeError, match="num_slots"):
        ring_bytes(config, num_ranks=1, chunk_tokens=4, num_slots=None)
