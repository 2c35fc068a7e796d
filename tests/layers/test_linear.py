"""Sharded linear layers against one plain nn.functional.linear over the whole weights."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from nanovllm.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from nanovllm.utils.distributed import TPGroup, make_tp_group, use_tp_group
from tests.forkserver import FORKSERVER

DEADLINE_S = 120


def run_ranks(
    work: Callable[[TPGroup, Any], Any], argument: Any, folder: Path, size: int = 2
) -> list[Any]:
    """``work(group, argument)`` on every rank of a gloo group; the results, in rank order.

    The ranks meet through a file, so no port can be taken; whatever they do, the call ends
    within DEADLINE_S.
    """
    arguments = (size, work, argument, str(folder))
    context = mp.start_processes(
        _rank_main, arguments, size, join=False, start_method=FORKSERVER.get_start_method()
    )
    end = time.monotonic() + DEADLINE_S
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < end, "the ranks are stuck"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join(10)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(size)]


def _rank_main(rank: int, size: int, work: Any, argument: Any, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/meet", size)
    group = make_tp_group(rank, size, store, torch.device("cpu"))
    with torch.inference_mode():
        torch.save(work(group, argument), f"{folder}/rank{rank}.pt")
    group.min(0, torch.device("cpu"))  # none leaves while another still needs it
    os._exit(0)  # as workers do: gloo's threads can abort a process that takes its time


# Sizes that no rank boundary can hide behind: all differ, none is a power of two.
INPUT, OUTPUT, NUM_TOKENS = 10, 14, 7
MERGED = {0: 6, 1: 10, 2: 4}
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 3


@dataclass(frozen=True)
class Case:
    """A layer, and the output rows of each checkpoint tensor that goes into it."""

    make: Callable[[bool], LinearBase]
    rows: dict[Any, int]  # shard id (None: no shards) -> rows
    splits: str = "output"  # "output", "input" or "nothing"


CASES = {
    "replicated": Case(lambda b: ReplicatedLinear(INPUT, OUTPUT, b), {None: OUTPUT}, "nothing"),
    "column": Case(lambda b: ColumnParallelLinear(INPUT, OUTPUT, b), {None: OUTPUT}),
    "merged": Case(
        lambda b: MergedColumnParallelLinear(INPUT, list(MERGED.values()), b), dict(MERGED)
    ),
    "qkv-gqa": Case(
        lambda b: QKVParallelLinear(INPUT, HEAD_DIM, HEADS, KV_HEADS, b),
        {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM},
    ),
    "qkv-mha": Case(
        lambda b: QKVParallelLinear(INPUT, HEAD_DIM, HEADS, bias=b),
        dict.fromkeys("qkv", HEADS * HEAD_DIM),
    ),
    "row": Case(lambda b: RowParallelLinear(INPUT, OUTPUT, b), {None: OUTPUT}, "input"),
}
each_case = pytest.mark.parametrize("name", CASES)
each_layout = pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
each_bias = pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])


def whole_tensors(name: str, bias: bool) -> dict[Any, tuple[torch.Tensor, torch.Tensor | None]]:
    """The checkpoint's (weight, bias) of each shard id."""
    generator = torch.Generator().manual_seed(list(CASES).index(name))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        shard_id: (draw(rows, INPUT), draw(rows) if bias else None)
        for shard_id, rows in CASES[name].rows.items()
    }


def whole_input() -> torch.Tensor:
    return torch.randn(NUM_TOKENS, INPUT, generator=torch.Generator().manual_seed(99))


def build(name: str, bias: bool, tp: TPGroup) -> LinearBase:
    """The layer of one rank, filled by its weight loaders from whole tensors."""
    with use_tp_group(tp):
        layer = CASES[name].make(bias)
    for param in layer.parameters():  # whatever no loader fills shows up
        param.data.fill_(torch.nan)
    for shard_id, (weight, bias_) in whole_tensors(name, bias).items():
        args = () if shard_id is None else (shard_id,)
        layer.weight.weight_loader(layer.weight, weight, *args)
        if bias_ is not None:
            layer.bias.weight_loader(layer.bias, bias_, *args)
    return layer


def rank_input(name: str, tp: TPGroup) -> torch.Tensor:
    x = whole_input()
    return x.chunk(tp.size, -1)[tp.rank].contiguous() if CASES[name].splits == "input" else x


def expected_output(name: str, bias: bool, tp: TPGroup) -> torch.Tensor:
    parts = []
    for weight, bias_ in whole_tensors(name, bias).values():
        y = F.linear(whole_input(), weight, bias_)
        parts.append(y.chunk(tp.size, -1)[tp.rank] if CASES[name].splits == "output" else y)
    return torch.cat(parts, -1)


