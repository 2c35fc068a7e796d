"""The copies of a quantised cache's keys and values."""

import pytest
import torch

from nanovllm.kernels.attention import dequantized_kv
from nanovllm.kernels.attention.dequantized_kv import (
    dequantized_kv_reference,
    dequantized_kv_triton,
    max_num_keys,
)
from tests.kernels.attention.test_attention import SHAPES, Paged

pytestmark = pytest.mark.usefixtures("exact_fp8")


@pytest.mark.parametrize("shape", ["d64-block16", "d96-group3-block8", "group3-block7"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_copies_are_those_of_the_reference(shape, dtype, device, monkeypatch):
    """Bit for bit. All other slots of the cache are NaN. The memory depends on the queries only."""
    monkeypatch.setattr(dequantized_kv, "SCAN", 4)
    lens = [1, 0, 64, 65, 0, 130, 7]
    paged = Paged(lens, [min(n, 1) for n in lens], *SHAPES[shape], dtype, device)
    paged.quantize()
    q = torch.zeros(80, *paged.qs[0].shape[1:]).to(paged.qs[0])
    args = q, paged.cache, paged.context()
    assert sum(lens) <= max_num_keys(q, paged.cache)
    copies = dequantized_kv_triton(*args)
    assert copies[0].untyped_storage().nbytes() == 4 * q.nbytes
    for copy, values in zip(copies, dequantized_kv_reference(*args), strict=True):
        assert copy.dtype is dtype and copy.shape == (sum(lens), *paged.cache.k.shape[2:])
        assert torch.equal(copy, values)
