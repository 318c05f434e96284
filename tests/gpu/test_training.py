"""Training in bfloat16: 200 steps through the kernels follow those through `sm.reference` in the same dtype.

The same rounding points, but other sums: a result that falls on the other side of one differs by 2^-8, and a token
whose experts score alike goes another way. So losses are compared as means over windows of 20 steps, 1,024 tokens each.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import jax_streammoe as sm
from tests.helpers.training import curve, example

pytestmark = pytest.mark.gpu

STEPS, WINDOW = 200, 20
# Relative, of a window's mean: of the first two and of all. On the CPU, in bfloat16: 4e-4 and 1e-2.
EARLY_BOUND, BOUND = 0.005, 0.03
CONFIG = sm.MoEConfig(num_experts=16, top_k=4, hidden=256, intermediate=128, dtype=jnp.bfloat16)
SETTINGS = example.Settings(CONFIG, num_layers=2, heads=4, length=64, sequences=16, rate=2e-3)


def check(layer, num_ranks):
    want, got = (curve(SETTINGS, how, n, STEPS) for how, n in (("reference", 1), (layer, num_ranks)))
    assert np.isfinite(got).all()
    want, got = (losses.reshape(-1, WINDOW).mean(1) for losses in (want, got))
    assert want[0] > 3.5 and want[-1] < 2.8, f"the reference did not learn: {want}"
    np.testing.assert_allclose(got[:2], want[:2], rtol=EARLY_BOUND)
    np.testing.assert_allclose(got, want, rtol=BOUND)


@pytest.mark.parametrize("layer", ["moe", "stream"])
def test_losses_follow_those_of_the_reference(layer):
    check(layer, 1)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("layer", ["moe", "stream"])
def test_losses_over_two_gpus_follow_those_of_the_reference(layer):
    check(layer, 2)
