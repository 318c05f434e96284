"""Gradients in programs: finite differences, scans over layers, remat, accumulation, reverse mode only."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_streammoe as sm
from tests.helpers import oracle
from tests.helpers.layers import HOWS, NAMES, RINGLESS, assert_same_bits, layer, ring_for, run

SIZES = {"T": 22, "H": 40, "I": 24, "E": 6, "K": 3, "block_m": 8}
F32 = SIZES | {"dtype": jnp.float32}
each_how = pytest.mark.parametrize("how", HOWS)


def operands_of(problem):
    return {n: jnp.asarray(getattr(problem, n)) for n in NAMES if getattr(problem, n) is not None}


def loss_of(problem, how="moe"):
    """A scalar function of the operands, non-linear in y."""

    def loss(operands):
        y, _, _ = layer(how, problem.config, None, problem.topk_ids, operands)
        return jnp.sum(jnp.sin(y) * problem.dy)

    return loss


@pytest.mark.core
@pytest.mark.parametrize("activation", ["swiglu", "swigluoai", "geglu", "silu", "gelu", "relu2"])
def test_against_finite_differences(rng, activation):
    """Along random directions, of the library's own forward: nothing here knows its formula."""
    problem = oracle.make_problem(rng, **F32, activation=activation, use_bias=True, masked=0.2, duplicates=True)
    grads = run("moe", problem).grads
    for name in grads:
        primal = getattr(problem, name).astype(np.float64)
        direction = rng.standard_normal(primal.shape)
        direction *= 1 / np.sqrt(np.mean(direction**2))

        def value(step, name=name, primal=primal, direction=direction):
            moved = problem.replace(**{name: (primal + step * direction).astype(np.float32)})
            return np.vdot(run("moe", moved, grad=False).y.astype(np.float64), problem.dy)

        size = np.sqrt(np.mean(primal**2))
        got = np.vdot(grads[name].astype(np.float64), direction)
        # Richardson: the error of a central difference of steps h and h/2 is O(h^4).
        h = 0.02 * size
        slopes = [(value(s) - value(-s)) / (2 * s) for s in (h, h / 2)]
        numeric = (4 * slopes[1] - slopes[0]) / 3
        scale = np.sqrt(np.sum(grads[name].astype(np.float64) ** 2))  # of a random direction's derivative
        assert abs(got - numeric) < 1e-4 * scale, (name, got, numeric, scale)
        assert scale > 1


@pytest.mark.core
@each_how
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_value_and_grad_with_a_ring_as_aux(rng, how, dtype):
    problem = oracle.make_problem(rng, **SIZES, dtype=dtype, masked=0.1)
    want = run("moe", problem)

    @functools.partial(jax.jit, donate_argnames="ring")
    def step(operands, ring):
        def loss(operands):
            y, _, out = layer(how, problem.config, ring, problem.topk_ids, operands)
            return jnp.sum(y.astype(jnp.float32) * problem.dy.astype(jnp.float32)), (y, out)

        (value, (y, ring)), grads = jax.value_and_grad(loss, has_aux=True)(operands)
        return value, y, grads, ring

    ring = None if how == "moe" else ring_for(problem.config)
    value, y, grads, ring = step(operands_of(problem), ring)
    assert_same_bits((y, grads), (want.y, want.grads))
    np.testing.assert_allclose(
        value, np.vdot(want.y.astype(np.float64), problem.dy.astype(np.float64)), rtol=1e-5, atol=1e-3
    )
    if ring is not None:
        sm.close_ring(ring)


def layers_problem(rng, num_layers=2, **config):
    """A problem and stacks of expert weights, each layer's scaled so that activations stay near 1."""
    problem = oracle.make_problem(rng, **F32, **config)
    others = [oracle.make_problem(rng, **F32, **config) for _ in range(num_layers)]
    stacks = {n: np.stack([getattr(p, n) for p in others]) for n in ("topk_weights", "w_gate_up", "w_down")}
    return problem, stacks, np.stack([p.topk_ids for p in others])


def block(how, config, policy, x, ring, weights, ids):
    """A residual block whose layer output feeds something non-linear: y is needed in the backward."""

    def inner(x, ring, weights):
        y, _, ring = layer(how, config, ring, ids, {"x": x, **weights})
        return x + jnp.tanh(y), ring

    if policy is not None:
        inner = jax.checkpoint(inner, policy=None if policy == "nothing" else policy)
    return inner(x, ring, weights)


