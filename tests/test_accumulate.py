"""`accumulate_gradients`: float32 sums over micro-batches, against the float64 oracle, autodiff, and over ranks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_streammoe as sm
from tests.helpers import oracle, ranks
from tests.helpers.layers import assert_same_bits, run

SIZES = {"T": 22, "H": 40, "I": 24, "E": 6, "K": 3, "block_m": 8}
EXPERTS = ("w_gate_up", "w_down", "b_gate_up", "b_down")
BATCHES = 4


def problems_of(rng, count=BATCHES, **options):
    """Micro-batches of one layer: every problem has the experts of the first."""
    problems = [oracle.make_problem(rng, **SIZES | options) for _ in range(count)]
    experts = {name: getattr(problems[0], name) for name in EXPERTS}
    return [problem.replace(**experts) for problem in problems]


def zeros_of(problem):
    tensors = {name: getattr(problem, name) for name in EXPERTS}
    return {n: jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), t) for n, t in tensors.items() if t is not None}


@functools.partial(jax.jit, static_argnames="config", donate_argnums=0)
def accumulate(accumulators, args, dy, biases, num_valid=None, *, config):
    return sm.accumulate_gradients(accumulators, *args, dy, config=config, num_valid=num_valid, **biases)


def step(accumulators, problem, **options):
    biases = {name: getattr(problem, name) for name in EXPERTS[2:]}
    return accumulate(accumulators, problem.args, problem.dy, biases, config=problem.config, **options)


@pytest.mark.core
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_sums_against_the_oracle(rng, dtype, activation):
    """To float32 in every dtype: contributions that were rounded to it would be 1000 times farther off."""
    problems = problems_of(rng, dtype=dtype, activation=activation, use_bias=True, masked=0.1, duplicates=True)
    sums, want = zeros_of(problems[0]), {}
    depth = BATCHES * SIZES["T"] * SIZES["K"] + SIZES["H"] + SIZES["I"]
    for problem in problems:
        dx, d_weights, sums = step(sums, problem)
        exact = oracle.backward(problem)
        oracle.assert_close("dx", dx, exact["x"], dtype, depth)
        oracle.assert_close("d_weights", d_weights, exact["topk_weights"], jnp.float32, depth)
        want = {name: want.get(name, 0) + exact[name] for name in EXPERTS}
    assert sums.keys() == want.keys()
    for name in EXPERTS:
        assert sums[name].dtype == jnp.float32
        oracle.assert_close(name, sums[name], want[name], jnp.float32, depth)


@pytest.mark.core
def test_a_float32_layer_adds_the_bits_of_autodiff(rng):
    problems = problems_of(rng, dtype=jnp.float32, use_bias=True, masked=0.1)
    sums = zeros_of(problems[0])
    want = {name: np.zeros(a.shape, np.float32) for name, a in sums.items()}
    for problem in problems:
        dx, d_weights, sums = step(sums, problem)
        grads = run("moe", problem).grads
        assert_same_bits((dx, d_weights), (grads["x"], grads["topk_weights"]))
        want = {name: want[name] + grads[name] for name in want}
    assert_same_bits(sums, want)


@pytest.mark.core
def test_sums_stay_where_they_are(rng):
    (problem,) = problems_of(rng, 1, dtype=jnp.bfloat16, use_bias=True)
    sums = zeros_of(problem)
    before, old = {n: a.unsafe_buffer_pointer() for n, a in sums.items()}, sums
    for _ in range(3):
        *_, sums = step(sums, problem)
        assert {n: a.unsafe_buffer_pointer() for n, a in sums.items()} == before
    assert all(a.is_deleted() for a in old.values())


def test_in_a_scan_over_micro_batches(rng):
    problems = problems_of(rng, dtype=jnp.bfloat16, masked=0.1)
    first, config = problems[0], problems[0].config
    stacked = jax.tree.map(lambda *a: np.stack(a), *((*p.args[:3], p.dy) for p in problems))

    @functools.partial(jax.jit, donate_argnums=0)
    def all_of_them(sums, stacked):
        def body(sums, batch):
            *tokens, dy = batch
            *out, sums = sm.accumulate_gradients(sums, *tokens, *first.args[3:], dy, config=config)
            return sums, out

        return lax.scan(body, sums, stacked)

    sums, (dx, d_weights) = all_of_them(zeros_of(first), stacked)
    want = zeros_of(first)
    for n, problem in enumerate(problems):
        dx_n, d_weights_n, want = step(want, problem)
        assert_same_bits((dx[n], d_weights[n]), (dx_n, d_weights_n))
    assert_same_bits(sums, want)


@pytest.mark.core
def test_pairs_leading_dimensions_num_valid_and_half_weights(rng):
    (problem,) = problems_of(rng, 1, dtype=jnp.bfloat16, use_bias=True)
    weights = problem.topk_weights.astype(jnp.bfloat16)
    whole = problem.replace(topk_weights=weights)
    *tokens, want = step(zeros_of(whole), whole, num_valid=jnp.int32(17))
    assert tokens[1].dtype == jnp.bfloat16
    assert not np.asarray(tokens[0][17:]).any() and np.asarray(tokens[0][:17]).any()
    inner = problem.config.intermediate
    pairs = {n: (getattr(whole, n)[..., :inner], getattr(whole, n)[..., inner:]) for n in ("w_gate_up", "b_gate_up")}
    folded = {n: getattr(whole, n).reshape(2, 11, -1) for n in ("x", "topk_ids", "topk_weights", "dy")}
    for names in (("w_gate_up", "b_gate_up"), ("w_gate_up",), ("b_gate_up",)):  # biases may be what the weights are not
        split = whole.replace(**{n: pairs[n] for n in names}, **folded)
        dx, d_weights, sums = step(zeros_of(split), split, num_valid=jnp.int32(17))
        assert dx.shape == (2, 11, 40) and d_weights.shape == (2, 11, 3)
        assert_same_bits((dx.reshape(22, 40), d_weights.reshape(22, 3)), tuple(tokens))
        assert {n for n, a in sums.items() if isinstance(a, tuple)} == set(names)
        sums = {n: jnp.concatenate(a, -1) if isinstance(a, tuple) else a for n, a in sums.items()}
        assert_same_bits(sums, want)


def test_capacity_and_experts_without_rows(rng):
    (problem,) = problems_of(rng, 1, dtype=jnp.bfloat16, capacity=4, duplicates=True)
    problem.topk_ids[problem.topk_ids == 5] = 2
    *_, sums = step(zeros_of(problem), problem)
    want = oracle.backward(problem)
    for name, value in sums.items():
        oracle.assert_close(name, value, want[name], jnp.float32, 200)
        assert_same_bits(value[5], np.zeros_like(value[5]))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_over_ranks(rng, num_ranks, dtype):
    """Rows come in the order of the global tokens, so that every expert sums what it would on one device."""
    problem = oracle.make_problem(rng, **SIZES | {"T": 24, "E": 8}, dtype=dtype, use_bias=True, masked=0.1)
    mesh, spec = ranks.mesh_of(num_ranks), P("ep")
    names = [name for name in EXPERTS if getattr(problem, name) is not None]

    @functools.partial(jax.jit, donate_argnums=0)
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec, spec, spec), out_specs=(spec, spec, spec))
    def over_ranks(sums, tokens, experts):
        x, ids, weights, dy = tokens
        w_gate_up, w_down, b_gate_up, b_down = (experts[name] for name in names)
        return sm.accumulate_gradients(
            sums, x, ids, weights, w_gate_up, w_down, dy, config=problem.config, axis_name="ep",
            b_gate_up=b_gate_up, b_down=b_down,
        )  # fmt: skip

    tokens = (problem.x, problem.topk_ids, problem.topk_weights, problem.dy)
    place = functools.partial(jax.device_put, device=NamedSharding(mesh, spec))
    experts = {name: getattr(problem, name) for name in names}
    sums = jax.tree.map(place, zeros_of(problem))
    for _ in range(2):
        dx, d_weights, sums = jax.block_until_ready(over_ranks(sums, place(tokens), place(experts)))
    want = zeros_of(problem)
    for _ in range(2):
        want_dx, want_d_weights, want = step(want, problem)
    assert_same_bits((dx, d_weights, sums), (want_dx, want_d_weights, want))


def test_sharded_tokens_under_plain_jit(rng):
    problem = oracle.make_problem(rng, **SIZES | {"T": 24}, dtype=jnp.bfloat16, masked=0.1)
    sharding = NamedSharding(ranks.mesh_of(4), P("ep"))
    tokens = {n: jax.device_put(getattr(problem, n), sharding) for n in ("x", "topk_ids", "topk_weights", "dy")}
    dx, d_weights, sums = jax.block_until_ready(step(zeros_of(problem), problem.replace(**tokens)))
    want_dx, want_d_weights, _ = step(zeros_of(problem), problem)
    assert_same_bits((dx, d_weights), (want_dx, want_d_weights))
    exact = oracle.backward(problem)
    for name, value in sums.items():
        oracle.assert_close(name, value, exact[name], jnp.float32, 200)


def test_it_cannot_be_differentiated(rng):
    (problem,) = problems_of(rng, 1, dtype=jnp.float32)

    def f(x):
        args = (x, *problem.args[1:], problem.dy)
        return jnp.sum(sm.accumulate_gradients(zeros_of(problem), *args, config=problem.config)[0])

    with pytest.raises(NotImplementedError, match="first order only"):
        jax.grad(f)(problem.x)


@pytest.mark.core
@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda s: list(s), TypeError, r"accumulators must be a dict of w_gate_up, w_down, got list"),
        (lambda s: {"w_down": s["w_down"]}, ValueError, r"a dict of w_gate_up, w_down, got w_down"),
        (
            lambda s: s | {"w_down": s["w_down"].astype(jnp.bfloat16)}, TypeError,
            r"accumulators\['w_down'\] must be float32 of shape \(6, 24, 40\) like w_down, got bfloat16",
        ),
        (
            lambda s: s | {"w_gate_up": s["w_gate_up"][:5]}, ValueError,
            r"accumulators\['w_gate_up'\] must be float32 of shape \(6, 40, 48\) like w_gate_up, got float32 \(5, 40",
        ),
        (lambda s: s | {"b_down": s["w_down"]}, ValueError, r"must be a dict of w_gate_up, w_down, got b_down, w_down"),
        (
            lambda s: s | {"w_down": (s["w_down"],)}, TypeError,
            r"accumulators\['w_down'\] must be float32 of shape \(6, 24, 40\) like w_down, got tuple",
        ),
    ],
)  # fmt: skip
def test_wrong_accumulators(rng, change, error, text):
    (problem,) = problems_of(rng, 1, dtype=jnp.bfloat16)
    with pytest.raises(error, match=text):
        sm.accumulate_gradients(change(zeros_of(problem)), *problem.args, problem.dy, config=problem.config)


@pytest.mark.core
def test_wrong_pairs_and_cotangents(rng):
    (problem,) = problems_of(rng, 1, dtype=jnp.bfloat16)
    sums, (*tokens, w_gate_up, w_down) = zeros_of(problem), problem.args
    pair = (w_gate_up[..., :24], w_gate_up[..., 24:])
    call = functools.partial(sm.accumulate_gradients, config=problem.config)
    with pytest.raises(TypeError, match=r"accumulators\['w_gate_up'\] must be a tuple of 2 like w_gate_up, got Array"):
        call(sums, *tokens, pair, w_down, problem.dy)
    with pytest.raises(TypeError, match=r"dy must be bfloat16 of shape \(22, 40\) like x, got float32 \(22, 40\)"):
        call(sums, *problem.args, problem.dy.astype(np.float32))
    with pytest.raises(ValueError, match=r"dy must be bfloat16 of shape \(22, 40\) like x, got bfloat16 \(21, 40\)"):
        call(sums, *problem.args, problem.dy[:21])
    with pytest.raises(TypeError, match=r"x must be bfloat16 of shape \(\.\.\., 40\), got float32"):
        call(sums, problem.x.astype(np.float32), *problem.args[1:], problem.dy)
    with pytest.raises(TypeError, match="config must be an MoEConfig, got int"):
        sm.accumulate_gradients(sums, *problem.args, problem.dy, config=3)
