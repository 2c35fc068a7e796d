"""The batch-invariant attention of CPUs: the same bits in prefills, chunks and decodes."""

from itertools import pairwise

import pytest
import torch

from nanovllm.kernels.attention.base import AttentionParams
from nanovllm.kernels.attention.torch_invariant import TILE, BatchInvariantTorchAttention
from tests.kernels.attention.test_attention import Paged
from tests.kernels.rows import num_threads, same_bits

LENGTH = 2 * TILE + 37
SHAPES = {  # q_heads, kv_heads, head_dim, block_size
    "d64-block16": (4, 2, 64, 16),
    "d24-group3-block7": (3, 1, 24, 7),
    "d128-mha": (2, 2, 128, 64),
    "d16-group7": (14, 2, 16, 32),
}
PARAMS = {
    "plain": AttentionParams(0.2),
    "window": AttentionParams(0.2, window=50),
    "wide-window": AttentionParams(0.2, window=TILE + 30),
    "softcap-sinks": AttentionParams(0.3, softcap=5.0, sinks=torch.zeros(0)),
    "all": AttentionParams(0.3, window=33, softcap=5.0, sinks=torch.zeros(0)),
}


def params_of(name: str, num_heads: int) -> AttentionParams:
    params = PARAMS[name]
    return params if params.sinks is None else params._replace(sinks=torch.randn(num_heads))


def attend(paged: Paged, bounds: list[int], params: AttentionParams) -> torch.Tensor:
    """Attention of one sequence in steps: of a decode for one token, and else of a prefill. The
    first step reads no cache."""
    backend, out = BatchInvariantTorchAttention(), []
    (q,), (k,), (v,) = paged.qs, paged.ks, paged.vs
    for begin, end in pairwise(bounds):
        paged.contexts, paged.new_tokens = [end], [end - begin]
        if end - begin == 1 and begin:
            context = paged.context(decode=True, window=params.window)
            out.append(backend.decode(q[begin:end], paged.cache, context, params))
        else:
            context = paged.context(paged=begin > 0)
            step = q[begin:end], k[:end], v[:end]
            out.append(backend.prefill(*step, paged.cache, context, params))
    return torch.cat(out)


FAST = (("plain", "d24-group3-block7"), ("window", "d64-block16"), ("all", "d16-group7"))
CASES = pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(name, shape, marks=[] if (name, shape) in FAST else pytest.mark.slow)
        for name in PARAMS
        for shape in SHAPES
    ],
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@CASES
def test_prefills_chunks_and_decodes_have_the_same_bits(name: str, shape: str, dtype: torch.dtype):
    q_heads, kv_heads, head_dim, block = SHAPES[shape]
    paged = Paged([LENGTH], [LENGTH], q_heads, kv_heads, head_dim, block, dtype, "cpu")
    params = params_of(name, q_heads)
    expected = attend(paged, [0, LENGTH], params)
    for bounds in (
        [0, 1, 2, 3, 20, 21, 149, 150, LENGTH - 1, LENGTH],
        [0, 100, TILE, TILE + 1, 2 * TILE - 1, 2 * TILE, 2 * TILE + 1, LENGTH],
        [0, *range(7, LENGTH, 31), LENGTH],
    ):
        assert same_bits(attend(paged, bounds, params), expected)
    with num_threads(2):
        assert same_bits(attend(paged, [0, 200, LENGTH], params), expected)


@CASES
def test_other_sequences_do_not_matter(name: str, shape: str):
    """Slots outside of the window and beyond the sequences hold NaN."""
    q_heads, kv_heads, head_dim, block = SHAPES[shape]
    sizes = [5, 200, 70, 1, 150], [5, 3, 0, 1, 150]
    paged = Paged(*sizes, q_heads, kv_heads, head_dim, block, torch.float32, "cpu")
    params = params_of(name, q_heads)
    paged.forget(params.window)
    backend, qs, tables = BatchInvariantTorchAttention(), paged.qs, paged.tables
    k, v = torch.cat(paged.ks), torch.cat(paged.vs)
    together = backend.prefill(torch.cat(qs), k, v, paged.cache, paged.context(), params)
    assert together.isfinite().all()
    alone = []
    for i in range(len(qs)):
        paged.contexts, paged.new_tokens = ([size[i]] for size in sizes)
        paged.tables = tables[i : i + 1]
        alone.append(backend.prefill(qs[i], k, v, paged.cache, paged.context(), params))
    assert same_bits(torch.cat(alone), together)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", PARAMS)
def test_it_is_as_exact_as_the_default_backend(name: str, paged: bool, monkeypatch):
    sizes = ([200, 5], [200, 5]) if not paged else ([200, 300, 5, 1], [3, 40, 5, 1])
    batch = Paged(*sizes, 4, 2, 64, 16, torch.float32, "cpu")
    params = params_of(name, 4)
    if paged:
        batch.forget(params.window)
    context = batch.context(paged=paged)
    batch.check(BatchInvariantTorchAttention(), context, monkeypatch, params)
