"""An independent float64 oracle of the expert layer: a NumPy loop over experts, forward and hand-written backward.

Contract: nothing here imports the library's numerics; only `MoEConfig` is read. The oracle rounds nowhere unasked, so
an error measured against it is the whole error of what is tested. Problems are scaled so that |y| is near 1
and a zero result fails. Trade-off: sums run in whatever order BLAS has, 2^-53 of a term away from any other.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_streammoe.config import MoEConfig

F64 = np.float64
UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


# Every activation, with and without a clamp where it takes one: (name, limit).
ACTIVATIONS = [
    ("swiglu", None),
    ("swiglu", 0.7),
    ("swigluoai", None),
    ("swigluoai", 0.7),
    ("geglu", None),
    ("silu", None),
    ("gelu", None),
    ("relu2", None),
]


@dataclasses.dataclass
class Problem:
    """One call's arrays in the dtypes the library takes, and the cotangent `dy`."""

    config: MoEConfig
    x: np.ndarray
    topk_ids: np.ndarray
    topk_weights: np.ndarray
    w_gate_up: np.ndarray
    w_down: np.ndarray
    b_gate_up: np.ndarray | None
    b_down: np.ndarray | None
    dy: np.ndarray

    @property
    def args(self) -> tuple[np.ndarray, ...]:
        """The positional arguments of `moe` and `reference`."""
        return self.x, self.topk_ids, self.topk_weights, self.w_gate_up, self.w_down

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of `moe` and `reference`."""
        return {"config": self.config, "b_gate_up": self.b_gate_up, "b_down": self.b_down}

    def replace(self, **changes: Any) -> Problem:
        """A copy with other fields."""
        return dataclasses.replace(self, **changes)


def make_problem(
    rng: np.random.Generator,
    *,
    T: int,
    H: int,
    I: int,
    E: int,
    K: int,
    masked: float = 0.0,
    invalid: float = 0.0,
    duplicates: bool = False,
    ids: Any = None,
    **config: Any,
) -> Problem:
    """Draws a problem with y and dy near 1.

    `masked` and `invalid` are the shares of routes set to -1 and to ids outside -1..E-1; `duplicates` draws
    the K ids of a token independently, as does K > E; `ids` fixes them. Other keywords go to `MoEConfig`.
    """
    cfg = MoEConfig(E, K, H, I, **config)
    if ids is None:
        if duplicates or K > E:
            ids = rng.integers(0, E, (T, K))
        else:
            ids = np.argsort(rng.random((T, E)), axis=1)[:, :K]
        ids = np.where(rng.random((T, K)) < masked, -1, ids)
        wrong = rng.choice([-2, E, E + 7, 2**31 - 1, -(2**31)], (T, K))
        ids = np.where(rng.random((T, K)) < invalid, wrong, ids)
    weights = rng.random((T, K)) + 0.25
    weights *= rng.choice([-1.0, 1.0], (T, K)) / np.sqrt((weights**2).sum(1, keepdims=True))
    w_gate_up = rng.standard_normal((E, H, cfg.gate_up_width)) / math.sqrt(H)
    b_gate_up = 0.3 * rng.standard_normal((E, cfg.gate_up_width)) if cfg.use_bias else None
    b_down = 0.3 * rng.standard_normal((E, H)) if cfg.use_bias else None
    sample = activate(cfg, rng.standard_normal(4096), rng.standard_normal(4096))
    w_down = rng.standard_normal((E, I, H)) / (math.sqrt(I) * np.sqrt(np.mean(sample**2)))

    def cast(a: np.ndarray | None) -> Any:
        return None if a is None else a.astype(cfg.dtype)

    x, dy = rng.standard_normal((T, H)), rng.standard_normal((T, H))
    return Problem(
        cfg, cast(x), np.asarray(ids, np.int32), weights.astype(np.float32), cast(w_gate_up), cast(w_down),
        cast(b_gate_up), cast(b_down), cast(dy),
    )  # fmt: skip


def activate(config: MoEConfig, gate: np.ndarray, up: np.ndarray | None) -> np.ndarray:
    """act(gate, up) in float64."""
    return _activation(config, gate, up)[0]


def kept_routes(problem: Problem, num_valid: int | None = None) -> np.ndarray:
    """bool [T, K]: the routes that count, after masking, range, num_valid and capacity (lowest token, then
    k)."""
    ids, experts = problem.topk_ids, problem.config.num_experts
    kept = np.zeros(ids.shape, bool)
    used = [0] * experts
    for t in range(ids.shape[0] if num_valid is None else min(num_valid, ids.shape[0])):
        for k in range(ids.shape[1]):
            e = int(ids[t, k])
            if 0 <= e < experts and (problem.config.capacity is None or used[e] < problem.config.capacity):
                kept[t, k] = True
                used[e] += 1
    return kept


def forward(problem: Problem, num_valid: int | None = None) -> np.ndarray:
    """y [T, H] in float64."""
    return _run(problem, num_valid, None, False)[0]


def backward(problem: Problem, num_valid: int | None = None, *, kept: bool = False) -> dict[str, np.ndarray]:
    """Cotangents in float64: x, topk_weights, w_gate_up, w_down, and with biases b_gate_up, b_down.

    kept: those of a layer that keeps what enters its activation in its dtype, and so rounds it.
    """
    return _run(problem, num_valid, problem.dy.astype(F64), kept)[1]


def error_bound(dtype: Any, depth: int) -> float:
    """The largest error expected, as a multiple of rms(want) + |want|.

    Roundings are independent, with standard deviation near half the unit roundoff u (Higham and Mary 2019).
    A value passes at most five to the dtype (three forward, the cotangent and the gradient), hence
    sqrt(5)/2 * u, and float32 chains of `depth` terms, hence sqrt(depth)/2 * u32, plus some for exp and tanh.
    Six standard deviations bound the maximum over many millions of elements.
    """
    u, u32 = UNIT_ROUNDOFF[np.dtype(dtype).name], UNIT_ROUNDOFF["float32"]
    return 6.0 * (math.sqrt(5) / 2 * u + (4.0 + math.sqrt(depth)) / 2 * u32)


def assert_close(name: str, got: Any, want: np.ndarray, dtype: Any, depth: int) -> None:
    """Compares all elements with `error_bound`; reports the largest error; NaN and infinity must be where
    wanted.

    A zero result fails unless `want` is exactly zero everywhere, and then only zero passes.
    """
    got = np.asarray(got).astype(F64)
    assert got.shape == want.shape, f"{name}: shape {got.shape}, want {want.shape}"
    finite = np.isfinite(want)
    assert np.array_equal(np.isfinite(got), finite), (
        f"{name}: {np.sum(np.isfinite(got) != finite)} elements are finite on one side only"
    )
    got, want = got[finite], want[finite]
    if want.size == 0:
        return
    nonzero = want[want != 0]
    if nonzero.size == 0:
        assert not got.any(), f"{name}: want exactly 0 everywhere, got up to {np.abs(got).max():.3g}"
        return
    assert got.any(), f"{name}: all zero, want values up to {np.abs(want).max():.3g}"
    rms = float(np.sqrt(np.mean(nonzero**2)))
    error = np.abs(got - want) / (rms + np.abs(want))
    worst, bound = int(error.argmax()), error_bound(dtype, depth)
    assert error[worst] <= bound, (
        f"{name}: max error {error[worst]:.3g} > bound {bound:.3g} at flat index {worst} of {error.size}: "
        f"got {got[worst]:.6g}, want {want[worst]:.6g} (rms {rms:.3g})"
    )


def _run(
    p: Problem, num_valid: int | None, dy: np.ndarray | None, kept_pre: bool
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    cfg, half = p.config, p.config.intermediate
    x, weights, w1, w2 = (a.astype(F64) for a in (p.x, p.topk_weights, p.w_gate_up, p.w_down))
    b1 = np.zeros(w1.shape[::2]) if p.b_gate_up is None else p.b_gate_up.astype(F64)
    b2 = np.zeros(w2.shape[::2]) if p.b_down is None else p.b_down.astype(F64)
    y, dx, dweights = np.zeros_like(x), np.zeros_like(x), np.zeros_like(weights)
    dw1, dw2, db1, db2 = (np.zeros_like(a) for a in (w1, w2, b1, b2))
    kept = kept_routes(p, num_valid)
    for e in range(cfg.num_experts):
        t, k = np.nonzero(kept & (p.topk_ids == e))
        pre = x[t] @ w1[e] + b1[e]
        if kept_pre:
            if cfg.dtype == np.float16:
                pre = np.clip(pre, -65504, 65504)
            pre = pre.astype(cfg.dtype).astype(F64)
        a, da_dgate, da_dup = _activation(cfg, pre[:, :half], pre[:, half:] if cfg.is_gated else None)
        rows, weight = a @ w2[e] + b2[e], weights[t, k, None]
        np.add.at(y, t, weight * rows)
        if dy is None:
            continue
        dweights[t, k] = np.sum(dy[t] * rows, axis=1)
        drows = weight * dy[t]
        da = drows @ w2[e].T
        dpre = np.concatenate([da * da_dgate, da * da_dup], axis=1) if cfg.is_gated else da * da_dgate
        db2[e], dw2[e] = drows.sum(0), a.T @ drows
        db1[e], dw1[e] = dpre.sum(0), x[t].T @ dpre
        np.add.at(dx, t, dpre @ w1[e].T)
    grads = {"x": dx, "topk_weights": dweights, "w_gate_up": dw1, "w_down": dw2}
    if cfg.use_bias:
        grads |= {"b_gate_up": db1, "b_down": db2}
    return y, grads


def _activation(config: MoEConfig, gate: Any, up: Any) -> tuple[Any, Any, Any]:
    """(act, d act / d gate, d act / d up) in float64."""
    kind, inside_gate, inside_up = config.activation, 1.0, 1.0
    gate = np.asarray(gate, F64)
    if config.limit is not None:
        limit = config.limit
        inside_gate, inside_up = (gate <= limit).astype(F64), (np.abs(up) <= limit).astype(F64)
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    if kind == "relu2":
        return np.maximum(gate, 0) ** 2, 2 * np.maximum(gate, 0), None
    if kind in ("silu", "swiglu"):
        base, slope = _silu(gate, 1.0)
    elif kind == "swigluoai":
        base, slope = _silu(gate, 1.702)
        up = up + 1
    else:
        base, slope = _gelu(gate)
    if not config.is_gated:
        return base, slope, None
    return base * up, slope * up * inside_gate, base * inside_up


def _silu(g: np.ndarray, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    s = 0.5 * (1 + np.tanh(0.5 * alpha * g))
    return g * s, s * (1 + alpha * g * (1 - s))


def _gelu(g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    c = math.sqrt(2 / math.pi)
    th = np.tanh(c * (g + 0.044715 * g**3))
    return 0.5 * g * (1 + th), 0.5 * (1 + th) + 0.5 * g * (1 - th**2) * c * (1 + 3 * 0.044715 * g**2)


def as_jax(problem: Problem) -> Problem:
    """The problem with its arrays on JAX's default device."""
    arrays = {f.name: getattr(problem, f.name) for f in dataclasses.fields(problem) if f.name != "config"}
    return dataclasses.replace(problem, **{n: None if a is None else jnp.asarray(a) for n, a in arrays.items()})
