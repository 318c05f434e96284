"""What was built, what this machine can do, and why not: facts for a bug report, and for users who wonder.

Contract: reads versions, files and environment; starts no computation and no backend. Every "no" carries its reason.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from typing import NamedTuple

from . import ffi


class Finding(NamedTuple):
    """One fact: what was looked at, whether it is fine, and what was seen or is missing."""

    what: str
    ok: bool
    detail: str


def doctor() -> list[Finding]:
    """Returns findings about this build and machine; print them with `python -m jax_streammoe doctor`."""
    built, runtime = tuple(ffi.compiled.FFI_API_VERSION), ffi.runtime_ffi_version()
    findings = [
        Finding("python", True, platform.python_version()),
        *(Finding(name, True, importlib.metadata.version(name)) for name in ("jax", "jaxlib", "numpy")),
        Finding("FFI", True, f"built on {built[0]}.{built[1]}, jaxlib has {runtime[0]}.{runtime[1]}"),
        Finding("CPU backend", True, f"{ffi.compiled.default_threads()} cores for expert GEMMs, OpenBLAS"),
    ]
    shm = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    findings.append(
        Finding("several processes", shm > 0, f"{shm >> 20} MiB free in /dev/shm" if shm else "/dev/shm is missing")
    )
    if ffi.compiled.WITH_CUDA:
        findings.append(
            Finding("CUDA backend", True, "sm_90a kernels for the batch-ready bfloat16 forward; the rest in JAX")
        )
    else:
        findings.append(Finding("CUDA backend", False, "built without CUDA kernels: CPU only"))
    return findings
