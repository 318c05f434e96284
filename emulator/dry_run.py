"""Runs benchmarks/gpu/backward_check.py on emulated kernels: `python dry_run.py LIBRARY [check] [bits] [corners]`.

Contract: needs a CPU build of torch and the library of `run.sh library`; small problems, minutes. That every check can
fail is shown by building the library from a changed source. Trade-off: what the emulator assumes of the hardware is
not checked.
"""

from __future__ import annotations

import pathlib
import sys
import types

sys.modules["pynvml"] = types.ModuleType("pynvml")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "benchmarks" / "gpu"))

import torch  # noqa: E402

torch.cuda.current_stream = lambda: types.SimpleNamespace(cuda_stream=0)
torch.cuda.synchronize = lambda: None

import backward_check  # noqa: E402
import kernels  # noqa: E402

kernels.DEV = "cpu"
library, what = kernels.Library(sys.argv[1]), sys.argv[2:] or ["check", "bits", "corners"]
backward_check.SIZES = [(120, 2, 72, 40, 4), (40, 3, 136, 136, 3)]
if "check" in what:
    backward_check.check_parts(library)
if "bits" in what:
    for kind in ("swiglu", "relu2"):
        for dtype in kernels.DTYPES:
            options = dict(biased=True, packed=dtype == torch.float16, dtype=dtype, masked=0)
            backward_check.check_bits_of(library, backward_check.make_layer(90, 2, 72, 40, 3, kind, **options))
            print(f"bits {kind} {dtype} ok")
if "corners" in what:
    backward_check.check_corners(library)
