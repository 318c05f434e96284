"""What a GPU would take for a layer and for the route function in front of it: enough to decide whether to stream.

Contract: pure functions of static shapes; nothing runs and nothing is compiled. `layer_seconds` is a roofline fitted to
measured products (docs/kernels.md), good to some ten percent. `producer_seconds` reads a jaxpr: matrix products by
operations and bytes, sorts and other operations that XLA does not fuse by the bytes they touch, everything else by what
enters and leaves the function, and some microseconds per kernel. It is rough, and is compared with a threshold only.
Trade-off: an estimate at trace time instead of a measurement at the first call, so that all ranks plan alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .config import MoEConfig
from .waves import CostModel

FLOPS_PER_S, BYTES_PER_S, KERNEL_S = 7.0e14, 4.05e12, 3e-6  # of an H200: bf16 products, device memory, one small kernel

# Measured (docs/kernels.md, Streams): a wave of 1,024 rows per expert costs 2 to 3 % of its products' time, one of 512
# rows 8 %. Beside a producer a wave takes 9 % longer, since it leaves 16 of 132 SMs; a producer of XLA kernels that
# fill the machine does on 16 SMs what 16 SMs do, 12 % of its work. Below a share of 15 % there is nothing to hide.
OVERLAPPED = CostModel(rows_per_wave=1024, min_carry_rows=256, max_waves=2, producer_sms=16, chunks_per_wave=1)
ONE_WAVE = CostModel(rows_per_wave=1024, min_carry_rows=256, max_waves=1, producer_sms=0, chunks_per_wave=1)
MIN_PRODUCER_SHARE = 0.15
PRODUCER_RATE, WAVE_SLOWDOWN, SECOND_WAVE = 0.12, 1.09, 0.025

_SORTS = {"sort", "top_k", "approx_top_k"}
_UNFUSED = {
    "gather",
    "scatter",
    "scatter-add",
    "scatter_add",
    "cumsum",
    "cumlogsumexp",
    "ffi_call",
    "pallas_call",
    "fft",
}
SORT_PASSES = 4  # a sort reads and writes its rows a few times


def gpu_cost(
    config: MoEConfig, num_tokens: int, num_ranks: int, producer_s: float | None, only_if_it_pays: bool = False
) -> CostModel:
    """Returns the cost model of a call of `num_tokens` tokens per rank behind a producer of `producer_s` seconds.

    None: nothing is known of the producer; whoever publishes by hand is taken to have a reason. `only_if_it_pays`: the
    caller asked for what is fastest and not for a stream.
    """
    if producer_s is None:
        return OVERLAPPED
    layer_s = layer_seconds(config, num_tokens, num_ranks)
    together = producer_s + layer_s
    if producer_s < MIN_PRODUCER_SHARE * together:
        return ONE_WAVE
    return ONE_WAVE if only_if_it_pays and streamed_seconds(layer_s, producer_s) >= together else OVERLAPPED


def streamed_seconds(layer_s: float, producer_s: float) -> float:
    """Returns the expected time of a stream of two chunks and two waves: the first wave runs beside the second half of
    the producer."""
    wave_s = WAVE_SLOWDOWN * layer_s / 2
    left_s = max(0.0, producer_s / 2 - PRODUCER_RATE * wave_s)
    return producer_s / 2 + wave_s + left_s + (0.5 + SECOND_WAVE) * layer_s


def layer_seconds(config: MoEConfig, num_tokens: int, num_ranks: int) -> float:
    """Returns the expected time of the layer on one rank, routing spread evenly: plan, products, combine."""
    experts = config.num_experts // num_ranks
    width = config.hidden * (config.gate_up_width + config.intermediate)
    rows = num_tokens * config.top_k
    weights = min(experts, max(1, rows)) * width * config.itemsize
    row_bytes = rows * config.hidden * config.itemsize
    return _roofline(2.0 * rows * width, weights + 2.0 * row_bytes) + row_bytes / BYTES_PER_S + 4 * KERNEL_S


def producer_seconds(function: Callable[..., Any], *args: Any) -> float:
    """Returns the expected time of `function(*args)`, a route function on all tokens of a call; only traces it."""
    closed = jax.make_jaxpr(function)(*args)
    touched = {id(v) for eqn in closed.jaxpr.eqns for v in eqn.invars if eqn.primitive.name != "dot_general"}
    inputs = sum(_bytes(v.aval) for v in closed.jaxpr.invars if id(v) in touched)
    outputs = sum(_bytes(aval) for aval in closed.out_avals)
    return (inputs + outputs) / BYTES_PER_S + _seconds(closed.jaxpr)


def _seconds(jaxpr: Any) -> float:
    total = 0.0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inner = [j for value in eqn.params.values() for j in _jaxprs(value)]
        moved = sum(_bytes(v.aval) for v in (*eqn.invars, *eqn.outvars))
        if name == "scan":
            total += eqn.params["length"] * sum(map(_seconds, inner))
        elif name == "cond":
            total += max(map(_seconds, inner))
        elif inner:
            total += sum(map(_seconds, inner))
        elif name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
            total += _roofline(2.0 * depth * eqn.outvars[0].aval.size, moved) + KERNEL_S
        elif name in _SORTS:
            total += SORT_PASSES * moved / BYTES_PER_S + KERNEL_S
        elif name in _UNFUSED:
            total += moved / BYTES_PER_S + KERNEL_S
        elif name.startswith("reduce_"):
            total += KERNEL_S
    return total


def _jaxprs(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [j for item in value for j in _jaxprs(item)]
    value = getattr(value, "jaxpr", value)  # closed or not
    return [value] if hasattr(value, "eqns") else []


def _bytes(aval: Any) -> int:
    dtype = getattr(aval, "dtype", None)
    return 0 if dtype is None or not isinstance(dtype, np.dtype) else aval.size * dtype.itemsize


def _roofline(flops: float, num_bytes: float) -> float:
    """Operations and bytes overlap, and disturb each other where they take equally long."""
    return ((flops / FLOPS_PER_S) ** 3 + (num_bytes / BYTES_PER_S) ** 3) ** (1 / 3)
