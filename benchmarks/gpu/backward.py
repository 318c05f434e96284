"""The backward of the layer inside jit on one H200: all gradients of `sm.moe`, from x, ids, weights and dy.

Contract: run as `python benchmarks/gpu/backward.py --out FILE` with the library importable; writes a list of records
`layer_bwd/1gpu/SHAPE/T8192` (or --tokens) in ms as benchmarks/README.md describes them, each with the rate by 16TKHI
(the backward with gate and up computed again) beside it, and prints a table. Gradients are checked against those of
`sm.reference` on part of the batch before anything is timed. A figure is the median over rounds of 1/n of a program of
n backwards, one after the other, on different tokens and routes; of the weight gradients a program returns a few
elements, so that n of them need the memory of one. Trade-off: `--stock` times forward and backward of ragged_dot, whose
residuals are its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from layer import PREFILL, SHAPES, make, power_and_clock

import jax_streammoe as sm
from jax_streammoe.bench.layer import ragged_dot_layer
from jax_streammoe.bench.measure import record

WARM_UP, ROUNDS, LAUNCHES, CALLS = 2, 7, 3, 4
NAMES = ("x", "topk_weights", "w_gate_up", "w_down")


def gradients(layer: Any, dy: jax.Array, x: jax.Array, ids: jax.Array, *rest: jax.Array) -> tuple:
    """Gradients of x, weights, w_gate_up, w_down; y is not computed, because nobody asks for it."""
    return jax.vjp(lambda x, *rest: layer(x, ids, *rest), x, *rest)[1](dy)


def check(config: sm.MoEConfig, args: tuple, dy: jax.Array, **options: Any) -> None:
    """On 256 tokens, against the gradients of the reference in float32. options: of `sm.moe`."""
    tokens, experts = [a[:256] for a in args[:3]], args[3:]
    ours = jax.jit(lambda *a: gradients(functools.partial(sm.moe, config=config, **options), *a))(
        dy[:256], *tokens, *experts
    )
    wide = dataclasses.replace(config, dtype=jnp.float32)
    wide_args = [a if a.dtype == jnp.int32 else a.astype(jnp.float32) for a in (dy[:256], *tokens, *experts)]
    wanted = jax.jit(lambda *a: gradients(lambda *b: sm.reference(*b, config=wide), *a))(*wide_args)
    for name, got, want in zip(NAMES, ours, wanted, strict=True):
        error = float(jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want))
        if not error < 1e-2:
            raise RuntimeError(f"{config}: d_{name} has a relative error of {error}")


def program(layer: Any) -> Any:
    """A backward per batch; the weight gradients are made in full and returned in part."""

    def run(batches: list, dy: jax.Array, *experts: jax.Array) -> list:
        out = []
        for batch in batches:
            dx, d_weights, *d_experts = gradients(layer, dy, *batch, *experts)
            out.append((dx, d_weights, [d[:1, :1, :128] for d in d_experts]))
        return out

    return jax.jit(run)


def timed(versions: dict[str, Any], args: tuple, dy: jax.Array, calls: dict[str, int]) -> dict[str, float]:
    """Median seconds of one backward of each version."""
    x, ids, weights, *experts = args
    batches = [(jnp.roll(x, n, axis=1), jnp.roll(ids, n, axis=0), weights) for n in range(max(calls.values()))]
    programs = {name: program(layer) for name, layer in versions.items()}
    launch = {name: functools.partial(run, batches[: calls[name]], dy, *experts) for name, run in programs.items()}
    return in_turns(launch, calls)


def in_turns(programs: dict[str, Callable[[], Any]], calls: dict[str, int]) -> dict[str, float]:
    """Median seconds of one of the calls that a program makes; programs alternate."""
    samples: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(WARM_UP + ROUNDS):
        for name, run in programs.items():
            launches = LAUNCHES if calls[name] > 1 else 1  # a program of one call takes seconds
            begin = time.perf_counter()
            for _ in range(launches):
                out = run()
            jax.block_until_ready(out)
            if turn >= WARM_UP:
                samples[name].append((time.perf_counter() - begin) / calls[name] / launches)
    return {name: statistics.median(s) for name, s in samples.items()}


def measure(name: str, tokens: int, stock: bool, verify: bool, revision: str) -> dict:
    config, args = make(SHAPES[name], tokens)
    dy = jax.random.normal(jax.random.key(5), args[0].shape, jnp.bfloat16)
    if verify:
        check(config, args, dy)
    hidden, inner, _, top_k = SHAPES[name]
    versions, calls = {"moe": lambda *a: sm.moe(*a, config=config)}, {"moe": CALLS}
    if stock:
        versions["ragged_dot"], calls["ragged_dot"] = ragged_dot_layer, 1
    try:
        seconds = timed(versions, args, dy, calls)
    except jax.errors.JaxRuntimeError as error:  # what stock parts need of memory is no reason not to measure ours
        if not stock:
            raise
        print(f"{name}: no baseline: {str(error)[:200]}", flush=True)
        seconds = timed({"moe": versions["moe"]}, args, dy, calls)
    baselines = {"tflops_16TKHI": 16 * tokens * top_k * hidden * inner / seconds["moe"] / 1e12}
    baselines |= {f"{n}_fwd_bwd_ms": s * 1e3 for n, s in seconds.items() if n != "moe"}
    print(name, f"{seconds['moe'] * 1e3:.3f} ms", {k: round(v, 2) for k, v in baselines.items()}, power_and_clock())
    return record(f"layer_bwd/1gpu/{name}/T{tokens}", seconds["moe"] * 1e3, "ms", baselines, jnp.bfloat16, 1, revision)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=PREFILL, help="T")
    parser.add_argument("--stock", action="store_true", help="time forward and backward of ragged_dot beside ours")
    parser.add_argument("--no-check", action="store_true", help="the reference needs float32 copies of the weights")
    parser.add_argument("--commit", default="", help="of the measured tree, where it is not a git checkout")
    options = parser.parse_args()
    records: list[dict] = []
    for name in options.shapes:
        records.append(measure(name, options.tokens, options.stock, not options.no_check, options.commit))
        options.out.write_text(json.dumps(records, indent=1) + "\n")  # what is done stays when the run is cut short


if __name__ == "__main__":
    main()
