"""Meshes of any axes, a problem small enough for all of them, and rings on them: for the tests of `expert_parallel`.

Contract: sizes are those of the problem; every ring gets a name of its own in this process.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

import jax_streammoe as sm
from tests.helpers import oracle

H, I, E, K = 16, 24, 8, 2
names = (f"ep-{n}" for n in itertools.count())


def mesh_of(axes, axis_type=AxisType.Auto):
    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))]).reshape(*axes.values())
    return Mesh(devices, tuple(axes), axis_types=(axis_type,) * len(axes))


def problem_of(rng, T=24, **options):
    return oracle.make_problem(rng, T=T, H=H, I=I, E=E, K=K, **({"dtype": jnp.float32, "block_m": 8} | options))


def ring_of(ep, name=None, **options):
    sizes = {"chunk_tokens": 4, "num_slots": 2, "timeout_s": 20} | options
    return sm.make_ring(ep.config, mesh=ep.mesh, axis_name=ep.axis_names, name=name or next(names), **sizes)
