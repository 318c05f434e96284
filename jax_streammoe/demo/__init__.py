"""The demonstration behind `python -m jax_streammoe`: a language model trained through a streamed layer, then examined.

Contract: sets up virtual CPU devices, so it must run before any JAX operation of its process. Returns an exit status:
0, or 1 when the model learned too little or a comparison fails. Files are written before either is judged.
"""

from __future__ import annotations

import itertools
import pathlib
import time

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..ring import close_ring
from . import data, model, report, timeline
from .train import Trainer

HELD_OUT_BATCHES = 8
MARGIN_BITS = 0.5  # the model must beat the entropy of single bytes by this much


def run(text: str | None, num_devices: int, num_steps: int, out: pathlib.Path) -> int:
    """Trains, examines, reports; returns the exit status. Raises data.InputError for an unusable text or folder."""
    start = time.perf_counter()
    origin, everything = data.load_text(text)
    training, held_out = data.split(everything)
    unigram = data.unigram_bits(everything)
    _make_folder(out)
    _use_cpu(num_devices)
    console = Console()
    c = model.CONFIG
    console.print(
        f"{origin}: {len(everything):,} bytes; {c.num_experts} experts of {c.hidden}x{c.intermediate}, "
        f"top-{c.top_k}, on {num_devices} virtual CPU devices; {model.CHUNKS} chunks of "
        f"{model.SEQUENCES * model.LENGTH // num_devices // model.CHUNKS} tokens per device and call"
    )
    trainer = Trainer(num_devices, num_steps)
    try:
        examples = list(
            itertools.islice(data.batches(held_out, model.SEQUENCES, model.LENGTH, seed=1), HELD_OUT_BATCHES)
        )
        _train(trainer, training, num_steps, console)
        bits, rows = trainer.evaluate(examples)
        findings, events = report.compare(trainer, examples[0])
        for table in (
            report.findings_table(findings), report.load_table(rows, num_devices), report.ring_table(trainer.ring)
        ):  # fmt: skip
            console.print(table)
        files = timeline.save(events, out)
    finally:
        close_ring(trainer.ring)
    for path in files:
        console.print(f"wrote {path}", soft_wrap=True)
    learned = bits <= unigram - MARGIN_BITS
    console.print(f"held-out loss {bits:.3f} bits per byte, unigram entropy of the text {unigram:.3f}")
    if not learned:
        wanted = unigram - MARGIN_BITS
        console.print(f"[bold red]learned too little in {num_steps} steps: the loss must fall below {wanted:.3f}")
    equal = all(f.ok for f in findings)
    if not equal:
        console.print("[bold red]streamed and batch-ready results differ: see the table above")
    console.print(f"{time.perf_counter() - start:.0f} s")
    return 0 if learned and equal else 1


def run_trace(num_devices: int, out: pathlib.Path) -> int:
    """Records one streamed call of the untrained model; returns the exit status."""
    _make_folder(out)
    _use_cpu(num_devices)
    console = Console()
    trainer = Trainer(num_devices, 1)
    try:
        _, text = data.load_text(None)
        batch = next(data.batches(text, model.SEQUENCES, model.LENGTH, seed=1))
        findings, events = report.compare(trainer, batch)
    finally:
        close_ring(trainer.ring)
    console.print(report.events_table(timeline.with_producer(events)))
    for path in timeline.save(events, out):
        console.print(f"wrote {path}", soft_wrap=True)
    return 0 if all(f.ok for f in findings) else 1


def _make_folder(path: pathlib.Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise data.InputError(f"--out {path}: {error.strerror or error}") from None


def _use_cpu(num_devices: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


def _train(trainer: Trainer, text: np.ndarray, num_steps: int, console: Console) -> None:
    columns = (
        TextColumn("train"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"), TimeElapsedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("train", total=num_steps, loss="compiling")
        recent: list[float] = []
        for batch in itertools.islice(data.batches(text, model.SEQUENCES, model.LENGTH, seed=0), num_steps):
            recent = [*recent[-19:], trainer.step(batch)]
            progress.update(task, advance=1, loss=f"{np.mean(recent):.3f} bits per byte")
