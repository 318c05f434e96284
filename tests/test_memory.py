"""A ring is never copied, not in compiled programs, not at run time; `check_program` says so before the first run.

The optimised HLO is read twice: by `check_program` and by a scan of its own here, which allows an array of the ring's
size only where memory is handed on. XLA's own numbers (aliases, temporaries) are the third witness.
"""

from __future__ import annotations

import functools
import math
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jax_streammoe as sm

# T = 24 tokens are small beside a ring of some hundred kilobytes, so that temporaries cannot hide one.
CONFIG = sm.MoEConfig(4, 2, 64, 8, dtype=jnp.float32, block_m=8)
HANDS_ON = {"parameter", "custom-call", "get-tuple-element", "tuple", "while", "call", "bitcast", "conditional"}
LAYERS = 2


@pytest.fixture
def ring(request):
    with sm.make_ring(CONFIG, chunk_tokens=64, num_slots=4, name=request.node.name) as ring:
        yield ring


@pytest.fixture
def arrays(rng):
    shapes = {"x": (24, 64), "w_router": (64, 4), "w_gate_up": (4, 64, 16), "w_down": (4, 8, 64)}
    return {n: jnp.asarray(rng.standard_normal(s) / 8, jnp.float32) for n, s in shapes.items()}


def layer(x, a, ring, **options):
    route = lambda x, w_router: sm.route_topk(x @ w_router, CONFIG)
    options = {"chunks": 3} | options
    y, ring, _ = sm.stream_moe(
        x, route, a["w_gate_up"], a["w_down"], config=CONFIG, ring=ring, route_args=(a["w_router"],), **options
    )
    return y, ring


def norm(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def pre_norm(x, a, ring, **options):
    y, ring = layer(norm(x), a, ring, **options)
    return x + y, ring


def post_norm(x, a, ring):
    y, ring = layer(x, a, ring)
    return norm(x + y), ring


def batch_ready(x, a, ring):
    y, ring = layer(x, a, ring, chunks="auto")
    return jnp.tanh(y), ring


def unrolled(block, x, a, ring):
    for _ in range(LAYERS):
        x, ring = block(x, a, ring)
    return x, ring


def scanned(block, x, a, ring):
    return lax.scan(lambda carry, _: (block(carry[0], a, carry[1]), None), (x, ring), length=LAYERS)[0]


def while_loop(block, x, a, ring):
    step = lambda c: (c[0] + 1, *block(c[1], a, c[2]))
    return lax.while_loop(lambda c: c[0] < LAYERS, step, (0, x, ring))[1:]


def forward(net, block):
    return jax.jit(functools.partial(net, block), donate_argnums=2)


def gradient(net, block):
    def loss(x, a, ring):
        y, ring = net(block, x, a, ring)
        return jnp.sum(y * y), ring

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True), donate_argnums=2)


def remat(block):
    return jax.checkpoint(block, policy=sm.checkpoint_policy(jax.checkpoint_policies.dots_with_no_batch_dims_saveable))


def only_names(block):
    return jax.checkpoint(block, policy=sm.checkpoint_policy())


def no_remat(block):
    return block


def ring_sized(text, num_bytes):
    """(opcode, line) of every instruction of optimised HLO whose result holds an array as large as the ring."""
    found = []
    for line in text.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?[\w.\-]+ = (.*?) ([\w\-]+)\(", line)
        if match is None:
            continue
        sizes = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"u8\[([\d,]+)\]", match[1])]
        if max(sizes, default=0) >= num_bytes:
            found.append((match[2], line))
    return found


def assert_in_place(jitted, x, a, ring):
    sm.check_program(jitted, x, a, ring)
    compiled = jitted.lower(x, a, ring).compile()
    found = ring_sized(compiled.as_text(), ring.mem.nbytes)
    assert any(op == "custom-call" for op, _ in found), "the scan must see the library's own calls"
    copies = [line for op, line in found if op not in HANDS_ON]
    assert not copies, "\n".join(copies)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= ring.mem.nbytes
    assert memory.temp_size_in_bytes < ring.mem.nbytes
    return compiled


@pytest.mark.core
@pytest.mark.parametrize("block", [pre_norm, post_norm, batch_ready], ids=lambda f: f.__name__)
@pytest.mark.parametrize("net", [unrolled, scanned, while_loop], ids=lambda f: f.__name__)
def test_forward_programs_hold_no_copy(ring, arrays, net, block):
    x = arrays.pop("x")
    program = assert_in_place(forward(net, block), x, arrays, ring)
    address = ring.mem.unsafe_buffer_pointer()
    for _ in range(3):
        x, ring = program(x, arrays, ring)
        assert ring.mem.unsafe_buffer_pointer() == address


