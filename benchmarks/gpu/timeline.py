"""When each kernel of one `ep.moe` call ran on each GPU: JAX's profiler, read back and sorted into the call's phases.

Contract: run as `python benchmarks/gpu/timeline.py --out FILE` on a machine with at least two GPUs and the library
importable; writes one record `timeline/Rgpu/SHAPE/T` (us of the slowest rank's call, from its open to its close; the
sums of each rank's phases beside it) with a further key `kernels`: rank, phase, name, start_us and duration_us, from
that rank's open_call of the last complete call of the trace. Trade-off: clocks of GPUs are not compared, so a wait for
a peer shows as a long `await` or `seal` and not as an offset; and a traced call is slower than one that is not.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import ranks
from kernel_trace import CLOSE, OPEN, Kernel, read

import jax_streammoe as sm
from jax_streammoe.bench.measure import record

LAUNCHES = 4


def last_call(kernels: list[Kernel]) -> list[Kernel]:
    """From the last open_call with a close behind it to that close; empty when there is none."""
    end = next((n for n in reversed(range(len(kernels))) if kernels[n].short in CLOSE), -1)
    begin = next((n for n in reversed(range(end + 1)) if kernels[n].short == OPEN), end + 1)
    return kernels[begin : end + 1]


def rows_of(calls: list[list[Kernel]]) -> list[dict[str, Any]]:
    """The record's `kernels`."""
    us = lambda ns: round(ns / 1e3, 3)
    return [
        {
            "rank": rank, "phase": k.phase, "name": k.short, "start_us": us(k.start_ns - call[0].start_ns),
            "duration_us": us(k.duration_ns),
        }
        for rank, call in enumerate(calls) for k in call
    ]  # fmt: skip


def trace(shape: str, num_tokens: int, mesh: Any, folder: pathlib.Path) -> None:
    """LAUNCHES calls, one to a program, after as many that are not traced."""
    config, batches, experts = ranks.make(ranks.SHAPES[shape], num_tokens, mesh, 2)
    ring = sm.make_ring(config, chunk_tokens=num_tokens, num_slots=1, mesh=mesh, name=shape)
    run = ranks.ring_program(sm.expert_parallel(config, mesh=mesh))
    out = ranks.outputs(batches[:1])

    def launch(out: list, ring: Any) -> tuple[list, Any]:
        for turn in range(LAUNCHES):
            out, ring = run(out, ring, batches[turn % 2 :][:1], *experts)
        return jax.block_until_ready((out, ring))

    out, ring = launch(out, ring)
    with jax.profiler.trace(str(folder)):
        launch(out, ring)
    sm.close_ring(shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--shape", default="qwen3-30b", choices=ranks.SHAPES)
    parser.add_argument("--tokens", type=int, default=ranks.PREFILL, help="of each rank")
    parser.add_argument("--ranks", type=int, default=2, help="use the first so many devices")
    parser.add_argument("--commit", default="", help="of the measured tree, where it is not a git checkout")
    options = parser.parse_args()
    devices = jax.devices()[: options.ranks]
    mesh = jax.make_mesh((len(devices),), ("ep",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
    with tempfile.TemporaryDirectory() as folder:
        trace(options.shape, options.tokens, mesh, pathlib.Path(folder))
        calls = [last_call(kernels) for kernels in read(pathlib.Path(folder))]
    calls = calls[: mesh.size]
    if len(calls) < mesh.size or not all(calls):
        raise SystemExit(f"timeline.py: kernels of a whole call on {sum(map(bool, calls))} GPUs, want {mesh.size}")
    kernels, sums = rows_of(calls), {}
    for k in kernels:
        what = f"rank{k['rank']}_{k['phase']}_us"
        sums[what] = sums.get(what, 0.0) + k["duration_us"]
    total = max(k["start_us"] + k["duration_us"] for k in kernels)
    what = f"timeline/{mesh.size}gpu/{options.shape}/T{options.tokens}"
    result = record(what, total, "us", sums, jnp.bfloat16, mesh.size, options.commit)
    print(what, f"{total:.1f} us", result["baselines"], flush=True)
    options.out.write_text(json.dumps([result | {"kernels": kernels}], indent=1) + "\n")


if __name__ == "__main__":
    main()
