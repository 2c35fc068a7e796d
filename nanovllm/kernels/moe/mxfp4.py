"""MXFP4 weights (OCP Microscaling Formats 1.0): blocks of 32 values with a common scale.

A value has 4 bits (E2M1): the sign, two bits of exponent, one of mantissa. A scale is one byte
(E8M0), which means 2 ** (byte - 127). In a checkpoint, two values share a byte, the first one in
the lower four bits.

Kernels read weights that ``pack_mxfp4`` has rearranged, so that few instructions dequantise them.
A group is 128 columns of a row, which are four blocks. It is stored as 32 words of 16 bits and four
bytes of scales. Word c has the values of columns c, 32 + c, 64 + c and 96 + c. Two words in a
register give two values of block ``part`` by at most two shifts of both and a mask, as the words'
bits are those of bf16 numbers: the sign in bit 15, the exponent's lower bits and the highest bit of
the mantissa in bits 8 to 6. This makes a value 2 ** 126 times too small, because the exponents of
bf16 have another bias. The stored scales correct that, but for 2 ** -64, so that they fit into the
exponent of a bf16 number.
"""

import torch
import torch.nn.functional as F

from nanovllm.utils.triton_compat import tl, triton

BLOCK, GROUP = 32, 128
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the fourth bit is the sign
# The bit of a word that has the sign of block ``part``, and the lowest of its other three bits.
SIGN_BITS, LOWEST_BITS = (15, 12, 14, 13), (6, 3, 0, 9)
# A scale's byte plus this is the biased exponent of the scale times 2 ** (126 - 64).
SCALE_OFFSET = 126 - 64
MAX_SCALE = 254 - SCALE_OFFSET

_ASM = (
    "{{ .reg .b32 r, s; {} mov.b32 s, 0x80008000; fma.rn.bf16x2 $0, r, $2, s; }}"  # r * scale - 0
)
_SHIFTS = (
    "and.b32 r, $1, 0x81C081C0;",
    "shl.b32 r, $1, 3; and.b32 r, r, 0x81C081C0;",
    "shl.b32 r, $1, 1; and.b32 r, r, 0x80008000;"
    " shl.b32 s, $1, 6; lop3.b32 r, s, 0x01C001C0, r, 0xEA;",
    "shl.b32 r, $1, 2; and.b32 r, r, 0x80008000;"
    " shr.b32 s, $1, 3; lop3.b32 r, s, 0x01C001C0, r, 0xEA;",
)
_ASM_0, _ASM_1, _ASM_2, _ASM_3 = (tl.constexpr(_ASM.format(shifts)) for shifts in _SHIFTS)


def dequantise_mxfp4(
    blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Computes the values of MXFP4 weights as they are in a checkpoint.

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
    unscaled = values[_codes(blocks).int()]
    return torch.ldexp(unscaled, (scales.int() - 127)[..., None]).flatten(-2)


def _codes(blocks: torch.Tensor) -> torch.Tensor:
    """Returns the four bits of each value: [..., num_blocks, 16] -> [..., num_blocks, 32]."""
    return torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)


def num_groups(width: int) -> int:
    """Returns the number of groups of a row with ``width`` columns. The last may be padded."""
    return -(-width // GROUP)


def pack_mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """Rearranges the values of MXFP4 weights for the kernels.

    Args:
        blocks: uint8 [..., rows, num_blocks, 16].

    Returns:
        int16 [..., num_groups, rows, 32].
    """
    padding = -blocks.size(-2) % 4
    codes = F.pad(_codes(blocks).short(), (0, 0, 0, padding)).unflatten(-2, (-1, 4))
    words = torch.zeros_like(codes[..., 0, :])
    for part, (sign, lowest) in enumerate(zip(SIGN_BITS, LOWEST_BITS, strict=True)):
        code = codes[..., part, :]
        words |= ((code & 8) >> 3 << sign) | ((code & 7) << lowest)
    return words.transpose(-3, -2).contiguous()


def pack_mxfp4_scales(scales: torch.Tensor) -> torch.Tensor:
    """Rearranges the scales of MXFP4 weights for the kernels.

    Args:
        scales: uint8 [..., rows, num_blocks].

    Returns:
        int32 [..., num_groups, rows], with the byte of a group's first block lowest.

    Raises:
        ValueError: a scale is above 2 ** 65, or NaN, which is byte 255.
    """
    if (scales > MAX_SCALE).any():
        raise ValueError(
            f"byte {int(scales.max())} is not a scale of MXFP4 weights: it is too large"
        )
    groups = F.pad(scales + SCALE_OFFSET, (0, -scales.size(-1) % 4)).view(torch.int32)
    return groups.transpose(-2, -1).contiguous()


def unpack_mxfp4(
    words: torch.Tensor, scales: torch.Tensor, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """Computes the values of packed weights.

    Args:
        words: int16 [..., num_groups, rows, 32], from ``pack_mxfp4``.
        scales: int32 [..., num_groups, rows], from ``pack_mxfp4_scales``.
        width: number of columns, without padding.

    Returns:
        [..., rows, width].
    """
    values = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=dtype)
    codes = torch.stack(
        [
            ((words >> sign & 1) << 3) | (words >> lowest & 7)
            for sign, lowest in zip(SIGN_BITS, LOWEST_BITS, strict=True)
        ],
        dim=-2,
    )
    exponents = scales.view(torch.uint8).unflatten(-1, (-1, 4)).int() - SCALE_OFFSET - 127
    unpacked = torch.ldexp(values.to(words.device)[codes.int()], exponents[..., None])
    return unpacked.flatten(-2).transpose(-3, -2).flatten(-2)[..., :width].contiguous()


def fill_mxfp4(packed: torch.Tensor, generator: torch.Generator) -> None:
    """Fills packed words with random values, or packed scales with 2 ** -7. The values have a
    standard deviation of about 0.02."""
    in_bytes = packed.data.view(torch.uint8)
    if packed.dtype is torch.int32:
        in_bytes.fill_(SCALE_OFFSET + 120)
    else:
        in_bytes.random_(generator=generator)


@triton.jit
def dequantise_part(words, scales, PART: tl.constexpr, dtype: tl.constexpr):
    """Computes the values of one block of each group. In bf16 they are divided by 2 ** 64, which
    ``rescale`` makes up for.

    Args:
        words: int16 [..., 32].
        scales: int32 [..., 1].

    Returns:
        [..., 32], in dtype. The columns are those of block PART of the group.
    """
    exponent = (scales >> (8 * PART)) & 255
    if dtype == tl.bfloat16:
        scale = (exponent.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)
        ASM: tl.constexpr = (
            _ASM_0 if PART == 0 else _ASM_1 if PART == 1 else _ASM_2 if PART == 2 else _ASM_3
        )
        return tl.inline_asm_elementwise(
            ASM, "=r,r,r", [words, scale], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    SIGN: tl.constexpr = 15 if PART == 0 else 12 if PART == 1 else 14 if PART == 2 else 13
    LOWEST: tl.constexpr = 6 if PART == 0 else 3 if PART == 1 else 0 if PART == 2 else 9
    bits = words.to(tl.int32)
    bits = ((bits >> SIGN) << 31) | (((bits >> LOWEST) & 7) << 22)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    return (bits.to(tl.float32, bitcast=True) * 2.0**64 * scale).to(dtype)


@triton.jit
def rescale(sums, dtype: tl.constexpr):
    """Multiplies sums of products with dequantised values by 2 ** 64, if these were divided by
    it."""
    if dtype == tl.bfloat16:
        sums *= 2.0**64
    return sums
