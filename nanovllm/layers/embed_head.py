"""Token embedding and LM head, with the vocabulary split over the tensor-parallel ranks."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels.sampling.philox import GROUP
from nanovllm.quantization import new_vocabulary_weight
from nanovllm.quantization.base import Shard
from nanovllm.utils.context import get_context
from nanovllm.utils.distributed import get_tp_group
from nanovllm.utils.loader import check_shape
from nanovllm.utils.math import cdiv


class VocabParallelEmbedding(nn.Module):
    """Embedding rows [rank * R, (rank + 1) * R) on each rank. R is the vocabulary with one rank,
    otherwise vocabulary / ranks, rounded up to a multiple of GROUP, as sampling needs. Rows past
    the end of the vocabulary are zero."""

    weight: nn.Parameter

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        self.tp = get_tp_group()
        self.num_embeddings = num_embeddings
        self.num_embeddings_per_rank = num_embeddings
        if self.tp.size > 1:
            self.num_embeddings_per_rank = cdiv(num_embeddings, self.tp.size * GROUP) * GROUP
        self.vocab_start = self.tp.rank * self.num_embeddings_per_rank
        self.linear_weight = new_vocabulary_weight(self)
        self.linear_weight.create_parameters(embedding_dim, self.num_embeddings_per_rank)
        self.weight.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        check_shape((self.num_embeddings, *param.shape[1:]), loaded_weight)
        rows = loaded_weight[self.vocab_start :][: self.num_embeddings_per_rank]
        num_missing = self.num_embeddings_per_rank - len(rows)
        rows = F.pad(rows, (0, 0, 0, num_missing)) if num_missing else rows
        self.linear_weight.load(param, rows, Shard())

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int32 [N] -> [N, embedding_dim]."""
        if self.tp.size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.vocab_start
        clamped = local.clamp(0, self.num_embeddings_per_rank - 1)
        is_local = (clamped == local).unsqueeze(-1)
        return self.tp.all_reduce(F.embedding(clamped, self.weight) * is_local)


class ParallelLMHead(VocabParallelEmbedding):
    """Computes logits for the positions that the step samples. Each rank computes the logits of its
    shard of the vocabulary."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[N, embedding_dim] -> [num_seqs, num_embeddings_per_rank]."""
        indices = get_context().logits_indices
        if indices is not None:
            hidden_states = hidden_states[indices]
        return self.linear_weight.matmul(hidden_states)
