"""What the stream tests share: small sizes, the batch-ready call to compare with, and gradients against the oracle."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jax_streammoe as sm
from tests.helpers import oracle

SIZES = dict(H=16, I=8, E=4, K=2, dtype=jnp.float32, block_m=8)
GRADIENTS = ("x", "topk_weights", "w_gate_up", "w_down")


def batch(p, **options):
    return jax.jit(functools.partial(sm.moe, **p.kwargs, **options))(*p.args)


def assert_gradients(p, gradients, num_valid=None):
    want = oracle.backward(p, num_valid)
    for name, gradient in zip(GRADIENTS, gradients, strict=True):
        oracle.assert_close(name, gradient, want[name], p.config.dtype, p.x.shape[0] * p.config.top_k + 32)


def gradients_of(call, p, ring):
    """Gradients of <y, dy> with respect to x, weights and experts, and the ring; `call(p, ring) -> y, ring`."""

    @functools.partial(jax.jit, donate_argnums=1)
    def gradients(args, ring):
        def loss(args):
            y, used = call(p.replace(**dict(zip(GRADIENTS, args, strict=True))), ring)
            return jnp.vdot(y, p.dy), used

        return jax.grad(loss, has_aux=True)(args)

    return gradients(tuple(jnp.asarray(getattr(p, name)) for name in GRADIENTS), ring)
