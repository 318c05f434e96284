"""Builds native.cu and calls it: a spinner for tests of progress, and wrong kernels that a sanitizer must see.

Contract: `library` builds once per test session, with the nvcc that is there, and skips without one. `spinning` leaves
no spinner behind. Run as `python native.py LIBRARY WRONG`, this file runs one of the wrong kernels, in a process of its
own, since what follows an error of the device is undefined. Trade-off: ctypes instead of an FFI target, so that none of
it is part of a program of XLA's.
"""

from __future__ import annotations

import contextlib
import ctypes
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

SOURCE = pathlib.Path(__file__).with_name("native.cu")
SPIN_LIMIT_S = 20.0  # after which a call that waits for the spinner's SMs goes on, and its test fails
WRONG = ("memory", "xla", "race", "sync")


def find_tool(name: str) -> str | None:
    """The path of a program of the CUDA toolkit, or None."""
    return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")


def library(tmp_path_factory: Any) -> pathlib.Path:
    """The compiled library."""
    import pytest

    out = tmp_path_factory.getbasetemp() / "native.so"
    if not out.exists():
        nvcc = find_tool("nvcc")
        if nvcc is None:
            pytest.skip("native.cu needs nvcc, which is neither on PATH nor in /usr/local/cuda/bin")
        system = shutil.which("g++", path="/usr/bin")  # before whatever an environment puts first
        options = ["-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-O3", "-lineinfo", "-cudart", "static"]
        options += ["-shared", "-Xcompiler", "-fPIC", *(["-ccbin", system] if system else [])]
        done = subprocess.run([nvcc, *options, SOURCE, "-o", out], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return out


def load(path: pathlib.Path | str) -> ctypes.CDLL:
    """The library, ready to be called."""
    native = ctypes.CDLL(str(path))
    native.spin_start.argtypes = [ctypes.c_int, ctypes.c_double]
    native.wrong_read.argtypes = [ctypes.c_void_p]
    return native


@contextlib.contextmanager
def spinning(native: ctypes.CDLL, num_sms: int) -> Iterator[None]:
    """`num_sms` SMs are busy inside the block, and were so to its end; else an AssertionError."""
    error = native.spin_start(num_sms, SPIN_LIMIT_S)
    assert error == 0, f"the spinner did not start: CUDA error {error}"
    try:
        yield
        assert native.spin_running(), f"what should run beside the spinner waited {SPIN_LIMIT_S} s for its end"
    finally:
        error = native.spin_stop()
    assert error == 0, f"the spinner failed: CUDA error {error}"


def run_wrong(path: str, which: str) -> int:
    """Runs a kernel that is wrong; returns a CUDA error, which a sanitizer may keep at 0."""
    native = load(path)
    if which != "xla":
        return {"memory": native.wrong_memory, "race": native.wrong_race, "sync": native.wrong_sync}[which]()
    import jax
    import numpy as np

    # Past the end of 576 bytes, in the gap that alignment leaves before whatever XLA allocates next.
    data = jax.block_until_ready(jax.device_put(np.zeros(576, np.uint8), jax.devices("gpu")[0]))
    return native.wrong_read(data.unsafe_buffer_pointer() + 700)


if __name__ == "__main__":
    print(f"CUDA error {run_wrong(*sys.argv[1:])}", flush=True)
