"""`expert_parallel` on global arrays: any mesh and placement gives one device's y, d_x and d_topk_weights to the bit.

Weight gradients are sums over ranks, so they are compared with the float64 oracle. Programs keep the ring in place and
gather nothing that already lies right. What is refused, and how, is in test_expert_parallel_errors.py.
"""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_streammoe as sm
from tests.helpers import oracle, ranks
from tests.helpers.meshes import E, H, K, mesh_of, names, problem_of, ring_of

# mesh axes, the axes of the experts, how a flat token dimension lies
MESHES = {
    "ep": ({"ep": 4}, "ep", P("ep")),
    "data_ep": ({"data": 2, "ep": 2}, "ep", P(("data", "ep"))),
    "data_ep_model": ({"data": 2, "ep": 2, "model": 2}, "ep", P(("data", "ep"))),
    "ep_of_two_axes": ({"data": 2, "expert": 2}, ("data", "expert"), P(("data", "expert"))),
}
TYPES = [AxisType.Auto, AxisType.Explicit]


def set_mesh(mesh, wanted):
    return jax.set_mesh(mesh) if wanted else contextlib.nullcontext()


def lay_like(ep, value, like):
    """On an Explicit mesh two operands of a product must lie alike."""
    is_explicit = ep.mesh.axis_types[0] == AxisType.Explicit
    return jax.sharding.reshard(value, jax.typeof(like).sharding) if is_explicit else value


def gradients(ep):
    """jitted (x, ids, weights, experts, dy, ring, num_valid) -> y, ring, gradients of x, weights and experts."""

    def run(x, ids, weights, experts, dy, ring, num_valid):
        def forward(x, weights, experts, ring):
            w1, w2, b1, b2 = experts
            y, ring, _ = ep.moe(x, ids, weights, w1, w2, b_gate_up=b1, b_down=b2, ring=ring, num_valid=num_valid)
            return jnp.sum(y * lay_like(ep, dy, y)), (y, ring)

        grad = jax.value_and_grad(forward, argnums=(0, 1, 2), has_aux=True)
        (_, (y, ring)), grads = grad(x, weights, experts, ring)
        return y, ring, grads

    return jax.jit(run, donate_argnames="ring")


def moe_gradients(ep):
    jitted = gradients(ep)
    # A ring must not be closed while a call on it runs.
    return lambda *args: jax.block_until_ready(jitted(*args))


def on_one_device(problem):
    """y and its gradients of x and weights from `moe` without a mesh."""

    def forward(x, weights):
        y = sm.moe(x, problem.topk_ids, weights, problem.w_gate_up, problem.w_down, **problem.kwargs)
        return jnp.sum(y * problem.dy), y

    (_, y), grads = jax.jit(jax.value_and_grad(forward, argnums=(0, 1), has_aux=True))(problem.x, problem.topk_weights)
    return y, *grads


def place(ep, problem, how):
    """x, ids, weights, experts, dy: where the layer wants them, all on every device, FSDP-sharded, or uncommitted."""
    experts = (problem.w_gate_up, problem.w_down, problem.b_gate_up, problem.b_down)
    values = (*problem.args[:3], experts, problem.dy)
    if how == "uncommitted":
        return jax.tree.map(jnp.asarray, values)
    put = lambda spec: lambda a: jax.device_put(a, NamedSharding(ep.mesh, spec))
    tokens = put(ep.token_spec if how != "replicated" else P())
    of_experts = {"sharded": ep.weight_spec, "replicated": P(), "fsdp": P(ep.weight_spec[0], "data")}[how]
    x, ids, weights, experts, dy = values
    if how == "fsdp":  # biases have no second dimension to shard
        experts = (*map(put(of_experts), experts[:2]), *jax.tree.map(put(ep.weight_spec), experts[2:]))
    else:
        experts = jax.tree.map(put(of_experts), experts)
    return tokens(x), tokens(ids), tokens(weights), experts, tokens(dy)


