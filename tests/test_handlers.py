"""What handlers promise to a caller that Python's checks never saw, as an exported program or a bug above them is.

An operand or result of the wrong type or size is an error that names it with what was wanted and got. On a ring it
costs the ring, like every failure of a call, and so does an expert tensor that is not where the open stream reads it.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_streammoe as sm
from jax_streammoe import ffi, ops, publish
from tests.helpers import oracle

T, H, I, E, K = 6, 16, 8, 4, 2
CONFIG = sm.MoEConfig(E, K, H, I, dtype=jnp.float32, block_m=8)
LAYER = ops.LayerSpec(CONFIG, E)


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


EXPERTS = ops.pack_experts(zeros(E, H, 2 * I), zeros(E, I, H), None, None)
X, IDS, WEIGHTS = zeros(T, H), zeros(T, K, dtype=jnp.int32), zeros(T, K)
ROWS, DROPPED, TOKEN = zeros(T, K, H), zeros(T, K, dtype=jnp.uint8), zeros(1, 1)


def call(name, results, *operands):
    """A handler by its target, with results of its own."""
    attributes = LAYER.attributes() | {"checks": np.int32(0), "ring": ""}
    return ffi.call(name, [ffi.like(r, r.shape, r.dtype) for r in results], *operands, attributes=attributes)


def with_experts(**changed):
    names = ("gate", "up", "down", "b_gate", "b_up", "b_down")
    return tuple(changed.get(name, tensor) for name, tensor in zip(names, EXPERTS, strict=True))


COUNTS, EXPERT_ROWS = zeros(3, dtype=jnp.int32), zeros(E, dtype=jnp.int32)
GRADIENTS = (TOKEN, ROWS, WEIGHTS, *EXPERTS)
REFUSED = {
    "ids": (lambda: ops.forward(LAYER, X, WEIGHTS, WEIGHTS, EXPERTS), "topk_ids must have 12 of type S32, got 12 F32"),
    "odd ids": (
        lambda: ops.forward(LAYER, X, IDS.ravel()[:11], WEIGHTS, EXPERTS),
        "topk_ids must have 10 of type S32, got 11 S32",
    ),
    "weights": (
        lambda: ops.forward(LAYER, X, IDS, WEIGHTS.astype(jnp.bfloat16), EXPERTS),
        "topk_weights must have 12 of type F32, got 12 BF16",
    ),
    "x": (lambda: ops.forward(LAYER, X[:5], IDS, WEIGHTS, EXPERTS), "x must have 96 of type F32, got 80 F32"),
    "y": (
        lambda: call("forward", (X[:5], EXPERT_ROWS, COUNTS), X, IDS, WEIGHTS, *EXPERTS),
        "y must have 96 of type F32, got 80 F32",
    ),
    "expert_rows": (
        lambda: call("forward", (X, COUNTS, COUNTS), X, IDS, WEIGHTS, *EXPERTS),
        "expert_rows must have 4 of type S32, got 3 S32",
    ),
    "counts": (
        lambda: call("forward", (X, EXPERT_ROWS, EXPERT_ROWS), X, IDS, WEIGHTS, *EXPERTS),
        "counts must have 3 of type S32, got 4 S32",
    ),
    "expert dtype": (
        lambda: ops.forward(LAYER, X, IDS, WEIGHTS, with_experts(down=zeros(E, I, H, dtype=jnp.bfloat16))),
        "down must have 512 of type F32, got 512 BF16",
    ),
    "expert size": (
        lambda: ops.forward(LAYER, X, IDS, WEIGHTS, with_experts(gate=zeros(E, H, I))),
        "gate must have 1024 of type F32, got 512 F32",
    ),
    "unexpected up": (
        lambda: ops.forward(LAYER, X, IDS, WEIGHTS, with_experts(up=zeros(E, H, I))),
        "gate must have 512 of type F32, got 1024 F32",
    ),
    "rows: ids": (lambda: ops.rows(LAYER, X, WEIGHTS, EXPERTS), "local ids must have 12 of type S32, got 12 F32"),
    "rows: x": (lambda: ops.rows(LAYER, X[1:], IDS, EXPERTS), "x must have 96 of type F32, got 80 F32"),
    "rows: dropped": (
        lambda: call("rows", (ROWS, WEIGHTS, EXPERT_ROWS), X, IDS, *EXPERTS),
        "dropped must have 12 of type U8, got 12 F32",
    ),
    "check_ids": (
        lambda: call("check_ids", (IDS,), WEIGHTS, jnp.int32(0)), "attribute total_experts",
    ),
    "check_ids: ids": (
        lambda: ops.check_ids(LAYER, WEIGHTS, jnp.int32(0)), "topk_ids must have 12 of type S32, got 12 F32",
    ),
    "check_ids: any_invalid": (
        lambda: ops.check_ids(LAYER, IDS, zeros(2, dtype=jnp.int32)), "any_invalid must have 1 of type S32, got 2 S32",
    ),
    "combine: rows": (
        lambda: ops.combine(LAYER, ROWS.astype(jnp.float16), IDS, WEIGHTS, DROPPED),
        "rows must have 192 of type F32, got 192 F16",
    ),
    "combine: dropped": (
        lambda: ops.combine(LAYER, ROWS, IDS, WEIGHTS, DROPPED[:1]), "dropped must have 12 of type U8, got 2 U8",
    ),
    "backward: dy": (
        lambda: ops.backward(LAYER, TOKEN, X, X[:2], IDS, WEIGHTS, EXPERTS), "dy must have 96 of type F32, got 32 F32",
    ),
    "backward: ids": (
        lambda: ops.backward(LAYER, TOKEN, X, X, IDS.astype(jnp.uint32), WEIGHTS, EXPERTS),
        "local ids must have 12 of type S32, got 12 U32",
    ),
    "backward: weights": (
        lambda: ops.backward(LAYER, TOKEN, X, X, IDS, IDS, EXPERTS),
        "topk_weights must have 12 of type F32, got 12 S32",
    ),
    "backward: token": (
        lambda: call("backward", (X, *GRADIENTS[1:]), TOKEN, X, X, IDS, WEIGHTS, *EXPERTS),
        "token must have 1 of type F32, got 96 F32",
    ),
    "backward: gradient": (
        lambda: call("backward", (*GRADIENTS[:3], zeros(E, H), *EXPERTS[1:]), TOKEN, X, X, IDS, WEIGHTS, *EXPERTS),
        "gate must have 1024 of type F32, got 64 F32",
    ),
    "forward_kept: gate_up": (
        lambda: call("forward_kept", (X, zeros(T, K * I), EXPERT_ROWS, COUNTS), X, IDS, WEIGHTS, *EXPERTS),
        "gate_up must have 192 of type F32, got 96 F32",
    ),
    "backward_kept: gate_up": (
        lambda: ops.backward_kept(LAYER, X, X, IDS, WEIGHTS, zeros(T, K * 2 * I, dtype=jnp.bfloat16), EXPERTS),
        "gate_up must have 192 of type F32, got 192 BF16",
    ),
    "backward_kept: dy": (
        lambda: ops.backward_kept(LAYER, X, X[:2], IDS, WEIGHTS, zeros(T, K * 2 * I), EXPERTS),
        "dy must have 96 of type F32, got 32 F32",
    ),
    "after": (lambda: call("after", (X,), X[:1]), "value must have 16 of type F32, got 96 F32"),
    "sizes": (
        lambda: ops.forward(dataclasses.replace(LAYER, num_local_experts=0), X, IDS, WEIGHTS, EXPERTS),
        "num_experts, hidden, intermediate, top_k and block_m must be at least 1, got 0",
    ),
}  # fmt: skip


def pattern(text):
    """`NAME must have N of type A, got M B` stands for the full text."""
    return re.escape(
        re.sub(r"have (\d+) of type (\w+), got (\d+) (\w+)", r"have \1 elements of type \2, got \3 of type \4", text)
    )


@pytest.mark.core
@pytest.mark.parametrize(("run", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_a_layer_handler_names_the_operand(run, text):
    with pytest.raises(Exception, match=pattern(text)):
        jax.block_until_ready(jax.jit(run)())


@pytest.fixture
def ring(request):
    with sm.make_ring(CONFIG, chunk_tokens=4, num_slots=2, name=request.node.name) as ring:
        yield ring


def stream_spec(ring, **changed):
    spec = publish.plan_stream(ring.spec, CONFIG, T, changed.pop("policy", "serial"), "packed", None, False)
    plan = dataclasses.replace(spec.plan, **changed.pop("plan", {}))
    return dataclasses.replace(spec, plan=plan, **changed)


def by_hand(spec, mem, *, y=None, index=None, route=(IDS[:4], WEIGHTS[:4]), x=X[:4], closing=EXPERTS):
    """A stream of two chunks, of which chunk 0 may be changed."""
    mem, opened = ops.open_stream(spec, mem, EXPERTS)
    y = opened if y is None else y
    mem, y = ops.publish_route(spec, mem, y, ops.as_chunk(0) if index is None else index, *route)
    mem, y = ops.publish_layout(spec, mem, y, ops.as_chunk(0), x)
    mem, y = ops.publish_route(spec, mem, y, ops.as_chunk(1), IDS[4:], WEIGHTS[4:])
    mem, y = ops.publish_layout(spec, mem, y, ops.as_chunk(1), X[4:])
    return ops.close_stream(spec, mem, y, closing)


def batch(spec, mem, x=X, ids=IDS, weights=WEIGHTS):
    return ops.ring_forward(spec, mem, x, ids, weights, EXPERTS)


def with_short_x(spec, mem):
    results = [ffi.like(r, r.shape, r.dtype) for r in (mem, X, EXPERT_ROWS, COUNTS)]
    operands = (mem, X[:5], IDS, WEIGHTS, *EXPERTS)
    return ffi.call("ring_forward", results, *operands, attributes=spec.attributes(), aliases={0: 0})


changed_plan = lambda **plan: lambda ring, mem: batch(stream_spec(ring, plan=plan), mem)
changed_call = lambda **change: lambda ring, mem: by_hand(stream_spec(ring), mem, **change)
REFUSED_ON_A_RING = {
    "macro_tokens": (changed_plan(macro_tokens=9), "macro_tokens must be at most num_slots * chunk_tokens = 8"),
    "wave_ends": (changed_plan(wave_ends=(1,)), "macro_ends and wave_ends must ascend to num_chunks = 2"),
    "macro_ends": (changed_plan(macro_ends=(2, 2)), "macro_ends and wave_ends must ascend to num_chunks = 2"),
    "num_chunks": (
        changed_plan(num_chunks=1, macro_ends=(1,), wave_ends=(1,)), "the plan of the call: its chunks hold 0 of 6",
    ),
    "x": (lambda r, mem: with_short_x(stream_spec(r), mem), "x must have 96 of type F32, got 80 F32"),
    "y": (lambda r, mem: batch(stream_spec(r), mem, x=X[:5]), "y must have 96 of type F32, got 80 F32"),
    "ids": (lambda r, mem: batch(stream_spec(r), mem, ids=WEIGHTS), "topk_ids must have 12 of type S32, got 12 F32"),
    "weights": (
        lambda r, mem: batch(stream_spec(r), mem, weights=WEIGHTS[1:]),
        "topk_weights must have 12 of type F32, got 10 F32",
    ),
    "route: ids": (changed_call(route=(IDS[:3], WEIGHTS[:4])), "topk_ids must have 8 of type S32, got 6 S32"),
    "route: weights": (changed_call(route=(IDS[:4], IDS[:4])), "topk_weights must have 8 of type F32, got 8 S32"),
    "route: chunk": (changed_call(index=jnp.int8(0)), "chunk must have 1 of type S32, got 1 S8"),
    "layout: x": (changed_call(x=X[:3]), "x must have 64 of type F32, got 48 F32"),
    "layout: type of x": (changed_call(x=X[:4].astype(jnp.bfloat16)), "x must have 64 of type F32, got 64 BF16"),
    "y of an open stream": (changed_call(y=zeros(5, H)), "y must have 96 of type F32, got 80 F32"),
    "moved experts": (
        changed_call(closing=with_experts(down=zeros(E, I, H) + 1)), "XLA moved the experts while the stream was open",
    ),
    "close: experts": (
        changed_call(closing=with_experts(down=zeros(E, I))), "down must have 512 of type F32, got 32 F32",
    ),
    "not open": (
        lambda r, mem: ops.close_stream(stream_spec(r), mem, X, EXPERTS), "close_stream without open_stream",
    ),
}  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize(("run", "text"), REFUSED_ON_A_RING.values(), ids=REFUSED_ON_A_RING.keys())
def test_a_ring_handler_names_the_operand_and_ends_the_ring(ring, run, text):
    with pytest.raises(Exception, match=pattern(text)):
        jax.block_until_ready(jax.jit(functools.partial(run, ring), donate_argnums=0)(ring.mem))
    with pytest.raises(RuntimeError, match=f"is unusable.*{pattern(text)}"):
        ring.check()


@pytest.mark.parametrize("policy", ["serial", "overlap"])
def test_the_unchanged_calls_pass(ring, policy):
    spec = stream_spec(ring, policy=policy)
    mem = ring.mem
    for run in (by_hand, batch):
        mem, y, expert_rows, _ = jax.block_until_ready(jax.jit(functools.partial(run, spec), donate_argnums=0)(mem))
        np.testing.assert_array_equal(y, np.zeros((T, H), np.float32))
        np.testing.assert_array_equal(expert_rows, [T * K, 0, 0, 0])
    ring.check()


def test_an_event_of_the_backward_names_the_group_and_rank_of_its_ring(rng, request):
    mesh = jax.make_mesh((2, 2), ("data", "ep"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    p = oracle.make_problem(rng, T=16, H=H, I=I, E=E, K=K, dtype=jnp.float32, block_m=8)
    ep = sm.expert_parallel(p.config, mesh=mesh, token_spec=P(("data", "ep")))

    def loss(x, ring):
        y, ring, *_ = ep.moe(x, *p.args[1:], ring=ring)
        return jnp.sum(y * p.dy), ring

    ring = sm.make_ring(p.config, chunk_tokens=4, num_slots=2, mesh=mesh, name=request.node.name)
    with ring, sm.trace.record() as events:
        jax.block_until_ready(jax.jit(jax.grad(loss, has_aux=True), donate_argnums=1)(p.x, ring))
    for phase in ("open", "backward"):
        places = sorted((e.group, e.rank) for e in events if e.phase == phase)
        assert places == [(0, 0), (0, 1), (1, 0), (1, 1)], phase
