"""Open streams by hand, inside jit: `open_stream`, `publish_route`, `publish_layout`, `close_stream`.

Contract: a stream is linear: every call takes it and returns the next one. Chunks come in any order the ring allows,
each half once; closing wants all of them. Published arrays are recorded, so that the gradient can be attached at the
end; a chunk published under a traced index cannot be, and closing then wants the whole arrays. Whatever can be known
while tracing is checked here; what depends on values is the handlers' to refuse. stream.py runs the same calls for a
route function.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import get_abstract_mesh

from . import api, checks, costs, ops, vjp, waves
from .config import MoEConfig, as_int, at_least
from .ops import Experts, LayerSpec, StreamSpec
from .ring import Ring, RingRef, RingSpec
from .varying import vary_together

POLICIES = ("serial", "overlap")
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
    ring: Ring | RingRef, w_gate_up: Any, w_down: jax.Array, *, config: MoEConfig, num_tokens: int,
    b_gate_up: Any = None, b_down: Any = None, num_valid: Any = None, policy: str = "overlap",
    schedule: str = "packed", chunks: Any = None, checks: bool = False, record: bool = True,
) -> Stream:  # fmt: skip
    """Opens a stream of `num_tokens` tokens on `ring`.

    Arguments:
      ring: used up; close_stream returns the next one.
      w_gate_up, w_down, b_gate_up, b_down: experts of this rank, [L, ...] as in `moe`.
      num_tokens: T, static, equal on all ranks. num_valid: tokens of this rank that exist; later ones are masked.
      policy: "serial" or "overlap" (waves run beside the producer).
      schedule: "packed" (waves, partial blocks are carried) or "chunk" (each chunk on its own).
      chunks: None (chunks of the ring's C tokens), an int n (chunks of ceil(min(T, S*C) / n) tokens), or "auto".
      checks: ids outside -1..E-1 are an error; on a GPU they are only counted, in Stats.invalid_routes.
      record: keep published arrays for the gradient; False when chunks are published under a traced index.

    Returns a Stream with `num_chunks` and `chunk_bounds(n)`. Raises ValueError or TypeError naming the argument.
    """
    spec = check_call("open_stream", ring, config, policy)
    check_experts(w_gate_up, w_down, b_gate_up, b_down, config, spec)
    stream_spec = plan_stream(spec, config, num_tokens, policy, schedule, chunks, checks)
    experts = ops.pack_experts(w_gate_up, w_down, b_gate_up, b_down)
    return begin(ring, experts, stream_spec, num_valid, record)


def publish_route(stream: Stream, chunk: Any, topk_ids: jax.Array, topk_weights: jax.Array) -> Stream:
    """Publishes the routing of a chunk: ids [c, K] int32, weights [c, K]; before or after its layout.

    `chunk` is a Python int (any order the ring allows) or a traced int32 scalar (in order 0..n-1). c is the chunk's
    true size, `chunk_bounds`; under a traced index every chunk has the full size. Raises ValueError when the chunk is
    published already, out of range, or before a chunk whose slot it needs.
    """
    config, chunk = stream.spec.layer.config, _chunk_index(chunk)
    rows = _check_chunk(stream, chunk, "publish_route", stream.routes, stream.layouts)
    checks.check_routes(topk_ids, topk_weights, config, (rows,))
    start = _first_token(stream, chunk)
    ids, weights = api.prepare_routes(topk_ids, topk_weights, stream.num_valid, start)
    ids, weights = vary_together((ids, weights), stream.mem)
    operand = lax.stop_gradient(weights)
    mem = no_vmap(stream.mem, ops.as_chunk(chunk), ids, operand)
    mem, y = ops.publish_route(stream.spec, mem, stream.y, chunk, ids, operand)
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
    chunk = _chunk_index(chunk)
    rows = _check_chunk(stream, chunk, "publish_layout", stream.layouts, stream.routes)
    checks.check_tokens(x, stream.spec.layer.config, "x_c")
    if x.shape != (rows, stream.spec.layer.config.hidden):
        raise ValueError(f"x_c must have shape {(rows, stream.spec.layer.config.hidden)}, got {x.shape}")
    x = vary_together(x, stream.mem)
    operand = lax.stop_gradient(x)
    mem = no_vmap(stream.mem, ops.as_chunk(chunk), operand)
    mem, y = ops.publish_layout(stream.spec, mem, stream.y, chunk, operand)
    layouts = stream.layouts | {chunk: x if stream.record else ()} if isinstance(chunk, int) else stream.layouts
    return dataclasses.replace(stream, mem=mem, y=y, layouts=layouts, marks=_mark(stream, TOKENS, x))


def publish_external(stream: Stream, chunk: int, mem: jax.Array) -> Stream:
    """Takes over a chunk whose both halves a CUDA kernel of yours has published on the device.

    The kernel's handler had `stream.mem` as an operand, wrote the chunk's payload where protocol/publish.cuh says
    (`include_dir()`), published both halves, and returned the ring in place: `mem` [1, bytes] uint8. Open the stream
    with record=False and give close_stream the whole arrays if a gradient is wanted: the library cannot see what was
    published, so it neither applies `num_valid` nor counts masked and invalid ids. A published half that never arrives
    ends the call at the ring's deadline.

    Raises ValueError for a chunk that is out of order (as publish_route), a stream that records, or a ring on the CPU;
    TypeError when `mem` is not a ring's.
    """
    if stream.ring.spec.platform != "cuda":
        raise ValueError("publish_external needs a ring on a GPU: its device header is for CUDA kernels")
    if stream.ring.spec.num_ranks > 1:
        raise ValueError("publish_external is for rings of one rank in this version: a kernel cannot know its own")
    if stream.record:
        raise ValueError("publish_external: nothing can be recorded, open the stream with record=False")
    if getattr(mem, "shape", None) != stream.mem.shape or getattr(mem, "dtype", None) != stream.mem.dtype:
        raise TypeError(f"mem must be the ring's memory, {stream.mem.shape} uint8, got {checks.describe(mem)}")
    if len(stream.spec.plan.macro_ends) > 1:
        raise ValueError(
            f"publish_external: the ring must hold all {stream.spec.num_tokens} tokens of the call, it holds "
            f"num_slots * chunk_tokens = {stream.ring.spec.macro_tokens}"
        )
    chunk = as_int("chunk", chunk)
    _check_chunk(stream, chunk, "publish_external", stream.routes, stream.layouts)
    if chunk in stream.layouts:
        raise ValueError(f"publish_external: the layout of chunk {chunk} is published already")
    mem, y = ops.publish_external(stream.spec, mem, stream.y, chunk)
    routes, layouts = stream.routes | {chunk: ()}, stream.layouts | {chunk: ()}
    return dataclasses.replace(stream, mem=mem, y=y, routes=routes, layouts=layouts)


def close_stream(
    stream: Stream, *, x: jax.Array | None = None, topk_ids: jax.Array | None = None,
    topk_weights: jax.Array | None = None, return_stats: bool = True,
) -> tuple[jax.Array, Ring | RingRef, StreamInfo]:  # fmt: skip
    """Ends a stream: -> y [T, H], the ring, StreamInfo(aux=None, stats).

    The gradient reaches the published arrays, or, when they were published under a traced index or with record=False,
    the whole arrays given here: x [T, H], topk_ids [T, K], topk_weights [T, K]. With neither, differentiating raises.
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
        ids = api.mask_ids(api.narrow_ids(topk_ids), stream.num_valid)  # type: ignore[arg-type]
        residuals = (x, ids, topk_weights.astype(jnp.float32))  # type: ignore[union-attr]
    elif stream.record:
        order = range(stream.num_chunks)
        ids, weights = (jnp.concatenate([stream.routes[n][half] for n in order]) for half in (0, 1))
        residuals = (jnp.concatenate([stream.layouts[n] for n in order]), ids, weights)
    y, ring, stats = finish(stream, residuals)
    return y, ring, StreamInfo(None, stats if return_stats else None)


def begin(ring: Ring | RingRef, experts: Experts, spec: StreamSpec, num_valid: Any, record: bool) -> Stream:
    """Opens a stream of checked operands; see `open_stream`."""
    checks.check_num_valid(num_valid)
    functional = ring.load() if isinstance(ring, RingRef) else ring
    experts = vary_together(experts, functional.mem)
    operands = lax.stop_gradient(experts)
    mem, y = ops.open_stream(spec, no_vmap(functional.mem, *operands), operands)
    unmarked = {} if record else {what: vary_together(jnp.zeros((), jnp.float32), mem) for what in (TOKENS, WEIGHTS)}
    gradient = gradient_spec(ring.spec, spec.layer)
    return Stream(ring, mem, functional.token, y, experts, num_valid, {}, {}, unmarked, spec, gradient, record)


def finish(stream: Stream, residuals: tuple | None) -> tuple:
    """Closes a stream: -> y, ring, Stats. `residuals` (x, ids, weights) carry the gradient; None refuses it."""
    mem, y, expert_rows, counts = ops.close_stream(stream.spec, stream.mem, stream.y, lax.stop_gradient(stream.experts))
    token = stream.token
    if residuals is None:
        # Ties y to them in AD only: differentiating them raises instead of giving zeros.
        marks = [vjp.no_residuals(what, mark) for what, mark in stream.marks.items()]
        refuse = functools.partial(vjp.no_residuals, "close_stream: expert weights")
        y = vjp.tie(y, (marks, jax.tree.map(refuse, stream.experts)))
    else:
        x, ids, weights = vary_together(residuals, mem)
        y, token = vjp.attach(stream.gradient, api.named_y(y), x, ids, weights, stream.experts, token)
    ring = stream.ring
    used = Ring(mem, token, ring.spec)
    if isinstance(ring, RingRef):
        ring.store(used)
    else:
        ring = used
    return y, ring, api.stats_of(expert_rows, counts)


def _mark(stream: Stream, what: str, value: jax.Array) -> dict[str, jax.Array]:
    """Remembers that an operand which is not recorded is being differentiated.

    Closing knows whether that is an error.
    """
    return stream.marks | {what: vjp.witness(stream.marks[what], value)} if stream.marks else stream.marks


def gradient_spec(ring: RingSpec, layer: LayerSpec) -> vjp.GradientSpec:
    """The gradient of a layer on a ring: exchanged over its ranks, if there are several."""
    if ring.num_ranks == 1:
        return vjp.GradientSpec(layer)
    on_gpu = ring.platform == "cuda"
    return vjp.GradientSpec(layer, ring.axis_names, ring.shape.num_slots * ring.shape.chunk_tokens if on_gpu else 0)


def check_call(what: str, ring: Any, config: MoEConfig, policy: str) -> RingSpec:
    """Raises unless `ring` belongs to `config` and to the mesh axes the call runs under; returns its spec."""
    api.check_context(what)
    check_words(policy)
    if not isinstance(ring, (Ring, RingRef)):
        raise TypeError(f"ring must come from make_ring, got {type(ring).__name__}")
    spec = ring.spec
    if spec.config != config:
        raise ValueError(f"config must be the one the ring {spec.name!r} was made with, {spec.config}, got {config}")
    manual = get_abstract_mesh().manual_axes
    if spec.mesh_axes and not manual:
        raise ValueError(
            f"{what}: ring {spec.name!r} spans the mesh axes {dict(spec.mesh_axes)}, so the call belongs inside "
            "jax.shard_map over all of them; or use expert_parallel, which takes global arrays"
        )
    if spec.mesh_axes and set(manual) != {name for name, _ in spec.mesh_axes}:
        raise ValueError(
            f"{what}: ring {spec.name!r} was made for mesh axes {dict(spec.mesh_axes)}, the call runs in a shard_map "
            f"over {tuple(manual)}"
        )
    check_traced(what, ring)
    return spec


def check_traced(what: str, ring: Ring | RingRef) -> None:
    """Raises ValueError unless the call is traced, with a functional ring as an argument of what is traced."""
    outside = not isinstance(jnp.zeros(()), jax.core.Tracer)
    if outside or (isinstance(ring, Ring) and not isinstance(ring.mem, jax.core.Tracer)):
        how = "it is called outside of it" if outside else "the function takes it from its surroundings"
        raise ValueError(
            f"{what} on a ring runs inside of jax.jit, with the ring {ring.spec.name!r} as an argument of the jitted "
            f"function (donated, unless it is mutable); {how}, and XLA would work on a copy of the ring's memory"
        )


def check_words(policy: str, schedule: str = "packed", chunks: Any = None) -> None:
    """Raises ValueError or TypeError for a word that no stream knows, whether or not a ring is there."""
    if policy == "persistent":
        raise ValueError('policy "persistent" is not in this version: use "overlap" or "serial"')
    checks.check_choice("policy", policy, POLICIES)
    checks.check_choice("schedule", schedule, waves.SCHEDULES)
    if isinstance(chunks, str):
        if chunks != "auto":
            raise ValueError(f'chunks must be None, an int or "auto", got {chunks!r}')
    elif chunks is not None:
        at_least("chunks", chunks, 1)


def check_experts(w_gate_up: Any, w_down: Any, b_gate_up: Any, b_down: Any, config: MoEConfig, spec: RingSpec) -> None:
    """Raises unless the expert tensors have the shapes and dtypes of one rank of the ring."""
    checks.check_weights(w_gate_up, w_down, b_gate_up, b_down, config, config.local_experts(spec.num_ranks))


def plan_stream(
    ring: RingSpec, config: MoEConfig, num_tokens: int, policy: str, schedule: str, chunks: Any, check_ids: bool,
    max_waves: int | None = None, producer_s: float | None = None,
) -> StreamSpec:  # fmt: skip
    """The static half of a call on a ring: its chunks and waves, from the plan that all ranks compute alike.

    producer_s: what the route function is expected to take for all tokens, if that is known.
    """
    checks.check_choice("schedule", schedule, waves.SCHEDULES)
    if ring.platform == "cuda":
        cost = costs.gpu_cost(config, num_tokens, ring.num_ranks, producer_s, only_if_it_pays=chunks == "auto")
    else:
        cost = waves.CPU(config.block_m)
    if max_waves is not None:
        cost = dataclasses.replace(cost, max_waves=max_waves)
    plan = waves.plan_chunks(
        num_tokens, ring_chunk_tokens=ring.shape.chunk_tokens, num_slots=ring.shape.num_slots, top_k=config.top_k,
        num_experts=config.num_experts, num_ranks=ring.num_ranks, cost=cost, chunks=chunks, schedule=schedule,
        single_wave=config.capacity is not None,
    )  # fmt: skip
    layer = LayerSpec(config, config.local_experts(ring.num_ranks), ring.threads, ring.name, check_ids)
    return StreamSpec(
        layer, plan, num_tokens, cost.min_carry_rows, schedule == "packed", policy == "overlap", cost.producer_sms
    )


def _chunk_index(chunk: Any) -> Any:
    """A chunk index as a Python int, or the traced int32 it is."""
    return ops.as_chunk(chunk) if isinstance(chunk, jax.core.Tracer) else as_int("chunk", chunk)


def _check_chunk(stream: Stream, chunk: Any, what: str, mine: dict, other: dict) -> int:
    """Checks that a half of `chunk` may be published now; returns the rows it must have."""
    if not isinstance(chunk, int):
        if stream.record:
            raise ValueError(f"{what}: chunk is traced, so nothing can be recorded: open the stream with record=False")
        if stream.num_chunks * stream.spec.plan.chunk_tokens != stream.spec.num_tokens:
            raise ValueError(
                f"{what}: chunk is traced, so all {stream.num_chunks} chunks must have "
                f"{stream.spec.plan.chunk_tokens} tokens, but the stream has {stream.spec.num_tokens}"
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


@custom_vmap
def no_vmap(mem: jax.Array, *operands: Any) -> jax.Array:
    """`mem`; vmap over any of the operands raises, since a ring is one resource."""
    return mem


@no_vmap.def_vmap
def _(size: int, batched: Any, mem: jax.Array, *operands: Any) -> Any:
    raise NotImplementedError(checks.RING_VMAP)
