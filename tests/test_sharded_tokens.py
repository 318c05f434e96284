"""Tokens and experts that lie on a mesh: kept where they are under plain jit, refused where they would be gathered."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_streammoe as sm
from tests.helpers import oracle
from tests.helpers.layers import assert_same_bits, layer, ring_for, run

F32 = {"T": 24, "H": 40, "I": 24, "E": 6, "K": 3, "block_m": 8, "dtype": jnp.float32}


def batched(problem, size):
    """x, ids, weights, dy with the tokens split into [size, T / size, ...]."""
    arrays = (problem.x, problem.topk_ids, problem.topk_weights, problem.dy)
    return tuple(a.reshape(size, -1, a.shape[-1]) for a in arrays)


def put(mesh, spec, *arrays):
    return tuple(jax.device_put(a, NamedSharding(mesh, spec)) for a in arrays)


def spec_of(array):
    return tuple(array.sharding.spec) + (None,) * (array.ndim - len(array.sharding.spec))


each_mesh = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


@pytest.mark.core
@each_mesh
@pytest.mark.parametrize("placed", [True, False])
@pytest.mark.parametrize("use_mesh", [True, False])
@pytest.mark.parametrize("save_gate_up", [False, True])
def test_sharded_tokens_stay_local(rng, mesh_of, axis_type, placed, use_mesh, save_gate_up):
    problem = oracle.make_problem(rng, **F32, masked=0.1, invalid=0.1, use_bias=True)
    want = run("moe", problem)
    mesh = mesh_of(4, "data", axis_type)
    x, ids, weights, dy = put(mesh, P("data", None), problem.x, problem.topk_ids, problem.topk_weights, problem.dy)
    experts = (problem.w_gate_up, problem.w_down, problem.b_gate_up, problem.b_down)
    if placed:
        experts = put(mesh, P(), *experts)

    @jax.jit
    def step(x, ids, weights, experts, dy):
        def f(x, weights, experts):
            a, b, c, d = experts
            options = dict(b_gate_up=c, b_down=d, return_stats=True, save_gate_up=save_gate_up)
            return sm.moe(x, ids, weights, a, b, config=problem.config, **options)

        y, pullback, stats = jax.vjp(f, x, weights, experts, has_aux=True)
        return y, stats, pullback(dy)

    if use_mesh:
        with jax.set_mesh(mesh):
            text = step.lower(x, ids, weights, experts, dy).compile().as_text()
            y, stats, (dx, d_weights, d_experts) = step(x, ids, weights, experts, dy)
    else:
        text = step.lower(x, ids, weights, experts, dy).compile().as_text()
        y, stats, (dx, d_weights, d_experts) = step(x, ids, weights, experts, dy)
    assert "all-gather" not in text and "all-to-all" not in text and "all-reduce" in text
    for array in (y, dx, d_weights):
        assert spec_of(array) == ("data", None)
    assert_same_bits((y, dx, d_weights), (want.y, want.grads["x"], want.grads["topk_weights"]))
    assert_same_bits(stats, want.stats)  # of all tokens
    wanted = oracle.backward(problem)
    for grad, name in zip(d_experts, ("w_gate_up", "w_down", "b_gate_up", "b_down"), strict=True):
        assert all(part is None for part in spec_of(grad))
        oracle.assert_close(name, grad, wanted[name], np.float32, 200)


@pytest.mark.core
@each_mesh
@pytest.mark.parametrize("spec", [P("a", None, None), P(None, "a", None), P("a", "b", None), P(None, ("a", "b"), None)])
@pytest.mark.parametrize(("num_valid", "save_gate_up"), [(None, False), (13, False), (13, True)])
def test_any_leading_dimension_may_be_sharded(rng, axis_type, spec, num_valid, save_gate_up):
    problem = oracle.make_problem(rng, **F32)
    want = run("moe", problem, num_valid=num_valid)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(axis_type,) * 2)
    x, ids, weights, dy = put(mesh, spec, *batched(problem, 2))

    @jax.jit
    def step(x, ids, weights, dy):
        options = dict(config=problem.config, num_valid=num_valid, save_gate_up=save_gate_up)
        y, pullback = jax.vjp(
            lambda x, w, a: sm.moe(x, ids, w, a, problem.w_down, **options),
            x, weights, jnp.asarray(problem.w_gate_up),
        )  # fmt: skip
        return y, pullback(dy)

    y, (dx, d_weights, d_gate_up) = step(x, ids, weights, dy)
    text = step.lower(x, ids, weights, dy).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text and "collective-permute" not in text
    for array in (y, dx, d_weights):
        assert spec_of(array) == tuple(spec)
    got = [np.asarray(a).reshape(24, -1) for a in (y, dx, d_weights)]
    assert_same_bits(got, [want.y, want.grads["x"], want.grads["topk_weights"]])
    wanted = oracle.backward(problem, num_valid)["w_gate_up"]
    oracle.assert_close("w_gate_up", d_gate_up, wanted, np.float32, 200)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_vmap_over_sharded_tokens_keeps_them_local(rng, mesh_of, axis_type):
    problem = oracle.make_problem(rng, **F32)
    args = put(mesh_of(2, "data", axis_type), P(None, "data", None), *batched(problem, 3)[:3])
    call = jax.jit(jax.vmap(lambda x, ids, w: sm.moe(x, ids, w, *problem.args[3:], config=problem.config)))
    y = call(*args)
    assert spec_of(y) == (None, "data", None) and "all-gather" not in call.lower(*args).compile().as_text()
    assert_same_bits(np.asarray(y).reshape(24, -1), run("moe", problem, grad=False).y)


@each_mesh
def test_no_tokens_on_a_mesh(rng, mesh_of, axis_type):
    problem = oracle.make_problem(rng, **F32 | {"T": 0})
    mesh = mesh_of(2, "data", axis_type)
    x, ids, weights = put(mesh, P("data", None), problem.x, problem.topk_ids, problem.topk_weights)
    loss = lambda w: jnp.sum(sm.moe(x, ids, weights, problem.w_gate_up, w, **problem.kwargs))
    step = jax.jit(jax.value_and_grad(loss))
    value, grad = step(*put(mesh, P(), problem.w_down))
    assert_same_bits((value, grad), (np.float32(0), np.zeros_like(problem.w_down)))


@each_mesh
@pytest.mark.parametrize("arrays", ["replicated", "uncommitted"])
def test_tokens_that_are_not_sharded(rng, mesh_of, axis_type, arrays):
    problem = oracle.make_problem(rng, **F32)
    mesh = mesh_of(4, "data", axis_type)
    args = put(mesh, P(), *problem.args) if arrays == "replicated" else problem.args
    with jax.set_mesh(mesh):
        y = jax.jit(lambda *a: sm.moe(*a, config=problem.config))(*args)
    assert_same_bits(y, run("moe", problem, grad=False).y)


@pytest.mark.core
@each_mesh
def test_sharded_experts_are_refused(rng, mesh_of, axis_type):
    problem = oracle.make_problem(rng, **F32)
    mesh = mesh_of(2, "ep", axis_type)
    tokens = put(mesh, P("ep", None), *problem.args[:3])
    text = r"moe: expert tensor of shape \(6, 40, 48\) is sharded as .*'ep'.* under plain jit, where it would be"
    with pytest.raises(Exception, match=text):
        jax.jit(lambda *a: sm.moe(*a, config=problem.config))(*tokens, *put(mesh, P("ep"), *problem.args[3:]))


@each_mesh
def test_capacity_over_sharded_tokens_is_refused(rng, mesh_of, axis_type):
    problem = oracle.make_problem(rng, **F32, capacity=4)
    mesh = mesh_of(2, "data", axis_type)
    tokens = put(mesh, P("data", None), *problem.args[:3])
    with pytest.raises(Exception, match="capacity counts the tokens of all shards; use expert_parallel"):
        jax.jit(lambda *a: sm.moe(*a, config=problem.config))(*tokens, *put(mesh, P(), *problem.args[3:]))


def test_a_mesh_of_auto_and_explicit_axes_is_refused(rng):
    problem = oracle.make_problem(rng, **F32)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit, AxisType.Auto))
    tokens = put(mesh, P("a", None), *problem.args[:3])
    with pytest.raises(ValueError, match="the mesh axes must be all Auto or all Explicit"):
        jax.jit(lambda *a: sm.moe(*a, config=problem.config))(*tokens, *problem.args[3:])


@pytest.mark.core
def test_make_mesh_as_it_comes(rng):
    """`jax.make_mesh` makes Explicit axes: eager calls, jit and vmap(grad) work on such arrays."""
    problem = oracle.make_problem(rng, **F32)
    want = run("moe", problem)
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    assert AxisType.Explicit in mesh.axis_types
    tokens = put(mesh, P("data", None), *problem.args[:3])
    experts = put(mesh, P(), *problem.args[3:])
    for save_gate_up in (False, True):
        one = lambda x, s=save_gate_up: sm.moe(x, *tokens[1:], *experts, config=problem.config, save_gate_up=s)
        y, pullback = jax.vjp(one, tokens[0])
        assert_same_bits((y, pullback(*put(mesh, P("data", None), problem.dy))[0]), (want.y, want.grads["x"]))
    assert_same_bits(sm.moe(*tokens, *experts, config=problem.config), want.y)
    step = jax.jit(lambda x: jax.vmap(lambda x: sm.moe(x, *tokens[1:], *experts, config=problem.config))(x))
    stacked = jax.device_put(np.stack([problem.x, problem.x]), NamedSharding(mesh, P(None, "data", None)))
    np.testing.assert_array_equal(step(stacked), np.stack([want.y, want.y]))


@pytest.mark.core
@each_mesh
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("save_gate_up", [False, True])
def test_inside_shard_map_replicated_weights_get_the_summed_gradient(rng, mesh_of, axis_type, check_vma, save_gate_up):
    problem = oracle.make_problem(rng, **F32, masked=0.1)
    want = oracle.backward(problem)
    mesh = mesh_of(4, "data", axis_type)

    def per_rank(x, ids, weights, w_gate_up, w_down):
        return sm.moe(x, ids, weights, w_gate_up, w_down, config=problem.config, save_gate_up=save_gate_up)

    rows = P("data")
    call = jax.shard_map(per_rank, mesh=mesh, in_specs=(rows,) * 3 + (P(),) * 2, out_specs=rows, check_vma=check_vma)
    args = put(mesh, P("data", None), *problem.args[:3]) + put(mesh, P(), *problem.args[3:])
    (dy,) = put(mesh, P("data", None), problem.dy)

    @jax.jit
    def step(x, ids, *others):
        y, pullback = jax.vjp(lambda x, *others: call(x, ids, *others), x, *others)
        return y, pullback(dy)

    y, grads = step(*args)
    assert_same_bits(y, run("moe", problem, grad=False).y)
    for name, grad in zip(("x", "topk_weights", "w_gate_up", "w_down"), grads, strict=True):
        oracle.assert_close(name, grad, want[name], np.float32, 200)


@pytest.mark.core
@pytest.mark.parametrize("call", ["moe", "stream_moe"])
def test_partial_manual_shard_map_is_refused(rng, call):
    problem = oracle.make_problem(rng, **F32)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def per_rank(x, ids, weights):
        if call == "moe":
            return sm.moe(x, ids, weights, *problem.args[3:], config=problem.config)
        return sm.stream_moe(x, lambda _, *r: r, *problem.args[3:], config=problem.config, token_args=(ids, weights))[0]

    f = jax.shard_map(per_rank, mesh=mesh, in_specs=(P("data"),) * 3, out_specs=P("data"), axis_names={"data"})
    text = rf"{call} needs a shard_map .* over all mesh axes, got manual \('data',\) and not manual \('model',\)"
    with pytest.raises(ValueError, match=text):
        jax.jit(f)(*problem.args[:3])


def test_a_ring_over_ranks_outside_of_shard_map_is_refused(rng, mesh_of):
    problem = oracle.make_problem(rng, **F32)
    operands = {n: getattr(problem, n) for n in ("x", "topk_weights", "w_gate_up", "w_down")}
    with ring_for(problem.config, mesh=mesh_of(2)) as ring:
        call = jax.jit(lambda operands, ring: layer("serial", problem.config, ring, problem.topk_ids, operands)[0])
        with pytest.raises(ValueError, match=r"belongs inside jax\.shard_map"):
            call(operands, ring)
