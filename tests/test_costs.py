"""The cost model of a GPU: layers and producers of known size, and the decision that follows from both."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jax_streammoe as sm
from jax_streammoe import costs, waves

pytestmark = pytest.mark.core

# name -> hidden, intermediate, experts, top_k, measured milliseconds of the layer at T = 8192 on an H200
MEASURED = {
    "qwen3-30b": (2048, 768, 128, 8, 1.18),
    "qwen3-235b": (4096, 1536, 128, 8, 4.10),
    "mixtral-8x7b": (4096, 14336, 8, 2, 8.80),
    "dsv3-shard": (7168, 2048, 32, 8, 8.91),
}


def config_of(name):
    hidden, inner, experts, top_k, _ = MEASURED[name]
    return sm.MoEConfig(experts, top_k, hidden, inner, dtype=jnp.bfloat16)


def shapes(*sizes, dtype=jnp.bfloat16):
    return [jax.ShapeDtypeStruct(s, dtype) for s in sizes]


def router(x, w):
    h = x.astype(jnp.float32) * jax.lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-6)
    h = h.astype(x.dtype)
    weights, ids = jax.lax.top_k(jax.nn.softmax(jnp.dot(h, w, preferred_element_type=jnp.float32)), 8)
    return ids, weights, h


def reader(*args):
    *inputs, w = args
    return router(sum(a.astype(jnp.float32) for a in inputs).astype(w.dtype), w)


@pytest.mark.parametrize("name", MEASURED)
def test_a_layer_within_a_fifth_of_its_measured_time(name):
    measured = MEASURED[name][-1]
    assert 0.8 * measured < 1e3 * costs.layer_seconds(config_of(name), 8192, 1) < 1.05 * measured


def test_a_decode_batch_costs_its_weights():
    config = config_of("qwen3-235b")
    weights = 128 * 3 * 4096 * 1536 * 2
    fixed = 4 * costs.KERNEL_S
    assert costs.layer_seconds(config, 64, 1) == pytest.approx(weights / costs.BYTES_PER_S + fixed, rel=0.1)
    assert costs.layer_seconds(config, 1, 1) == pytest.approx(weights / 16 / costs.BYTES_PER_S + fixed, rel=0.1)


def test_ranks_share_experts_and_keep_their_rows():
    config = config_of("mixtral-8x7b")
    assert costs.layer_seconds(config, 8192, 2) == pytest.approx(costs.layer_seconds(config, 8192, 1), rel=0.05)


def test_producers():
    """A router took 0.09 to 0.12 ms at these sizes; a producer that reads 131 copies of x takes what reading takes."""
    x, w = shapes((8192, 4096), (4096, 128))
    seconds = costs.producer_seconds(router, x, w)
    assert 0.03e-3 < seconds < 0.2e-3
    read = 131 * 8192 * 4096 * 2 / costs.BYTES_PER_S
    assert read < costs.producer_seconds(reader, *[x] * 131, w) < 1.15 * read + 0.2e-3
    # Loops count their turns, branches the longer one; a product of the size of the layer counts as one.
    chain = lambda n: lambda a: jax.lax.fori_loop(0, n, lambda _, h: jnp.dot(h, h), a)
    (a,) = shapes((4096, 4096))
    one, four = (
        costs.producer_seconds(lambda a, n=n: jax.lax.scan(lambda h, _: (h @ h, None), a, None, n)[0], a)
        for n in (1, 4)
    )
    assert one > 2 * 4096**3 / costs.FLOPS_PER_S and 3.5 < four / one < 4
    assert costs.producer_seconds(chain(3), a) > 0
    either = lambda a: jax.lax.cond(a[0, 0] > 0, lambda h: h, lambda h: h @ h, a)
    assert costs.producer_seconds(either, a) == pytest.approx(one, rel=0.3)


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("tokens", [64, 8192, 32768])
def test_streams_only_behind_producers_that_are_worth_it(name, tokens):
    config = config_of(name)
    x, w = shapes((tokens, config.hidden), (config.hidden, config.num_experts))
    cost = costs.gpu_cost(config, tokens, 1, costs.producer_seconds(router, x, w))
    assert cost.max_waves == 1 and cost.producer_sms == 0
    layer = costs.layer_seconds(config, tokens, 1)
    cost = costs.gpu_cost(config, tokens, 1, 0.25 * layer)
    assert cost.max_waves == 2 and 0 < cost.producer_sms < 132
    rows = tokens * config.top_k // config.num_experts
    plan = waves.plan_chunks(
        tokens, ring_chunk_tokens=tokens, num_slots=2, top_k=config.top_k, num_experts=config.num_experts, cost=cost
    )
    assert plan.wave_ends == ((1, 2) if rows >= 2048 else (1,))


def test_auto_streams_only_where_the_model_predicts_a_gain(monkeypatch):
    """Producers that fill the machine gain nothing on 16 of its SMs, as measured; one that needs no more would."""
    config = config_of("mixtral-8x7b")
    layer = costs.layer_seconds(config, 8192, 1)
    assert costs.streamed_seconds(layer, 0.25 * layer) > 1.25 * layer
    assert costs.gpu_cost(config, 8192, 1, 0.25 * layer, only_if_it_pays=True).max_waves == 1
    assert costs.gpu_cost(config, 8192, 1, 0.25 * layer).max_waves == 2
    monkeypatch.setattr(costs, "PRODUCER_RATE", 1.0)
    assert costs.streamed_seconds(layer, 0.25 * layer) == pytest.approx((1.0 + 0.125 + 0.07) * layer, rel=0.01)
    assert costs.gpu_cost(config, 8192, 1, 0.25 * layer, only_if_it_pays=True).max_waves == 2


def test_nothing_known_of_the_producer():
    assert costs.gpu_cost(config_of("qwen3-30b"), 8192, 1, None) is costs.OVERLAPPED
