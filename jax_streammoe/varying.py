"""Mesh axes: of a PartitionSpec, and those an array varies over inside jax.shard_map. A leaf: JAX only.

Contract: outside of shard_map, and with check_vma=False, every array varies over nothing and the casts do nothing.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P


def part_axes(part: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a PartitionSpec or of an `axis_name`: None, a name, or names."""
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def spec_axes(spec: P) -> tuple[str, ...]:
    """Returns all mesh axes of a PartitionSpec, in order."""
    return tuple(axis for part in spec for axis in part_axes(part))


def varying(array: Any) -> frozenset[str]:
    """Returns the mesh axes an array varies over, as `check_vma` tracks them; empty outside of shard_map."""
    return frozenset(jax.typeof(array).manual_axis_type.varying)


def vary_together(arrays: Any, *others: Any) -> Any:
    """Casts a pytree of arrays to vary over all axes that any of them, or of `others`, varies over.

    AD transposes the cast to a sum over the added axes, which is the gradient of a replicated weight.
    """
    axes = frozenset().union(*(varying(a) for a in jax.tree.leaves((arrays, others))))

    def cast(array: Any) -> Any:
        missing = tuple(sorted(axes - varying(array)))
        return lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(cast, arrays)
