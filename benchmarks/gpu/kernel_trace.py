"""The kernels that ran on each GPU during a trace of JAX's profiler, by name, phase of the layer, and time.

Contract: `read(folder)` takes what `jax.profiler.trace(folder)` wrote; a kernel inside a command buffer is one like any
other. Trade-off: a traced program is slower on the host than one that is not, so only times on the device count.
"""

from __future__ import annotations

import pathlib
import re
from typing import NamedTuple

import jax

# The library's kernels; a name that the profiler gives contains one of these, mangled or not.
PHASES = {
    "open_call": "other",
    "publish_route": "publish",
    "publish_layout": "publish",
    "await_chunks": "await",
    "await_resident": "await",
    "fetch_chunks": "fetch",
    "plan_count": "plan",
    "plan_scatter": "plan",
    "gemm_up": "up",
    "gemm_down": "down",
    "seal_macro": "seal",
    "combine_sm90": "combine",
    "close_call": "close",
    "advance_call": "close",
}
OPEN, CLOSE = "open_call", ("close_call", "advance_call")


class Kernel(NamedTuple):
    """One kernel of a GPU's trace."""

    start_ns: float
    duration_ns: float
    name: str

    @property
    def short(self) -> str:
        """The library's name for its kernels, the first word of others."""
        return next((known for known in PHASES if known in self.name), re.split(r"[<(]", self.name)[0][:60])

    @property
    def phase(self) -> str:
        """One of the values of PHASES."""
        return PHASES.get(self.short, "other")


def read(folder: pathlib.Path) -> list[list[Kernel]]:
    """The kernels of every GPU of a trace, by start."""
    path = next(folder.glob("**/*.xplane.pb"))
    planes = {}
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if "GPU" in plane.name:
            lines = [line for line in plane.lines if "Stream" in line.name]
            events = [Kernel(e.start_ns, e.duration_ns, e.name) for line in lines for e in line.events]
            planes[int(re.findall(r"\d+", plane.name)[-1])] = sorted(events)
    return [planes[n] for n in sorted(planes)]
