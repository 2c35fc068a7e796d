"""The prefill kernel for Hopper: on a GPU, and run by an emulator on a CPU."""

import logging
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest
import torch

from nanovllm.kernels import fallback
from nanovllm.kernels.attention import hopper_prefill, triton_backend
from nanovllm.kernels.attention.base import AttentionParams
from nanovllm.kernels.attention.hopper_prefill import Tile, can_launch, make_schedule
from nanovllm.kernels.attention.prefill import prefill_attention
from nanovllm.kernels.attention.triton_backend import TritonAttention
from tests.kernels.attention.test_attention import Paged
from tests.kernels.gluon_emulator import emulated

PLAIN = AttentionParams(1.0)
LAUNCHER = SimpleNamespace(prefill=hopper_prefill.hopper_prefill)


class Case(NamedTuple):
    """A batch: new tokens and context length of each sequence, heads, page size or 0 for keys that
    are not paged, parameters of the layer, and whether the cache is quantised."""

    lens: tuple[tuple[int, int], ...]
    q_heads: int = 4
    kv_heads: int = 2
    page_size: int = 0
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    is_quantized: bool = False


def check(
    case: Case, head_dim: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, lens = (list(x) for x in zip(*case.lens, strict=True))
    shape = case.q_heads, case.kv_heads, head_dim, case.page_size or 16, dtype, device
    batch = Paged(lens, new, *shape)
    if case.window and case.page_size:
        free_blocks(batch, case.window)
    if case.is_quantized:
        batch.quantize()
    sinks = 3 * torch.randn(case.q_heads, device=device) if case.sinks else None
    params = AttentionParams(head_dim**-0.5, case.window, case.softcap, sinks)
    context = batch.context(paged=bool(case.page_size))
    with monkeypatch.context() as patch:
        batch.check(LAUNCHER, context, patch, params)


def free_blocks(batch: Paged, window: int) -> None:
    """Makes the entries of blocks before the window of the first query name another block, all of
    whose slots are NaN, or none. The kernel reads other tokens before the window."""
    for i, (length, new) in enumerate(zip(batch.contexts, batch.new_tokens, strict=True)):
        freed = max(0, length - new + 1 - window) // batch.cache.k.size(1)
        batch.tables[i, :freed] = batch.nan_block
        batch.tables[i, :freed:2] = -1


EMULATED_CASES = (
    Case(((130, 130), (0, 0), (2, 300), (77, 440)), kv_heads=1, page_size=16),
    Case(((150, 150), (0, 0), (3, 96), (200, 450)), page_size=16, is_quantized=True),
    Case(((300, 300), (130, 401)), 4, 2, 256, window=128, softcap=2.0, sinks=True),
    Case(((0, 0), (5, 5)), 2, 1),  # one program has no item
    Case(((128, 128), (1, 1), (193, 193), (64, 64))),
    Case(((260, 260), (40, 700)), 4, 2, 16, window=100),
    Case(((150, 150), (3, 256), (200, 450)), page_size=128),
    Case(((150, 150), (3, 96), (70, 450)), page_size=48),
)
EMULATED_TILES = (
    (128, Tile(2, 128, 2, num_q_stages=2)),
    (64, Tile(3, 64, 4, num_q_stages=2)),
    (64, Tile(2, 64, 2, ping_pong=False)),
)


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize(
    ("num_tiles", "num_cases"), [(1, 3), pytest.param(3, 8, marks=pytest.mark.slow)]
)
def test_the_kernel_is_attention_in_the_emulator(num_tiles, num_cases, monkeypatch):
    """With few programs, so that each has several items."""
    monkeypatch.setattr(hopper_prefill, "num_multiprocessors", lambda device: 3)
    monkeypatch.setattr(hopper_prefill, "make_schedule", schedule_of_lists)
    with emulated("nanovllm.kernels.hopper", "nanovllm.kernels.attention.hopper_prefill_kernel"):
        for i, (head_dim, tile) in enumerate(EMULATED_TILES[:num_tiles]):
            monkeypatch.setitem(hopper_prefill.TILES, head_dim, tile)
            for j, case in enumerate(EMULATED_CASES[:num_cases]):
                dtype = (torch.float16, torch.bfloat16)[(i + j) % 2]
                check(case, head_dim, dtype, "cpu", monkeypatch)


def schedule_of_lists(
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, num_tokens: int, rows: int, paged: bool
) -> torch.Tensor:
    """See ``make_schedule``."""
    tiles = []
    for seq, (q_start, k_start) in enumerate(
        zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_k[:-1].tolist(), strict=True)
    ):
        len_q, len_k = (int(x[seq + 1] - x[seq]) for x in (cu_seqlens_q, cu_seqlens_k))
        for offset in range(0, len_q, rows):
            place = q_start + offset, seq if paged else k_start, len_k - len_q + offset
            tiles.append((*place, min(rows, len_q - offset)))
    tiles.sort(key=lambda tile: -(tile[2] + tile[3]))
    most = num_tokens // rows + len(cu_seqlens_q) - 1
    return torch.tensor([[len(tiles)] * 4, *tiles, *[(9,) * 4] * (most - len(tiles))]).int()


