"""One process of a ring over the GPUs of several: `python processes.py SCENARIO RANK PROCESSES PORT FOLDER`.

Contract: every process has one GPU, because it sees no other (CUDA_VISIBLE_DEVICES names one) or because it takes the
one of its rank among all. It runs the scenario, writes its rows of the results to FOLDER as the bits of their dtype,
prints what happened and leaves with 0. The problem depends on nothing, so the test can compute it alone. Nothing here
needs a collective of XLA's.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax_streammoe as sm
from tests.helpers import oracle

PLATFORM = "cuda"
TOKENS = 350  # of a rank
# Several chunks, slots that are used again, and macro-chunks; the batch-ready call beside streams of both policies.
RING = dict(chunk_tokens=64, num_slots=2, timeout_s=60.0)
MODES: dict[str, dict[str, Any] | None] = {
    "batch": None,
    "serial": {"policy": "serial", "chunks": None},
    "overlap": {"policy": "overlap", "chunks": None},
}
CALLS = 3  # of a program: XLA captures the batch-ready one
GRADIENTS = ("d_x", "d_topk_weights", "d_w_gate_up", "d_w_down")
DEADLINE_S = 8.0  # of the ring whose peer dies
SQUARE = 1024  # of the matrix that cuBLAS multiplies
LATE_S = 1.0  # of the late rank, when cuBLAS starts beside the call
CUBLAS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
SHORT = 200  # tokens of a rank in the other of two layers
ROUTINGS = 3


def problem_of(processes: int) -> oracle.Problem:
    rng = np.random.default_rng(processes)
    sizes = dict(T=processes * TOKENS, H=256, I=192, E=8, K=4)
    return oracle.make_problem(rng, masked=0.05, invalid=0.02, dtype=jnp.bfloat16, **sizes)


def given(x_c: jax.Array, ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    return ids, weights


def program(problem: oracle.Problem, mesh: Mesh, mode: str) -> Callable[..., Any]:
    """(x, ids, weights, w_gate_up, w_down, ring) -> y, ring; not yet jitted."""
    ep, options = sm.expert_parallel(problem.config, mesh=mesh), MODES[mode]

    def run(x: Any, ids: Any, weights: Any, w_gate_up: Any, w_down: Any, ring: Any) -> Any:
        if options is None:
            return ep.moe(x, ids, weights, w_gate_up, w_down, ring=ring)[:2]
        return ep.stream(x, given, w_gate_up, w_down, ring=ring, token_args=(ids, weights), **options)[:2]

    return run


def ring_of(problem: oracle.Problem, mesh: Mesh, **options: Any) -> Any:
    return sm.make_ring(problem.config, mesh=mesh, **(RING | options))


def place(problem: oracle.Problem, mesh: Mesh) -> list[jax.Array]:
    sharding = NamedSharding(mesh, P("ep"))
    return [jax.make_array_from_callback(a.shape, sharding, lambda i, a=a: a[i]) for a in problem.args]


def save(folder: pathlib.Path, name: str, y: jax.Array) -> None:
    for shard in y.addressable_shards:
        start = shard.index[0].start or 0
        np.save(folder / f"{name}-{start:06d}.npy", np.asarray(shard.data).view(np.uint16))


def load(folder: pathlib.Path, name: str) -> np.ndarray:
    """What `save` of all processes wrote, in the order of the tokens."""
    return np.concatenate([np.load(path) for path in sorted(folder.glob(f"{name}-*.npy"))])


def same(problem: oracle.Problem, mesh: Mesh, folder: pathlib.Path) -> None:
    """Every mode, on a ring that is made twice for the same programs, and on a RingRef."""
    args = place(problem, mesh)
    programs = {mode: jax.jit(program(problem, mesh, mode), donate_argnames="ring") for mode in MODES}
    for turn in range(2):
        ring = ring_of(problem, mesh)
        assert ring.spec.platform == PLATFORM
        for mode, run in programs.items():
            for _ in range(CALLS):
                y, ring = jax.block_until_ready(run(*args, ring))
            save(folder, f"{turn}-{mode}", y)
        ring.check()
        (state,) = sm.inspect(ring).ranks
        assert state.call_number == CALLS * len(MODES) and state.rank == jax.process_index(), state
        assert sm.close_ring(ring)
    ring = ring_of(problem, mesh, name="ref", mutable=True)
    run = jax.jit(lambda *args: program(problem, mesh, "overlap")(*args)[0])
    for _ in range(CALLS):
        y = jax.block_until_ready(run(*args, ring))
    save(folder, "0-ref", y)
    ring.check()


def gradient(problem: oracle.Problem, mesh: Mesh, folder: pathlib.Path) -> None:
    """All gradients of a batch-ready call on a ring that holds its tokens, and so carries them back."""
    x, ids, *rest = place(problem, mesh)
    sharding = NamedSharding(mesh, P("ep"))
    dy = jax.make_array_from_callback(problem.dy.shape, sharding, lambda i: problem.dy[i])
    run = program(problem, mesh, "batch")

    def pulled(x: Any, ids: Any, rest: Any, dy: Any, ring: Any) -> Any:
        _, pullback, ring = jax.vjp(lambda x, *rest: run(x, ids, *rest, ring), x, *rest, has_aux=True)
        return pullback(dy), ring

    ring = ring_of(problem, mesh, chunk_tokens=TOKENS, num_slots=1)
    compiled = jax.jit(pulled, donate_argnames="ring")
    for _ in range(CALLS):
        gradients, ring = jax.block_until_ready(compiled(x, ids, rest, dy, ring))
    for name, value in zip(GRADIENTS, gradients, strict=True):
        save(folder, f"0-{name}", value)
    ring.check()


def refused(problem: oracle.Problem, mesh: Mesh, folder: pathlib.Path) -> None:
    """XLA's memory cannot be shared: every process says so, and soon."""
    begin = time.monotonic()
    try:
        ring_of(problem, mesh)
    except RuntimeError as error:
        rank = jax.process_index()
        assert f"the memory of rank {rank} cannot be shared with other processes" in str(error), error
        assert "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async" in str(error) and "ring=None" in str(error), error
        assert time.monotonic() - begin < RING["timeout_s"]
        print("EXPECTED", error)
    else:
        raise AssertionError("memory without a shareable handle was shared")


