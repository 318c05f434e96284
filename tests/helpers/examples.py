"""The programs of examples/ as modules, found by path: `examples` is no package, and others install one of that name.

Contract: `load("jax_producer.py")` runs the file once a process, under its own name, and returns the module. Trade-off:
a test imports what a reader runs, so an example may read its settings from JAX only when it is loaded or later.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import sys
from types import ModuleType

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples"


@functools.cache
def load(path: str) -> ModuleType:
    """Returns the module of a file in examples/."""
    name = f"example_{pathlib.Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, FOLDER / path)
    if spec is None or spec.loader is None:
        raise ImportError(f"no example {path} in {FOLDER}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
