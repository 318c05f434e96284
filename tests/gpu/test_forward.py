"""The batch-ready layer on a CUDA device: the kernels against the f64 oracle and the portable reference.

bfloat16 and float16 run the kernels of cc/kernels, float32 the portable path; both must be right. Bits are compared
where the semantics promise them: repeats, padding that holds NaN, packed against split weights, masked routes, batches.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_streammoe as sm
from tests.helpers import oracle

pytestmark = pytest.mark.gpu

SIZES = {
    "small": dict(T=77, H=96, I=40, E=5, K=3),
    "one token": dict(T=1, H=256, I=128, E=8, K=2),
    "odd": dict(T=300, H=720, I=328, E=7, K=4),
    "many experts": dict(T=513, H=256, I=192, E=64, K=8),
}


def _call(problem, **options):
    x, ids, weights, gate_up, down = oracle.as_jax(problem).args
    f = jax.jit(lambda *a: sm.moe(*a, config=problem.config, **options))
    return f(x, ids, weights, gate_up, down)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", ["swiglu", "swigluoai", "geglu", "silu", "gelu", "relu2"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_values(rng, size, activation, dtype):
    shares = dict(masked=0.1, invalid=0.1) if SIZES[size]["T"] > 1 else {}  # the one token keeps its routes
    problem = oracle.make_problem(rng, **SIZES[size], **shares, activation=activation, dtype=dtype)
    y = _call(problem)
    depth = problem.config.hidden + problem.config.intermediate
    oracle.assert_close("y", np.asarray(y, np.float64), oracle.forward(problem), problem.config.dtype, depth)


def test_portable_dtypes(rng):
    problem = oracle.make_problem(rng, **SIZES["small"], masked=0.1, dtype=jnp.float32)
    depth = problem.config.hidden + problem.config.intermediate
    y = np.asarray(_call(problem), np.float64)
    oracle.assert_close("y", y, oracle.forward(problem), problem.config.dtype, depth)


def test_float16_overflows_to_infinity(rng):
    """Expert rows of +-320000 are infinite, as IEEE arithmetic has it: nothing saturates at 65504."""
    p = oracle.make_problem(rng, **SIZES["small"] | {"K": 1}, activation="silu", dtype=jnp.float16)
    signs = np.where(np.arange(p.config.hidden) % 2, -1.0, 1.0)
    w_down = np.broadcast_to(1000.0 * signs, p.w_down.shape).astype(np.float16)
    gate = np.full_like(p.w_gate_up, 8.0 / p.config.hidden)  # act = silu(8) or so in all I columns
    p = p.replace(x=np.ones_like(p.x), topk_weights=np.ones_like(p.topk_weights), w_gate_up=gate, w_down=w_down)
    np.testing.assert_array_equal(np.asarray(_call(p), np.float64), np.broadcast_to(signs * np.inf, p.x.shape))


def test_gradients(rng):
    problem = oracle.make_problem(rng, **SIZES["small"], masked=0.1, dtype=jnp.float32)
    p = oracle.as_jax(problem)
    _, pullback = jax.vjp(
        lambda x, w, g, d: sm.moe(x, p.topk_ids, w, g, d, config=p.config), p.x, p.topk_weights, p.w_gate_up, p.w_down
    )
    wanted = oracle.backward(problem)
    names = ("x", "topk_weights", "w_gate_up", "w_down")
    for name, got in zip(names, pullback(p.dy), strict=True):
        oracle.assert_close(name, np.asarray(got, np.float64), wanted[name], p.config.dtype, 300)


def test_same_bits_every_time(rng):
    problem = oracle.make_problem(rng, **SIZES["many experts"], dtype=jnp.bfloat16)
    first = np.asarray(_call(problem)).view(np.uint16)
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(_call(problem)).view(np.uint16), first)


def test_split_weights_and_parts_of_a_batch_have_the_same_bits(rng):
    problem = oracle.make_problem(rng, **SIZES["many experts"], dtype=jnp.bfloat16)
    x, ids, weights, gate_up, down = oracle.as_jax(problem).args
    f = jax.jit(lambda *a: sm.moe(*a, config=problem.config))
    whole = np.asarray(f(x, ids, weights, gate_up, down)).view(np.uint16)
    split = f(x, ids, weights, tuple(jnp.split(gate_up, 2, axis=-1)), down)
    np.testing.assert_array_equal(np.asarray(split).view(np.uint16), whole)
    part = f(x[100:261], ids[100:261], weights[100:261], gate_up, down)
    np.testing.assert_array_equal(np.asarray(part).view(np.uint16), whole[100:261])


@pytest.mark.parametrize("activation", ["swiglu", "silu"])
def test_small_batches_have_the_bits_of_a_large_one(rng, activation):
    """Few rows are copied before the product, which gathers many by itself; ids come from the kernel before, and some
    of them name no expert."""
    sizes = dict(T=2100, H=256, I=328, E=16, K=4)
    problem = oracle.make_problem(
        rng, **sizes, masked=0.2, invalid=0.2, duplicates=True, activation=activation, dtype=jnp.bfloat16
    )
    x, ids, weights, gate_up, down = oracle.as_jax(problem).args
    f = jax.jit(
        lambda x, ids, weights, gate_up, down: sm.moe(x, ids + 1, weights, gate_up, down, config=problem.config)
    )
    whole = np.asarray(f(x, ids - 1, weights, gate_up, down)).view(np.uint16)
    assert whole.any()
    start = 0
    for num_tokens in (1, 2, 3, 8, 40, 128, 129, 500):
        for _ in range(3):
            part = slice(start, start + num_tokens)
            got = f(x[part], ids[part] - 1, weights[part], gate_up, down)
            np.testing.assert_array_equal(np.asarray(got).view(np.uint16), whole[part], err_msg=f"T {num_tokens}")
            start = (start + num_tokens) % (2100 - 500)


def test_a_masked_token_of_nan_reaches_nobody(rng):
    problem = oracle.make_problem(rng, **SIZES["many experts"], dtype=jnp.bfloat16)
    x, ids, weights, gate_up, down = oracle.as_jax(problem).args
    ids = ids.at[5].set(-1)
    f = jax.jit(lambda *a: sm.moe(*a, config=problem.config))
    clean = np.asarray(f(x, ids, weights, gate_up, down)).view(np.uint16)
    dirty = np.asarray(f(x.at[5].set(jnp.nan), ids, weights, gate_up, down)).view(np.uint16)
    np.testing.assert_array_equal(dirty, clean)
    assert not clean[5].any()


def test_statistics(rng):
    problem = oracle.make_problem(rng, **SIZES["small"], masked=0.2, invalid=0.2, dtype=jnp.bfloat16)
    _, stats = _call(problem, return_stats=True)
    ids = np.asarray(problem.topk_ids)
    experts = problem.config.num_experts
    np.testing.assert_array_equal(stats.expert_rows, np.bincount(ids[(ids >= 0) & (ids < experts)], minlength=experts))
    assert int(stats.masked_routes) == (ids == -1).sum()
    assert int(stats.invalid_routes) == ((ids < -1) | (ids >= experts)).sum()


def test_replays_follow_the_routing(rng):
    """A jitted loop is captured as a graph after a few launches; every replay must read the routing of its turn."""
    problem = oracle.make_problem(rng, **SIZES["many experts"], dtype=jnp.bfloat16)
    x, ids, weights, gate_up, down = oracle.as_jax(problem).args
    f = jax.jit(lambda *a: sm.moe(sm.moe(*a, config=problem.config), *a[1:], config=problem.config))
    routings = [jnp.roll(ids, n, axis=0) for n in range(3)]
    eager = [np.asarray(f(x, r, weights, gate_up, down)).view(np.uint16) for r in routings]
    for turn in range(12):
        got = np.asarray(f(x, routings[turn % 3], weights, gate_up, down)).view(np.uint16)
        np.testing.assert_array_equal(got, eager[turn % 3])