def killed(problem: oracle.Problem, mesh: Mesh, folder: pathlib.Path) -> None:
    """The last process is killed before its next call; the others' calls end at their deadline, and they go on."""
    args, last = place(problem, mesh), jax.process_count() - 1
    run = jax.jit(program(problem, mesh, "overlap"), donate_argnames="ring")
    # All that is compiled and loaded later on comes first: one process may take longer for it than the deadline.
    ring = ring_of(problem, mesh, name="dies")
    jax.block_until_ready(run(*args, ring))
    own = oracle.as_jax(problem)
    layer = jax.jit(lambda ring: sm.stream_moe(
        own.x, given, *own.args[3:], ring=ring, config=own.config, token_args=own.args[1:3]
    )[:2], donate_argnames="ring")  # fmt: skip
    _, alone = jax.block_until_ready(layer(sm.make_ring(own.config, name="alone", chunk_tokens=256, num_slots=4)))
    ring = ring_of(problem, mesh, name="dies", timeout_s=DEADLINE_S)
    y, ring = jax.block_until_ready(run(*args, ring))
    save(folder, "0-before", y)
    if jax.process_index() == last:
        print("EXPECTED to die", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        survive(run, args, ring, last)
        y, alone = layer(alone)
        save(folder, "0-alone", y)
        alone.check()
        print("EXPECTED to go on", flush=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # jax.distributed's own shutdown would wait for the dead process


def survive(run: Callable[..., Any], args: list[jax.Array], ring: sm.Ring, dead: int) -> None:
    """The call that the dead rank does not make: NaN at the deadline, then errors that name it."""
    begin = time.monotonic()
    y, ring = jax.block_until_ready(run(*args, ring))
    took = time.monotonic() - begin
    assert DEADLINE_S - 0.5 < took < DEADLINE_S + 10, took
    for shard in y.addressable_shards:
        assert np.isnan(np.asarray(shard.data, np.float32)).all()
    try:
        ring.check()
    except RuntimeError as error:
        assert f"waited {DEADLINE_S:g} s for rank {dead} in phase" in str(error), error
        print("EXPECTED", error)
    else:
        raise AssertionError("a dead rank was not noticed")
    try:
        jax.block_until_ready(run(*args, ring))
    except Exception as error:
        assert f"ring {ring.name!r} is unusable" in str(error), error
    else:
        raise AssertionError("a failed ring was used")


def first_call(problem: oracle.Problem, mesh: Mesh, folder: pathlib.Path, inside: bool) -> None:
    """The first that this process runs on a new ring is the call over ranks, beside the first use of cuBLAS.

    The last rank is late, so kernels of the others wait for it while cuBLAS starts, which loads kernels and takes
    memory. Its products are in the same program, or in one that another thread runs: at once on the late rank, on the
    others when the call waits already. Autotuning would use cuBLAS before, in the compiler.
    """
    args, ring, late = place(problem, mesh), ring_of(problem, mesh, name="first"), mesh.size - 1
    matrix = np.random.default_rng(0).integers(-2, 3, (SQUARE, SQUARE)).astype(np.float32)
    layer = program(problem, mesh, "overlap")

    def with_products(m: Any, x: Any, ids: Any, weights: Any, w_gate_up: Any, w_down: Any, ring: Any) -> Any:
        y, ring = layer(x, ids, weights, w_gate_up, w_down, ring)
        return y, ring, m @ m.T

    if inside:
        m = jax.make_array_from_callback(matrix.shape, NamedSharding(mesh, P()), lambda i: matrix[i])
        run = jax.jit(with_products, donate_argnames="ring").lower(m, *args, ring).compile(CUBLAS)
        call = lambda: run(m, *args, ring)
        beside = None
    else:
        m = jax.device_put(matrix, jax.local_devices()[0])
        product = jax.jit(lambda m: m @ m.T).lower(m).compile(CUBLAS)
        run = jax.jit(layer, donate_argnames="ring").lower(*args, ring).compile(CUBLAS)
        call = lambda: (*run(*args, ring), None)
        products: list[jax.Array] = []

        def multiply() -> None:
            time.sleep(0 if jax.process_index() == late else LATE_S / 2)
            products.extend(product(m) for _ in range(20))

        beside = threading.Thread(target=multiply)
        beside.start()
    with sm.testing.fault(ring.name, "publish_route", "delay", rank=late, seconds=LATE_S):
        y, ring, result = jax.block_until_ready(call())
    if beside is not None:
        beside.join()
        assert len(products) == 20
        result = products[-1]
    np.testing.assert_array_equal(result.addressable_data(0), matrix @ matrix.T)  # small integers: exact
    save(folder, "0-first", y)
    ring.check()


def first_with_product(problem: oracle.Problem, mesh: Mesh, folder: pathlib.Path) -> None:
    first_call(problem, mesh, folder, inside=True)


def first_beside_thread(problem: oracle.Problem, mesh: Mesh, folder: pathlib.Path) -> None:
    first_call(problem, mesh, folder, inside=False)


def other_order(problem: oracle.Problem, mesh: Mesh, folder: pathlib.Path) -> None:
    """Rank 0 runs layer A and then B, the others B and then A: errors that say so, soon, and a new ring works."""
    ring = ring_of(problem, mesh, name="order")
    short = problem.replace(**{name: rows_of(problem, name, mesh.size) for name in ("x", "topk_ids", "topk_weights")})
    layers = {}
    for name, p in (("A", problem), ("B", short)):
        args = place(p, mesh)
        run = jax.jit(program(p, mesh, "overlap"), donate_argnames="ring").lower(*args, ring).compile()
        layers[name] = (run, args)
    begin = time.monotonic()
    for name in "AB" if jax.process_index() == 0 else "BA":
        run, args = layers[name]
        try:
            y, ring = jax.block_until_ready(run(*args, ring))
        except RuntimeError as error:  # a handler of the call that found it raises, and the ring's array is gone
            print("EXPECTED", name, error, flush=True)
            break
        for shard in y.addressable_shards:
            assert np.isnan(np.asarray(shard.data, np.float32)).all(), f"layer {name} has a result"
    try:
        ring.check()
    except RuntimeError as error:
        text = str(error)
        assert "is unusable" in text and ("disagree about the" in text or "because rank" in text), text
        print("EXPECTED", text, flush=True)
    else:
        raise AssertionError("two orders were not noticed")
    assert time.monotonic() - begin < RING["timeout_s"] / 2, "ended by the deadline"
    ring = ring_of(problem, mesh, name="order")
    for name in "AB":
        run, args = layers[name]
        y, ring = jax.block_until_ready(run(*args, ring))
        save(folder, f"0-{name}", y)
    ring.check()


def rows_of(problem: oracle.Problem, name: str, processes: int) -> np.ndarray:
    """The first SHORT tokens of each rank."""
    value = getattr(problem, name)
    return value.reshape(processes, TOKENS, -1)[:, :SHORT].reshape(processes * SHORT, -1)


def replays(problem: oracle.Problem, mesh: Mesh, folder: pathlib.Path) -> None:
    """The batch-ready call, captured and replayed 12 times, with another routing than the time before."""
    routings = [problem.replace(topk_ids=np.roll(problem.topk_ids, n, axis=0)) for n in range(ROUTINGS)]
    args, ring = [place(p, mesh) for p in routings], ring_of(problem, mesh, name="replays")
    layer = jax.jit(program(problem, mesh, "batch"), donate_argnames="ring")
    run = layer.lower(*args[0], ring).compile({"xla_gpu_graph_min_graph_size": 1})
    for turn in range(13):  # the first is not a replay
        y, ring = jax.block_until_ready(run(*args[turn % ROUTINGS], ring))
        save(folder, f"{turn:02d}-replay", y)
    ring.check()


def main() -> None:
    scenario, rank, processes, port, folder = sys.argv[1:]
    jax.config.update("jax_platforms", PLATFORM)
    sees_one = len(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")) == 1 and "CUDA_VISIBLE_DEVICES" in os.environ
    jax.distributed.initialize(
        f"127.0.0.1:{port}", int(processes), int(rank), initialization_timeout=60,
        local_device_ids=None if sees_one or PLATFORM == "cpu" else [int(rank)],
    )  # fmt: skip
    assert len(jax.local_devices()) == 1 and len(jax.devices()) == int(processes), jax.devices()
    mesh = Mesh(np.array(jax.devices()), ("ep",), axis_types=(AxisType.Auto,))
    globals()[scenario](problem_of(mesh.size), mesh, pathlib.Path(folder))
    print("DONE", flush=True)


if __name__ == "__main__":
    main()
