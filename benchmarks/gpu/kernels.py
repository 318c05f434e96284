"""Checks and times the sm_90a kernels on one GPU, through ctypes and torch.

Contract: `python kernels.py LIBRARY [check] [stress] [gemm] [layer] [decode]`. `check` compares every kernel with a
float64 torch reference on random data, with padding, workspaces and outputs poisoned with NaN; `stress` repeats random
shapes and compares bits. `gemm` and `layer` time medians over rounds that alternate with torch._grouped_mm in one
process, on random data, rotating over input sets larger than the L2. Records go to $OUT/kernels.jsonl, a short table to
stdout. Trade-off: absolute TFLOP/s move with power and temperature by a few per cent, and between cards; the ratio of
one run is the figure to compare.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import math
import os
import pathlib
import sys

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


# ---- checks ---------------------------------------------------------------------------------------------------


def expected_plan(ids, num_experts, first, total):
    flat = ids.flatten().cpu().tolist()
    local = [i - first if 0 <= i < total and 0 <= i - first < num_experts else -1 for i in flat]
    invalid = sum(1 for i in flat if i < -1 or i >= total)
    rows = [0] * num_experts
    for e in local:
        if e >= 0:
            rows[e] += 1
    blocks, starts = [], []
    for e, r in enumerate(rows):
        starts.append(len(blocks) * BLOCK_M)
        n = -(-r // BLOCK_M)
        blocks += [[e, starts[e] // BLOCK_M, n, r]] * n
    row_pair, pair_row, nxt = [-1] * (len(blocks) * BLOCK_M), [-1] * len(flat), list(starts)
    for p, e in enumerate(local):
        if e >= 0:
            pair_row[p], row_pair[nxt[e]] = nxt[e], p
            nxt[e] += 1
    return row_pair, pair_row, blocks, rows, [len(blocks), sum(rows), invalid]


def check_plan(lib):
    gen = torch.Generator(device="cpu").manual_seed(1)
    cases = [
        (1, 1, 1, 0, 1),
        (7, 2, 4, 0, 4),
        (1000, 8, 128, 0, 128),
        (4096, 8, 32, 32, 128),
        (8192, 8, 512, 0, 512),
        (3000, 6, 1024, 0, 1024),
        (33, 8, 3, 1, 8),
        (70000, 4, 16, 0, 16),
    ]
    for t, k, l, first, total in cases:
        ids = torch.randint(-2, total + 1, (t, k), generator=gen, dtype=torch.int32)
        check_one_plan(lib, ids, l, first, total)
    check_one_plan(lib, torch.full((600, 8), 2, dtype=torch.int32), 4, 0, 4)
    check_one_plan(lib, torch.full((600, 8), -1, dtype=torch.int32), 4, 0, 4)
    print("plan ok")


def check_one_plan(lib, ids, l, first, total):
    plan = Plan(lib, ids.to(DEV), l, first, total)
    row_pair, pair_row, blocks, rows, totals = expected_plan(ids, l, first, total)
    assert plan.table(4, 3).tolist() == totals, (plan.table(4, 3).tolist(), totals)
    assert plan.table(3, l).tolist() == rows
    assert plan.table(1, len(pair_row)).tolist() == pair_row
    assert plan.table(0, len(row_pair)).tolist() == row_pair
    assert plan.table(2, 4 * len(blocks)).reshape(len(blocks), 4).tolist() == blocks


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


def check_gemms(lib):
    torch.manual_seed(2)
    sizes = [
        (256, 128, 5, 300, 2),
        (704, 96, 3, 77, 3),
        (2880, 2880, 4, 200, 2),
        (72, 40, 6, 500, 4),
        (1024, 768, 9, 700, 4),
        (2048, 1536, 2, 900, 1),
    ]
    for dtype in DTYPES:
        worst = 0.0
        for h, i, l, t, k in sizes:
            for kind in ACTIVATIONS:
                for biased in (False, True):
                    worst = max(worst, check_gemm_case(lib, h, i, l, t, k, kind, biased, dtype))
        print(f"gemm {dtype} ok, worst relative error {worst:.2e}")


def check_gemm_case(lib, h, i, l, t, k, kind, biased, dtype):
    gated = kind in GATED
    columns = 2 * i if gated else i
    limit = {"swiglu": 1.5 if biased else math.inf, "swigluoai": 7.0}.get(kind, math.inf)
    plan = Plan(lib, random_ids(t, k, l), l)
    x = torch.randn(t, h, device=DEV).to(dtype)
    w = (torch.randn(l, h, columns, device=DEV) / math.sqrt(h)).to(dtype)
    w_down = (torch.randn(l, i, h, device=DEV) / math.sqrt(i)).to(dtype)
    b = torch.randn(l, columns, device=DEV).to(dtype)
    b_down = torch.randn(l, h, device=DEV).to(dtype)
    rows, act, out = poison((plan.rows, h), dtype), poison((plan.rows, i), dtype), poison((plan.rows, h), dtype)
    lib.call("sm_gather", plan.workspace, x, rows, t, k, l, h)
    up = (
        h,
        i,
        w,
        w[:, :, i:] if gated else None,
        (h * columns, columns),
        (b, b[:, i:] if gated else None, columns) if biased else (None, None, 0),
        kind,
        limit,
    )
    down = (i, h, w_down, None, (i * h, h), (b_down, None, h) if biased else (None, None, 0))
    gathered, scattered = poison((plan.rows, i), dtype), poison((t * k, h), dtype)
    plan.gemm(1, rows, act, *up)
    plan.gemm(1, x, gathered, *up, by_pair=1)
    plan.gemm(0, act, out, *down)
    plan.gemm(0, act, scattered, *down, by_pair=1)
    torch.cuda.synchronize()
    assert scattered[plan.table(1, t * k) < 0].isnan().all(), "scattering wrote the row of a route that is not taken"
    pairs = plan.table(0, int(plan.table(4, 1)) * BLOCK_M)
    counts, start, worst = plan.table(3, l).tolist(), 0, 0.0
    for e, n in enumerate(counts):
        span = slice(start, start + n)
        start += -(-n // BLOCK_M) * BLOCK_M
        if n == 0:
            continue
        token = (pairs[span] // k).long()
        assert torch.equal(rows[span], x[token]), "gather"
        assert torch.equal(act[span], gathered[span]), "gathered rows give other bits"
        assert torch.equal(out[span], scattered[pairs[span].long()]), "scattered rows have other bits"
        pre = x[token].double() @ w[e].double() + (b[e].double() if biased else 0)
        want = activate(kind, pre[:, :i], pre[:, i:], limit)
        name = f"{kind} H{h} I{i} expert {e} rows {n} bias {biased}"
        worst = max(worst, close("up " + name, act[span], want))
        want = act[span].double() @ w_down[e].double() + (b_down[e].double() if biased else 0)
        worst = max(worst, close("down " + name, out[span], want))
    return worst


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


def check_forward(lib):
    torch.manual_seed(3)
    for t, k, h, i, l in [
        (1, 8, 2048, 768, 128),
        (17, 4, 704, 96, 8),
        (1000, 8, 1024, 768, 128),
        (513, 9, 256, 136, 4),
        (50, 40, 264, 128, 64),
    ]:
        for dtype in DTYPES:
            check_forward_case(lib, t, k, h, i, l, dtype)


def check_forward_case(lib, t, k, h, i, l, dtype):
    x = torch.randn(t, h, device=DEV).to(dtype)
    w = (torch.randn(l, h, 2 * i, device=DEV) / math.sqrt(h)).to(dtype)
    w_down = (torch.randn(l, i, h, device=DEV) / math.sqrt(i)).to(dtype)
    ids = random_ids(t, k, l)
    ids[t // 2] = -1 if t > 1 else ids[t // 2]
    weights = torch.rand(t, k, device=DEV)
    weights[ids < 0] = math.nan
    if t > 1:
        x[t // 2] = math.nan  # a masked token's values reach nothing
    y = forward(lib, x, ids, weights, w, w_down)
    want = torch.zeros(t, h, device=DEV, dtype=torch.float64)
    for j in range(k):
        for e in ids[:, j].unique().tolist():
            if e < 0:
                continue
            s = (ids[:, j] == e).nonzero().flatten()
            pre = x[s].double() @ w[e].double()
            act = activate("swiglu", pre[:, :i], pre[:, i:], math.inf).to(dtype).double()
            want[s] += weights[s, j, None].double() * (act @ w_down[e].double()).to(dtype).double()
    error = close(f"forward {dtype} T{t} H{h}", y, want)
    if t > 1:
        assert (y[t // 2].view(torch.int16) == 0).all(), "a token without routes must be +0"
    # Bits do not depend on the company a token keeps, nor on the run.
    assert torch.equal(y, forward(lib, x, ids, weights, w, w_down)), "run to run"
    for mode in (1, 2):
        assert torch.equal(y, forward(lib, x, ids, weights, w, w_down, gather=mode)), "fused or separate gather"
    part = torch.arange(0, t, 3, device=DEV)
    some = forward(lib, x[part].contiguous(), ids[part].contiguous(), weights[part].contiguous(), w, w_down)
    assert torch.equal(some, y[part]), "bits depend on the batch"
    print(f"forward {dtype} T{t} K{k} H{h} I{i} E{l} ok, relative error {error:.2e}")


def check_overflow(lib):
    """float16 rows beyond 65504 become infinite in the product and in combine; subnormals stay."""
    t, k, h, i, l = 200, 2, 256, 128, 4
    plan = Plan(lib, random_ids(t, k, l, masked=0), l)
    pairs, valid = plan.table(0, plan.rows), torch.zeros(plan.rows, device=DEV, dtype=torch.bool)
    valid[plan.table(1, t * k).long()] = True
    act = torch.full((plan.rows, i), 64.0, device=DEV, dtype=torch.float16)
    signs = torch.tensor([1.0, -1.0], device=DEV).repeat(h // 2)
    for value, want in ((16.0, math.inf), (2.0**-14, 0.5), (2.0**-24, 64.0 * 128 * 2.0**-24)):
        w_down = (signs * value).half().expand(l, i, h).contiguous()
        out, scattered = poison((plan.rows, h), torch.float16), poison((t * k, h), torch.float16)
        plan.gemm(0, act, out, i, h, w_down, None, (i * h, h))
        plan.gemm(0, act, scattered, i, h, w_down, None, (i * h, h), by_pair=1)
        assert torch.equal(out[valid].double(), (signs.double() * want).expand(t * k, h)), f"rows of {value}"
        assert torch.equal(scattered[pairs[valid].long()], out[valid]), f"scattered rows of {value}"
    rows = torch.zeros(plan.rows, h, device=DEV, dtype=torch.float16)
    for value, want in ((60000.0, math.inf), (2.0**-24, 2.0**-23)):
        y = poison((t, h), torch.float16)
        rows[valid] = value
        lib.call("sm_combine", plan.workspace, rows, torch.ones(t, k, device=DEV), y, t, k, l, h, DTYPES[y.dtype])
        assert (y.double() == want).all(), f"combine of {value}"
    print("overflow and subnormals ok")


def check_corners(lib):
    """No taken route at all; every route to one expert; and more than 2^31 elements of rows."""
    torch.manual_seed(4)
    t, k, h, i, l = 300, 8, 256, 128, 16
    x, weights = torch.randn(t, h, device=DEV).bfloat16(), torch.rand(t, k, device=DEV)
    w = (torch.randn(l, h, 2 * i, device=DEV) / math.sqrt(h)).bfloat16()
    w_down = (torch.randn(l, i, h, device=DEV) / math.sqrt(i)).bfloat16()
    none = torch.full((t, k), -1, device=DEV, dtype=torch.int32)
    assert (forward(lib, x, none, weights, w, w_down).view(torch.int16) == 0).all()
    check_sample(lib, x, torch.full_like(none, 3), weights, w, w_down)
    t, h, i, l = 40000, 7168, 64, 4  # 320,000 rows of 7168: 2.3e9 elements
    x, weights = torch.randn(t, h, device=DEV).bfloat16(), torch.rand(t, k, device=DEV)
    w = (torch.randn(l, h, 2 * i, device=DEV) / math.sqrt(h)).bfloat16()
    w_down = (torch.randn(l, i, h, device=DEV) / math.sqrt(i)).bfloat16()
    check_sample(lib, x, random_ids(t, k, l), weights, w, w_down)
    print("corners ok")


def check_sample(lib, x, ids, weights, w, w_down, count=40):
    y = [forward(lib, x, ids, weights, w, w_down, gather=mode) for mode in (1, 2)]
    assert torch.equal(y[0], y[1]), "fused or separate gather"
    i = w_down.shape[1]
    tokens = torch.linspace(0, x.shape[0] - 1, count).long().tolist()
    want = torch.zeros(count, x.shape[1], device=DEV, dtype=torch.float64)
    for n, t in enumerate(tokens):
        for j, e in enumerate(ids[t].tolist()):
            if e >= 0:
                pre = x[t].double() @ w[e].double()
                act = activate("swiglu", pre[:i], pre[i:], math.inf).bfloat16().double()
                want[n] += weights[t, j].double() * (act @ w_down[e].double()).bfloat16().double()
    close("sampled tokens", y[0][tokens], want)


def check_stress(lib, shapes=24, runs=8):
    """Random shapes, repeated beside a stream that keeps memory busy: any other bits are a race."""
    torch.manual_seed(5)
    noise = torch.empty(1 << 28, device=DEV, dtype=torch.uint8)
    side = torch.cuda.Stream()
    draw = lambda low, high: int(torch.randint(low, high + 1, ()))
    for _ in range(shapes):
        t, k, h, i, l = draw(1, 3000), draw(1, 9), 8 * draw(1, 300), 8 * draw(1, 150), draw(1, 70)
        x, weights = torch.randn(t, h, device=DEV).bfloat16(), torch.rand(t, k, device=DEV)
        w = (torch.randn(l, h, 2 * i, device=DEV) / math.sqrt(h)).bfloat16()
        w_down = (torch.randn(l, i, h, device=DEV) / math.sqrt(i)).bfloat16()
        ids = random_ids(t, k, l)
        y = forward(lib, x, ids, weights, w, w_down, gather=1)
        for run in range(runs):
            with torch.cuda.stream(side):
                noise.add_(1)
            again = forward(lib, x, ids, weights, w, w_down, gather=1 + run % 2)
            assert torch.equal(y, again), f"T{t} K{k} H{h} I{i} E{l}: run {run} gives other bits"
    print(f"stress ok, {shapes} shapes x {runs} runs")


# ---- timing ---------------------------------------------------------------------------------------------------


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


def time_gemms(lib, records, sets=2):
    print(
        f"{'E x M x K x N':24s} {'down TF':>8s} {'up TF':>8s} {'torch TF':>9s} {'down/torch':>10s} "
        f"{'up/torch':>9s}  clocks"
    )
    for e, m, depth, n in GEMMS:
        ids = torch.arange(e, device=DEV, dtype=torch.int32).repeat_interleave(m).view(-1, 1)
        plan = Plan(lib, ids, e)
        a = [torch.randn(plan.rows, depth, device=DEV, dtype=torch.bfloat16) for _ in range(sets)]
        b = [torch.randn(e, depth, n, device=DEV, dtype=torch.bfloat16) for _ in range(sets)]
        out, act = poison((plan.rows, n)), poison((plan.rows, n // 2))
        offs = torch.arange(1, e + 1, device=DEV, dtype=torch.int32) * m
        functions = {
            "down": lambda j: plan.gemm(0, a[j % sets], out, depth, n, b[j % sets], None, (depth * n, n)),
            "up": lambda j: plan.gemm(
                1, a[j % sets], act, depth, n // 2, b[j % sets], b[j % sets][:, :, n // 2 :], (depth * n, n)
            ),
            "torch": lambda j: torch._grouped_mm(a[j % sets][: e * m], b[j % sets], offs=offs),
        }
        functions["down"](0)
        reference = torch._grouped_mm(a[0][: e * m], b[0], offs=offs)
        close(f"gemm {e} x {m} x {depth} x {n}", out[: e * m], reference)
        t, states = medians(functions)
        flop = 2.0 * e * m * depth * n
        tf = {k: flop / v * 1e-12 for k, v in t.items()}
        name = f"{e}x{m}x{depth}x{n}"
        print(
            f"{name:24s} {tf['down']:8.0f} {tf['up']:8.0f} {tf['torch']:9.0f} {t['torch'] / t['down']:10.3f} "
            f"{t['torch'] / t['up']:9.3f}  MHz {[v['sm_mhz'] for v in states.values()]} "
            f"W {[v['watts'] for v in states.values()]}",
            flush=True,
        )
        for k, v in tf.items():
            records.add(f"grouped_gemm/{name}/{k}", v, "TFLOP/s", seconds=t[k], gpu=states[k])


def time_layers(lib, records):
    print(
        f"{'layer':14s} {'ms':>8s} {'TF':>6s} {'fused':>6s} {'separ.':>6s} {'target':>7s} | "
        "us: plan gather up up_gather down down_scatter combine | torch up down | up_gather TF down TF"
    )
    for name in LAYERS:
        time_layer(lib, records, name)


def time_layer(lib, records, name, t=8192, sets=2):
    """One layer and its parts; a function of its own, so that its tensors are gone before the next layer's are made."""
    h, i, e, k, target = LAYERS[name]
    x = [torch.randn(t, h, device=DEV).bfloat16() for _ in range(sets)]
    w = torch.randn(e, h, 2 * i, device=DEV, dtype=torch.bfloat16).mul_(1 / math.sqrt(h))
    w_down = torch.randn(e, i, h, device=DEV, dtype=torch.bfloat16).mul_(1 / math.sqrt(i))
    ids = [random_ids(t, k, e, masked=0) for _ in range(sets)]
    weights = torch.rand(t, k, device=DEV)
    nbytes = lib.c.sm_forward_bytes(*(ctypes.c_int64(v) for v in (t, k, h, i, e)))
    workspace, y = torch.empty(nbytes, device=DEV, dtype=torch.uint8), poison((t, h))
    plan = Plan(lib, ids[0], e)
    rows, act = torch.zeros(plan.rows, h, device=DEV).bfloat16(), torch.zeros(plan.rows, i, device=DEV).bfloat16()
    scattered = poison((t * k, h))
    up = (act, h, i, w, w[:, :, i:], (h * 2 * i, 2 * i))
    rows.normal_(), act.normal_()
    offs = plan.table(3, e).cumsum(0, dtype=torch.int32)
    parts = {
        "layer": lambda j: forward(lib, x[j % sets], ids[j % sets], weights, w, w_down, workspace, y),
        "fused": lambda j: forward(lib, x[j % sets], ids[j % sets], weights, w, w_down, workspace, y, 1),
        "separate": lambda j: forward(lib, x[j % sets], ids[j % sets], weights, w, w_down, workspace, y, 2),
        "gather": lambda j: lib.call("sm_gather", plan.workspace, x[j % sets], rows, t, k, e, h),
        "up": lambda j: plan.gemm(1, rows, *up),
        "up_gather": lambda j: plan.gemm(1, x[j % sets], *up, by_pair=1),
        "down": lambda j: plan.gemm(0, act, rows, i, h, w_down, None, (i * h, h)),
        "down_scatter": lambda j: plan.gemm(0, act, scattered, i, h, w_down, None, (i * h, h), by_pair=1),
        "torch_up": lambda j: torch._grouped_mm(rows[: t * k], w, offs=offs),
        "torch_down": lambda j: torch._grouped_mm(act[: t * k], w_down, offs=offs),
        "combine": lambda j: lib.call("sm_combine", plan.workspace, rows, weights, y, t, k, e, h, 1),
    }
    m, states = medians(parts, rounds=4, repeats=8)
    m["plan"] = graph_seconds([plan.launch] * 20)
    flop = 6.0 * t * k * h * i
    tf = flop / m["layer"] * 1e-12
    us = {p: v * 1e6 for p, v in m.items()}
    print(
        f"{name:14s} {m['layer'] * 1e3:8.3f} {tf:6.0f} {flop / m['fused'] * 1e-12:6.0f} "
        f"{flop / m['separate'] * 1e-12:6.0f} {target:7d} | "
        f"{us['plan']:.0f} {us['gather']:.0f} {us['up']:.0f} {us['up_gather']:.0f} {us['down']:.0f} "
        f"{us['down_scatter']:.0f} {us['combine']:.0f} | {us['torch_up']:.0f} {us['torch_down']:.0f} | "
        f"{flop / 1.5 / m['up_gather'] * 1e-12:.0f} {flop / 3 / m['down'] * 1e-12:.0f} "
        f"MHz {[states[p]['sm_mhz'] for p in ('layer', 'up', 'up_gather', 'down', 'torch_up')]} "
        f"W {states['layer']['watts']} {states['up']['watts']}",
        flush=True,
    )
    records.add(
        f"layer/{name}/T{t}",
        tf,
        "TFLOP/s",
        seconds=m["layer"],
        target=target,
        gpu=states["layer"],
        parts_us={p: v for p, v in us.items() if p != "layer"},
    )


