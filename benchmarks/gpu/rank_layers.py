"""Expert-parallel layers from stock parts, to stand beside `ep.moe` in ranks.py: collectives, and a layer per rank.

Contract: `make(name, config, mesh)` returns a function of the global arrays (x, ids, weights, w_gate_up, w_down), for
the names in STOCK, to be called inside jit. All drop nothing. Trade-offs: `all_gather` and `pallas` move every token to
every rank. `ragged_all_to_all` moves a token once per route, into a buffer for the worst routing, R*T*K rows, because
shapes are static; a stock ragged dot computes what of that buffer is empty, too. `_by_expert` sends a slice per expert
instead of one per rank: more updates, but rows arrive sorted.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from layer import pallas_dot

import jax_streammoe as sm

AXIS = "ep"
STOCK = ("all_gather", "pallas", "ragged_all_to_all", "ragged_all_to_all_by_expert")


def make(
    name: str, config: sm.MoEConfig, mesh: Any, *, dot: Callable[..., jax.Array] = pallas_dot,
    exchange: Callable[..., jax.Array] = jax.lax.ragged_all_to_all,
) -> Callable[..., jax.Array]:  # fmt: skip
    """The layer `name`; `dot` and `exchange` stand in where the backend has no such kernel or collective."""
    if name == "all_gather":
        rank = functools.partial(gather_rank, functools.partial(local_moe, config, mesh.size))
    elif name == "pallas":
        rank = functools.partial(gather_rank, functools.partial(local_ragged, dot))
    else:
        rank = functools.partial(exchange_rank, dot, exchange, mesh.size, name.endswith("_by_expert"))
    return jax.shard_map(rank, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)


def gather_rank(local: Any, x: jax.Array, ids: jax.Array, weights: jax.Array, *experts: jax.Array) -> jax.Array:
    """All tokens on every rank, the local experts there, sums scattered back in float32."""
    x, ids, weights = (jax.lax.all_gather(a, AXIS, tiled=True) for a in (x, ids, weights))
    num_experts = experts[0].shape[0]
    ids = ids - jax.lax.axis_index(AXIS) * num_experts
    y = local(x, jnp.where((ids >= 0) & (ids < num_experts), ids, -1), weights, *experts)
    return jax.lax.psum_scatter(y.astype(jnp.float32), AXIS, tiled=True).astype(x.dtype)


def local_moe(config: sm.MoEConfig, ranks: int, *args: jax.Array) -> jax.Array:
    return sm.moe(*args, config=dataclasses.replace(config, num_experts=config.num_experts // ranks))


def local_ragged(dot: Any, x: jax.Array, ids: jax.Array, weights: jax.Array, *experts: jax.Array) -> jax.Array:
    """Local ids, -1 for the experts of others: their routes are sorted to the end, and no group has them."""
    flat = jnp.where(ids < 0, experts[0].shape[0], ids).reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=experts[0].shape[0]).astype(jnp.int32)
    rows = apply_experts(dot, x[order // ids.shape[1]], sizes, *experts)
    return combine(rows, order, weights)


def apply_experts(dot: Any, rows: jax.Array, sizes: jax.Array, w_gate_up: jax.Array, w_down: jax.Array) -> jax.Array:
    """Rows sorted by expert, `sizes` to each; what lies behind them comes back as zeros."""
    gate, up = jnp.split(dot(rows, w_gate_up, sizes), 2, axis=-1)
    out = dot((jax.nn.silu(gate) * up).astype(rows.dtype), w_down, sizes)
    return jnp.where(jnp.arange(rows.shape[0])[:, None] < jnp.sum(sizes), out, jnp.zeros_like(out))


def combine(rows: jax.Array, order: jax.Array, weights: jax.Array) -> jax.Array:
    """Row n belongs to route order[n]."""
    rows = jnp.zeros_like(rows).at[order].set(rows, unique_indices=True).reshape(*weights.shape, -1)
    return jnp.einsum("tkh,tk->th", rows.astype(jnp.float32), weights).astype(rows.dtype)


def exchange_rank(
    dot: Any, exchange: Any, ranks: int, by_expert: bool, x: jax.Array, ids: jax.Array, weights: jax.Array,
    *experts: jax.Array,
) -> jax.Array:  # fmt: skip
    """Routes sorted by expert, their tokens sent to the experts' ranks, results sent back, weighted sum at the owner.

    A slice is what goes from a rank to another, or to one of its experts. counts[s, d, e] are the rows that rank s has
    for expert e of rank d; every rank knows all of them after one small all-gather, and so every offset.
    """
    (num_tokens, top_k), local = ids.shape, experts[0].shape[0]
    order = jnp.argsort(ids.reshape(-1))
    counts = jnp.bincount(ids.reshape(-1), length=ranks * local).astype(jnp.int32)
    counts = jax.lax.all_gather(counts, AXIS).reshape(ranks, ranks, local)
    me = jax.lax.axis_index(AXIS)
    received = counts[:, me]  # [source, expert]
    # Where slices begin: [source, destination, slice] at the source, which sorts by expert, and at the destination.
    slices = counts if by_expert else jnp.sum(counts, axis=2, keepdims=True)
    at_source = starts(slices.reshape(ranks, -1)).reshape(slices.shape)
    # At the destination expert by expert, or rank by rank.
    by_slice = jnp.transpose(slices, (1, 2, 0))  # [destination, slice, source]
    at_destination = jnp.transpose(starts(by_slice.reshape(ranks, -1)).reshape(by_slice.shape), (2, 0, 1))
    there = [a.reshape(-1) for a in (at_source[me], slices[me], at_destination[me], slices[:, me])]
    back = [a.reshape(-1) for a in (at_destination[:, me], slices[:, me], at_source[:, me], slices[me])]

    worst = jnp.zeros((ranks * num_tokens * top_k, x.shape[1]), x.dtype)
    rows = exchange(x[order // top_k], worst, *there, axis_name=AXIS)
    sizes = jnp.sum(received, axis=0)
    if by_expert:
        rows = apply_experts(dot, rows, sizes, *experts)
    else:
        expert = jnp.tile(jnp.arange(local), ranks)
        expert = jnp.repeat(expert, received.reshape(-1), total_repeat_length=rows.shape[0])
        place = jnp.where(jnp.arange(rows.shape[0]) < jnp.sum(sizes), expert, local)  # rows of no slice come last
        by_place = jnp.argsort(place)
        out = apply_experts(dot, rows[by_place], sizes, *experts)
        rows = jnp.zeros_like(out).at[by_place].set(out, unique_indices=True)
    home = jnp.zeros((num_tokens * top_k, x.shape[1]), x.dtype)
    return combine(exchange(rows, home, *back, axis_name=AXIS), order, weights)


def starts(sizes: jax.Array) -> jax.Array:
    """Exclusive sums along the last dimension."""
    return (jnp.cumsum(sizes, axis=-1) - sizes).astype(jnp.int32)
