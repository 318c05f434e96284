"""What a rank computes between the exchanges, in plain JAX as on a GPU without kernels for it, run on the CPU.

The whole `xla` transport with it, values and gradients on a mesh, against the float64 oracle; and each half against the
CPU's handler, which says what it returns for routes of other ranks, dropped ones, duplicates and NaN. Kernels are
tested in tests/gpu/test_exchange.py, programs for a GPU in test_gpu_programs_ranks.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_streammoe as sm
from jax_streammoe import cuda, local, ops
from tests.helpers import oracle, ranks
from tests.helpers.meshes import mesh_of

N, H, I, L, K = 37, 16, 24, 4, 3
NAMES = ("w_gate_up", "w_down", "b_gate_up", "b_down")


@pytest.fixture
def on_cuda(monkeypatch):
    """Every choice of platform falls on CUDA, and no layer has kernels."""
    monkeypatch.setattr(local, "_on_platform", lambda cpu, cuda, spec, *args: cuda(spec, *args))
    monkeypatch.setattr(cuda, "has_kernels", lambda spec: False)


def half(rng, *, split=False, **options):
    """A rank with 4 of 12 experts -> LayerSpec, x of all ranks, local ids (-1 elsewhere), weights, experts, dy."""
    problem = oracle.make_problem(rng, T=N, H=H, I=I, E=3 * L, K=K, **({"dtype": jnp.float32} | options))
    ids = problem.topk_ids - L
    ids = jnp.asarray(np.where((ids >= 0) & (ids < L), ids, -1))
    of_rank = lambda a: None if a is None else jnp.asarray(a[L : 2 * L])
    gate_up, down, b_gate_up, b_down = (of_rank(getattr(problem, name)) for name in NAMES)
    if split:
        gate_up, b_gate_up = (None if a is None else tuple(jnp.split(a, 2, -1)) for a in (gate_up, b_gate_up))
    experts = ops.pack_experts(gate_up, down, b_gate_up, b_down)
    x, weights, dy = map(jnp.asarray, (problem.x, problem.topk_weights, problem.dy))
    return ops.LayerSpec(problem.config, L), x, ids, weights, experts, dy


def wide(array):
    return np.asarray(array, np.float64)


LAYERS = {
    "packed": {},
    "split with biases": {"split": True, "use_bias": True, "activation": "swigluoai"},
    "duplicates": {"duplicates": True, "use_bias": True},
    "capacity": {"capacity": 3, "duplicates": True},
    "ungated": {"activation": "relu2", "use_bias": True},
    "bfloat16": {"dtype": jnp.bfloat16, "use_bias": True},
    "float16": {"dtype": jnp.float16},
}
each_layer = pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS.keys())


@each_layer
def test_rows_and_their_sum(rng, monkeypatch, options):
    spec, x, ids, weights, experts, _ = half(rng, **options)
    want = jax.jit(lambda *a: ops.rows(spec, *a))(x, ids, experts)
    monkeypatch.setattr(cuda, "has_kernels", lambda spec: False)
    got = jax.jit(lambda *a: cuda.rows(spec, *a))(x, ids, experts)
    oracle.assert_close("rows", got[0], wide(want[0]), spec.config.dtype, H + I)
    np.testing.assert_array_equal((wide(got[0]) != 0).any(-1), (wide(want[0]) != 0).any(-1))
    for a, b, name in zip(got[1:], want[1:], ("dropped", "expert_rows"), strict=True):
        ranks.assert_bits(a, b, name)
    assert np.asarray(want[1]).any() == (spec.config.capacity is not None)
    y = [jax.jit(lambda *a, f=f: f(spec, *a))(want[0], ids, weights, want[1]) for f in (cuda.combine, ops.combine)]
    oracle.assert_close("y", y[0], wide(y[1]), spec.config.dtype, K)


@each_layer
def test_gradients_of_rows(rng, monkeypatch, options):
    monkeypatch.setattr(cuda, "has_kernels", lambda spec: False)
    spec, x, ids, weights, experts, dy = half(rng, **options)
    token = jnp.full((1, 1), 7.0)
    got, want = (
        jax.jit(lambda *a, f=f: f(spec, *a))(token, x, dy, ids, weights, experts)
        for f in (cuda.rows_backward, ops.backward)
    )
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, want)
    assert jax.tree.map(lambda a: a.dtype, got) == jax.tree.map(lambda a: a.dtype, want)
    ranks.assert_bits(got[0], token)
    depth = H + I + N * K
    of_token = [np.sum(wide(g[1]), axis=1) for g in (got, want)]  # only the sum over a token's routes has a meaning
    oracle.assert_close("d_x", of_token[0], of_token[1], spec.config.dtype, depth)
    oracle.assert_close("d_topk_weights", got[2], wide(want[2]), spec.config.dtype, depth)
    for n, (a, b) in enumerate(zip(got[3], want[3], strict=True)):
        oracle.assert_close(f"tensor {n}", a, wide(b), spec.config.dtype, depth)
    assert not np.asarray(got[1])[np.asarray(ids) < 0].any()


def test_what_is_not_taken_stays_out(rng):
    """NaN in a masked token and its dy, in weights of routes that are skipped, in rows that no route takes."""
    spec, x, ids, weights, experts, dy = half(rng, use_bias=True)
    ids, token = ids.at[5].set(-1), jnp.zeros((1, 1))
    skipped = ids < 0
    bad_x, bad_dy, bad_weights = x.at[5].set(jnp.nan), dy.at[5].set(jnp.nan), jnp.where(skipped, jnp.nan, weights)

    @jax.jit
    def run(x, dy, weights):
        rows, dropped, _ = cuda.rows(spec, x, ids, experts)
        poisoned = jnp.where(skipped[..., None] & jnp.isnan(weights[..., None]), jnp.nan, rows)
        y = cuda.combine(spec, poisoned, ids, weights, dropped)
        return rows, y, cuda.rows_backward(spec, token, x, dy, ids, weights, experts)

    bad, clean = run(bad_x, bad_dy, bad_weights), run(x, dy, weights)
    jax.tree.map(ranks.assert_bits, bad, clean)
    assert all(np.isfinite(a).all() and np.asarray(a).any() for a in (clean[0], clean[1], *clean[2][1:3]))


CASES = {
    "packed": {"masked": 0.1},
    "biases and strays": {"use_bias": True, "masked": 0.1, "invalid": 0.1, "duplicates": True},
    "capacity": {"capacity": 5, "use_bias": True},
    "bfloat16": {"dtype": jnp.bfloat16, "use_bias": True, "masked": 0.1},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize(("num_ranks", "check_vma"), [(1, True), (4, True), (4, False)])
def test_the_transport(rng, on_cuda, num_ranks, options, check_vma):
    sizes = dict(T=24, H=H, I=I, E=8, K=2, dtype=jnp.float32)
    problem = oracle.make_problem(rng, **sizes | options)
    ep = sm.expert_parallel(problem.config, mesh=mesh_of({"ep": num_ranks}), transport="xla", check_vma=check_vma)
    experts = [getattr(problem, name) for name in NAMES if getattr(problem, name) is not None]

    def loss(x, weights, experts):
        biases = dict(zip(("b_gate_up", "b_down"), experts[2:], strict=False))
        y, _, info = ep.moe(
            x, problem.topk_ids, weights, *experts[:2], **biases, checks=bool(problem.config.use_bias),
            return_stats=True,
        )  # fmt: skip
        return jnp.sum(y * problem.dy), (y, info.stats)

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    (_, (y, stats)), (dx, d_weights, d_experts) = jax.block_until_ready(run(problem.x, problem.topk_weights, experts))
    dtype = problem.config.dtype
    oracle.assert_close("y", y, oracle.forward(problem), dtype, H + I)
    want = oracle.backward(problem)
    for name, got in zip(("x", "topk_weights", *NAMES), (dx, d_weights, *d_experts), strict=False):
        oracle.assert_close(name, got, want[name], dtype, H + I + 48)
    kept = oracle.kept_routes(problem)
    ids = problem.topk_ids
    in_range = (ids >= 0) & (ids < 8)
    np.testing.assert_array_equal(stats.expert_rows, np.bincount(ids[kept], minlength=8))
    counts = [int(np.sum(c)) for c in stats[1:]]
    assert counts == [(in_range & ~kept).sum(), (~in_range & (ids != -1)).sum(), (ids == -1).sum()]


def test_checks_count_and_raise_nothing(rng, on_cuda):
    """On CUDA nobody waits to see the ids, so invalid ones are counted, as without checks."""
    problem = oracle.make_problem(rng, T=16, H=H, I=I, E=8, K=2, dtype=jnp.float32, invalid=0.2)
    ep = sm.expert_parallel(problem.config, mesh=mesh_of({"ep": 2}), transport="xla")
    run = jax.jit(lambda *args: ep.moe(*args, checks=True, return_stats=True))
    _, _, info = jax.block_until_ready(run(*problem.args))
    wrong = ((problem.topk_ids < -1) | (problem.topk_ids >= 8)).sum()
    assert wrong > 0 and int(np.sum(info.stats.invalid_routes)) == wrong
