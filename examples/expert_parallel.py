"""Expert parallelism with optax: four ranks, tokens and experts split over them, a router and experts that learn.

Run: `python examples/expert_parallel.py`. The ranks are virtual CPU devices; on several processes the code is the same
after `jax.distributed.initialize`.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_streammoe as sm

jax.config.update("jax_num_cpu_devices", 4)  # before the first operation

T, H, I, E, K = 2048, 64, 128, 8, 2
cfg = sm.MoEConfig(num_experts=E, top_k=K, hidden=H, intermediate=I, dtype=jnp.float32, block_m=64)
optimiser = optax.adam(3e-3)


def route(x_chunk, w_router):
    routed = sm.route_topk(x_chunk @ w_router, cfg)
    return routed._replace(aux=(routed.aux, routed.ids))  # handed back for the balance loss


def loss(params, x, target, ring, ep):
    y, ring, info = ep.stream(
        x, route, params["w_gate_up"], params["w_down"], ring=ring, route_args=(params["w_router"],), chunks=4
    )
    return jnp.mean((y - target) ** 2) + 0.01 * sm.load_balance_loss(*info.aux, E), ring


@functools.partial(jax.jit, static_argnames="ep", donate_argnames=("params", "state", "ring"))
def step(params, state, x, target, ring, ep):
    (value, ring), grads = jax.value_and_grad(loss, has_aux=True)(params, x, target, ring, ep)
    updates, state = optimiser.update(grads, state)
    return optax.apply_updates(params, updates), state, value, ring


def main():
    mesh = jax.make_mesh((4,), ("ep",), axis_types=(AxisType.Auto,))
    ep = sm.expert_parallel(cfg, mesh=mesh)
    ring = sm.make_ring(cfg, chunk_tokens=T // 4 // 4, num_slots=4, mesh=mesh, name="expert_parallel")

    keys = jax.random.split(jax.random.key(0), 5)
    over_ranks, everywhere = NamedSharding(mesh, P("ep")), NamedSharding(mesh, P())
    params = {
        "w_router": jax.device_put(jax.random.normal(keys[0], (H, E)) / H**0.5, everywhere),
        "w_gate_up": jax.device_put(jax.random.normal(keys[1], (E, H, 2 * I)) / H**0.5, over_ranks),
        "w_down": jax.device_put(jax.random.normal(keys[2], (E, I, H)) / I**0.5, over_ranks),
    }
    x = jax.device_put(jax.random.normal(keys[3], (T, H)), over_ranks)
    target = jnp.sin(x @ jax.random.normal(keys[4], (H, H)) / H**0.5)
    state = optimiser.init(params)
    for n in range(40):
        params, state, value, ring = step(params, state, x, target, ring, ep)
        if n % 10 == 0 or n == 39:
            print(f"step {n}: loss {float(value):.4f}")  # waits for the step: launches must not pile up


if __name__ == "__main__":
    main()
