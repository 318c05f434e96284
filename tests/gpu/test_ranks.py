"""Expert parallelism over two GPUs of one process: the ring in XLA's own memory, pulled over NVLink.

Everything is compared bit for bit with one GPU: who owns a token or an expert, how it is cut into chunks, and whether
it streams, must not enter its bits.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_streammoe as sm
from jax_streammoe import costs
from tests.helpers import oracle

pytestmark = pytest.mark.gpu(2)

RANKS = 2
CALLS = 200  # of layers back to back
SQUARE = 4096  # of a product that takes 0.2 ms
SIZES = dict(T=RANKS * 350, H=256, I=192, E=8, K=4)


def _bits(y):
    return np.asarray(y).view(np.uint16)


def _problem(seed=3, **changes):
    rng = np.random.default_rng(seed)
    sizes = dict(dtype=jnp.bfloat16) | SIZES | changes
    return oracle.as_jax(oracle.make_problem(rng, masked=0.05, invalid=0.02, **sizes))


@pytest.fixture(scope="module")
def problem():
    return _problem()


def _wanted(problem):
    """One GPU."""
    return _bits(jax.jit(functools.partial(sm.moe, **problem.kwargs))(*problem.args))


@pytest.fixture(scope="module")
def wanted(problem):
    return _wanted(problem)


def _put(mesh, *arrays):
    """Rows over the ranks."""
    return [jax.device_put(a, NamedSharding(mesh, P("ep"))) for a in arrays]


def _on(mesh, problem):
    """Tokens and experts over the ranks."""
    return _put(mesh, *problem.args)


def _moe(ep):
    return jax.jit(ep.moe, donate_argnames="ring", static_argnames=("return_stats",))


def _stream(ep, **options):
    """The streamed call with given routes."""
    route = lambda x_c, ids_c, weights_c: (ids_c, weights_c)

    def run(x, ids, weights, gate_up, down, ring):
        y, ring, info = ep.stream(
            x, route, gate_up, down, ring=ring, token_args=(ids, weights), return_stats=True, **options
        )
        return y, ring, info.stats

    return jax.jit(run, donate_argnames="ring")


ROUTINGS = {
    "random": lambda ids: ids,
    "one expert": lambda ids: jnp.where(ids >= 0, 5, ids),
    "all on rank 0": lambda ids: jnp.where(ids >= 0, ids % 4, ids),
    "all remote": lambda ids: jnp.where(ids >= 0, ids % 4 + 4 * (1 - jnp.arange(len(ids)) // 350)[:, None], ids),
    "rank 1 all masked": lambda ids: jnp.where(jnp.arange(len(ids))[:, None] < 350, ids, -1),
    "none": lambda ids: jnp.full_like(ids, -1),
}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_batch_ready_equals_one_gpu(mesh_of, new_ring, problem, routing):
    mesh = mesh_of(RANKS)
    problem = problem.replace(topk_ids=ROUTINGS[routing](problem.topk_ids).astype(jnp.int32))
    want = _wanted(problem)
    ep = sm.expert_parallel(problem.config, mesh=mesh)
    for chunk_tokens, num_slots in ((350, 1), (128, 3), (64, 2)):  # the last: macro-chunks
        ring = new_ring(problem.config, mesh=mesh, chunk_tokens=chunk_tokens, num_slots=num_slots)
        for _ in range(2):
            y, ring, info = _moe(ep)(*_on(mesh, problem), ring=ring, return_stats=True)
            np.testing.assert_array_equal(_bits(y), want)
        ids = np.asarray(problem.topk_ids)
        valid = ids[(ids >= 0) & (ids < 8)]
        np.testing.assert_array_equal(info.stats.expert_rows, np.bincount(valid, minlength=8))
        assert int(np.sum(info.stats.masked_routes)) == (ids == -1).sum()
        ring.check()


@pytest.mark.parametrize("schedule", ["packed", "chunk"])
@pytest.mark.parametrize("policy", ["serial", "overlap"])
@pytest.mark.parametrize(
    ("chunk_tokens", "num_slots", "chunks"),
    [(350, 1, None), (100, 4, None), (64, 2, None), (175, 2, 3), (350, 1, "auto"), (175, 2, "auto")],
)
def test_streams_equal_one_gpu(mesh_of, new_ring, problem, wanted, policy, schedule, chunk_tokens, num_slots, chunks):
    mesh = mesh_of(RANKS)
    ep = sm.expert_parallel(problem.config, mesh=mesh)
    run = _stream(ep, policy=policy, schedule=schedule, chunks=chunks)
    ring = new_ring(problem.config, mesh=mesh, chunk_tokens=chunk_tokens, num_slots=num_slots)
    args = _on(mesh, problem)
    for _ in range(3):
        y, ring, _ = run(*args, ring)
        np.testing.assert_array_equal(_bits(y), wanted)
    ring.check()


def test_waves_carry_rows_over_ranks(mesh_of, new_ring, monkeypatch):
    problem = _problem(E=2, duplicates=True)  # 1400 rows per expert: two waves, the first carries partial blocks
    several = dataclasses.replace(costs.OVERLAPPED, rows_per_wave=512, max_waves=4)
    monkeypatch.setattr(costs, "gpu_cost", lambda *_, **__: several)
    mesh, want = mesh_of(RANKS), _wanted(problem)
    ep = sm.expert_parallel(problem.config, mesh=mesh)
    for policy in ("serial", "overlap"):
        ring = new_ring(problem.config, mesh=mesh, chunk_tokens=100, num_slots=4)
        y, ring, _ = _stream(ep, policy=policy, chunks=None)(*_on(mesh, problem), ring)
        np.testing.assert_array_equal(_bits(y), want)


def test_layers_back_to_back_with_a_late_rank(mesh_of, new_ring, problem):
    """Two layers on one ring, 200 calls, tokens and routes a function of the call, a rank late at random.

    Four calls are given to the GPUs before the first is looked at, so that calls meet on the ring, and not only layers.
    """
    mesh = mesh_of(RANKS)
    ep = sm.expert_parallel(problem.config, mesh=mesh)
    _, _, weights, *experts = _on(mesh, problem)
    route = lambda x_c, ids_c, weights_c: (ids_c, weights_c)

    def two(x, ids, ring, chunks):
        for _ in range(2):
            x, ring, _ = ep.stream(x, route, *experts, ring=ring, token_args=(ids, weights), chunks=chunks)
        return x, ring

    layer = lambda x, ids: sm.moe(x, ids, *problem.args[2:], config=problem.config)
    one = jax.jit(lambda x, ids: layer(layer(x, ids), ids))
    programs = [jax.jit(functools.partial(two, chunks=chunks), donate_argnums=2) for chunks in (1, 3)]
    shift = jax.jit(lambda x, ids, n: (jnp.roll(x, n, axis=0), jnp.roll(ids, 2 * n + 1, axis=0)))
    ring = new_ring(problem.config, mesh=mesh, chunk_tokens=350, num_slots=2)
    late = np.random.default_rng(17).integers(RANKS, size=CALLS // 4)
    wants = [_bits(one(*shift(problem.x, problem.topk_ids, call))) for call in range(CALLS)]
    assert len({want.tobytes() for want in wants}) == CALLS
    for first in range(0, CALLS, 4):
        calls = range(first, first + 4)
        pairs = [_put(mesh, *shift(problem.x, problem.topk_ids, call)) for call in calls]
        with sm.testing.fault(ring.name, "publish_route", "jitter", rank=int(late[first // 4]), seconds=0.002):
            got = []
            for call, pair in zip(calls, pairs, strict=True):
                y, ring = programs[call % 2](*pair, ring)
                got.append(y)
            jax.block_until_ready(got)
        for call, y in zip(calls, got, strict=True):
            np.testing.assert_array_equal(_bits(y), wants[call], err_msg=f"call {call}")
    states = sm.inspect(ring).ranks
    assert [s.call_number for s in states] == [2 * CALLS, 2 * CALLS]


def test_a_thousand_calls_keep_no_memory(mesh_of, new_ring, problem, wanted):
    mesh = mesh_of(RANKS)
    ep = sm.expert_parallel(problem.config, mesh=mesh)
    args, batch, stream = _on(mesh, problem), _moe(ep), _stream(ep, policy="overlap", chunks=3)
    ring = new_ring(problem.config, mesh=mesh, chunk_tokens=350, num_slots=2)

    def call(n, ring):
        return (stream(*args, ring) if n % 2 else batch(*args, ring=ring))[:2]

    def in_use():
        gc.collect()
        time.sleep(0.2)  # what a call held is given back by a thread of the runtime
        return [d.memory_stats()["bytes_in_use"] for d in mesh.devices.flat]

    for n in range(20):  # compiled, captured, every allocation made once
        y, ring = jax.block_until_ready(call(n, ring))
    before = in_use()
    assert min(before) > ring.mem.nbytes // RANKS  # the numbers are there, and count what is alive
    for n in range(1000):
        y, ring = call(n, ring)
        if n % 25 >= 23:  # one of each kind; the others run into each other
            np.testing.assert_array_equal(_bits(y), wanted, err_msg=f"call {n}")
    jax.block_until_ready((y, ring))
    assert in_use() == before
    assert [s.call_number for s in sm.inspect(ring).ranks] == [1020, 1020]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("routing", ["random", "all remote", "rank 1 all masked"])
def test_a_ring_has_the_bits_of_all_to_all(mesh_of, new_ring, routing, dtype):
    problem = _problem(use_bias=True, activation="swigluoai", dtype=dtype)
    problem = problem.replace(topk_ids=ROUTINGS[routing](problem.topk_ids).astype(jnp.int32))
    mesh = mesh_of(RANKS)
    ring = new_ring(problem.config, mesh=mesh, chunk_tokens=100, num_slots=4)
    ep = sm.expert_parallel(problem.config, mesh=mesh)
    biases = dict(zip(("b_gate_up", "b_down"), _put(mesh, problem.b_gate_up, problem.b_down), strict=True))
    run, args = _moe(ep), _on(mesh, problem)
    want, none, of_xla = run(*args, **biases, ring=None, return_stats=True)
    assert none is None and np.asarray(want).any()
    for _ in range(2):
        y, ring, of_ring = run(*args, **biases, ring=ring, return_stats=True)
        np.testing.assert_array_equal(_bits(y), _bits(want))
        np.testing.assert_array_equal(of_ring.stats.expert_rows, of_xla.stats.expert_rows)
    ring.check()


@pytest.mark.parametrize("call", ["batch", "stream"])
def test_a_ring_that_is_dropped_while_its_result_is_pending(request, mesh_of, new_ring, problem, wanted, call):
    """Python lets go of the ring behind a call that waits for a busy rank; what XLA puts there next is not written."""
    mesh, sizes = mesh_of(RANKS), dict(chunk_tokens=175, num_slots=2)
    ep = sm.expert_parallel(problem.config, mesh=mesh)
    args, batch, stream = _on(mesh, problem), _moe(ep), _stream(ep, policy="overlap", chunks=3)
    run = lambda ring: (batch(*args, ring=ring) if call == "batch" else stream(*args, ring))[:2]
    busy = jax.jit(lambda a: functools.reduce(lambda b, _: b @ a, range(300), a))
    operands = [jax.device_put(jnp.eye(SQUARE, dtype=jnp.bfloat16), device) for device in mesh.devices.flat]
    ring = new_ring(problem.config, mesh=mesh, **sizes)
    name, words = ring.name, ring.mem.nbytes // 4
    fill = jax.jit(lambda n: jnp.full((words,), n, jnp.int32), out_shardings=NamedSharding(mesh, P("ep")))
    for _ in range(3):  # everything is compiled, loaded, and captured where XLA captures
        _, ring = jax.block_until_ready((run(ring), fill(0), [busy(a) for a in operands]))[0]
    pending = 0
    gc.collect()
    request.addfinalizer(gc.unfreeze)
    gc.freeze()  # so that collecting garbage takes less time than the busy rank
    for turn in range(8):
        ring = sm.make_ring(problem.config, mesh=mesh, name=name, **sizes)
        busy(operands[turn % 2])  # some 60 ms
        y, ring = run(ring)
        del ring
        gc.collect()
        others = [fill(100 * turn + n) for n in range(3)]
        pending += not y.is_ready()
        np.testing.assert_array_equal(_bits(y), wanted, err_msg=f"turn {turn}")
        for n, other in enumerate(others):
            np.testing.assert_array_equal(other, np.full(words, 100 * turn + n, np.int32), err_msg=f"turn {turn}")
    assert pending > 4


def test_graph_replays(mesh_of, new_ring, problem):
    """The batch-ready call on a ring is one captured handler; replays follow the routing of their turn, on both ranks.

    A handler alone is captured only when it is asked for; y is compared whole, so each rank's rows are.
    """
    mesh = mesh_of(RANKS)
    ep = sm.expert_parallel(problem.config, mesh=mesh)
    x, _, weights, *experts = _on(mesh, problem)
    routings = [jnp.roll(problem.topk_ids, n, axis=0) for n in range(3)]
    wants = [_wanted(problem.replace(topk_ids=ids)) for ids in routings]
    routings = [jax.device_put(ids, NamedSharding(mesh, P("ep"))) for ids in routings]
    ring = new_ring(problem.config, mesh=mesh, chunk_tokens=350, num_slots=1)
    batch = _moe(ep).lower(x, routings[0], weights, *experts, ring=ring).compile({"xla_gpu_graph_min_graph_size": 1})
    stream = _stream(ep, chunks=1)
    assert len({want.tobytes() for want in wants}) == len(wants)
    for turn in range(13):  # the first is not a replay
        y, ring, _ = batch(x, routings[turn % 3], weights, *experts, ring=ring)
        np.testing.assert_array_equal(_bits(y), wants[turn % 3], err_msg=f"turn {turn}")
        if turn % 4 == 1:
            y, ring, _ = stream(x, routings[0], weights, *experts, ring)
            np.testing.assert_array_equal(_bits(y), wants[0], err_msg=f"stream in turn {turn}")
    assert [s.call_number for s in sm.inspect(ring).ranks] == [16, 16]


def test_a_rank_that_goes_silent_ends_at_the_deadline_of_the_other(mesh_of, new_ring, problem):
    mesh = mesh_of(RANKS)
    ep = sm.expert_parallel(problem.config, mesh=mesh)
    ring = new_ring(problem.config, mesh=mesh, chunk_tokens=350, num_slots=1, timeout_s=1.0)
    other = new_ring(problem.config, mesh=mesh, chunk_tokens=350, num_slots=1)
    args = _on(mesh, problem)
    with sm.testing.fault(ring.name, "publish_route", "drop", rank=1):
        y, ring, _ = jax.block_until_ready(_stream(ep, chunks=1)(*args, ring))
    assert np.isnan(np.asarray(y, np.float32)).all()
    with pytest.raises(RuntimeError, match=r"(waited 1 s for rank 1 in phase dispatch|because rank \d failed)"):
        ring.check()
    y, _, _ = _stream(ep, chunks=1)(*args, other)  # other rings, and the process, go on
    assert np.isfinite(np.asarray(y, np.float32)).all()


def test_gradients_equal_one_gpu_closely(mesh_of, new_ring):
    problem = oracle.make_problem(np.random.default_rng(5), T=44, H=32, I=16, E=4, K=2, masked=0.1, dtype=jnp.bfloat16)
    p, mesh = oracle.as_jax(problem), mesh_of(RANKS)
    ep = sm.expert_parallel(p.config, mesh=mesh)
    ring = new_ring(p.config, mesh=mesh, chunk_tokens=22, num_slots=1)
    x, ids, weights, gate_up, down = _on(mesh, p)
    dy = jax.device_put(p.dy, NamedSharding(mesh, P("ep")))

    @functools.partial(jax.jit, donate_argnums=1)
    def gradients(args, ring):
        def loss(args):
            x, weights, gate_up, down = args
            y, used, _ = ep.moe(x, ids, weights, gate_up, down, ring=ring)
            return jnp.vdot(y.astype(jnp.float32), dy.astype(jnp.float32)), used

        return jax.grad(loss, has_aux=True)(args)

    got, _ = gradients((x, weights, gate_up, down), ring)
    wanted = oracle.backward(problem)
    for name, value in zip(("x", "topk_weights", "w_gate_up", "w_down"), got, strict=True):
        value, want = np.asarray(value, np.float64), wanted[name]
        assert np.linalg.norm(value - want) < 0.01 * np.linalg.norm(want), name
