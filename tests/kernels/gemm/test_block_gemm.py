"""The GEMM with scales of blocks on Hopper: on a GPU, and run by an emulator on a CPU."""

from itertools import product

import pytest
import torch

from nanovllm.kernels import fallback
from nanovllm.kernels.fp8 import Fp8Rows, padded_rows
from nanovllm.kernels.gemm import block_gemm, hopper_gemm
from nanovllm.kernels.gemm.block_gemm import STEP_TIMES, Tile, choose_tile, is_fastest, launch
from nanovllm.kernels.gemm.fp8 import fp8_linear, fp8_linear_add, fp8_linear_reference
from nanovllm.kernels.rms_norm import rms_norm
from tests.kernels.gemm.test_decode_gemm import exact_product, hopper, make_fp8
from tests.kernels.gluon_emulator import emulated
from tests.kernels.oracle import assert_as_good_as_eager

MODULES = (
    "nanovllm.kernels.hopper",
    "nanovllm.kernels.gemm.block_loop",
    "nanovllm.kernels.gemm.block_gemm_kernel",
)


def make(num_rows, out, width, device):
    bias, residual = torch.randn(out), torch.randn(num_rows, out)
    others = (tensor.to(device).bfloat16() for tensor in (bias, residual))
    return *make_fp8(num_rows, out, width, True, device), *others


@pytest.mark.parametrize("sizes", STEP_TIMES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 40, 70, 150, 256])
def test_the_kernel_is_a_gemm_in_the_emulator(num_rows, sizes, monkeypatch):
    """With several tiles for a program: in one part with an odd number of groups, and in two parts,
    of which the second is shorter, and which do not end with the last stage."""
    monkeypatch.setattr(block_gemm, "HOPPER_MULTIPROCESSORS", 3)
    for out, width, parts, part_steps in ((384, 384, 1, 4), (256, 1152, 2, 6)):
        x, weight, bias, residual = make(num_rows, out, width, "cpu")
        exact, eager = exact_product(x, weight), fp8_linear_reference(x, weight, None, bias.dtype)
        tile = Tile(*sizes, parts, part_steps)
        with emulated(*MODULES):
            found = launch(x, weight, None, residual, tile, bias.dtype)
        if parts > 1:
            assert found.dtype is torch.float32 and len(found) == parts
            found = found.sum(0).to(bias.dtype) + residual
        else:
            with emulated(*MODULES):
                biased = launch(x, weight, bias, None, tile, bias.dtype)
            eager_biased = fp8_linear_reference(x, weight, bias, bias.dtype)
            assert_as_good_as_eager(biased, eager_biased, exact + bias.double())
        assert_as_good_as_eager(found, eager + residual, exact + residual.double())


