"""The kernels of the layer through ctypes and torch, and what their checks and timings share.

Contract: `Library(path)` is a library of build.sh; an error of CUDA raises with its text. Workspaces and results are
`poison`ed, so that what nobody wrote is NaN. Times are medians over captured graphs, in rounds that take turns.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import math
import os
import pathlib

import pynvml
import torch

ACTIVATIONS = {"swiglu": 0, "swigluoai": 1, "geglu": 2, "silu": 3, "gelu": 4, "relu2": 5}
GATED = ("swiglu", "swigluoai", "geglu")
BLOCK_M = 128
DTYPES = {torch.bfloat16: 1, torch.float16: 2}  # codes of host/problem.h
# Relative Frobenius error allowed against float64. One rounding costs about 1.7e-3 in bf16, 2.1e-4 in f16.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
# (experts, rows per expert, depth, width), and layers (hidden, intermediate, experts, top_k) at T = 8192.
GEMMS = [
    (8, 4096, 7168, 4096),
    (8, 4096, 2048, 7168),
    (32, 256, 7168, 4096),
    (32, 256, 2048, 7168),
    (32, 128, 7168, 4096),
    (128, 512, 2048, 1536),
    (128, 512, 768, 2048),
]
LAYERS = {
    "qwen3-30b": (2048, 768, 128, 8, 480),
    "qwen3-235b": (4096, 1536, 128, 8, 545),
    "mixtral-8x7b": (4096, 14336, 8, 2, 640),
    "dsv3-shard": (7168, 2048, 32, 8, 620),
}
DEV = "cuda"


class Library:
    """The kernels as Python functions on tensors; raises RuntimeError with the call's name and CUDA's text."""

    def __init__(self, path: str):
        self.c = ctypes.CDLL(path)
        self.c.sm_error.restype = ctypes.c_char_p
        for name in ("sm_plan_bytes", "sm_forward_bytes"):
            getattr(self.c, name).restype = ctypes.c_int64
        self.call("sm_prepare")

    def call(self, name, *args):
        converted = []
        for a in args:
            if isinstance(a, torch.Tensor):
                converted.append(ctypes.c_void_p(a.data_ptr()))
            elif a is None:
                converted.append(ctypes.c_void_p(None))
            elif isinstance(a, float):
                converted.append(ctypes.c_float(a))
            else:
                converted.append(ctypes.c_int64(a))
        if name != "sm_prepare":
            converted.append(ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        status = getattr(self.c, name)(*converted)
        if status:
            raise RuntimeError(f"{name}: {self.c.sm_error(status).decode()}")


def poison(shape, dtype=torch.bfloat16):
    return torch.full(shape, float("nan"), device=DEV, dtype=dtype)


class Plan:
    """A plan on the device and views of its tables."""

    def __init__(self, lib, ids, num_experts, first=0, total=None):
        self.t, self.k = ids.shape
        self.l, self.lib = num_experts, lib
        size = (ctypes.c_int64 * 7)()
        lib.c.sm_plan_layout(*(ctypes.c_int64(v) for v in (self.t, self.k, num_experts)), size)
        self.offsets, self.rows, self.blocks = size[:5], size[5], size[6]
        nbytes = lib.c.sm_plan_bytes(*(ctypes.c_int64(v) for v in (self.t, self.k, num_experts)))
        self.workspace = torch.full((nbytes,), 0x7F, device=DEV, dtype=torch.uint8)
        self.ids, self.first, self.total = ids, first, total or num_experts
        self.launch()

    def launch(self):
        self.lib.call("sm_plan", self.workspace, self.ids, self.t, self.k, self.l, self.first, self.total)

    def table(self, index, count):
        start = self.offsets[index]
        return self.workspace[start : start + 4 * count].view(torch.int32)

    def gemm(
        self,
        up,
        a,
        out,
        depth,
        width,
        b0,
        b1,
        strides,
        bias=(None, None, 0),
        activation="swiglu",
        limit=math.inf,
        sms=0,
        by_pair=0,
    ):
        """by_pair: the up product gathers a, the down product scatters its rows."""
        self.lib.call(
            "sm_gemm",
            up,
            by_pair,
            self.workspace,
            self.t,
            self.k,
            self.l,
            a,
            out,
            depth,
            width,
            b0,
            b1,
            *strides,
            *bias,
            ACTIVATIONS[activation],
            limit,
            sms,
            DTYPES[a.dtype],
        )


def activate(kind, gate, up, limit):
    if kind in ("swiglu", "swigluoai"):
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if kind == "swiglu":
        return torch.nn.functional.silu(gate) * up
    if kind == "swigluoai":
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    if kind == "geglu":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    if kind == "silu":
        return torch.nn.functional.silu(gate)
    if kind == "gelu":
        return torch.nn.functional.gelu(gate, approximate="tanh")
    return torch.relu(gate) ** 2


def close(name, got, want):
    """Relative Frobenius error, within TOLERANCE of got's dtype. NaN or an unwritten (poisoned) value fails."""
    want, tolerance = want.double(), TOLERANCE[got.dtype]
    error = ((got.double() - want).norm() / want.norm()).item()
    worst = ((got.double() - want).abs().max() / want.abs().max()).item()
    assert error < tolerance and worst < 5 * tolerance, f"{name}: relative error {error:.3e}, worst {worst:.3e}"
    return error


