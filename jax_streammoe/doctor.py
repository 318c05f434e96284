"""What was built, what this machine can do, and why not: facts for a bug report, and for users who wonder.

Contract: reads versions, files and environment, and asks the CUDA driver what devices there are; starts no computation,
no backend and no CUDA context. Every "no" carries its reason.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import shutil
from typing import NamedTuple

from . import ffi

COMPUTE_CAPABILITY = (9, 0)  # the kernels are sm_90a code, which runs on no other
_CAPABILITY_ATTRIBUTES = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


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
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        findings.append(Finding("several processes", free > 0, f"{free >> 20} MiB free in /dev/shm"))
    else:
        findings.append(Finding("several processes", False, "/dev/shm is missing"))
    why = _why_no_cuda()
    kernels = "sm_90a kernels in bfloat16 and float16, forward and backward; float32 in plain JAX"
    findings.append(Finding("CUDA backend", not why, why or kernels))
    return findings


def _why_no_cuda() -> str:
    """Why the CUDA kernels cannot run here; empty when they can."""
    if not ffi.compiled.WITH_CUDA:
        return "built without CUDA kernels: CPU only"
    try:
        found = _compute_capabilities()
    except OSError as error:
        return f"built with CUDA kernels, but {error}"
    if COMPUTE_CAPABILITY not in found:
        wanted, *got = ("{}.{}".format(*c) for c in (COMPUTE_CAPABILITY, *found))
        return f"the kernels need a device of compute capability {wanted}, found {', '.join(got)}"
    if not any("cuda" in plugin.name for plugin in importlib.metadata.entry_points(group="jax_plugins")):
        return "JAX has no CUDA plugin: pip install 'jax[cuda13]'"
    return ""


def _compute_capabilities() -> list[tuple[int, int]]:
    """Of every CUDA device, from the driver; at least one. Raises OSError with the reason when there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise OSError(f"there is no CUDA driver: {error}") from error

    def ask(function: str, *args: int) -> int:
        out = ctypes.c_int()
        if status := getattr(driver, function)(ctypes.byref(out), *args):
            raise OSError(f"{function} of the CUDA driver returned {status}")
        return out.value

    if status := driver.cuInit(0):
        raise OSError(f"cuInit of the CUDA driver returned {status}, 100 means no device")
    devices = [ask("cuDeviceGet", n) for n in range(ask("cuDeviceGetCount"))]
    if not devices:
        raise OSError("the CUDA driver sees no device")
    major, minor = _CAPABILITY_ATTRIBUTES
    return [(ask("cuDeviceGetAttribute", major, d), ask("cuDeviceGetAttribute", minor, d)) for d in devices]
