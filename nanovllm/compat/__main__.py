"""Runs a program written for vLLM on nanovllm, without changes:

python -m nanovllm.compat script.py [argument ...]
python -m nanovllm.compat -m module [argument ...]
"""

import io
import os
import runpy
import sys
from types import ModuleType

from nanovllm.compat import register_as_vllm


def main() -> None:
    sys.argv = sys.argv[1:]
    is_module = sys.argv[:1] == ["-m"]
    if is_module:
        del sys.argv[0]
    if not sys.argv or sys.argv[0].startswith("-"):
        sys.exit(__doc__)
    register_as_vllm()
    if is_module:  # the current folder is already first in sys.path
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        run_script(sys.argv[0])


def run_script(script: str) -> None:
    """Runs a file as ``python`` does.

    runpy would restore ``__main__`` when the file ends, but child processes, threads and exit
    handlers may need it after that."""
    path = os.path.abspath(script)
    try:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec")
    except OSError as error:
        sys.exit(f"cannot open {script}: {error.strerror}")
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    module = sys.modules["__main__"] = ModuleType("__main__")
    vars(module).update(__file__=path, __builtins__=__builtins__)
    exec(code, vars(module))


if __name__ == "__main__":
    main()
