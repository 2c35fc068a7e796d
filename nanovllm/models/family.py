"""Model families: reading a Hugging Face config, and the names of tensors in checkpoints.

Families differ only in data. Related families share a small file in this folder. ``registry.py``
lists them all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nanovllm.models.model_config import AttentionSpec, LayerSpec, MLPSpec, ModelConfig
from nanovllm.models.multimodal import VISION
from nanovllm.models.rope import max_positions, positive, read_rope
from nanovllm.models.weight_names import WeightNames

LAYERS_AND_HEADS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "num_experts_per_tok")
WIDTHS = ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size")
INTERVALS = ("sliding_window_pattern", "no_rope_layer_interval", "decoder_sparse_step")
# Limits far above any real model's sizes. A config that exceeds them is damaged or malicious.
MAX_SIZES = {
    **dict.fromkeys((*LAYERS_AND_HEADS, *EXPERT_COUNTS), 2**10),
    **dict.fromkeys(WIDTHS, 2**20),
    **dict.fromkeys(("max_position_embeddings", "sliding_window", *INTERVALS), 2**40),
}
# Fields that must be positive numbers in all families.
POSITIVE_NUMBERS = (
    *("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
    *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    *("rope_local_base_freq", "swiglu_limit", "swiglu_alpha"),
)
BOOL_DEFAULTS = dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings"), False)
BOOL_DEFAULTS["use_sliding_window"] = True
COPIED_FIELDS = ("vocab_size", "hidden_size", "tie_word_embeddings")
# The values of hidden_act in configs, and their names in MLPSpec.
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
FULL, SLIDING = "full_attention", "sliding_attention"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ATTENTION, MLP = "model.layers.{layer}.self_attn.", "model.layers.{layer}.mlp."
QKV_NAMES = tuple(
    (ATTENTION + name + "_proj.{kind}", ATTENTION + "qkv_proj.{kind}", name) for name in "qkv"
)
# Tensors that no model here needs: vision encoders, RoPE's frequencies, which are computed from the
# config instead, and heads for multi-token prediction (MTP), which only speculative decoding uses.
SKIPPED = (*VISION, "*.rotary_emb.inv_freq", "mtp.*", "*.mtp.*", "*.mtp_layers.*")
WEIGHT_NAMES = (
    *QKV_NAMES,
    (MLP + "gate_proj.{kind}", MLP + "gate_up_proj.{kind}", 0),
    (MLP + "up_proj.{kind}", MLP + "gate_up_proj.{kind}", 1),
)
# The LM head of a model that uses the embedding's weight instead.
TIED_HEAD = ("lm_head.weight", "language_model.lm_head.weight")
LAYER = "model.layers.{layer}."
# For families with norms after attention and MLP. Their post_attention_layernorm follows attention,
# while Llama's precedes the MLP.
OUTPUT_NORM_NAMES = (
    (LAYER + "post_attention_layernorm.weight", LAYER + "post_self_attn_layernorm.weight"),
    (LAYER + "post_feedforward_layernorm.weight", LAYER + "post_mlp_layernorm.weight"),
    (LAYER + "pre_feedforward_layernorm.weight", LAYER + "post_attention_layernorm.weight"),
)


@dataclass(frozen=True, slots=True)
class Family:
    """What distinguishes one family of models from others.

    Attributes:
        architecture: the model's class in transformers, as in a config.json: ``Qwen3ForCausalLM``.
        model_type: the config's ``model_type`` in transformers: ``qwen3``.
        layers: function from the fields of a checked config to the layers.
        defaults: transformers' default values of the config's fields. Besides common fields, only
            fields with a default are read from a config.json.
        weight_names: names of tensors in checkpoints: the rows of ``WeightNames``.
        numerics: function from the fields of a checked config to further fields of ModelConfig.
        quant_methods: the supported values of ``quant_method`` in a ``quantization_config``.
    """

    architecture: str
    model_type: str
    layers: Callable[[dict[str, Any]], Sequence[LayerSpec]]
    defaults: Mapping[str, Any]
    weight_names: tuple[Any, ...] = WEIGHT_NAMES
    numerics: Callable[[dict[str, Any]], Mapping[str, Any]] = field(default=lambda hf: {})
    quant_methods: tuple[str, ...] = ()

    def read(self, hf: Mapping[str, Any]) -> ModelConfig:
        """Reads the fields of a transformers config, as releases 4 or 5 write it.

        Raises:
            ValueError: the config asks for something unsupported (an activation, RoPE type or
                quantisation method), or a field is missing or has an invalid value.
        """
        if "use_sliding_window" not in self.defaults:  # other families have no such switch
            hf = {**hf, "use_sliding_window": True}
        try:
            hf = _checked({**self.defaults, **hf}, self.quant_methods)
            layers = tuple(self.layers(hf))
            fields = {"layer": range(len(layers)), "kind": ("weight", "bias")}
            fields["expert"] = range(max(layer.mlp.num_experts for layer in layers))
            skipped = SKIPPED + TIED_HEAD * hf["tie_word_embeddings"]
            return ModelConfig(
                architecture=self.architecture,
                layers=layers,
                max_position_embeddings=max_positions(hf),
                rms_norm_eps=positive("rms_norm_eps", hf.get("rms_norm_eps") or 1e-6),
                dtype=_read_dtype(hf.get("dtype") or hf.get("torch_dtype") or "float32"),
                weight_names=WeightNames(self.weight_names, fields, skipped),
                **{name: hf[name] for name in COPIED_FIELDS},
                **self.numerics(hf),
            )
        except KeyError as error:  # a field is missing, or null
            raise ValueError(f"the config lacks {error.args[0]!r}") from error


def with_own_head(config: ModelConfig) -> ModelConfig:
    """Returns the config of a model whose LM head does not share the embedding's weight."""
    names = config.weight_names
    skipped = tuple(pattern for pattern in names.skipped if pattern not in TIED_HEAD)
    names = replace(names, skipped=skipped)
    return replace(config, tie_word_embeddings=False, weight_names=names)


