"""The ring: a pytree of arrays that is donated from call to call, and its life outside of programs.

Contract: `mem` is one row of bytes per device of the mesh, known to the library by address, and only the library's
own operations take it and return it; `token` is one float per device that orders what has no ring operand (the
backward). The spec is static and holds neither pointers nor devices, so a ring that was made again reuses every
compiled program. Making a ring is collective and happens outside of jit. Trade-off: the ring must be threaded linearly,
like any donated value; `mutable=True` keeps the memory in a `jax.Ref` instead, which cannot be forgotten or copied.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from . import checks, cuda, ffi, ops, symmetric
from .config import MoEConfig, at_least
from .layout import RingShape, ring_layout, ring_shape
from .varying import vary_together

MAX_TIMEOUT_S = 1e8  # three years; as nanoseconds or milliseconds it fits every clock and RPC
HANDLE_BYTES = 128  # of the `mem` row when the heap is shared memory and the leaf only stands for it


@dataclasses.dataclass(frozen=True)
class RingSpec:
    """The static half of a ring: what programs are compiled against.

    `axis_names` are the mesh axes of the ranks (R = product of their sizes), `mesh_axes` all axes with their sizes;
    both are empty for a ring of one device. `threads`: CPU threads of one rank's expert work. `shared`: ranks live in
    several processes and exchange through POSIX shared memory, CPUs only. `platform`: "cpu" or "cuda".
    """

    name: str
    config: MoEConfig
    shape: RingShape
    axis_names: tuple[str, ...]
    mesh_axes: tuple[tuple[str, int], ...]
    threads: int
    shared: bool
    platform: str = "cpu"

    @property
    def num_ranks(self) -> int:
        """R, the ranks that exchange tokens."""
        return self.shape.num_ranks

    @property
    def partition(self) -> P:
        """How both leaves are sharded: one row per device, over all mesh axes."""
        return P(tuple(name for name, _ in self.mesh_axes)) if self.mesh_axes else P()

    @property
    def macro_tokens(self) -> int:
        """S * C, the tokens that one macro-chunk can hold."""
        return self.shape.num_slots * self.shape.chunk_tokens


class _RingMethods:
    mem: Any
    spec: RingSpec

    @property
    def name(self) -> str:
        """The ring's name, by which every process knows it."""
        return self.spec.name

    def check(self) -> None:
        """Raises RuntimeError with the first failure of this ring in this process, if it has failed."""
        if not ffi.compiled.ring_exists(self.name):
            raise RuntimeError(f"ring {self.name!r} is closed: call make_ring again")
        if why := ffi.compiled.ring_failure(self.name):
            if self.spec.platform == "cuda" and self.spec.num_ranks > 1:
                # A peer that is late may still write here: XLA must not give the memory to anybody else.
                ffi.compiled.keep_forever(self.mem)
            raise RuntimeError(
                f"ring {self.name!r} is unusable, call make_ring again on all ranks; it failed with: {why}"
            )

    def __repr__(self) -> str:
        # Never the arrays: printing one keeps a NumPy view, and its next donation would be a copy.
        shape = self.spec.shape
        what = f"{shape.num_ranks} ranks x {shape.num_slots} slots of {shape.chunk_tokens} tokens"
        return f"{type(self).__name__}({self.name!r}, {what})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(checks.RING_PICKLE)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        close_ring(self.name)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["mem", "token"], meta_fields=["spec"])
@dataclasses.dataclass(frozen=True, repr=False)
class Ring(_RingMethods):
    """A donated ring. `mem`: uint8 [devices, bytes]; `token`: float32 [devices, 1]; `spec`: static."""

    mem: jax.Array
    token: jax.Array
    spec: RingSpec

    __reduce__ = _RingMethods.__reduce__


@functools.partial(jax.tree_util.register_dataclass, data_fields=["mem"], meta_fields=["spec"])
@dataclasses.dataclass(frozen=True, repr=False)
class RingRef(_RingMethods):
    """A ring in a `jax.Ref`: pass it as an argument, do not donate, nothing to return. Full remat is safe.

    It needs no token: the Ref itself orders all that touches it, which is every forward call. A backward does not: over
    ranks it is ordered only behind its own forward.
    """

    mem: Any
    spec: RingSpec

    __reduce__ = _RingMethods.__reduce__

    def load(self) -> Ring:
        """Returns the functional view; whoever loads must store before anyone else loads."""
        return Ring(self.mem[...], jnp.zeros((self.mem.shape[0], 1), jnp.float32), self.spec)

    def store(self, ring: Ring) -> None:
        """Writes back what an operation returned for `load()`."""
        self.mem[...] = ring.mem


