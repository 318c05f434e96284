"""Publishing from kernels of a user: the headers, the attributes, what publish_external refuses, and the examples.

Streams on a GPU are traced here for a ring that has only a shape, so no GPU and no build with CUDA is needed; the
kernel of examples/cuda_producer is compiled where nvcc is, and its program for a described H200. What they compute on a
device is tested in tests/gpu/test_external.py.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_streammoe as sm
from jax_streammoe import external, ffi
from jax_streammoe.layout import RingShape, ring_layout, ring_shape
from tests.helpers import examples, gpu_asserts
from tests.helpers import gpu_compile as gpu

fused_producer = examples.load("cuda_producer/fused_producer.py")

T, H, I, E, K, CHUNKS = 512, 256, 128, 8, 2, 4
CONFIG = sm.MoEConfig(E, K, H, I, dtype=jnp.bfloat16)
HOST_HEADERS = ("protocol/ring.h", "protocol/descriptor.h", "protocol/sequence.h")  # publish.cuh is device code


# The headers.


@pytest.mark.core
def test_the_headers_need_nothing_beside_them():
    folder = pathlib.Path(sm.include_dir())
    for name in (*HOST_HEADERS, "protocol/publish.cuh"):
        included = re.findall(r'#include "(.*?)"', (folder / name).read_text())
        assert all(inner.startswith("protocol/") and (folder / inner).is_file() for inner in included), (name, included)


@pytest.mark.core
def test_installed_headers_come_first_and_missing_ones_are_an_error(tmp_path, monkeypatch):
    package = tmp_path / "jax_streammoe"
    monkeypatch.setattr(external, "__file__", str(package / "external.py"))
    with pytest.raises(
        RuntimeError, match=r"^the headers of jax_streammoe are missing in .*: install the library again$"
    ):
        sm.include_dir()
    for folder in (tmp_path / "cc", package / "include"):  # a checkout, then installed
        (folder / "protocol").mkdir(parents=True)
        (folder / "protocol" / "publish.cuh").touch()
        assert sm.include_dir() == str(folder)


@pytest.mark.core
def test_attributes_are_the_shape_of_the_header_in_its_order(tmp_path):
    """A designated initialiser compiles in the order of the fields only, and a binding to each only if none is left."""
    gpu_shape = ring_shape(CONFIG, chunk_tokens=24, num_slots=3, num_ranks=1, platform="cuda")
    cpu_shape = ring_shape(CONFIG, chunk_tokens=24, num_slots=3, num_ranks=4)
    lines = [f'#include "{name}"' for name in HOST_HEADERS]
    for number, shape in enumerate((gpu_shape, cpu_shape)):
        attributes = sm.ring_attributes(_spec(shape))
        assert all(type(value) is np.int64 for value in attributes.values())
        fields = ", ".join(f".{name} = {value}" for name, value in attributes.items())
        lines.append(f"constexpr streammoe::RingShape shape{number}{{{fields}}};")
        lines.append(
            f"static_assert(streammoe::make_ring_layout(shape{number}).total == {ring_layout(shape)['total']});"
        )
    names = ", ".join(f"f{n}" for n in range(len(sm.ring_attributes(_spec(gpu_shape)))))
    lines.append(f"int main() {{ const auto [{names}] = shape0; return f0 == 1 ? 0 : 1; }}")
    source = tmp_path / "shape.cc"
    source.write_text("\n".join(lines) + "\n")
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler: neither c++ on PATH nor CXX")
    command = [compiler, "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-I", sm.include_dir(), source]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    # Not -Werror: only what compilers say about these headers counts, and a binding is not always read.
    assert compiled.returncode == 0, compiled.stderr
    assert "protocol/" not in compiled.stderr, compiled.stderr


@pytest.mark.core
def test_attributes_of_what_is_not_a_ring():
    with pytest.raises(TypeError, match=r"^ring must come from make_ring, got RingShape$"):
        sm.ring_attributes(ring_shape(CONFIG, chunk_tokens=8, num_slots=2, num_ranks=1))


@pytest.mark.core
def test_attributes_of_a_ring_a_ref_and_a_spec_are_the_same(new_ring):
    config = dataclasses.replace(CONFIG, dtype=jnp.float32)
    rings = [new_ring(config), new_ring(config, mutable=True)]
    wanted = dataclasses.asdict(rings[0].spec.shape)
    for ring in (*rings, rings[0].spec):
        assert sm.ring_attributes(ring) == wanted


# What publish_external refuses while it traces.


def _spec(shape: RingShape, platform: str = "cuda") -> sm.RingSpec:
    return sm.RingSpec(
        name="described", config=CONFIG, shape=shape, axis_names=(), mesh_axes=(), threads=1, shared=False,
        platform=platform,
    )  # fmt: skip


def described_ring(chunk_tokens: int, num_slots: int, platform: str = "cuda") -> sm.Ring:
    """A ring without memory; platform "cuda" stands for a GPU."""
    shape = ring_shape(CONFIG, chunk_tokens=chunk_tokens, num_slots=num_slots, num_ranks=1, platform=platform)
    mem = jax.ShapeDtypeStruct((1, ring_layout(shape)["total"]), jnp.uint8)
    return sm.Ring(mem, jax.ShapeDtypeStruct((1, 1), jnp.float32), _spec(shape, platform))


EXPERTS = (jax.ShapeDtypeStruct((E, H, 2 * I), jnp.bfloat16), jax.ShapeDtypeStruct((E, I, H), jnp.bfloat16))
X = jax.ShapeDtypeStruct((T, H), jnp.bfloat16)


def trace(use, *, chunk_tokens=T // CHUNKS, num_slots=CHUNKS, platform="cuda", **options):
    """Traces `use(stream, x)` on an open stream of T tokens."""

    def run(x, experts, ring):
        stream = sm.open_stream(ring, *experts, config=CONFIG, num_tokens=T, **({"record": False} | options))
        return use(stream, x)

    return jax.eval_shape(run, X, EXPERTS, described_ring(chunk_tokens, num_slots, platform))


def external_chunks(stream, chunks):
    for chunk in chunks:
        stream = sm.publish_external(stream, chunk, stream.mem)
    return stream


def ids_of(rows):
    return jnp.zeros((rows, K), jnp.int32), jnp.ones((rows, K), jnp.float32)


@pytest.mark.core
def test_a_stream_of_external_chunks_closes():
    def use(stream, x):
        assert stream.num_chunks == CHUNKS
        y, ring, info = sm.close_stream(external_chunks(stream, (0, 2, 1, 3)))
        return y, ring.mem, info.stats

    y, mem, stats = trace(use)
    assert (y.shape, y.dtype) == ((T, H), jnp.bfloat16)
    assert (mem.dtype, stats.expert_rows.shape) == (jnp.uint8, (E,))


@pytest.mark.core
def test_external_chunks_and_the_librarys_own_mix():
    def use(stream, x):
        start, stop = stream.chunk_bounds(1)
        stream = sm.publish_external(stream, 0, stream.mem)
        stream = sm.publish_layout(sm.publish_route(stream, 1, *ids_of(stop - start)), 1, x[start:stop])
        return sm.close_stream(external_chunks(stream, (2, 3)))[0]

    assert trace(use).shape == (T, H)


def after(chunks, then):
    return lambda stream, x: then(external_chunks(stream, chunks), x)


REFUSED = {
    "a ring on the CPU": (
        lambda s, x: sm.publish_external(s, 0, s.mem),
        {"platform": "cpu"},
        "^publish_external needs a ring on a GPU: its device header is for CUDA kernels$",
    ),
    "a stream that records": (
        lambda s, x: sm.publish_external(s, 0, s.mem),
        {"record": True},
        "^publish_external: nothing can be recorded, open the stream with record=False$",
    ),
    "twice": (
        after((1,), lambda s, x: external_chunks(s, (1,))),
        {},
        "^publish_external: chunk 1 is published already$",
    ),
    "a route that is there": (
        lambda s, x: external_chunks(sm.publish_route(s, 0, *ids_of(T // CHUNKS)), (0,)),
        {},
        "^publish_external: chunk 0 is published already$",
    ),
    "a layout that is there": (
        lambda s, x: external_chunks(sm.publish_layout(s, 0, x[: T // CHUNKS]), (0,)),
        {},
        "^publish_external: the layout of chunk 0 is published already$",
    ),
    "a layout after it": (
        after((0,), lambda s, x: sm.publish_layout(s, 0, x[: T // CHUNKS])),
        {},
        "^publish_layout: chunk 0 is published already$",
    ),
    "out of range": (lambda s, x: external_chunks(s, (4,)), {}, r"^chunk must be in 0\.\.3, got 4$"),
    "negative": (lambda s, x: external_chunks(s, (-1,)), {}, r"^chunk must be in 0\.\.3, got -1$"),
    "a slot in use": (
        lambda s, x: external_chunks(s, (0, 2)),
        {"chunk_tokens": T // 2, "num_slots": 2, "chunks": 4},
        r"^chunk 2 reuses the slot of chunk 0 in a ring of 2 slots, .* ends with chunk 1: publish chunks \[1\] first$",
    ),
    "closed too early": (
        after((0, 1), lambda s, x: sm.close_stream(s)),
        {},
        r"^close_stream: chunks \[2, 3\] of 4 were not published \(route: \[0, 1\], layout: \[0, 1\]\)$",
    ),
}


@pytest.mark.core
@pytest.mark.parametrize(("use", "options", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_at_trace_time(use, options, text):
    with pytest.raises(ValueError, match=f"(?m){text}"):
        trace(use, **options)


WRONG = {
    "not an array": (
        lambda s, x: sm.publish_external(s, 0, None),
        r"^mem must be the ring's memory, .*, got NoneType$",
    ),
    "its values": (
        lambda s, x: sm.publish_external(s, 0, s.mem.view(jnp.int8)),
        r"^mem must be the ring's memory, \(1, \d+\) uint8, got int8 \(1, \d+\)$",
    ),
    "a part": (
        lambda s, x: sm.publish_external(s, 0, s.mem[:, :128]),
        r"^mem must be the ring's memory, \(1, \d+\) uint8, got uint8 \(1, 128\)$",
    ),
    "a bool": (lambda s, x: external_chunks(s, (True,)), "^chunk must be an int, got True$"),
    "a float": (lambda s, x: external_chunks(s, (0.0,)), "^chunk must be an int, got 0.0 of type float$"),
    "traced": (lambda s, x: external_chunks(s, (jnp.argmax(x[0]),)), "^chunk must be an int, got .*Tracer"),
}


@pytest.mark.core
@pytest.mark.parametrize(("use", "text"), WRONG.values(), ids=WRONG.keys())
def test_wrong_kinds_are_type_errors(use, text):
    with pytest.raises(TypeError, match=f"(?m){text}"):
        trace(use)


@pytest.mark.core
def test_what_a_kernel_published_has_no_gradient_without_the_whole_arrays():
    def loss(experts, x, ring, arrays):
        stream = sm.open_stream(ring, *experts, config=CONFIG, num_tokens=T, record=False)
        y, *_ = sm.close_stream(external_chunks(stream, range(CHUNKS)), **arrays)
        return jnp.sum(y.astype(jnp.float32))

    ring = described_ring(T // CHUNKS, CHUNKS)
    with pytest.raises(NotImplementedError, match="close_stream: expert weights"):
        jax.eval_shape(jax.grad(loss), EXPERTS, X, ring, {})

    def whole(experts, x, ring):
        ids, weights = ids_of(T)
        return jax.grad(lambda *a: loss(*a, ring, dict(x=a[1], topk_ids=ids, topk_weights=weights)), (0, 1))(experts, x)

    gradients = jax.eval_shape(whole, EXPERTS, X, ring)
    assert jax.tree.leaves(gradients) == [*EXPERTS, X]


# The examples.


@pytest.mark.core
def test_the_plain_jax_producer_runs(capsys):
    assert examples.load("jax_producer.py").main() == 0
    assert "same bits as sm.moe on the same rows and routes: True" in capsys.readouterr().out
    sm.close_ring("jax_producer")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return fused_producer.library(tmp_path_factory.mktemp("cuda_producer"))


@pytest.fixture(scope="module")
def compiler(library):
    if why := gpu.why_unavailable():
        pytest.skip(why)
    fused_producer.register(library)


def compiled(num_tokens, chunk_tokens, num_slots, chunks, normed):
    """The streamed program of the example for a described GPU, and its ring."""
    ring = gpu.abstract_ring(CONFIG, chunk_tokens=chunk_tokens, num_slots=num_slots)
    args = (
        gpu.abstract((num_tokens, H)), gpu.abstract((H, E)), gpu.abstract((H if normed else 1,)),
        gpu.abstract((), jnp.int32), (gpu.abstract((E, H, 2 * I)), gpu.abstract((E, I, H))), ring,
    )  # fmt: skip
    untraced = fused_producer.streamed.__wrapped__
    program = gpu.compile_program(lambda *args: untraced(*args, config=CONFIG, chunks=chunks), *args, donate=5)
    return program, ring


def steps_of(program):
    """What the program does, in order: "router", "produce", and the library's own calls."""

    def step(instruction):
        inside = program.computations.get(instruction.attribute("calls") or "", [])
        lines = [i.line for i in (instruction, *inside)]
        if any(fused_producer.INTO_RING in line for line in lines):
            return "produce"
        if any(" dot(" in line or "__cublas$" in line for line in lines):
            return "router"
        return program.target(instruction)

    return [name for instruction in program.entry if (name := step(instruction))]


