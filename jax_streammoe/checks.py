"""Argument checks and error texts, in one place; each text names the argument, what is wanted and what was
given.

Contract: checks read shapes and dtypes only, so they work on tracers, cost nothing at run time and never
start a computation. A wrong dtype or kind is a TypeError, a wrong shape or value a ValueError. Values of ids
are never looked at here: out-of-range ids are masked routes by definition. Trade-off: the texts are long;
they are all a user sees of a fault whose cause may be far away.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .config import MoEConfig, as_int

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_FLOAT32, _BFLOAT16 = np.dtype(np.float32), np.dtype(jnp.bfloat16)

# Said by check_program before a run; cc/ffi/decode.cc says the same of a ring whose memory moved at run time.
RING_CAUSES = (
    "the ring was not donated (jax.jit(..., donate_argnames='ring')); it was donated but not returned; a "
    "closure captured it; it was copied (jax.tree.map, jnp.copy, pickle, a checkpoint restore, a NumPy or "
    "DLPack view that is still held); jax.checkpoint without sm.checkpoint_policy() saved it; it was used by "
    "two calls or belongs to another spec"
)
RING_REMEDY = "pass the ring on from call to call; after an error or a restore, make a new one with make_ring"
RING_PICKLE = (
    "a ring cannot be pickled or copied: its memory is known to peers by address. Leave it out of "
    "checkpoints and call make_ring after a restore"
)
RING_VMAP = "a ring is one linear resource: a stream cannot be vmapped. Use sm.moe, which folds the axis into tokens"
PARTIAL_MANUAL = (
    "{what} needs a shard_map that is manual over all mesh axes, got manual {manual} and not manual {rest}: "
    "operands would be gathered silently over {rest}"
)
NO_RESIDUALS = (
    "{what} is being differentiated, but this stream keeps no residuals: pass x=, topk_ids=, topk_weights= "
    "to close_stream, or lax.stop_gradient the operand"
)


def ring_misuse(name: str, problem: str) -> str:
    """Returns the text of a ring error: which ring, what is wrong, the possible causes, what to do."""
    return f"ring {name!r}: {problem}. Possible causes: {RING_CAUSES}. What to do: {RING_REMEDY}"


def not_published(num_chunks: int, routes: list[int], layouts: list[int]) -> str:
    """Returns the text for a stream closed too early, from the chunks published in each half."""
    missing = [n for n in range(num_chunks) if n not in routes or n not in layouts]
    return (
        f"close_stream: chunks {missing} of {num_chunks} were not published (route: {sorted(routes)}, "
        f"layout: {sorted(layouts)})"
    )


def describe(array: Any) -> str:
    """Returns `"float32 (8, 2)"` for an array or tracer, the type's name for anything else."""
    if not _is_array(array):
        return type(array).__name__
    return f"{np.dtype(array.dtype).name} {tuple(array.shape)}"


def is_int64(topk_ids: Any) -> bool:
    """Whether ids are int64 and must be range-checked before they are narrowed to int32."""
    return np.dtype(topk_ids.dtype) == _INT64


def check_config(config: Any) -> None:
    """Raises TypeError for a `config` that is no MoEConfig."""
    if not isinstance(config, MoEConfig):
        raise TypeError(f"config must be an MoEConfig, got {type(config).__name__}")


def check_tokens(x: Any, config: MoEConfig, name: str = "x") -> tuple[int, ...]:
    """Checks `x [..., H]` in the config's dtype; returns its leading dims."""
    wanted = f"{config.dtype.name} of shape (..., {config.hidden})"
    _check_dtype(name, x, (config.dtype,), wanted)
    if len(x.shape) < 1 or x.shape[-1] != config.hidden:
        raise ValueError(f"{name} must be {wanted}, got {describe(x)}")
    return tuple(x.shape[:-1])


def check_routes(topk_ids: Any, topk_weights: Any, config: MoEConfig, leading: tuple[int, ...]) -> None:
    """Checks ids int32 (or int64) and weights float32 (or bfloat16), both of shape `(*leading, K)`."""
    shape = (*leading, config.top_k)
    for name, array, dtypes, text in (
        ("topk_ids", topk_ids, (_INT32, _INT64), "int32"),
        ("topk_weights", topk_weights, (_FLOAT32, _BFLOAT16), "float32 or bfloat16"),
    ):
        wanted = f"{text} of shape {shape}"
        _check_dtype(name, array, dtypes, wanted)
        if tuple(array.shape) != shape:
            raise ValueError(f"{name} must be {wanted}, got {describe(array)}")


def check_weights(
    w_gate_up: Any, w_down: Any, b_gate_up: Any, b_down: Any, config: MoEConfig, num_local_experts: int
) -> None:
    """Checks expert weights and biases of `num_local_experts` experts, packed or split into (gate, up)."""
    experts, hidden, inner = num_local_experts, config.hidden, config.intermediate
    _check_gate_up("w_gate_up", ("w_gate", "w_up"), w_gate_up, (experts, hidden), config)
    _check_exact("w_down", w_down, (experts, inner, hidden), config)
    for name, bias in (("b_gate_up", b_gate_up), ("b_down", b_down)):
        if config.use_bias and bias is None:
            raise ValueError(f"{name} must be given when config.use_bias is True, got None")
        if not config.use_bias and bias is not None:
            got = "a tuple" if isinstance(bias, (tuple, list)) else describe(bias)
            raise ValueError(f"{name} must be None when config.use_bias is False, got {got}")
    if config.use_bias:
        _check_gate_up("b_gate_up", ("b_gate", "b_up"), b_gate_up, (experts,), config)
        _check_exact("b_down", b_down, (experts, hidden), config)


