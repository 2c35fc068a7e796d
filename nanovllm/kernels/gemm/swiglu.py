"""A GEMM with SwiGLU in its epilogue, for prefills on Hopper. It comes from the quack-kernels
package, which compiles at run time."""

import logging
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.kernels.silu_and_mul import silu_and_mul_reference
from nanovllm.utils.triton_compat import keep_compiled_kernels

logger = logging.getLogger("nanovllm")

# The fastest of 18 configurations on an H200 at a steady clock. TILES is for 15,600 rows of 1,024
# columns (0.6B model), TILES_OF_LONG_ROWS for as many rows of 4,096 columns (8B model). With
# pingpong, one warpgroup runs its main loop while another runs its epilogue.
TILES = {"tile_M": 128, "tile_N": 192, "cluster_M": 1, "cluster_N": 2, "pingpong": True}
TILES_OF_LONG_ROWS = TILES | {"tile_M": 256, "pingpong": False}


def supports(weight: torch.Tensor) -> bool:
    """Returns whether ``gated_linear`` can multiply by this weight [2 I, in] on its device.

    The first call for each number of columns runs a small test.
    """
    num_features, width = weight.shape
    if not weight.is_cuda or width % 8 or num_features % 16:  # rows start at multiples of 16 bytes
        return False
    return _works(weight.device, weight.dtype, width)


def gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computes silu(x G^T) * (x U^T), rounded once and without a bias.

    Args:
        x: [N, in], fp16 or bf16.
        weight: [2 I, in], G above U.

    Returns:
        [N, I].
    """
    out = x.new_empty(len(x), len(weight) // 2)
    tiles = TILES if x.size(1) < 4096 else TILES_OF_LONG_ROWS
    _gemm_module().gemm(x, weight, None, epi_args={"mAuxOut": out}, concat_layout=("B",), **tiles)
    return out


@cache
def _gemm_module() -> Any:
    """Returns the package's GEMM with SwiGLU, without its other epilogue features. It caches a
    launch plan for each number of rows, and does not compile for a new number of rows."""
    keep_compiled_kernels()
    from quack.epilogue.library import linear_act_mod

    unused_features = dict.fromkeys(("has_c", "has_rowvec", "has_colvec"), False)
    return linear_act_mod("swiglu", gated=True, **unused_features)


@cache
def _works(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Returns whether the package is installed, and its GEMM is correct for small matrices with
    ``width`` columns."""
    if torch.cuda.get_device_capability(device) != (9, 0) or dtype.itemsize != 2:
        return False
    try:
        check_gated_linear(device, dtype, width)
    except Exception as error:  # packages and compilers may raise any exception
        if not (isinstance(error, ImportError) and error.name == "quack"):
            logger.warning(
                "prefill takes about 5%% longer: quack-kernels' matmul with SwiGLU does not work "
                "(try other versions of quack-kernels and nvidia-cutlass-dsl): %s: %s",
                type(error).__name__,
                error,
            )
        return False
    logger.info("large matmuls with SwiGLU use quack-kernels")
    return True


def check_gated_linear(device: torch.device, dtype: torch.dtype, width: int) -> None:
    """Tries ``gated_linear`` on small matrices. Raises any exception of ``gated_linear``, or
    AssertionError if the result is wrong."""
    generator = torch.Generator(device).manual_seed(0)
    both = torch.randn(3 + 128, width, device=device, generator=generator, dtype=torch.float32)
    x, weight = both[:3].to(dtype), (both[3:] / width**0.5).to(dtype)
    expected = silu_and_mul_reference(F.linear(x.float(), weight.float()))
    torch.testing.assert_close(gated_linear(x, weight).float(), expected, rtol=0.02, atol=0.02)
