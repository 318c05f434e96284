"""The layer on one CUDA device: kernels where there are any, the portable path of reference.py elsewhere.

Contract: bfloat16, dropless, at most 1,024 local experts, on sm_90a runs the kernels of cc/kernels; other dtypes, a
capacity, more experts, and the backward go through plain JAX, slower and not bitwise equal to the kernels. Programs are
traced for both platforms and lowered for one: local.py chooses with lax.platform_dependent. Statistics are counted in
JAX from the ids, and only where used.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import ffi
from .config import DTYPE_CODES
from .ops import Experts, LayerSpec
from .reference import reference

BFLOAT16 = DTYPE_CODES[np.dtype(jnp.bfloat16)]
MAX_LOCAL_EXPERTS = 1024  # kMaxLocalExperts of cc/host/heuristics.h; a test compares them


def has_kernels(spec: LayerSpec) -> bool:
    """Whether the forward of this layer runs kernels of the library rather than plain JAX."""
    fits = spec.num_local_experts <= MAX_LOCAL_EXPERTS
    return spec.config.dtype_code == BFLOAT16 and spec.config.capacity is None and fits


def forward(spec: LayerSpec, x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Experts) -> jax.Array:
    """x [T, H], ids [T, K] int32, weights [T, K] f32 -> y [T, H]."""
    if not has_kernels(spec):
        return _reference(spec, ids, x, weights, experts)
    config = spec.config
    num_bytes = ffi.compiled.cuda_forward_bytes(
        x.shape[0], config.top_k, config.hidden, config.intermediate, spec.num_local_experts
    )
    # The workspace is a result, so that XLA owns it and a captured call keeps its address.
    results = (ffi.like(x, x.shape, x.dtype), ffi.like(x, (max(1, num_bytes),), np.uint8))
    return ffi.call("forward", results, x, ids, weights, *experts, attributes=spec.attributes())[0]


def backward(
    spec: LayerSpec, x: jax.Array, dy: jax.Array, ids: jax.Array, weights: jax.Array, experts: Experts
) -> tuple[jax.Array, jax.Array, Experts]:
    """-> dx [T, H], d_weights [T, K] f32, gradients of the six expert tensors; through plain JAX."""
    _, pullback = jax.vjp(lambda *args: _reference(spec, ids, *args), x, weights, experts)
    return pullback(dy)


def _reference(spec: LayerSpec, ids: jax.Array, x: jax.Array, weights: jax.Array, experts: Experts) -> jax.Array:
    gate, up, down, b_gate, b_up, b_down = experts
    config = spec.config
    packed = gate.shape[-1] == config.gate_up_width
    biases: dict[str, Any] = {}
    if config.use_bias:
        biases = {"b_gate_up": b_gate if packed else (b_gate, b_up), "b_down": b_down}
    return reference(x, ids, weights, gate if packed else (gate, up), down, config=config, **biases)
