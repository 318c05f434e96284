"""What is checked and shown after training: equal bits, the reference, load of experts, state of the ring.

Contract: `compare` says what was compared, whether it holds and how well; nothing is fixed up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from rich.table import Table

from ..inspection import inspect
from ..reference import reference
from ..ring import Ring
from ..trace import Event, record
from . import model
from .train import Trainer


class Finding(NamedTuple):
    """One comparison, whether it holds, and the figures."""

    what: str
    ok: bool
    detail: str


def compare(trainer: Trainer, batch: np.ndarray) -> tuple[list[Finding], list[Event]]:
    """Runs the layer on a batch in every way and compares; -> findings, the events of one streamed call.

    Streamed and batch-ready calls get the same tokens, ids and weights, so equal bits are demanded. The reference sums
    in another order: an element of y goes through two dots of H and I terms, hence at most about H + I roundings of
    2^-24, relative to the largest |y|.
    """
    ep, params = trainer.ep, trainer.params

    def run_stream(policy: str, x: jax.Array, ring: Any) -> tuple:
        y, ring, info = model.stream_layer(ep, params, x, ring, policy)
        return y, info.aux, ring

    def run_ready(mixed: model.Mixed, ring: Any) -> tuple:
        y, ring, _ = ep.moe(mixed.tokens, mixed.ids, mixed.weights, params["w_gate_up"], params["w_down"], ring=ring)
        return y, ring

    def run_xla(mixed: model.Mixed) -> Any:
        return ep.moe(mixed.tokens, mixed.ids, mixed.weights, params["w_gate_up"], params["w_down"])[0]

    def run_reference(mixed: model.Mixed) -> Any:
        args = (mixed.tokens, mixed.ids, mixed.weights, params["w_gate_up"], params["w_down"])
        return reference(*jax.device_put(jax.device_get(args)), config=model.CONFIG)

    x = jax.jit(model.embed)(params, trainer.put(batch[:, :-1]))
    streamed = jax.jit(run_stream, static_argnums=0, donate_argnums=2)
    y, mixed = trainer.call(lambda ring: streamed("overlap", x, ring))
    with record() as events:
        again, _ = trainer.call(lambda ring: streamed("overlap", x, ring))
    serial, _ = trainer.call(lambda ring: streamed("serial", x, ring))
    (ready,) = trainer.call(jax.jit(run_ready, donate_argnums=1), mixed)
    others = {
        "streamed twice": again, "streamed in order, no overlap": serial, "batch-ready on the ring": ready,
        "batch-ready without a ring (XLA's all_to_all)": jax.jit(run_xla)(mixed),
    }  # fmt: skip
    findings = [_same_bits(name, y, other) for name, other in others.items()]
    findings.append(_close("sm.reference, plain JAX on one device", y, run_reference(mixed)))
    return findings, events


def _same_bits(name: str, a: jax.Array, b: jax.Array) -> Finding:
    x, y = (np.array(v).view(np.uint32) for v in (a, b))
    different = int(np.sum(x != y))
    detail = f"all {x.size:,} values bit-identical" if not different else f"{different:,} of {x.size:,} values differ"
    return Finding(name, not different, detail)


def _close(name: str, a: jax.Array, b: jax.Array) -> Finding:
    x, y = (np.array(v, np.float64) for v in (a, b))
    error = float(np.max(np.abs(x - y)) / np.max(np.abs(y)))
    bound = (model.CONFIG.hidden + model.CONFIG.intermediate) * 2.0**-24
    return Finding(name, error <= bound, f"largest difference {error:.1e} of max|y|, bound (H + I) 2^-24 = {bound:.1e}")


def findings_table(findings: list[Finding]) -> Table:
    """The comparisons as a table."""
    table = Table("streamed, against", "", "", title="Same layer, same numbers", title_justify="left")
    for f in findings:
        table.add_row(f.what, "[green]ok" if f.ok else "[bold red]DIFFERS", f.detail)
    return table


def load_table(rows: np.ndarray, num_devices: int) -> Table:
    """Rows computed per expert as a table with bars."""
    table = Table("expert", "rank", "rows", "share", "", title="Expert load on held-out text", title_justify="left")
    share = rows / max(1, rows.sum())
    for e, count in enumerate(rows):
        bar = "█" * round(30 * share[e] / max(share.max(), 1e-9))
        table.add_row(str(e), str(e * num_devices // len(rows)), f"{count:,}", f"{share[e]:.1%}", bar)
    return table


def ring_table(ring: Ring) -> Table:
    """The ring's sequence words as a table, lowest and highest over the slots."""
    state = inspect(ring)
    kib = state.num_bytes / 1024
    title = f"Ring {state.name!r}: {state.num_ranks} ranks x {state.num_slots} slots, {kib:,.0f} KiB per rank, "
    title += f"failed: {state.failure}" if state.failure else "usable"
    columns = ("rank", "calls", "chunks", "route_ready", "layout_ready", "consumed")
    table = Table(*columns, title=title, title_justify="left")
    for r in state.ranks:
        consumed = [min(row[slot] for row in r.consumed) for slot in range(state.num_slots)]
        words = (r.route_ready[r.rank], r.layout_ready[r.rank], consumed)
        table.add_row(str(r.rank), str(r.call_number), str(r.sequence_base), *(f"{min(w)}..{max(w)}" for w in words))
    return table


def events_table(events: list[Event]) -> Table:
    """How often each phase ran and how long it took, over all ranks."""
    table = Table("phase", "times", "median ms", "total ms", title="One streamed call", title_justify="left")
    for phase in dict.fromkeys(e.phase for e in events):
        lengths = [(e.end_s - e.begin_s) * 1e3 for e in events if e.phase == phase]
        table.add_row(phase, str(len(lengths)), f"{np.median(lengths):.2f}", f"{sum(lengths):.2f}")
    return table
