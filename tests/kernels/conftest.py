"""Kernel tests run on the GPU if there is one, else under Triton's interpreter."""

from typing import Any

import numpy as np
import pytest
import torch

from nanovllm.kernels.fp8 import FP8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# The interpreter has no bf16 arithmetic: it multiplies the bits as integers.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


# In the interpreter, fp16 differs from fp32 in its rounding only.
SLOW = [] if DEVICE == "cuda" else [pytest.mark.slow]


@pytest.fixture(
    params=[pytest.param(t, marks=SLOW if t is torch.float16 else []) for t in DTYPES], ids=str
)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture
def exact_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter converts to FP8 as a GPU does. By itself it rounds 124.5 to 64, and it
    takes NaN for 480."""
    if DEVICE == "cuda":
        return
    from triton import language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    dtypes = {tl.float32: torch.float32, tl.float16: torch.float16, tl.float8e4nv: FP8}

    def convert_float(data: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
        if tl.float8e4nv not in (source, target):
            return convert(data, source, target, rounding_mode)
        values = torch.from_numpy(np.ascontiguousarray(data)).view(dtypes[source])
        bits = torch.uint8 if target == tl.float8e4nv else dtypes[target]
        return values.to(dtypes[target]).view(bits).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert_float)
