"""The backward of the expert-parallel layer on the GPUs of one host, through the memory of a ring.

Contract: run as `python benchmarks/gpu/ranks_backward.py --out FILE` on a machine with at least two GPUs and the
library importable; writes the records `layer_bwd/Rgpu/SHAPE/T8192` in ms per call, T tokens per rank, the rate per GPU
by 16TKHI beside it. What is timed is the backward alone: the gradient is attached to a y that is an operand, as a layer
attaches it to the y of its forward call. The baseline is the backward of `all_gather` of rank_layers.py, a layer from
all-gather, `sm.moe` and reduce-scatter. Results are compared before anything is timed. A figure is the median over
rounds in which the versions take turns, each timed as 1/n of a program of n backwards on different tokens and routes.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rank_layers
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layer import power_and_clock
from ranks import FEW, PREFILL, SHAPES, make

import jax_streammoe as sm
from jax_streammoe import ops, publish, vjp
from jax_streammoe.bench.measure import record

WARM_UP, ROUNDS, LAUNCHES, CALLS = 2, 7, 3, 3


def ring_layer(config: sm.MoEConfig, ring: sm.Ring, mesh: Any) -> Any:
    """A layer whose forward is dy and whose backward is the layer's, over the ranks of the ring."""
    layer = ops.LayerSpec(config, config.num_experts // mesh.size, ring=ring.name)
    spec = publish.gradient_spec(ring.spec, layer)

    def rank(y: jax.Array, token: jax.Array, x: jax.Array, ids: jax.Array, *rest: jax.Array) -> jax.Array:
        weights, gate_up, down = rest
        return vjp.attach(spec, y, x, ids, weights, ops.pack_experts(gate_up, down, None, None), token)[0]

    return jax.shard_map(rank, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)


def program(layer: Any, calls: int) -> Any:
    """`calls` backwards of (dy, batches, experts); of the weight gradients a few elements are returned."""

    def run(dy: jax.Array, batches: list, *experts: jax.Array) -> list:
        out = []
        for x, ids, weights in batches[:calls]:
            pullback = jax.vjp(lambda x, w, *e, ids=ids: layer(x, ids, w, *e), x, weights, *experts)[1]
            dx, d_weights, *d_experts = pullback(dy)
            out.append((dx, d_weights, [d[:: d.shape[0] // 2, :8, :128] for d in d_experts]))
        return out

    return jax.jit(run)


def measure(name: str, mesh: Any, stock: bool) -> dict[str, float]:
    config, batches, experts = make(SHAPES[name], PREFILL, mesh, CALLS)
    sharding = NamedSharding(mesh, P("ep"))
    draw = lambda: jax.random.normal(jax.random.key(5), batches[0][0].shape, jnp.bfloat16)
    dy = jax.jit(draw, out_shardings=sharding)()
    ring = sm.make_ring(config, chunk_tokens=PREFILL, num_slots=1, mesh=mesh, name=f"backward/{name}")
    token = jax.device_put(jnp.zeros((mesh.size, 1), jnp.float32), sharding)
    attached = ring_layer(config, ring, mesh)
    versions = {"ring": program(lambda *args: attached(dy, token, *args), CALLS)}
    if stock:
        versions["all_gather"] = program(rank_layers.make("all_gather", config, mesh), CALLS)
        check(*(run(dy, batches[:1], *experts)[0] for run in versions.values()))
    samples: dict[str, list[float]] = {n: [] for n in versions}
    for turn in range(WARM_UP + ROUNDS):
        for n, run in versions.items():
            begin = time.perf_counter()
            for _ in range(LAUNCHES):
                out = run(dy, batches, *experts)
            jax.block_until_ready(out)
            if turn >= WARM_UP:
                samples[n].append((time.perf_counter() - begin) / LAUNCHES / CALLS)
    ring.check()
    sm.close_ring(ring.name)
    return {n: statistics.median(s) for n, s in samples.items()}


def check(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(v, np.float32) for v in (a, b))
        error = float(np.linalg.norm(a - b) / np.linalg.norm(b))
        if not error < 1e-2:
            raise RuntimeError(f"relative difference {error} of a gradient {a.shape} to the layer from collectives")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--shapes", nargs="*", default=FEW, choices=SHAPES)
    parser.add_argument("--no-stock", action="store_true", help="leave the baseline, and the comparison with it, out")
    parser.add_argument("--commit", default="", help="of the measured tree, where it is not a git checkout")
    options = parser.parse_args()
    mesh = jax.make_mesh((len(jax.devices()),), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    ranks, records = mesh.size, []
    for name in options.shapes:
        hidden, inner, _, top_k = SHAPES[name]
        seconds = measure(name, mesh, not options.no_stock)
        baselines = {"tflops_16TKHI": 16 * PREFILL * top_k * hidden * inner / seconds["ring"] / 1e12}
        baselines |= {f"{n}_ms": s * 1e3 for n, s in seconds.items() if n != "ring"}
        print(name, f"{seconds['ring'] * 1e3:.3f} ms", {k: round(v, 2) for k, v in baselines.items()},
              power_and_clock(), flush=True)  # fmt: skip
        what = f"layer_bwd/{ranks}gpu/{name}/T{PREFILL}"
        records.append(record(what, seconds["ring"] * 1e3, "ms", baselines, jnp.bfloat16, ranks, options.commit))
        options.out.write_text(json.dumps(records, indent=1) + "\n")  # what is done stays when the run is cut short


if __name__ == "__main__":
    main()
