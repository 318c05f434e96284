"""One streamed call as a picture and as a trace: when each rank produced, published, dispatched, computed, combined.

Contract: events come from `sm.trace`; `with_producer` adds what the library cannot see, the caller's own work between
its publications. Row order in the picture: per rank, the producer (XLA's thread) above the consumer (the library's).
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from .. import trace
from ..trace import Event

PRODUCER = ("produce", "publish_layout", "publish_route", "combine")
CONSUMER = ("dispatch", "experts")
COLOURS = {
    "produce": "#4c78a8", "publish_layout": "#f58518", "publish_route": "#f58518", "dispatch": "#b279a2",
    "experts": "#54a24b", "combine": "#e45756",
}  # fmt: skip


def with_producer(events: Sequence[Event]) -> list[Event]:
    """Returns the events and a "produce" phase per rank and chunk: since opening, or since the last publication.

    A chunk's produce phase includes copying its tokens into the ring when the payload is published before the routes.
    """
    produced: list[Event] = []
    free_since: dict[tuple[str, int, int], float] = {}
    for e in sorted(events, key=lambda e: e.begin_s):
        key = (e.ring, e.group, e.rank)
        if e.phase == "open":
            free_since[key] = e.end_s
        elif e.phase == "publish_route" and key in free_since:
            produced.append(e._replace(phase="produce", begin_s=free_since[key], end_s=e.begin_s))
            free_since[key] = e.end_s
    return sorted([*events, *produced], key=lambda e: (e.begin_s, e.rank))


def save(events: Sequence[Event], folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes timeline.png and trace.json (Chrome, Perfetto) of one call into `folder`; returns their paths."""
    events = with_producer(events)
    folder.mkdir(parents=True, exist_ok=True)
    return [_draw(events, folder / "timeline.png"), trace.save(events, folder / "trace.json")]


def _draw(events: Sequence[Event], path: pathlib.Path) -> pathlib.Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ranks = sorted({(e.group, e.rank) for e in events})
    origin = min((e.begin_s for e in events), default=0.0)
    legible = 0.015e3 * (max((e.end_s for e in events), default=0.0) - origin)  # ms
    figure, axes = pyplot.subplots(figsize=(12, 1.2 + 0.75 * len(ranks)), layout="constrained")
    labels = []
    for row, rank in enumerate(ranks):
        for side, phases in enumerate((PRODUCER, CONSUMER)):
            labels.append(f"rank {rank[1]} {'consumer' if side else 'producer'}")
            for e in events:
                if (e.group, e.rank) != rank or e.phase not in phases:
                    continue
                begin, width = (e.begin_s - origin) * 1e3, (e.end_s - e.begin_s) * 1e3
                y = 2 * row + side
                axes.broken_barh([(begin, width)], (y - 0.4, 0.8), color=COLOURS[e.phase], zorder=_order(e))
                if e.phase in ("produce", "experts") and width >= legible:
                    text = str(e.chunk) if e.chunk == e.last_chunk else f"{e.chunk}-{e.last_chunk}"
                    axes.text(begin + width / 2, y, text, ha="center", va="center", color="white", zorder=9)
    axes.set(yticks=range(len(labels)), yticklabels=labels, xlabel="ms", title="one streamed call; numbers are chunks")
    axes.invert_yaxis()
    names = {
        "produce": "produce (attention, router)", "publish_route": "publish", "dispatch": "dispatch (waits for peers)",
        "experts": "experts", "combine": "combine",
    }  # fmt: skip
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[phase]) for phase in names]
    figure.legend(handles, names.values(), ncols=len(names), loc="outside lower center")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _order(event: Event) -> int:
    """Short phases are drawn over long ones."""
    return 2 if event.phase == "produce" else 3
