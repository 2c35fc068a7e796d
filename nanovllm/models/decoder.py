"""The decoder-only transformer of all supported models, with RMSNorm, RoPE and gated MLP.

It is built from a ModelConfig, which has a LayerSpec for each layer. A layer's projections are
packed into four matrices (qkv, o, gate-up, down), split over the tensor-parallel ranks by heads and
by MLP columns. N is the number of new tokens in the step. The tokens of all sequences are
concatenated.
"""

from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from nanovllm.kernels.attention.base import AttentionParams
from nanovllm.layers.activation import ACTIVATIONS
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.model_config import AttentionSpec, LayerSpec, MLPSpec, ModelConfig, MoESpec
from nanovllm.utils.context import get_context
from nanovllm.utils.distributed import RankPart

Transform = Callable[[torch.Tensor], torch.Tensor]


def make_norm(config: ModelConfig, size: int) -> RMSNorm:
    dtype = torch.float32 if config.norm_in_fp32 else None
    return RMSNorm(size, config.rms_norm_eps, dtype, config.norm_offset)


def make_qk_norm(config: ModelConfig, spec: AttentionSpec, num_heads: int) -> Any:
    if spec.qk_norm is None:
        return None
    if spec.qk_norm == "head":
        return make_norm(config, spec.head_dim)
    from nanovllm.layers.all_heads_norm import AllHeadsRMSNorm

    return AllHeadsRMSNorm(num_heads, spec.head_dim, config.rms_norm_eps)


class DecoderAttention(nn.Module):
    """Self-attention: project, normalise q and k (``qk_norm``), apply RoPE, attend."""

    def __init__(
        self, config: ModelConfig, spec: AttentionSpec, rotary_emb: RotaryEmbedding
    ) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        heads = spec.num_heads, spec.num_kv_heads
        order = spec.rope.head_order(spec.head_dim) if spec.rope is not None else None
        assert order is None or not spec.qk_norm, "the norms' weights would need the same order"
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, spec.head_dim, *heads, spec.qkv_bias, order
        )
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.o_proj = RowParallelLinear(
            spec.num_heads * spec.head_dim, config.hidden_size, spec.o_bias
        )
        self.rotary_emb = rotary_emb
        scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        params = AttentionParams(scale, spec.window, spec.softcap)
        self.attn = Attention(self.num_heads, self.head_dim, params, self.num_kv_heads, spec.sinks)
        self.norms_all_heads = spec.qk_norm == "all_heads"
        self.q_norm, self.k_norm = (make_qk_norm(config, spec, num) for num in heads)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor | RankPart,
        residual: torch.Tensor | None,
        norm: RMSNorm | None,
        output_norm: Transform | None,
        output_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor | RankPart, torch.Tensor | None]:
        norms = () if self.norms_all_heads else (self.q_norm, self.k_norm)
        rope = self.rotary_emb(positions, *norms)
        weight, only_outputs = self.qkv_proj.linear_weight, output_indices is not None
        # Decode steps are not fused here: the Triton backend applies RoPE in its decode kernel.
        changes_heads = self.norms_all_heads or self.rotary_emb.query_scale is not None
        may_fuse = get_context().is_prefill and not changes_heads
        slots = self.attn.cache_slots() if may_fuse else None
        fused = weight.norm_matmul_rope(hidden_states, residual, norm, rope, slots)
        qkv, residual = fused or weight.norm_matmul(hidden_states, residual, norm)
        qkv = qkv.unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if fused is not None:
            x = self.attn.attend(q, k, v, only_outputs)
        else:
            if self.norms_all_heads:
                q, k = self.q_norm(q), self.k_norm(k)
            if self.rotary_emb.query_scale is not None:
                q = q * self.rotary_emb.query_scale[positions]
            x = self.attn(q, k, v, rope, only_outputs)
        kept = residual if output_indices is None else residual[output_indices]
        return self.o_proj.forward_add(kept, x.flatten(1), output_norm)


