"""Streams opened, published and closed by hand: any legal order gives the bits and the gradient of `sm.moe`.

Under a traced chunk index nothing is recorded: the gradient then comes from whole arrays, or asking for it raises.
Every other misuse of the four calls is refused with its own text, at trace time where it can be seen there.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax import lax

import jax_streammoe as sm
from jax_streammoe import waves
from tests.helpers import oracle
from tests.helpers.layers import assert_same_bits
from tests.helpers.streams import SIZES, assert_gradients, batch, gradients_of


def publish(s, p, half, chunk):
    """Publishes one half, "route" or "layout", of a chunk of the problem."""
    start, stop = s.chunk_bounds(chunk)
    if half == "layout":
        return sm.publish_layout(s, chunk, p.x[start:stop])
    return sm.publish_route(s, chunk, p.topk_ids[start:stop], p.topk_weights[start:stop])


def by_hand(p, ring, order, **options):
    p = oracle.as_jax(p)
    s = sm.open_stream(ring, p.w_gate_up, p.w_down, config=p.config, num_tokens=p.x.shape[0], **options)
    for half, chunk in order:
        s = publish(s, p, half, chunk)
    return sm.close_stream(s)


def in_order(num_chunks, *, route_first):
    halves = ("route", "layout") if route_first else ("layout", "route")
    return [(half, n) for n in range(num_chunks) for half in halves]


ORDERS = {
    "route first": in_order(6, route_first=True),
    "layout first": in_order(6, route_first=False),
    "all routes first": [(half, n) for half in ("route", "layout") for n in range(6)],
    "backwards": [(half, n) for n in (5, 4, 3, 2, 1, 0) for half in ("layout", "route")],
    "halves apart": [("route", n) for n in range(6)] + [("layout", n) for n in (3, 0, 5, 1, 4, 2)],
}


@pytest.mark.core
@pytest.mark.parametrize("policy", ["serial", "overlap"])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
def test_orders_of_publication_give_the_same_bits_and_gradient(rng, new_ring, order, policy):
    p = oracle.make_problem(rng, T=22, masked=0.1, **SIZES)
    ring = new_ring(p.config, chunk_tokens=4, num_slots=6)
    y, ring, info = jax.jit(lambda x, r: by_hand(p.replace(x=x), r, order, policy=policy), donate_argnums=1)(p.x, ring)
    assert_same_bits(y, batch(p))
    assert int(info.stats.masked_routes) == int(np.sum(np.asarray(p.topk_ids) == -1))
    gradients, _ = gradients_of(lambda p, ring: by_hand(p, ring, order, policy=policy)[:2], p, ring)
    assert_gradients(p, gradients)


@settings(max_examples=12, phases=[Phase.generate])  # every example compiles: no shrinking
@given(data=st.data())
def test_any_legal_order_gives_the_same_bits_and_any_other_is_refused(data):
    num_slots = data.draw(st.integers(1, 4), "slots")
    chunks = data.draw(st.integers(1, 7), "chunks")
    tokens = data.draw(st.integers(1, 20), "tokens")
    p = oracle.make_problem(np.random.default_rng(7), T=tokens, **SIZES)
    chunks = max(chunks, -(-min(tokens, 5 * num_slots) // 5))
    refused = 0

    def run(x, ring):
        nonlocal refused
        q = p.replace(x=x)
        s = sm.open_stream(ring, p.w_gate_up, p.w_down, config=p.config, num_tokens=tokens, chunks=chunks)
        left = {(half, n) for half in ("route", "layout") for n in range(s.num_chunks)}
        while left:
            whole = {n for n in range(s.num_chunks) if not {("route", n), ("layout", n)} & left}
            legal = []
            for half, n in sorted(left):
                try:
                    waves.validate_publication_order(s.spec.plan, whole, n, num_slots=num_slots)
                    legal.append((half, n))
                except ValueError as error:
                    refused += 1
                    with pytest.raises(ValueError, match=f"chunk {n} (reuses|belongs)") as raised:
                        publish(s, q, half, n)
                    assert str(raised.value) == str(error)
            assert legal, "a stream with chunks left can go on"
            step = data.draw(st.sampled_from(legal))
            s = publish(s, q, *step)
            left.remove(step)
        return sm.close_stream(s)

    with sm.make_ring(p.config, chunk_tokens=5, num_slots=num_slots, name="any order") as ring:
        y, _, _ = jax.jit(run, donate_argnums=1)(p.x, ring)
        assert_same_bits(y, batch(p))


def publish_in_scan(p, ring, indices, **residuals):
    """Publishes full chunks under a traced index, as a scan over producers does."""
    p = oracle.as_jax(p)
    options = {"config": p.config, "num_tokens": p.x.shape[0], "num_valid": residuals.pop("valid", None)}
    s = sm.open_stream(ring, p.w_gate_up, p.w_down, record=False, **options)
    c = s.chunk_bounds(0)[1]

    def step(s, n):
        at = lambda a: lax.dynamic_slice_in_dim(a, n * c, c)
        s = sm.publish_route(s, n, at(p.topk_ids), at(p.topk_weights))
        return sm.publish_layout(s, n, at(p.x)), None

    return sm.close_stream(lax.scan(step, s, jnp.asarray(indices, jnp.int32))[0], **residuals)


@pytest.mark.core
@pytest.mark.parametrize("num_valid", [None, 13])
def test_a_traced_chunk_index_takes_its_gradient_from_whole_arrays(rng, new_ring, num_valid):
    p = oracle.make_problem(rng, T=20, masked=0.1, **SIZES)
    ring = new_ring(p.config)
    forward = lambda x, ring: publish_in_scan(p.replace(x=x), ring, range(5), valid=num_valid)
    y, ring, _ = jax.jit(forward, donate_argnums=1)(p.x, ring)
    assert_same_bits(y, batch(p, num_valid=num_valid))

    def call(p, ring):
        whole = dict(x=p.x, topk_ids=p.topk_ids, topk_weights=p.topk_weights)
        return publish_in_scan(p, ring, range(5), valid=num_valid, **whole)[:2]

    gradients, _ = gradients_of(call, p, ring)
    assert_gradients(p, gradients, num_valid)


@pytest.mark.parametrize(
    ("argument", "what"),
    [
        ("x", "publish_layout: x_c"),
        ("topk_weights", "publish_route: topk_weights"),
        ("w_down", "close_stream: expert weights"),
    ],
)
def test_differentiating_a_stream_without_residuals_raises(rng, new_ring, argument, what):
    p = oracle.make_problem(rng, T=20, **SIZES)
    ring = new_ring(p.config)

    def loss(value, ring, stop):
        q = p.replace(**{argument: lax.stop_gradient(value) if stop else value})
        y, ring, _ = publish_in_scan(q, ring, range(5))
        return jnp.sum(y * value.ravel()[0]), ring

    text = f"^{what} is being differentiated.*pass x=, topk_ids=, topk_weights= to close_stream"
    with pytest.raises(NotImplementedError, match=text):
        jax.jit(jax.grad(functools.partial(loss, stop=False), has_aux=True)).lower(getattr(p, argument), ring)
    jax.jit(jax.grad(functools.partial(loss, stop=True), has_aux=True)).lower(getattr(p, argument), ring)


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([0, 0, 1, 2, 3], "publish_route: chunk 0 is published already"),
        ([0, 1, 2, 3, 5], "publish_route: chunk must be in 0..4, got 5"),
        ([-1, 0, 1, 2, 3], "publish_route: chunk must be in 0..4, got -1"),
        ([0, 1, 2, 3], "close_stream: not all of 5 chunks were published"),
        ([1, 2, 0, 3, 4], "chunk of macro-chunk 1 is published before all chunks of macro-chunk 0"),
    ],
)
def test_a_wrong_traced_index_is_a_run_time_error(rng, new_ring, indices, text):
    p = oracle.make_problem(rng, T=20, **SIZES)
    ring = new_ring(p.config)
    run = jax.jit(lambda x, ring: publish_in_scan(p.replace(x=x), ring, indices), donate_argnums=1)
    with pytest.raises(Exception, match=text):
        jax.block_until_ready(run(p.x, ring))


def refuse(p, ring, **options):
    return sm.open_stream(ring, p.w_gate_up, p.w_down, config=p.config, num_tokens=32, chunks=8, **options)


REFUSED = {
    "missing": (
        lambda p, r: by_hand(p, r, [("route", 0), ("layout", 0), ("layout", 2)], chunks=4),
        r"^close_stream: chunks \[1, 2, 3\] of 4 were not published \(route: \[0\], layout: \[0, 2\]\)$",
    ),
    "missing, unrecorded": (
        lambda p, r: by_hand(p, r, [("route", 0)], chunks=4, record=False),
        r"^close_stream: chunks \[0, 1, 2, 3\] of 4 were not published \(route: \[0\], layout: \[\]\)$",
    ),
    "route twice": (lambda p, r: by_hand(p, r, [("route", 1)] * 2), "^publish_route: chunk 1 is published already$"),
    "layout twice": (lambda p, r: by_hand(p, r, [("layout", 0)] * 2), "^publish_layout: chunk 0 is published already$"),
    "chunk 5 before 1": (
        lambda p, r: by_hand(p, r, [(h, n) for n in (0, 2, 3, 5) for h in ("route", "layout")], chunks=8),
        r"^chunk 5 reuses the slot of chunk 1 in a ring of 4 slots.*publish chunks \[1",
    ),
    "out of range": (lambda p, r: by_hand(p, r, [("route", 9)]), "^chunk must be in 0..3, got 9$"),
    "negative": (lambda p, r: by_hand(p, r, [("route", -1)]), "^chunk must be in 0..3, got -1$"),
    "short tokens": (
        lambda p, r: sm.publish_layout(refuse(p, r), 0, p.x[:3]),
        r"^x_c must have shape \(4, 16\), got \(3, 16\)$",
    ),
    "short ids": (
        lambda p, r: sm.publish_route(refuse(p, r), 0, p.topk_ids[:3], p.topk_weights[:3]),
        r"^topk_ids must be int32 of shape \(4, 2\), got int32 \(3, 2\)$",
    ),
    "x_scale": (
        lambda p, r: sm.publish_layout(refuse(p, r), 0, p.x[:4], x_scale=p.x[:4, :1]),
        "^x_scale must be None: tokens of dtype float32 carry no scales$",
    ),
    "persistent": (lambda p, r: refuse(p, r, policy="persistent"), '^policy "persistent" is not in this version'),
    "policy": (
        lambda p, r: refuse(p, r, policy="eager"),
        "^policy must be one of serial, overlap, got 'eager'$",
    ),
    "schedule": (lambda p, r: refuse(p, r, schedule="lazy"), "^schedule must be one of packed, chunk, got 'lazy'$"),
    "traced, recorded": (
        lambda p, r: sm.publish_layout(refuse(p, r), jnp.int32(0), p.x[:4]),
        "^publish_layout: chunk is traced, so nothing can be recorded: open the stream with record=False$",
    ),
    "traced, partial": (
        lambda p, r: publish_in_scan(p.replace(x=p.x[:30]), r, range(4)),
        "^publish_route: chunk is traced, so all 4 chunks must have 8 tokens, but the stream has 30$",
    ),
    "half of the residuals": (
        lambda p, r: sm.close_stream(refuse(p, r), x=p.x),
        "^close_stream: x, topk_ids and topk_weights must be given together$",
    ),
    "chunks word": (
        lambda p, r: sm.stream_moe(p.x, print, p.w_gate_up, p.w_down, config=p.config, ring=r, chunks="all"),
        "^chunks must be None, an int or \"auto\", got 'all'$",
    ),
    "leading dims": (
        lambda p, r: sm.stream_moe(p.x[None], print, p.w_gate_up, p.w_down, config=p.config, ring=r),
        r"^x must have shape \(T, 16\), got \(1, 32, 16\)$",
    ),
}


@pytest.mark.core
@pytest.mark.parametrize(("call", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_at_trace_time(rng, new_ring, call, text):
    p = oracle.as_jax(oracle.make_problem(rng, T=32, **SIZES))
    ring = new_ring(p.config, chunk_tokens=8, num_slots=4)
    with pytest.raises(ValueError, match=f"(?m){text}"):
        jax.jit(lambda x, ring: call(p.replace(x=x), ring)).lower(p.x, ring)
    ring.check()  # nothing ran


def test_wrong_kinds_are_type_errors(rng, new_ring):
    p = oracle.as_jax(oracle.make_problem(rng, T=32, **SIZES))
    for route, options, text in (
        (sm.Routed(None, None), {}, r"^route must be a function of the tokens of a chunk, got Routed$"),
        (print, {"route_args": p.x}, r"^route_args must be a tuple, got float32 \(32, 16\)$"),
        (print, {"token_args": p.topk_ids}, r"^token_args must be a tuple, got int32 \(32, 2\)$"),
    ):
        with pytest.raises(TypeError, match=text):
            sm.stream_moe(p.x, route, p.w_gate_up, p.w_down, config=p.config, **options)
    with pytest.raises(TypeError, match=r"^ring must come from make_ring, got str$"):
        refuse(p, "ring")
    with pytest.raises(TypeError, match=r"^route must return Routed or a tuple \(ids, weights\), got ArrayImpl$"):
        sm.stream_moe(p.x, lambda x: p.topk_ids, p.w_gate_up, p.w_down, config=p.config)
    weights = p.topk_weights[:4]
    with pytest.raises(TypeError, match=r"^topk_ids must be int32 of shape \(4, 2\), got float32 \(4, 2\)$"):
        sm.publish_route(jax.eval_shape(lambda r: refuse(p, r), new_ring(p.config, num_slots=8)), 0, weights, weights)


VMAPPED = {
    "tokens": lambda p, ring: lambda a: publish(refuse(p.replace(x=p.x * a), ring), p.replace(x=p.x * a), "layout", 0),
    "routes": lambda p, ring: (
        lambda a: publish(refuse(p, ring), p.replace(topk_weights=p.topk_weights * a), "route", 0)
    ),
    "experts": lambda p, ring: lambda a: refuse(p.replace(w_down=p.w_down * a), ring),
    "route function": lambda p, ring: (
        lambda a: sm.stream_moe(
            p.x * a,
            lambda x: (p.topk_ids[: x.shape[0]], p.topk_weights[: x.shape[0]]),
            p.w_gate_up,
            p.w_down,
            config=p.config,
            ring=ring,
        )[0]
    ),
}


@pytest.mark.parametrize("call", VMAPPED.values(), ids=VMAPPED.keys())
def test_a_stream_cannot_be_vmapped(rng, new_ring, call):
    p = oracle.as_jax(oracle.make_problem(rng, T=32, **SIZES))
    ring = new_ring(p.config, chunk_tokens=32, num_slots=4)
    text = r"^a ring is one linear resource: a stream cannot be vmapped\. Use sm\.moe, which folds the axis into tokens"
    with pytest.raises(NotImplementedError, match=text):
        jax.eval_shape(lambda r: jax.vmap(call(p, r))(jnp.ones(3)), ring)


def test_a_numpy_integer_is_a_chunk_index(rng):
    problem = oracle.make_problem(rng, T=16, H=32, I=16, E=4, K=2, dtype=jnp.float32)
    ring = sm.make_ring(problem.config, chunk_tokens=8, num_slots=2, name="numpy-chunk")

    def run(ring):
        s = sm.open_stream(ring, problem.w_gate_up, problem.w_down, config=problem.config, num_tokens=16)
        for chunk in np.arange(s.num_chunks):
            part = slice(*s.chunk_bounds(int(chunk)))
            s = sm.publish_route(s, chunk, jnp.asarray(problem.topk_ids)[part], jnp.asarray(problem.topk_weights)[part])
            s = sm.publish_layout(s, chunk, jnp.asarray(problem.x)[part])
        return sm.close_stream(s)

    y, ring, _ = jax.jit(run, donate_argnums=0)(ring)
    np.testing.assert_array_equal(y, sm.moe(*oracle.as_jax(problem).args, config=problem.config))
    sm.close_ring("numpy-chunk")
