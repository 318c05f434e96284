"""Gradients of the experts in float32, added up over micro-batches: what autodiff, whose dtypes are fixed, cannot give.

Contract: an explicit backward, outside of autodiff; the caller brings the cotangent of y and keeps the sums. It runs
the backward of `moe` and nothing else: no forward, no ring. Trade-off: on the CPU the whole pass is that of the float32
layer over widened operands, which costs a float32 copy of the experts; the CUDA kernels write their float32 sums, which
are added to the caller's by XLA, one more pass over them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from . import api, checks, exchange, local, ops, vjp
from .config import MoEConfig
from .ops import LayerSpec
from .varying import part_axes, vary_together


def accumulate_gradients(
    accumulators: dict[str, Any], x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array, w_gate_up: Any,
    w_down: jax.Array, dy: jax.Array, *, config: MoEConfig, b_gate_up: Any = None, b_down: Any = None,
    num_valid: Any = None, axis_name: Any = None,
) -> tuple[jax.Array, jax.Array, dict[str, Any]]:  # fmt: skip
    """Adds the experts' gradients of one micro-batch to float32 sums; returns them with the gradients of the tokens.

    `accumulators[w] + d<dy, moe(x, ...)>/dw` for every expert tensor w.

    Arguments:
      accumulators: dict with the names and shapes of the expert tensors given, "w_gate_up", "w_down" and with biases
        "b_gate_up", "b_down", each float32 (a pair where the tensor is one). Donate them: they are added to in place.
      x, topk_ids, topk_weights, w_gate_up, w_down, config, b_gate_up, b_down, num_valid: as in `moe`.
      dy: [..., H] of config.dtype, the cotangent of y.
      axis_name: inside of jax.shard_map, the mesh axis or axes that the experts are split over: expert tensors and
        accumulators are then this rank's [L, ...], tokens this rank's own. None: this device has all experts.

    Returns (dx [..., H] in x's dtype, d_topk_weights [..., K] in the weights' dtype, accumulators as a new dict).

    Precision: in float32 layers, a call adds what autodiff gives, bit by bit. In bfloat16 and float16 layers the sums
    over rows are added as they are, in float32, where autodiff rounds them to the dtype first. On CUDA that is all of
    the difference: dx and d_topk_weights have the bits of autodiff. On the CPU nothing of a call is rounded to the
    dtype but dx, so that all results are nearer to the exact gradient than autodiff's and have other bits.
    Gradients: none; differentiating it raises NotImplementedError.
    Determinism: same bits every time. Within shard_map, sums over axes that hold copies of the experts are left to the
    caller; under plain jit with sharded tokens they are made, in float32.
    Memory: the gradients of one call beside the sums, in float32; on the CPU also a float32 copy of the experts.
    Raises TypeError or ValueError naming the argument.
    """
    api.check_context("accumulate_gradients")
    axis_names = part_axes(axis_name)
    checks.check_config(config)
    num_local = config.local_experts(exchange.num_ranks(axis_names))
    checks.check_moe_args(x, topk_ids, topk_weights, w_gate_up, w_down, b_gate_up, b_down, config, num_local)
    checks.check_cotangent(dy, x, config)
    tensors = {"w_gate_up": w_gate_up, "w_down": w_down, "b_gate_up": b_gate_up, "b_down": b_down}
    checks.check_accumulators(accumulators, tensors)

    args = api.prepare(x, topk_ids, topk_weights, w_gate_up, w_down, b_gate_up, b_down, num_valid)
    args, dy = vjp.first_order_only(vary_together((args, dy)))
    spec, token = LayerSpec(config, num_local), vjp.new_token(args.x)
    if axis_names:
        x_, dy_, ids, weights = (a.reshape(-1, a.shape[-1]) for a in (args.x, dy, args.ids, args.weights))
        out = exchange.backward(spec, axis_names, token, x_, dy_, ids, weights, args.experts, wide=True)
    else:
        out = local.backward(spec, token, args.x, dy, args.ids, args.weights, args.experts, wide=True)
    _, dx, d_weights, (gate, up, down, b_gate, b_up, b_down_) = out
    split = isinstance(w_gate_up, (tuple, list))  # so are the biases' gradients then, whatever form these came in
    gradients = {"w_gate_up": (gate, up) if split else gate, "w_down": down}
    gradients |= {"b_gate_up": (b_gate, b_up) if split else b_gate, "b_down": b_down_}
    sums = {name: _added(value, gradients[name]) for name, value in accumulators.items()}
    return dx.reshape(x.shape), d_weights.reshape(topk_weights.shape).astype(topk_weights.dtype), sums


def _added(value: Any, gradient: Any) -> Any:
    """The sums of one tensor, or of a pair, and its gradient."""
    if isinstance(value, (tuple, list)):
        return tuple(jnp.add(a, g) for a, g in zip(value, ops.split_gate_up(gradient), strict=True))
    return jnp.add(value, ops.join_gate_up(gradient))
