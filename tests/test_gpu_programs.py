"""Programs compiled for a GPU, on a machine that needs none: where XLA:GPU leaves the ring, and in which order it runs.

What these programs compute is tested on the CPU (the same traces) and on a device (tests/gpu). Here every assertion is
shown to refuse a program with the fault it is for. A build without CUDA has no handlers to compile for.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jax_streammoe as sm
from jax_streammoe import ffi
from tests.helpers import gpu_asserts
from tests.helpers import gpu_compile as gpu
from tests.helpers.gpu_nets import (
    CHUNKS,
    CONFIG,
    LAYERS,
    E,
    H,
    I,
    K,
    T,
    arguments,
    batch_block,
    block,
    gradient,
    layer_of,
    one_layer,
    over_ranks,
    remat,
    route,
    scanned,
    unrolled,
)

__test__ = ffi.compiled.WITH_CUDA


@pytest.fixture(scope="module", autouse=True)
def compiler():
    if why := gpu.why_unavailable():
        pytest.skip(why)


PROGRAMS = {  # name: (function, streams in its text, where a loop's body stands once)
    "jit": (one_layer, 1),
    "unrolled": (unrolled, LAYERS),
    "scan": (scanned, 1),
    "shard_map": (scanned, 1),
    "gradient of scan": (gradient(scanned), 1),
    "gradient of scan with remat": (gradient(lambda *a: scanned(*a, block=remat(block))), 1),
}


@functools.cache
def compiled(name):
    function, mesh = PROGRAMS[name][0], None
    if name == "shard_map":
        function, mesh = over_ranks(function)
    args = arguments(mesh)
    return gpu.compile_program(function, *args, donate=2), args[2]


programs = pytest.mark.parametrize("name", PROGRAMS)


@programs
def test_the_ring_stays_in_place(name):
    program, ring = compiled(name)
    gpu_asserts.assert_no_copies(program, ring)
    gpu_asserts.assert_in_place(program, ring)


@programs
def test_a_router_runs_while_the_experts_have_the_chunk_before(name):
    program, _ = compiled(name)
    gpu_asserts.assert_streamed_order(program, PROGRAMS[name][1], CHUNKS)


@programs
def test_experts_lie_still_from_open_to_close(name):
    gpu_asserts.assert_same_experts(compiled(name)[0])


@programs
def test_command_buffers_hold_no_stream(name):
    gpu_asserts.assert_not_captured(compiled(name)[0])


def in_a_loop(x, weights, ring):
    """Chunks published under a traced index."""
    w = layer_of(weights, 0)

    def publish(s, chunk):
        n, x_n = chunk
        routed = route(x_n, w["router"])
        return sm.publish_route(sm.publish_layout(s, n, x_n), n, routed.ids, routed.weights), None

    s = sm.open_stream(ring, w["gate_up"], w["down"], config=CONFIG, num_tokens=T, record=False)
    s, _ = lax.scan(publish, s, (jnp.arange(CHUNKS, dtype=jnp.int32), x.reshape(CHUNKS, -1, H)))
    y, ring, _ = sm.close_stream(s)
    return y, ring


def test_a_loop_over_chunks_keeps_the_ring_in_place():
    args = arguments()
    program = gpu.compile_program(in_a_loop, *args, donate=2)
    assert [len(program.calls(name)) for name in gpu_asserts.STREAM] == [1, 1, 1, 1]
    gpu_asserts.assert_no_copies(program, args[2])
    gpu_asserts.assert_in_place(program, args[2])
    gpu_asserts.assert_not_captured(program)


BATCH_NETS = {
    "jit": lambda *args, block: one_layer(*args, block=block),
    "scan": lambda *args, block: scanned(*args, block=block),
    "gradient of scan with remat": lambda *args, block: gradient(functools.partial(scanned, block=remat(block)))(*args),
}
batch_nets = pytest.mark.parametrize("name", BATCH_NETS)


@batch_nets
def test_the_batch_ready_call_on_a_ring_stays_in_place_and_is_captured(name):
    args = arguments(chunks=1)  # where "auto" finds nothing to stream
    net = functools.partial(BATCH_NETS[name], block=functools.partial(block, chunks="auto"))
    program = gpu.compile_program(net, *args, donate=2)
    assert len(program.calls("ring_forward_local")) == 1
    gpu_asserts.assert_no_copies(program, args[2])
    gpu_asserts.assert_in_place(program, args[2])
    gpu_asserts.assert_captured(program, "ring_forward_local")


@batch_nets
def test_the_batch_ready_layer_is_called_once_and_captured(name):
    # In the gradient its output is a residual of the scan and an operand, which XLA would serve with a call each.
    x, weights, _ = arguments()
    net = functools.partial(BATCH_NETS[name], block=batch_block)
    program = gpu.compile_program(lambda x, weights: net(x, weights, None), x, weights)
    assert len(program.calls("forward")) == 1
    gpu_asserts.assert_captured(program, "forward")
    if "gradient" in name:
        assert len(program.calls("backward")) == 1
        gpu_asserts.assert_captured(program, "backward")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda d: d.__name__)
def test_the_gradient_of_a_layer_is_one_call_and_captured(dtype):
    config = dataclasses.replace(CONFIG, dtype=dtype, use_bias=True)

    def pullback(ids, dy, *operands):
        def run(x, topk_weights, gate, up, down, b_gate, b_up, b_down):
            biases = dict(b_gate_up=(b_gate, b_up), b_down=b_down)
            return sm.moe(x, ids, topk_weights, (gate, up), down, config=config, **biases)

        return jax.vjp(run, *operands)[1](dy)

    shapes = ((T, H), (T, K), (E, H, I), (E, H, I), (E, I, H), (E, I), (E, I), (E, H))
    dtypes = (dtype, jnp.float32, *(dtype,) * 6)
    operands = [gpu.abstract(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    ids, dy = gpu.abstract((T, K), jnp.int32), gpu.abstract((T, H), dtype)
    program = gpu.compile_program(pullback, ids, dy, *operands, options={"xla_gpu_graph_min_graph_size": 1})
    if dtype == jnp.float32:
        assert not program.calls("backward")  # plain JAX
        return
    # Nothing else is computed: not the forward, whose y is not asked for, and no product of XLA's.
    assert len(program.calls("backward")) == 1 and not program.calls("forward")
    assert " dot(" not in program.text and "gemm" not in program.text
    gpu_asserts.assert_captured(program, "backward")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda d: d.__name__)
def test_a_layer_that_keeps_gate_and_up_is_two_calls_and_captured(dtype):
    config = dataclasses.replace(CONFIG, dtype=dtype)

    def step(ids, dy, *operands):
        run = lambda x, weights, gate_up, down: sm.moe(x, ids, weights, gate_up, down, config=config, save_gate_up=True)
        y, pullback = jax.vjp(run, *operands)
        return y, pullback(dy)

    shapes, dtypes = ((T, H), (T, K), (E, H, 2 * I), (E, I, H)), (dtype, jnp.float32, dtype, dtype)
    operands = [gpu.abstract(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    ids, dy = gpu.abstract((T, K), jnp.int32), gpu.abstract((T, H), dtype)
    program = gpu.compile_program(step, ids, dy, *operands, options={"xla_gpu_graph_min_graph_size": 1})
    if dtype == jnp.float32:
        assert not program.calls("forward_kept") and not program.calls("backward_kept")  # plain JAX
        return
    assert len(program.calls("forward_kept")) == 1 and len(program.calls("backward_kept")) == 1
    assert not program.calls("forward") and not program.calls("backward")
    gpu_asserts.assert_captured(program, "forward_kept")
    gpu_asserts.assert_captured(program, "backward_kept")
    kept = T * K * 2 * I * config.itemsize
    work = ffi.compiled.cuda_backward_bytes(T, K, H, I, E, True)
    assert kept + work <= program.temporary_bytes < kept + work + 2**16


def test_the_layer_takes_the_memory_that_the_formulas_say():
    """Forward and backward, in temporaries of XLA; nothing has the size of E times the rows."""
    config = sm.MoEConfig(E := 64, K, H, I, dtype=jnp.bfloat16)
    shapes = [((T, H), jnp.bfloat16), ((T, K), jnp.float32), ((E, H, 2 * I), jnp.bfloat16), ((E, I, H), jnp.bfloat16)]
    operands, ids = [gpu.abstract(*shape) for shape in shapes], gpu.abstract((T, K), jnp.int32)
    run = lambda ids, x, weights, *experts: sm.moe(x, ids, weights, *experts, config=config)
    pullback = lambda ids, dy, *operands: jax.vjp(functools.partial(run, ids), *operands)[1](dy)
    sizes = (T, K, H, I, E)
    for function, args, needed in (
        (run, (ids, *operands), ffi.compiled.cuda_forward_bytes(*sizes)),
        (pullback, (ids, operands[0], *operands), ffi.compiled.cuda_backward_bytes(*sizes, True)),
    ):
        program = gpu.compile_program(function, *args)
        assert needed <= program.temporary_bytes < needed + 2**16 < 2 * E * T * K * H


@pytest.mark.parametrize("name", ["gradient of scan", "gradient of scan with remat"])
def test_the_gradient_of_a_stream_is_one_call(name):
    assert len(compiled(name)[0].calls("backward")) == 1


# Programs with a fault, and the assertion that each must fail.


def refuses(assertion, program, *args, match):
    with pytest.raises(AssertionError, match=match):
        assertion(program, *args)


def test_a_ring_that_is_not_donated_is_refused():
    x, weights, ring = arguments()
    program = gpu.compile_program(one_layer, x, weights, ring)
    refuses(gpu_asserts.assert_no_copies, program, ring, match=r"copy\(%ring")
    refuses(gpu_asserts.assert_in_place, program, ring, match="the ring is argument")


def test_a_ring_of_two_calls_is_refused():
    def twice(x, weights, ring):
        y, _ = one_layer(x, weights, ring)
        return one_layer(y, weights, ring)

    x, weights, ring = arguments()
    program = gpu.compile_program(twice, x, weights, ring, donate=2)
    refuses(gpu_asserts.assert_no_copies, program, ring, match=r" copy\(")
    refuses(gpu_asserts.assert_in_place, program, ring, match="the ring lies in 2 allocations")


def test_a_ring_that_xla_writes_is_refused():
    def touched(x, weights, ring):
        y, ring = one_layer(x, weights, ring)
        return y, dataclasses.replace(ring, mem=ring.mem + jnp.uint8(1))

    x, weights, ring = arguments()
    program = gpu.compile_program(touched, x, weights, ring, donate=2)
    refuses(gpu_asserts.assert_no_copies, program, ring, match="add")


def test_a_ring_kept_for_remat_is_refused():
    x, weights, ring = arguments()
    without_policy = gradient(lambda *a: scanned(*a, block=jax.checkpoint(block)))
    program = gpu.compile_program(without_policy, x, weights, ring, donate=2)
    refuses(gpu_asserts.assert_no_copies, program, ring, match=rf"u8\[{LAYERS},1,{ring.mem.shape[1]}\]")


def by_hand(x, weights, ring, change=lambda experts: experts, ahead=False):
    """A stream whose routers have weights of their own and wait for nothing; or come before everything else."""
    w = layer_of(weights, 0)
    parts = jnp.split(x, CHUNKS)
    routed = [route(x_n, w["router"] * jnp.bfloat16(n + 1))[:2] for n, x_n in enumerate(parts)]
    if ahead:
        routed, mem = lax.optimization_barrier((routed, ring.mem))
        ring = dataclasses.replace(ring, mem=mem)
    s = sm.open_stream(ring, w["gate_up"], w["down"], config=CONFIG, num_tokens=T)
    for n, x_n in enumerate(parts):
        s = sm.publish_route(sm.publish_layout(s, n, x_n), n, *routed[n])
    y, ring, _ = sm.close_stream(dataclasses.replace(s, experts=change(s.experts)))
    return y, ring


def test_routers_that_run_ahead_are_refused():
    args = arguments()
    program = gpu.compile_program(functools.partial(by_hand, ahead=True), *args, donate=2)
    refuses(gpu_asserts.assert_streamed_order, program, 1, CHUNKS, match="run before chunk 0 is published")
    # policy="serial" holds no router back, and XLA makes one product of all.
    serial = functools.partial(block, policy="serial")
    program = gpu.compile_program(lambda *a: one_layer(*a, block=serial), *args, donate=2)
    refuses(gpu_asserts.assert_streamed_order, program, 1, CHUNKS, match="chunk 1 has no router of its own")


def test_a_missing_chunk_is_refused():
    program, _ = compiled("jit")
    refuses(gpu_asserts.assert_streamed_order, program, 1, CHUNKS + 1, match="open")
    refuses(gpu_asserts.assert_streamed_order, program, 2, CHUNKS, match="1 streams, wanted 2")


def test_experts_that_move_are_refused():
    doubled = functools.partial(by_hand, change=lambda e: (e[0] * jnp.bfloat16(2), *e[1:]))
    program = gpu.compile_program(doubled, *arguments(), donate=2)
    refuses(gpu_asserts.assert_same_experts, program, match="open reads")


def test_calls_that_xla_doubles_are_refused(monkeypatch):
    # Without the barrier of ffi.call, XLA folds the update of a scan's stacked residual into a second call.
    monkeypatch.setattr(ffi.lax, "optimization_barrier", lambda values: values)
    x, weights, ring = arguments()
    untraced = remat(lambda *args: block(*args))
    program = gpu.compile_program(gradient(lambda *a: scanned(*a, block=untraced)), x, weights, ring, donate=2)
    assert len(program.calls("close")) == 2
    refuses(gpu_asserts.assert_streamed_order, program, 1, CHUNKS, match="2 streams, wanted 1")
    refuses(gpu_asserts.assert_no_copies, program, ring, match=r" copy\(")
    refuses(gpu_asserts.assert_in_place, program, ring, match="close is fused with slices of its memory")


def test_calls_that_alias_nothing_are_refused(monkeypatch):
    call = ffi.call
    monkeypatch.setattr(ffi, "call", lambda *args, aliases=None, **options: call(*args, **options))
    args = arguments()
    program = gpu.compile_program(lambda *args: one_layer(*args), *args, donate=2)
    refuses(gpu_asserts.assert_in_place, program, args[2], match="open does not alias its ring")


def test_what_is_captured_is_seen():
    x, weights, _ = arguments()
    for net in one_layer, scanned:
        batch = lambda x, weights, net=net: net(x, weights, None, batch_block)[0]
        refuses(gpu_asserts.assert_not_captured, gpu.compile_program(batch, x, weights), ["forward"], match="1 of 1")
        none = gpu.compile_program(batch, x, weights, options={"xla_gpu_enable_command_buffer": ""})
        refuses(gpu_asserts.assert_captured, none, "forward", match="1 of 1 calls of forward are in no")
        refuses(gpu_asserts.assert_not_captured, none, ["forward"], match="nothing is captured")


@pytest.mark.parametrize("net", [one_layer, scanned], ids=lambda f: f.__name__)
def test_check_program_knows_gpus(net):
    args = arguments()
    sm.check_program(jax.jit(net, donate_argnums=2), *args)
    with pytest.raises(ValueError, match="its argument is not donated"):
        sm.check_program(jax.jit(net), *args)
    twice = lambda x, weights, ring: net(net(x, weights, ring)[0], weights, ring)
    with pytest.raises(ValueError, match="the compiled program copies its memory 1 times"):
        sm.check_program(jax.jit(twice, donate_argnums=2), *args)


def test_check_program_knows_several_gpus():
    function, mesh = over_ranks(scanned)
    sm.check_program(jax.jit(function, donate_argnums=2), *arguments(mesh))
    with pytest.raises(ValueError, match="its argument is not donated"):
        sm.check_program(jax.jit(function), *arguments(mesh))
