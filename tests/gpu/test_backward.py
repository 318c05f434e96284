"""The backward of the layer on a CUDA device: the kernels against the f64 oracle, and the bits that they promise.

bfloat16 and float16 run the kernels of cc/kernels; float32 is plain JAX and tested in test_forward.py. Values are
compared as everywhere, gradient by gradient; bits between repeats, ways in, layouts of weights, batches and routings.
benchmarks/gpu/backward_check.py looks at each kernel alone.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_streammoe as sm
from jax_streammoe import ffi, local, ops
from tests.gpu.corners import assert_near, assert_zero
from tests.helpers import oracle
from tests.helpers.layers import HOWS, NAMES, assert_same_bits, check, run
from tests.helpers.ranks import given

pytestmark = pytest.mark.gpu

SIZES = {
    "small": dict(T=77, H=96, I=40, E=5, K=3),
    "one token": dict(T=1, H=256, I=128, E=8, K=2),
    "odd": dict(T=300, H=720, I=328, E=7, K=4),
    "many experts": dict(T=513, H=256, I=192, E=64, K=8),
}
BF16 = SIZES["many experts"] | dict(dtype=jnp.bfloat16)
EXPERTS = ("w_gate_up", "w_down", "b_gate_up", "b_down")

each_dtype = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])


def copy_of(problem, *names):
    """The problem with copies of the named arrays, to be changed in place."""
    return problem.replace(**{name: getattr(problem, name).copy() for name in names})


# Values


@pytest.mark.parametrize("size", ["small", "one token", "odd"])
@pytest.mark.parametrize(("activation", "limit"), oracle.ACTIVATIONS)
@pytest.mark.parametrize("use_bias", [False, True], ids=["plain", "biased"])
@each_dtype
def test_values(rng, size, activation, limit, use_bias, dtype):
    shares = dict(masked=0.1, invalid=0.1) if SIZES[size]["T"] > 1 else {}  # the one token keeps its routes
    config = dict(activation=activation, limit=limit, use_bias=use_bias, dtype=dtype)
    check("moe", oracle.make_problem(rng, **SIZES[size], **shares, **config))


@pytest.mark.parametrize(("activation", "limit"), oracle.ACTIVATIONS)
@each_dtype
def test_values_of_many_experts(rng, activation, limit, dtype):
    """In the mean square: among millions of elements some are small differences of large terms, or lie at a clamp."""
    config = dict(activation=activation, limit=limit, use_bias=True, dtype=dtype)
    problem = oracle.make_problem(rng, **SIZES["many experts"], masked=0.1, invalid=0.1, **config)
    grads = run("moe", problem).grads
    for name, want in oracle.backward(problem).items():
        assert_near(f"d_{name}", grads[name], want, problem.config)


@each_dtype
def test_duplicates_and_more_routes_than_experts(rng, dtype):
    sizes = dict(T=200, H=72, I=136, E=3, K=9)
    check("moe", oracle.make_problem(rng, **sizes, masked=0.1, use_bias=True, dtype=dtype))


def test_every_route_to_one_expert(rng):
    ids = np.full((600, 2), 3)
    result = check("moe", oracle.make_problem(rng, T=600, H=136, I=72, E=5, K=2, ids=ids, dtype=jnp.bfloat16))
    for name in ("w_gate_up", "w_down"):
        assert_zero(np.delete(result.grads[name], 3, 0))


def test_capacity(rng):
    sizes = dict(T=300, H=136, I=72, E=4, K=3, capacity=70, use_bias=True, dtype=jnp.bfloat16)
    problem = oracle.make_problem(rng, **sizes, masked=0.1, invalid=0.05, duplicates=True)
    result = check("moe", problem)
    assert int(result.stats.dropped_routes) > 0
    assert_zero(result.grads["topk_weights"][~oracle.kept_routes(problem)])


def test_no_tokens_and_no_routes(rng):
    for sizes in (dict(T=0), dict(ids=np.full((513, 8), -1))):
        result = run("moe", oracle.make_problem(rng, **BF16 | sizes, use_bias=True))
        for array in result.grads.values():
            assert_zero(array)


def test_gradients_of_weights_that_are_zero(rng):
    """<dy, f(x)> is not scaled by the weight; everything else is."""
    problem = oracle.make_problem(rng, **BF16)
    zero = run("moe", problem.replace(topk_weights=np.zeros_like(problem.topk_weights)))
    assert_same_bits(zero.grads["topk_weights"], run("moe", problem).grads["topk_weights"])
    for name in ("x", "w_gate_up", "w_down"):
        assert not zero.grads[name].any(), name


# Gate and up that were kept


@pytest.mark.parametrize("size", ["small", "odd"])
@pytest.mark.parametrize(("activation", "limit"), oracle.ACTIVATIONS)
@each_dtype
def test_values_from_what_was_kept(rng, size, activation, limit, dtype):
    config = dict(activation=activation, limit=limit, use_bias=size == "odd", dtype=dtype)
    problem = oracle.make_problem(rng, **SIZES[size], masked=0.1, invalid=0.1, **config)
    assert_same_bits(check("kept", problem).y, run("moe", problem, grad=False).y)


def test_capacity_duplicates_and_one_expert_from_what_was_kept(rng):
    sizes = dict(T=300, H=136, I=72, E=4, K=3, use_bias=True, dtype=jnp.bfloat16)
    check("kept", oracle.make_problem(rng, **sizes, capacity=70, masked=0.1, invalid=0.05, duplicates=True))
    check("kept", oracle.make_problem(rng, **sizes, ids=np.full((300, 3), 2)))
    for special in (dict(T=0), dict(ids=np.full((300, 3), -1))):
        for array in run("kept", oracle.make_problem(rng, **sizes | special)).grads.values():
            assert_zero(array)


@each_dtype
@pytest.mark.parametrize("activation", ["swigluoai", "gelu"])
def test_what_is_kept(rng, activation, dtype):
    """What enters the activation, rounded, finite, and zeros of routes that are not taken: never what memory held."""
    problem = oracle.make_problem(rng, **SIZES["odd"], masked=0.2, invalid=0.1, activation=activation, dtype=dtype)
    problem.x[5] = np.copysign(60000, problem.x[5].astype(np.float32)).astype(dtype)
    spec = ops.LayerSpec(problem.config, problem.config.num_experts)
    experts = ops.pack_experts(problem.w_gate_up, problem.w_down, None, None)
    args = (problem.x, problem.topk_ids, problem.topk_weights, tuple(map(jnp.asarray, experts)))
    y, gate_up, *_ = jax.jit(functools.partial(local.forward_kept, spec))(*args)
    assert_same_bits(y, run("moe", problem, grad=False).y)
    kept = oracle.kept_routes(problem)
    gate_up = np.asarray(gate_up).reshape(*kept.shape, -1)
    assert_zero(gate_up[~kept])
    want = np.stack([problem.x[t].astype(np.float64) @ problem.w_gate_up[problem.topk_ids[t, k]].astype(np.float64)
                     for t, k in np.argwhere(kept)])  # fmt: skip
    if dtype == jnp.float16:
        assert (np.abs(want) > 65504).any()
        want = np.clip(want, -65504, 65504)
    np.testing.assert_allclose(gate_up[kept].astype(np.float64), want, rtol=2e-2, atol=2e-2)


@each_dtype
def test_bits_from_what_was_kept(rng, dtype):
    """Twenty times the same; those of packed and of split weights; and a masked token of NaN reaches nothing."""
    problem = oracle.make_problem(rng, **SIZES["many experts"], masked=0.2, use_bias=True, dtype=dtype)
    problem.topk_ids[[3, 110]] = -1
    first = run("kept", problem).grads
    for _ in range(20):
        assert_same_bits(run("kept", problem).grads, first)
    poisoned = copy_of(problem, "x", "topk_weights", "dy")
    poisoned.x[[3, 110]], poisoned.topk_weights[[3, 110]], poisoned.dy[[3, 110]] = np.nan, np.inf, np.nan
    assert_same_bits(run("kept", poisoned).grads, first)
    split = split_and_joined(problem, save_gate_up=True)
    for name in NAMES:
        assert_same_bits(split[name], first[name], name)


# Bits


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@each_dtype
def test_same_bits_every_time_and_by_every_way_in(rng, activation, dtype):
    sizes = SIZES["many experts"] | dict(T=40)  # more than the ring of layers.py holds
    problem = oracle.make_problem(rng, **sizes, activation=activation, masked=0.1, use_bias=True, dtype=dtype)
    first = run("moe", problem)
    for how in (*HOWS, *HOWS, *HOWS):
        assert_same_bits(run(how, problem).grads, first.grads, how)


def test_same_bits_beside_other_work(rng):
    problem = oracle.make_problem(rng, **BF16, use_bias=True)
    first = run("moe", problem).grads
    noise = jnp.ones((4096, 4096), jnp.float32)
    for _ in range(10):
        noise = jax.jit(lambda a: jnp.sin(a) + 1)(noise)
        assert_same_bits(run("moe", problem).grads, first)


@functools.partial(jax.jit, static_argnames=("config", "save_gate_up"))
def pullback(config, ids, operands, dy, save_gate_up=False):
    """Gradients by name; operands may hold (gate, up) pairs."""

    def f(operands):
        experts = (operands["w_gate_up"], operands["w_down"])
        biases = {name: operands.get(name) for name in ("b_gate_up", "b_down")}
        options = dict(config=config, save_gate_up=save_gate_up, **biases)
        return sm.moe(operands["x"], ids, operands["topk_weights"], *experts, **options)

    return jax.vjp(f, operands)[1](dy)[0]


def split_and_joined(problem, **options):
    """Gradients by name from (gate, up) pairs of weights and biases, joined again."""
    inner = problem.config.intermediate
    operands = {name: getattr(problem, name) for name in NAMES}
    for name in ("w_gate_up", "b_gate_up"):
        operands[name] = (operands[name][..., :inner], operands[name][..., inner:])
    grads = pullback(problem.config, problem.topk_ids, operands, problem.dy, **options)
    return {n: np.concatenate(g, -1) if isinstance(g, tuple) else g for n, g in grads.items()}


@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
@each_dtype
def test_packed_and_split_weights_have_the_same_bits(rng, activation, dtype):
    problem = oracle.make_problem(rng, **SIZES["odd"], activation=activation, use_bias=True, dtype=dtype)
    split, packed = split_and_joined(problem), run("moe", problem).grads
    for name in NAMES:
        assert_same_bits(split[name], packed[name], name)


def test_gradients_of_an_expert_depend_on_its_own_rows_only(rng):
    problem = oracle.make_problem(rng, **BF16, use_bias=True)
    mine = problem.topk_ids == 5
    whole = run("moe", problem).grads
    alone = run("moe", problem.replace(topk_ids=np.where(mine, 5, -1).astype(np.int32))).grads
    for name in EXPERTS:
        assert_same_bits(alone[name][5], whole[name][5], name)
        assert_zero(np.delete(alone[name], 5, 0))
    assert_same_bits(alone["topk_weights"][mine], whole["topk_weights"][mine])


def test_a_token_does_not_depend_on_its_batch(rng):
    problem = oracle.make_problem(rng, **BF16, use_bias=True)
    part = slice(100, 261)
    rows = {name: getattr(problem, name)[part] for name in ("x", "topk_ids", "topk_weights", "dy")}
    whole, some = run("moe", problem).grads, run("moe", problem.replace(**rows)).grads
    for name in ("x", "topk_weights"):
        assert_same_bits(some[name], whole[name][part], name)


@each_dtype
def test_a_masked_token_of_nan_reaches_nothing(rng, dtype):
    clean = oracle.make_problem(rng, **SIZES["many experts"], masked=0.2, use_bias=True, dtype=dtype)
    clean.topk_ids[[3, 110]] = -1
    poisoned = copy_of(clean, "x", "topk_weights", "dy")
    poisoned.x[[3, 110]], poisoned.topk_weights[[3, 110]], poisoned.dy[[3, 110]] = np.nan, np.inf, np.nan
    poisoned.topk_weights[poisoned.topk_ids == -1] = np.nan
    got, want = run("moe", poisoned).grads, run("moe", clean).grads
    assert_same_bits(got, want)
    assert_zero(got["x"][[3, 110]])


@pytest.mark.parametrize(("name", "value"), [("x", np.nan), ("dy", np.nan), ("topk_weights", np.nan)])
def test_a_bad_value_reaches_its_row_and_its_experts_only(rng, name, value):
    problem = oracle.make_problem(rng, **BF16, use_bias=True)
    bad = copy_of(problem, name)
    getattr(bad, name)[7] = value
    got, want = run("moe", bad).grads, run("moe", problem).grads
    others, mine = np.arange(len(problem.x)) != 7, np.isin(np.arange(problem.config.num_experts), problem.topk_ids[7])
    assert_same_bits(got["x"][others], want["x"][others])
    assert np.isnan(got["x"][7].astype(np.float32)).all()
    if name == "topk_weights":
        assert_same_bits(got["topk_weights"], want["topk_weights"])
    else:
        assert_same_bits(got["topk_weights"][others], want["topk_weights"][others])
        assert np.isnan(got["topk_weights"][7]).all()
    for tensor in EXPERTS:
        assert_same_bits(got[tensor][~mine], want[tensor][~mine], tensor)
    for tensor in ("w_gate_up", "w_down"):
        assert np.isnan(got[tensor][mine].astype(np.float32)).all(), tensor


@pytest.mark.parametrize("factor", [2.0, 0.25])
def test_powers_of_two_scale_gradients_exactly(rng, factor):
    """In bfloat16, whose range is float32's: nothing on the way is subnormal."""
    problem = oracle.make_problem(rng, **SIZES["small"], duplicates=True, use_bias=True, dtype=jnp.bfloat16)
    scaled = run("moe", problem.replace(topk_weights=np.float32(factor) * problem.topk_weights)).grads
    grads = run("moe", problem).grads
    assert_same_bits(scaled.pop("topk_weights"), grads.pop("topk_weights"))
    for name, gradient in grads.items():
        want = np.float32(factor) * gradient.astype(np.float32)
        np.testing.assert_array_equal(scaled[name].astype(np.float32), want, name)


