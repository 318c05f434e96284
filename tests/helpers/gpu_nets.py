"""Small nets of streamed layers, as functions of abstract arguments, for programs that are compiled for a GPU.

Contract: a net is (x, weights of all layers, ring) -> results and the ring; `arguments` are what it takes, on one
described device or over the ranks of a mesh of them. Nothing here runs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_streammoe as sm
from tests.helpers import gpu_compile as gpu

# T = 512 tokens in 4 chunks of C = 128; 3 layers, equal but for their weights.
T, H, I, E, K, CHUNKS, LAYERS = 512, 256, 128, 8, 2, 4, 3
CONFIG = sm.MoEConfig(E, K, H, I, dtype=jnp.bfloat16)
WEIGHTS = {"norm": (H,), "router": (H, E), "gate_up": (E, H, 2 * I), "down": (E, I, H)}


def arguments(mesh=None, chunks=CHUNKS):
    """x, weights of all layers, ring of as many slots as chunks: on one device, or over the ranks of a mesh."""
    on = lambda *spec: None if mesh is None else NamedSharding(mesh, P(*spec))
    split = {"gate_up": on(None, "ep"), "down": on(None, "ep")}
    ranks = 1 if mesh is None else mesh.size
    x = gpu.abstract((ranks * T, H), sharding=on("ep"))
    weights = {n: gpu.abstract((LAYERS, *s), sharding=split.get(n, on())) for n, s in WEIGHTS.items()}
    return x, weights, gpu.abstract_ring(CONFIG, chunk_tokens=T // chunks, num_slots=chunks, mesh=mesh)


def norm(x, scale):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale[None]


def route(x, router):
    return sm.route_topk(jnp.dot(x, router, preferred_element_type=jnp.float32), CONFIG)


def stream(x, w, ring, **options):
    options = {"chunks": CHUNKS} | options
    y, ring, _ = sm.stream_moe(
        x, route, w["gate_up"], w["down"], config=CONFIG, ring=ring, route_args=(w["router"],), **options
    )
    return y, ring


def block(x, w, ring, **options):
    y, ring = stream(norm(x, w["norm"]), w, ring, **options)
    return x + jnp.tanh(y) * y, ring


def batch_block(x, w, ring):
    routed = route(norm(x, w["norm"]), w["router"])
    y = sm.moe(norm(x, w["norm"]), routed.ids, routed.weights, w["gate_up"], w["down"], config=CONFIG)
    return x + jnp.tanh(y) * y, ring


def layer_of(weights, n):
    return jax.tree.map(lambda w: w[n], weights)


def one_layer(x, weights, ring, block=block):
    return block(x, layer_of(weights, 0), ring)


def unrolled(x, weights, ring, block=block):
    for n in range(LAYERS):
        x, ring = block(x, layer_of(weights, n), ring)
    return x, ring


def scanned(x, weights, ring, block=block):
    return lax.scan(lambda carry, w: (block(carry[0], w, carry[1]), None), (x, ring), weights)[0]


def gradient(net):
    def run(x, weights, ring):
        def loss(x, weights):
            y, used = net(x, weights, ring)
            return jnp.sum(jnp.square(y.astype(jnp.float32))), used

        return jax.grad(loss, (0, 1), has_aux=True)(x, weights)

    return run


def remat(block):
    return jax.checkpoint(block, policy=sm.checkpoint_policy())


def over_ranks(net):
    mesh = Mesh(np.array(gpu.devices(2)), ("ep",), axis_types=(AxisType.Auto,))
    weights = {"norm": P(), "router": P(), "gate_up": P(None, "ep"), "down": P(None, "ep")}
    specs = (P("ep"), weights, P("ep"))
    return jax.shard_map(net, mesh=mesh, in_specs=specs, out_specs=(P("ep"), P("ep"))), mesh
