"""File descriptors handed from process to process of one host: how GPU memory reaches the peers of a ring.

Contract: processes open a Handoff with the same key, each naming the others it deals with, and, once all have opened
theirs, call `exchange`: it sends one content and its descriptors to each of the others and returns what each of them
sent, or raises RuntimeError, at the latest after `timeout_s`. Sockets are Unix sockets in the abstract namespace, named
by a digest of the key: nothing is left behind, whoever dies. Only processes of the same user that know the key are
answered. Trade-off: every pair of processes meets, and the abstract namespace is that of a network namespace, so
containers with networks of their own do not reach each other.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import hmac
import json
import os
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

MOST_BYTES = 1 << 16  # of a message
MOST_FDS = 253  # the kernel's limit for one message
MAX_WAIT_S = 1e6  # for one system call, whose timeout is a count of milliseconds in 32 bits
RETRY_S = 0.01
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Parcel(NamedTuple):
    """What a process sent: JSON content, and descriptors that are open until the Handoff closes."""

    content: Any
    fds: list[int]


class Handoff:
    """One end of an exchange; a context manager that closes its sockets and every descriptor that it received.

    Arguments:
      label: how errors begin.
      key: a text that all processes share and others do not know.
      me, processes: numbers of this process and of those it deals with, which may include itself; they name it too.
      timeout_s: seconds that `exchange` may take.
    """

    def __init__(self, label: str, key: str, me: int, processes: Iterable[int], timeout_s: float) -> None:
        self._label, self._key, self._me, self._timeout_s = label, key, me, float(timeout_s)
        self._others = sorted(set(processes) - {me})
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Handoff:
        with contextlib.ExitStack() as opened:
            self._listener = opened.enter_context(_socket())
            try:
                self._listener.bind(self._address(self._me))
                self._listener.listen(len(self._others) + 1)
            except OSError as error:
                raise RuntimeError(f"{self._label}: process {self._me} cannot listen for its peers: {error}") from error
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def exchange(self, content: Any, fds: Sequence[int]) -> dict[int, Parcel]:
        """Sends `content` (JSON, up to 60 KB) and `fds` (up to 253) to all others; -> what they sent, by process.

        The caller keeps its descriptors; those that came are closed with the Handoff. Raises RuntimeError naming the
        process that went away, answered wrongly, or was not there in time.
        """
        message = json.dumps({"key": self._key, "process": self._me, "content": content}).encode()
        if len(message) > MOST_BYTES or len(fds) > MOST_FDS:
            raise ValueError(f"a handoff takes {MOST_BYTES} bytes, {MOST_FDS} descriptors: {len(message)}, {len(fds)}")
        deadline = time.monotonic() + self._timeout_s
        # Of two processes the later one connects and sends, the earlier one accepts and answers. All listen already, so
        # connecting and sending wait for nobody.
        links = {process: self._connect(process, deadline) for process in self._others if process < self._me}
        for process, link in links.items():
            self._send(link, process, message, fds, deadline)
        received = self._accept_all(message, fds, deadline)
        for process, link in links.items():
            received[process] = self._receive(link, process, deadline)
        return dict(sorted(received.items()))

    def _address(self, process: int) -> str:
        return f"\0streammoe-{hashlib.sha256(self._key.encode()).hexdigest()[:24]}-{process}"

    def _connect(self, process: int, deadline: float) -> socket.socket:
        link = self._open.enter_context(_socket())
        while True:
            try:
                link.settimeout(_left(deadline))
                link.connect(self._address(process))
                break
            except BlockingIOError:  # strangers fill its queue
                time.sleep(RETRY_S)
            except TimeoutError:
                raise self._late([process]) from None
            except ConnectionRefusedError as error:
                raise RuntimeError(
                    f"{self._label}: process {process} does not listen: it failed or died, see its own error, or it "
                    "runs in a container with a network of its own, whose Unix sockets are not reached from here"
                ) from error
            except OSError as error:
                raise RuntimeError(f"{self._label}: process {process} cannot be reached: {error}") from error
        if not _same_user(link):
            raise RuntimeError(f"{self._label}: process {process} runs as another user")
        return link

    def _send(
        self, link: socket.socket, process: int, message: bytes, fds: Sequence[int], deadline: float
    ) -> None:  # fmt: skip
        try:
            link.settimeout(_left(deadline))
            socket.send_fds(link, [message], list(fds))
        except TimeoutError:
            raise self._late([process]) from None
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._gone(process) from error
        except OSError as error:
            raise RuntimeError(f"{self._label}: nothing can be sent to process {process}: {error}") from error

    def _accept_all(self, message: bytes, fds: Sequence[int], deadline: float) -> dict[int, Parcel]:
        received: dict[int, Parcel] = {}
        missing = [process for process in self._others if process > self._me]
        while missing:
            try:
                self._listener.settimeout(_left(deadline))
                link = self._listener.accept()[0]
            except TimeoutError:
                raise self._late(missing) from None
            with link:
                # Whoever is not one of ours, or died before it spoke, is dropped: ours may still come.
                if not _same_user(link):
                    continue
                try:
                    found = self._read(link, deadline)
                except TimeoutError:
                    raise self._late(missing) from None
                except OSError:
                    continue
                if found is None or found[0] not in missing:
                    continue
                process, parcel = found
                received[process] = parcel
                self._send(link, process, message, fds, deadline)
                missing.remove(process)
        return received

    def _receive(self, link: socket.socket, process: int, deadline: float) -> Parcel:
        try:
            found = self._read(link, deadline)
        except TimeoutError:
            raise self._late([process]) from None
        except OSError as error:
            raise self._gone(process) from error
        if found is None:
            raise self._gone(process)
        if found[0] != process:
            raise RuntimeError(f"{self._label}: process {found[0]} answered in place of process {process}")
        return found[1]

    def _read(self, link: socket.socket, deadline: float) -> tuple[int, Parcel] | None:
        """-> the process and what it sent, or None when the other end closed or does not know the key."""
        link.settimeout(_left(deadline))
        # Not socket.recv_fds, which drops its flags: no descriptor may reach a program that another thread starts.
        space = socket.CMSG_SPACE(MOST_FDS * array.array("i").itemsize)
        data, ancillary, flags, _ = link.recvmsg(MOST_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i")
        for level, kind, numbers in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(numbers[: len(numbers) - len(numbers) % fds.itemsize])
        for fd in fds:
            self._open.callback(os.close, fd)
        if flags & socket.MSG_CTRUNC:
            raise RuntimeError(f"{self._label}: descriptors were lost on the way: raise the limit of open files")
        try:
            message = json.loads(data)
            if not hmac.compare_digest(message["key"], self._key):
                return None
            return int(message["process"]), Parcel(message["content"], list(fds))
        except (ValueError, TypeError, KeyError):
            return None

    def _late(self, processes: Sequence[int]) -> RuntimeError:
        who = f"process {processes[0]}" if len(processes) == 1 else f"processes {list(processes)}"
        return RuntimeError(f"{self._label}: {who} handed nothing over within {self._timeout_s} s")

    def _gone(self, process: int) -> RuntimeError:
        return RuntimeError(f"{self._label}: process {process} went away before it answered; see its own error")


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return min(left, MAX_WAIT_S)


def _same_user(link: socket.socket) -> bool:
    """Whether the other end belongs to this user; the kernel says so, not the other end."""
    raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return CREDENTIALS.unpack(raw)[1] == os.geteuid()
