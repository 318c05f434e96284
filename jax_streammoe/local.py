"""What one device computes: the layer on its tokens, batchable and partitionable, and the halves of an exchange.

Contract: `forward` and `backward` are plain operations (vjp.py ties them together). Under vmap over tokens the axis is
folded into the tokens: one call. When weights are mapped, or a capacity counts the tokens of a call, the axis is
walked with lax.map. Under plain jit with sharded tokens each shard stays where it is (partition.py), and statistics and
weight gradients are summed over the shards. `forward_kept` keeps gate and up, which `backward` may then be given.
`rows`, `combine`, `check_ids` and `rows_backward` are for exchange.py, inside of shard_map. A `wide` backward returns
float32 gradients of the experts. All of these choose by the platform that a program is lowered for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from . import cuda, ffi, ops
from .ops import Experts, LayerSpec
from .partition import partitioned


def forward(spec: LayerSpec, x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Experts) -> tuple:
    """x [..., H], ids [..., K], weights [..., K] f32 -> y [..., H], expert_rows [L] i32, counts [3] i32."""
    return _forward(spec, False)(x, ids, weights, *experts)


def forward_kept(spec: LayerSpec, x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Experts) -> tuple:
    """As `forward` -> y, gate_up [..., K * 2I] (ungated: K * I) of the layer's dtype, expert_rows, counts."""
    return _forward(spec, True)(x, ids, weights, *experts)


def backward(
    spec: LayerSpec, token: jax.Array, x: jax.Array, dy: jax.Array, ids: jax.Array, weights: jax.Array,
    experts: Experts, *, wide: bool = False, gate_up: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, Experts]:  # fmt: skip
    """-> token, dx [..., H], d_weights [..., K] f32, the gradients of the six expert tensors (f32 if `wide`).

    gate_up: of `forward_kept`, not with `wide`; without it gate and up are computed again.
    """
    kept = () if gate_up is None else (gate_up,)
    run = _backward(spec, wide, bool(kept))
    token, dx, d_weights, *d_experts = run(token, x, dy, ids, weights, *kept, *experts)
    return token, dx, d_weights, tuple(d_experts)


def rows(spec: LayerSpec, x: jax.Array, local_ids: jax.Array, experts: Experts) -> tuple:
    """x [N, H], local ids [N, K] -> unweighted rows [N, K, H] (0 where skipped), dropped [N, K] uint8, expert_rows."""
    return _on_platform(ops.rows, cuda.rows, spec, x, local_ids, experts)


def combine(
    spec: LayerSpec, expert_rows: jax.Array, ids: jax.Array, weights: jax.Array, dropped: jax.Array
) -> jax.Array:
    """rows [T, K, H], ids [T, K] (negative: skipped), weights f32, dropped uint8 -> y [T, H], k ascending."""
    return _on_platform(ops.combine, cuda.combine, spec, expert_rows, ids, weights, dropped)


def check_ids(spec: LayerSpec, ids: jax.Array, any_invalid: jax.Array) -> jax.Array:
    """ids [T, K], or an error that names an invalid one, as `ops.check_ids`; on CUDA the host sees no value: ids."""
    return _on_platform(ops.check_ids, lambda _, ids, any_invalid: ids, spec, ids, any_invalid)


def rows_backward(
    spec: LayerSpec, token: jax.Array, x: jax.Array, dy: jax.Array, local_ids: jax.Array, weights: jax.Array,
    experts: Experts, *, wide: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, Experts]:  # fmt: skip
    """Gradients of weighted rows: -> token, dx_rows [N, K, H], d_weights [N, K] f32, the six expert gradients.

    The rows of a token sum to its d_x; those of routes that are skipped are 0.
    """
    on_cpu = _wide_rows_cpu if wide else ops.backward
    on_cuda = functools.partial(cuda.rows_backward, wide=wide)
    return _on_platform(on_cpu, on_cuda, spec, token, x, dy, local_ids, weights, experts)


def combine_gradient(spec: LayerSpec, dx_rows: jax.Array, ids: jax.Array) -> jax.Array:
    """Sums the gradient rows [T, K, H] of each token, k ascending, like `y` with weight 1."""
    return combine(spec, dx_rows, ids, *_unweighted(ids))


@functools.cache
def _forward(spec: LayerSpec, keep: bool) -> Callable[..., tuple]:
    on_cpu, on_cuda = (functools.partial(f, keep) for f in (_forward_cpu, _forward_cuda))

    def call(x: jax.Array, ids: jax.Array, weights: jax.Array, *experts: jax.Array) -> tuple:
        *of_tokens, expert_rows, counts = _on_platform(on_cpu, on_cuda, spec, *map(_rows, (x, ids, weights)), *experts)
        return *(a.reshape(*x.shape[:-1], a.shape[-1]) for a in of_tokens), expert_rows, counts

    token_results = (True, True, False, False) if keep else (True, False, False)
    run = custom_vmap(partitioned(call, spec, token_args=range(3), token_results=token_results))

    @run.def_vmap
    def _(size: int, batched: Sequence[bool], *args: jax.Array) -> tuple:
        experts = args[3:]
        batched_results = (True,) * len(token_results)
        if any(batched[3:]) or spec.config.capacity is not None:
            return _walk(run, batched, args), batched_results
        tokens = [
            a if b else jnp.broadcast_to(a[None], (size, *a.shape)) for a, b in zip(args[:3], batched, strict=False)
        ]
        *of_tokens, _, _ = run(*tokens, *experts)
        rows, counts = jax.vmap(functools.partial(cuda.count_routes, spec))(tokens[1])
        return (*of_tokens, rows, counts), batched_results

    return run


