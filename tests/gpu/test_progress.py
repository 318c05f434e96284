"""Nothing waits for what cannot run: SMs held by others, launches that block, one hardware queue, a cold start.

docs/protocol.md says why no call can deadlock; these are the situations in which a call that needs two kernels at once,
all SMs, or a kernel that is not loaded yet, would hang. A hang is an error here: spinner, ring and process have limits.
"""

from __future__ import annotations

import os
import re

import jax
import numpy as np
import pytest

import jax_streammoe as sm
from tests.gpu import native, sanitized
from tests.helpers import oracle, processes

pytestmark = pytest.mark.gpu

LIMIT_S = 150  # of a process, with the start of JAX and three compilations
ENVIRONMENTS = {
    "plain": {},
    "launches block": {"CUDA_LAUNCH_BLOCKING": "1"},
    "one queue": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    "one queue, launches block": {"CUDA_LAUNCH_BLOCKING": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
}


@pytest.fixture(scope="module")
def spinner(tmp_path_factory):
    return native.load(native.library(tmp_path_factory))


@pytest.fixture(scope="module")
def wanted():
    return sanitized.batch_ready("moe")


@pytest.mark.parametrize("name", ["moe", "serial", "overlap"])
def test_a_kernel_that_holds_two_sms_hangs_nothing(spinner, wanted, name):
    problem, run, ring = oracle.as_jax(sanitized.problem_of(name)), sanitized.program(name), sanitized.make_ring(name)
    try:
        for _ in range(4):  # everything is compiled, loaded, and captured where XLA captures
            y, ring = jax.block_until_ready(run(problem, ring))
        with native.spinning(spinner, 2):
            for _ in range(3):
                y, ring = jax.block_until_ready(run(problem, ring))
        np.testing.assert_array_equal(sanitized.raw_bytes(y), wanted)
        if ring is not None:
            ring.check()
    finally:
        sm.close_ring(f"sanitized-{name}")


def test_the_spinner_holds_what_it_says(spinner):
    """On all SMs it does keep a call from ending, so the tests above can fail."""
    problem, run = oracle.as_jax(sanitized.problem_of("moe")), sanitized.program("moe")
    for _ in range(4):
        jax.block_until_ready(run(problem, None))
    assert spinner.spin_start(spinner.num_sms(), 1.0) == 0
    y, _ = run(problem, None)
    y.block_until_ready()
    waited = not spinner.spin_running()
    assert spinner.spin_stop() == 0
    assert waited, "the layer ran although no SM was free"


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_fresh_process_whose_first_call_is_a_stream(tmp_path, wanted, name):
    names, out = ["overlap", "serial", "moe"], tmp_path / "results.npz"
    # This process holds most of the GPU's memory already.
    env = os.environ | {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | ENVIRONMENTS[name]
    process = processes.start(sanitized.__file__, out, *names, env=env)
    output = processes.output_of(process, LIMIT_S)
    assert process.returncode == 0, output
    assert re.findall(r"^(\w+) ran on gpu$", output, re.M) == names, output
    with np.load(out) as results:
        for call in names:
            np.testing.assert_array_equal(results[call], wanted, err_msg=call)
