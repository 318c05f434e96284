"""Starts the processes of a test that needs several, and shows what each of them printed when something is wrong.

Contract: `python SCRIPT SCENARIO RANK PROCESSES PORT FOLDER ...` per rank, on a free port for jax.distributed; a
process that is still there after the limit is killed, and the test fails. The environment is the test's own, without
what it says about JAX's devices.
"""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

LIMIT_S = 120


def run(
    script: str | pathlib.Path, scenario: str, processes: int, folder: pathlib.Path, *arguments: object,
    env: Sequence[dict[str, str]] = (), codes: Sequence[int] = (), limit_s: float = LIMIT_S,
) -> list[str]:  # fmt: skip
    """Runs all to their end; -> what each printed. `env`: of each rank; `codes`: exit status of each, 0 if empty."""
    port, common = free_port(), environment()
    return finish(
        [
            start(script, scenario, rank, processes, port, folder, *arguments, env=common | (env[rank] if env else {}))
            for rank in range(processes)
        ],
        codes=codes, limit_s=limit_s,
    )  # fmt: skip


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment() -> dict[str, str]:
    """The environment of a process that chooses its devices itself."""
    return {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")}


def finish(
    started: Sequence[subprocess.Popen[str]], *, codes: Sequence[int] = (), limit_s: float = LIMIT_S
) -> list[str]:
    """Waits for all; -> what each printed. `codes`: the exit status that each must have, 0 if empty."""
    try:
        outputs = [output_of(process, limit_s) for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    ended = [process.returncode for process in started]
    report = "\n".join(f"--- exit {code}\n{text}" for code, text in zip(ended, outputs, strict=True))
    assert ended == (list(codes) or [0] * len(started)), report
    return outputs


def start(*arguments: object, env: Mapping[str, str], before: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Starts `python *arguments`, behind a command that runs it if one is given, in a session of its own."""
    return subprocess.Popen(
        [*before, sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=env,
    )  # fmt: skip


def output_of(process: subprocess.Popen[str], limit_s: float) -> str:
    """All that a process prints until it ends; it and its children are killed after `limit_s` seconds."""
    try:
        return process.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0] + f"\nkilled after {limit_s} s"
