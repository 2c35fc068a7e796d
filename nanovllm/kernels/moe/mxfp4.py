"""MXFP4 weights (OCP Microscaling Formats 1.0): blocks of 32 values with a common scale.

A value has 4 bits (E2M1). Two values share a byte, the first one in the lower four bits. A scale is
one byte (E8M0), which means 2 ** (byte - 127).
"""

import torch

BLOCK = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the fourth bit is the sign


def dequantise_mxfp4(
    blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Computes the values of MXFP4 weights.

    Args:
        blocks: uint8 [..., num_blocks, 16].
        scales: uint8 [..., num_blocks].

    Returns:
        [..., 32 num_blocks].

    Raises:
        ValueError: the tensors have other dtypes or shapes.
    """
    are_uint8 = blocks.dtype == scales.dtype == torch.uint8
    if not are_uint8 or blocks.shape != (*scales.shape, 16):
        raise ValueError(
            f"MXFP4 needs uint8 blocks of 16 bytes with a scale each, got {blocks.dtype} "
            f"{list(blocks.shape)} and {scales.dtype} {list(scales.shape)}"
        )
    values = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=dtype)
    values = values.to(blocks.device)
    pairs = torch.stack([blocks & 15, blocks >> 4], dim=-1)
    unscaled = values[pairs.int()].flatten(-2)
    return torch.ldexp(unscaled, (scales.int() - 127)[..., None]).flatten(-2)
