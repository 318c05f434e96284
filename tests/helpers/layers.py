"""The layer by every way in on one device, behind one function: values, statistics and gradients of a problem.

Contract: `run(how, problem)` computes what `oracle.forward` and `oracle.backward` describe, as NumPy arrays. `HOWS` are
the batch-ready call and a stream on a small ring, serial and overlapped: chunks of C = 8 tokens and S = 3 slots, so
that the usual 22 tokens are two full chunks and a partial one, and more than 24 tokens wrap the ring. "kept" is the
batch-ready call that keeps gate and up for its backward, whose bits are its own.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import numpy as np

import jax_streammoe as sm
from tests.helpers import oracle

HOWS = ("moe", "serial", "overlap")
RINGLESS = ("moe", "kept")
CHUNK_TOKENS, NUM_SLOTS = 8, 3
NAMES = ("x", "topk_weights", "w_gate_up", "w_down", "b_gate_up", "b_down")
_numbers = itertools.count()
_rings: dict[sm.MoEConfig, sm.Ring] = {}  # kept from call to call, so that programs are compiled once


class Result(NamedTuple):
    """y [T, H], Stats, and the gradients by name (None when not asked for)."""

    y: np.ndarray
    stats: sm.Stats
    grads: dict[str, np.ndarray] | None


def ring_for(config: sm.MoEConfig, **options: Any) -> sm.Ring:
    """A small ring with a name of its own; use it as a context manager."""
    sizes = {"chunk_tokens": CHUNK_TOKENS, "num_slots": NUM_SLOTS} | options
    return sm.make_ring(config, name=f"layers-{next(_numbers)}", **sizes)


def layer(
    how: str, config: sm.MoEConfig, ring: sm.Ring | None, ids: Any, operands: dict[str, Any], num_valid: Any = None,
    checks: bool = False,
) -> tuple:  # fmt: skip
    """(y, stats, ring) of operands by name, inside jit."""
    x, weights = operands["x"], operands["topk_weights"]
    experts = (operands["w_gate_up"], operands["w_down"])
    options = {"config": config, "num_valid": num_valid, "checks": checks, "return_stats": True}
    options |= {name: operands.get(name) for name in ("b_gate_up", "b_down")}
    if how in RINGLESS:
        return *sm.moe(x, ids, weights, *experts, **options, save_gate_up=how == "kept"), ring
    y, ring, info = sm.stream_moe(
        x, lambda _, *routes: routes, *experts, ring=ring, token_args=(ids, weights), policy=how, chunks=None, **options
    )
    return y, info.stats, ring


@functools.partial(jax.jit, static_argnames=("how", "config", "checks", "grad"), donate_argnames="ring")
def _run(how, config, checks, grad, ring, ids, operands, dy, num_valid):
    def f(operands):
        y, stats, out = layer(how, config, ring, ids, operands, num_valid, checks)
        return y, (stats, out)

    if not grad:
        y, (stats, out) = f(operands)
        return y, stats, None, out
    y, pullback, (stats, out) = jax.vjp(f, operands, has_aux=True)
    return y, stats, pullback(dy)[0], out


def run(how: str, problem: oracle.Problem, *, num_valid: Any = None, checks: bool = False, grad: bool = True) -> Result:
    """Runs a problem; checks that every gradient has its primal's shape and dtype."""
    operands = {name: getattr(problem, name) for name in NAMES if getattr(problem, name) is not None}
    config, ring = problem.config, None
    if how not in RINGLESS:
        ring = _rings.pop(config, None) or ring_for(config)  # lost when the call raises
    y, stats, grads, ring = _run(how, config, checks, grad, ring, problem.topk_ids, operands, problem.dy, num_valid)
    y, stats, grads = jax.tree.map(np.asarray, jax.block_until_ready((y, stats, grads)))
    if ring is not None:
        _rings[config] = ring
    assert (y.shape, y.dtype) == (problem.x.shape, problem.x.dtype)
    for name, value in (grads or {}).items():
        assert (value.shape, value.dtype) == (operands[name].shape, operands[name].dtype), name
    return Result(y, stats, grads)


def check(how: str, problem: oracle.Problem, *, num_valid: int | None = None, grad: bool = True) -> Result:
    """Runs a problem and compares y, every gradient and the statistics with the oracle."""
    result = run(how, problem, num_valid=num_valid, grad=grad)
    config, ids = problem.config, problem.topk_ids
    depth = config.hidden + config.intermediate + ids.size
    oracle.assert_close("y", result.y, oracle.forward(problem, num_valid), config.dtype, depth)
    if grad:
        want = oracle.backward(problem, num_valid, kept=how == "kept")
        assert result.grads.keys() == want.keys()
        for name, value in want.items():
            oracle.assert_close(f"d_{name}", result.grads[name], value, config.dtype, depth)
    valid = np.where(np.arange(len(ids))[:, None] < (len(ids) if num_valid is None else num_valid), ids, -1)
    kept = oracle.kept_routes(problem, num_valid)
    in_range = (valid >= 0) & (valid < config.num_experts)
    np.testing.assert_array_equal(result.stats.expert_rows, np.bincount(ids[kept], minlength=config.num_experts))
    counts = [int(c) for c in result.stats[1:]]
    assert counts == [(in_range & ~kept).sum(), (~in_range & (valid != -1)).sum(), (valid == -1).sum()]
    return result


def assert_same_bits(got: Any, want: Any, what: str = "") -> None:
    """Equal shapes, dtypes and raw bytes of two pytrees of arrays (NaN equals the same NaN, +0 differs from -0)."""
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for a, b in zip(map(np.asarray, got), map(np.asarray, want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), what
        raw = [np.ascontiguousarray(v).reshape(-1).view(np.uint8) for v in (a, b)]
        np.testing.assert_array_equal(*raw, err_msg=what)