@pytest.mark.parametrize("num_rows", [33, 64, 65, 128, 129, 256, 300, 512])
def test_tiles_cover_all_columns_and_fit_into_shared_memory(num_rows):
    outs, widths, most_parts = (128, 1024, 6144, 34_816), (128, 384, 4096, 17_408), (1, 3)
    for out, width, most in product(outs, widths, most_parts):
        rows, features, parts, part_steps = choose_tile(num_rows, out, width // 128, most)
        assert (rows, features) in STEP_TIMES and rows == (64 if num_rows <= 64 else 128)
        last = -(-width // 256) * 2 - (parts - 1) * part_steps  # steps of the last part
        assert 1 <= parts <= most and part_steps % 2 == 0 and 2 <= last <= part_steps
        stage = (rows + features) * 128 + rows * 4
        stages = min(block_gemm.MAX_STAGES, block_gemm.MEMORY // stage)
        assert stages >= 6, "enough loads are in flight"
        # Two consumers convert the layout of their results in shared memory of its own.
        assert stages * stage + 2 * 64 * min(features, 2 * rows - 64) * 2 <= 227 << 10


def test_which_tile():
    """These tiles were the fastest on an H200."""
    for num_rows, out, width, expected in (
        (64, 4096, 12_288, (64, 128, 3)),
        (64, 6144, 4096, (64, 64, 1)),
        (96, 4096, 12_288, (128, 64, 2)),
        (256, 4096, 4096, (128, 64, 1)),
        (256, 4096, 12_288, (128, 128, 2)),
        (256, 2560, 9728, (128, 128, 3)),
    ):
        assert choose_tile(num_rows, out, width // 128, 3)[:3] == expected
    assert choose_tile(256, 6144, 32, 1)[:3] == (128, 128, 1)


def test_numbers_of_rows_and_sizes_of_weights(monkeypatch):
    monkeypatch.setattr(hopper_gemm, "supports", lambda *_: True)

    def weight(out, width):
        sizes = (out, width), (out // 128, width // 128)
        return Fp8Rows(*(torch.empty(size, device="meta") for size in sizes))

    small, medium, large = weight(4096, 2048), weight(6144, 4096), weight(34_816, 5120)
    for given, most in ((small, 512), (medium, 256), (large, 64)):
        counts = 1, 32, 33, most, most + 1
        assert [is_fastest(n, given) for n in counts] == [False, False, True, True, False]
    assert not is_fastest(64, small.codes)
    assert not is_fastest(64, small._replace(scales=small.scales[:, 0]))
    # Whole tiles are loaded faster.
    assert all(padded_rows(n) % (64 if n <= 64 else 128) == 0 for n in range(33, 257))


def test_other_kernels_run_where_it_does_not_compile(monkeypatch, caplog):
    """As on a CPU, without the emulator."""
    monkeypatch.setattr(fallback, "_failed", set())
    monkeypatch.setattr(
        hopper_gemm, "supports", lambda name, w, _: not fallback.has_failed(name, w.device)
    )
    x, weight, bias, residual = make(40, 128, 256, "cpu")
    expected = fp8_linear_reference(x, weight, bias, bias.dtype)
    torch.testing.assert_close(fp8_linear(x, weight, bias, bias.dtype), expected)
    found, rest = fp8_linear_add(x, weight, bias, residual)
    torch.testing.assert_close(found + rest, expected + residual)
    assert fallback._failed == {(block_gemm.KERNEL, x.codes.device)} and "blocks" in caplog.text


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("num_rows", [33, 48, 64, 65, 96, 128, 129, 160, 200, 256, 300, 512])
def test_the_kernel_is_a_gemm(num_rows):
    """In all tiles, with the numbers of parts that are chosen, and as chosen."""
    for out, width in ((6144, 1024), (1024, 3072), (24_576, 2048), (1152, 896), (4096, 12_288)):
        x, weight, bias, residual = make(num_rows, out, width, "cuda")
        exact, eager = exact_product(x, weight), fp8_linear_reference(x, weight, None, bias.dtype)
        biased = fp8_linear_reference(x, weight, bias, bias.dtype)
        assert num_rows > 256 or is_fastest(num_rows, weight)
        found, rest = fp8_linear_add(x, weight, None, residual)
        if rest is not None:
            found = rms_norm(found, bias, 1e-6, rest)[1]
        assert_as_good_as_eager(found, eager + residual, exact + residual.double())
        found = fp8_linear(x, weight, bias, bias.dtype)
        assert_as_good_as_eager(found, biased, exact + bias.double())
        num_steps = -(-width // 256) * 2
        for sizes in STEP_TIMES:
            tile = Tile(*sizes, 1, num_steps)
            found = launch(x, weight, bias, None, tile, bias.dtype)
            assert_as_good_as_eager(found, biased, exact + bias.double())
            tile = Tile(*sizes, 2, -(-num_steps // 4) * 2)
            found = launch(x, weight, None, residual, tile, bias.dtype).sum(0).to(bias.dtype)
            assert_as_good_as_eager(found, eager, exact)
    assert not fallback.has_failed(block_gemm.KERNEL, x.codes.device)
