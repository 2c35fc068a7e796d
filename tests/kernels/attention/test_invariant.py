"""Batch-invariant attention: against naive attention, and bits in prefills and decodes."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from nanovllm.kernels.attention import fixed_schedule, invariant, prefill
from nanovllm.kernels.attention.fixed_schedule import EXTRA_ROWS, SPLIT
from nanovllm.kernels.attention.invariant import InvariantTritonAttention, Tile, choose_tile
from nanovllm.utils.context import Context
from tests.kernels.attention.test_attention import SLOW, Paged, naive
from tests.kernels.attention.test_attention_params import make_params
from tests.kernels.conftest import DEVICE
from tests.kernels.oracle import assert_as_good_as_eager, poisoned

SHAPES = {"group2": (2, 1, 32, 16), "d24-group3-block7": (6, 2, 24, 7)}  # as in test_attention.py
NAMES = ("plain", "window5", "window40", "softcap", "sinks", "window20-softcap-sinks")
FAST = ("plain", "group2"), ("softcap", "group2"), ("window20-softcap-sinks", "d24-group3-block7")
# The interpreter takes its time: the other pairs run with the slow tests.
EACH = pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(name, shape, id=f"{name}-{id_}", marks=[] if (name, id_) in FAST else SLOW)
        for name in NAMES
        for id_, shape in SHAPES.items()
    ],
)


@pytest.fixture
def small(monkeypatch):
    """On a CPU, tiles of 16 keys and splits of 32, so that short contexts have several; and one
    program for all rows of a decode's schedule."""
    if DEVICE == "cpu":
        monkeypatch.setattr(fixed_schedule, "SPLIT", 32)
        monkeypatch.setattr(invariant, "choose_tile", lambda *_: Tile(16, 16, 4, 2))
        monkeypatch.setattr(invariant, "NUM_PROGRAMS", 0)


@pytest.fixture
def ordered_matmul(monkeypatch):
    """The interpreter's matmuls sum each element in order, as a tensor core does. Those of NumPy
    may sum the rows of one matrix in different orders."""
    if DEVICE == "cuda":
        return
    from triton.runtime import interpreter

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        total, a, b = d.data, a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        for k in range(a.shape[1]):
            total = total + a[:, k, None] * b[k]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def decode_context(paged, lens, params):
    """A decode of sequences that share the blocks of the first one, with contexts of ``lens``."""
    q_heads, (kv_heads, head_dim) = paged.qs[0].size(1), paged.cache.k.shape[2:]
    shape = q_heads, kv_heads, head_dim, paged.cache.k.dtype, paged.cache.scales is not None
    lens = np.array(lens, np.int32)
    schedule = InvariantTritonAttention().split_kv(lens, *shape, params.window)
    return Context(
        block_tables=paged.tables[:1].repeat(len(lens), 1),
        context_lens=torch.from_numpy(lens).to(paged.device),
        split_kv_schedule=torch.from_numpy(schedule).to(paged.device),
        max_seqlen_k=int(lens.max()),
    )


@EACH
@pytest.mark.parametrize("quantized", [False, True])
def test_as_good_as_eager(quantized, name, shape, dtype, device, small, exact_fp8, monkeypatch):
    """Prefills of whole prompts and of chunks, and decodes; keys before the window are NaN."""
    params = make_params(name, shape, device)
    backend = InvariantTritonAttention()
    for lens, new, is_paged in (
        ([1, 50], [1, 50], False),
        ([30, 5, 70, 64], [7, 5, 1, 0], True),
    ):
        paged = Paged(lens, new, *shape, dtype, device)
        if quantized:
            if not is_paged:
                continue
            paged.quantize()
        if is_paged:
            paged.forget(params.window)
        with monkeypatch.context() as patch:
            paged.check(backend, paged.context(paged=is_paged), patch, params)
    lens = [1, 16, 32, 33, 97]
    paged = Paged(lens, [1] * len(lens), *shape, dtype, device)
    if quantized:
        paged.quantize()
    paged.forget(params.window)
    exact = torch.cat([naive(*t, params) for t in zip(paged.qs, paged.ks, paged.vs, strict=True)])
    q, context = torch.cat(paged.qs), decode_context(paged, lens, params)
    context.block_tables.copy_(paged.tables)
    poisoned(monkeypatch)
    out = backend.decode(q, paged.cache, context, params)
    assert_as_good_as_eager(out, exact.to(dtype), exact, ulps=4.0)
    assert not any(arrived.any() for arrived in backend._arrived.values())


