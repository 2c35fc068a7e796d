"""Matrix products of 17 to 64 rows with small weights, which a GPU reads faster than it starts.

cuBLAS requests its first weight once the kernel before it has ended in full. Here, with
programmatic dependent launch, programs start beside that kernel and have their weights brought
into the L2 cache while they wait for their input. Where features are too few to occupy the GPU,
the columns are split too, and a second kernel adds the parts in a fixed order.

The weight is the side of a tile that has to be 64 or more for Hopper's tensor core instructions;
the rows, the other, may be few.
"""

import torch

from nanovllm.utils.triton_compat import pdl_options, shared_memory, tl, triton, use_triton

MIN_ROWS, MAX_ROWS = 17, 64
MAX_WEIGHTS = 1 << 22  # of larger matrices cuBLAS reads as much in the time
BLOCK_N, BLOCK_K, NUM_STAGES = 64, 128, 4
PART = 512  # most columns of a part, where they are split
SHARED_MEMORY = 192 << 10  # bytes for a program: data-centre GPUs from Hopper on


@triton.jit
def _prefetch(first_ptr, stride, columns, BLOCK_N: tl.constexpr):
    """Asks for the first KiB or two of each of BLOCK_N rows of half precision to be brought into
    the L2 cache."""
    # A warp's threads ask one after the other, so every second one does, for a row each.
    thread = tl.arange(0, 2 * BLOCK_N)
    address = (first_ptr + (thread // 2).to(tl.int64) * stride).to(tl.int64, bitcast=True)
    size = tl.where(thread % 2 == 0, tl.minimum(columns, 1024) * 2, 0)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _tile_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    out_features,
    width,
    columns,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_M rows of BLOCK_N features, of ``columns`` of the columns: the result, or a part of
    it.

    Sizes are no constants, lest the loop be unrolled: its code would be fetched only to run once.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(2)
    begin = part * columns
    first = tl.program_id(1) * BLOCK_N
    weight_ptr += first.to(tl.int64) * width + begin
    if PDL:
        _prefetch(weight_ptr, width, columns, BLOCK_N)
    feature = first + tl.arange(0, BLOCK_N)[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + feature).to(tl.float32)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    column = tl.arange(0, BLOCK_K)
    # Past the end the last row is repeated, and not stored.
    x_ptrs = x_ptr + begin + tl.minimum(row, num_rows - 1) * width + column[:, None]
    weight_ptrs = weight_ptr + tl.arange(0, BLOCK_N)[:, None] * width + column[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    for start in tl.range(0, columns, BLOCK_K, num_stages=STAGES):
        acc = tl.dot(tl.load(weight_ptrs + start), tl.load(x_ptrs + start), acc)
    address = out_ptr + (part * num_rows + row) * out_features + feature
    tl.store(address, acc.to(out_ptr.dtype.element_ty), mask=row < num_rows)


@triton.jit
def _sum_kernel(
    parts_ptr,
    bias_ptr,
    out_ptr,
    size,
    out_features,
    NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """[NUM_PARTS, size] -> [size], bias added."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(NUM_PARTS):
        total += tl.load(parts_ptr + part * size + index, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + index % out_features, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), mask=mask)


def is_tiled(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``tile_linear`` multiplies x [N, in] by a weight [out, in] fastest."""
    out_features, width = weight.shape
    return (
        MIN_ROWS <= len(x) <= MAX_ROWS
        and x.dim() == 2
        and use_triton(x)
        and x.is_contiguous()
        and x.dtype in (torch.float16, torch.bfloat16)
        and weight.numel() <= MAX_WEIGHTS
        and out_features % BLOCK_N == 0
        and width % (_num_parts(out_features, width) * BLOCK_K) == 0
        and shared_memory(x.device) >= SHARED_MEMORY
    )


def tile_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + b of x [MIN_ROWS to MAX_ROWS, in] and a weight [out, in], both contiguous, of half
    precision."""
    out_features, width = weight.shape
    num_parts = _num_parts(out_features, width)
    assert x.is_contiguous() and weight.is_contiguous() and x.size(1) == width
    assert out_features % BLOCK_N == 0 and width % (num_parts * BLOCK_K) == 0
    out = x.new_empty(len(x), out_features)
    is_whole = num_parts == 1
    parts = out if is_whole else x.new_empty(num_parts, *out.shape, dtype=torch.float32)
    block_m = 32 if is_whole or len(x) <= 32 else 64
    _tile_kernel[(triton.cdiv(len(x), block_m), out_features // BLOCK_N, num_parts)](
        x,
        weight,
        bias,
        parts,
        len(x),
        out_features,
        width,
        width // num_parts,
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        STAGES=NUM_STAGES,
        HAS_BIAS=bias is not None and is_whole,
        num_warps=4,
        **pdl_options(x),
    )
    if not is_whole:
        block = 1024
        _sum_kernel[(triton.cdiv(out.numel(), block),)](
            parts,
            bias,
            out,
            out.numel(),
            out_features,
            NUM_PARTS=num_parts,
            BLOCK=block,
            HAS_BIAS=bias is not None,
            num_warps=4,
            **pdl_options(x),
        )
    return out


def _num_parts(out_features: int, width: int) -> int:
    """Into how many the columns are split: by the matrix alone."""
    if out_features >= 64 * BLOCK_N:
        return 1
    return triton.next_power_of_2(triton.cdiv(width, PART))
