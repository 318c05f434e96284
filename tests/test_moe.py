"""Values of the layer against the float64 oracle: activations, dtypes, sizes, layouts and errors of the arguments."""

from __future__ import annotations

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_streammoe as sm
from tests.helpers import oracle
from tests.helpers.layers import HOWS, assert_same_bits, check, run

SIZES = {"T": 22, "H": 40, "I": 24, "E": 6, "K": 3, "block_m": 8}
F32 = SIZES | {"dtype": jnp.float32}
each_how = pytest.mark.parametrize("how", HOWS)
each_activation = pytest.mark.parametrize(("activation", "limit"), oracle.ACTIVATIONS)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


@functools.partial(jax.jit, static_argnames="config")
def moe(*args, **options):
    return sm.moe(*args, **options)


@pytest.mark.core
@each_activation
@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_values_and_gradients(rng, dtype, use_bias, activation, limit):
    problem = oracle.make_problem(
        rng, **SIZES, dtype=dtype, activation=activation, limit=limit, use_bias=use_bias, masked=0.1, duplicates=True
    )
    result = check("moe", problem)
    assert 0.2 < np.sqrt(np.mean(result.y.astype(np.float32) ** 2)) < 5


@pytest.mark.core
@each_activation
@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_gradients_from_the_gate_and_up_that_were_kept(rng, dtype, use_bias, activation, limit):
    """Those of the rounded values; in float32 nothing is rounded."""
    problem = oracle.make_problem(
        rng, **SIZES, dtype=dtype, activation=activation, limit=limit, use_bias=use_bias, masked=0.1, duplicates=True
    )
    kept, again = check("kept", problem), run("moe", problem)
    assert_same_bits((kept.y, kept.stats), (again.y, again.stats))
    if dtype == jnp.float32:
        assert_same_bits(kept.grads, again.grads)


@pytest.mark.core
@each_activation
def test_what_is_kept_does_not_overflow(rng, activation, limit):
    """float16 holds 65504, its sums are float32: gate and up beyond it are kept as that, and no gradient is NaN."""
    problem = oracle.make_problem(rng, **SIZES, dtype=jnp.float16, activation=activation, limit=limit)
    problem = problem.replace(
        x=np.abs(problem.x) * np.float16(16384), w_gate_up=-np.abs(problem.w_gate_up), dy=problem.dy / np.float16(256)
    )
    pre = problem.x.astype(np.float32) @ problem.w_gate_up.astype(np.float32)[problem.topk_ids[0, 0]]
    assert (pre < -65504).any()
    for how in ("moe", "kept"):
        result = run(how, problem)
        assert all(np.isfinite(a.astype(np.float32)).all() for a in (result.y, *result.grads.values())), how


@each_activation
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_streams_give_the_same_bits(rng, dtype, activation, limit):
    problem = oracle.make_problem(
        rng, **SIZES, dtype=dtype, activation=activation, limit=limit, use_bias=True, masked=0.1
    )
    want = run("moe", problem)
    for how in ("serial", "overlap"):
        assert_same_bits(run(how, problem), want, how)


@each_activation
def test_large_preactivations_do_not_overflow(rng, activation, limit):
    """exp and tanh saturate; nothing becomes NaN on the way."""
    problem = oracle.make_problem(rng, **F32, activation=activation, limit=limit)
    problem = problem.replace(x=(np.float32(300) * problem.x))
    result = run("moe", problem)
    want = oracle.forward(problem)
    np.testing.assert_allclose(result.y, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    assert all(np.isfinite(g).all() for g in result.grads.values())


@pytest.mark.parametrize("limit", [0.3, 0.7])
def test_clamp_of_swiglu(rng, limit):
    free = oracle.make_problem(rng, **F32, activation="swiglu")
    clamped = free.replace(config=dataclasses.replace(free.config, limit=limit))
    assert (check("moe", clamped).y != run("moe", free).y).any(axis=1).all()


@pytest.mark.core
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("T", "H", "I", "E", "K", "block_m"),
    [
        (1, 8, 8, 1, 1, 8),
        (5, 8, 16, 2, 4, 128),
        (33, 96, 704, 3, 2, 16),
        (9, 704, 96, 4, 1, 256),
        (7, 72, 88, 5, 3, 24),
        (130, 104, 56, 2, 2, 64),
        (3, 16, 16, 64, 8, 8),
    ],
)
def test_sizes(rng, dtype, T, H, I, E, K, block_m):
    check("moe", oracle.make_problem(rng, T=T, H=H, I=I, E=E, K=K, block_m=block_m, dtype=dtype))


@each_how
@pytest.mark.parametrize(("H", "I"), [(2880, 64), (64, 2880)])
def test_wide_sizes_that_are_no_power_of_two(rng, how, H, I):
    sizes = {"T": 9, "H": H, "I": I, "E": 3, "K": 2, "block_m": 8}
    check(how, oracle.make_problem(rng, **sizes, dtype=jnp.float32))
    check(how, oracle.make_problem(rng, **sizes, dtype=jnp.bfloat16), grad=False)


