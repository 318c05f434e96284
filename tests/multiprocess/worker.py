"""One process of a test with several: `python worker.py SCENARIO RANK PROCESSES DEVICES PORT FOLDER`.

Contract: every process runs the scenario on the same mesh, prints what happened, writes its shards of the results to
FOLDER, and leaves with 0. The problem is a function of the number of ranks only, so the test can compute it alone.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax_streammoe as sm
from jax_streammoe import ffi, symmetric
from tests.helpers import oracle

MODES = {
    "batch": {}, "serial": {"policy": "serial", "chunks": None}, "overlap": {"policy": "overlap", "chunks": None},
    "xla": {},
}  # fmt: skip


def problem_of(num_ranks: int) -> oracle.Problem:
    rng = np.random.default_rng(num_ranks)
    return oracle.make_problem(rng, T=13 * num_ranks, H=16, I=24, E=8, K=2, masked=0.1, dtype=jnp.float32, block_m=8)


def ring_of(problem: oracle.Problem, mesh: Mesh, **options: object) -> sm.Ring:
    return sm.make_ring(problem.config, mesh=mesh, **({"chunk_tokens": 4, "num_slots": 2, "timeout_s": 30} | options))


def given(x_c: jax.Array, ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    return ids, weights


def program(ep: sm.ExpertParallel, mode: str):
    """jitted (x, ids, weights, w_gate_up, w_down, dy, ring) -> y, ring, gradients of x, weights and experts."""

    def forward(x, weights, w_gate_up, w_down, ids, dy, ring):
        if mode in ("batch", "xla"):
            y, ring, _ = ep.moe(x, ids, weights, w_gate_up, w_down, ring=ring)
        else:
            y, ring, _ = ep.stream(x, given, w_gate_up, w_down, ring=ring, token_args=(ids, weights), **MODES[mode])
        return jnp.sum(y * dy), (y, ring)

    def run(x, ids, weights, w_gate_up, w_down, dy, ring):
        grad = jax.value_and_grad(forward, argnums=(0, 1, 2, 3), has_aux=True)
        (_, (y, ring)), grads = grad(x, weights, w_gate_up, w_down, ids, dy, ring)
        return y, ring, grads

    return jax.jit(run, donate_argnames="ring")


def layer_of(problem: oracle.Problem, mesh: Mesh, mode: str) -> sm.ExpertParallel:
    return sm.expert_parallel(problem.config, mesh=mesh, transport="xla" if mode == "xla" else "pull")


def place(problem: oracle.Problem, mesh: Mesh) -> list[jax.Array]:
    sharding = NamedSharding(mesh, P("ep"))
    return [jax.make_array_from_callback(a.shape, sharding, lambda i, a=a: a[i]) for a in (*problem.args, problem.dy)]


def use(problem: oracle.Problem, mesh: Mesh, ring: sm.Ring) -> None:
    """A call over all processes."""
    jax.block_until_ready(program(layer_of(problem, mesh, "serial"), "serial")(*place(problem, mesh), ring))


def wait_for(path: pathlib.Path) -> None:
    """Another process says that it has come this far."""
    for _ in range(400):
        if path.exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"{path.name} was never reached")


def same(problem: oracle.Problem, mesh: Mesh, folder: pathlib.Path) -> None:
    """Forward and gradient in every mode; the ring is made twice, the second time for the same programs."""
    args, me = place(problem, mesh), jax.process_index()
    for turn in range(2):
        ring = ring_of(problem, mesh)
        assert ring.spec.shared
        for mode in MODES:
            y, new_ring, grads = jax.block_until_ready(
                program(layer_of(problem, mesh, mode), mode)(*args, None if mode == "xla" else ring)
            )
            ring = ring if mode == "xla" else new_ring
            for name, array in zip(("y", "dx", "dweights", "dw1", "dw2"), (y, *grads), strict=True):
                for shard in array.addressable_shards:
                    start = shard.index[0].start or 0
                    np.save(folder / f"{turn}-{mode}-{name}-{start:04d}-{me}.npy", np.array(shard.data))
        # Chunks of the three ring modes: four of 4 tokens each.
        assert all(rank.sequence_base == 12 and rank.call_number == 3 for rank in sm.inspect(ring).ranks)
        sm.close_ring(ring)


def disagree(problem: oracle.Problem, mesh: Mesh, folder: pathlib.Path) -> None:
    """Each process asks for a ring of another size."""
    try:
        ring_of(problem, mesh, num_slots=2 + jax.process_index(), timeout_s=10)
    except RuntimeError as error:
        text = str(error)
        assert "processes disagree" in text and "num_slots=2" in text and "num_slots=3" in text, text
        print("EXPECTED", text)
    use(problem, mesh, ring_of(problem, mesh))  # and agrees the next time


def missing(problem: oracle.Problem, mesh: Mesh, folder: pathlib.Path) -> None:
    """The last process does not call make_ring."""
    last = jax.process_count() - 1
    if jax.process_index() == last:
        return wait_for(folder / "done")
    begin = time.monotonic()
    try:
        ring_of(problem, mesh, timeout_s=2)
    except RuntimeError as error:
        assert f"process {last} did not call make_ring within 2.0 s" in str(error), error
        assert 1.5 < time.monotonic() - begin < 8
        print("EXPECTED", error)
    else:
        raise AssertionError("a ring was made without a process")
    (folder / "done").touch()


def fail(problem: oracle.Problem, mesh: Mesh, **options: object) -> str:
    try:
        ring_of(problem, mesh, **options)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("a ring was made by one process alone")


def late(problem: oracle.Problem, mesh: Mesh, folder: pathlib.Path) -> None:
    """The first process tries twice, alone, the last once, too late and alone; then both try again."""
    last = jax.process_index() == 1
    if last:
        wait_for(folder / "gave-up")
    for _ in range(1 if last else 2):
        text = fail(problem, mesh, timeout_s=0.5)
        assert f"process {0 if last else 1} did not call make_ring within 0.5 s" in text, text
        print("EXPECTED", text)
    (folder / ("late" if last else "gave-up")).touch()
    wait_for(folder / "late")
    use(problem, mesh, ring_of(problem, mesh, timeout_s=1e8))


def early(problem: oracle.Problem, mesh: Mesh, folder: pathlib.Path) -> None:
    """The last process raises after all agreed, the first waits in vain; then both try again, at their own time."""
    if jax.process_index() == 1:
        share = ffi.compiled.ring_share

        def full(*args: object) -> None:
            raise RuntimeError("no space left")

        ffi.compiled.ring_share = full
        text = fail(problem, mesh, timeout_s=2)
        ffi.compiled.ring_share = share
        assert text == "no space left"
    else:
        text = fail(problem, mesh, timeout_s=2)
        assert "not all processes [0, 1] reached 'created' of make_ring within 2.0 s" in text, text
    print("EXPECTED", text)
    use(problem, mesh, ring_of(problem, mesh))


def leftover(problem: oracle.Problem, mesh: Mesh, folder: pathlib.Path) -> None:
    """A failed attempt could not delete its record, of another spec: the next one is not misled."""
    if jax.process_index() == 1:
        record = json.dumps({"offer": "0", "spec": "another", "seen": "0"})
        symmetric.distributed_client().key_value_set("streammoe/ring-a%2Fb/offers/1", record)
        (folder / "left").touch()
        time.sleep(1)
    wait_for(folder / "left")
    use(problem, mesh, ring_of(problem, mesh, name="a/b"))
    keys = symmetric.distributed_client().key_value_dir_get("streammoe/ring-a%2Fb/offers/")
    assert f"/{jax.process_index()}" not in "".join(key for key, _ in keys), keys
    print("EXPECTED")


def killed(problem: oracle.Problem, mesh: Mesh, folder: pathlib.Path) -> None:
    """The last process dies in the middle of a stream; the others get an error in time and go on."""
    last = jax.process_count() - 1
    ring = ring_of(problem, mesh, name="dies", timeout_s=2)
    forward = jax.jit(
        lambda x, ids, weights, w1, w2, ring: layer_of(problem, mesh, "serial").stream(
            x, given, w1, w2, ring=ring, token_args=(ids, weights), **MODES["serial"]
        )[:2],
        donate_argnames="ring",
    )
    args = place(problem, mesh)[:5]
    _, ring = jax.block_until_ready(forward(*args, ring))
    if jax.process_index() == last:
        import os
        import threading

        sm.testing.add_fault("dies", "experts", "delay", seconds=20)
        threading.Timer(0.5, os._exit, (0,)).start()
        print("EXPECTED to die", flush=True)
        jax.block_until_ready(forward(*args, ring))
        raise AssertionError("still alive")
    begin = time.monotonic()
    try:
        jax.block_until_ready(forward(*args, ring))
    except Exception as error:
        assert f"for rank {last} in phase done" in str(error) and "waited 2 s" in str(error), error
        assert time.monotonic() - begin < 8
        print("EXPECTED", error)
    else:
        raise AssertionError("a dead rank was not noticed")
    # This process goes on: its own devices and a ring of its own still work.
    alone = sm.make_ring(problem.config, chunk_tokens=8, num_slots=2, name="alone")
    x, ids, weights, *experts = map(jnp.asarray, problem.args)
    options = dict(config=problem.config, token_args=(ids, weights))
    run = jax.jit(lambda ring: sm.stream_moe(x, given, *experts, ring=ring, **options)[:2], donate_argnums=0)
    y, _ = run(alone)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(sm.moe(x, ids, weights, *experts, config=problem.config)))
    print("EXPECTED to go on", flush=True)
    sys.stdout.flush()
    import os

    os._exit(0)  # jax.distributed's own shutdown would wait for the dead process


def main() -> None:
    scenario, rank, processes, port, folder, devices = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(rank), initialization_timeout=60)
    mesh = Mesh(np.array(jax.devices()), ("ep",), axis_types=(AxisType.Auto,))
    globals()[scenario](problem_of(mesh.size), mesh, pathlib.Path(folder))
    print("DONE", flush=True)


if __name__ == "__main__":
    main()
