"""What goes wrong on GPUs ends as an error or as NaN, never as a plausible number, and never beyond its ring.

Device failures are recorded by kernels, so the failing call may return: then with NaN. Whatever the ring was, the
process and other rings go on.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_streammoe as sm
from tests.helpers import oracle

pytestmark = pytest.mark.gpu

T, RANKS = 700, 2


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(11)
    return oracle.as_jax(oracle.make_problem(rng, T=T, H=256, I=192, E=8, K=4, dtype=jnp.bfloat16))


def _program(problem, chunks=4, between=None, **options):
    """A streamed call with given routes; `between` runs on the host when the third chunk is routed."""

    def route(x_c, ids_c, weights_c):
        if between is not None:
            weights_c = io_callback(between, jax.ShapeDtypeStruct(weights_c.shape, weights_c.dtype), weights_c)
        return ids_c, weights_c

    @functools.partial(jax.jit, donate_argnames="ring")
    def run(x, ids, weights, gate_up, down, ring):
        y, ring, _ = sm.stream_moe(
            x, route, gate_up, down, ring=ring, config=problem.config, token_args=(ids, weights), chunks=chunks,
            **options,
        )  # fmt: skip
        return y, ring

    return run


def _works(problem, ring):
    want = jax.jit(functools.partial(sm.moe, config=problem.config))(*problem.args)
    y, ring = _program(problem)(*problem.args, ring)
    np.testing.assert_array_equal(np.asarray(y).view(np.uint16), np.asarray(want).view(np.uint16))
    ring.check()


def _nan_or_error(call, text):
    """y of the call is NaN throughout, or the call raises `text`."""
    try:
        y = np.asarray(jax.block_until_ready(call())[0], np.float32)
    except jax.errors.JaxRuntimeError as failure:
        assert text in str(failure)
    else:
        assert np.isnan(y).all(), f"{np.isfinite(y).sum()} elements look like results"


def test_a_ring_that_was_overwritten_in_place(problem, new_ring):
    ring = new_ring(problem.config, chunk_tokens=175, num_slots=4)
    other = new_ring(problem.config, chunk_tokens=175, num_slots=4)
    wipe = jax.jit(lambda r: dataclasses.replace(r, mem=r.mem * jnp.uint8(0)), donate_argnums=0)
    ring = jax.block_until_ready(wipe(ring))
    _nan_or_error(lambda: _program(problem)(*problem.args, ring), "does not hold a ring")
    with pytest.raises(RuntimeError, match="does not hold a ring"):
        ring.check()
    _works(problem, other)
    _works(problem, sm.make_ring(problem.config, chunk_tokens=175, num_slots=4, name=ring.name))


@pytest.mark.parametrize("how", ["closed", "made again"])
def test_a_ring_that_goes_while_a_stream_is_open_on_it(problem, new_ring, how):
    """The host callback of a router closes or replaces the ring; its waves end before the error is raised."""
    ring = new_ring(problem.config, chunk_tokens=175, num_slots=4)
    seen = []

    def between(weights):
        seen.append(len(weights))
        if len(seen) == 3:
            if how == "closed":
                sm.close_ring(ring.name)
            else:
                sm.make_ring(problem.config, chunk_tokens=175, num_slots=4, name=ring.name)
        return np.asarray(weights)

    with pytest.raises(jax.errors.JaxRuntimeError, match="ring"):
        jax.block_until_ready(_program(problem, between=between)(*problem.args, ring))
    assert len(seen) >= 3
    _works(problem, sm.make_ring(problem.config, chunk_tokens=175, num_slots=4, name=ring.name))


def test_too_many_routes_are_refused_when_the_ring_is_made():
    config = sm.MoEConfig(8, 8, 8, 8, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="top_k must be at most"):
        sm.make_ring(config, chunk_tokens=2**20, num_slots=300, name="too many routes")


def _ranks(mesh_of, problem, ring_options, new_ring):
    mesh = mesh_of(RANKS)
    ring = new_ring(problem.config, mesh=mesh, **ring_options)
    sharding = NamedSharding(mesh, P("ep"))
    return sm.expert_parallel(problem.config, mesh=mesh), ring, [jax.device_put(a, sharding) for a in problem.args]


@pytest.mark.gpu(2)
def test_a_rank_later_than_the_deadline_gets_no_plausible_rows(mesh_of, new_ring, problem):
    """The other has given up: its rows of this call do not exist, so the late rank must not combine what lies there."""
    ep, ring, args = _ranks(mesh_of, problem, dict(chunk_tokens=350, num_slots=1, timeout_s=1.0), new_ring)
    run = jax.jit(ep.moe, donate_argnames="ring")
    y, ring, _ = jax.block_until_ready(run(*args, ring=ring))  # leaves rows of a good call behind
    assert np.isfinite(np.asarray(y, np.float32)).all()
    route = lambda x_c, ids_c, weights_c: (ids_c, weights_c)
    stream = jax.jit(
        lambda x, ids, w, g, d, ring: ep.stream(x, route, g, d, ring=ring, token_args=(ids, w), chunks=1),
        donate_argnames="ring",
    )
    with sm.testing.fault(ring.name, "publish_route", "delay", rank=1, seconds=3.0):
        _nan_or_error(lambda: stream(args[0] + jnp.bfloat16(1), *args[1:], ring), "ring")
    with pytest.raises(RuntimeError, match="is unusable"):
        ring.check()


@pytest.mark.gpu(2)
@pytest.mark.parametrize("kind", ["fail", "drop"])
def test_memory_of_others_survives_a_failure(mesh_of, new_ring, problem, kind):
    """After one rank failed, what XLA puts where its ring was is nobody else's to write."""
    ep, ring, args = _ranks(mesh_of, problem, dict(chunk_tokens=100, num_slots=4, timeout_s=1.0), new_ring)
    route = lambda x_c, ids_c, weights_c: (ids_c, weights_c)
    stream = jax.jit(
        lambda x, ids, w, g, d, ring: ep.stream(x, route, g, d, ring=ring, token_args=(ids, w), chunks=None),
        donate_argnames="ring",
    )
    size = ring.mem.nbytes // RANKS
    with sm.testing.fault(ring.name, "publish_layout", kind, rank=0):
        call = functools.partial(stream, *args, ring)
        _nan_or_error(call, "")
    del ring, call
    fresh = jax.device_put(np.arange(RANKS * size // 4, dtype=np.int32), NamedSharding(mesh_of(RANKS), P("ep")))
    for _ in range(5):
        np.testing.assert_array_equal(np.asarray(fresh + 0), np.arange(RANKS * size // 4, dtype=np.int32))


@pytest.mark.gpu(2)
def test_a_ring_in_a_ref_over_ranks(mesh_of, new_ring, problem):
    mesh = mesh_of(RANKS)
    ring = new_ring(problem.config, mesh=mesh, chunk_tokens=350, num_slots=1, mutable=True)
    ep = sm.expert_parallel(problem.config, mesh=mesh)
    args = [jax.device_put(a, NamedSharding(mesh, P("ep"))) for a in problem.args]
    want = jax.jit(functools.partial(sm.moe, config=problem.config))(*problem.args)
    run = jax.jit(lambda args, ring: ep.moe(*args, ring=ring)[0])
    for _ in range(3):
        got = run(args, ring)
        np.testing.assert_array_equal(np.asarray(got).view(np.uint16), np.asarray(want).view(np.uint16))
