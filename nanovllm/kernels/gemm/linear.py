"""Matrix product with a weight, in the layout that the device multiplies fastest."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from nanovllm.kernels.gemm.skinny import is_skinny, skinny_linear, skinny_norm_linear
from nanovllm.kernels.gemm.swiglu import gated_linear, is_gated
from nanovllm.kernels.gemm.tiled import is_tiled, tile_linear
from nanovllm.kernels.rms_norm import add_rms_norm, rms_norm
from nanovllm.kernels.silu_and_mul import silu_and_mul

# From which size of it a product adds to the residual stream itself: one that is smaller stays in
# the L2 cache, and little is saved.
MIN_BYTES_TO_ADD = 16 << 20


@contextmanager
def small_cublas_workspace() -> Iterator[None]:
    """Within, cuBLAS has 256 KiB to split products in, not 32 MiB: for 16 to 192 rows the kernels
    that it then takes are up to 6% faster. What the environment says already stays.

    For captures, one at a time in a process: PyTorch parses the setting again in each product,
    which costs the host 50 us, and all threads' workspaces are freed here.
    """
    if "CUBLAS_WORKSPACE_CONFIG" in os.environ:
        yield
        return
    torch._C._cuda_clearCublasWorkspaces()  # what is there is as large as the setting said then
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":256:1"
    try:
        yield
    finally:
        del os.environ["CUBLAS_WORKSPACE_CONFIG"]
        torch._C._cuda_clearCublasWorkspaces()


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """The weight as ``linear`` likes it best; the same tensor where nothing is gained.

    On a CPU: oneDNN's blocked layout, reordered once instead of in every product. 2 to 3 times
    as fast for the 1 to 32 rows of a decode step, 1.2 times for a prefill (fp32, AVX-512).
    """
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return weight
    if weight.dtype is not torch.float32:  # half precision needs instructions not every CPU has
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + b: [..., in], [out, in] plain or packed, [out] -> [..., out]."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    if is_skinny(x, weight):
        return skinny_linear(x, weight, bias)
    if is_tiled(x, weight):
        return tile_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def adds_in_place(x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> bool:
    """Whether ``linear_add`` writes over the stream."""
    return bias is None and x.is_cuda and residual.nbytes >= MIN_BYTES_TO_ADD


def linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A projection that goes back into the residual stream.

    Args:
        x: [N, in].
        weight, bias: as for ``linear``.
        residual: [N, out], the stream, which may be written over.

    Returns:
        What ``norm_linear`` takes next. The projection [N, out] and the stream that it is to be
        added to; or, for many rows on a GPU, the new stream and None, which saves the norm a read
        and a write.
    """
    if adds_in_place(x, bias, residual):
        return torch.addmm(residual, x, weight.t(), out=residual), None
    return linear(x, weight, bias), residual


def norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A projection of the normalised residual stream.

    Args:
        x: [N, in], what the last layer adds to the stream.
        residual: [N, in], the stream; None where x is all of it.
        norm, eps: [in], the RMSNorm's.
        weight, bias: as for ``linear``.
        silu: whether the result is gate and up side by side, to become silu(gate) * up.

    Returns:
        The projection [N, out] or, with ``silu``, [N, out / 2]; and x + residual.
    """
    if is_skinny(x, weight) and len(x) == 1:
        return skinny_norm_linear(x, weight, bias, silu, norm, eps, residual)
    if residual is None:
        hidden, total = rms_norm(x, norm, eps), x
    else:
        hidden, total = add_rms_norm(x, residual, norm, eps)
    if silu and is_skinny(x, weight):
        return skinny_linear(hidden, weight, bias, silu=True), total
    if silu and is_gated(hidden, weight, bias):
        return gated_linear(hidden, weight), total
    y = linear(hidden, weight, bias)
    return silu_and_mul(y) if silu else y, total
