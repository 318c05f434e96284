"""Streams: publish chunks of routing and tokens, in any order, and get the layer's output when all are in.

Contract: `stream_moe` runs a route function chunk by chunk; `open_stream`, `publish_route`, `publish_layout`,
`close_stream` do the same by hand, inside jit. A stream is linear: every call takes it and returns the next one. The
result has the same bits as `moe` over the same tokens. Published arrays are recorded, so that the gradient can be
attached at the end; a chunk published under a traced index cannot be, and closing then wants the whole arrays.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import get_abstract_mesh

from . import api, checks, exchange, local, ops, vjp, waves
from .config import MoEConfig
from .ops import Experts, LayerSpec, StreamSpec
from .ring import Ring, RingRef, RingSpec, with_ring
from .routing import Routed

POLICIES = ("serial", "overlap", "persistent")
TOKENS, WEIGHTS = "publish_layout: x_c", "publish_route: topk_weights"


class StreamInfo(NamedTuple):
    """What a stream returns beside y: aux of the route function, concatenated over chunks, and Stats or None."""

    aux: Any = None
    stats: api.Stats | None = None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["ring", "mem", "token", "y", "experts", "num_valid", "routes", "layouts", "marks"],
    meta_fields=["spec", "gradient", "record"],
)
@dataclasses.dataclass(frozen=True)
class Stream:
    """An open stream; pass it on from call to call. Fields are the library's own."""

    ring: Ring | RingRef
    mem: jax.Array
    token: jax.Array
    y: jax.Array
    experts: Experts
    num_valid: Any
    routes: dict[int, Any]
    layouts: dict[int, Any]
    marks: dict[str, jax.Array]
    spec: StreamSpec
    gradient: vjp.GradientSpec
    record: bool

    @property
    def num_chunks(self) -> int:
        """Chunks that must be published; the same on every rank."""
        return self.spec.plan.num_chunks

    def chunk_bounds(self, chunk: int) -> tuple[int, int]:
        """Returns (start, stop), the tokens of a chunk."""
        return waves.chunk_bounds(self.spec.plan, self.spec.num_tokens, chunk)


def open_stream(
    ring: Ring | RingRef, w_gate_up: Any, w_down: jax.Array, *, config: MoEConfig, num_tokens: int, b_gate_up: Any = None,
    b_down: Any = None, num_valid: Any = None, policy: str = "overlap", schedule: str = "packed", chunks: Any = None,
    checks: bool = False, record: bool = True,
) -> Stream:  # fmt: skip
    """Opens a stream of `num_tokens` tokens on `ring`.

    Arguments:
      ring: used up; close_stream returns the next one.
      w_gate_up, w_down, b_gate_up, b_down: experts of this rank, [L, ...] as in `moe`.
      num_tokens: T, static, equal on all ranks. num_valid: tokens of this rank that exist; later ones are masked.
      policy: "serial" or "overlap" (waves run beside the producer).
      schedule: "packed" (waves, partial blocks are carried) or "chunk" (each chunk on its own).
      chunks: None (chunks of the ring's C tokens), an int n (chunks of ceil(min(T, S*C) / n) tokens), or "auto".
      checks: ids outside -1..E-1 are an error.
      record: keep published arrays for the gradient; False when chunks are published under a traced index.

    Returns a Stream with `num_chunks` and `chunk_bounds(n)`. Raises ValueError or TypeError naming the argument.
    """
    spec = _check_call("open_stream", ring, config, policy)
    _check_experts(w_gate_up, w_down, b_gate_up, b_down, config, spec)
    stream_spec = _stream_spec(spec, config, num_tokens, policy, schedule, chunks, checks)
    experts = ops.pack_experts(w_gate_up, w_down, b_gate_up, b_down)
    return _open(ring, experts, stream_spec, num_valid, record)


