"""The batch-ready layer against the same layer built from `jax.lax.ragged_dot`, and against a plain matmul."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..api import moe
from .measure import alternate, layer_arguments, layer_config, record
from .shapes import CPU_LAYER

MATMUL_SIZE = 2048


def ragged_dot_layer(
    x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array, w_gate_up: jax.Array, w_down: jax.Array
) -> jax.Array:
    """The swiglu layer as JAX users write it: sort routes by expert, two ragged dots, unsort, weighted sum."""
    num_tokens, top_k = topk_ids.shape
    experts = topk_ids.reshape(-1)
    order = jnp.argsort(experts)
    sizes = jnp.bincount(experts, length=w_down.shape[0]).astype(jnp.int32)
    gate, up = jnp.split(lax.ragged_dot(x[order // top_k], w_gate_up, sizes), 2, axis=-1)
    rows = lax.ragged_dot((jax.nn.silu(gate) * up).astype(x.dtype), w_down, sizes)
    rows = jnp.zeros_like(rows).at[order].set(rows).reshape(num_tokens, top_k, -1)
    return jnp.einsum("tkh,tk->th", rows.astype(jnp.float32), topk_weights).astype(x.dtype)


def layer_forward(dtype: Any, rounds: int = 3) -> dict:
    """Record cpu/layer_fwd/*: how many times faster `moe` is than the ragged_dot layer."""
    shape, name = CPU_LAYER, {"float32": "f32", "bfloat16": "bf16"}[np.dtype(dtype).name]
    args, config = layer_arguments(shape, dtype), layer_config(shape, dtype)
    ours = jax.jit(lambda *a: moe(*a, config=config))
    theirs = jax.jit(ragged_dot_layer)
    got, wanted = (np.asarray(f(*args), np.float32) for f in (ours, theirs))
    tolerance = 1e-4 if name == "f32" else 0.1  # |y| is near 1; bf16 rounds three times on either side
    if not np.max(np.abs(got - wanted)) < tolerance:
        raise RuntimeError(f"{name}: moe and the ragged_dot layer differ by {np.max(np.abs(got - wanted))}")
    square = jnp.asarray(np.random.default_rng(1).standard_normal((MATMUL_SIZE, MATMUL_SIZE)), jnp.float32)
    matmul = jax.jit(jnp.matmul)
    times = alternate(
        {"moe": lambda: ours(*args), "ragged_dot": lambda: theirs(*args), "matmul": lambda: matmul(square, square)},
        rounds=rounds, repeats={"moe": 7, "matmul": 7},
    )  # fmt: skip
    t_moe, t_ragged, t_matmul = times["moe"], times["ragged_dot"], times["matmul"]
    baselines = {
        "moe_ms": t_moe.wall_s * 1e3, "ragged_dot_ms": t_ragged.wall_s * 1e3,
        "moe_gflops": shape.flops / t_moe.wall_s / 1e9, "ragged_dot_gflops": shape.flops / t_ragged.wall_s / 1e9,
        "matmul_f32_gflops": 2 * MATMUL_SIZE**3 / t_matmul.wall_s / 1e9,
        "speedup_in_cpu_time": t_ragged.cpu_s / t_moe.cpu_s,
    }  # fmt: skip
    return record(f"cpu/layer_fwd/{name}", t_ragged.wall_s / t_moe.wall_s, "x", baselines, dtype)
