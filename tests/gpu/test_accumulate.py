"""`accumulate_gradients` on a CUDA device: float32 sums of what autodiff gives, bit by bit, over calls and ranks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_streammoe as sm
from tests.helpers import oracle
from tests.helpers.layers import assert_same_bits, run

pytestmark = pytest.mark.gpu

SIZES = dict(T=512, H=256, I=192, E=64, K=8)
EXPERTS = ("w_gate_up", "w_down", "b_gate_up", "b_down")


def zeros_of(problem):
    return {name: jnp.zeros(getattr(problem, name).shape, jnp.float32) for name in EXPERTS}


def call(sums, problem, **options):
    biases = {name: getattr(problem, name) for name in EXPERTS[2:]}
    return sm.accumulate_gradients(sums, *problem.args, problem.dy, config=problem.config, **biases, **options)


def wanted(problems):
    """dx and d_topk_weights of the last one, and the sums."""
    sums = {name: np.zeros(getattr(problems[0], name).shape, np.float32) for name in EXPERTS}
    for problem in problems:
        grads = run("moe", problem).grads
        sums = {name: sums[name] + grads[name].astype(np.float32) for name in EXPERTS}
    return grads["x"], grads["topk_weights"], sums


def with_experts_of(first, problem):
    return problem.replace(**{name: getattr(first, name) for name in EXPERTS})


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sums_of_rounded_gradients(rng, dtype):
    problems = [oracle.make_problem(rng, **SIZES, masked=0.1, use_bias=True, dtype=dtype) for _ in range(3)]
    problems = [with_experts_of(problems[0], problem) for problem in problems]
    step = jax.jit(lambda sums, args, dy: call(sums, problems[0].replace(**args, dy=dy)), donate_argnums=0)
    sums = zeros_of(problems[0])
    for problem in problems:
        args = {name: getattr(problem, name) for name in ("x", "topk_ids", "topk_weights")}
        dx, d_weights, sums = step(sums, args, problem.dy)
    assert_same_bits((dx, d_weights, sums), wanted(problems))


@pytest.mark.gpu(2)
def test_over_two_gpus(rng, mesh_of):
    problem = oracle.make_problem(rng, **SIZES, masked=0.1, use_bias=True, dtype=jnp.bfloat16)
    names = ("x", "topk_ids", "topk_weights", "dy", *EXPERTS)
    spec = P("ep")

    @functools.partial(jax.shard_map, mesh=mesh_of(2), in_specs=(spec, spec), out_specs=(spec, spec, spec))
    def over_ranks(sums, arrays):
        return call(sums, problem.replace(**arrays), axis_name="ep")

    out = jax.jit(over_ranks, donate_argnums=0)(zeros_of(problem), {name: getattr(problem, name) for name in names})
    assert_same_bits(out, wanted([problem]))
