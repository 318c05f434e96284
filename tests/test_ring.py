"""The life of a ring on one device: made, looked at, replaced, closed; functional and in a `jax.Ref`.

What a user does outside of programs, and what programs need not do: a ring that was made again recompiles nothing, and
a `RingRef` needs no donation, no threading and no remat policy.
"""

from __future__ import annotations

import copy
import functools
import pickle
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_streammoe as sm
from jax_streammoe.layout import ring_layout
from tests.helpers import oracle

SIZES = dict(H=16, I=8, E=4, K=2, dtype=jnp.float32, block_m=8)
CONFIG = sm.MoEConfig(4, 2, 16, 8, dtype=jnp.float32, block_m=8)
SMALL = dict(chunk_tokens=4, num_slots=2)


@pytest.fixture
def name(request):
    yield request.node.name
    sm.close_ring(request.node.name)


def layer(p, x, ring, **options):
    route = lambda x, ids, weights: (ids, weights)
    options |= {"config": p.config, "ring": ring, "token_args": (p.topk_ids, p.topk_weights), "chunks": None}
    return sm.stream_moe(x, route, p.w_gate_up, p.w_down, **options)[:2]


def stack(p, x, ring, remat=lambda f: f):
    """Three layers, each behind a non-linear operation, so that remat has something to compute again."""

    def block(x, ring):
        y, ring = layer(p, jnp.tanh(x), ring)
        return x + jnp.sin(y), ring

    for _ in range(3):
        x, ring = remat(block)(x, ring)
    return x, ring


def batch_stack(p, x):
    for _ in range(3):
        x = x + jnp.sin(sm.moe(jnp.tanh(x), p.topk_ids, p.topk_weights, p.w_gate_up, p.w_down, config=p.config))
    return x


def assert_same_bits(got, want):
    np.testing.assert_array_equal(np.array(got).view(np.uint32), np.array(want).view(np.uint32))


@pytest.mark.core
@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"chunk_tokens": 0}, ValueError, "chunk_tokens must be at least 1, got 0"),
        ({"num_slots": 0}, ValueError, "num_slots must be at least 1, got 0"),
        ({"chunk_tokens": 4.0}, TypeError, "chunk_tokens must be an int, got 4.0 of type float"),
        ({"num_slots": True}, TypeError, "num_slots must be an int, got True"),
        ({"config": None}, TypeError, "config must be an MoEConfig, got NoneType"),
        ({"timeout_s": 0}, ValueError, "timeout_s must be positive and at most 1e+08 seconds, got 0"),
        ({"timeout_s": float("nan")}, ValueError, "timeout_s must be positive and at most 1e+08 seconds, got nan"),
        ({"timeout_s": float("inf")}, ValueError, "timeout_s must be positive and at most 1e+08 seconds, got inf"),
        ({"timeout_s": 1e10}, ValueError, "timeout_s must be positive and at most 1e+08 seconds, got 10000000000.0"),
        ({"pool_tokens": 3}, ValueError, "pool_tokens must be in 4..8 (R*C..R*S*C), got 3"),
        ({"pool_tokens": 9}, ValueError, "pool_tokens must be in 4..8 (R*C..R*S*C), got 9"),
        ({"threads": 0}, ValueError, "threads must be at least 1, got 0"),
        (
            {"config": sm.MoEConfig(4, 2, 16, 8, capacity=3), "pool_tokens": 7},
            ValueError,
            "pool_tokens must be 8 with capacity=, which needs all routes at once, got 7",
        ),
    ],
    ids=lambda v: "" if not isinstance(v, dict) else "-".join(v),
)
def test_make_ring_says_what_is_wrong_and_makes_nothing(name, changes, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        sm.make_ring(**{"config": CONFIG, "name": name} | SMALL | changes)
    assert not sm.close_ring(name)


@pytest.mark.parametrize(
    ("ranks", "options", "text"),
    [
        (2, {"axis_name": "tp"}, r"^axis_name must be an axis of the mesh \('ep',\), got 'tp'$"),
        (2, {"axis_name": ("ep", "ep")}, r"^axis_name must name each axis once, got \('ep', 'ep'\)$"),
        (2, {"axis_name": ()}, r"^axis_name must name each axis once, got \(\)$"),
        (3, {}, "^num_experts must be a multiple of num_ranks = 3, got 4$"),
    ],
)
def test_make_ring_over_a_mesh_says_what_is_wrong(name, mesh_of, ranks, options, text):
    with pytest.raises(ValueError, match=text):
        sm.make_ring(CONFIG, mesh=mesh_of(ranks), name=name, **SMALL, **options)
    assert not sm.close_ring(name)


def test_a_ring_name_is_a_string():
    with pytest.raises(TypeError, match=r"^name must be a str, got 3$"):
        sm.make_ring(CONFIG, name=3, **SMALL)


class OtherDevice:
    platform, id, process_index = "tpu", 0, 0

    def __str__(self):
        return "tpu:0"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(mesh=4), r"mesh must be a jax\.sharding\.Mesh or None, got int"),
        (dict(timeout_s="10"), "timeout_s must be a number of seconds, got '10'"),
        (dict(timeout_s=None), "timeout_s must be a number of seconds, got None"),
        (dict(num_slots=None), "num_slots"),
    ],
)
def test_arguments_of_another_kind_are_named(name, options, text):
    with pytest.raises(TypeError, match=f"^{text}"):
        sm.make_ring(CONFIG, name=name, **SMALL | options)
    for call in (sm.close_ring, sm.inspect):
        with pytest.raises(TypeError, match=r"^ring must come from make_ring.*, got NoneType$"):
            call(None)


