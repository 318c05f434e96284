"""How the processes of a ring find each other's memory.

Contract: with one process there is nothing to share. Several agree through the key-value store of `jax.distributed`:
same spec everywhere, or an error that shows both, and one host for the ranks of a group. Then, on CPUs, one
shared-memory segment per rank is created by its owner, attached by its peers and unlinked at once; on GPUs each process
hands the others a descriptor of the memory that holds its ranks, which they map. Nothing is left behind when a process
dies. Every step has the ring's deadline. An attempt is known by the random offers of its processes, not by a count of
calls: after any failure, on some processes or on all, the next attempt that all make succeeds. The price is a poll of
the store. This is the only module that uses a private JAX name: the client of that store.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import socket
import time
import urllib.parse
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from . import ffi, handoff

POLL_S = 0.01  # between two looks at the store, one small RPC each


class Member(NamedTuple):
    """A rank of a ring: XLA's device ordinal, group, rank in the group, and the process that owns it.

    Other processes' GPUs have no ordinal here.
    """

    ordinal: int | None
    group: int
    rank: int
    process: int


def distributed_client() -> Any:
    """Returns the client of jax.distributed's key-value store, or None when jax.distributed is not initialised."""
    try:
        from jax._src import distributed
    except ImportError:  # pragma: no cover - a JAX without it has no several processes either
        return None
    return getattr(distributed.global_state, "client", None)


