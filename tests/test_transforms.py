"""The layer under JAX's transformations: vmap, jit in jit, control flow, ahead-of-time compilation, export."""

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

import jax_streammoe as sm
from tests.helpers import oracle
from tests.helpers.layers import assert_same_bits, layer, ring_for, run

SIZES = {"T": 24, "H": 40, "I": 24, "E": 6, "K": 3, "block_m": 8}
F32 = SIZES | {"dtype": jnp.float32}
TARGETS = ("forward", "backward", "combine")
KEPT_TARGETS = ("forward_kept", "backward_kept")


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
    scaled = lambda s: moe(*problem.args[:2], s * problem.topk_weights, *problem.args[3:], config=problem.config)
    got = jax.vmap(scaled)(scales)
    y = np.asarray(moe(*problem.args, config=problem.config))
    assert_same_bits(got, scales[:, None, None] * y[None])


@pytest.mark.core
@pytest.mark.parametrize("mapped", ["all", "w_down", "capacity"])
@pytest.mark.parametrize("save_gate_up", [False, True])
def test_vmap_with_mapped_experts_or_capacity_walks_the_axis(rng, save_gate_up, mapped):
    capacity = 3 if mapped == "capacity" else None
    problems = [oracle.make_problem(rng, **F32, masked=0.1, capacity=capacity) for _ in range(3)]
    axes = {"all": (0,) * 5, "w_down": (0, 0, 0, None, 0), "capacity": (0, 0, 0, None, None)}[mapped]
    args = tuple(
        problems[0].args[n] if axis is None else np.stack([p.args[n] for p in problems]) for n, axis in enumerate(axes)
    )
    config, dy = problems[0].config, np.stack([p.dy for p in problems])
    options = dict(config=config, return_stats=True, save_gate_up=save_gate_up)
    call = jax.vmap(lambda *a: sm.moe(*a, **options), in_axes=axes)
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
@pytest.mark.parametrize("save_gate_up", [False, True])
def test_vmap_of_grad_and_grad_of_vmap(rng, save_gate_up):
    problem = oracle.make_problem(rng, **F32, masked=0.1)
    x, ids, weights, dy = batched(problem, 4)
    experts = tuple(map(jnp.asarray, problem.args[3:]))
    layer = functools.partial(sm.moe, config=problem.config, save_gate_up=save_gate_up)
    one = lambda x, ids, w, a, b, dy: jnp.vdot(layer(x, ids, w, a, b), dy)
    each = jax.jit(jax.vmap(jax.grad(one, (0, 2, 3, 4)), (0, 0, 0, None, None, 0)))(x, ids, weights, *experts, dy)
    total = lambda x, ids, w, a, b, dy: jnp.sum(jax.vmap(one, (0, 0, 0, None, None, 0))(x, ids, w, a, b, dy))
    together = jax.jit(jax.grad(total, (0, 2, 3, 4)))(x, ids, weights, *experts, dy)
    want = run("moe", problem).grads
    for n, name in enumerate(("x", "topk_weights")):
        assert_same_bits(each[n].reshape(want[name].shape), want[name], name)
        assert_same_bits(together[n].reshape(want[name].shape), want[name], name)
    for n in range(4):
        arrays = {"x": x[n], "topk_ids": ids[n], "topk_weights": weights[n], "dy": dy[n]}
        alone = run("moe", problem.replace(**jax.tree.map(np.asarray, arrays))).grads
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
        call = lambda x, ring: layer(how, problem.config, ring, problem.topk_ids, operands | {"x": x})[0]
        with pytest.raises(NotImplementedError, match=r"a stream cannot be vmapped\. Use sm\.moe"):
            jax.jit(jax.vmap(call, in_axes=(0, None)))(jnp.stack([operands["x"]] * 2), ring)
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
    loss = lambda x: jnp.vdot(sm.moe(x, *problem.args[1:], **problem.kwargs), problem.dy)
    assert_same_bits(jax.grad(loss)(jnp.asarray(problem.x)), want.grads["x"])


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
@pytest.mark.parametrize("save_gate_up", [False, True])
def test_export_round_trip_with_gradient(rng, save_gate_up):
    problem = oracle.make_problem(rng, **F32, masked=0.1)
    want, options = run("moe", problem), dict(config=problem.config, save_gate_up=save_gate_up)
    call = jax.jit(lambda x, w, a, b: sm.moe(x, problem.topk_ids, w, a, b, **options))
    args = (problem.x, *problem.args[2:])
    exported = export.export(call, disabled_checks=_checks(*TARGETS, *KEPT_TARGETS))(*args)
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
