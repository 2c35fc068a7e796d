"""What the router's kernel and the sort compute for the grouped GEMMs, in plain PyTorch."""

import torch

from nanovllm.kernels.moe.route import Routing, chunk_size
from nanovllm.kernels.moe.sort import Groups, max_tiles


def count_tokens(routing: Routing, num_experts: int) -> Routing:
    """The routing with ranks and counts, for any number of tokens."""
    num_tokens, device = len(routing.topk_ids), routing.topk_ids.device
    experts = routing.topk_ids.long()
    size = chunk_size(num_tokens, num_experts)
    num_chunks = -(-num_tokens // size)
    chosen = torch.zeros(num_chunks * size, num_experts, dtype=torch.int32, device=device)
    chosen[:num_tokens].scatter_(1, experts, 1)
    chosen = chosen.view(num_chunks, size, num_experts)
    earlier = (chosen.cumsum(1) - chosen).view(-1, num_experts)[:num_tokens]
    ranks = earlier.gather(1, experts).int()
    return routing._replace(ranks=ranks, counts=chosen.sum(1, dtype=torch.int32))


def sort_reference(routing: Routing, block_m: int) -> Groups:
    """See ``sort_triton``."""
    experts = routing.topk_ids.flatten()
    counts = routing.counts.sum(0)
    ends = counts.cumsum(0)
    per_expert = (counts + block_m - 1) // block_m
    expert = torch.arange(len(counts), device=counts.device).repeat_interleave(per_expert)
    index = torch.arange(len(expert), device=counts.device)
    index -= (per_expert.cumsum(0) - per_expert)[expert]
    starts = (ends - counts)[expert] + index * block_m
    size = max_tiles(len(experts), len(counts), block_m)
    tiles = torch.zeros(size, 3, dtype=torch.int32, device=counts.device)
    tiles[: len(expert)] = torch.stack([expert, starts, ends[expert]], dim=1)
    num_tiles = torch.tensor([len(expert)], dtype=torch.int32, device=counts.device)
    order = experts.argsort(stable=True)
    return Groups(order.int(), order.argsort().int(), tiles, num_tiles)
