"""`MoEConfig`: what it accepts, derives and refuses, and that it can be static, hashed and imported early."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_streammoe.config import ACTIVATION_CODES, DTYPE_CODES, MoEConfig

pytestmark = pytest.mark.core
ROOT = Path(__file__).parents[1]
PROBLEM_H = (ROOT / "cc/host/problem.h").read_text()


def make(*sizes, **options):
    return MoEConfig(*(sizes or (8, 2, 64, 32)), **options)


def test_defaults_and_derived_values():
    cfg = make()
    assert (cfg.num_experts, cfg.top_k, cfg.hidden, cfg.intermediate) == (8, 2, 64, 32)
    assert cfg.dtype == np.dtype(jnp.bfloat16) and cfg.itemsize == 2 and cfg.block_m == 128
    assert cfg.is_gated and cfg.gate_up_width == 64
    assert (cfg.limit, cfg.capacity, cfg.use_bias) == (None, None, False)
    ungated = make(activation="relu2", dtype="float32")
    assert not ungated.is_gated and ungated.gate_up_width == 32 and ungated.itemsize == 4


def test_equal_configs_are_one_static_argument():
    a, b = (
        make(dtype=jnp.float32, limit=7, activation="swigluoai"),
        make(dtype="float32", activation="swigluoai"),
    )
    assert a == b and hash(a) == hash(b) and len({a, b, make()}) == 2
    assert pickle.loads(pickle.dumps(a)) == a
    traces = []
    f = jax.jit(lambda x, cfg: traces.append(cfg) or x, static_argnums=1)
    f(jnp.ones(2), a)
    f(jnp.ones(2), b)
    assert len(traces) == 1
    with pytest.raises(AttributeError):
        a.top_k = 3


def test_numpy_ints_become_python_ints():
    cfg = MoEConfig(np.int64(8), np.int32(2), np.uint8(64), 32, capacity=np.int64(0), limit=np.float32(0.5))
    assert all(type(v) is int for v in (cfg.num_experts, cfg.top_k, cfg.hidden, cfg.capacity))
    assert type(cfg.limit) is float


@pytest.mark.parametrize("activation", ACTIVATION_CODES)
def test_limit_defaults(activation):
    assert make(activation=activation).limit == (7.0 if activation == "swigluoai" else None)


@pytest.mark.parametrize(("name", "code"), [("float32", 0), ("bfloat16", 1), ("float16", 2)])
def test_dtype_codes_match_the_header(name, code):
    member = {"float32": "kF32", "bfloat16": "kBF16", "float16": "kF16"}[name]
    assert make(dtype=name).dtype_code == code == _enum("DType")[member]
    assert len(DTYPE_CODES) == len(_enum("DType"))


@pytest.mark.parametrize("activation", ACTIVATION_CODES)
def test_activation_codes_match_the_header(activation):
    members = {name[1:].lower(): code for name, code in _enum("Activation").items()}
    assert make(activation=activation).activation_code == members[activation]
    assert len(ACTIVATION_CODES) == len(members)
    assert make(activation=activation).is_gated == (members[activation] <= members["geglu"])


def _enum(name):
    body = re.search(rf"enum class {name} : int32_t {{(.*?)}};", PROBLEM_H, re.DOTALL).group(1)
    return {member: int(code) for member, code in re.findall(r"(k\w+) = (\d+)", body)}


def test_local_experts():
    assert [make().local_experts(r) for r in (1, 2, 4, 8)] == [8, 4, 2, 1]
    with pytest.raises(ValueError, match=r"^num_experts must be a multiple of num_ranks = 3, got 8$"):
        make().local_experts(3)
    with pytest.raises(ValueError, match=r"^num_ranks must be at least 1, got 0$"):
        make().local_experts(0)


def test_more_routes_than_experts_is_legal():
    assert MoEConfig(2, 5, 8, 8).top_k == 5


@pytest.mark.parametrize(
    ("sizes", "options", "error", "text"),
    [
        ((0, 2, 64, 32), {}, ValueError, "num_experts must be at least 1, got 0"),
        ((8, 0, 64, 32), {}, ValueError, "top_k must be at least 1, got 0"),
        ((8, 2, -8, 32), {}, ValueError, "hidden must be at least 1, got -8"),
        ((8, 2, 60, 32), {}, ValueError, "hidden must be a multiple of 8, got 60"),
        ((8, 2, 64, 33), {}, ValueError, "intermediate must be a multiple of 8, got 33"),
        ((8.0, 2, 64, 32), {}, TypeError, "num_experts must be an int, got 8.0 of type float"),
        ((8, True, 64, 32), {}, TypeError, "top_k must be an int, got True"),
        ((8, 2, "64", 32), {}, TypeError, "hidden must be an int, got '64' of type str"),
        ((), {"block_m": 12}, ValueError, "block_m must be a multiple of 8 in 8..256, got 12"),
        ((), {"block_m": 264}, ValueError, "block_m must be a multiple of 8 in 8..256, got 264"),
        ((), {"block_m": 0}, ValueError, "block_m must be at least 1, got 0"),
        ((), {"dtype": jnp.int32}, ValueError, "dtype must be float32, bfloat16 or float16, got int32"),
        ((), {"dtype": "float64"}, ValueError, "dtype must be float32, bfloat16 or float16, got float64"),
        (
            (),
            {"dtype": "half a loaf"},
            TypeError,
            "dtype must be float32, bfloat16 or float16, got 'half a loaf'",
        ),
        ((), {"dtype": None}, TypeError, "dtype must be float32, bfloat16 or float16, got None"),
        (
            (),
            {"activation": "tanh"},
            ValueError,
            "activation must be one of swiglu, swigluoai, geglu, silu, gelu, relu2, got 'tanh'",
        ),
        ((), {"limit": 0}, ValueError, "limit must be positive and finite, got 0.0"),
        ((), {"limit": float("nan")}, ValueError, "limit must be positive and finite, got nan"),
        ((), {"limit": float("inf")}, ValueError, "limit must be positive and finite, got inf"),
        ((), {"limit": "7"}, TypeError, "limit must be a float or None, got '7'"),
        ((), {"limit": True}, TypeError, "limit must be a float or None, got True"),
        (
            (),
            {"limit": 7.0, "activation": "geglu"},
            ValueError,
            "limit is for swiglu and swigluoai only, got limit=7.0 with geglu",
        ),
        ((), {"capacity": -1}, ValueError, "capacity must be at least 0, got -1"),
        ((), {"capacity": 1.5}, TypeError, "capacity must be an int, got 1.5 of type float"),
        ((), {"use_bias": 1}, TypeError, "use_bias must be a bool, got 1"),
    ],
)
def test_refusals(sizes, options, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        make(*sizes, **options)


def test_importing_the_leaves_runs_no_jax_operation():
    code = (
        "import jax_streammoe.config, jax_streammoe.layout, jax_streammoe.waves, jax_streammoe.checks, "
        "jax_streammoe.routing, jax_streammoe.reference, jax; "
        "jax.config.update('jax_num_cpu_devices', 3); assert len(jax.devices('cpu')) == 3"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=300)
