"""A backward of the kernel library through ctypes: operands, poisoned results and workspace, parts run one by one.

Contract: as kernel_library.py. `Layer` holds what a backward reads, `Backward` what it writes and where its tables lie
in the workspace; both are NaN before. Trade-off: offsets of the workspace come from the library, types are known here.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math

import kernel_library as kernels
import torch
from kernel_library import ACTIVATIONS, BLOCK_M, DTYPES, GATED, random_ids

ALL, PLAN, ROWS, DACT, BIASES, DW_DOWN, DW_UP, DX, COMBINE, WEIGHTS, SPREAD = range(11)
PARTS = {
    "plan": PLAN, "rows": ROWS, "dact": DACT, "dw_down": DW_DOWN, "dw_up": DW_UP, "dx": DX, "combine": COMBINE,
    "d_weights": WEIGHTS,
}  # fmt: skip
TABLES = (
    "row_pair", "pair_row", "expert_rows", "totals", "x", "dy", "d_gate", "d_up", "wa", "row_weight", "partial",
    "expert_first",
)  # fmt: skip


def i64(*values):
    return (ctypes.c_int64(v) for v in values)


@dataclasses.dataclass
class Layer:
    """Operands and results of one backward; gate and up are views of one tensor when packed."""

    x: torch.Tensor
    dy: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor | None
    down: torch.Tensor
    biases: tuple
    activation: str
    limit: float
    packed: bool
    capacity: int = -1

    def __post_init__(self):
        (self.t, self.h), self.k = self.x.shape, self.ids.shape[1]
        self.l, self.i, _ = self.down.shape
        self.dtype, self.gated = self.x.dtype, self.activation in GATED
        self.sizes = (self.t, self.k, self.h, self.i, self.l, int(self.gated))


def poison_like(packed, tensors):
    """NaN tensors that lie as `tensors` do: views of one when packed."""
    if packed and tensors[1] is not None:
        whole = kernels.poison((*tensors[0].shape[:-1], 2 * tensors[0].shape[-1]), tensors[0].dtype)
        return whole[..., : tensors[0].shape[-1]], whole[..., tensors[0].shape[-1] :]
    return tuple(None if t is None else kernels.poison(t.shape, t.dtype) for t in tensors)


class Backward:
    """Workspace and results of a layer's backward; run() launches a part of it, or all."""

    def __init__(self, lib, layer):
        self.lib, self.p = lib, layer
        lib.c.sm_backward_bytes.restype = ctypes.c_int64
        self.workspace = torch.full(
            (lib.c.sm_backward_bytes(*i64(*layer.sizes)),), 0xFF, device=kernels.DEV, dtype=torch.uint8
        )
        layout = (ctypes.c_int64 * 13)()
        lib.c.sm_backward_layout(*i64(*layer.sizes), layout)
        self.offsets, self.capacity = dict(zip(TABLES, layout[:12], strict=True)), layout[12]
        self.dx = kernels.poison(layer.x.shape, layer.dtype)
        self.dx_rows = kernels.poison((layer.t * layer.k, layer.h), layer.dtype)
        self.d_weights = kernels.poison(layer.weights.shape, torch.float32)
        self.d_gate_up = poison_like(layer.packed, (layer.gate, layer.up))
        self.d_down = kernels.poison(layer.down.shape, layer.dtype)
        none = (None, None, None)
        self.d_biases = none
        if layer.biases[0] is not None:
            self.d_biases = (
                *poison_like(layer.packed, layer.biases[:2]),
                kernels.poison(layer.biases[2].shape, layer.dtype),
            )

    def run(self, part=ALL, sms=0):
        p, dx = self.p, self.dx_rows if part == SPREAD else self.dx
        self.lib.call(
            "sm_backward", part, self.workspace, p.x, p.dy, p.ids, p.weights, dx, self.d_weights,
            p.gate, p.up, p.down, *self.d_gate_up, self.d_down, *p.biases, *self.d_biases,
            p.gate.stride(0), p.gate.stride(1), 0 if p.biases[0] is None else p.biases[0].stride(0),
            *p.sizes, ACTIVATIONS[p.activation], p.limit, p.capacity, sms, DTYPES[p.dtype],
        )  # fmt: skip
        return self

    def table(self, name, shape, dtype):
        start, size = self.offsets[name], torch.empty((), dtype=dtype).element_size() * math.prod(shape)
        return self.workspace[start : start + size].view(dtype).view(shape)

    def rows(self, name):
        width = self.p.h if name in ("x", "dy") else self.p.i
        return self.table(name, (self.capacity, width), self.p.dtype)

    def experts(self):
        """(expert, first row, number of rows, their pairs) of the plan."""
        counts, start = self.table("expert_rows", (self.p.l,), torch.int32).tolist(), 0
        pairs = self.table("row_pair", (self.capacity,), torch.int32)
        for e, n in enumerate(counts):
            yield e, start, n, pairs[start : start + n].long()
            start += -(-n // BLOCK_M) * BLOCK_M

    def results(self):
        parts = (self.dx, self.d_weights, *self.d_gate_up, self.d_down, *self.d_biases)
        return [r.clone() for r in parts if r is not None]


def make_layer(t, k, h, i, l, kind="swiglu", biased=False, packed=True, dtype=torch.bfloat16, masked=0.05, **more):
    dev, gated = kernels.DEV, kind in GATED

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, device=dev) * scale).to(dtype)

    def pair(*shape, scale):
        if not gated:
            return normal(*shape, scale=scale), None
        if packed:
            whole = normal(*shape[:-1], 2 * shape[-1], scale=scale)
            return whole[..., : shape[-1]], whole[..., shape[-1] :]
        return normal(*shape, scale=scale), normal(*shape, scale=scale)

    ids = random_ids(t, k, l, masked)
    weights = torch.randn(t, k, device=dev)
    x, dy = normal(t, h), normal(t, h)
    if t > 2 and masked:
        ids[t // 2] = -1  # a masked token's values reach nothing
        x[t // 2] = dy[t // 2] = math.nan
        ids[t // 3] = l + 7
    weights[(ids < 0) | (ids >= l)] = math.nan
    gate, up = pair(l, h, i, scale=h**-0.5)
    biases = (*pair(l, i, scale=0.5), normal(l, h, scale=0.5)) if biased else (None, None, None)
    limit = {"swiglu": 1.5 if biased else math.inf, "swigluoai": 7.0}.get(kind, math.inf)
    return Layer(x, dy, ids, weights, gate, up, normal(l, i, h, scale=i**-0.5), biases, kind, limit, packed, **more)
