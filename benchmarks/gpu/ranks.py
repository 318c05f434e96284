"""The expert-parallel layer on the GPUs of one host: `ep.moe` on a ring, per-GPU speed, beside layers from collectives.

Contract: run as `python benchmarks/gpu/ranks.py --out FILE` on a machine with at least two GPUs and the library
importable; writes the records `layer_fwd/Rgpu/SHAPE/T8192` (TFLOP/s per GPU of 6 T K H I, T tokens per rank) and
`decode/Rgpu/SHAPE/T128` (us). Random data, random routings; the result is compared before it is timed.
A figure is the median over rounds in which the versions take turns, each timed as one of several launches in a row on
different routes. The baseline `all_gather` gathers all tokens, computes the local experts with `sm.moe`, and
reduce-scatters in float32: what a user builds from a fast single-GPU layer and JAX's collectives.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_streammoe as sm
from jax_streammoe.bench.measure import record

SHAPES = {
    "qwen3-30b": (2048, 768, 128, 8),
    "qwen3-235b": (4096, 1536, 128, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
}
PREFILL, DECODE = 8192, 128
WARM_UP, ROUNDS, LAUNCHES = 2, 7, 5
COPY_BYTES_PER_S = 4.05e12


def make(shape: tuple[int, int, int, int], num_tokens: int, mesh: Any) -> tuple[sm.MoEConfig, list, tuple]:
    """Config, two batches (x, ids, weights) and the experts, over the ranks."""
    hidden, inner, experts, top_k = shape
    config = sm.MoEConfig(experts, top_k, hidden, inner, dtype=jnp.bfloat16)
    keys = jax.random.split(jax.random.key(num_tokens + hidden), 4)
    sharding = NamedSharding(mesh, P("ep"))

    def normal(key: jax.Array, dims: tuple[int, ...], depth: int) -> jax.Array:
        draw = lambda: (jax.random.normal(key, dims, jnp.bfloat16) * depth**-0.5).astype(jnp.bfloat16)
        return jax.jit(draw, out_shardings=sharding)()

    total = num_tokens * mesh.size
    _, ids = jax.lax.top_k(jax.random.uniform(keys[0], (total, experts)), top_k)
    weights = jax.device_put(jax.random.uniform(keys[1], (total, top_k), minval=0.5) / top_k, sharding)
    x = normal(keys[2], (total, hidden), 1)
    batches = [(x, jax.device_put(jnp.roll(ids, n, axis=0).astype(jnp.int32), sharding), weights) for n in range(2)]
    return (
        config,
        batches,
        (normal(keys[3], (experts, hidden, 2 * inner), hidden), normal(keys[0], (experts, inner, hidden), inner)),
    )


def all_gather_layer(config: sm.MoEConfig, mesh: Any) -> Any:
    """All tokens on every GPU, local experts there, sums scattered back."""
    local = sm.MoEConfig(
        config.num_experts // mesh.size, config.top_k, config.hidden, config.intermediate, dtype=config.dtype
    )

    def rank(x: jax.Array, ids: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
        x, ids, weights = (jax.lax.all_gather(a, "ep", tiled=True) for a in (x, ids, weights))
        ids = ids - jax.lax.axis_index("ep") * local.num_experts
        y = sm.moe(x, jnp.where((ids >= 0) & (ids < local.num_experts), ids, -1), weights, gate_up, down, config=local)
        return jax.lax.psum_scatter(y.astype(jnp.float32), "ep", tiled=True).astype(x.dtype)

    return jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False))


def measure(name: str, num_tokens: int, mesh: Any, baselines: bool) -> dict[str, float]:
    config, batches, experts = make(SHAPES[name], num_tokens, mesh)
    ep = sm.expert_parallel(config, mesh=mesh)
    ring = sm.make_ring(config, chunk_tokens=num_tokens, num_slots=1, mesh=mesh, name=name)
    state = {"ring": ring}
    run = jax.jit(ep.moe, donate_argnames="ring")

    def ours(turn: int) -> jax.Array:
        y, state["ring"], _ = run(*batches[turn % 2], *experts, ring=state["ring"])
        return y

    theirs = all_gather_layer(config, mesh)
    versions = {"ring": ours, "all_gather": lambda turn: theirs(*batches[turn % 2], *experts)}
    check(versions["ring"](0), versions["all_gather"](0))
    if not baselines:
        del versions["all_gather"]
    samples: dict[str, list[float]] = {n: [] for n in versions}
    for turn in range(WARM_UP + ROUNDS):
        for n, version in versions.items():
            begin = time.perf_counter()
            for launch in range(LAUNCHES):
                out = version(launch)
            jax.block_until_ready(out)
            if turn >= WARM_UP:
                samples[n].append((time.perf_counter() - begin) / LAUNCHES)
    sm.close_ring(name)
    return {n: statistics.median(s) for n, s in samples.items()}


def check(got: jax.Array, want: jax.Array) -> None:
    got, want = (np.asarray(a[::97], np.float32) for a in (got, want))
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    if not error < 1e-2:
        raise RuntimeError(f"relative difference {error} to the layer from collectives")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--commit", default="", help="of the measured tree, where it is not a git checkout")
    options = parser.parse_args()
    mesh = jax.make_mesh((len(jax.devices()),), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    ranks, records = mesh.size, []
    add = functools.partial(record, dtype=jnp.bfloat16, num_devices=ranks, revision=options.commit)
    for name in options.shapes:
        hidden, inner, experts, top_k = SHAPES[name]
        flops = 6 * PREFILL * top_k * hidden * inner
        seconds = measure(name, PREFILL, mesh, True)
        times = {f"{n}_ms": s * 1e3 for n, s in seconds.items()}
        times["all_gather_tflops"] = flops / seconds["all_gather"] / 1e12
        value = flops / seconds["ring"] / 1e12
        records.append(add(f"layer_fwd/{ranks}gpu/{name}/T{PREFILL}", value, "TFLOP/s", times))
        print(name, f"{value:.0f} TFLOP/s per GPU", {k: round(v, 3) for k, v in times.items()}, flush=True)
        seconds = measure(name, DECODE, mesh, False)
        floor = experts // ranks * 3 * hidden * inner * 2 / COPY_BYTES_PER_S * 1e6
        records.append(
            add(f"decode/{ranks}gpu/{name}/T{DECODE}", seconds["ring"] * 1e6, "us", {"weight_read_us": floor})
        )
        print(name, f"decode {seconds['ring'] * 1e6:.0f} us, weights {floor:.0f} us", flush=True)
        options.out.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