@functools.partial(jax.jit, static_argnames=("how", "config", "policy", "scan"), donate_argnames="ring")
def stack_step(how, config, policy, scan, x, ring, stacks, ids, dy):
    def forward(x, stacks):
        if scan:

            def body(carry, layer_arrays):
                return block(how, config, policy, *carry, *layer_arrays), None

            (y, out), _ = lax.scan(body, (x, ring), (stacks, ids))
            return y, out
        y, out = x, ring
        for n in range(ids.shape[0]):
            y, out = block(how, config, policy, y, out, jax.tree.map(lambda a, n=n: a[n], stacks), ids[n])
        return y, out

    y, pullback, out = jax.vjp(forward, x, stacks, has_aux=True)
    return y, pullback(dy), out


def reference_stack(problem, stacks, ids):
    """The same stack in JAX's own arithmetic."""

    def forward(x, stacks):
        for n in range(ids.shape[0]):
            w = jax.tree.map(lambda a, n=n: a[n], stacks)
            y = sm.reference(x, ids[n], w["topk_weights"], w["w_gate_up"], w["w_down"], config=problem.config)
            x = x + jnp.tanh(y)
        return x

    @jax.jit
    def step(x, stacks):
        y, pullback = jax.vjp(forward, x, stacks)
        return y, pullback(problem.dy)

    return step(problem.x, stacks)


@pytest.mark.core
@each_how
@pytest.mark.parametrize(
    ("scan", "policy"), [(False, None), (False, "names"), (True, None), (True, "names"), (True, "names+dots")]
)
def test_stacks_of_layers_with_and_without_remat(rng, how, scan, policy):
    problem, stacks, ids = layers_problem(rng, masked=0.1)
    base = {"names": None, "names+dots": jax.checkpoint_policies.dots_saveable}
    rule = None if policy is None else sm.checkpoint_policy(base[policy])
    ring = None if how == "moe" else ring_for(problem.config)
    y, (dx, grads), ring = stack_step(how, problem.config, rule, scan, problem.x, ring, stacks, ids, problem.dy)
    want_y, (want_dx, want_grads) = reference_stack(problem, stacks, ids)
    for name, got, want in (
        ("y", y, want_y), ("dx", dx, want_dx), *((n, grads[n], want_grads[n]) for n in grads)
    ):  # fmt: skip
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4 * np.abs(want).max(), err_msg=name)
        assert np.abs(np.asarray(got)).max() > 0.1, name
    if ring is not None:
        ring.check()
        sm.close_ring(ring)


@pytest.mark.core
@pytest.mark.parametrize(("how", "forward", "backward"), [
    ("moe", "forward", "backward"), ("kept", "forward_kept", "backward_kept"),
])  # fmt: skip
def test_remat_changes_no_bit_and_runs_the_experts_as_often_as_it_must(rng, how, forward, backward):
    problem, stacks, ids = layers_problem(rng, masked=0.1)
    calls, results = {}, {}
    for name, policy in (("none", None), ("nothing", "nothing"), ("names", sm.checkpoint_policy())):
        args = (how, problem.config, policy, False, problem.x, None, stacks, ids, problem.dy)
        results[name] = stack_step(*args)
        text = stack_step.lower(*args).as_text()
        calls[name] = text.count(f"@streammoe_{forward}_v1")
        assert calls[name] == text.count("@streammoe_forward")
        assert text.count(f"@streammoe_{backward}_v1") == text.count("@streammoe_backward") == 2
    assert_same_bits(results["nothing"], results["none"])
    assert_same_bits(results["names"], results["none"])
    assert calls == {"none": 2, "nothing": 4, "names": 2}


@pytest.mark.core
def test_gate_and_up_are_kept_for_a_gradient_only(rng):
    problem = oracle.make_problem(rng, **F32)
    operands, call = operands_of(problem), functools.partial(layer, "kept", problem.config, None, problem.topk_ids)
    text = jax.jit(lambda operands: call(operands)[0]).lower(operands).as_text()
    assert "@streammoe_forward_v1" in text and "forward_kept" not in text
    residuals = jax.eval_shape(lambda operands: jax.vjp(lambda o: call(o)[0], operands)[1], operands)
    width = problem.config.top_k * problem.config.gate_up_width
    assert sum(a.shape == (SIZES["T"], width) for a in jax.tree.leaves(residuals)) == 1