@functools.cache
def _backward(spec: LayerSpec, wide: bool, kept: bool) -> Callable[..., tuple]:
    on_cpu, on_cuda = (functools.partial(f, wide, kept) for f in (_backward_cpu, _backward_cuda))
    first_expert = 6 if kept else 5  # behind token, x, dy, ids, weights, gate_up

    def call(token: jax.Array, *args: jax.Array) -> tuple:
        of_tokens, experts = args[: first_expert - 1], args[first_expert - 1 :]
        x, _, _, weights = of_tokens[:4]
        token, dx, d_weights, *d_experts = _on_platform(on_cpu, on_cuda, spec, token, *map(_rows, of_tokens), *experts)
        return token, dx.reshape(x.shape), d_weights.reshape(weights.shape), *d_experts

    token_results = (None, True, True) + (False,) * 6
    run = custom_vmap(partitioned(call, spec, token_args=range(1, first_expert), token_results=token_results))

    @run.def_vmap
    def _(size: int, batched: Sequence[bool], *args: jax.Array) -> tuple:
        # Each example has weight gradients of its own, so there is nothing to fold.
        return _walk(run, batched, args), (True,) * 9

    return run


def _on_platform(cpu: Callable[..., Any], cuda: Callable[..., Any], spec: LayerSpec, *args: Any) -> Any:
    """The platform's own call; without CUDA in the build there is nothing to choose."""
    if not ffi.compiled.WITH_CUDA:
        return cpu(spec, *args)
    return lax.platform_dependent(*args, cpu=functools.partial(cpu, spec), cuda=functools.partial(cuda, spec))


def _forward_cpu(
    keep: bool, spec: LayerSpec, x: jax.Array, ids: jax.Array, weights: jax.Array, *experts: jax.Array
) -> tuple:
    call = ops.forward_kept if keep else ops.forward
    return call(spec, x, ids, weights, experts)  # type: ignore[arg-type]


def _forward_cuda(
    keep: bool, spec: LayerSpec, x: jax.Array, ids: jax.Array, weights: jax.Array, *experts: jax.Array
) -> tuple:
    args: Any = (spec, x, ids, weights, experts)
    of_tokens = cuda.forward_kept(*args) if keep else (cuda.forward(*args),)
    return *of_tokens, *cuda.count_routes(spec, ids)


def _backward_cpu(
    wide: bool,
    kept: bool,
    spec: LayerSpec,
    token: jax.Array,
    x: jax.Array,
    dy: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    *rest: Any,
) -> tuple:
    if kept:
        dx_rows, d_weights, d_experts = ops.backward_kept(spec, x, dy, ids, weights, rest[0], rest[1:])
    else:
        of_rows: Callable[..., tuple] = _wide_rows_cpu if wide else ops.backward
        token, dx_rows, d_weights, d_experts = of_rows(spec, token, x, dy, ids, weights, rest)
    # A route dropped by capacity has a zero row, so it needs no flag here.
    ids = _owned(spec, ids)
    return token, ops.combine(spec, dx_rows, ids, *_unweighted(ids)), d_weights, *d_experts


def _backward_cuda(
    wide: bool,
    kept: bool,
    spec: LayerSpec,
    token: jax.Array,
    x: jax.Array,
    dy: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    *rest: Any,
) -> tuple:
    gate_up, experts = (rest[0], rest[1:]) if kept else (None, rest)
    dx, d_weights, d_experts = cuda.backward(spec, x, dy, ids, weights, experts, wide, gate_up)
    return token, dx, d_weights, *d_experts


def _wide_rows_cpu(
    spec: LayerSpec, token: jax.Array, x: jax.Array, dy: jax.Array, local_ids: jax.Array, weights: jax.Array,
    experts: Experts,
) -> tuple:  # fmt: skip
    """`rows_backward` as that of the float32 layer: the handler computes in float32 and rounds what it is told to."""
    wide = dataclasses.replace(spec, config=dataclasses.replace(spec.config, dtype=np.float32))
    x_, dy_, experts = cuda.widened((x, dy, experts))
    token, dx_rows, d_weights, d_experts = ops.backward(wide, token, x_, dy_, local_ids, weights, experts)
    return token, dx_rows.astype(x.dtype), d_weights, d_experts


def _unweighted(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights and drop flags of a plain sum."""
    return jnp.ones_like(ids, jnp.float32), jnp.zeros_like(ids, jnp.uint8)


def _owned(spec: LayerSpec, ids: jax.Array) -> jax.Array:
    return jnp.where((ids >= 0) & (ids < spec.num_local_experts), ids, -1)


def _rows(array: jax.Array) -> jax.Array:
    """Leading dimensions folded: [T, n]. Inside the partitioned call, where it moves nothing between devices."""
    return array.reshape(-1, array.shape[-1])


def _walk(run: Callable[..., Any], batched: Sequence[bool], args: Sequence[jax.Array]) -> Any:
    """lax.map over the batched arguments."""
    mapped = [a for a, b in zip(args, batched, strict=True) if b]

    def one(mapped_args: Sequence[jax.Array]) -> Any:
        rest = iter(mapped_args)
        return run(*(next(rest) if b else a for a, b in zip(args, batched, strict=True)))

    return lax.map(one, mapped)
