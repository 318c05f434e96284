"""The whole layer inside jit on one H200: `sm.moe` against the layers JAX users can build from stock parts.

Contract: run as `python benchmarks/gpu/layer.py --out FILE` with the library importable; writes a list of records as
benchmarks/README.md describes them and prints a table. Random data, random routings; a value is checked against
`sm.reference` on part of the batch before anything is timed. A figure is the median over rounds in which the versions
take turns; a call is timed as 1/n of a program that makes n calls one after the other, on different tokens and routes,
launched a few times in a row; a launch donates the outputs of the launch before it, as a decode loop donates its state.
Small batches take the device less time than the host needs to launch them (70 to 100 us per call on the machine of the
records, in a command buffer or not), so their figure is time on the device, from a trace: from the end of one call to
the end of the next inside one program; wall time stands beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import statistics
import subprocess
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel_trace import Kernel, read

import jax_streammoe as sm
from jax_streammoe.bench.layer import ragged_dot_layer
from jax_streammoe.bench.measure import record

# name -> hidden, intermediate, experts on this GPU, top_k
SHAPES = {
    "qwen3-30b": (2048, 768, 128, 8),
    "qwen3-235b": (4096, 1536, 128, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "dsv3-shard": (7168, 2048, 32, 8),
}
PREFILL = 8192
DECODE = (1, 8, 16, 64, 128)
CALLS = 12  # per program
WARM_UP, ROUNDS, LAUNCHES = 3, 7, 4
COPY_BYTES_PER_S = 4.05e12  # what reads of weights reach on this part


def pallas_dot(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """Pallas' Mosaic ragged_dot for Hopper; rows behind the last group are not written."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    tiles = dict(block_m=128, block_n=128, block_k=64, max_concurrent_steps=4, grid_block_n=1)
    return ragged_dot_mgpu.ragged_dot(rows, weights, group_sizes=sizes, **tiles)


