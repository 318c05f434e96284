"""Arrays of more than 2^31 elements: 64-bit arithmetic in every address, batch-ready and streamed.

Bits of a token do not depend on its company, so some hundred tokens, among them the first, the last and those around
every power of two, must have the bits of a call with these tokens alone; that call is compared with the f64 oracle. All
rows of a stream are compared with the batch-ready call. Data is drawn on the device, of which it takes 20 GB at most.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_streammoe as sm
from tests.helpers import oracle

pytestmark = pytest.mark.gpu

# 262,152 rows of 8,192 elements, 8 rows more than 2^31 elements, before padding.
MANY_ROWS = dict(T=32769, H=8192, I=128, E=8, K=8)
# Gate and up columns: 2.4e9 elements, of which those of the last expert all lie beyond 2^31.
MANY_WEIGHTS = dict(T=1000, H=4096, I=1152, E=256, K=2)


@functools.partial(jax.jit, static_argnames=("T", "H", "I", "E", "K"))
def _draw(key, *, T, H, I, E, K):
    """x [T, H], ids [T, K], weights [T, K], and one expert's gate_up [H, 2I], down [I, H] in float32; y is near 1."""
    keys = jax.random.split(key, 5)
    x = jax.random.normal(keys[0], (T, H), jnp.bfloat16)
    ids = jax.random.randint(keys[1], (T, K), 0, E, jnp.int32)
    weights = jax.random.uniform(keys[2], (T, K), jnp.float32, 0.5, 1.5) / np.float32(np.sqrt(K))
    gate_up = jax.random.normal(keys[3], (H, 2 * I), jnp.float32) / np.float32(np.sqrt(H))
    down = jax.random.normal(keys[4], (I, H), jnp.float32) / np.float32(np.sqrt(0.36 * I))
    return x, ids, weights, gate_up, down


@functools.partial(jax.jit, static_argnames="num_experts")
def _experts(one, experts, num_experts):
    """Experts [L, ...] in bfloat16: expert e is one expert times 0.75 + e / 2E, so no two are equal."""
    scale = np.float32(0.75) + experts.astype(jnp.float32) / np.float32(2 * num_experts)
    return tuple((scale[:, None, None] * w[None]).astype(jnp.bfloat16) for w in one)


def _bits(y):
    return np.asarray(y).view(np.uint16)


def _moe(config, *args):
    return jax.jit(functools.partial(sm.moe, config=config))(*args)


def _alone(config, x, ids, weights, gate_up, down):
    """Bits of these tokens in a call of their own; the first and last eight are compared with the oracle."""
    y = _moe(config, x, ids, weights, gate_up, down)
    some = np.r_[:8, -8:0]
    problem = oracle.Problem(
        config, *(np.asarray(a[some]) for a in (x, ids, weights)), np.asarray(gate_up), np.asarray(down), None, None,
        np.asarray(x[some]),
    )  # fmt: skip
    depth = config.hidden + config.intermediate
    oracle.assert_close("y", np.asarray(y[some], np.float64), oracle.forward(problem), config.dtype, depth)
    return _bits(y)


def _streams_equal(config, args, y, ring):
    """Streams of four chunks in two slots, hence of two waves, have the bits of y in every row."""

    @functools.partial(jax.jit, static_argnames="policy", donate_argnames="ring")
    def stream(args, ring, policy):
        x, ids, weights, *experts = args
        y, ring, _ = sm.stream_moe(
            x, lambda _, *routes: routes, *experts, config=config, ring=ring, token_args=(ids, weights), policy=policy,
            chunks=4,
        )  # fmt: skip
        return y, ring

    @jax.jit
    def rows_that_differ(a, b):
        different = jax.lax.bitcast_convert_type(a, jnp.uint16) != jax.lax.bitcast_convert_type(b, jnp.uint16)
        return jnp.sum(jnp.any(different, axis=-1), dtype=jnp.int32)

    for policy in ("serial", "overlap"):
        got, ring = stream(args, ring, policy)
        ring.check()
        assert int(rows_that_differ(got, y)) == 0, policy


def test_rows_beyond_2_31_elements(rng, new_ring):
    T, H, E, K = (MANY_ROWS[n] for n in ("T", "H", "E", "K"))
    config = sm.MoEConfig(E, K, H, MANY_ROWS["I"])
    *tokens, gate_up, down = _draw(jax.random.key(1), **MANY_ROWS)
    args = (*tokens, *_experts((gate_up, down), jnp.arange(E), E))
    # Tokens whose elements of x, or of K rows, lie around a power of two of elements or of bytes.
    powers = [2**n // row for n in range(26, 33) for row in (H, K * H)]
    near = [np.arange(p - 5, p + 6) for p in powers]
    chosen = np.unique(np.concatenate([np.arange(64), *near, rng.integers(0, T, 64), np.arange(T - 200, T)]))
    chosen = chosen[(chosen >= 0) & (chosen < T)]
    want = _alone(config, *(a[chosen] for a in tokens), *args[3:])
    y = _moe(config, *args)
    np.testing.assert_array_equal(_bits(y[chosen]), want)
    _streams_equal(config, args, y, new_ring(config, chunk_tokens=-(-T // 2), num_slots=2))


def test_weights_beyond_2_31_elements(new_ring):
    """Every token goes to the last expert, twice; alone, it is the only expert."""
    T, H, I, E, K = (MANY_WEIGHTS[n] for n in ("T", "H", "I", "E", "K"))
    config = sm.MoEConfig(E, K, H, I)
    x, ids, weights, *one = _draw(jax.random.key(2), **MANY_WEIGHTS)
    last = _experts(one, jnp.array([E - 1]), E)
    want = _alone(sm.MoEConfig(1, K, H, I), x, jnp.zeros_like(ids), weights, *last)
    args = (x, jnp.full_like(ids, E - 1), weights, *_experts(one, jnp.arange(E), E))
    y = _moe(config, *args)
    np.testing.assert_array_equal(_bits(y), want)
    _streams_equal(config, args, y, new_ring(config, chunk_tokens=-(-T // 2), num_slots=2))
