"""Programs over the ranks of a mesh, compiled for GPUs that need not be there: what is exchanged, and by whom.

One GPU and the assertions that refuse a program are in test_gpu_programs.py; what programs compute is tested on the CPU
and on devices.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_streammoe as sm
from jax_streammoe import ffi
from tests.helpers import gpu_asserts
from tests.helpers import gpu_compile as gpu
from tests.helpers.gpu_nets import CONFIG, E, H, I, K, T, route

__test__ = ffi.compiled.WITH_CUDA


@pytest.fixture(scope="module", autouse=True)
def compiler():
    if why := gpu.why_unavailable():
        pytest.skip(why)


# Over ranks without a ring: collectives of XLA's, and the halves of the layer between them.


def exchanged(call, dtype=jnp.bfloat16, split=0, **options):
    """The program of a layer over two ranks, ring=None. `split`: the dimension in which the experts arrive sharded."""
    mesh = Mesh(np.array(gpu.devices(2)), ("ep",), axis_types=(AxisType.Auto,))
    config = dataclasses.replace(CONFIG, dtype=dtype)
    ep = sm.expert_parallel(config, mesh=mesh)
    on = lambda *spec: NamedSharding(mesh, P(*spec))
    tokens, experts = on("ep"), on(*(None,) * split, "ep")
    x = gpu.abstract((2 * T, H), dtype, tokens)
    w1, w2 = (gpu.abstract(shape, dtype, experts) for shape in ((E, H, 2 * I), (E, I, H)))
    if call == "moe":
        routes = (gpu.abstract((2 * T, K), d, tokens) for d in (jnp.int32, jnp.float32))
        run, args = (lambda *args: ep.moe(*args, checks=True)[0]), (x, *routes, w1, w2)
    else:
        run = lambda x, router, w1, w2: ep.stream(x, route, w1, w2, route_args=(router,))[0]
        args = (x, gpu.abstract((H, E), dtype, on()), w1, w2)
    if call != "gradient":
        return gpu.compile_program(run, *args, **options)
    loss = lambda *args: jnp.sum(jnp.square(run(*args).astype(jnp.float32)))
    return gpu.compile_program(jax.grad(loss, (0, 1, 2, 3)), *args, **options)


HALVES = ("rows", "combine", "rows_backward", "check_ids", "backward", "forward")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda d: d.__name__)
@pytest.mark.parametrize("call", ["moe", "stream", "gradient"])
def test_the_exchange_moves_what_it_must(call, dtype):
    program = exchanged(call, dtype)
    backwards = int(call == "gradient")  # one call for the gradients of a rank's rows, and d_x is combined like y
    calls = [len(program.calls(name)) for name in HALVES]
    assert calls == ([1, 1 + backwards, backwards, 0, 0, 0] if dtype != jnp.float32 else [0] * 6)
    assert "all-to-all" in program.text and not moved_by_itself(program)
    # The router's gradient is summed over ranks, nothing else.
    assert ("all-reduce" in program.text) == (call == "gradient")


def test_the_gradient_over_a_ring_is_one_call_behind_its_forward():
    """It is found by name, so only the order of thunks keeps it apart from the forward call; no graph may hold it."""
    mesh = Mesh(np.array(gpu.devices(2)), ("ep",), axis_types=(AxisType.Auto,))
    ep = sm.expert_parallel(CONFIG, mesh=mesh)
    on = NamedSharding(mesh, P("ep"))
    shapes = [((2 * T, H), jnp.bfloat16), ((2 * T, K), jnp.float32), ((E, H, 2 * I), jnp.bfloat16)]
    operands = [gpu.abstract(*shape, on) for shape in (*shapes, ((E, I, H), jnp.bfloat16))]
    ids = gpu.abstract((2 * T, K), jnp.int32, on)
    ring = gpu.abstract_ring(CONFIG, chunk_tokens=T, num_slots=1, mesh=mesh)

    def loss(operands, ids, ring):
        x, weights, *experts = operands
        y, ring, _ = ep.moe(x, ids, weights, *experts, ring=ring)
        return jnp.sum(jnp.square(y.astype(jnp.float32))), ring

    program = gpu.compile_program(
        jax.grad(loss, has_aux=True), operands, ids, ring, donate=2, options={"xla_gpu_graph_min_graph_size": 1}
    )
    assert len(program.calls("ring_forward")) == len(program.calls("ring_backward")) == 1
    assert "all-to-all" not in program.text and not moved_by_itself(program)
    assert program.text.index("streammoe_ring_forward_v1") < program.text.index("streammoe_ring_backward_v1")
    assert "num_ranks = 2 : i64" in program.calls("ring_backward")[0].line  # compared with the ring of that name
    gpu_asserts.assert_no_copies(program, ring)
    gpu_asserts.assert_in_place(program, ring)
    gpu_asserts.assert_captured(program, "ring_forward")
    with pytest.raises(AssertionError):
        gpu_asserts.assert_captured(program, "ring_backward")


@pytest.mark.parametrize("policy", ["serial", "overlap"])
def test_a_stream_over_ranks_that_has_nothing_to_overlap_is_one_call_on_one_stream(policy):
    mesh = Mesh(np.array(gpu.devices(2)), ("ep",), axis_types=(AxisType.Auto,))
    ep, on = sm.expert_parallel(CONFIG, mesh=mesh), lambda *spec: NamedSharding(mesh, P(*spec))
    x, gate_up = gpu.abstract((2 * T, H), jnp.bfloat16, on("ep")), gpu.abstract((E, H, 2 * I), jnp.bfloat16, on("ep"))
    down, router = gpu.abstract((E, I, H), jnp.bfloat16, on("ep")), gpu.abstract((H, E), jnp.bfloat16, on())
    ring = gpu.abstract_ring(CONFIG, chunk_tokens=T // 4, num_slots=4, mesh=mesh)

    def run(x, router, gate_up, down, ring):
        options = dict(ring=ring, route_args=(router,), policy=policy, chunks="auto")
        return ep.stream(x, route, gate_up, down, **options)[:2]

    program = gpu.compile_program(run, x, router, gate_up, down, ring, donate=4)
    (call,) = program.calls("ring_forward")
    assert "overlap = 0 : i32" in call.line and not program.calls("open")
    assert f"chunk_tokens = {T} : i64" in call.line and "num_chunks = 1 : i64" in call.line  # whatever its slots hold


def moved_by_itself(program):
    """Whether something lay elsewhere than the layer wants it, and XLA's partitioner moved it."""
    return "all-gather" in program.text or 'is_spmd_generated="true"' in program.text


def test_command_buffers_may_hold_the_halves_of_the_exchange():
    program = exchanged("gradient", options={"xla_gpu_graph_min_graph_size": 1})
    for name in ("rows", "combine", "rows_backward"):
        gpu_asserts.assert_captured(program, name)


def test_experts_that_lie_elsewhere_are_seen():
    assert moved_by_itself(exchanged("moe", split=1))
