"""The decoder-only transformer that all served models are: pre-norm, RoPE, gated MLP.

It is built from a ModelConfig, which has a LayerSpec for each layer. A layer's projections are
packed into four matrices (qkv, o, gate-up, down), split over the tensor-parallel ranks by heads and
by MLP columns. N is the step's number of new tokens, of all sequences end to end.
"""

from functools import cache

import torch
from torch import nn

from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.model_config import AttentionSpec, LayerSpec, MLPSpec, ModelConfig
from nanovllm.utils.context import get_context


class DecoderAttention(nn.Module):
    """Self-attention: project, normalise q and k per head (``qk_norm``), apply RoPE, attend."""

    def __init__(
        self, config: ModelConfig, spec: AttentionSpec, rotary_emb: RotaryEmbedding
    ) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, spec.head_dim, spec.num_heads, spec.num_kv_heads, spec.qkv_bias
        )
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.o_proj = RowParallelLinear(
            spec.num_heads * spec.head_dim, config.hidden_size, spec.o_bias
        )
        self.rotary_emb = rotary_emb
        self.attn = Attention(self.num_heads, self.head_dim, self.head_dim**-0.5, self.num_kv_heads)
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        norm: RMSNorm,
        outputs: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        qkv, residual = self.qkv_proj.after_norm(norm, hidden_states, residual)
        qkv = qkv.unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        rope = self.rotary_emb(positions, self.q_norm, self.k_norm)
        x = self.attn(q, k, v, rope, only_outputs=outputs is not None).flatten(1)
        return self.o_proj.add_to(residual if outputs is None else residual[outputs], x)


class DecoderMLP(nn.Module):
    """down(silu(gate(x)) * up(x)): SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, spec: MLPSpec) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, spec.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(hidden, [inner, inner], spec.bias)
        self.down_proj = RowParallelLinear(inner, hidden, spec.bias)
        self.act_fn = SiluAndMul(self.down_proj.linear_weight.input_format)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, residual = self.gate_up_proj.after_norm(norm, x, residual, self.act_fn)
        return self.down_proj.add_to(residual, x)


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm that also adds what came before to the residual
    (in one step with the projection after it: ``LinearBase.after_norm``), unless what came before
    has done so itself (``RowParallelLinear.add_to``): then there is no residual beside it.

    With ``outputs``, the context's, it computes what comes after keys and values for these rows
    only.
    """

    def __init__(self, config: ModelConfig, spec: LayerSpec, rotary_emb: RotaryEmbedding) -> None:
        super().__init__()
        self.self_attn = DecoderAttention(config, spec.attention, rotary_emb)
        self.mlp = DecoderMLP(config, spec.mlp)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        outputs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden_states, residual = self.self_attn(
            positions, hidden_states, residual, self.input_layernorm, outputs
        )
        return self.mlp(hidden_states, residual, self.post_attention_layernorm)


class DecoderModel(nn.Module):
    """Embedding, layers, final norm: int32 [N] token ids and positions -> [N, hidden_size], or of
    the context's ``output_indices`` alone."""

    def __init__(self, config: ModelConfig, max_position: int) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        rope = cache(RotaryEmbedding)  # layers of equal settings share one
        self.layers = nn.ModuleList(
            DecoderLayer(config, spec, rope(config.head_dim, max_position, spec.attention.rope))
            for spec in config.layers
        )
        self.layers_run = [*self.layers]  # few of them while kernels are compiled
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden_states = self.embed_tokens(input_ids)
        residual = None
        *layers, last = self.layers_run
        for layer in layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        outputs = get_context().output_indices  # nobody attends to what the last layer gives
        hidden_states, residual = last(positions, hidden_states, residual, outputs)
        return self.norm(hidden_states, residual)


class DecoderForCausalLM(nn.Module):
    """A decoder and its output head, tied to the embedding or not.

    Args:
        config: the checkpoint's facts.
        max_position: positions to serve; the rotary cache covers [0, max_position).
    """

    def __init__(self, config: ModelConfig, max_position: int) -> None:
        super().__init__()
        self.weight_names = config.weight_names
        self.model = DecoderModel(config, max_position)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids, positions)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What ``forward`` gives -> [num_seqs, vocab_size], of several ranks this one's part."""
        return self.lm_head(hidden_states)
