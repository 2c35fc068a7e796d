"""A checkpoint's config as typed facts, read once; models and runner see nothing else of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.layers.rotary_embedding import RopeConfig

# No model comes near these: a config beyond them is damaged, or made to exhaust memory.
LAYERS_AND_HEADS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
MAX_SIZES = {
    **dict.fromkeys(LAYERS_AND_HEADS, 2**10),
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 2**20),
    **dict.fromkeys(("max_position_embeddings", "sliding_window"), 2**40),
}
SWITCHES = ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and numerics of a decoder-only transformer.

    ``dtype`` is the checkpoint's. The flags at the end are what architectures differ in; each
    model class sets them (``config_flags``).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    dtype: torch.dtype
    sliding_window: int | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False

    def check_split(self, num_ranks: int) -> None:
        """Raises ValueError, with the reason, if so many ranks cannot share this model."""
        sizes = {
            "attention heads": self.num_attention_heads,
            "MLP columns": self.intermediate_size,
        }
        if num_ranks % self.num_key_value_heads:  # or else each rank has a copy of one
            sizes["key-value heads"] = self.num_key_value_heads
        for what, size in sizes.items():
            if size % num_ranks:
                raise ValueError(
                    f"tensor_parallel_size={num_ranks} cannot split this model's {size} {what} "
                    f"evenly"
                )

    def check_bytes(self, num_bytes: int) -> None:
        """Raises ValueError if so many cannot hold this model's matrices, at a bit for each weight:
        before anything of their size is allocated."""
        attention = 2 * self.head_dim * (self.num_attention_heads + self.num_key_value_heads)
        layer = self.hidden_size * (attention + 3 * self.intermediate_size)
        num_weights = self.vocab_size * self.hidden_size + self.num_hidden_layers * layer
        if num_weights > 8 * num_bytes:
            raise ValueError(f"{num_weights:,} weights are not in {num_bytes:,} bytes of files")

    @classmethod
    def from_hf(
        cls, architecture: str, hf: dict[str, Any], flags: dict[str, bool]
    ) -> "ModelConfig":
        """Reads a transformers config dict, in the spellings of releases 4 and 5.

        Raises:
            ValueError: something that is not served (activation, rope kind, quantisation), or
                a field that is missing or of an impossible value.
        """
        hf = {name: value for name, value in hf.items() if value is not None}
        check_sizes(hf)
        for name in SWITCHES:
            if not isinstance(hf.get(name, False), bool):
                raise ValueError(f"{name} must be true or false, got {hf[name]!r:.80}")
        try:
            heads = hf["num_attention_heads"]
            hf = {"num_key_value_heads": heads, "head_dim": hf["hidden_size"] // heads, **hf}
            sizes = {name: hf[name] for name in MAX_SIZES if name != "sliding_window"}
        except KeyError as error:
            raise ValueError(f"the config lacks {error.args[0]!r}") from None
        kv_heads, head_dim = sizes["num_key_value_heads"], sizes["head_dim"]
        if heads % kv_heads:
            raise ValueError(
                f"{heads} attention heads cannot share {kv_heads} KV heads evenly: check "
                f"num_key_value_heads in the config"
            )
        if head_dim % 2 or not head_dim:
            raise ValueError(f"a head_dim of {head_dim} in the config cannot be rotated in halves")
        if hf.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act {hf['hidden_act']!r:.80} is not served, only 'silu'")
        if quantisation := hf.get("quantization_config"):
            method = dict(quantisation).get("quant_method", "unknown")
            raise ValueError(
                f"{method!r} quantisation is not served: use an unquantised or GGUF checkpoint"
            )
        uses_window = hf.get("use_sliding_window", True)
        return cls(
            architecture=architecture,
            **sizes,
            rms_norm_eps=_positive("rms_norm_eps", hf.get("rms_norm_eps") or 1e-6),
            rope=_read_rope(hf, head_dim),
            tie_word_embeddings=hf.get("tie_word_embeddings", False),
            dtype=_read_dtype(hf.get("dtype") or hf.get("torch_dtype") or "float32"),
            sliding_window=hf.get("sliding_window") if uses_window else None,
            **flags,
        )


def check_sizes(hf: Mapping[str, Any]) -> None:
    """Raises ValueError for a size, of those that are there, that no model has."""
    for name, limit in MAX_SIZES.items():
        value = hf.get(name)
        if value is not None and (type(value) is not int or not 1 <= value <= limit):
            raise ValueError(f"{name} must be a positive int up to {limit}, got {value!r:.80}")


def _positive(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 1e-30 < value < 1e30:  # nor NaN
        raise ValueError(f"{name} must be a positive number, got {value!r:.80}")
    return float(value)


def _read_dtype(dtype: Any) -> torch.dtype:
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise ValueError(f"dtype {dtype!s:.80} in the config is not served: {', '.join(DTYPES)}")
    return found


def _read_rope(hf: dict[str, Any], head_dim: int) -> RopeConfig:
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
        if len(divisors) != head_dim // 2:
            raise ValueError(f"{len(divisors)} frequency divisors do not suit heads of {head_dim}")
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
