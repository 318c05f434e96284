"""Parts of benchmarks/gpu that need no GPU: layers over ranks from stock parts, donated steps, reading of traces.

On CPU XLA has no ragged_all_to_all: `exchange` below does what its documentation says, from all-gathers, and refuses
offsets and sizes that the ranks do not agree on by putting NaN in their place.
"""

from __future__ import annotations

import importlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_streammoe as sm
from tests.helpers.meshes import mesh_of

PROGRAMS = pathlib.Path(__file__).resolve().parents[1] / "benchmarks" / "gpu"
RANKS, T, H, I, E, K = 4, 24, 32, 16, 8, 3


@pytest.fixture
def program(monkeypatch):
    """Imports a program of benchmarks/gpu by name; they import each other as scripts do."""
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return importlib.import_module


def exchange(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    swap = lambda a: jax.lax.all_to_all(a, axis_name, 0, 0, tiled=True)
    agreed = jnp.all(send_sizes == swap(recv_sizes))
    operands = jax.lax.all_gather(operand, axis_name)
    starts, places = swap(input_offsets), swap(output_offsets)
    rows, per_rank = jnp.arange(output.shape[0]), len(starts) // operands.shape[0]
    for n in range(len(starts)):
        here = (rows >= places[n]) & (rows < places[n] + recv_sizes[n])
        sent = operands[n // per_rank][jnp.clip(rows - places[n] + starts[n], 0, len(operand) - 1)]
        output = jnp.where(here[:, None], sent, output)
    return jnp.where(agreed, output, jnp.full_like(output, jnp.nan))


@pytest.mark.parametrize("routing", ["uniform", "one_expert", "one_rank"])
@pytest.mark.parametrize("name", ["all_gather", "pallas", "ragged_all_to_all", "ragged_all_to_all_by_expert"])
def test_layers_from_stock_parts(program, rng, name, routing):
    rank_layers = program("rank_layers")
    assert name in rank_layers.STOCK
    mesh, config = mesh_of({"ep": RANKS}), sm.MoEConfig(E, K, H, I, dtype=jnp.float32)
    few = {"uniform": E, "one_expert": K, "one_rank": E // RANKS}[routing]
    ids = rng.integers(0, few, (RANKS * T, K)) if routing == "one_rank" else np.argsort(rng.random((RANKS * T, few)))
    if routing == "one_rank":
        ids = ids + 2 * E // RANKS
    args = (
        rng.standard_normal((RANKS * T, H)).astype(np.float32), ids[:, :K].astype(np.int32),
        rng.random((RANKS * T, K)).astype(np.float32),
        (rng.standard_normal((E, H, 2 * I)) / H**0.5).astype(np.float32),
        (rng.standard_normal((E, I, H)) / I**0.5).astype(np.float32),
    )  # fmt: skip
    layer = rank_layers.make(name, config, mesh, dot=jax.lax.ragged_dot, exchange=exchange)
    want = np.asarray(sm.reference(*args, config=config))
    np.testing.assert_allclose(np.asarray(jax.jit(layer)(*args)), want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_outputs_and_ring_stay_where_they_are(program):
    ranks = program("ranks")
    mesh = mesh_of({"ep": 2})
    config, batches, experts = ranks.make((H, I, E, K), T, mesh, 3)
    ring = sm.make_ring(config, chunk_tokens=T, num_slots=1, mesh=mesh, name="benchmark")
    out, run = ranks.outputs(batches), ranks.ring_program(sm.expert_parallel(config, mesh=mesh))
    want = [np.asarray(sm.reference(*batch, *experts, config=config), np.float32) for batch in batches]
    addresses = lambda: [
        shard.data.unsafe_buffer_pointer() for a in (*out, *jax.tree.leaves(ring)) for shard in a.addressable_shards
    ]
    begin = addresses()
    for _ in range(2):
        out, ring = jax.block_until_ready(run(out, ring, batches, *experts))
        assert addresses() == begin
    for got, wanted in zip(out, want, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), wanted, rtol=0, atol=2.0**-7 * np.abs(wanted).max())
    assert sm.close_ring("benchmark")


def test_timeline_takes_the_last_call_that_is_whole(program):
    timeline = program("timeline")
    names = ["open_call", "close_call", "_ZN3fooopen_call", "void gemm_up_sm90<1>(int)", "loop_fusion", "close_call"]
    kernels = [timeline.Kernel(1000.0 * n, 500.0, name) for n, name in enumerate([*names, "advance_call", "open_call"])]
    call = timeline.last_call(kernels)
    rows = timeline.rows_of([call, call])
    assert [(r["phase"], r["name"], r["start_us"]) for r in rows if r["rank"] == 1] == [
        ("other", "open_call", 0.0), ("up", "gemm_up", 1.0), ("other", "loop_fusion", 2.0),
        ("close", "close_call", 3.0), ("close", "advance_call", 4.0),
    ]  # fmt: skip
    assert timeline.last_call(kernels[:1]) == timeline.last_call(kernels[1:2]) == []


def test_time_between_calls_counts_inside_programs_only(program):
    layer = program("layer")
    assert layer.call_times([5.0, 15.0, 27.0, 100.0, 111.0, 120.0], 3) == [10.0, 12.0, 11.0, 9.0]
    for ends in ([], [1.0, 2.0]):
        with pytest.raises(RuntimeError, match=f"the trace shows {len(ends)} calls, want a multiple of 3"):
            layer.call_times(ends, 3)
