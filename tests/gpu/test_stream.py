"""Streams on one GPU: the same bits as the batch-ready call, whatever the chunks, slots, policy and schedule.

The batch-ready call is checked against the f64 oracle in test_forward.py; here every stream must equal it bit for bit,
and failures must be errors of the ring and not of the process.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_streammoe as sm
from jax_streammoe import costs
from tests.helpers import layers, oracle

pytestmark = pytest.mark.gpu

SIZES = dict(T=700, H=256, I=192, E=8, K=4)
# 350 rows per expert, and 1400 with routes twice to one expert; the latter are cut into two waves below, of which the
# first carries partial blocks.
PROBLEMS = {"one wave": SIZES, "two waves": SIZES | dict(E=2, duplicates=True)}


@pytest.fixture(scope="module", params=PROBLEMS.values(), ids=PROBLEMS.keys())
def problem(request):
    rng = np.random.default_rng(7)
    return oracle.as_jax(oracle.make_problem(rng, **request.param, masked=0.05, invalid=0.02, dtype=jnp.bfloat16))


@pytest.fixture(autouse=True)
def waves_by_load(request, monkeypatch):
    """The route functions here cost nothing, so the cost model would plan one wave."""
    if "two waves" in request.node.name:
        several = dataclasses.replace(costs.OVERLAPPED, rows_per_wave=512, max_waves=4)
        monkeypatch.setattr(costs, "gpu_cost", lambda *_, **__: several)


@pytest.fixture(scope="module")
def wanted(problem):
    return _bits(jax.jit(functools.partial(sm.moe, **problem.kwargs))(*problem.args))


def _bits(y):
    return np.asarray(y).view(np.uint16)


def _stream(problem, ring, **options):
    """One streamed call whose routing is given per token; returns y, the ring and the statistics."""

    @functools.partial(jax.jit, donate_argnames="ring")
    def run(x, ids, weights, gate_up, down, ring):
        route = lambda x_c, ids_c, weights_c: (ids_c, weights_c)
        y, ring, info = sm.stream_moe(
            x, route, gate_up, down, ring=ring, config=problem.config, token_args=(ids, weights), return_stats=True,
            b_gate_up=problem.b_gate_up, b_down=problem.b_down, **options,
        )  # fmt: skip
        return y, ring, info.stats

    return run(*problem.args, ring)


@pytest.mark.parametrize("schedule", ["packed", "chunk"])
@pytest.mark.parametrize("policy", ["serial", "overlap"])
@pytest.mark.parametrize(
    ("chunk_tokens", "num_slots", "chunks"),
    [(700, 1, None), (256, 3, None), (100, 7, None), (64, 4, None), (350, 2, 2), (350, 2, 5), (128, 8, 8),
     (700, 2, "auto")],
)  # fmt: skip
def test_the_same_bits_as_batch_ready(problem, wanted, new_ring, policy, schedule, chunk_tokens, num_slots, chunks):
    ring = new_ring(problem.config, chunk_tokens=chunk_tokens, num_slots=num_slots)
    for _ in range(3):  # the ring goes on from call to call
        y, ring, stats = _stream(problem, ring, policy=policy, schedule=schedule, chunks=chunks)
        np.testing.assert_array_equal(_bits(y), wanted)
        valid = (np.asarray(problem.topk_ids) >= 0) & (np.asarray(problem.topk_ids) < problem.config.num_experts)
        rows = np.bincount(np.asarray(problem.topk_ids)[valid], minlength=problem.config.num_experts)
        np.testing.assert_array_equal(stats.expert_rows, rows)
        assert int(stats.invalid_routes) == (~valid & (np.asarray(problem.topk_ids) != -1)).sum()
        assert int(stats.masked_routes) == (np.asarray(problem.topk_ids) == -1).sum()
    ring.check()
    assert sm.inspect(ring).ranks[0].call_number == 3


@pytest.mark.parametrize("how", layers.HOWS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("options", [{}, {"use_bias": True}, {"capacity": 9}, {"activation": "relu2"}], ids=str)
def test_values_and_statistics(rng, how, dtype, options):
    """Without gradients: they go through plain JAX in this dtype, see test_forward.py and the scan below."""
    problem = oracle.make_problem(rng, T=22, H=32, I=16, E=4, K=2, masked=0.1, invalid=0.05, dtype=dtype, **options)
    layers.check(how, problem, grad=False)


def test_capacity_drops_the_same_routes(rng, new_ring):
    problem = oracle.as_jax(oracle.make_problem(rng, **SIZES, capacity=200, dtype=jnp.bfloat16))
    batch = jax.jit(functools.partial(sm.moe, **problem.kwargs, return_stats=True))
    y, want = batch(*problem.args)
    for chunks in (None, 3):
        got, _, stats = _stream(problem, new_ring(problem.config, chunk_tokens=256, num_slots=3), chunks=chunks)
        np.testing.assert_array_equal(_bits(got), _bits(y))
        assert int(stats.dropped_routes) == int(want.dropped_routes) > 0
        np.testing.assert_array_equal(stats.expert_rows, want.expert_rows)


def test_twenty_runs_have_the_same_bits(problem, wanted, new_ring):
    ring = new_ring(problem.config, chunk_tokens=128, num_slots=6)
    for _ in range(20):
        y, ring, _ = _stream(problem, ring, chunks=None)
        np.testing.assert_array_equal(_bits(y), wanted)


def test_nan_in_masked_tokens_and_in_the_pool_reaches_nobody(problem, new_ring):
    ids = problem.topk_ids.at[5].set(-1).at[699].set(-1)
    clean = problem.replace(topk_ids=ids)
    dirty = clean.replace(x=problem.x.at[5].set(jnp.nan).at[699].set(jnp.inf))
    want = _bits(jax.jit(functools.partial(sm.moe, **clean.kwargs))(*clean.args))
    ring = new_ring(problem.config, chunk_tokens=128, num_slots=6)
    # What an earlier call leaves in pool and activations is NaN.
    _, ring, _ = _stream(problem.replace(x=jnp.full_like(problem.x, jnp.nan)), ring, chunks=None)
    y, ring, _ = _stream(dirty, ring, chunks=None)
    np.testing.assert_array_equal(_bits(y), want)
    assert not want[5].any()


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_few_tokens(problem, new_ring, num_tokens):
    part = problem.replace(**{n: getattr(problem, n)[:num_tokens] for n in ("x", "topk_ids", "topk_weights")})
    want = _bits(jax.jit(functools.partial(sm.moe, **part.kwargs))(*part.args))
    ring = new_ring(problem.config, chunk_tokens=4, num_slots=2)
    y, ring, stats = _stream(part, ring, chunks=2)
    np.testing.assert_array_equal(_bits(y), want)
    assert int(stats.expert_rows.sum()) <= num_tokens * problem.config.top_k


def test_by_hand_in_any_order(problem, wanted, new_ring):
    ring = new_ring(problem.config, chunk_tokens=175, num_slots=4)

    @functools.partial(jax.jit, donate_argnames="ring")
    def run(x, ids, weights, gate_up, down, ring):
        s = sm.open_stream(ring, gate_up, down, config=problem.config, num_tokens=len(x), chunks=4)
        for half, chunk in (("route", 2), ("layout", 3), ("layout", 0), ("route", 0), ("route", 3), ("layout", 1),
                            ("layout", 2), ("route", 1)):  # fmt: skip
            rows = slice(*s.chunk_bounds(chunk))
            if half == "route":
                s = sm.publish_route(s, chunk, ids[rows], weights[rows])
            else:
                s = sm.publish_layout(s, chunk, x[rows])
        y, ring, _ = sm.close_stream(s)
        return y, ring

    y, ring = run(*problem.args, ring)
    np.testing.assert_array_equal(_bits(y), wanted)


def _traced(problem, order):
    """A stream whose chunks are published in a loop, under an index the host does not know."""

    @functools.partial(jax.jit, donate_argnames="ring")
    def run(x, ids, weights, gate_up, down, ring):
        s = sm.open_stream(ring, gate_up, down, config=problem.config, num_tokens=len(x), chunks=4, record=False)

        def body(s, operands):
            chunk, x_c, ids_c, weights_c = operands
            s = sm.publish_layout(s, chunk, x_c)
            return sm.publish_route(s, chunk, ids_c, weights_c), None

        parts = [a.reshape(4, 175, *a.shape[1:]) for a in (x, ids, weights)]
        s, _ = jax.lax.scan(body, s, (jnp.asarray(order, jnp.int32), *parts))
        y, ring, _ = sm.close_stream(s)
        return y, ring

    return run


def test_chunks_under_a_traced_index(problem, wanted, new_ring):
    y, _ = _traced(problem, [0, 1, 2, 3])(*problem.args, new_ring(problem.config, chunk_tokens=175, num_slots=4))
    np.testing.assert_array_equal(_bits(y), wanted)


def test_chunks_under_a_traced_index_out_of_order_fail_on_the_device(problem, new_ring):
    ring = new_ring(problem.config, chunk_tokens=175, num_slots=4)
    other = new_ring(problem.config, chunk_tokens=175, num_slots=4)
    # A handler of the same call may learn of it; else the call ends with NaN and the next one raises.
    try:
        y, _ = jax.block_until_ready(_traced(problem, [0, 2, 1, 3])(*problem.args, ring))
    except jax.errors.JaxRuntimeError as failure:
        assert "wanted chunk 1, got 2" in str(failure)
    else:
        assert np.isnan(np.asarray(y, np.float32)).all()
    with pytest.raises(RuntimeError, match="wanted chunk 1, got 2"):
        ring.check()
    y, _ = _traced(problem, [0, 1, 2, 3])(*problem.args, other)  # other rings stay usable
    assert np.isfinite(np.asarray(y, np.float32)).all()


def test_a_chunk_that_never_arrives_ends_at_the_deadline(problem, new_ring):
    """The fault drops one publication on the device; the wave that waits for it gives up and says for what."""
    ring = new_ring(problem.config, chunk_tokens=175, num_slots=4, timeout_s=0.5)
    with sm.testing.fault(ring.name, "publish_route", "drop"):
        y, ring, _ = jax.block_until_ready(_stream(problem, ring, chunks=4))
    assert np.isnan(np.asarray(y, np.float32)).all()
    with pytest.raises(
        RuntimeError, match=r"waited 0.5 s for rank 0 in phase dispatch, slot \d: sequence wanted \d, seen 0"
    ):
        ring.check()


def test_scan_over_layers_with_gradients(problem, new_ring):
    """Four layers on one ring, forward and backward; each layer's y is the next one's x."""
    ring = new_ring(problem.config, chunk_tokens=175, num_slots=4)
    stacked = [jnp.stack([w * s for s in (1.0, 0.5, 0.75, 1.25)]).astype(w.dtype) for w in problem.args[3:]]
    route = lambda x_c, ids_c, weights_c: (ids_c, weights_c)
    token_args = (problem.topk_ids, problem.topk_weights)

    def loss(x, ring, streamed):
        def layer(carry, experts):
            x, ring = carry
            if streamed:
                y, ring, _ = sm.stream_moe(
                    x, route, *experts, ring=ring, config=problem.config, token_args=token_args, chunks=4
                )
            else:
                y = sm.moe(x, *token_args, *experts, config=problem.config)
            return (y, ring), y[:3]

        (y, ring), tops = jax.lax.scan(layer, (x, ring), tuple(stacked))
        return jnp.sum(y.astype(jnp.float32) ** 2) + jnp.sum(tops.astype(jnp.float32)), ring

    run = lambda streamed: jax.jit(
        functools.partial(jax.value_and_grad(loss, has_aux=True), streamed=streamed), donate_argnums=1
    )
    (got, ring), d_got = run(True)(problem.x, ring)
    (want, _), d_want = run(False)(problem.x, ())
    assert float(got) == float(want)
    np.testing.assert_array_equal(_bits(d_got), _bits(d_want))
    ring.check()


def test_a_ring_in_a_ref(problem, wanted, new_ring):
    ring = new_ring(problem.config, chunk_tokens=175, num_slots=4, mutable=True)

    @jax.jit
    def run(args, ring):
        x, ids, weights, gate_up, down = args
        route = lambda x_c, ids_c, weights_c: (ids_c, weights_c)
        y, _, _ = sm.stream_moe(
            x, route, gate_up, down, ring=ring, config=problem.config, token_args=(ids, weights), chunks=4
        )
        return y

    for _ in range(2):
        np.testing.assert_array_equal(_bits(run(problem.args, ring)), wanted)


def test_graph_replays_follow_the_routing_beside_streams(problem, new_ring):
    """The batch-ready call on a ring is captured; streams and eager calls between replays move the counters."""
    ring = new_ring(problem.config, chunk_tokens=700, num_slots=1)
    routings = [jnp.roll(problem.topk_ids, n, axis=0) for n in range(3)]

    @functools.partial(jax.jit, donate_argnames="ring")
    def twice(x, ids, weights, gate_up, down, ring):
        route = lambda x_c, ids_c, weights_c: (ids_c, weights_c)
        for _ in range(2):
            x, ring, _ = sm.stream_moe(
                x, route, gate_up, down, ring=ring, config=problem.config, token_args=(ids, weights), chunks="auto"
            )
        return x, ring

    moe = jax.jit(functools.partial(sm.moe, config=problem.config))
    x, _, weights, *experts = problem.args
    eager = [_bits(moe(moe(x, r, weights, *experts), r, weights, *experts)) for r in routings]
    for turn in range(12):
        y, ring = twice(x, routings[turn % 3], weights, *experts, ring)
        np.testing.assert_array_equal(_bits(y), eager[turn % 3])
        if turn % 4 == 1:
            y, ring, _ = _stream(problem.replace(topk_ids=routings[0]), ring, chunks=1)
            np.testing.assert_array_equal(_bits(y), _bits(moe(x, routings[0], weights, *experts)))
    assert sm.inspect(ring).ranks[0].call_number == 12 * 2 + 3


def test_an_error_of_the_host_costs_the_ring_and_nothing_else(problem, new_ring):
    ring = new_ring(problem.config, chunk_tokens=175, num_slots=4)
    with sm.testing.fault(ring.name, "publish_route", "fail"), pytest.raises(Exception, match="fault"):
        jax.block_until_ready(_stream(problem, ring, chunks=4)[0])
    with pytest.raises(RuntimeError, match="is unusable"):
        ring.check()
    again = sm.make_ring(problem.config, chunk_tokens=175, num_slots=4, name=ring.name)
    y, _, _ = _stream(problem, again, chunks=4)
    assert np.isfinite(np.asarray(y, np.float32)).all()


def test_what_a_gpu_ring_refuses(problem):
    small = dict(chunk_tokens=8, num_slots=2, name="refused")
    with pytest.raises(ValueError, match="bfloat16 or float16 layers, got float32"):
        sm.make_ring(sm.MoEConfig(4, 2, 16, 8, dtype=jnp.float32), **small)
    with pytest.raises(ValueError, match=r"pool_tokens must be 16 \(R\*S\*C\) on a GPU, got 8"):
        sm.make_ring(problem.config, **small, pool_tokens=8)


def test_bytes_are_the_formula_and_nothing_is_allocated_beside(problem, new_ring):
    ring = new_ring(problem.config, chunk_tokens=175, num_slots=4)
    assert ring.mem.nbytes == sm.ring_bytes(problem.config, chunk_tokens=175, num_slots=4, num_ranks=1, platform="cuda")
    run = jax.jit(
        lambda x, ids, weights, gate_up, down, ring: sm.stream_moe(
            x, lambda x_c, *routes: routes, gate_up, down, ring=ring, config=problem.config, token_args=(ids, weights),
            chunks=4,
        )[:2],
        donate_argnums=5,
    )  # fmt: skip
    analysis = run.lower(*problem.args, ring).compile().memory_analysis()
    rows = problem.x.size * 2
    assert analysis.temp_size_in_bytes < 2 * rows, analysis  # no buffer of T * K rows or of E times anything
