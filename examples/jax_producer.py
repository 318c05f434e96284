"""A producer in plain JAX: norm, router product, top-k and layout of a chunk are a route function of `stream_moe`.

Run: `python examples/jax_producer.py`, on a CPU or a GPU. While the experts have one chunk, XLA norms and routes the
next. `sm.moe` on the rows and routes of the stream gives the same bits; behind the same route function over the whole
batch it is the batch-ready layer. `cuda_producer/` does the producer's work in one CUDA kernel.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_streammoe as sm

T, H, I, E, K, CHUNKS = 2048, 256, 512, 16, 2, 4
# A ring on a GPU is for bfloat16 and float16.
DTYPE = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
cfg = sm.MoEConfig(num_experts=E, top_k=K, hidden=H, intermediate=I, dtype=DTYPE)


def route(x_chunk, gain, w_router):
    """The normed tokens go to the experts in place of x; `aux` hands back what was dispatched."""
    wide = x_chunk.astype(jnp.float32)
    wide *= lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    rows = wide.astype(x_chunk.dtype) * gain[None]
    routed = sm.route_topk(jnp.dot(rows, w_router, preferred_element_type=jnp.float32), cfg)
    return routed._replace(x=rows, aux=(rows, routed.ids, routed.weights))


@functools.partial(jax.jit, donate_argnames="ring")
def streamed(x, router, experts, ring):
    y, ring, info = sm.stream_moe(x, route, *experts, ring=ring, config=cfg, route_args=router, chunks=CHUNKS)
    return y, ring, info.aux


@jax.jit
def batch_ready(x, router, experts):
    routed = route(x, *router)
    return sm.moe(*routed.aux, *experts, config=cfg)


@jax.jit
def on_routes_of(aux, experts):
    return sm.moe(*aux, *experts, config=cfg)


def main():
    keys = jax.random.split(jax.random.key(0), 5)
    normal = lambda key, shape, depth: (jax.random.normal(key, shape) / depth**0.5).astype(DTYPE)
    x = normal(keys[0], (T, H), 1)
    router = (jnp.ones((H,), DTYPE) + normal(keys[4], (H,), 100), normal(keys[1], (H, E), H))
    experts = (normal(keys[2], (E, H, 2 * I), H), normal(keys[3], (E, I, H), I))
    ring = sm.make_ring(cfg, chunk_tokens=T // CHUNKS, num_slots=CHUNKS, name="jax_producer")

    y, ring, aux = streamed(x, router, experts, ring)
    same = np.array_equal(np.asarray(y), np.asarray(on_routes_of(aux, experts)))
    print(f"{jax.devices()[0].platform}, {np.dtype(DTYPE).name}, {CHUNKS} chunks of {T // CHUNKS} tokens")
    print("same bits as sm.moe on the same rows and routes:", same)
    # XLA's router product has other bits in one piece than in chunks, so a token near a tie may choose otherwise.
    wide = [np.asarray(a, np.float32) for a in (y, batch_ready(x, router, experts))]
    print(f"difference from the batch-ready program: {np.linalg.norm(wide[0] - wide[1]) / np.linalg.norm(wide[1]):.1e}")
    ring.check()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
