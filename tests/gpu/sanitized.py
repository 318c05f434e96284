"""A few small calls of the layer in a process of their own: `python sanitized.py OUT CALL...`.

Contract: runs the calls named on the command line, in this order, and writes the bytes of y, or of all gradients, of
each to OUT (.npz). A call is a problem and a way to run it, fixed by its name, so whoever started the process can
compute the same; the first name is the first thing that the process does on its GPU. The names cover every kernel, with
tails in every dimension. Trade-off: nothing here draws random numbers or multiplies on the GPU, so that a sanitizer has
little to do beside the library's kernels.
"""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax_streammoe as sm
from tests.helpers import oracle

TIMEOUT_S = 60.0  # of the ring; a sanitizer is slow

# 1024 rows per expert. Four chunks in two slots are two waves, the first of which carries partial blocks.
WAVES = dict(T=512, H=136, I=72, E=2, K=4, masked=0.05, invalid=0.05)
# Fewer than 8 rows per expert: rows are copied before the product, which otherwise gathers them.
FEW = dict(T=20, H=136, I=72, E=12, K=3)


class Call(NamedTuple):
    """Keywords of `make_problem`; of `make_ring` and `stream_moe`, None for the batch-ready call; whether to take the
    gradients of that call instead of y, and from what it kept."""

    problem: dict[str, Any]
    ring: dict[str, Any] | None = None
    stream: dict[str, Any] | None = None
    gradient: bool = False
    save_gate_up: bool = False


_RING = dict(chunk_tokens=256, num_slots=2)
CALLS = {
    "moe": Call(WAVES),
    "copied": Call(FEW | dict(use_bias=True)),
    "serial": Call(WAVES, _RING, dict(policy="serial", chunks=4)),
    "overlap": Call(WAVES, _RING, dict(policy="overlap", chunks=4)),
    "capacity": Call(WAVES | dict(capacity=300), _RING, dict(policy="serial", chunks=2)),
    # Two macro-chunks of four chunks, each a wave.
    "half": Call(
        WAVES | dict(dtype=jnp.float16, use_bias=True, activation="relu2"),
        dict(chunk_tokens=64, num_slots=4),
        dict(policy="overlap", schedule="chunk", chunks=None),
    ),
    "gradient": Call(WAVES | dict(use_bias=True), gradient=True),
    "gradient_half": Call(FEW | dict(dtype=jnp.float16, use_bias=True, activation="relu2", capacity=4), gradient=True),
    "gradient_kept": Call(WAVES | dict(use_bias=True), gradient=True, save_gate_up=True),
    "gradient_kept_half": Call(
        FEW | dict(dtype=jnp.float16, use_bias=True, activation="relu2", capacity=4), gradient=True, save_gate_up=True
    ),
}


def problem_of(name: str) -> oracle.Problem:
    """The problem of a call, the same in every process."""
    return oracle.make_problem(np.random.default_rng(7), duplicates=True, **CALLS[name].problem)


def make_ring(name: str) -> sm.Ring | None:
    """The ring of a call, None for a batch-ready one."""
    options = CALLS[name].ring
    if options is None:
        return None
    return sm.make_ring(problem_of(name).config, name=f"sanitized-{name}", timeout_s=TIMEOUT_S, **options)


def program(name: str) -> Callable[..., tuple[Any, Any]]:
    """The call as `run(problem, ring) -> (y or gradients, ring)`, compiled once."""

    @functools.partial(jax.jit, static_argnames="config", donate_argnames="ring")
    def jitted(args, biases, dy, config, ring):
        x, ids, weights, *experts = args
        if CALLS[name].gradient:
            options = dict(config=config, save_gate_up=CALLS[name].save_gate_up)
            layer = lambda x, weights, experts, biases: sm.moe(x, ids, weights, *experts, **options, **biases)
            return jax.vjp(layer, x, weights, experts, biases)[1](dy), None
        if ring is None:
            return sm.moe(*args, config=config, **biases), None
        y, ring, _ = sm.stream_moe(
            x, lambda _, *routes: routes, *experts, ring=ring, config=config, token_args=(ids, weights), **biases,
            **CALLS[name].stream,
        )  # fmt: skip
        return y, ring

    def run(problem, ring):
        biases = dict(b_gate_up=problem.b_gate_up, b_down=problem.b_down)
        return jitted(problem.args, biases, problem.dy, problem.config, ring)

    return run


def batch_ready(name: str) -> np.ndarray:
    """Bytes of the call's result from the batch-ready call of this process: what every process must get."""
    return raw_bytes(program(name)(problem_of(name), None)[0])


def raw_bytes(results: Any) -> np.ndarray:
    """The arrays of a pytree, one behind the other, as uint8."""
    return np.concatenate([np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in jax.tree.leaves(results)])


def main(out: str, *names: str) -> None:
    """Runs the calls and writes their results."""
    results = {}
    for name in names:
        problem = problem_of(name)
        result, ring = program(name)(problem, make_ring(name))
        results[name] = raw_bytes(result)
        if ring is not None:
            ring.check()
            sm.close_ring(ring)
        print(f"{name} ran on {next(iter(jax.tree.leaves(result)[0].devices())).platform}", flush=True)
    np.savez(out, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
