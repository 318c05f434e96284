"""`accumulate_gradients` on a CUDA device: the float32 sums that autodiff rounds, bit by bit, over calls and ranks."""

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


def of_one_call(problem):
    """dx, d_topk_weights and the sums of one call, which begin at 0: what autodiff gives before it rounds."""
    return jax.jit(lambda sums: call(sums, oracle.as_jax(problem)), donate_argnums=0)(zeros_of(problem))


def with_experts_of(first, problem):
    return problem.replace(**{name: getattr(first, name) for name in EXPERTS})


each_dtype = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])


@each_dtype
@pytest.mark.parametrize("activation", ["swiglu", "silu"])
def test_a_call_rounds_to_the_gradients_of_autodiff(rng, activation, dtype):
    problem = oracle.make_problem(rng, **SIZES, activation=activation, masked=0.1, use_bias=True, dtype=dtype)
    dx, d_weights, sums = of_one_call(problem)
    want = run("moe", problem).grads
    assert_same_bits((dx, d_weights), (want["x"], want["topk_weights"]))
    for name in EXPERTS:
        assert_same_bits(np.asarray(sums[name]).astype(dtype), want[name], name)
        assert (np.asarray(sums[name]) != want[name].astype(np.float32)).mean() > 0.5, f"{name} was rounded"


@each_dtype
def test_sums_over_calls(rng, dtype):
    problems = [oracle.make_problem(rng, **SIZES, masked=0.1, use_bias=True, dtype=dtype) for _ in range(3)]
    problems = [with_experts_of(problems[0], problem) for problem in problems]
    step = jax.jit(lambda sums, args, dy: call(sums, problems[0].replace(**args, dy=dy)), donate_argnums=0)
    sums = zeros_of(problems[0])
    want = {name: np.zeros(value.shape, np.float32) for name, value in sums.items()}
    for problem in problems:
        args = {name: getattr(problem, name) for name in ("x", "topk_ids", "topk_weights")}
        _, _, sums = step(sums, args, problem.dy)
        alone = of_one_call(problem)[2]
        want = {name: want[name] + np.asarray(alone[name]) for name in EXPERTS}
    assert_same_bits(sums, want)


@pytest.mark.gpu(2)
def test_over_two_gpus(rng, mesh_of):
    problem = oracle.make_problem(rng, **SIZES, masked=0.1, use_bias=True, dtype=jnp.bfloat16)
    names = ("x", "topk_ids", "topk_weights", "dy", *EXPERTS)
    spec = P("ep")

    @functools.partial(jax.shard_map, mesh=mesh_of(2), in_specs=(spec, spec), out_specs=(spec, spec, spec))
    def over_ranks(sums, arrays):
        return call(sums, problem.replace(**arrays), axis_name="ep")

    out = jax.jit(over_ranks, donate_argnums=0)(zeros_of(problem), {name: getattr(problem, name) for name in names})
    assert_same_bits(out, of_one_call(problem))
