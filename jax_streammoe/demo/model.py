"""A byte-level language model with one streamed Mixture-of-Experts layer.

Contract: pure functions of a parameter dictionary. The producer of the stream is the whole attention block: `route`
gets the sequences of one chunk, mixes them causally, normalises, and routes; so the experts work on one chunk while
attention runs on the next. Sequences are split over the ranks, experts too, all else is replicated. Trade-off: one
block only, small enough to learn something on two cores within a minute.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..config import MoEConfig
from ..ring import Ring
from ..routing import Routed, load_balance_loss, route_topk
from ..sharding import ExpertParallel
from ..stream import StreamInfo
from .data import NUM_BYTES

SEQUENCES, LENGTH = 32, 64  # of a batch, over all ranks
CHUNKS = 4  # per rank and call
HEADS = 4
CONFIG = MoEConfig(num_experts=8, top_k=2, hidden=128, intermediate=256, dtype=jnp.float32, block_m=64)
BALANCE = 0.01  # weight of the load balance loss

Params = dict[str, jax.Array]


class Mixed(NamedTuple):
    """What the producer hands on beside the routes: per token, the residual stream, and what the layer was given."""

    residual: jax.Array
    tokens: jax.Array
    ids: jax.Array
    weights: jax.Array
    probs: jax.Array


def init_params(key: jax.Array) -> Params:
    """Random parameters; expert tensors are the only ones of rank 3."""
    h, i, e = CONFIG.hidden, CONFIG.intermediate, CONFIG.num_experts
    shapes: dict[str, tuple[tuple[int, ...], float]] = {
        "embed": ((NUM_BYTES, h), 1.0),
        "position": ((LENGTH, h), 0.3),
        "qkv": ((h, 3 * h), h**-0.5),
        "attention_out": ((h, h), h**-0.5),
        "router": ((h, e), h**-0.5),
        "w_gate_up": ((e, h, 2 * i), h**-0.5),
        "w_down": ((e, i, h), i**-0.5),
        "head": ((h, NUM_BYTES), h**-0.5),
    }
    keys = jax.random.split(key, len(shapes))
    return {
        name: scale * jax.random.normal(k, shape, jnp.float32)
        for k, (name, (shape, scale)) in zip(keys, shapes.items(), strict=True)
    }


def place(tree: Any, mesh: Mesh) -> Any:
    """Puts parameters, or optimiser state, on the mesh: expert tensors split over the ranks, the rest replicated."""
    return jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, P("ep") if a.ndim == 3 else P())), tree)


def normalise(x: jax.Array) -> jax.Array:
    """RMS norm over the last axis, without a scale."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def attention(x: jax.Array, qkv: jax.Array, out: jax.Array) -> jax.Array:
    """Causal attention over x [sequences, LENGTH, H]."""
    q, k, v = jnp.split((x @ qkv).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1), v)
    return mixed.reshape(x.shape) @ out


def route(x_c: jax.Array, qkv: jax.Array, attention_out: jax.Array, router: jax.Array) -> Routed:
    """The producer: x_c [c, H] of whole sequences -> routes, the tokens to dispatch, and `Mixed`."""
    x = x_c.reshape(-1, LENGTH, CONFIG.hidden)
    x = (x + attention(normalise(x), qkv, attention_out)).reshape(x_c.shape)
    tokens = normalise(x)
    routed = route_topk(tokens @ router, CONFIG)
    return routed._replace(x=tokens, aux=Mixed(x, tokens, routed.ids, routed.weights, routed.aux))


def embed(params: Params, inputs: jax.Array) -> jax.Array:
    """Bytes [B, LENGTH] -> [B, LENGTH, H]."""
    return params["embed"][inputs] + params["position"][None]


def stream_layer(
    ep: ExpertParallel, params: Params, x: jax.Array, ring: Ring, policy: str = "overlap"
) -> tuple[jax.Array, Any, StreamInfo]:
    """Attention and experts, streamed: -> y [B, LENGTH, H] of the experts, the ring, StreamInfo(Mixed, Stats)."""
    return ep.stream(
        x, route, params["w_gate_up"], params["w_down"], ring=ring, policy=policy, chunks=CHUNKS, return_stats=True,
        route_args=(params["qkv"], params["attention_out"], params["router"]),
    )  # fmt: skip


def loss(
    params: Params, batch: jax.Array, ring: Ring, ep: ExpertParallel
) -> tuple[jax.Array, tuple[jax.Array, Any, StreamInfo]]:
    """-> what is minimised, (cross-entropy in bits per byte, the ring, StreamInfo)."""
    inputs, targets = batch[:, :-1], batch[:, 1:]
    y, ring, info = stream_layer(ep, params, embed(params, inputs), ring)
    logits = normalise(info.aux.residual + y) @ params["head"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    entropy = -jnp.mean(picked)
    balance = load_balance_loss(info.aux.probs, info.aux.ids, CONFIG.num_experts)
    return entropy + BALANCE * balance, (entropy / math.log(2.0), ring, info)
