"""One-shot all-reduce between GPUs that NVLink connects, alone or with the residual add and the
RMSNorm that follow it.

Each rank writes its tensor into an inbox on every other rank, waits until the tensors of the other
ranks are in its own inboxes, and sums them. This takes one trip over NVLink, where a ring takes
several. Each program exchanges its own rows with the other ranks, so the programs of one rank do
not wait for each other.

No flag says that a tensor has arrived. Inboxes are filled with a number that is never sent, -0, and
a rank reads its inboxes until nothing there is -0, as TensorRT-LLM's low-latency all-reduce does.
Then it fills them with -0 again. So a sender need not wait, between its data and a flag, until the
data have arrived.

A CUDA graph can replay the kernel, because no argument changes from call to call: the device counts
the calls for each row. Calls use two inboxes in turn. A peer sends a row of call e + 1 only after
it has emptied its inbox of call e. So a rank that has received this row may write to that inbox in
call e + 2.
"""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nanovllm.kernels.rms_norm import store_norm
from nanovllm.utils.cuda_ipc import (
    DriverError,
    close_memory,
    export_memory,
    has_native_atomics,
    open_memory,
)
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.math import cdiv, next_power_of_2
from nanovllm.utils.triton_compat import (
    HAS_TRITON,
    num_multiprocessors,
    pdl_options,
    pdl_wait,
    register_limit,
    tl,
    triton,
)

logger = logging.getLogger("nanovllm")
# Elements of an inbox of two ranks, to which a larger tensor is sent in several calls.
MAX_NUMEL = 8 << 20
# Largest tensors for 3 to 4 ranks and for 5 to 8 ranks. Above these sizes a ring is faster, because
# in a one-shot all-reduce each rank sends its tensor to every other rank.
MAX_BYTES_4_RANKS, MAX_BYTES_8_RANKS = 512 << 10, 256 << 10
TOKEN_ROWS, TOKEN_WIDTH = 32, 256  # an inbox for sampled tokens
# If there are few rows, and no norm follows, four programs exchange a row.
SPLIT, MAX_SPLIT_ROWS = 4, 16
# Multiprocessors hold at least 16 programs, and 32 warps of threads with 64 registers each, since
# Volta.
PROGRAMS_PER_MULTIPROCESSOR, WARPS_PER_MULTIPROCESSOR, REGISTERS = 16, 32, 64


@triton.jit
def _receive(address, mask, abort_ptr, EMPTY: tl.constexpr, SPINS: tl.constexpr):
    """Waits until no inbox is empty at the addresses, and empties them. Returns what was there."""
    bits = tl.load(address, mask=mask, other=0, volatile=True)
    num_missing = tl.sum((bits == EMPTY).to(tl.int32))
    aborted = 0
    spins = 0
    while (num_missing > 0) & (aborted == 0):
        bits = tl.load(address, mask=mask, other=0, volatile=True)
        num_missing = tl.sum((bits == EMPTY).to(tl.int32))
        spins += 1
        if spins % SPINS == 0:
            aborted = tl.load(abort_ptr, volatile=True)  # slow, in host memory
    tl.store(address, tl.full(bits.shape, EMPTY, bits.dtype), mask=mask)
    return bits


