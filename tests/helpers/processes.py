"""Starts the processes of a test that needs several, and shows what each of them printed when something is wrong.

Contract: `python SCRIPT SCENARIO RANK PROCESSES PORT FOLDER` per rank, on a free port for jax.distributed; a process
that is still there after the limit is killed, and the test fails. The environment is the test's own, without what it
says about JAX's devices.
"""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

LIMIT_S = 120


def run(
    script: str | pathlib.Path, scenario: str, processes: int, folder: pathlib.Path, *,
    env: Sequence[dict[str, str]] = (), codes: Sequence[int] = (), limit_s: float = LIMIT_S,
) -> list[str]:  # fmt: skip
    """Runs all to their end; -> what each printed. `env`: of each rank; `codes`: exit status of each, 0 if empty."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    started = [
        subprocess.Popen(
            [sys.executable, str(script), scenario, *map(str, (rank, processes, port, folder))],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env=common | (env[rank] if env else {}),
        )
        for rank in range(processes)
    ]  # fmt: skip
    outputs = []
    try:
        for process in started:
            try:
                outputs.append(process.communicate(timeout=limit_s)[0])
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                outputs.append(process.communicate()[0] + f"\nkilled after {limit_s} s")
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    ended = [process.returncode for process in started]
    report = "\n".join(f"--- exit {code}\n{text}" for code, text in zip(ended, outputs, strict=True))
    assert ended == (list(codes) or [0] * processes), report
    return outputs
