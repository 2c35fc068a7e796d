"""Registers the vllm alias in child processes. ``register_as_vllm`` puts this folder on PYTHONPATH,
and Python imports a module of this name when it starts. If there is another sitecustomize further
along the path, it runs too."""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))


def _register() -> None:
    """Loads alias.py alone, not the package around it, which would import PyTorch."""
    name = "nanovllm.compat.alias"
    path = os.path.join(os.path.dirname(_HERE), "alias.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.register_as_vllm()


def _run_next() -> None:
    paths = [path for path in sys.path if os.path.abspath(path) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if importlib.util.find_spec("nanovllm") is not None:  # another Python may lack it
    _register()
_run_next()
