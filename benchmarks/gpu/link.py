"""What NVLink gives a kernel, by the SMs it runs on: pulls and pushes of rows between two GPUs, beside a copy engine.

Contract: run as `python benchmarks/gpu/link.py --out FILE` on a machine with two GPUs that reach each other, with nvcc
on the path (or `--library` from a machine that has it, by `--build-only`) and the library importable; writes the
records `link/2gpu/{pull,push}/{one,both}/smsN` and `link/2gpu/copy/{one,both}/sms0`: GB/s in one direction, 1 GB = 1e9
bytes, with one direction or both in use. The value is the best over CTAs per SM, which stand beside it. Every kernel is
checked word by word before it is timed; a figure is the median over rounds in which all take turns, each of a few
transfers in a row, by CUDA events.
Trade-off: buffers of 256 MB, larger than an L2, so that rates are those of long transfers from memory to memory.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import pathlib
import statistics
import subprocess

SOURCE = pathlib.Path(__file__).with_name("link.cu")
BUILT = pathlib.Path(__file__).resolve().parents[2] / "build" / "liblink.so"
BYTES, ROW_BYTES, SETS = 256 * 2**20, 8192, 4
KINDS = {"pull": 0, "push": 1, "copy": 2}
SMS, CTAS = (4, 8, 16, 32, 64, 132), (1, 2, 4)
WARM_UP, ROUNDS, REPEATS = 1, 7, 4


def build(path: pathlib.Path) -> pathlib.Path:
    host = os.environ.get("CXX") or ("/usr/bin/g++" if pathlib.Path("/usr/bin/g++").exists() else "")
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["nvcc", "-gencode", "arch=compute_90a,code=sm_90a", "-std=c++20", "-O3", "-shared", "-cudart", "static"]
    command += ["-Xcompiler", "-fPIC,-Wall", *(["-ccbin", host] if host else []), str(SOURCE), "-o", str(path)]
    subprocess.run(command, check=True)
    return path


class Link:
    """The library's functions; a status other than 0 raises with CUDA's text."""

    def __init__(self, path: pathlib.Path):
        self.c = ctypes.CDLL(str(path.resolve()))
        self.c.link_error.restype = ctypes.c_char_p
        count = ctypes.c_int(0)
        status = self.c.link_count(ctypes.byref(count))
        if status or count.value < 2:
            reason = self.c.link_error(status).decode() if status else f"found {count.value}"
            raise SystemExit(f"link.py needs two GPUs: {reason}")
        self.call("link_open", ctypes.c_int64(BYTES), ctypes.c_int64(ROW_BYTES), SETS)

    def call(self, name: str, *args: object) -> None:
        status = getattr(self.c, name)(*args)
        if status:
            raise SystemExit(f"link.py: {name}: {self.c.link_error(status).decode()}")

    def check(self, kind: str, sms: int, ctas: int) -> None:
        wrong = ctypes.c_int64(0)
        self.call("link_check", KINDS[kind], sms, ctas, ctypes.byref(wrong))
        if wrong.value:
            raise RuntimeError(f"{kind} on {sms} SMs, {ctas} CTAs each: {wrong.value} words are wrong")

    def rate(self, kind: str, both: bool, sms: int, ctas: int) -> float:
        """GB/s in one direction."""
        milliseconds = ctypes.c_float(0.0)
        self.call("link_run", KINDS[kind], int(both), sms, ctas, REPEATS, ctypes.byref(milliseconds))
        return REPEATS * BYTES / milliseconds.value / 1e6


def measure(link: Link) -> dict[tuple[str, bool, int], dict[int, float]]:
    """(kind, both directions, SMs) -> CTAs per SM -> median rate."""
    most = link.c.link_sms()
    cases = [(kind, min(sms, most), ctas) for kind in ("pull", "push") for sms in SMS for ctas in CTAS]
    cases.append(("copy", 0, 0))
    for case in cases:
        link.check(*case)
    samples: dict[tuple, list[float]] = {}
    for turn in range(WARM_UP + ROUNDS):
        for kind, sms, ctas in cases:
            for both in (False, True):
                rate = link.rate(kind, both, sms, ctas)
                if turn >= WARM_UP:
                    samples.setdefault((kind, both, sms, ctas), []).append(rate)
    rates: dict[tuple[str, bool, int], dict[int, float]] = {}
    for (kind, both, sms, ctas), found in samples.items():
        rates.setdefault((kind, both, sms), {})[ctas] = statistics.median(found)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("link.json"))
    parser.add_argument("--library", type=pathlib.Path, help="built before; otherwise nvcc builds it")
    parser.add_argument("--build-only", action="store_true", help=f"build {BUILT.name} and stop")
    parser.add_argument("--commit", default="", help="of the measured tree, where it is not a git checkout")
    options = parser.parse_args()
    library = options.library or build(BUILT)
    if options.build_only:
        print(library)
        return
    rates = measure(Link(library))

    import numpy as np  # JAX comes last: records name its versions and device, the measurement uses none of it

    from jax_streammoe.bench.measure import record

    add = functools.partial(record, unit="GB/s", dtype=np.uint8, num_devices=2, revision=options.commit)
    records = []
    for (kind, both, sms), by_ctas in rates.items():
        what = f"link/2gpu/{kind}/{'both' if both else 'one'}/sms{sms}"
        baselines = {f"ctas{n}": rate for n, rate in by_ctas.items() if n}
        records.append(add(what, max(by_ctas.values()), baselines=baselines))
        print(f"{what:30} {records[-1]['value']:7.1f} GB/s", records[-1]["baselines"], flush=True)
    options.out.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the buffers are not XLA's
    main()
