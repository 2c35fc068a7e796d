"""One-shot all-reduce of small tensors between GPUs that NVLink connects.

Each rank writes its tensor into an inbox on every other rank and sets a flag there. Then it waits
for the flags of the other ranks and sums the tensors in its own inboxes. This takes one trip over
NVLink, where a ring takes several. The tensor is divided into blocks. Each program exchanges its
own blocks with the other ranks, so the programs of one rank do not wait for each other. Flags are
set by atomic operations on the peer's memory, which PCIe does not support.

A CUDA graph can replay the kernel, because no argument changes from call to call: the device counts
the calls of each block (the epoch). Inboxes are double-buffered: epochs e and e + 2 use the same
buffer. A peer sets flag e + 1 only after it has read its inbox of epoch e. So a rank that has seen
this flag may overwrite that inbox in epoch e + 2.
"""

import logging
from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist

from nanovllm.utils.cuda_ipc import (
    DriverError,
    close_memory,
    export_memory,
    has_native_atomics,
    open_memory,
)
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.math import cdiv
from nanovllm.utils.triton_compat import HAS_TRITON, pdl_options, pdl_wait, tl, triton

logger = logging.getLogger("nanovllm")
BLOCK = 2048  # elements
NUM_BLOCKS = 1024  # for two ranks, the number of blocks of the largest tensor
MAX_NUMEL = BLOCK * NUM_BLOCKS
MAX_ROWS = 4 * BLOCK  # largest number of sampled tokens
# Largest tensors for 3 to 4 ranks and for 5 to 8 ranks. Above these sizes a ring is faster, because
# in a one-shot all-reduce each rank sends its tensor to every other rank.
MAX_BYTES_4_RANKS, MAX_BYTES_8_RANKS = 512 << 10, 256 << 10
# Multiprocessors hold at least 4 programs of 256 threads with 64 registers each, since Volta.
PROGRAMS_PER_MULTIPROCESSOR, REGISTERS = 4, 64


@triton.jit
def _all_reduce_kernel(
    x_ptr,
    out_ptr,
    inboxes_ptr,
    flags_ptr,
    epochs_ptr,
    abort_ptr,
    numel,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr = BLOCK,
    SPINS: tl.constexpr = 4096,
):
    TAKES_MAX: tl.constexpr = x_ptr.dtype.element_ty == tl.int64
    pdl_wait(PDL)
    # Programs wait for programs of other ranks, so all programs must be resident at once. Therefore
    # a large tensor has more blocks than programs. A program processes its blocks in ascending
    # order, on all ranks.
    for block in tl.range(tl.program_id(0), tl.cdiv(numel, BLOCK), tl.num_programs(0)):
        offset = block * BLOCK + tl.arange(0, BLOCK)
        mask = offset < numel
        epoch = tl.load(epochs_ptr + block) + 1
        first_inbox = (epoch % 2) * SIZE  # this epoch's buffer begins at this inbox
        x = tl.load(x_ptr + offset, mask=mask)
        for i in tl.static_range(1, SIZE):
            # The hint allows wide stores: the compiler cannot know the alignment of this address.
            inbox = tl.multiple_of(tl.load(inboxes_ptr + (RANK + i) % SIZE).to(x_ptr.dtype), 16)
            tl.store(inbox + (first_inbox + RANK) * (BLOCK * NUM_BLOCKS) + offset, x, mask=mask)
        tl.debug_barrier()
        for i in tl.static_range(1, SIZE):
            flags = tl.load(flags_ptr + (RANK + i) % SIZE).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flags + RANK * NUM_BLOCKS + block, epoch, sem="release", scope="sys")
        tl.store(epochs_ptr + block, epoch)
        own_flags = tl.load(flags_ptr + RANK).to(tl.pointer_type(tl.int32))
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                flag_ptr = own_flags + peer * NUM_BLOCKS + block
                aborted = 0
                spins = 0
                seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
                while (seen < epoch) & (aborted == 0):
                    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
                    spins += 1
                    if spins % SPINS == 0:
                        aborted = tl.load(abort_ptr, volatile=True)  # slow, in host memory
        tl.debug_barrier()
        own_inbox = tl.multiple_of(tl.load(inboxes_ptr + RANK).to(x_ptr.dtype), 16)
        total = x if TAKES_MAX else tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(SIZE):  # the same order, and so the same sum, on all ranks
            received = x
            if rank != RANK:
                inbox = own_inbox + (first_inbox + rank) * (BLOCK * NUM_BLOCKS)
                received = tl.load(inbox + offset, mask=mask, cache_modifier=".cg")
            if TAKES_MAX:
                total = tl.maximum(total, received)
            else:
                total += received.to(tl.float32)
        tl.store(out_ptr + offset, total.to(x.dtype), mask=mask)


