"""`route_topk` against NumPy, its gradients, names and refusals, and the load-balancing loss."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_streammoe.config import MoEConfig
from jax_streammoe.routing import Routed, load_balance_loss, route_topk

pytestmark = pytest.mark.core
T, E, K = 37, 16, 4
CFG = MoEConfig(E, K, 8, 8)


def softmax(a):
    powers = np.exp(a - a.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def expected(logits, *, score, normalize, pre_softmax, bias=0.0, groups=None, scaling=1.0):
    """Ids, weights and probabilities by a loop over tokens in float64."""
    logits = np.asarray(logits, np.float64)
    scores = softmax(logits) if score == "softmax" else 1 / (1 + np.exp(-logits))
    values = scores if pre_softmax else logits
    ids, weights = np.zeros((T, K), int), np.zeros((T, K))
    for t in range(T):
        choice = values[t] + bias
        if groups is not None:
            blocks = choice.reshape(groups[0], -1)
            best = np.argsort(-np.sort(blocks, axis=1)[:, -2:].sum(1), kind="stable")[: groups[1]]
            masked = np.full_like(blocks, -np.inf)
            masked[best] = blocks[best]
            choice = masked.reshape(-1)
        ids[t] = np.argsort(-choice, kind="stable")[:K]
        picked = values[t, ids[t]]
        if not pre_softmax:
            weights[t] = softmax(picked)
        else:
            weights[t] = picked / picked.sum() if normalize else picked
    return ids, weights * scaling, scores / scores.sum(-1, keepdims=True)


MODES = {
    "mixtral": {"score": "softmax", "normalize": True, "pre_softmax": True},
    "plain": {"score": "softmax", "normalize": False, "pre_softmax": True},
    "post": {"score": "softmax", "normalize": True, "pre_softmax": False},
    "sigmoid": {"score": "sigmoid", "normalize": True, "pre_softmax": True},
    "sigmoid_raw": {"score": "sigmoid", "normalize": False, "pre_softmax": True},
}


@pytest.mark.parametrize("groups", [None, (4, 2), (8, 3), (16, 4)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_matches_the_loop(rng, mode, biased, groups):
    logits = rng.standard_normal((T, E)).astype(np.float32)
    bias = rng.standard_normal(E).astype(np.float32) if biased else None
    got = route_topk(
        jnp.asarray(logits), CFG, **MODES[mode], bias=None if bias is None else jnp.asarray(bias),
        scaling=2.5, num_groups=groups and groups[0], group_topk=groups and groups[1],
    )  # fmt: skip
    ids, weights, probs = expected(
        logits, **MODES[mode], bias=0.0 if bias is None else bias, groups=groups, scaling=2.5
    )
    assert isinstance(got, Routed) and got.x is None
    assert got.ids.dtype == jnp.int32 and got.weights.dtype == got.aux.dtype == jnp.float32
    np.testing.assert_array_equal(got.ids, ids)
    np.testing.assert_allclose(got.weights, weights, rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(got.aux, probs, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("mode", MODES)
def test_gradient_is_that_of_the_gathered_scores(rng, mode):
    logits, c = rng.standard_normal((T, E)).astype(np.float32), rng.standard_normal((T, K)).astype(np.float32)
    loss = lambda a: jnp.sum(route_topk(a, CFG, **MODES[mode]).weights * c)
    grad = np.asarray(jax.grad(loss)(jnp.asarray(logits)))
    step, numeric = 1e-6, np.zeros((T, E))
    base_ids = expected(logits, **MODES[mode])[0]
    for e in range(E):
        values = []
        for sign in (1, -1):
            moved = logits.astype(np.float64)
            moved[:, e] += sign * step
            ids, weights, _ = expected(moved, **MODES[mode])
            np.testing.assert_array_equal(ids, base_ids)
            values.append((weights * c).sum(1))
        numeric[:, e] = (values[0] - values[1]) / (2 * step)
    np.testing.assert_allclose(grad, numeric, rtol=1e-3, atol=1e-6)
    assert np.abs(grad).max() > 0.01


def test_bias_selects_and_gets_no_gradient(rng):
    logits, bias = jnp.asarray(rng.standard_normal((T, E)), jnp.float32), jnp.zeros(E).at[3].set(10.0)
    routed = route_topk(logits, CFG, bias=bias, normalize=False)
    assert np.all(routed.ids[:, 0] == 3)
    np.testing.assert_allclose(routed.weights[:, 0], jax.nn.softmax(logits)[:, 3], rtol=1e-6)
    assert not jax.grad(lambda b: jnp.sum(route_topk(logits, CFG, bias=b).weights ** 2))(bias).any()


def test_bfloat16_logits_and_leading_dims(rng):
    logits = jnp.asarray(rng.standard_normal((2, 3, 5, E)), jnp.bfloat16)
    got, flat = route_topk(logits, CFG), route_topk(logits.reshape(-1, E).astype(jnp.float32), CFG)
    assert got.ids.shape == got.weights.shape == (2, 3, 5, K) and got.weights.dtype == jnp.float32
    np.testing.assert_array_equal(got.ids.reshape(-1, K), flat.ids)
    np.testing.assert_array_equal(got.weights.reshape(-1, K), flat.weights)


def test_ties_go_to_the_lower_id():
    np.testing.assert_array_equal(route_topk(jnp.zeros((1, E)), CFG).ids, [[0, 1, 2, 3]])


def test_no_tokens():
    routed = route_topk(jnp.zeros((0, E)), CFG, num_groups=4, group_topk=2)
    assert routed.ids.shape == (0, K) and routed.aux.shape == (0, E)


def test_extreme_logits_stay_finite():
    logits = jnp.stack([jnp.full((E,), -1e30), jnp.full((E,), 1e30), jnp.zeros((E,)).at[0].set(1e30)])
    for mode in MODES.values():
        loss = lambda a, mode=mode: jnp.sum(route_topk(a, CFG, **mode).weights ** 2)
        assert np.isfinite(route_topk(logits, CFG, **mode).weights).all()
        assert np.isfinite(jax.grad(loss)(logits)).all()


@pytest.mark.parametrize("mode", MODES)
def test_hash_routing(rng, mode):
    logits = jnp.asarray(rng.standard_normal((T, E)), jnp.float32)
    table = jnp.asarray(rng.integers(0, E, (100, K)), jnp.int32).at[7, 1].set(-1).at[8].set(E)
    token_ids = jnp.asarray(rng.integers(9, 100, T), jnp.int32).at[0].set(7).at[1].set(8)
    routed = route_topk(logits, CFG, **MODES[mode], hash_table=table, token_ids=token_ids)
    np.testing.assert_array_equal(routed.ids, table[token_ids])
    assert routed.weights[0, 1] == 0 and not routed.weights[1].any() and routed.weights[2:].all()
    if mode in ("mixtral", "post", "sigmoid"):
        np.testing.assert_allclose(jnp.sum(routed.weights, -1), np.arange(T) != 1, rtol=1e-5)
    grad = jax.grad(lambda a: jnp.sum(route_topk(
        a, CFG, **MODES[mode], hash_table=table, token_ids=token_ids).weights ** 2))(logits)  # fmt: skip
    assert np.isfinite(grad).all() and grad.any() and not grad[1].any()


def test_more_routes_than_experts_only_by_table():
    cfg = MoEConfig(2, 3, 8, 8)
    with pytest.raises(ValueError, match=r"^top_k must be at most num_experts = 2, got 3$"):
        route_topk(jnp.zeros((1, 2)), cfg)
    table = jnp.asarray([[0, 1, 1]], jnp.int32)
    assert route_topk(jnp.zeros((1, 2)), cfg, hash_table=table, token_ids=jnp.zeros(1, jnp.int32)).ids.shape == (1, 3)


def test_named_values_are_saved_so_selection_runs_once(rng):
    logits = jnp.asarray(rng.standard_normal((T, E)), jnp.float32)
    policy = jax.checkpoint_policies.save_only_these_names("streammoe_ids", "streammoe_weights")

    def count(policy):
        block = jax.checkpoint(lambda a: jnp.sum(jnp.sin(route_topk(jnp.sin(a), CFG).weights)), policy=policy)
        return str(jax.make_jaxpr(jax.grad(block))(logits)).count(" top_k[")

    assert count(policy) == 1 and count(jax.checkpoint_policies.nothing_saveable) == 2


OK = {"logits": jnp.zeros((T, E))}
TABLE, TOKENS = jnp.zeros((10, K), jnp.int32), jnp.zeros(T, jnp.int32)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"logits": jnp.zeros((T, E), jnp.int32)}, TypeError, "logits must be floating, got int32 (37, 16)"),
        ({"logits": jnp.zeros((T, 8))}, ValueError, "logits must have shape (..., 16), got (37, 8)"),
        ({"logits": jnp.zeros(())}, ValueError, "logits must have shape (..., 16), got ()"),
        ({"score": "tanh"}, ValueError, "score must be one of softmax, sigmoid, got 'tanh'"),
        (
            {"score": "sigmoid", "pre_softmax": False},
            ValueError,
            "pre_softmax=False needs score=\"softmax\", got score='sigmoid'",
        ),
        ({"bias": jnp.zeros(3)}, ValueError, "bias must have shape (16,), got (3,)"),
        (
            {"num_groups": 4},
            ValueError,
            "num_groups and group_topk must be given together, got num_groups=4 and group_topk=None",
        ),
        ({"num_groups": 3, "group_topk": 2}, ValueError, "num_groups must divide num_experts = 16, got 3"),
        ({"num_groups": 4, "group_topk": 5}, ValueError, "group_topk must be at most num_groups = 4, got 5"),
        ({"num_groups": 0, "group_topk": 1}, ValueError, "num_groups must be at least 1, got 0"),
        (
            {"num_groups": 8, "group_topk": 1},
            ValueError,
            "group_topk groups of 2 experts must hold top_k = 4, got group_topk = 1",
        ),
        (
            {"hash_table": TABLE},
            ValueError,
            "hash_table and token_ids must be given together, got one of them",
        ),
        (
            {"token_ids": TOKENS},
            ValueError,
            "hash_table and token_ids must be given together, got one of them",
        ),
        (
            {"hash_table": TABLE[:, :2], "token_ids": TOKENS},
            ValueError,
            "hash_table must have shape (V, 4), got (10, 2)",
        ),
        (
            {"hash_table": TABLE, "token_ids": TOKENS[:3]},
            ValueError,
            "token_ids must have shape (37,) like logits, got (3,)",
        ),
        (
            {"hash_table": TABLE, "token_ids": jnp.zeros(T)},
            TypeError,
            "token_ids must be an integer array, got float32 (37,)",
        ),
        (
            {"hash_table": TABLE, "token_ids": TOKENS, "bias": jnp.zeros(E)},
            ValueError,
            "hash routing selects by table: bias, num_groups and group_topk must be None",
        ),
    ],
)
def test_refusals(options, error, text):
    options = {**OK, **options}
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        route_topk(options.pop("logits"), CFG, **options)


def test_load_balance_loss_matches_the_loop(rng):
    probs = softmax(rng.standard_normal((2, T, E))).astype(np.float32)
    ids = np.where(rng.random((2, T, K)) < 0.3, -1, rng.integers(0, E, (2, T, K))).astype(np.int32)
    ids[0, 3], ids[1, 4, 0] = -1, E
    poisoned = probs.copy()
    poisoned[0, 3] = np.nan
    counts = np.bincount(ids[(ids >= 0) & (ids < E)], minlength=E)
    used = ((ids >= 0) & (ids < E)).any(-1)
    want = E * np.sum(counts / counts.sum() * probs[used].mean(0))
    got, grad = jax.value_and_grad(load_balance_loss)(jnp.asarray(poisoned), jnp.asarray(ids), E)
    assert got.dtype == jnp.float32 and got.shape == ()
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(grad[used], np.tile(E * counts / counts.sum() / used.sum(), (used.sum(), 1)), rtol=1e-5)
    assert not grad[~used].any()


def test_load_balance_loss_at_its_ends():
    uniform = jnp.full((E, E), 1 / E)
    np.testing.assert_allclose(load_balance_loss(uniform, jnp.arange(E)[:, None], E), 1.0, rtol=1e-6)
    collapsed = jnp.zeros((E, E)).at[:, 2].set(1.0)
    np.testing.assert_allclose(load_balance_loss(collapsed, jnp.full((E, 1), 2), E), E, rtol=1e-6)
    assert load_balance_loss(uniform, jnp.full((E, K), -1), E) == 0
    assert load_balance_loss(uniform[:0], jnp.zeros((0, K), jnp.int32), E) == 0


def test_load_balance_loss_refusals():
    with pytest.raises(ValueError, match=re.escape("probs must have shape (..., 8), got (37, 16)")):
        load_balance_loss(jnp.zeros((T, E)), jnp.zeros((T, K), jnp.int32), 8)
    with pytest.raises(ValueError, match=re.escape("ids must have shape (37, 'K') like probs (37, 16), got (3, 4)")):
        load_balance_loss(jnp.zeros((T, E)), jnp.zeros((3, K), jnp.int32), E)
