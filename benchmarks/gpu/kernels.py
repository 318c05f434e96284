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
import math
import sys

import kernels_check
import torch
from kernel_library import (
    DEV,
    GEMMS,
    LAYERS,
    Library,
    Plan,
    Records,
    close,
    forward,
    graph_seconds,
    medians,
    poison,
    random_ids,
)


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
        kernels_check.check_all(lib)
    if "stress" in what:
        kernels_check.check_stress(lib)
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
