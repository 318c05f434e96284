"""Training and evaluation: one jitted step that donates parameters, optimiser state and ring.

Contract: `Trainer` owns what is donated and replaces it at every step. Every step waits for its loss, so that no
launches pile up (XLA's CPU backend stalls with dozens of collectives in flight).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..ring import Ring, make_ring
from ..sharding import ExpertParallel, expert_parallel
from . import model


class Trainer:
    """The model on `num_devices` ranks, with its optimiser and ring."""

    def __init__(self, num_devices: int, num_steps: int, seed: int = 0):
        devices = np.array(jax.devices()[:num_devices])
        self.mesh = Mesh(devices, ("ep",), axis_types=(AxisType.Auto,))
        self.ep = expert_parallel(model.CONFIG, mesh=self.mesh)
        tokens = model.SEQUENCES * model.LENGTH // num_devices
        self.ring: Any = make_ring(
            model.CONFIG, chunk_tokens=tokens // model.CHUNKS, num_slots=model.CHUNKS, mesh=self.mesh, name="demo"
        )
        rate = optax.warmup_cosine_decay_schedule(3e-4, 4e-3, max(1, num_steps // 20), max(2, num_steps), 4e-4)
        self.optimiser = optax.adam(rate, b2=0.98)
        params = model.init_params(jax.random.key(seed))
        self.params = model.place(params, self.mesh)
        self.state = model.place(self.optimiser.init(params), self.mesh)
        self._batch_sharding = NamedSharding(self.mesh, P("ep"))
        shardings = jax.tree.map(lambda a: a.sharding, (self.params, self.state))
        self._step = jax.jit(
            functools.partial(_step, self.ep, self.optimiser), donate_argnums=(0, 1, 3),
            out_shardings=(*shardings, None, None),
        )  # fmt: skip
        self._evaluate = jax.jit(functools.partial(_evaluate, self.ep), donate_argnums=2)

    def put(self, batch: np.ndarray) -> jax.Array:
        """A batch with its sequences split over the ranks."""
        return jax.device_put(batch, self._batch_sharding)

    def step(self, batch: np.ndarray) -> float:
        """One step; returns the batch's loss before it, in bits per byte."""
        self.params, self.state, bits, self.ring = self._step(self.params, self.state, self.put(batch), self.ring)
        return float(bits)

    def evaluate(self, batches: Iterable[np.ndarray]) -> tuple[float, np.ndarray]:
        """Mean loss in bits per byte, and rows computed per expert [E]."""
        losses, rows = [], np.zeros(model.CONFIG.num_experts, np.int64)
        for batch in batches:
            bits, expert_rows, self.ring = self._evaluate(self.params, self.put(batch), self.ring)
            losses.append(float(bits))
            rows += np.array(expert_rows)
        return float(np.mean(losses)), rows

    def call(self, function: Callable[..., tuple], *args: Any) -> tuple:
        """Runs a jitted `function(*args, ring) -> (*out, ring)` that donates the ring; returns out."""
        *out, self.ring = jax.block_until_ready(function(*args, self.ring))
        return tuple(out)


def _step(
    ep: ExpertParallel, optimiser: Any, params: model.Params, state: Any, batch: jax.Array, ring: Ring
) -> tuple[model.Params, Any, jax.Array, Any]:
    value_and_grad = jax.value_and_grad(model.loss, has_aux=True)
    (_, (bits, ring, _)), gradients = value_and_grad(params, batch, ring, ep)
    updates, state = optimiser.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, bits, ring


def _evaluate(ep: ExpertParallel, params: model.Params, batch: jax.Array, ring: Ring) -> tuple:
    _, (bits, ring, info) = model.loss(params, batch, ring, ep)
    assert info.stats is not None
    return bits, info.stats.expert_rows.astype(jnp.int32), ring
