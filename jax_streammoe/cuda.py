"""The layer on one CUDA device: kernels where there are any, the portable path of reference.py elsewhere.

Contract: bfloat16 or float16 and at most 1,024 local experts, on sm_90a, run the kernels of cc/kernels; float32, more
experts, and the backward go through plain JAX, slower and not bitwise equal to the kernels. Programs are traced for
both platforms and lowered for one: local.py chooses with lax.platform_dependent; a ring knows its platform. Statistics
of batch-ready calls are counted in JAX from the ids, and only where used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import ffi
from .config import DTYPE_CODES, MoEConfig
from .ops import Experts, LayerSpec, StreamSpec
from .reference import reference

KERNEL_DTYPES = (DTYPE_CODES[np.dtype(jnp.bfloat16)], DTYPE_CODES[np.dtype(np.float16)])
MAX_LOCAL_EXPERTS = 1024  # kMaxLocalExperts of cc/host/heuristics.h; a test compares them
COMPUTE_CAPABILITY = "9.0"  # the kernels are sm_90a code, which runs on no other


def has_kernels(spec: LayerSpec) -> bool:
    """Whether the forward of this layer runs kernels of the library rather than plain JAX."""
    return spec.config.dtype_code in KERNEL_DTYPES and spec.num_local_experts <= MAX_LOCAL_EXPERTS


def check_ring(config: MoEConfig, devices: Sequence[jax.Device]) -> None:
    """Raises ValueError unless the kernels can serve a ring of this layer on these GPUs."""
    if not ffi.compiled.WITH_CUDA:
        raise ValueError(f"rings on {devices[0]} need a build with CUDA kernels, this one is for the CPU only")
    if len(devices) > 1:
        raise ValueError(
            f"a ring on GPUs has one device in this version, got {len(devices)}; over ranks leave ring=None, which "
            "exchanges through XLA's collectives"
        )
    for device in devices:
        found = getattr(device, "compute_capability", None)
        if found != COMPUTE_CAPABILITY:
            raise ValueError(f"the kernels need compute capability {COMPUTE_CAPABILITY}, {device} has {found}")
    if config.dtype_code not in KERNEL_DTYPES:
        raise ValueError(
            f"a ring on a GPU takes bfloat16 or float16 layers, got {config.dtype.name}; float32 runs through plain "
            "JAX with ring=None"
        )
    if config.num_experts > MAX_LOCAL_EXPERTS:
        raise ValueError(f"a ring on a GPU takes at most {MAX_LOCAL_EXPERTS} experts, got {config.num_experts}")


def forward(spec: LayerSpec, x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Experts) -> jax.Array:
    """x [T, H], ids [T, K] int32, weights [T, K] f32 -> y [T, H]."""
    if not has_kernels(spec):
        return _reference(spec, ids, x, weights, experts)
    results = (ffi.like(x, x.shape, x.dtype), _workspace(spec, x))
    return ffi.call("forward", results, x, ids, weights, *experts, attributes=spec.attributes())[0]


def ring_forward(
    spec: StreamSpec, mem: jax.Array, x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Experts
) -> tuple:
    """The batch-ready call on a ring -> mem, y [T, H], expert_rows [L], counts [3]."""
    results = (ffi.like(mem, mem.shape, mem.dtype), ffi.like(mem, x.shape, x.dtype), _workspace(spec.layer, x, mem))
    mem, y, _ = ffi.call(
        "ring_forward", results, mem, x, ids, weights, *experts, attributes=spec.attributes(), aliases={0: 0}
    )
    return mem, y, *count_routes(spec.layer, ids)


def count_routes(spec: LayerSpec, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Statistics of ids [..., K] as the CPU handler counts them: expert_rows [L], counts [3]."""
    valid = jnp.where((ids >= 0) & (ids < spec.num_local_experts), ids, -1)
    experts = jnp.arange(spec.num_local_experts, dtype=jnp.int32).reshape(*(1,) * ids.ndim, -1)
    # A comparison and not a scatter: JAX's scatter does not know Explicit axes.
    rows = jnp.sum(valid[..., None] == experts, axis=tuple(range(ids.ndim)), dtype=jnp.int32)
    masked = jnp.sum(ids == -1, dtype=jnp.int32)
    invalid = jnp.sum(valid < 0, dtype=jnp.int32) - masked
    kept = rows if spec.config.capacity is None else jnp.minimum(rows, spec.config.capacity)
    return kept, jnp.stack([jnp.sum(rows - kept, dtype=jnp.int32), invalid, masked])


def _workspace(spec: LayerSpec, x: jax.Array, like: jax.Array | None = None) -> Any:
    """The kernels' memory as a result, so that XLA owns it and a captured call keeps its address."""
    config = spec.config
    num_bytes = ffi.compiled.cuda_forward_bytes(
        x.shape[0], config.top_k, config.hidden, config.intermediate,
        spec.num_local_experts,
    )  # fmt: skip
    return ffi.like(x if like is None else like, (max(1, num_bytes),), np.uint8)


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
