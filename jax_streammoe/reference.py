"""The expert layer in readable pure JAX: the oracle of the kernels and the fallback on any backend.

Contract: the meaning of every corner (masked and invalid ids, duplicates, NaN, capacity, rounding points) is
the same as the kernels'; bits are not, because XLA chooses the order inside a dot. Trade-off: a scan over
experts gives every token to every expert and keeps what was asked for, so the arithmetic is E/K times too
much and the memory small: [T, K, H] rows and one expert's [T, 2I].
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .checks import check_moe_args
from .config import SWIGLUOAI_ALPHA, MoEConfig
from .varying import vary_together


def activate(config: MoEConfig, gate: jax.Array, up: jax.Array | None) -> jax.Array:
    """Returns `act(gate, up)` in the dtype of `gate`; `up` is ignored when the activation is not gated.

    swiglu: silu(gate) * up; swigluoai: gate * sigmoid(1.702 gate) * (up + 1); both after the clamp gate <=
    limit, |up| <= limit. geglu: gelu(gate) * up. silu, gelu (tanh form), relu2: max(gate, 0)^2. NaN stays
    NaN; the gradient of a clamp is 1 at and inside the limit.
    """
    kind, limit = config.activation, config.limit
    if limit is not None and up is not None:
        gate = jnp.where(gate > limit, limit, gate)
        up = jnp.where(up > limit, limit, jnp.where(up < -limit, -limit, up))
    if kind == "silu":
        return jax.nn.silu(gate)
    if kind == "gelu":
        return jax.nn.gelu(gate, approximate=True)
    if kind == "relu2":
        positive = jnp.where(gate <= 0, 0.0, gate)
        return positive * positive
    assert up is not None  # checked by every public caller
    if kind == "swiglu":
        return jax.nn.silu(gate) * up
    if kind == "geglu":
        return jax.nn.gelu(gate, approximate=True) * up
    return gate * jax.nn.sigmoid(SWIGLUOAI_ALPHA * gate) * (up + 1.0)


def reference(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array,
    w_gate_up: jax.Array | tuple[jax.Array, jax.Array],
    w_down: jax.Array,
    *,
    config: MoEConfig,
    b_gate_up: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    b_down: jax.Array | None = None,
    num_valid: Any = None,
) -> jax.Array:
    """Returns `y[t] = sum_k topk_weights[t, k] * f_{topk_ids[t, k]}(x[t])`, in pure JAX, on any backend.

    Arguments:
      x: [..., H] in the config's dtype; leading dims are folded into the tokens.
      topk_ids: int32 [..., K] (int64 accepted); ids outside 0..E-1 are masked routes: no contribution, no
        gradient.
      topk_weights: float32 or bfloat16 [..., K].
      w_gate_up: [E, H, 2I], gate first, or `(w_gate, w_up)`, each [E, H, I]; ungated: one [E, H, I].
      w_down: [E, I, H].
      b_gate_up, b_down: [E, 2I] (or a tuple, or [E, I]) and [E, H]; given exactly when `config.use_bias`.
      num_valid: None or an int scalar, may be traced; tokens from there on are masked.

    Returns: y [..., H] in the config's dtype.

    Raises: TypeError or ValueError naming the argument, what is wanted and what was given.

    Three roundings to the dtype: the activation, each unweighted row, and y, whose sum over k is float32 in
    ascending k. Differentiable in x, topk_weights, weights and biases, any order; a masked token never
    influences a result or a gradient, even when it holds NaN. With `config.capacity`, routes beyond it are
    masked, lowest token index kept. Deterministic within one compiled program; not bitwise equal to the
    kernels.
    """
    check_moe_args(x, topk_ids, topk_weights, w_gate_up, w_down, b_gate_up, b_down, config, config.num_experts)
    top_k, hidden = config.top_k, config.hidden
    tokens = x.reshape(-1, hidden)
    ids = topk_ids.reshape(-1, top_k)
    weights = topk_weights.reshape(-1, top_k).astype(jnp.float32)
    ids = jnp.where((ids >= 0) & (ids < config.num_experts), ids, -1).astype(jnp.int32)
    if num_valid is not None:
        ids = jnp.where(jnp.arange(ids.shape[0])[:, None] < num_valid, ids, -1)

    rows, kept = unweighted_rows(tokens, ids, w_gate_up, w_down, b_gate_up, b_down, config=config)
    weights = jnp.where(kept, weights, 0.0)  # a masked weight may be NaN
    total = jnp.zeros(tokens.shape, jnp.float32)
    for k in range(top_k):
        total = total + weights[:, k, None] * rows[:, k].astype(jnp.float32)
    return total.astype(config.dtype).reshape(x.shape)


def unweighted_rows(
    x: jax.Array, ids: jax.Array, w_gate_up: Any, w_down: jax.Array, b_gate_up: Any, b_down: Any, *, config: MoEConfig
) -> tuple[jax.Array, jax.Array]:
    """Unweighted rows [T, K, H], 0 where a route is not taken, and bool [T, K], whether it is.

    x [T, H] may be of any float dtype. ids [T, K] are those of the experts given, which may be a part of all; others
    are not taken, nor those beyond the capacity. Differentiable.
    """

    def body(carry: tuple[jax.Array, jax.Array], expert: Any) -> tuple[tuple[jax.Array, jax.Array], None]:
        rows, kept = carry
        index, tensors = expert
        hit = ids == index
        if config.capacity is not None:
            order = jnp.cumsum(hit.reshape(-1), dtype=jnp.int32).reshape(hit.shape)
            hit = hit & (order <= config.capacity)
        row = mlp(jnp.any(hit, axis=-1), x, tensors)
        return (place(hit, row, rows), kept | hit), None

    # Recomputed in the backward, masks inside, so that a scan step leaves nothing but its bool [T, K] behind.
    mlp = jax.checkpoint(lambda owned, rows, tensors: _expert(config, _masked(rows, owned), *tensors))
    place = jax.checkpoint(lambda hit, row, rows: jnp.where(hit[..., None], row[:, None, :], rows))
    experts = _stack(w_gate_up, w_down, b_gate_up, b_down, config)
    none = (jnp.zeros((*ids.shape, config.hidden), config.dtype), jnp.zeros(ids.shape, bool))
    indices = jnp.arange(w_down.shape[0], dtype=jnp.int32)
    (rows, kept), _ = lax.scan(body, vary_together(none, x, ids, experts), (indices, experts))
    return rows, kept


def _stack(w_gate_up: Any, w_down: Any, b_gate_up: Any, b_down: Any, config: MoEConfig) -> tuple[Any, ...]:
    """(gate, up, down, b_gate, b_up, b_down), each stacked over experts, None where absent."""
    gate, up = _split(w_gate_up, config)
    b_gate, b_up = _split(b_gate_up, config)
    return gate, up, w_down, b_gate, b_up, b_down


def _split(packed: Any, config: MoEConfig) -> tuple[Any, Any]:
    if isinstance(packed, (tuple, list)):
        return packed[0], packed[1]
    if packed is None or not config.is_gated:
        return packed, None
    return packed[..., : config.intermediate], packed[..., config.intermediate :]


def _masked(rows: jax.Array, owned: jax.Array) -> jax.Array:
    """`rows` with zeros where not owned; the select also stops NaN in the backward."""
    return jnp.where(owned[:, None], rows, jnp.zeros((), rows.dtype))


def _expert(config: MoEConfig, x: Any, gate: Any, up: Any, down: Any, b_gate: Any, b_up: Any, b_down: Any) -> jax.Array:
    """One expert's MLP on [T, H]; float32 accumulators, rounded after the activation and at the end."""
    pre_gate = _affine(x, gate, b_gate)
    pre_up = None if up is None else _affine(x, up, b_up)
    return _affine(activate(config, pre_gate, pre_up).astype(config.dtype), down, b_down).astype(config.dtype)


def _affine(x: jax.Array, w: jax.Array, b: jax.Array | None) -> jax.Array:
    product = jnp.dot(x.astype(jnp.float32), w.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    return product if b is None else product + b.astype(jnp.float32)[None, :]
