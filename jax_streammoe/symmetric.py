"""How the processes of a ring find each other's memory.

Contract: with one process there is nothing to do. With several, they agree through the key-value store of
`jax.distributed`: same spec everywhere, or an error that shows both; then one shared-memory segment per rank is created
by its owner, attached by its peers and unlinked at once, so that nothing is left behind when a process dies. Every
step has the ring's deadline. This is the only module that uses a private JAX name: the client of that store.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from . import ffi


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
        self._timeout_ms = int(timeout_s * 1000)
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
        self._prefix = f"streammoe/{self._name}/{ffi.compiled.next_generation(self._name)}"
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
        nonce = self._exchange("nonce", f"{os.getpid():x}-{os.urandom(6).hex()}")[self._processes[0]]
        for member in self._members:
            if member.process == self._me:
                segment = self._segment(nonce, member)
                ffi.compiled.ring_share(self._name, member.group, member.rank, segment, True)
                self._created.append(segment)
        self._barrier("created")
        for member in self._members:
            if member.process != self._me:
                segment = self._segment(nonce, member)
                ffi.compiled.ring_share(self._name, member.group, member.rank, segment, False)
        self._barrier("attached")

    def _segment(self, nonce: str, member: Member) -> str:
        return f"/streammoe-{nonce}-{zlib.crc32(self._name.encode()):08x}-{member.group}-{member.rank}"

    def _agree(self) -> None:
        for process, spec in self._exchange("spec", self._spec).items():
            if spec != self._spec:
                raise RuntimeError(
                    f"ring {self._name!r}: processes disagree; every process must call make_ring with the same "
                    f"arguments in the same order. Process {self._me} has {self._spec}, process {process} has {spec}"
                )

    def _exchange(self, what: str, value: str) -> dict[int, str]:
        self._client.key_value_set(f"{self._prefix}/{what}/{self._me}", value)
        out = {}
        for process in self._processes:
            try:
                out[process] = self._client.blocking_key_value_get(f"{self._prefix}/{what}/{process}", self._timeout_ms)
            except Exception as error:
                raise RuntimeError(
                    f"ring {self._name!r}: process {process} did not call make_ring within "
                    f"{self._timeout_ms / 1000} s ({what}): {error}"
                ) from error
        return out

    def _barrier(self, what: str) -> None:
        try:
            self._client.wait_at_barrier(f"{self._prefix}/{what}", self._timeout_ms, self._processes)
        except Exception as error:
            raise RuntimeError(
                f"ring {self._name!r}: not all processes {self._processes} reached '{what}' of make_ring within "
                f"{self._timeout_ms / 1000} s: {error}"
            ) from error
