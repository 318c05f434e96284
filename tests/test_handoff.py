"""Descriptors handed between processes: what arrives, who is answered, and how it ends when a process is missing.

The exchange itself runs between threads, whose sockets are those of processes, and between real ones where one dies.
How make_ring uses it is tested with memfds in place of GPU memory in multiprocess/test_handing.py, on GPUs in
gpu/test_processes.py.
"""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jax_streammoe import MoEConfig, cuda, ffi, handoff

pytestmark = pytest.mark.core

# Loads the module by its path: a process that imports all of JAX would need seconds for what takes milliseconds.
CHILD = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("handoff", sys.argv[1])
handoff = importlib.util.module_from_spec(spec)
sys.modules["handoff"] = handoff
spec.loader.exec_module(handoff)
key, me = sys.argv[2], int(sys.argv[3])
fd = os.memfd_create("child")
os.write(fd, f"from {me}".encode())
with handoff.Handoff("child", key, me, (0, 1), 20) as hands:
    print("listening", flush=True)
    sys.stdin.readline()
    exec(sys.argv[4])
"""


def memory(text):
    fd = os.memfd_create("test")
    os.write(fd, text.encode())
    return fd


def read(fd):
    return os.pread(fd, 100, 0).decode()


def open_descriptors():
    return sorted(os.listdir("/proc/self/fd"))


@pytest.fixture
def key(request):
    return f"{request.node.nodeid}-{os.getpid()}"


@pytest.fixture(autouse=True)
def no_descriptor_is_left_open():
    before = len(open_descriptors())
    yield
    assert len(open_descriptors()) == before


def child(key, me, code):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, handoff.__file__, key, str(me), code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def ended(process):
    output = process.communicate(timeout=30)[0]
    return process.returncode, output


def test_everybody_gets_what_everybody_sent(key):
    count, listening = 5, threading.Barrier(5)

    def run(me):
        fds = [memory(f"{me}-{n}") for n in range(me)]  # process 0 sends none
        try:
            with handoff.Handoff("here", key, me, range(count), 20) as hands:
                listening.wait()
                received = hands.exchange({"from": me}, fds)
                assert list(received) == [p for p in range(count) if p != me]
                for process, parcel in received.items():
                    assert parcel.content == {"from": process}
                    assert [read(fd) for fd in parcel.fds] == [f"{process}-{n}" for n in range(process)]
                    assert not any(os.get_inheritable(fd) for fd in parcel.fds)
        finally:
            for fd in fds:
                os.close(fd)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(run, range(count)))


@pytest.mark.parametrize("me", [0, 1])
def test_another_process_shares_its_memory(key, me):
    code = "parcel = hands.exchange('child', [fd])[1 - me]; os.pwrite(parcel.fds[0], b'X', 0); print(parcel.content)"
    other, fd = child(key, 1 - me, code), memory("mine")
    try:
        with handoff.Handoff("here", key, me, (0, 1), 20) as hands:
            assert other.stdout.readline() == "listening\n"
            other.stdin.write("\n")
            other.stdin.flush()
            parcel = hands.exchange(["parent"], [fd])[1 - me]
            assert parcel.content == "child" and read(parcel.fds[0]) == f"from {1 - me}"
            assert ended(other) == (0, "['parent']\n")
            assert read(fd) == "Xine"  # one memory, two processes
    finally:
        os.close(fd)
        other.kill()
        ended(other)


@pytest.mark.parametrize(
    ("me", "code", "text"),
    [
        (0, "os._exit(0)", r"here: process 1 handed nothing over within 1\.0 s"),
        (1, "os._exit(0)", r"here: process 0 (does not listen: it failed or died|went away before it answered)"),
        (0, "hands._connect(0, handoff.time.monotonic() + 5); os._exit(0)", r"process 1 handed nothing over within"),
        (1, "hands._listener.accept(); os._exit(0)", r"here: process 0 went away before it answered; see its own"),
    ],
    ids=["before it connects", "before it accepts", "before it speaks", "before it answers"],
)
def test_a_process_that_dies(key, me, code, text):
    other = child(key, 1 - me, code)
    try:
        with handoff.Handoff("here", key, me, (0, 1), 1.0) as hands:
            assert other.stdout.readline() == "listening\n"
            other.stdin.write("\n")
            other.stdin.flush()
            begin = time.monotonic()
            with pytest.raises(RuntimeError, match=text):
                hands.exchange(None, [])
            assert time.monotonic() - begin < 5
    finally:
        other.kill()
        ended(other)


@pytest.mark.parametrize("me", [0, 1])
def test_a_process_that_stalls_ends_at_the_deadline(key, me):
    """It listens and never gives anything."""
    with (
        handoff.Handoff("there", key, 1 - me, (0, 1), 60),
        handoff.Handoff("here", key, me, (0, 1), 0.3) as hands,
    ):
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match=rf"^here: process {1 - me} handed nothing over within 0\.3 s$"):
            hands.exchange(None, [])
        assert 0.25 < time.monotonic() - begin < 3


def test_many_that_are_missing_are_all_named(key):
    with (
        handoff.Handoff("here", key, 0, range(4), 0.2) as hands,
        pytest.raises(RuntimeError, match=r"processes \[1, 2, 3\] handed nothing over"),
    ):
        hands.exchange(None, [])


def hello(key, message):
    """Connects to process 0 and says something."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.settimeout(10)
    link.connect(handoff.Handoff("", key, 0, (), 1)._address(0))
    link.send(message)
    return link


