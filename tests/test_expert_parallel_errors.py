"""What `expert_parallel` and the per-rank calls refuse on a mesh, and the words they use.

Every message is compared as text: it names the argument, what was wanted and what was given.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_streammoe as sm
from tests.helpers import oracle, ranks
from tests.helpers.meshes import mesh_of, problem_of, ring_of


@pytest.mark.core
def test_what_is_wrong_is_said(rng):
    problem = problem_of(rng)
    config, mesh = problem.config, mesh_of({"ep": 4})
    make = functools.partial(sm.expert_parallel, config)
    errors = [
        (lambda: make(mesh=mesh, axis_name="expert"), "axis_name must be an axis of the mesh ('ep',), got 'expert'"),
        (lambda: make(mesh=mesh_of({"ep": 3})), "num_experts must be a multiple of num_ranks = 3, got 8"),
        (lambda: make(mesh=mesh, transport="push"), "transport must be one of pull, xla, got 'push'"),
    ]
    ep, xla = make(mesh=mesh), make(mesh=mesh, transport="xla")
    ring, alien = ring_of(ep), ring_of(make(mesh=mesh_of({"ep": 2})))
    x, ids, weights, *experts = problem.args
    call = lambda ep=ep, x=x, ids=ids, weights=weights, **more: ep.moe(x, ids, weights, *experts, **more)
    odd = (x[:22], ids[:22], weights[:22])
    errors += [
        (lambda: call(ep, *odd), "x: dimension 0 of (22, 16) must be a multiple of 4, mesh axes ('ep',)"),
        (lambda: call(num_valid=jnp.int32(3)), "num_valid must be int32 of shape (4,), one count per token shard"),
        (lambda: call(xla, ring=ring), 'ep.moe: transport "xla" uses no ring, got one; pass ring=None'),
        (lambda: call(ring=ring.mem), "ring must come from make_ring, got"),
        (lambda: call(ring=alien), "was made for axis_name ('ep',) of mesh {'ep': 2}, got ('ep',) of {'ep': 4}"),
        (
            lambda: jax.shard_map(lambda x: call(x=x)[0], mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))(x),
            "ep.moe takes global arrays and is called outside of shard_map, got manual axes ('ep',); inside, use "
            "stream_moe",
        ),
    ]
    with ring, alien:
        for wrong, text in errors:
            with pytest.raises((ValueError, TypeError), match=re.escape(text)):
                wrong()


def test_a_ring_of_a_mesh_outside_of_shard_map_is_refused(rng):
    problem = problem_of(rng)
    ep = sm.expert_parallel(problem.config, mesh=mesh_of({"ep": 4}))
    with (
        ring_of(ep) as ring,
        pytest.raises(ValueError, match=re.escape("belongs inside jax.shard_map over all of them")),
    ):
        sm.stream_moe(
            problem.x, ranks.given, *problem.args[3:], ring=ring, config=problem.config, token_args=problem.args[1:3]
        )


@pytest.mark.parametrize("call", ["moe", "stream_moe"])
def test_partial_manual_is_refused(rng, call):
    problem = problem_of(rng)
    mesh = mesh_of({"data": 2, "ep": 2})

    def rank(x, ids, weights):
        if call == "moe":
            return sm.moe(x, ids, weights, *problem.args[3:], config=problem.config)
        return sm.stream_moe(x, ranks.given, *problem.args[3:], config=problem.config, token_args=(ids, weights))[0]

    layer = jax.shard_map(rank, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), axis_names={"ep"})
    with pytest.raises(ValueError, match=re.escape("('ep',)")) as error:
        jax.jit(layer)(*problem.args[:3])
    assert call in str(error.value) and "('data',)" in str(error.value)


BAD_ROUTES = {
    "ids of another K": (
        lambda ids, w: (ids[:, :1], w),
        r"topk_ids must be int32 of shape \(16, 2\), got int32 \(16, 1\)",
    ),
    "ids of fewer tokens": (
        lambda ids, w: (ids[:8], w),
        r"topk_ids must be int32 of shape \(16, 2\), got int32 \(8, 2\)",
    ),
    "float ids": (lambda ids, w: (ids.astype(np.float32), w), r"topk_ids must be int32 of shape"),
    "narrow ids": (lambda ids, w: (ids.astype(np.int8), w), r"topk_ids must be int32 of shape"),
    "weights of fewer tokens": (lambda ids, w: (ids, w[:8]), r"topk_weights must be float32 or bfloat16 of shape"),
}


@pytest.mark.parametrize("with_ring", [False, True])
@pytest.mark.parametrize("case", BAD_ROUTES)
def test_routes_that_do_not_fit_the_tokens(rng, case, with_ring):
    problem = oracle.make_problem(rng, T=16, H=32, I=16, E=4, K=2, dtype=jnp.float32)
    change, text = BAD_ROUTES[case]
    ids, weights = change(np.asarray(problem.topk_ids), np.asarray(problem.topk_weights))
    mesh = mesh_of({"ep": 2})
    ep = sm.expert_parallel(problem.config, mesh=mesh)
    ring = (
        sm.make_ring(problem.config, chunk_tokens=8, num_slots=1, mesh=mesh, name="bad-routes") if with_ring else None
    )
    with pytest.raises((ValueError, TypeError), match=text):
        jax.jit(lambda ring: ep.moe(problem.x, ids, weights, problem.w_gate_up, problem.w_down, ring=ring))(ring)
    sm.close_ring("bad-routes")


def test_expert_parallel_arguments():
    config, mesh = sm.MoEConfig(4, 2, 32, 16), mesh_of({"ep": 2})
    with pytest.raises(TypeError, match="config must be an MoEConfig, got NoneType"):
        sm.expert_parallel(None, mesh=mesh)
    with pytest.raises(ValueError, match=r"token_spec must name axes of the mesh \('ep',\), got 'zz'"):
        sm.expert_parallel(config, mesh=mesh, token_spec=P("zz"))
    with pytest.raises(ValueError, match=r"mesh must be given, or set with jax\.set_mesh"):
        sm.expert_parallel(config)
