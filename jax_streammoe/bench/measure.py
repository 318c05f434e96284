"""How time is taken and how a result is written down.

Contract: versions that are compared run in turns in one process, so that a slow minute of the machine hits all of
them; the first call of each is not counted; a figure is a median. Wall time is the figure; processor time of all
threads stands beside it, because it shows a busy machine. Inputs are random: zeros multiply faster on some machines.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import ffi
from ..config import MoEConfig
from .shapes import Shape

SCHEMA = ("name", "value", "unit", "baselines", "device", "num_devices", "dtype", "versions", "commit", "date")


class Timing(NamedTuple):
    """Medians of one version: wall seconds, and processor seconds of all threads of this process."""

    wall_s: float
    cpu_s: float


def alternate(
    versions: Mapping[str, Callable[[], Any]], *, rounds: int, repeats: Mapping[str, int] | None = None
) -> dict[str, Timing]:
    """Times versions in turns: in each round, every version runs `repeats[name]` times (1 if not given)."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in versions}
    for version in versions.values():
        jax.block_until_ready(version())
    for _ in range(rounds):
        for name, version in versions.items():
            for _ in range((repeats or {}).get(name, 1)):
                wall, cpu = time.perf_counter(), time.process_time()
                jax.block_until_ready(version())
                samples[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {name: Timing(*map(statistics.median, zip(*s, strict=True))) for name, s in samples.items()}


def layer_config(shape: Shape, dtype: Any) -> MoEConfig:
    """The layer of a named shape."""
    return MoEConfig(shape.experts, shape.top_k, shape.hidden, shape.intermediate, dtype=dtype, block_m=shape.block_m)


def layer_arguments(shape: Shape, dtype: Any, seed: int = 0) -> tuple[jax.Array, ...]:
    """Random x [T, H], ids [T, K], weights [T, K], w_gate_up [E, H, 2I], w_down [E, I, H]; outputs are near 1."""
    rng = np.random.default_rng(seed)
    t, h, i, e, k = shape[:5]

    def normal(*dims: int, depth: int = 1) -> jax.Array:
        return jnp.asarray(rng.standard_normal(dims) / depth**0.5, dtype)

    ids = np.argsort(rng.random((t, e)), axis=1)[:, :k]
    weights = rng.random((t, k)) + 0.5
    return (
        normal(t, h), jnp.asarray(ids, jnp.int32), jnp.asarray(weights / weights.sum(1, keepdims=True), jnp.float32),
        normal(e, h, 2 * i, depth=h), normal(e, i, h, depth=i),
    )  # fmt: skip


def record(
    name: str, value: float, unit: str, baselines: Mapping[str, float], dtype: Any, num_devices: int = 1,
    revision: str = "",
) -> dict:  # fmt: skip
    """Returns one result with everything that is needed to read it later; the keys are SCHEMA."""
    from .. import __version__  # not at import: the package imports nothing from here, but must be complete

    wanted = {"jax", "jaxlib", "numpy", "scipy-openblas32", "jax-cuda13-plugin"}
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    versions = {name: installed[name] for name in sorted(wanted & installed.keys())}
    versions |= {"jax_streammoe": __version__, "python": platform.python_version()}
    values = (
        name, float(f"{value:.4g}"), unit, {k: float(f"{v:.4g}") for k, v in baselines.items()}, device_name(),
        num_devices, np.dtype(dtype).name, versions, revision or commit(),
        datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )  # fmt: skip
    return dict(zip(SCHEMA, values, strict=True))


def write(records: list[dict], path: pathlib.Path) -> None:
    """Writes records as a JSON list; those of other names that the file already holds stay."""
    kept = json.loads(path.read_text()) if path.exists() else []
    names = {r["name"] for r in records}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([r for r in kept if r["name"] not in names] + records, indent=1) + "\n")


def device_name() -> str:
    """The processor's model and the cores this process may use, or the accelerator's name."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    model = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = (line.partition(":") for line in cpuinfo.read_text().splitlines())
        model = next((value.strip() for key, _, value in lines if key.strip() == "model name"), model)
    return f"{model}, {ffi.compiled.default_threads()} cores"


def commit() -> str:
    """The commit of the checkout this package runs from, with "+" when it has changes; else an empty string."""
    root = pathlib.Path(__file__).resolve().parents[2]
    try:
        git = [["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]]
        head, changes = (
            subprocess.run(["git", "-C", str(root), *a], capture_output=True, text=True, check=True).stdout for a in git
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.strip() + ("+" if changes.strip() else "")


def run_module(module: str, environment: Mapping[str, str]) -> Any:
    """Runs `python -m module` with further environment variables; returns the JSON of its last line of output."""
    command, env = [sys.executable, "-m", module], {**os.environ, **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{module} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])