def forward(name: str, bias: bool, packed: bool, tp: TPGroup) -> torch.Tensor:
    layer = build(name, bias, tp)
    if packed:
        layer.linear_weight.pack()
    with torch.inference_mode():
        return layer(rank_input(name, tp))


def forward_all(tp: TPGroup, _: Any = None) -> dict[tuple[str, bool, bool], torch.Tensor]:
    return {
        (name, bias, packed): forward(name, bias, packed, tp)
        for name in CASES
        for bias in (False, True)
        for packed in (False, True)
    }


@pytest.fixture(scope="module")
def outputs_of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_ranks(forward_all, None, tmp_path_factory.mktemp("linear"))


@each_case
@each_bias
@each_layout
def test_output_of_one_rank_equals_plain_linear(name, bias, packed):
    tp = TPGroup()
    output = forward(name, bias, packed, tp)
    torch.testing.assert_close(output, expected_output(name, bias, tp))


@each_case
@each_bias
@each_layout
@pytest.mark.parametrize("rank", [0, 1])
def test_output_of_two_ranks_equals_plain_linear(name, bias, packed, rank, outputs_of_two_ranks):
    """Guards a row-parallel bias added once per rank, and shards of q, k, v or of gate and up
    taken from the wrong place of the whole tensor."""
    output = outputs_of_two_ranks[rank][name, bias, packed]
    torch.testing.assert_close(output, expected_output(name, bias, TPGroup(rank, 2)))


@each_case
@each_layout
@pytest.mark.parametrize("shape", [(0, INPUT), (1, INPUT), (2, 3, INPUT)], ids=str)
def test_any_number_of_rows(name, packed, shape):
    layer, x = build(name, True, TPGroup()), torch.randn(shape)
    expected = layer(x).detach()
    if packed:
        layer.linear_weight.pack()
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), expected)
    assert expected.shape[:-1] == shape[:-1]


@each_case
@pytest.mark.parametrize("size", [1, 2])
def test_weight_loaders_keep_this_ranks_shard(name, size):
    """Both ranks' parameters, laid side by side shard by shard, are the whole tensors."""
    layers = [build(name, True, TPGroup(rank, size)) for rank in range(size)]
    dim = 1 if CASES[name].splits == "input" else 0
    offset = 0
    for weight, bias in whole_tensors(name, True).values():
        rows = weight.size(0) // (size if CASES[name].splits == "output" else 1)
        weights = [layer.weight[offset : offset + rows] for layer in layers]
        biases = [layer.bias[offset : offset + rows] for layer in layers]
        offset += rows
        if CASES[name].splits == "nothing":
            assert all(torch.equal(part, weight) for part in weights)
        else:
            assert torch.equal(torch.cat(weights, dim), weight)
        if CASES[name].splits == "output":
            assert torch.equal(torch.cat(biases), bias)
        else:
            assert all(torch.equal(part, bias) for part in biases)
    assert all(layer.weight.size(0) == offset for layer in layers)


