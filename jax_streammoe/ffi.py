"""FFI targets: registration, the version guard, and the one place where attributes get their exact types.

Contract: importing this module registers the CPU handlers and runs no JAX operation. Handlers are built on the FFI
headers of jaxlib 0.10 (API 0.3); a library built on newer headers than the running jaxlib's would take the CPU backend
down, so the versions are compared before anything is registered. Sizes travel as int64, codes and flags as int32,
because Python ints would arrive as whatever JAX thinks best. Target names carry a version: they are written into
exported programs.
"""

from __future__ import annotations

import ctypes
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import lax

from .config import MoEConfig
from .waves import ChunkPlan

VERSION = "v1"
NUM_WEIGHTS = 6  # gate, up, down, b_gate, b_up, b_down: the operand order of every handler


def _load() -> Any:
    # The wheel that carries OpenBLAS may lie in another site folder than this library: loading it by path first
    # lets the dynamic linker find it under its name.
    import scipy_openblas32

    library = pathlib.Path(scipy_openblas32.get_lib_dir()) / "libscipy_openblas.so"
    if library.exists():
        ctypes.CDLL(str(library))
    try:
        import _jax_streammoe
    except ImportError as error:
        raise ImportError(
            f"jax_streammoe's compiled module cannot be loaded ({error}); install the library with `pip install .` "
            "from its checkout"
        ) from error
    return _jax_streammoe


def runtime_ffi_version() -> tuple[int, int]:
    """Returns (major, minor) of the FFI API that the running jaxlib was built with."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    text = header.read_text()
    major, minor = (re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR"))
    if major is None or minor is None:
        raise ImportError(f"jax_streammoe cannot read the FFI version of jaxlib in {header}")
    return int(major.group(1)), int(minor.group(1))


def check_ffi_version(built: tuple[int, int], runtime: tuple[int, int]) -> None:
    """Raises ImportError when handlers built on FFI `built` must not be registered with a `runtime` jaxlib."""
    if built[0] != runtime[0] or built[1] > runtime[1]:
        raise ImportError(
            f"jax_streammoe was built on XLA FFI {built[0]}.{built[1]}, jaxlib {jaxlib.__version__} has "
            f"{runtime[0]}.{runtime[1]}: registering its handlers would break the CPU backend. Rebuild it with "
            "jaxlib==0.10.2 as the build requirement, which `pip install .` does"
        )


compiled = _load()
check_ffi_version(tuple(compiled.FFI_API_VERSION), runtime_ffi_version())


def target(name: str) -> str:
    """Returns the registered target name of a handler, e.g. `streammoe_forward_v1`."""
    return f"streammoe_{name}_{VERSION}"


for _name, _capsule in compiled.cpu_handlers().items():
    jax.ffi.register_ffi_target(target(_name), _capsule, platform="cpu")
for _name, _stages in compiled.cuda_handlers().items():
    jax.ffi.register_ffi_target(target(_name), _stages, platform="CUDA")


def problem_attributes(config: MoEConfig, *, num_local_experts: int, threads: int) -> dict[str, Any]:
    """Returns the attributes that `read_problem` in cc/ffi/decode.cc reads."""
    return {
        "num_experts": np.int64(num_local_experts),
        "hidden": np.int64(config.hidden),
        "intermediate": np.int64(config.intermediate),
        "top_k": np.int64(config.top_k),
        "dtype": np.int32(config.dtype_code),
        "activation": np.int32(config.activation_code),
        "limit": np.float32(np.inf if config.limit is None else config.limit),
        "block_m": np.int64(config.block_m),
        "threads": np.int32(threads or compiled.default_threads()),
        "capacity": np.int64(-1 if config.capacity is None else config.capacity),
    }


def call_attributes(
    plan: ChunkPlan, *, num_tokens: int, min_carry_rows: int, packed: bool, overlap: bool, checks: bool,
    producer_sms: int,
) -> dict[str, Any]:  # fmt: skip
    """Returns the attributes that `read_call` in cc/ffi/decode.cc reads beside the problem's."""
    return {
        "num_tokens": np.int64(num_tokens),
        "chunk_tokens": np.int64(plan.chunk_tokens),
        "macro_tokens": np.int64(plan.macro_tokens),
        "num_chunks": np.int64(plan.num_chunks),
        "macro_ends": np.asarray(plan.macro_ends, np.int64),
        "wave_ends": np.asarray(plan.wave_ends, np.int64),
        "min_carry_rows": np.int64(min_carry_rows),
        "packed": np.int32(packed),
        "overlap": np.int32(overlap),
        "checks": np.int32(checks),
        "producer_sms": np.int32(producer_sms),
    }


def like(reference: jax.Array, shape: Sequence[int], dtype: Any) -> Any:
    """Returns a result descriptor that varies over the mesh axes `reference` varies over."""
    return jax.typeof(reference).update(shape=tuple(shape), dtype=np.dtype(dtype))


def call(
    name: str, results: Any, *operands: jax.Array, attributes: dict[str, Any], aliases: dict[int, int] | None = None,
    side_effect: bool = False,
) -> Any:  # fmt: skip
    """Calls handler `name`; `aliases` maps operands to the results that share their memory.

    The barrier keeps XLA:GPU from folding an update of a larger array (the stacked results of a scan) into the call: it
    would then make the call twice, or write a result elsewhere than its alias. XLA:CPU has no such fusion and drops it.
    """
    function = jax.ffi.ffi_call(
        target(name), results, has_side_effect=side_effect, input_output_aliases=aliases, vmap_method=None
    )
    return lax.optimization_barrier(function(*operands, **attributes))


def absent(reference: jax.Array) -> jax.Array:
    """Returns the operand that stands for an absent weight or bias: one element.

    Not an empty one: the partitioner of jaxlib 0.11 crashes on empty arrays that enter or leave a shard_map.
    """
    return jnp.zeros((1,), reference.dtype)