def host_identity() -> str:
    """Returns what is equal in processes that run on one host, and on no other: Linux's boot id."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class Bootstrap:
    """One collective make_ring, a context manager round what follows the ring's creation.

    The processes agree when the block begins, and a last barrier ends it. On CPUs `share_heaps()` comes before the
    memory is registered; on GPUs `settle()` comes before and `share_memory()` after. With one process they only do
    what concerns its own GPUs.
    """

    def __init__(self, name: str, spec: str, members: Sequence[Member], timeout_s: float) -> None:
        self._name, self._spec = name, spec
        self._timeout_s = float(timeout_s)
        self._processes = sorted({m.process for m in members})
        self._several = len(self._processes) > 1
        self._me = jax.process_index()
        self._mine = [member for member in members if member.process == self._me]
        groups = {member.group for member in self._mine}
        # Ranks of other processes that exchange tokens with ranks of this one; those processes.
        self._peers = [member for member in members if member.process != self._me and member.group in groups]
        self._neighbours = {member.process for member in self._peers}
        self._created: list[str] = []

    def __enter__(self) -> Bootstrap:
        if not self._several:
            return self
        self._client = distributed_client()
        if self._client is None:
            raise RuntimeError(
                f"ring {self._name!r} spans processes {self._processes}: call jax.distributed.initialize first"
            )
        # Quoted, because the store splits and normalizes keys at slashes.
        self._prefix = f"streammoe/ring-{urllib.parse.quote(self._name, safe='')}"
        self._agree()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for segment in self._created:
            ffi.compiled.segment_unlink(segment)
        if self._several and kind is None:
            self._barrier("registered")  # no rank publishes before every rank has zeroed its control words

    def share_heaps(self) -> None:
        """CPUs of several processes: creates the segments of this one's ranks and attaches those of the others."""
        for member in self._mine:
            segment = self._segment(member)
            ffi.compiled.ring_share(self._name, member.group, member.rank, segment, True)
            self._created.append(segment)
        self._barrier("created")
        for member in self._peers:
            segment = self._segment(member)
            ffi.compiled.ring_share(self._name, member.group, member.rank, segment, False)
        self._barrier("attached")

    def settle(self) -> None:
        """GPUs: returns when none of all processes still works for an earlier ring.

        A ring that failed may have lain where this one does, and a late kernel may still write to it.
        """
        ffi.compiled.ring_settle(self._name)
        if self._several:
            self._barrier("settled")

    def share_memory(self) -> None:
        """GPUs: gives the memory that holds this process's ranks to the others and maps theirs; all are registered."""
        ffi.compiled.ring_check_peers(self._name)
        if not self._several:
            return
        wanted = {(member.group, member.rank) for member in self._peers}
        shared_groups = {group for group, _ in wanted}
        key = hashlib.sha256(f"{self._attempt}/{self._name}".encode()).hexdigest()
        with contextlib.ExitStack() as cleanup:
            places, fds = [], []
            for member in (member for member in self._mine if member.group in shared_groups):
                fd, num_bytes, offset = ffi.compiled.ring_export(self._name, member.group, member.rank)
                cleanup.callback(os.close, fd)
                fds.append(fd)
                places.append((member.group, member.rank, num_bytes, offset))
            hands = handoff.Handoff(f"ring {self._name!r}", key, self._me, self._neighbours, self._timeout_s)
            cleanup.enter_context(hands)
            self._barrier("exported")  # all listen
            for parcel in hands.exchange(places, fds).values():
                for (group, rank, num_bytes, offset), fd in zip(parcel.content, parcel.fds, strict=True):
                    if (group, rank) in wanted:
                        ffi.compiled.ring_import(self._name, group, rank, fd, num_bytes, offset)
        self._barrier("mapped")  # no kernel of a peer reaches here before all of this is there

    def _segment(self, member: Member) -> str:
        return f"/streammoe-{self._attempt}-{zlib.crc32(self._name.encode()):08x}-{member.group}-{member.rank}"

    def _agree(self) -> None:
        self._host = host_identity()
        try:
            records = self._meet()
            self._barrier("met")  # a record stays until every process has read it
        finally:
            self._client.key_value_delete(self._key(self._me))
        for process, record in records.items():
            if record["spec"] != self._spec:
                raise RuntimeError(self._disagreement(process, record["spec"]))
        for process, record in records.items():
            if process in self._neighbours and record["host"] != self._host:
                raise RuntimeError(
                    f"ring {self._name!r}: process {process} runs on another host than process {self._me}, and ranks "
                    "that exchange tokens share memory: let axis_name span devices of one host, or leave ring=None, "
                    "which exchanges through XLA's collectives"
                )

    def _meet(self) -> dict[int, dict[str, str]]:
        """Waits until every process has seen the offers of this attempt; -> their records.

        Each keeps one record: its offer (a nonce), spec, host, and `seen`, the digest of the offers that it reads.
        Equal digests everywhere, over offers that include one's own, come from this attempt only: a record that a
        failed one has left behind has seen other offers, and is replaced when its process calls again.
        """
        offer, seen = os.urandom(8).hex(), ""
        deadline = time.monotonic() + self._timeout_s
        self._post(offer, seen)
        while True:
            records = self._records()
            if len(records) == len(self._processes):
                offers = "-".join(record["offer"] for record in records.values())
                digest = hashlib.sha256(offers.encode()).hexdigest()[:24]
                if seen != digest:
                    seen = digest
                    self._post(offer, seen)
                    continue
                if all(record["seen"] == seen for record in records.values()):
                    self._attempt = seen
                    return records
            if time.monotonic() > deadline:
                raise RuntimeError(self._why_not_met(records, seen))
            time.sleep(POLL_S)

    def _post(self, offer: str, seen: str) -> None:
        record = json.dumps({"offer": offer, "spec": self._spec, "host": self._host, "seen": seen})
        self._client.key_value_set(self._key(self._me), record, allow_overwrite=True)

    def _records(self) -> dict[int, dict[str, str]]:
        found = dict(self._client.key_value_dir_get(f"{self._prefix}/offers/"))
        return {p: json.loads(found[self._key(p)]) for p in self._processes if self._key(p) in found}

    def _key(self, process: int) -> str:
        return f"{self._prefix}/offers/{process}"

    def _why_not_met(self, records: dict[int, dict[str, str]], seen: str) -> str:
        missing = [p for p in self._processes if p not in records]
        if not missing:  # a mesh of other processes shows here: it waits for other offers
            for process, record in records.items():
                if record["spec"] != self._spec:
                    return self._disagreement(process, record["spec"])
            missing = [p for p, record in records.items() if p != self._me and record["seen"] != seen]
        return f"ring {self._name!r}: process {missing[0]} did not call make_ring within {self._timeout_s} s"

    def _disagreement(self, process: int, spec: str) -> str:
        return (
            f"ring {self._name!r}: processes disagree; every process must call make_ring with the same arguments in "
            f"the same order. Process {self._me} has {self._spec}, process {process} has {spec}"
        )

    def _barrier(self, what: str) -> None:
        try:
            barrier = f"{self._prefix}/{self._attempt}/{what}"
            self._client.wait_at_barrier(barrier, int(self._timeout_s * 1000), self._processes)
        except Exception as error:
            raise RuntimeError(
                f"ring {self._name!r}: not all processes {self._processes} reached '{what}' of make_ring within "
                f"{self._timeout_s} s: {error}"
            ) from error
