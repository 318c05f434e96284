"""The layer on one CUDA device, and the halves of an exchange: kernels where there are any, elsewhere plain JAX.

Contract: bfloat16 or float16 and at most 1,024 local experts, on sm_90a, run the kernels of cc/kernels, forward and
backward; float32 and more experts go through plain JAX, slower and not bitwise equal to the kernels. Programs are
traced for both platforms and lowered for one: local.py chooses with lax.platform_dependent; a ring knows its platform.
Statistics of batch-ready calls are counted in JAX from the ids, and only where used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import ffi, ops
from .config import DTYPE_CODES, MoEConfig
from .ops import Experts, LayerSpec, StreamSpec
from .reference import reference, unweighted_rows

KERNEL_DTYPES = (DTYPE_CODES[np.dtype(jnp.bfloat16)], DTYPE_CODES[np.dtype(np.float16)])
MAX_LOCAL_EXPERTS = 1024  # kMaxLocalExperts of cc/host/heuristics.h; a test compares them
MAX_ROUTES = 2**31 - 1 - 128 * MAX_LOCAL_EXPERTS  # kMaxPlanPairs of the same file
COMPUTE_CAPABILITY = "9.0"  # the kernels are sm_90a code, which runs on no other


def has_kernels(spec: LayerSpec) -> bool:
    """Whether this layer runs kernels of the library rather than plain JAX."""
    return spec.config.dtype_code in KERNEL_DTYPES and spec.num_local_experts <= MAX_LOCAL_EXPERTS


def check_ring(config: MoEConfig, num_ranks: int, pool_tokens: int, devices: Sequence[jax.Device]) -> None:
    """Raises ValueError unless the kernels can serve a ring of this layer and size on these GPUs.

    Every process looks at its own GPUs; that all are on one host is known when the processes meet.
    """
    if not ffi.compiled.WITH_CUDA:
        raise ValueError(f"rings on {devices[0]} need a build with CUDA kernels, this one is for the CPU only")
    if num_ranks > 1 and config.capacity is not None:
        raise ValueError("a ring over several GPUs takes no capacity in this version; leave ring=None")
    for device in (device for device in devices if device.process_index == jax.process_index()):
        found = getattr(device, "compute_capability", None)
        if found != COMPUTE_CAPABILITY:
            raise ValueError(f"the kernels need compute capability {COMPUTE_CAPABILITY}, {device} has {found}")
    if config.dtype_code not in KERNEL_DTYPES:
        raise ValueError(
            f"a ring on a GPU takes bfloat16 or float16 layers, got {config.dtype.name}; float32 runs through plain "
            "JAX with ring=None"
        )
    if config.num_experts > MAX_LOCAL_EXPERTS * num_ranks:
        raise ValueError(
            f"a ring on GPUs takes at most {MAX_LOCAL_EXPERTS} experts per rank, got {config.num_experts} on "
            f"{num_ranks}"
        )
    if pool_tokens * config.top_k > MAX_ROUTES:
        raise ValueError(
            f"num_ranks * num_slots * chunk_tokens * top_k must be at most {MAX_ROUTES} on a GPU, got "
            f"{pool_tokens * config.top_k}"
        )


def forward(spec: LayerSpec, x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Experts) -> jax.Array:
    """x [T, H], ids [T, K] int32, weights [T, K] f32 -> y [T, H]."""
    if not has_kernels(spec):
        return _reference(spec, ids, x, weights, experts)
    results = (ffi.like(x, x.shape, x.dtype), _workspace(spec, x))
    return ffi.call("forward", results, x, ids, weights, *experts, attributes=spec.attributes())[0]


def forward_kept(
    spec: LayerSpec, x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Experts
) -> tuple[jax.Array, jax.Array]:
    """As `forward` -> y, gate_up [T, K * 2I]: what enters the activations, zeros where plain JAX does the work."""
    gate_up = ops.gate_up_like(spec, x, ids)
    if not has_kernels(spec):
        return _reference(spec, ids, x, weights, experts), jnp.zeros_like(x, shape=gate_up.shape)
    results = (ffi.like(x, x.shape, x.dtype), gate_up, _workspace(spec, x))
    y, kept, _ = ffi.call("forward_kept", results, x, ids, weights, *experts, attributes=spec.attributes())
    return y, kept


def ring_forward(
    spec: StreamSpec, mem: jax.Array, x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Experts
) -> tuple:
    """The batch-ready call on a ring -> mem, y [T, H], expert_rows [L], counts [3]."""
    if spec.layer.num_local_experts < spec.layer.config.num_experts:
        return ops.ring_forward(spec, mem, x, ids, weights, experts)
    results = (ffi.like(mem, mem.shape, mem.dtype), ffi.like(mem, x.shape, x.dtype), _workspace(spec.layer, x, mem))
    mem, y, _ = ffi.call(
        "ring_forward_local", results, mem, x, ids, weights, *experts, attributes=spec.attributes(), aliases={0: 0}
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


def rows(spec: LayerSpec, x: jax.Array, local_ids: jax.Array, experts: Experts) -> tuple:
    """x [N, H], local ids [N, K] -> unweighted rows [N, K, H] (0 where skipped), dropped [N, K] uint8, expert_rows."""
    if not has_kernels(spec):
        expert_rows, taken = _plain_rows(spec, x, local_ids, experts)
        owned = (local_ids >= 0) & (local_ids < spec.num_local_experts)
        return expert_rows, (owned & ~taken).astype(jnp.uint8), count_routes(spec, local_ids)[0]
    results = (
        ffi.like(x, (*local_ids.shape, x.shape[-1]), x.dtype),
        ffi.like(x, local_ids.shape, np.uint8),
        ffi.like(x, (spec.num_local_experts,), np.int32),
        _workspace(spec, x, with_rows=False),
    )
    return tuple(ffi.call("rows", results, x, local_ids, *experts, attributes=spec.attributes())[:3])


def combine(
    spec: LayerSpec, expert_rows: jax.Array, ids: jax.Array, weights: jax.Array, dropped: jax.Array
) -> jax.Array:
    """rows [T, K, H], ids [T, K] (negative: skipped), weights f32, dropped uint8 -> y [T, H], k ascending."""
    if has_kernels(spec):
        return ops.combine(spec, expert_rows, ids, weights, dropped)
    taken = (ids >= 0) & (dropped == 0)
    total = jnp.zeros((ids.shape[0], expert_rows.shape[-1]), jnp.float32)
    for k in range(ids.shape[1]):
        term = weights[:, k, None] * expert_rows[:, k].astype(jnp.float32)
        total = total + jnp.where(taken[:, k, None], term, 0.0)  # a weight that is not used may be NaN
    return total.astype(expert_rows.dtype)


def rows_backward(
    spec: LayerSpec, token: jax.Array, x: jax.Array, dy: jax.Array, local_ids: jax.Array, weights: jax.Array,
    experts: Experts, wide: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, Experts]:  # fmt: skip
    """Gradients of weighted rows: -> token, dx_rows [N, K, H], d_weights [N, K] f32, of the experts (`wide`: f32).

    In plain JAX the whole d_x of a token lies in the row of the first of its routes that are taken here, the others are
    0: every expert works on all N tokens as it is, and would on N * K with a row for each route.
    """
    if has_kernels(spec):
        dx_shape = (*local_ids.shape, x.shape[-1])
        return token, *_gradients("rows_backward", spec, dx_shape, x, dy, local_ids, weights, experts, wide)
    # As float32, so that the sum over experts is one.
    expert_rows, pullback, taken = jax.vjp(
        lambda x, experts: _plain_rows(spec, x, local_ids, experts), x.astype(jnp.float32), experts, has_aux=True
    )
    dy = dy[:, None, :].astype(jnp.float32)
    dx, d_experts = pullback((weights[..., None] * dy).astype(expert_rows.dtype))
    d_weights = jnp.where(taken, jnp.sum(dy * expert_rows.astype(jnp.float32), axis=-1), 0.0)
    first = taken & (jnp.cumsum(taken, axis=1, dtype=jnp.int32) == 1)
    dx_rows = jnp.where(first[..., None], dx[:, None, :].astype(x.dtype), jnp.zeros((), x.dtype))
    return token, dx_rows, d_weights, widened(d_experts) if wide else d_experts


def widened(arrays: Any) -> Any:
    """The same in float32."""
    return jax.tree.map(lambda a: a.astype(jnp.float32), arrays)


def _plain_rows(
    spec: LayerSpec, x: jax.Array, local_ids: jax.Array, experts: Experts
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Unweighted rows [N, K, H], 0 where skipped, and bool [N, K], whether a route was taken; differentiable."""
    gate_up, down, biases = _named(spec, experts)
    b_gate_up, b_down = biases.get("b_gate_up"), biases.get("b_down")
    return unweighted_rows(x, local_ids, gate_up, down, b_gate_up, b_down, config=spec.config)