class DecoderMLP(nn.Module):
    """down(act(gate(x)) * up(x)): SwiGLU and GEGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, spec: MLPSpec) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, spec.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(hidden, [inner, inner], spec.bias)
        self.down_proj = RowParallelLinear(inner, hidden, spec.bias)
        self.act_fn = ACTIVATIONS[spec.activation](self.down_proj.linear_weight.input_format)

    def forward(
        self,
        x: torch.Tensor | RankPart,
        residual: torch.Tensor | None,
        norm: RMSNorm | None,
        output_norm: Transform | None,
    ) -> tuple[torch.Tensor | RankPart, torch.Tensor | None]:
        y, residual = self.gate_up_proj.linear_weight.norm_matmul(x, residual, norm, self.act_fn)
        return self.down_proj.forward_add(residual, y, output_norm)


def new_mlp(config: ModelConfig, spec: MLPSpec | MoESpec) -> nn.Module:
    if isinstance(spec, MLPSpec):
        return DecoderMLP(config, spec)
    from nanovllm.layers.moe import MoE

    return MoE(config.hidden_size, **asdict(spec))


class DecoderLayer(nn.Module):
    """Attention and MLP, each with an RMSNorm before it, after it or both. With an
    ``output_scale``, a multiplication takes the place of the norm after it. Attention's norms are
    input_layernorm and post_self_attn_layernorm, and the MLP's are post_attention_layernorm and
    post_mlp_layernorm.

    The outputs of attention and MLP are added to the residual in one of two places: in the
    projection that computes them (``RowParallelLinear.forward_add``), or in the next norm
    (``LinearWeight.norm_matmul``). In the first case ``residual`` is None until the next norm.

    The last layer gets the context's ``output_indices``, which may be None. If it is not, only
    these rows are computed, except for keys and values, which are computed for all rows.
    """

    def __init__(self, config: ModelConfig, spec: LayerSpec, rotary_emb: RotaryEmbedding) -> None:
        super().__init__()
        self.self_attn = DecoderAttention(config, spec.attention, rotary_emb)
        self.mlp = new_mlp(config, spec.mlp)
        norm = partial(make_norm, config, config.hidden_size)
        self.input_layernorm = norm() if spec.input_norms else None
        self.post_attention_layernorm = norm() if spec.input_norms else None
        scale = partial(torch.mul, other=spec.output_scale) if spec.output_scale != 1.0 else None
        self.post_self_attn_layernorm = norm() if spec.output_norms else scale
        self.post_mlp_layernorm = norm() if spec.output_norms else scale

    def forward(
        self,
        positions: torch.Tensor,
        x: torch.Tensor | RankPart,
        residual: torch.Tensor | None,
        output_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | RankPart, torch.Tensor | None]:
        norms = self.input_layernorm, self.post_self_attn_layernorm
        x, residual = self.self_attn(positions, x, residual, *norms, output_indices)
        norms = self.post_attention_layernorm, self.post_mlp_layernorm
        return self.mlp(x, residual, *norms)


class DecoderModel(nn.Module):
    """Embedding, layers and final norm.

    It maps token ids and positions, int32 [N] each, to hidden states [N, hidden_size], or only the
    rows in the context's ``output_indices``.
    """

    def __init__(self, config: ModelConfig, max_position: int) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        # Rounded to the default dtype, which is the model's here, as in training.
        self.embedding_scale = float(torch.tensor(config.embedding_scale, device="cpu"))
        rope = cache(RotaryEmbedding)  # layers with equal arguments share one
        self.layers = nn.ModuleList(
            DecoderLayer(config, spec, rope(config.head_dim, max_position, spec.attention.rope))
            for spec in config.layers
        )
        self.layers_run = [*self.layers]  # ``skip_middle_layers`` leaves layers out
        self.norm = make_norm(config, config.hidden_size)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden_states = self.embed_tokens(input_ids)
        if self.embedding_scale != 1.0:
            hidden_states = hidden_states * self.embedding_scale
        residual = None
        *layers, last = self.layers_run
        for layer in layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        # No layer attends to the last layer's outputs, so it computes only rows that are needed.
        output_indices = get_context().output_indices
        hidden_states, residual = last(positions, hidden_states, residual, output_indices)
        return self.norm(hidden_states, residual)


class DecoderForCausalLM(nn.Module):
    """A decoder and its LM head, which may share the embedding's weight.

    Args:
        config: the description of the model.
        max_position: number of positions for which RoPE is precomputed.
    """

    def __init__(self, config: ModelConfig, max_position: int) -> None:
        super().__init__()
        self.weight_names = config.weight_names
        self.logits_scale, self.logits_softcap = config.logits_scale, config.logits_softcap
        self.model = DecoderModel(config, max_position)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids, positions)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Computes logits from the output of ``forward``: [num_seqs, vocab_size], or this rank's
        shard of the vocabulary."""
        logits: torch.Tensor = self.lm_head(hidden_states)
        if self.logits_scale != 1.0:
            logits.mul_(self.logits_scale)
        if self.logits_softcap is not None:
            logits.div_(self.logits_softcap).tanh_().mul_(self.logits_softcap)
        return logits
