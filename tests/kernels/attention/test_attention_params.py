"""Windows, softcaps and attention sinks, on every backend that runs here, against naive attention.

All that is before the first window is NaN, or in a block that is no longer the sequence's.
"""

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.kernels.attention import decode, prefill, torch_backend, triton_backend
from nanovllm.kernels.attention.base import AttentionParams
from nanovllm.kernels.attention.decode import DecodeTile
from nanovllm.kernels.attention.torch_backend import TorchAttention
from nanovllm.kernels.attention.triton_backend import TritonAttention
from nanovllm.layers.attention import Attention
from nanovllm.utils.distributed import TPGroup, use_tp_group
from tests.kernels.attention.test_attention import SHAPES, SLOW, Paged, naive
from tests.kernels.conftest import DEVICE, DTYPES

# Softcaps of large logits: tanh is 1 where exp is infinite.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")

SHAPE = (2, 1, 32, 16)  # q_heads, kv_heads, head_dim, block_size; tiles have 8 tokens and 16 keys
# Smaller than a block, equal to one, several tiles, larger than a context; a sink beside one key.
NAMES = ("window5", "window16", "window40", "window999", "softcap", "large-softcap")
NAMES += ("sinks", "window1-sinks", "window21-softcap-sinks")
EACH = pytest.mark.parametrize("name", NAMES)
# The interpreter takes its time: there each name meets each shape in one of the two dtypes, and
# every name and every shape has both.
CASES = [
    pytest.param(name, shape, dtype, id=f"{name}-{shape_id}-{dtype}")
    for i, name in enumerate(NAMES)
    for j, (shape_id, shape) in enumerate(SHAPES.items())
    for k, dtype in enumerate(DTYPES)
    if DEVICE == "cuda" or (i + j) % 2 == k
]
IN_KERNELS = pytest.mark.parametrize(  # the slow tests' are in the others too
    "name", [pytest.param(n, marks=SLOW if n in ("softcap", "sinks") else []) for n in NAMES]
)


def make_params(name: str, shape: tuple[int, ...], device: str) -> AttentionParams:
    heads, _, head_dim, _ = shape
    params = AttentionParams(head_dim**-0.5)
    if window := re.search(r"window(\d+)", name):
        params = params._replace(window=int(window[1]))
    if "softcap" in name:
        params = params._replace(softcap=0.5)  # scores are about 1
    if "large" in name:
        params = params._replace(scale=40 * params.scale)
    if "sinks" in name:
        params = params._replace(sinks=3 * torch.randn(heads, device=device))
    return params


def check_torch(paged: Paged, params: AttentionParams, reads_cache: bool = True) -> None:
    """Checks the backend in PyTorch, whose errors bound those of the others."""
    q, k, v = (torch.cat(x) for x in (paged.qs, paged.ks, paged.vs))
    exact = torch.cat([naive(*t, params) for t in zip(paged.qs, paged.ks, paged.vs, strict=True)])
    backend, context = TorchAttention(), paged.context(paged=reads_cache)
    outs = [backend.prefill(q, k, v, paged.cache, context, params)]
    if max(paged.new_tokens) == 1 and reads_cache:
        outs.append(backend.decode(q, paged.cache, paged.context(decode=True), params))
    eps = torch.finfo(q.dtype).eps
    atol = 32 * eps * max(1.0, params.scale)
    for out in outs:
        torch.testing.assert_close(out.double(), exact, rtol=8 * eps, atol=atol)


