"""From router logits to expert ids and weights, in plain JAX, so that autodiff of the router is free.

Contract: ids are int32 and named `streammoe_ids` at the source, weights are float32, gathered with those ids
and named `streammoe_weights`; a remat policy that saves the names never selects twice. No gradient passes
through the selection. Trade-off: scores are computed in float32 over all experts even when only K are wanted,
because the auxiliary loss wants them all and XLA removes what nobody reads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .config import MoEConfig, at_least

IDS_NAME = "streammoe_ids"
WEIGHTS_NAME = "streammoe_weights"
SCORES = ("softmax", "sigmoid")
_TINY = 1e-18  # keeps sigmoid weights finite when all selected scores underflow; its square is a normal f32


class Routed(NamedTuple):
    """What a route function returns: ids int32 [..., K], weights [..., K], and optionally the tokens to
    dispatch instead of x, and any pytree of per-token arrays to hand back (probabilities, for an auxiliary
    loss)."""

    ids: Any
    weights: Any
    x: Any = None
    aux: Any = None


def route_topk(
    logits: jax.Array,
    config: MoEConfig,
    *,
    score: str = "softmax",
    normalize: bool = True,
    pre_softmax: bool = True,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling: float = 1.0,
    bias: jax.Array | None = None,
    hash_table: jax.Array | None = None,
    token_ids: jax.Array | None = None,
) -> Routed:
    """Selects the K experts of each token and their weights.

    `p = softmax(logits)` or `sigmoid(logits)`, `ids = top_k(p + bias)`,
    `weights = scaling * p[ids] / sum(p[ids])`.

    Arguments:
      logits: [..., E], any float dtype; computed in float32.
      config: gives E and K.
      score: "softmax" (Switch, GShard, Mixtral, Qwen) or "sigmoid" (DeepSeek-V3).
      normalize: divide the K weights by their sum.
      pre_softmax: softmax over all E experts before the selection; False takes the softmax of the K selected
        logits (GPT-OSS), which sums to one by itself. Only with score="softmax".
      num_groups, group_topk: keep only experts of the `group_topk` best of `num_groups` equal groups, a
        group's score being the sum of its two best (DeepSeek-V3). Both or neither.
      scaling: factor on the weights.
      bias: [E], added to the scores for the selection only (auxiliary-loss-free balancing); no gradient.
      hash_table, token_ids: int [V, K] and int [...]: ids are `hash_table[token_ids]` (hash routing) instead
        of a selection; an entry outside 0..E-1 is a masked route with weight 0.

    Returns:
      Routed(ids int32 [..., K] in descending score, weights float32 [..., K], None, aux = probabilities
      float32 [..., E] that sum to one).

    Raises:
      TypeError: logits are not floating, or ids of the hash routing are not integers.
      ValueError: K > E, a shape or a word is wrong, or options exclude each other.

    Gradients flow to the logits through the gathered scores and aux. Ties go to the lower expert id. Memory:
    three float32 arrays like logits.
    """
    num_experts, top_k = config.num_experts, config.top_k
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"logits must be floating, got {logits.dtype.name} {logits.shape}")
    if logits.ndim < 1 or logits.shape[-1] != num_experts:
        raise ValueError(f"logits must have shape (..., {num_experts}), got {logits.shape}")
    if score not in SCORES:
        raise ValueError(f"score must be one of {', '.join(SCORES)}, got {score!r}")
    if not pre_softmax and score != "softmax":
        raise ValueError(f'pre_softmax=False needs score="softmax", got score={score!r}')
    if bias is not None and bias.shape != (num_experts,):
        raise ValueError(f"bias must have shape ({num_experts},), got {bias.shape}")
    if hash_table is None and top_k > num_experts:
        raise ValueError(f"top_k must be at most num_experts = {num_experts}, got {top_k}")

    logits = logits.astype(jnp.float32)
    scores = jax.nn.softmax(logits, axis=-1) if score == "softmax" else jax.nn.sigmoid(logits)
    values = scores if pre_softmax else logits
    if hash_table is not None or token_ids is not None:
        if bias is not None or num_groups is not None or group_topk is not None:
            raise ValueError("hash routing selects by table: bias, num_groups and group_topk must be None")
        ids = _hash_ids(hash_table, token_ids, logits.shape[:-1], top_k)
    else:
        ids = _select(lax.stop_gradient(values), bias, num_groups, group_topk, top_k)
    ids = checkpoint_name(ids, IDS_NAME)
    valid = (ids >= 0) & (ids < num_experts)
    gathered = jnp.take_along_axis(values, jnp.where(valid, ids, 0), axis=-1)
    if not pre_softmax:
        weights = _masked_softmax(gathered, valid)
    else:
        weights = jnp.where(valid, gathered, 0.0)
        if normalize:
            weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), _TINY)
    if scaling != 1.0:
        weights = weights * jnp.float32(scaling)
    probs = scores
    if score == "sigmoid":
        probs = scores / jnp.maximum(jnp.sum(scores, axis=-1, keepdims=True), _TINY)
    return Routed(ids, checkpoint_name(weights, WEIGHTS_NAME), None, probs)


def load_balance_loss(probs: jax.Array, ids: jax.Array, num_experts: int) -> jax.Array:
    """Returns the auxiliary loss `E * sum_e f_e * P_e` as a float32 scalar; 1 when the load is uniform.

    f_e is the share of valid routes that go to expert e (no gradient), P_e the mean of `probs[..., e]` over
    the tokens with a valid route. The form of Switch Transformer (Fedus et al. 2021, equation 4), over K
    routes as in GShard (Lepikhin et al. 2020). ids int [..., K]; routes outside 0..E-1 and tokens without a
    valid route are ignored, also when their probabilities are NaN. Raises ValueError when a shape does not
    fit.
    """
    if probs.ndim < 1 or probs.shape[-1] != num_experts:
        raise ValueError(f"probs must have shape (..., {num_experts}), got {probs.shape}")
    if ids.ndim < 1 or ids.shape[:-1] != probs.shape[:-1]:
        raise ValueError(f"ids must have shape {(*probs.shape[:-1], 'K')} like probs {probs.shape}, got {ids.shape}")
    ids = ids.reshape(-1, ids.shape[-1])
    probs = probs.reshape(-1, num_experts).astype(jnp.float32)
    valid = (ids >= 0) & (ids < num_experts)
    slots = jnp.where(valid, ids, num_experts).reshape(-1)
    counts = jnp.zeros((num_experts + 1,), jnp.int32).at[slots].add(1)[:num_experts]
    routes = jnp.maximum(jnp.sum(counts), 1).astype(jnp.float32)
    used = jnp.any(valid, axis=-1)
    tokens = jnp.maximum(jnp.sum(used, dtype=jnp.int32), 1).astype(jnp.float32)
    mean = jnp.sum(jnp.where(used[:, None], probs, 0.0), axis=0) / tokens
    return jnp.float32(num_experts) * jnp.sum(counts.astype(jnp.float32) / routes * mean)


def _masked_softmax(values: jax.Array, valid: jax.Array) -> jax.Array:
    """Softmax over the valid entries of the last axis; 0 elsewhere, also where nothing is valid."""
    largest = jnp.max(jnp.where(valid, values, -jnp.inf), axis=-1, keepdims=True)
    shifted = values - jnp.where(jnp.any(valid, axis=-1, keepdims=True), lax.stop_gradient(largest), 0.0)
    powers = jnp.where(valid, jnp.exp(jnp.where(valid, shifted, 0.0)), 0.0)
    return powers / jnp.maximum(jnp.sum(powers, axis=-1, keepdims=True), _TINY)


def _select(values: jax.Array, bias: Any, num_groups: int | None, group_topk: int | None, top_k: int) -> jax.Array:
    """Ids of the K best of `values + bias`, within the best groups when grouped."""
    if bias is not None:
        values = values + jnp.broadcast_to(lax.stop_gradient(bias).astype(jnp.float32), values.shape)
    if num_groups is not None or group_topk is not None:
        if num_groups is None or group_topk is None:
            raise ValueError(
                f"num_groups and group_topk must be given together, got num_groups={num_groups} and "
                f"group_topk={group_topk}"
            )
        values = _mask_groups(
            values, at_least("num_groups", num_groups, 1), at_least("group_topk", group_topk, 1), top_k
        )
    return lax.top_k(values, top_k)[1].astype(jnp.int32)


def _mask_groups(values: jax.Array, num_groups: int, group_topk: int, top_k: int) -> jax.Array:
    """`values` with minus infinity outside the `group_topk` groups whose two best sum highest."""
    num_experts = values.shape[-1]
    if num_experts % num_groups:
        raise ValueError(f"num_groups must divide num_experts = {num_experts}, got {num_groups}")
    size = num_experts // num_groups
    if group_topk > num_groups:
        raise ValueError(f"group_topk must be at most num_groups = {num_groups}, got {group_topk}")
    if group_topk * size < top_k:
        raise ValueError(
            f"group_topk groups of {size} experts must hold top_k = {top_k}, got group_topk = {group_topk}"
        )
    grouped = values.reshape(*values.shape[:-1], num_groups, size)
    best = jnp.sum(lax.top_k(grouped, min(2, size))[0], axis=-1)
    chosen = lax.top_k(best, group_topk)[1]
    keep = jnp.any(jax.nn.one_hot(chosen, num_groups, dtype=bool), axis=-2)
    return jnp.where(keep[..., None], grouped, -jnp.inf).reshape(values.shape)


def _hash_ids(table: Any, token_ids: Any, leading: tuple[int, ...], top_k: int) -> jax.Array:
    if table is None or token_ids is None:
        raise ValueError("hash_table and token_ids must be given together, got one of them")
    if table.ndim != 2 or table.shape[1] != top_k:
        raise ValueError(f"hash_table must have shape (V, {top_k}), got {table.shape}")
    if token_ids.shape != leading:
        raise ValueError(f"token_ids must have shape {leading} like logits, got {token_ids.shape}")
    for name, array in (("hash_table", table), ("token_ids", token_ids)):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"{name} must be an integer array, got {array.dtype.name} {array.shape}")
    return jnp.asarray(table).at[jnp.asarray(token_ids)].get(mode="fill", fill_value=-1).astype(jnp.int32)
