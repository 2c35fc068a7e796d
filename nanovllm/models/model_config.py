"""The description of a model, which the decoder, the engine and the weight loader use."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from nanovllm.models.weight_names import WeightNames
from nanovllm.utils.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Self-attention of one layer.

    Attributes:
        num_heads, num_kv_heads: query heads, and key and value heads. Each key and value head
            is shared by the same number of query heads.
        head_dim: size of a head.
        rope: the rotary embedding; None for a layer without position embedding (NoPE).
        qk_norm: an RMSNorm of queries and keys before RoPE: None, "head" (each head has its own
            mean square, and all heads share a weight [head_dim]) or "all_heads" (one mean square
            and one weight over all heads).
        qkv_bias, o_bias: whether the projections have biases.
        window: number of tokens that a token attends to, itself included; None for all.
        softcap: attention scores s become softcap * tanh(s / softcap); None leaves them.
        scale: factor of the attention scores; None for head_dim ** -0.5.
        sinks: whether each query head has an attention sink, a learned logit.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    qk_norm: str | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """The feed-forward part of one layer: a gated MLP.

    Attributes:
        activation: "silu" or "gelu_tanh", applied to the gate.
    """

    intermediate_size: int
    bias: bool = False
    activation: str = "silu"
    num_experts: ClassVar[int] = 1  # so that sizes are computed as for a MoESpec
    top_k: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class MoESpec:
    """The feed-forward part of one layer: a mixture of SwiGLU experts.

    A router chooses the ``top_k`` most probable experts for each token. Their outputs are summed,
    weighted with their probabilities.

    Attributes:
        intermediate_size: intermediate size of one expert.
        norm_topk_prob: whether the probabilities of the chosen experts are divided by their sum.
        bias: whether the router and the experts have biases.
        limit, alpha: clamps gate and up, and scales the gate within the sigmoid: see
            ``kernels.moe.experts.ExpertWeights``.
        interleaved: whether checkpoints interleave the output features of gate and up. Unless it is
            in MXFP4, a tensor is then [num_experts, in, out].
        mxfp4: whether checkpoints have the weights in MXFP4. On a GPU they stay packed.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool = True
    bias: bool = False
    limit: float | None = None
    alpha: float = 1.0
    interleaved: bool = False
    mxfp4: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer.

    Attributes:
        input_norms: whether an RMSNorm precedes attention, and another the MLP.
        output_norms: whether an RMSNorm follows attention, and another the MLP, before their
            outputs are added to the residual.
        output_scale: factor of the outputs of attention and MLP.
    """

    attention: AttentionSpec
    mlp: MLPSpec | MoESpec
    input_norms: bool = True
    output_norms: bool = False
    output_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and numerics of a decoder-only transformer.

    Attributes:
        architecture: the class name in a Hugging Face config, such as ``Qwen3ForCausalLM``.
        layers: the layers from first to last. All have the same attention heads.
        dtype: the checkpoint's dtype.
        weight_names: the names of the parameters in the checkpoint.
        norm_in_fp32: whether norms multiply by their weights in fp32, before rounding to the
            model's dtype.
        norm_offset: added to the norm weights of a checkpoint.
        embedding_scale: factor of the embeddings.
        logits_scale, logits_softcap: logits x become softcap * tanh(scale * x / softcap), or
            scale * x without a softcap.
        quantization: how the checkpoint quantises the weights of all projections, if linear layers
            can keep them so (``quantization.WEIGHT_CLASSES``).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    dtype: torch.dtype
    weight_names: WeightNames
    norm_in_fp32: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_softcap: float | None = None
    quantization: str | None = None

    @property
    def num_attention_heads(self) -> int:
        return self.layers[0].attention.num_heads

    @property
    def num_key_value_heads(self) -> int:
        return self.layers[0].attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.layers[0].attention.head_dim
