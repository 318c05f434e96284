"""Timeline of the library's phases: which rank opened, published, dispatched, computed and combined which chunk, when.

Contract: `start` and `stop` bracket what is recorded, in this process, on one clock; recording costs a lock per phase
and nothing when off. `save` writes the Chrome trace format, which Perfetto and chrome://tracing read. The events are
the library's own; `add` puts a caller's phases (a producer, say) on the same clock.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from . import ffi


class Event(NamedTuple):
    """One phase of one rank: chunks `chunk..last_chunk` (-1: the whole call), begin and end in seconds."""

    ring: str
    group: int
    rank: int
    phase: str
    chunk: int
    last_chunk: int
    begin_s: float
    end_s: float


def start() -> None:
    """Starts recording; forgets what was recorded before."""
    ffi.compiled.timeline_start()


def stop() -> list[Event]:
    """Ends recording and returns the events, by begin time."""
    events = [Event(**event) for event in ffi.compiled.timeline_stop()]
    return sorted(events, key=lambda e: (e.begin_s, e.rank))


@contextlib.contextmanager
def record() -> Iterator[list[Event]]:
    """Records a block: the yielded list is filled when it ends."""
    events: list[Event] = []
    start()
    try:
        yield events
    finally:
        events.extend(stop())


def to_chrome(events: Sequence[Event]) -> dict[str, Any]:
    """Returns the events in Chrome's trace format: a process per group, a row per rank and side of the protocol."""
    rows: dict[tuple[int, str], int] = {}
    out: list[dict[str, Any]] = []
    origin = min((e.begin_s for e in events), default=0.0)
    for e in events:
        side = "consumer" if e.phase in ("dispatch", "experts", "done") else "producer"
        row = rows.setdefault((e.group, f"rank {e.rank} {side}"), len(rows))
        out.append(
            {
                "name": e.phase, "cat": e.ring, "ph": "X", "pid": e.group, "tid": row,
                "ts": (e.begin_s - origin) * 1e6, "dur": (e.end_s - e.begin_s) * 1e6,
                "args": {"chunk": e.chunk, "last_chunk": e.last_chunk, "rank": e.rank},
            }
        )  # fmt: skip
    for (group, name), row in rows.items():
        out.append({"name": "thread_name", "ph": "M", "pid": group, "tid": row, "args": {"name": name}})
    return {"traceEvents": out, "displayTimeUnit": "ms"}


def save(events: Sequence[Event], path: str | pathlib.Path) -> pathlib.Path:
    """Writes events as a Chrome trace (JSON) and returns the path."""
    path = pathlib.Path(path)
    path.write_text(json.dumps(to_chrome(events)))
    return path
