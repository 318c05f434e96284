"""One function per handler: operands in the handler's order, result descriptors, aliases. Nothing is decided here.

Contract: the expert tensors travel as a six-tuple (gate, up, down, b_gate, b_up, b_down), absent ones of one element;
packed `w_gate_up` [L, H, 2I] is gate with an empty up. Ring operations take `mem` first and return it in place. These
are not differentiable; vjp.py attaches the gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import ffi
from .config import MoEConfig
from .waves import ChunkPlan

Experts = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What every handler of a layer needs to know and no array says. `threads` 0: all cores."""

    config: MoEConfig
    num_local_experts: int
    threads: int = 0
    ring: str = ""
    checks: bool = False

    def attributes(self) -> dict[str, Any]:
        """The attributes of the problem."""
        return ffi.problem_attributes(self.config, num_local_experts=self.num_local_experts, threads=self.threads)


@dataclasses.dataclass(frozen=True)
class StreamSpec:
    """The static plan of a streamed call."""

    layer: LayerSpec
    plan: ChunkPlan
    num_tokens: int
    min_carry_rows: int
    packed: bool
    overlap: bool
    producer_sms: int = 0

    def attributes(self) -> dict[str, Any]:
        """The attributes of the problem and of the call."""
        return self.layer.attributes() | {"ring": self.layer.ring} | ffi.call_attributes(
            self.plan, num_tokens=self.num_tokens, min_carry_rows=self.min_carry_rows, packed=self.packed,
            overlap=self.overlap, checks=self.layer.checks, producer_sms=self.producer_sms,
        )  # fmt: skip


def pack_experts(w_gate_up: Any, w_down: Any, b_gate_up: Any, b_down: Any) -> Experts:
    """Returns the six-tuple of the handlers from the arguments of the public functions.

    Biases take the form of the weights, packed or split: what a tensor's gradient is, JAX derives from that.
    """
    none = ffi.absent(w_down)
    gate, up, b_gate, b_up = w_gate_up, none, b_gate_up, None
    if isinstance(w_gate_up, (tuple, list)):
        gate, up = w_gate_up
        b_gate, b_up = (None, None) if b_gate_up is None else split_gate_up(b_gate_up)
    elif b_gate_up is not None:
        b_gate = join_gate_up(b_gate_up)
    return (gate, up, w_down, *(none if b is None else b for b in (b_gate, b_up, b_down)))


def split_gate_up(value: Any) -> tuple[jax.Array, jax.Array]:
    """(gate, up) [..., I] of an array [..., 2I]; a pair as it is."""
    if isinstance(value, (tuple, list)):
        return value[0], value[1]
    inner = value.shape[-1] // 2
    return value[..., :inner], value[..., inner:]


def join_gate_up(value: Any) -> jax.Array:
    """The array [..., 2I] of a pair (gate, up) [..., I]; an array as it is."""
    return jnp.concatenate(value, axis=-1) if isinstance(value, (tuple, list)) else value


def forward(spec: LayerSpec, x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Experts) -> tuple:
    """x [T, H], ids [T, K] int32, weights [T, K] f32 -> y [T, H], expert_rows [L], counts [3] (int32)."""
    results = (ffi.like(x, x.shape, x.dtype), *_stats(spec, x))
    attributes = spec.attributes() | {"checks": np.int32(spec.checks)}
    return tuple(
        ffi.call("forward", results, x, ids, weights, *experts, attributes=attributes, side_effect=spec.checks)
    )


def forward_kept(spec: LayerSpec, x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Experts) -> tuple:
    """As `forward` -> y, gate_up [T, K * 2I] (ungated: K * I), what enters the activations, expert_rows, counts."""
    results = (ffi.like(x, x.shape, x.dtype), gate_up_like(spec, x, ids), *_stats(spec, x))
    attributes = spec.attributes() | {"checks": np.int32(spec.checks)}
    operands = (x, ids, weights, *experts)
    return tuple(ffi.call("forward_kept", results, *operands, attributes=attributes, side_effect=spec.checks))


