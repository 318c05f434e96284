"""What streaming costs and gains on one GPU: streamed calls against producer-then-layer, same run.

Contract: run as `python benchmarks/gpu/stream.py --out FILE` with the library importable; writes the records
`stream/1gpu/SHAPE/T/PRODUCER/nN` that benchmarks/README.md describes and prints a table. P is the producer alone, T_b
the producer and then `sm.moe`, T_s the streamed call, each one program; a figure is the median over rounds in which a
version and T_b take turns, each timed as one of several launches in a row on different tokens. The streamed result is
compared with T_b's before it is timed (tests/gpu compares bits). Producers: `router` (norm, router product, softmax,
top-k, layout), and `reader`, the router behind a sum over so many inputs that it takes a quarter of the layer's time.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import pathlib
import statistics
import subprocess
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_streammoe as sm
from jax_streammoe import costs
from jax_streammoe.bench.measure import record

# name -> hidden, intermediate, experts on this GPU, top_k
SHAPES = {
    "qwen3-30b": (2048, 768, 128, 8),
    "qwen3-235b": (4096, 1536, 128, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "dsv3-shard": (7168, 2048, 32, 8),
}
LAYER_TFLOPS = 6.0e14  # only to size the reader
READ_BYTES_PER_S = 4.0e12
WARM_UP, ROUNDS, LAUNCHES = 1, 7, 4


class Case:
    """One shape, token count and producer: functions for P, T_b and every n, and their inputs.

    With a mesh (of the one axis "ep") every rank has num_tokens tokens and its part of the experts.
    """

    def __init__(self, name: str, num_tokens: int, producer: str, mesh: Any = None):
        hidden, inner, experts, top_k = SHAPES[name]
        self.config = sm.MoEConfig(experts, top_k, hidden, inner, dtype=jnp.bfloat16)
        self.name, self.num_tokens, self.producer, self.mesh = name, num_tokens, producer, mesh
        split, whole = (NamedSharding(mesh, P("ep")), NamedSharding(mesh, P())) if mesh else (None, None)
        total = num_tokens * (mesh.size if mesh else 1)
        keys = jax.random.split(jax.random.key(num_tokens), 5)

        def normal(key: Any, dims: tuple[int, ...], depth: int, sharding: Any = split) -> jax.Array:
            draw = lambda: jax.random.normal(key, dims, jnp.bfloat16) * jnp.bfloat16(depth**-0.5)
            return jax.jit(draw, out_shardings=sharding)()

        seconds = 6 * num_tokens * top_k * hidden * inner / LAYER_TFLOPS
        copies = max(1, round(0.25 * seconds * READ_BYTES_PER_S / (num_tokens * hidden * 2)))
        self.copies = copies if producer == "reader" else 0
        scales = normal(keys[4], (1, max(self.copies, 1), 1), 1, whole)
        self.inputs = jax.jit(jnp.multiply, out_shardings=split)(normal(keys[0], (total, 1, hidden), 1), scales)
        # Routers start near uniform: a small spread, so that experts are loaded alike but at random.
        scale = jax.device_put(jnp.ones((hidden,), jnp.bfloat16), whole)
        self.params = (normal(keys[1], (hidden, experts), 4 * hidden, whole), scale)
        self.experts = (
            normal(keys[2], (experts, hidden, 2 * inner), hidden), normal(keys[3], (experts, inner, hidden), inner),
        )  # fmt: skip
        self.rings: dict[Any, Any] = {}

    def route(self, x: jax.Array, inputs: jax.Array, w_router: jax.Array, scale: jax.Array) -> sm.Routed:
        h = jnp.sum(inputs.astype(jnp.float32), axis=1) if self.copies else x.astype(jnp.float32)
        h = h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-6)
        h = (h * scale.astype(jnp.float32)[None]).astype(jnp.bfloat16)
        logits = jnp.dot(h, w_router, preferred_element_type=jnp.float32)
        return sm.route_topk(logits, self.config)._replace(x=h)

    def produce(self, inputs: jax.Array, params: tuple) -> tuple:
        routed = self.route(inputs[:, 0], inputs, *params)
        return routed.x, routed.ids, routed.weights

    def batch(self, inputs: jax.Array, params: tuple, experts: tuple) -> jax.Array:
        return sm.moe(*self.produce(inputs, params), *experts, config=self.config)

    def stream(self, chunks: Any, policy: str, inputs: jax.Array, params: tuple, experts: tuple, ring: Any) -> tuple:
        y, ring, _ = sm.stream_moe(
            inputs[:, 0], self.route, *experts, ring=ring, config=self.config, route_args=params, token_args=(inputs,),
            chunks=chunks, policy=policy,
        )  # fmt: skip
        return y, ring

    def ring(self, chunks: Any) -> Any:
        n = 2 if chunks == "auto" else chunks  # what "auto" would cut: it may also take the batch-ready call
        return sm.make_ring(
            self.config, chunk_tokens=-(-self.num_tokens // n), num_slots=n, mesh=self.mesh,
            name=f"{self.name}/{self.num_tokens}",
        )  # fmt: skip


def versions_of(case: Case, chunks: list[Any], policy: str) -> dict[str, Any]:
    """Version name -> function of a turn number that launches it."""
    args = (case.params, case.experts)
    lowered = {
        "P": jax.jit(case.produce).lower(case.inputs, case.params),
        "T_b": jax.jit(case.batch).lower(case.inputs, *args),
    }
    for n in chunks:
        ring = case.ring(n)  # the spec is what is compiled for; a ring of this name is made again below
        function = jax.jit(functools.partial(case.stream, n, policy), donate_argnums=3)
        lowered[f"n{n}"] = function.lower(case.inputs, *args, ring)
        del ring
    side_by_side = 8 if case.inputs.nbytes < 2**32 else 1  # XLA tunes a program on inputs of its own
    with concurrent.futures.ThreadPoolExecutor(side_by_side) as pool:
        compiled = dict(zip(lowered, pool.map(lambda low: low.compile(), lowered.values()), strict=True))
    batches = [case.inputs, jnp.roll(case.inputs, 1, axis=0) if case.inputs.nbytes < 2**33 else case.inputs]
    runs = {
        "P": lambda turn: compiled["P"](batches[turn % 2], case.params),
        "T_b": lambda turn: compiled["T_b"](batches[turn % 2], *args),
    }
    for n in chunks:

        def run(turn: int, n: Any = n) -> jax.Array:
            y, case.rings[n] = compiled[f"n{n}"](batches[turn % 2], *args, case.rings[n])
            return y

        runs[f"n{n}"] = run
    return runs


def measure(case: Case, chunks: list[Any], policy: str) -> dict[str, float]:
    """Median seconds per version; one ring at a time lives."""
    runs = versions_of(case, chunks, policy)
    want = runs["T_b"](0)
    samples: dict[str, list[float]] = {}
    for name, run in runs.items():
        # T_b in turn with every version, so that each ratio is of neighbours in time.
        pair = {name: run} if name in ("P", "T_b") else {name: run, f"T_b {name}": runs["T_b"]}
        if name.startswith("n"):
            n = name[1:] if name == "nauto" else int(name[1:])
            case.rings = {n: case.ring(n)}
            for _ in range(2):
                check(case, name, run(0), want)
        take_turns(pair, samples)
        case.rings = {}
    return {name: statistics.median(s) for name, s in samples.items()}


def take_turns(versions: dict[str, Any], samples: dict[str, list[float]]) -> None:
    """Appends seconds per launch to `samples`, by version; versions alternate."""
    for turn in range(WARM_UP + ROUNDS):
        for which, version in versions.items():
            begin = time.perf_counter()
            for launch in range(LAUNCHES):
                out = version(launch)
            jax.block_until_ready(out)
            if turn >= WARM_UP:
                samples.setdefault(which, []).append((time.perf_counter() - begin) / LAUNCHES)


@jax.jit
def difference(got: jax.Array, want: jax.Array) -> jax.Array:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.linalg.norm(got - want) / jnp.linalg.norm(want)


def check(case: Case, name: str, got: jax.Array, want: jax.Array) -> None:
    """Bits of XLA's router product depend on its rows: a few tokens change experts, the rest differ by roundings."""
    error = float(difference(got, want))
    if not error < 0.05:
        raise RuntimeError(f"{case.name}: {name} differs from the batch-ready result by {error}")


