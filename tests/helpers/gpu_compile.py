"""Compiles programs for an H200 on a machine that has none, and reads what XLA made of them.

Contract: XLA's CUDA plugin compiles for a described device; nothing runs, no driver and no GPU memory is needed, and a
ring is an abstract value. The plugin (two wheels) is looked for among the installed packages and in
`sys.prefix/cuda_plugin`, where CI puts it: installed beside JAX without NVIDIA's libraries it would complain in every
process that asks for devices. XLA calls ptxas, which comes with nvcc. The `assert_` functions say what a program must
be like; for each of them tests show a program that it refuses. Trade-off: the text of scheduled HLO, XLA's buffer
assignment and its thunks are read with regular expressions, for one version of XLA; what they do not recognise fails.
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

PUBLISH = ("publish_route", "publish_layout")
STREAM = ("open", *PUBLISH, "close")
RING = (
    *STREAM,
    "ring_forward",
    "ring_forward_local",
    "register",
    "connect",
    "publish_external",
)  # calls whose first operand and result is `mem`
# Instructions that hand memory on and touch none of it. A fusion does if all it holds of the ring is one of our calls.
HANDS_ON = {"parameter", "get-tuple-element", "tuple", "while", "call", "bitcast", "conditional", "opt-barrier"}
NO_WORK = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast"}


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


def assert_in_place(program: Program, ring: sm.Ring) -> None:
    """The ring's memory is that of the donated argument throughout, in XLA's own books too."""
    num_bytes = ring.mem.shape[-1]
    # The header: the argument's memory is a result's.
    given = {i.number for i in program.entry if i.opcode == "parameter" and i.holds(num_bytes)}
    aliased = {int(n) for n in re.findall(r"\}: \((\d+), ", program.text.split("entry_computation_layout", 1)[0])}
    assert given and given <= aliased, f"the ring is argument {given}, results share memory with {aliased}"
    # Every call: what is declared as one memory is one, the ring first. In a fusion with a slice it would be two.
    for name in RING:
        for call in program.calls(name):
            inner, around = program.inner_call(call)
            aliases = dict(re.findall(r"\{(\d*)\}: \((\d+), \{\}\)", inner.line))
            assert aliases.get("0", aliases.get("")) == "0", f"{name} does not alias its ring: {inner.line}"
            sources = {i.name: i.opcode for i in around}
            sliced = [n for n in aliases.values() if "slice" in sources.get(inner.operands[int(n)], "")]
            updated = [i.name for i in around if i.opcode == "dynamic-update-slice"]
            assert not sliced and not updated, f"{name} is fused with slices of its memory: {sliced}, {updated}"
    # The buffers: all values of the ring's size lie in one allocation, which is an argument and a result.
    holders = set()
    for allocation in re.split(r"^(?=allocation \d+:)", program.buffers, flags=re.M):
        values = re.findall(r"^ value: .*?\): (u8\[.*?\])", allocation, re.M)
        if any(Instruction("", shape, "", (), "").holds(num_bytes) for shape in values):
            holders.add(allocation.split("\n", 1)[0])
    assert len(holders) == 1, f"the ring lies in {len(holders)} allocations: {holders}"
    assert re.search(r"parameter \d+, .*maybe-live-out", *holders), f"the ring is not kept in its argument: {holders}"


def assert_no_copies(program: Program, ring: sm.Ring) -> None:
    """Nothing but the library's calls makes or moves memory of the ring's size."""
    num_bytes = ring.mem.shape[-1]
    found = [
        i.line.strip()
        for body in program.computations.values()
        for i in body
        if i.holds(num_bytes) and i.opcode not in HANDS_ON and program.target(i) not in RING
    ]
    assert any(program.calls(name) for name in RING), "no ring is used here"
    assert not found, "\n".join(found)


def streams(program: Program) -> Iterator[tuple[list[Instruction], list[int]]]:
    """Yields every stream as (its computation, the positions of its calls in it): from an open to the next close."""
    for body in program.schedules().values():
        positions: list[int] = []
        for position, instruction in enumerate(body):
            if program.target(instruction) in STREAM:
                positions.append(position)
            if program.target(instruction) == "close":
                yield body, positions
                positions = []
        assert not positions, f"a stream is not closed: {[program.target(body[p]) for p in positions]}"


def assert_streamed_order(program: Program, num_streams: int, num_chunks: int) -> None:
    """Each stream is open, publications in order, close, each once; a chunk's router runs after the publication of the
    chunk before it, and so beside that chunk's experts. `num_streams` counts a loop's body once."""
    found = list(streams(program))
    assert len(found) == num_streams, f"{len(found)} streams, wanted {num_streams}"
    for body, positions in found:
        names = [program.target(body[p]) for p in positions]
        assert names[0] == "open" and names[-1] == "close", names
        for half in PUBLISH:
            assert names.count(half) == num_chunks, names
        assert len(names) == 2 + len(PUBLISH) * num_chunks, names
        by_chunk = [sorted(positions[1 + 2 * n : 3 + 2 * n]) for n in range(num_chunks)]
        for chunk, pair in enumerate(by_chunk):
            assert {program.target(body[p]) for p in pair} == set(PUBLISH), f"chunk {chunk}: {names}"
        work = [_ancestors(program, body, pair) for pair in by_chunk]
        for chunk in range(1, num_chunks):
            own = work[chunk] - set().union(*(w for n, w in enumerate(work) if n != chunk))
            assert any(_multiplies(program, body[p]) for p in own), f"chunk {chunk} has no router of its own"
            early = [body[p].name for p in sorted(own) if p < by_chunk[chunk - 1][-1]]
            assert not early, f"chunk {chunk}: {early} run before chunk {chunk - 1} is published"


def _ancestors(program: Program, body: list[Instruction], calls: list[int]) -> set[int]:
    """Positions of the work that the operands of `calls` come from, without the library's own calls."""
    position = {instruction.name: p for p, instruction in enumerate(body)}
    seen: set[int] = set()
    wanted = [operand for p in calls for operand in body[p].operands]
    while wanted:
        p = position[wanted.pop()]
        if p in seen or program.target(body[p]) in RING:
            continue
        seen.add(p)
        whole = body[position[body[p].operands[0]]] if body[p].opcode == "get-tuple-element" else None
        if whole is not None and whole.opcode == "tuple":  # what is left of a barrier
            wanted.append(whole.operands[int(re.search(r"index=(\d+)", body[p].line)[1])])
        else:
            wanted += body[p].operands
    return {p for p in seen if body[p].opcode not in NO_WORK}