def gate_up_like(spec: LayerSpec, x: jax.Array, ids: jax.Array) -> Any:
    """What a forward keeps for its backward: a row per token, of whose K routes each has gate first, then up."""
    return ffi.like(x, (ids.shape[0], spec.config.top_k * spec.config.gate_up_width), x.dtype)


def rows(spec: LayerSpec, x: jax.Array, local_ids: jax.Array, experts: Experts) -> tuple:
    """x [N, H], local ids [N, K] -> unweighted rows [N, K, H] (0 where skipped), dropped [N, K] uint8, expert_rows."""
    shape = (*local_ids.shape, x.shape[-1])
    results = (ffi.like(x, shape, x.dtype), ffi.like(x, local_ids.shape, np.uint8), _stats(spec, x)[0])
    return tuple(ffi.call("rows", results, x, local_ids, *experts, attributes=spec.attributes()))


def check_ids(spec: LayerSpec, ids: jax.Array, any_invalid: jax.Array) -> jax.Array:
    """ids [T, K] of this rank, or an error that names the first one outside -1..E-1.

    any_invalid: int32 [], whether any rank has one; all of them raise, so that none waits for another in a collective.
    """
    attributes = spec.attributes() | {"total_experts": np.int64(spec.config.num_experts)}
    result = ffi.like(ids, ids.shape, ids.dtype)
    return ffi.call("check_ids", result, ids, any_invalid, attributes=attributes, aliases={0: 0}, side_effect=True)


def combine(
    spec: LayerSpec, expert_rows: jax.Array, ids: jax.Array, weights: jax.Array, dropped: jax.Array
) -> jax.Array:
    """rows [T, K, H], ids [T, K] (negative: skipped), weights f32, dropped uint8 -> y [T, H], k ascending."""
    result = ffi.like(expert_rows, (expert_rows.shape[0], expert_rows.shape[2]), expert_rows.dtype)
    return ffi.call("combine", result, expert_rows, ids, weights, dropped, attributes=spec.attributes())


def backward(
    spec: LayerSpec, token: jax.Array, x: jax.Array, dy: jax.Array, local_ids: jax.Array, weights: jax.Array,
    experts: Experts,
) -> tuple[jax.Array, jax.Array, jax.Array, Experts]:  # fmt: skip
    """Gradients of rows [N, K]: -> token, dx_rows [N, K, H], d_weights [N, K] f32, the six expert gradients."""
    results = (ffi.like(token, token.shape, token.dtype), *_row_gradients(x, local_ids, experts))
    token, dx_rows, d_weights, *d_experts = ffi.call(
        "backward", results, token, x, dy, local_ids, weights, *experts,
        attributes=spec.attributes() | {"ring": spec.ring}, aliases={0: 0},
    )  # fmt: skip
    gate, up, down, b_gate, b_up, b_down = d_experts
    return token, dx_rows, d_weights, (gate, up, down, b_gate, b_up, b_down)


def backward_kept(
    spec: LayerSpec, x: jax.Array, dy: jax.Array, ids: jax.Array, weights: jax.Array, gate_up: jax.Array,
    experts: Experts,
) -> tuple[jax.Array, jax.Array, Experts]:  # fmt: skip
    """As `backward` of one rank, from the gate and up of `forward_kept` -> dx_rows, d_weights, expert gradients."""
    dx_rows, d_weights, *d_experts = ffi.call(
        "backward_kept", _row_gradients(x, ids, experts), x, dy, ids, weights, gate_up, *experts,
        attributes=spec.attributes() | {"ring": ""},
    )  # fmt: skip
    gate, up, down, b_gate, b_up, b_down = d_experts
    return dx_rows, d_weights, (gate, up, down, b_gate, b_up, b_down)


def _row_gradients(x: jax.Array, ids: jax.Array, experts: Experts) -> tuple:
    """dx_rows [N, K, H], d_weights [N, K] f32, the six expert gradients."""
    return (
        ffi.like(x, (*ids.shape, x.shape[-1]), x.dtype),
        ffi.like(x, ids.shape, np.float32),
        *(ffi.like(e, e.shape, e.dtype) for e in experts),
    )