@triton.jit
def _all_reduce_kernel(
    x_ptr,
    out_ptr,
    residual_ptr,
    total_ptr,
    weight_ptr,
    scale_ptr,
    eps,
    inboxes_ptr,
    counts_ptr,
    abort_ptr,
    numel,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    BITS: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
    SPINS: tl.constexpr = 4096,
):
    """Stores the sums or, with a residual, its sum with them and the norm of that. A program
    exchanges a row at a time, or one of its PARTS."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    EMPTY: tl.constexpr = -(2 ** (DTYPE.primitive_bitwidth - 1))
    COLUMNS: tl.constexpr = WIDTH // PARTS
    INBOX: tl.constexpr = NUM_ROWS * WIDTH
    column = tl.arange(0, triton.next_power_of_2(COLUMNS))
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0)
    pdl_wait(PDL)
    # Programs wait for programs of other ranks, so all programs must be resident at once. Therefore
    # a large tensor has more rows than programs. A program processes its rows in ascending order,
    # on all ranks.
    for i in tl.range(tl.program_id(0), tl.cdiv(numel, WIDTH) * PARTS, tl.num_programs(0)):
        offset = i * COLUMNS + column
        mask = (column < COLUMNS) & (offset < numel)
        x = tl.load(x_ptr + offset, mask=mask, other=0)
        count_ptr = counts_ptr + i * (SPLIT // PARTS)
        count = tl.load(count_ptr)
        first = (count & 1) * SIZE  # the number of this call's first inbox
        bits = x.to(BITS, bitcast=True)
        if x.dtype != tl.int64:
            bits = tl.where(bits == EMPTY, 0, bits)  # +0, which adds the same
        for step in tl.static_range(1, SIZE):
            # The hint allows wide stores: the compiler does not know this address's alignment.
            inbox = tl.load(inboxes_ptr + (RANK + step) % SIZE).to(tl.pointer_type(BITS))
            inbox = tl.multiple_of(inbox, 16) + (first + RANK) * INBOX
            tl.store(inbox + offset, bits, mask=mask)
        tl.debug_barrier()
        tl.store(count_ptr + tl.arange(0, SPLIT // PARTS), count + 1)
        total = x if x.dtype == tl.int64 else tl.zeros(column.shape, tl.float32)
        own = tl.load(inboxes_ptr + RANK).to(tl.pointer_type(BITS))
        own = tl.multiple_of(own, 16) + first * INBOX
        for rank in tl.static_range(SIZE):  # the same order, and so the same sum, on all ranks
            received = x
            if rank != RANK:
                bits = _receive(own + rank * INBOX + offset, mask, abort_ptr, EMPTY, SPINS)
                received = bits.to(DTYPE, bitcast=True)
            if x.dtype == tl.int64:
                total = tl.maximum(total, received)
            else:
                total += received.to(tl.float32)
        x = total.to(DTYPE)
        if weight_ptr is None:
            tl.store(out_ptr + offset, x, mask=mask)
        else:
            residual = tl.load(residual_ptr + offset, mask=mask, other=0.0)
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(DTYPE)
            tl.store(total_ptr + offset, x, mask=mask)
            store_norm(x, weight, i, out_ptr, scale_ptr, eps, WIDTH, GROUP)


class Mail(NamedTuple):
    """What one rank needs to exchange tensors of up to [num_rows, width] elements with the others.

    Attributes:
        inboxes: int64 [size], the address of each rank's inboxes, [2, size, num_rows, width]
            elements, at first empty (``empty_inboxes``).
        counts: int32 [num_rows, SPLIT], how often this rank has exchanged each part of a row, at
            first 0. Parts of the same row have been exchanged equally often.
        abort: int32 [1] in pinned host memory. A nonzero value ends all waiting.
    """

    rank: int
    size: int
    num_rows: int
    width: int
    inboxes: torch.Tensor
    counts: torch.Tensor
    abort: torch.Tensor


def empty_inboxes(
    size: int, num_rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Allocates a rank's inboxes, filled with -0 or, for int64, the least number."""
    number = torch.iinfo(dtype).min if dtype is torch.int64 else -0.0
    return torch.full((2, size, num_rows, width), number, dtype=dtype, device=device)


def all_reduce(x: torch.Tensor, mail: Mail) -> torch.Tensor:
    """Returns the sum of x over all ranks, each of which calls this with its own x, or for int64
    the maximum. The sum is computed in fp32, in the order of the ranks, and rounded once.

    Args:
        x: contiguous fp32, bf16 or fp16, or int64 above the least one.
    """
    assert x.is_contiguous()
    out = torch.empty_like(x)
    numel = mail.num_rows * mail.width
    for part, out_part in zip(x.view(-1).split(numel), out.view(-1).split(numel), strict=True):
        _launch(part, mail, out_part)
    return out


