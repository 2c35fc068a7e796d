"""One-shot all-reduce of small tensors between GPUs that can write each other's memory.

Each rank pushes its tensor into an inbox on every other one, raises a flag there, waits for the
flags of the others and adds up what they have left: one trip over NVLink, where a ring takes
several. Every program does this for its own piece of the tensor, so none waits for a whole grid.

Nothing that changes from call to call is an argument, so a CUDA graph can replay it: the number
of a program's call (its epoch) is counted on the device. Inboxes are double: a peer that has
raised flag e + 1 has read what was left at e, so call e + 2 may overwrite it.
"""

import torch
import torch.distributed as dist

from nanovllm.kernels.compat import HAS_TRITON, chained, tl, triton
from nanovllm.kernels.cuda_ipc import close_memory, export_memory, open_memory

BLOCK = 2048  # elements a program
NUM_BLOCKS = 1024  # of the largest tensor that goes this way
MAX_NUMEL = BLOCK * NUM_BLOCKS
MAX_ROWS = 4 * BLOCK  # of sampled tokens


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
    block = tl.program_id(0)
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
    _all_reduce_kernel[(triton.cdiv(x.numel(), BLOCK),)](
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
        **chained(x),
    )
    return out


def can_one_shot(size: int) -> bool:
    """Whether GPUs 0 to size - 1 can all write each other's memory."""
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    return HAS_TRITON and all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)


class OneShotAllReduce:
    """The inboxes of one engine's ranks, each written by all. Blocks until all ranks have made
    theirs.

    Args:
        store: where ranks leave word for each other.
        dtype: of what is to be reduced.
        max_numel: elements of the largest tensor.
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
        torch.cuda.synchronize()
        store.set(f"inbox/{dtype}/{rank}", export_memory(self.memory).hex())
        self._opened: list[int] = []
        addresses = []
        for peer in range(size):
            if peer == rank:
                addresses.append(self.memory.data_ptr())
            else:
                exported = bytes.fromhex(store.get(f"inbox/{dtype}/{peer}").decode())
                base, address = open_memory(exported)
                self._opened.append(base)
                addresses.append(address)
        self.inboxes = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.flags = self.inboxes + inbox_bytes
        self.epochs = torch.zeros(num_blocks, dtype=torch.int32, device=device)
        self.aborted = torch.zeros(1, dtype=torch.int32).pin_memory()

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