@pytest.mark.parametrize("num_seeds", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_the_schedule_has_each_tile_once_and_long_contexts_first(num_seeds, device, monkeypatch):
    monkeypatch.setattr(hopper_prefill, "SCAN", 16)
    for seed in range(num_seeds if device == "cpu" else 100):
        rng = random.Random(seed)
        new = [rng.choice([0, 1, 64, 128, 129, 200, 700]) for _ in range(rng.randint(1, 40))]
        lens = [n + rng.choice([0, 0, 5, 128, 300]) for n in new]
        bounds = [torch.tensor([0, *x]).cumsum(0).int().to(device) for x in (new, lens)]
        args = sum(new) + rng.randint(0, 200), rng.choice([128, 192]), rng.random() < 0.5
        schedule, expected = make_schedule(*bounds, *args), schedule_of_lists(*bounds, *args)
        num_tiles = int(expected[0, 0])
        assert int(schedule[0, 0]) == num_tiles
        assert schedule.shape == expected.shape
        assert schedule[1:].tolist()[:num_tiles] == expected[1:].tolist()[:num_tiles]


def test_what_the_kernel_does_not_support_goes_to_the_other_one(monkeypatch):
    monkeypatch.setattr(hopper_prefill, "HAS_TRITON", True)
    monkeypatch.setattr(hopper_prefill, "is_hopper", lambda device: device == "cuda")
    batch = Paged([600, 5], [600, 5], 4, 2, 64, 16, torch.float16, "cpu")
    context = batch.context()

    def takes(
        cache: Any = batch.cache,
        context: Any = context,
        params: Any = PLAIN,
        tokens: int = 5000,
        **changes: Any,
    ) -> bool:
        q = MagicMock(device="cuda", dtype=torch.bfloat16)
        q.size.return_value, q.__len__.return_value = 128, tokens
        q.configure_mock(**changes)
        return can_launch(q, cache, context, params)

    assert takes()
    assert takes(dtype=torch.float16)
    assert not takes(device="cpu")
    assert not takes(dtype=torch.float32)
    assert not takes(**{"size.return_value": 96})
    assert not takes(tokens=4096)
    for feature in ({"window": 1024}, {"softcap": 2.0}, {"sinks": torch.ones(4)}):
        assert takes(params=AttentionParams(1.0, **feature))
    assert not takes(params=AttentionParams(1.0, window=128)), "tiles of keys would be masked"
    assert not takes(context=replace(context, max_seqlen_q=100))
    # A quantised cache is copied, for 5,000 x 128 query heads with at most 4 times the elements.
    quantized = batch.cache._replace(scales=torch.ones(1))
    for num_keys, is_taken in ((0, False), (605, True), (640_000, True), (640_001, False)):
        assert takes(cache=quantized, context=replace(context, num_keys=num_keys)) == is_taken
    assert not takes(cache=quantized, params=AttentionParams(1.0, window=1024))
    odd = Paged([600], [600], 4, 2, 64, 24, torch.float16, "cpu")
    assert not takes(cache=odd.cache)
    assert takes(cache=odd.cache, context=replace(context, block_tables=None))
    monkeypatch.setattr(hopper_prefill, "is_hopper", lambda device: False)
    assert not takes()


def test_a_kernel_that_does_not_compile_is_replaced_with_one_warning(monkeypatch, caplog):
    calls = []

    def broken(*args: Any) -> None:
        calls.append(args)
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(triton_backend, "hopper_prefill", broken)
    monkeypatch.setattr(triton_backend, "can_launch", lambda *args: True)
    monkeypatch.setattr(triton_backend, "prefill_attention", lambda *args: "other kernel")
    monkeypatch.setattr(fallback, "_failed", set())
    args: Any = torch.empty(0), *[None] * 5
    with caplog.at_level(logging.WARNING, "nanovllm"):
        for _ in range(2):
            assert TritonAttention().prefill(*args) == "other kernel"
    assert len(calls) == 1
    assert [r.getMessage() for r in caplog.records] == [
        "the prefill kernel for Hopper failed, so a slower kernel runs: "
        "RuntimeError: PassManager::run failed"
    ]

    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(fallback, "_failed", set())
    monkeypatch.setattr(triton_backend, "hopper_prefill", full)
    with pytest.raises(torch.OutOfMemoryError):
        TritonAttention().prefill(*args)


NEEDS_HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
# Mostly of the same heads, because each number of heads is compiled. The 132 programs of a GPU
# compute up to 5 items each.
GPU_CASES = {
    "one-token": Case(((1, 1),), 16, 8),
    "short": Case(((128, 128), (1, 1), (0, 0), (129, 129), (64, 64), (333, 333)), 16, 8),
    "many-items": Case(((4097, 4097), (1024, 1024), (5, 5)), 16, 8),
    "many-prompts": Case(((200, 200),) * 60, 16, 8),
    "one-kv-head": Case(((1000, 1000), (2, 1500), (77, 840)), 8, 1, 256),
    "all-features": Case(((700, 700), (130, 901), (2000, 2000)), 16, 8, 256, 128, 2.0, True),
    "softcap": Case(((2000, 2000), (130, 130)), 16, 8, softcap=2.0),
    "window": Case(((3000, 3000), (40, 1100)), 16, 8, 16, 300),
    "pages": Case(((600, 600), (3, 512), (256, 1300), (1000, 3000)), 16, 8, 128),
    "pages-of-48": Case(((600, 600), (70, 450)), 16, 8, 48),
    "quantized": Case(
        ((600, 600), (3, 512), (0, 0), (256, 1300), (1000, 3000)), 16, 8, 128, is_quantized=True
    ),
}
IN_HALF = ("many-items", "all-features")


@pytest.mark.gpu
@NEEDS_HOPPER
@pytest.mark.parametrize("head_dim", hopper_prefill.TILES)
@pytest.mark.parametrize("name", GPU_CASES)
def test_the_kernel_is_attention(name, head_dim, monkeypatch):
    check(GPU_CASES[name], head_dim, torch.bfloat16, "cuda", monkeypatch)
    if name in IN_HALF:
        check(GPU_CASES[name], head_dim, torch.float16, "cuda", monkeypatch)


@pytest.mark.gpu
@NEEDS_HOPPER
def test_the_backend_uses_the_kernel_for_long_prompts_also_in_a_graph(monkeypatch):
    """A graph's shapes are upper bounds: replayed with fewer tokens and sequences."""
    calls = []

    def counted(*args: Any) -> torch.Tensor:
        calls.append(args)
        return hopper_prefill.hopper_prefill(*args)

    monkeypatch.setattr(triton_backend, "hopper_prefill", counted)
    monkeypatch.setattr(hopper_prefill, "MIN_TOKENS", 1)
    backend, params = TritonAttention(), AttentionParams(0.1)
    batch = Paged([900, 700], [600, 700], 4, 2, 128, 256, torch.bfloat16, "cuda")
    context = batch.context()
    packed = torch.randn(2600, 8, 128, dtype=torch.bfloat16, device="cuda")
    q, *kv = packed.split((4, 2, 2), dim=1)
    args = *kv, batch.cache
    backend.prefill(q, *args, context, params)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.prefill(q, *args, context, params)
    assert len(calls) == 2
    for new, lens in (([600, 700], [900, 700]), ([0, 5], [0, 20]), ([130, 0], [900, 0])):
        for bounds, x in ((context.cu_seqlens_q, new), (context.cu_seqlens_k, lens)):
            bounds.copy_(torch.tensor([0, *x]).cumsum(0))
        out.fill_(torch.nan)
        graph.replay()
        expected = prefill_attention(q, *args, context, params)
        count = sum(new)
        torch.testing.assert_close(out[:count], expected[:count], rtol=0.02, atol=0.02)
        assert out[count:].isnan().all()
    unpaged = replace(context, block_tables=None, cu_seqlens_q=context.cu_seqlens_k)
    context.cu_seqlens_k.copy_(torch.tensor([0, 900, 1600]))
    out, expected = (f(q, *args, unpaged, params) for f in (backend.prefill, prefill_attention))
    assert len(calls) == 3
    torch.testing.assert_close(out[:1600], expected[:1600], rtol=0.02, atol=0.02)
