"""Four and eight GPUs of one host, where a machine has them: the bits of one GPU, in one process and in one per GPU.

What two GPUs show at length (test_ranks.py, test_ranks_backward.py, test_processes.py) is repeated here at other
numbers of ranks, with the helpers that run 1 to 8 ranks on CPU devices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_streammoe as sm
from tests.gpu import processes as worker
from tests.gpu import test_processes
from tests.helpers import oracle, ranks

T, E, K = 150, 16, 4  # tokens of a rank: several chunks, slots that are used again, and macro-chunks
SIZES = dict(H=256, I=192, E=E, K=K, dtype=jnp.bfloat16)
RING = dict(chunk_tokens=32, num_slots=2, timeout_s=60)

each_size = pytest.mark.parametrize("R", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (4, 8)])


def check_modes(problem, R, modes):
    mesh = ranks.mesh_of(R)
    want, stats = ranks.one_device(problem.config)(*problem.args)
    ring = sm.make_ring(problem.config, mesh=mesh, name=f"more-{R}", **RING)
    for mode in modes:
        y, used, got = ranks.run(problem, mesh, mode, ring)
        ranks.assert_bits(y, want, mode)
        np.testing.assert_array_equal(got.expert_rows, stats.expert_rows, mode)
        ring = ring if used is None else used
    sm.close_ring(ring)


@each_size
def test_every_mode_has_the_bits_of_one_gpu(rng, R):
    check_modes(oracle.make_problem(rng, T=R * T, masked=0.05, invalid=0.02, **SIZES), R, ranks.MODES)


@each_size
@pytest.mark.parametrize("routing", ranks.ROUTINGS, ids=lambda f: f.__name__)
def test_adversarial_routing(rng, R, routing):
    problem = oracle.make_problem(rng, T=R * T, ids=routing(rng, R, T, E, K), **SIZES)
    check_modes(problem, R, ("batch", "serial-packed", "overlap-packed"))


@each_size
@pytest.mark.parametrize("transport", ["pull", "xla"])
def test_gradients_have_the_bits_of_one_gpu(rng, R, transport):
    problem = oracle.make_problem(rng, T=R * T, masked=0.05, use_bias=True, **SIZES)
    mesh, biases = ranks.mesh_of(R), (problem.b_gate_up, problem.b_down)
    ep = sm.expert_parallel(problem.config, mesh=mesh, transport=transport)
    ring = None
    if transport == "pull":
        ring = sm.make_ring(problem.config, mesh=mesh, name=f"more-{R}", **RING | dict(chunk_tokens=T))
    x, ids, *rest = problem.args

    def over_ranks(ring, x, *args):
        *args, b_gate_up, b_down = args
        y, ring, _ = ep.moe(x, ids, *args, ring=ring, b_gate_up=b_gate_up, b_down=b_down)
        return y, ring

    def alone(x, *args):
        *args, b_gate_up, b_down = args
        return sm.moe(x, ids, *args, config=problem.config, b_gate_up=b_gate_up, b_down=b_down)

    def step(ring, dy, *args):
        y, pullback, ring = jax.vjp(lambda *a: over_ranks(ring, *a), *args, has_aux=True)
        return (y, *pullback(dy)), ring

    operands = (x, *rest, *biases)
    got, ring = jax.jit(step, donate_argnums=0)(ring, problem.dy, *operands)
    y, pullback = jax.vjp(alone, *operands)
    names = ("y", "x", "topk_weights", "w_gate_up", "w_down", "b_gate_up", "b_down")
    for name, mine, want in zip(names, got, (y, *pullback(problem.dy)), strict=True):
        ranks.assert_bits(mine, want, name)
    if ring is not None:
        ring.check()
        sm.close_ring(ring)


@each_size
@pytest.mark.multiprocess
def test_a_process_per_gpu(tmp_path, R):
    problem = oracle.as_jax(worker.problem_of(R))
    for scenario in ("same", "gradient"):
        for output in test_processes.run(scenario, tmp_path, "one", "pool", count=R):
            assert "DONE" in output
    want = np.asarray(sm.moe(*problem.args, config=problem.config)).view(np.uint16)
    for mode in worker.MODES:
        np.testing.assert_array_equal(worker.load(tmp_path, f"0-{mode}"), want, err_msg=mode)
    x, ids, *rest = problem.args
    pullback = jax.vjp(lambda x, *rest: sm.moe(x, ids, *rest, config=problem.config), x, *rest)[1]
    for name, gradient in zip(worker.GRADIENTS, pullback(problem.dy), strict=True):
        got = worker.load(tmp_path, f"0-{name}")
        np.testing.assert_array_equal(got, np.asarray(gradient).view(np.uint16), err_msg=name)
