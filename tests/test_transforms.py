"""The layer under JAX's transformations: vmap, export, AOT, sharded tokens under plain jit, shard_map."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_streammoe as sm
from tests.helpers import oracle
from tests.helpers.layers import assert_same_bits, layer, ring_for, run

SIZES = {"T": 24, "H": 40, "I": 24, "E": 6, "K": 3, "block_m": 8}
F32 = SIZES | {"dtype": jnp.float32}
TARGETS = ("forward", "backward", "combine")


@functools.partial(jax.jit, static_argnames=("config", "return_stats"))
def moe(*args, **options):
    return sm.moe(*args, **options)


def batched(problem, size):
    """x, ids, weights, dy with the tokens split into [size, T / size, ...]."""
    arrays = (problem.x, problem.topk_ids, problem.topk_weights, problem.dy)
    return tuple(jnp.asarray(a.reshape(size, -1, a.shape[-1])) for a in arrays)


def value_and_grads(call, argnums, *args, dy):
    y, pullback = jax.vjp(lambda *v: call(*(dict(zip(argnums, v, strict=True)).get(n, a) for n, a in enumerate(args))),
                          *(args[n] for n in argnums))  # fmt: skip
    return y, pullback(dy)


def num_calls(jitted, *args, target="forward"):
    return jitted.lower(*args).compile().as_text().count(f'custom_call_target="streammoe_{target}_v1"')


# vmap


@pytest.mark.core
@pytest.mark.parametrize("nested", [False, True])
def test_vmap_over_tokens_is_one_call_with_the_same_bits(rng, nested):
    problem = oracle.make_problem(rng, **F32, masked=0.1, invalid=0.1, use_bias=True)
    want, want_stats = moe(*problem.args, **problem.kwargs, return_stats=True)
    one = lambda x, ids, w: sm.moe(x, ids, w, *problem.args[3:], **problem.kwargs, return_stats=True)
    x, ids, weights, _ = batched(problem, 4)
    call = jax.vmap(one)
    if nested:
        x, ids, weights = (a.reshape(2, 2, *a.shape[1:]) for a in (x, ids, weights))
        call = jax.vmap(call)
    call = jax.jit(call)
    y, stats = call(x, ids, weights)
    assert_same_bits(y.reshape(want.shape), want)
    assert num_calls(call, x, ids, weights) == 1
    # Statistics are those of each example; together they are those of all tokens.
    batch = y.ndim - 2
    assert stats.expert_rows.shape == (*y.shape[:batch], 6)
    for got, total in zip(stats, want_stats, strict=True):
        np.testing.assert_array_equal(np.asarray(got).sum(tuple(range(batch))), total)
    for index in np.ndindex(*y.shape[:batch]):
        _, alone = moe(x[index], ids[index], weights[index], *problem.args[3:], **problem.kwargs, return_stats=True)
        assert_same_bits([s[index] for s in stats], list(alone))


@pytest.mark.parametrize("axis", [1, 2])
def test_vmap_over_another_axis_and_over_one_operand_only(rng, axis):
    problem = oracle.make_problem(rng, **F32)
    x = rng.standard_normal((3, 24, 40)).astype(np.float32)
    got = jax.vmap(lambda x: moe(x, *problem.args[1:], config=problem.config), in_axes=axis, out_axes=axis)(
        np.moveaxis(x, 0, axis)
    )
    for n in range(3):
        assert_same_bits(np.moveaxis(got, axis, 0)[n], moe(x[n], *problem.args[1:], config=problem.config))
    scales = np.float32([1, 2, 4])
    got = jax.vmap(lambda s: moe(*problem.args[:2], s * problem.topk_weights, *problem.args[3:], config=problem.config))(
        scales
    )
    y = np.asarray(moe(*problem.args, config=problem.config))
    assert_same_bits(got, scales[:, None, None] * y[None])


@pytest.mark.core
@pytest.mark.parametrize("mapped", ["all", "w_down", "capacity"])
def test_vmap_with_mapped_experts_or_capacity_walks_the_axis(rng, mapped):
    capacity = 3 if mapped == "capacity" else None
    problems = [oracle.make_problem(rng, **F32, masked=0.1, capacity=capacity) for _ in range(3)]
    axes = {"all": (0,) * 5, "w_down": (0, 0, 0, None, 0), "capacity": (0, 0, 0, None, None)}[mapped]
    args = tuple(
        problems[0].args[n] if axis is None else np.stack([p.args[n] for p in problems]) for n, axis in enumerate(axes)
    )
    config, dy = problems[0].config, np.stack([p.dy for p in problems])
    call = jax.vmap(lambda *a: sm.moe(*a, config=config, return_stats=True), in_axes=axes)
    y, stats = jax.jit(call)(*args)
    grads = jax.jit(jax.grad(lambda a: jnp.vdot(call(a[0], args[1], *a[1:])[0], dy)))((args[0], *args[2:]))
    summed = [np.zeros_like(args[3]), np.zeros_like(args[4])]
    for n, p in enumerate(problems):
        mine = [a if axis is None else a[n] for a, axis in zip(args, axes, strict=True)]
        want = run("moe", p.replace(w_gate_up=mine[3], w_down=mine[4]))
        assert_same_bits((y[n], [s[n] for s in stats]), (want.y, list(want.stats)))
        assert_same_bits((grads[0][n], grads[1][n]), (want.grads["x"], want.grads["topk_weights"]))
        for slot, name in enumerate(("w_gate_up", "w_down")):
            if axes[3 + slot] == 0:
                assert_same_bits(grads[2 + slot][n], want.grads[name], name)
            summed[slot] += want.grads[name]
    for slot in (0, 1):
        if axes[3 + slot] is None:
            np.testing.assert_allclose(grads[2 + slot], summed[slot], rtol=1e-5, atol=1e-5)


@pytest.mark.core
def test_vmap_of_grad_and_grad_of_vmap(rng):
    problem = oracle.make_problem(rng, **F32, masked=0.1)
    x, ids, weights, dy = batched(problem, 4)
    experts = tuple(map(jnp.asarray, problem.args[3:]))
    one = lambda x, ids, w, a, b, dy: jnp.vdot(sm.moe(x, ids, w, a, b, config=problem.config), dy)
    each = jax.jit(jax.vmap(jax.grad(one, (0, 2, 3, 4)), (0, 0, 0, None, None, 0)))(x, ids, weights, *experts, dy)
    total = lambda x, ids, w, a, b, dy: jnp.sum(jax.vmap(one, (0, 0, 0, None, None, 0))(x, ids, w, a, b, dy))
    together = jax.jit(jax.grad(total, (0, 2, 3, 4)))(x, ids, weights, *experts, dy)
    want = run("moe", problem).grads
    for n, name in enumerate(("x", "topk_weights")):
        assert_same_bits(each[n].reshape(want[name].shape), want[name], name)
        assert_same_bits(together[n].reshape(want[name].shape), want[name], name)
    for n in range(4):
        alone = run("moe", problem.replace(**{
            k: np.asarray(a[n]) for k, a in zip(("x", "topk_ids", "topk_weights", "dy"), (x, ids, weights, dy), strict=True)
        })).grads  # fmt: skip
        for slot, name in ((2, "w_gate_up"), (3, "w_down")):
            assert_same_bits(each[slot][n], alone[name], name)
    for slot, name in ((2, "w_gate_up"), (3, "w_down")):
        np.testing.assert_allclose(together[slot], want[name], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.core
@pytest.mark.parametrize("how", ["serial", "overlap"])
def test_vmap_of_a_stream_raises(rng, how):
    problem = oracle.make_problem(rng, **F32)
    with ring_for(problem.config) as ring:
        operands = {n: jnp.asarray(getattr(problem, n)) for n in ("x", "topk_weights", "w_gate_up", "w_down")}
        call = lambda x: layer(how, problem.config, ring, problem.topk_ids, operands | {"x": x})[0]
        with pytest.raises(NotImplementedError, match="a stream cannot be vmapped. Use sm.moe"):
            jax.jit(jax.vmap(call))(jnp.stack([operands["x"]] * 2))
        ring.check()


# jit, AOT, export


@pytest.mark.core
def test_jit_in_jit_eager_and_aot_give_the_same_bits(rng):
    problem = oracle.make_problem(rng, **F32, masked=0.1)
    want = run("moe", problem)
    assert_same_bits(sm.moe(*problem.args, **problem.kwargs), want.y)
    nested = jax.jit(lambda *a: moe(*a, **problem.kwargs))
    assert_same_bits(nested(*problem.args), want.y)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in problem.args]
    compiled = nested.lower(*shapes).compile()
    assert_same_bits(compiled(*problem.args), want.y)
    eager = jax.grad(lambda x: jnp.vdot(sm.moe(x, *problem.args[1:], **problem.kwargs), problem.dy))(jnp.asarray(problem.x))
    assert_same_bits(eager, want.grads["x"])


def test_jit_of_a_batch_of_calls_in_one_program(rng):
    """Independent calls of one program run beside each other and stay apart."""
    problems = [oracle.make_problem(rng, **F32) for _ in range(4)]
    outs = jax.jit(lambda args: [sm.moe(*a, config=problems[0].config) for a in args])([p.args for p in problems])
    for out, problem in zip(outs, problems, strict=True):
        assert_same_bits(out, moe(*problem.args, config=problem.config))


def test_while_loop_and_cond(rng):
    problem = oracle.make_problem(rng, **F32)

    @jax.jit
    def repeat(x, n):
        def step(carry):
            x, left = carry
            y = lax.cond(left % 2 == 0, lambda x: sm.moe(x, *problem.args[1:], config=problem.config), lambda x: -x, x)
            return jnp.tanh(y), left - 1

        return lax.while_loop(lambda c: c[1] > 0, step, (x, n))[0]

    want = problem.x
    for left in (4, 3, 2, 1):
        want = jnp.tanh(moe(want, *problem.args[1:], config=problem.config) if left % 2 == 0 else -want)
    assert_same_bits(repeat(problem.x, 4), want)


def _checks(*names):
    return [export.DisabledSafetyCheck.custom_call(f"streammoe_{n}_v1") for n in names]


@pytest.mark.core
def test_export_round_trip_with_gradient(rng):
    problem = oracle.make_problem(rng, **F32, masked=0.1)
    want = run("moe", problem)
    call = jax.jit(lambda x, w, a, b: sm.moe(x, problem.topk_ids, w, a, b, config=problem.config))
    args = (problem.x, *problem.args[2:])
    exported = export.export(call, disabled_checks=_checks(*TARGETS))(*args)
    again = export.deserialize(exported.serialize(vjp_order=1))
    assert_same_bits(again.call(*args), want.y)
    y, grads = jax.jit(functools.partial(value_and_grads, again.call, (0, 1, 2, 3), dy=problem.dy))(*args)
    assert_same_bits((y, grads), (want.y, tuple(want.grads[n] for n in ("x", "topk_weights", "w_gate_up", "w_down"))))


def test_an_exported_program_runs_in_another_process(rng, tmp_path):
    problem = oracle.make_problem(rng, **F32)
    exported = export.export(moe, disabled_checks=_checks("forward"))(*problem.args, config=problem.config)
    (tmp_path / "program").write_bytes(exported.serialize())
    np.savez(tmp_path / "args.npz", *problem.args, want=moe(*problem.args, config=problem.config))
    code = f"""
        import numpy as np, jax_streammoe
        from jax import export
        data = np.load({str(tmp_path / "args.npz")!r})
        program = export.deserialize(open({str(tmp_path / "program")!r}, "rb").read())
        y = program.call(*(data[f"arr_{{n}}"] for n in range(5)))
        assert np.array_equal(np.asarray(y).view(np.uint32), data["want"].view(np.uint32))
        print("same bits")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )
    assert "same bits" in done.stdout, done.stderr


