"""Ranks in several processes, ring in shared memory: bits of one process, errors when processes differ or die.

Processes meet through jax.distributed on a free port, collectives are gloo. Every test has a hard time limit, shows
what each process printed when something is wrong, and looks at /dev/shm at its end.
"""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.helpers import ranks
from tests.multiprocess import worker

pytestmark = pytest.mark.multiprocess
LIMIT_S = 100


def segments():
    return {p.name for p in pathlib.Path("/dev/shm").glob("streammoe-*")}


def run(scenario, processes, devices, folder):
    """Starts the processes and waits for all; -> their outputs. Kills what is left after LIMIT_S."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    started = [
        subprocess.Popen(
            [sys.executable, worker.__file__, scenario, *map(str, (rank, processes, devices, port, folder))],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True,
        )
        for rank in range(processes)
    ]  # fmt: skip
    outputs = []
    try:
        for process in started:
            try:
                outputs.append(process.communicate(timeout=LIMIT_S)[0])
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                outputs.append(process.communicate()[0] + f"\nkilled after {LIMIT_S} s")
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    codes = [p.returncode for p in started]
    report = "\n".join(f"--- exit {code}\n{text}" for code, text in zip(codes, outputs, strict=True))
    assert not any(codes), report
    return outputs


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory():
    before = segments()
    yield
    assert segments() <= before


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(2, 1), (2, 2), (4, 1)], ids=["2x1", "2x2", "4x1"])
def test_same_bits_as_one_process(tmp_path, processes, devices):
    num_ranks = processes * devices
    run("same", processes, devices, tmp_path)
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