def equal_layers(hf: dict[str, Any], **flags: Any) -> list[LayerSpec]:
    """Returns identical layers, with the sizes, RoPE and biases of a checked config.

    Args:
        hf: the fields of the config.
        flags: ``mlp_bias``, or fields of AttentionSpec. They override the config.
    """
    bias = hf["attention_bias"]
    flags = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": hf["mlp_bias"], **flags}
    if "rope" not in flags:
        flags["rope"] = read_rope(hf)
    act = hf.get("hidden_activation") or hf.get("hidden_act") or "silu"
    if not isinstance(act, str) or act not in ACTIVATIONS:
        supported = " and ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"hidden_act {act!r:.80} is not supported, only {supported}")
    mlp = MLPSpec(hf["intermediate_size"], flags.pop("mlp_bias"), ACTIVATIONS[act])
    heads, kv_heads, head_dim = (hf[name] for name in LAYERS_AND_HEADS[1:])
    attention = AttentionSpec(heads, kv_heads, head_dim, **flags)
    return [LayerSpec(attention, mlp)] * hf["num_hidden_layers"]


def with_fields(layers: list[LayerSpec], **changes: Any) -> list[LayerSpec]:
    """Returns the layers with these fields changed."""
    return [replace(layer, **changes) for layer in layers]


def with_attention(layer: LayerSpec, **changes: Any) -> LayerSpec:
    """Returns the layer with these fields of its AttentionSpec changed."""
    return replace(layer, attention=replace(layer.attention, **changes))


def with_windows(
    hf: dict[str, Any], layers: list[LayerSpec], is_windowed: Callable[[int], bool]
) -> list[LayerSpec]:
    """Returns the layers with the config's sliding window where ``layer_types`` says so.

    Args:
        hf: the fields of a checked config.
        layers: layers without windows.
        is_windowed: whether the layer with this index has a window, if the config has no
            ``layer_types``.

    Raises:
        ValueError: ``layer_types`` has unsupported values, or has sliding windows although the
            config does not state their length.
    """
    window = hf.get("sliding_window") if hf["use_sliding_window"] else None
    if hf.get("layer_types") is None and window is None:
        return layers
    types = layer_types(hf, is_windowed)
    if window is None and SLIDING in types:
        is_off = not hf["use_sliding_window"]
        reason = "use_sliding_window is false" if is_off else "sliding_window is missing"
        raise ValueError(f"layer_types has sliding windows, but {reason}")
    windows = [window if kind == SLIDING else None for kind in types]
    pairs = zip(layers, windows, strict=True)
    return [with_attention(layer, window=window) for layer, window in pairs]