CASES = [
    ("ep", "sharded", AxisType.Auto, False, True),
    ("ep", "uncommitted", AxisType.Auto, True, False),
    ("ep", "sharded", AxisType.Explicit, True, True),
    ("ep", "uncommitted", AxisType.Explicit, False, True),
    ("data_ep", "fsdp", AxisType.Auto, False, True),
    ("data_ep", "replicated", AxisType.Explicit, True, True),
    ("data_ep", "fsdp", AxisType.Explicit, False, False),
    ("data_ep_model", "sharded", AxisType.Auto, True, True),
    ("data_ep_model", "replicated", AxisType.Explicit, False, True),
    ("data_ep_model", "sharded", AxisType.Auto, False, False),
    ("ep_of_two_axes", "sharded", AxisType.Auto, False, True),
    ("ep_of_two_axes", "sharded", AxisType.Explicit, True, True),
]


@pytest.mark.parametrize(("mesh", "how", "axis_type", "in_set_mesh", "check_vma"), CASES)
@pytest.mark.parametrize("transport", ["pull", "xla"])
def test_moe_and_its_gradients(rng, mesh, how, axis_type, in_set_mesh, check_vma, transport):
    axes, axis_name, token_spec = MESHES[mesh]
    problem = problem_of(rng, use_bias=True, masked=0.1)
    ep = sm.expert_parallel(
        problem.config, mesh=mesh_of(axes, axis_type), axis_name=axis_name, token_spec=token_spec, transport=transport,
        check_vma=check_vma,
    )  # fmt: skip
    ring = ring_of(ep) if transport == "pull" else None
    with set_mesh(ep.mesh, in_set_mesh), ring or contextlib.nullcontext():
        y, _, (dx, d_weights, d_experts) = moe_gradients(ep)(*place(ep, problem, how), ring, None)
    for what, got, want in zip(("y", "d_x", "d_topk_weights"), (y, dx, d_weights), on_one_device(problem), strict=True):
        ranks.assert_bits(got, want, what)
    want = oracle.backward(problem)
    for what, got in zip(("w_gate_up", "w_down", "b_gate_up", "b_down"), d_experts, strict=True):
        oracle.assert_close(what, got, want[what], jnp.float32, 64)


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_bits_do_not_depend_on_the_number_of_ranks(rng, num_ranks):
    problem = problem_of(rng, masked=0.1)
    ep = sm.expert_parallel(problem.config, mesh=mesh_of({"ep": num_ranks}))
    with ring_of(ep) as ring:
        y, _, (dx, d_weights, _) = moe_gradients(ep)(*place(ep, problem, "sharded"), ring, None)
    for got, want in zip((y, dx, d_weights), on_one_device(problem), strict=True):
        ranks.assert_bits(got, want)


def test_num_valid_masks_the_tail_of_each_shard(rng):
    problem, valid = problem_of(rng), np.array([6, 0, 1, 4], np.int32)
    exists = (np.arange(6)[None] < valid[:, None]).reshape(-1, 1)
    masked = problem.replace(topk_ids=np.where(exists, problem.topk_ids, -1).astype(np.int32))
    ep = sm.expert_parallel(problem.config, mesh=mesh_of({"ep": 4}))
    with ring_of(ep) as ring:
        y, _, (dx, d_weights, _) = moe_gradients(ep)(*place(ep, problem, "sharded"), ring, jnp.asarray(valid))
    for got, want in zip((y, dx, d_weights), on_one_device(masked), strict=True):
        ranks.assert_bits(got, want)
    assert not np.asarray(dx)[~exists[:, 0]].any() and np.asarray(dx)[exists[:, 0]].all()


SPECS = {
    "batch": ({"ep": 4}, P("ep")),
    "sequence": ({"ep": 4}, P(None, "ep")),
    "both": ({"data": 2, "ep": 2}, P("data", "ep")),
}


def stream_loss(ep, dy, **options):
    """(x [B, S, H], w_router, experts, ring) -> sum(y * dy) + balance, (y, ring); the router is inside the stream."""
    config = ep.config

    def route(x_c, w_router):
        routed = sm.route_topk(x_c @ w_router, config)
        return routed._replace(aux=routed.aux)

    def loss(x, w_router, experts, ring):
        y, ring, info = ep.stream(x, route, *experts, ring=ring, route_args=(w_router,), **options)
        return jnp.sum(y * lay_like(ep, dy, y)) + jnp.sum(info.aux**2), (y, ring)

    return loss


