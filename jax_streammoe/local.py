"""The layer on the tokens of one device: its forward and backward calls, batchable and partitionable.

Contract: `forward` and `backward` are plain operations (vjp.py ties them together). Under vmap over tokens the axis is
folded into the tokens: one call. When weights are mapped, or a capacity counts the tokens of a call, the axis is
walked with lax.map. Under plain jit with sharded tokens each shard stays where it is and statistics and weight
gradients are summed over the shards; sharded experts are refused, because XLA would gather them without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from . import ops
from .ops import Experts, LayerSpec


def forward(spec: LayerSpec, x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Experts) -> tuple:
    """x [T, H], ids [T, K], weights [T, K] f32 -> y [T, H], expert_rows [L] i32, counts [3] i32."""
    return _forward(spec)(x, ids, weights, *experts)


def backward(
    spec: LayerSpec, token: jax.Array, x: jax.Array, dy: jax.Array, ids: jax.Array, weights: jax.Array, experts: Experts
) -> tuple[jax.Array, jax.Array, jax.Array, Experts]:  # fmt: skip
    """-> token, dx [T, H], d_weights [T, K] f32, the gradients of the six expert tensors."""
    token, dx, d_weights, *d_experts = _backward(spec)(token, x, dy, ids, weights, *experts)
    return token, dx, d_weights, tuple(d_experts)  # type: ignore[return-value]


def combine_gradient(spec: LayerSpec, dx_rows: jax.Array, ids: jax.Array) -> jax.Array:
    """Sums the gradient rows [T, K, H] of each token, k ascending, like `y` with weight 1."""
    ones = jnp.ones_like(ids, jnp.float32)
    return ops.combine(spec, dx_rows, ids, ones, jnp.zeros_like(ids, jnp.uint8))


@functools.lru_cache(maxsize=None)
def _forward(spec: LayerSpec) -> Callable[..., tuple]:
    def call(x: jax.Array, ids: jax.Array, weights: jax.Array, *experts: jax.Array) -> tuple:
        return ops.forward(spec, x, ids, weights, experts)  # type: ignore[arg-type]

    partitioned = _partitioned(call, spec, num_token_args=3, token_results=(True, False, False))

    @custom_vmap
    def run(x: jax.Array, ids: jax.Array, weights: jax.Array, *experts: jax.Array) -> tuple:
        return (call if _is_manual() else partitioned)(x, ids, weights, *experts)

    @run.def_vmap
    def _(size: int, batched: Sequence[bool], *args: jax.Array) -> tuple:
        tokens, experts = args[:3], args[3:]
        if any(batched[3:]) or spec.config.capacity is not None:
            return _walk(run, batched, args), (True,) * 3
        tokens = [a if b else jnp.broadcast_to(a[None], (size, *a.shape)) for a, b in zip(tokens, batched, strict=False)]
        y, _, _ = run(*(a.reshape(-1, a.shape[-1]) for a in tokens), *experts)
        rows, counts = jax.vmap(functools.partial(_count, spec))(tokens[1])
        return (y.reshape(tokens[0].shape), rows, counts), (True,) * 3

    return run


@functools.lru_cache(maxsize=None)
def _backward(spec: LayerSpec) -> Callable[..., tuple]:
    def call(token: jax.Array, x: jax.Array, dy: jax.Array, ids: jax.Array, weights: jax.Array, *experts: jax.Array) -> tuple:
        token, dx_rows, d_weights, d_experts = ops.backward(spec, token, x, dy, ids, weights, experts)  # type: ignore[arg-type]
        # A route dropped by capacity has a zero row, so it needs no flag here.
        return token, combine_gradient(spec, dx_rows, _owned(spec, ids)), d_weights, *d_experts

    partitioned = _partitioned(call, spec, num_token_args=5, token_results=(None, True, True) + (False,) * 6)

    @custom_vmap
    def run(token: jax.Array, *args: jax.Array) -> tuple:
        return (call if _is_manual() else partitioned)(token, *args)

    @run.def_vmap
    def _(size: int, batched: Sequence[bool], *args: jax.Array) -> tuple:
        # Each example has weight gradients of its own, so there is nothing to fold.
        return _walk(run, batched, args), (True,) * 9

    return run


def _owned(spec: LayerSpec, ids: jax.Array) -> jax.Array:
    return jnp.where((ids >= 0) & (ids < spec.num_local_experts), ids, -1)


def _walk(run: Callable[..., Any], batched: Sequence[bool], args: Sequence[jax.Array]) -> Any:
    """lax.map over the batched arguments."""
    mapped = [a for a, b in zip(args, batched, strict=True) if b]

    def one(mapped_args: Sequence[jax.Array]) -> Any:
        rest = iter(mapped_args)
        return run(*(next(rest) if b else a for a, b in zip(args, batched, strict=True)))

    return lax.map(one, mapped)


def _count(spec: LayerSpec, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Statistics of ids [T, K] as the handler would count them, dropless."""
    valid = _owned(spec, ids)
    rows = jnp.zeros((spec.num_local_experts,), jnp.int32).at[jnp.where(valid < 0, spec.num_local_experts, valid)].add(
        1, mode="drop"
    )
    masked = jnp.sum(ids == -1, dtype=jnp.int32)
    invalid = jnp.sum(valid < 0, dtype=jnp.int32) - masked
    return rows, jnp.stack([jnp.zeros((), jnp.int32), invalid, masked])