def with_ring(ring: Ring | RingRef | None, function: Callable[..., tuple], *args: Any) -> tuple:
    """Calls `function(*args, ring) -> (*out, ring)` with the functional form of either kind of ring."""
    if not isinstance(ring, RingRef):
        return function(*args, ring)
    *out, used = function(*args, ring.load())
    ring.store(used)
    return (*out, ring)


def after(ring: Ring, *others: Any) -> Ring:
    """Returns `ring`, ordered after `others` (arrays or rings).

    Two rings of one program need one order on all ranks. Raises TypeError for a RingRef, whose Ref orders its calls.
    """
    if isinstance(ring, RingRef):
        raise TypeError("a RingRef needs no after: its Ref orders its calls; to order two rings, make them Rings")
    mem, token = _after(ring.mem, ring.token, [o.token if isinstance(o, Ring) else o for o in others])
    return dataclasses.replace(ring, mem=mem, token=token)


@jax.custom_jvp
def _after(mem: jax.Array, token: jax.Array, others: Any) -> tuple[jax.Array, jax.Array]:
    args = (mem, token, *jax.tree.leaves(others))
    types = [jax.typeof(a) for a in args]
    if get_abstract_mesh().manual_axes:
        return _after_local(*args)
    mesh = next((t.sharding.mesh for t in types if AxisType.Explicit in t.sharding.mesh.axis_types), None)
    if mesh is None:
        return _after_partitioned(*args)
    specs = tuple(t.sharding.spec if t.sharding.mesh == mesh else P() for t in types)
    return jax.shard_map(_after_local, mesh=mesh, in_specs=specs, out_specs=specs[:2], check_vma=False)(*args)


@_after.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return _after(*primals), tangents[:2]


def _after_local(mem: jax.Array, token: jax.Array, *others: jax.Array) -> tuple[jax.Array, jax.Array]:
    mem, token = ops.after((mem, token), others)
    return mem, token


# Every operand stays as it is sharded; each device waits for its own shards.
_after_partitioned = custom_partitioning(_after_local)
_after_partitioned.def_partition(
    partition=lambda mesh, args, results: (
        mesh, _after_local, tuple(a.sharding for a in args[:2]), tuple(a.sharding for a in args)
    ),
    sharding_rule=lambda mesh, args, results: (
        ", ".join(" ".join(f"f{n}d{d}" for d in range(len(a.shape))) for n, a in enumerate(args))
        + " -> f0d0 f0d1, f1d0 f1d1"
    ),
)  # fmt: skip