@pytest.mark.parametrize(
    "message",
    [
        b"", b"hello", b"[]", b"3", b"{}", json.dumps({"key": 3, "process": 1, "content": 0}).encode(),
        json.dumps({"key": "another digest", "process": 1, "content": 0}).encode(), "process 7", "process 0",
    ],
    ids=["nothing", "no JSON", "list", "number", "no key", "key of another kind", "wrong digest", "7", "0"],
)  # fmt: skip
def test_strangers_are_dropped_and_the_process_still_comes(key, message):
    if isinstance(message, str):  # knows the key, and is not who is waited for
        message = json.dumps({"key": key, "process": int(message[8:]), "content": 0}).encode()
    fd = memory("secret")
    try:
        with handoff.Handoff("here", key, 0, (0, 1), 20) as hands, ThreadPoolExecutor(1) as pool:
            with hello(key, message) as stranger:
                result = pool.submit(hands.exchange, "mine", [fd])
                data, fds, _, _ = socket.recv_fds(stranger, 100, 10)
                assert (data, fds) == (b"", []), "a stranger was answered"
            with handoff.Handoff("there", key, 1, (0, 1), 20) as there:
                assert there.exchange("theirs", [])[0].content == "mine"
            assert result.result(10)[1].content == "theirs"
    finally:
        os.close(fd)


def test_another_user_is_dropped(key, monkeypatch):
    """What the kernel says of the other end decides, before anything is read."""
    users = iter([False, True, True])
    monkeypatch.setattr(handoff, "_same_user", lambda link: next(users))
    with handoff.Handoff("here", key, 0, (0, 1), 20) as hands, ThreadPoolExecutor(1) as pool:
        with hello(key, json.dumps({"key": key, "process": 1, "content": 0}).encode()) as stranger:
            result = pool.submit(hands.exchange, "mine", [])
            with pytest.raises(ConnectionResetError):  # what it said was never read
                stranger.recv(100)
        with handoff.Handoff("there", key, 1, (0, 1), 20) as there:
            there.exchange("theirs", [])
        assert result.result(10)[1].content == "theirs"
    monkeypatch.setattr(handoff, "_same_user", lambda link: False)
    with (
        handoff.Handoff("there", key, 0, (0, 1), 20),
        handoff.Handoff("here", key, 1, (0, 1), 5) as hands,
        pytest.raises(RuntimeError, match=r"^here: process 0 runs as another user$"),
    ):
        hands.exchange(None, [])


def test_the_user_of_the_other_end_is_read_from_the_kernel(monkeypatch):
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, two:
        assert handoff._same_user(one) and handoff._same_user(two)
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
        assert not handoff._same_user(one)


def test_who_answers_in_place_of_another_is_an_error(key):
    def impostor(listener):
        with listener.accept()[0] as link:
            link.recv(1000)
            link.send(json.dumps({"key": key, "process": 2, "content": 0}).encode())

    with (
        handoff.Handoff("there", key, 0, (0, 1), 20) as there,
        handoff.Handoff("here", key, 1, (0, 1), 20) as hands,
        ThreadPoolExecutor(1) as pool,
    ):
        done = pool.submit(impostor, there._listener)
        with pytest.raises(RuntimeError, match=r"^here: process 2 answered in place of process 0$"):
            hands.exchange(None, [])
        done.result(10)


