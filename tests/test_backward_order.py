"""Backward calls over ranks run in exact reverse order on every rank, after the last forward call.

Ranks wait for each other inside a backward, so another order on one of them is a deadlock. Each layer has a ring of its
own here, because an event of the timeline names the ring; its `rank` is the device. `trace` sees what ran, not what was
asked for. A loss whose cotangent does not depend on the forward is the hard case: only the token orders it.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_streammoe as sm
from tests.helpers import oracle, ranks

R, LAYERS = 4, 3
names = (f"order-{n}" for n in itertools.count())


def problem_of(rng):
    return oracle.make_problem(rng, T=R * 6, H=16, I=24, E=8, K=2, dtype=jnp.float32, block_m=8)


def rings_of(problem, mesh, count):
    return [
        sm.make_ring(problem.config, chunk_tokens=4, num_slots=2, mesh=mesh, name=next(names), timeout_s=20)
        for _ in range(count)
    ]


def layer_of(ep, problem):
    def layer(h, w_down, ring):
        args = (problem.topk_ids, problem.topk_weights)
        y, ring, _ = ep.stream(h, ranks.given, problem.w_gate_up, w_down, ring=ring, token_args=args, chunks=None)
        return y, ring

    return layer


def events_of(run, *args):
    """Runs once to compile, once recorded; -> result, {rank: [(phase, ring)]} of backward and close by begin time."""
    out = jax.block_until_ready(run(*args))
    with sm.trace.record() as events:
        out = jax.block_until_ready(run(*args[:-1], out[1]))
    order = {rank: [] for rank in range(R)}
    for event in events:
        if event.phase in ("backward", "close"):
            order[event.rank].append((event.phase, event.ring))
    for rank in range(R):  # calls of one rank never overlap
        mine = sorted((e.begin_s, e.end_s) for e in events if e.rank == rank and e.phase == "backward")
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(mine))
    return out, order


def expect(order, forward):
    want = [("close", name) for name in forward] + [("backward", name) for name in reversed(forward)]
    for rank in range(R):
        assert order[rank] == want, f"rank {rank}: {order[rank]}, want {want}"


@pytest.mark.parametrize("remat", [False, True], ids=["plain", "remat"])
def test_unrolled_layers(rng, remat):
    problem, mesh = problem_of(rng), ranks.mesh_of(R)
    layer = layer_of(sm.expert_parallel(problem.config, mesh=mesh), problem)
    if remat:
        layer = jax.checkpoint(layer, policy=sm.checkpoint_policy())

    def loss(w_down, rings):
        h, out = problem.x, []
        for ring in rings:
            y, ring = layer(h, w_down, ring)
            h = jnp.tanh(y)
            out.append(ring)
        return jnp.sum(h * problem.dy), out

    rings = rings_of(problem, mesh, LAYERS)
    _, order = events_of(jax.jit(jax.grad(loss, has_aux=True), donate_argnums=1), problem.w_down, rings)
    expect(order, [ring.name for ring in rings])


def test_parallel_branches_on_one_ring(rng):
    # Nothing but the ring's token orders the branches, forward or backward; branches differ by weights.
    problem, mesh = problem_of(rng), ranks.mesh_of(R)
    layer = layer_of(sm.expert_parallel(problem.config, mesh=mesh), problem)

    def loss(scales, ring):
        total = jnp.float32(0)
        for n in range(LAYERS):
            y, ring = layer(problem.x, problem.w_down * scales[n], ring)
            total += jnp.sum(y * problem.dy)
        return total, ring

    (ring,) = rings_of(problem, mesh, 1)
    run = jax.jit(jax.grad(loss, has_aux=True), donate_argnums=1)
    scales = jnp.arange(1, 1 + LAYERS, dtype=jnp.float32)
    for _ in range(6):  # an order that only luck holds does not hold for long
        (grads, ring), order = events_of(run, scales, ring)
        expect(order, [ring.name] * LAYERS)
        np.testing.assert_allclose(grads, np.full(LAYERS, grads[0]), rtol=1e-5)
    sm.close_ring(ring)


def test_parallel_branches_on_rings_of_their_own(rng):
    problem, mesh = problem_of(rng), ranks.mesh_of(R)
    layer = layer_of(sm.expert_parallel(problem.config, mesh=mesh), problem)

    def loss(w_down, rings):
        total, out = jnp.float32(0), []
        for ring in rings:
            y, ring = layer(problem.x, w_down, sm.after(ring, *out[-1:]))
            total += jnp.sum(y * problem.dy)
            out.append(ring)
        return total, out

    rings = rings_of(problem, mesh, LAYERS)
    run = jax.jit(jax.value_and_grad(loss, has_aux=True), donate_argnums=1)

    def swapped(w_down, rings):
        (value, rings), grads = run(w_down, rings)
        return (value, grads), rings

    for _ in range(4):
        (_, rings), order = events_of(swapped, problem.w_down, rings)
        closes = {rank: [name for phase, name in order[rank] if phase == "close"] for rank in range(R)}
        backs = {rank: [name for phase, name in order[rank] if phase == "backward"] for rank in range(R)}
        assert all(closes[rank] == [ring.name for ring in rings] for rank in range(R)), closes
        assert all(backs[rank] == backs[0] for rank in range(R)), backs


def test_scan_over_layers(rng):
    problem, mesh = problem_of(rng), ranks.mesh_of(R)
    layer = layer_of(sm.expert_parallel(problem.config, mesh=mesh), problem)

    def loss(scales, ring):
        def step(carry, scale):
            h, ring = carry
            y, ring = layer(h, problem.w_down * scale, ring)
            return (jnp.tanh(y), ring), None

        (h, ring), _ = jax.lax.scan(step, (jnp.asarray(problem.x), ring), scales)
        return jnp.sum(h * problem.dy), ring

    (ring,) = rings_of(problem, mesh, 1)
    run = jax.jit(jax.grad(loss, has_aux=True), donate_argnums=1)
    (_, ring), order = events_of(run, jnp.ones(LAYERS, jnp.float32), ring)
    expect(order, [ring.name] * LAYERS)
    sm.close_ring(ring)


def test_accumulation_of_gradients_in_one_program(rng):
    # A later forward is put after an earlier backward by `after(ring, grads)`.
    problem, mesh = problem_of(rng), ranks.mesh_of(R)
    layer = layer_of(sm.expert_parallel(problem.config, mesh=mesh), problem)

    def loss(w_down, ring, x):
        y, ring = layer(x, w_down, ring)
        return jnp.sum(y * problem.dy), ring

    def accumulate(w_down, ring):
        first, ring = jax.grad(loss, has_aux=True)(w_down, ring, problem.x)
        second, ring = jax.grad(loss, has_aux=True)(w_down, sm.after(ring, first), -problem.x)
        return first + second, ring

    (ring,) = rings_of(problem, mesh, 1)
    run = jax.jit(accumulate, donate_argnums=1)
    for _ in range(4):
        (_, ring), order = events_of(run, problem.w_down, ring)
        assert all(order[rank] == [("close", ring.name), ("backward", ring.name)] * 2 for rank in range(R)), order
    sm.close_ring(ring)