def test_a_ring_of_other_devices_is_refused(name, monkeypatch):
    text = "^rings run on CPU and CUDA devices, got tpu:0$"
    grid = np.array([jax.devices()[0], OtherDevice()])
    with pytest.raises(ValueError, match=text):
        sm.make_ring(CONFIG, mesh=types.SimpleNamespace(axis_names=("ep",), shape={"ep": 2}, devices=grid), **SMALL)
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [OtherDevice()])
    with pytest.raises(ValueError, match=text):
        sm.make_ring(CONFIG, name=name, **SMALL)
    assert not sm.close_ring(name)


@pytest.mark.parametrize("device", ["cpu", 3])
def test_a_ring_without_a_mesh_is_on_the_default_device(rng, name, device):
    p = oracle.make_problem(rng, T=9, **SIZES)
    with jax.default_device(device if isinstance(device, str) else jax.devices()[device]):
        ring = sm.make_ring(p.config, name=name, timeout_s=1e8, **SMALL)  # the longest deadline too
        y, ring = jax.jit(functools.partial(layer, p), donate_argnums=1)(p.x, ring)
    assert {d.id for d in ring.mem.devices()} == {0 if device == "cpu" else device}
    assert_same_bits(y, jax.jit(lambda x: sm.moe(x, *p.args[1:], config=p.config))(p.x))


def test_make_ring_inside_jit_is_refused(name):
    with pytest.raises(ValueError, match="make_ring is called outside of jit: it allocates the memory that programs"):
        jax.jit(lambda x: (x, sm.make_ring(CONFIG, name=name, **SMALL))[0])(jnp.ones(3))
    assert not sm.close_ring(name)


@pytest.mark.core
@pytest.mark.parametrize("mutable", [False, True])
def test_close_is_idempotent_and_takes_a_ring_or_its_name(name, mutable):
    ring = sm.make_ring(CONFIG, name=name, mutable=mutable, **SMALL)
    ring.check()
    assert ring.name == name
    assert sm.close_ring(ring) and not sm.close_ring(ring) and not sm.close_ring(name)
    for look in (ring.check, functools.partial(sm.inspect, ring)):
        with pytest.raises(RuntimeError, match=f"^ring {re.escape(repr(name))} is closed: call make_ring again$"):
            look()
    ring = sm.make_ring(CONFIG, name=name, **SMALL)
    assert sm.close_ring(name)


def test_a_closed_ring_cannot_be_used(rng, name):
    p = oracle.make_problem(rng, T=8, **SIZES)
    ring = sm.make_ring(p.config, name=name, **SMALL)
    sm.close_ring(ring)
    with pytest.raises(Exception, match=f"ring {re.escape(repr(name))} does not exist in this process: it was closed"):
        jax.block_until_ready(jax.jit(functools.partial(layer, p), donate_argnums=1)(p.x, ring))


def test_as_a_context_manager(name):
    with sm.make_ring(CONFIG, name=name, **SMALL) as ring:
        ring.check()
    assert not sm.close_ring(name)
    with pytest.raises(KeyError), sm.make_ring(CONFIG, name=name, **SMALL):
        raise KeyError
    assert not sm.close_ring(name)


