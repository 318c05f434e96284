"""A ring over two processes with a GPU each: one maps the other's memory, and gets the bits of one GPU.

Processes see one GPU or all, and XLA's memory comes from its pool at once, from a pool that grows, or piece by piece.
This process holds most of both GPUs, so theirs are small.
"""

from __future__ import annotations

import functools
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_streammoe as sm
from tests.gpu import processes as worker
from tests.helpers import oracle, processes

pytestmark = [pytest.mark.gpu(2), pytest.mark.multiprocess]

COUNT = 2
LIMIT_S = 240
MEMORY = {
    "pool": {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".05"},
    "growing": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    "platform": {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"},
    "async": {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
}


def run(scenario, folder, visible, memory, codes=(), count=COUNT):
    every = ",".join(map(str, range(count)))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")[:count]
    env = [MEMORY[memory] | {"CUDA_VISIBLE_DEVICES": gpu if visible == "one" else ",".join(gpus)} for gpu in gpus]
    return processes.run(worker.__file__, scenario, count, folder, env=env, codes=codes, limit_s=LIMIT_S)


@pytest.fixture(scope="module")
def layer():
    """topk_ids -> the bits of y on one GPU."""
    problem = oracle.as_jax(worker.problem_of(COUNT))
    run = jax.jit(functools.partial(sm.moe, **problem.kwargs))
    return lambda topk_ids: np.asarray(run(problem.x, jnp.asarray(topk_ids), *problem.args[2:])).view(np.uint16)


@pytest.fixture(scope="module")
def wanted(layer):
    return layer(worker.problem_of(COUNT).topk_ids)


@pytest.mark.parametrize(("visible", "memory"), [("one", "pool"), ("all", "growing"), ("one", "platform")])
def test_same_bits_as_one_process(tmp_path, wanted, visible, memory):
    for output in run("same", tmp_path, visible, memory):
        assert "DONE" in output
    names = [f"{turn}-{mode}" for turn in range(2) for mode in worker.MODES]
    for name in (*names, "0-ref"):
        np.testing.assert_array_equal(worker.load(tmp_path, name), wanted, err_msg=name)


def test_gradients_have_the_bits_of_one_gpu(tmp_path):
    for output in run("gradient", tmp_path, "one", "pool"):
        assert "DONE" in output
    problem = oracle.as_jax(worker.problem_of(COUNT))
    x, ids, *rest = problem.args
    layer = lambda x, *rest: sm.moe(x, ids, *rest, config=problem.config)
    wanted = jax.jit(lambda dy, *args: jax.vjp(layer, *args)[1](dy))(problem.dy, x, *rest)
    for name, want in zip(worker.GRADIENTS, wanted, strict=True):
        got = worker.load(tmp_path, f"0-{name}")
        np.testing.assert_array_equal(got, np.asarray(want).view(np.uint16), err_msg=name)
        assert got.any()


def test_memory_that_cannot_be_shared_is_refused(tmp_path):
    for output in run("refused", tmp_path, "one", "async"):
        assert "EXPECTED" in output and "DONE" in output


@pytest.mark.parametrize(
    ("scenario", "visible"),
    [("first_with_product", "one"), ("first_beside_thread", "one"), ("first_beside_thread", "all")],
)
def test_a_first_call_beside_the_start_of_cublas(tmp_path, wanted, scenario, visible):
    for output in run(scenario, tmp_path, visible, "growing"):
        assert "DONE" in output
    np.testing.assert_array_equal(worker.load(tmp_path, "0-first"), wanted)


def test_ranks_that_call_in_another_order(tmp_path, wanted):
    outputs = run("other_order", tmp_path, "one", "pool")
    assert all("EXPECTED" in output and "DONE" in output for output in outputs)
    assert any("disagree about the" in output for output in outputs), outputs
    np.testing.assert_array_equal(worker.load(tmp_path, "0-A"), wanted)
    rows = wanted.reshape(COUNT, worker.TOKENS, -1)[:, : worker.SHORT].reshape(COUNT * worker.SHORT, -1)
    np.testing.assert_array_equal(worker.load(tmp_path, "0-B"), rows)


def test_replays_with_alternating_routes(tmp_path, layer):
    for output in run("replays", tmp_path, "one", "pool"):
        assert "DONE" in output
    problem = worker.problem_of(COUNT)
    wants = [layer(np.roll(problem.topk_ids, n, axis=0)) for n in range(worker.ROUTINGS)]
    assert len({want.tobytes() for want in wants}) == worker.ROUTINGS
    for turn in range(13):
        got = worker.load(tmp_path, f"{turn:02d}-replay")
        np.testing.assert_array_equal(got, wants[turn % worker.ROUTINGS], err_msg=f"turn {turn}")


@pytest.mark.parametrize("visible", ["one", "all"])
def test_a_process_that_is_killed(tmp_path, wanted, visible):
    first, last = run("killed", tmp_path, visible, "pool", codes=(0, -signal.SIGKILL))
    assert "EXPECTED to go on" in first and "EXPECTED to die" in last
    np.testing.assert_array_equal(worker.load(tmp_path, "0-before"), wanted)
    np.testing.assert_array_equal(worker.load(tmp_path, "0-alone"), wanted)