def all_reduce_norm(
    x: torch.Tensor,
    mail: Mail,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor | None = None,
    group: int | None = None,
) -> torch.Tensor:
    """Writes the RMSNorm of ``all_reduce(x, mail)`` + residual to ``out``, quantised if there are
    ``scales``, as in kernels/rms_norm.py. Returns the sum.

    Args:
        x: as for ``all_reduce``, [N, width], with at most ``max_norm_rows`` rows.
        residual: [N, width].
    """
    assert residual.is_contiguous() and residual.shape == x.shape
    assert len(x) <= max_norm_rows(mail, x.device)
    total = torch.empty_like(x)
    _launch(x, mail, out, residual, total, weight, scales, eps, group)
    return total


def _launch(
    x: torch.Tensor,
    mail: Mail,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    eps: float = 0.0,
    group: int | None = None,
) -> None:
    rank, size, num_rows, width, *tensors = mail
    rows = cdiv(x.numel(), width)
    assert x.is_contiguous() and rows <= num_rows
    is_split = weight is None and rows <= MAX_SPLIT_ROWS and width % SPLIT == 0
    parts = SPLIT if is_split else 1
    num_warps = num_warps_of(width // parts)
    _all_reduce_kernel[(min(rows * parts, max_programs(x.device, num_warps)),)](
        x,
        out,
        residual,
        total,
        weight,
        scales,
        eps,
        *tensors,
        x.numel(),
        WIDTH=width,
        GROUP=group,
        RANK=rank,
        SIZE=size,
        NUM_ROWS=num_rows,
        BITS={2: tl.int16, 4: tl.int32, 8: tl.int64}[x.itemsize],
        PARTS=parts,
        SPLIT=SPLIT,
        num_warps=num_warps,
        **register_limit(REGISTERS),
        **pdl_options(x),
    )


def num_warps_of(width: int) -> int:
    """Returns the number of warps of a program that exchanges this many columns."""
    return min(16, max(1, next_power_of_2(width) // 512))


def max_programs(device: torch.device, num_warps: int) -> int:
    """Returns the number of programs that can be resident at once on a GPU."""
    programs = min(PROGRAMS_PER_MULTIPROCESSOR, WARPS_PER_MULTIPROCESSOR // num_warps)
    return programs * num_multiprocessors(device)


def max_norm_rows(mail: Mail, device: torch.device) -> int:
    """Returns the number of rows up to which ``all_reduce_norm`` has a program for each."""
    return min(mail.num_rows, max_programs(device, num_warps_of(mail.width)))


def num_rows_of(width: int, size: int, dtype: torch.dtype) -> int:
    """Returns the number of rows of an inbox for ``size`` ranks. The width is the model's hidden
    size. With more than two ranks, NCCL is faster for larger tensors."""
    if size == 2:
        return MAX_NUMEL // width
    return (MAX_BYTES_4_RANKS if size <= 4 else MAX_BYTES_8_RANKS) // (width * dtype.itemsize)


def supports_one_shot(devices: Sequence[torch.device]) -> bool:
    """Returns whether NVLink connects all GPUs: they can write to each other's memory and, other
    than over PCIe, do atomic operations there."""
    pairs = [(a.index, b.index) for a in devices for b in devices if a != b]
    return HAS_TRITON and all(
        torch.cuda.can_device_access_peer(a, b) and has_native_atomics(a, b) for a, b in pairs
    )


def make_one_shot_all_reduces(
    group: TPGroup,
    store: dist.Store,
    dtype: torch.dtype,
    width: int,
    devices: Sequence[torch.device],
) -> tuple["OneShotAllReduce", ...]:
    """Makes two one-shot all-reduces for a group: one sums ``dtype``, one takes maxima of int64.

    This is a collective: every rank must call it, and waits for the others. Returns an empty tuple,
    on all ranks, if NVLink does not connect all devices, or if a rank cannot share its memory, as
    with expandable segments in PyTorch's allocator.

    Args:
        store: the store through which ranks exchange memory handles.
        width: the model's hidden size.
        devices: the device of each rank.
    """
    device, reason = devices[group.rank], ""
    one_shots: list[OneShotAllReduce] = []
    shapes = {
        dtype: (num_rows_of(width, group.size, dtype), width),
        torch.int64: (TOKEN_ROWS, TOKEN_WIDTH),
    }
    try:
        if not supports_one_shot(devices):
            reason = "not all GPUs are linked by NVLink"
    except DriverError as error:
        reason = str(error)
    for type_, shape in shapes.items():
        # All ranks must agree before they wait for each other.
        if not group.min(not reason, device):
            break
        try:
            one_shots.append(OneShotAllReduce(group.rank, group.size, store, type_, device, *shape))
        except DriverError as error:
            reason = str(error)
    if group.min(not reason and len(one_shots) == len(shapes), device):
        return tuple(one_shots)  # by now the inboxes of all ranks are empty
    if group.rank == 0:
        logger.info("all-reduce uses NCCL only: %s", reason or "another rank cannot share memory")
    for one_shot in one_shots:
        one_shot.close()
    return ()


class OneShotAllReduce:
    """A one-shot all-reduce of one dtype, with its inboxes.

    The constructor is a collective: it blocks until all ranks have called it.

    Args:
        store: the store through which ranks exchange memory handles.
        dtype: dtype of the tensors.
        num_rows, width: the shape of an inbox.

    Raises:
        DriverError: this rank or another cannot share its memory.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: dist.Store,
        dtype: torch.dtype,
        device: torch.device,
        num_rows: int,
        width: int,
    ) -> None:
        self.dtype = dtype
        self.memory = empty_inboxes(size, num_rows, width, dtype, device)
        inboxes = torch.zeros(size, dtype=torch.int64, device=device)
        counts = torch.zeros(num_rows, SPLIT, dtype=torch.int32, device=device)
        abort = torch.zeros(1, dtype=torch.int32, device="cpu").pin_memory()
        self.mail = Mail(rank, size, num_rows, width, inboxes, counts, abort)
        torch.cuda.synchronize(device)
        self._opened: list[int] = []
        try:
            addresses = self._exchange(store)
        except DriverError:
            self.close()
            raise
        inboxes.copy_(torch.tensor(addresses, device="cpu"))

    def _exchange(self, store: dist.Store) -> list[int]:
        """Exchanges memory handles. Returns the address of each rank's memory."""
        name, rank = f"inbox/{self.dtype}", self.mail.rank
        try:
            own_handle = export_memory(self.memory).hex()
        except DriverError:
            store.set(f"{name}/{rank}", "")  # tells the other ranks, which wait for this key
            raise
        store.set(f"{name}/{rank}", own_handle)
        addresses = []
        for peer in range(self.mail.size):
            if peer == rank:
                addresses.append(self.memory.data_ptr())
                continue
            handle = store.get(f"{name}/{peer}").decode()
            if not handle:
                raise DriverError(f"rank {peer} cannot share its memory")
            base, address = open_memory(bytes.fromhex(handle))
            self._opened.append(base)
            addresses.append(address)
        return addresses

    def supports(self, x: torch.Tensor) -> bool:
        """Returns whether x has the right dtype, and is small enough to be faster than NCCL."""
        is_small = x.numel() <= self.mail.num_rows * self.mail.width
        return x.dtype == self.dtype and x.is_contiguous() and (self.mail.size == 2 or is_small)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x, self.mail)

    def supports_norm(self, x: torch.Tensor) -> bool:
        """Returns whether ``norm`` takes this x. For one row it is slower than the kernels that
        apply the norm while they multiply (kernels/gemm/skinny.py)."""
        is_input = x.dim() == 2 and x.size(1) == self.mail.width and self.supports(x)
        return is_input and 1 < len(x) <= max_norm_rows(self.mail, x.device)

    def norm(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        """See ``all_reduce_norm``."""
        return all_reduce_norm(x, self.mail, *args)

    def abort(self) -> None:
        """Ends all waiting for peers. The results of running calls are undefined."""
        self.mail.abort.fill_(1)

    def close(self) -> None:
        """Unmaps the peers' memory. No call may be running."""
        for base in self._opened:
            close_memory(base)
        self._opened = []
