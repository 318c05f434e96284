"""Ranks in several processes, ring in shared memory: bits of one process, errors when processes differ or die.

Processes meet through jax.distributed on a free port, collectives are gloo. Every test has a hard time limit, shows
what each process printed when something is wrong, and looks at /dev/shm at its end.
"""

from __future__ import annotations

import pathlib

import jax
import numpy as np
import pytest

from tests.helpers import processes, ranks
from tests.multiprocess import worker

pytestmark = pytest.mark.multiprocess
LIMIT_S = 100


def segments():
    return {p.name for p in pathlib.Path("/dev/shm").glob("streammoe-*")}


def run(scenario, count, devices, folder):
    return processes.run(worker.__file__, scenario, count, folder, devices, limit_s=LIMIT_S)


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory():
    before = segments()
    yield
    assert segments() <= before


@pytest.mark.slow
@pytest.mark.parametrize(("count", "devices"), [(2, 1), (2, 2), (4, 1)], ids=["2x1", "2x2", "4x1"])
def test_same_bits_as_one_process(tmp_path, count, devices):
    num_ranks = count * devices
    run("same", count, devices, tmp_path)
    problem, mesh = worker.problem_of(num_ranks), ranks.mesh_of(num_ranks)
    args = worker.place(problem, mesh)
    run_here = worker.program(worker.layer_of(problem, mesh, "serial"), "serial")
    with worker.ring_of(problem, mesh, name="one-process") as ring:
        y, _, grads = jax.block_until_ready(run_here(*args, ring))
    for turn in range(2):
        for mode in worker.MODES:
            for name, want in zip(("y", "dx", "dweights", "dw1", "dw2"), (y, *grads), strict=True):
                parts = sorted(tmp_path.glob(f"{turn}-{mode}-{name}-*.npy"))
                assert len(parts) == num_ranks
                ranks.assert_bits(np.concatenate([np.load(p) for p in parts]), want, f"{turn} {mode} {name}")
    expected, _ = ranks.one_device(problem.config)(*problem.args)
    ranks.assert_bits(y, expected)


@pytest.mark.slow
def test_processes_that_disagree(tmp_path):
    for output in run("disagree", 2, 1, tmp_path):
        assert "EXPECTED ring 'ring': processes disagree" in output and "DONE" in output


@pytest.mark.slow
def test_a_process_that_is_missing(tmp_path):
    outputs = run("missing", 2, 1, tmp_path)
    assert "EXPECTED" in outputs[0] and "DONE" in outputs[1]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["late", "early", "leftover"])
def test_a_ring_is_made_after_attempts_that_failed_on_some_processes(tmp_path, scenario):
    for output in run(scenario, 2, 1, tmp_path):
        assert "EXPECTED" in output and "DONE" in output


@pytest.mark.slow
def test_a_process_that_is_killed_in_a_stream(tmp_path):
    first, last = run("killed", 2, 1, tmp_path)
    assert "EXPECTED to go on" in first and "EXPECTED to die" in last