def test_names_carry_nothing_but_a_digest_and_vanish(key):
    def names():
        text = pathlib.Path("/proc/net/unix").read_text()
        return [line.split()[-1] for line in text.splitlines() if "@streammoe-" in line]

    before = set(names())
    with handoff.Handoff("here", key, 0, (0, 1), 1):
        (name,) = set(names()) - before
        assert key not in name and "test" not in name
        head, digest, process = name.rsplit("-", 2)
        assert head == "@streammoe" and process == "0" and len(digest) == 24
        with (
            pytest.raises(RuntimeError, match=r"^here: process 0 cannot listen for its peers: .*already in use"),
            handoff.Handoff("here", key, 0, (0, 1), 1),
        ):
            pass
    assert set(names()) == before


def test_what_is_too_large_is_refused_before_anything_is_sent(key):
    with handoff.Handoff("here", key, 0, (0, 1), 1) as hands:
        with pytest.raises(ValueError, match="a handoff takes 65536 bytes, 253 descriptors"):
            hands.exchange("x" * 70_000, [])
        with pytest.raises(ValueError, match=r"a handoff takes .*, 254$"):
            hands.exchange(None, [0] * 254)


def test_a_year_is_a_deadline_too(key):
    """No system call is given more than it can count."""
    listening = threading.Barrier(2)

    def run(me):
        with handoff.Handoff("here", key, me, (0, 1), 1e8) as hands:
            listening.wait()
            return hands.exchange(me, [])[1 - me].content

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, (0, 1))) == [1, 0]


def test_gpus_of_several_processes_are_not_refused(monkeypatch):
    """And each process looks at its own only."""
    monkeypatch.setattr(ffi, "compiled", SimpleNamespace(WITH_CUDA=True))
    config = MoEConfig(8, 2, 64, 64, dtype=jnp.bfloat16)
    here = SimpleNamespace(process_index=0, compute_capability="9.0")
    there = SimpleNamespace(process_index=1, compute_capability=None)  # not known here
    cuda.check_ring(config, 2, 64, [here, there])
    here.compute_capability = "8.0"
    with pytest.raises(ValueError, match=r"^the kernels need compute capability 9\.0, .* has 8\.0$"):
        cuda.check_ring(config, 2, 64, [here, there])


def test_more_routes_than_a_plan_holds_are_refused_before_memory_is_asked_for(monkeypatch):
    monkeypatch.setattr(ffi, "compiled", SimpleNamespace(WITH_CUDA=True))
    config = MoEConfig(8, 8, 8, 8, dtype=jnp.bfloat16)
    most = cuda.MAX_ROUTES // 8
    cuda.check_ring(config, 1, most, [])
    with pytest.raises(ValueError, match=rf"top_k must be at most {cuda.MAX_ROUTES} on a GPU, got {8 * (most + 1)}$"):
        cuda.check_ring(config, 1, most + 1, [])


class TestMemoryThatCannotBeAPeers:
    """Refused before the driver is asked; a ring on GPUs as make_ring creates it, which needs no device yet."""

    __test__ = ffi.compiled.WITH_CUDA

    @pytest.fixture(autouse=True)
    def ring(self):
        shape = dict(
            num_ranks=2, num_slots=1, chunk_tokens=8, hidden=64, top_k=1, itemsize=2, pool_tokens=16, num_experts=1,
            intermediate=64,
        )  # fmt: skip
        ffi.compiled.ring_create("handed", shape, 1, 1.0, [[0, 0, 0]])
        yield
        ffi.compiled.ring_close("handed")

    @pytest.mark.parametrize(
        ("group", "rank", "num_bytes", "offset", "text"),
        [
            (0, 2, 1 << 40, 0, "has no rank 2 of group 0 in another process"),
            (1, 0, 1 << 40, 0, "has no rank 0 of group 1 in another process"),
            (-1, 0, 1 << 40, 0, "has no rank 0 of group -1"),
            (0, 1, 100, 0, r"rank 1 offers 100 bytes and its ring at 0, which needs \d+"),
            (0, 1, 1 << 40, -1, "and its ring at -1"),
            (0, 1, 1 << 40, (1 << 40) - 100, "offers 1099511627776 bytes and its ring at 1099511627676"),
        ],
    )
    def test_of_a_peer(self, group, rank, num_bytes, offset, text):
        with pytest.raises(RuntimeError, match=text):
            ffi.compiled.ring_import("handed", group, rank, -1, num_bytes, offset)

    @pytest.mark.parametrize("rank", [0, 1])
    def test_of_this_process(self, rank):
        with pytest.raises(RuntimeError, match=f"ring 'handed': rank {rank} is not registered here"):
            ffi.compiled.ring_export("handed", 0, rank)
