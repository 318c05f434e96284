"""The layer on CUDA under JAX's transformations: vmap, views of operands, control flow, scan with remat."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_streammoe as sm
from tests.gpu.corners import BF16, EXPERTS, assert_near
from tests.helpers import oracle
from tests.helpers.layers import assert_same_bits, layer, ring_for, run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("nested", [False, True])
def test_vmap_over_tokens_is_one_call_with_the_same_bits(rng, nested):
    problem = oracle.make_problem(rng, **BF16 | {"T": 24}, masked=0.1, invalid=0.1)
    experts = tuple(map(jnp.asarray, problem.args[3:]))
    one = lambda x, ids, w: sm.moe(x, ids, w, *experts, **problem.kwargs, return_stats=True)
    tokens = tuple(jnp.asarray(a.reshape(4, 6, a.shape[-1])) for a in problem.args[:3])
    call = jax.vmap(one)
    if nested:
        tokens = tuple(a.reshape(2, 2, *a.shape[1:]) for a in tokens)
        call = jax.vmap(call)
    compiled = jax.jit(call).lower(*tokens).compile()
    assert compiled.as_text().count('custom_call_target="streammoe_forward_v1"') == 1
    y, stats = compiled(*tokens)
    want, want_stats = jax.jit(one)(*problem.args[:3])
    assert_same_bits(y.reshape(want.shape), want)
    batch = tuple(range(y.ndim - 2))
    for got, total in zip(stats, want_stats, strict=True):
        np.testing.assert_array_equal(np.asarray(got).sum(batch), total)


def test_vmap_over_experts_walks_the_axis(rng):
    problems = [oracle.make_problem(rng, **BF16, masked=0.1) for _ in range(3)]
    arrays = [[getattr(p, n) for n in ("x", "topk_ids", "topk_weights", *EXPERTS)] for p in problems]
    call = lambda x, ids, w, g, d, bg, bd: sm.moe(
        x, ids, w, g, d, config=problems[0].config, b_gate_up=bg, b_down=bd, return_stats=True
    )
    y, stats = jax.jit(jax.vmap(call))(*(np.stack(a) for a in zip(*arrays, strict=True)))
    for n, problem in enumerate(problems):
        want = run("moe", problem)
        assert_same_bits((y[n], [s[n] for s in stats]), (want.y, list(want.stats)))


def test_vmap_of_a_stream_raises(rng):
    problem = oracle.make_problem(rng, **BF16)
    with ring_for(problem.config) as ring:
        operands = {n: jnp.asarray(getattr(problem, n)) for n in ("x", "topk_weights", *EXPERTS)}
        call = lambda x, ring: layer("overlap", problem.config, ring, problem.topk_ids, operands | {"x": x})[0]
        with pytest.raises(NotImplementedError, match=r"a stream cannot be vmapped\. Use sm\.moe"):
            jax.jit(jax.vmap(call, in_axes=(0, None)))(jnp.stack([operands["x"]] * 2), ring)
        ring.check()


def test_views_and_leading_dimensions_have_the_same_bits(rng):
    """Strided, reversed and transposed operands, tokens in three dimensions."""
    problem = oracle.make_problem(rng, **BF16 | {"T": 24}, masked=0.1)
    want = jax.jit(functools.partial(sm.moe, **problem.kwargs))(*problem.args)
    wide = np.repeat(problem.x, 2, axis=-1)
    wide[..., 1::2] = 0

    @jax.jit
    def call(x, ids, weights, w_gate_up, w_down):
        tokens = (x[:, ::2], ids[::-1], weights.T)
        folded = (a.reshape(2, 3, 4, -1) for a in tokens)
        return sm.moe(*folded, jnp.swapaxes(w_gate_up, 1, 2), w_down[::-1], **problem.kwargs)

    y = call(
        wide, problem.topk_ids[::-1], problem.topk_weights.T.copy(), problem.w_gate_up.swapaxes(1, 2).copy(),
        problem.w_down[::-1],
    )  # fmt: skip
    assert y.shape == (2, 3, 4, 40)
    assert_same_bits(y.reshape(24, 40), want)


def test_while_loop_and_cond(rng):
    problem = oracle.make_problem(rng, **BF16)
    step = lambda x: sm.moe(x, *problem.args[1:], **problem.kwargs)

    @jax.jit
    def repeat(x, n):
        body = lambda c: (lax.cond(c[1] % 2 == 0, step, lambda x: -x, c[0]), c[1] - 1)
        return lax.while_loop(lambda c: c[1] > 0, body, (x, n))[0]

    want = problem.x
    for left in (4, 3, 2, 1):
        want = jax.jit(step)(want) if left % 2 == 0 else -want
    for _ in range(4):  # captured or not
        assert_same_bits(repeat(problem.x, 4), want)


LAYERS = 3


def stack_problem(rng):
    """A problem and stacks of weights and experts, and ids, one per layer."""
    problem = oracle.make_problem(rng, **BF16, masked=0.1)
    others = [oracle.make_problem(rng, **BF16, masked=0.1) for _ in range(LAYERS)]
    stacks = {n: np.stack([getattr(p, n) for p in others]) for n in ("topk_weights", *EXPERTS)}
    return problem, stacks, np.stack([p.topk_ids for p in others])


@functools.partial(jax.jit, static_argnames=("how", "config", "policy"), donate_argnames="ring")
def stack_step(how, config, policy, ring, x, stacks, ids, dy):
    """Residual blocks in a scan, y behind a non-linear operation, so that the backward needs it again."""

    def block(carry, arrays):
        weights, ids = arrays
        x, ring = carry
        y, _, ring = layer(how, config, ring, ids, {"x": x, **weights})
        return (x + jnp.tanh(y), ring), None

    if policy is not None:
        block = jax.checkpoint(block, policy=None if policy == "nothing" else policy)

    def forward(x, stacks):
        (y, out), _ = lax.scan(block, (x, ring), (stacks, ids))
        return y, out

    y, pullback, out = jax.vjp(forward, x, stacks, has_aux=True)
    return y, pullback(dy), out


@functools.partial(jax.jit, static_argnames=("config", "policy"))
def stack_step_ref(config, policy, ring, x, stacks, ids, dy):
    """The same on a ring in a Ref, which is neither donated nor returned."""

    def block(x, arrays):
        weights, ids = arrays
        y, _, _ = layer("overlap", config, ring, ids, {"x": x, **weights})
        return x + jnp.tanh(y), None

    inner = jax.checkpoint(block, policy=policy)
    y, pullback = jax.vjp(lambda x, stacks: lax.scan(inner, x, (stacks, ids))[0], x, stacks)
    return y, pullback(dy)


def test_remat_of_layers_in_a_scan(rng):
    """With `checkpoint_policy` on a functional ring, and without any on a Ref: the values of no remat at all."""
    problem, stacks, ids = stack_problem(rng)
    config, policy = problem.config, sm.checkpoint_policy()
    arrays = (problem.x, stacks, ids, problem.dy)
    y, grads, _ = stack_step("moe", config, None, None, *arrays)
    results = {"batch-ready": stack_step("moe", config, policy, None, *arrays)[:2]}
    for name, rule in (("stream", None), ("stream, policy", policy)):
        ring = ring_for(config)
        *results[name], ring = jax.block_until_ready(stack_step("overlap", config, rule, ring, *arrays))
        ring.check()
        assert sm.inspect(ring).ranks[0].call_number == LAYERS  # the backward runs no expert of a stream again
        sm.close_ring(ring)
    with ring_for(config, mutable=True) as ring:
        results["Ref"] = jax.block_until_ready(stack_step_ref(config, None, ring, *arrays))
        ring.check()
    for name, (got_y, got) in results.items():
        assert_near(f"{name}: y", got_y, y, config)
        for path, want in jax.tree_util.tree_leaves_with_path(grads):
            leaf = functools.reduce(lambda tree, key: tree[getattr(key, "idx", getattr(key, "key", None))], path, got)
            assert np.abs(np.asarray(want, np.float32)).max() > 0.01, path
            assert_near(f"{name}: {jax.tree_util.keystr(path)}", leaf, want, config)
