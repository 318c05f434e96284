"""The corners of docs/semantics.md on CUDA: bfloat16 and float16 through the kernels, float32 through plain JAX.

What test_semantics.py checks on the CPU is checked here by every way in: batch-ready, and streams on a small ring,
serial and overlapped. Bits of y are compared where the table promises them; of gradients, what must be zero exactly.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_streammoe as sm
from tests.gpu.corners import BF16, EXPERTS, F32, SHAPE, E, K, T, assert_near, assert_zero, check_all
from tests.helpers import oracle
from tests.helpers.layers import HOWS, assert_same_bits, check, layer, ring_for, run

pytestmark = pytest.mark.gpu

each_how = pytest.mark.parametrize("how", HOWS)
two_hows = pytest.mark.parametrize("how", ["moe", "overlap"])
each_dtype = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])


def copy_of(problem, *names):
    """The problem with copies of the named arrays, to be changed in place."""
    return problem.replace(**{name: getattr(problem, name).copy() for name in names})


# Routes


@each_how
@each_dtype
def test_masked_invalid_and_duplicate_ids(rng, how, dtype):
    problem = oracle.make_problem(rng, **SHAPE, dtype=dtype, masked=0.2, invalid=0.1, duplicates=True)
    problem.topk_ids[4], problem.topk_ids[13] = -1, (-2, 6, 2**31 - 1)
    kept = oracle.kept_routes(problem)
    result = check_all(how, problem)
    for row in (4, 13):  # nothing, not even a bias
        assert_zero(result.y[row])
        assert_zero(result.grads["x"][row])
    assert_zero(result.grads["topk_weights"][~kept])
    assert result.grads["topk_weights"][kept].all()


@each_how
def test_all_routes_masked(rng, how):
    problem = oracle.make_problem(rng, **BF16, ids=np.full((T, K), -1))
    result = check_all(how, problem)
    for array in (result.y, *result.grads.values()):
        assert_zero(array)
    assert int(result.stats.masked_routes) == T * K and not result.stats.expert_rows.any()


@each_how
def test_masking_a_route_leaves_all_other_rows_alone(rng, how):
    problem = oracle.make_problem(rng, **BF16)
    masked = copy_of(problem, "topk_ids")
    masked.topk_ids[7, 1] = -1
    before, after = run(how, problem), run(how, masked)
    others = np.arange(T) != 7
    assert_same_bits(after.y[others], before.y[others])
    assert (after.y[7] != before.y[7]).any() and after.grads["topk_weights"][7, 1] == 0
    assert_near("x", after.grads["x"][others], before.grads["x"][others], problem.config)
    lost = problem.topk_ids[7, 1]
    rest = np.arange(E) != lost
    for name in EXPERTS:
        assert_near(name, after.grads[name][rest], before.grads[name][rest], problem.config)
        assert (after.grads[name][lost] != before.grads[name][lost]).any(), name
    assert int(after.stats.masked_routes) == 1


@each_how
def test_minus_one_and_invalid_ids_mean_the_same(rng, how):
    problem = oracle.make_problem(rng, **BF16, masked=0.3)
    invalid = copy_of(problem, "topk_ids")
    wrong = rng.choice([-2, E, 100, 2**31 - 1, -(2**31)], problem.topk_ids.shape)
    invalid.topk_ids[:] = np.where(problem.topk_ids == -1, wrong, problem.topk_ids)
    a, b = run(how, problem), run(how, invalid)
    assert_same_bits((a.y, a.stats.expert_rows), (b.y, b.stats.expert_rows))
    for name, gradient in a.grads.items():
        assert_near(name, b.grads[name], gradient, problem.config)
    count = (problem.topk_ids == -1).sum()
    assert (a.stats.masked_routes, a.stats.invalid_routes) == (count, 0)
    assert (b.stats.masked_routes, b.stats.invalid_routes) == (0, count)


@each_how
def test_checks_counts_and_raises_nothing(rng, how):
    """On CUDA the host does not wait to see the ids."""
    problem = oracle.make_problem(rng, **BF16, masked=0.2)
    problem.topk_ids[0, 0], problem.topk_ids[8, 1], problem.topk_ids[21, 2] = E, 2**31 - 1, -(2**31)
    checked, unchecked = run(how, problem, checks=True, grad=False), run(how, problem)
    assert_same_bits((checked.y, checked.stats), (unchecked.y, unchecked.stats))
    assert int(checked.stats.invalid_routes) == 3


@each_how
def test_every_route_to_one_expert_more_rows_than_tokens(rng, how):
    sizes = dict(T=300, H=16, I=16, E=4, K=2, dtype=jnp.bfloat16)
    result = check(how, oracle.make_problem(rng, **sizes, ids=np.full((300, 2), 3)), grad=False)
    assert result.stats.expert_rows.tolist() == [0, 0, 0, 600]


@two_hows
@pytest.mark.parametrize(("num_experts", "top_k"), [(2, 5), (5, 37)])  # 37: more than the lanes of a warp
def test_more_routes_than_experts(rng, how, num_experts, top_k):
    sizes = dict(T=T, H=16, I=8, E=num_experts, K=top_k, masked=0.1, dtype=jnp.bfloat16)
    check(how, oracle.make_problem(rng, **sizes), grad=False)


@two_hows
def test_int64_ids_are_checked_before_they_are_narrowed(rng, how):
    problem = oracle.make_problem(rng, **BF16, masked=0.2)
    problem.topk_ids[3, 1] = -2
    want = run(how, problem)
    with jax.enable_x64(True):
        wide = problem.replace(topk_ids=problem.topk_ids.astype(np.int64))
        for value in (2**32 + 1, -(2**63)):  # the low half of the first is expert 1
            wide.topk_ids[3, 1] = value
            got = run(how, wide, grad=False)
            assert_same_bits(got.y, want.y)
            assert got.stats.invalid_routes == 1


# Weights


@each_how
def test_zero_and_negative_weights(rng, how):
    problem = oracle.make_problem(rng, **BF16)
    problem.topk_weights[2] = 0
    result = check_all(how, problem)
    assert_zero(result.y[2])
    assert not result.grads["x"][2].any() and result.grads["topk_weights"][2].all()
    negated = run(how, problem.replace(topk_weights=-problem.topk_weights))
    np.testing.assert_array_equal(negated.y.astype(np.float32), -result.y.astype(np.float32))  # 0 is +0 in both


@each_how
@each_dtype
@pytest.mark.parametrize("factor", [2.0, 0.25])
def test_powers_of_two_scale_y_exactly(rng, how, dtype, factor):
    problem = oracle.make_problem(rng, **SHAPE, dtype=dtype, duplicates=True)
    scaled = run(how, problem.replace(topk_weights=np.float32(factor) * problem.topk_weights)).y.astype(np.float32)
    y = run(how, problem).y.astype(np.float32)
    normal = np.abs(y) >= 4 * float(jnp.finfo(dtype).tiny)  # subnormal results round
    assert normal.mean() > 0.99
    np.testing.assert_array_equal(scaled[normal], np.float32(factor) * y[normal])


@each_how
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_weight_affects_only_its_token(rng, how, value):
    problem = oracle.make_problem(rng, **BF16)
    bad = copy_of(problem, "topk_weights")
    bad.topk_weights[7, 1] = value
    clean, got = run(how, problem), run(how, bad)
    others = np.arange(T) != 7
    assert not np.isfinite(got.y[7]).any() and not np.isfinite(got.grads["x"][7]).all()
    assert_same_bits(got.y[others], clean.y[others])
    for name, rows in (("x", others), ("topk_weights", slice(None))):  # <dy, f(x)>, whatever the weights
        assert_near(name, got.grads[name][rows], clean.grads[name][rows], problem.config)
    rest = np.arange(E) != problem.topk_ids[7, 1]
    for name in EXPERTS:
        assert_near(name, got.grads[name][rest], clean.grads[name][rest], problem.config)


@two_hows
def test_bfloat16_weights_are_widened(rng, how):
    problem = oracle.make_problem(rng, **BF16)
    half = problem.replace(topk_weights=problem.topk_weights.astype(jnp.bfloat16))
    want = run(how, problem.replace(topk_weights=half.topk_weights.astype(np.float32)))
    got = run(how, half)
    assert_same_bits(got.y, want.y)
    assert got.grads["topk_weights"].dtype == jnp.bfloat16
    assert_near("topk_weights", got.grads["topk_weights"], want.grads["topk_weights"], problem.config)


# Tokens


@each_how
@each_dtype
@pytest.mark.parametrize(("name", "value"), [("x", np.nan), ("x", np.inf), ("dy", np.nan)])
def test_a_bad_token_affects_its_row_and_its_experts_only(rng, how, dtype, name, value):
    problem = oracle.make_problem(rng, **SHAPE, dtype=dtype)
    bad = copy_of(problem, name)
    getattr(bad, name)[5] = value
    clean, got = run(how, problem), run(how, bad)
    others = np.arange(T) != 5
    assert_same_bits(got.y[others], clean.y[others])
    assert np.isfinite(got.y[5]).any() == np.isfinite(got.y[5]).all() == (name == "dy")
    assert not np.isfinite(got.grads["x"][5]).any() and not np.isfinite(got.grads["topk_weights"][5]).any()
    for n in ("x", "topk_weights"):
        assert_near(n, got.grads[n][others], clean.grads[n][others], problem.config)
    mine = np.isin(np.arange(E), problem.topk_ids[5])
    assert 0 < mine.sum() < E
    for n in EXPERTS:
        assert_near(n, got.grads[n][~mine], clean.grads[n][~mine], problem.config)
    for n in ("w_gate_up", "w_down"):
        assert not np.isfinite(got.grads[n][mine]).any(), n


@each_how
@each_dtype
def test_a_masked_token_never_influences_anything(rng, how, dtype):
    clean = oracle.make_problem(rng, **SHAPE, dtype=dtype, masked=0.2)
    clean.topk_ids[[3, 11]] = -1
    poisoned = copy_of(clean, "x", "topk_weights", "dy")
    poisoned.x[[3, 11]], poisoned.topk_weights[[3, 11]], poisoned.dy[[3, 11]] = np.nan, np.inf, np.nan
    poisoned.topk_weights[poisoned.topk_ids == -1] = np.nan
    got, want = run(how, poisoned), run(how, clean)
    assert_same_bits(got.y, want.y)
    for name, gradient in want.grads.items():
        assert_near(name, got.grads[name], gradient, clean.config)
    for array in (got.y, got.grads["x"]):
        assert_zero(array[[3, 11]])


@two_hows
def test_no_tokens(rng, how):
    result = check_all(how, oracle.make_problem(rng, **BF16 | {"T": 0}))
    for name in EXPERTS:
        assert_zero(result.grads[name])


@two_hows
@pytest.mark.parametrize("num_valid", [0, 1, 8, 21, 22, 1000])
def test_num_valid_masks_the_tail(rng, how, num_valid):
    problem = oracle.make_problem(rng, **BF16)
    want = check_all(how, problem, num_valid=np.int32(num_valid))
    poisoned = copy_of(problem, "x", "dy")
    poisoned.x[num_valid:], poisoned.dy[num_valid:] = np.nan, np.nan
    got = run(how, poisoned, num_valid=np.int32(num_valid))
    assert_same_bits(got.y, want.y)
    assert_zero(got.y[num_valid:])
    for name, gradient in want.grads.items():
        assert_near(name, got.grads[name], gradient, problem.config)
    assert int(got.stats.masked_routes) == max(0, T - num_valid) * K


@pytest.mark.parametrize("num_valid", [8, 1000])
def test_num_valid_may_be_static(rng, num_valid):
    problem = oracle.make_problem(rng, **BF16)
    static = jax.jit(functools.partial(sm.moe, **problem.kwargs, num_valid=num_valid))
    assert_same_bits(static(*problem.args), run("moe", problem, num_valid=np.int32(num_valid)).y)


# Experts


@each_how
@each_dtype
def test_an_expert_without_rows_gets_plus_zero(rng, how, dtype):
    ids = np.where(np.arange(K) == 1, 2, -1) * np.ones((T, 1), int)
    result = check_all(how, oracle.make_problem(rng, **SHAPE, dtype=dtype, ids=ids))
    for name in EXPERTS:
        assert_zero(np.delete(result.grads[name], 2, 0))
        assert result.grads[name][2].any(), name
    assert result.stats.expert_rows.tolist() == [0, 0, T, 0, 0, 0]


@functools.partial(jax.jit, static_argnames=("how", "config"), donate_argnames="ring")
def value_and_gradients(how, config, ring, ids, operands, dy):
    """y, gradients by name, ring; operands may hold (gate, up) pairs."""

    def f(operands):
        y, _, out = layer(how, config, ring, ids, operands)
        return y, out

    y, pullback, out = jax.vjp(f, operands, has_aux=True)
    return y, pullback(dy)[0], out


@two_hows
@pytest.mark.parametrize("activation", ["swiglu", "swigluoai"])
def test_packed_and_split_weights_and_biases(rng, how, activation):
    problem = oracle.make_problem(rng, **BF16, activation=activation, masked=0.1)
    inner = problem.config.intermediate
    operands = {n: getattr(problem, n) for n in ("x", "topk_weights", *EXPERTS)}
    for name in ("w_gate_up", "b_gate_up"):
        operands[name] = (operands[name][..., :inner], operands[name][..., inner:])
    ring = None if how == "moe" else ring_for(problem.config)
    y, grads, ring = value_and_gradients(how, problem.config, ring, problem.topk_ids, operands, problem.dy)
    packed = check_all(how, problem)
    assert_same_bits(y, packed.y)
    for name, gradient in packed.grads.items():
        got = np.concatenate(grads[name], axis=-1) if isinstance(grads[name], tuple) else np.asarray(grads[name])
        assert got.dtype == gradient.dtype
        assert_near(name, got, gradient, problem.config)
    if ring is not None:
        sm.close_ring(ring)


def test_capacity_keeps_the_lowest_tokens(rng):
    """Gradients too; streams with a capacity are in test_stream.py."""
    problem = oracle.make_problem(rng, **BF16, capacity=5, masked=0.1, invalid=0.05, duplicates=True)
    kept = oracle.kept_routes(problem)
    result = check_all("moe", problem)
    assert result.stats.expert_rows.max() == 5 and int(result.stats.dropped_routes) > 0
    assert_zero(result.grads["topk_weights"][~kept])


@two_hows
def test_capacity_zero_drops_everything(rng, how):
    result = check(how, oracle.make_problem(rng, **BF16, capacity=0), grad=False)
    assert_zero(result.y)
    assert int(result.stats.dropped_routes) == T * K


def test_more_experts_than_the_kernels_take_go_through_plain_jax(rng):
    sizes = dict(T=9, H=16, I=8, E=1032, K=2, dtype=jnp.bfloat16)
    problem = oracle.make_problem(rng, **sizes)
    check("moe", problem, grad=False)
    with pytest.raises(ValueError, match=r"at most 1024 experts.*got 1032"):
        ring_for(problem.config)


# Determinism


@each_dtype
def test_run_to_run_and_every_way_in_give_the_same_bits(rng, dtype):
    problem = oracle.make_problem(rng, **SHAPE, dtype=dtype, masked=0.1, duplicates=True)
    first = run("moe", problem)
    for how in (*HOWS, *HOWS):
        again = run(how, problem)
        assert_same_bits((again.y, again.stats), (first.y, first.stats), how)
        for name, gradient in first.grads.items():
            assert_near(name, again.grads[name], gradient, problem.config)


# Rings


def test_a_ring_that_was_not_donated_is_refused_and_stays_usable(rng):
    problem = oracle.make_problem(rng, **BF16)
    operands = {n: getattr(problem, n) for n in ("x", "topk_weights", *EXPERTS)}
    call = lambda ring: layer("overlap", problem.config, ring, problem.topk_ids, operands)[::2]
    with ring_for(problem.config) as ring:
        with pytest.raises(Exception, match=f"ring '{ring.name}' .*is not at the address it was made at") as raised:
            jax.block_until_ready(jax.jit(call)(ring))
        for cause in ("not donated", "Nothing was written", "make_ring again"):
            assert cause in str(raised.value)
        y, ring = jax.block_until_ready(jax.jit(call, donate_argnums=0)(ring))
        assert_same_bits(y, run("moe", problem).y)
        ring.check()
        assert sm.inspect(ring).ranks[0].call_number == 1


# float32, through plain JAX


def test_float32(rng):
    problem = oracle.make_problem(rng, **F32, masked=0.2, invalid=0.1, duplicates=True)
    problem.topk_ids[4], problem.topk_ids[13] = -1, (-2, 6, 2**31 - 1)
    kept = oracle.kept_routes(problem)
    clean = check("moe", problem)
    assert_zero(clean.grads["topk_weights"][~kept])
    poisoned = copy_of(problem, "x", "topk_weights", "dy")
    poisoned.x[[4, 13]], poisoned.topk_weights[~kept], poisoned.dy[[4, 13]] = np.nan, np.nan, np.nan
    got = run("moe", poisoned)
    for row in (4, 13):
        assert_zero(got.y[row])
        assert_zero(got.grads["x"][row])
    assert_near("y", got.y, clean.y, problem.config)
    for name, gradient in clean.grads.items():
        assert_near(name, got.grads[name], gradient, problem.config)


def test_float32_bad_token_and_empty_expert(rng):
    ids = np.where(np.arange(T)[:, None] == 5, [0, 1, -1], [2, 3, 4])
    problem = oracle.make_problem(rng, **F32, ids=ids)
    bad = copy_of(problem, "x")
    bad.x[5] = np.nan
    clean, got = run("moe", problem), run("moe", bad)
    others = np.arange(T) != 5
    assert np.isnan(got.y[5]).all()
    assert_near("y", got.y[others], clean.y[others], problem.config)
    assert_near("x", got.grads["x"][others], clean.grads["x"][others], problem.config)
    for name in EXPERTS:
        assert_near(name, got.grads[name][2:5], clean.grads[name][2:5], problem.config)
        assert_zero(got.grads[name][5])
    assert np.isnan(got.grads["w_down"][:2]).all()