@pytest.mark.core
def test_scan_over_layers_that_keep_gate_and_up(rng):
    problem, stacks, ids = layers_problem(rng, masked=0.1)
    results = [
        stack_step(how, problem.config, policy, scan, problem.x, None, stacks, ids, problem.dy)
        for how in ("moe", "kept") for scan in (False, True) for policy in (None, sm.checkpoint_policy())
    ]  # fmt: skip
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.core
@each_how
def test_gradient_accumulation_in_a_scan(rng, how):
    """The mean over micro-batches, one ring threaded through scan(value_and_grad)."""
    problem = oracle.make_problem(rng, **F32, masked=0.1)
    batches = [oracle.make_problem(rng, **F32, masked=0.1) for _ in range(4)]
    weights = {n: getattr(problem, n) for n in ("w_gate_up", "w_down")}
    stacked = jax.tree.map(lambda *a: np.stack(a), *((p.x, p.topk_ids, p.topk_weights, p.dy) for p in batches))

    @functools.partial(jax.jit, donate_argnames="ring")
    def accumulate(weights, ring, stacked):
        def micro(carry, batch):
            ring, total = carry
            x, ids, topk_weights, dy = batch

            def loss(weights):
                y, _, out = layer(how, problem.config, ring, ids, {"x": x, "topk_weights": topk_weights, **weights})
                return jnp.sum(y * dy), out

            (value, ring), grads = jax.value_and_grad(loss, has_aux=True)(weights)
            return (ring, jax.tree.map(jnp.add, total, grads)), value

        return lax.scan(micro, (ring, jax.tree.map(jnp.zeros_like, weights)), stacked)

    ring = None if how == "moe" else ring_for(problem.config)
    (ring, total), values = accumulate(weights, ring, stacked)
    each = [run("moe", p.replace(**weights)) for p in batches]
    for name in weights:
        want = functools.reduce(np.add, (r.grads[name] for r in each), np.zeros_like(weights[name]))
        assert_same_bits(total[name], want, name)
    losses = [np.vdot(r.y, p.dy) for r, p in zip(each, batches, strict=True)]
    np.testing.assert_allclose(values, losses, rtol=1e-4, atol=1e-3)
    if ring is not None:
        sm.close_ring(ring)


@pytest.mark.core
@pytest.mark.parametrize("how", ["moe", "overlap"])
def test_the_gradient_reaches_the_router(rng, how):
    problem = oracle.make_problem(rng, **F32)
    config, w_router = problem.config, rng.standard_normal((40, 6)).astype(np.float32) / np.sqrt(np.float32(40))

    @functools.partial(jax.jit, donate_argnames="ring")
    def step(x, w_router, ring):
        def forward(x, w_router):
            def route(x_c, w):
                return sm.route_topk(x_c @ w, config)

            if how == "moe":
                routed = route(x, w_router)
                y = sm.moe(x, routed.ids, routed.weights, *problem.args[3:], config=config)
                return (y, routed.aux), ring
            y, out, info = sm.stream_moe(
                x, route, *problem.args[3:], config=config, ring=ring, route_args=(w_router,), policy=how, chunks=None
            )
            return (y, info.aux), out

        (y, aux), pullback, out = jax.vjp(forward, x, w_router, has_aux=True)
        return y, aux, pullback((problem.dy, jnp.ones_like(aux) * aux)), out

    @jax.jit
    def want_step(x, w_router):
        def forward(x, w_router):
            routed = sm.route_topk(x @ w_router, config)
            return sm.reference(x, routed.ids, routed.weights, *problem.args[3:], config=config), routed.aux

        (y, aux), pullback = jax.vjp(forward, x, w_router)
        return y, aux, pullback((problem.dy, aux))

    ring = None if how == "moe" else ring_for(config)
    *got, ring = step(problem.x, w_router, ring)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want_step(problem.x, w_router)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())
    if ring is not None:
        sm.close_ring(ring)


FIRST_ORDER = "the gradient of the expert layer is first order only: its backward is a kernel"


