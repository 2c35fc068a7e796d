"""One-shot all-reduce of small tensors between GPUs that are linked by NVLink.

Each rank pushes its tensor into an inbox on every other one, raises a flag there, waits for the
flags of the others and adds up what they have left: one trip over NVLink, where a ring takes
several. Every program does this for its own blocks of the tensor, so none waits for a whole grid.
Flags are atomic operations on the peer's memory, which PCIe does not have.

Nothing that changes from call to call is an argument, so a CUDA graph can replay it: the number
of a program's call (its epoch) is counted on the device. Inboxes are double: a peer that has
raised flag e + 1 has read what was left at e, so call e + 2 may overwrite it.
"""

import logging
from collections.abc import Sequence

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
from nanovllm.utils.triton_compat import HAS_TRITON, chained, num_multiprocessors, tl, triton

logger = logging.getLogger("nanovllm")
BLOCK = 2048  # elements
NUM_BLOCKS = 1024  # of the largest tensor that goes this way, between two GPUs
MAX_NUMEL = BLOCK * NUM_BLOCKS
MAX_ROWS = 4 * BLOCK  # of sampled tokens
# Each rank sends its tensor to every other one, which of several costs more than a ring's latency
# from these sizes on.
MAX_BYTES_OF_4, MAX_BYTES_OF_8 = 512 << 10, 256 << 10
# Programs that a multiprocessor holds at once: with 256 threads of 64 registers, any since Volta.
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
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    TAKES_MAX: tl.constexpr,
    SPINS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # Programs that wait for a peer's must all be able to run at once, so there may be fewer of them
    # than blocks. Each goes through its own in ascending order, as the peer's does.
    for block in tl.range(tl.program_id(0), tl.cdiv(numel, BLOCK), tl.num_programs(0)):
        offset = block * BLOCK + tl.arange(0, BLOCK)
        mask = offset < numel
        epoch = tl.load(epochs_ptr + block) + 1
        half = (epoch % 2) * SIZE
        x = tl.load(x_ptr + offset, mask=mask)
        for i in tl.static_range(1, SIZE):
            # Addresses from memory say nothing of their alignment, and stores would be narrow.
            inbox = tl.multiple_of(tl.load(inboxes_ptr + (RANK + i) % SIZE).to(x_ptr.dtype), 16)
            tl.store(inbox + (half + RANK) * (BLOCK * NUM_BLOCKS) + offset, x, mask=mask)
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
                        aborted = tl.load(abort_ptr, volatile=True)  # on the host, so seldom
        tl.debug_barrier()
        own_inbox = tl.multiple_of(tl.load(inboxes_ptr + RANK).to(x_ptr.dtype), 16)
        total = x if TAKES_MAX else tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(SIZE):  # in the same order everywhere, for the same sum
            left = x
            if rank != RANK:
                left_ptr = own_inbox + (half + rank) * (BLOCK * NUM_BLOCKS) + offset
                left = tl.load(left_ptr, mask=mask, cache_modifier=".cg")
            if TAKES_MAX:
                total = tl.maximum(total, left)
            else:
                total += left.to(tl.float32)
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
    """Sum of x over the ranks, in fp32 and rounded once; of int64, the largest at each place.
    Every rank calls it with its own x.

    Args:
        x: contiguous, at most num_blocks * BLOCK elements of fp32, bf16, fp16 or int64.
        inboxes: int64 [size], addresses of [2, size, num_blocks * BLOCK] elements on each rank.
        flags: int64 [size], addresses of int32 [size, num_blocks] on each rank, zeroed once.
        epochs: int32 [num_blocks] on this rank, zeroed once.
        abort: int32 [1] in pinned host memory; anything but 0 ends all waiting.
    """
    assert x.is_contiguous() and x.numel() <= len(epochs) * BLOCK
    out = torch.empty_like(x)
    _all_reduce_kernel[(min(triton.cdiv(x.numel(), BLOCK), max_programs(x.device)),)](
        x,
        out,
        inboxes,
        flags,
        epochs,
        abort,
        x.numel(),
        RANK=rank,
        SIZE=size,
        BLOCK=BLOCK,
        NUM_BLOCKS=len(epochs),
        TAKES_MAX=x.dtype == torch.int64,
        SPINS=4096,
        num_warps=8,
        **({} if torch.version.hip else {"maxnreg": REGISTERS}),
        **chained(x),
    )
    return out


