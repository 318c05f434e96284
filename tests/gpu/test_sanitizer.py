"""compute-sanitizer on the kernels: bounds, races in shared memory, barriers; and that it would see a wrong one.

The tools look at kernels of namespace streammoe only and serialise them, so a stream that needed two kernels at once
would end at its deadline. Buffers come from cudaMallocAsync, which memcheck knows by the byte; XLA's own pool would be
one large buffer, in which hardly anything is out of bounds.
"""

from __future__ import annotations

import os
import pathlib
import re

import numpy as np
import pytest

from tests.gpu import native, sanitized
from tests.helpers import processes

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

LIMIT_S = 400
FOUND = 99  # the exit code that stands for errors found
CLEAN = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    "synccheck": "ERROR SUMMARY: 0 errors",
}
# racecheck follows every access of shared memory: a few calls with every kernel.
CALLS = {check: list(sanitized.CALLS) for check in CLEAN} | {
    "racecheck": ["moe", "copied", "overlap", "gradient", "gradient_kept"]
}


@pytest.fixture(scope="module")
def tool() -> str:
    path = native.find_tool("compute-sanitizer")
    if path is None:
        pytest.skip("compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin")
    return path


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> pathlib.Path:
    return native.library(tmp_path_factory)


def run(tool: str, check: str, *command: object) -> tuple[int, str]:
    """Runs `python *command` under a tool of the sanitizer; -> its exit code and all that was printed."""
    options = [
        "--tool", check, "--kernel-name", "kns=streammoe", "--error-exitcode", str(FOUND),
        "--target-processes", "application-only", "--launch-timeout", "120", "--print-limit", "20",
        "--destroy-on-device-error", "kernel",
        # JAX asks the driver for things that it may not have, and goes on without them.
        *(["--report-api-errors", "no"] if check == "memcheck" else []),
    ]  # fmt: skip
    env = os.environ | {
        "JAX_PLATFORMS": "cuda,cpu",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async",
    }
    process = processes.start(*command, env=env, before=[tool, *options])
    output = processes.output_of(process, LIMIT_S)
    return process.returncode, output


@pytest.mark.parametrize("check", CLEAN)
def test_kernels_are_clean(tool, tmp_path, check):
    names, out = CALLS[check], tmp_path / "results.npz"
    code, output = run(tool, check, sanitized.__file__, out, *names)
    assert code == 0 and CLEAN[check] in output, output
    assert re.findall(r"^(\w+) ran on gpu$", output, re.M) == names, output
    with np.load(out) as results:
        for name in names:
            np.testing.assert_array_equal(results[name], sanitized.batch_ready(name), err_msg=name)


@pytest.mark.parametrize(
    ("check", "wrong", "report"),
    [
        ("memcheck", "memory", r"Invalid __global__ read of size 1"),
        ("memcheck", "xla", r"Invalid __global__ read of size 1"),
        ("racecheck", "race", r"Race reported between"),
        ("synccheck", "sync", r"Barrier error detected"),
    ],
)
def test_wrong_kernels_are_found(tool, library, check, wrong, report):
    """Each tool reports a wrong kernel under the same options; memory by cudaMalloc, and a buffer of XLA's."""
    code, output = run(tool, check, native.__file__, library, wrong)
    assert code == FOUND and CLEAN[check] not in output, output
    assert re.search(report + r"(?s:.*)streammoe::wrong::", output), output
