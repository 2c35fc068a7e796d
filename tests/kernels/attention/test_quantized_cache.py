"""A KV cache in FP8, on every backend that runs here.

Kernels and references read the same FP8 numbers and scales. Every other slot is NaN.
"""

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine import startup
from nanovllm.kernels.attention import decode, prefill, prefix_decode, triton_backend
from nanovllm.kernels.attention.base import AttentionParams
from nanovllm.kernels.attention.decode import DecodeTile
from nanovllm.kernels.attention.prefix_schedule import PrefixTile
from nanovllm.kernels.attention.torch_backend import TorchAttention
from nanovllm.kernels.attention.triton_backend import TritonAttention
from nanovllm.utils.context import Context
from tests.kernels.attention.test_attention import SHAPES, SLOW, Paged
from tests.kernels.attention.test_attention_params import check_torch, make_params
from tests.kernels.attention.test_shared_prefix import SharedPaged
from tests.kernels.conftest import DEVICE

pytestmark = [
    pytest.mark.usefixtures("exact_fp8"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2"),
]

HALF, FULL = torch.float16, torch.float32
# name of the attention's features, shape, dtype
CASES = [
    ("plain", "d64-block16", FULL, []),
    ("window21-softcap-sinks", "group3-block7", HALF, []),
    ("window40", "d96-group3-block8", FULL, SLOW),
    ("plain", "d128-block256", HALF, SLOW),
    ("softcap", "d256-mha", FULL, SLOW),
]
if DEVICE == "cuda":
    CASES += [("window40", shape, torch.bfloat16, []) for shape in SHAPES]
EACH = pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [pytest.param(*case, marks=marks, id="-".join(map(str, case))) for *case, marks in CASES],
)


def make_paged(name, lens, new, shape, dtype, device) -> tuple[Paged, AttentionParams]:
    params = make_params(name, SHAPES[shape], device)
    paged = Paged(lens, new, *SHAPES[shape], dtype, device)
    paged.quantize()
    paged.forget(params.window)
    return paged, params


@EACH
def test_prefill(name, shape, dtype, device, monkeypatch):
    paged, params = make_paged(name, [3, 30, 130], [3, 7, 20], shape, dtype, device)
    paged.check(TritonAttention(), paged.context(), monkeypatch, params)


@EACH
@pytest.mark.parametrize("prefetches", [True, False])
def test_decode(prefetches, name, shape, dtype, device, monkeypatch):
    """In one split and in several. The key and value of the new token are quantised too."""
    tile = DecodeTile(16, 4, 4, prefetches)
    monkeypatch.setattr(decode, "NUM_MULTIPROCESSORS", 1)
    for module in (triton_backend, decode):
        monkeypatch.setattr(module, "decode_tile", lambda *_: tile)
    paged, params = make_paged(name, [1, 2, 17, 33, 100], [1] * 5, shape, dtype, device)
    paged.check_decode(TritonAttention(), True, monkeypatch, params)


def test_decode_in_the_tile_of_many_query_heads(device, monkeypatch):
    """With 8 per KV head fewer programs run at once than with an unquantised cache, so the schedule
    is another one."""
    if device == "cpu":  # fewer programs are faster in the interpreter
        monkeypatch.setattr(decode, "NUM_MULTIPROCESSORS", 2)
    shape = 8, 1, 128, HALF
    assert decode.decode_tile(1, *shape, True) != decode.decode_tile(1, *shape, False)
    paged = Paged([70], [1], 8, 1, 128, 16, HALF, device)
    paged.quantize()
    paged.check_decode(TritonAttention(), True, monkeypatch)


@pytest.mark.skipif(DEVICE == "cuda", reason="the backend would compute without a schedule")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_the_schedule_is_for_the_cache_of_the_engine(kv_cache_dtype, tiny_models, monkeypatch):
    seen = []
    monkeypatch.setattr(TorchAttention, "split_kv", lambda self, *args: seen.append(args[5]))
    settings = {"device": "cpu", "num_kvcache_blocks": 8, "kv_cache_dtype": kv_cache_dtype}
    with LLM(tiny_models.path("qwen3-one-layer"), **settings) as llm:
        llm.generate([[3, 4]], SamplingParams(max_tokens=2), use_tqdm=False)
    assert seen and {*seen} == {kv_cache_dtype == "fp8"}


