"""What a program compiled for a GPU must be like: where the ring lies, what runs before what, what is captured.

Contract: each `assert_` function takes a `Program` of gpu_compile.py and raises AssertionError with what it saw; for
each of them a test shows a program that it refuses. They read XLA's own accounts and not the program's results.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import jax_streammoe as sm
from tests.helpers.gpu_compile import Instruction, Program

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
