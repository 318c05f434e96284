"""Training runs of examples/train_moe_lm.py in this process, for tests that compare loss curves.

Contract: a run is a function of settings, layer and number of ranks; its batches, and its losses but for rounding, are
one of the settings alone. Runs are kept, so that what others are compared with is trained once.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jax_streammoe.demo import data
from tests.helpers import examples

example = examples.load("train_moe_lm.py")


def trainer_of(settings: Any, layer: str, num_ranks: int, num_steps: int) -> Any:
    """A trainer whose batches have `settings.sequences` sequences over all ranks."""
    here = settings.sequences // num_ranks
    settings = dataclasses.replace(settings, sequences=here, chunks=min(settings.chunks, here))
    mesh = Mesh(np.array(jax.devices()[:num_ranks]), ("ep",), axis_types=(AxisType.Auto,))
    return example.Trainer(settings, mesh, num_steps, layer, ring_name=f"training-{layer}-{num_ranks}")


@functools.cache
def text() -> np.ndarray:
    return data.split(data.load_text(None)[1])[0]


@functools.cache
def curve(settings: Any, layer: str, num_ranks: int, num_steps: int) -> np.ndarray:
    """The losses of all steps."""
    with jax.numpy_dtype_promotion("standard"):  # optax mixes ints and floats
        trainer = trainer_of(settings, layer, num_ranks, num_steps)
        try:
            steps = zip(range(num_steps), trainer.batches(text()), strict=False)
            losses = [trainer.step(batch) for _, batch in steps]
        finally:
            trainer.close()
    return np.array(losses)