def max_programs(device: torch.device) -> int:
    """How many programs can run at once."""
    return PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(device)


def max_numel(size: int, dtype: torch.dtype) -> int:
    """Elements of the largest tensor for which one shot between so many GPUs is faster than NCCL:
    whole blocks."""
    if size == 2:
        return MAX_NUMEL
    return (MAX_BYTES_OF_4 if size <= 4 else MAX_BYTES_OF_8) // dtype.itemsize // BLOCK * BLOCK


def can_one_shot(devices: Sequence[torch.device]) -> bool:
    """Whether GPUs can all write each other's memory, and do atomic operations on it."""
    pairs = [(a.index, b.index) for a in devices for b in devices if a != b]
    return HAS_TRITON and all(
        torch.cuda.can_device_access_peer(a, b) and has_native_atomics(a, b) for a, b in pairs
    )


def make_one_shots(
    group: TPGroup, store: dist.Store, dtype: torch.dtype, devices: Sequence[torch.device]
) -> tuple["OneShotAllReduce", ...]:
    """What reduces a group's small tensors: sums of ``dtype``, and maxima of int64. Every rank
    calls it, and waits for the others.

    Empty, on all ranks alike, where not all of their devices are linked, or where one rank cannot
    share its memory, as with expandable segments in PyTorch's allocator.

    Args:
        store: where ranks leave word for each other.
        devices: of all ranks.
    """
    device, reason = devices[group.rank], ""
    made: list[OneShotAllReduce] = []
    sizes = {dtype: max_numel(group.size, dtype), torch.int64: MAX_ROWS}
    try:
        if not can_one_shot(devices):
            reason = "not all GPUs are linked by NVLink"
    except DriverError as error:
        reason = str(error)
    for kind, numel in sizes.items():
        # Ranks that went different ways would wait for each other.
        if not group.min(not reason, device):
            break
        try:
            made.append(OneShotAllReduce(group.rank, group.size, store, kind, device, numel))
        except DriverError as error:
            reason = str(error)
    if group.min(not reason and len(made) == len(sizes), device):
        return tuple(made)  # all ranks have zeroed their flags by now, so one may be raised
    if group.rank == 0:
        logger.info("all-reduce by NCCL alone: %s", reason or "another rank cannot share memory")
    for one_shot in made:
        one_shot.close()
    return ()


class OneShotAllReduce:
    """The inboxes of one engine's ranks, each written by all. Blocks until all ranks have made
    theirs.

    Args:
        store: where ranks leave word for each other.
        dtype: of what is to be reduced.
        max_numel: elements of the largest tensor.

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
        self.aborted = torch.zeros(1, dtype=torch.int32).pin_memory()
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
        """The addresses of all ranks' memory."""
        name = f"inbox/{self.dtype}"
        try:
            exported = export_memory(self.memory).hex()
        except DriverError:
            store.set(f"{name}/{self.rank}", "")  # or others would wait for it
            raise
        store.set(f"{name}/{self.rank}", exported)
        addresses = []
        for peer in range(self.size):
            if peer == self.rank:
                addresses.append(self.memory.data_ptr())
                continue
            theirs = store.get(f"{name}/{peer}").decode()
            if not theirs:
                raise DriverError(f"rank {peer} cannot share its memory")
            base, address = open_memory(bytes.fromhex(theirs))
            self._opened.append(base)
            addresses.append(address)
        return addresses

    def serves(self, x: torch.Tensor) -> bool:
        return x.numel() <= len(self.epochs) * BLOCK and x.dtype == self.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(
            x, self.inboxes, self.flags, self.epochs, self.aborted, self.rank, self.size
        )

    def abort(self) -> None:
        """Ends all waiting for peers; what comes out of it is no sum."""
        self.aborted.fill_(1)

    def close(self) -> None:
        """Lets go of the peers' memory; nothing may be running."""
        for base in self._opened:
            close_memory(base)
        self._opened = []
