"""One process of a test of GPU memory handed over, without a GPU: a memfd stands in for the memory of a rank.

Run as `python handing.py SCENARIO RANK PROCESSES PORT FOLDER`. Contract: the processes meet through jax.distributed and
`symmetric.Bootstrap` as make_ring has them meet; only what the compiled module would ask of the CUDA driver is
replaced. Each prints what happened and leaves with 0.
"""

from __future__ import annotations

import mmap
import os
import pathlib
import sys
import time
from typing import Any

import jax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from jax_streammoe import ffi, symmetric

NUM_BYTES, OFFSET = 1 << 16, 4096


class Memory:
    """What `ring_export` and `ring_import` do, on memfds: a rank of this process writes its name, peers read it."""

    def __init__(self) -> None:
        self.own: dict[tuple[int, int], mmap.mmap] = {}
        self.peers: dict[tuple[int, int], mmap.mmap] = {}

    def ring_settle(self, name: str) -> None:
        print("settled", flush=True)

    def ring_check_peers(self, name: str) -> None:
        pass

    def ring_export(self, name: str, group: int, rank: int) -> tuple[int, int, int]:
        fd = os.memfd_create("rank")
        os.truncate(fd, NUM_BYTES)
        self.own[group, rank] = mmap.mmap(fd, NUM_BYTES)
        self.own[group, rank][OFFSET : OFFSET + 8] = f"{group}-{rank}".ljust(8).encode()
        return fd, NUM_BYTES, OFFSET

    def ring_import(self, name: str, group: int, rank: int, fd: int, num_bytes: int, offset: int) -> None:
        assert (num_bytes, offset) == (NUM_BYTES, OFFSET)
        self.peers[group, rank] = mmap.mmap(fd, num_bytes)  # mmap keeps a descriptor of its own


def all_to_all(processes: int) -> list[symmetric.Member]:
    """Two groups, each with a rank in every process."""
    return [symmetric.Member(None, group, rank, rank) for group in range(2) for rank in range(processes)]


def chained(processes: int) -> list[symmetric.Member]:
    """Group g has its ranks in processes g and g + 1; and one more group at home in each process."""
    across = [symmetric.Member(None, g, rank, g + rank) for g in range(processes - 1) for rank in range(2)]
    return across + [symmetric.Member(None, 10 + p, rank, p) for p in range(processes) for rank in range(2)]


def meet(me: int, processes: int, *, timeout_s: float = 20, members: Any = all_to_all) -> Memory:
    memory = Memory()
    for function in ("ring_settle", "ring_check_peers", "ring_export", "ring_import"):
        setattr(ffi.compiled, function, getattr(memory, function))
    with symmetric.Bootstrap("a/ring", "spec", members(processes), timeout_s) as bootstrap:
        bootstrap.settle()
        bootstrap.share_memory()
    return memory


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def check(memory: Memory, me: int, processes: int) -> None:
    others = [rank for rank in range(processes) if rank != me]
    assert sorted(memory.peers) == sorted((group, rank) for group in range(2) for rank in others)
    for (group, rank), view in memory.peers.items():
        assert view[OFFSET : OFFSET + 8] == f"{group}-{rank}".ljust(8).encode()
        view[OFFSET + 8 + me] = 100 + me  # every peer leaves its mark


def check_marks(memory: Memory, me: int, processes: int) -> None:
    for view in memory.own.values():
        assert [view[OFFSET + 8 + rank] for rank in range(processes)] == [
            0 if rank == me else 100 + rank for rank in range(processes)
        ]


def wait_for(path: pathlib.Path) -> None:
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"{path.name} was never reached")


def share(me: int, processes: int, folder: pathlib.Path) -> None:
    """Everybody maps everybody, twice; nothing stays open but what is mapped."""
    for turn in range(2):
        before = descriptors()
        memory = meet(me, processes)
        check(memory, me, processes)
        (folder / f"{turn}-{me}").touch()
        for rank in range(processes):
            wait_for(folder / f"{turn}-{rank}")
        check_marks(memory, me, processes)
        for view in (*memory.own.values(), *memory.peers.values()):
            view.close()
        assert turn == 0 or descriptors() <= before, "a descriptor was left open"


def groups(me: int, processes: int, folder: pathlib.Path) -> None:
    """Only ranks of one group share memory; hosts that have no group in common may differ."""
    known = symmetric.host_identity
    symmetric.host_identity = lambda: f"host {me}"
    memory = meet(me, processes, members=lambda n: [m for m in chained(n) if m.group >= 10])
    assert not memory.own and not memory.peers
    symmetric.host_identity = known
    memory = meet(me, processes, members=chained)
    assert sorted(memory.own) == [(g, me - g) for g in (me - 1, me) if 0 <= g < processes - 1]
    assert sorted(memory.peers) == [(g, 1 - (me - g)) for g in (me - 1, me) if 0 <= g < processes - 1]
    for (group, rank), view in memory.peers.items():
        assert view[OFFSET : OFFSET + 8] == f"{group}-{rank}".ljust(8).encode()
    print("EXPECTED")


def hosts(me: int, processes: int, folder: pathlib.Path) -> None:
    """The last process says that it runs elsewhere; then all agree."""
    known = symmetric.host_identity
    assert known() == known() != ""
    symmetric.host_identity = lambda: f"host {me}"
    try:
        meet(me, processes)
    except RuntimeError as error:
        other = 1 - me
        assert f"ring 'a/ring': process {other} runs on another host than process {me}" in str(error), error
        assert "ring=None" in str(error)
        print("EXPECTED", error)
    else:
        raise AssertionError("a ring was made over two hosts")
    symmetric.host_identity = known
    check(meet(me, processes), me, processes)


def fails(me: int, processes: int, folder: pathlib.Path) -> None:
    """The last process cannot export its memory; the others wait in vain, and all try again."""
    export = Memory.ring_export
    if me == processes - 1:

        def refuse(self: Memory, name: str, group: int, rank: int) -> tuple[int, int, int]:
            if group == 0:
                return export(self, name, group, rank)
            raise RuntimeError("the memory of rank 1 cannot be shared")

        Memory.ring_export = refuse
    try:
        meet(me, processes, timeout_s=3)
    except RuntimeError as error:
        text = str(error)
        want = "cannot be shared" if me == processes - 1 else "reached 'exported' of make_ring within 3.0 s"
        assert want in text, text
        print("EXPECTED", text)
    else:
        raise AssertionError("a ring was made without a rank's memory")
    Memory.ring_export = export
    check(meet(me, processes), me, processes)


def dies(me: int, processes: int, folder: pathlib.Path) -> None:
    """The last process dies between the agreement and its message."""
    from jax_streammoe import handoff

    if me == processes - 1:
        handoff.Handoff.exchange = lambda *_: os._exit(0)
    begin = time.monotonic()
    try:
        meet(me, processes, timeout_s=6)
    except RuntimeError as error:
        text, last = str(error), processes - 1
        assert f"ring 'a/ring': process {last} handed nothing over within 6.0 s" in text, text
        assert time.monotonic() - begin < 20
        print("EXPECTED", text, flush=True)
        os._exit(0)  # jax.distributed's own shutdown would wait for the dead process
    raise AssertionError("a ring was made without a process")


def main() -> None:
    scenario, rank, processes, port, folder = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(rank), initialization_timeout=60)
    globals()[scenario](int(rank), int(processes), pathlib.Path(folder))
    print("DONE", flush=True)


if __name__ == "__main__":
    main()
