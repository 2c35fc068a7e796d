"""Kernel tests run on the GPU if there is one, else under Triton's interpreter."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# The interpreter has no bf16 arithmetic: it multiplies the bits as integers.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def device() -> str:
    return DEVICE