def with_layer_types(
    hf: dict[str, Any],
    layers: list[LayerSpec],
    is_windowed: Callable[[int], bool],
    sliding_theta: float,
) -> list[LayerSpec]:
    """Returns the layers with windows (``with_windows``), and with the RoPE of their type. A layer
    of type "sliding_attention" has that type's RoPE even if the config has no ``sliding_window``.

    ``rope_parameters`` may have an object for each type. Fields outside of it, such as
    ``rope_scaling``, apply to layers without a window. If only these exist, layers with a window
    have unscaled RoPE with the base ``sliding_theta``.
    """
    nested = hf.get("rope_parameters") or {}
    if not isinstance(nested, dict):
        raise ValueError(f"the config's rope parameters must be an object, got {nested!r:.80}")
    full, sliding = (nested.get(kind) or {} for kind in (FULL, SLIDING))
    scaling = hf.get("rope_scaling") or {}
    if not all(isinstance(fields, dict) for fields in (full, sliding, scaling)):
        raise ValueError("the config's RoPE parameters of a type of layer must be an object")
    ropes = {
        FULL: read_rope(hf, {**full, **scaling}),
        SLIDING: read_rope(hf, {"rope_theta": sliding_theta, **sliding}),
    }
    types, layers = layer_types(hf, is_windowed), with_windows(hf, layers, is_windowed)
    pairs = zip(layers, types, strict=True)
    return [with_attention(layer, rope=ropes[kind]) for layer, kind in pairs]


def layer_types(hf: dict[str, Any], is_windowed: Callable[[int], bool]) -> list[str]:
    """Returns FULL or SLIDING for each layer of a checked config. Without ``layer_types``,
    ``is_windowed`` decides by the layer's index."""
    num_layers = hf["num_hidden_layers"]
    default = [SLIDING if is_windowed(i) else FULL for i in range(num_layers)]
    types = hf.get("layer_types") or default
    if not isinstance(types, list) or any(kind not in (FULL, SLIDING) for kind in types):
        raise ValueError(f"layer_types must be a list of {FULL} and {SLIDING}, got {types!r:.80}")
    if len(types) != num_layers:
        raise ValueError(f"layer_types has {len(types)} entries for {num_layers} layers")
    return types


def _checked(hf: Mapping[str, Any], quant_methods: Sequence[str]) -> dict[str, Any]:
    """Checks a config's fields and fills in defaults. Fields that are null count as missing.

    Raises:
        ValueError: a field is invalid or unsupported.
        KeyError: a field is missing.
    """
    hf = {**BOOL_DEFAULTS, **{name: value for name, value in hf.items() if value is not None}}
    for name, limit in MAX_SIZES.items():
        value = hf.get(name, 1)
        if type(value) is not int or not 1 <= value <= limit:
            raise ValueError(f"{name} must be a positive int up to {limit}, got {value!r:.80}")
    hf |= {name: positive(name, hf[name]) for name in POSITIVE_NUMBERS if name in hf}
    for name in (*BOOL_DEFAULTS, "norm_topk_prob"):
        if not isinstance(value := hf.get(name, False), bool):
            raise ValueError(f"{name} must be true or false, got {value!r:.80}")
    heads = hf["num_attention_heads"]
    hf = {"num_key_value_heads": heads, "head_dim": hf["hidden_size"] // heads, **hf}
    kv_heads, head_dim = hf["num_key_value_heads"], hf["head_dim"]
    if heads % kv_heads:
        raise ValueError(
            f"{heads} attention heads cannot share {kv_heads} KV heads evenly: check "
            f"num_key_value_heads in the config"
        )
    if head_dim % 2 or not head_dim:
        raise ValueError(
            f"head_dim must be even and positive for RoPE, got {head_dim}: check the config"
        )
    if quantization := hf.get("quantization_config"):
        if not isinstance(quantization, Mapping):
            raise ValueError(f"quantization_config must be an object, got {quantization!r:.80}")
        method = dict(quantization).get("quant_method", "unknown")
        if method not in quant_methods:
            raise unsupported_quantization(method)
    return hf


def unsupported_quantization(method: Any) -> ValueError:
    """Returns the error for a checkpoint that is quantised in an unsupported way."""
    return ValueError(
        f"{method!r:.80} quantisation is not supported: use an unquantised, FP8 or GGUF checkpoint"
    )


def _read_dtype(dtype: Any) -> torch.dtype:
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise ValueError(f"dtype {dtype!s:.80} in the config is not one of {', '.join(DTYPES)}")
    return found
