"""Gradients over the ranks of a ring on two GPUs: through its memory, with the bits of one GPU.

Values are compared with the f64 oracle in test_backward.py; here everything is compared with one GPU, bit by bit: who
owns a token or an expert must not enter a gradient, nor how the forward call was cut.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_streammoe as sm
from tests.helpers import oracle
from tests.helpers.layers import NAMES, assert_same_bits, run

pytestmark = pytest.mark.gpu(2)

RANKS = 2
HERE = 350  # tokens of a rank
SIZES = dict(T=RANKS * HERE, H=256, I=192, E=8, K=4, masked=0.05, invalid=0.02)
ROUTINGS = {
    "random": lambda ids: ids,
    "duplicates": lambda ids: np.where(ids >= 0, ids // 4 * 4, ids),
    "one expert": lambda ids: np.where(ids >= 0, 5, ids),
    "all remote": lambda ids: np.where(ids >= 0, ids % 4 + 4 * (1 - np.arange(len(ids)) // HERE)[:, None], ids),
    "rank 1 all masked": lambda ids: np.where(np.arange(len(ids))[:, None] < HERE, ids, -1),
    "none": lambda ids: np.full_like(ids, -1),
}


def _problem(routing="random", seed=3, **changes):
    problem = oracle.make_problem(np.random.default_rng(seed), **SIZES | dict(dtype=jnp.bfloat16) | changes)
    return problem.replace(topk_ids=ROUTINGS[routing](problem.topk_ids).astype(np.int32))


def _over_ranks(problem, mesh):
    """Operands by name, ids and dy, over the ranks."""
    put = lambda a: jax.device_put(a, NamedSharding(mesh, P("ep")))
    operands = {name: put(getattr(problem, name)) for name in NAMES if getattr(problem, name) is not None}
    return operands, put(problem.topk_ids), put(problem.dy)


def _call(ep, how, operands, ids, ring):
    """y and the ring of one forward call."""
    biases = {name: operands[name] for name in NAMES[4:] if name in operands}
    x, weights, *experts = (operands[name] for name in NAMES[:4])
    if how == "moe":
        return ep.moe(x, ids, weights, *experts, ring=ring, **biases)[:2]
    route = lambda x_c, ids_c, weights_c: (ids_c, weights_c)
    return ep.stream(x, route, *experts, ring=ring, token_args=(ids, weights), policy=how, chunks=None, **biases)[:2]


def _program(ep, how):
    """jitted operands, ids, dy, ring -> gradients, ring."""

    @functools.partial(jax.jit, donate_argnums=3)
    def gradients(operands, ids, dy, ring):
        _, pullback, ring = jax.vjp(lambda operands: _call(ep, how, operands, ids, ring), operands, has_aux=True)
        return pullback(dy)[0], ring

    return gradients


def test_the_ring_carries_the_gradient(mesh_of, new_ring):
    """And not XLA's collectives, while the tokens fit."""
    problem, mesh = _problem(), mesh_of(RANKS)
    args = _over_ranks(problem, mesh)
    for chunk_tokens, here in ((HERE, True), (HERE // 2, False)):
        ring = new_ring(problem.config, mesh=mesh, chunk_tokens=chunk_tokens, num_slots=1)
        text = _program(sm.expert_parallel(problem.config, mesh=mesh), "moe").lower(*args, ring).as_text()
        assert ("streammoe_ring_backward_v1" in text) == here
        assert ("all_to_all" in text) != here


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_bits_of_one_gpu(mesh_of, new_ring, routing, dtype):
    problem, mesh = _problem(routing, dtype=dtype, use_bias=True), mesh_of(RANKS)
    want = run("moe", problem).grads
    ring = new_ring(problem.config, mesh=mesh, chunk_tokens=HERE, num_slots=1)
    program, args = _program(sm.expert_parallel(problem.config, mesh=mesh), "moe"), _over_ranks(problem, mesh)
    for _ in range(3):
        grads, ring = program(*args, ring)
        assert_same_bits(grads, want, routing)
    ring.check()


@pytest.mark.parametrize("activation", ["swigluoai", "silu"])
@pytest.mark.parametrize(
    ("how", "chunk_tokens", "num_slots"),
    [("moe", 128, 3), ("moe", 64, 2), ("serial", 128, 3), ("overlap", 100, 4), ("overlap", 64, 2)],
)
def test_chunks_do_not_enter(mesh_of, new_ring, how, chunk_tokens, num_slots, activation):
    """Also where a rank has more tokens than slots hold, and the collectives take over."""
    problem, mesh = _problem(activation=activation), mesh_of(RANKS)
    ring = new_ring(problem.config, mesh=mesh, chunk_tokens=chunk_tokens, num_slots=num_slots)
    grads, ring = _program(sm.expert_parallel(problem.config, mesh=mesh), how)(*_over_ranks(problem, mesh), ring)
    assert_same_bits(grads, run("moe", problem).grads)
    ring.check()


def test_nan_in_masked_tokens_and_in_the_ring_reaches_nobody(mesh_of, new_ring):
    problem, mesh = _problem(), mesh_of(RANKS)
    problem.topk_ids[::5] = -1
    want = run("moe", problem).grads
    poisoned = problem.replace(x=problem.x.copy(), dy=problem.dy.copy(), topk_weights=problem.topk_weights.copy())
    ring = new_ring(problem.config, mesh=mesh, chunk_tokens=HERE, num_slots=1)
    program = _program(sm.expert_parallel(problem.config, mesh=mesh), "moe")
    everywhere = problem.replace(x=np.full_like(problem.x, np.nan), dy=np.full_like(problem.dy, np.nan))
    _, ring = program(*_over_ranks(everywhere, mesh), ring)  # leaves NaN in the ring's memory
    poisoned.x[::5], poisoned.dy[::5], poisoned.topk_weights[::5] = np.nan, np.nan, np.nan
    grads, _ = program(*_over_ranks(poisoned, mesh), ring)
    assert_same_bits(grads, want)


@pytest.mark.parametrize(
    "sizes",
    [dict(T=44, H=72, I=40, E=6, K=3), dict(T=60, H=264, I=200, E=64, K=37), dict(T=2, H=8, I=8, E=2, K=1)],
    ids=["tails", "more routes than lanes", "a token each"],
)
def test_other_sizes(mesh_of, new_ring, sizes):
    problem, mesh = _problem(**sizes, use_bias=True), mesh_of(RANKS)
    ring = new_ring(problem.config, mesh=mesh, chunk_tokens=sizes["T"] // RANKS, num_slots=1)
    program = _program(sm.expert_parallel(problem.config, mesh=mesh), "moe")
    grads, _ = program(*_over_ranks(problem, mesh), ring)
    assert_same_bits(grads, run("moe", problem).grads)


def test_steps_of_streams_with_a_late_rank(mesh_of, new_ring):
    """A forward call follows a backward at once, with other tokens, and works where its gradients lay."""
    problem, mesh = _problem(), mesh_of(RANKS)
    ring = new_ring(problem.config, mesh=mesh, chunk_tokens=100, num_slots=4)
    program = _program(sm.expert_parallel(problem.config, mesh=mesh), "overlap")
    turns = [problem.replace(x=np.roll(problem.x, n, 0), dy=np.roll(problem.dy, 2 * n, 0)) for n in range(3)]
    wants, args = [run("moe", p).grads for p in turns], [_over_ranks(p, mesh) for p in turns]
    sm.testing.add_fault(ring.name, "backward", "jitter", rank=0, seconds=0.002)
    sm.testing.add_fault(ring.name, "publish_route", "jitter", rank=1, seconds=0.001)
    try:
        results = []
        for turn in range(30):
            grads, ring = program(*args[turn % 3], ring)
            results.append(grads)
            if turn % 5 == 4:  # several steps are in flight
                for n, grads in enumerate(results, turn - 4):
                    assert_same_bits(grads, wants[n % 3], f"step {n}")
                results = []
    finally:
        sm.testing.clear_faults()


@pytest.mark.parametrize("remat", [False, True])
def test_layers_in_a_scan_with_a_late_rank(mesh_of, new_ring, remat):
    """Three layers, 50 steps, every step other tokens; the order of calls is the same on both ranks."""
    layers, mesh = 3, mesh_of(RANKS)
    problems = [_problem(seed=seed, masked=0.0, invalid=0.0) for seed in range(layers)]
    config = problems[0].config
    ep = sm.expert_parallel(config, mesh=mesh)
    ids, weights = problems[0].topk_ids, problems[0].topk_weights
    stacked = tuple(jnp.stack([getattr(p, name) for p in problems]) for name in NAMES[2:4])
    sharding = NamedSharding(mesh, P(None, "ep"))

    def loss(layer, x, experts, ring):
        def body(carry, experts):
            x, ring = carry
            y, ring = layer(x, experts, ring)
            return (x + y, ring), None

        if remat:
            body = jax.checkpoint(body, policy=sm.checkpoint_policy())
        (x, ring), _ = jax.lax.scan(body, (x, ring), experts)
        return jnp.sum(jnp.square(x.astype(jnp.float32))) / x.size, ring

    one = jax.jit(jax.grad(
        functools.partial(loss, lambda x, e, ring: (sm.moe(x, ids, weights, *e, config=config), ring)), (0, 1),
        has_aux=True,
    ))  # fmt: skip
    put = lambda a: jax.device_put(a, NamedSharding(mesh, P("ep")))
    ids_r, weights_r = put(ids), put(weights)
    two = jax.jit(
        jax.grad(
            functools.partial(loss, lambda x, e, ring: ep.moe(x, ids_r, weights_r, *e, ring=ring)[:2]), (0, 1),
            has_aux=True,
        ),
        donate_argnums=2,
    )  # fmt: skip
    inputs = [jnp.roll(problems[0].x, n, axis=0) for n in range(3)]
    wants = [one(x, stacked, jnp.zeros(()))[0] for x in inputs]
    inputs, over = [put(x) for x in inputs], tuple(jax.device_put(a, sharding) for a in stacked)
    ring = new_ring(config, mesh=mesh, chunk_tokens=HERE, num_slots=1)
    sm.testing.add_fault(ring.name, "backward", "jitter", rank=1, seconds=0.002)
    try:
        for step in range(50):
            grads, ring = two(inputs[step % 3], over, ring)
            assert_same_bits(grads, wants[step % 3], f"step {step}")
    finally:
        sm.testing.clear_faults()
    assert [s.call_number for s in sm.inspect(ring).ranks] == [2 * layers * 50] * RANKS


def test_a_ref_ring(mesh_of, new_ring):
    problem, mesh = _problem(), mesh_of(RANKS)
    ref = new_ring(problem.config, mesh=mesh, chunk_tokens=HERE, num_slots=1, mutable=True)
    ep = sm.expert_parallel(problem.config, mesh=mesh)
    operands, ids, dy = _over_ranks(problem, mesh)

    @jax.jit
    def gradients(operands, ids, dy, ref):
        return jax.vjp(lambda operands: _call(ep, "moe", operands, ids, ref)[0], operands)[1](dy)[0]

    want = run("moe", problem).grads
    for _ in range(2):
        assert_same_bits(gradients(operands, ids, dy, ref), want)


def test_a_rank_that_goes_silent_in_the_backward(mesh_of, new_ring):
    """The other ends at its deadline, every gradient there is NaN, and the next call says why."""
    problem, mesh = _problem(), mesh_of(RANKS)
    ring = new_ring(problem.config, mesh=mesh, chunk_tokens=HERE, num_slots=1, timeout_s=1.0)
    program = _program(sm.expert_parallel(problem.config, mesh=mesh), "moe")
    args = _over_ranks(problem, mesh)
    with sm.testing.fault(ring.name, "backward", "drop", rank=1):
        grads, ring = jax.block_until_ready(program(*args, ring))
    for name, value in grads.items():
        assert np.isnan(np.asarray(value, np.float32)).all(), name
    with pytest.raises(RuntimeError, match=r"(waited 1 s for rank 1 in phase dispatch|because rank \d failed)"):
        ring.check()


def test_a_ring_that_is_made_again_serves_the_same_program(mesh_of, new_ring):
    problem, mesh = _problem(), mesh_of(RANKS)
    options = dict(mesh=mesh, chunk_tokens=HERE, num_slots=1)
    ring = new_ring(problem.config, **options)
    program = _program(sm.expert_parallel(problem.config, mesh=mesh), "moe")
    args = _over_ranks(problem, mesh)
    with sm.testing.fault(ring.name, "backward", "fail", rank=1), pytest.raises(Exception, match="rank 1"):
        jax.block_until_ready(program(*args, ring))
    ring = sm.make_ring(problem.config, name=ring.name, **options)
    grads, ring = program(*args, ring)
    assert_same_bits(grads, run("moe", problem).grads)
    ring.check()
