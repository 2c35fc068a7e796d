import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels.silu_and_mul import silu_and_mul_reference, silu_and_mul_triton
from tests.kernels.oracle import assert_as_good_as_eager, poisoned


@pytest.mark.parametrize("shape", [(1, 2), (5, 246), (3, 2 * 1536), (2, 2 * 3072)])
def test_silu_and_mul(shape, dtype, device, monkeypatch):
    poisoned(monkeypatch)
    x = torch.randn(shape, device=device).to(dtype) * 4
    gate, up = x.double().chunk(2, -1)
    out = silu_and_mul_triton(x)
    assert_as_good_as_eager(out, silu_and_mul_reference(x), F.silu(gate) * up)
