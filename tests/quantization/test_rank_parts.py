"""A rank's part of a sum, which the next norm reduces over the ranks: every way from there gives
what the sum gives."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nanovllm.kernels.fp8 import Fp8Rows
from nanovllm.kernels.gemm import qkv
from nanovllm.kernels.rms_norm import (
    fp8_group_rms_norm_reference,
    fp8_rms_norm_reference,
    rms_norm_reference,
)
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.quantization import unquantized
from nanovllm.quantization.base import PLAIN, InputFormat
from nanovllm.quantization.fp8 import FP8_GROUPS, FP8_ROWS
from nanovllm.quantization.unquantized import ANY, Choice, UnquantizedWeight
from nanovllm.utils.distributed import RankPart

WIDTH = 256


class OtherRank:
    """Stands for an all-reduce with a rank that has the same part."""

    def __init__(self) -> None:
        self.num_calls = 0

    def norm(self, part, weight, eps, residual, out, scales=None, group=None) -> torch.Tensor:
        self.num_calls += 1
        arguments = 2 * part, weight, eps, residual
        if scales is None:
            normed, total = rms_norm_reference(*arguments)
            out.copy_(normed)
            return total
        reference = fp8_rms_norm_reference if group is None else fp8_group_rms_norm_reference
        rows, total = reference(*arguments)
        out.copy_(rows.codes)
        scales.copy_(rows.scales)
        return total


@pytest.fixture
def given(monkeypatch) -> SimpleNamespace:
    """A part with its sum, a residual, a norm, and a weight as on a GPU."""
    monkeypatch.setattr(RankPart, "is_cuda", True)
    norm = RMSNorm(WIDTH)
    norm.weight.data = torch.rand(WIDTH)
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.randn(32, WIDTH), requires_grad=False)
    layer.weight.weight_loader = layer.weight_loader = None
    part, residual, other = torch.randn(3, WIDTH), torch.randn(3, WIDTH), OtherRank()
    yield SimpleNamespace(
        part=RankPart(part, other),
        sum=2 * part,
        residual=residual,
        norm=norm,
        weight=UnquantizedWeight(layer),
    )
    assert other.num_calls == 1


def assert_equal(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, Fp8Rows):
            assert torch.equal(one.codes.view(torch.uint8), other.codes.view(torch.uint8))
            assert torch.equal(one.scales, other.scales)
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    "input_format", [PLAIN, FP8_ROWS, FP8_GROUPS], ids=["16", "rows", "groups"]
)
def test_each_format_of_inputs(input_format: InputFormat, given):
    arguments = given.norm.weight, given.norm.eps, given.residual
    expected = input_format.rms_norm(given.sum, *arguments)
    assert_equal(input_format.rms_norm(given.part, *arguments), expected)


@pytest.mark.parametrize("name", ["norm_matmul", "norm_and_matmul"])
def test_matmuls(name: str, given):
    multiply = getattr(given.weight, name)
    expected = multiply(given.sum, given.residual, given.norm)
    assert_equal(multiply(given.part, given.residual, given.norm), expected)


def test_the_matmul_that_applies_rope(given, monkeypatch):
    """Its kernel is chosen by the number of rows, as for a sum."""
    seen = []

    def multiply(x, weight, bias, rope, slots) -> torch.Tensor:
        seen.append((rope, slots))
        return x @ weight.t()

    choice = Choice(range(3, 4), lambda num_rows, weight, bias: True, multiply)
    monkeypatch.setitem(unquantized.KERNELS, "matmul_rope", (choice,))
    monkeypatch.setattr(qkv, "supports", lambda rope, slots, dtype: dtype is torch.float32)
    rest = given.residual, given.norm, "rope", "slots"
    expected = given.weight.norm_matmul_rope(given.sum, *rest)
    assert_equal(given.weight.norm_matmul_rope(given.part, *rest), expected)
    assert seen == [("rope", "slots")] * 2


def test_a_fused_norm_is_for_whole_sums(given, monkeypatch):
    def multiply(*args: Any) -> None:
        raise AssertionError("this kernel takes a tensor")

    choice = Choice(ANY, lambda num_rows, weight, bias: num_rows > 0, multiply)
    monkeypatch.setitem(unquantized.KERNELS, "norm_matmul", (choice,))
    normed, total = rms_norm_reference(given.sum, given.norm.weight, given.norm.eps, given.residual)
    expected = given.weight.matmul(normed), total
    assert_equal(given.weight.norm_matmul(given.part, given.residual, given.norm), expected)


def test_the_last_norm(given):
    expected = given.norm(given.sum, given.residual)
    assert torch.equal(given.norm(given.part, given.residual), expected)


def test_a_part_is_where_its_tensor_is():
    for is_cuda in (True, False):
        assert RankPart(SimpleNamespace(is_cuda=is_cuda), None).is_cuda == is_cuda
