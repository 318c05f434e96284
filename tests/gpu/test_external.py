"""A user's CUDA kernel as the producer of a stream: examples/cuda_producer, built here by nvcc and run on one GPU.

The kernel's routes and rows are checked against float64, routes exactly where no rounding can decide. The streamed
layer must have the bits of `sm.moe` on the same rows and routes, whatever the chunks. What a kernel fails to publish
must end as an error of the ring at its deadline.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_streammoe as sm
from tests.helpers import examples, oracle

pytestmark = pytest.mark.gpu

fused_producer = examples.load("cuda_producer/fused_producer.py")
U32 = oracle.UNIT_ROUNDOFF["float32"]
SIZES = dict(T=700, H=256, I=192, E=8, K=4)
AS_THEY_ARE = np.ones((1,), jnp.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory):
    path = fused_producer.library(tmp_path_factory.mktemp("cuda_producer"))
    fused_producer.register(path)
    return path


def arrays(x, logits, scale=AS_THEY_ARE, num_valid=None, **options):
    """rows, ids, weights of the kernel without a ring, as NumPy arrays."""
    num_valid = jnp.int32(len(x) if num_valid is None else num_valid)
    run = jax.jit(functools.partial(fused_producer.produce_arrays, **options))
    return [np.asarray(a) for a in run(x, jnp.asarray(logits), scale, num_valid)]


# The kernel alone.


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("num_experts", [3, 8, 32, 33, 128, 129, 256, 257, 1000, 1024])
def test_routes(rng, num_experts, normalize):
    """Logits are far apart or equal, so that the order is known whatever exp is; ties go to the lower expert."""
    num_tokens, top_k = 41, min(8, num_experts)
    logits = (rng.integers(-20, 20, (num_tokens, num_experts)) / 4).astype(np.float32)
    x = jnp.zeros((num_tokens, 8), jnp.bfloat16)
    _, ids, weights = arrays(x, logits, top_k=top_k, normalize=normalize)
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=1, kind="stable")[:, :top_k])
    powers = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    want = np.take_along_axis(powers / powers.sum(1, keepdims=True), ids, 1)
    if normalize:
        want /= want.sum(1, keepdims=True)
    # Sums of E / 32 and 5 terms and of K; two roundings of exp, two divisions.
    np.testing.assert_allclose(weights, want, rtol=(num_experts / 32 + top_k + 16) * U32)
    config = sm.MoEConfig(num_experts, top_k, 8, 8, dtype=jnp.bfloat16)
    with jax.default_device(jax.devices("cpu")[0]):
        plain = sm.route_topk(jnp.asarray(logits), config, normalize=normalize)
    np.testing.assert_array_equal(ids, plain.ids)


def test_routes_of_corner_logits():
    """One expert takes all, and of the probabilities that are 0 the lowest come next; NaN or infinity takes the row."""
    logits = np.zeros((6, 16), np.float32)
    logits[0], logits[0, 5] = -200, 0
    logits[1, 3], logits[2, 3], logits[3], logits[4, 2] = np.nan, np.inf, -np.inf, -np.inf
    _, ids, weights = arrays(jnp.zeros((6, 8), jnp.bfloat16), logits, top_k=4, num_valid=5)
    first = [0, 1, 2, 3]
    np.testing.assert_array_equal(ids, [[5, 0, 1, 2], first, first, first, [0, 1, 3, 4], [-1] * 4])
    np.testing.assert_array_equal(weights, [[1, 0, 0, 0], *[[np.nan] * 4] * 3, [0.25] * 4, [0] * 4])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("hidden", [8, 264, 2056])
def test_rows(rng, hidden, dtype):
    x = jnp.asarray(rng.standard_normal((37, hidden)), dtype)
    scale = jnp.asarray(1 + 0.1 * rng.standard_normal(hidden), dtype)
    rows, *_ = arrays(x, np.zeros((37, 4), np.float32), scale, top_k=1)
    assert rows.dtype == x.dtype
    wide = np.asarray(x).astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(1, keepdims=True) + fused_producer.EPSILON) * np.asarray(scale, np.float64)
    # One rounding to the dtype, of what has the rounding of half a float32 sum and of five operations.
    relative = oracle.UNIT_ROUNDOFF[np.dtype(dtype).name] * 1.001 + (hidden / 64 + 16) * U32
    np.testing.assert_allclose(rows.astype(np.float64), want, rtol=relative, atol=2.0**-25)  # float16: half a subnormal
    assert np.abs(rows.astype(np.float64)).mean() > 0.5


# The streamed layer.


@dataclasses.dataclass(frozen=True)
class Layer:
    config: sm.MoEConfig
    x: jax.Array
    w_router: jax.Array  # folded
    scale: jax.Array
    experts: tuple

    def stream(self, ring, num_valid=None, **options):
        """One streamed call: y, ring, ids, weights."""
        num_valid = jnp.int32(len(self.x) if num_valid is None else num_valid)
        operands = (self.x, self.w_router, self.scale, num_valid, self.experts)
        return fused_producer.streamed(*operands, ring, config=self.config, **options)

    def batch_ready(self, ids, weights):
        """The bits of sm.moe on the kernel's rows and given routes."""
        return bits(fused_producer.same_routes(self.x, self.scale, ids, weights, self.experts, config=self.config))