class TestCudaProducer:
    """Compiled by nvcc, and its program by XLA for an H200; nothing runs. Without CUDA there may be no nvcc."""

    __test__ = ffi.compiled.WITH_CUDA

    def test_it_is_built_once(self, library, monkeypatch):
        assert [path.name for path in library.parent.iterdir()] == ["fused_producer.so"]
        commands: list[list] = []
        monkeypatch.setattr(fused_producer.subprocess, "run", lambda command, check: commands.append(command))
        assert fused_producer.library(library.parent) == library
        assert not commands
        os.utime(library, (0, 0))  # older than its sources
        fused_producer.library(library.parent)
        assert [command[2:] for command in commands] == [[library, sm.include_dir(), jax.ffi.include_dir()]]
        os.utime(library)

    @pytest.mark.parametrize(
        ("num_tokens", "chunk_tokens", "num_slots", "chunks"), [(512, 128, 4, 4), (700, 350, 2, 5), (9, 4, 4, 4)]
    )
    @pytest.mark.parametrize("normed", [True, False])
    def test_its_program_keeps_the_ring_in_place_and_in_order(
        self, compiler, num_tokens, chunk_tokens, num_slots, chunks, normed
    ):
        program, ring = compiled(num_tokens, chunk_tokens, num_slots, chunks, normed)
        gpu_asserts.assert_in_place(program, ring)
        assert not [line for line in program.text.splitlines() if " copy(" in line and f",{ring.mem.shape[1]}]" in line]
        # One launch a chunk, in place, and the chunk's router behind the publication before it.
        launches = [line for line in program.text.splitlines() if fused_producer.INTO_RING in line]
        assert len(launches) == chunks
        assert all("output_to_operand_aliasing={{0}: (0, {})}" in line for line in launches)
        full = sum(1 for n in range(chunks) if n * -(-num_tokens // chunks) < num_tokens)
        chunk = ["router", "produce", "publish_external"]
        assert steps_of(program) == ["open", *chunk * full, *chunk[1:] * (chunks - full), "close"]

    def test_without_barriers_nothing_would_overlap(self, compiler, monkeypatch):
        monkeypatch.setattr(fused_producer.lax, "optimization_barrier", lambda values: values)
        program, _ = compiled(512, 128, 4, 4, True)
        # One product for all chunks, before anything is published.
        assert steps_of(program) == ["router", "open", *["produce", "publish_external"] * 4, "close"]
