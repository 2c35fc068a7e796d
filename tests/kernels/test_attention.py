"""Paged attention against a naive fp64 softmax, on every backend that runs here."""

import pytest
import torch

from nanovllm.kernels.attention_torch import TorchAttention
from nanovllm.kernels.attention_triton import TritonAttention
from nanovllm.utils.context import Context
from tests.kernels.oracle import assert_as_good_as_eager, poisoned


def naive(q, keys, values, scale):
    """fp64 causal attention; q are the last tokens of keys."""
    len_q, len_k, group = q.size(0), keys.size(0), q.size(1) // keys.size(1)
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    visible = torch.ones(len_q, len_k, dtype=torch.bool, device=q.device).tril(len_k - len_q)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -1e30).softmax(-1), values)


class Paged:
    """Contexts of given lengths scattered over shuffled blocks; every other slot is NaN."""

    def __init__(self, contexts, new_tokens, q_heads, kv_heads, head_dim, block, dtype, device):
        def randn(*shape):
            return torch.randn(shape, device=device).to(dtype)

        self.qs = [randn(n, q_heads, head_dim) for n in new_tokens]
        self.ks = [randn(n, kv_heads, head_dim) for n in contexts]
        self.vs = [randn(n, kv_heads, head_dim) for n in contexts]
        counts = [-(-n // block) for n in contexts]
        free = torch.randperm(sum(counts) + 3).tolist()
        shape = (sum(counts) + 3, block, kv_heads, head_dim)
        self.k_cache = torch.full(shape, float("nan"), dtype=dtype, device=device)
        self.v_cache = self.k_cache.clone()
        tables = torch.zeros(len(contexts), max(counts), dtype=torch.int32)
        for i, (k, v) in enumerate(zip(self.ks, self.vs, strict=True)):
            for j in range(counts[i]):
                block_id = tables[i, j] = free.pop()
                part = k[j * block : (j + 1) * block]
                self.k_cache[block_id, : len(part)] = part
                self.v_cache[block_id, : len(part)] = v[j * block : (j + 1) * block]
        self.tables = tables.to(device)
        self.contexts, self.new_tokens, self.device = contexts, new_tokens, device

    def bounds(self, lens):
        return torch.tensor([0, *lens], device=self.device).cumsum(0).to(torch.int32)

    def context(self, decode=False, paged=True):
        if decode:
            lens = torch.tensor(self.contexts, dtype=torch.int32, device=self.device)
            return Context(
                block_tables=self.tables, context_lens=lens, max_seqlen_k=max(self.contexts)
            )
        return Context(
            is_prefill=True,
            block_tables=self.tables if paged else None,
            cu_seqlens_q=self.bounds(self.new_tokens),
            cu_seqlens_k=self.bounds(self.contexts),
            max_seqlen_q=max(self.new_tokens),
            max_seqlen_k=max(self.contexts),
        )

    def check(self, backend, context, monkeypatch):
        q = torch.cat(self.qs)
        scale = q.size(-1) ** -0.5
        k = torch.cat([x[-n:] for x, n in zip(self.ks, self.new_tokens, strict=True)])
        v = torch.cat([x[-n:] for x, n in zip(self.vs, self.new_tokens, strict=True)])
        triples = list(zip(self.qs, self.ks, self.vs, strict=True))
        exact = torch.cat([naive(*t, scale) for t in triples])
        eager = TorchAttention()
        if context.is_prefill:
            args = (q, k, v, self.k_cache, self.v_cache, context, scale)
            expected = eager.prefill(*args)
            poisoned(monkeypatch)
            out = backend.prefill(*args)
        else:
            args = (q, self.k_cache, self.v_cache, context, scale)
            expected = eager.decode(*args)
            poisoned(monkeypatch)
            out = backend.decode(*args)
        assert_as_good_as_eager(out, expected, exact, factor=3.0)


SHAPES = [  # q_heads, kv_heads, head_dim, block_size
    pytest.param((4, 2, 64, 16), id="d64-block16"),
    pytest.param((3, 1, 96, 8), id="d96-group3-block8"),
    pytest.param((4, 2, 128, 256), id="d128-block256"),
    pytest.param((2, 2, 256, 64), id="d256-mha"),
    pytest.param((9, 3, 64, 7), id="group3-block7"),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_decode(shape, dtype, device, monkeypatch):
    lens = [1, 17, 300, 64] if device == "cpu" else [1, 17, 300, 64, 257, 1000, 2049]
    paged = Paged(lens, [1] * len(lens), *shape, dtype, device)
    paged.check(TritonAttention(), paged.context(decode=True), monkeypatch)


@pytest.mark.parametrize("shape", SHAPES)
def test_decode_of_one_sequence_is_split(shape, dtype, device, monkeypatch):
    lens = [130] if device == "cpu" else [5000]
    paged = Paged(lens, [1], *shape, dtype, device)
    paged.check(TritonAttention(), paged.context(decode=True), monkeypatch)


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_of_whole_prompts(shape, dtype, device, monkeypatch):
    lens = [1, 5, 150] if device == "cpu" else [1, 5, 150, 700, 64]
    paged = Paged(lens, lens, *shape, dtype, device)
    paged.check(TritonAttention(), paged.context(paged=False), monkeypatch)


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_of_chunks_reads_the_cache(shape, dtype, device, monkeypatch):
    lens, new = [30, 5, 150, 64], [7, 5, 1, 64]
    if device == "cuda":
        lens, new = [*lens, 900, 1000], [*new, 300, 129]
    paged = Paged(lens, new, *shape, dtype, device)
    paged.check(TritonAttention(), paged.context(), monkeypatch)


def test_rows_that_pad_a_graph_give_zeros(device):
    q = torch.randn(2, 4, 64, device=device)
    cache = torch.randn(1, 16, 2, 64, device=device)
    context = Context(
        block_tables=torch.zeros(2, 4, dtype=torch.int32, device=device),
        context_lens=torch.zeros(2, dtype=torch.int32, device=device),
    )
    assert not TritonAttention().decode(q, cache, cache, context, 1.0).any()
