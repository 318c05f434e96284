"""The expert-parallel layer on global arrays: jax.shard_map round the per-rank functions, for any mesh.

Contract: experts are split over `axis_name`, tokens over `token_spec`; further mesh axes hold more tokens or copies.
Arrays may come sharded otherwise, replicated or uncommitted: on Explicit meshes they are resharded to what the layer
wants, on Auto meshes the partitioner does it. Gradients of what is replicated over an axis are summed over it. A ring
in `jax.Ref`s is loaded and stored outside of the shard_map. There is no all-gather of tokens or experts that the
caller did not ask for by sharding them otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from . import api, checks, publish, stream
from .config import MoEConfig
from .ops import LayerSpec
from .ring import Ring, RingRef, with_ring
from .varying import part_axes, spec_axes

TRANSPORTS = ("pull", "xla")


@dataclasses.dataclass(frozen=True)
class ExpertParallel:
    """An expert-parallel layer; made by `expert_parallel`. Frozen and hashable; call `.moe` or `.stream` inside jit."""

    config: MoEConfig
    mesh: Mesh
    axis_names: tuple[str, ...]
    token_spec: P
    transport: str
    check_vma: bool

    @property
    def ring_spec(self) -> P:
        """How a ring is sharded: one row per device."""
        return P(tuple(self.mesh.axis_names))

    @property
    def weight_spec(self) -> P:
        """How expert tensors are sharded: dimension 0 over the ranks."""
        return P(self._axis)

    @property
    def num_ranks(self) -> int:
        """R, the ranks that share the experts."""
        return math.prod(self.mesh.shape[a] for a in self.axis_names)

    @property
    def _axis(self) -> Any:
        return self.axis_names if len(self.axis_names) > 1 else self.axis_names[0]

    def moe(
        self, x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array, w_gate_up: Any, w_down: jax.Array, *,
        ring: Ring | RingRef | None = None, b_gate_up: Any = None, b_down: Any = None, num_valid: Any = None,
        checks: bool = False, return_stats: bool = False,
    ) -> tuple[jax.Array, Ring | RingRef | None, stream.StreamInfo]:  # fmt: skip
        """The batch-ready layer: x [..., H], ids and weights [..., K], experts [E, ...], all global.

        `num_valid`: int32 [devices that hold tokens] valid tokens of each token shard, or None. Returns
        (y [..., H], ring, StreamInfo(None, stats)); stats hold expert_rows [E] (or [D * E] with further token axes D)
        and counts per token shard. Gradients, errors and bits as `moe`.
        """
        self._check("ep.moe", ring)
        _check_tokens_and_routes(x, topk_ids, topk_weights, self.config)
        per_rank = functools.partial(self._moe_rank, checks)
        return self._run(
            per_rank, x, (topk_ids, topk_weights), (), w_gate_up, w_down, b_gate_up, b_down, num_valid, ring,
            return_stats,
        )  # fmt: skip

    def stream(
        self, x: jax.Array, route: Callable[..., Any], w_gate_up: Any, w_down: jax.Array, *,
        ring: Ring | RingRef | None = None, b_gate_up: Any = None, b_down: Any = None, route_args: tuple = (),
        token_args: tuple = (), num_valid: Any = None, policy: str = "overlap", schedule: str = "packed",
        chunks: Any = "auto", checks: bool = False, return_stats: bool = False,
    ) -> tuple[jax.Array, Ring | RingRef | None, stream.StreamInfo]:  # fmt: skip
        """The streamed layer: `route` runs per rank and chunk on x_c [c, H]; arguments as `stream_moe`, all global.

        `route_args` are replicated, `token_args` [..., n] sharded like tokens; aux comes back with the leading dims of
        x.
        """
        self._check("ep.stream", ring)
        publish.check_words(policy, schedule, chunks)
        stream.check_route(route, route_args, token_args)
        options = dict(policy=policy, schedule=schedule, chunks=chunks, checks=checks, return_stats=True)
        per_rank = functools.partial(self._stream_rank, route, options)
        return self._run(
            per_rank, x, tuple(token_args), tuple(route_args), w_gate_up, w_down, b_gate_up, b_down, num_valid, ring,
            return_stats,
        )  # fmt: skip

    def _moe_rank(
        self, check_ids: bool, x: jax.Array, token_args: Any, route_args: Any, experts: tuple, num_valid: Any,
        ring: Ring | None,
    ) -> tuple:  # fmt: skip
        config = self.config
        rows, ids, weights = (a.reshape(-1, a.shape[-1]) for a in (x, *token_args))
        w_gate_up, w_down, b_gate_up, b_down = experts
        prepared = api.prepare(rows, ids, weights, w_gate_up, w_down, b_gate_up, b_down, num_valid)
        if ring is None:
            layer = LayerSpec(config, config.local_experts(self.num_ranks), checks=check_ids)
            return *stream.forward_over_ranks(layer, self.axis_names, prepared), None, ring
        spec = stream.batch_spec(ring.spec, config, prepared.x.shape[0], check_ids)
        y, stats, ring = stream.forward_on_ring(spec, prepared, ring)
        return y, stats, None, ring

    def _stream_rank(
        self, route: Callable, options: dict, x: jax.Array, token_args: Any, route_args: Any, experts: tuple,
        num_valid: Any, ring: Ring | None,
    ) -> tuple:  # fmt: skip
        w_gate_up, w_down, b_gate_up, b_down = experts
        rows = x.reshape(-1, self.config.hidden)
        token_args = jax.tree.map(lambda a: a.reshape(rows.shape[0], *a.shape[x.ndim - 1 :]), token_args)
        y, used, info = stream.stream_moe(
            rows, route, w_gate_up, w_down, config=self.config, ring=ring, b_gate_up=b_gate_up, b_down=b_down,
            route_args=route_args, token_args=token_args, num_valid=num_valid, axis_name=self.axis_names, **options,
        )  # fmt: skip
        aux = jax.tree.map(lambda a: a.reshape(*x.shape[:-1], *a.shape[1:]), info.aux)
        return y, info.stats, aux, used

    def _run(
        self, per_rank: Callable, x: jax.Array, token_args: Any, route_args: Any, w_gate_up: Any, w_down: Any,
        b_gate_up: Any, b_down: Any, num_valid: Any, ring: Ring | RingRef | None, return_stats: bool,
    ) -> tuple:  # fmt: skip
        leading = checks.check_tokens(x, self.config)
        checks.check_per_token("token_args", token_args, leading)
        checks.check_weights(w_gate_up, w_down, b_gate_up, b_down, self.config, self.config.num_experts)
        if not x.size:
            return self._run_empty(
                per_rank, x, token_args, route_args, w_gate_up, w_down, b_gate_up, b_down, ring, return_stats
            )
        tokens, weight, whole = self._token_spec(x), self.weight_spec, P()
        token_axes = spec_axes(tokens)
        valid = P(token_axes) if num_valid is not None else whole
        if num_valid is not None:
            self._check_num_valid(num_valid, valid)

        def rank(x_: Any, token_: Any, route_: Any, experts_: Any, valid_: Any, ring_: Any) -> tuple:
            valid_ = None if valid_ is None else valid_.reshape(())
            y, stats, aux, ring_ = per_rank(x_, token_, route_, experts_, valid_, ring_)
            stats = stats._replace(**{n: getattr(stats, n).reshape(1) for n in stats._fields[1:]})
            return y.reshape(x_.shape), aux, stats, ring_

        others = tuple(a for a in token_axes if a not in self.axis_names)
        per_rank_stats = P(tuple(self.mesh.axis_names)) if ring is not None else P((*others, *self.axis_names))
        stats_spec = api.Stats._make([per_rank_stats] * len(api.Stats._fields))
        args = self._place(
            (x, token_args, route_args, (w_gate_up, w_down, b_gate_up, b_down), num_valid),
            (tokens, tokens, whole, weight, valid),
        )

        # A ring varies over every axis, so the results of axes that hold copies look as if they varied too.
        copies = set(self.mesh.axis_names) - set(token_axes) - set(self.axis_names)
        check_vma = self.check_vma and not (copies and ring is not None)

        def run(args: Any, ring: Ring | None) -> tuple:
            ring = None if ring is None else self._place((ring,), (self.ring_spec,))[0]
            specs = (tokens, tokens, whole, weight, valid, self.ring_spec)
            out_specs = (tokens, tokens, stats_spec, self.ring_spec)
            per_shard: Callable[..., tuple] = jax.shard_map(
                rank, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=check_vma
            )
            return per_shard(*args, ring)

        y, aux, stats, ring = with_ring(ring, run, args)
        return y, ring, stream.StreamInfo(aux, stats if return_stats else None)

    def _run_empty(
        self, per_rank: Callable, x: jax.Array, token_args: Any, route_args: Any, w_gate_up: Any, w_down: Any,
        b_gate_up: Any, b_down: Any, ring: Ring | RingRef | None, return_stats: bool,
    ) -> tuple:  # fmt: skip
        """A call without tokens, as one with a masked token per shard.

        jaxlib 0.11 crashes on empty shard_map operands.
        """
        sizes = [
            math.prod(self.mesh.shape[a] for a in part_axes(part)) for part in tuple(self.token_spec)[: x.ndim - 1]
        ]
        sizes += [1] * (x.ndim - 1 - len(sizes))
        leading = tuple(n or size for n, size in zip(x.shape, sizes, strict=False))
        x_, token_ = jax.tree.map(lambda a: jnp.zeros((*leading, *a.shape[x.ndim - 1 :]), a.dtype), (x, token_args))
        valid = jnp.zeros((math.prod(sizes),), jnp.int32)
        _, ring, info = self._run(
            per_rank, x_, token_, route_args, w_gate_up, w_down, b_gate_up, b_down, valid, ring, return_stats
        )
        stats = info.stats and info.stats._replace(masked_routes=jnp.zeros_like(info.stats.masked_routes))
        aux = jax.tree.map(lambda a: jnp.zeros((*x.shape[:-1], *a.shape[x.ndim - 1 :]), a.dtype), info.aux)
        return jnp.zeros(x.shape, x.dtype), ring, stream.StreamInfo(aux, stats)

    def _place(self, values: Any, specs: Any) -> Any:
        """On Explicit meshes, reshards what is not laid out as the layer wants it."""
        if AxisType.Explicit not in self.mesh.axis_types:
            return values
        return jax.tree.map(
            lambda value, spec: jax.tree.map(lambda a: jax.sharding.reshard(a, NamedSharding(self.mesh, spec)), value),
            values, specs, is_leaf=lambda v: not isinstance(v, tuple) or v is not values,
        )  # fmt: skip

    def _token_spec(self, x: jax.Array) -> P:
        parts = tuple(self.token_spec)[: x.ndim - 1]
        for dim, part in enumerate(parts):
            size = math.prod(self.mesh.shape[a] for a in part_axes(part))
            if x.shape[dim] % size:
                raise ValueError(
                    f"x: dimension {dim} of {x.shape} must be a multiple of {size}, mesh axes {part_axes(part)}"
                )
        return P(*parts)

    def _check_num_valid(self, num_valid: Any, spec: P) -> None:
        shards = math.prod(self.mesh.shape[a] for a in part_axes(spec[0] if len(spec) else None))
        if getattr(num_valid, "shape", None) != (shards,):
            got = checks.describe(num_valid)
            raise ValueError(f"num_valid must be int32 of shape {(shards,)}, one count per token shard, got {got}")

    def _check(self, what: str, ring: Any) -> None:
        manual = get_abstract_mesh().manual_axes
        if manual:
            raise ValueError(
                f"{what} takes global arrays and is called outside of shard_map, got manual axes {tuple(manual)}; "
                "inside, use stream_moe"
            )
        if ring is not None and self.transport != "pull":
            raise ValueError(f'{what}: transport "{self.transport}" uses no ring, got one; pass ring=None')
        if ring is None:
            return
        if not isinstance(ring, (Ring, RingRef)):
            raise TypeError(f"ring must come from make_ring, got {type(ring).__name__}")
        if ring.spec.axis_names != self.axis_names or dict(ring.spec.mesh_axes) != dict(self.mesh.shape):
            raise ValueError(
                f"{what}: ring {ring.name!r} was made for axis_name {ring.spec.axis_names} of mesh "
                f"{dict(ring.spec.mesh_axes)}, got {self.axis_names} of {dict(self.mesh.shape)}"
            )
        publish.check_traced(what, ring)


def expert_parallel(
    config: MoEConfig, *, mesh: Mesh | None = None, axis_name: Any = "ep", token_spec: P | None = None,
    transport: str = "pull", check_vma: bool = True,
) -> ExpertParallel:  # fmt: skip
    """Returns the expert-parallel layer of `config` on `mesh`.

    Arguments:
      mesh: a concrete mesh; None takes the one set by jax.set_mesh. Auto and Explicit axes both work.
      axis_name: the axis, or axes, that the experts are split over; E must be a multiple of their size R.
      token_spec: PartitionSpec of the leading dims of x over the mesh; by default dimension 0 over `axis_name`. Axes it
        leaves out hold copies of the tokens.
      transport: "pull" (through a ring; without one it falls back to "xla") or "xla" (XLA's all_to_all, no ring).
      check_vma: as in jax.shard_map.

    Raises ValueError for an axis that is not in the mesh, E not divisible by R, or an unknown transport.
    """
    checks.check_choice("transport", transport, TRANSPORTS)
    checks.check_config(config)
    axis_names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if mesh is None:
        mesh = jax.sharding.get_mesh()
        if not mesh.axis_names:
            raise ValueError("mesh must be given, or set with jax.set_mesh: there is none")
    for axis in axis_names:
        if axis not in mesh.axis_names:
            raise ValueError(f"axis_name must be an axis of the mesh {tuple(mesh.axis_names)}, got {axis!r}")
    config.local_experts(math.prod(mesh.shape[a] for a in axis_names))
    spec = P(axis_names if len(axis_names) > 1 else axis_names[0]) if token_spec is None else token_spec
    for axis in spec_axes(spec):
        if axis not in mesh.axis_names:
            raise ValueError(f"token_spec must name axes of the mesh {tuple(mesh.axis_names)}, got {axis!r}")
    return ExpertParallel(config, mesh, axis_names, spec, transport, check_vma)


def _check_tokens_and_routes(x: Any, topk_ids: Any, topk_weights: Any, config: MoEConfig) -> None:
    checks.check_routes(topk_ids, topk_weights, config, checks.check_tokens(x, config))