def publish_route(stream: Stream, chunk: Any, topk_ids: jax.Array, topk_weights: jax.Array) -> Stream:
    """Publishes the routing of a chunk: ids [c, K] int32, weights [c, K]; before or after its layout.

    `chunk` is a Python int (any order the ring allows) or a traced int32 scalar (in order 0..n-1). c is the chunk's true
    size, `chunk_bounds`; under a traced index every chunk has the full size. Raises ValueError when the chunk is
    published already, out of range, or before a chunk whose slot it needs.
    """
    config = stream.spec.layer.config
    rows = _check_chunk(stream, chunk, "publish_route", stream.routes, stream.layouts)
    checks.check_routes(topk_ids, topk_weights, config, (rows,))
    start = _first_token(stream, chunk)
    ids = api.name_ids(api.mask_ids(api.narrow_ids(topk_ids, config), stream.num_valid, start))
    weights = api.name_weights(topk_weights.astype(jnp.float32))
    ids, weights = vjp.vary_together((ids, weights), stream.mem)
    index, operand = ops.as_chunk(chunk), lax.stop_gradient(weights)
    mem, y = ops.publish_route(stream.spec, _no_vmap(stream.mem, index, ids, operand), stream.y, index, ids, operand)
    routes = (
        stream.routes | {chunk: (ids, weights) if stream.record else ()} if isinstance(chunk, int) else stream.routes
    )
    return dataclasses.replace(stream, mem=mem, y=y, routes=routes, marks=_mark(stream, WEIGHTS, weights))


def publish_layout(stream: Stream, chunk: Any, x: jax.Array, x_scale: jax.Array | None = None) -> Stream:
    """Publishes the tokens [c, H] of a chunk, before or after its routing. `chunk` as in `publish_route`.

    x_scale: scales of quantised tokens; None for the dtypes of this backend. Raises as `publish_route`.
    """
    if x_scale is not None:
        raise ValueError(f"x_scale must be None: tokens of dtype {stream.spec.layer.config.dtype.name} carry no scales")
    rows = _check_chunk(stream, chunk, "publish_layout", stream.layouts, stream.routes)
    checks.check_tokens(x, stream.spec.layer.config, "x_c")
    if x.shape != (rows, stream.spec.layer.config.hidden):
        raise ValueError(f"x_c must have shape {(rows, stream.spec.layer.config.hidden)}, got {x.shape}")
    x = vjp.vary_together(x, stream.mem)
    index, operand = ops.as_chunk(chunk), lax.stop_gradient(x)
    mem, y = ops.publish_layout(stream.spec, _no_vmap(stream.mem, index, operand), stream.y, index, operand)
    layouts = stream.layouts | {chunk: x if stream.record else ()} if isinstance(chunk, int) else stream.layouts
    return dataclasses.replace(stream, mem=mem, y=y, layouts=layouts, marks=_mark(stream, TOKENS, x))


def close_stream(
    stream: Stream, *, x: jax.Array | None = None, topk_ids: jax.Array | None = None,
    topk_weights: jax.Array | None = None, return_stats: bool = True,
) -> tuple[jax.Array, Ring | RingRef, StreamInfo]:  # fmt: skip
    """Ends a stream: -> y [T, H], the ring, StreamInfo(aux=None, stats).

    The gradient reaches the published arrays, or, when they were published under a traced index or with record=False, the
    whole arrays given here: x [T, H], topk_ids [T, K], topk_weights [T, K]. With neither, differentiating raises.
    Raises ValueError when a chunk is missing.
    """
    given = [a is not None for a in (x, topk_ids, topk_weights)]
    if any(given) and not all(given):
        raise ValueError("close_stream: x, topk_ids and topk_weights must be given together")
    traced = not stream.record and not stream.routes and not stream.layouts
    if not traced and not len(stream.routes) == len(stream.layouts) == stream.num_chunks:
        raise ValueError(checks.not_published(stream.num_chunks, list(stream.routes), list(stream.layouts)))
    residuals = None
    if all(given):
        config = stream.spec.layer.config
        tokens = (stream.spec.num_tokens,)
        if checks.check_tokens(x, config) != tokens:
            raise ValueError(f"x must have shape {(*tokens, config.hidden)}, got {x.shape}")  # type: ignore[union-attr]
        checks.check_routes(topk_ids, topk_weights, config, tokens)
        ids = api.mask_ids(api.narrow_ids(topk_ids, config), stream.num_valid)  # type: ignore[arg-type]
        residuals = (x, ids, topk_weights.astype(jnp.float32))  # type: ignore[union-attr]
    elif stream.record:
        order = range(stream.num_chunks)
        ids, weights = (jnp.concatenate([stream.routes[n][half] for n in order]) for half in (0, 1))
        residuals = (jnp.concatenate([stream.layouts[n] for n in order]), ids, weights)
    y, ring, stats = _close(stream, residuals)
    return y, ring, StreamInfo(None, stats if return_stats else None)


