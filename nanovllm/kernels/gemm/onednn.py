"""GEMMs of oneDNN, for CPUs.

oneDNN and other libraries choose a kernel, and with it the order of a dot product's sum, by the
shape of the matrices. ``row_block_linear`` therefore multiplies blocks of ROWS rows, so that every
call has the same shape, and the bits of a row's result depend on this row alone.
"""

import torch
import torch.nn.functional as F

from nanovllm.utils.math import cdiv

ROWS = 16


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Returns an fp32 weight in oneDNN's blocked layout.

    Otherwise every matmul would convert it. This makes matmuls 2 to 3 times as fast in decode steps
    of 1 to 32 rows, and 1.2 times as fast in a prefill (AVX-512).
    """
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + b with a packed weight."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def row_block_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + b, with the same bits in a row whatever the other rows are. Computed in fp32.

    Args:
        x: [N, in].
        weight: [out, in], packed or not.

    Returns:
        [N, out] in x's dtype.
    """
    weight = pack_for_row_blocks(weight)
    num_rows = len(x)
    padded = x.new_zeros(cdiv(num_rows, ROWS) * ROWS, x.size(1), dtype=torch.float32)
    padded[:num_rows] = x
    out = padded.new_empty(len(padded), weight.size(0))
    for block, out_block in zip(padded.split(ROWS), out.split(ROWS), strict=True):
        out_block.copy_(_multiply(block, weight))
    out = out[:num_rows]
    return (out if bias is None else out + bias.float()).to(x.dtype)


def pack_for_row_blocks(weight: torch.Tensor) -> torch.Tensor:
    """Returns the weight in the form that ``row_block_linear`` multiplies: fp32, and in oneDNN's
    layout if oneDNN is available."""
    if weight.is_mkldnn or not torch.backends.mkldnn.is_available():
        return weight.float()
    return pack_weight(weight.float())


def check_row_blocks(weight: torch.Tensor) -> None:
    """Checks with one block of equal rows that the bits of a row depend neither on its position in
    the block nor on the number of threads.

    Args:
        weight: from ``pack_for_row_blocks``.

    Raises:
        ValueError: the result depends on the row's position or on the thread count.
    """
    row = torch.arange(weight.size(1), dtype=torch.float32, device="cpu").sin()
    block = row.expand(ROWS, -1).contiguous()
    out = _multiply(block, weight)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = _multiply(block, weight)[:1]
    finally:
        torch.set_num_threads(num_threads)
    if not torch.allclose(out, expected.expand_as(out), rtol=0, atol=0, equal_nan=True):
        raise ValueError(
            f"batch_invariant=True does not work on this CPU: its matmul with a weight of "
            f"{weight.size(0)} x {weight.size(1)} sums in an order that depends on the position of "
            f"a row or on the number of threads ({num_threads}): set OMP_NUM_THREADS=1, or leave "
            f"batch_invariant out"
        )


def _multiply(block: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if weight.is_mkldnn:
        return onednn_linear(block, weight, None)
    return F.linear(block, weight)