def random_ids(t, k, e, masked=0.05):
    ids = (
        torch.rand(t, e, device=DEV).topk(k).indices.to(torch.int32)
        if k <= e
        else torch.randint(0, e, (t, k), device=DEV, dtype=torch.int32)
    )
    ids[torch.rand(t, k, device=DEV) < masked] = -1
    return ids.contiguous()


def forward(lib, x, ids, weights, w, w_down, workspace=None, y=None, gather=0):
    (t, h), k, l, i = x.shape, ids.shape[1], w.shape[0], w_down.shape[1]
    if workspace is None:
        nbytes = lib.c.sm_forward_bytes(*(ctypes.c_int64(v) for v in (t, k, h, i, l)))
        workspace = torch.full((nbytes,), 0xFF, device=DEV, dtype=torch.uint8)  # NaN everywhere
    y = poison((t, h), x.dtype) if y is None else y
    lib.call(
        "sm_forward", workspace, x, ids, weights, y, w, w_down, t, k, h, i, l, 0, math.inf, gather, DTYPES[x.dtype]
    )
    return y


def gpu_state():
    """Clock, power and temperature, read while work is queued: after it, the clock says nothing."""
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    return {
        "sm_mhz": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
        "watts": pynvml.nvmlDeviceGetPowerUsage(gpu) // 1000,
        "celsius": pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
    }


def medians(functions, rounds=5, repeats=10):
    """Median seconds of each function, and the GPU's state during each one's last round.

    Rounds alternate, so that all see the same clocks. Functions take the index of the repeat.
    """
    times, states = {name: [] for name in functions}, {}
    for name, f in functions.items():
        for j in range(2):
            f(j)
    for _ in range(rounds):
        for name, f in functions.items():
            events = [
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)
            ]
            for j, (start, stop) in enumerate(events):
                start.record()
                f(j)
                stop.record()
            events[repeats // 2][1].synchronize()
            states[name] = gpu_state()
            torch.cuda.synchronize()
            times[name] += [a.elapsed_time(b) * 1e-3 for a, b in events[2:]]
    return {name: sorted(v)[len(v) // 2] for name, v in times.items()}, states


def graph_seconds(functions, replays=15):
    """Median seconds per function of one graph that runs all of them: host time does not enter."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for f in functions:
            f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for f in functions:
            f()
    graph.replay()
    return medians({"graph": lambda j: graph.replay()}, rounds=3, repeats=replays)[0]["graph"] / len(functions)


class Records:
    def __init__(self):
        commit = os.environ.get("COMMIT", "unknown")
        self.rows, self.common = (
            [],
            {
                "device": torch.cuda.get_device_name(),
                "commit": commit,
                "date": datetime.date.today().isoformat(),
                "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
            },
        )

    def add(self, name, value, unit, **extra):
        self.rows.append({"name": name, "value": value, "unit": unit, **extra, **self.common})

    def write(self):
        out = pathlib.Path(os.environ.get("OUT", ".")) / "kernels.jsonl"
        out.write_text("\n".join(json.dumps(r) for r in self.rows) + "\n")
