"""`python -m jax_streammoe`: exit statuses, one-line errors, files, and that the demonstration judges what it says.

The demonstration runs in processes of its own, because it chooses the number of devices; its pure parts (text, entropy,
verdict on equal bits, targets, records) are tested here directly.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

import jax_streammoe as sm
from jax_streammoe import __main__ as cli
from jax_streammoe import bench
from jax_streammoe.bench import measure, shapes
from jax_streammoe.demo import data, model, report

ROOT = pathlib.Path(__file__).parents[1]
PNG = b"\x89PNG\r\n\x1a\n"


def command(*args: str) -> list[str]:
    return [sys.executable, "-W", "error", "-m", "jax_streammoe", *args]


def run(*args: str, cwd: pathlib.Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(command(*args), cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def assert_trace(folder: pathlib.Path, num_ranks: int) -> None:
    """The two files of a call exist; the trace has every phase of every rank and chunk."""
    assert (folder / "timeline.png").read_bytes().startswith(PNG)
    spans = [e for e in json.loads((folder / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    for phase in ("produce", "publish_layout", "publish_route", "dispatch"):
        seen = sorted((e["args"]["rank"], e["args"]["chunk"]) for e in spans if e["name"] == phase)
        assert seen == [(r, n) for r in range(num_ranks) for n in range(model.CHUNKS)], phase
    assert all(e["dur"] >= 0 for e in spans)


@pytest.mark.slow
@pytest.mark.core
def test_demo_learns_checks_and_writes(tmp_path):
    devices = 4  # the default
    done = run("demo", "--steps", "15", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    loss, entropy = (float(done.stdout.split(words)[1].split()[0]) for words in ("held-out loss ", "of the text "))
    assert 1.0 < loss < entropy - 0.5
    assert done.stdout.count("bit-identical") == 4
    assert "DIFFERS" not in done.stdout
    assert f"{devices} virtual CPU devices" in done.stdout
    assert f"Ring 'demo': {devices} ranks x {model.CHUNKS} slots" in done.stdout
    assert_trace(tmp_path / "streammoe_out", devices)


@pytest.mark.slow
def test_demo_says_when_it_learned_too_little(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(np.random.default_rng(0).integers(0, 256, data.MIN_BYTES, np.uint8).tobytes())
    done = run("--steps", "2", "--devices", "1", "--text", str(text), "--out", "here", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "learned too little in 2 steps" in done.stdout
    assert_trace(tmp_path / "here", 1)  # written before the verdict


@pytest.mark.slow
def test_trace_command_and_interrupt(tmp_path):
    done = run("trace", "--devices", "2", "--out", "t", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_trace(tmp_path / "t", 2)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    out = (tmp_path / "log").open("w+")
    endless = command("--steps", "100000", "--devices", "2")
    process = subprocess.Popen(endless, cwd=tmp_path, env=env, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 120
        while "bytes;" not in (tmp_path / "log").read_text() and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(5)  # compiling or training, either must end cleanly
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        out.close()
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    assert log.rstrip().endswith("interrupted")


@pytest.mark.core
def test_doctor_prints_every_finding(capsys):
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    findings = sm.doctor()
    assert {"python", "jax", "jaxlib", "CPU backend", "CUDA backend"} <= {f.what for f in findings}
    for finding in findings:
        assert finding.what in printed
    assert f"jax_streammoe {sm.__version__}" in printed
    assert next(f for f in findings if f.what == "CPU backend").ok


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["--text", "missing.txt"], "--text missing.txt: No such file or directory"),
        (["demo", "--text", "empty"], "--text empty: the file is empty"),
        (["--text", "short"], "--text short: 100 bytes are too few to learn from, give at least 8192"),
        (["--text", "."], "--text .: Is a directory"),
        (["--text", "long", "--out", "empty"], "--out empty: File exists"),
        (["trace", "--out", "empty"], "--out empty: File exists"),
    ],
)
def test_unusable_files_are_one_line_and_status_2(args, wanted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, size in (("empty", 0), ("short", 100), ("long", data.MIN_BYTES)):
        pathlib.Path(name).write_bytes(b"x" * size)
    with pytest.raises(SystemExit) as error:
        cli.main(args)
    assert error.value.code == 2
    assert capsys.readouterr().err == f"python -m jax_streammoe: error: {wanted}\n"


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["--devices", "3"], "--devices must divide the model's 8 experts, got 3"),
        (["trace", "--devices", "16"], "--devices must divide the model's 8 experts, got 16"),
        (["--devices", "0"], "must be a positive integer, got '0'"),
        (["--steps", "many"], "must be a positive integer, got 'many'"),
        (["bench", "cpu/none"], "CASE must be one of cpu/layer_fwd/f32, "),
        (["demo", "extra"], "unrecognized arguments: extra"),
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
    ],
)
def test_wrong_arguments_are_status_2_and_name_the_argument(args, wanted, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(args)
    assert error.value.code == 2
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("args", [["--help"], ["demo", "--help"], ["--version"]])
def test_help_and_version_are_status_0(args, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(args)
    assert error.value.code == 0
    assert "jax_streammoe" in capsys.readouterr().out


def test_interrupt_is_status_130(monkeypatch, capsys):
    def interrupted() -> None:
        raise KeyboardInterrupt

    module = sys.modules["jax_streammoe.doctor"]  # in the package, the name is the function
    monkeypatch.setattr(module, "doctor", interrupted)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_unigram_entropy_and_split():
    assert data.unigram_bits(np.zeros(100, np.uint8)) == 0.0
    assert data.unigram_bits(np.arange(256, dtype=np.uint8)) == pytest.approx(8.0)
    assert data.unigram_bits(np.array([0, 0, 0, 1], np.uint8)) == pytest.approx(0.8112781, abs=1e-6)
    training, held_out = data.split(np.arange(100, dtype=np.uint8))
    assert (training[-1], held_out[0], len(held_out)) == (89, 90, 10)


def test_default_text_is_real_and_batches_are_windows_of_it():
    origin, text = data.load_text(None)
    assert origin == "pydoc_data.topics"
    assert 3.5 < data.unigram_bits(text) < 5.5
    batch = next(data.batches(text, 4, 16, seed=3))
    assert (batch.shape, batch.dtype) == ((4, 17), np.int32)
    assert all(row.astype(np.uint8).tobytes() in text.tobytes() for row in batch)
    np.testing.assert_array_equal(batch, next(data.batches(text, 4, 16, seed=3)))


def test_comparisons_see_one_wrong_bit_and_one_wrong_value(rng):
    y = jnp.asarray(rng.standard_normal((8, 16)), jnp.float32)
    off = y.at[3, 4].set(jnp.nextafter(y[3, 4], jnp.float32(9)))
    assert report._same_bits("", y, y) == report.Finding("", True, "all 128 values bit-identical")
    assert report._same_bits("", y, off) == report.Finding("", False, "1 of 128 values differ")
    assert not report._same_bits("", jnp.zeros(2), -jnp.zeros(2)).ok
    assert report._close("", off, y).ok
    assert not report._close("", y.at[0, 0].add(1e-3), y).ok
    assert not report._close("", jnp.zeros_like(y), y).ok


def test_every_case_has_a_target_and_targets_have_the_right_side():
    assert list(bench.CASES) == list(shapes.TARGETS)
    assert shapes.meets_target("cpu/layer_fwd/f32", 10.0)
    assert not shapes.meets_target("cpu/layer_fwd/f32", 9.9)
    assert shapes.meets_target("cpu/stream_overlap", 0.75)
    assert not shapes.meets_target("cpu/stream_overlap", 0.76)
    assert shapes.Shape(4, 8, 16, 2, 2).flops == 4 * 2 * (2 * 8 * 32 + 2 * 16 * 8)


def test_records_are_complete_and_replace_those_of_the_same_name(tmp_path):
    path = tmp_path / "new" / "cpu.json"
    first = measure.record("a", 1.23456, "x", {"ms": 2.0}, jnp.bfloat16)
    assert tuple(first) == measure.SCHEMA
    assert (first["value"], first["dtype"], first["num_devices"]) == (1.235, "bfloat16", 1)
    assert {"jax", "jaxlib", "python", "jax_streammoe"} <= set(first["versions"])
    measure.write([first, measure.record("b", 1.0, "x", {}, jnp.float32)], path)
    measure.write([measure.record("a", 2.0, "x", {}, jnp.float32)], path)
    assert [(r["name"], r["value"]) for r in json.loads(path.read_text())] == [("b", 1.0), ("a", 2.0)]


def test_recorded_results_have_the_schema_and_meet_their_targets():
    records = json.loads((ROOT / "benchmarks" / "results" / "cpu.json").read_text())
    assert {r["name"] for r in records} == set(bench.CASES)
    for r in records:
        assert tuple(r) == measure.SCHEMA
        assert shapes.meets_target(r["name"], r["value"]), r["name"]


@pytest.mark.core
def test_alternate_runs_every_version_in_turns():
    calls: list[str] = []
    versions = {name: lambda name=name: calls.append(name) for name in ("a", "b")}
    times = measure.alternate(versions, rounds=2, repeats={"b": 2})
    assert calls == ["a", "b", "a", "b", "b", "a", "b", "b"]
    assert set(times) == {"a", "b"}
    assert all(0 <= t.wall_s < 1 for t in times.values())