def test_ranks_hold_an_equal_share_of_each_head_group():
    layer = build("qkv-gqa", False, TPGroup(1, 2))
    weights = {key: weight for key, (weight, _) in whole_tensors("qkv-gqa", False).items()}
    q = weights["q"][HEADS // 2 * HEAD_DIM :]  # the second half of the heads, and so on
    k, v = (weights[key][KV_HEADS // 2 * HEAD_DIM :] for key in "kv")
    assert torch.equal(layer.weight, torch.cat((q, k, v)))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_ranks_share_a_key_value_head_where_they_are_more(kv_heads):
    """Guards queries that meet the keys of another group."""
    heads, size, dim = 8, 4, 3
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(n * dim, INPUT, generator=generator) for n in (heads, kv_heads, kv_heads)
    )
    for rank in range(size):
        with use_tp_group(TPGroup(rank, size)):
            layer = QKVParallelLinear(INPUT, dim, heads, kv_heads)
        for shard_id, weight in {"q": q, "k": k, "v": v}.items():
            layer.weight.weight_loader(layer.weight, weight, shard_id)
        queries = [rank * heads // size, (rank + 1) * heads // size - 1]
        kv_head, same = (head * kv_heads // heads for head in queries)
        assert kv_head == same, "all queries of a rank have one key-value head"
        own_q = q[queries[0] * dim : (queries[1] + 1) * dim]
        own_k, own_v = (x[kv_head * dim : (kv_head + 1) * dim] for x in (k, v))
        assert torch.equal(layer.weight, torch.cat((own_q, own_k, own_v)))


@each_case
def test_weight_loader_converts_dtype(name):
    layer = build(name, False, TPGroup())
    for shard_id, (weight, _) in whole_tensors(name, False).items():
        args = () if shard_id is None else (shard_id,)
        layer.weight.weight_loader(layer.weight, weight.bfloat16(), *args)
    assert layer.weight.dtype == torch.float32
    whole = torch.cat([weight for weight, _ in whole_tensors(name, False).values()])
    assert torch.equal(layer.weight, whole.bfloat16().float())


@each_case
@pytest.mark.parametrize("size", [1, 2])
def test_weight_loader_refuses_another_shape(name, size):
    """Guards a tensor that is silently broadcast, or cut, to fit."""
    layer = build(name, True, TPGroup(0, size))
    shard_id, (weight, _) = next(iter(whole_tensors(name, True).items()))
    args = () if shard_id is None else (shard_id,)
    for wrong in (weight[:, :2], weight[:2], weight.T, weight[:2, :2]):
        with pytest.raises(ValueError, match=r"shape|evenly"):
            layer.weight.weight_loader(layer.weight, wrong, *args)
    for wrong in (torch.zeros(2), torch.zeros(2 * OUTPUT * 3)):
        with pytest.raises(ValueError, match="shape"):
            layer.bias.weight_loader(layer.bias, wrong, *args)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ColumnParallelLinear(4, 5),
        lambda: MergedColumnParallelLinear(4, [4, 5]),
        lambda: MergedColumnParallelLinear(4, [3, 5]),
        lambda: QKVParallelLinear(4, 2, 6, 3),
        lambda: QKVParallelLinear(4, 2, 5, 2),
        lambda: RowParallelLinear(5, 4),
    ],
    ids=["column", "merged", "merged-even-sum", "kv-heads", "heads", "row"],
)
def test_sizes_that_do_not_split_evenly_are_refused(make):
    with use_tp_group(TPGroup(0, 2)), pytest.raises(ValueError, match="split evenly into 2"):
        make()


def test_layers_keep_the_group_that_they_were_built_in():
    with use_tp_group(TPGroup(1, 2)):
        layer = ColumnParallelLinear(4, 8)
    assert (layer.tp.rank, layer.tp.size, layer.weight.shape) == (1, 2, (4, 4))
    assert ColumnParallelLinear(4, 8).weight.shape == (8, 4)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_tensor_with_all_shards_is_loaded_as_its_shards_are(rank):
    """As in Phi-3's checkpoints."""
    with use_tp_group(TPGroup(rank, 2)):
        qkv, fused_qkv = (QKVParallelLinear(6, 4, 4, 1, bias=True) for _ in range(2))
        merged, fused_merged = (MergedColumnParallelLinear(6, [8, 8]) for _ in range(2))
    q, kv = torch.randn(16, 6), torch.randn(2, 4, 6)
    for name, part in zip("qkv", (q, *kv), strict=True):
        qkv.weight.weight_loader(qkv.weight, part, name)
        qkv.bias.weight_loader(qkv.bias, part[:, 0], name)
    whole = torch.cat((q, *kv))
    fused_qkv.weight.weight_loader(fused_qkv.weight, whole)
    fused_qkv.bias.weight_loader(fused_qkv.bias, whole[:, 0])
    gate_up = torch.randn(16, 6)
    for shard_id, part in enumerate(gate_up.chunk(2)):
        merged.weight.weight_loader(merged.weight, part, shard_id)
    fused_merged.weight.weight_loader(fused_merged.weight, gate_up)
    assert torch.equal(fused_qkv.weight, qkv.weight) and torch.equal(fused_qkv.bias, qkv.bias)
    assert torch.equal(fused_merged.weight, merged.weight)
    for wrong in (gate_up[:-2], gate_up[:, :-1]):
        with pytest.raises(ValueError, match="the model needs shape"):
            merged.weight.weight_loader(merged.weight, wrong)


def test_rows_of_query_and_key_heads_are_reordered():
    order = [0, 2, 1, 3]
    plain, ordered = (QKVParallelLinear(6, 4, 2, 1, True, order_) for order_ in (None, order))
    whole = torch.randn(16, 6)
    for layer in (plain, ordered):
        layer.weight.weight_loader(layer.weight, whole)
        layer.bias.weight_loader(layer.bias, whole[:, 0])
    rows = [*order, *(4 + i for i in order), *(8 + i for i in order), *range(12, 16)]
    assert torch.equal(ordered.weight, plain.weight[rows])
    assert torch.equal(ordered.bias, plain.bias[rows])
    with pytest.raises(ValueError, match="split evenly"):
        ordered.weight.weight_loader(ordered.weight, whole[:7], "q")
