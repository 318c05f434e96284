"""Injected faults: stall, fail or drop a rank, delay producers and consumers. For tests of programs that use rings.

Contract: faults are set by ring name, rank and phase, in this process, through these functions only; no environment
variable and no build changes what a program computes. They stay until `clear_faults`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from . import checks, ffi

PHASES = ("open", "publish_route", "publish_layout", "dispatch", "experts", "done", "combine", "close")
KINDS = ("delay", "jitter", "fail", "drop")


def add_fault(ring: str, phase: str, kind: str = "delay", *, rank: int = -1, seconds: float = 0.0) -> None:
    """Adds a fault.

    Arguments:
      ring: name of the ring. rank: its rank, -1 for all.
      phase: one of PHASES, or "backward": the gradients of a call on a ring over GPUs; on CPUs
        it does nothing.
      kind: "delay" sleeps `seconds`, "jitter" a random part of them; "fail" raises on that rank and tells its peers;
        "drop" goes silent, so that peers run into their deadline.
    """
    checks.check_choice("phase", phase, (*PHASES, "backward"))
    checks.check_choice("kind", kind, KINDS)
    ffi.compiled.fault_add(ring, rank, phase, kind, float(seconds))


def clear_faults() -> None:
    """Removes all faults."""
    ffi.compiled.fault_clear()


@contextlib.contextmanager
def fault(ring: str, phase: str, kind: str = "delay", *, rank: int = -1, seconds: float = 0.0) -> Iterator[None]:
    """A fault for the length of a block; clears every fault at its end."""
    add_fault(ring, phase, kind, rank=rank, seconds=seconds)
    try:
        yield
    finally:
        clear_faults()
