"""How the processes of a ring find each other's memory.

Contract: with one process there is nothing to do. With several, they agree through the key-value store of
`jax.distributed`: same spec everywhere, or an error that shows both; then one shared-memory segment per rank is created
by its owner, attached by its peers and unlinked at once, so that nothing is left behind when a process dies. Every
step has the ring's deadline. An attempt is known by the random offers of its processes, not by a count of calls: after
any failure, on some processes or on all, the next attempt that all make succeeds. The price is a poll of the store.
This is the only module that uses a private JAX name: the client of that store.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import urllib.parse
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from . import ffi

POLL_S = 0.01  # between two looks at the store, one small RPC each


class Member(NamedTuple):
    """A rank of a ring: XLA's device ordinal, group, rank in the group, and the process that owns it."""

    ordinal: int
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


class Bootstrap:
    """One collective make_ring: `share_heaps()` after the ring exists, a last barrier when the block ends."""

    def __init__(self, name: str, spec: str, members: Sequence[Member], shared: bool, timeout_s: float) -> None:
        self._name, self._spec, self._members, self._shared = name, spec, members, shared
        self._timeout_s = float(timeout_s)
        self._processes = sorted({m.process for m in members})
        self._me = jax.process_index()
        self._created: list[str] = []

    def __enter__(self) -> Bootstrap:
        if not self._shared:
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
        if self._shared and kind is None:
            self._barrier("registered")  # no rank publishes before every rank has zeroed its control words

    def share_heaps(self) -> None:
        """Creates the segments of this process's ranks and attaches those of the others."""
        if not self._shared:
            return
        for member in self._members:
            if member.process == self._me:
                segment = self._segment(member)
                ffi.compiled.ring_share(self._name, member.group, member.rank, segment, True)
                self._created.append(segment)
        self._barrier("created")
        for member in self._members:
            if member.process != self._me:
                segment = self._segment(member)
                ffi.compiled.ring_share(self._name, member.group, member.rank, segment, False)
        self._barrier("attached")

    def _segment(self, member: Member) -> str:
        return f"/streammoe-{self._attempt}-{zlib.crc32(self._name.encode()):08x}-{member.group}-{member.rank}"

    def _agree(self) -> None:
        try:
            specs = self._meet()
            self._barrier("met")  # a record stays until every process has read it
        finally:
            self._client.key_value_delete(self._key(self._me))
        for process, spec in specs.items():
            if spec != self._spec:
                raise RuntimeError(self._disagreement(process, spec))

    def _meet(self) -> dict[int, str]:
        """Waits until every process has seen the offers of this attempt; -> their specs.

        Each keeps one record: its offer (a nonce), its spec, and `seen`, the digest of the offers that it reads. Equal
        digests everywhere, over offers that include one's own, come from this attempt only: a record that a failed one
        has left behind has seen other offers, and is replaced when its process calls again.
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
                    return {process: record["spec"] for process, record in records.items()}
            if time.monotonic() > deadline:
                raise RuntimeError(self._why_not_met(records, seen))
            time.sleep(POLL_S)

    def _post(self, offer: str, seen: str) -> None:
        record = json.dumps({"offer": offer, "spec": self._spec, "seen": seen})
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