def pallas_layer(x: Any, topk_ids: Any, topk_weights: Any, w_gate_up: Any, w_down: Any) -> Any:
    """The same layer from pallas_dot."""
    num_tokens, top_k = topk_ids.shape
    order = jnp.argsort(topk_ids.reshape(-1))
    sizes = jnp.bincount(topk_ids.reshape(-1), length=w_down.shape[0]).astype(jnp.int32)
    gate, up = jnp.split(pallas_dot(x[order // top_k], w_gate_up, sizes), 2, axis=-1)
    rows = pallas_dot((jax.nn.silu(gate) * up).astype(x.dtype), w_down, sizes)
    rows = jnp.zeros_like(rows).at[order].set(rows).reshape(num_tokens, top_k, -1)
    return jnp.einsum("tkh,tk->th", rows.astype(jnp.float32), topk_weights).astype(x.dtype)


STOCK = {"pallas": (pallas_layer, 5), "ragged_dot": (ragged_dot_layer, 1)}  # layer, calls per program


def make(shape: tuple[int, int, int, int], num_tokens: int) -> tuple[sm.MoEConfig, tuple[jax.Array, ...]]:
    hidden, inner, experts, top_k = shape
    config = sm.MoEConfig(experts, top_k, hidden, inner, dtype=jnp.bfloat16)
    keys = jax.random.split(jax.random.key(num_tokens + hidden), 4)
    _, ids = jax.lax.top_k(jax.random.uniform(keys[0], (num_tokens, experts)), top_k)
    weights = jax.random.uniform(keys[1], (num_tokens, top_k), minval=0.5) / top_k

    def normal(key: jax.Array, dims: tuple[int, ...], depth: int) -> jax.Array:
        return jax.jit(lambda: (jax.random.normal(key, dims, jnp.bfloat16) * depth**-0.5).astype(jnp.bfloat16))()

    return config, (
        normal(keys[2], (num_tokens, hidden), 1), ids.astype(jnp.int32), weights,
        normal(keys[3], (experts, hidden, 2 * inner), hidden), normal(keys[0], (experts, inner, hidden), inner),
    )  # fmt: skip


def program(layer: Any) -> Any:
    """One call per batch of tokens and routes, one after the other, into `out`, the results of the launch before.

    There is nothing else, so all that is timed is the layer.
    """

    def run(out: list, batches: list, *rest: jax.Array) -> list:
        return [layer(*batch, *rest) for batch in batches]

    return jax.jit(run, donate_argnums=0, keep_unused=True)


def batches_of(args: tuple, count: int) -> list[tuple]:
    """Every call has tokens and routes of its own: no result is shared."""
    x, ids, weights = args[:3]
    return [(jnp.roll(x, n, axis=1), jnp.roll(ids, n, axis=0), weights) for n in range(count)]


def timed(versions: dict[str, Any], args: tuple, repeats: dict[str, int]) -> dict[str, float]:
    """Median seconds of one call of each version."""
    x, _, _, *experts = args
    batches = batches_of(args, max(repeats.values()))
    programs = {n: program(f) for n, f in versions.items()}
    outs = {n: [jnp.zeros_like(x) for _ in range(repeats[n])] for n in versions}
    samples: dict[str, list[float]] = {n: [] for n in versions}
    for turn in range(WARM_UP + ROUNDS):
        for name, run in programs.items():
            begin = time.perf_counter()
            for _ in range(LAUNCHES):
                outs[name] = run(outs[name], batches[: repeats[name]], *experts)
            jax.block_until_ready(outs[name])
            if turn >= WARM_UP:
                samples[name].append((time.perf_counter() - begin) / repeats[name] / LAUNCHES)
    return {n: statistics.median(s) for n, s in samples.items()}


def device_time(layer: Any, args: tuple, calls: int) -> float:
    """Median seconds from the end of one call's last kernel to that of the next in the same program, by a trace."""
    x, _, _, *experts = args
    batches, run, out = batches_of(args, calls), program(layer), [jnp.zeros_like(x) for _ in range(calls)]
    for _ in range(WARM_UP):
        out = run(out, batches, *experts)
    jax.block_until_ready(out)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(ROUNDS):
                out = run(out, batches, *experts)
            jax.block_until_ready(out)
        ends = last_kernels(read(pathlib.Path(folder))[0])
    return statistics.median(call_times(ends, calls)) * 1e-9


def last_kernels(kernels: list[Kernel]) -> list[float]:
    """When the last kernel of each call ended, in ns."""
    return [k.start_ns + k.duration_ns for k in kernels if k.phase == "combine"]


def call_times(ends: list[float], calls: int) -> list[float]:
    """Nanoseconds between the ends of calls that follow each other in a program of so many."""
    if not ends or len(ends) % calls:
        raise RuntimeError(f"the trace shows {len(ends)} calls, want a multiple of {calls}")
    return [b - a for n, (a, b) in enumerate(itertools.pairwise(ends)) if (n + 1) % calls]


def check(config: sm.MoEConfig, args: tuple) -> None:
    part = tuple(a[:256] for a in args[:3])
    got = sm.moe(*args, config=config)[: part[0].shape[0]].astype(jnp.float32)
    wanted = sm.reference(*part, *args[3:], config=config).astype(jnp.float32)
    error = float(jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted))
    if not error < 5e-3:
        raise RuntimeError(f"{config}: relative error {error}")


def power_and_clock() -> str:
    query = ["nvidia-smi", "--query-gpu=power.draw,clocks.sm", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


def prefill(name: str, stock: list[str], revision: str) -> dict:
    config, args = make(SHAPES[name], PREFILL)
    check(config, args)
    hidden, inner, _, top_k = SHAPES[name]
    flops = 6 * PREFILL * top_k * hidden * inner
    ours = lambda *a: sm.moe(*a, config=config)
    versions, repeats = {"moe": ours}, {"moe": CALLS}
    for baseline in stock:
        versions[baseline], repeats[baseline] = STOCK[baseline]
    seconds = timed(versions, args, repeats)
    baselines = {f"{n}_ms": s * 1e3 for n, s in seconds.items()}
    baselines |= {f"{n}_tflops": flops / s / 1e12 for n, s in seconds.items() if n != "moe"}
    print(name, {k: round(v, 3) for k, v in baselines.items()}, power_and_clock(), flush=True)
    what, value = f"layer_fwd/1gpu/{name}/T{PREFILL}", flops / seconds["moe"] / 1e12
    return record(what, value, "TFLOP/s", baselines, jnp.bfloat16, 1, revision)


def decode(name: str, num_tokens: int, revision: str) -> dict:
    config, args = make(SHAPES[name], num_tokens)
    hidden, inner, _, _ = SHAPES[name]
    hit = len(np.unique(np.asarray(args[1])))
    floor = hit * 3 * hidden * inner * 2 / COPY_BYTES_PER_S
    layer = lambda *a: sm.moe(*a, config=config)
    wall, seconds = timed({"moe": layer}, args, {"moe": CALLS})["moe"], device_time(layer, args, CALLS)
    print(
        f"{name} T{num_tokens}: {seconds * 1e6:.1f} us on the device, {wall * 1e6:.0f} with the host, weights of {hit} "
        f"experts {floor * 1e6:.0f} us", flush=True,
    )  # fmt: skip
    baselines = {"wall_us": wall * 1e6, "weight_read_us": floor * 1e6, "experts_hit": hit}
    return record(f"decode/1gpu/{name}/T{num_tokens}", seconds * 1e6, "us", baselines, jnp.bfloat16, 1, revision)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--stock", nargs="*", choices=STOCK, default=list(STOCK), help="baselines to time beside ours")
    parser.add_argument("--decode", nargs="*", type=int, default=DECODE, help="token counts of the decode rows")
    parser.add_argument("--no-prefill", action="store_true", help="decode rows only")
    parser.add_argument("--commit", default="", help="of the measured tree, where it is not a git checkout")
    options = parser.parse_args()
    records: list[dict] = []
    prefills = [] if options.no_prefill else list(SHAPES)
    jobs = [lambda n=name: prefill(n, options.stock, options.commit) for name in prefills]
    for name in ("qwen3-235b", "dsv3-shard", "qwen3-30b"):
        jobs += [lambda n=name, t=tokens: decode(n, t, options.commit) for tokens in options.decode]
    for job in jobs:
        records.append(job())
        options.out.write_text(json.dumps(records, indent=1) + "\n")  # what is done stays when the run is cut short
    print(f"{'name':40} {'value':>9}")
    for r in records:
        print(f"{r['name']:40} {r['value']:9.1f} {r['unit']}")


if __name__ == "__main__":
    main()
