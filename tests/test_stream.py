"""Streams on one device: whatever the cut, the order, the policy, the schedule or the pool, the bits are `sm.moe`'s.

Also the gradient of `stream_moe` against the float64 oracle, and what a route function may take and return.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_streammoe as sm
from tests.helpers import oracle
from tests.helpers.layers import assert_same_bits
from tests.helpers.streams import SIZES, assert_gradients, batch, gradients_of


def given_routes(x, ids, weights):
    """A route function whose answer is given: ids and weights come as token_args."""
    return ids, weights


def stream(p, ring, **options):
    p = oracle.as_jax(p)
    options = {"b_gate_up": p.b_gate_up, "b_down": p.b_down, "chunks": None} | options
    options |= {"config": p.config, "ring": ring, "token_args": (p.topk_ids, p.topk_weights)}
    return sm.stream_moe(p.x, given_routes, p.w_gate_up, p.w_down, **options)


@pytest.mark.core
@pytest.mark.parametrize("schedule", ["packed", "chunk"])
@pytest.mark.parametrize("policy", ["serial", "overlap"])
@pytest.mark.parametrize("num_slots", [1, 2, 3, 4])
def test_one_to_nine_chunks_over_every_ring_call_after_call(rng, new_ring, num_slots, policy, schedule):
    # 9 tokens in n chunks of ceil(9 / n): partial chunks, empty chunks and more chunks than slots are among them.
    p = oracle.make_problem(rng, T=9, masked=0.2, duplicates=True, **SIZES)
    ring = new_ring(p.config, chunk_tokens=9, num_slots=num_slots)

    @functools.partial(jax.jit, donate_argnums=1)
    def run(p_args, ring):
        ys = []
        for n in range(1, 10):
            y, ring, _ = stream(p.replace(x=p_args), ring, chunks=n, policy=policy, schedule=schedule)
            ys.append(y)
        return ys, ring

    want = batch(p)
    oracle.assert_close("y", want, oracle.forward(p), p.config.dtype, 16)
    for calls in (1, 2, 3):
        ys, ring = run(p.x, ring)
        for y in ys:
            assert_same_bits(y, want)
        (rank,) = sm.inspect(ring).ranks
        assert (rank.sequence_base, rank.call_number) == (45 * calls, 9 * calls)
        newest = [max(q for q in range(45 * calls + 1) if (q - 1) % num_slots == slot) for slot in range(num_slots)]
        assert rank.route_ready[0] == rank.layout_ready[0] == rank.consumed[0] == newest


@pytest.mark.parametrize("chunks", [None, 3, "auto"])
@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 16, 25, 41])
def test_calls_larger_than_the_ring_run_macro_chunk_after_macro_chunk(rng, new_ring, tokens, chunks):
    p = oracle.make_problem(rng, T=tokens, masked=0.1, **SIZES)
    ring = new_ring(p.config, chunk_tokens=4, num_slots=2)
    run = jax.jit(lambda x, ring: stream(p.replace(x=x), ring, chunks=chunks, return_stats=True), donate_argnums=1)
    y, ring, info = run(p.x, ring)
    want, stats = batch(p, return_stats=True)
    assert_same_bits(y, want)
    jax.tree.map(np.testing.assert_array_equal, info.stats, stats)
    macros = max(1, -(-tokens // 8))
    if chunks == 3:
        assert sm.inspect(ring).ranks[0].sequence_base == (3 * macros if tokens else 1)
    else:
        assert sm.inspect(ring).ranks[0].sequence_base >= macros


@pytest.mark.parametrize("num_valid", [0, 1, 11, 19])
def test_num_valid_masks_the_tokens_behind_it(rng, new_ring, num_valid):
    p = oracle.make_problem(rng, T=19, **SIZES)
    ring = new_ring(p.config)
    run = jax.jit(lambda n, ring: stream(p, ring, num_valid=n, return_stats=True), donate_argnums=1)
    y, _, info = run(jnp.int32(num_valid), ring)
    assert_same_bits(y, batch(p, num_valid=num_valid))
    oracle.assert_close("y", y, oracle.forward(p, num_valid), p.config.dtype, 16)
    assert int(info.stats.masked_routes) == (19 - num_valid) * 2


@pytest.mark.parametrize(
    "options", [dict(use_bias=True), dict(dtype=jnp.bfloat16), dict(capacity=3, activation="relu2")]
)
def test_other_configs_stream_the_same_bits(rng, new_ring, options):
    p = oracle.make_problem(rng, T=16, masked=0.1, invalid=0.1, **SIZES | options)
    ring = new_ring(p.config, chunk_tokens=4, num_slots=4)
    y, ring, info = jax.jit(lambda x, r: stream(p.replace(x=x), r, return_stats=True), donate_argnums=1)(p.x, ring)
    want, stats = batch(p, return_stats=True)
    assert_same_bits(y, want)
    oracle.assert_close("y", y, oracle.forward(p), p.config.dtype, 16)
    jax.tree.map(np.testing.assert_array_equal, info.stats, stats)


@pytest.mark.parametrize("pool_tokens", [8, 9, 16, 32])
@pytest.mark.parametrize("policy", ["serial", "overlap"])
def test_a_small_pool_computes_partial_blocks(rng, new_ring, policy, pool_tokens):
    # All tokens go to two experts, so 32 tokens carry rows from chunk to chunk, in a pool that holds one chunk.
    ids = np.tile([[0, 3]], (32, 1))
    p = oracle.make_problem(rng, T=32, ids=ids, **SIZES | dict(block_m=64))
    ring = new_ring(p.config, chunk_tokens=8, num_slots=4, pool_tokens=pool_tokens)
    run = jax.jit(lambda x, ring: stream(p.replace(x=x), ring, chunks=8, policy=policy), donate_argnums=1)
    for _ in range(2):
        y, ring, _ = run(p.x, ring)
        assert_same_bits(y, batch(p))


@pytest.mark.slow
def test_a_thousand_calls_wrap_the_ring(rng, new_ring):
    p = oracle.make_problem(rng, T=11, **SIZES)
    ring = new_ring(p.config, chunk_tokens=4, num_slots=2)
    run = jax.jit(lambda x, ring: stream(p.replace(x=x), ring)[:2], donate_argnums=1)
    want, address = batch(p), ring.mem.unsafe_buffer_pointer()
    for _ in range(1000):
        y, ring = run(p.x, ring)
        assert_same_bits(y, want)
    assert ring.mem.unsafe_buffer_pointer() == address
    assert sm.inspect(ring).ranks[0].sequence_base == 3000


@pytest.mark.parametrize("policy", ["serial", "overlap"])
def test_random_delays_change_nothing(rng, new_ring, policy):
    # Payload is a function of the iteration: a stale slot, row or word would give the bits of another one.
    p = oracle.make_problem(rng, T=26, **SIZES)
    ring = new_ring(p.config, chunk_tokens=4, num_slots=2)
    p = oracle.as_jax(p)
    at = lambda n: p.replace(**{f: jnp.roll(getattr(p, f), n, 0) for f in ("x", "topk_ids", "topk_weights")})
    run = jax.jit(lambda n, ring: stream(at(n), ring, policy=policy)[:2], donate_argnums=1)
    want = jax.jit(lambda n: sm.moe(*at(n).args, config=p.config))
    for phase in sm.testing.PHASES:
        sm.testing.add_fault(ring.name, phase, "jitter", seconds=0.002)
    try:
        for n in range(16):
            y, ring = run(jnp.int32(n), ring)
            assert_same_bits(y, want(jnp.int32(n)))
    finally:
        sm.testing.clear_faults()


def norm(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def routed_call(p, w_router, table, ring, tokens, **options):
    """A stream whose route uses all it may: Routed.x, aux, token_args (hash routing), route_args, a closure."""
    config = p.config

    def route(x_c, tokens_c, w_router, scale):
        h = norm(x_c)
        logits = h @ w_router
        hashed = sm.route_topk(logits, config, hash_table=table, token_ids=tokens_c)
        aux = {"probs": hashed.aux, "ids": hashed.ids, "weights": hashed.weights}
        return sm.Routed(hashed.ids, hashed.weights * scale, x=h, aux=aux)

    return sm.stream_moe(
        p.x, route, p.w_gate_up, p.w_down, config=config, ring=ring, route_args=(w_router, jnp.float32(2.0)),
        token_args=(tokens,), **options,
    )  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize("chunks", [None, 4, "auto"])
def test_a_route_may_return_tokens_and_aux_and_take_arguments(rng, new_ring, chunks):
    p = oracle.as_jax(oracle.make_problem(rng, T=14, **SIZES))
    ring = new_ring(p.config, chunk_tokens=4, num_slots=4)
    table = jnp.asarray(rng.integers(-1, 4, (10, 2)), jnp.int32)
    tokens = jnp.asarray(rng.integers(0, 10, 14), jnp.int32)
    w_router = jnp.asarray(rng.standard_normal((16, 4)), jnp.float32)

    @functools.partial(jax.jit, donate_argnums=2)
    def streamed(x, w_router, ring):
        def loss(x, w_router, ring):
            y, ring, info = routed_call(p.replace(x=x), w_router, table, ring, tokens, chunks=chunks)
            balance = sm.load_balance_loss(info.aux["probs"], info.aux["ids"], 4)
            return jnp.vdot(y, p.dy) + balance, (y, ring, info)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(x, w_router, ring)

    (_, (y, ring, info)), gradients = streamed(p.x, w_router, ring)
    assert info.stats is None
    np.testing.assert_array_equal(info.aux["ids"], table[tokens])
    assert info.aux["probs"].shape == (14, 4)
    oracle.assert_close(
        "y", y, oracle.forward(as_numpy(p, x=norm(p.x), topk_ids=table[tokens], topk_weights=2 * info.aux["weights"])),
        p.config.dtype, 32,
    )  # fmt: skip

    def plain(x, w_router):
        h = norm(x)
        routed = sm.route_topk(h @ w_router, p.config, hash_table=table, token_ids=tokens)
        y = sm.reference(h, routed.ids, 2 * routed.weights, p.w_gate_up, p.w_down, config=p.config)
        return jnp.vdot(y, p.dy) + sm.load_balance_loss(routed.aux, routed.ids, 4)

    wanted = jax.jit(jax.grad(plain, (0, 1)))(p.x, w_router)
    for name, got, want in zip(("x", "w_router"), gradients, wanted, strict=True):
        # Two float32 programs: each within the bound of the exact value.
        error, scale = np.abs(np.asarray(got - want)), np.abs(np.asarray(want))
        bound = 2 * oracle.error_bound(p.config.dtype, 64) * (np.sqrt(np.mean(scale**2)) + scale)
        assert np.all(error <= bound), f"{name}: {error.max()}"
        assert np.any(np.asarray(got) != 0)


def as_numpy(p, **changes):
    arrays = {f: np.asarray(getattr(p, f)) for f in ("x", "topk_ids", "topk_weights", "w_gate_up", "w_down", "dy")}
    return p.replace(**arrays | {name: np.asarray(a) for name, a in changes.items()})


@pytest.mark.parametrize("mutable", [False, True])
def test_a_scan_over_layers_whose_route_closes_over_a_traced_table(rng, new_ring, mutable):
    # A custom_vjp round the route would leak the table's tracer here.
    p = oracle.as_jax(oracle.make_problem(rng, T=10, **SIZES))
    ring = new_ring(p.config, mutable=mutable)
    tables = jnp.asarray(rng.integers(0, 4, (3, 10, 2)), jnp.int32)
    weights = jnp.asarray(rng.random((3, 10, 2)), jnp.float32)

    def model(x, weights, layer):
        def step(carry, layer_args):
            x, state = carry
            table, weights = layer_args
            y, state = layer(p.replace(x=x), table, weights, state)
            return (x + jnp.tanh(y), state), None

        return lambda state: lax.scan(step, (x, state), (tables, weights))[0]

    def on_ring(q, table, weights, ring):
        rows = jnp.arange(10)
        route = lambda x, rows: (table[rows], weights[rows])
        y, used, _ = sm.stream_moe(
            q.x,
            route,
            q.w_gate_up,
            q.w_down,
            config=q.config,
            ring=cell if mutable else ring,
            token_args=(rows,),
            chunks=None,
        )
        return y, None if mutable else used

    cell = ring
    batch_ready = lambda q, table, weights, state: (
        sm.moe(q.x, table, weights, q.w_gate_up, q.w_down, config=q.config), state
    )  # fmt: skip

    def gradients(layer):
        def loss(x, weights, state):
            y, state = model(x, weights, layer)(state)
            return jnp.vdot(y, p.dy), (y, state)

        return lambda x, weights, state: jax.grad(loss, (0, 1), has_aux=True)(x, weights, state)

    run = jax.jit(gradients(on_ring), donate_argnums=() if mutable else 2)
    got, (y, used) = run(p.x, weights, None if mutable else ring)
    want, (y_want, _) = jax.jit(gradients(batch_ready))(p.x, weights, None)
    assert_same_bits(y, y_want)
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)
    assert sm.inspect(ring if mutable else used).ranks[0].sequence_base == 9


@pytest.mark.core
@pytest.mark.parametrize("chunks", [None, 5, "auto"])
def test_the_gradient_does_not_depend_on_the_cut(rng, new_ring, chunks):
    p = oracle.make_problem(rng, T=23, masked=0.1, invalid=0.1, duplicates=True, **SIZES)
    ring = new_ring(p.config, chunk_tokens=5, num_slots=3)
    gradients, ring = gradients_of(lambda p, ring: stream(p, ring, chunks=chunks)[:2], p, ring)
    assert_gradients(p, gradients)
    want, _ = gradients_of(lambda p, _: (sm.moe(*p.args, **p.kwargs), None), p, None)
    for a, b in zip(gradients, want, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("schedule", ["packed", "chunk"])
def test_without_a_ring_the_same_call_is_batch_ready(rng, schedule):
    p = oracle.make_problem(rng, T=13, masked=0.1, **SIZES)
    y, ring, info = jax.jit(lambda x: stream(p.replace(x=x), None, schedule=schedule, return_stats=True))(p.x)
    want, stats = batch(p, return_stats=True)
    assert_same_bits(y, want)
    assert ring is None
    jax.tree.map(np.testing.assert_array_equal, info.stats, stats)


def test_checks_name_the_token_slot_and_value(rng, new_ring):
    p = oracle.make_problem(rng, T=11, **SIZES)
    p.topk_ids[9, 1] = 77
    ring = new_ring(p.config)
    run = jax.jit(lambda x, ring: stream(p.replace(x=x), ring, checks=True)[:2], donate_argnums=1)
    with pytest.raises(Exception, match=r"topk_ids\[9, 1\] is 77, outside -1..3"):
        jax.block_until_ready(run(p.x, ring))


BAD_ROUTE_RESULTS = {
    "fewer tokens": (
        lambda ids, w, x: sm.Routed(ids[:2], w[:2], x[:2]),
        r"topk_ids must be int32 of shape \(\d+, 2\)",
    ),
    "fewer replaced tokens": (
        lambda ids, w, x: sm.Routed(ids, w, x[:2]),
        r"Routed\.x must have shape \(\d+, 32\), got \(2, 32\)",
    ),
    "scalar aux": (
        lambda ids, w, x: sm.Routed(ids, w, None, jnp.sum(w)),
        r"Routed\.aux must hold arrays of shape \(\d+, \.\.\.\)",
    ),
}


@pytest.mark.parametrize("chunks", [None, "auto", "no ring"])
@pytest.mark.parametrize("case", BAD_ROUTE_RESULTS)
def test_what_a_route_returns_is_per_token_however_it_is_called(rng, case, chunks):
    problem = oracle.make_problem(rng, T=16, H=32, I=16, E=4, K=2, dtype=jnp.float32)
    change, text = BAD_ROUTE_RESULTS[case]
    ring = None if chunks == "no ring" else sm.make_ring(problem.config, chunk_tokens=8, num_slots=2, name="bad-route")

    def call(ring):
        return sm.stream_moe(
            problem.x, lambda x, i, w: change(i, w, x), problem.w_gate_up, problem.w_down, ring=ring,
            config=problem.config,
            token_args=(jnp.asarray(problem.topk_ids), jnp.asarray(problem.topk_weights)),
            chunks="auto" if chunks == "no ring" else chunks,
        )  # fmt: skip

    with pytest.raises(ValueError, match=text):
        jax.jit(call)(ring)
    sm.close_ring("bad-route")


@pytest.mark.parametrize("length", [5, 50])
def test_token_args_have_one_entry_per_token(rng, length):
    problem = oracle.make_problem(rng, T=16, H=32, I=16, E=4, K=2, dtype=jnp.float32)
    with pytest.raises(
        ValueError, match=rf"token_args must hold arrays of shape \(16, \.\.\.\), got float32 \({length},\)"
    ):
        sm.stream_moe(
            problem.x, lambda x, mask: None, problem.w_gate_up, problem.w_down, config=problem.config,
            token_args=(jnp.zeros((length,), jnp.float32),),
        )  # fmt: skip


@pytest.mark.parametrize("word", ["policy", "schedule", "chunks"])
def test_words_are_checked_without_a_ring_too(rng, word):
    problem = oracle.make_problem(rng, T=16, H=32, I=16, E=4, K=2, dtype=jnp.float32)
    with pytest.raises(ValueError, match=f"{word} must be .*, got 'bogus'"):
        sm.stream_moe(
            problem.x, lambda x: None, problem.w_gate_up, problem.w_down, config=problem.config, **{word: "bogus"}
        )
