"""A streamed Mixture-of-Experts layer on one device: the router runs on one chunk while experts work on the last one.

Run: `python examples/streamed_layer.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jax_streammoe as sm

T, H, I, E, K = 1024, 256, 512, 8, 2
cfg = sm.MoEConfig(num_experts=E, top_k=K, hidden=H, intermediate=I, dtype=jnp.float32)


def route(x_chunk, w_router):
    """Any JAX function of a chunk's tokens; `aux` is handed back, here the routes themselves."""
    routed = sm.route_topk(x_chunk @ w_router, cfg)
    return routed._replace(aux=(routed.ids, routed.weights))


@functools.partial(jax.jit, donate_argnames="ring")
def layer(x, w_router, w_gate_up, w_down, ring):
    y, ring, info = sm.stream_moe(
        x, route, w_gate_up, w_down, ring=ring, config=cfg, route_args=(w_router,), chunks=4, return_stats=True
    )
    return y, ring, info


@functools.partial(jax.jit, donate_argnames="ring")
def gradients(x, w_router, w_gate_up, w_down, ring):
    def loss(x, w_router, w_gate_up, w_down, ring):
        y, ring, _ = layer(x, w_router, w_gate_up, w_down, ring)
        return jnp.mean(y**2), ring

    return jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(x, w_router, w_gate_up, w_down, ring)


def main():
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (T, H))
    w_router = jax.random.normal(keys[1], (H, E)) / H**0.5
    w_gate_up = jax.random.normal(keys[2], (E, H, 2 * I)) / H**0.5
    w_down = jax.random.normal(keys[3], (E, I, H)) / I**0.5

    # Memory for chunks on their way, made once and donated from call to call: always go on with the ring you got back.
    ring = sm.make_ring(cfg, chunk_tokens=256, num_slots=4, name="streamed_layer")
    y, ring, info = layer(x, w_router, w_gate_up, w_down, ring)
    print("rows per expert", info.stats.expert_rows)

    # The batch-ready layer over the same routes gives the same bits.
    ready = sm.moe(x, *info.aux, w_gate_up, w_down, config=cfg)
    print("same bits as batch-ready:", np.array_equal(y, ready))

    grads, ring = gradients(x, w_router, w_gate_up, w_down, ring)
    for name, grad in zip(("x", "w_router", "w_gate_up", "w_down"), grads, strict=True):
        print(f"gradient of {name}: {grad.shape}, norm {jnp.linalg.norm(grad):.4f}")
    print(sm.inspect(ring))


if __name__ == "__main__":
    main()