@pytest.mark.parametrize("save_gate_up", [False, True])
def test_replays_follow_the_routing(rng, save_gate_up):
    """A jitted program is captured as a graph after a few launches; every replay must read the routing of its turn."""
    problem = oracle.make_problem(rng, **BF16)
    operands = {name: jnp.asarray(getattr(problem, name)) for name in NAMES if getattr(problem, name) is not None}
    routings = [jnp.roll(jnp.asarray(problem.topk_ids), n, axis=0) for n in range(3)]
    each = functools.partial(pullback, problem.config, operands=operands, dy=problem.dy, save_gate_up=save_gate_up)
    first = [jax.tree.map(np.asarray, each(ids=ids)) for ids in routings]
    assert (first[0]["w_down"] != first[1]["w_down"]).any()
    for turn in range(12):
        assert_same_bits(each(ids=routings[turn % 3]), first[turn % 3], f"turn {turn}")


# Ranks


@functools.partial(jax.jit, static_argnames=("config", "num_ranks"))
def rank_by_rank(config, num_ranks, operands, ids, dy):
    """Gradients from the halves of each rank in turn, on one GPU."""
    here = config.num_experts // num_ranks
    spec, parts = ops.LayerSpec(config, here), []
    x, weights, *tensors = (operands[name] for name in NAMES)
    for rank in range(num_ranks):
        mine = (ids >= rank * here) & (ids < (rank + 1) * here)
        experts = ops.pack_experts(*(t[rank * here : (rank + 1) * here] for t in tensors))
        local_ids = jnp.where(mine, ids - rank * here, -1)
        parts.append(local.rows_backward(spec, jnp.zeros((1, 1)), x, dy, local_ids, weights, experts)[1:])
    dx_rows, d_weights, d_experts = zip(*parts, strict=True)
    total = functools.reduce(lambda a, b: a + b, dx_rows)  # of each route one rank has a row, the others zeros
    gate_up, _, down, b_gate_up, _, b_down = (jnp.concatenate(d) for d in zip(*d_experts, strict=True))
    dx = local.combine_gradient(ops.LayerSpec(config, config.num_experts), total, ids)
    return dict(zip(NAMES, (dx, sum(d_weights), gate_up, down, b_gate_up, b_down), strict=True)), dx_rows