def _workspace(spec: LayerSpec, x: jax.Array, like: jax.Array | None = None, *, with_rows: bool = True) -> Any:
    """The kernels' memory as a result, so that XLA owns it and a captured call keeps its address."""
    config = spec.config
    num_bytes = ffi.compiled.cuda_forward_bytes(
        x.shape[0], config.top_k, config.hidden if with_rows else 0, config.intermediate,
        spec.num_local_experts,
    )  # fmt: skip
    return ffi.like(x if like is None else like, (max(1, num_bytes),), np.uint8)


def backward(
    spec: LayerSpec, x: jax.Array, dy: jax.Array, ids: jax.Array, weights: jax.Array, experts: Experts,
    wide: bool = False, gate_up: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, Experts]:  # fmt: skip
    """x, dy [T, H], ids [T, K] int32, weights [T, K] f32 -> dx [T, H], d_weights [T, K] f32, gradients of `experts`.

    wide: these are float32, where there are kernels the sums before they are rounded. gate_up: of `forward_kept`;
    without it the kernels compute gate and up again, as plain JAX always does.

    The kernels' memory beside the results: 2 R (2 H + 3 I) bytes (2 I, ungated), and 4 R (1 + I / 64), of R = T * K
    rows and up to 127 more for each expert that has rows.
    """
    if not has_kernels(spec):
        _, pullback = jax.vjp(lambda *args: _reference(spec, ids, *args), x, weights, experts)
        dx, d_weights, d_experts = pullback(dy)
        return dx, d_weights, widened(d_experts) if wide else d_experts
    name, kept = ("backward", ()) if gate_up is None else ("backward_kept", (gate_up,))
    return _gradients(name, spec, x.shape, x, dy, ids, weights, experts, wide, kept)


