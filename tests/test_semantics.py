"""Every corner of the semantics table on one device, forward and backward, batch-ready and streamed."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_streammoe as sm
from tests.helpers import oracle
from tests.helpers.layers import CHUNK_TOKENS, HOWS, NUM_SLOTS, assert_same_bits, check, run

SIZES = {"T": 22, "H": 40, "I": 24, "E": 6, "K": 3, "block_m": 8}
F32 = SIZES | {"dtype": jnp.float32}
HALVES = (jnp.bfloat16, jnp.float16)
both_passes = pytest.mark.parametrize("how", [*HOWS, "kept"])


def copy_of(problem, *names):
    """The problem with copies of the named arrays, to be changed in place."""
    return problem.replace(**{name: getattr(problem, name).copy() for name in names})


@pytest.mark.core
@both_passes
@pytest.mark.parametrize("dtype", [jnp.float32, *HALVES])
def test_masked_invalid_and_duplicate_ids(rng, how, dtype):
    problem = oracle.make_problem(rng, **SIZES, dtype=dtype, masked=0.2, invalid=0.1, duplicates=True, use_bias=True)
    problem.topk_ids[4], problem.topk_ids[13] = -1, (-2, 6, 2**31 - 1)
    kept = oracle.kept_routes(problem)
    result = check(how, problem)
    for row in (4, 13):  # nothing, not even a bias
        assert_same_bits((result.y[row], result.grads["x"][row]), (np.zeros(40, dtype),) * 2)
    assert_same_bits(result.grads["topk_weights"][~kept], np.zeros((~kept).sum(), np.float32))
    assert result.grads["topk_weights"][kept].all()


@pytest.mark.core
@both_passes
def test_masking_a_route_leaves_all_other_rows_alone(rng, how):
    problem = oracle.make_problem(rng, **F32, use_bias=True)
    masked = copy_of(problem, "topk_ids")
    masked.topk_ids[7, 1] = -1
    before, after = run(how, problem), run(how, masked)
    others = np.arange(22) != 7
    assert_same_bits(after.y[others], before.y[others])
    assert_same_bits(after.grads["x"][others], before.grads["x"][others])
    routes = np.ones((22, 3), bool)
    routes[7, 1] = False
    assert_same_bits(after.grads["topk_weights"][routes], before.grads["topk_weights"][routes])
    assert (after.y[7] != before.y[7]).any() and after.grads["topk_weights"][7, 1] == 0
    # Weight gradients change for the expert that lost the row, and for no other.
    lost = problem.topk_ids[7, 1]
    rest = np.arange(6) != lost
    for name in ("w_gate_up", "w_down", "b_gate_up", "b_down"):
        assert_same_bits(after.grads[name][rest], before.grads[name][rest], name)
        assert (after.grads[name][lost] != before.grads[name][lost]).any(), name
    assert int(after.stats.masked_routes) == 1


@both_passes
def test_minus_one_and_invalid_ids_mean_the_same(rng, how):
    problem = oracle.make_problem(rng, **F32, masked=0.3)
    invalid = copy_of(problem, "topk_ids")
    wrong = rng.choice([-2, 6, 100, 2**31 - 1, -(2**31)], problem.topk_ids.shape)
    invalid.topk_ids[:] = np.where(problem.topk_ids == -1, wrong, problem.topk_ids)
    a, b = run(how, problem), run(how, invalid)
    assert_same_bits((a.y, a.grads, a.stats.expert_rows), (b.y, b.grads, b.stats.expert_rows))
    count = (problem.topk_ids == -1).sum()
    assert (a.stats.masked_routes, a.stats.invalid_routes) == (count, 0)
    assert (b.stats.masked_routes, b.stats.invalid_routes) == (0, count)


@pytest.mark.core
@both_passes
@pytest.mark.parametrize(("token", "slot", "value"), [(0, 0, 6), (19, 2, -2), (8, 1, 2**31 - 1), (21, 0, -(2**31))])
def test_checks_names_token_slot_and_value(rng, how, token, slot, value):
    problem = oracle.make_problem(rng, **F32, masked=0.2)
    assert np.isfinite(run(how, problem, checks=True, grad=False).y).all()
    problem.topk_ids[token, slot] = value
    with pytest.raises(Exception, match=rf"topk_ids\[{token}, {slot}\] is {value}, outside -1\.\.5"):
        run(how, problem, checks=True, grad=False)


@both_passes
def test_checks_ignores_tokens_beyond_num_valid(rng, how):
    problem = oracle.make_problem(rng, **F32)
    problem.topk_ids[15, 1] = 99
    assert np.isfinite(run(how, problem, num_valid=15, checks=True, grad=False).y).all()
    with pytest.raises(Exception, match=r"topk_ids\[15, 1\] is 99"):
        run(how, problem, num_valid=16, checks=True, grad=False)


@pytest.mark.core
@both_passes
def test_every_route_to_one_expert_more_rows_than_tokens(rng, how):
    problem = oracle.make_problem(
        rng, T=128, H=16, I=16, E=4, K=2, block_m=16, dtype=jnp.float32, ids=np.zeros((128, 2), np.int32)
    )
    problem = problem.replace(topk_weights=np.full((128, 2), 0.75, np.float32))
    result = check(how, problem)
    assert result.stats.expert_rows.tolist() == [256, 0, 0, 0]
    single = oracle.make_problem(
        rng, T=128, H=16, I=16, E=4, K=1, block_m=16, dtype=jnp.float32, ids=np.zeros((128, 1), np.int32)
    )
    single = single.replace(
        x=problem.x, w_gate_up=problem.w_gate_up, w_down=problem.w_down, topk_weights=np.full((128, 1), 1.5, np.float32)
    )
    np.testing.assert_allclose(run(how, single, grad=False).y, result.y, rtol=1e-6)


@both_passes
def test_more_routes_than_experts(rng, how):
    check(how, oracle.make_problem(rng, T=11, H=16, I=8, E=2, K=5, block_m=8, dtype=jnp.float32))


def test_route_topk_refuses_more_routes_than_experts():
    config = sm.MoEConfig(2, 5, 16, 8, dtype=jnp.float32)
    with pytest.raises(ValueError, match="top_k must be at most num_experts = 2, got 5"):
        sm.route_topk(jnp.zeros((3, 2)), config)


@both_passes
def test_int64_ids_are_checked_before_they_are_narrowed(rng, how):
    problem = oracle.make_problem(rng, **F32, masked=0.2)
    problem.topk_ids[3, 1] = -2
    want = run(how, problem)
    with jax.enable_x64(True):
        wide = problem.replace(topk_ids=problem.topk_ids.astype(np.int64))
        wide.topk_ids[3, 1] = 2**32 + 1  # its low half is expert 1
        got = run(how, wide)
        wide.topk_ids[3, 1] = -(2**63)
        lowest = run(how, wide)
    assert_same_bits((got.y, got.grads), (want.y, want.grads))
    assert_same_bits((lowest.y, lowest.grads), (want.y, want.grads))
    assert got.stats.invalid_routes == lowest.stats.invalid_routes == 1


@pytest.mark.parametrize("dtype", [np.int16, np.uint32, np.float32, np.bool_])
def test_other_id_dtypes_are_a_type_error(rng, dtype):
    problem = oracle.make_problem(rng, **F32)
    text = rf"topk_ids must be int32 of shape \(22, 3\), got {np.dtype(dtype).name} \(22, 3\)"
    with pytest.raises(TypeError, match=text):
        sm.moe(problem.x, problem.topk_ids.astype(dtype), *problem.args[2:], **problem.kwargs)


@both_passes
def test_bfloat16_weights_are_widened(rng, how):
    problem = oracle.make_problem(rng, **F32)
    half = problem.replace(topk_weights=problem.topk_weights.astype(jnp.bfloat16))
    widened = problem.replace(topk_weights=half.topk_weights.astype(np.float32))
    got, want = run(how, half), run(how, widened)
    assert_same_bits(got.y, want.y)
    assert got.grads["topk_weights"].dtype == jnp.bfloat16
    assert_same_bits(got.grads["topk_weights"], want.grads["topk_weights"].astype(jnp.bfloat16))


@pytest.mark.core
@both_passes
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_weight_affects_only_its_token(rng, how, value):
    problem = oracle.make_problem(rng, **F32)
    bad = copy_of(problem, "topk_weights")
    bad.topk_weights[7, 1] = value
    clean, got = run(how, problem), run(how, bad)
    others = np.arange(22) != 7
    assert not np.isfinite(got.y[7]).any() and not np.isfinite(got.grads["x"][7]).all()
    assert_same_bits((got.y[others], got.grads["x"][others]), (clean.y[others], clean.grads["x"][others]))
    assert_same_bits(got.grads["topk_weights"], clean.grads["topk_weights"])  # <dy, f(x)>, whatever the weights
    rest = np.arange(6) != problem.topk_ids[7, 1]
    for name in ("w_gate_up", "w_down"):
        assert_same_bits(got.grads[name][rest], clean.grads[name][rest], name)


@pytest.mark.core
@both_passes
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ["x", "dy"])
def test_a_nan_token_affects_its_row_and_its_experts_only(rng, how, dtype, name):
    problem = oracle.make_problem(rng, **SIZES, dtype=dtype, use_bias=True)
    bad = copy_of(problem, name)
    getattr(bad, name)[5] = np.nan
    clean, got = run(how, problem), run(how, bad)
    others = np.arange(22) != 5
    assert np.isnan(got.grads["x"][5]).all() and np.isnan(got.grads["topk_weights"][5]).all()
    assert np.isnan(got.y[5]).all() == (name == "x")
    for a, b in ((got.y, clean.y), *((got.grads[n], clean.grads[n]) for n in ("x", "topk_weights"))):
        assert_same_bits(a[others], b[others])
    mine = np.isin(np.arange(6), problem.topk_ids[5])
    assert 0 < mine.sum() < 6
    for n in ("w_gate_up", "w_down"):
        assert_same_bits(got.grads[n][~mine], clean.grads[n][~mine], n)
        assert np.isnan(got.grads[n][mine]).all(), n


@pytest.mark.core
@both_passes
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_masked_token_never_influences_anything(rng, how, dtype):
    clean = oracle.make_problem(rng, **SIZES, dtype=dtype, use_bias=True, masked=0.2)
    clean.topk_ids[[3, 11]] = -1
    poisoned = copy_of(clean, "x", "topk_weights", "dy")
    poisoned.x[[3, 11]], poisoned.topk_weights[[3, 11]], poisoned.dy[[3, 11]] = np.nan, np.inf, np.nan
    poisoned.topk_weights[poisoned.topk_ids == -1] = np.nan
    got, want = run(how, poisoned), run(how, clean)
    assert_same_bits((got.y, got.grads), (want.y, want.grads))
    for a in (got.y, got.grads["x"]):
        assert_same_bits(a[[3, 11]], np.zeros((2, 40), dtype))


@pytest.mark.core
@both_passes
def test_no_tokens(rng, how):
    result = check(how, oracle.make_problem(rng, **F32 | {"T": 0}, use_bias=True))
    for name in ("w_gate_up", "w_down", "b_gate_up", "b_down"):
        assert_same_bits(result.grads[name], np.zeros_like(result.grads[name]), name)


@pytest.mark.core
@both_passes
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("split", [False, True])
def test_an_expert_without_rows_gets_plus_zero(rng, how, dtype, split):
    problem = oracle.make_problem(rng, **SIZES | {"K": 1}, dtype=dtype, use_bias=True, ids=np.full((22, 1), 2))
    if split:
        inner = problem.config.intermediate
        halves = [(a[..., :inner], a[..., inner:]) for a in (problem.w_gate_up, problem.b_gate_up)]
        grads = jax.jit(jax.grad(
            lambda w, b: jnp.vdot(sm.moe(*problem.args[:3], w, problem.w_down, config=problem.config, b_gate_up=b,
                                         b_down=problem.b_down), problem.dy), (0, 1)))(*halves)  # fmt: skip
        grads = {str(n): np.asarray(g) for n, g in enumerate(jax.tree.leaves(grads))}
    else:
        grads = run(how, problem).grads
        grads = {n: grads[n] for n in ("w_gate_up", "w_down", "b_gate_up", "b_down")}
    for name, grad in grads.items():
        assert_same_bits(np.delete(grad, 2, 0), np.zeros_like(np.delete(grad, 2, 0)), name)
        assert grad[2].any(), name


@pytest.mark.core
@both_passes
@pytest.mark.parametrize("capacity", [0, 1, 5, 1000])
def test_capacity_keeps_the_lowest_tokens(rng, how, capacity):
    assert SIZES["T"] <= CHUNK_TOKENS * NUM_SLOTS  # one wave
    problem = oracle.make_problem(rng, **F32, capacity=capacity, masked=0.1, invalid=0.05, duplicates=True)
    kept = oracle.kept_routes(problem)
    result = check(how, problem)
    wanted = problem.topk_ids[(problem.topk_ids >= 0) & (problem.topk_ids < 6)]
    assert result.stats.expert_rows.max() == min(capacity, np.bincount(wanted).max())
    assert_same_bits(result.grads["topk_weights"][~kept], np.zeros((~kept).sum(), np.float32))


@both_passes
def test_capacity_counts_valid_tokens_only(rng, how):
    problem = oracle.make_problem(rng, **F32 | {"K": 1}, capacity=4, ids=np.zeros((22, 1)))
    assert int(check(how, problem, num_valid=6).stats.dropped_routes) == 2


def test_counts_and_ids_that_do_not_fit_int32_do_not_wrap(rng):
    problem = oracle.make_problem(rng, T=22, H=16, I=8, E=4, K=2)
    layer = functools.partial(sm.moe, config=problem.config, return_stats=True)
    whole, none = layer(*problem.args)[0], layer(*problem.args, num_valid=0)[0]
    for num_valid, want in (
        (2**40, whole), (np.int64(2**32 + 5), whole), (np.uint32(2**31 + 5), whole), (jnp.uint32(2**31 + 5), whole),
        (23, whole), (-1, none), (-(2**40), none), (jnp.int8(22), whole),
    ):  # fmt: skip
        y, _ = layer(*problem.args, num_valid=num_valid)
        np.testing.assert_array_equal(y, want, err_msg=str(num_valid))
    wide = problem.topk_ids.astype(np.int64) + 2**32  # NumPy's, which JAX would narrow without x64
    y, stats = layer(problem.x, wide, *problem.args[2:])
    assert int(stats.invalid_routes) == wide.size and not np.asarray(y).any()


@pytest.mark.core
@both_passes
@pytest.mark.parametrize("num_valid", [0, 1, 8, 21, 22])
def test_num_valid_masks_the_tail(rng, how, num_valid):
    problem = oracle.make_problem(rng, **F32)
    problem.x[num_valid:], problem.dy[num_valid:] = np.nan, np.nan
    result = run(how, problem, num_valid=num_valid)
    traced = run(how, problem, num_valid=jnp.int32(num_valid))
    zeros = problem.replace(x=np.nan_to_num(problem.x), dy=np.nan_to_num(problem.dy))
    clean = check(how, zeros, num_valid=num_valid)
    assert_same_bits((result.y, result.grads), (clean.y, clean.grads))
    assert_same_bits((traced.y, traced.grads), (clean.y, clean.grads))


@pytest.mark.core
@both_passes
def test_weight_gradient_where_the_weight_is_zero(rng, how):
    problem = oracle.make_problem(rng, **F32, use_bias=True)
    problem.topk_weights[2] = 0
    result = check(how, problem)
    assert not result.y[2].any() and not result.grads["x"][2].any()
    assert result.grads["topk_weights"][2].all()


@pytest.mark.core
@both_passes
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("factor", [2.0, 0.25])
def test_powers_of_two_scale_y_exactly(rng, how, dtype, factor):
    problem = oracle.make_problem(rng, **SIZES, dtype=dtype, use_bias=True, duplicates=True)
    y = run(how, problem, grad=False).y.astype(np.float32)
    weights = np.float32(factor) * problem.topk_weights
    scaled = run(how, problem.replace(topk_weights=weights), grad=False).y.astype(np.float32)
    assert y.any()
    assert_same_bits(scaled, np.float32(factor) * y)


@pytest.mark.core
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_run_to_run_and_every_way_in_give_the_same_bits(rng, dtype):
    problem = oracle.make_problem(rng, **SIZES | {"T": 41}, dtype=dtype, use_bias=True, masked=0.1, duplicates=True)
    first = run("moe", problem)
    for how in (*HOWS, *HOWS):
        again = run(how, problem)
        assert_same_bits((again.y, again.grads), (first.y, first.grads), how)
        assert_same_bits(again.stats, first.stats, how)


def test_bits_of_a_row_do_not_depend_on_its_neighbours(rng):
    problem = oracle.make_problem(rng, **F32 | {"T": 40}, use_bias=True)
    whole = run("moe", problem)
    order = rng.permutation(40)[:17]
    some = problem.replace(**{n: getattr(problem, n)[order] for n in ("x", "topk_ids", "topk_weights", "dy")})
    part = run("moe", some)
    assert_same_bits(part.y, whole.y[order])
    for name in ("x", "topk_weights"):
        assert_same_bits(part.grads[name], whole.grads[name][order], name)