@pytest.mark.parametrize("activation", ["swiglu", "silu"])
@pytest.mark.parametrize("num_ranks", [1, 4])
@each_dtype
def test_rank_by_rank_has_the_bits_of_one(rng, activation, num_ranks, dtype):
    sizes = SIZES["many experts"]
    problem = oracle.make_problem(rng, **sizes, activation=activation, masked=0.1, use_bias=True, dtype=dtype)
    operands = {name: jnp.asarray(getattr(problem, name)) for name in NAMES}
    got, dx_rows = rank_by_rank(problem.config, num_ranks, operands, jnp.asarray(problem.topk_ids), problem.dy)
    want = run("moe", problem).grads
    assert_same_bits(got, want)
    here = sizes["E"] // num_ranks
    for rank, rows in enumerate(map(np.asarray, dx_rows)):
        mine = problem.topk_ids // here == rank
        assert_zero(rows[~mine])  # also of masked routes, -1
        assert rows[mine].any(-1).all()


@pytest.mark.parametrize("call", ["moe", "stream"])
@each_dtype
def test_two_ranks_have_the_bits_of_one(rng, mesh_of, call, dtype):
    problem = oracle.make_problem(rng, **SIZES["many experts"] | {"T": 512}, masked=0.1, use_bias=True, dtype=dtype)
    ep = sm.expert_parallel(problem.config, mesh=mesh_of(2))
    operands = {name: jnp.asarray(getattr(problem, name)) for name in NAMES}

    def run_over_ranks(operands):
        x, weights, *experts = (operands[name] for name in NAMES[:4])
        biases = {name: operands[name] for name in NAMES[4:]}
        if call == "moe":
            return ep.moe(x, problem.topk_ids, weights, *experts, **biases)[0]
        return ep.stream(x, given, *experts, token_args=(problem.topk_ids, weights), **biases)[0]

    got = jax.jit(lambda operands, dy: jax.vjp(run_over_ranks, operands)[1](dy)[0])(operands, problem.dy)
    assert_same_bits(got, run("moe", problem).grads)