@pytest.mark.core
@pytest.mark.parametrize("outer", ["x", "topk_weights", "w_gate_up", "w_down", "b_gate_up", "b_down"])
@pytest.mark.parametrize("inner", ["x", "w_down"])
@pytest.mark.parametrize("how", ["moe", "kept"])
def test_second_order_is_refused_for_every_operand(rng, how, inner, outer):
    problem = oracle.make_problem(rng, **F32, use_bias=True)
    operands, loss = operands_of(problem), loss_of(problem, how)

    def slope(value):
        return jnp.sum(jax.grad(lambda v: loss(operands | {outer: value} | {inner: v}))(
            value if inner == outer else operands[inner]))  # fmt: skip

    with pytest.raises(NotImplementedError, match=FIRST_ORDER):
        jax.grad(slope)(operands[outer])


@pytest.mark.core
@pytest.mark.parametrize("how", [*HOWS, "kept"])
def test_the_value_of_an_inner_vjp_has_no_gradient_of_zeros(rng, how):
    problem = oracle.make_problem(rng, **F32)
    ring = None if how in RINGLESS else ring_for(problem.config)

    @functools.partial(jax.jit, donate_argnames="ring")
    def slope(x, ring):
        def value(x):
            operands = operands_of(problem)
            call = lambda x: layer(how, problem.config, ring, problem.topk_ids, operands | {"x": x})[::2]
            y, _, out = jax.vjp(call, x, has_aux=True)
            return jnp.vdot(y, problem.dy), out

        return jax.grad(value, has_aux=True)(x)

    with pytest.raises(NotImplementedError, match=FIRST_ORDER):
        slope(problem.x, ring)
    if ring is not None:
        sm.close_ring(ring)


def test_second_order_through_the_cotangent_and_hessian_are_refused(rng):
    problem = oracle.make_problem(rng, **F32)
    operands, loss = operands_of(problem), loss_of(problem)

    def with_cotangent(dy):
        _, pullback = jax.vjp(lambda x: layer("moe", problem.config, None, problem.topk_ids, operands | {"x": x})[0],
                              operands["x"])  # fmt: skip
        return jnp.sum(pullback(dy)[0])

    with pytest.raises(NotImplementedError, match=FIRST_ORDER):
        jax.grad(with_cotangent)(jnp.asarray(problem.dy))
    with pytest.raises(NotImplementedError, match=FIRST_ORDER):
        jax.hessian(lambda x: loss(operands | {"x": x}))(operands["x"])


@pytest.mark.core
@pytest.mark.parametrize("name", ["x", "topk_weights", "w_down"])
def test_forward_mode_is_refused_with_jaxs_text(rng, name):
    problem = oracle.make_problem(rng, **F32)
    operands, loss = operands_of(problem), loss_of(problem)
    with pytest.raises(TypeError, match="can't apply forward-mode autodiff"):
        jax.jvp(lambda v: loss(operands | {name: v}), (operands[name],), (operands[name],))


@pytest.mark.parametrize("how", ["serial", "overlap"])
def test_forward_mode_over_a_stream_is_refused(rng, how):
    problem = oracle.make_problem(rng, **F32)
    with ring_for(problem.config) as ring:

        def f(ring, x):
            return layer(how, problem.config, ring, problem.topk_ids, operands_of(problem) | {"x": x})[0]

        with pytest.raises(TypeError, match="can't apply forward-mode autodiff"):
            jax.jit(lambda x, ring: jax.jvp(functools.partial(f, ring), (x,), (x,)))(problem.x, ring)


@pytest.mark.core
def test_only_what_is_asked_for_is_differentiated(rng):
    """stop_gradient, integer ids and has_aux behave as with any JAX function."""
    problem = oracle.make_problem(rng, **F32)
    operands, loss = operands_of(problem), loss_of(problem)
    everything = jax.jit(jax.grad(loss))(operands)
    for name in operands:
        alone = jax.jit(jax.grad(lambda v, name=name: loss(operands | {name: v})))(operands[name])
        np.testing.assert_allclose(alone, everything[name], rtol=1e-5, atol=1e-5)
        stopped = jax.grad(lambda o, name=name: loss(o | {name: lax.stop_gradient(o[name])}))(operands)
        assert not stopped[name].any()
    ids_gradient = jax.grad(
        lambda ids: jnp.sum(sm.moe(operands["x"], ids, *problem.args[2:], config=problem.config)), allow_int=True
    )(jnp.asarray(problem.topk_ids))
    assert ids_gradient.dtype == jax.dtypes.float0
