"""The `xla` transport: dispatch and combine over ranks through XLA's own all_to_all. Any backend, several hosts.

Contract: dropless, the same bits as every other transport: each rank computes unweighted rows for the routes of its
experts, one row per route returns to the token's owner, and the owner combines in k order. Blocks are worst case: every
rank sends room for all its tokens to every other rank, so R*T token rows and R*T*K result rows exist at once. Rows
that a rank does not own are sent as zeros, so a NaN in a token that nobody needs goes nowhere. What a rank computes
between the exchanges is in local.py, which knows its platform.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from . import local
from .ops import Experts, LayerSpec


def num_ranks(axis_names: Sequence[str]) -> int:
    """Returns R, the product of the sizes of the mesh axes; 1 for no axis."""
    return lax.axis_size(tuple(axis_names)) if axis_names else 1


def forward(
    spec: LayerSpec, axis_names: tuple[str, ...], x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Experts
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x [T, H], global ids [T, K], weights [T, K] f32 of this rank -> y [T, H], expert_rows [L], counts [3]."""
    if spec.checks:
        invalid_here = jnp.any((ids < -1) | (ids >= spec.config.num_experts)).astype(jnp.int32)
        any_invalid = lax.pmax(invalid_here, axis_names) if axis_names else invalid_here
        ids = local.check_ids(spec, ids, any_invalid)
    ids, invalid, masked = _clean(spec, axis_names, ids)
    needed, local_ids = _destinations(spec, axis_names, ids)
    x_in = _exchange(jnp.where(needed[..., None], x[None], jnp.zeros((), x.dtype)), axis_names)
    ids_in = _exchange(local_ids, axis_names)
    rows, dropped, expert_rows = local.rows(spec, _flat(x_in), _flat(ids_in), experts)
    rows, dropped = _exchange(_split(rows, ids_in), axis_names), _exchange(_split(dropped, ids_in), axis_names)
    rows, dropped = _of_owner(spec, rows, ids), _of_owner(spec, dropped, ids)
    y = local.combine(spec, rows, ids, weights, dropped)
    num_dropped = jnp.sum((dropped != 0) & (ids >= 0), dtype=jnp.int32)
    return y, expert_rows, jnp.stack([num_dropped, invalid, masked])


def backward(
    spec: LayerSpec, axis_names: tuple[str, ...], token: jax.Array, x: jax.Array, dy: jax.Array, ids: jax.Array,
    weights: jax.Array, experts: Experts, *, wide: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, Experts]:  # fmt: skip
    """-> token, dx [T, H], d_weights [T, K] f32, gradients of this rank's experts from the tokens of all ranks.

    `wide`: those of the experts are float32.
    """
    # Every exchange reads ids, which vjp.py has put after the token: that orders backward calls on every rank.
    ids, _, _ = _clean(spec, axis_names, ids)
    needed, local_ids = _destinations(spec, axis_names, ids)
    zero = jnp.zeros((), x.dtype)
    x_in = _exchange(jnp.where(needed[..., None], x[None], zero), axis_names)
    dy_in = _exchange(jnp.where(needed[..., None], dy[None], zero), axis_names)
    ids_in = _exchange(local_ids, axis_names)
    weights_in = _exchange(jnp.where(local_ids >= 0, weights[None], jnp.zeros((), weights.dtype)), axis_names)
    token, dx_rows, d_weights, d_experts = local.rows_backward(
        spec, token, _flat(x_in), _flat(dy_in), _flat(ids_in), _flat(weights_in), experts, wide=wide
    )
    dx_rows = _of_owner(spec, _exchange(_split(dx_rows, ids_in), axis_names), ids)
    d_weights = _of_owner(spec, _exchange(_split(d_weights, ids_in), axis_names), ids)
    d_weights = jnp.where(ids >= 0, d_weights, jnp.zeros((), d_weights.dtype))
    return token, local.combine_gradient(spec, dx_rows, ids), d_weights, d_experts


def _clean(spec: LayerSpec, axis_names: tuple[str, ...], ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Ids with -1 for whatever names no expert, and how many were invalid and masked."""
    num_experts = spec.num_local_experts * num_ranks(axis_names)
    valid = (ids >= 0) & (ids < num_experts)
    masked = jnp.sum(ids == -1, dtype=jnp.int32)
    return jnp.where(valid, ids, -1), jnp.sum(~valid, dtype=jnp.int32) - masked, masked


def _destinations(spec: LayerSpec, axis_names: tuple[str, ...], ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Per destination rank: which tokens it needs [R, T], and ids [R, T, K] local to it (-1 elsewhere)."""
    first = jnp.arange(num_ranks(axis_names), dtype=jnp.int32)[:, None, None] * spec.num_local_experts
    mine = (ids[None] >= first) & (ids[None] < first + spec.num_local_experts)
    return jnp.any(mine, axis=-1), jnp.where(mine, ids[None] - first, -1)


def _exchange(blocks: jax.Array, axis_names: tuple[str, ...]) -> jax.Array:
    """blocks[r] goes to rank r; returns what each rank sent to this one, in rank order."""
    return lax.all_to_all(blocks, axis_names, 0, 0, tiled=True) if axis_names else blocks


def _of_owner(spec: LayerSpec, blocks: jax.Array, ids: jax.Array) -> jax.Array:
    """blocks [R, T, K, ...] by expert rank -> [T, K, ...] from the rank that owns each route's expert."""
    owner = jnp.maximum(ids, 0) // spec.num_local_experts
    index = owner.reshape(1, *owner.shape, *(1,) * (blocks.ndim - 3))
    return jnp.take_along_axis(blocks, index, axis=0)[0]


def _flat(blocks: jax.Array) -> jax.Array:
    return blocks.reshape(-1, blocks.shape[-1])


def _split(rows: jax.Array, like: jax.Array) -> jax.Array:
    return rows.reshape(*like.shape[:2], *rows.shape[1:])
