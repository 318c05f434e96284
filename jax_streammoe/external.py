"""Publishing from CUDA kernels of your own: where the header lies, and what a kernel must be told about a ring.

Contract: `include_dir()` is the folder for the compiler's -I; `#include "protocol/publish.cuh"` from there needs
nothing else of the library. `ring_attributes(ring)` are the attributes from which a handler builds the `RingView` of
that header. Both are plain data: nothing here runs on a device.
"""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np

from .ring import Ring, RingRef, RingSpec


def include_dir() -> str:
    """Returns the folder that holds `protocol/publish.cuh`, the header for CUDA producers, and what it includes.

    Raises RuntimeError when the headers are not there, in a build without them.
    """
    package = pathlib.Path(__file__).resolve().parent
    for folder in (package / "include", package.parent / "cc"):  # installed, or a checkout
        if (folder / "protocol" / "publish.cuh").exists():
            return str(folder)
    raise RuntimeError(f"the headers of jax_streammoe are missing in {package / 'include'}: install the library again")


def ring_attributes(ring: Ring | RingRef | RingSpec) -> dict[str, np.int64]:
    """Returns the fields of a ring's `RingShape` as int64 attributes for jax.ffi.ffi_call, in the header's order.

    Raises TypeError for what is not a ring.
    """
    spec = ring if isinstance(ring, RingSpec) else getattr(ring, "spec", None)
    if not isinstance(spec, RingSpec):
        raise TypeError(f"ring must come from make_ring, got {type(ring).__name__}")
    return {name: np.int64(value) for name, value in dataclasses.asdict(spec.shape).items()}
