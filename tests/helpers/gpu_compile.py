"""Compiles programs for an H200 on a machine that has none, and reads what XLA made of them.

Contract: XLA's CUDA plugin compiles for a described device; nothing runs, no driver and no GPU memory is needed, and a
ring is an abstract value. The plugin (two wheels) is looked for among the installed packages and in
`sys.prefix/cuda_plugin`, where CI puts it: installed beside JAX without NVIDIA's libraries it would complain in every
process that asks for devices. XLA calls ptxas, which comes with nvcc. gpu_asserts.py says what a program must be like.
Trade-off: the text of scheduled HLO, XLA's buffer assignment and its thunks are read with regular expressions, for one
version of XLA; what they do not recognise fails.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

import jax_streammoe as sm
from jax_streammoe.layout import ring_layout, ring_shape

PLUGIN_FOLDER = pathlib.Path(sys.prefix) / "cuda_plugin"
PLUGIN = "jax_plugins.xla_cuda13"
TOOLKIT = pathlib.Path("/usr/local/cuda")  # where XLA looks by itself

# What XLA wants to know of a device. The versions decide whether command buffers may hold custom calls.
TARGET = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000
  device_memory_size: 150000000000
  l2_cache_size: 62914560
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  max_blocks_per_multiprocessor: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  reserved_shared_memory_per_block: 1024
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_address_bits: 64
}
"""


def why_unavailable() -> str:
    """Returns why programs cannot be compiled here, or the empty string when they can."""
    if not _ptxas().exists():
        return f"XLA needs ptxas, from nvcc: it is neither on PATH nor in {TOOLKIT / 'bin'}"
    try:
        _load_plugin()
    except ImportError as error:
        version = jax.__version__
        return (
            f"XLA's CUDA plugin is missing ({error}): pip install --no-deps --target {PLUGIN_FOLDER} "
            f"jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}"
        )
    return ""


def _ptxas() -> pathlib.Path:
    return pathlib.Path(shutil.which("ptxas") or TOOLKIT / "bin" / "ptxas").resolve()


def _toolkit_options() -> dict[str, str]:
    """Tells XLA where the toolkit of that ptxas has libdevice, unless that is for XLA to find."""
    root = _ptxas().parents[1]
    return {"xla_gpu_cuda_data_dir": str(root)} if (root / "nvvm" / "libdevice").is_dir() else {}


@functools.cache
def _load_plugin() -> None:
    """Makes the plugin known to JAX, whether or not JAX has looked for plugins already."""
    try:
        plugin = importlib.import_module(PLUGIN)
    except ImportError:
        sys.path.append(str(PLUGIN_FOLDER))
        importlib.invalidate_caches()
        plugin = importlib.import_module(PLUGIN)
    try:
        topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology="1x1x1")
    except NotImplementedError:  # JAX looked for plugins before the folder was there
        plugin.initialize()


@functools.cache
def devices(count: int = 1) -> tuple[Any, ...]:
    """Returns `count` described GPUs of one host."""
    _load_plugin()
    described = topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology=f"1x1x{count}")
    return tuple(described.devices)