@pytest.mark.parametrize("axis_type", TYPES, ids=["auto", "explicit"])
@pytest.mark.parametrize("lies", SPECS)
def test_stream_with_a_router_on_batches_of_sequences(rng, lies, axis_type):
    axes, token_spec = SPECS[lies]
    problem = problem_of(rng, T=64)
    x, dy = (jnp.asarray(a.reshape(4, 16, H)) for a in (problem.x, problem.dy))
    w_router = jnp.asarray(rng.standard_normal((H, E)), jnp.float32)
    ep = sm.expert_parallel(problem.config, mesh=mesh_of(axes, axis_type), token_spec=token_spec)
    experts = (jnp.asarray(problem.w_gate_up), jnp.asarray(problem.w_down))

    def reference(x, w_router, experts):
        routed = sm.route_topk(x @ w_router, problem.config)
        y = sm.moe(x, routed.ids, routed.weights, *experts, config=problem.config)
        return jnp.sum(y * dy) + jnp.sum(routed.aux**2), y

    (_, want_y), want = jax.jit(jax.value_and_grad(reference, (0, 1, 2), has_aux=True))(x, w_router, experts)
    loss = stream_loss(ep, dy, chunks=None)
    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True), donate_argnums=3)
    with ring_of(ep) as ring:
        (_, (y, _)), got = jax.block_until_ready(run(x, w_router, experts, ring))
    # A router's product has other rows per call here, so its bits may differ: close, not equal.
    oracle.assert_close("y", y, np.asarray(want_y, np.float64), jnp.float32, 64)
    for what, a, b in zip(
        ("x", "w_router", "w_gate_up", "w_down"), jax.tree.leaves(got), jax.tree.leaves(want), strict=True
    ):
        oracle.assert_close(what, a, np.asarray(b, np.float64), jnp.float32, 64)


def test_weight_gradients_do_not_depend_on_chunks_and_slots(rng):
    problem = problem_of(rng, T=64)
    ep = sm.expert_parallel(problem.config, mesh=mesh_of({"ep": 4}))
    results = []
    for options in (
        {"chunk_tokens": 16, "num_slots": 1},
        {"chunk_tokens": 4, "num_slots": 4},
        {"chunk_tokens": 3, "num_slots": 6},
    ):

        def loss(experts, ring):
            args = (problem.topk_ids, problem.topk_weights)
            y, ring, _ = ep.stream(problem.x, ranks.given, *experts, ring=ring, token_args=args, chunks=None)
            return jnp.sum(y * problem.dy), ring

        with ring_of(ep, **options) as ring:
            run = jax.jit(jax.grad(loss, has_aux=True), donate_argnums=1)
            results.append(jax.block_until_ready(run((problem.w_gate_up, problem.w_down), ring))[0])
    for other in results[1:]:
        jax.tree.map(ranks.assert_bits, other, results[0])


@pytest.mark.parametrize("layers", ["unrolled", "scan"])
@pytest.mark.parametrize("axis_type", TYPES, ids=["auto", "explicit"])
def test_ring_ref_outside_of_shard_map_under_full_remat(rng, axis_type, layers):
    problem, L = problem_of(rng), 3
    ep = sm.expert_parallel(problem.config, mesh=mesh_of({"ep": 4}, axis_type))
    x, ids, weights, (w1, w2, _, _), dy = place(ep, problem, "sharded")
    scales = jnp.asarray(rng.random(L) + 0.5, jnp.float32)

    def loss(w1, w2, ring, remat):
        def block(h, scale):
            y, _, _ = ep.stream(h, ranks.given, w1 * scale, w2, ring=ring, token_args=(ids, weights), chunks=None)
            return jnp.tanh(y)

        f = jax.checkpoint(block) if remat else block
        if layers == "scan":
            h, _ = jax.lax.scan(lambda h, scale: (f(h, scale), None), x, scales)
        else:
            h = functools.reduce(f, scales, x)
        return jnp.sum(h * dy)

    def reference(w1, w2):
        h = problem.x
        for n in range(L):
            h = jnp.tanh(sm.moe(h, problem.topk_ids, problem.topk_weights, w1 * scales[n], w2, config=problem.config))
        return jnp.sum(h * problem.dy)

    want = jax.jit(jax.grad(reference, (0, 1)))(problem.w_gate_up, problem.w_down)
    run = jax.jit(jax.grad(loss, (0, 1)), static_argnums=3)
    with ring_of(ep, mutable=True) as ring:
        plain, full = (jax.block_until_ready(run(w1, w2, ring, remat)) for remat in (False, True))
        ring.check()
    for a, b, c in zip(plain, full, want, strict=True):
        ranks.assert_bits(a, b, "with and without remat")
        oracle.assert_close("gradient", a, np.asarray(c, np.float64), jnp.float32, 256)