@pytest.mark.parametrize(
    ("name", "value"), [("hidden", 12), ("hidden", 2881), ("intermediate", 4), ("intermediate", 100)]
)
def test_sizes_outside_are_refused(name, value):
    sizes = {"hidden": 16, "intermediate": 16} | {name: value}
    with pytest.raises(ValueError, match=f"{name} must be a multiple of 8, got {value}"):
        sm.MoEConfig(4, 2, **sizes)


@pytest.mark.parametrize("block_m", [8, 16, 64, 256])
def test_block_m_changes_no_value_beyond_rounding(rng, block_m):
    check("moe", oracle.make_problem(rng, **F32 | {"T": 70, "block_m": block_m}, use_bias=True))


@pytest.mark.core
@each_how
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_packed_and_split_weights_give_the_same_bits(rng, how, dtype):
    problem = oracle.make_problem(rng, **SIZES, dtype=dtype, use_bias=True, activation="swigluoai", masked=0.1)
    inner = problem.config.intermediate
    arrays = {n: getattr(problem, n) for n in ("w_gate_up", "b_gate_up")}
    halves = {n: (a[..., :inner], a[..., inner:]) for n, a in arrays.items()}
    packed = run(how, problem)
    for names in (("w_gate_up", "b_gate_up"), ("w_gate_up",), ("b_gate_up",)):  # biases may be what the weights are not
        y, grads = run_split(problem, arrays | {n: halves[n] for n in names})
        assert_same_bits(y, packed.y)
        for name, want in packed.grads.items():
            got = np.concatenate(grads[name], axis=-1) if name in names else grads[name]
            assert_same_bits(got, want, name)


def run_split(problem, halves):
    """(y, gradients by name) with (gate, up) pairs."""
    operands = {n: getattr(problem, n) for n in ("x", "topk_weights", "w_down", "b_down")} | halves

    @jax.jit
    def call(p, dy):
        y, pullback = jax.vjp(
            lambda p: sm.moe(
                p["x"], problem.topk_ids, p["topk_weights"], p["w_gate_up"], p["w_down"], config=problem.config,
                b_gate_up=p["b_gate_up"], b_down=p["b_down"],
            ), p,
        )  # fmt: skip
        return y, pullback(dy)[0]

    return jax.tree.map(np.asarray, call(operands, problem.dy))


@pytest.mark.core
@pytest.mark.parametrize("leading", [(24,), (2, 12), (2, 3, 4), (24, 1), (1, 1, 24)])
def test_leading_dimensions_are_folded(rng, leading):
    problem = oracle.make_problem(rng, **F32 | {"T": 24}, use_bias=True, masked=0.1)
    want = run("moe", problem)

    @jax.jit
    def call(x, ids, weights, dy):
        y, pullback = jax.vjp(lambda x, w: sm.moe(x, ids, w, *problem.args[3:], **problem.kwargs), x, weights)
        return y, pullback(dy)

    arrays = (problem.x, problem.topk_ids, problem.topk_weights, problem.dy)
    y, (dx, d_weights) = call(*(a.reshape(*leading, a.shape[-1]) for a in arrays))
    assert y.shape == dx.shape == (*leading, 40) and d_weights.shape == (*leading, 3)
    got = (np.asarray(y).reshape(24, -1), np.asarray(dx).reshape(24, -1), np.asarray(d_weights).reshape(24, -1))
    assert_same_bits(got, (want.y, want.grads["x"], want.grads["topk_weights"]))


def test_a_single_token_without_leading_dimensions(rng):
    problem = oracle.make_problem(rng, **F32 | {"T": 1})
    y = moe(problem.x[0], problem.topk_ids[0], problem.topk_weights[0], *problem.args[3:], **problem.kwargs)
    assert_same_bits(y, moe(*problem.args, **problem.kwargs)[0])


def test_strided_and_transposed_inputs_give_the_same_bits(rng):
    problem = oracle.make_problem(rng, **F32, use_bias=True)
    want = run("moe", problem)

    def every_other(a):
        wide = np.repeat(a, 2, axis=-1)
        wide[..., 1::2] = 0
        return wide

    @jax.jit
    def call(x, ids, weights, w_gate_up, w_down, dy):
        def layer(x, weights, w_gate_up, w_down):  # each one a view: strides, reversal, transposition
            return sm.moe(
                x[:, ::2], ids[::-1], weights.T, jnp.swapaxes(w_gate_up, 1, 2), w_down[::-1], **problem.kwargs
            )

        y, pullback = jax.vjp(layer, x, weights, w_gate_up, w_down)
        dx, d_weights, d_gate_up, d_down = pullback(dy.T)
        return y, dx[:, ::2], d_weights.T, jnp.swapaxes(d_gate_up, 1, 2), d_down[::-1]

    got = call(
        every_other(problem.x), problem.topk_ids[::-1], problem.topk_weights.T.copy(),
        problem.w_gate_up.swapaxes(1, 2).copy(), problem.w_down[::-1], problem.dy.T.copy(),
    )  # fmt: skip
    assert_same_bits(got, (want.y, *(want.grads[n] for n in ("x", "topk_weights", "w_gate_up", "w_down"))))