def stream_moe(
    x: jax.Array, route: Callable[..., Any], w_gate_up: Any, w_down: jax.Array, *, config: MoEConfig,
    ring: Ring | RingRef | None = None, b_gate_up: Any = None, b_down: Any = None, route_args: tuple = (),
    token_args: tuple = (), num_valid: Any = None, policy: str = "overlap", schedule: str = "packed", chunks: Any = "auto",
    checks: bool = False, return_stats: bool = False, axis_name: Any = None,
) -> tuple[jax.Array, Ring | RingRef | None, StreamInfo]:  # fmt: skip
    """Routes and applies the layer chunk by chunk: while experts work on one chunk, the next is being routed.

    Arguments:
      x: [T, H] tokens of this rank.
      route: `route(x_c [c, H], *token_args_c, *route_args) -> Routed | (ids, weights)`, any JAX function; the last chunk
        has its true size. `Routed.x` replaces the tokens that are dispatched, `Routed.aux` is any pytree of per-token
        arrays.
      w_gate_up, w_down, b_gate_up, b_down: experts of this rank, [L, ...] as in `moe`.
      ring: from make_ring, used up and returned. None: batch-ready, same bits; over ranks `axis_name` then names the mesh
        axes, and XLA's all_to_all is the transport.
      route_args: whole arrays for the router (its parameters). token_args: arrays [T, ...] sliced per chunk.
      policy, schedule, chunks, num_valid, checks: as in open_stream; chunks="auto" may choose the batch-ready call.

    Returns (y [T, H], ring, StreamInfo(aux, stats)); stats is None unless return_stats.

    Gradients: x, router parameters, aux, weights, biases; the same whatever the chunks. Raises ValueError or TypeError
    naming the argument; NotImplementedError under vmap.
    """
    _check_tokens_2d(x, config)
    if ring is None:
        return _batch_ready(
            x, route, w_gate_up, w_down, config, b_gate_up, b_down, route_args, token_args, num_valid, checks, return_stats,
            axis_name,
        )  # fmt: skip
    spec = _check_call("stream_moe", ring, config, policy)
    _check_experts(w_gate_up, w_down, b_gate_up, b_down, config, spec)
    stream_spec = _stream_spec(spec, config, x.shape[0], policy, schedule, chunks, checks)
    experts = ops.pack_experts(w_gate_up, w_down, b_gate_up, b_down)
    x, token_args = vjp.vary_together((x, tuple(token_args)), _leaf(ring))
    run = _ring_batch if _wants_batch(stream_spec, chunks) else _ring_stream
    y, aux, stats, ring = run(stream_spec, x, route, experts, tuple(route_args), token_args, num_valid, ring)
    return y, ring, StreamInfo(aux, stats if return_stats else None)


def _ring_stream(
    spec: StreamSpec, x: jax.Array, route: Callable, experts: Experts, route_args: tuple, token_args: tuple, num_valid: Any,
    ring: Ring | RingRef,
) -> tuple:  # fmt: skip
    stream = _open(ring, experts, spec, num_valid, True)
    parts, aux = [], []
    for chunk in range(stream.num_chunks):
        start, stop = stream.chunk_bounds(chunk)
        if start == stop and x.shape[0]:
            stream = _publish_empty(stream, chunk)
            continue
        x_c, args_c = jax.tree.map(lambda a, b=start, e=stop: a[b:e], (x, token_args))
        if spec.overlap and chunk:
            # The next chunk is routed after the last one is published and before the stream is closed.
            x_c = _sequence(x_c, _published(stream.mem))
        routed = _route(route, x_c, args_c, route_args)
        stream = publish_layout(stream, chunk, x_c if routed.x is None else routed.x)
        stream = publish_route(stream, chunk, routed.ids, routed.weights)
        parts.append((routed.x, *stream.routes[chunk]))
        aux.append(routed.aux)
    tokens = x if parts[0][0] is None else jnp.concatenate([p[0] for p in parts])
    residuals = (tokens, *(jnp.concatenate([p[n] for p in parts]) for n in (1, 2)))
    y, ring, stats = _close(stream, residuals)
    return y, _concat(aux), stats, ring