def make_ring(
    config: MoEConfig, *, chunk_tokens: int, num_slots: int, mesh: Mesh | None = None,
    axis_name: str | Sequence[str] = "ep", name: str = "ring", mutable: bool = False, timeout_s: float = 100.0,
    pool_tokens: int | None = None, threads: int | None = None,
) -> Ring | RingRef:  # fmt: skip
    """Makes a ring over the devices of `mesh`, or of one device without a mesh.

    Collective: every process of the mesh calls it, in the same order, with the same arguments, outside of jit. A live
    ring of the same name is replaced; programs compiled for it are reused.

    Arguments:
      config: the layer; E must be a multiple of R.
      chunk_tokens: C, most tokens that are published at once. num_slots: S. S*C tokens bound the memory, recommended
        min(T, 8192).
      mesh: all its devices take part; `axis_name` (one or several axes) spans the ranks of one group, other axes make
        further groups. None: one device, R = 1.
      name: by which programs and processes know the ring.
      mutable: return a RingRef (leaves in `jax.Ref`): no donation, safe under full remat.
      timeout_s: deadline of every wait for a peer, in seconds, at most 1e8.
      pool_tokens: token rows that one rank can hold for its experts; between R*C and R*S*C, the default. A smaller pool
        computes partial blocks when it is full.
      threads: CPU threads of one rank's expert work; by default the cores divided by the ranks of this process.

    Returns a Ring of `ring_bytes(...)` bytes per rank (CPUs of several processes: in shared memory). On GPUs the ring
    takes bfloat16 and float16 layers and loads every kernel. The ranks of a group are GPUs of one host that reach each
    other's memory, in one process or several; with more than one, `make_ring` waits for what they were given before,
    and gradients are exchanged through the ring: it must be alive until they are there, as one that is returned is.

    Raises TypeError for an argument of another kind, ValueError for sizes, axes, devices or a config that do not fit,
    RuntimeError when processes disagree, run on several hosts or one is missing, or when GPUs cannot share their
    memory; all may then call it again.
    """
    checks.check_config(config)
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {name!r}")
    axis_names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if mesh is not None and not hasattr(mesh, "axis_names"):
        raise TypeError(f"mesh must be a jax.sharding.Mesh or None, got {type(mesh).__name__}")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float, np.number)):
        raise TypeError(f"timeout_s must be a number of seconds, got {timeout_s!r}")
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        raise ValueError("make_ring is called outside of jit: it allocates the memory that programs then share")
    devices, num_groups, num_ranks = _devices(mesh, axis_names)
    config.local_experts(num_ranks)
    members = [_member(device, n // num_ranks, n % num_ranks) for n, device in enumerate(devices)]
    platform = "cuda" if devices[0].platform == "gpu" else "cpu"
    shape = ring_shape(
        config, chunk_tokens=chunk_tokens, num_slots=num_slots, num_ranks=num_ranks, pool_tokens=pool_tokens,
        platform=platform,
    )  # fmt: skip
    if platform == "cuda":
        cuda.check_ring(config, num_ranks, shape.pool_tokens, devices)
    most = num_ranks * num_slots * chunk_tokens
    if platform == "cuda" and shape.pool_tokens != most:
        raise ValueError(f"pool_tokens must be {most} (R*S*C) on a GPU, got {shape.pool_tokens}: leave it out")
    if not num_ranks * chunk_tokens <= shape.pool_tokens <= most:
        raise ValueError(
            f"pool_tokens must be in {num_ranks * chunk_tokens}..{most} (R*C..R*S*C), got {shape.pool_tokens}"
        )
    if config.capacity is not None and shape.pool_tokens < most:
        raise ValueError(
            f"pool_tokens must be {most} with capacity=, which needs all routes at once, got {shape.pool_tokens}"
        )
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(f"timeout_s must be positive and at most {MAX_TIMEOUT_S:g} seconds, got {timeout_s}")
    local = [m for m in members if m.process == jax.process_index()]
    per_rank = max(1, ffi.compiled.default_threads() // max(1, len(local)))
    spec = RingSpec(
        name=name, config=config, shape=shape, axis_names=axis_names if mesh is not None else (),
        mesh_axes=tuple(mesh.shape.items()) if mesh is not None else (),
        threads=per_rank if threads is None else at_least("threads", threads, 1),
        shared=platform == "cpu" and len({m.process for m in members}) > 1, platform=platform,
    )  # fmt: skip
    ffi.compiled.ring_create(
        name, dataclasses.asdict(shape), num_groups, float(timeout_s), [[m.ordinal, m.group, m.rank] for m in local]
    )
    try:
        with symmetric.Bootstrap(spec.name, repr(spec), members, timeout_s) as bootstrap:
            if spec.shared:
                bootstrap.share_heaps()
            ring = _allocate(spec, mesh)
            setup = _setup(spec, mesh, bootstrap)
            return _register_ref(ring, setup) if mutable else _register(ring, setup)
    except BaseException:
        ffi.compiled.ring_close(name)
        raise


def close_ring(ring: Ring | RingRef | str) -> bool:
    """Forgets a ring in this process, by object or name; returns whether it existed. Safe to call twice.

    Its arrays live on until Python drops them; a program that uses them raises. Call it on every process.
    """
    if not isinstance(ring, (Ring, RingRef, str)):
        raise TypeError(f"ring must come from make_ring or be its name, got {type(ring).__name__}")
    return bool(ffi.compiled.ring_close(ring if isinstance(ring, str) else ring.name))


def _devices(mesh: Mesh | None, axis_names: tuple[str, ...]) -> tuple[list[jax.Device], int, int]:
    """The device of every rank, group after group, the number of groups, and R."""
    if mesh is None:
        device = jax.config.jax_default_device
        if device is None or isinstance(device, str):  # the name of a platform; None is the default one
            device = jax.local_devices(backend=device)[0]
        return [device], 1, 1
    for axis in axis_names:
        if axis not in mesh.axis_names:
            raise ValueError(f"axis_name must be an axis of the mesh {tuple(mesh.axis_names)}, got {axis!r}")
    if len(set(axis_names)) != len(axis_names) or not axis_names:
        raise ValueError(f"axis_name must name each axis once, got {axis_names}")
    others = [a for a in mesh.axis_names if a not in axis_names]
    order = [mesh.axis_names.index(a) for a in (*others, *axis_names)]
    num_ranks = math.prod(mesh.shape[a] for a in axis_names)
    devices = list(np.transpose(mesh.devices, order).reshape(-1))
    return devices, len(devices) // num_ranks, num_ranks


def _member(device: jax.Device, group: int, rank: int) -> symmetric.Member:
    if device.platform not in ("cpu", "gpu"):
        raise ValueError(f"rings run on CPU and CUDA devices, got {device}")
    # XLA's device ordinal is the global id on CPUs and the local one on GPUs.
    ordinal = device.local_hardware_id if device.platform == "gpu" else device.id
    return symmetric.Member(ordinal, group, rank, device.process_index)


def _allocate(spec: RingSpec, mesh: Mesh | None) -> Ring:
    num_bytes = HANDLE_BYTES if spec.shared else ring_layout(spec.shape)["total"]
    devices = math.prod(size for _, size in spec.mesh_axes)
    sharding = None if mesh is None else NamedSharding(mesh, spec.partition)

    @functools.partial(jax.jit, out_shardings=sharding)
    def zeros() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((devices, num_bytes), jnp.uint8), jnp.zeros((devices, 1), jnp.float32)

    mem, token = zeros()
    return Ring(mem, token, spec)


# What make_ring does on all ranks before the next: something outside of jit, then something to the memory, in place,
# which also returns a mark that exists once that is done.
Setup = list[tuple[Callable[[], None], Callable[[jax.Array], tuple[jax.Array, jax.Array]]]]


def _setup(spec: RingSpec, mesh: Mesh | None, bootstrap: symmetric.Bootstrap) -> Setup:
    """The steps of make_ring behind the allocation; GPUs also learn where their peers lie."""

    def step(handler: str) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
        def run(mem: jax.Array) -> tuple[jax.Array, jax.Array]:
            mem = ffi.call(
                handler, ffi.like(mem, mem.shape, mem.dtype), mem, attributes={"ring": spec.name}, aliases={0: 0},
                side_effect=True,
            )  # fmt: skip
            return mem, ops.after((vary_together(jnp.zeros((1, 1), jnp.float32), mem),), (mem,))[0]

        if mesh is None:
            return run
        return jax.shard_map(run, mesh=mesh, in_specs=spec.partition, out_specs=spec.partition)

    nothing = lambda: None
    if spec.platform == "cpu":
        return [(nothing, step("register"))]
    if spec.num_ranks == 1:
        return [(nothing, step("register")), (nothing, step("connect"))]
    return [(bootstrap.settle, step("register")), (bootstrap.share_memory, step("connect"))]


def _register(ring: Ring, setup: Setup) -> Ring:
    mem = ring.mem
    for prepare, step in setup:
        prepare()
        mem, _ = jax.block_until_ready(jax.jit(step, donate_argnums=0)(mem))
    return Ring(mem, ring.token, ring.spec)


def _register_ref(ring: Ring, setup: Setup) -> RingRef:
    # new_ref copies, so the address is registered from inside.
    ref = RingRef(jax.new_ref(ring.mem), ring.spec)
    for prepare, step in setup:
        prepare()

        def store(ref: Any, step: Callable[..., tuple[jax.Array, jax.Array]] = step) -> jax.Array:
            ref[...], mark = step(ref[...])
            return mark

        jax.block_until_ready(jax.jit(store)(ref.mem))  # effects_barrier() does not wait for what is in a Ref
    return ref
