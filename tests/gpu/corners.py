"""What the tests of corners on CUDA share: one shape, so that one program per way in serves many tests, and checks.

Contract: y is compared with the oracle as everywhere. Gradients are values here, because some of them are plain JAX's
(float32, many experts, ranks): `assert_near` compares them, and `check_all` a whole result, within roundings. The bits
of the kernels' gradients are compared in test_backward.py.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from tests.helpers import oracle
from tests.helpers.layers import assert_same_bits, run

T, E, K = 22, 6, 3
SHAPE = dict(T=T, H=40, I=24, E=E, K=K, use_bias=True)
BF16 = SHAPE | dict(dtype=jnp.bfloat16)
F32 = SHAPE | dict(dtype=jnp.float32)
EXPERTS = ("w_gate_up", "w_down", "b_gate_up", "b_down")


def assert_near(name, got, want, config):
    """Equal but for roundings to the dtype, in the mean square.

    In plain JAX d_x passes through 4 + K: w * dy, the sum over equal ids, da, its product with gate or up, their sum,
    and K - 1 sums over experts; the others pass through fewer. Each has a standard deviation near u/2. The mean square
    is the stricter measure: a single element may be the small difference of large terms, but one wrong element among
    thousands shows.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    finite = np.isfinite(want)
    assert got.shape == want.shape and np.array_equal(np.isfinite(got), finite), name
    error, size = np.linalg.norm((got - want)[finite]), np.linalg.norm(want[finite])
    bound = np.sqrt(4 + K) / 2 * oracle.UNIT_ROUNDOFF[config.dtype.name] * size
    assert error <= bound, f"{name}: error {error:.3g} > {bound:.3g}, of values of size {size:.3g}"


def check_all(how, problem, num_valid=None):
    """As `layers.check`, with gradients compared as plain JAX in this dtype can be."""
    result = run(how, problem, num_valid=num_valid)
    config, ids = problem.config, problem.topk_ids
    oracle.assert_close("y", result.y, oracle.forward(problem, num_valid), config.dtype, 64 + ids.size)
    for name, want in oracle.backward(problem, num_valid).items():
        assert_near(f"d_{name}", result.grads[name], want, config)
    kept = oracle.kept_routes(problem, num_valid)
    valid = np.where(np.arange(len(ids))[:, None] < (len(ids) if num_valid is None else num_valid), ids, -1)
    in_range = (valid >= 0) & (valid < E)
    np.testing.assert_array_equal(result.stats.expert_rows, np.bincount(ids[kept], minlength=E))
    counts = [int(c) for c in result.stats[1:]]
    assert counts == [(in_range & ~kept).sum(), (~in_range & (valid != -1)).sum(), (valid == -1).sum()]
    return result


def assert_zero(array):
    """+0 in every element."""
    assert_same_bits(array, np.zeros_like(array))