@pytest.mark.core
@pytest.mark.parametrize("pool_tokens", [None, 5])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bytes_are_the_formula(name, dtype, pool_tokens):
    config = sm.MoEConfig(4, 2, 24, 8, dtype=dtype)
    ring = sm.make_ring(config, name=name, chunk_tokens=5, num_slots=3, pool_tokens=pool_tokens)
    shape = dict(chunk_tokens=5, num_slots=3, num_ranks=1, pool_tokens=pool_tokens)
    assert sm.ring_bytes(config, **shape) == ring.mem.nbytes == ring_layout(ring.spec.shape)["total"]
    assert ring.mem.shape == (1, ring.mem.nbytes) and ring.mem.dtype == jnp.uint8
    assert ring.token.shape == (1, 1) and ring.token.dtype == jnp.float32
    assert sm.inspect(ring).num_bytes == ring.mem.nbytes
    # Slots, pool and combine rows dominate: S*C*H*itemsize for each of them (the pool P*H*itemsize), K of the last.
    pool = 15 if pool_tokens is None else pool_tokens
    assert ring.mem.nbytes > (15 + pool + 15 * 2) * 24 * config.itemsize


def test_a_ring_made_again_reuses_the_program(rng, name):
    p = oracle.make_problem(rng, T=9, **SIZES)
    step = jax.jit(functools.partial(layer, p), donate_argnums=1)
    want = jax.jit(lambda x: sm.moe(x, *p.args[1:], config=p.config))(p.x)
    specs = set()
    for _ in range(3):
        ring = sm.make_ring(p.config, name=name, **SMALL)
        specs.add(ring.spec)
        for calls in (1, 2):
            y, ring = step(p.x, ring)
            assert_same_bits(y, want)
            assert sm.inspect(ring).ranks[0].call_number == calls
    assert step._cache_size() == 1 and len(specs) == 1


def test_a_live_name_is_replaced(rng, name):
    p = oracle.make_problem(rng, T=9, **SIZES)
    old = sm.make_ring(p.config, name=name, **SMALL)
    new = sm.make_ring(p.config, name=name, **SMALL)
    step = jax.jit(functools.partial(layer, p), donate_argnums=1)
    with pytest.raises(Exception, match="is not at the address it was made at"):
        jax.block_until_ready(step(p.x, old))
    y, new = step(p.x, new)
    new.check()
    assert_same_bits(y, jax.jit(lambda x: sm.moe(x, *p.args[1:], config=p.config))(p.x))


@pytest.mark.core
def test_inspect_is_a_table_of_slots(rng, name):
    p = oracle.make_problem(rng, T=9, **SIZES)
    ring = first = sm.make_ring(p.config, name=name, chunk_tokens=4, num_slots=4)
    state = sm.inspect(ring)
    assert (state.name, state.num_ranks, state.num_slots, state.failure) == (name, 1, 4, "")
    assert str(state).count("never used") == 4
    _, ring = jax.block_until_ready(jax.jit(functools.partial(layer, p), donate_argnums=1)(p.x, ring))
    (rank,) = sm.inspect(ring).ranks
    assert (rank.group, rank.rank, rank.sequence_base, rank.call_number, rank.error) == (0, 0, 3, 1, "")
    assert rank.route_ready == rank.layout_ready == rank.consumed == [[1, 2, 3, 0]]
    lines = str(sm.inspect(ring)).splitlines()
    assert lines[0] == f"ring {name!r}: 1 ranks x 4 slots, {ring.mem.nbytes:,} bytes per rank, usable"
    assert lines[1].split() == ["rank", "calls", "chunks", "slot", "route", "layout", "consumed", "state"]
    assert [line.split() for line in lines[2:]] == [
        ["0.0", "1", "3", "0", "1", "1", "1", "free"],
        ["0.0", "1", "3", "1", "2", "2", "2", "free"],
        ["0.0", "1", "3", "2", "3", "3", "3", "free"],
        ["0.0", "1", "3", "3", "0", "0", "0", "never", "used"],
    ]
    with pytest.raises(RuntimeError, match="this value was donated, inspect the one that the call returned"):
        sm.inspect(first)


def test_looking_at_a_ring_does_not_move_it(rng, name):
    p = oracle.make_problem(rng, T=9, **SIZES)
    ring = sm.make_ring(p.config, name=name, **SMALL)
    step = jax.jit(functools.partial(layer, p), donate_argnums=1)
    for _ in range(3):
        str(sm.inspect(ring))
        assert repr(ring) == f"Ring({name!r}, 1 ranks x 2 slots of 4 tokens)"
        ring.check()
        assert ring.spec.macro_tokens == 8
        _, ring = step(p.x, ring)


@pytest.mark.parametrize("mutable", [False, True])
@pytest.mark.parametrize("copier", [pickle.dumps, copy.deepcopy, copy.copy], ids=["pickle", "deepcopy", "copy"])
def test_a_ring_cannot_be_pickled_or_copied(name, copier, mutable):
    ring = sm.make_ring(CONFIG, name=name, mutable=mutable, **SMALL)
    with pytest.raises(TypeError, match=r"a ring cannot be pickled or copied.*call make_ring after a restore"):
        copier({"ring": ring})["ring"] if copier is not copy.copy else copier(ring)
    ring.check()