def _publish_empty(stream: Stream, chunk: int) -> Stream:
    """Publishes a chunk without tokens, which the plan has so that all ranks count alike; nothing is routed.

    Routing no tokens would also leave residuals of size 0 behind, on which the partitioner of jaxlib 0.11.2 crashes.
    """
    config = stream.spec.layer.config
    stream = publish_layout(stream, chunk, jnp.zeros((0, config.hidden), config.dtype))
    ids, weights = jnp.zeros((0, config.top_k), jnp.int32), jnp.zeros((0, config.top_k), jnp.float32)
    return publish_route(stream, chunk, ids, weights)


def _ring_batch(
    spec: StreamSpec, x: jax.Array, route: Callable, experts: Experts, route_args: tuple, token_args: tuple, num_valid: Any,
    ring: Ring | RingRef,
) -> tuple:  # fmt: skip
    routed, prepared = _routed_operands(spec.layer.config, x, route, experts, route_args, token_args, num_valid)
    y, stats, ring = forward_on_ring(spec, prepared, ring)
    return y, routed.aux, stats, ring


def forward_on_ring(spec: StreamSpec, prepared: api.Prepared, ring: Ring | RingRef) -> tuple:
    """The batch-ready call on a ring: -> y, Stats, ring. `prepared` as from `api.prepare`."""

    def run(args: api.Prepared, ring: Ring) -> tuple:
        args = vjp.vary_together(args, ring.mem)
        operands = lax.stop_gradient(args)
        mem, y, expert_rows, counts = ops.ring_forward(spec, _no_vmap(ring.mem, *operands), *operands)
        gradient = _gradient(ring.spec, spec.layer)
        y, token = vjp.attach(gradient, api.named_y(y), *args, ring.token)
        return y, expert_rows, counts, dataclasses.replace(ring, mem=mem, token=token)

    y, expert_rows, counts, ring = with_ring(ring, run, prepared)
    return y, api.stats_of(expert_rows, counts), ring


def batch_spec(spec: RingSpec, config: MoEConfig, num_tokens: int, check_ids: bool) -> StreamSpec:
    """The plan of a batch-ready call on a ring: chunks of C tokens, one wave per macro-chunk."""
    return _stream_spec(spec, config, num_tokens, "serial", "packed", None, check_ids, max_waves=1)


def forward_over_ranks(spec: LayerSpec, axis_names: tuple[str, ...], prepared: api.Prepared) -> tuple:
    """The batch-ready call without a ring over the ranks of `axis_names` (none: this device): -> y, Stats."""
    prepared = vjp.vary_together(prepared)
    args = lax.stop_gradient(prepared)
    if axis_names:
        y, expert_rows, counts = exchange.forward(spec, axis_names, *args)
    else:
        y, expert_rows, counts = local.forward(spec, *args)
    y, _ = vjp.attach(vjp.GradientSpec(spec, axis_names), api.named_y(y), *prepared, vjp.new_token(prepared.x))
    return y, api.stats_of(expert_rows, counts)


def _batch_ready(
    x: jax.Array, route: Callable, w_gate_up: Any, w_down: Any, config: MoEConfig, b_gate_up: Any, b_down: Any,
    route_args: tuple, token_args: tuple, num_valid: Any, check_ids: bool, return_stats: bool, axis_name: Any,
) -> tuple:  # fmt: skip
    api.check_context("stream_moe")
    axis_names = () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    num_local = config.local_experts(exchange.num_ranks(axis_names))
    checks.check_weights(w_gate_up, w_down, b_gate_up, b_down, config, num_local)
    experts = ops.pack_experts(w_gate_up, w_down, b_gate_up, b_down)
    routed, prepared = _routed_operands(config, x, route, experts, tuple(route_args), tuple(token_args), num_valid)
    y, stats = forward_over_ranks(LayerSpec(config, num_local, checks=check_ids), axis_names, prepared)
    return y, None, StreamInfo(routed.aux, stats if return_stats else None)


def _routed_operands(
    config: MoEConfig,
    x: jax.Array,
    route: Callable,
    experts: Experts,
    route_args: tuple,
    token_args: tuple,
    num_valid: Any,
) -> tuple[Routed, api.Prepared]:
    """Routes all tokens at once; -> what the route function returned, and the operands of the handlers."""
    routed = _route(route, x, token_args, route_args)
    tokens = x if routed.x is None else routed.x
    leading = checks.check_tokens(tokens, config)
    checks.check_routes(routed.ids, routed.weights, config, leading)
    ids = api.name_ids(api.mask_ids(api.narrow_ids(routed.ids, config), num_valid))
    return routed, api.Prepared(tokens, ids, api.name_weights(routed.weights.astype(jnp.float32)), experts)


