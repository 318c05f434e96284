"""The layers over ranks that benchmarks/gpu sets beside `ep.moe` compute the same layer.

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
def rank_layers(monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return importlib.import_module("rank_layers")


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
def test_layers_from_stock_parts(rank_layers, rng, name, routing):
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