def _is_manual() -> bool:
    return bool(get_abstract_mesh().manual_axes)


def _partitioned(
    call: Callable[..., tuple], spec: LayerSpec, *, num_token_args: int, token_results: Sequence[bool | None]
) -> Callable[..., tuple]:
    """`call` with rows of tokens kept where they are; results that are not rows are summed over the shards.

    The first `num_token_args` arguments of rank 2 are rows of tokens, the others whole. `token_results`: per result,
    True for rows of tokens, False for a sum over tokens, None for neither.
    """
    wrapped = custom_partitioning(call)

    def is_rows(position: int, shape: Sequence[int]) -> bool:
        return position < num_token_args and len(shape) == 2

    def partition(mesh: Any, arg_shapes: Any, result_shapes: Any) -> Any:
        del result_shapes
        axes = _token_axes(arg_shapes[num_token_args - 2].sharding.spec)
        if axes and spec.config.capacity is not None:
            raise ValueError(
                f"moe: tokens are sharded over {axes} under plain jit, but capacity counts the tokens of all shards; use "
                "expert_parallel, or leave the tokens replicated"
            )
        for arg in arg_shapes[num_token_args:]:
            if any(part is not None for part in arg.sharding.spec):
                raise ValueError(
                    f"moe: expert tensor of shape {arg.shape} is sharded as {arg.sharding.spec} under plain jit, where it "
                    "would be gathered; use expert_parallel, or replicate it first with jax.lax.with_sharding_constraint"
                )
        rows, whole = NamedSharding(mesh, P(axes or None, None)), NamedSharding(mesh, P())

        def local(*args: jax.Array) -> tuple:
            out = call(*args)
            return tuple(
                lax.psum(o, axes) if axes and kind is False else o for o, kind in zip(out, token_results, strict=True)
            )

        arg_shardings = tuple(rows if is_rows(n, a.shape) else whole for n, a in enumerate(arg_shapes))
        return mesh, local, tuple(rows if kind else whole for kind in token_results), arg_shardings

    def rule(mesh: Any, args: Any, results: Any) -> str:
        # Only the token dimension is shared between operands and results; every other one has a factor of its own.
        del mesh
        names = [
            " ".join("t" if token and d == 0 else f"f{n}d{d}" for d in range(len(a.shape)))
            for n, (token, a) in enumerate(
                [(is_rows(n, a.shape), a) for n, a in enumerate(args)]
                + [(bool(kind), a) for kind, a in zip(token_results, results, strict=True)]
            )
        ]
        return ", ".join(names[: len(args)]) + " -> " + ", ".join(names[len(args) :])

    wrapped.def_partition(partition=partition, sharding_rule=rule)
    return wrapped


def _token_axes(spec: P) -> tuple[str, ...]:
    first = spec[0] if len(spec) else None
    return () if first is None else (first,) if isinstance(first, str) else tuple(first)
