"""A gated MLP's first product with its SwiGLU in the same kernel, for a prefill on Hopper: by the
quack-kernels package, which compiles at run time."""

import logging
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.kernels.compat import keep_compiled_kernels
from nanovllm.kernels.silu_and_mul import silu_and_mul_reference

logger = logging.getLogger("nanovllm")

# How large gate and up together must be: below, the call costs the host more than the GPU saves.
MIN_BYTES = 64 << 20


def is_gated(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether ``gated_linear`` serves this product, and pays."""
    if bias is not None or not x.is_cuda or len(x) * len(weight) * x.element_size() < MIN_BYTES:
        return False
    if x.size(1) % 8 or len(weight) % 16:  # rows begin at multiples of 16 bytes
        return False
    return _works(x.device, x.dtype, x.size(1))


def gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(x G^T) * (x U^T), rounded once.

    Args:
        x: [N, in], fp16 or bf16.
        weight: [2 I, in], G above U.

    Returns:
        [N, I].
    """
    gemm, config, config_of_long_rows = _package()
    out = x.new_empty(len(x), len(weight) // 2)
    gemm(
        x,
        weight.t(),
        activation="swiglu",
        postact_out=out,
        store_preact=False,
        concat_layout=("B",),
        tuned=False,
        config=config if x.size(1) < 4096 else config_of_long_rows,
    )
    return out


@cache
def _package() -> tuple[Any, Any, Any]:
    """The package's function, and which tiles it is to take: the fastest of 18 on an H200, once its
    clock had settled, for 15,600 rows of 1,024 (0.6B) and of 4,096 columns (8B). Those of the
    former are of two warpgroups in turn, one in the product while the other is in its SwiGLU."""
    keep_compiled_kernels()
    from quack.gemm_config import GemmConfig
    from quack.gemm_interface import gemm_act

    common = {"tile_n": 192, "cluster_m": 1, "cluster_n": 2, "is_dynamic_persistent": False}
    in_turn = GemmConfig(tile_m=128, pingpong=True, **common)
    return gemm_act, in_turn, GemmConfig(tile_m=256, pingpong=False, **common)


@cache
def _works(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether the package is there, and multiplies two small matrices of so many columns."""
    if torch.cuda.get_device_capability(device) != (9, 0) or dtype.itemsize != 2:
        return False
    x = torch.ones(2, width, dtype=dtype, device=device)
    weight = torch.full((128, width), 1 / width, dtype=dtype, device=device)
    try:
        expected = silu_and_mul_reference(F.linear(x, weight))
        torch.testing.assert_close(gated_linear(x, weight), expected)
    except ImportError:
        return False
    except Exception as error:  # whatever a package or a compiler raises is the reason
        logger.info("no SwiGLU within products: %s: %s", type(error).__name__, error)
        return False
    logger.info("SwiGLU within large products, by quack-kernels")
    return True