def test_after_orders_a_ring_behind_arrays_and_rings_without_a_copy(rng, name):
    p = oracle.make_problem(rng, T=9, **SIZES)
    ring = sm.make_ring(p.config, name=name, **SMALL)
    with sm.make_ring(p.config, name=name + "/other", **SMALL) as other:

        @functools.partial(jax.jit, donate_argnums=(1, 2))
        def run(x, ring, other):
            y, ring = layer(p, x, ring)
            z, other = layer(p, x, sm.after(other, ring, y))
            return y, z, sm.after(ring, other), other

        sm.check_program(run, p.x, ring, other)
        for _ in range(3):
            y, z, ring, other = run(p.x, ring, other)
            assert_same_bits(y, z)
        assert sm.inspect(ring).ranks[0].call_number == sm.inspect(other).ranks[0].call_number == 3


def test_a_ref_ring_needs_no_after(name):
    ring = sm.make_ring(CONFIG, name=name, mutable=True, **SMALL)
    with pytest.raises(TypeError, match=r"^a RingRef needs no after: its Ref orders its calls; to order two rings, "):
        sm.after(ring, jnp.ones(3))


def cotangents(p, run, *rings, **options):
    @functools.partial(jax.jit, **options)
    def gradient(x, w_down, *rings):
        def loss(x, w_down):
            y, used = run(p.replace(w_down=w_down), x, *rings)
            return jnp.vdot(y, p.dy), used

        return jax.grad(loss, (0, 1), has_aux=True)(x, w_down)

    return gradient(jnp.asarray(p.x), jnp.asarray(p.w_down), *rings)


REMATS = {
    "no remat": lambda f: f,
    "full remat": jax.checkpoint,
    "nothing saveable": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable),
    "names": lambda f: jax.checkpoint(f, policy=sm.checkpoint_policy()),
}


@pytest.mark.core
@pytest.mark.parametrize("remat", REMATS.values(), ids=REMATS.keys())
def test_a_ref_ring_needs_no_donation_and_no_policy(rng, name, remat):
    p = oracle.make_problem(rng, T=9, **SIZES)
    ring = sm.make_ring(p.config, name=name, mutable=True, **SMALL)

    def run(p, x, ring):
        def block(x):  # the ring is closed over: a Ref needs no threading
            return x + jnp.sin(layer(p, jnp.tanh(x), ring)[0])

        for _ in range(3):
            x = remat(block)(x)
        return x, None

    got, _ = cotangents(p, run, ring)
    want, _ = cotangents(p, lambda p, x: (batch_stack(p, x), None))
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)
    y = jax.jit(lambda x, r: run(p, x, r)[0])(p.x, ring)
    assert_same_bits(y, jax.jit(functools.partial(batch_stack, p))(p.x))
    ring.check()


@pytest.mark.parametrize("remat", [REMATS["no remat"], REMATS["full remat"]], ids=["no remat", "full remat"])
def test_a_ref_ring_in_scan(rng, name, remat):
    p = oracle.make_problem(rng, T=9, **SIZES)
    ring = sm.make_ring(p.config, name=name, mutable=True, **SMALL)

    def run(p, x, ring):
        block = remat(lambda x: x + jnp.sin(layer(p, jnp.tanh(x), ring)[0]))
        return lax.scan(lambda x, _: (block(x), None), x, length=3)[0], None

    got, _ = cotangents(p, run, ring)
    want, _ = cotangents(p, lambda p, x: (batch_stack(p, x), None))
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)


@pytest.mark.core
def test_a_functional_ring_under_remat_with_the_policy(rng, name):
    p = oracle.make_problem(rng, T=9, **SIZES)
    ring = sm.make_ring(p.config, name=name, **SMALL)
    run = functools.partial(stack, remat=REMATS["names"])
    want, _ = cotangents(p, lambda p, x: (batch_stack(p, x), None))
    for calls in (3, 6):
        got, ring = cotangents(p, run, ring, donate_argnums=2)
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b)
        assert sm.inspect(ring).ranks[0].call_number == calls  # y is saved, so the stream never runs again


def test_a_ring_in_a_ref_is_registered_when_make_ring_returns(mesh_of, name):
    """On every rank: nothing that later calls wait for is still under way."""
    for turn in range(3):
        with sm.make_ring(CONFIG, chunk_tokens=256, num_slots=64, mesh=mesh_of(4), mutable=True, name=name) as ring:
            assert [r.rank for r in sm.inspect(ring).ranks] == [0, 1, 2, 3]
            assert {r.call_number for r in sm.inspect(ring).ranks} == {0}, turn