def ring_backward(
    spec: LayerSpec, num_ranks: int, token: jax.Array, x: jax.Array, dy: jax.Array, ids: jax.Array,
    weights: jax.Array, experts: Experts,
) -> tuple[jax.Array, jax.Array, jax.Array, Experts]:  # fmt: skip
    """`backward` over the ranks of the ring `spec.ring`, which exchange through its memory -> token and the gradients.

    x, dy [T, H], ids of all ranks' experts [T, K], weights [T, K] of this rank, T at most S*C; of `experts` the sums
    over the tokens of all ranks, in rank order. All ranks make their calls on a ring in one order, which the token
    carries. The workspace is that of `backward` for R*T tokens, and their weights.
    """
    results = (
        ffi.like(token, token.shape, token.dtype),
        *_gradient_results(spec, x.shape, x, weights, experts, num_ranks * x.shape[0], 4 * num_ranks * weights.size),
    )
    attributes = spec.attributes() | {"ring": spec.ring, "num_ranks": np.int64(num_ranks), "wide": np.int32(0)}
    operands = (token, x, dy, ids, weights, *experts)
    token, dx, d_weights, *d_experts, _ = ffi.call(
        "ring_backward", results, *operands, attributes=attributes, aliases={0: 0}
    )
    gate, up, down, b_gate, b_up, b_down = d_experts
    return token, dx, d_weights, (gate, up, down, b_gate, b_up, b_down)


def _gradients(
    name: str, spec: LayerSpec, dx_shape: tuple[int, ...], x: jax.Array, dy: jax.Array, ids: jax.Array,
    weights: jax.Array, experts: Experts, wide: bool, kept: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, jax.Array, Experts]:  # fmt: skip
    """Calls a backward handler, whose first result has dx_shape; the last, its workspace, is dropped.

    wide: the gradients of the experts are the kernels' float32 sums, which are otherwise rounded once.
    """
    results = _gradient_results(spec, dx_shape, x, weights, experts, x.shape[0], wide=wide)
    operands, attributes = (x, dy, ids, weights, *kept, *experts), spec.attributes() | {"wide": np.int32(wide)}
    dx, d_weights, *d_experts, _ = ffi.call(name, results, *operands, attributes=attributes)
    gate, up, down, b_gate, b_up, b_down = d_experts
    return dx, d_weights, (gate, up, down, b_gate, b_up, b_down)


def _gradient_results(
    spec: LayerSpec, dx_shape: tuple[int, ...], x: jax.Array, weights: jax.Array, experts: Experts, num_tokens: int,
    more_bytes: int = 0, wide: bool = False,
) -> tuple:  # fmt: skip
    """d_x, d_weights, the six gradients, and the workspace of a backward of num_tokens tokens."""
    config = spec.config
    num_bytes = more_bytes + ffi.compiled.cuda_backward_bytes(
        num_tokens, config.top_k, config.hidden, config.intermediate, spec.num_local_experts, config.is_gated
    )
    return (
        ffi.like(x, dx_shape, x.dtype),
        ffi.like(x, weights.shape, np.float32),
        *(ffi.like(e, e.shape, np.float32 if wide else e.dtype) for e in experts),
        ffi.like(x, (max(1, num_bytes),), np.uint8),
    )


def _reference(spec: LayerSpec, ids: jax.Array, x: jax.Array, weights: jax.Array, experts: Experts) -> jax.Array:
    gate_up, down, biases = _named(spec, experts)
    return reference(x, ids, weights, gate_up, down, config=spec.config, **biases)


def _named(spec: LayerSpec, experts: Experts) -> tuple[Any, jax.Array, dict[str, Any]]:
    """The six tensors as `reference` takes them: gate and up, down, and the biases by name."""
    gate, up, down, b_gate, b_up, b_down = experts
    packed = gate.shape[-1] == spec.config.gate_up_width
    biases: dict[str, Any] = {}
    if spec.config.use_bias:
        biases = {"b_gate_up": b_gate if packed else (b_gate, b_up), "b_down": b_down}
    return gate if packed else (gate, up), down, biases
