"""The layer's calls under plain jit on sharded tokens: each shard stays where it is, whatever type its axes have.

Contract: `partitioned(call, ...)` behaves as `call` with rows of tokens kept local and sums over tokens summed over the
shards. Auto axes go through custom_partitioning, Explicit ones through jax.shard_map, because their shardings are in
the types and custom_partitioning does not know them; inside of a shard_map it is `call` itself. Sharded experts are
refused, because XLA would gather them without a word. Trade-off: two ways for one thing, as long as JAX has two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from .ops import LayerSpec
from .varying import spec_axes


def partitioned(
    call: Callable[..., tuple], spec: LayerSpec, *, token_args: range, token_results: Sequence[bool | None]
) -> Callable[..., tuple]:
    """`call` with rows of tokens kept where they are; results that are not rows are summed over the shards.

    The arguments at `token_args` are rows of tokens [..., n] with equal leading dimensions, x first, those behind them
    the experts, others whole. `token_results`: per result, True for rows of tokens, False for a sum over tokens, None
    for neither.
    """
    wrapped = custom_partitioning(call)

    def token_spec(args: Sequence[Any]) -> P:
        """How the leading dimensions lie over the mesh."""
        leading = (_leading(args[n]) for n in token_args)
        parts = next((p for p in leading if any(part is not None for part in p)), P())
        axes = spec_axes(parts)
        if axes and spec.config.capacity is not None:
            raise ValueError(
                f"moe: tokens are sharded over {axes} under plain jit, but capacity counts the tokens of all shards; "
                "use expert_parallel, or leave the tokens replicated"
            )
        for arg in args[token_args.stop :]:
            if any(part is not None for part in _spec_of(arg)):
                raise ValueError(
                    f"moe: expert tensor of shape {arg.shape} is sharded as {_spec_of(arg)} under plain jit, where it "
                    "would be gathered; use expert_parallel (accumulate_gradients: jax.shard_map and axis_name=), or "
                    "replicate it first with jax.lax.with_sharding_constraint"
                )
        return parts

    def local_call(axes: tuple[str, ...]) -> Callable[..., tuple]:
        def local(*args: jax.Array) -> tuple:
            out = call(*args)
            return tuple(
                lax.psum(o, axes) if axes and kind is False else o for o, kind in zip(out, token_results, strict=True)
            )

        return local

    def specs(rows: P, args: Sequence[Any]) -> tuple[tuple[P, ...], tuple[P, ...]]:
        arg_specs = tuple(rows if n in token_args else P() for n in range(len(args)))
        return arg_specs, tuple(rows if kind else P() for kind in token_results)

    def partition(mesh: Any, arg_shapes: Any, result_shapes: Any) -> Any:
        del result_shapes
        rows = token_spec(arg_shapes)
        arg_specs, result_specs = specs(rows, arg_shapes)
        on_mesh = functools.partial(NamedSharding, mesh)
        return mesh, local_call(spec_axes(rows)), tuple(map(on_mesh, result_specs)), tuple(map(on_mesh, arg_specs))

    def rule(mesh: Any, args: Any, results: Any) -> str:
        # Only leading dimensions of tokens are shared by operands and results; every other one has a factor of its own.
        del mesh
        names = [
            " ".join(f"t{d}" if token and d < len(a.shape) - 1 else f"f{n}d{d}" for d in range(len(a.shape)))
            for n, (token, a) in enumerate(
                [(n in token_args, a) for n, a in enumerate(args)]
                + [(bool(kind), a) for kind, a in zip(token_results, results, strict=True)]
            )
        ]
        return ", ".join(names[: len(args)]) + " -> " + ", ".join(names[len(args) :])

    wrapped.def_partition(partition=partition, sharding_rule=rule)

    def run(*args: jax.Array) -> tuple:
        if get_abstract_mesh().manual_axes:
            return call(*args)
        types = [jax.typeof(a) for a in args]
        mesh = next((t.sharding.mesh for t in types if AxisType.Explicit in t.sharding.mesh.axis_types), None)
        if mesh is None:
            return wrapped(*args)
        if mesh.auto_axes:
            raise ValueError(
                f"moe: under plain jit the mesh axes must be all Auto or all Explicit, got {mesh.axis_types}"
            )
        # Shardings are in the types: the partitioner has no say, and custom_partitioning does not know them.
        rows = token_spec(types)
        return jax.jit(functools.partial(_shard_map, local_call(spec_axes(rows)), mesh, *specs(rows, types)))(*args)

    return run


def _shard_map(
    local: Callable[..., tuple], mesh: Any, arg_specs: tuple[P, ...], result_specs: tuple[P, ...], *args: jax.Array
) -> tuple:
    """`local` per shard on an Explicit mesh.

    Empty operands and results (absent biases, T = 0) stay outside: JAX 0.11's partitioner crashes on them.
    """
    per_shard = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    args = tuple(jax.sharding.reshard(a, NamedSharding(mesh, s)) for a, s in zip(args, arg_specs, strict=True))
    results = jax.eval_shape(per_shard(local, in_specs=arg_specs, out_specs=result_specs), *args)
    args_in, results_out = ([n for n, a in enumerate(arrays) if a.size] for arrays in (args, results))

    def present(*values: jax.Array) -> tuple:
        given = dict(zip(args_in, values, strict=True))
        out = local(*(given[n] if n in given else jnp.zeros(a.shape, a.dtype) for n, a in enumerate(args)))
        return tuple(out[n] for n in results_out)

    in_specs, out_specs = tuple(arg_specs[n] for n in args_in), tuple(result_specs[n] for n in results_out)
    out = per_shard(present, in_specs=in_specs, out_specs=out_specs)(*(args[n] for n in args_in))
    given = dict(zip(results_out, out, strict=True))
    return tuple(given[n] if n in given else jnp.zeros(r.shape, r.dtype) for n, r in enumerate(results))


def _spec_of(array: Any) -> P:
    """The PartitionSpec of an array's sharding; operands that XLA made or replicated itself come without one."""
    spec = getattr(array.sharding, "spec", None)
    if spec is None and not array.sharding.is_fully_replicated:
        raise ValueError(
            f"moe: operand of shape {array.shape} is sharded as {array.sharding}, which names no mesh axes; give it a "
            "NamedSharding with jax.lax.with_sharding_constraint"
        )
    return P() if spec is None else spec


def _leading(array: Any) -> P:
    """The spec of all dimensions but the last one."""
    return P(*tuple(_spec_of(array))[: len(array.shape) - 1])
