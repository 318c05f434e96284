"""The gradient of the layer, attached to an output that plain operations computed.

Contract: `attach` is the identity on (y, token); its backward is the layer's, computed from x, ids, weights and the
expert tensors and from nothing a stream left behind. So the gradient does not depend on chunks, slots, schedule, policy
or transport, and routers stay plain JAX outside of it. Over ranks the backward exchanges through the memory of a ring
on GPUs, for which it goes by the ring's name, elsewhere through XLA's collectives; its calls are ordered by the token,
whose cotangent AD threads in reverse. `keeping` is the layer of one device as one function of AD, because what it keeps
is made by the forward itself. Every backward is first order only.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from . import checks, cuda, exchange, local, ops
from .ops import Experts, LayerSpec
from .varying import vary_together

GATE_UP_NAME = "streammoe_gate_up"


@dataclasses.dataclass(frozen=True)
class GradientSpec:
    """The layer, and the mesh axes of its ranks (empty: this device has all experts).

    ring_tokens: the tokens of a rank that the ring's memory can exchange, S*C on GPUs; 0 where XLA's collectives do it.
    """

    layer: LayerSpec
    axis_names: tuple[str, ...] = ()
    ring_tokens: int = 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attach(
    spec: GradientSpec, y: jax.Array, x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Experts,
    token: jax.Array,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns `(y, token)`; y [T, H] gets the gradient with respect to x, weights [T, K] f32 and the experts."""
    del x, ids, weights, experts
    return y, _token_after(spec, token, y)


def _attach_forward(
    spec: GradientSpec, y: jax.Array, x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Experts,
    token: jax.Array,
) -> tuple[Any, Any]:  # fmt: skip
    token = _token_after(spec, token, y)
    return (_refusing(y, x, weights, experts), token), (x, ids, weights, experts, token)


def _refusing(y: jax.Array, *operands: Any) -> jax.Array:
    """The value of a `jax.vjp`: y came from operands without tangents, so differentiating it again would give zeros."""
    return tie(y, first_order_only(operands))


def _attach_backward(spec: GradientSpec, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    x, ids, weights, experts, forward_token = residuals
    dy, token = cotangents
    if _is_ordered(spec):
        # After the forward call and the backward calls of later layers: ranks wait for each other in all of them.
        token, ids = ops.after((token, ids), (forward_token,))
    x, dy, weights, experts = first_order_only((x, dy, weights, experts))
    if 0 < x.shape[0] <= spec.ring_tokens:
        out = cuda.ring_backward(spec.layer, exchange.num_ranks(spec.axis_names), token, x, dy, ids, weights, experts)
    elif spec.axis_names:
        out = exchange.backward(spec.layer, spec.axis_names, token, x, dy, ids, weights, experts)
    else:
        out = local.backward(spec.layer, token, x, dy, ids, weights, experts)
    token, dx, d_weights, d_experts = out
    return None, dx, None, d_weights, d_experts, token


attach.defvjp(_attach_forward, _attach_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def keeping(spec: LayerSpec, x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Experts) -> jax.Array:
    """y of `local.forward`; under differentiation gate and up of every route are kept, which the backward then reads.

    No statistics: JAX would make cotangents for them, which it cannot do for Explicit axes outside of jit.
    """
    return local.forward(spec, x, ids, weights, experts)[0]


def _keeping_forward(
    spec: LayerSpec, x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Experts
) -> tuple[jax.Array, Any]:
    operands = lax.stop_gradient((x, ids, weights, experts))
    y, gate_up, _, _ = local.forward_kept(spec, *operands)
    return _refusing(y, x, weights, experts), (x, ids, weights, checkpoint_name(gate_up, GATE_UP_NAME), experts)


def _keeping_backward(spec: LayerSpec, residuals: Any, dy: jax.Array) -> tuple[Any, ...]:
    x, ids, weights, gate_up, experts = residuals
    x, dy, weights, gate_up, experts = first_order_only((x, dy, weights, gate_up, experts))
    out = local.backward(spec, new_token(x), x, dy, ids, weights, experts, gate_up=gate_up)
    _, dx, d_weights, d_experts = out
    return dx, None, d_weights, d_experts


keeping.defvjp(_keeping_forward, _keeping_backward)


def _is_ordered(spec: GradientSpec) -> bool:
    """Whether ranks wait for each other in the calls of a ring, so that one order must hold on all of them."""
    return bool(spec.axis_names and spec.layer.ring)


def _token_after(spec: GradientSpec, token: jax.Array, y: jax.Array) -> jax.Array:
    return ops.after((token,), (y,))[0] if _is_ordered(spec) else token


@jax.custom_jvp
def first_order_only(operands: Any) -> Any:
    """Identity that refuses to be differentiated: the layer's backward is a kernel."""
    return operands


@first_order_only.defjvp
def _(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "the gradient of the expert layer is first order only: its backward is a kernel and cannot be differentiated "
        "again"
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def no_residuals(what: str, value: jax.Array) -> jax.Array:
    """Identity for operands of a stream that keeps no residuals; differentiating it raises instead of giving zeros."""
    del what
    return value


@no_residuals.defjvp
def _(what: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(checks.NO_RESIDUALS.format(what=what))


@jax.custom_jvp
def witness(mark: jax.Array, value: jax.Array) -> jax.Array:
    """`mark` [], which has a tangent from now on if `value` has one.

    So it remembers that `value` is being differentiated.
    """
    del value
    return mark


@witness.defjvp
def _(primals: Any, tangents: Any) -> Any:
    mark, value = tangents
    return witness(*primals), mark + jnp.sum(value.astype(jnp.float32)) * jnp.float32(0.0)


@jax.custom_jvp
def tie(value: jax.Array, others: Any) -> jax.Array:
    """`value`; its derivative visits `others`, which must refuse to be differentiated."""
    del others
    return value


@tie.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return tie(*primals), tangents[0]


def new_token(reference: jax.Array) -> jax.Array:
    """A token for a call without a ring, varying like `reference`."""
    return vary_together(jnp.zeros((1, 1), jnp.float32), reference)
