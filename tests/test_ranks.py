"""Several ranks in one process give the bits of one device, whatever the routing, transport, schedule and timing.

Ranks are virtual CPU devices whose handlers wait for each other. Every test compares raw bits of all rows with `moe` on
one device, which other tests compare with the oracle. Iterated tests make the payload a function of the iteration, so
that a stale slot, a stale row or a word from an earlier call cannot go unseen.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_streammoe as sm
from tests.helpers import oracle, ranks

C, S = 8, 2
names = (f"ranks-{n}" for n in itertools.count())


def problem_of(rng, R, T=21, E=None, K=2, **options):
    """T tokens per rank: two macro-chunks of the ring, the last chunk partial."""
    options = {"dtype": jnp.float32, "block_m": 8} | options
    return oracle.make_problem(rng, T=R * T, H=16, I=24, E=E or 2 * R, K=K, **options)


def make_ring(config, mesh, name, **options):
    return sm.make_ring(config, mesh=mesh, name=name, **{"chunk_tokens": C, "num_slots": S, "timeout_s": 20} | options)


def check(problem, mesh, mode, ring, want, num_valid=None):
    y, ring, stats = ranks.run(problem, mesh, mode, ring, num_valid)
    ranks.assert_bits(y, want, mode)
    return ring, stats


@pytest.mark.core
@pytest.mark.parametrize("R", [1, 2, 3, 4, 5, 6, 7, 8])
def test_every_mode_has_the_bits_of_one_device(rng, R):
    mesh = ranks.mesh_of(R)
    problem = problem_of(rng, R, E={1: 4, 2: 6, 8: 8}.get(R, 2 * R), masked=0.1)
    want, stats = ranks.one_device(problem.config)(*problem.args)
    oracle.assert_close("y", want, oracle.forward(problem), jnp.float32, 24)
    with make_ring(problem.config, mesh, next(names)) as ring:
        for mode in ranks.MODES:
            new_ring, got = check(problem, mesh, mode, ring, want)
            np.testing.assert_array_equal(got.expert_rows, stats.expert_rows)
            ring = new_ring if new_ring is not None else ring


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_over_ranks(rng, dtype):
    mesh, problem = ranks.mesh_of(4), problem_of(rng, 4, dtype=dtype, activation="swigluoai", block_m=16)
    want, _ = ranks.one_device(problem.config)(*problem.args)
    with make_ring(problem.config, mesh, next(names)) as ring:
        for mode in ("overlap-packed", "xla"):
            check(problem, mesh, mode, ring, want)


@pytest.fixture(scope="module")
def shared_name():
    return next(names)


@pytest.mark.parametrize("routing", ranks.ROUTINGS, ids=lambda f: f.__name__)
def test_adversarial_routing(rng, shared_name, routing):
    R, T, E, K = 4, 21, 8, 3
    mesh, problem = ranks.mesh_of(R), problem_of(rng, R, T, E, K, ids=routing(rng, R, T, E, K))
    want, want_stats = ranks.one_device(problem.config)(*problem.args)
    valid = (problem.topk_ids >= 0) & (problem.topk_ids < E)
    assert np.asarray(want).any() == valid.any()
    with make_ring(problem.config, mesh, shared_name) as ring:
        for mode in ("serial-packed", "overlap-packed", "overlap-chunk", "batch", "xla"):
            new_ring, stats = check(problem, mesh, mode, ring, want)
            ring = ring if new_ring is None else new_ring
            np.testing.assert_array_equal(stats.expert_rows, np.bincount(problem.topk_ids[valid], minlength=E))
            per_rank = problem.topk_ids.reshape(R, T, K)
            np.testing.assert_array_equal(stats.masked_routes, (per_rank == -1).sum((1, 2)))
            np.testing.assert_array_equal(
                stats.invalid_routes, (~valid.reshape(R, T, K) & (per_rank != -1)).sum((1, 2))
            )
            np.testing.assert_array_equal(stats.dropped_routes, np.zeros(R))
            assert np.sum(stats.masked_routes) == want_stats.masked_routes


@pytest.mark.parametrize("num_valid", [(21, 3, 0, 8), (0, 0, 0, 1), (0, 0, 0, 0)], ids=str)
def test_ranks_with_different_token_counts(rng, shared_name, num_valid):
    R, T, E, K = 4, 21, 8, 3
    mesh, problem = ranks.mesh_of(R), problem_of(rng, R, T, E, K)
    exists = (np.arange(T)[None] < np.array(num_valid)[:, None]).reshape(R * T, 1)
    # A token that does not exist must not be read: NaN there.
    x = np.where(exists, problem.x, np.float32(np.nan))
    masked = problem.replace(topk_ids=np.where(exists, problem.topk_ids, -1).astype(np.int32))
    want, _ = ranks.one_device(problem.config)(*masked.args)
    assert (np.asarray(want) != 0).any(1).sum() == sum(num_valid)
    with make_ring(problem.config, mesh, shared_name) as ring:
        for mode in ("serial-packed", "overlap-packed", "overlap-chunk", "batch", "xla"):
            new_ring, stats = check(problem.replace(x=x), mesh, mode, ring, want, num_valid)
            ring = ring if new_ring is None else new_ring
            np.testing.assert_array_equal(stats.masked_routes, (T - np.array(num_valid)) * K)


def test_no_tokens_on_any_rank(rng):
    mesh, problem = ranks.mesh_of(3), problem_of(rng, 3, T=0)
    with make_ring(problem.config, mesh, next(names)) as ring:
        for mode in ranks.MODES:
            y, new_ring, stats = ranks.run(problem, mesh, mode, ring)
            assert y.shape == (0, 16)
            assert not np.any(stats.expert_rows)
            ring = ring if new_ring is None else new_ring
        calls = [rank.call_number for rank in sm.inspect(ring).ranks]
        assert calls == [len(ranks.RING_MODES)] * 3  # an empty rank takes part in every hand-shake


@pytest.mark.parametrize("routing", [ranks.one_rank, ranks.duplicates, ranks.all_remote], ids=lambda f: f.__name__)
@pytest.mark.parametrize("mode", ["serial-packed", "overlap-packed"])
def test_smallest_pool(rng, mode, routing):
    # R*C pool rows, four chunks of R*C tokens per macro-chunk: a carried row always leaves too little room.
    R, T, E, K = 4, 4 * C, 8, 2
    mesh, problem = ranks.mesh_of(R), problem_of(rng, R, T, E, K, ids=routing(rng, R, T, E, K), block_m=24)
    want, _ = ranks.one_device(problem.config)(*problem.args)
    with make_ring(problem.config, mesh, f"pool-{mode}", num_slots=4, pool_tokens=R * C) as ring:
        for _ in range(3):
            ring, _ = check(problem, mesh, mode, ring, want)


@pytest.mark.parametrize("capacity", [0, 1, 7, 1000])
def test_capacity_over_ranks_is_capacity_on_one_device(rng, capacity):
    R, T = 4, 13
    mesh, problem = ranks.mesh_of(R), problem_of(rng, R, T, capacity=capacity, masked=0.1)
    want, want_stats = ranks.one_device(problem.config)(*problem.args)
    kept = oracle.kept_routes(problem)
    dropped = ((problem.topk_ids >= 0) & ~kept).reshape(R, T, -1).sum((1, 2))
    assert dropped.sum() == want_stats.dropped_routes and (dropped.any() == (capacity < 1000))
    with make_ring(problem.config, mesh, next(names)) as ring:
        for mode in ("serial-packed", "overlap-packed", "batch", "xla"):
            new_ring, stats = check(problem, mesh, mode, ring, want)
            ring = ring if new_ring is None else new_ring
            np.testing.assert_array_equal(stats.dropped_routes, dropped, err_msg=mode)
            np.testing.assert_array_equal(stats.expert_rows, want_stats.expert_rows, err_msg=mode)


@pytest.mark.parametrize("policy", ["serial", "overlap"])
@pytest.mark.parametrize("rings", ["two-rings", "one-ring-twice"])
def test_two_layers_many_iterations_with_jitter(rng, rings, policy):
    R, T, E, K, iterations = 3, 13, 6, 2, 52
    mesh = ranks.mesh_of(R)
    first, second = (problem_of(rng, R, T, E, K) for _ in range(2))
    config = first.config
    ep = sm.expert_parallel(config, mesh=mesh)
    options = {"policy": policy, "chunks": None}

    def payload(n):  # tokens and routing are functions of the iteration
        return first.x * (1 + n) / 8, (first.topk_ids + n) % E, first.topk_weights + n

    def two(x, ids, weights, ring_a, ring_b):
        args = (ids, weights)
        h, ring_a, _ = ep.stream(x, ranks.given, first.w_gate_up, first.w_down, ring=ring_a, token_args=args, **options)
        ring = ring_a if ring_b is None else ring_b
        y, ring, _ = ep.stream(h, ranks.given, second.w_gate_up, second.w_down, ring=ring, token_args=args, **options)
        return (y, ring, None) if ring_b is None else (y, ring_a, ring)

    def reference(x, ids, weights):
        h = sm.moe(x, ids, weights, first.w_gate_up, first.w_down, config=config)
        return sm.moe(h, ids, weights, second.w_gate_up, second.w_down, config=config)

    run, want = jax.jit(two, donate_argnames=("ring_a", "ring_b")), jax.jit(reference)
    name_a, name_b = next(names), next(names)
    ring_a = make_ring(config, mesh, name_a)
    ring_b = make_ring(config, mesh, name_b) if rings == "two-rings" else None
    try:
        for name, phase in itertools.product((name_a, name_b), sm.testing.PHASES):
            sm.testing.add_fault(name, phase, "jitter", seconds=0.0004)
        for n in range(iterations):
            args = payload(n)
            y, ring_a, ring_b = jax.block_until_ready(run(*args, ring_a, ring_b))
            ranks.assert_bits(y, want(*args), f"iteration {n}")
        calls = iterations * (1 if ring_b is not None else 2)
        assert [r.call_number for r in sm.inspect(ring_a).ranks] == [calls] * R
    finally:
        sm.testing.clear_faults()
        sm.close_ring(name_a)
        sm.close_ring(name_b)


@pytest.mark.parametrize("with_ring", [False, True])
def test_checks_over_ranks_name_the_token(rng, mesh_of, with_ring):
    problem = oracle.make_problem(rng, T=16, H=32, I=16, E=4, K=2, dtype=jnp.float32)
    ids = np.array(problem.topk_ids)
    ids[11, 1] = 9  # token 3 of rank 1
    mesh = mesh_of(2)
    ep = sm.expert_parallel(problem.config, mesh=mesh)
    ring = None
    if with_ring:
        ring = sm.make_ring(problem.config, chunk_tokens=8, num_slots=1, mesh=mesh, name="checks-ranks", timeout_s=20)
    f = jax.jit(lambda i, x, w, g, d, ring: ep.moe(x, i, w, g, d, ring=ring, checks=True)[:2], donate_argnums=5)
    # Either rank's error may come first; without a ring the other one can only say that it is not its own.
    text = r"topk_ids\[3, 1\] is 9, outside -1\.\.3" + ("" if with_ring else "|topk_ids of another rank name no expert")
    with pytest.raises(Exception, match=text):
        jax.block_until_ready(f(ids, problem.x, problem.topk_weights, problem.w_gate_up, problem.w_down, ring))
    if with_ring:
        sm.close_ring("checks-ranks")