def check_moe_args(
    x: Any,
    topk_ids: Any,
    topk_weights: Any,
    w_gate_up: Any,
    w_down: Any,
    b_gate_up: Any,
    b_down: Any,
    config: MoEConfig,
    num_local_experts: int,
) -> None:
    """Checks every array of an expert-layer call by shape and dtype.

    x [..., H]; topk_ids, topk_weights [..., K] with the same leading dims; w_gate_up [L, H, 2I] or a pair of
    [L, H, I] (ungated: one [L, H, I]); w_down [L, I, H]; biases exactly when config.use_bias: b_gate_up [L,
    2I] or a pair of [L, I] (ungated: [L, I]), b_down [L, H]; L = `num_local_experts`.

    Raises: TypeError for a dtype or kind, ValueError for a shape or a missing bias.
    """
    check_config(config)
    leading = check_tokens(x, config)
    check_routes(topk_ids, topk_weights, config, leading)
    check_weights(w_gate_up, w_down, b_gate_up, b_down, config, num_local_experts)


def check_cotangent(dy: Any, x: Any, config: MoEConfig) -> None:
    """Checks `dy`, the cotangent of y: shape and dtype of the tokens x, which are checked already."""
    wanted = f"{config.dtype.name} of shape {tuple(x.shape)} like x"
    _check_dtype("dy", dy, (config.dtype,), wanted)
    if tuple(dy.shape) != tuple(x.shape):
        raise ValueError(f"dy must be {wanted}, got {describe(dy)}")


def check_accumulators(accumulators: Any, experts: dict[str, Any]) -> None:
    """Checks a dict of float32 arrays, or pairs, against the expert tensors of the same names (None: absent)."""
    experts = {name: tensor for name, tensor in experts.items() if tensor is not None}
    if not isinstance(accumulators, dict):
        raise TypeError(f"accumulators must be a dict of {', '.join(experts)}, got {type(accumulators).__name__}")
    if set(accumulators) != set(experts):
        raise ValueError(f"accumulators must be a dict of {', '.join(experts)}, got {', '.join(sorted(accumulators))}")
    for name, tensor in experts.items():
        name_, got = f"accumulators[{name!r}]", accumulators[name]
        if isinstance(tensor, (tuple, list)):
            if not isinstance(got, (tuple, list)) or len(got) != len(tensor):
                raise TypeError(f"{name_} must be a tuple of {len(tensor)} like {name}, got {type(got).__name__}")
        else:
            tensor, got = (tensor,), (got,)
        for part, array in zip(tensor, got, strict=True):
            wanted = f"float32 of shape {tuple(part.shape)} like {name}"
            _check_dtype(name_, array, (_FLOAT32,), wanted)
            if tuple(array.shape) != tuple(part.shape):
                raise ValueError(f"{name_} must be {wanted}, got {describe(array)}")


def check_per_token(name: str, tree: Any, leading: tuple[int, ...]) -> None:
    """Checks that every array of a pytree has one entry per token: its shape starts with `leading`."""
    for array in jax.tree.leaves(tree):
        if not _is_array(array) or tuple(array.shape[: len(leading)]) != tuple(leading):
            wanted = ", ".join(map(str, leading))
            raise ValueError(f"{name} must hold arrays of shape ({wanted}, ...), got {describe(array)}")


def check_num_valid(num_valid: Any) -> None:
    """Checks that `num_valid` is None, an int or an integer scalar array; raises TypeError otherwise."""
    if num_valid is None:
        return
    if not _is_array(num_valid):
        as_int("num_valid", num_valid)
    elif tuple(num_valid.shape) != () or np.dtype(num_valid.dtype).kind not in "iu":
        raise TypeError(f"num_valid must be an int or an integer scalar, got {describe(num_valid)}")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _check_dtype(name: str, array: Any, dtypes: tuple[Any, ...], wanted: str) -> None:
    if not _is_array(array) or array.dtype not in dtypes:
        raise TypeError(f"{name} must be {wanted}, got {describe(array)}")


def _check_exact(name: str, array: Any, shape: tuple[int, ...], config: MoEConfig) -> None:
    wanted = f"{config.dtype.name} of shape {shape}"
    _check_dtype(name, array, (config.dtype,), wanted)
    if tuple(array.shape) != shape:
        raise ValueError(f"{name} must be {wanted}, got {describe(array)}")


def _check_gate_up(name: str, names: tuple[str, str], packed: Any, leading: tuple[int, ...], config: MoEConfig) -> None:
    if not isinstance(packed, (tuple, list)):
        _check_exact(name, packed, (*leading, config.gate_up_width), config)
        return
    if not config.is_gated:
        raise ValueError(f"{name} must be one array for the ungated activation {config.activation}, got a tuple")
    if len(packed) != 2:
        raise ValueError(f"{name} must be one array or ({names[0]}, {names[1]}), got a tuple of {len(packed)}")
    for part, array in zip(names, packed, strict=True):
        _check_exact(part, array, (*leading, config.intermediate), config)
