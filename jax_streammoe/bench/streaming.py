"""What streaming costs when nothing overlaps, and what it gives when producer and layer have a core each.

Contract: `stream_serial` runs here. `stream_overlap` needs a process of its own, in which XLA and the layer have one
thread each (with both on all cores there is nothing to gain): `measure_overlap` is what runs there, started by
`python -m jax_streammoe.bench.overlap`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..api import moe
from ..ring import close_ring, make_ring
from ..routing import Routed, route_topk
from ..stream import stream_moe
from .measure import alternate, layer_arguments, layer_config, record, run_module
from .shapes import CPU_STREAM, STREAM_CHUNKS

ONE_THREAD = {"PJRT_NPROC": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "JAX_PLATFORMS": "cpu"}


class _Bench:
    """One stream problem: a ring, and jitted versions of the layer with a producer of `length` matmuls."""

    def __init__(self, name: str, threads: int | None = None):
        shape = CPU_STREAM
        self.config = layer_config(shape, jnp.float32)
        self.x, self.ids, self.weights, *experts = layer_arguments(shape, jnp.float32)
        self.experts = tuple(experts)
        rng = np.random.default_rng(2)
        # A rotation: a chain of any length neither grows nor vanishes.
        rotation = np.linalg.qr(rng.standard_normal((shape.hidden, shape.hidden)))[0]
        self.rotation = jnp.asarray(rotation, jnp.float32)
        self.w_router = jnp.asarray(rng.standard_normal((shape.hidden, shape.experts)), jnp.float32)
        chunk_tokens = shape.tokens // STREAM_CHUNKS
        self.ring: Any = make_ring(
            self.config, chunk_tokens=chunk_tokens, num_slots=STREAM_CHUNKS, name=name, threads=threads
        )

    def route(self, x: jax.Array, rotation: jax.Array, w_router: jax.Array, length: jax.Array) -> Routed:
        """The producer: `length` matmuls, then the router."""
        h = jax.lax.fori_loop(0, length, lambda _, h: h @ rotation, x)
        return route_topk(h @ w_router, self.config)

    def producer(self, length: int) -> Callable[[], Any]:
        """The producer alone, chunk by chunk as in the stream."""
        tokens = CPU_STREAM.tokens // STREAM_CHUNKS

        @jax.jit
        def run(x: jax.Array, length: jax.Array) -> list[Routed]:
            starts = range(0, CPU_STREAM.tokens, tokens)
            return [self.route(x[s : s + tokens], self.rotation, self.w_router, length) for s in starts]

        return lambda: run(self.x, jnp.int32(length))

    def streamed(self, policy: str, length: int) -> Callable[[], Any]:
        """Route and layer in chunks."""

        @functools.partial(jax.jit, donate_argnames="ring")
        def run(x: jax.Array, ring: Any, length: jax.Array) -> tuple[jax.Array, Any]:
            y, ring, _ = stream_moe(
                x, self.route, *self.experts, ring=ring, config=self.config, policy=policy, chunks=STREAM_CHUNKS,
                route_args=(self.rotation, self.w_router, length),
            )  # fmt: skip
            return y, ring

        def call() -> jax.Array:
            y, self.ring = jax.block_until_ready(run(self.x, self.ring, jnp.int32(length)))
            return y

        return call

    def batch_ready(self, length: int) -> Callable[[], Any]:
        """Route everything, then the layer."""

        @jax.jit
        def run(x: jax.Array, length: jax.Array) -> jax.Array:
            routed = self.route(x, self.rotation, self.w_router, length)
            return moe(x, routed.ids, routed.weights, *self.experts, config=self.config)

        return lambda: run(self.x, jnp.int32(length))


def stream_serial(rounds: int = 15) -> dict:
    """Record cpu/stream_serial: time of four chunks under "serial" over the batch-ready call, router included."""
    bench = _Bench("bench_serial")
    try:
        streamed, ready = bench.streamed("serial", 0), bench.batch_ready(0)
        _check_same(streamed(), ready())
        times = alternate({"streamed": streamed, "batch_ready": ready}, rounds=rounds)
    finally:
        close_ring(bench.ring)
    streamed_t, ready_t = times["streamed"], times["batch_ready"]
    baselines = {
        "streamed_ms": streamed_t.wall_s * 1e3, "batch_ready_ms": ready_t.wall_s * 1e3,
        "ratio_in_cpu_time": streamed_t.cpu_s / ready_t.cpu_s,
    }  # fmt: skip
    return record("cpu/stream_serial", streamed_t.wall_s / ready_t.wall_s, "ratio", baselines, jnp.float32)


def stream_overlap() -> dict:
    """Record cpu/stream_overlap: time under "overlap" over time under "serial"; producer and layer cost the same."""
    times = run_module("jax_streammoe.bench.overlap", ONE_THREAD)
    return record("cpu/stream_overlap", times["overlap_ms"] / times["serial_ms"], "ratio", times, jnp.float32)


def measure_overlap(rounds: int = 9) -> dict[str, float]:
    """Median milliseconds of the producer, the layer, and both, serial and overlapped; runs with ONE_THREAD."""
    bench = _Bench("bench_overlap", threads=1)
    probe = 16
    times = alternate(
        {"layer": bench.streamed("serial", 0), "short": bench.producer(0), "long": bench.producer(probe)}, rounds=5
    )
    cpu = {name: t.cpu_s for name, t in times.items()}  # one thread each: processor time is undisturbed wall time
    length = max(1, round((cpu["layer"] - cpu["short"]) / (cpu["long"] - cpu["short"]) * probe))
    versions = {
        "producer": bench.producer(length), "layer": bench.streamed("serial", 0),
        "serial": bench.streamed("serial", length), "overlap": bench.streamed("overlap", length),
    }  # fmt: skip
    _check_same(versions["overlap"](), versions["serial"]())
    times = alternate(versions, rounds=rounds)
    close_ring(bench.ring)
    result = {f"{name}_ms": t.wall_s * 1e3 for name, t in times.items()}
    # Chunk n+1 is produced while chunk n is computed: n + 1 of 2n steps remain.
    return result | {"matmuls": length, "ideal_ratio": (STREAM_CHUNKS + 1) / (2 * STREAM_CHUNKS)}


def _check_same(a: jax.Array, b: jax.Array) -> None:
    if not np.array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32)):
        raise RuntimeError("streamed and batch-ready results differ: nothing is timed")
