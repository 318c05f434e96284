"""What importing the library does and what it depends on: no JAX operation, a version guard, public JAX names only."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
import types
from importlib import resources
from pathlib import Path

import jax
import pytest

import jax_streammoe as sm
from jax_streammoe import ffi

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "jax_streammoe").rglob("*.py"))
# The client of jax.distributed's key-value store has no public name; nothing else private is used, and only there.
PRIVATE = {"symmetric.py": {"jax._src.distributed"}}


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_runs_no_jax_operation():
    # The number of devices can only be set before the backend starts, which the first operation does.
    code = """
import jax_streammoe as sm
import jax
{between}
try:
    jax.config.update("jax_num_cpu_devices", 8)
except RuntimeError:
    print("started")
else:
    print(len(jax.devices("cpu")))
"""
    assert run(code.format(between="")) == "8"
    assert run(code.format(between="sm.MoEConfig(4, 2, 16, 8); sm.checkpoint_policy()")) == "8"
    assert run(code.format(between="jax.numpy.zeros(())")) == "started"  # so the test would see an operation


def test_every_module_can_be_imported_first():
    for module in pkgutil.walk_packages(sm.__path__, "jax_streammoe."):
        if module.name.endswith("__main__"):
            continue
        imported = importlib.import_module(module.name)
        assert imported.__doc__, module.name
    assert run("import jax_streammoe.ffi, jax_streammoe.waves; print(jax_streammoe.ffi.VERSION)") == "v1"


@pytest.mark.parametrize(
    ("built", "runtime"),
    [((0, 3), (0, 2)), ((0, 4), (0, 3)), ((1, 0), (0, 4)), ((0, 3), (1, 3)), ((0, 10), (0, 9))],
)
def test_handlers_built_on_newer_headers_are_refused(built, runtime):
    text = (
        rf"^jax_streammoe was built on XLA FFI {built[0]}\.{built[1]}, jaxlib [\w.]+ has {runtime[0]}\.{runtime[1]}: "
        r"registering its handlers would break the CPU backend\. Rebuild it with jaxlib==0\.10\.2"
    )
    with pytest.raises(ImportError, match=text):
        ffi.check_ffi_version(built, runtime)


@pytest.mark.parametrize(
    ("built", "runtime"), [((0, 3), (0, 3)), ((0, 3), (0, 4)), ((0, 9), (0, 10)), ((1, 0), (1, 2))]
)
def test_handlers_built_on_older_headers_are_fine(built, runtime):
    ffi.check_ffi_version(built, runtime)


def test_the_versions_are_those_of_the_library_and_of_jaxlib():
    built, runtime = tuple(ffi.compiled.FFI_API_VERSION), ffi.runtime_ffi_version()
    assert built == (0, 3), "built on the oldest supported headers"
    assert runtime >= built


def test_a_header_without_a_version_is_an_import_error(monkeypatch, tmp_path):
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR 0\n")
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    with pytest.raises(ImportError, match=r"^jax_streammoe cannot read the FFI version of jaxlib in .*c_api\.h$"):
        ffi.runtime_ffi_version()


def test_a_missing_compiled_module_says_how_to_install():
    code = """
import sys
sys.modules["_jax_streammoe"] = None
try:
    import jax_streammoe
except ImportError as error:
    print(error)
"""
    text = run(code)
    assert text.startswith("jax_streammoe's compiled module cannot be loaded (")
    assert text.endswith("; install the library with `pip install .` from its checkout")


def test_target_names_carry_a_version():
    assert ffi.target("forward") == "streammoe_forward_v1"
    handlers = set(ffi.compiled.cpu_handlers())
    assert {"forward", "backward", "rows", "combine", "register", "open", "close", "ring_forward"} <= handlers


def dotted(node):
    """`a.b.c` of an attribute chain that starts at a name, else None."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def jax_names(source):
    """Every dotted name of JAX or jaxlib that a source file imports or reaches through what it imported."""
    tree = ast.parse(source)
    names, aliases = set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names.add(alias.name)
                aliases[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                names.add(f"{node.module}.{alias.name}")
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            first, rest = name.split(".", 1)
            if first in aliases:
                names.add(f"{aliases[first]}.{rest}")
    return {name for name in names if name.split(".")[0] in ("jax", "jaxlib")}


def private(names):
    """The names that are not public, each up to one part behind the private one."""
    found = set()
    for name in names:
        parts = name.split(".")
        for n, part in enumerate(parts):
            if (part.startswith("_") and not part.startswith("__")) or part in ("interpreters", "extend"):
                found.add(".".join(parts[: n + 2]))
    return {name for name in found if not any(other.startswith(name + ".") for other in found)}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_only_public_jax_names_are_used(path):
    assert private(jax_names(path.read_text())) == PRIVATE.get(path.name, set())


def test_the_walk_sees_private_names():
    seen = private(
        jax_names("import jax\nfrom jax._src import core as c\nimport jax.numpy as jnp\njax._src.api\njnp._x.y\n")
    )
    assert seen == {"jax._src.core", "jax._src.api", "jax.numpy._x.y"}
    assert not private(jax_names("import jax\njax.__version_info__\nself._cache\njax.numpy.zeros"))


def test_all_is_complete_sorted_and_documented():
    modules = {"testing", "trace"}
    public = {
        name
        for name, value in vars(sm).items()
        if not name.startswith("_") and (name in modules or not isinstance(value, types.ModuleType))
    }
    assert set(sm.__all__) == public
    assert sm.__all__ == sorted(sm.__all__) and len(set(sm.__all__)) == len(sm.__all__)
    for name in sm.__all__:
        value = getattr(sm, name)
        assert inspect.getdoc(value), name
        assert isinstance(value, types.ModuleType) == (name in modules), name


def test_the_package_is_typed():
    assert resources.files("jax_streammoe").joinpath("py.typed").is_file()
    untyped = []
    for name in sm.__all__:
        value = getattr(sm, name)
        if inspect.isfunction(value):
            signature = inspect.signature(value)
            missing = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
            untyped += [f"{name}: {missing}"] if missing or signature.return_annotation is signature.empty else []
    assert not untyped
