"""Settings and fixtures of every test.

Eight virtual CPU devices, so that meshes of 1 to 8 ranks run in one process; strict dtype and rank promotion,
so that a hidden cast or broadcast is an error; randomness seeded from the test's own id, so that a test gives
the same numbers alone and in any order. Tests run on CPU; `--gpu` runs those marked `gpu`, on the GPU, and is an error
without one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import hypothesis
import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

NUM_CPU_DEVICES = 8

# Before any JAX operation: the number of devices is fixed when the backend starts.
jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# The first example of a property compiles, so deadlines mean nothing; derandomized, so that a failure is
# everybody's failure.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True)
hypothesis.settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("jax_streammoe")
    group.addoption("--gpu", action="store_true", help="run the tests marked gpu, and only those, on the GPU")
    group.addoption("--no-skips", action="store_true", help="a skipped test is an error")


def pytest_configure(config: pytest.Config) -> None:
    on_gpu = config.getoption("--gpu")
    jax.config.update("jax_platforms", "cuda,cpu" if on_gpu else "cpu")
    if on_gpu and not config.option.collectonly:
        _require_gpu()


def _require_gpu() -> None:
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise pytest.UsageError(f"--gpu needs a GPU that JAX can use: {error}") from error
    if devices[0].platform != "gpu":
        raise pytest.UsageError(f"--gpu needs a GPU, JAX found {devices}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_gpu = config.getoption("--gpu")
    num_gpus = len(jax.devices()) if on_gpu and not config.option.collectonly else 0

    def wanted(item: pytest.Item) -> bool:
        marker = item.get_closest_marker("gpu")
        if marker is None or not on_gpu:
            return (marker is not None) == on_gpu
        return num_gpus == 0 or num_gpus >= (marker.args[0] if marker.args else 1)

    chosen = [item for item in items if wanted(item)]
    if len(chosen) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("--no-skips"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: {reason} (--no-skips makes this an error)"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    """A module that skips itself (`pytest.importorskip`) is an error under --no-skips too."""
    report = yield
    if report.skipped and collector.config.getoption("--no-skips"):
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid}: {report.longrepr} (--no-skips makes this an error)"
    return report


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded from the test's id, parameters included."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="session")
def mesh_of() -> Callable[..., Mesh]:
    """`mesh_of(n, axis_name="ep", axis_type=AxisType.Auto)`: a mesh of the first n devices."""

    def make(num_ranks: int, axis_name: str = "ep", axis_type: AxisType = AxisType.Auto) -> Mesh:
        devices = jax.devices()
        if num_ranks > len(devices):
            pytest.skip(f"a mesh of {num_ranks} ranks needs as many devices, this machine has {len(devices)}")
        return Mesh(np.array(devices[:num_ranks]), (axis_name,), axis_types=(axis_type,))

    return make


@pytest.fixture
def new_ring(request: pytest.FixtureRequest):
    """`new_ring(config, **sizes)`: rings named after the test, closed at its end."""
    import jax_streammoe as sm  # after the settings above

    rings: list = []

    def make(config, *, chunk_tokens=4, num_slots=2, **options):
        name = f"{request.node.name}/{len(rings)}"
        rings.append(sm.make_ring(config, chunk_tokens=chunk_tokens, num_slots=num_slots, name=name, **options))
        return rings[-1]

    yield make
    for ring in rings:
        sm.close_ring(ring)
