"""Pictures of the GPU records: `python benchmarks/gpu/plot.py [FOLDER]` draws FOLDER/*.png from FOLDER/gpu_*.json.

Contract: reads what the programs beside it wrote and draws nothing that is not in a record; a missing file is a missing
picture. Bars are TFLOP/s of 6 T K H I; the lines of a stream are T_s / T_b over the number of chunks, those of a link
GB/s over the SMs of the kernel; a timeline has a row per rank and phase.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# From top to bottom, as timeline.py names them.
PHASES = ("publish", "await", "fetch", "plan", "up", "down", "seal", "combine", "close", "other")
RESULTS = pathlib.Path(__file__).resolve().parents[1] / "results"


def load(folder: pathlib.Path, stem: str) -> dict[str, dict]:
    path = folder / f"{stem}.json"
    return {r["name"]: r for r in json.loads(path.read_text())} if path.exists() else {}


def layers(folder: pathlib.Path, stem: str, gpus: int) -> None:
    """One group of bars per shape: ours and the baselines of the same run."""
    found = {n.split("/")[2]: r for n, r in load(folder, stem).items() if n.startswith(f"layer_fwd/{gpus}gpu/")}
    if not found:
        return
    names = ["ours", *sorted({k[:-7] for r in found.values() for k in r["baselines"] if k.endswith("_tflops")})]
    figure, axes = plt.subplots(figsize=(8, 4))
    width = 0.8 / len(names)
    for n, name in enumerate(names):
        values = [r["value"] if name == "ours" else r["baselines"].get(f"{name}_tflops", 0) for r in found.values()]
        bars = axes.bar([i + (n - (len(names) - 1) / 2) * width for i in range(len(found))], values, width, label=name)
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    axes.set_xticks(range(len(found)), list(found))
    axes.set_ylabel("TFLOP/s per GPU")
    axes.set_title(f"MoE layer forward, bf16, 8192 tokens per GPU, {gpus} GPU{'s' if gpus > 1 else ''}")
    axes.legend()
    save(figure, folder / f"{stem}.png")


def scaling(folder: pathlib.Path) -> None:
    """One line per shape over the number of GPUs, 8192 tokens on each."""
    found = load(folder, "gpu_layer_h200") | load(folder, "gpu_ranks_h200")
    rates: dict[str, dict[int, float]] = {}
    for name, r in found.items():
        kind, gpus, shape, *tokens = name.split("/")
        if kind == "layer_fwd" and tokens == ["T8192"]:
            rates.setdefault(shape, {})[int(gpus.removesuffix("gpu"))] = r["value"]
    rates = {shape: points for shape, points in rates.items() if len(points) > 1}
    if not rates:
        return
    figure, axes = plt.subplots(figsize=(6, 4))
    for shape, points in sorted(rates.items()):
        axes.plot(*zip(*sorted(points.items()), strict=True), marker="o", label=shape)
    ticks = sorted({n for points in rates.values() for n in points})
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GPUs of one host")
    axes.set_ylabel("TFLOP/s per GPU")
    axes.set_title("MoE layer forward, bf16, experts split, 8192 tokens per GPU")
    axes.legend()
    save(figure, folder / "gpu_scaling_h200.png")


def streams(folder: pathlib.Path, stem: str) -> None:
    """One panel per producer and token count, one line per shape."""
    found = load(folder, stem)
    cases = sorted({tuple(n.split("/")[3:5]) for n in found}, key=lambda c: (c[1], int(c[0][1:])))
    if not cases:
        return
    gpus = next(iter(found)).split("/")[1]
    shapes = sorted({n.split("/")[2] for n in found})
    chunks = sorted({n.split("/")[5][1:] for n in found}, key=lambda n: int(n) if n.isdigit() else 99)
    figure, panels = plt.subplots(1, len(cases), figsize=(4 * len(cases), 4), sharey=True, squeeze=False)
    for axes, (tokens, producer) in zip(panels[0], cases, strict=True):
        for index, shape in enumerate(shapes):
            values = {n: found.get(f"stream/{gpus}/{shape}/{tokens}/{producer}/n{n}") for n in chunks}
            points = {chunks.index(n): r["value"] for n, r in values.items() if r}
            if points:
                axes.plot(list(points), list(points.values()), marker="o", color=f"C{index}", label=shape)
        axes.set_xticks(range(len(chunks)), chunks)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_title(f"{producer}, {tokens}" + ("" if gpus == "1gpu" else f" per GPU, {gpus[:-3]} GPUs"))
        axes.set_xlabel("chunks")
    panels[0][0].set_ylabel("streamed / batch-ready time")
    panels[0][0].legend()
    save(figure, folder / f"{stem}.png")


def decode(folder: pathlib.Path, stem: str) -> None:
    """Microseconds over the time that reading the weights of the hit experts takes."""
    found = {tuple(n.split("/")[2:4]): r for n, r in load(folder, stem).items() if n.startswith("decode/1gpu/")}
    if not found:
        return
    figure, axes = plt.subplots(figsize=(6, 4))
    for shape in sorted({s for s, _ in found}):
        rows = {t: r for (s, t), r in sorted(found.items(), key=lambda item: int(item[0][1][1:])) if s == shape}
        line = axes.plot(list(rows), [r["value"] for r in rows.values()], marker="o", label=shape)[0]
        floor = [r["baselines"]["weight_read_us"] for r in rows.values()]
        axes.plot(list(rows), floor, linestyle=":", color=line.get_color())
    axes.set_yscale("log")
    axes.set_ylabel("us (dotted: weights of the hit experts at 4.05 TB/s)")
    axes.set_title("Decode, bf16, one GPU")
    axes.legend()
    save(figure, folder / "gpu_decode_h200.png")


def link(folder: pathlib.Path, stem: str) -> None:
    """Pull and push over SMs, one direction and both; the copy engines as horizontal lines."""
    found = {tuple(n.split("/")[2:]): r["value"] for n, r in load(folder, stem).items() if n.startswith("link/2gpu/")}
    if not found:
        return
    figure, axes = plt.subplots(figsize=(6, 4))
    kinds = {"pull": "C0", "push": "C1", "copy": "C2"}
    for (kind, color), direction in itertools.product(kinds.items(), ("one", "both")):
        points = sorted((int(s[3:]), v) for (k, d, s), v in found.items() if (k, d) == (kind, direction))
        style = {"color": color, "linestyle": "-" if direction == "one" else "--"}
        label = f"{kind}, {direction} direction{'s' if direction == 'both' else ''}"
        if kind == "copy" and points:
            axes.axhline(points[0][1], label=label, **style)
        elif points:
            axes.plot(*zip(*points, strict=True), marker="o", label=label, **style)
    axes.set_xscale("log", base=2)
    ticks = sorted({int(s[3:]) for _, _, s in found} - {0})
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("SMs")
    axes.set_ylabel("GB/s in each direction")
    axes.set_title("Rows between two GPUs, 16-byte accesses")
    axes.legend(fontsize=8)
    save(figure, folder / f"{stem}.png")


def timeline(folder: pathlib.Path, stem: str) -> None:
    """One row per rank and phase that occurs, one bar per kernel."""
    for name, r in load(folder, stem).items():
        kernels = r["kernels"]
        rows = sorted({(k["rank"], PHASES.index(k["phase"])) for k in kernels})
        figure, axes = plt.subplots(figsize=(9, 0.6 + 0.25 * len(rows)))
        for at, (rank, phase) in enumerate(rows):
            here = [k for k in kernels if (k["rank"], k["phase"]) == (rank, PHASES[phase])]
            spans = [(k["start_us"], k["duration_us"]) for k in here]
            axes.broken_barh(spans, (at - 0.4, 0.8), color=f"C{phase}", edgecolor="black", linewidth=0.3)
        axes.set_yticks(range(len(rows)), [f"GPU {rank} {PHASES[phase]}" for rank, phase in rows], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("us since this GPU's call began")
        axes.set_title("One call: " + ", ".join(name.split("/")[1:]))
        save(figure, folder / f"{stem}.png")


def save(figure: plt.Figure, path: pathlib.Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(path)


if __name__ == "__main__":
    where = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    layers(where, "gpu_layer_h200", 1)
    layers(where, "gpu_ranks_h200", 2)
    scaling(where)
    streams(where, "gpu_stream_h200")
    streams(where, "gpu_ranks_stream_h200")
    decode(where, "gpu_decode_h200")
    link(where, "gpu_link_h200")
    timeline(where, "gpu_timeline_h200")
