"""What an expert layer is: sizes, activation and dtype, as one frozen hashable value.

Contract: an `MoEConfig` that exists is valid. It holds plain Python values and a NumPy dtype, so it can be a
static argument of `jax.jit`, metadata of a pytree and a dictionary key. Nothing here knows about ranks,
chunks or rings, except that `local_experts` divides. Trade-off: `top_k > num_experts` is accepted, because
explicit duplicate expert ids are legal; only `route_topk` refuses it.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import jax.numpy as jnp
import numpy as np

# Codes shared with cc/host/problem.h (enum DType, enum Activation).
DTYPE_CODES = {np.dtype(np.float32): 0, np.dtype(jnp.bfloat16): 1, np.dtype(np.float16): 2}
ACTIVATION_CODES = {"swiglu": 0, "swigluoai": 1, "geglu": 2, "silu": 3, "gelu": 4, "relu2": 5}
GATED_ACTIVATIONS = ("swiglu", "swigluoai", "geglu")
CLAMPED_ACTIVATIONS = ("swiglu", "swigluoai")
SWIGLUOAI_LIMIT = 7.0
SWIGLUOAI_ALPHA = 1.702


def as_int(name: str, value: Any) -> int:
    """Returns `value` as a Python int; raises TypeError naming `name` for bools, floats, arrays and
    tracers."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an int, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}") from None


def at_least(name: str, value: Any, minimum: int) -> int:
    """Returns `value` as a Python int of at least `minimum`; raises TypeError or ValueError naming `name`."""
    number = as_int(name, value)
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    return number


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Sizes, activation and dtype of one Mixture-of-Experts layer; frozen and hashable.

    `y[t] = sum_k topk_weights[t, k] * f_{topk_ids[t, k]}(x[t])`, with
    `f_e(x) = act(x @ w_gate_e (+ b), x @ w_up_e (+ b)) @ w_down_e (+ b)`; ungated activations have no up
    projection.

    Arguments:
      num_experts: E, experts over all ranks.
      top_k: K, routes per token; may exceed E when ids are explicit duplicates.
      hidden: H, width of a token, a multiple of 8.
      intermediate: I, width of an expert, a multiple of 8.
      activation: "swiglu", "swigluoai", "geglu" (gated); "silu", "gelu", "relu2" (ungated). GELU is the tanh
        form.
      dtype: of tokens, weights and outputs: float32, bfloat16 or float16. Stored as a NumPy dtype.
      limit: clamp of swiglu and swigluoai: gate <= limit, -limit <= up <= limit. None is no clamp for swiglu
        and 7.0 for swigluoai.
      use_bias: experts have `b_gate_up` and `b_down`.
      capacity: None is dropless; an int keeps that many rows per expert over all tokens of a call, lowest
        global token first.
      block_m: rows of every expert GEMM call, a multiple of 8 in 8..256. A row's bits may depend on it.

    Raises:
      TypeError: a size is not an int, or the dtype is not a dtype.
      ValueError: a value is outside the above; the text names it, what is wanted and what was given.
    """

    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    _: dataclasses.KW_ONLY
    activation: str = "swiglu"
    dtype: Any = jnp.bfloat16
    limit: float | None = None
    use_bias: bool = False
    capacity: int | None = None
    block_m: int = 128

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "hidden", "intermediate", "block_m"):
            self._store(name, at_least(name, getattr(self, name), 1))
        for name in ("hidden", "intermediate"):
            if getattr(self, name) % 8:
                raise ValueError(f"{name} must be a multiple of 8, got {getattr(self, name)}")
        if self.block_m % 8 or not 8 <= self.block_m <= 256:
            raise ValueError(f"block_m must be a multiple of 8 in 8..256, got {self.block_m}")
        if not isinstance(self.activation, str) or self.activation not in ACTIVATION_CODES:
            names = ", ".join(ACTIVATION_CODES)
            raise ValueError(f"activation must be one of {names}, got {self.activation!r}")
        self._store("dtype", _as_dtype(self.dtype))
        self._store("limit", self._checked_limit())
        if not isinstance(self.use_bias, (bool, np.bool_)):
            raise TypeError(f"use_bias must be a bool, got {self.use_bias!r}")
        self._store("use_bias", bool(self.use_bias))
        if self.capacity is not None:
            self._store("capacity", at_least("capacity", self.capacity, 0))

    def _store(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _checked_limit(self) -> float | None:
        if self.limit is None:
            return SWIGLUOAI_LIMIT if self.activation == "swigluoai" else None
        if self.activation not in CLAMPED_ACTIVATIONS:
            raise ValueError(f"limit is for swiglu and swigluoai only, got limit={self.limit} with {self.activation}")
        if isinstance(self.limit, (bool, np.bool_, str)):
            raise TypeError(f"limit must be a float or None, got {self.limit!r}")
        try:
            limit = float(self.limit)
        except (TypeError, ValueError):
            raise TypeError(f"limit must be a float or None, got {self.limit!r}") from None
        if not (limit > 0 and math.isfinite(limit)):
            raise ValueError(f"limit must be positive and finite, got {limit}")
        return limit

    @property
    def is_gated(self) -> bool:
        """Whether the activation reads both a gate and an up projection."""
        return self.activation in GATED_ACTIVATIONS

    @property
    def gate_up_width(self) -> int:
        """Columns of `w_gate_up`: 2*I (gate first, then up) when gated, I otherwise."""
        return (2 if self.is_gated else 1) * self.intermediate

    @property
    def itemsize(self) -> int:
        """Bytes of one element of `dtype`."""
        return int(self.dtype.itemsize)

    @property
    def dtype_code(self) -> int:
        """The value of the C++ enum `DType` for `dtype`."""
        return DTYPE_CODES[self.dtype]

    @property
    def activation_code(self) -> int:
        """The value of the C++ enum `Activation` for `activation`."""
        return ACTIVATION_CODES[self.activation]

    def local_experts(self, num_ranks: int) -> int:
        """Returns L = E / R, the experts of each of `num_ranks` ranks.

        Raises ValueError when `num_ranks` is not positive or does not divide `num_experts`.
        """
        ranks = at_least("num_ranks", num_ranks, 1)
        if self.num_experts % ranks:
            raise ValueError(f"num_experts must be a multiple of num_ranks = {ranks}, got {self.num_experts}")
        return self.num_experts // ranks


def _as_dtype(dtype: Any) -> np.dtype[Any]:
    try:
        if dtype is None or (hasattr(dtype, "shape") and not isinstance(dtype, (type, np.dtype))):
            raise TypeError  # NumPy would read None as float64, and take an array for its dtype
        result = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype must be float32, bfloat16 or float16, got {dtype!r}") from None
    if result not in DTYPE_CODES:
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {result.name}")
    return result