@EACH
@pytest.mark.parametrize(
    ("lens", "new"), [([1, 40, 150], [1, 1, 1]), ([30, 5, 150], [7, 5, 70])], ids=["one", "chunks"]
)
def test_torch_reads_the_cache(name, lens, new, device, monkeypatch):
    params = make_params(name, SHAPE, device)
    for max_rows, max_scores in ((512, 1 << 24), (9, 1 << 24), (512, 1000)):
        monkeypatch.setattr(torch_backend, "MAX_ROWS", max_rows)
        monkeypatch.setattr(torch_backend, "MAX_SCORES", max_scores)
        paged = Paged(lens, new, *SHAPE, torch.float32, device)
        paged.forget(params.window)
        check_torch(paged, params)


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operation returns."""

    num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                self.num_bytes = max(self.num_bytes, x.nbytes)
        return result


@pytest.mark.parametrize(
    ("name", "heads", "new_tokens"),
    [("plain", 1, 300), ("window79900", 1, 300), ("softcap", 8, 40), ("sinks", 8, 40)],
)
def test_torch_prefills_long_prompts_in_bounded_memory(name, heads, new_tokens):
    """The mask or the scores of all new tokens would have about 100 MB."""
    shape = (heads, 1, 8, 256)
    params = make_params(name, shape, "cpu")
    paged = Paged([80_000], [new_tokens], *shape, torch.float32, "cpu")
    args = (*(torch.cat(x) for x in (paged.qs, paged.ks, paged.vs)), paged.cache, paged.context())
    with LargestTensor() as largest:
        TorchAttention().prefill(*args, params)
    assert 1 << 24 < largest.num_bytes <= 1 << 26


@EACH
def test_torch_prefills_whole_prompts(name, device):
    params = make_params(name, SHAPE, device)._replace(scale=SHAPE[2] ** -0.5)
    for dtype in (torch.float32, torch.float16):
        paged = Paged([1, 5, 130], [1, 5, 130], *SHAPE, dtype, device)
        check_torch(paged, params, reads_cache=False)


@IN_KERNELS
def test_prefill_of_chunks(name, device, monkeypatch):
    """The first window of a chunk begins in earlier chunks."""
    params = make_params(name, SHAPE, device)
    paged = Paged([3, 83], [2, 15], *SHAPE, torch.float32, device)
    paged.forget(params.window)
    paged.check(TritonAttention(), paged.context(), monkeypatch, params)


@pytest.mark.parametrize("name", ["window5", "window21-softcap-sinks"])
def test_prefill_of_whole_prompts(name, device, monkeypatch):
    params = make_params(name, SHAPE, device)
    paged = Paged([1, 50], [1, 50], *SHAPE, torch.float32, device)
    paged.check(TritonAttention(), paged.context(paged=False), monkeypatch, params)


def test_prefill_in_large_tiles(device, monkeypatch):
    """Tiles at the edges of a window are smaller than those amid it."""
    monkeypatch.setattr(prefill, "shared_memory", lambda _: 200 << 10)
    params = make_params("window300-sinks", SHAPE, device)
    paged = Paged([500], [70], *SHAPE[:3], 256, torch.float16, device)
    paged.forget(params.window)
    paged.check(TritonAttention(), paged.context(), monkeypatch, params)


@IN_KERNELS
def test_decode(name, device, monkeypatch):
    params = make_params(name, SHAPE, device)
    lens = [1, 17, 60]
    paged = Paged(lens, [1] * len(lens), *SHAPE, torch.float32, device)
    paged.forget(params.window)
    paged.check_decode(TritonAttention(), False, monkeypatch, params)


def test_decode_with_a_window_launches_only_programs_that_may_have_keys(device, monkeypatch):
    """A window of 16 overlaps two tiles of 16 keys. Without one, 528 programs may share it."""
    kernel, grids = decode._decode_kernel, []

    class Launcher:
        def __getitem__(self, grid):
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(decode, "_decode_kernel", Launcher())
    for name in ("window16", "plain"):
        params = make_params(name, SHAPE, device)
        paged = Paged([60], [1], *SHAPE, torch.float32, device)
        with monkeypatch.context() as patch:
            paged.check_decode(TritonAttention(), False, patch, params)
    assert grids == [(1, 2), (1, 529)]


@pytest.mark.parametrize("window", [16, 33, pytest.param(64, marks=SLOW)])
@pytest.mark.parametrize(
    "tile", [DecodeTile(16, 4, 3, True), DecodeTile(64, 1, 3, False)], ids=["prefetch", "one-warp"]
)
def test_decode_with_windows_at_the_edges_of_blocks(tile, window, device, monkeypatch):
    """In splits of several tiles; the last one may hold the new token only."""
    for module in (triton_backend, decode):
        monkeypatch.setattr(module, "decode_tile", lambda *_: tile)
    monkeypatch.setattr(decode, "NUM_MULTIPROCESSORS", 1)
    params = make_params(f"window{window}-sinks", SHAPE, device)
    backend, lens = TritonAttention(), [window, window + 1, window + 16, 97]
    paged = Paged(lens, [1] * len(lens), *SHAPE, torch.float16, device)
    paged.forget(window)
    paged.check_decode(backend, False, monkeypatch, params)
    assert not any(arrived.any() for arrived in backend._arrived.values())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape", "dtype"), CASES)
def test_every_shape(name, shape, dtype, device, monkeypatch):
    params = make_params(name, shape, device)
    backend = TritonAttention()
    for lens, new in (([30, 5, 150, 64], [7, 5, 1, 64]), ([1, 65, 130], [1, 1, 1])):
        paged = Paged(lens, new, *shape, dtype, device)
        paged.forget(params.window)
        with monkeypatch.context() as patch:
            paged.check(backend, paged.context(), patch, params)
    with monkeypatch.context() as patch:
        paged.check_decode(backend, True, patch, params)
    paged = Paged([1, 130], [1, 130], *shape, dtype, device)
    paged.check(backend, paged.context(paged=False), monkeypatch, params)


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
        with pytest.raises(ValueError, match=r"needs shape \[8\], got \[4\]"):
            layer.sinks.weight_loader(layer.sinks, values[:4])
    assert not dict(Attention(4, 16, AttentionParams(0.25), 2).named_parameters())
