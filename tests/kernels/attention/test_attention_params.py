"""Windows, softcaps and attention sinks, on every backend that runs here, against naive attention.

All that is before the first window is NaN, or in a block that is no longer the sequence's.
"""

import pytest
import torch

from nanovllm.kernels.attention import torch_backend
from nanovllm.kernels.attention.base import AttentionParams
from nanovllm.kernels.attention.torch_backend import TorchAttention
from nanovllm.kernels.attention.triton_backend import TritonAttention
from nanovllm.layers.attention import Attention
from nanovllm.utils.distributed import TPGroup, use_tp_group
from tests.kernels.attention.test_attention import Paged, naive

SHAPE = (4, 2, 64, 16)  # q_heads, kv_heads, head_dim, block_size
NAMES = ("window1", "window5", "window16", "window17", "window999", "softcap", "sinks", "all")
EACH = pytest.mark.parametrize("name", NAMES)


def make_params(name: str, heads: int, head_dim: int, device: str = "cpu") -> AttentionParams:
    params = AttentionParams(head_dim**-0.5)
    if name.startswith("window"):
        return params._replace(window=int(name.removeprefix("window")))
    if name != "softcap":
        params = params._replace(sinks=3 * torch.randn(heads, device=device))
    if name != "sinks":
        params = params._replace(softcap=0.5)  # the scores are about 1
    return params._replace(window=21) if name == "all" else params


def torch_output(paged: Paged, params: AttentionParams, paged_keys: bool = True) -> None:
    """Checks the backend in PyTorch, whose errors bound those of the others."""
    q, k, v = (torch.cat(x) for x in (paged.qs, paged.ks, paged.vs))
    exact = torch.cat([naive(*t, params) for t in zip(paged.qs, paged.ks, paged.vs, strict=True)])
    backend, outs = TorchAttention(), []
    outs.append(backend.prefill(q, k, v, paged.cache, paged.context(paged=paged_keys), params))
    if max(paged.new_tokens) == 1 and paged_keys:
        outs.append(backend.decode(q, paged.cache, paged.context(decode=True), params))
    for out in outs:
        eps = torch.finfo(q.dtype).eps
        torch.testing.assert_close(out.double(), exact, rtol=8 * eps, atol=32 * eps)


@EACH
@pytest.mark.parametrize(
    ("lens", "new"), [([1, 40, 150], [1, 1, 1]), ([30, 5, 150], [7, 5, 70])], ids=["one", "chunks"]
)
def test_torch_reads_the_cache(name, lens, new, device, monkeypatch):
    """In chunks of a few rows too."""
    params = make_params(name, *SHAPE[0:3:2], device)
    for num_rows in (512, 9):
        monkeypatch.setattr(torch_backend, "MAX_ROWS", num_rows)
        paged = Paged(lens, new, *SHAPE, torch.float32, device)
        paged.forget(params.window)
        torch_output(paged, params)


@EACH
def test_torch_prefills_whole_prompts(name, device):
    params = make_params(name, *SHAPE[0:3:2], device)
    lens = [1, 5, 130]
    for dtype in (torch.float32, torch.float16):
        torch_output(Paged(lens, lens, *SHAPE, dtype, device), params, paged_keys=False)


@EACH
def test_triton_prefills_whole_prompts(name, device, monkeypatch):
    params = make_params(name, *SHAPE[0:3:2], device)
    lens = [1, 5, 130]
    paged = Paged(lens, lens, *SHAPE, torch.float32, device)
    paged.check(TritonAttention(), paged.context(paged=False), monkeypatch, params)


@EACH
def test_triton_prefills_chunks(name, device, monkeypatch):
    params = make_params(name, *SHAPE[0:3:2], device)
    paged = Paged([30, 5, 150], [7, 5, 40], *SHAPE, torch.float32, device)
    paged.forget(params.window)
    paged.check(TritonAttention(), paged.context(), monkeypatch, params)


@EACH
def test_triton_decodes(name, device, monkeypatch):
    lens = [1, 2, 17, 65, 130]
    params = make_params(name, *SHAPE[0:3:2], device)
    paged = Paged(lens, [1] * len(lens), *SHAPE, torch.float32, device)
    paged.forget(params.window)
    paged.check_decode(TritonAttention(), True, monkeypatch, params)


def test_each_rank_has_the_sinks_of_its_heads():
    values = torch.randn(8, dtype=torch.float16)
    for rank in range(2):
        with use_tp_group(TPGroup(rank, 2)):
            layer = Attention(4, 16, AttentionParams(0.25, window=3), 2, has_sinks=True)
        assert dict(layer.named_parameters()) == {"sinks": layer.sinks}
        layer.sinks.requires_grad_(False)
        layer.sinks.weight_loader(layer.sinks, values)
        assert layer.params.sinks is layer.sinks and layer.params.window == 3
        assert torch.equal(layer.sinks, values[4 * rank : 4 * rank + 4].float())
        with pytest.raises(ValueError, match=r"needs shape \[8\], the checkpoint has \[4\]"):
            layer.sinks.weight_loader(layer.sinks, values[:4])
    assert not dict(Attention(4, 16, AttentionParams(0.25), 2).named_parameters())