# Errors


def test_the_handler_names_what_is_wrong():
    config = sm.MoEConfig(4, 2, 16, 8, dtype=jnp.bfloat16)
    spec = ops.LayerSpec(config, 4)
    x, ids, weights = jnp.zeros((6, 16), jnp.bfloat16), jnp.zeros((6, 2), jnp.int32), jnp.zeros((6, 2))
    experts = ops.pack_experts(jnp.zeros((4, 16, 16), jnp.bfloat16), jnp.zeros((4, 8, 16), jnp.bfloat16), None, None)

    def call(dy, num_bytes):
        like = [ffi.like(a, a.shape, a.dtype) for a in (x, weights, *experts)]
        results = [*like, ffi.like(x, (num_bytes,), np.uint8)]
        return ffi.call(
            "backward", results, x, dy, ids, weights, *experts, attributes=spec.attributes() | {"wide": np.int32(0)}
        )

    needed = ffi.compiled.cuda_backward_bytes(6, 2, 16, 8, 4, True)
    for dy, num_bytes, text in (
        (x[:5], needed, "dy must have 96 elements of type BF16, got 80"),
        (x, needed - 1, f"the workspace must have {needed} bytes, got {needed - 1}"),
    ):
        with pytest.raises(Exception, match=text):
            jax.block_until_ready(jax.jit(functools.partial(call, num_bytes=num_bytes))(dy))
