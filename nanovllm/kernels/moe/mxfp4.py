"""MXFP4 weights (OCP Microscaling Formats 1.0), and how the kernels dequantise them.

In a checkpoint, 32 consecutive columns of a row are a block. A block has 32 values of 4 bits (E2M1:
a sign, two bits of exponent, one of mantissa) and a scale of one byte (E8M0, which stands for
2 ** (byte - 127)). A weight is a value times its block's scale. Two values share a byte, the first
one in the lower four bits.

**Layout.** ``pack_mxfp4`` and ``pack_mxfp4_scales`` rearrange the weights so that few instructions
dequantise them. Four blocks of a row, which are 128 columns, are a group. It is stored as 32 words
of 16 bits, and an int32 with the bytes of its four scales. Word c has the values of columns c,
32 + c, 64 + c and 96 + c: one of each block. The last group covers the last 128 columns of the row.
Blocks that the group before it covers too are stored as zeros. So a kernel can read the 128 columns
of x that belong to a group without a mask. ``part`` is the index of a block in its group, s a sign,
e a bit of exponent, m a mantissa:

    bit   15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    part   0  2  3  1  3  3  3  0  0  0  1  1  1  2  2  2
           s  s  s  s  e  e  m  e  e  m  e  e  m  e  e  m

A bf16 number has its sign in bit 15, its exponent in bits 14 to 7 and its mantissa in bits 6 to 0.
So the bits of part 0 are already where bf16 has its sign, the lower two bits of its exponent and
the highest of its mantissa: a mask turns a word into a bf16 number. The bits of part 1 need a shift
first. Those of parts 2 and 3 need two, one for the sign and one for the rest. Each instruction
handles the two words in a 32-bit register.

**Scaling.** That number is the value times 2 ** -126, because the exponent's bias is 1 in E2M1 and
127 in bf16. (This also holds for 0.5, whose bits are a subnormal number in both formats.) If it
were multiplied by the scale times 2 ** 126, the result would be the weight, but this factor is too
large for bf16 if the scale is above 2. So the factor is the scale times 2 ** 62, the result is the
weight times 2 ** -64, and ``rescale`` multiplies the fp32 sums of the GEMM by 2 ** 64. The result
is exact for scales of at least 2 ** -68. The stored byte of a scale is the exponent of this factor
with bf16's bias: the checkpoint's byte plus 62. For fp16 and fp32, ``dequantize_part`` returns the
weight itself.
"""

import torch

from nanovllm.utils.math import cdiv
from nanovllm.utils.triton_compat import tl, triton

BLOCK, GROUP = 32, 128
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the fourth bit is the sign
# For each part, the bit of a word that has its sign, and the lowest bit of the other three.
SIGN_BITS, LOWEST_BITS = (15, 12, 14, 13), (6, 3, 0, 9)
SCALE_OFFSET = 126 - 64  # added to a scale's byte: see "Scaling" above
MAX_SCALE = 254 - SCALE_OFFSET  # the largest byte in a checkpoint; an exponent of 255 is infinity

# PTX for two words: shifts and masks give two bf16 numbers in r, which are multiplied by the factor
# of their block, the lower or the upper half of $2. Adding -0 keeps the sign of a zero.
_TEMPLATE = (
    "{{ .reg .b32 r, s, z; .reg .b16 l, h; {shifts} mov.b32 {{l, h}}, $2;"
    " mov.b32 s, {{{half}, {half}}}; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, r, s, z; }}"
)
_SHIFTS = (
    "and.b32 r, $1, 0x81C081C0;",  # bits 15 and 8 to 6 of both words
    "shl.b32 r, $1, 3; and.b32 r, r, 0x81C081C0;",
    # The bits of this part alone, times 2 + 64: both shifts at once.
    "and.b32 r, $1, 0x40074007; mul.lo.u32 r, r, 66; and.b32 r, r, 0x81C081C0;",
    "shl.b32 r, $1, 2; and.b32 r, r, 0x80008000;"
    " shr.b32 s, $1, 3; lop3.b32 r, s, 0x01C001C0, r, 0xEA;",  # (s & mask) | r
)
# For kernels: each has an entry for each part.
_ASM = tl.constexpr(
    tuple(
        _TEMPLATE.format(shifts=shifts, half=half)
        for shifts, half in zip(_SHIFTS, "llhh", strict=True)
    )
)
_SIGN_BITS, _LOWEST_BITS = tl.constexpr(SIGN_BITS), tl.constexpr(LOWEST_BITS)


def dequantize_mxfp4(
    blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Dequantises weights as they are in a checkpoint.

    Args:
        blocks: uint8 [..., num_blocks, 16].
        scales: uint8 [..., num_blocks].
        dtype: of the result.

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
    return _values(_codes(blocks), scales.int() - 127, dtype).flatten(-2)


def _codes(blocks: torch.Tensor) -> torch.Tensor:
    """Returns the four bits of each value: [..., num_blocks, 16] -> [..., num_blocks, 32]."""
    return torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)


