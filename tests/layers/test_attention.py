"""The attention layer over a paged cache against naive attention in fp64."""

from dataclasses import dataclass

import pytest
import torch

from nanovllm.kernels.attention.base import AttentionParams
from nanovllm.kernels.attention.kv_cache import KVCache
from nanovllm.kernels.attention.torch_backend import TorchAttention
from nanovllm.kernels.fp8 import FP8
from nanovllm.kernels.rope import RopeInputs
from nanovllm.layers.attention import Attention
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.utils.context import Context, step_context


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = [Shape(4, 4, 16), Shape(4, 2, 40), Shape(6, 1, 18), Shape(9, 3, 128), Shape(1, 1, 2)]
each_shape = pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda s: f"{s.heads}x{s.kv_heads}x{s.head_dim}"
)
each_block_size = pytest.mark.parametrize("block_size", [1, 16, 256])


def no_rope(q: torch.Tensor) -> RopeInputs:
    """All angles are 0."""
    positions = torch.zeros(len(q), dtype=torch.int32)
    return RotaryEmbedding(q.size(-1), 1, None)(positions)


# Batches of (tokens already in the cache, new tokens).
PREFILLS = {
    "whole": [(0, 1), (0, 15), (0, 16), (0, 300), (0, 17)],
    "cached-prefix": [(16, 5), (256, 40), (32, 1)],
    "chunk": [(40, 23)],
    "mixed": [(0, 7), (48, 16), (0, 260), (256, 1), (15, 2)],
}
DECODES = {
    "one": [(0, 1)],
    "ragged": [(0, 1), (15, 1), (16, 1), (17, 1), (300, 1)],
}