def bits(y):
    return np.asarray(y).view(np.uint16)


def make_layer(rng, dtype=jnp.bfloat16, normed=True, **sizes):
    problem = oracle.as_jax(oracle.make_problem(rng, **(SIZES | sizes), dtype=dtype))
    config = problem.config
    w_router = rng.standard_normal((config.hidden, config.num_experts)) / config.hidden**0.5
    scale = jnp.asarray(1 + 0.1 * rng.standard_normal(config.hidden) if normed else [1.0], dtype)
    w_router = fused_producer.fold(jnp.asarray(w_router, dtype), scale)
    return Layer(config, problem.x, w_router, scale, (problem.w_gate_up, problem.w_down))


def assert_routes(layer, ids, weights):
    """Routes of all tokens against float64, up to what a float32 product of that depth may differ."""
    x, w_router = (np.asarray(a).astype(np.float64) for a in (layer.x, layer.w_router))
    factor = 1.0
    if layer.scale.size > 1:
        factor = 1 / np.sqrt((x**2).mean(1, keepdims=True) + fused_producer.EPSILON)
    logits, ids = factor * (x @ w_router), np.asarray(ids)
    # Tensor cores cut instead of rounding: one float32 ulp per term, for each of two logits.
    slack = 2 * x.shape[1] * 2 * U32 * np.max(factor * (np.abs(x) @ np.abs(w_router)))
    chosen = np.take_along_axis(logits, ids, 1)
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    assert (chosen >= np.sort(logits, 1)[:, [-ids.shape[1]]] - slack).all()
    assert (np.diff(chosen, axis=1) <= slack).all()
    powers = np.exp(chosen - chosen.max(1, keepdims=True))
    relative = np.expm1(slack) + (layer.config.num_experts / 32 + ids.shape[1] + 16) * U32
    np.testing.assert_allclose(weights, powers / powers.sum(1, keepdims=True), rtol=relative)


CASES = {  # sizes and dtype of the layer, chunk_tokens, num_slots, options
    "one chunk": ({}, 700, 1, dict(chunks=1)),
    "two chunks": ({}, 350, 2, dict(chunks=2)),
    "seven chunks": ({}, 100, 7, dict(chunks=None)),
    "a partial chunk": ({}, 256, 3, dict(chunks=None)),
    "more chunks than slots": ({}, 350, 2, dict(chunks=5)),
    "serial": (dict(K=1), 175, 4, dict(chunks=4, policy="serial")),
    "rows as they are": (dict(normed=False), 175, 4, dict(chunks=4)),
    "float16": (dict(dtype=jnp.float16), 175, 4, dict(chunks=4)),
    "two waves": (dict(T=1400, E=2, K=2), 350, 4, dict(chunks=4)),
    "200 experts": (dict(E=200, K=8), 350, 2, dict(chunks=2)),
    "300 experts": (dict(E=300, K=8), 350, 2, dict(chunks=2)),
    "an empty chunk": (dict(T=9), 4, 4, dict(chunks=4)),
    "one token": (dict(T=1), 4, 2, dict(chunks=2)),
    "no token": (dict(T=0), 4, 2, dict(chunks=2)),
}


