"""Grouped GEMMs for Hopper: on a GPU, and run by an emulator on a CPU."""

import pytest
import torch

from nanovllm.kernels import fallback
from nanovllm.kernels.moe import grouped
from nanovllm.kernels.moe import hopper_grouped as module
from nanovllm.kernels.moe.route import Routing
from tests.kernels.conftest import DEVICE
from tests.kernels.gemm.test_swiglu import NEEDS_HOPPER
from tests.kernels.gluon_emulator import emulated, emulated_gemm
from tests.kernels.moe import test_fp8_experts as fp8
from tests.kernels.moe.references import count_tokens
from tests.kernels.moe.test_moe import check_experts, make, make_routing, random_routing, routings

BLOCK_MODULES = (
    "hopper",
    "gemm.hopper_loop",
    "gemm.block_loop",
    "moe.hopper_grouped_kernel",
    "moe.block_grouped_kernel",
)
CPU_ONLY = pytest.mark.skipif(DEVICE == "cuda", reason="the kernel itself is tested on a GPU")


def uneven_routing(num_tokens: int) -> Routing:
    """Of five experts, one has all tokens, one none, and the others have a third each."""
    others = torch.randint(2, 5, (num_tokens, 1), generator=torch.Generator().manual_seed(0))
    return make_routing(torch.cat([torch.zeros_like(others), others], 1), 5)


@pytest.fixture
def emulator(monkeypatch):
    launch = module._launch

    def emulated(*args):
        with emulated_gemm("moe.hopper_grouped_kernel", module):
            launch(*args)

    monkeypatch.setattr(module, "_launch", emulated)


@CPU_ONLY
@pytest.mark.parametrize(
    "routing", [*routings().values(), uneven_routing(290)], ids=[*routings(), "uneven"]
)
@pytest.mark.parametrize(("hidden", "columns"), [(136, 144), (272, 200)])
def test_in_the_emulator(routing, hidden, columns, emulator, monkeypatch):
    check_experts(
        module.experts_hopper, routing, hidden, columns, torch.float16, monkeypatch, [False]
    )


@CPU_ONLY
@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize(
    "routing", [*routings().values(), uneven_routing(150)], ids=[*routings(), "uneven"]
)
def test_blocks_in_the_emulator(routing, monkeypatch):
    """The second GEMM has an odd number of groups. Tiles do not end with the last stage."""
    monkeypatch.setattr(module, "num_multiprocessors", lambda device: 3)
    monkeypatch.setattr(module, "BLOCK_STAGES", 3)
    launch = module._launch

    def emulate(*args):
        with emulated(*(f"nanovllm.kernels.{name}" for name in BLOCK_MODULES)):
            launch(*args)

    monkeypatch.setattr(module, "_launch", emulate)
    check_blocks(routing, 512, 384, monkeypatch)


def check_blocks(routing, hidden, columns, monkeypatch):
    x, residual, experts = fp8.make(routing, hidden, columns, torch.bfloat16, True)
    args = routing, x, experts, residual, monkeypatch
    fp8.check_quantized(*args, module, module.experts_hopper, module.SCALE_ALIGNMENT)


def test_which_fp8_the_kernel_can_compute(monkeypatch):
    """It needs blocks and a model in bf16."""
    monkeypatch.setattr(module, "supports", lambda kind, weight, dtypes: True)
    routing = random_routing(160, 8, 4)
    x, _, experts = fp8.make(routing, 128, 128, torch.bfloat16, True)
    assert module.is_faster(x, experts, routing)
    assert not module.is_faster(x.half(), experts, routing)
    x, _, experts = fp8.make(routing, 128, 128, torch.bfloat16, False)
    assert not module.is_faster(x, experts, routing)


@pytest.mark.parametrize("name", ["gate_up_bias", "limit", "alpha", "fp8"])
def test_what_the_kernel_cannot_compute(name, monkeypatch):
    monkeypatch.setattr(module, "supports", lambda kind, weight, dtypes: True)
    routing = random_routing(160, 8, 4)
    x, _, experts = make(routing, 136, 144, torch.float16, False)
    assert module.is_faster(x, experts, routing)
    assert not module.is_faster(x, experts, random_routing(159, 8, 4))
    fields = {"gate_up_bias": torch.zeros(8, 288), "limit": 7.0, "alpha": 1.7}
    if name in fields:
        experts = experts._replace(**{name: fields[name]})
    else:
        experts = experts._replace(down=experts.down.to(torch.float8_e4m3fn))
    assert not module.is_faster(x, experts, routing)


