"""ExpertWeights with FP8 weights, against plain PyTorch on the same quantised inputs."""

from typing import Any

import pytest
import torch

from nanovllm.kernels.fp8 import FP8, GROUP, Fp8Rows, dequantize, quantize, quantize_blocks
from nanovllm.kernels.moe import gemv, grouped, hopper_grouped
from nanovllm.kernels.moe.experts import ExpertWeights, clamped_swiglu, experts_reference
from nanovllm.kernels.moe.gemv import experts_gemv
from nanovllm.kernels.moe.grouped import Tile, experts_grouped
from nanovllm.kernels.moe.route import Routing, route_triton
from nanovllm.kernels.silu_and_mul import silu_and_mul_reference
from tests.kernels.conftest import DEVICE
from tests.kernels.moe.test_moe import make_routing, random_routing, routings
from tests.kernels.oracle import assert_as_good_as_eager, poisoned

pytestmark = pytest.mark.usefixtures("exact_fp8")
BLOCKS = pytest.mark.parametrize("has_blocks", [False, True], ids=["rows", "blocks"])


def dequantized(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """One expert's weight, or rows of x, in fp64. Scales are those of rows, groups or blocks."""
    scales = scales.double()
    if scales.dim() == 1:
        scales = scales[:, None]
    for dim in range(2):
        scales = scales.repeat_interleave(codes.size(dim) // scales.size(dim), dim)
    return codes.view(FP8).double() * scales


def make(
    routing: Routing, hidden: int, columns: int, dtype: torch.dtype, has_blocks: bool, **fields: Any
) -> tuple[torch.Tensor, torch.Tensor, ExpertWeights]:
    """x, a residual and experts. All scales differ."""
    num_experts = routing.counts.size(1)
    function = quantize_blocks if has_blocks else quantize

    def weight(rows: int, width: int) -> list[torch.Tensor]:
        experts = torch.randn(num_experts, rows, width) * width**-0.5
        experts *= torch.logspace(-0.3, 0.3, rows)[:, None]
        experts *= torch.logspace(-0.3, 0.3, width)
        parts = zip(*map(function, experts), strict=True)
        return [torch.stack(part).to(DEVICE) for part in parts]

    gate_up, down = weight(2 * columns, hidden), weight(hidden, columns)
    if fields.pop("has_biases", False):
        fields["gate_up_bias"] = torch.randn(num_experts, 2 * columns).to(dtype).to(DEVICE)
        fields["down_bias"] = torch.randn(num_experts, hidden).to(dtype).to(DEVICE)
        fields |= {"limit": 0.7, "alpha": 1.7}
    experts = ExpertWeights(
        gate_up[0], down[0], gate_up_scales=gate_up[1], down_scales=down[1], **fields
    )
    x, residual = torch.randn(2, len(routing.topk_ids), hidden) * torch.logspace(-0.5, 0.5, hidden)
    return x.to(dtype).to(DEVICE), residual.to(dtype).to(DEVICE), experts


def gemm(rows: list[torch.Tensor], weight: list[Any], expert: int, like: torch.Tensor) -> Any:
    """x W^T + b for an expert, in the dtype of ``like``. Sums are in fp32 unless it is fp64."""
    codes, scales, bias = (None if t is None else t[expert] for t in weight)
    compute = torch.float64 if like.dtype is torch.float64 else torch.float32
    y = dequantized(*rows).to(compute) @ dequantized(codes, scales).to(compute).t()
    return (y if bias is None else y + bias).to(like.dtype)


def activation(x: torch.Tensor, experts: ExpertWeights) -> torch.Tensor:
    if experts.limit is None:
        return silu_and_mul_reference(x)
    return clamped_swiglu(x, experts.limit, experts.alpha)


def check_quantized(
    routing: Routing,
    x: torch.Tensor,
    experts: ExpertWeights,
    added: torch.Tensor | None,
    monkeypatch,
    module: Any = grouped,
    function: Any = experts_grouped,
    alignment: int = 1,
) -> None:
    """Each GEMM of a module's function against eager PyTorch with the inputs that it was given,
    both compared with fp64: rounding before a quantisation may change a code. The sorted rows of
    each expert begin at a multiple of the alignment."""
    quantize, inputs = module._quantize, []

    def record(values: torch.Tensor, weights: ExpertWeights) -> Any:
        inputs.append((values, quantize(values, weights)))
        return inputs[-1][1]

    with monkeypatch.context() as context:
        context.setattr(module, "_quantize", record)
        poisoned(context)
        ours = function(x, experts, routing, added)
    (_, x_rows), (inner, inner_rows) = inputs
    for codes, scales in (x_rows, inner_rows):
        assert codes.dtype is FP8 and (scales.dim() == 2) == (experts.group is not None)
    top_k = routing.topk_ids.size(1)
    flat = routing.topk_ids.flatten().long()
    order = flat.argsort(stable=True)
    counts = flat.bincount()
    aligned = (counts + alignment - 1) // alignment * alignment
    skipped = (aligned.cumsum(0) - aligned) - (counts.cumsum(0) - counts)  # before each expert
    used = torch.arange(len(flat), device=flat.device) + skipped[flat[order]]
    inner, inner_rows = inner[used], [part[used] for part in inner_rows]

    def both(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        like = torch.empty(0, dtype=dtype)
        gate_up = [experts.gate_up, experts.gate_up_scales, experts.gate_up_bias]
        down = [experts.down, experts.down_scales, experts.down_bias]
        expected = torch.empty(inner.shape, dtype=dtype, device=inner.device)
        parts = torch.empty(len(flat), x.size(1), dtype=dtype, device=inner.device)
        for expert in flat.unique().tolist():
            chosen = (flat[order] == expert).nonzero()[:, 0]
            assignment = order[chosen]
            rows = [part[assignment // top_k] for part in x_rows]
            expected[chosen] = activation(gemm(rows, gate_up, expert, like), experts)
            y = gemm([part[chosen] for part in inner_rows], down, expert, like)
            parts[assignment] = y * routing.topk_weights.flatten()[assignment, None].to(dtype)
        total = parts.view(len(x), top_k, -1).sum(1)
        return expected, total if added is None else total + added.to(dtype)

    for found, eager, exact in zip((inner, ours), both(x.dtype), both(torch.float64), strict=True):
        assert_as_good_as_eager(found, eager, exact)


def cases() -> dict[str, Routing]:
    ties = route_triton(torch.zeros(7, 6, device=DEVICE), 2, True)
    return routings() | {"ties": ties}


@BLOCKS
@pytest.mark.parametrize("name", ["one-token", "all-to-one", "empty-experts", "ties"])
def test_grouped_gemms(name, has_blocks, dtype, monkeypatch):
    """In small tiles. Without blocks, no tile divides the sizes."""
    monkeypatch.setattr(grouped, "choose_tile", lambda *_: Tile(16, 8, 64, 32, 64, 2, 4))
    routing, sizes = cases()[name], (128, 128) if has_blocks else (80, 48)
    for has_biases in (False, True) if name == "ties" else (False,):
        x, residual, experts = make(routing, *sizes, dtype, has_blocks, has_biases=has_biases)
        check_quantized(routing, x, experts, residual if has_biases else None, monkeypatch)


def check(
    function: Any, routing: Routing, x: torch.Tensor, experts: ExpertWeights, added: Any
) -> None:
    """With inputs that are not quantised."""
    plain = experts._replace(
        gate_up=torch.stack([*map(dequantized, experts.gate_up, experts.gate_up_scales)]),
        down=torch.stack([*map(dequantized, experts.down, experts.down_scales)]),
        gate_up_scales=None,
        down_scales=None,
    )
    in_fp64 = ExpertWeights(*(t.double() if isinstance(t, torch.Tensor) else t for t in plain))
    weights = routing._replace(topk_weights=routing.topk_weights.double())
    exact = experts_reference(
        x.double(), in_fp64, weights, None if added is None else added.double()
    )
    eager = experts_reference(x, experts, routing, added)
    assert_as_good_as_eager(function(x, experts, routing, added), eager, exact)


def in_bits(experts: ExpertWeights) -> ExpertWeights:
    """As GPUs without FP8 get them."""
    weights = (weight.view(torch.uint8) for weight in (experts.gate_up, experts.down))
    return experts._replace(**dict(zip(("gate_up", "down"), weights, strict=True)))


@BLOCKS
@pytest.mark.parametrize("has_bits", [False, True], ids=["fp8", "bits"])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_few_tokens(num_tokens, has_bits, has_blocks, dtype, monkeypatch):
    """Three tokens of which two have the same experts; one token with the tiles of the table, all
    of which are loaded before the wait."""
    sizes = (256, 640) if has_blocks else (200, 700)
    if num_tokens > 1:
        monkeypatch.setattr(gemv, "FP8_GATE_UP_CONFIG", (64, 128, 1))
        monkeypatch.setattr(gemv, "FP8_DOWN_CONFIG", (64, 256 if has_blocks else 64, 1))
        sizes = (256, 384) if has_blocks else (200, 72)
    routing = make_routing(torch.tensor([[3, 1], [0, 5], [3, 1]])[:num_tokens], 6)
    x, residual, experts = make(routing, *sizes, dtype, has_blocks, has_biases=num_tokens == 3)
    if has_bits:
        experts = in_bits(experts)
    with monkeypatch.context() as context:
        poisoned(context)
        found = experts_gemv(x, experts, routing, residual)
    check(lambda *_: found, routing, x, experts, residual)


@BLOCKS
def test_gpus_without_fp8(has_blocks, dtype, monkeypatch):
    """Weights are converted in the GEMMs, and inputs are not quantised."""
    monkeypatch.setattr(grouped, "choose_tile", lambda *_: Tile(16, 8, 32, 64, 64, 2, 4))
    routing = cases()["empty-experts"]
    x, residual, experts = make(
        routing, *((128, 128) if has_blocks else (80, 48)), dtype, has_blocks
    )
    check(experts_grouped, routing, x, in_bits(experts), residual)


def test_all_numbers_of_8_bits_are_dequantized():
    bits = torch.arange(256, dtype=torch.uint8).view(1, 2, 128)
    weights = ExpertWeights(
        bits, bits, gate_up_scales=torch.ones(1, 2), down_scales=torch.ones(1, 2)
    )
    for experts in (weights, weights._replace(gate_up=bits.view(FP8), down=bits.view(FP8))):
        found = experts.dequantized(torch.float32)
        assert torch.equal(found.down.nan_to_num(), bits.view(FP8).float().nan_to_num())


def test_blocks_have_one_scale():
    x = torch.randn(2 * GROUP, 3 * GROUP) * torch.logspace(-2, 2, 2 * GROUP)[:, None]
    rows = quantize_blocks(x)
    for i in range(2):
        for j in range(3):
            part = slice(i * GROUP, (i + 1) * GROUP), slice(j * GROUP, (j + 1) * GROUP)
            codes, scale = quantize(x[part].flatten())
            assert torch.equal(rows.codes[part].flatten().float(), codes.float())
            assert rows.scales[i, j] == scale
    repeated = Fp8Rows(rows.codes, rows.scales.repeat_interleave(GROUP, 0))
    error = (dequantize(repeated) - x).abs().max() / x.abs().max()
    assert error < 2**-4


@pytest.mark.gpu
@BLOCKS
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 100, 256, 2000])
def test_a_layer_of_qwen3_30b_a3b(num_tokens, has_blocks, monkeypatch):
    """In the tiles of the table, with all numbers of tokens per expert; and on Hopper, where many
    tokens take it, in the other kernel for blocks."""
    routing = random_routing(num_tokens, 128, 8)
    x, residual, experts = make(routing, 2048, 768, torch.bfloat16, has_blocks)
    if num_tokens <= 4:
        check(experts_gemv, routing, x, experts, residual)
    args = routing, x, experts, residual, monkeypatch
    check_quantized(*args, function=grouped._experts_tiled)
    if hopper_grouped.is_faster(x, experts, routing):
        function = hopper_grouped.experts_hopper
        check_quantized(*args, hopper_grouped, function, hopper_grouped.SCALE_ALIGNMENT)
    check(experts_grouped, routing, x, in_bits(experts), residual)
