"""The one-shot all-reduce as one rank sees it, its peers' mail laid out beforehand."""

import pytest
import torch

from nanovllm.kernels.all_reduce import BLOCK, MAX_NUMEL, NUM_BLOCKS, all_reduce


def address(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.tensor(
        [t.data_ptr() for t in tensors], dtype=torch.int64, device=tensors[0].device
    )


@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (1, 4096), (5, 2048)])
@pytest.mark.parametrize("rank, size", [(0, 2), (1, 2), (2, 4)])
def test_sums_what_the_peers_have_left_and_leaves_its_own(shape, rank, size, device):
    dtype = torch.float16
    inboxes = [torch.zeros(2, size, MAX_NUMEL, dtype=dtype, device=device) for _ in range(size)]
    flags = [torch.zeros(size, NUM_BLOCKS, dtype=torch.int32, device=device) for _ in range(size)]
    epochs = torch.zeros(NUM_BLOCKS, dtype=torch.int32, device=device)
    abort = torch.zeros(1, dtype=torch.int32)
    if device == "cuda":
        abort = abort.pin_memory()
    for epoch in (1, 2, 3):
        parts = torch.randn(size, *shape, device=device).to(dtype)
        for peer in range(size):
            if peer != rank:
                inboxes[rank][epoch % 2, peer, : parts[peer].numel()] = parts[peer].flatten()
                flags[rank][peer] = epoch
        out = all_reduce(parts[rank], address(*inboxes), address(*flags), epochs, abort, rank, size)
        expected = parts[0].float()
        for part in parts[1:]:
            expected = expected + part.float()
        assert torch.equal(out, expected.to(dtype))
        num_blocks = -(-parts[0].numel() // BLOCK)
        for peer in range(size):
            if peer != rank:
                left = inboxes[peer][epoch % 2, rank, : parts[rank].numel()]
                assert torch.equal(left, parts[rank].flatten())
                assert flags[peer][rank].tolist() == [epoch] * num_blocks + [0] * (
                    NUM_BLOCKS - num_blocks
                )


def test_the_largest_of_int64_at_each_place(device):
    """Guards packed scores, of which fp32 would lose the token."""
    inboxes = [torch.zeros(2, 2, BLOCK, dtype=torch.int64, device=device) for _ in range(2)]
    flags = [torch.zeros(2, 1, dtype=torch.int32, device=device) for _ in range(2)]
    epochs = torch.zeros(1, dtype=torch.int32, device=device)
    abort = torch.zeros(1, dtype=torch.int32)
    if device == "cuda":
        abort = abort.pin_memory()
    for epoch in (1, 2, 3):
        mine, theirs = torch.randint(-(2**62), 2**62, (2, 100), device=device)
        mine[:50] = theirs[:50] + 1
        inboxes[1][epoch % 2, 0, :100] = theirs
        flags[1][0] = epoch
        out = all_reduce(mine, address(*inboxes), address(*flags), epochs, abort, 1, 2)
        assert torch.equal(out, torch.maximum(mine, theirs))
        assert torch.equal(inboxes[0][epoch % 2, 1, :100], mine)


def test_an_abort_ends_the_wait_for_a_silent_peer(device):
    inboxes, flags = (
        [torch.zeros(2, 2, MAX_NUMEL, device=device) for _ in range(2)],
        [torch.zeros(2, NUM_BLOCKS, dtype=torch.int32, device=device) for _ in range(2)],
    )
    epochs = torch.zeros(NUM_BLOCKS, dtype=torch.int32, device=device)
    abort = torch.ones(1, dtype=torch.int32)
    if device == "cuda":
        abort = abort.pin_memory()
    x = torch.ones(10, device=device)
    all_reduce(x, address(*inboxes), address(*flags), epochs, abort, 0, 2)
    if device == "cuda":
        torch.cuda.synchronize()