def after(values: Sequence[jax.Array], others: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Returns `values`, in place, available to the program only once `others` are.

    A real operation: XLA:CPU drops lax.optimization_barrier before it schedules, and then runs what it ordered at once.
    """
    results = tuple(ffi.like(v, v.shape, v.dtype) for v in values)
    aliases = {n: n for n in range(len(results))}
    return tuple(ffi.call("after", results, *values, *others, attributes={}, aliases=aliases))


def open_stream(spec: StreamSpec, mem: jax.Array, experts: Experts) -> tuple[jax.Array, jax.Array]:
    """-> mem, y [T, H] (not written yet)."""
    hidden = spec.layer.config.hidden
    results = (ffi.like(mem, mem.shape, mem.dtype), ffi.like(mem, (spec.num_tokens, hidden), spec.layer.config.dtype))
    mem, y = ffi.call("open", results, mem, *experts, attributes=spec.attributes(), aliases={0: 0})
    return mem, y


def publish_route(
    spec: StreamSpec, mem: jax.Array, y: jax.Array, chunk: int | jax.Array, ids: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Publishes ids and weights [c, K] of a chunk -> mem, y."""
    attributes = {"ring": spec.layer.ring, "static_chunk": _static_chunk(chunk)}
    mem, y = ffi.call(
        "publish_route", _stream_state(mem, y), mem, y, _operand(chunk), ids, weights, attributes=attributes,
        aliases={0: 0, 1: 1},
    )  # fmt: skip
    return mem, y


def publish_layout(
    spec: StreamSpec, mem: jax.Array, y: jax.Array, chunk: int | jax.Array, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Publishes the tokens [c, H] of a chunk -> mem, y."""
    attributes = {"ring": spec.layer.ring, "static_chunk": _static_chunk(chunk)}
    mem, y = ffi.call(
        "publish_layout", _stream_state(mem, y), mem, y, _operand(chunk), x, attributes=attributes,
        aliases={0: 0, 1: 1},
    )  # fmt: skip
    return mem, y


def publish_external(spec: StreamSpec, mem: jax.Array, y: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Notes that a kernel of the caller's has published both halves of a chunk -> mem, y."""
    attributes = {"ring": spec.layer.ring, "static_chunk": _static_chunk(chunk)}
    mem, y = ffi.call("publish_external", _stream_state(mem, y), mem, y, attributes=attributes, aliases={0: 0, 1: 1})
    return mem, y


def close_stream(spec: StreamSpec, mem: jax.Array, y: jax.Array, experts: Experts) -> tuple:
    """-> mem, y [T, H], expert_rows [L], counts [3]."""
    results = (*_stream_state(mem, y), *_stats(spec.layer, mem))
    return tuple(
        ffi.call("close", results, mem, y, *experts, attributes={"ring": spec.layer.ring}, aliases={0: 0, 1: 1})
    )


def ring_forward(
    spec: StreamSpec, mem: jax.Array, x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Experts
) -> tuple:
    """The batch-ready call on a ring -> mem, y [T, H], expert_rows [L], counts [3]."""
    results = (ffi.like(mem, mem.shape, mem.dtype), ffi.like(mem, x.shape, x.dtype), *_stats(spec.layer, mem))
    return tuple(
        ffi.call("ring_forward", results, mem, x, ids, weights, *experts, attributes=spec.attributes(), aliases={0: 0})
    )


def _stats(spec: LayerSpec, reference: jax.Array) -> tuple[Any, Any]:
    return ffi.like(reference, (spec.num_local_experts,), np.int32), ffi.like(reference, (3,), np.int32)


def _stream_state(mem: jax.Array, y: jax.Array) -> tuple[Any, Any]:
    return ffi.like(mem, mem.shape, mem.dtype), ffi.like(y, y.shape, y.dtype)


def as_chunk(chunk: Any) -> jax.Array:
    """A chunk index as the int32 scalar operand of the publish handlers."""
    return jnp.asarray(chunk, jnp.int32)


def _operand(chunk: int | jax.Array) -> jax.Array:
    return as_chunk(chunk) if isinstance(chunk, int) else chunk


def _static_chunk(chunk: Any) -> np.int64:
    """The index as far as the host knows it: -1 when it is traced. A GPU's handlers cannot read the operand."""
    return np.int64(chunk if isinstance(chunk, int) else -1)
