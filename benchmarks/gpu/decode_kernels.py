"""Times the layer at small T with and without the prefetch of weights, on one GPU.

Contract: `python decode_kernels.py LIBRARY [T ...]`, LIBRARY as benchmarks/gpu/build.sh makes it. One graph for each
number of tokens and variant: plan, gather, up, down, combine of `SETS` calls with other ids and tokens each, so that no
call finds its weights in L2; variants take turns in one process. Every variant's y is compared with that of the layer
without prefetch, to the bit, before and after timing. Records go to $OUT/decode_kernels.jsonl, a table to stdout.
Trade-off: the L2 holds a part of what the call before left there, for all variants alike; ids repeat that part
at random.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import pathlib
import sys

import torch
from kernels import DEV, LAYERS, Library, Records, forward, medians, poison, random_ids

LAYER = "qwen3-30b"
SETS = 10
TOKENS = (1, 4, 8, 16, 64, 128)
READ_TB_S = 4.05
MIB = 1 << 20
# Bytes of the up and of the down product; -1 is the layer's own choice (cc/host/heuristics.h).
VARIANTS = {
    "off": (0, 0),
    "auto": (-1, -1),
    "up": (-1, 0),
    "down": (0, -1),
    "up 12": (12 * MIB, -1),
    "up 36": (36 * MIB, -1),
    "down 18": (-1, 18 * MIB),
    "down 36": (-1, 36 * MIB),
}


class Case:
    """One call's tensors; `hit` is the number of experts that have rows."""

    def __init__(self, lib, t, h, i, e, k):
        self.x = torch.randn(t, h, device=DEV).bfloat16()
        self.ids = random_ids(t, k, e, masked=0)
        self.weights = torch.rand(t, k, device=DEV)
        nbytes = lib.c.sm_forward_bytes(*(ctypes.c_int64(v) for v in (t, k, h, i, e)))
        self.workspace = torch.empty(nbytes, device=DEV, dtype=torch.uint8)
        self.y = poison((t, h))
        self.hit = len(self.ids.unique())


def capture(functions):
    """One graph that runs all functions."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for f in functions:
            f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for f in functions:
            f()
    return graph


def time_tokens(lib, t, w, w_down):
    """us per call of each variant, and the us in which the hit experts' weights can be read."""
    h, i, e, k, _ = LAYERS[LAYER]
    cases = [Case(lib, t, h, i, e, k) for _ in range(SETS)]
    run = lambda c, prefetch: forward(lib, c.x, c.ids, c.weights, w, w_down, c.workspace, c.y, prefetch=prefetch)
    graphs = {
        name: capture([lambda c=c, prefetch=prefetch: run(c, prefetch) for c in cases])
        for name, prefetch in VARIANTS.items()
    }
    want = [run(c, (0, 0)).clone() for c in cases]

    def check(name):
        for c in cases:
            c.y.fill_(math.nan)
        graphs[name].replay()
        for n, c in enumerate(cases):
            assert torch.equal(c.y, want[n]), f"T {t}, prefetch {name}: call {n} has other bits"

    for name in VARIANTS:
        check(name)
    seconds, states = medians({name: lambda j, g=g: g.replay() for name, g in graphs.items()}, rounds=6, repeats=12)
    for name in VARIANTS:
        check(name)
    read = sum(c.hit for c in cases) / SETS * 6 * h * i
    return {name: 1e6 * s / SETS for name, s in seconds.items()}, read / READ_TB_S * 1e-6, states["auto"]


def main():
    lib = Library(sys.argv[1])
    torch.manual_seed(7)
    tokens = [int(a) for a in sys.argv[2:]] or TOKENS
    h, i, e, _, _ = LAYERS[LAYER]
    w = torch.randn(e, h, 2 * i, device=DEV, dtype=torch.bfloat16).mul_(1 / math.sqrt(h))
    w_down = torch.randn(e, i, h, device=DEV, dtype=torch.bfloat16).mul_(1 / math.sqrt(i))
    records = Records()
    print(f"{LAYER}, us" + "".join(f"{name:>9s}" for name in VARIANTS) + f"{'read':>9s}{'auto-read':>11s}")
    for t in tokens:
        us, read, state = time_tokens(lib, t, w, w_down)
        print(f"T {t:<12d}" + "".join(f"{v:9.1f}" for v in us.values()) + f"{read:9.1f}{us['auto'] - read:11.1f}")
        for name, value in us.items():
            records.add(f"decode/{LAYER}/T{t}/{name}", value, "us", read_us=read, bytes=VARIANTS[name], gpu=state)
    out = pathlib.Path(os.environ.get("OUT", ".")) / "decode_kernels.jsonl"
    out.write_text("\n".join(json.dumps(r) for r in records.rows) + "\n")


if __name__ == "__main__":
    main()
