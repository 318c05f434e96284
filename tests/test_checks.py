"""Every argument check: what passes, and the exact text of each refusal, on arrays and on tracers."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_streammoe import checks
from jax_streammoe.config import MoEConfig

pytestmark = pytest.mark.core
T, H, I, E, K = 5, 16, 24, 4, 2
NAMES = ("x", "topk_ids", "topk_weights", "w_gate_up", "w_down", "b_gate_up", "b_down")


def of(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def call(leading=(T,), use_bias=False, activation="swiglu", **changes):
    cfg = MoEConfig(E, K, H, I, dtype=jnp.float32, use_bias=use_bias, activation=activation)
    args = {
        "x": of(*leading, H),
        "topk_ids": of(*leading, K, dtype=jnp.int32),
        "topk_weights": of(*leading, K),
        "w_gate_up": of(E, H, cfg.gate_up_width),
        "w_down": of(E, I, H),
        "b_gate_up": of(E, cfg.gate_up_width) if use_bias else None,
        "b_down": of(E, H) if use_bias else None,
    } | changes
    return checks.check_moe_args(*(args[name] for name in NAMES), args.get("config", cfg), E)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"leading": ()},
        {"leading": (2, 3, 4)},
        {"leading": (0,)},
        {"topk_ids": of(T, K, dtype=np.dtype(np.int64))},
        {"topk_weights": of(T, K, dtype=jnp.bfloat16)},
        {"w_gate_up": (of(E, H, I), of(E, H, I))},
        {"use_bias": True},
        {"use_bias": True, "b_gate_up": (of(E, I), of(E, I))},
        {"activation": "relu2"},
        {"activation": "gelu", "use_bias": True},
    ],
)
def test_accepts(changes):
    assert call(**changes) is None


def test_accepts_arrays_numpy_and_tracers():
    x, ids, weights = jnp.ones((T, H)), np.zeros((T, K), np.int32), np.ones((T, K), np.float32)
    call(x=x, topk_ids=ids, topk_weights=weights)
    jax.make_jaxpr(lambda x: call(x=x) or x)(x)
    jax.vmap(lambda x: call(x=x) or x)(jnp.ones((3, T, H)))


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"config": 3}, TypeError, "config must be an MoEConfig, got int"),
        ({"x": [1.0]}, TypeError, "x must be float32 of shape (..., 16), got list"),
        (
            {"x": of(T, H, dtype=jnp.bfloat16)},
            TypeError,
            "x must be float32 of shape (..., 16), got bfloat16 (5, 16)",
        ),
        ({"x": of(T, 8)}, ValueError, "x must be float32 of shape (..., 16), got float32 (5, 8)"),
        ({"x": of()}, ValueError, "x must be float32 of shape (..., 16), got float32 ()"),
        ({"topk_ids": of(T, K)}, TypeError, "topk_ids must be int32 of shape (5, 2), got float32 (5, 2)"),
        (
            {"topk_ids": of(T, K, dtype=jnp.uint32)},
            TypeError,
            "topk_ids must be int32 of shape (5, 2), got uint32 (5, 2)",
        ),
        (
            {"topk_ids": of(T, 3, dtype=jnp.int32)},
            ValueError,
            "topk_ids must be int32 of shape (5, 2), got int32 (5, 3)",
        ),
        (
            {"topk_ids": of(1, T, K, dtype=jnp.int32)},
            ValueError,
            "topk_ids must be int32 of shape (5, 2), got int32 (1, 5, 2)",
        ),
        (
            {"topk_weights": of(T, K, dtype=jnp.float16)},
            TypeError,
            "topk_weights must be float32 or bfloat16 of shape (5, 2), got float16 (5, 2)",
        ),
        (
            {"topk_weights": of(6, K)},
            ValueError,
            "topk_weights must be float32 or bfloat16 of shape (5, 2), got float32 (6, 2)",
        ),
        ({"w_gate_up": None}, TypeError, "w_gate_up must be float32 of shape (4, 16, 48), got NoneType"),
        (
            {"w_gate_up": of(E, H, I)},
            ValueError,
            "w_gate_up must be float32 of shape (4, 16, 48), got float32 (4, 16, 24)",
        ),
        (
            {"w_gate_up": of(E, H, 2 * I), "activation": "silu"},
            ValueError,
            "w_gate_up must be float32 of shape (4, 16, 24), got float32 (4, 16, 48)",
        ),
        (
            {"w_gate_up": (of(E, H, I),)},
            ValueError,
            "w_gate_up must be one array or (w_gate, w_up), got a tuple of 1",
        ),
        (
            {"w_gate_up": (of(E, H, I), of(E, H, I)), "activation": "gelu"},
            ValueError,
            "w_gate_up must be one array for the ungated activation gelu, got a tuple",
        ),
        (
            {"w_gate_up": (of(E, I, H), of(E, H, I))},
            ValueError,
            "w_gate must be float32 of shape (4, 16, 24), got float32 (4, 24, 16)",
        ),
        (
            {"w_gate_up": (of(E, H, I), of(E, H, I, dtype=jnp.bfloat16))},
            TypeError,
            "w_up must be float32 of shape (4, 16, 24), got bfloat16 (4, 16, 24)",
        ),
        (
            {"w_down": of(2, I, H)},
            ValueError,
            "w_down must be float32 of shape (4, 24, 16), got float32 (2, 24, 16)",
        ),
        (
            {"w_down": of(E, I, H, dtype=jnp.float16)},
            TypeError,
            "w_down must be float32 of shape (4, 24, 16), got float16 (4, 24, 16)",
        ),
        (
            {"b_down": of(E, H)},
            ValueError,
            "b_down must be None when config.use_bias is False, got float32 (4, 16)",
        ),
        (
            {"b_gate_up": (of(E, I), of(E, I))},
            ValueError,
            "b_gate_up must be None when config.use_bias is False, got a tuple",
        ),
        (
            {"use_bias": True, "b_gate_up": None},
            ValueError,
            "b_gate_up must be given when config.use_bias is True, got None",
        ),
        (
            {"use_bias": True, "b_down": None},
            ValueError,
            "b_down must be given when config.use_bias is True, got None",
        ),
        (
            {"use_bias": True, "b_gate_up": of(E, I)},
            ValueError,
            "b_gate_up must be float32 of shape (4, 48), got float32 (4, 24)",
        ),
        (
            {"use_bias": True, "b_gate_up": (of(E, I), of(E, H))},
            ValueError,
            "b_up must be float32 of shape (4, 24), got float32 (4, 16)",
        ),
        (
            {"use_bias": True, "b_down": of(H)},
            ValueError,
            "b_down must be float32 of shape (4, 16), got float32 (16,)",
        ),
    ],
)
def test_refuses(changes, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        call(**changes)


def test_int64_ids_are_flagged():
    assert checks.is_int64(np.zeros((T, K), np.int64))
    assert not checks.is_int64(np.zeros((T, K), np.int32))


def test_num_valid():
    for good in (None, 3, np.int64(3), jnp.int32(3), np.array(3)):
        checks.check_num_valid(good)
    with pytest.raises(TypeError, match=r"^num_valid must be an int, got 3\.0 of type float$"):
        checks.check_num_valid(3.0)
    for bad, got in ((jnp.ones(2, jnp.int32), "int32 (2,)"), (jnp.float32(3), "float32 ()")):
        text = f"num_valid must be an int or an integer scalar, got {got}"
        with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
            checks.check_num_valid(bad)


def test_choice():
    checks.check_choice("policy", "serial", ("serial", "overlap"))
    with pytest.raises(ValueError, match=r"^policy must be one of serial, overlap, got 'fast'$"):
        checks.check_choice("policy", "fast", ("serial", "overlap"))


def test_ring_texts_name_the_ring_the_causes_and_the_remedy():
    text = checks.ring_misuse("moe_3", "its memory moved")
    assert text.startswith("ring 'moe_3': its memory moved. Possible causes: the ring was not donated")
    for cause in (
        "not returned",
        "closure",
        "tree.map",
        "pickle",
        "checkpoint restore",
        "two calls",
        "another spec",
    ):
        assert cause in text
    assert text.endswith("make a new one with make_ring") and "checkpoint_policy" in text
    assert "make_ring" in checks.RING_PICKLE and "sm.moe" in checks.RING_VMAP
    text = checks.PARTIAL_MANUAL.format(what="stream_moe", manual=("ep",), rest=("data",))
    assert text.startswith("stream_moe needs a shard_map that is manual over all mesh axes, got manual ('ep',)")
    assert checks.NO_RESIDUALS.format(what="x").startswith("x is being differentiated, but this stream keeps no")


def test_not_published_text():
    want = "close_stream: chunks [0, 1, 2] of 3 were not published (route: [0], layout: [1])"
    assert checks.not_published(3, [0], [1]) == want