def power_and_clock() -> str:
    query = ["nvidia-smi", "--query-gpu=power.draw,clocks.sm", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--tokens", nargs="*", type=int, default=[8192, 32768])
    parser.add_argument("--producers", nargs="*", default=["router", "reader"])
    parser.add_argument("--chunks", nargs="*", default=["1", "2", "4", "8", "16", "auto"])
    parser.add_argument("--policy", default="overlap")
    parser.add_argument("--commit", default="", help="of the measured tree, where it is not a git checkout")
    parser.add_argument("--producer-sms", type=int, help="instead of the cost model's")
    options = parser.parse_args()
    if options.producer_sms is not None:
        costs.OVERLAPPED = dataclasses.replace(costs.OVERLAPPED, producer_sms=options.producer_sms)
    chunks = [n if n == "auto" else int(n) for n in options.chunks]
    records: list[dict] = []
    for name in options.shapes:
        for num_tokens in options.tokens:
            for producer in options.producers:
                case = Case(name, num_tokens, producer)
                seconds = measure(case, chunks, options.policy)
                p = seconds["P"]
                line = f"{name} T{num_tokens} {producer}: P {p * 1e3:.3f} T_b {seconds['T_b'] * 1e3:.3f} ms"
                for n in chunks:
                    t_s, t_b = seconds[f"n{n}"], seconds[f"T_b n{n}"]
                    line += f" | n{n} {t_s / t_b:.3f}"
                    baselines = {
                        "T_s_ms": t_s * 1e3, "T_b_ms": t_b * 1e3, "P_ms": p * 1e3, "gain_over_P": (t_b - t_s) / p,
                    }  # fmt: skip
                    what = f"stream/1gpu/{name}/T{num_tokens}/{producer}/n{n}"
                    records.append(record(what, t_s / t_b, "T_s/T_b", baselines, jnp.bfloat16, 1, options.commit))
                print(line, power_and_clock(), flush=True)
                options.out.write_text(json.dumps(records, indent=1) + "\n")
                del case


if __name__ == "__main__":
    main()