def _values(codes: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values of four bits times 2 ** exponent: [..., 32], [...] -> [..., 32]."""
    numbers = [*VALUES, *(-value for value in VALUES)]
    values = torch.tensor(numbers, dtype=dtype, device=codes.device)
    return torch.ldexp(values[codes.int()], exponents[..., None])


def num_groups(width: int) -> int:
    """Returns the number of groups of a row with ``width`` columns."""
    return cdiv(width, GROUP)


def _pad_blocks(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Inserts zeros before the blocks of the last group, if these are fewer than four."""
    num_blocks = tensor.size(dim)
    full, rest = tensor.split([num_blocks - num_blocks % 4, num_blocks % 4], dim)
    shape = [*tensor.shape]
    shape[dim] = -num_blocks % 4
    return torch.cat([full, tensor.new_zeros(shape), rest], dim)


def pack_mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """Rearranges the values of MXFP4 weights for the kernels.

    Args:
        blocks: uint8 [..., rows, num_blocks, 16].

    Returns:
        int16 [..., num_groups, rows, 32], the words.
    """
    codes = _pad_blocks(_codes(blocks).short(), -2).unflatten(-2, (-1, 4))
    words = torch.zeros_like(codes[..., 0, :])
    for part, (sign, lowest) in enumerate(zip(SIGN_BITS, LOWEST_BITS, strict=True)):
        code = codes[..., part, :]
        words |= ((code & 8) >> 3 << sign) | ((code & 7) << lowest)
    return words.transpose(-3, -2).contiguous()


def pack_mxfp4_scales(scales: torch.Tensor) -> torch.Tensor:
    """Rearranges the scales of MXFP4 weights for the kernels, and adds SCALE_OFFSET.

    Args:
        scales: uint8 [..., rows, num_blocks].

    Returns:
        int32 [..., num_groups, rows], with the byte of a group's first block lowest.

    Raises:
        ValueError: a byte is above 192: a scale above 2 ** 65, or NaN, which is byte 255.
    """
    if (scales > MAX_SCALE).any():
        raise ValueError(
            f"byte {int(scales.max())} is not a scale of MXFP4 weights: it is too large"
        )
    groups = _pad_blocks(scales + SCALE_OFFSET, -1).view(torch.int32)
    return groups.transpose(-2, -1).contiguous()


def unpack_mxfp4(
    words: torch.Tensor, scales: torch.Tensor, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """Dequantises packed weights: the reference of ``dequantize_part``.

    Args:
        words: int16 [..., num_groups, rows, 32], from ``pack_mxfp4``.
        scales: int32 [..., num_groups, rows], from ``pack_mxfp4_scales``.
        width: number of columns, without padding.
        dtype: of the result.

    Returns:
        [..., rows, width].
    """
    codes = torch.stack(
        [
            ((words >> sign & 1) << 3) | (words >> lowest & 7)
            for sign, lowest in zip(SIGN_BITS, LOWEST_BITS, strict=True)
        ],
        dim=-2,
    )
    exponents = scales.view(torch.uint8).unflatten(-1, (-1, 4)).int() - SCALE_OFFSET - 127
    rows = _values(codes, exponents, dtype).flatten(-2).transpose(-3, -2).flatten(-2)
    full = width // GROUP * GROUP
    return torch.cat([rows[..., :full], rows[..., rows.size(-1) - width % GROUP :]], -1)


def fill_mxfp4(packed: torch.Tensor, generator: torch.Generator) -> None:
    """Fills packed words (int16) with random bits, or packed scales (int32) with 2 ** -7. Then the
    weights have a standard deviation of about 0.02. Blocks that are stored as zeros get random bits
    too, which ``unpack_mxfp4`` leaves out."""
    in_bytes = packed.data.view(torch.uint8)
    if packed.dtype is torch.int32:
        in_bytes.fill_(SCALE_OFFSET + 120)
    else:
        in_bytes.random_(generator=generator)


@triton.jit
def dequantize_part(words, scales, PART: tl.constexpr, dtype: tl.constexpr):
    """Dequantises block PART (0 to 3) of each group.

    Args:
        words: int16 [..., 32], the words of a group.
        scales: int32 [..., 1], its scales.

    Returns:
        [..., 32], in dtype, for columns 32 PART to 32 PART + 31 of the group. In bf16, these are
        the weights times 2 ** -64.
    """
    if dtype == tl.bfloat16:
        # The factors of two blocks as bf16 numbers: of 0 and 2, or of 1 and 3.
        factors = (scales << 7 if PART % 2 == 0 else scales >> 1) & 0x7F807F80
        return tl.inline_asm_elementwise(
            _ASM[PART], "=r,r,r,r", [words, factors], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    exponent = (scales >> (8 * PART)) & 255
    bits = words.to(tl.int32)  # then the value times 2 ** -126, as fp32
    bits = ((bits >> _SIGN_BITS[PART]) << 31) | (((bits >> _LOWEST_BITS[PART]) & 7) << 22)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    return (bits.to(tl.float32, bitcast=True) * 2.0**64 * scale).to(dtype)


@triton.jit
def add_block(weight, x, acc):
    """Returns weight x + acc, for a block from ``dequantize_part``.

    A matmul in fp32 adds one product after the other, and its rounding error grows with their
    number. So a block's sum starts at zero there. It is added by an FMA, because the compiler would
    make an addition a part of the matmul.
    """
    if weight.dtype == tl.float32:
        acc = tl.fma(tl.dot(weight, x, input_precision="ieee"), 1.0, acc)
    else:
        acc = tl.dot(weight, x, acc)
    return acc


@triton.jit
def rescale(sums, dtype: tl.constexpr):
    """Multiplies the results of a GEMM with weights from ``dequantize_part`` by 2 ** 64, if their
    dtype is bf16."""
    if dtype == tl.bfloat16:
        sums *= 2.0**64
    return sums
