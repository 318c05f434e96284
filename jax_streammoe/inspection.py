"""Looking at rings and at programs that use them, from outside: `inspect` and `check_program`.

Contract: `inspect` reads the control words through the library (acquire loads), never through the arrays, because a
NumPy view of a ring makes its next donation a copy. `check_program` compiles but does not run: it finds, before the
first run, what would otherwise be an address error at run time.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax

from . import checks, ffi
from .layout import ring_layout
from .ring import HANDLE_BYTES, Ring, RingRef


@dataclasses.dataclass(frozen=True)
class RankState:
    """Control words of one rank; tables are [R][S] (done and abort: [R]) as this rank sees them."""

    group: int
    rank: int
    sequence_base: int
    call_number: int
    route_ready: list[list[int]]
    layout_ready: list[list[int]]
    consumed: list[list[int]]
    done: list[int]
    abort: list[int]
    error: str


@dataclasses.dataclass(frozen=True)
class RingState:
    """State of a ring at one moment. `str()` is a table: one line per rank and slot.

    `ranks` is empty when the ring has failed and its memory went with the call; `failure` says why.
    """

    name: str
    num_ranks: int
    num_slots: int
    num_bytes: int
    failure: str
    ranks: list[RankState]

    def __str__(self) -> str:
        state = f"failed: {self.failure}" if self.failure else "usable"
        lines = [
            f"ring {self.name!r}: {self.num_ranks} ranks x {self.num_slots} slots, {self.num_bytes:,} bytes per rank, "
            f"{state}",
            f"{'rank':>6} {'calls':>6} {'chunks':>7} {'slot':>4} {'route':>7} {'layout':>7} {'consumed':>8}  state",
        ]
        for r in self.ranks:
            for slot in range(self.num_slots):
                route, layout = (table[r.rank][slot] for table in (r.route_ready, r.layout_ready))
                consumed = min(row[slot] for row in r.consumed)
                lines.append(
                    f"{f'{r.group}.{r.rank}':>6} {r.call_number:>6} {r.sequence_base:>7} {slot:>4} {route:>7} "
                    f"{layout:>7} {consumed:>8}  {_slot_state(route, layout, consumed)}"
                )
        return "\n".join(lines)


def inspect(ring: Ring | RingRef) -> RingState:
    """Returns the state of a ring's ranks in this process: sequences, ready and consumed words, failures.

    Host side, outside of jit, without touching the ring's arrays; a call that is running may move while it is read.
    Raises RuntimeError when the ring is closed or this value of it was donated.
    """
    if not isinstance(ring, (Ring, RingRef)):
        raise TypeError(f"ring must come from make_ring, got {type(ring).__name__}")
    if not ffi.compiled.ring_exists(ring.name):
        raise RuntimeError(f"ring {ring.name!r} is closed: call make_ring again")
    shape, failure = ring.spec.shape, ffi.compiled.ring_failure(ring.name)
    gone = bool(failure) and not ring.spec.shared  # XLA freed the memory of the call that failed
    if not gone and isinstance(ring, Ring) and ring.mem.is_deleted():  # freed too, if nobody kept what was returned
        raise RuntimeError(f"ring {ring.name!r}: this value was donated, inspect the one that the call returned")
    ranks = []
    for group, rank in [] if gone else ffi.compiled.ring_members(ring.name):
        words = ffi.compiled.ring_words(ring.name, group, rank)
        ranks.append(
            RankState(
                group,
                rank,
                words["sequence_base"],
                words["call_number"],
                words["route_ready"],
                words["layout_ready"],
                words["consumed"],
                [row[0] for row in words["done"]],
                [row[0] for row in words["abort"]],
                words["error"],
            )
        )
    return RingState(ring.name, shape.num_ranks, shape.num_slots, ring_layout(shape)["total"], failure, ranks)


def _slot_state(route: int, layout: int, consumed: int) -> str:
    if route == layout == consumed:
        return "free" if consumed else "never used"
    if route == layout:
        return "ready"
    return "route ready" if route > layout else "layout ready"


def check_program(jitted: Any, *args: Any, **kwargs: Any) -> None:
    """Raises ValueError when a jitted function would copy a ring, before its first run.

    Lowers and compiles `jitted` for the given arguments (arrays or ShapeDtypeStructs): every ring argument must be
    donated, and the compiled program must contain no copy of the size of a ring's memory.
    """
    lowered = jitted.lower(*args, **kwargs)
    rings = [r for r in jax.tree.leaves((args, kwargs), is_leaf=_is_ring) if isinstance(r, Ring)]
    # Rings whose leaves are not arrays but what lowering knows about them.
    infos: list[Any] = [r for r in jax.tree.leaves(lowered.args_info, is_leaf=_is_ring) if isinstance(r, Ring)]
    for info in infos:
        if not info.mem.donated:
            raise ValueError(checks.ring_misuse(info.spec.name, "its argument is not donated"))
    text = lowered.compile().as_text()
    for ring in rings:
        num_bytes = HANDLE_BYTES if ring.spec.shared else ring_layout(ring.spec.shape)["total"]
        pattern = rf"= u8\[(?:\d+,)*{num_bytes}\]\S* copy\("
        copies = re.findall(pattern, text)
        if copies:
            raise ValueError(
                checks.ring_misuse(ring.name, f"the compiled program copies its memory {len(copies)} times")
            )


def _is_ring(value: Any) -> bool:
    return isinstance(value, (Ring, RingRef))