def all_reduce(
    x: torch.Tensor,
    inboxes: torch.Tensor,
    flags: torch.Tensor,
    epochs: torch.Tensor,
    abort: torch.Tensor,
    rank: int,
    size: int,
) -> torch.Tensor:
    """Reduces x over all ranks: the sum in fp32, rounded once, or for int64 the maximum.

    Every rank calls it with its own x. The result does not alias x.

    Args:
        x: contiguous, at most num_blocks * BLOCK elements of fp32, bf16, fp16 or int64.
        inboxes: int64 [size], the address of each rank's inboxes, [2, size, num_blocks * BLOCK]
            elements of x's dtype.
        flags: int64 [size], the address of each rank's flags, int32 [size, num_blocks], initially
            0.
        epochs: int32 [num_blocks], this rank's call counters, initially 0.
        abort: int32 [1] in pinned host memory. A nonzero value ends all waiting.
    """
    assert x.is_contiguous() and x.numel() <= len(epochs) * BLOCK
    out = torch.empty_like(x)
    _all_reduce_kernel[(min(cdiv(x.numel(), BLOCK), max_programs(x.device)),)](
        x,
        out,
        inboxes,
        flags,
        epochs,
        abort,
        x.numel(),
        RANK=rank,
        SIZE=size,
        NUM_BLOCKS=len(epochs),
        num_warps=8,
        **({} if torch.version.hip else {"maxnreg": REGISTERS}),
        **pdl_options(x),
    )
    return out


@cache
def max_programs(device: torch.device) -> int:
    """Returns the number of programs that can be resident at once on a GPU; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return PROGRAMS_PER_MULTIPROCESSOR * multiprocessors


def max_numel(size: int, dtype: torch.dtype) -> int:
    """Returns the number of elements, a multiple of BLOCK, up to which a one-shot all-reduce of
    ``size`` ranks is faster than NCCL."""
    if size == 2:
        return MAX_NUMEL
    max_bytes = MAX_BYTES_4_RANKS if size <= 4 else MAX_BYTES_8_RANKS
    return max_bytes // dtype.itemsize // BLOCK * BLOCK


def supports_one_shot(devices: Sequence[torch.device]) -> bool:
    """Returns whether all GPUs can write to each other's memory and do atomic operations there."""
    pairs = [(a.index, b.index) for a in devices for b in devices if a != b]
    return HAS_TRITON and all(
        torch.cuda.can_device_access_peer(a, b) and has_native_atomics(a, b) for a, b in pairs
    )


def make_one_shot_all_reduces(
    group: TPGroup, store: dist.Store, dtype: torch.dtype, devices: Sequence[torch.device]
) -> tuple["OneShotAllReduce", ...]:
    """Makes two one-shot all-reduces for a group: one sums ``dtype``, one takes maxima of int64.

    This is a collective: every rank must call it, and waits for the others. Returns an empty tuple,
    on all ranks, if NVLink does not connect all devices, or if a rank cannot share its memory, as
    with expandable segments in PyTorch's allocator.

    Args:
        store: the store through which ranks exchange memory handles.
        devices: the device of each rank.
    """
    device, reason = devices[group.rank], ""
    one_shots: list[OneShotAllReduce] = []
    sizes = {dtype: max_numel(group.size, dtype), torch.int64: MAX_ROWS}
    try:
        if not supports_one_shot(devices):
            reason = "not all GPUs are linked by NVLink"
    except DriverError as error:
        reason = str(error)
    for type_, numel in sizes.items():
        # All ranks must agree before they wait for each other.
        if not group.min(not reason, device):
            break
        try:
            one_shots.append(OneShotAllReduce(group.rank, group.size, store, type_, device, numel))
        except DriverError as error:
            reason = str(error)
    if group.min(not reason and len(one_shots) == len(sizes), device):
        return tuple(one_shots)  # by now all ranks have zeroed their flags
    if group.rank == 0:
        logger.info("all-reduce uses NCCL only: %s", reason or "another rank cannot share memory")
    for one_shot in one_shots:
        one_shot.close()
    return ()


class OneShotAllReduce:
    """A one-shot all-reduce of one dtype, with its inboxes and flags.

    The constructor is a collective: it blocks until all ranks have called it.

    Args:
        store: the store through which ranks exchange memory handles.
        dtype: dtype of the tensors.
        max_numel: largest number of elements.

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
        max_numel: int = MAX_NUMEL,
    ) -> None:
        self.rank, self.size, self.dtype = rank, size, dtype
        num_blocks = max_numel // BLOCK
        inbox_bytes = 2 * size * num_blocks * BLOCK * dtype.itemsize
        num_bytes = inbox_bytes + size * num_blocks * 4
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.epochs = torch.zeros(num_blocks, dtype=torch.int32, device=device)
        self.aborted = torch.zeros(1, dtype=torch.int32, device="cpu").pin_memory()
        torch.cuda.synchronize(device)
        self._opened: list[int] = []
        try:
            addresses = self._exchange(store)
        except DriverError:
            self.close()
            raise
        self.inboxes = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.flags = self.inboxes + inbox_bytes

    def _exchange(self, store: dist.Store) -> list[int]:
        """Exchanges memory handles. Returns the address of each rank's memory."""
        name = f"inbox/{self.dtype}"
        try:
            own_handle = export_memory(self.memory).hex()
        except DriverError:
            store.set(f"{name}/{self.rank}", "")  # tells the other ranks, which wait for this key
            raise
        store.set(f"{name}/{self.rank}", own_handle)
        addresses = []
        for peer in range(self.size):
            if peer == self.rank:
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
        """Returns whether x has the right dtype and is small enough."""
        return x.numel() <= len(self.epochs) * BLOCK and x.dtype == self.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(
            x, self.inboxes, self.flags, self.epochs, self.aborted, self.rank, self.size
        )

    def abort(self) -> None:
        """Ends all waiting for peers. The results of running calls are undefined."""
        self.aborted.fill_(1)

    def close(self) -> None:
        """Unmaps the peers' memory. No call may be running."""
        for base in self._opened:
            close_memory(base)
        self._opened = []
