"""Gradients where routing is extreme, and what must not enter them: poison, repeats, ranks, a second selection.

One device has its corners in test_semantics.py; here are those of the gradient alone, and over ranks. Ranks are
compared bit for bit with one device, which is compared with the float64 oracle.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_streammoe as sm
from tests.helpers import oracle, ranks
from tests.helpers.layers import HOWS, RINGLESS, assert_same_bits, check, layer, ring_for, run

SIZES = {"T": 128, "H": 16, "I": 24, "E": 8, "K": 2, "block_m": 16}
DTYPES = (jnp.float32, jnp.bfloat16)
NAMES = ("x", "topk_weights", "w_gate_up", "w_down")
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
names = (f"corners-{n}" for n in itertools.count())


def hot(rng, dtype, expert=0):
    """Every route of every token goes to one expert: T * K rows, each token twice among them."""
    problem = oracle.make_problem(rng, **SIZES, dtype=dtype, ids=np.full((128, 2), expert))
    return problem.replace(topk_weights=np.full((128, 2), 0.75, np.float32))


@pytest.mark.core
@pytest.mark.parametrize("how", [*HOWS, "kept"])
@each_dtype
def test_duplicates_only(rng, how, dtype):
    result = check(how, hot(rng, dtype))
    assert result.stats.expert_rows.tolist() == [256, *[0] * 7]
    for name, grad in result.grads.items():
        assert np.isfinite(grad.astype(np.float32)).all(), name
    # Both routes of a token are the same one.
    assert_same_bits(result.grads["topk_weights"][:, 0], result.grads["topk_weights"][:, 1])
    for name in ("w_gate_up", "w_down"):
        assert_same_bits(result.grads[name][1:], np.zeros_like(result.grads[name][1:]), name)


@pytest.mark.core
@pytest.mark.parametrize("how", [*HOWS, "kept"])
@each_dtype
def test_experts_without_rows_beside_masked_tokens_of_nan(rng, how, dtype):
    """The only tokens that were ever meant for experts 3..7 are masked, and hold NaN: their gradients are +0."""
    clean = oracle.make_problem(rng, **SIZES, dtype=dtype, use_bias=True, ids=rng.integers(0, 3, (128, 2)))
    masked = np.arange(0, 128, 3)
    clean.topk_ids[masked] = -1
    poisoned = clean.replace(**{n: getattr(clean, n).copy() for n in ("x", "topk_weights", "dy")})
    for array in (poisoned.x, poisoned.topk_weights, poisoned.dy):
        array[masked] = np.nan
    got, want = run(how, poisoned).grads, check(how, clean).grads
    assert_same_bits(got, want)
    for name in ("w_gate_up", "w_down", "b_gate_up", "b_down"):
        assert_same_bits(got[name][3:], np.zeros_like(got[name][3:]), name)
        assert got[name][:3].any(axis=tuple(range(1, got[name].ndim))).all(), name
    for name in ("x", "topk_weights"):
        assert_same_bits(got[name][masked], np.zeros_like(got[name][masked]), name)


@pytest.mark.core
@pytest.mark.parametrize("how", [*HOWS, "kept"])
@each_dtype
def test_twenty_runs_have_the_same_bits(rng, how, dtype):
    problem = oracle.make_problem(rng, **SIZES, dtype=dtype, use_bias=True, masked=0.1, duplicates=True)
    first = run("kept" if how == "kept" else "moe", problem).grads
    for turn in range(20):
        assert_same_bits(run(how, problem).grads, first, f"turn {turn}")


@functools.cache
def over_ranks(config, mesh, mode):
    """jitted (operands, ids, dy, ring) -> gradients by name, ring."""
    ep = sm.expert_parallel(config, mesh=mesh, transport="xla" if mode == "xla" else "pull")

    def run(operands, ids, dy, ring):
        def loss(operands):
            x, weights, *experts = (operands[name] for name in NAMES)
            if mode in ("batch", "xla"):
                y, used, _ = ep.moe(x, ids, weights, *experts, ring=ring)
            else:
                options = ranks.MODES[mode]
                y, used, _ = ep.stream(x, ranks.given, *experts, ring=ring, token_args=(ids, weights), **options)
            return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32)), used

        return jax.grad(loss, has_aux=True)(operands)

    return jax.jit(run, donate_argnames="ring")


@pytest.mark.parametrize("mode", ["batch", "serial-packed", "overlap-chunk", "xla"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("routing", ["random", "hot", "last rank"])
def test_over_ranks_with_the_bits_of_one(rng, num_ranks, routing, mode):
    """Blocks of an expert's rows are those of one device: rows come in the order of the global tokens."""
    if routing == "hot":
        problem = hot(rng, jnp.float32, expert=5)
    else:
        ids = rng.integers(4, 8, (128, 2)) if routing == "last rank" else None
        problem = oracle.make_problem(rng, **SIZES, dtype=jnp.float32, masked=0.1, duplicates=True, ids=ids)
    mesh, config = ranks.mesh_of(num_ranks), problem.config
    operands = {name: getattr(problem, name) for name in NAMES}
    ring = None
    if mode != "xla":
        ring = sm.make_ring(config, chunk_tokens=16, num_slots=2, mesh=mesh, name=next(names), timeout_s=20)
    call, want = over_ranks(config, mesh, mode), check("moe", problem).grads
    for _ in range(2):
        got, ring = jax.block_until_ready(call(operands, problem.topk_ids, problem.dy, ring))
        assert_same_bits(got, {name: want[name] for name in NAMES})
    if ring is not None:
        sm.close_ring(ring)


