"""The `xla` transport on GPUs: the kernels between XLA's collectives give the bits of the batch-ready layer.

A mesh of one device needs one GPU, and so do ranks that are computed one after the other on it, which is what shows how
the halves treat routes of others. Two GPUs are compared with one. Gradients are values here; their bits are compared in
test_backward.py.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jax_streammoe as sm
from jax_streammoe import local, ops
from tests.helpers import oracle
from tests.helpers.ranks import assert_bits, given

pytestmark = pytest.mark.gpu

SHAPE = dict(T=44, H=40, I=24, E=8, K=3)
BIASED = ("w_gate_up", "w_down", "b_gate_up", "b_down")
PROBLEMS = {
    "small": SHAPE | dict(masked=0.1, invalid=0.1, duplicates=True),
    "biases": SHAPE | dict(use_bias=True, activation="swigluoai"),
    "ungated": SHAPE | dict(activation="relu2", use_bias=True),
    "capacity": SHAPE | dict(capacity=5, duplicates=True),
    "two tokens": SHAPE | dict(T=2),
    "more routes than lanes": SHAPE | dict(K=37, masked=0.2),
    "tails": dict(T=602, H=2888, I=712, E=6, K=2, masked=0.1),
    "many experts": dict(T=2048, H=512, I=256, E=128, K=8, masked=0.05),
}
each_problem = pytest.mark.parametrize("sizes", PROBLEMS.values(), ids=PROBLEMS.keys())
each_dtype = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])


def biases_of(problem):
    return {name: getattr(problem, name) for name in BIASED[2:] if problem.config.use_bias}


@functools.cache
def program(config, mesh, call="moe", **options):
    """jitted (x, ids, weights, w_gate_up, w_down, biases) -> y, stats without a ring."""
    ep = sm.expert_parallel(config, mesh=mesh, **options)

    def run(x, ids, weights, w_gate_up, w_down, biases):
        if call == "moe":
            y, _, info = ep.moe(x, ids, weights, w_gate_up, w_down, **biases, return_stats=True)
        else:
            y, _, info = ep.stream(
                x, given, w_gate_up, w_down, token_args=(ids, weights), **biases, return_stats=True
            )  # fmt: skip
        return y, info.stats

    return jax.jit(run)


def one_device(problem):
    """y, stats of the batch-ready layer."""
    run = jax.jit(functools.partial(sm.moe, config=problem.config, return_stats=True))
    return run(*problem.args, **biases_of(problem))


def assert_same(got, want):
    """y to the bit, and the statistics of all ranks."""
    assert_bits(got[0], want[0], "y")
    np.testing.assert_array_equal(got[1].expert_rows, want[1].expert_rows)
    assert [int(np.sum(c)) for c in got[1][1:]] == [int(c) for c in want[1][1:]]


@pytest.mark.parametrize("call", ["moe", "stream"])
@each_dtype
@each_problem
def test_one_rank_has_the_bits_of_the_layer(rng, mesh_of, sizes, dtype, call):
    problem = oracle.make_problem(rng, **sizes, dtype=dtype)
    got = program(problem.config, mesh_of(1), call)(*problem.args, biases_of(problem))
    assert_same(got, one_device(problem))
    assert np.asarray(got[0]).any()


@functools.partial(jax.jit, static_argnames=("config", "num_ranks", "poison"))
def rank_by_rank(config, num_ranks, x, ids, weights, experts, poison=False):
    """What the ranks of a mesh would compute of all tokens, on one device -> y, rows [R, T, K, H], expert_rows [E].

    poison: a token that a rank does not need is NaN there, which is stricter than the zeros of the exchange.
    """
    num_local = config.num_experts // num_ranks
    spec = ops.LayerSpec(config, num_local)
    ids = jnp.where((ids >= 0) & (ids < config.num_experts), ids, -1)
    rows, dropped, expert_rows = [], [], []
    for rank in range(num_ranks):
        mine = (ids >= 0) & (ids // num_local == rank)
        local_ids = jnp.where(mine, ids - rank * num_local, -1)
        x_in = jnp.where(jnp.any(mine, 1)[:, None], x, jnp.nan).astype(x.dtype) if poison else x
        of_rank = [e if e.size == 1 else e[rank * num_local : (rank + 1) * num_local] for e in experts]
        for array, out in zip(local.rows(spec, x_in, local_ids, of_rank), (rows, dropped, expert_rows), strict=True):
            out.append(array)
    owner = jnp.maximum(ids, 0)[None] // num_local
    rows, dropped = jnp.stack(rows), jnp.stack(dropped)
    at_owner = jnp.take_along_axis(rows, owner[..., None], axis=0)[0]
    y = local.combine(spec, at_owner, ids, weights, jnp.take_along_axis(dropped, owner, axis=0)[0])
    return y, rows, dropped, jnp.concatenate(expert_rows)


def experts_of(problem):
    return tuple(map(jnp.asarray, ops.pack_experts(*(getattr(problem, name) for name in BIASED))))


@pytest.mark.parametrize("num_ranks", [2, 4])
@each_dtype
@each_problem
def test_ranks_one_after_the_other(rng, sizes, dtype, num_ranks):
    if sizes["E"] % num_ranks:
        num_ranks = sizes["E"]  # a rank per expert
    problem = oracle.make_problem(rng, **sizes, dtype=dtype)
    arrays = (*problem.args[:3], experts_of(problem))
    y, rows, dropped, expert_rows = rank_by_rank(problem.config, num_ranks, *arrays)
    want, stats = one_device(problem)
    assert_bits(y, want)
    np.testing.assert_array_equal(expert_rows, stats.expert_rows)
    taken, kept = np.asarray(rows).any(-1), oracle.kept_routes(problem)
    np.testing.assert_array_equal(taken.sum(0), kept)  # once if it is taken, and zeros at all other ranks
    assert set(np.unique(dropped)) <= {0, 1} and np.sum(dropped) == int(stats.dropped_routes)
    assert (np.sum(dropped) > 0) == (problem.config.capacity is not None)
    again = rank_by_rank(problem.config, num_ranks, *arrays, poison=True)
    for a, b in zip(again, (y, rows, dropped, expert_rows), strict=True):
        assert_bits(a, b, "with NaN where nothing is needed")


@each_dtype
def test_a_bad_token_affects_its_row_only(rng, mesh_of, dtype):
    problem = oracle.make_problem(rng, **SHAPE, dtype=dtype)
    problem.topk_ids[3] = -1
    bad = problem.replace(x=problem.x.copy(), topk_weights=problem.topk_weights.copy())
    bad.x[[3, 5]], bad.topk_weights[3] = np.nan, np.nan
    run = program(problem.config, mesh_of(1))
    (clean, _), (y, _) = (run(*p.args, {}) for p in (problem, bad))
    others = np.arange(SHAPE["T"]) != 5
    assert_bits(np.asarray(y)[others], np.asarray(clean)[others])
    assert not np.isfinite(np.asarray(y, np.float32)[5]).any() and not np.asarray(y)[3].any()


def test_a_rank_that_gets_nothing(rng, mesh_of):
    problem = oracle.make_problem(rng, **SHAPE, dtype=jnp.bfloat16, ids=np.full((SHAPE["T"], SHAPE["K"]), -1))
    y, stats = program(problem.config, mesh_of(1))(*problem.args, {})
    assert not np.asarray(y).view(np.uint16).any() and not np.asarray(stats.expert_rows).any()
    empty = oracle.make_problem(rng, **SHAPE | {"T": 0}, dtype=jnp.bfloat16)
    _, rows, dropped, expert_rows = rank_by_rank(empty.config, 4, *empty.args[:3], experts_of(empty))
    assert rows.shape == (4, 0, SHAPE["K"], SHAPE["H"]) and dropped.shape == (4, 0, SHAPE["K"])
    np.testing.assert_array_equal(expert_rows, np.zeros(SHAPE["E"], np.int32))


def test_replays_follow_the_routing(rng):
    """Captured as graphs: every replay clears the rows and reads the routing of its turn."""
    problem = oracle.make_problem(rng, **PROBLEMS["many experts"], capacity=100, dtype=jnp.bfloat16)
    x, ids, weights = map(jnp.asarray, problem.args[:3])
    args = (x, ids, weights, experts_of(problem))
    run = rank_by_rank.lower(problem.config, 2, *args).compile({"xla_gpu_graph_min_graph_size": 1})
    routings = [jnp.roll(ids, n, axis=0).at[n::7].set(-1) for n in range(3)]
    uncaptured = rank_by_rank.lower(problem.config, 2, *args).compile({"xla_gpu_enable_command_buffer": ""})
    want = [uncaptured(x, r, *args[2:]) for r in routings]
    for turn in range(12):
        for a, b in zip(run(x, routings[turn % 3], *args[2:]), want[turn % 3], strict=True):
            assert_bits(a, b, f"turn {turn}")


def gradients(problem, mesh, **options):
    """y and the gradients of x, topk_weights, and the experts."""
    ep = sm.expert_parallel(problem.config, mesh=mesh, **options)
    experts = [getattr(problem, name) for name in BIASED if getattr(problem, name) is not None]

    def loss(x, weights, experts):
        biases = dict(zip(BIASED[2:], experts[2:], strict=False))
        y, _, _ = ep.moe(x, problem.topk_ids, weights, *experts[:2], **biases)
        dy = jnp.asarray(problem.dy)
        if ep.mesh.axis_types[0] == AxisType.Explicit:
            dy = jax.sharding.reshard(dy, jax.typeof(y).sharding)
        return jnp.sum(y * dy), y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(problem.x, problem.topk_weights, experts)
    dx, d_weights, d_experts = grads
    return y, {"x": dx, "topk_weights": d_weights} | dict(zip(BIASED, d_experts, strict=False))


def assert_gradients(problem, got):
    depth = problem.config.hidden + problem.config.intermediate + problem.topk_ids.size
    for name, want in oracle.backward(problem).items():
        oracle.assert_close(name, got[name], want, problem.config.dtype, depth)


GRADIENTS = {
    "plain": SHAPE | dict(masked=0.1, invalid=0.1),
    "biases": SHAPE | dict(use_bias=True, activation="swigluoai"),
    "capacity": SHAPE | dict(capacity=5, use_bias=True),
}
each_gradient = pytest.mark.parametrize("sizes", GRADIENTS.values(), ids=GRADIENTS.keys())
all_dtypes = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
each_mesh = pytest.mark.parametrize(
    ("axis_type", "check_vma"), [(AxisType.Auto, True), (AxisType.Auto, False), (AxisType.Explicit, True)]
)


@all_dtypes
@each_gradient
def test_gradients_on_one_rank(rng, mesh_of, sizes, dtype):
    problem = oracle.make_problem(rng, **sizes, dtype=dtype)
    y, got = gradients(problem, mesh_of(1))
    oracle.assert_close("y", y, oracle.forward(problem), dtype, 64)
    assert_gradients(problem, got)


def test_layers_without_kernels(rng, mesh_of):
    """More local experts than a plan holds: plain JAX, also in bfloat16."""
    problem = oracle.make_problem(rng, T=16, H=16, I=8, E=1032, K=4, dtype=jnp.bfloat16, masked=0.1)
    got = program(problem.config, mesh_of(1))(*problem.args, {})
    oracle.assert_close("y", got[0], oracle.forward(problem), jnp.bfloat16, 64)
    np.testing.assert_array_equal(got[1].expert_rows, one_device(problem)[1].expert_rows)


@pytest.mark.parametrize("call", ["moe", "stream"])
@each_mesh
@each_dtype
@each_problem
def test_two_ranks_have_the_bits_of_one(rng, mesh_of, sizes, dtype, axis_type, check_vma, call):
    mesh = mesh_of(2, axis_type=axis_type)
    problem = oracle.make_problem(rng, **sizes, dtype=dtype)
    got = program(problem.config, mesh, call, check_vma=check_vma)(*problem.args, biases_of(problem))
    assert_same(got, one_device(problem))


@all_dtypes
@each_mesh
@each_gradient
def test_gradients_on_two_ranks(rng, mesh_of, sizes, dtype, axis_type, check_vma):
    mesh = mesh_of(2, axis_type=axis_type)
    problem = oracle.make_problem(rng, **sizes, dtype=dtype)
    y, got = gradients(problem, mesh, check_vma=check_vma)
    oracle.assert_close("y", y, oracle.forward(problem), dtype, 64)
    if dtype != jnp.float32:
        assert_bits(y, one_device(problem)[0])
    assert_gradients(problem, got)


def test_a_routed_stream_over_two_ranks_learns(rng, mesh_of):
    """A router inside of the stream: its gradient, that of a parameter that both ranks hold, is that of one device."""
    problem = oracle.make_problem(rng, **SHAPE, dtype=jnp.float32)
    router = jnp.asarray(rng.standard_normal((SHAPE["H"], SHAPE["E"])), jnp.float32)
    experts = (jnp.asarray(problem.w_gate_up), jnp.asarray(problem.w_down))
    route = lambda x, w: sm.route_topk(jnp.dot(x, w, precision="highest"), problem.config)

    def loss(mesh):
        def of(x, router, experts):
            if mesh is None:
                routed = route(x, router)
                y = sm.moe(x, routed.ids, routed.weights, *experts, config=problem.config)
                return jnp.sum(y * problem.dy)
            ep = sm.expert_parallel(problem.config, mesh=mesh)
            y, _, _ = ep.stream(x, route, *experts, route_args=(router,))
            return jnp.sum(y * problem.dy)

        return jax.jit(jax.value_and_grad(of, (0, 1, 2)))

    (_, want), (_, got) = (loss(mesh)(problem.x, router, experts) for mesh in (None, mesh_of(2)))
    for name, a, b in zip(("x", "router", "up", "down"), jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        oracle.assert_close(name, a, np.asarray(b, np.float64), jnp.float32, 256)