@pytest.mark.gpu
@NEEDS_HOPPER
@pytest.mark.parametrize(
    ("num_tokens", "num_experts"), [(40, 8), (1000, 8), (4000, 60), (2100, 128)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_on_hopper(num_tokens, num_experts, dtype, monkeypatch):
    for routing in (random_routing(num_tokens, num_experts, 4), uneven_routing(num_tokens)):
        check_experts(module.experts_hopper, routing, 264, 200, dtype, monkeypatch, [False])


@pytest.mark.gpu
@NEEDS_HOPPER
@pytest.mark.parametrize(
    ("num_tokens", "num_experts"), [(40, 8), (1000, 8), (4000, 60), (2100, 128)]
)
def test_blocks_on_hopper(num_tokens, num_experts, monkeypatch):
    for routing in (random_routing(num_tokens, num_experts, 4), uneven_routing(num_tokens)):
        check_blocks(routing, 1024, 384, monkeypatch)


@pytest.mark.gpu
@NEEDS_HOPPER
@pytest.mark.parametrize(
    ("num_experts", "top_k", "hidden", "columns"),
    [(128, 8, 2048, 768), (64, 8, 2048, 1024)],
    ids=["qwen3-30b-a3b", "olmoe"],
)
def test_results_of_blocks_have_the_same_bits_as_those_of_the_other_kernel(
    num_experts, top_k, hidden, columns
):
    routing = random_routing(2000, num_experts, top_k)
    x, residual, experts = fp8.make(routing, hidden, columns, torch.bfloat16, True)
    assert module.is_faster(x, experts, routing)
    ours = module.experts_hopper(x, experts, routing, residual)
    assert torch.equal(ours, grouped._experts_tiled(x, experts, routing, residual))


@pytest.mark.gpu
@NEEDS_HOPPER
@pytest.mark.parametrize(
    ("num_experts", "top_k", "hidden", "columns"),
    [(128, 8, 2048, 768), (8, 2, 4096, 14336), (64, 8, 2048, 1024), (40, 8, 1536, 512)],
    ids=["qwen3-30b-a3b", "mixtral", "olmoe", "granite"],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_results_have_the_same_bits_as_those_of_the_other_kernel(
    num_experts, top_k, hidden, columns, dtype
):
    """So the batch-invariant mode may have both, and use either."""
    routing = random_routing(2000, num_experts, top_k)
    x, residual, experts = make(routing, hidden, columns, dtype, False)
    assert module.is_faster(x, experts, routing)
    ours = module.experts_hopper(x, experts, routing, residual)
    for num_tokens in (2000, 300, 1):
        first = {
            field: getattr(routing, field)[:num_tokens] for field in ("topk_ids", "topk_weights")
        }
        part = count_tokens(routing._replace(**first), num_experts)
        theirs = grouped._experts_tiled(x[:num_tokens], experts, part, residual[:num_tokens])
        assert torch.equal(ours[:num_tokens], theirs)


@pytest.mark.gpu
@NEEDS_HOPPER
def test_many_rows_take_it_unless_it_does_not_compile(monkeypatch, caplog):
    routing = random_routing(400, 8, 4)
    x, residual, experts = make(routing, 272, 200, torch.bfloat16, False)
    monkeypatch.setattr(fallback, "_failed", set())
    calls = []
    mix = module.experts_hopper
    monkeypatch.setattr(module, "experts_hopper", lambda *args: calls.append(1) or mix(*args))
    y = grouped.experts_grouped(x, experts, routing, residual)
    assert calls == [1]

    def broken(*args: torch.Tensor) -> None:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(module, "experts_hopper", broken)
    for _ in range(2):
        assert torch.equal(grouped.experts_grouped(x, experts, routing, residual), y)
    assert len([r for r in caplog.records if "the GEMM of experts" in r.getMessage()]) == 1
