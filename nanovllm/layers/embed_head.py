"""Token embedding and output head, the vocabulary split over the tensor-parallel ranks."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels.linear import linear, pack_weight
from nanovllm.utils.context import get_context
from nanovllm.utils.distributed import get_tp_group
from nanovllm.utils.loader import copy_weight
from nanovllm.utils.math import cdiv


class VocabParallelEmbedding(nn.Module):
    """Embedding rows [rank * R, (rank + 1) * R) on each rank, R = vocabulary / ranks rounded up:
    the last rank's end may be padding, of zeros."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        self.tp = get_tp_group()
        self.num_embeddings = num_embeddings
        self.num_embeddings_per_rank = cdiv(num_embeddings, self.tp.size)
        self.vocab_start = self.tp.rank * self.num_embeddings_per_rank
        self.weight = nn.Parameter(torch.empty(self.num_embeddings_per_rank, embedding_dim))
        self.weight.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        if loaded_weight.size(0) != self.num_embeddings:
            shape = [self.num_embeddings, *param.shape[1:]]
            raise ValueError(
                f"the model needs shape {shape}, the checkpoint has {list(loaded_weight.shape)}"
            )
        rows = loaded_weight[self.vocab_start :][: self.num_embeddings_per_rank]
        copy_weight(param.data[: len(rows)], rows)
        param.data[len(rows) :].zero_()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int32 [N] -> [N, embedding_dim]."""
        if self.tp.size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.vocab_start
        mask = (local >= 0) & (local < self.num_embeddings_per_rank)
        rows = F.embedding(local * mask, self.weight)
        return self.tp.all_reduce(rows * mask.unsqueeze(-1))


class ParallelLMHead(VocabParallelEmbedding):
    """Logits of the positions that the step samples, gathered on rank 0."""

    def pack(self) -> None:
        """Once loaded: puts the weight into the device's fastest layout (an embedding tied to
        it keeps the plain one)."""
        self.weight = nn.Parameter(pack_weight(self.weight.data), requires_grad=False)

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor
    ) -> torch.Tensor | None:
        """[N, embedding_dim] -> [num_sampled, vocabulary] on rank 0, None elsewhere."""
        indices = get_context().logits_indices
        if indices is not None:
            hidden_states = hidden_states[indices]
        parts = self.tp.gather(linear(hidden_states, self.weight, None))
        if parts is None:
            return None
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, -1)[:, : self.num_embeddings].contiguous()
