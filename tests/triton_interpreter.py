"""Makes Triton's interpreter twice as fast: at each call and each operation it does again what it
has done before, or what nothing comes of. And it runs the PTX that kernels for decoding have."""

import sys
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


def speed_up() -> None:
    """Does nothing where the interpreter is not loaded."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return
    tl, patch_lang = interpreter.tl, interpreter._patch_lang
    np_dtype_of_scalar = cache(interpreter._get_np_dtype)
    patched: set[str] = set()

    def patch_lang_once(function: Any) -> Any:
        """A launch makes the functions of triton.language interpreted ones until it ends, and each
        call of another jitted function within it does the same again."""
        names = {m.__name__ for m in function.__globals__.values() if m is tl or m is tl.core}
        if patched and names <= patched:
            return None
        is_launch = not patched
        patched.update(names)
        scope = patch_lang(function)
        if is_launch:
            restore = scope.restore

            def restore_and_forget() -> None:
                patched.clear()
                restore()

            scope.restore = restore_and_forget
        return scope

    def get_np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        is_pointer = isinstance(scalar, tl.pointer_type)
        return np_dtype_of_scalar(tl.uint64 if is_pointer else scalar)

    interpreter._patch_lang, interpreter._get_np_dtype = patch_lang_once, get_np_dtype
    # It looks for overflows, but says nothing of them.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    builder.create_inline_asm = partial(_run_ptx, interpreter)


def _run_ptx(interpreter: Any, ptx: str, constraints: str, args: Any, *options: Any) -> Any:
    """Runs the PTX of tiles.py, which converts the lower or the upper byte of each pair."""
    assert "cvt.rn.f16x2.e4m3x2" in ptx, ptx
    codes = args[0].data.view(np.uint8)[..., {"0x0020": 0, "0x0031": 1}[ptx.split()[12][:-1]] :: 2]
    values = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).half().numpy()
    handle = interpreter.TensorHandle(values, interpreter.tl.float16)
    return SimpleNamespace(get_result=lambda index: handle)