@pytest.mark.parametrize("dtype", [HALF, pytest.param(FULL, marks=SLOW)], ids=str)
def test_decode_with_a_shared_prefix(dtype, device, monkeypatch):
    monkeypatch.setattr("nanovllm.engine.shared_prefixes.MIN_TOKENS", 1)
    tile = PrefixTile(16, 8, 16, 4, 2, 4)
    for module in (triton_backend, decode, prefix_decode):
        monkeypatch.setattr(module, "prefix_tile", lambda *_: tile)
    paged = SharedPaged([50 + i for i in range(5)], [([*range(5)], 2)], 4, 2, 64, 16, dtype, device)
    paged.quantize()
    params = make_params("softcap-sinks", (4, 2, 64, 16), device)
    paged.check_decode(TritonAttention(), True, monkeypatch, params)


def test_small_values_keep_their_precision_in_fp16(device, monkeypatch):
    """Weights times the scales of values would be subnormal numbers."""
    monkeypatch.setattr(prefill, "shared_memory", lambda _: 200 << 10)
    paged = Paged([300], [2], *SHAPES["d64-block16"], HALF, device)
    for x in (*paged.vs, paged.cache.v):
        x.mul_(1e-3)
    paged.quantize()
    paged.check(TritonAttention(), paged.context(), monkeypatch)


@pytest.mark.parametrize("name", ["plain", "window21-softcap-sinks"])
def test_torch(name, device):
    for lens, new in (([1, 40, 130], [1, 1, 1]), ([30, 5, 130], [7, 5, 70])):
        paged, params = make_paged(name, lens, new, "d64-block16", FULL, device)
        check_torch(paged, params)


def test_rows_that_pad_a_graph_store_nothing(device):
    paged = Paged([20, 20], [1, 1], *SHAPES["d64-block16"], FULL, device)
    paged.quantize()
    q, new, _, _ = paged.draw_new(False)
    backend = TritonAttention()
    work = backend.split_kv(np.zeros(2, np.int32), 4, 2, 64, q.dtype, True)
    context = Context(
        slot_mapping=torch.full((2,), -1, dtype=torch.int32, device=device),
        block_tables=torch.zeros(2, 4, dtype=torch.int32, device=device),
        context_lens=torch.zeros(2, dtype=torch.int32, device=device),
        split_kv_schedule=torch.from_numpy(work).to(device),
    )
    before = [x.clone().view(torch.uint8) for x in paged.cache]
    assert not backend.decode(q, paged.cache, context, AttentionParams(1.0), new).any()
    for x, old in zip(paged.cache, before, strict=True):
        assert torch.equal(x.view(torch.uint8), old)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="tests/test_gpu.py runs engines")
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_the_kernels_in_an_engine(name, tiny_models, monkeypatch):
    """In Triton's interpreter, against the backend in PyTorch. A decode reads what a prefill and
    earlier decodes have stored."""
    monkeypatch.setattr(TritonAttention, "prefill", TorchAttention.prefill)  # takes less time
    monkeypatch.setattr(decode, "NUM_MULTIPROCESSORS", 1)
    prompts = [list(range(7, 7 + n)) for n in (2, 17)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    settings = {"kvcache_block_size": 16, "num_kvcache_blocks": 20}
    results = []
    for backend in (TorchAttention, TritonAttention):
        monkeypatch.setattr(startup, "select_attention_backend", lambda *_, b=backend: b())
        with LLM(tiny_models.path(name), device="cpu", kv_cache_dtype="fp8", **settings) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        results.append([out.outputs[0] for out in outputs])
    for ours, expected in zip(*results, strict=True):
        assert ours.token_ids == expected.token_ids
        pairs = zip(ours.token_ids, ours.logprobs, expected.logprobs, strict=True)
        assert max(abs(a[i].logprob - b[i].logprob) for i, a, b in pairs) < 0.02
