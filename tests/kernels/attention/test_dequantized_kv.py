"""The copies of a quantised cache's keys and values."""

from dataclasses import replace

import pytest
import torch

from nanovllm.kernels.attention import dequantized_kv
from nanovllm.kernels.attention.dequantized_kv import (
    dequantized_kv_reference,
    dequantized_kv_triton,
    max_num_keys,
)
from tests.kernels.attention.test_attention import SHAPES, Paged
from tests.kernels.conftest import DTYPES

pytestmark = pytest.mark.usefixtures("exact_fp8")


@pytest.mark.parametrize("shape", ["d64-block16", "d96-group3-block8", "group3-block7"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_are_those_of_the_reference(shape, dtype, device, monkeypatch):
    """Bit for bit. All other slots of the cache are NaN. The memory depends on the queries only,
    and what is after the last key is not written."""
    monkeypatch.setattr(dequantized_kv, "SCAN", 4)
    lens = [1, 0, 64, 65, 0, 130, 7]
    paged = Paged(lens, [min(n, 1) for n in lens], *SHAPES[shape], dtype, device)
    paged.quantize()
    q = torch.zeros(80, *paged.qs[0].shape[1:]).to(paged.qs[0])
    new_empty = torch.Tensor.new_empty
    with monkeypatch.context() as patch:
        patch.setattr(
            torch.Tensor,
            "new_empty",
            lambda x, *shape, **kw: new_empty(x, *shape, **kw) if kw else x.new_full(shape, -7),
        )
        copies = dequantized_kv_triton(q, paged.cache, paged.context())
    buffer = copies[0].new_empty(0).set_(copies[0].untyped_storage()).view(2, -1)
    assert buffer.numel() == 4 * q.numel() and (buffer[:, copies[0].numel() :] == -7).all()
    expected = dequantized_kv_reference(q, paged.cache, paged.context())
    for copy, values in zip(copies, expected, strict=True):
        assert copy.dtype is dtype and copy.shape == (sum(lens), *paged.cache.k.shape[2:])
        assert torch.equal(copy, values)


def test_more_keys_than_there_is_room_for_are_not_copied(device):
    paged = Paged([300], [1], *SHAPES["d64-block16"], torch.float16, device)
    paged.quantize()
    q, context = torch.cat(paged.qs), paged.context()
    assert max_num_keys(q, paged.cache) < 300
    for num_keys in (0, 300):
        with pytest.raises(AssertionError):
            dequantized_kv_triton(q, paged.cache, replace(context, num_keys=num_keys))