@pytest.mark.core
@pytest.mark.parametrize("call", ["moe", "stream", "gradient"])
def test_ring_in_place_and_nothing_gathered(rng, call):
    problem = problem_of(rng)
    ep = sm.expert_parallel(problem.config, mesh=mesh_of({"data": 2, "ep": 2}), token_spec=P(("data", "ep")))
    args = place(ep, problem, "sharded")
    x, ids, weights, experts, _ = args
    with ring_of(ep) as ring:
        if call == "moe":
            jitted, args = jax.jit(ep.moe, donate_argnames="ring"), (x, ids, weights, *experts[:2])
        elif call == "stream":
            jitted = jax.jit(functools.partial(ep.stream, route=ranks.given, chunks=None), donate_argnames="ring")
            args = ()
        else:
            jitted, args = gradients(ep), (*args, ring, None)
        if call == "gradient":
            kwargs = {}
        elif call == "stream":
            kwargs = dict(x=x, w_gate_up=experts[0], w_down=experts[1], token_args=(ids, weights), ring=ring)
        else:
            kwargs = {"ring": ring}
        sm.check_program(jitted, *args, **kwargs)
        text = jitted.lower(*args, **kwargs).compile().as_text()
        assert "streammoe_" in text and "all-gather" not in text
        # Expert gradients are summed over data; tokens move by the ring.
        assert ("all-reduce" in text) == (call == "gradient")
        jax.block_until_ready(jitted(*args, **kwargs))


@pytest.mark.parametrize("check_vma", [True, False])
def test_stream_moe_in_a_users_shard_map(rng, check_vma):
    problem = problem_of(rng)
    mesh = mesh_of({"data": 2, "ep": 2})
    ring = sm.make_ring(problem.config, mesh=mesh, chunk_tokens=4, num_slots=2, name=next(names), timeout_s=20)
    tokens, experts, whole = P(("data", "ep")), P("ep"), P(("data", "ep"))

    def rank(x, ids, weights, w1, w2, ring):
        y, ring, _ = sm.stream_moe(
            x, ranks.given, w1, w2, ring=ring, config=problem.config, token_args=(ids, weights), chunks=2
        )
        return y, ring

    layer = jax.shard_map(
        rank, mesh=mesh, in_specs=(tokens, tokens, tokens, experts, experts, whole), out_specs=(tokens, whole),
        check_vma=check_vma,
    )  # fmt: skip

    def loss(x, weights, w1, w2, ring):
        y, ring = layer(x, problem.topk_ids, weights, w1, w2, ring)
        return jnp.sum(y * problem.dy), (y, ring)

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True), donate_argnums=4)
    with ring:
        (_, (y, _)), (dx, d_weights, *d_experts) = jax.block_until_ready(run(problem.x, *problem.args[2:], ring))
    for got, want in zip((y, dx, d_weights), on_one_device(problem), strict=True):
        ranks.assert_bits(got, want)
    for got, what in zip(d_experts, ("w_gate_up", "w_down"), strict=True):
        oracle.assert_close(what, got, oracle.backward(problem)[what], jnp.float32, 64)


@pytest.mark.parametrize("transport", ["pull", "xla"])
def test_no_tokens(rng, transport):
    problem = problem_of(rng, T=0)
    ep = sm.expert_parallel(problem.config, mesh=mesh_of({"ep": 4}), transport=transport)
    ring = ring_of(ep) if transport == "pull" else None
    with ring or contextlib.nullcontext():
        y, _, (dx, d_weights, d_experts) = moe_gradients(ep)(*place(ep, problem, "sharded"), ring, None)
    assert y.shape == dx.shape == (0, H) and d_weights.shape == (0, K)
    assert not any(np.asarray(d).view(np.uint32).any() for d in jax.tree.leaves(d_experts))