@EACH
@pytest.mark.parametrize("quantized", [False, True])
def test_a_token_has_the_same_bits_in_prefill_chunk_and_decode(
    quantized, name, shape, device, small, ordered_matmul, exact_fp8, monkeypatch
):
    """Also where a decode has too few rows for all splits, so that a program merges several."""
    dtype, length, cuts, lens = torch.float32, 70, (0, 3, 40, 70), [1, 16, 17, 32, 33, 64, 65, 70]
    if device == "cuda":
        dtype, length, cuts = torch.bfloat16, 1500, (0, 3, 64, 700, 811, 1500)
        lens = [*range(1, length + 1)]
    params = make_params(name, shape, device)
    backend = InvariantTritonAttention()
    paged = Paged([length], [length], *shape, dtype, device)
    q, k, v = paged.qs[0], paged.ks[0], paged.vs[0]
    if quantized:
        paged.quantize()
    arguments = k, v, paged.cache
    expected = backend.prefill(q, *arguments, paged.context(paged=quantized), params)
    assert torch.equal(backend.prefill(q, *arguments, paged.context(), params), expected)
    for first, last in pairwise(cuts):
        paged.contexts, paged.new_tokens = [last], [last - first]
        chunk = backend.prefill(q[first:last], *arguments, paged.context(), params)
        assert torch.equal(chunk, expected[first:last]), (first, last)
    rows = torch.tensor(lens, device=device) - 1
    for extra_rows in (EXTRA_ROWS, 2):
        monkeypatch.setattr(fixed_schedule, "EXTRA_ROWS", extra_rows)
        context = decode_context(paged, lens, params)
        out = backend.decode(q[rows], paged.cache, context, params)
        assert torch.equal(out, expected[rows]), extra_rows
    alone = backend.decode(q[-1:], paged.cache, decode_context(paged, [length], params), params)
    assert torch.equal(alone, expected[-1:])


def test_rows_that_pad_a_graph_give_zeros(device, small):
    paged = Paged([20], [1], 4, 2, 32, 16, torch.float32, device)
    context = decode_context(paged, [0, 20, 0], make_params("plain", (4, 2, 32, 16), device))
    q = torch.randn(3, 4, 32, device=device)
    params = make_params("sinks", (4, 2, 32, 16), device)
    out = InvariantTritonAttention().decode(q, paged.cache, context, params)
    assert not out[0].any() and out[1].all() and not out[2].any()


def test_sequences_that_pad_a_prefill_change_nothing(device, small, monkeypatch):
    monkeypatch.setattr(prefill, "SCAN", 16)
    new = [0, 1, 3, 0, 20, 2, 0] * 3
    batch = Paged([max(1, n) for n in new], new, 4, 2, 32, 16, torch.float32, device)
    batch.check(InvariantTritonAttention(), batch.context(), monkeypatch)


def test_keys_per_tile_divide_splits():
    for head_dim in (64, 128, 256):
        for dtype in (torch.float32, torch.bfloat16):
            for memory in (99 << 10, 227 << 10):
                tile = choose_tile(5, head_dim, dtype, memory)
                assert SPLIT % tile.num_keys == 0
    assert choose_tile(71, 128, torch.bfloat16, 227 << 10).num_rows == 128
