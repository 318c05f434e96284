"""What the tests of several ranks share: meshes, modes of a call, routings that stress a transport, bits.

Contract: a mode names one way to run the layer over ranks; all of them promise the same bits as `moe` on one device.
Programs are cached per (config, mesh, mode), so that tests which differ in data only compile once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

import jax_streammoe as sm
from tests.helpers import oracle

MODES = {
    "batch": {},
    "serial-packed": {"policy": "serial", "schedule": "packed", "chunks": None},
    "serial-chunk": {"policy": "serial", "schedule": "chunk", "chunks": None},
    "overlap-packed": {"policy": "overlap", "schedule": "packed", "chunks": None},
    "overlap-chunk": {"policy": "overlap", "schedule": "chunk", "chunks": None},
    "xla": {},
}
RING_MODES = tuple(mode for mode in MODES if mode != "xla")


def mesh_of(num_ranks: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:num_ranks]), ("ep",), axis_types=(AxisType.Auto,))


def given(x_c: jax.Array, ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A route function that takes its routing as token_args."""
    return ids, weights


@functools.cache
def program(config: sm.MoEConfig, mesh: Mesh, mode: str) -> Callable[..., Any]:
    """jitted (x, ids, weights, w_gate_up, w_down, num_valid, ring) -> y, ring, info; the ring is donated."""
    ep = sm.expert_parallel(config, mesh=mesh, transport="xla" if mode == "xla" else "pull")

    def run(x: Any, ids: Any, weights: Any, w_gate_up: Any, w_down: Any, num_valid: Any, ring: Any) -> Any:
        common = dict(ring=ring, num_valid=num_valid, return_stats=True)
        if mode in ("batch", "xla"):
            return ep.moe(x, ids, weights, w_gate_up, w_down, **common)
        return ep.stream(x, given, w_gate_up, w_down, token_args=(ids, weights), **common, **MODES[mode])

    return jax.jit(run, donate_argnames="ring")


@functools.cache
def one_device(config: sm.MoEConfig) -> Callable[..., Any]:
    """jitted (x, ids, weights, w_gate_up, w_down) -> y, stats of `moe` on one device."""
    return jax.jit(functools.partial(sm.moe, config=config, return_stats=True))


def run(
    problem: oracle.Problem, mesh: Mesh, mode: str, ring: Any, num_valid: Any = None
) -> tuple[np.ndarray, Any, Any]:
    """-> y, the next ring, stats."""
    valid = None if num_valid is None else jnp.asarray(num_valid, jnp.int32)
    y, ring, info = program(problem.config, mesh, mode)(*problem.args, valid, None if mode == "xla" else ring)
    return np.asarray(jax.block_until_ready(y)), ring, info.stats


def assert_bits(got: Any, want: Any, what: str = "") -> None:
    """Equal shape, dtype and bits; signed zeros and NaN payloads count."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, want {want.dtype}"
    raw = np.dtype(f"u{got.dtype.itemsize}")
    got, want = (np.ascontiguousarray(a).view(raw) for a in (got, want))
    np.testing.assert_array_equal(got, want, err_msg=what)


# Routings [R * T, K] that stress one thing each; L = E / R experts per rank.
def one_expert(rng: Any, R: int, T: int, E: int, K: int) -> np.ndarray:
    return np.full((R * T, K), E // 2)


def one_rank(rng: Any, R: int, T: int, E: int, K: int) -> np.ndarray:
    return (R - 1) * (E // R) + rng.integers(0, E // R, (R * T, K))


def all_remote(rng: Any, R: int, T: int, E: int, K: int) -> np.ndarray:
    owner = np.repeat(np.arange(R), T)[:, None]
    return (owner + rng.integers(1, max(R, 2), (R * T, K))) % R * (E // R) + rng.integers(0, E // R, (R * T, K))


def one_rank_masked(rng: Any, R: int, T: int, E: int, K: int) -> np.ndarray:
    ids = rng.integers(0, E, (R * T, K))
    ids[T : 2 * T] = -1
    return ids


def all_masked(rng: Any, R: int, T: int, E: int, K: int) -> np.ndarray:
    return np.full((R * T, K), -1)


def duplicates(rng: Any, R: int, T: int, E: int, K: int) -> np.ndarray:
    return np.repeat(rng.integers(0, E, (R * T, 1)), K, axis=1)


def holes_and_strays(rng: Any, R: int, T: int, E: int, K: int) -> np.ndarray:
    ids = rng.integers(0, E, (R * T, K))
    ids = np.where(rng.random(ids.shape) < 0.3, -1, ids)
    return np.where(rng.random(ids.shape) < 0.2, rng.choice([-2, E, 2**31 - 1, -(2**31)], ids.shape), ids)


ROUTINGS = (one_expert, one_rank, all_remote, one_rank_masked, all_masked, duplicates, holes_and_strays)