def _open(ring: Ring | RingRef, experts: Experts, spec: StreamSpec, num_valid: Any, record: bool) -> Stream:
    checks.check_num_valid(num_valid)
    functional = ring.load() if isinstance(ring, RingRef) else ring
    experts = vjp.vary_together(experts, functional.mem)
    operands = lax.stop_gradient(experts)
    mem, y = ops.open_stream(spec, _no_vmap(functional.mem, *operands), None, operands)
    unmarked = (
        {} if record else {what: vjp.vary_together(jnp.zeros((), jnp.float32), mem) for what in (TOKENS, WEIGHTS)}
    )
    gradient = _gradient(ring.spec, spec.layer)
    return Stream(ring, mem, functional.token, y, experts, num_valid, {}, {}, unmarked, spec, gradient, record)


def _mark(stream: Stream, what: str, value: jax.Array) -> dict[str, jax.Array]:
    """Remembers that an operand which is not recorded is being differentiated; closing knows whether that is an error."""
    return stream.marks | {what: vjp.witness(stream.marks[what], value)} if stream.marks else stream.marks


def _close(stream: Stream, residuals: tuple | None) -> tuple:
    mem, y, expert_rows, counts = ops.close_stream(stream.spec, stream.mem, stream.y, lax.stop_gradient(stream.experts))
    token = stream.token
    if residuals is None:
        # Ties y to them in AD only: differentiating them raises instead of giving zeros.
        marks = [vjp.no_residuals(what, mark) for what, mark in stream.marks.items()]
        refuse = functools.partial(vjp.no_residuals, "close_stream: expert weights")
        y = vjp.tie(y, (marks, jax.tree.map(refuse, stream.experts)))
    else:
        x, ids, weights = vjp.vary_together(residuals, mem)
        y, token = vjp.attach(stream.gradient, api.named_y(y), x, ids, weights, stream.experts, token)
    ring = stream.ring
    used = Ring(mem, token, ring.spec)
    if isinstance(ring, RingRef):
        ring.store(used)
    else:
        ring = used
    return y, ring, api.stats_of(expert_rows, counts)


def _gradient(ring: RingSpec, layer: LayerSpec) -> vjp.GradientSpec:
    return vjp.GradientSpec(layer, ring.axis_names if ring.num_ranks > 1 else ())


def _check_call(what: str, ring: Any, config: MoEConfig, policy: str) -> RingSpec:
    api.check_context(what)
    checks.check_choice("policy", policy, POLICIES)
    if policy == "persistent":
        raise ValueError('policy "persistent" needs one CUDA device: use "overlap" or "serial" on this backend')
    if not isinstance(ring, (Ring, RingRef)):
        raise TypeError(f"ring must come from make_ring, got {type(ring).__name__}")
    spec = ring.spec
    if spec.config != config:
        raise ValueError(f"config must be the one the ring {spec.name!r} was made with, {spec.config}, got {config}")
    manual = get_abstract_mesh().manual_axes
    if spec.mesh_axes and not manual:
        raise ValueError(
            f"{what}: ring {spec.name!r} spans the mesh axes {dict(spec.mesh_axes)}, so the call belongs inside jax.shard_map "
            "over all of them; or use expert_parallel, which takes global arrays"
        )
    if spec.mesh_axes and set(manual) != {name for name, _ in spec.mesh_axes}:
        raise ValueError(
            f"{what}: ring {spec.name!r} was made for mesh axes {dict(spec.mesh_axes)}, the call runs in a shard_map over "
            f"{tuple(manual)}"
        )
    return spec


def _check_tokens_2d(x: Any, config: MoEConfig) -> None:
    if not isinstance(config, MoEConfig):
        raise TypeError(f"config must be an MoEConfig, got {type(config).__name__}")
    checks.check_tokens(x, config)
    if x.ndim != 2:
        raise ValueError(f"x must have shape (T, {config.hidden}), got {x.shape}")