def time_decode(lib, records, sets=10):
    """Small T, one graph of `sets` calls on other ids and tokens each; the floor is the hit experts' weights."""
    h, i, e, k, _ = LAYERS["qwen3-30b"]
    w = torch.randn(e, h, 2 * i, device=DEV, dtype=torch.bfloat16).mul_(1 / math.sqrt(h))
    w_down = torch.randn(e, i, h, device=DEV, dtype=torch.bfloat16).mul_(1 / math.sqrt(i))
    print(f"{'decode 30b':>10s} {'us':>8s} {'fused':>8s} {'separate':>8s} {'floor us':>8s} {'ratio':>6s} {'TB/s':>6s}")
    for t in (1, 4, 16, 64, 256, 1024, 2048):
        cases = []
        for _ in range(sets):
            x, ids = torch.randn(t, h, device=DEV).bfloat16(), random_ids(t, k, e, masked=0)
            nbytes = lib.c.sm_forward_bytes(*(ctypes.c_int64(v) for v in (t, k, h, i, e)))
            cases.append(
                (
                    x,
                    ids,
                    torch.rand(t, k, device=DEV),
                    torch.empty(nbytes, device=DEV, dtype=torch.uint8),
                    poison((t, h)),
                )
            )
        hit = sum(len(c[1].unique()) for c in cases) / sets * 6 * h * i
        us = [
            1e6
            * graph_seconds([lambda c=c: forward(lib, c[0], c[1], c[2], w, w_down, c[3], c[4], mode) for c in cases])
            for mode in (0, 1, 2)
        ]
        for c in cases[:2]:
            assert torch.equal(c[4], forward(lib, c[0], c[1], c[2], w, w_down)), "graph replay gives other bits"
        floor = hit / 4.05e6
        print(
            f"T {t:8d} {us[0]:8.1f} {us[1]:8.1f} {us[2]:8.1f} {floor:8.1f} {us[0] / floor:6.2f} "
            f"{hit / us[0] * 1e-6:6.2f}",
            flush=True,
        )
        records.add(f"decode/qwen3-30b/T{t}", us[0], "us", floor_us=floor, fused_us=us[1], separate_us=us[2])


def main():
    lib = Library(sys.argv[1])
    what = sys.argv[2:] or ["check", "stress", "gemm", "layer", "decode"]
    if "check" in what:
        check_plan(lib)
        check_gemms(lib)
        check_forward(lib)
        check_overflow(lib)
        check_corners(lib)
    if "stress" in what:
        check_stress(lib)
    records = Records()
    if "gemm" in what:
        time_gemms(lib, records)
    if "layer" in what:
        time_layers(lib, records)
    if "decode" in what:
        time_decode(lib, records)
    records.write()


if __name__ == "__main__":
    main()
