"""Benchmarks behind `python -m jax_streammoe bench`: named shapes, cases, records.

Contract: `run` measures, prints a table and writes records. Every case checks that what it times is right before it
times it.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from .layer import layer_forward
from .measure import write
from .shapes import TARGETS, meets_target
from .streaming import stream_overlap, stream_serial

CASES: dict[str, Callable[[], dict]] = {
    "cpu/layer_fwd/f32": lambda: layer_forward(jnp.float32),
    "cpu/layer_fwd/bf16": lambda: layer_forward(jnp.bfloat16),
    "cpu/stream_serial": stream_serial,
    "cpu/stream_overlap": stream_overlap,
}


def run(out: pathlib.Path, names: Sequence[str] = ()) -> int:
    """Runs cases (all by default), writes their records to `out`; returns how many missed their target."""
    jax.config.update("jax_platforms", "cpu")
    console = Console()
    records = []
    for name in names or CASES:
        with console.status(name):
            records.append(CASES[name]())
        write(records, out)
    table = Table("case", "value", "target", "beside it", title=f"{records[0]['device']}, JAX {jax.__version__}")
    for r in records:
        bound, larger = TARGETS[r["name"]]
        style = "green" if meets_target(r["name"], r["value"]) else "bold red"
        beside = "  ".join(f"{k} {v:g}" for k, v in r["baselines"].items())
        target = f"{'>=' if larger else '<='} {bound:g}"
        table.add_row(r["name"], f"[{style}]{r['value']:g} {r['unit']}", target, beside)
    console.print(table)
    console.print(f"records: {out}")
    return sum(not meets_target(r["name"], r["value"]) for r in records)
