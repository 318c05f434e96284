"""The expert-parallel layer on the GPUs of one host: `ep.moe` on a ring, per-GPU speed, beside layers from stock parts.

Contract: run as `python benchmarks/gpu/ranks.py --out FILE` on a machine with at least two GPUs and the library
importable; writes the records `layer_fwd/Rgpu/SHAPE/T8192` (TFLOP/s per GPU of 6 T K H I, T tokens per rank),
`decode/Rgpu/SHAPE/T128` (us) and `ring_bytes/Rgpu/qwen3-235b` (GiB per rank). Random data, random routings; results are
compared before they are timed. A figure is the median over rounds in which the versions take turns; a call is timed as
1/n of a program that makes n calls one after the other, on different routes and the same ring, launched a few times in
a row. A launch donates ring and outputs of the launch before it, so addresses repeat and XLA's command buffers are
recorded once. Baselines are those of rank_layers.py; one that does not compile, run or agree is printed and left out.
"""

from __future__ import annotations

import argparse
import functools
import itertools
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

import jax_streammoe as sm
from jax_streammoe.bench.measure import record

SHAPES = {
    "qwen3-30b": (2048, 768, 128, 8),
    "qwen3-235b": (4096, 1536, 128, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "dsv3": (7168, 2048, 256, 8),  # 21 GiB of experts
}
FEW = [name for name in SHAPES if name != "dsv3"]  # what two GPUs measure
PREFILL, DECODE = 8192, 128
RING_SHAPE, RING_TOKENS = "qwen3-235b", 8192
WARM_UP, ROUNDS, LAUNCHES = 2, 7, 4
COPY_BYTES_PER_S = 4.05e12


def make(
    shape: tuple[int, int, int, int], num_tokens: int, mesh: Any, num_batches: int
) -> tuple[sm.MoEConfig, list, tuple]:
    """Config, batches (x, ids, weights) and the experts, over the ranks."""
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
    place = functools.partial(jax.device_put, device=sharding)
    batches = [
        (place(jnp.roll(x, n, axis=1)), place(jnp.roll(ids, n, axis=0).astype(jnp.int32)), weights)
        for n in range(num_batches)
    ]
    return (
        config,
        batches,
        (normal(keys[3], (experts, hidden, 2 * inner), hidden), normal(keys[0], (experts, inner, hidden), inner)),
    )


def ring_program(ep: Any) -> Any:
    """(outputs of the launch before, ring, batches, *experts) -> outputs, ring; a call per batch, in a row."""

    def run(out: list, ring: Any, batches: list, *experts: jax.Array) -> tuple[list, Any]:
        results = []
        for batch in batches:
            y, ring, _ = ep.moe(*batch, *experts, ring=ring)
            results.append(y)
        return results, ring

    return jax.jit(run, donate_argnums=(0, 1), keep_unused=True)


def stock_program(layer: Any) -> Any:
    """The same without a ring, which comes back as it was."""

    def run(out: list, ring: None, batches: list, *experts: jax.Array) -> tuple[list, None]:
        return [layer(*batch, *experts) for batch in batches], ring

    return jax.jit(run, donate_argnums=0, keep_unused=True)


def outputs(batches: list) -> list[jax.Array]:
    """What a program's first launch donates."""
    return [jnp.zeros_like(x) for x, _, _ in batches]


def measure(name: str, num_tokens: int, mesh: Any, stock: list[str]) -> dict[str, float]:
    """Median seconds of one call on the ring, and of the baselines that work."""
    calls = 12 if num_tokens <= 1024 else 3  # per program
    config, batches, experts = make(SHAPES[name], num_tokens, mesh, calls)
    ep = sm.expert_parallel(config, mesh=mesh)
    ring = sm.make_ring(config, chunk_tokens=num_tokens, num_slots=1, mesh=mesh, name=name)
    programs, states = {"ring": ring_program(ep)}, {"ring": (outputs(batches), ring)}
    del ring

    def launch(version: str) -> list[jax.Array]:
        states[version] = programs[version](*states[version], batches, *experts)
        return states[version][0]

    ours = [np.asarray(y[::97], np.float32) for y in launch("ring")]
    theirs = jax.jit(rank_layers.make("all_gather", config, mesh))
    for got, batch in zip(ours, batches, strict=True):
        check(got, theirs(*batch, *experts))
    for baseline in stock:
        try:
            programs[baseline] = stock_program(rank_layers.make(baseline, config, mesh))
            states[baseline] = (outputs(batches), None)
            for got, want in zip(ours, launch(baseline), strict=True):
                check(got, want)
        except Exception as error:  # stock parts come and go with versions of JAX: what is there is measured
            print(f"{name}: no baseline {baseline}: {type(error).__name__}: {str(error)[:500]}", flush=True)
            programs.pop(baseline, None), states.pop(baseline, None)
    samples: dict[str, list[float]] = {n: [] for n in programs}
    for turn, version in itertools.product(range(WARM_UP + ROUNDS), programs):
        begin = time.perf_counter()
        for _ in range(LAUNCHES):
            out = launch(version)
        jax.block_until_ready(out)
        if turn >= WARM_UP:
            samples[version].append((time.perf_counter() - begin) / LAUNCHES / len(batches))
    sm.close_ring(name)
    return {n: statistics.median(s) for n, s in samples.items()}


def check(got: np.ndarray, want: jax.Array) -> None:
    """got: every 97th row of what `want` should be."""
    want = np.asarray(want[::97], np.float32)
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    if not error < 1e-2:
        raise RuntimeError(f"relative difference {error} between the layers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--shapes", nargs="*", default=FEW, choices=SHAPES)
    parser.add_argument("--tokens", nargs="*", type=int, default=[PREFILL, DECODE], help="of a rank; up to 128: decode")
    parser.add_argument("--stock", nargs="*", choices=rank_layers.STOCK, default=list(rank_layers.STOCK))
    parser.add_argument("--ranks", type=int, help="use the first so many devices; all by default")
    parser.add_argument("--commit", default="", help="of the measured tree, where it is not a git checkout")
    options = parser.parse_args()
    devices = jax.devices()[: options.ranks]
    mesh = jax.make_mesh((len(devices),), ("ep",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
    ranks, records = mesh.size, []
    add = functools.partial(record, dtype=jnp.bfloat16, num_devices=ranks, revision=options.commit)

    def done(what: str, value: float, unit: str, baselines: dict[str, float]) -> None:
        records.append(add(what, value, unit, baselines))
        print(what, f"{value:.4g} {unit}", {k: round(v, 3) for k, v in baselines.items()}, flush=True)
        options.out.write_text(json.dumps(records, indent=1) + "\n")

    hidden, inner, experts, top_k = SHAPES[RING_SHAPE]
    ring_bytes = sm.ring_bytes(
        sm.MoEConfig(experts, top_k, hidden, inner, dtype=jnp.bfloat16), chunk_tokens=RING_TOKENS, num_slots=1,
        num_ranks=ranks, platform="cuda",
    )  # fmt: skip
    done(f"ring_bytes/{ranks}gpu/{RING_SHAPE}", ring_bytes / 2**30, "GiB", {})
    for name in options.shapes:
        hidden, inner, experts, top_k = SHAPES[name]
        for tokens in options.tokens:
            if tokens <= DECODE:
                seconds = measure(name, tokens, mesh, [])
                floor = experts // ranks * 3 * hidden * inner * 2 / COPY_BYTES_PER_S * 1e6
                done(f"decode/{ranks}gpu/{name}/T{tokens}", seconds["ring"] * 1e6, "us", {"weight_read_us": floor})
                continue
            flops = 6 * tokens * top_k * hidden * inner
            seconds = measure(name, tokens, mesh, options.stock)
            times = {f"{n}_ms": s * 1e3 for n, s in seconds.items()}
            times |= {f"{n}_tflops": flops / s / 1e12 for n, s in seconds.items() if n != "ring"}
            done(f"layer_fwd/{ranks}gpu/{name}/T{tokens}", flops / seconds["ring"] / 1e12, "TFLOP/s", times)


if __name__ == "__main__":
    main()