@pytest.mark.core
@pytest.mark.parametrize(
    ("net", "policy", "block"),
    [
        (unrolled, no_remat, pre_norm),
        (unrolled, no_remat, batch_ready),
        (unrolled, remat, pre_norm),
        (unrolled, only_names, post_norm),
        (unrolled, only_names, batch_ready),
        (scanned, no_remat, post_norm),
        (scanned, remat, post_norm),
        (scanned, remat, batch_ready),
        (scanned, only_names, pre_norm),
    ],
    ids=lambda f: f.__name__,
)
def test_training_programs_hold_no_copy(ring, arrays, net, policy, block):
    x = arrays.pop("x")
    program = assert_in_place(gradient(net, policy(block)), x, arrays, ring)
    address = ring.mem.unsafe_buffer_pointer()
    for calls in (1, 2):
        _, ring = jax.block_until_ready(program(x, arrays, ring))
        assert ring.mem.unsafe_buffer_pointer() == address
        assert sm.inspect(ring).ranks[0].call_number == LAYERS * calls, "remat must not run the stream again"


@pytest.mark.core
def test_check_program_refuses_a_ring_that_is_not_donated(ring, arrays):
    x = arrays.pop("x")
    text = f"^ring {re.escape(repr(ring.name))}: its argument is not donated. Possible causes: .*make_ring"
    with pytest.raises(ValueError, match=text):
        sm.check_program(jax.jit(functools.partial(unrolled, pre_norm)), x, arrays, ring)
    shapes = jax.eval_shape(lambda *args: args, x, arrays, ring)
    with pytest.raises(ValueError, match=text):
        sm.check_program(jax.jit(functools.partial(unrolled, pre_norm)), *shapes)
    sm.check_program(forward(unrolled, pre_norm), *shapes)
    ring.check()


def two_calls(x, a, ring):
    return layer(x, a, ring)[0], layer(2 * x, a, ring)


def stacked_by_scan(x, a, ring):
    """Keeps every ring value, as autodiff of a scan does with a residual."""
    (x, ring), rings = lax.scan(lambda c, _: (pre_norm(c[0], a, c[1]), c[1].mem), (x, ring), length=LAYERS)
    return x, ring, rings


COPIES = [two_calls, stacked_by_scan]


@pytest.mark.parametrize("program", COPIES, ids=lambda f: f.__name__)
def test_check_program_finds_copies_before_the_first_run(ring, arrays, program):
    x = arrays.pop("x")
    jitted = jax.jit(program, donate_argnums=2)
    with pytest.raises(ValueError, match=r"the compiled program copies its memory \d+ times\. Possible causes"):
        sm.check_program(jitted, x, arrays, ring)
    found = {op for op, _ in ring_sized(jitted.lower(x, arrays, ring).compile().as_text(), ring.mem.nbytes)}
    assert found - HANDS_ON, "the scan of this module must see the copy too"
    ring.check()  # nothing ran, nothing is lost
    jax.block_until_ready(forward(unrolled, pre_norm)(x, arrays, ring))


def test_the_ring_does_not_grow_with_the_tokens(ring, arrays):
    x = jnp.tile(arrays.pop("x"), (40, 1))  # 960 tokens through S*C = 256
    before = ring.mem.nbytes
    block = functools.partial(pre_norm, chunks=None)
    _, ring = forward(unrolled, block)(x, arrays, ring)
    assert ring.mem.nbytes == before == sm.ring_bytes(CONFIG, chunk_tokens=64, num_slots=4, num_ranks=1)


RSS = """
import resource, jax, jax.numpy as jnp
import jax_streammoe as sm

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

config = sm.MoEConfig(4, 2, 256, 8, dtype=jnp.float32, block_m=8)
ring = sm.make_ring(config, chunk_tokens=256, num_slots=4, mutable={mutable})
x, w1, w2 = jnp.ones((16, 256)), jnp.ones((4, 256, 16)), jnp.ones((4, 8, 256))
ids, weights = jnp.zeros((16, 2), jnp.int32), jnp.ones((16, 2))
route = lambda x, ids, weights: (ids, weights)

def loss(x, ring):
    y, used, _ = sm.stream_moe(x, route, w1, w2, config=config, ring=ring, token_args=(ids, weights), chunks=4)
    return jnp.sum(y), None if {mutable} else used

step = jax.jit(jax.grad(loss, has_aux=True), donate_argnums=() if {mutable} else 1)
ring_bytes = ring.mem.size
for n in range(1300):
    dx, used = step(x, ring)
    ring = used or ring
    jax.block_until_ready(dx)
    if n == 299:
        before = resident()
print(ring_bytes, resident() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mutable", [False, True])
def test_a_thousand_calls_leave_the_process_as_large_as_it_was(mutable):
    done = subprocess.run(
        [sys.executable, "-c", RSS.format(mutable=mutable)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ring_bytes, growth = map(int, done.stdout.split())
    assert ring_bytes > 2**22
    assert growth < ring_bytes, f"{growth} bytes over 1,000 calls, a ring has {ring_bytes}"
