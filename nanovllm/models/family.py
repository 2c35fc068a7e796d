"""A family of models: how its Hugging Face config is read, and the names in its checkpoints.

Families differ in data only. Each has a small file in this folder, and ``registry.py`` lists them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.layers.rotary_embedding import RopeConfig
from nanovllm.models.model_config import AttentionSpec, LayerSpec, MLPSpec, ModelConfig, WeightNames

# No model comes near these: a config beyond them is damaged, or made to exhaust memory.
LAYERS_AND_HEADS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
MAX_SIZES = {
    **dict.fromkeys(LAYERS_AND_HEADS, 2**10),
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 2**20),
    **dict.fromkeys(("max_position_embeddings", "sliding_window"), 2**40),
}
HAVE_DEFAULTS = ("num_key_value_heads", "head_dim", "sliding_window")
SWITCHES = dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings"), False)
SWITCHES["use_sliding_window"] = True
UNCHANGED = ("vocab_size", "hidden_size", "max_position_embeddings", "tie_word_embeddings")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ATTENTION, MLP = "model.layers.{layer}.self_attn.", "model.layers.{layer}.mlp."
WEIGHT_NAMES = (
    (ATTENTION + "q_proj.{kind}", ATTENTION + "qkv_proj.{kind}", "q"),
    (ATTENTION + "k_proj.{kind}", ATTENTION + "qkv_proj.{kind}", "k"),
    (ATTENTION + "v_proj.{kind}", ATTENTION + "qkv_proj.{kind}", "v"),
    (MLP + "gate_proj.{kind}", MLP + "gate_up_proj.{kind}", 0),
    (MLP + "up_proj.{kind}", MLP + "gate_up_proj.{kind}", 1),
    (ATTENTION + "rotary_emb.inv_freq", None),  # in old checkpoints; the config says the same
)
TIED_HEAD = (("lm_head.weight", None),)  # the embedding's weight


@dataclass(frozen=True, slots=True)
class Family:
    """What sets a family of models apart.

    Attributes:
        architecture: its class in transformers, which a config.json names: ``Qwen3ForCausalLM``.
        model_type: transformers' name of its config: ``qwen3``.
        layers: gives the layers of a config that has been checked.
        defaults: transformers' values of the fields that a config leaves out.
        weight_names: its checkpoints' names, rows of ``WeightNames``.
    """

    architecture: str
    model_type: str
    layers: Callable[[dict[str, Any]], Sequence[LayerSpec]]
    defaults: Mapping[str, Any]
    weight_names: tuple[Any, ...] = WEIGHT_NAMES

    def read(self, hf: Mapping[str, Any]) -> ModelConfig:
        """Reads a transformers config dict, in the spellings of releases 4 and 5.

        Raises:
            ValueError: something that is not served (activation, rope kind, quantisation), or
                a field that is missing or of an impossible value.
        """
        hf = _checked({**self.defaults, **hf})
        rows = self.weight_names + TIED_HEAD * hf["tie_word_embeddings"]
        fields = {"layer": range(hf["num_hidden_layers"]), "kind": ("weight", "bias")}
        return ModelConfig(
            architecture=self.architecture,
            layers=tuple(self.layers(hf)),
            rms_norm_eps=_positive("rms_norm_eps", hf.get("rms_norm_eps") or 1e-6),
            dtype=_read_dtype(hf.get("dtype") or hf.get("torch_dtype") or "float32"),
            sliding_window=hf.get("sliding_window") if hf["use_sliding_window"] else None,
            weight_names=WeightNames(rows, fields),
            **{name: hf[name] for name in UNCHANGED},
        )


def equal_layers(hf: dict[str, Any], **flags: bool) -> list[LayerSpec]:
    """Layers that are all alike: Llama's, with the sizes, RoPE and biases of a checked config.
    ``flags`` overrule it: ``qk_norm``, ``qkv_bias``, ``o_bias``, ``mlp_bias``."""
    bias = hf["attention_bias"]
    flags = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": hf["mlp_bias"], **flags}
    mlp = MLPSpec(hf["intermediate_size"], flags.pop("mlp_bias"))
    heads, kv_heads, head_dim = (hf[name] for name in LAYERS_AND_HEADS[1:])
    attention = AttentionSpec(heads, kv_heads, head_dim, _read_rope(hf), **flags)
    return [LayerSpec(attention, mlp)] * hf["num_hidden_layers"]


def _checked(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are set, and what follows from them. Raises ValueError for one that is
    missing, impossible or not served."""
    hf = {**SWITCHES, **{name: value for name, value in hf.items() if value is not None}}
    for name, limit in MAX_SIZES.items():
        value = hf.get(name, 1)
        if type(value) is not int or not 1 <= value <= limit:
            raise ValueError(f"{name} must be a positive int up to {limit}, got {value!r:.80}")
        if name not in hf and name not in HAVE_DEFAULTS:
            raise ValueError(f"the config lacks {name!r}")
    for name in SWITCHES:
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
        raise ValueError(f"hidden_act {hf['hidden_act']!r:.80} is not served, only 'silu'")
    if quantisation := hf.get("quantization_config"):
        method = dict(quantisation).get("quant_method", "unknown")
        raise ValueError(
            f"{method!r} quantisation is not served: use an unquantised or GGUF checkpoint"
        )
    return hf


def _positive(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 1e-30 < value < 1e30:  # nor NaN
        raise ValueError(f"{name} must be a positive number, got {value!r:.80}")
    return float(value)


def _read_dtype(dtype: Any) -> torch.dtype:
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise ValueError(f"dtype {dtype!s:.80} in the config is not served: {', '.join(DTYPES)}")
    return found


def _read_rope(hf: dict[str, Any]) -> RopeConfig:
    # Release 5 keeps all in rope_parameters; release 4 in rope_theta and rope_scaling, whose
    # kind was once spelled "type".
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"the config's rope parameters must be an object, got {rope!r:.80}")
    theta = _positive("rope_theta", rope.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    partial = rope.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ValueError(f"a partial rotary embedding (factor {partial!r:.80}) is not served")
    divisors = rope.get("freq_divisors")
    if divisors is not None:
        divisors = tuple(_positive("each of freq_divisors", divisor) for divisor in divisors)
        if len(divisors) != hf["head_dim"] // 2:
            raise ValueError(
                f"{len(divisors)} frequency divisors do not suit heads of {hf['head_dim']}"
            )
    if kind == "default":
        return RopeConfig(theta, freq_divisors=divisors)
    if kind not in ("linear", "llama3"):
        raise ValueError(f"rope kind {kind!r:.80} is not served: default, linear and llama3 are")
    factor = _positive("rope's factor", rope.get("factor"))
    if kind == "linear":
        return RopeConfig(theta, kind, factor, freq_divisors=divisors)
    rope = {"original_max_position_embeddings": hf["max_position_embeddings"], **rope}
    ramp = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    low, high, length = (_positive(f"rope's {name}", rope.get(name)) for name in ramp)
    if low >= high:
        raise ValueError(f"rope's low_freq_factor {low} must be under its high_freq_factor {high}")
    return RopeConfig(theta, kind, factor, low, high, int(length))
