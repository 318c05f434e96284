"""The batch-ready layer on one device, and the argument handling that every public call shares.

Contract: `moe` needs no ring and no mesh; it is differentiable, folds leading dimensions and vmapped axes into tokens,
and keeps sharded tokens where they are. `prepare` turns user arguments into the operands of the handlers: one place
checks, narrows and masks. Trade-off: masking by `num_valid` happens in JAX, on ids, so that no kernel knows of it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import get_abstract_mesh

from . import checks, cuda, local, ops, vjp
from .config import MoEConfig
from .ops import Experts, LayerSpec
from .routing import IDS_NAME, WEIGHTS_NAME
from .varying import vary_together

Y_NAME = "streammoe_y"


class Stats(NamedTuple):
    """What a call counted, on the device, int32; no host synchronisation.

    expert_rows [L]: rows computed per local expert; dropped_routes: beyond `capacity`; invalid_routes: ids outside
    -1..E-1; masked_routes: ids of -1, padding tokens beyond `num_valid` among them. Scalars of this rank's tokens.
    """

    expert_rows: jax.Array
    dropped_routes: jax.Array
    invalid_routes: jax.Array
    masked_routes: jax.Array


class Prepared(NamedTuple):
    """Operands: x [..., H], ids [..., K] int32 (-1 beyond num_valid), weights [..., K] f32, experts."""

    x: jax.Array
    ids: jax.Array
    weights: jax.Array
    experts: Experts


def moe(
    x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array, w_gate_up: Any, w_down: jax.Array, *, config: MoEConfig,
    b_gate_up: Any = None, b_down: Any = None, num_valid: Any = None, checks: bool = False, return_stats: bool = False,
    save_gate_up: bool = False,
) -> Any:  # fmt: skip
    """Applies a Mixture-of-Experts layer to tokens whose routes are all known.

    `y[t] = sum_k topk_weights[t, k] * f_{topk_ids[t, k]}(x[t])`, k ascending, valid routes only.

    Arguments:
      x: [..., H] of config.dtype; leading dimensions are folded into T tokens.
      topk_ids: [..., K] int32 (int64 under x64); -1 is no route, other ids outside 0..E-1 are treated as -1 and
        counted. Duplicates are legal and summed.
      topk_weights: [..., K] float32 or bfloat16.
      w_gate_up: [E, H, 2I], gate columns first, or a pair (w_gate, w_up) of [E, H, I]; ungated: [E, H, I].
      w_down: [E, I, H]. b_gate_up: [E, 2I] or a pair; b_down: [E, H]; given exactly when config.use_bias.
      num_valid: tokens that exist, an int or int32 scalar; later ones are masked. None: all.
      checks: an id outside -1..E-1 is an error that names token, slot and value (on CPU; CUDA only counts it).
      return_stats: also return `Stats`.
      save_gate_up: under differentiation, keep what enters the activation for the backward instead of computing it
        again: T*K*2I elements of x's dtype (ungated: T*K*I) per layer for a quarter fewer products of the backward.
        Gradients then come from the rounded values (float16: at most 65504), and have bits of their own where that
        rounds. float32 on a GPU computes it again all the same.

    Returns y [..., H] in x's dtype, or (y, Stats). A token without a valid route gets exactly 0.

    Gradients: x, topk_weights (non-zero also where a weight is 0), weights, biases; first order, reverse mode.
    Determinism: same bits every time, and the same bits as a stream over the same tokens (with save_gate_up, of y).
    Memory: T*K rows of H beside the operands. Raises TypeError or ValueError naming the argument.
    """
    return _moe(
        x, topk_ids, topk_weights, w_gate_up, w_down, config, b_gate_up, b_down, num_valid, checks, return_stats,
        save_gate_up,
    )  # fmt: skip


def _moe(
    x: Any, topk_ids: Any, topk_weights: Any, w_gate_up: Any, w_down: Any, config: MoEConfig, b_gate_up: Any,
    b_down: Any, num_valid: Any, check_ids: bool, return_stats: bool, save_gate_up: bool,
) -> Any:  # fmt: skip
    check_context("moe")
    experts = config.num_experts if isinstance(config, MoEConfig) else 0
    checks.check_moe_args(x, topk_ids, topk_weights, w_gate_up, w_down, b_gate_up, b_down, config, experts)
    args = prepare(x, topk_ids, topk_weights, w_gate_up, w_down, b_gate_up, b_down, num_valid)
    args = vary_together(args)
    spec = LayerSpec(config, config.num_experts, checks=check_ids)
    if save_gate_up:
        y = named_y(vjp.keeping(spec, *args))
        expert_rows, counts = cuda.count_routes(spec, args.ids)
    else:
        y, expert_rows, counts = local.forward(spec, *lax.stop_gradient(args))
        y, _ = vjp.attach(vjp.GradientSpec(spec), named_y(y), *args, vjp.new_token(args.x))
    return (y, stats_of(expert_rows, counts)) if return_stats else y


def check_context(what: str) -> None:
    """Raises ValueError inside a shard_map that is manual over some axes of the mesh and not over others."""
    mesh = get_abstract_mesh()
    rest = (*mesh.auto_axes, *mesh.explicit_axes)
    if mesh.manual_axes and rest:
        raise ValueError(checks.PARTIAL_MANUAL.format(what=what, manual=tuple(mesh.manual_axes), rest=rest))


def prepare(
    x: Any, topk_ids: Any, topk_weights: Any, w_gate_up: Any, w_down: Any, b_gate_up: Any, b_down: Any,
    num_valid: Any,
) -> Prepared:  # fmt: skip
    """Returns the operands of checked arguments: ids narrowed and masked, weights widened; leading dims as they are."""
    ids, weights = prepare_routes(topk_ids, topk_weights, num_valid)
    return Prepared(x, ids, weights, ops.pack_experts(w_gate_up, w_down, b_gate_up, b_down))


def prepare_routes(
    topk_ids: jax.Array, topk_weights: jax.Array, num_valid: Any, first_token: Any = 0
) -> tuple[jax.Array, jax.Array]:
    """Returns checked ids [..., K] narrowed and masked, and weights [..., K] widened, both named for remat policies."""
    ids = mask_ids(narrow_ids(topk_ids), num_valid, first_token)
    return checkpoint_name(ids, IDS_NAME), checkpoint_name(topk_weights.astype(jnp.float32), WEIGHTS_NAME)


def narrow_ids(ids: jax.Array) -> jax.Array:
    """Ids as int32; an int64 value that does not fit stays outside 0..E-1."""
    if not checks.is_int64(ids):
        return ids
    limits = jnp.iinfo(jnp.int32)
    clip: Any = jnp.clip if isinstance(ids, jax.Array) else np.clip  # without x64 JAX would wrap a NumPy array first
    return jnp.asarray(clip(ids, limits.min, limits.max).astype(jnp.int32))


def mask_ids(ids: jax.Array, num_valid: Any, first_token: Any = 0) -> jax.Array:
    """Ids [..., K] with -1 for tokens at or beyond `num_valid`; the first row is token `first_token`."""
    if num_valid is None:
        return ids
    checks.check_num_valid(num_valid)
    tokens = jnp.arange(math.prod(ids.shape[:-1]), dtype=jnp.int32) + jnp.asarray(first_token, jnp.int32)
    return jnp.where(tokens.reshape(*ids.shape[:-1], 1) < _as_count(num_valid), ids, -1)


def _as_count(num_valid: Any) -> jax.Array:
    """As int32; what does not fit becomes the nearest that does: more than there can be, or less than none."""
    limits = np.iinfo(np.int32)
    if not isinstance(num_valid, jax.Array):
        return jnp.asarray(min(max(int(num_valid), limits.min), limits.max), jnp.int32)
    if num_valid.dtype in (jnp.uint32, jnp.int64, jnp.uint64):
        low = 0 if num_valid.dtype.kind == "u" else limits.min
        num_valid = jnp.clip(num_valid, *(jnp.asarray(v, num_valid.dtype) for v in (low, limits.max)))
    return num_valid.astype(jnp.int32)


def named_y(y: jax.Array) -> jax.Array:
    """Names the layer's output for checkpoint policies."""
    return checkpoint_name(y, Y_NAME)


def stats_of(expert_rows: jax.Array, counts: jax.Array) -> Stats:
    """Returns Stats from the two statistics results of a handler."""
    return Stats(expert_rows, counts[0], counts[1], counts[2])


def checkpoint_policy(base: Any = None) -> Any:
    """Returns a policy for `jax.checkpoint` that saves what a layer cannot compute twice, beside what `base` saves.

    A functional ring is used up by the forward call, so y must be saved whenever a non-linear operation follows inside
    the block; ids and weights are saved with it, so that top-k never runs twice, and so are the gate and up of a layer
    with `save_gate_up`, named `streammoe_gate_up`. Saved per layer: T*H elements of y, T*K ids and weights, and T*K*2I
    elements of gate and up where asked for.
    """
    names = jax.checkpoint_policies.save_only_these_names(Y_NAME, IDS_NAME, WEIGHTS_NAME, vjp.GATE_UP_NAME)
    return names if base is None else jax.checkpoint_policies.save_from_both_policies(base, names)