@pytest.mark.parametrize(("sizes", "chunk_tokens", "num_slots", "options"), CASES.values(), ids=CASES.keys())
def test_the_same_bits_as_batch_ready(rng, new_ring, sizes, chunk_tokens, num_slots, options):
    layer = make_layer(rng, **sizes)
    ring = new_ring(layer.config, chunk_tokens=chunk_tokens, num_slots=num_slots)
    before = None
    for _ in range(3):  # the ring goes on from call to call
        y, ring, *routes = layer.stream(ring, **options)
        if before is None:
            if len(layer.x) > 0:
                assert_routes(layer, *routes)
            before = [np.asarray(a) for a in routes]
        for got, want in zip(routes, before, strict=True):
            np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(bits(y), layer.batch_ready(*routes))
        assert len(layer.x) == 0 or 0.1 < float(jnp.std(y.astype(jnp.float32))) < 10
    ring.check()
    assert sm.inspect(ring).ranks[0].call_number == 3


@pytest.mark.parametrize("num_valid", [0, 350, 601])
def test_nan_in_masked_tokens_reaches_nobody(rng, new_ring, num_valid):
    layer = make_layer(rng)
    dirty = dataclasses.replace(layer, x=layer.x.at[num_valid:].set(jnp.nan))
    ring = new_ring(layer.config, chunk_tokens=175, num_slots=4)
    y, ring, ids, weights = dirty.stream(ring, num_valid, chunks=4)
    assert (np.asarray(ids)[num_valid:] == -1).all() and (np.asarray(ids)[:num_valid] >= 0).all()
    assert not np.asarray(weights)[num_valid:].any()
    # Bits of the clean tokens too: sm.moe sees them without the NaN.
    np.testing.assert_array_equal(bits(y), layer.batch_ready(ids, weights))
    assert not bits(y)[num_valid:].any()


def test_nan_in_a_taken_token_stays_there(rng, new_ring):
    layer = make_layer(rng)
    dirty = dataclasses.replace(layer, x=layer.x.at[401, 3].set(jnp.nan))
    y, _, ids, weights = dirty.stream(new_ring(layer.config, chunk_tokens=175, num_slots=4), chunks=4)
    np.testing.assert_array_equal(np.asarray(ids)[401], range(layer.config.top_k))
    assert np.isnan(np.asarray(weights)[401]).all() and np.isnan(np.asarray(y[401], np.float32)).all()
    keep = np.arange(len(layer.x)) != 401
    np.testing.assert_array_equal(bits(y)[keep], layer.batch_ready(ids, weights)[keep])


def by_hand(layer, ring, logits, chunks, external):
    """A stream of rows as they are, of whose chunks those in `external` come from the kernel; y and the ring."""

    @functools.partial(jax.jit, donate_argnames="ring")
    def run(x, logits, experts, ring):
        s = sm.open_stream(ring, *experts, config=layer.config, num_tokens=len(x), chunks=chunks, record=False)
        for n in range(s.num_chunks):
            part = slice(*s.chunk_bounds(n))
            if n in external:
                mem, *_ = fused_producer.produce(s.mem, ring, n, x[part], logits[part], AS_THEY_ARE, jnp.int32(len(x)))
                s = sm.publish_external(s, n, mem)
            else:
                _, ids, weights = fused_producer.produce_arrays(
                    x[part], logits[part], AS_THEY_ARE, jnp.int32(len(x)), top_k=layer.config.top_k
                )
                s = sm.publish_layout(sm.publish_route(s, n, ids, weights), n, x[part])
        y, ring, _ = sm.close_stream(s)
        return y, ring

    return run(layer.x, logits, layer.experts, ring)


@pytest.mark.parametrize("external", [{0, 2}, {1}, {0, 1, 2, 3}], ids=str)
def test_chunks_of_the_kernel_and_of_the_library_mix(rng, new_ring, external):
    layer = make_layer(rng, normed=False)
    logits = jnp.asarray(rng.standard_normal((len(layer.x), layer.config.num_experts)), jnp.float32)
    _, ids, weights = arrays(layer.x, logits, top_k=layer.config.top_k)
    y, ring = by_hand(layer, new_ring(layer.config, chunk_tokens=175, num_slots=4), logits, 4, external)
    np.testing.assert_array_equal(bits(y), layer.batch_ready(ids, weights))
    ring.check()


