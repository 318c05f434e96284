"""The problems that are timed, each named once. Plain numbers: nothing here imports JAX."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """T tokens of width H through E experts of width I, K routes per token; rows per expert GEMM call."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    block_m: int = 128

    @property
    def flops(self) -> int:
        """Multiplications and additions of a swiglu layer's three projections."""
        return self.tokens * self.top_k * 6 * self.hidden * self.intermediate


CPU_LAYER = Shape(tokens=2048, hidden=512, intermediate=1024, experts=16, top_k=2)
# 512 routes per expert: each of four waves computes about 128 rows of every expert, two blocks.
CPU_STREAM = Shape(tokens=2048, hidden=512, intermediate=1024, experts=8, top_k=2, block_m=64)
STREAM_CHUNKS = 4

# name -> (bound, whether a larger value is better)
TARGETS = {
    "cpu/layer_fwd/f32": (10.0, True),
    "cpu/layer_fwd/bf16": (4.0, True),
    "cpu/stream_serial": (1.25, False),
    "cpu/stream_overlap": (0.75, False),
}


def meets_target(name: str, value: float) -> bool:
    """Whether a value is on the good side of its target; a name without one always is."""
    if name not in TARGETS:
        return True
    bound, larger_is_better = TARGETS[name]
    return value >= bound if larger_is_better else value <= bound
