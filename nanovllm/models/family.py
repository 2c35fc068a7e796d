"""Model families: reading a Hugging Face config, and the names of tensors in checkpoints.

Families differ only in data. Each has a small file in this folder, and ``registry.py`` lists them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.layers.rotary_embedding import RopeConfig
from nanovllm.models.model_config import AttentionSpec, LayerSpec, MLPSpec, ModelConfig, WeightNames

# Limits far above any real model's sizes. A config that exceeds them is damaged or malicious.
LAYERS_AND_HEADS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
MAX_SIZES = {
    **dict.fromkeys(LAYERS_AND_HEADS, 2**10),
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 2**20),
    **dict.fromkeys(("max_position_embeddings", "sliding_window"), 2**40),
}
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "sliding_window")
BOOL_DEFAULTS = dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings"), False)
BOOL_DEFAULTS["use_sliding_window"] = True
COPIED_FIELDS = ("vocab_size", "hidden_size", "max_position_embeddings", "tie_word_embeddings")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ATTENTION, MLP = "model.layers.{layer}.self_attn.", "model.layers.{layer}.mlp."
WEIGHT_NAMES = (
    (ATTENTION + "q_proj.{kind}", ATTENTION + "qkv_proj.{kind}", "q"),
    (ATTENTION + "k_proj.{kind}", ATTENTION + "qkv_proj.{kind}", "k"),
    (ATTENTION + "v_proj.{kind}", ATTENTION + "qkv_proj.{kind}", "v"),
    (MLP + "gate_proj.{kind}", MLP + "gate_up_proj.{kind}", 0),
    (MLP + "up_proj.{kind}", MLP + "gate_up_proj.{kind}", 1),
    (ATTENTION + "rotary_emb.inv_freq", None),  # in old checkpoints; computed from the config
)
TIED_HEAD = (("lm_head.weight", None),)  # the same as the embedding's weight


@dataclass(frozen=True, slots=True)
class Family:
    """What distinguishes one family of models from others.

    Attributes:
        architecture: the model's class in transformers, as in a config.json: ``Qwen3ForCausalLM``.
        model_type: the config's ``model_type`` in transformers: ``qwen3``.
        layers: returns the layers for the fields of a checked config.
        defaults: transformers' default values of the config's fields.
        weight_names: names of tensors in checkpoints: the rows of ``WeightNames``.
    """

    architecture: str
    model_type: str
    layers: Callable[[dict[str, Any]], Sequence[LayerSpec]]
    defaults: Mapping[str, Any]
    weight_names: tuple[Any, ...] = WEIGHT_NAMES

    def read(self, hf: Mapping[str, Any]) -> ModelConfig:
        """Reads the fields of a transformers config, as releases 4 or 5 write it.

        Raises:
            ValueError: the config asks for something unsupported (an activation, RoPE type or
                quantisation method), or a field is missing or has an invalid value.
        """
        hf = _checked({**self.defaults, **hf})
        rows = self.weight_names + TIED_HEAD * hf["tie_word_embeddings"]
        layers = tuple(self.layers(hf))
        num_experts = max(layer.mlp.num_experts for layer in layers)
        fields = {"layer": range(len(layers)), "kind": ("weight", "bias")}
        fields["expert"] = range(num_experts)
        return ModelConfig(
            architecture=self.architecture,
            layers=layers,
            rms_norm_eps=_positive("rms_norm_eps", hf.get("rms_norm_eps") or 1e-6),
            dtype=_read_dtype(hf.get("dtype") or hf.get("torch_dtype") or "float32"),
            sliding_window=hf.get("sliding_window") if hf["use_sliding_window"] else None,
            weight_names=WeightNames(rows, fields),
            **{name: hf[name] for name in COPIED_FIELDS},
        )


def equal_layers(hf: dict[str, Any], **flags: bool) -> list[LayerSpec]:
    """Returns identical layers, with the sizes, RoPE and biases of a checked config.

    Args:
        hf: the fields of the config.
        flags: ``qk_norm``, ``qkv_bias``, ``o_bias`` or ``mlp_bias``. They override the config.
    """
    bias = hf["attention_bias"]
    flags = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": hf["mlp_bias"], **flags}
    mlp = MLPSpec(hf["intermediate_size"], flags.pop("mlp_bias"))
    heads, kv_heads, head_dim = (hf[name] for name in LAYERS_AND_HEADS[1:])
    attention = AttentionSpec(heads, kv_heads, head_dim, _read_rope(hf), **flags)
    return [LayerSpec(attention, mlp)] * hf["num_hidden_layers"]


def _checked(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Checks a config's fields and fills in defaults. Fields that are null count as missing.

    Raises:
        ValueError: a field is missing, invalid or unsupported.
    """
    hf = {**BOOL_DEFAULTS, **{name: value for name, value in hf.items() if value is not None}}
    for name, limit in MAX_SIZES.items():
        value = hf.get(name, 1)
        if type(value) is not int or not 1 <= value <= limit:
            raise ValueError(f"{name} must be a positive int up to {limit}, got {value!r:.80}")
        if name not in hf and name not in OPTIONAL_SIZES:
            raise ValueError(f"the config lacks {name!r}")
    for name in BOOL_DEFAULTS:
        if not isinstance(hf[name], bool):
            raise ValueError(f"{name} must be true or false, got {hf[name]!r:.80}")
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
    if hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {hf['hidden_act']!r:.80} is not supported, only 'silu'")
    if quantisation := hf.get("quantization_config"):
        method = dict(quantisation).get("quant_method", "unknown")
        raise ValueError(
            f"{method!r} quantisation is not supported: use an unquantised or GGUF checkpoint"
        )
    return hf


def _positive(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 1e-30 < value < 1e30:  # also refuses NaN
        raise ValueError(f"{name} must be a positive number, got {value!r:.80}")
    return float(value)


def _read_dtype(dtype: Any) -> torch.dtype:
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise ValueError(f"dtype {dtype!s:.80} in the config is not one of {', '.join(DTYPES)}")
    return found


def _read_rope(hf: dict[str, Any]) -> RopeConfig:
    # transformers 5 has all fields in rope_parameters. Version 4 has rope_theta and rope_scaling,
    # in which early releases call the field rope_type "type".
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"the config's rope parameters must be an object, got {rope!r:.80}")
    theta = _positive("rope_theta", rope.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    partial = rope.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ValueError(f"a partial rotary embedding (factor {partial!r:.80}) is not supported")
    divisors = rope.get("freq_divisors")
    if divisors is not None:
        divisors = tuple(_positive("each of freq_divisors", divisor) for divisor in divisors)
        if len(divisors) != hf["head_dim"] // 2:
            raise ValueError(
                f"{len(divisors)} frequency divisors do not match head_dim {hf['head_dim']}"
            )
    if rope_type == "default":
        return RopeConfig(theta, freq_divisors=divisors)
    if rope_type not in ("linear", "llama3"):
        raise ValueError(
            f"rope type {rope_type!r:.80} is not supported, only default, linear and llama3"
        )
    factor = _positive("the RoPE factor", rope.get("factor"))
    if rope_type == "linear":
        return RopeConfig(theta, rope_type, factor, freq_divisors=divisors)
    rope = {"original_max_position_embeddings": hf["max_position_embeddings"], **rope}
    ramp = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    low, high, length = (_positive(f"RoPE's {name}", rope.get(name)) for name in ramp)
    if low >= high:
        raise ValueError(f"RoPE's low_freq_factor {low} must be below its high_freq_factor {high}")
    return RopeConfig(theta, rope_type, factor, low, high, int(length))
