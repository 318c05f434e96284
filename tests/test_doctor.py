"""What `doctor` says of a machine, and where the CUDA path falls back to plain JAX: facts, with no device touched."""

from __future__ import annotations

import ctypes
import importlib.metadata
import pathlib
import types

import jax.numpy as jnp
import pytest

import jax_streammoe as sm
from jax_streammoe import cuda, ffi, ops


class Driver:
    """libcuda with devices of these compute capabilities."""

    def __init__(self, capabilities, status=0):
        self.capabilities, self.status = capabilities, status

    def cuInit(self, flags):
        return self.status

    def cuDeviceGetCount(self, out):
        out._obj.value = len(self.capabilities)
        return 0

    def cuDeviceGet(self, out, idx):
        out._obj.value = idx
        return 0

    def cuDeviceGetAttribute(self, out, attribute, device):
        out._obj.value = self.capabilities[device][attribute - 75]
        return 0


@pytest.mark.parametrize(
    ("driver", "plugins", "text"),
    [
        (None, ["xla_cuda13"], "built with CUDA kernels, but there is no CUDA driver: libcuda.so.1: no such file"),
        (Driver([], 100), ["xla_cuda13"], "built with CUDA kernels, but cuInit of the CUDA driver returned 100, "),
        (Driver([]), ["xla_cuda13"], "built with CUDA kernels, but the CUDA driver sees no device"),
        (
            Driver([(7, 5), (8, 0)]),
            ["xla_cuda13"],
            "the kernels need a device of compute capability 9.0, found 7.5, 8.0",
        ),
        (Driver([(8, 0), (9, 0)]), [], "JAX has no CUDA plugin: pip install"),
        (Driver([(8, 0), (9, 0)]), ["xla_cuda13"], ""),
    ],
    ids=["no driver", "cuInit", "no device", "old device", "no plugin", "yes"],
)
def test_doctor_says_why_cuda_kernels_cannot_run(monkeypatch, driver, plugins, text):
    def load(name):
        if driver is None:
            raise OSError(f"{name}: no such file")
        return driver

    monkeypatch.setattr(ffi.compiled, "WITH_CUDA", True)
    monkeypatch.setattr(ctypes, "CDLL", load)
    found = [types.SimpleNamespace(name=n) for n in plugins]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)
    finding = next(f for f in sm.doctor() if f.what == "CUDA backend")
    assert finding.ok == (not text) and finding.detail.startswith(text or "sm_90a kernels"), finding
    monkeypatch.setattr(ffi.compiled, "WITH_CUDA", False)
    finding = next(f for f in sm.doctor() if f.what == "CUDA backend")
    assert not finding.ok and finding.detail == "built without CUDA kernels: CPU only"


def test_cuda_kernels_take_as_many_experts_and_routes_as_their_plan_can_hold():
    cc = pathlib.Path(__file__).parents[1] / "cc"
    header = (cc / "host" / "heuristics.h").read_text()
    assert f"kMaxLocalExperts = {cuda.MAX_LOCAL_EXPERTS};" in header
    assert "kMaxPlanPairs = std::numeric_limits<int32_t>::max() - kBlockM * kMaxLocalExperts;" in header
    assert "kBlockM = 128;" in (cc / "device" / "block_info.h").read_text()
    assert cuda.MAX_ROUTES == 2**31 - 1 - 128 * cuda.MAX_LOCAL_EXPERTS
    config = sm.MoEConfig(2048, 2, 16, 8, dtype=jnp.bfloat16)
    assert cuda.has_kernels(ops.LayerSpec(config, 1024)) and not cuda.has_kernels(ops.LayerSpec(config, 1025))