def _multiplies(program: Program, instruction: Instruction) -> bool:
    """Whether an instruction is or holds a matrix product."""
    if instruction.opcode == "dot" or "__cublas$" in instruction.line:
        return True
    called = instruction.attribute("calls")
    return any(_multiplies(program, i) for i in program.computations.get(called or "", []))


def assert_same_experts(program: Program) -> None:
    """A stream's experts lie at the same place from open to close: nobody may free what waves still read."""
    for body, positions in streams(program):
        opened, closed = (_sources(program, body, body[p]) for p in (positions[0], positions[-1]))
        # open: mem, experts; close: mem, y, experts.
        assert opened[1:] == closed[2:], f"open reads {opened[1:]}, close {closed[2:]}"
        assert len(opened) == 1 + 6


def _sources(program: Program, body: list[Instruction], call: Instruction) -> list[tuple]:
    """Where the operands of a call lie: a named value of the computation, or a slice of one."""
    inner, fused = program.inner_call(call)
    around = {i.name: i for i in body}
    within = {i.name: i for i in fused}

    def outside(name: str) -> tuple:
        instruction = around[name]
        if instruction.opcode == "bitcast":
            return outside(instruction.operands[0])
        if instruction.opcode == "constant":  # copied wherever it is used
            return (instruction.opcode, instruction.shape, re.search(r"constant\((.*?)\)", instruction.line)[1])
        return (name,)

    def inside(name: str) -> tuple:
        instruction = within[name]
        if instruction.opcode == "parameter":
            return outside(call.operands[instruction.number])
        if instruction.opcode == "bitcast":
            return inside(instruction.operands[0])
        if instruction.opcode in ("slice", "dynamic-slice"):
            part = re.search(r"slice=\{.*?\}|dynamic_slice_sizes=\{.*?\}", instruction.line)[0]
            return (instruction.opcode, part, *map(inside, instruction.operands))
        return (instruction.opcode, instruction.shape, re.search(r"\((.*?)\)", instruction.line)[1])

    return [inside(o) if fused else outside(o) for o in inner.operands]


def _captured(program: Program, target: str) -> list[bool]:
    """Whether a command buffer holds it, for each call of a handler."""
    captured = [thunk.captured for thunk in program.thunks if thunk.target == target]
    calls = len(program.calls(target))
    assert len(captured) == calls > 0, f"{len(captured)} thunks make the {calls} calls of {target}"
    return captured


def assert_captured(program: Program, target: str) -> None:
    """Command buffers hold every call of a handler, and there is one."""
    captured = _captured(program, target)
    assert all(captured), f"{captured.count(False)} of {len(captured)} calls of {target} are in no command buffer"


def assert_not_captured(program: Program, targets: Sequence[str] = STREAM) -> None:
    """No command buffer holds a call of these handlers, each of which is there, while others hold the rest."""
    kinds = [thunk.kind for thunk in program.thunks]
    assert "kCommandBuffer" in kinds, f"nothing is captured, so this says nothing: {kinds}"
    for target in targets:
        captured = _captured(program, target)
        assert not any(captured), f"{captured.count(True)} of {len(captured)} calls of {target} are in a command buffer"
