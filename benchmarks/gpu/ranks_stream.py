"""What streaming costs and gains over the GPUs of one host: `ep.stream` against the producer and then `ep.moe`.

Contract: run as `python benchmarks/gpu/ranks_stream.py --out FILE` on a machine with at least two GPUs and the library
importable; writes the records `stream/Rgpu/SHAPE/T8192/PRODUCER/nN` (T tokens per rank) in the form of stream.py, whose
producers and inputs these are. T_b is the producer and `ep.moe` on a ring of one slot, T_s the streamed call; streamed
results are compared with T_b's before they are timed. Launches donate rings and outputs to the next one, see ranks.py.
PRODUCER-late is the same with rank 0 about 0.3 ms behind the others: its producer waits for work of its own, a layer
whose routes are masked on the other ranks. It is not a `lax.cond`, whose predicate XLA reads on the host unless a
command buffer holds the cond: the host would wait for the device in the middle of a step.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from stream import ROUNDS, WARM_UP, Case, check, power_and_clock, take_turns

import jax_streammoe as sm
from jax_streammoe.bench.measure import record

NUM_TOKENS = 8192
LATE_MS, LATE_TOKENS, LATE_CALLS = 0.3, 8192, 8
LATE_CONFIG = sm.MoEConfig(4, 1, 2048, 2048, dtype=jnp.bfloat16)  # 8192 tokens: 2e11 flop, about 0.3 ms


class Late(NamedTuple):
    """The work of a late rank: tokens, experts, and who is late (-1: nobody)."""

    x: jax.Array
    w_gate_up: jax.Array
    w_down: jax.Array
    rank: jax.Array


def delay(mesh: Any, params: tuple, late: Late | None, shift: int = 0) -> tuple:
    """Producer parameters that rank `late.rank` has only after a layer; their values are the same.

    It is the last one, the norm's scale, because tokens and routes both wait for it.
    """
    if late is None:
        return params

    def rank(scale: jax.Array, late: Late) -> jax.Array:
        x = jnp.roll(late.x, shift, axis=0)
        ids = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None] % LATE_CONFIG.num_experts
        ids = jnp.where(jax.lax.axis_index("ep") == late.rank, ids, -1)
        weights = jnp.ones(ids.shape, jnp.float32)
        y = sm.moe(x, ids, weights, late.w_gate_up, late.w_down, config=LATE_CONFIG)
        return scale + y[0, :1] * jnp.bfloat16(1e-30)  # below the last bit of a scale of 1

    run = jax.shard_map(rank, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return *params[:-1], run(params[-1], late)


def make_late(mesh: Any, params: tuple) -> tuple[Late, float]:
    """The work, sized to LATE_MS, and the milliseconds that it does take."""
    keys = jax.random.split(jax.random.key(7), 3)
    hidden, inner, experts = LATE_CONFIG.hidden, LATE_CONFIG.intermediate, LATE_CONFIG.num_experts

    def normal(key: Any, dims: tuple[int, ...], depth: int) -> jax.Array:
        draw = lambda: jax.random.normal(key, dims, jnp.bfloat16) * jnp.bfloat16(depth**-0.5)
        return jax.jit(draw, out_shardings=NamedSharding(mesh, P()))()

    def work(num_tokens: int, rank: int) -> Late:
        where = jax.device_put(jnp.int32(rank), NamedSharding(mesh, P()))
        experts_ = (
            normal(keys[1], (experts, hidden, 2 * inner), hidden),
            normal(keys[2], (experts, inner, hidden), inner),
        )
        return Late(normal(keys[0], (num_tokens, hidden), 1), *experts_, where)

    def several(params: tuple, late: Late) -> tuple:
        for n in range(LATE_CALLS):
            params = delay(mesh, params, late, n)
        return params

    def milliseconds(num_tokens: int) -> float:
        """Of one delay, without what the masked call costs the others."""
        run, medians = jax.jit(several), []
        for late in (work(num_tokens, 0), work(num_tokens, -1)):
            times = []
            for _ in range(WARM_UP + ROUNDS):
                begin = time.perf_counter()
                jax.block_until_ready(run(params, late))
                times.append((time.perf_counter() - begin) / LATE_CALLS * 1e3)
            medians.append(statistics.median(times[WARM_UP:]))
        return medians[0] - medians[1]

    num_tokens = max(128, round(LATE_TOKENS * LATE_MS / max(milliseconds(LATE_TOKENS), 1e-3) / 128) * 128)
    return work(num_tokens, 0), milliseconds(num_tokens)


class RankCase(Case):
    """A case of stream.py over the ranks of a mesh, perhaps with a late one."""

    def __init__(self, name: str, producer: str, mesh: Any, late: Late | None):
        super().__init__(name, NUM_TOKENS, producer, mesh)
        self.layer, self.late = sm.expert_parallel(self.config, mesh=mesh), late

    def produce_late(self, inputs: jax.Array, params: tuple, late: Late | None) -> tuple:
        run = jax.shard_map(self.produce, mesh=self.mesh, in_specs=(P("ep"), P()), out_specs=P("ep"), check_vma=False)
        return run(inputs, delay(self.mesh, params, late))

    def batch_on_ring(
        self, out: Any, ring: Any, inputs: jax.Array, params: tuple, experts: tuple, late: Late | None
    ) -> tuple:
        y, ring, _ = self.layer.moe(*self.produce_late(inputs, params, late), *experts, ring=ring)
        return y, ring

    def stream_on_ring(
        self, chunks: Any, policy: str, out: Any, ring: Any, inputs: jax.Array, params: tuple, experts: tuple,
        late: Late | None,
    ) -> tuple:  # fmt: skip
        y, ring, _ = self.layer.stream(
            inputs[:, 0], self.route, *experts, ring=ring, route_args=delay(self.mesh, params, late),
            token_args=(inputs,), chunks=chunks, policy=policy,
        )  # fmt: skip
        return y, ring


class Version:
    """A step and what its launches hand on: the ring and the output."""

    def __init__(self, case: RankCase, step: Any, ring: Any, batches: list):
        self.run = jax.jit(step, donate_argnums=(0, 1), keep_unused=True)
        self.args, self.batches = (case.params, case.experts, case.late), batches
        self.state = (jnp.zeros_like(case.inputs[:, 0]), ring)

    def __call__(self, turn: int) -> jax.Array:
        self.state = self.run(*self.state, self.batches[turn % len(self.batches)], *self.args)
        return self.state[0]


def measure(case: RankCase, chunks: list[Any], policy: str) -> dict[str, float]:
    """Median seconds per version; the ring of T_b lives beside one other."""
    batches = [case.inputs]
    if case.inputs.nbytes / case.mesh.size < 2**33:
        batches.append(jnp.roll(case.inputs, 1, axis=2))
    produce = jax.jit(case.produce_late)
    batch_ring = sm.make_ring(
        case.config, chunk_tokens=NUM_TOKENS, num_slots=1, mesh=case.mesh, name=f"{case.name}/batch"
    )
    versions: dict[str, Any] = {
        "P": lambda turn: produce(batches[turn % len(batches)], case.params, case.late),
        "T_b": Version(case, case.batch_on_ring, batch_ring, batches),
    }
    del batch_ring
    samples: dict[str, list[float]] = {}
    want = jnp.copy(versions["T_b"](0))
    take_turns(versions, samples)
    for n in chunks:
        ring = case.ring(n)
        step = functools.partial(case.stream_on_ring, n, policy)
        streamed = Version(case, step, ring, batches)
        del ring
        for _ in range(2):
            check(case, f"n{n}", streamed(0), want)
        # T_b in turn with every version, so that each ratio is of neighbours in time.
        take_turns({f"n{n}": streamed, f"T_b n{n}": versions["T_b"]}, samples)
        streamed.state = (None, None)
    sm.close_ring(f"{case.name}/batch")
    sm.close_ring(f"{case.name}/{case.num_tokens}")
    return {name: statistics.median(s) for name, s in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--shapes", nargs="*", default=["qwen3-30b", "qwen3-235b", "mixtral-8x7b"])
    parser.add_argument("--producers", nargs="*", default=["router", "reader", "router-late", "reader-late"])
    parser.add_argument("--chunks", nargs="*", default=["1", "2", "4", "auto"])
    parser.add_argument("--policy", default="overlap")
    parser.add_argument("--ranks", type=int, help="use the first so many devices; all by default")
    parser.add_argument("--commit", default="", help="of the measured tree, where it is not a git checkout")
    options = parser.parse_args()
    devices = jax.devices()[: options.ranks]
    mesh = jax.make_mesh((len(devices),), ("ep",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
    chunks = [n if n == "auto" else int(n) for n in options.chunks]
    late: tuple[Late | None, float] = (None, 0.0)
    if any(p.endswith("-late") for p in options.producers):
        whole = NamedSharding(mesh, P())
        late = make_late(mesh, (jax.device_put(jnp.ones((256,), jnp.bfloat16), whole),))
        print(f"a late rank is {late[1]:.3f} ms late", flush=True)
    records: list[dict] = []
    for name in options.shapes:
        for producer in options.producers:
            is_late = producer.endswith("-late")
            case = RankCase(name, producer.removesuffix("-late"), mesh, late[0] if is_late else None)
            seconds = measure(case, chunks, options.policy)
            p = seconds["P"]
            line = f"{name} T{NUM_TOKENS} {producer}: P {p * 1e3:.3f} T_b {seconds['T_b'] * 1e3:.3f} ms"
            for n in chunks:
                t_s, t_b = seconds[f"n{n}"], seconds[f"T_b n{n}"]
                line += f" | n{n} {t_s / t_b:.3f}"
                baselines = {"T_s_ms": t_s * 1e3, "T_b_ms": t_b * 1e3, "P_ms": p * 1e3, "gain_over_P": (t_b - t_s) / p}
                if is_late:
                    baselines["late_ms"] = late[1]
                what = f"stream/{mesh.size}gpu/{name}/T{NUM_TOKENS}/{producer}/n{n}"
                records.append(record(what, t_s / t_b, "T_s/T_b", baselines, jnp.bfloat16, mesh.size, options.commit))
            print(line, power_and_clock(), flush=True)
            options.out.write_text(json.dumps(records, indent=1) + "\n")
            del case


if __name__ == "__main__":
    main()
