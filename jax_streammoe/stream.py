"""Streams over a route function, and the batch-ready calls that give the same bits in one piece.

Contract: `stream_moe` routes and publishes chunk by chunk on a ring, or all at once where streaming gains nothing;
`forward_on_ring` and `forward_over_ranks` are those calls for operands that are there already, for sharding.py too. The
result has the same bits as `moe` over the same tokens. Trade-off: the next chunk's routing is held back until the last
one is published, so that routers do not run ahead of the experts they overlap with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import api, checks, costs, cuda, exchange, local, ops, vjp
from .config import MoEConfig
from .ops import Experts, LayerSpec, StreamSpec
from .publish import (
    Stream,
    StreamInfo,
    begin,
    check_call,
    check_experts,
    check_words,
    finish,
    gradient_spec,
    no_vmap,
    plan_stream,
    publish_layout,
    publish_route,
)
from .ring import Ring, RingRef, RingSpec, with_ring
from .routing import Routed
from .varying import part_axes, vary_together


def stream_moe(
    x: jax.Array, route: Callable[..., Any], w_gate_up: Any, w_down: jax.Array, *, config: MoEConfig,
    ring: Ring | RingRef | None = None, b_gate_up: Any = None, b_down: Any = None, route_args: tuple = (),
    token_args: tuple = (), num_valid: Any = None, policy: str = "overlap", schedule: str = "packed",
    chunks: Any = "auto", checks: bool = False, return_stats: bool = False, axis_name: Any = None,
) -> tuple[jax.Array, Ring | RingRef | None, StreamInfo]:  # fmt: skip
    """Routes and applies the layer chunk by chunk: while experts work on one chunk, the next is being routed.

    Arguments:
      x: [T, H] tokens of this rank.
      route: `route(x_c [c, H], *token_args_c, *route_args) -> Routed | (ids, weights)`, any JAX function; the last
        chunk has its true size. `Routed.x` replaces the tokens that are dispatched, `Routed.aux` is any pytree of
        per-token arrays.
      w_gate_up, w_down, b_gate_up, b_down: experts of this rank, [L, ...] as in `moe`.
      ring: from make_ring, used up and returned. None: batch-ready, same bits; over ranks `axis_name` then names the
        mesh axes, and XLA's all_to_all is the transport.
      route_args: whole arrays for the router (its parameters). token_args: arrays [T, ...] sliced per chunk.
      policy, schedule, chunks, num_valid, checks: as in open_stream; chunks="auto" may choose the batch-ready call.

    Returns (y [T, H], ring, StreamInfo(aux, stats)); stats is None unless return_stats.

    Gradients: x, router parameters, aux, weights, biases; the same whatever the chunks. Raises ValueError or TypeError
    naming the argument; NotImplementedError under vmap.
    """
    check_route(route, route_args, token_args)
    _check_arguments(x, token_args, config)
    check_words(policy, schedule, chunks)
    if ring is None:
        return _batch_ready(
            x, route, w_gate_up, w_down, config, b_gate_up, b_down, route_args, token_args, num_valid, checks,
            return_stats, axis_name,
        )  # fmt: skip
    spec = check_call("stream_moe", ring, config, policy)
    check_experts(w_gate_up, w_down, b_gate_up, b_down, config, spec)
    experts = ops.pack_experts(w_gate_up, w_down, b_gate_up, b_down)
    x, token_args = vary_together((x, tuple(token_args)), ring.token if isinstance(ring, Ring) else ())
    on_gpu = spec.platform == "cuda"
    producer_s = costs.producer_seconds(route, x, *token_args, *route_args) if on_gpu else None
    stream_spec = plan_stream(spec, config, x.shape[0], policy, schedule, chunks, checks, producer_s=producer_s)
    run = _ring_stream
    if _wants_batch(stream_spec, chunks):  # nothing is left to run beside: one handler, on one stream
        run, stream_spec = _ring_batch, batch_spec(spec, config, x.shape[0], checks)
    y, aux, stats, ring = run(stream_spec, x, route, experts, tuple(route_args), token_args, num_valid, ring)
    return y, ring, StreamInfo(aux, stats if return_stats else None)


def _ring_stream(
    spec: StreamSpec, x: jax.Array, route: Callable, experts: Experts, route_args: tuple, token_args: tuple,
    num_valid: Any, ring: Ring | RingRef,
) -> tuple:  # fmt: skip
    stream = begin(ring, experts, spec, num_valid, True)
    parts, aux = [], []
    for chunk in range(stream.num_chunks):
        start, stop = stream.chunk_bounds(chunk)
        if start == stop and x.shape[0]:
            stream = _publish_empty(stream, chunk)
            continue
        # The next chunk is routed after the last one is published and before the stream is closed.
        in_turn = spec.overlap and chunk > 0
        if in_turn and ring.spec.platform == "cuda":
            (x, token_args), mem = _in_turn((x, token_args), stream.mem)
            stream = dataclasses.replace(stream, mem=mem)
        x_c, args_c = jax.tree.map(lambda a, b=start, e=stop: a[b:e], (x, token_args))
        if in_turn and ring.spec.platform != "cuda":
            x_c = _sequence(x_c, _published(stream.mem))
        routed = _route(route, x_c, args_c, route_args, spec.layer.config)
        stream = publish_layout(stream, chunk, x_c if routed.x is None else routed.x)
        stream = publish_route(stream, chunk, routed.ids, routed.weights)
        parts.append((routed.x, *stream.routes[chunk]))
        aux.append(routed.aux)
    tokens = x if parts[0][0] is None else jnp.concatenate([p[0] for p in parts])
    residuals = (tokens, *(jnp.concatenate([p[n] for p in parts]) for n in (1, 2)))
    y, ring, stats = finish(stream, residuals)
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
    spec: StreamSpec, x: jax.Array, route: Callable, experts: Experts, route_args: tuple, token_args: tuple,
    num_valid: Any, ring: Ring | RingRef,
) -> tuple:  # fmt: skip
    routed, prepared = _routed_operands(spec.layer.config, x, route, experts, route_args, token_args, num_valid)
    y, stats, ring = forward_on_ring(spec, prepared, ring)
    return y, routed.aux, stats, ring


def forward_on_ring(spec: StreamSpec, prepared: api.Prepared, ring: Ring | RingRef) -> tuple:
    """The batch-ready call on a ring: -> y, Stats, ring. `prepared` as from `api.prepare`."""

    def run(args: api.Prepared, ring: Ring) -> tuple:
        args = vary_together(args, ring.mem)
        operands = lax.stop_gradient(args)
        forward = cuda.ring_forward if ring.spec.platform == "cuda" else ops.ring_forward
        mem, y, expert_rows, counts = forward(spec, no_vmap(ring.mem, *operands), *operands)
        gradient = gradient_spec(ring.spec, spec.layer)
        y, token = vjp.attach(gradient, api.named_y(y), *args, ring.token)
        return y, expert_rows, counts, dataclasses.replace(ring, mem=mem, token=token)

    y, expert_rows, counts, ring = with_ring(ring, run, prepared)
    return y, api.stats_of(expert_rows, counts), ring


def batch_spec(spec: RingSpec, config: MoEConfig, num_tokens: int, check_ids: bool) -> StreamSpec:
    """The plan of a batch-ready call on a ring: one wave per macro-chunk, of chunks of C tokens.

    On a GPU a macro-chunk is one chunk: tokens lie in the pool there and not in slots, so S*C bounds them and not C.
    """
    shape = spec.shape
    if spec.platform == "cuda":
        whole = dataclasses.replace(shape, num_slots=1, chunk_tokens=shape.num_slots * shape.chunk_tokens)
        spec = dataclasses.replace(spec, shape=whole)
    return plan_stream(spec, config, num_tokens, "serial", "packed", None, check_ids, max_waves=1)


def forward_over_ranks(spec: LayerSpec, axis_names: tuple[str, ...], prepared: api.Prepared) -> tuple:
    """The batch-ready call without a ring over the ranks of `axis_names` (none: this device): -> y, Stats."""
    prepared = vary_together(prepared)
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
    axis_names = part_axes(axis_name)
    num_local = config.local_experts(exchange.num_ranks(axis_names))
    checks.check_weights(w_gate_up, w_down, b_gate_up, b_down, config, num_local)
    experts = ops.pack_experts(w_gate_up, w_down, b_gate_up, b_down)
    routed, prepared = _routed_operands(config, x, route, experts, tuple(route_args), tuple(token_args), num_valid)
    y, stats = forward_over_ranks(LayerSpec(config, num_local, checks=check_ids), axis_names, prepared)
    return y, None, StreamInfo(routed.aux, stats if return_stats else None)


def _routed_operands(
    config: MoEConfig, x: jax.Array, route: Callable, experts: Experts, route_args: tuple, token_args: tuple,
    num_valid: Any,
) -> tuple[Routed, api.Prepared]:  # fmt: skip
    """Routes all tokens at once; -> what the route function returned, and the operands of the handlers."""
    routed = _route(route, x, token_args, route_args, config)
    ids, weights = api.prepare_routes(routed.ids, routed.weights, num_valid)
    return routed, api.Prepared(x if routed.x is None else routed.x, ids, weights, experts)


def check_route(route: Any, route_args: Any, token_args: Any) -> None:
    """Raises TypeError unless `route` can be called with arguments that come as tuples."""
    if not callable(route):
        raise TypeError(f"route must be a function of the tokens of a chunk, got {type(route).__name__}")
    for name, value in (("route_args", route_args), ("token_args", token_args)):
        if not isinstance(value, (tuple, list)):
            raise TypeError(f"{name} must be a tuple, got {checks.describe(value)}")


def _check_arguments(x: Any, token_args: Any, config: MoEConfig) -> None:
    checks.check_config(config)
    checks.check_tokens(x, config)
    if x.ndim != 2:
        raise ValueError(f"x must have shape (T, {config.hidden}), got {x.shape}")
    checks.check_per_token("token_args", token_args, x.shape[:1])


def _wants_batch(spec: StreamSpec, chunks: Any) -> bool:
    """chunks="auto" and one wave per macro-chunk: no expert would work beside the producer."""
    return chunks == "auto" and len(spec.plan.wave_ends) == len(spec.plan.macro_ends)


def _route(route: Callable, x: jax.Array, token_args: tuple, route_args: tuple, config: MoEConfig) -> Routed:
    """What `route` says of the tokens x [c, H], checked: ids, weights, replaced tokens and aux are all per token."""
    routed = route(x, *token_args, *route_args)
    if isinstance(routed, tuple) and not isinstance(routed, Routed) and len(routed) == 2:
        routed = Routed(*routed)
    if not isinstance(routed, Routed):
        raise TypeError(f"route must return Routed or a tuple (ids, weights), got {type(routed).__name__}")
    rows = x.shape[:1]
    checks.check_routes(routed.ids, routed.weights, config, rows)
    if routed.x is not None and checks.check_tokens(routed.x, config, "Routed.x") != rows:
        raise ValueError(f"Routed.x must have shape {x.shape}, got {routed.x.shape}")
    checks.check_per_token("Routed.aux", routed.aux, rows)
    return routed


def _concat(parts: list) -> Any:
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def _published(mem: jax.Array) -> jax.Array:
    """A scalar that exists once `mem` does.

    It is named like y: what a remat policy makes the backward compute again waits for the saved scalar, not for the
    ring.
    """
    return api.named_y(ops.after((vary_together(jnp.zeros((), jnp.float32), mem),), (mem,))[0])


@jax.custom_jvp
def _in_turn(values: Any, mem: jax.Array) -> tuple[Any, jax.Array]:
    """`values`, available to the program only after `mem`, without a copy: XLA:GPU schedules by barriers.

    Both must be used further on: XLA drops what is not, and the order with it.
    """
    return lax.optimization_barrier((values, mem))


@_in_turn.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return _in_turn(*primals), tangents


@jax.custom_jvp
def _sequence(x: jax.Array, published: jax.Array) -> jax.Array:
    """x, available to the program only after `published`."""
    return ops.after((x,), (published,))[0]


@_sequence.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return _sequence(*primals), tangents[0]