def abstract(shape: Sequence[int], dtype: Any = jnp.bfloat16, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """Returns what a program is compiled for in place of an array: on the first described GPU, or as sharded."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding or SingleDeviceSharding(devices()[0]))


def abstract_ring(
    config: sm.MoEConfig, *, chunk_tokens: int, num_slots: int, mesh: Mesh | None = None, axis_name: str = "ep",
    name: str = "ring",
) -> sm.Ring:  # fmt: skip
    """Returns the ring that make_ring would return for CUDA devices, without memory. `mesh` is of described GPUs."""
    num_ranks = 1 if mesh is None else mesh.shape[axis_name]
    shape = ring_shape(config, chunk_tokens=chunk_tokens, num_slots=num_slots, num_ranks=num_ranks, platform="cuda")
    spec = sm.RingSpec(
        name=name, config=config, shape=shape, axis_names=() if mesh is None else (axis_name,),
        mesh_axes=() if mesh is None else tuple(mesh.shape.items()), threads=1, shared=False, platform="cuda",
    )  # fmt: skip
    rows = 1 if mesh is None else mesh.size
    sharding = None if mesh is None else NamedSharding(mesh, spec.partition)
    mem = abstract((rows, ring_layout(shape)["total"]), jnp.uint8, sharding)
    return sm.Ring(mem, abstract((rows, 1), jnp.float32, sharding), spec)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of scheduled HLO: `%name = shape opcode(%operands...), attributes`."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    line: str

    @property
    def number(self) -> int:
        """Which parameter of its computation this one is."""
        return int(re.search(r"parameter\((\d+)\)", self.line)[1])

    def attribute(self, key: str) -> str | None:
        """Returns the computation that `key=%computation` names."""
        match = re.search(rf"\b{key}=%([\w.\-]+)", self.line)
        return match and match[1]

    def holds(self, num_bytes: int) -> bool:
        """Whether a result has the size of a ring, or of several, in bytes."""
        sizes = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"\bu8\[([\d,]+)\]", self.shape)]
        return any(size >= num_bytes and size % num_bytes == 0 for size in sizes)


@dataclasses.dataclass(frozen=True)
class Thunk:
    """What XLA executes: `target` is the handler it calls, `captured` whether a command buffer holds it."""

    kind: str
    target: str | None
    captured: bool


class Program:
    """A compiled program: its computations in the order in which they execute, its buffers and its thunks."""

    def __init__(self, text: str, buffers: str, thunks: str, metadata: str, temporary_bytes: int) -> None:
        self.text, self.temporary_bytes = text, temporary_bytes
        self.computations: dict[str, list[Instruction]] = {}
        if ", is_scheduled=true" not in text.split("\n", 1)[0]:
            raise ValueError("the program's text is not scheduled, so its order says nothing")
        self.entry: list[Instruction] = []
        for entry, name, body in re.findall(r"^(ENTRY )?%([\w.\-]+) \(.*?\{\n(.*?)^\}", text, re.M | re.S):
            self.computations[name] = [i for line in body.splitlines() if (i := _instruction(line))]
            if entry:
                self.entry = self.computations[name]
        self.buffers = buffers
        self.thunks = list(self._read_thunks(thunks, metadata))

    def target(self, instruction: Instruction) -> str | None:
        """Returns the handler that an instruction calls, itself or in the fusion that it is."""
        if match := re.search(r'custom_call_target="streammoe_(\w+)_v1"', instruction.line):
            return match[1]
        called = instruction.attribute("calls")
        found = [t for inner in self.computations.get(called or "", []) if (t := self.target(inner))]
        if len(found) > 1:
            raise ValueError(f"one instruction makes several calls, {found}: {instruction.line}")
        return found[0] if found else None

    def schedules(self) -> dict[str, list[Instruction]]:
        """Returns the computations that call handlers and are executed instruction by instruction."""
        fused = {i.attribute("calls") for body in self.computations.values() for i in body}
        return {
            name: body for name, body in self.computations.items() if name not in fused and any(map(self.target, body))
        }

    def calls(self, name: str) -> list[Instruction]:
        """Returns every call of a handler, in the text's order."""
        return [i for body in self.schedules().values() for i in body if self.target(i) == name]

    def inner_call(self, instruction: Instruction) -> tuple[Instruction, list[Instruction]]:
        """Returns the custom call that an instruction is or holds, and the instructions around it."""
        body = self.computations.get(instruction.attribute("calls") or "", [])
        return next(((i, body) for i in body if self.target(i)), (instruction, []))

    def _read_thunks(self, sequence: str, metadata: str) -> Iterator[Thunk]:
        names: dict[str, str] = {}
        for record in metadata.split("thunk_metadata {")[1:]:
            name = re.search(r'profile_annotation: "(.*?)"', record)
            number = re.search(r"thunk_id: (\d+)", record)
            if name and number:
                names[number[1]] = name[1]
        instructions = {i.name: i for body in self.computations.values() for i in body}
        outer: list[tuple[int, str]] = []  # (indentation, kind) of the thunks that hold the present one
        for indent, number, kind in re.findall(r"^( *)(\d+): (k\w+)", sequence, re.M):
            outer = [(depth, k) for depth, k in outer if depth < len(indent)]
            instruction = instructions.get(names.get(str(int(number)), ""))
            target = instruction and self.target(instruction)
            yield Thunk(kind, target, any(k == "kCommandBuffer" for _, k in outer))
            outer.append((len(indent), kind))


def _instruction(line: str) -> Instruction | None:
    match = re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(([^)]*)\)", line)
    return match and Instruction(match[1], match[2], match[3], tuple(re.findall(r"%([\w.\-]+)", match[4])), line)


def compile_program(
    function: Callable[..., Any], *args: Any, donate: Any = (), options: dict[str, Any] | None = None
) -> Program:
    """Compiles `function` for abstract arguments. `donate`: argument numbers. `options`: XLA's flags."""
    with tempfile.TemporaryDirectory() as folder:
        lowered = jax.jit(function, donate_argnums=donate).lower(*args)
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder} | _toolkit_options() | (options or {}))

        def dumped(*names: str) -> str:
            """The first of these that was written; the second sequence of thunks only if a pass changed the first."""
            found = [path for name in names for path in pathlib.Path(folder).glob(f"*.{name}.txt")]
            if not found:
                raise FileNotFoundError(f"XLA wrote no {names[0]}.txt, only {sorted(p.name for p in found)}")
            return found[0].read_text()

        thunks = dumped("thunk_sequence_after_thunk_passes", "thunk_sequence")
        temporary = compiled.memory_analysis().temp_size_in_bytes
        return Program(compiled.as_text(), dumped("*buffer-assignment"), thunks, dumped("thunk_metadata"), temporary)
