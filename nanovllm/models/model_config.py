"""A checkpoint's config as typed facts, read once; models and runner see nothing else of it."""

from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.layers.rotary_embedding import RopeConfig


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

    @classmethod
    def from_hf(
        cls, architecture: str, hf: dict[str, Any], flags: dict[str, bool]
    ) -> "ModelConfig":
        """Reads a transformers config dict, in the spellings of releases 4 and 5.

        Raises:
            ValueError: something that is not served (activation, rope kind, quantisation), or
                a field that is missing.
        """
        try:
            heads, head_dim = hf["num_attention_heads"], hf.get("head_dim")
            _check_size("num_attention_heads", heads)
            facts = {
                "vocab_size": hf["vocab_size"],
                "hidden_size": hf["hidden_size"],
                "intermediate_size": hf["intermediate_size"],
                "num_hidden_layers": hf["num_hidden_layers"],
                "num_attention_heads": heads,
                "num_key_value_heads": hf.get("num_key_value_heads") or heads,
                "head_dim": hf["hidden_size"] // heads if head_dim is None else head_dim,
                "max_position_embeddings": hf["max_position_embeddings"],
            }
        except KeyError as error:
            raise ValueError(f"the config lacks {error.args[0]!r}") from None
        for name, value in facts.items():
            _check_size(name, value)
        if heads % facts["num_key_value_heads"]:
            raise ValueError(
                f"{heads} attention heads cannot share {facts['num_key_value_heads']} KV heads "
                f"evenly: check num_key_value_heads in the config"
            )
        if hf.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act {hf['hidden_act']!r} is not served, only 'silu'")
        if hf.get("quantization_config"):
            method = hf["quantization_config"].get("quant_method", "unknown")
            raise ValueError(
                f"{method!r} quantisation is not served: use an unquantised or GGUF checkpoint"
            )
        uses_window = hf.get("use_sliding_window", True)
        return cls(
            architecture=architecture,
            **facts,
            rms_norm_eps=hf.get("rms_norm_eps") or 1e-6,
            rope=_read_rope(hf),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings")),
            dtype=_read_dtype(hf.get("dtype") or hf.get("torch_dtype") or "float32"),
            sliding_window=hf.get("sliding_window") if uses_window else None,
            **flags,
        )


def _check_size(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} in the config must be a positive int, got {value!r}")


def _read_dtype(dtype: Any) -> torch.dtype:
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    if found not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype {dtype} in the config is not served: float32, bfloat16, float16")
    return found


def _read_rope(hf: dict[str, Any]) -> RopeConfig:
    # Release 5 keeps all in rope_parameters; release 4 in rope_theta and rope_scaling, whose
    # kind was once spelled "type".
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    partial = rope.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ValueError(f"a partial rotary embedding (factor {partial}) is not served")
    divisors = tuple(rope["freq_divisors"]) if "freq_divisors" in rope else None
    if kind == "default":
        return RopeConfig(theta, freq_divisors=divisors)
    try:
        if kind == "linear":
            return RopeConfig(theta, kind, float(rope["factor"]), freq_divisors=divisors)
        if kind == "llama3":
            return RopeConfig(
                theta,
                kind,
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_max_position=int(rope["original_max_position_embeddings"]),
            )
    except KeyError as error:
        raise ValueError(f"{kind!r} rope scaling in the config lacks {error.args[0]!r}") from None
    raise ValueError(f"rope kind {kind!r} is not served: default, linear and llama3 are")