# What goes wrong.


@pytest.mark.parametrize("halves", [0, fused_producer.ROUTE, fused_producer.LAYOUT])
def test_a_half_that_is_never_published_ends_at_the_deadline(rng, new_ring, halves):
    layer = make_layer(rng)
    ring = new_ring(layer.config, chunk_tokens=175, num_slots=4, timeout_s=0.5)
    y, ring, *_ = jax.block_until_ready(layer.stream(ring, chunks=4, halves=halves))
    assert np.isnan(np.asarray(y, np.float32)).all()
    text = r"waited 0.5 s for rank 0 in phase dispatch, slot \d: sequence wanted \d, seen 0"
    with pytest.raises(RuntimeError, match=text):
        ring.check()
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(layer.stream(ring, chunks=4)[0])
    again = sm.make_ring(layer.config, chunk_tokens=175, num_slots=4, name=ring.name)
    y, _, *routes = layer.stream(again, chunks=4)
    np.testing.assert_array_equal(bits(y), layer.batch_ready(*routes))


def test_a_chunk_of_another_size_is_not_published(rng, new_ring):
    layer = make_layer(rng, normed=False)
    ring = new_ring(layer.config, chunk_tokens=700, num_slots=1, timeout_s=0.5)

    @functools.partial(jax.jit, donate_argnames="ring")
    def run(x, experts, ring):
        s = sm.open_stream(ring, *experts, config=layer.config, num_tokens=len(x), chunks=1, record=False)
        logits = jnp.zeros((len(x) - 1, layer.config.num_experts), jnp.float32)
        mem, *_ = fused_producer.produce(s.mem, ring, 0, x[1:], logits, AS_THEY_ARE, jnp.int32(len(x)))
        y, ring, _ = sm.close_stream(sm.publish_external(s, 0, mem))
        return y, ring

    y, ring = jax.block_until_ready(run(layer.x, layer.experts, ring))
    assert np.isnan(np.asarray(y, np.float32)).all()
    with pytest.raises(RuntimeError, match="slot 0: sequence wanted 1, seen 0"):
        ring.check()


def test_the_ring_must_hold_the_call(rng, new_ring):
    layer = make_layer(rng)
    ring = new_ring(layer.config, chunk_tokens=100, num_slots=4)
    text = r"must hold all 700 tokens of the call, it holds num_slots \* chunk_tokens = 400"
    with pytest.raises(ValueError, match=text):
        layer.stream(ring, chunks=None)


def test_the_kernel_refuses_operands_of_another_ring(rng, new_ring):
    layer = make_layer(rng, normed=False)
    logits = jnp.zeros((len(layer.x), layer.config.num_experts - 1), jnp.float32)
    ring = new_ring(layer.config, chunk_tokens=700, num_slots=1)
    text = "the ring is for H = 256, K = 4, E = 8, the operands have H = 256, K = 4, E = 7"
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(by_hand(layer, ring, logits, 1, {0})[0])


def test_the_plain_jax_producer(capsys):
    """The other example, without a kernel of its own."""
    assert examples.load("jax_producer.py").main() == 0
    assert "same bits as sm.moe on the same rows and routes: True" in capsys.readouterr().out
    sm.close_ring("jax_producer")


def test_the_program(library):
    """The example as its reader runs it, on a small layer."""
    sizes = {"tokens": 1000, "hidden": 512, "intermediate": 256, "experts": 16, "top-k": 4, "chunks": 4}
    options = [f"--{name}={value}" for name, value in sizes.items()]
    program = examples.FOLDER / "cuda_producer" / "fused_producer.py"
    # This process holds most of the device's memory.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    for more in ([], ["--no-norm"]):
        command = [sys.executable, str(program), f"--library={library}", *options, *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=240)
        assert done.returncode == 0, done.stderr
        assert "same bits as sm.moe on the same rows and routes: True" in done.stdout
