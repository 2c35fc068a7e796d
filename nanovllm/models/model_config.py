"""The description of a model, which the decoder, the engine and the weight loader use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from nanovllm.layers.rotary_embedding import RopeConfig


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Self-attention of one layer.

    Attributes:
        num_heads, num_kv_heads: query heads, and key and value heads. Each key and value head
            is shared by the same number of query heads.
        head_dim: size of a head.
        rope: the rotary embedding; None for a layer without position embedding (NoPE).
        qk_norm: whether an RMSNorm is applied to each query and key head before RoPE.
        qkv_bias, o_bias: whether the projections have biases.
        window: the number of tokens to which a token attends, itself included; None for all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    window: int | None = None


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """The feed-forward part of one layer: SwiGLU over ``intermediate_size`` columns."""

    intermediate_size: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer, with an RMSNorm before attention and one before the MLP."""

    attention: AttentionSpec
    mlp: MLPSpec


WeightName = tuple[str, str | None] | tuple[str, str, str | int]


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Which checkpoint tensor fills which parameter.

    Attributes:
        rows: (tensor, parameter), or (tensor, parameter, shard id) for a part of a packed
            parameter. Names have fields in braces: ``model.layers.{layer}.mlp.up_proj.{kind}``.
            The parameter is None for a tensor that is not needed. A parameter without a row has
            the same name in checkpoints.
        fields: the values of each field. If the tensor's name has a field that the parameter's
            name lacks, such as the index of an expert, the parameter's ``weight_loader`` gets its
            value as a keyword argument.
    """

    rows: tuple[WeightName, ...]
    fields: Mapping[str, Sequence[str | int]]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and numerics of a decoder-only transformer.

    Attributes:
        architecture: the class name in a Hugging Face config, such as ``Qwen3ForCausalLM``.
        layers: the layers from first to last. All have the same attention heads.
        dtype: the checkpoint's dtype.
        sliding_window: the number of tokens to which some layers attend; None if all layers attend
            to all tokens.
        weight_names: the names of the parameters in the checkpoint.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    dtype: torch.dtype
    sliding_window: int | None
    weight_names: WeightNames

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @property
    def num_attention_heads(self) -> int:
        return self.layers[0].attention.num_heads

    @property
    def num_key_value_heads(self) -> int:
        return self.layers[0].attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.layers[0].attention.head_dim
