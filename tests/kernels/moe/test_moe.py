"""The kernels of mixtures of experts against their references, and these against plain loops."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels.moe import gemv, grouped
from nanovllm.kernels.moe.experts import ExpertWeights, experts_reference
from nanovllm.kernels.moe.gemv import experts_gemv
from nanovllm.kernels.moe.grouped import Tile, experts_grouped
from nanovllm.kernels.moe.mxfp4 import (
    _SHIFTS,
    LOWEST_BITS,
    SIGN_BITS,
    dequantize_mxfp4,
    pack_mxfp4,
    pack_mxfp4_scales,
    unpack_mxfp4,
)
from nanovllm.kernels.moe.mxfp4_gemv import experts_gemv_mxfp4
from nanovllm.kernels.moe.route import (
    MAX_UNSORTED_TOKENS,
    Routing,
    chunk_size,
    route_reference,
    route_triton,
)
from nanovllm.kernels.moe.sort import max_tiles, sort_triton
from tests.kernels.conftest import DEVICE, DTYPES
from tests.kernels.moe.references import count_tokens, sort_reference
from tests.kernels.oracle import assert_as_good_as_eager, poisoned
from tests.kernels.test_compile import FASTER

slow = pytest.mark.slow
SHAPES = [  # tokens, experts, top_k
    (1, 8, 2),
    (5, 5, 5),
    (33, 128, 8),
    pytest.param(300, 60, 4, marks=slow),
    pytest.param(1500, 12, 3, marks=slow),
    pytest.param(2100, 128, 8, marks=slow),
]


def assert_same_routing(found: Routing, expected: Routing) -> None:
    torch.testing.assert_close(found.topk_weights, expected.topk_weights, rtol=1e-5, atol=1e-6)
    assert torch.equal(found.topk_ids, expected.topk_ids)
    if expected.ranks is None:
        assert found.ranks is None and found.counts is None
    else:
        assert torch.equal(found.ranks, expected.ranks)
        assert torch.equal(found.counts, expected.counts)


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SHAPES)
def test_route(num_tokens, num_experts, top_k, norm_topk_prob, dtype, monkeypatch):
    logits = torch.randn(num_tokens, num_experts).to(dtype).to(DEVICE)
    expected = count_tokens(route_reference(logits, top_k, norm_topk_prob), num_experts)
    probs = logits.float().softmax(-1)
    plain, _ = probs.topk(top_k)
    if norm_topk_prob:
        plain /= plain.sum(-1, keepdim=True)
    torch.testing.assert_close(expected.topk_weights, plain)
    size = chunk_size(num_tokens, num_experts)
    for chunk, experts in enumerate(expected.topk_ids.split(size)[:20]):
        flat = experts.flatten().tolist()
        ranks = [flat[:i].count(expert) for i, expert in enumerate(flat)]
        assert expected.ranks[chunk * size :][:size].flatten().tolist() == ranks
        assert expected.counts[chunk].tolist() == [flat.count(i) for i in range(num_experts)]
    poisoned(monkeypatch)
    assert_same_routing(route_triton(logits, top_k, norm_topk_prob), as_routed(expected))
    if num_tokens <= MAX_UNSORTED_TOKENS:
        assert_same_routing(route_triton(logits, top_k, norm_topk_prob, True), expected)


@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_routing_weights_depend_on_the_token_alone(norm_topk_prob):
    """A program sums in an order that depends on the number of tokens. So it must not matter."""
    logits = torch.randn(1500 if DEVICE == "cuda" else 40, 60, device=DEVICE)
    weights = route_triton(logits, 3, norm_topk_prob, True).topk_weights
    for num_tokens in (1, 7, len(logits) - 1):
        found = route_triton(logits[:num_tokens], 3, norm_topk_prob, True).topk_weights
        assert torch.equal(found, weights[:num_tokens])
    shuffled = logits[:, torch.randperm(60, device=DEVICE)]
    assert torch.equal(route_triton(shuffled, 3, norm_topk_prob, True).topk_weights, weights)


def test_of_equal_logits_the_lower_index_is_first():
    logits = torch.tensor([[1.0, 3, 2, 3, 3, 2], [0.0, -0.0, 0, 0, -1, 0], [-9.0] * 6])
    for route in (route_reference, route_triton):
        routing = route(logits.to(DEVICE), 4, False)
        assert routing.topk_ids.tolist() == [[1, 3, 4, 2], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_invalid_logits_give_indices_of_experts():
    """Else a NaN would make the GEMMs read memory out of bounds."""
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor([[nan] * 6, [-inf] * 6, [inf, nan, -inf, 0, inf, -nan]])
    for num_copies in (1, 3):  # also with more tokens, which are sorted
        routing = route_triton(logits.repeat(num_copies, 1).to(DEVICE), 4, True)
        for experts in routing.topk_ids.tolist():
            assert len({*experts}) == 4 and {*experts} <= {*range(6)}
    assert routing.counts.sum() == 36


def make_routing(experts: torch.Tensor, num_experts: int) -> Routing:
    """A routing to the experts [N, k], which differ within a row."""
    top_k = experts.size(1)
    logits = torch.zeros(len(experts), num_experts)
    logits.scatter_(1, experts, torch.arange(2.0 * top_k, top_k, -1).expand_as(experts))
    return count_tokens(route_reference(logits.to(DEVICE), top_k, True), num_experts)


def random_routing(num_tokens: int, num_experts: int, top_k: int) -> Routing:
    logits = torch.randn(num_tokens, num_experts, device=DEVICE)
    return count_tokens(route_reference(logits, top_k, True), num_experts)


def as_routed(routing: Routing) -> Routing:
    """The routing as the kernel returns it by default: of few tokens without ranks."""
    is_sorted = len(routing.topk_ids) > MAX_UNSORTED_TOKENS
    return routing if is_sorted else routing._replace(ranks=None)


def routings() -> dict[str, Routing]:
    random = torch.rand(70, 12).argsort(-1)[:, :3]
    return {
        "one-token": make_routing(torch.tensor([[3, 1]]), 4),
        "spread": make_routing(random, 12),
        "empty-experts": make_routing(random[:20] % 4 + torch.tensor([0, 4, 8]), 40),
        "all-to-one": make_routing(torch.full((37, 1), 2), 5),
        "all-to-all": make_routing(torch.arange(4).repeat(9, 1), 4),
    }


@pytest.mark.parametrize("block_m", [1, 16, 64])
@pytest.mark.parametrize("name", routings())
def test_sort(name, block_m, monkeypatch):
    routing = routings()[name]
    expected = sort_reference(routing, block_m)
    count = int(expected.num_tiles)
    assert count <= len(expected.tiles)
    experts = routing.topk_ids.flatten()[expected.order.long()]
    covered = []
    for expert, start, end in expected.tiles[:count].tolist():
        assert start % block_m == 0 or experts[start - 1] != expert or block_m < end
        rows = range(start, min(start + block_m, end))
        assert rows and (experts[start:end] == expert).all()
        assert end == len(experts) or experts[end] != expert
        covered += rows
    assert covered == [*range(len(experts))]
    poisoned(monkeypatch)
    found = sort_triton(routing, block_m)
    assert torch.equal(found.order, expected.order) and int(found.num_tiles) == count
    assert torch.equal(found.positions, expected.positions)
    assert torch.equal(found.tiles[:count], expected.tiles[:count])


@pytest.mark.parametrize("name", routings())
def test_an_aligned_sort(name, monkeypatch):
    """Each expert's assignments are those of the other sort, from the next multiple of four on."""
    routing = routings()[name]
    expected = sort_reference(routing, 16)
    poisoned(monkeypatch)
    found = sort_triton(routing, 16, 4)
    assert torch.equal(found.num_tiles, expected.num_tiles)
    start, tiles, num_tiles = 0, [], int(expected.num_tiles)
    for expert, count in enumerate(routing.counts.sum(0).tolist()):
        chosen = expected.order[routing.topk_ids.flatten()[expected.order.long()] == expert]
        assert torch.equal(found.order[start : start + count], chosen)
        assert found.positions[chosen.long()].tolist() == [*range(start, start + count)]
        tiles += [[expert, start + first, start + count] for first in range(0, count, 16)]
        start += -(-count // 4) * 4
    assert found.tiles[:num_tiles].tolist() == tiles and start <= len(found.order)


@pytest.mark.parametrize("num_tokens", [1, 100, pytest.param(16384, marks=slow)])
def test_sort_in_many_chunks(num_tokens):
    routing = random_routing(num_tokens, 128, 8)
    found, expected = sort_triton(routing, 32), sort_reference(routing, 32)
    assert torch.equal(found.order, expected.order)
    count = int(expected.num_tiles)
    assert torch.equal(found.tiles[:count], expected.tiles[:count])


def test_the_most_tiles():
    """Brute force over all counts of 3 experts."""
    for total in range(1, 12):
        for size in range(1, 6):
            counts = [(a, b, total - a - b) for a in range(total + 1) for b in range(total - a + 1)]
            most = max(sum(-(-count // size) for count in each) for each in counts)
            assert most <= max_tiles(total, 3, size) <= most + 1


def make(routing: Routing, hidden: int, columns: int, dtype: torch.dtype, has_biases: bool):
    num_experts, num_tokens = routing.counts.size(1), len(routing.topk_ids)
    shapes = {
        "x": (num_tokens, hidden),
        "gate_up": (num_experts, 2 * columns, hidden),
        "down": (num_experts, hidden, columns),
        "residual": (num_tokens, hidden),
        **({"gate_up_bias": (num_experts, 2 * columns)} if has_biases else {}),
        **({"down_bias": (num_experts, hidden)} if has_biases else {}),
    }
    scales = {"gate_up": hidden**-0.5, "down": columns**-0.5}
    tensors = {
        name: (torch.randn(shape, device=DEVICE) * scales.get(name, 1.0)).to(dtype)
        for name, shape in shapes.items()
    }
    return tensors.pop("x"), tensors.pop("residual"), ExpertWeights(**tensors)


def check_experts(
    mix,
    routing: Routing,
    hidden: int,
    columns: int,
    dtype: torch.dtype,
    monkeypatch,
    biases=(False, True),
):
    """Against eager PyTorch, both compared with fp64."""
    for has_biases in biases:
        x, residual, experts = make(routing, hidden, columns, dtype, has_biases)
        if has_biases:
            experts = experts._replace(limit=0.7, alpha=1.7)
        added = residual if has_biases else None
        eager = experts_reference(x, experts, routing, added)
        exact = experts_reference(
            x.double(),
            ExpertWeights(*(t.double() if isinstance(t, torch.Tensor) else t for t in experts)),
            routing._replace(topk_weights=routing.topk_weights.double()),
            None if added is None else added.double(),
        )
        with monkeypatch.context() as context:
            poisoned(context)
            ours = mix(x, experts, routing, added)
        assert_as_good_as_eager(ours, eager, exact)


CHOSEN = ("one-token", "all-to-one", "empty-experts")  # the interpreter takes its time


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in CHOSEN else slow) for name in routings()]
)
def test_grouped_gemms(name, dtype, monkeypatch):
    """With tiles that are small, and others."""
    tile = Tile(16, 8, 32, 16, 16, 2, 4)
    monkeypatch.setattr(grouped, "choose_tile", lambda *_: tile)
    check_experts(experts_grouped, routings()[name], 40, 24, dtype, monkeypatch)


def test_more_tiles_than_a_grid_may_have(monkeypatch):
    """In fp32, 131,072 tokens with 8 experts each have more than 65,535 tiles."""
    monkeypatch.setattr(grouped, "choose_tile", lambda *_: Tile(16, 16, 32, 32, 16, 2, 4))
    monkeypatch.setattr(grouped, "MAX_LAUNCHED_TILES", 5)
    routing = routings()["empty-experts"]
    assert sort_reference(routing, 16).num_tiles > 10
    check_experts(experts_grouped, routing, 40, 24, torch.float32, monkeypatch)


@pytest.mark.parametrize("num_tokens", [1, 3, pytest.param(16, marks=slow)])
def test_few_tokens(num_tokens, dtype, monkeypatch):
    """With sizes that no tile divides."""
    monkeypatch.setattr(gemv, "GATE_UP_CONFIG", (16, 64, 4))
    monkeypatch.setattr(gemv, "DOWN_CONFIG", (32, 32, 4))
    routing = make_routing(torch.rand(num_tokens, 6).argsort(-1)[:, :2], 6)
    check_experts(experts_gemv, routing, 100, 50, dtype, monkeypatch)


@pytest.mark.parametrize("top_k", [1, 3, pytest.param(10, marks=slow)])
def test_any_number_of_experts_per_token(top_k, dtype, monkeypatch):
    """With the tiles of the table: one is loaded before the wait, and others in the loop."""
    routing = make_routing(torch.rand(2, 12).argsort(-1)[:, :top_k], 12)
    check_experts(experts_gemv, routing, 20, 600, dtype, monkeypatch)


def make_mxfp4(*shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random packed values and scales, and the values that they stand for."""
    blocks = torch.randint(0, 256, (*shape[:-1], shape[-1] // 32, 16), dtype=torch.uint8)
    scales = torch.randint(121, 126, blocks.shape[:-1]).to(torch.uint8)
    tensors = pack_mxfp4(blocks), pack_mxfp4_scales(scales), dequantize_mxfp4(blocks, scales, dtype)
    return tuple(tensor.to(DEVICE) for tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [32, 96, 128, 160, 288])
def test_packed_mxfp4(width, dtype):
    words, scales, values = make_mxfp4(3, 5, width, dtype=dtype)
    assert words.shape == (3, -(-width // 128), 5, 32) and scales.shape == words.shape[:-1]
    assert torch.equal(unpack_mxfp4(words, scales, width, dtype), values)


def test_every_value_and_scale_of_mxfp4():
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(193, 1, 1)
    scales = torch.arange(193, dtype=torch.uint8)[:, None].repeat(1, 16)
    found = unpack_mxfp4(pack_mxfp4(blocks), pack_mxfp4_scales(scales), 512, torch.float32)
    assert torch.equal(found, dequantize_mxfp4(blocks, scales))
    with pytest.raises(ValueError, match="byte 255 is not a scale of MXFP4 weights"):
        pack_mxfp4_scales(torch.tensor([[100, 255]], dtype=torch.uint8))


@pytest.mark.parametrize("part", range(4))
def test_the_ptx_moves_the_bits_of_a_part_to_those_of_bf16(part):
    """For pairs of random words. The interpreter cannot run PTX."""
    pairs = np.random.default_rng(0).integers(0, 1 << 32, 4096, dtype=np.uint32)
    registers = {"$1": pairs}
    for instruction in _SHIFTS[part].split(";")[:-1]:
        name, target, *args = instruction.replace(",", "").split()
        a, b, *rest = (registers[arg] if arg in registers else int(arg, 0) for arg in args)
        if name == "lop3.b32":
            assert int(args[3], 0) == (0xF0 & 0xCC) | 0xAA  # the truth table of (a & b) | c
            registers[target] = a & np.uint32(b) | rest[0]
        else:
            operation = {
                "and.b32": np.bitwise_and,
                "shl.b32": np.left_shift,
                "shr.b32": np.right_shift,
                "mul.lo.u32": np.multiply,
            }[name]
            registers[target] = operation(a, np.uint32(b))
    words = pairs.view(np.uint16)
    expected = (words >> SIGN_BITS[part] & 1) << 15 | (words >> LOWEST_BITS[part] & 7) << 6
    assert np.array_equal(registers["r"].view(np.uint16), expected)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("one-token", (160, 96)), ("empty-experts", (160, 96)), ("one-token", (128, 832))],
    ids=str,
)
def test_mxfp4_weights(name, sizes, dtype, monkeypatch):
    """With widths that no tile divides, and groups that are padded, also the only one. With seven
    groups of down, three iterations are loaded before the wait, and one in the loop."""
    monkeypatch.setattr(grouped, "choose_tile", lambda *_: Tile(16, 8, 32, 16, 64, 2, 4))
    routing, (hidden, columns) = routings()[name], sizes
    x, residual, experts = make(routing, hidden, columns, dtype, True)
    num_experts = len(experts.down)
    gate_up, gate_up_scales, dense = make_mxfp4(num_experts, 2 * columns, hidden, dtype=dtype)
    down, down_scales, dense_down = make_mxfp4(num_experts, hidden, columns, dtype=dtype)
    experts = experts._replace(gate_up=dense, down=dense_down, limit=0.7, alpha=1.7)
    packed = experts._replace(
        gate_up=gate_up, gate_up_scales=gate_up_scales, down=down, down_scales=down_scales
    )
    eager = experts_reference(x, experts, routing, residual)
    assert torch.equal(experts_reference(x, packed, routing, residual), eager)
    exact = experts_reference(
        x.double(),
        ExpertWeights(*(t.double() if isinstance(t, torch.Tensor) else t for t in experts)),
        routing._replace(topk_weights=routing.topk_weights.double()),
        residual.double(),
    )
    for mix in (experts_grouped, experts_gemv_mxfp4):
        with monkeypatch.context() as context:
            poisoned(context)
            ours = mix(x, packed, routing, residual)
        assert_as_good_as_eager(ours, eager, exact)


@slow
@pytest.mark.parametrize(
    ("num_tokens", "dtype"),
    [
        (num_tokens, dtype)
        for num_tokens in (1, 17, 40, 100, 300)
        for dtype in DTYPES
        if num_tokens < 40 or dtype is not torch.float32  # which has one tile
    ],
    ids=str,
)
def test_the_tiles_of_the_table(num_tokens, dtype, monkeypatch):
    """With sizes that no tile divides."""
    routing = random_routing(num_tokens, 8, 3)
    check_experts(experts_grouped, routing, 152, 168, dtype, monkeypatch)


@slow
def test_many_tokens(monkeypatch):
    """More than 256 for each expert, so they get the largest tile; more than 1,024 take long in the
    interpreter, which runs a program for each of them."""
    routing = random_routing(1100, 4, 1)
    check_experts(experts_grouped, routing, 16, 8, torch.float16, monkeypatch)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "target",
    [
        pytest.param("80 163", marks=pytest.mark.exhaustive),
        pytest.param("89 99", marks=pytest.mark.exhaustive),
        pytest.param("100 227", marks=pytest.mark.exhaustive),
        pytest.param("120 99", marks=slow),
    ],
)
def test_compiles_for_every_other_generation(target, tmp_path):
    """Of Hopper GPUs, tests/kernels/test_compile.py compiles every kernel."""
    program = Path(__file__).with_name("compile_for.py")
    root = str(program.parents[3])
    result = subprocess.run(
        [sys.executable, str(program), *target.split()],
        env={**os.environ, **FASTER, "PYTHONPATH": root, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert "launches of 6 kernels" in result.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 4, 16, 100, 256, 2000])
def test_a_layer_of_qwen3_30b_a3b_in_a_cuda_graph(num_tokens):
    """Replayed with other tokens, whose experts have other numbers of tiles."""
    draw = lambda *shape, scale=1.0: torch.randn(  # noqa: E731
        shape, device="cuda", dtype=torch.bfloat16
    ).mul_(scale)
    gate = draw(128, 2048, scale=2048**-0.5)
    weights = ExpertWeights(
        draw(128, 1536, 2048, scale=2048**-0.5), draw(128, 2048, 768, scale=768**-0.5)
    )
    x, residual = draw(num_tokens, 2048), draw(num_tokens, 2048)
    mix = experts_gemv if num_tokens <= MAX_UNSORTED_TOKENS else experts_grouped

    def run() -> torch.Tensor:
        return mix(x, weights, route_triton(F.linear(x, gate), 8, True), residual)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = run()
    for spread in (1.0, 0.0):  # the second time all tokens are equal
        x.copy_(draw(num_tokens, 2048) * spread + draw(1, 2048))
        graph.replay()
        routing = route_reference(F.linear(x, gate), 8, True)
        eager = experts_reference(x, weights, routing, residual)
        exact = experts_reference(
            x.float(),
            weights._replace(gate_up=weights.gate_up.float(), down=weights.down.float()),
            routing,
            residual.float(),
        )
        assert_as_good_as_eager(ours, eager, exact.double())