class PagedBatch:
    """Random sequences whose keys and values lie in shuffled blocks; every other slot of the
    cache is NaN, and the part that the step is to store is NaN too."""

    def __init__(
        self,
        lens: list[tuple[int, int]],
        block_size: int,
        shape: Shape,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.lens, self.block_size, self.shape = lens, block_size, shape

        def draw(length: int, heads: int) -> torch.Tensor:
            return torch.randn(length, heads, shape.head_dim).to(dtype)

        totals = [cached + new for cached, new in lens]
        self.q = [draw(new, shape.heads) for _, new in lens]
        self.keys = [draw(total, shape.kv_heads) for total in totals]
        self.values = [draw(total, shape.kv_heads) for total in totals]
        counts = [-(-total // block_size) for total in totals]
        # Some blocks belong to nobody; block 0, which pads the tables, is one of them.
        order = (1 + torch.randperm(sum(counts) + 3)).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        cache_shape = (sum(counts) + 4, block_size, shape.kv_heads, shape.head_dim)
        self.cache = KVCache(*torch.full((2, *cache_shape), torch.nan, dtype=dtype))
        self.fill(self.cache, [range(cached) for cached, _ in lens])

    def slot(self, i: int, position: int) -> int:
        return self.tables[i][position // self.block_size] * self.block_size + (
            position % self.block_size
        )

    def fill(self, cache: KVCache, ranges: list[range]) -> None:
        for i, positions in enumerate(ranges):
            slots = [self.slot(i, position) for position in positions]
            cache.k.flatten(0, 1)[slots] = self.keys[i][list(positions)]
            cache.v.flatten(0, 1)[slots] = self.values[i][list(positions)]

    def new_ranges(self) -> list[range]:
        return [range(cached, cached + new) for cached, new in self.lens]

    def context(self, is_prefill: bool, with_tables: bool = True) -> Context:
        new = torch.tensor([0] + [n for _, n in self.lens])
        totals = torch.tensor([0] + [cached + n for cached, n in self.lens])
        slots = [self.slot(i, p) for i, r in enumerate(self.new_ranges()) for p in r]
        width = max(map(len, self.tables))
        tables = torch.tensor([table + [0] * (width - len(table)) for table in self.tables])
        common = {
            "slot_mapping": torch.tensor(slots),
            "block_tables": tables.int() if with_tables else None,
            "max_seqlen_k": int(totals.max()),
        }
        if not is_prefill:
            return Context(context_lens=totals[1:].int(), **common)
        return Context(
            is_prefill=True,
            cu_seqlens_q=new.cumsum(0).int(),
            cu_seqlens_k=totals.cumsum(0).int(),
            max_seqlen_q=int(new.max()),
            **common,
        )

    def new_keys_and_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        ranges = self.new_ranges()
        keys, values = (
            torch.cat([whole[i][list(r)] for i, r in enumerate(ranges)])
            for whole in (self.keys, self.values)
        )
        return keys, values

    def layer(self) -> Attention:
        shape = self.shape
        params = AttentionParams(shape.head_dim**-0.5)
        layer = Attention(shape.heads, shape.head_dim, params, shape.kv_heads)
        layer.backend = TorchAttention()
        layer.kv_cache = self.cache
        return layer

    def run(self, context: Context, layer: Attention | None = None) -> torch.Tensor:
        with step_context(context):
            q, kv = torch.cat(self.q), self.new_keys_and_values()
            return (layer or self.layer())(q, *kv, no_rope(q))

    def expected(self) -> torch.Tensor:
        """Query by query, in fp64."""
        shape, out = self.shape, []
        group = shape.heads // shape.kv_heads
        for (cached, new), q, *kv in zip(self.lens, self.q, self.keys, self.values, strict=True):
            keys, values = (x.double().repeat_interleave(group, 1) for x in kv)
            for t in range(new):
                end = cached + t + 1
                scores = torch.einsum("hd,nhd->hn", q[t].double(), keys[:end])
                weights = (scores * shape.head_dim**-0.5).softmax(-1)
                out.append(torch.einsum("hn,nhd->hd", weights, values[:end]))
        return torch.stack(out)

    def check(self, output: torch.Tensor, rtol: float = 1e-4, atol: float = 1e-5) -> None:
        """The output is right, and the cache holds the new tokens and nothing else new."""
        torch.testing.assert_close(output.double(), self.expected(), rtol=rtol, atol=atol)
        expected = KVCache(*(torch.full_like(x, torch.nan) for x in self.cache[:2]))
        self.fill(expected, [range(cached + new) for cached, new in self.lens])
        exact = {"rtol": 0, "atol": 0, "equal_nan": True}
        torch.testing.assert_close(self.cache.k, expected.k, **exact)
        torch.testing.assert_close(self.cache.v, expected.v, **exact)


@each_shape
@each_block_size
@pytest.mark.parametrize("lens", PREFILLS.values(), ids=PREFILLS)
def test_prefill_through_the_cache(lens, block_size, shape):
    batch = PagedBatch(lens, block_size, shape)
    batch.check(batch.run(batch.context(is_prefill=True)))


@each_shape
@each_block_size
def test_prefill_that_reads_no_cache(block_size, shape):
    batch = PagedBatch(PREFILLS["whole"], block_size, shape)
    batch.check(batch.run(batch.context(is_prefill=True, with_tables=False)))


@each_shape
@each_block_size
@pytest.mark.parametrize("lens", DECODES.values(), ids=DECODES)
def test_decode(lens, block_size, shape):
    batch = PagedBatch(lens, block_size, shape)
    batch.check(batch.run(batch.context(is_prefill=False)))


@pytest.mark.parametrize("block_size", [1, 16])
def test_sequences_share_a_prefix(block_size):
    """Two tables name the same blocks for the first 32 tokens."""
    batch = PagedBatch([(32, 9), (32, 3)], block_size, Shape(4, 2, 16))
    num_shared = 32 // block_size
    batch.keys[1][:32], batch.values[1][:32] = batch.keys[0][:32], batch.values[0][:32]
    for block_id in batch.tables[1][:num_shared]:  # what they had is nobody's now
        batch.cache.k[block_id] = batch.cache.v[block_id] = torch.nan
    batch.tables[1][:num_shared] = batch.tables[0][:num_shared]
    batch.check(batch.run(batch.context(is_prefill=True)))


@pytest.mark.parametrize("is_prefill", [True, False])
def test_a_fully_cached_prompt_is_computed_without_storing(is_prefill):
    """Its last token runs only for its logits: slot -1, and the key that is there stays."""
    batch = PagedBatch([(31, 1), (15, 1)], 16, Shape(4, 2, 16))
    batch.fill(batch.cache, batch.new_ranges())
    context = batch.context(is_prefill)
    context.slot_mapping.fill_(-1)
    batch.check(batch.run(context))


def test_chunks_add_up_to_the_whole_prompt():
    whole = PagedBatch([(0, 50)], 16, Shape(4, 2, 40))
    layer, outputs = whole.layer(), []
    q = whole.q[0]
    for start, end in ((0, 7), (7, 32), (32, 33), (33, 50)):
        whole.lens, whole.q[0] = [(start, end - start)], q[start:end]
        outputs.append(whole.run(whole.context(is_prefill=True), layer))
    whole.lens, whole.q[0] = [(0, 50)], q
    whole.check(torch.cat(outputs))


def test_a_quantized_cache_is_the_same_however_a_sequence_is_computed():
    """Bit for bit: as a whole prompt, in chunks, and with decodes. Attention reads what is stored,
    also of the step's own tokens: the outputs are those of an unquantised cache with these keys
    and values."""
    batch = PagedBatch([(0, 50)], 16, Shape(4, 2, 40))
    q, blocks, outputs, caches = batch.q[0], len(batch.cache.k), [], []
    for ends in ([50], [7, 32, 33, 50], [5, *range(6, 51)]):
        numbers = torch.full((2, *batch.cache.k.shape), torch.nan).to(FP8)
        batch.cache = KVCache(*numbers, torch.full((blocks, 2, 2, 16), torch.nan))
        layer, outs, start = batch.layer(), [], 0
        for end in ends:
            batch.lens, batch.q[0] = [(start, end - start)], q[start:end]
            is_prefill = start == 0 or end - start > 1
            outs.append(batch.run(batch.context(is_prefill), layer))
            start = end
        outputs.append(torch.cat(outs))
        caches.append(batch.cache)
    for cache, output in zip(caches, outputs, strict=True):
        for x, first in zip(cache, caches[0], strict=True):
            assert torch.equal(x.view(torch.uint8), first.view(torch.uint8))
        torch.testing.assert_close(output, outputs[0], rtol=1e-4, atol=1e-5)
    batch.lens, batch.q[0] = [(0, 50)], q
    unquantized = batch.expected()
    slots = [batch.slot(0, position) for position in range(50)]
    for i, vectors in enumerate((batch.keys, batch.values)):
        scales = cache.scales[:, i].transpose(1, 2).flatten(0, 1)[slots]
        vectors[0] = cache[i].flatten(0, 1)[slots].float() * scales.unsqueeze(-1)
    torch.testing.assert_close(outputs[0].double(), batch.expected(), rtol=1e-4, atol=1e-5)
    assert (outputs[0] - unquantized).abs().max() > 1e-3


def test_without_a_cache_nothing_is_stored():
    batch = PagedBatch([(0, 5), (0, 9)], 16, Shape(4, 2, 16))
    layer = batch.layer()
    layer.kv_cache = Attention(4, 16, AttentionParams(0.25), 2).kv_cache
    context = Context(
        is_prefill=True,
        cu_seqlens_q=torch.tensor([0, 5, 14], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([0, 5, 14], dtype=torch.int32),
        max_seqlen_q=9,
        max_seqlen_k=9,
    )
    output = batch.run(context, layer)
    torch.testing.assert_close(output.double(), batch.expected(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_prefill", [True, False])
def test_half_precision_stays_within_its_rounding(dtype, is_prefill):
    lens = PREFILLS["mixed"] if is_prefill else DECODES["ragged"]
    batch = PagedBatch(lens, 16, Shape(4, 2, 40), dtype)
    output = batch.run(batch.context(is_prefill))
    assert output.dtype == dtype
    eps = torch.finfo(dtype).eps
    batch.check(output, rtol=4 * eps, atol=8 * eps)


def test_strided_values_as_the_packed_projection_gives_them():
    """q, k and v are views of one [N, heads + 2 kv_heads, D] tensor."""
    batch = PagedBatch([(0, 6), (16, 3)], 16, Shape(4, 2, 16))
    packed = torch.cat((torch.cat(batch.q), *batch.new_keys_and_values()), dim=1)
    with step_context(batch.context(is_prefill=True)):
        output = batch.layer()(*packed.split((4, 2, 2), dim=1), no_rope(packed))
    batch.check(output)


@pytest.mark.parametrize("is_prefill", [True, False])
def test_scale_is_applied(is_prefill):
    batch = PagedBatch([(16, 4)] if is_prefill else [(16, 1)], 16, Shape(4, 2, 16))
    layer, context = batch.layer(), batch.context(is_prefill)
    plain = batch.run(context, layer)
    layer.params = AttentionParams(2 * layer.params.scale)
    doubled = batch.run(context, layer)
    batch.q[0] /= 2
    torch.testing.assert_close(batch.run(context, layer), plain)
    assert not torch.allclose(doubled, plain, atol=1e-3)