def _check_experts(w_gate_up: Any, w_down: Any, b_gate_up: Any, b_down: Any, config: MoEConfig, spec: RingSpec) -> None:
    checks.check_weights(w_gate_up, w_down, b_gate_up, b_down, config, config.local_experts(spec.num_ranks))


def _stream_spec(
    ring: RingSpec, config: MoEConfig, num_tokens: int, policy: str, schedule: str, chunks: Any, check_ids: bool,
    max_waves: int | None = None,
) -> StreamSpec:  # fmt: skip
    checks.check_choice("schedule", schedule, waves.SCHEDULES)
    cost = waves.CPU(config.block_m)
    if max_waves is not None:
        cost = dataclasses.replace(cost, max_waves=max_waves)
    plan = waves.plan_chunks(
        num_tokens, ring_chunk_tokens=ring.shape.chunk_tokens, num_slots=ring.shape.num_slots, top_k=config.top_k,
        num_experts=config.num_experts, num_ranks=ring.num_ranks, cost=cost, chunks=chunks, schedule=schedule,
        single_wave=config.capacity is not None,
    )  # fmt: skip
    layer = LayerSpec(config, config.local_experts(ring.num_ranks), ring.threads, ring.name, check_ids)
    return StreamSpec(layer, plan, num_tokens, cost.min_carry_rows, schedule == "packed", policy == "overlap")


def _wants_batch(spec: StreamSpec, chunks: Any) -> bool:
    """chunks="auto" with as few chunks as the ring allows: the model predicts no gain from streaming."""
    return chunks == "auto" and spec.plan.num_chunks == len(spec.plan.macro_ends)


def _check_chunk(stream: Stream, chunk: Any, what: str, mine: dict, other: dict) -> int:
    """Checks that a half of `chunk` may be published now; returns the rows it must have."""
    if not isinstance(chunk, int):
        if stream.record:
            raise ValueError(f"{what}: chunk is traced, so nothing can be recorded: open the stream with record=False")
        if stream.num_chunks * stream.spec.plan.chunk_tokens != stream.spec.num_tokens:
            raise ValueError(
                f"{what}: chunk is traced, so all {stream.num_chunks} chunks must have {stream.spec.plan.chunk_tokens} tokens, "
                f"but the stream has {stream.spec.num_tokens}"
            )
        return stream.spec.plan.chunk_tokens
    start, stop = stream.chunk_bounds(chunk)
    if chunk in mine:
        raise ValueError(f"{what}: chunk {chunk} is published already")
    waves.validate_publication_order(
        stream.spec.plan, mine.keys() & other.keys(), chunk, num_slots=stream.ring.spec.shape.num_slots
    )
    return stop - start


def _first_token(stream: Stream, chunk: Any) -> Any:
    if isinstance(chunk, int):
        return stream.chunk_bounds(chunk)[0]
    return ops.as_chunk(chunk) * stream.spec.plan.chunk_tokens


def _route(route: Callable, x: jax.Array, token_args: tuple, route_args: tuple) -> Routed:
    routed = route(x, *token_args, *route_args)
    if isinstance(routed, Routed):
        return routed
    if isinstance(routed, tuple) and len(routed) == 2:
        return Routed(*routed)
    raise TypeError(f"route must return Routed or (ids, weights), got {type(routed).__name__}")


def _concat(parts: list) -> Any:
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def _leaf(ring: Ring | RingRef) -> Any:
    """A small leaf that varies over the ring's mesh axes."""
    return ring.load().token if isinstance(ring, RingRef) else ring.token


def _published(mem: jax.Array) -> jax.Array:
    """A scalar that exists once `mem` does.

    It is named like y: what a remat policy makes the backward compute again waits for the saved scalar, not for the ring.
    """
    return api.named_y(ops.after((vjp.vary_together(jnp.zeros((), jnp.float32), mem),), (mem,))[0])


@jax.custom_jvp
def _sequence(x: jax.Array, published: jax.Array) -> jax.Array:
    """x, available to the program only after `published`."""
    return ops.after((x,), (published,))[0]


@_sequence.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return _sequence(*primals), tangents[0]


@custom_vmap
def _no_vmap(mem: jax.Array, *operands: Any) -> jax.Array:
    return mem


@_no_vmap.def_vmap
def _(size: int, batched: Any, mem: jax.Array, *operands: Any) -> Any:
    raise NotImplementedError(checks.RING_VMAP)
