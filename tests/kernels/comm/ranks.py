"""Runs a one-shot all-reduce between processes that share memory, in Triton's interpreter: ``python
-m tests.kernels.comm.ranks NUM_RANKS WIDTH DTYPE``."""

import os
import random
import sys
import traceback
from time import sleep

import torch

from nanovllm.kernels.comm import all_reduce as module
from nanovllm.kernels.comm.all_reduce import Mail, all_reduce, all_reduce_norm, empty_inboxes
from nanovllm.kernels.rms_norm import rms_norm_triton

NUM_ROWS, NUM_CALLS, NUM_PROGRAMS = 12, 40, 5
SHARE_OF_ZEROS = 0.2


def make_parts(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Only the last byte of a number is not 0, because the interpreter stores one byte after the
    other: a rank could read a part of a number."""
    parts = torch.randn(size, *shape).to(dtype)
    parts[torch.rand(parts.shape) < SHARE_OF_ZEROS] = -0.0
    integers = {2: torch.int16, 4: torch.int32}[parts.itemsize]
    bits = 8 * parts.itemsize - 8
    return (parts.view(integers) >> bits << bits).view(dtype)


def run(rank: int, size: int, inboxes: list[torch.Tensor]) -> None:
    """Calls all-reduces of random shapes, with and without a norm, the same on all ranks. Ranks
    pause at times of their own."""
    dtype, width = inboxes[0].dtype, inboxes[0].size(-1)
    addresses = torch.tensor([each.data_ptr() for each in inboxes])
    counts = torch.zeros(NUM_ROWS, module.SPLIT, dtype=torch.int32)
    mail = Mail(rank, size, NUM_ROWS, width, addresses, counts, torch.zeros(1, dtype=torch.int32))
    weight = torch.rand(width).to(dtype)
    choices, pauses = random.Random(0), random.Random(rank)
    for _ in range(NUM_CALLS):
        has_norm = choices.random() < 0.4
        num_rows = choices.choice(
            [1, 2, 3, 5] if has_norm else [1, 2, 4, 7, NUM_ROWS, 2 * NUM_ROWS]
        )
        shape = num_rows, width
        if not has_norm and choices.random() < 0.3:
            shape = (choices.randint(1, NUM_ROWS * width),)
        parts = make_parts(size, shape, dtype)
        total = torch.zeros(shape)
        for part in parts:
            total += part.float()
        expected = total.to(dtype)
        if pauses.random() < 0.2:
            sleep(0.05 * pauses.random())
        if not has_norm:
            assert torch.equal(all_reduce(parts[rank], mail), expected)
            continue
        residual = torch.randn(shape).to(dtype)
        out = torch.empty_like(residual)
        found = all_reduce_norm(parts[rank], mail, weight, 1e-6, residual, out)
        normed, total = rms_norm_triton(expected, weight, 1e-6, residual)
        assert torch.equal(found, total) and torch.equal(out, normed)


def main(size: int, width: int, dtype: torch.dtype) -> None:
    module.MAX_SPLIT_ROWS = 3
    # The interpreter runs one program after the other, so all ranks need equally many.
    module.max_programs = lambda device, num_warps: NUM_PROGRAMS
    empty = empty_inboxes(size, NUM_ROWS, width, dtype, torch.device("cpu"))
    inboxes = [empty.clone().share_memory_() for _ in range(size)]  # at the same addresses in all
    torch.manual_seed(0)
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            status = 1
            try:
                run(rank, size, inboxes)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    assert not any(os.waitpid(child, 0)[1] for child in children)
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    assert all(torch.equal(each.view(integers), empty.view(integers)) for each in inboxes)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), getattr(torch, sys.argv[3]))
