"""`reference` against the float64 oracle: values and gradients in every corner of the semantics table."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_streammoe.config import MoEConfig
from jax_streammoe.reference import activate, reference
from tests.helpers import oracle

SIZES = {"T": 23, "H": 40, "I": 24, "E": 6, "K": 3}
pytestmark = pytest.mark.core


@functools.partial(jax.jit, static_argnames="config")
def _value_and_grads(diff, ids, dy, num_valid, *, config):
    def loss(diff):
        return reference(
            diff["x"], ids, diff["topk_weights"], diff["w_gate_up"], diff["w_down"], config=config,
            b_gate_up=diff.get("b_gate_up"), b_down=diff.get("b_down"), num_valid=num_valid,
        )  # fmt: skip

    y, pullback = jax.vjp(loss, diff)
    return y, pullback(dy)[0]


def run(problem, num_valid=None):
    """(y, gradients by name) of a problem, jitted."""
    p = oracle.as_jax(problem)
    names = ["x", "topk_weights", "w_gate_up", "w_down"] + ["b_gate_up", "b_down"] * p.config.use_bias
    diff = {name: getattr(p, name) for name in names}
    y, grads = _value_and_grads(diff, p.topk_ids, p.dy, num_valid, config=p.config)
    for name in names:
        assert grads[name].dtype == diff[name].dtype, name
    return np.asarray(y), {name: np.asarray(grad) for name, grad in grads.items()}


def check(problem, num_valid=None):
    """Compares y and every gradient with the oracle; returns them."""
    y, grads = run(problem, num_valid)
    cfg = problem.config
    depth = cfg.hidden + cfg.intermediate + problem.topk_ids.size
    want = oracle.backward(problem, num_valid)
    assert grads.keys() == want.keys()
    oracle.assert_close("y", y, oracle.forward(problem, num_valid), cfg.dtype, depth)
    for name in want:
        oracle.assert_close(f"d_{name}", grads[name], want[name], cfg.dtype, depth)
    return y, grads


@pytest.mark.parametrize(
    ("activation", "limit", "use_bias"),
    [(*a, True) for a in oracle.ACTIVATIONS] + [("swiglu", 0.7, False), ("silu", None, False)],
)
def test_f32_value_and_gradients(rng, activation, limit, use_bias):
    problem = oracle.make_problem(
        rng, **SIZES, dtype=jnp.float32, activation=activation, limit=limit, use_bias=use_bias,
        masked=0.2, invalid=0.1, duplicates=True,
    )  # fmt: skip
    y, _ = check(problem)
    assert 0.2 < np.sqrt(np.mean(y**2)) < 5


@pytest.mark.parametrize(
    ("activation", "limit", "dtype"),
    [(*a, jnp.bfloat16) for a in oracle.ACTIVATIONS] + [("swiglu", None, jnp.float16)],
)
def test_half_precision_value_and_gradients(rng, activation, limit, dtype):
    check(oracle.make_problem(rng, **SIZES, dtype=dtype, activation=activation, limit=limit, use_bias=True))


@pytest.mark.parametrize("capacity", [0, 1, 5, 1000])
def test_capacity_keeps_the_lowest_tokens(rng, capacity):
    problem = oracle.make_problem(rng, **SIZES, dtype=jnp.float32, capacity=capacity, masked=0.1, duplicates=True)
    kept = oracle.kept_routes(problem)
    rows = np.bincount(problem.topk_ids[problem.topk_ids >= 0], minlength=SIZES["E"])
    assert kept.sum() == np.minimum(rows, capacity).sum() and rows.max() > 5
    _, grads = check(problem)
    assert not grads["topk_weights"][~kept].any()


@pytest.mark.parametrize("num_valid", [0, 1, 9, 23])
def test_num_valid_masks_the_tail(rng, num_valid):
    problem = oracle.make_problem(rng, **SIZES, dtype=jnp.float32)
    y, grads = check(problem, num_valid)
    assert not y[num_valid:].any() and not grads["x"][num_valid:].any()


@pytest.mark.parametrize("sizes", [(1, 8, 8, 1, 1), (5, 8, 16, 2, 4), (0, 8, 8, 4, 2), (64, 96, 88, 3, 1)])
def test_odd_sizes(rng, sizes):
    check(oracle.make_problem(rng, **dict(zip("THIEK", sizes, strict=True)), dtype=jnp.float32))


def test_all_routes_to_one_expert(rng):
    ids = np.full((23, 3), 4)
    _, grads = check(oracle.make_problem(rng, **SIZES, dtype=jnp.float32, ids=ids))
    for name in ("w_gate_up", "w_down"):
        assert not grads[name][[0, 1, 2, 3, 5]].any()


def test_masked_nan_token_is_exactly_zero_and_influences_nothing(rng):
    clean = oracle.make_problem(rng, **SIZES, dtype=jnp.float32, use_bias=True, masked=0.2)
    clean.topk_ids[[3, 11]] = -1
    poisoned = clean.replace(x=clean.x.copy(), topk_weights=clean.topk_weights.copy(), dy=clean.dy.copy())
    poisoned.x[[3, 11]], poisoned.topk_weights[[3, 11]], poisoned.dy[[3, 11]] = np.nan, np.inf, np.nan
    (y, grads), (y_clean, grads_clean) = run(poisoned), run(clean)
    np.testing.assert_array_equal(y, y_clean)
    for name in grads:
        np.testing.assert_array_equal(grads[name], grads_clean[name], err_msg=name)
    assert not y[[3, 11]].any() and not grads["x"][[3, 11]].any() and not grads["topk_weights"][[3, 11]].any()


def test_nan_token_affects_its_own_row_and_experts_only(rng):
    problem = oracle.make_problem(rng, **SIZES, dtype=jnp.float32)
    problem.x[5] = np.nan
    y, grads = check(problem)
    assert np.isnan(y[5]).all() and np.isnan(grads["x"][5]).all()
    assert np.isfinite(np.delete(y, 5, 0)).all() and np.isfinite(np.delete(grads["x"], 5, 0)).all()
    others = [e for e in range(6) if e not in problem.topk_ids[5]]
    assert np.isfinite(grads["w_gate_up"][others]).all() and np.isfinite(grads["w_down"][others]).all()
    assert np.isnan(grads["w_down"][problem.topk_ids[5]]).all()


def test_nan_weight_affects_its_token_only(rng):
    problem = oracle.make_problem(rng, **SIZES, dtype=jnp.float32)
    problem.topk_weights[7, 1] = np.nan
    y, _ = run(problem)
    assert np.isnan(y[7]).all() and np.isfinite(np.delete(y, 7, 0)).all()


def test_weight_gradient_is_not_zero_where_the_weight_is(rng):
    problem = oracle.make_problem(rng, **SIZES, dtype=jnp.float32)
    problem.topk_weights[2] = 0
    y, grads = check(problem)
    assert not y[2].any() and grads["topk_weights"][2].all()


def test_doubling_the_weights_doubles_y_exactly(rng):
    problem = oracle.make_problem(rng, **SIZES, dtype=jnp.bfloat16)
    y, _ = run(problem)
    doubled, _ = run(problem.replace(topk_weights=2 * problem.topk_weights))
    np.testing.assert_array_equal(doubled.astype(np.float32), 2 * y.astype(np.float32))


def test_split_weights_and_leading_dims_give_the_same_bits(rng):
    problem = oracle.make_problem(rng, **{**SIZES, "T": 24}, dtype=jnp.float32, use_bias=True)
    p, inner = oracle.as_jax(problem), SIZES["I"]
    call = jax.jit(reference, static_argnames="config")
    want = call(*p.args, **p.kwargs)
    split = (p.w_gate_up[..., :inner], p.w_gate_up[..., inner:])
    biases = (p.b_gate_up[..., :inner], p.b_gate_up[..., inner:])
    got = call(
        p.x.reshape(2, 3, 4, -1), p.topk_ids.reshape(2, 3, 4, -1), p.topk_weights.reshape(2, 3, 4, -1), split,
        p.w_down, config=p.config, b_gate_up=biases, b_down=p.b_down,
    )  # fmt: skip
    assert got.shape == (2, 3, 4, SIZES["H"])
    np.testing.assert_array_equal(np.asarray(got).reshape(want.shape), np.asarray(want))


def test_bfloat16_weights_are_widened_and_get_a_bfloat16_gradient(rng):
    problem = oracle.make_problem(rng, **SIZES, dtype=jnp.bfloat16)
    problem = problem.replace(topk_weights=problem.topk_weights.astype(jnp.bfloat16))
    _, grads = check(problem)
    assert grads["topk_weights"].dtype == jnp.bfloat16


def test_vmap_and_second_order(rng):
    p = oracle.as_jax(oracle.make_problem(rng, **SIZES, dtype=jnp.float32))
    call = jax.jit(lambda x: reference(x, *p.args[1:], **p.kwargs))
    stacked = jnp.stack([p.x, 2 * p.x])
    np.testing.assert_allclose(jax.vmap(call)(stacked)[1], call(2 * p.x), rtol=1e-4, atol=1e-4)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(call(x) * p.dy)))
    second = jax.jvp(gradient, (p.x,), (p.x,))[1]
    step = 1e-2
    numeric = (gradient(p.x * (1 + step)) - gradient(p.x * (1 - step))) / (2 * step)
    np.testing.assert_allclose(second, numeric, rtol=0.02, atol=0.02)


def test_backward_memory_does_not_grow_with_rows_times_experts(rng):
    p = oracle.as_jax(oracle.make_problem(rng, T=512, H=64, I=64, E=32, K=2, dtype=jnp.float32))
    step = jax.jit(jax.grad(lambda x, w: jnp.sum(reference(x, p.topk_ids, w, *p.args[3:], **p.kwargs)), (0, 1)))
    temporary = step.lower(p.x, p.topk_weights).compile().memory_analysis().temp_size_in_bytes
    assert temporary < 16 * p.x.nbytes  # one array [E, T, H] would be 32


@pytest.mark.parametrize(("activation", "limit"), oracle.ACTIVATIONS)
def test_activate_matches_the_oracle_at_and_beyond_the_limit(activation, limit):
    cfg = MoEConfig(2, 1, 8, 8, activation=activation, limit=limit, dtype=jnp.float32)
    edge = cfg.limit or 3.0
    gate, up = np.meshgrid([-50.0, -edge, -0.5, 0.0, 0.5, edge, 50.0], [-50.0, -edge, 0.0, edge, 50.0])
    gate, up = gate.astype(np.float32), up.astype(np.float32)
    got, pullback = jax.vjp(lambda g, u: activate(cfg, g, u if cfg.is_gated else None), gate, up)
    want, d_gate, d_up = oracle._activation(cfg, gate.astype(np.float64), up.astype(np.float64))
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-5)
    got_gate, got_up = pullback(np.ones_like(gate))
    inside = (np.abs(gate) < edge) & (np.abs(up) < edge)  # f32(limit) may lie on either side of limit
    np.testing.assert_allclose(got_gate[inside], d_gate[inside], rtol=2e-6, atol=1e-5)
    if d_up is not None:
        np.testing.assert_allclose(got_up[inside], d_up[inside], rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("activation", ["swiglu", "swigluoai", "geglu", "silu", "gelu", "relu2"])
def test_activate_keeps_nan(activation):
    cfg = MoEConfig(2, 1, 8, 8, activation=activation, limit=1.0 if activation == "swiglu" else None)
    nan = jnp.full((3,), jnp.nan)
    assert np.isnan(activate(cfg, nan, jnp.ones(3) if cfg.is_gated else None)).all()