@pytest.mark.core
@each_how
def test_agrees_with_the_readable_reference(rng, how):
    problem = oracle.make_problem(rng, **SIZES, dtype=jnp.bfloat16, use_bias=True, masked=0.1, invalid=0.1)
    want = jax.jit(sm.reference, static_argnames="config")(*problem.args, **problem.kwargs)
    got = run(how, problem, grad=False).y.astype(np.float32)
    difference = np.abs(got - np.asarray(want, np.float32))
    assert got.any() and difference.max() <= 2.0**-6 * np.abs(got).max() and (difference == 0).mean() > 0.9


@pytest.mark.core
def test_statistics_without_and_with_the_flag(rng):
    problem = oracle.make_problem(rng, **F32, masked=0.2, invalid=0.2)
    y, stats = jax.jit(lambda *a: sm.moe(*a, **problem.kwargs, return_stats=True))(*problem.args)
    assert_same_bits(y, moe(*problem.args, **problem.kwargs))
    assert isinstance(stats, sm.Stats) and stats.expert_rows.shape == (6,)
    assert all(s.dtype == jnp.int32 for s in stats) and all(s.shape == () for s in stats[1:])
    total = int(stats.expert_rows.sum()) + sum(int(s) for s in stats[1:])
    assert total == problem.topk_ids.size


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"x": zeros(22, 48)}, ValueError, r"x must be float32 of shape \(\.\.\., 40\), got float32 \(22, 48\)"),
        ({"x": zeros(22, 40, dtype=np.float16)}, TypeError, r"x must be float32 of shape .*, got float16 \(22, 40\)"),
        ({"topk_ids": zeros(21, 3, dtype=np.int32)}, ValueError, r"topk_ids must be .*\(22, 3\), got int32 \(21, 3\)"),
        ({"topk_weights": zeros(22, 2)}, ValueError, r"topk_weights must be .*\(22, 3\), got float32 \(22, 2\)"),
        ({"topk_weights": zeros(22, 3, dtype=np.float16)}, TypeError, r"topk_weights must be .*, got float16"),
        ({"w_gate_up": zeros(6, 40, 24)}, ValueError, r"w_gate_up must be .*\(6, 40, 48\), got float32 \(6, 40, 24\)"),
        ({"w_down": zeros(3, 24, 40)}, ValueError, r"w_down must be .*\(6, 24, 40\), got float32 \(3, 24, 40\)"),
        ({"b_down": zeros(6, 40)}, ValueError, "b_down must be None when config.use_bias is False"),
        ({"num_valid": 3.5}, TypeError, "num_valid must be an int, got 3.5"),
        ({"config": None}, TypeError, "config must be an MoEConfig, got NoneType"),
    ],
)  # fmt: skip
def test_argument_errors_name_wanted_and_got(rng, changes, kind, text):
    problem = oracle.make_problem(rng, **F32)
    arguments = {n: getattr(problem, n) for n in ("x", "topk_ids", "topk_weights", "w_gate_up", "w_down", "config")}
    with pytest.raises(kind, match=text):
        sm.moe(**arguments | changes)


@hypothesis.settings(max_examples=25)
@hypothesis.given(data=st.data())
@pytest.mark.slow
def test_any_shape_and_routing(data):
    draw = data.draw
    sizes = {
        "T": draw(st.integers(0, 40)), "H": 8 * draw(st.integers(1, 6)), "I": 8 * draw(st.integers(1, 6)),
        "E": draw(st.integers(1, 9)), "K": draw(st.integers(1, 5)), "block_m": draw(st.sampled_from([8, 16, 40, 128])),
    }  # fmt: skip
    activation, limit = draw(st.sampled_from(oracle.ACTIVATIONS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    problem = oracle.make_problem(
        rng, **sizes, dtype=jnp.float32, activation=activation, limit=limit, use_bias=draw(st.booleans()),
        masked=draw(st.sampled_from([0.0, 0.3, 1.0])), invalid=draw(st.sampled_from([0.0, 0.2])),
        duplicates=draw(st.booleans()), capacity=draw(st.sampled_from([None, None, 0, 3])),
    )  # fmt: skip
    num_valid = draw(st.one_of(st.none(), st.integers(0, sizes["T"])))
    check("moe", problem, num_valid=num_valid)