def test_export_without_allowing_the_targets_names_them(rng):
    problem = oracle.make_problem(rng, **F32)
    with pytest.raises(ValueError, match=r"streammoe_forward_v1"):
        export.export(moe)(*problem.args, config=problem.config)


# Sharded operands under plain jit


def put(mesh, spec, *arrays):
    return tuple(jax.device_put(a, NamedSharding(mesh, spec)) for a in arrays)


def spec_of(array):
    return tuple(array.sharding.spec) + (None,) * (array.ndim - len(array.sharding.spec))


each_mesh = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


@pytest.mark.core
@each_mesh
@pytest.mark.parametrize("placed", [True, False])
@pytest.mark.parametrize("use_mesh", [True, False])
def test_sharded_tokens_stay_local(rng, mesh_of, axis_type, placed, use_mesh):
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
            return sm.moe(x, ids, weights, a, b, config=problem.config, b_gate_up=c, b_down=d, return_stats=True)

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
@pytest.mark.parametrize("num_valid", [None, 13])
def test_any_leading_dimension_may_be_sharded(rng, axis_type, spec, num_valid):
    problem = oracle.make_problem(rng, **F32)
    want = run("moe", problem, num_valid=num_valid)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(axis_type,) * 2)
    x, ids, weights, dy = put(mesh, spec, *(np.asarray(a) for a in batched(problem, 2)))

    @jax.jit
    def step(x, ids, weights, dy):
        y, pullback = jax.vjp(
            lambda x, w, a: sm.moe(x, ids, w, a, problem.w_down, config=problem.config, num_valid=num_valid),
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
    args = put(mesh_of(2, "data", axis_type), P(None, "data", None), *(np.asarray(a) for a in batched(problem, 3)[:3]))
    call = jax.jit(jax.vmap(lambda x, ids, w: sm.moe(x, ids, w, *problem.args[3:], config=problem.config)))
    y = call(*args)
    assert spec_of(y) == (None, "data", None) and "all-gather" not in call.lower(*args).compile().as_text()
    assert_same_bits(np.asarray(y).reshape(24, -1), run("moe", problem, grad=False).y)


@each_mesh
def test_no_tokens_on_a_mesh(rng, mesh_of, axis_type):
    problem = oracle.make_problem(rng, **F32 | {"T": 0})
    mesh = mesh_of(2, "data", axis_type)
    x, ids, weights = put(mesh, P("data", None), problem.x, problem.topk_ids, problem.topk_weights)
    step = jax.jit(jax.value_and_grad(lambda w: jnp.sum(sm.moe(x, ids, weights, problem.w_gate_up, w, **problem.kwargs))))
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
    text = r"moe: expert tensor of shape \(6, 40, 48\) is sharded as .*'ep'.* under plain jit, where it would be gathered"
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
    assert_same_bits(sm.moe(*tokens, *experts, config=problem.config), want.y)
    step = jax.jit(lambda x: jax.vmap(lambda x: sm.moe(x, *tokens[1:], *experts, config=problem.config))(x))
    stacked = jax.device_put(np.stack([problem.x, problem.x]), NamedSharding(mesh, P(None, "data", None)))
    np.testing.assert_array_equal(step(stacked), np.stack([want.y, want.y]))


# Inside shard_map


@pytest.mark.core
@each_mesh
@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map_replicated_weights_get_the_summed_gradient(rng, mesh_of, axis_type, check_vma):
    problem = oracle.make_problem(rng, **F32, masked=0.1)
    want = oracle.backward(problem)
    mesh = mesh_of(4, "data", axis_type)

    def per_rank(x, ids, weights, w_gate_up, w_down):
        return sm.moe(x, ids, weights, w_gate_up, w_down, config=problem.config)

    rows = P("data")
    call = jax.shard_map(per_rank, mesh=mesh, in_specs=(rows,) * 3 + (P(),) * 2, out_specs=rows, check_vma=check_vma)
    args = put(mesh, P("data", None), *problem.args[:3]) + put(mesh, P(), *problem.args[3:])
    (dy,) = put(mesh, P("data", None), problem.dy)
    y, grads = jax.jit(functools.partial(value_and_grads, call, (0, 2, 3, 4), dy=dy))(*args)
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
        return sm.stream_moe(
            x, lambda _, *r: r, *problem.args[3:], config=problem.config, token_args=(ids, weights)
        )[0]

    f = jax.shard_map(per_rank, mesh=mesh, in_specs=(P("data"),) * 3, out_specs=P("data"), axis_names={"data"})
    text = rf"{call} needs a shard_map that is manual over all mesh axes, got manual \('data',\) and not manual \('model',\)"
    with pytest.raises(ValueError, match=text):
        jax.jit(f)(*problem.args[:3])


def test_a_ring_over_ranks_outside_of_shard_map_is_refused(rng, mesh_of):
    problem = oracle.make_problem(rng, **F32)
    with ring_for(problem.config, mesh=mesh_of(2)) as ring, pytest.raises(ValueError, match=r"belongs inside jax\.shard_map"):
        jax.jit(lambda x, ring: layer("serial", problem.config, ring, problem.topk_ids, {
            n: getattr(problem, n) for n in ("topk_weights", "w_gate_up", "w_down")} | {"x": x})[0])(problem.x, ring)  # fmt: skip
