"""A CUDA kernel as the producer of a streamed layer: each chunk is one router product and one launch of producer.cu,
which norms, routes, lays out and publishes it while the experts have the chunks before.

Run on a GPU with nvcc on PATH: `python examples/cuda_producer/fused_producer.py`. It builds the library, compares the
streamed layer with `sm.moe` on the same rows and routes bit for bit, and times it against the same kernel with `sm.moe`
behind it. The gain of the norm is folded into the router's weights, so that the product reads x as it is and the
kernel's factor 1 / rms finishes rows and logits alike.

A chunk without tokens is produced and published like any other: the kernel writes nothing and stores the words.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_streammoe as sm

HERE = pathlib.Path(__file__).resolve().parent
INTO_RING, INTO_ARRAYS = "example_fused_producer_v1", "example_fused_producer_arrays_v1"
SYMBOLS = {INTO_RING: "FusedProducer", INTO_ARRAYS: "FusedProducerArrays"}
ROUTE, LAYOUT = 1, 2  # the halves of a chunk
EPSILON = 1e-6


def library(folder: pathlib.Path = HERE) -> pathlib.Path:
    """Returns the compiled producer in `folder`; builds it when it is missing or older than what it is made of."""
    path, script = folder / "fused_producer.so", HERE / "build.sh"
    made_of = [HERE / "producer.cu", script, *pathlib.Path(sm.include_dir(), "protocol").iterdir()]
    if not path.exists() or path.stat().st_mtime < max(source.stat().st_mtime for source in made_of):
        subprocess.run(["sh", script, path, sm.include_dir(), jax.ffi.include_dir()], check=True)
    return path


@functools.cache
def register(path: pathlib.Path) -> None:
    """Makes the handlers of the compiled producer known to JAX, once a process."""
    handlers = ctypes.CDLL(str(path))
    for target, symbol in SYMBOLS.items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(handlers, symbol)), platform="CUDA")


def produce(
    mem: jax.Array, ring: sm.Ring, chunk: int, x: jax.Array, logits: jax.Array, scale: jax.Array, num_valid: jax.Array,
    *, normalize: bool = True, halves: int = ROUTE | LAYOUT,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Produces and publishes a chunk of an open stream -> mem, ids [c, K] int32, weights [c, K] float32.

    Arguments:
      mem: uint8 [1, bytes], the stream's, returned in place. ring: the one that open_stream was given.
      x: [c, H], the tokens of the chunk. logits: float32 [c, E]. scale: [H], or [1] for rows as they are.
      num_valid: int32 [], tokens of the call that exist; later ones take no expert.
      normalize: weights of a token sum to one. halves: what is published; for tests of what happens else.
    """
    shape = (x.shape[0], ring.spec.config.top_k)
    results = (
        jax.ShapeDtypeStruct(mem.shape, mem.dtype), jax.ShapeDtypeStruct(shape, jnp.int32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    )  # fmt: skip
    call = jax.ffi.ffi_call(INTO_RING, results, input_output_aliases={0: 0})
    out = call(
        mem, x, logits, scale, num_valid, ring=sm.ring_attributes(ring), chunk=np.int64(chunk),
        epsilon=np.float32(EPSILON), normalize=np.int32(normalize), halves=np.int32(halves),
    )  # fmt: skip
    # XLA:GPU folds an update of a larger array into the call that makes the part, and would then call it twice or put
    # the ring elsewhere. A barrier over all results keeps it out.
    return tuple(lax.optimization_barrier(out))


def produce_arrays(
    x: jax.Array, logits: jax.Array, scale: jax.Array, num_valid: jax.Array, *, top_k: int, normalize: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same rows and routes without a ring, for sm.moe -> rows [T, H], ids [T, K], weights [T, K]."""
    shape, normed = (x.shape[0], top_k), scale.shape[0] > 1
    results = (
        jax.ShapeDtypeStruct(x.shape if normed else (1,), x.dtype), jax.ShapeDtypeStruct(shape, jnp.int32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    )  # fmt: skip
    call = jax.ffi.ffi_call(INTO_ARRAYS, results)
    out = call(x, logits, scale, num_valid, epsilon=np.float32(EPSILON), normalize=np.int32(normalize))
    rows, ids, weights = lax.optimization_barrier(out)
    return rows if normed else x, ids, weights


def fold(w_router: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the router's weights [H, E] with the norm's gain in them; scale [1] leaves them alone."""
    if scale.shape[0] == 1:
        return w_router
    return (w_router.astype(jnp.float32) * scale.astype(jnp.float32)[:, None]).astype(w_router.dtype)


def router_product(x: jax.Array, w_router: jax.Array) -> jax.Array:
    """Returns logits, float32 [c, E]; of a norm the factor 1 / rms is left to the kernel."""
    return jnp.dot(x, w_router, preferred_element_type=jnp.float32)


@functools.partial(jax.jit, static_argnames=("config", "chunks", "policy", "halves"), donate_argnames="ring")
def streamed(
    x: jax.Array, w_router: jax.Array, scale: jax.Array, num_valid: jax.Array, experts: tuple, ring: sm.Ring, *,
    config: sm.MoEConfig, chunks: Any, policy: str = "overlap", halves: int = ROUTE | LAYOUT,
) -> tuple[jax.Array, sm.Ring, jax.Array, jax.Array]:  # fmt: skip
    """The layer with the kernel as its producer, chunk by chunk -> y [T, H], ring, ids [T, K], weights [T, K].

    x [T, H], w_router [H, E] folded, experts (w_gate_up [E, H, 2I], w_down [E, I, H]). The ring must hold all tokens.
    """
    # record=False: the library cannot see what a kernel publishes. For gradients give close_stream the whole arrays.
    s = sm.open_stream(ring, *experts, config=config, num_tokens=len(x), chunks=chunks, policy=policy, record=False)
    routes = []
    for n in range(s.num_chunks):
        # This chunk's router runs after the last publication: XLA would otherwise run all routers first.
        x, mem = lax.optimization_barrier((x, s.mem))
        x_c = x[slice(*s.chunk_bounds(n))]
        mem, *route = produce(mem, ring, n, x_c, router_product(x_c, w_router), scale, num_valid, halves=halves)
        s = sm.publish_external(s, n, mem)
        routes.append(route)
    y, ring, _ = sm.close_stream(s)
    ids, weights = (jnp.concatenate(parts) for parts in zip(*routes, strict=True))
    return y, ring, ids, weights


@functools.partial(jax.jit, static_argnames="config")
def batch_ready(
    x: jax.Array, w_router: jax.Array, scale: jax.Array, num_valid: jax.Array, experts: tuple, *, config: sm.MoEConfig
) -> jax.Array:
    """The same kernel over all tokens and the layer behind it -> y [T, H]."""
    logits = router_product(x, w_router)
    return sm.moe(*produce_arrays(x, logits, scale, num_valid, top_k=config.top_k), *experts, config=config)


@functools.partial(jax.jit, static_argnames="config")
def same_routes(
    x: jax.Array, scale: jax.Array, ids: jax.Array, weights: jax.Array, experts: tuple, *, config: sm.MoEConfig
) -> jax.Array:
    """`sm.moe` of the rows that the kernel makes of x, on given routes -> y [T, H]."""
    no_logits = jnp.zeros((len(x), config.num_experts), jnp.float32)
    rows, *_ = produce_arrays(x, no_logits, scale, jnp.int32(len(x)), top_k=config.top_k)
    return sm.moe(rows, ids, weights, *experts, config=config)


def milliseconds(versions: dict[str, Any], rounds: int = 9, launches: int = 5) -> dict[str, float]:
    """Median time of a launch, versions in turns so that a slow moment hits all of them."""
    samples: dict[str, list[float]] = {name: [] for name in versions}
    for turn in range(rounds + 2):  # two to warm up
        for name, version in versions.items():
            begin = time.perf_counter()
            for _ in range(launches):
                out = version()
            jax.block_until_ready(out)
            if turn >= 2:
                samples[name].append((time.perf_counter() - begin) / launches * 1e3)
    return {name: statistics.median(values) for name, values in samples.items()}


def main() -> int:
    """Compares and times; returns 1 when a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in dict(tokens=8192, hidden=2048, intermediate=768, experts=128, top_k=8, chunks=4).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--library", type=pathlib.Path, help="compiled by build.sh; without it, it is built here")
    parser.add_argument("--no-norm", action="store_true", help="publish the rows as they are")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit(f"this example is a CUDA kernel, JAX found only {jax.devices()}")
    register(options.library or library())

    T, H, I, E, K = options.tokens, options.hidden, options.intermediate, options.experts, options.top_k
    config = sm.MoEConfig(E, K, H, I, dtype=jnp.bfloat16)
    keys = jax.random.split(jax.random.key(0), 5)
    normal = lambda key, shape, depth: jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(depth**-0.5)
    x = normal(keys[0], (T, H), 1)
    scale = jnp.ones((1,), jnp.bfloat16) if options.no_norm else 1 + normal(keys[4], (H,), 100)
    w_router = fold(normal(keys[1], (H, E), H), scale)
    experts = (normal(keys[2], (E, H, 2 * I), H), normal(keys[3], (E, I, H), I))
    num_valid = jnp.int32(T)

    chunk_tokens = -(-T // options.chunks)
    ring = sm.make_ring(config, chunk_tokens=chunk_tokens, num_slots=options.chunks, name="fused_producer")
    stream = functools.partial(streamed, config=config, chunks=options.chunks)
    y, ring, ids, weights = stream(x, w_router, scale, num_valid, experts, ring)
    wanted = same_routes(x, scale, ids, weights, experts, config=config)
    same = np.array_equal(np.asarray(y).view(np.uint16), np.asarray(wanted).view(np.uint16))
    print("same bits as sm.moe on the same rows and routes:", same)
    rows, *_ = produce_arrays(x, router_product(x, w_router), scale, num_valid, top_k=K)
    plain = sm.route_topk(router_product(rows, normal(keys[1], (H, E), H)), config)
    # Near ties go either way: the plain router rounds its rows first, and has all tokens in one product.
    print(f"routes as sm.route_topk chooses them: {np.mean(np.asarray(plain.ids) == np.asarray(ids)):.2%}")

    def stream_once() -> jax.Array:
        nonlocal ring
        y, ring, *_ = stream(x, w_router, scale, num_valid, experts, ring)
        return y

    times = milliseconds(
        {
            "streamed": stream_once,
            "batch-ready": lambda: batch_ready(x, w_router, scale, num_valid, experts, config=config),
        }
    )
    print(f"T {T}, H {H}, I {I}, E {E}, K {K}: {options.chunks} chunks {times['streamed']:.3f} ms, the kernel and")
    print(f"then sm.moe {times['batch-ready']:.3f} ms, ratio {times['streamed'] / times['batch-ready']:.3f}")
    ring.check()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