LAYERS = 3


def stack_loss(how, config, policy, scan, params, x, ring):
    """Three layers with a router each, in remat blocks whose last operation is not linear."""

    def block(x, ring, router, w_gate_up, w_down):
        routed = sm.route_topk(jnp.tanh(x) @ router, config)
        operands = {"x": x, "topk_weights": routed.weights, "w_gate_up": w_gate_up, "w_down": w_down}
        y, _, ring = layer(how, config, ring, routed.ids, operands)
        return x + jnp.sin(y), ring

    block = jax.checkpoint(block, policy=policy)
    if scan:
        (x, ring), _ = lax.scan(lambda carry, p: (block(*carry, *p), None), (x, ring), params)
    else:
        for n in range(LAYERS):
            x, ring = block(x, ring, *(a[n] for a in params))
    return jnp.sum(x * x), ring


@pytest.mark.core
@pytest.mark.parametrize("how", [*HOWS, "kept"])
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
def test_experts_are_selected_once(rng, how, scan):
    """In the program of a gradient under the library's policy; what saves nothing shows that the count would tell."""
    problem = oracle.make_problem(rng, **SIZES | {"T": 22}, dtype=jnp.float32)
    router = rng.standard_normal((LAYERS, 16, 8)).astype(np.float32)
    params = (router, *(np.stack([getattr(problem, n)] * LAYERS) for n in ("w_gate_up", "w_down")))
    ring = None if how in RINGLESS else ring_for(problem.config)

    def count(policy):
        f = functools.partial(stack_loss, how, problem.config, policy, scan)
        gradient = jax.jit(jax.grad(f, has_aux=True), donate_argnums=2)
        return gradient.lower(params, problem.x, ring).as_text().count("chlo.top_k"), gradient

    once = 1 if scan else LAYERS
    found, gradient = count(sm.checkpoint_policy())
    assert found == once
    assert count(sm.checkpoint_policy(jax.checkpoint_policies.dots_saveable))[0] == once
    assert count(jax.checkpoint_policies.nothing_saveable)[0] == 2 * once
    grads, ring = gradient(params, problem.x, ring)
    assert all(np.isfinite(g).all() and np.asarray(g).any() for g in grads)
    if ring is not None:
        ring.check()
        sm.close_ring(ring)
