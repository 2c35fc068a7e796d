"""Reads the rotary embedding of a Hugging Face config: all of transformers' types of scaling.

The types are default, linear (arXiv:2306.15595), dynamic (NTK-aware), llama3, yarn
(arXiv:2309.00071) and longrope (arXiv:2402.13753). Two of them depend on the length of a sequence
in transformers. Here they cannot, because keys are cached after RoPE, before the final length of
the sequence is known:

- dynamic: frequencies are unscaled up to ``max_position_embeddings``, and no sequence is longer.
- longrope: there are frequencies for short and for long sequences. The engine's maximum length
  decides between them for all sequences, as in vLLM.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm.models.model_config import LayerSpec, ModelConfig
from nanovllm.utils.rope import RopeConfig

TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def read_rope(
    hf: Mapping[str, Any], rope: Mapping[str, Any] | None = None, *, interleaved: bool | None = None
) -> RopeConfig:
    """Reads the rotary embedding of a checked config.

    Args:
        hf: the fields of the config.
        rope: the RoPE fields to read, if they are not those that ``rope_parameters`` returns.
        interleaved: as in RopeConfig. None for a family that supports no partial RoPE, and has
            half-split pairs.

    Raises:
        ValueError: a field is missing, invalid or unsupported.
    """
    rope = rope_parameters(hf) if rope is None else rope
    theta = positive("rope_theta", rope.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    rope_type = type_of(rope)
    partial = rope.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    if partial != 1.0 and interleaved is None:
        raise ValueError(f"a partial rotary embedding (factor {partial!r:.80}) is not supported")
    dim = int(hf["head_dim"] * positive("partial_rotary_factor", partial))
    if dim % 2 or not 0 < dim <= hf["head_dim"]:
        raise ValueError(
            f"partial_rotary_factor {partial!r:.80} gives RoPE to {dim} features of a head, which "
            f"must be even and between 2 and {hf['head_dim']}"
        )
    freqs = tuple(theta ** (-2 * i / dim) for i in range(dim // 2))
    if (divisors := rope.get("freq_divisors")) is not None:  # from a GGUF file
        freqs = _divide(freqs, divisors, "frequency divisors")
    config = RopeConfig(freqs, interleaved=bool(interleaved))
    if rope_type in ("default", "dynamic"):
        return config
    if rope_type not in TYPES:
        raise ValueError(f"rope type {rope_type!r:.80} is not supported, only {', '.join(TYPES)}")
    if rope_type == "linear":
        factor = positive("the RoPE factor", rope.get("factor"))
        return replace(config, inv_freq=tuple(freq / factor for freq in freqs))
    name = "original_max_position_embeddings"
    lengths = hf.get(name), rope.get(name), hf["max_position_embeddings"]
    length = positive(f"RoPE's {name}", next(each for each in lengths if each is not None))
    if rope_type == "longrope":
        return _longrope(config, hf, rope, length)
    factor = positive("the RoPE factor", rope.get("factor"))
    if rope_type == "llama3":
        return replace(config, inv_freq=_llama3(freqs, rope, factor, length))
    attention_factor = rope.get("attention_factor") or _yarn_scale(rope, factor)
    scale = positive("RoPE's attention_factor", attention_factor)
    return replace(config, inv_freq=_yarn(freqs, rope, theta, factor, length), scale=scale)


def rope_parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the RoPE fields of a config: transformers 5 has them in rope_parameters. Version 4
    has rope_theta and rope_scaling."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"the config's rope parameters must be an object, got {rope!r:.80}")
    return rope


def type_of(rope: Mapping[str, Any]) -> Any:
    """Returns the type of scaling. Early releases of transformers call the field "type"."""
    return rope.get("rope_type") or rope.get("type") or "default"


def max_positions(hf: Mapping[str, Any]) -> int:
    """Returns the number of positions of a checked config. YaRN may extend a model beyond its
    ``max_position_embeddings``."""
    lengths: list[int] = [hf["max_position_embeddings"]]
    rope = rope_parameters(hf)
    of_layer_types = [fields for fields in rope.values() if isinstance(fields, dict)]
    for fields in (rope, *of_layer_types):
        length = fields.get("original_max_position_embeddings")
        if type_of(fields) == "yarn" and length is not None:
            length = positive("RoPE's original_max_position_embeddings", length)
            lengths.append(int(length * positive("the RoPE factor", fields.get("factor"))))
    return max(lengths)


def for_length(config: ModelConfig, max_model_len: int) -> ModelConfig:
    """Returns the config for an engine with sequences of up to ``max_model_len`` tokens. The length
    decides between the short and the long frequencies of LongRoPE."""

    def choose(layer: LayerSpec) -> LayerSpec:
        rope = layer.attention.rope
        if rope is None or rope.long is None or max_model_len <= rope.long[0]:
            return layer
        longer = replace(rope, inv_freq=rope.long[1])
        return replace(layer, attention=replace(layer.attention, rope=longer))

    return replace(config, layers=tuple(map(choose, config.layers)))


def positive(name: str, value: Any) -> float:
    """Returns a config's value as a float. Raises ValueError if it is not a positive number."""
    if type(value) not in (int, float) or not 1e-30 < value < 1e30:  # also refuses NaN
        raise ValueError(f"{name} must be a positive number, got {value!r:.80}")
    return float(value)


def _divide(freqs: tuple[float, ...], divisors: Any, name: str) -> tuple[float, ...]:
    if not isinstance(divisors, (list, tuple)) or len(divisors) != len(freqs):
        num = len(divisors) if isinstance(divisors, (list, tuple)) else f"{divisors!r:.80} as"
        raise ValueError(f"{num} {name} do not match {len(freqs)} pairs of features with RoPE")
    divisors = [positive(f"each of the {name}", divisor) for divisor in divisors]
    return tuple(freq / divisor for freq, divisor in zip(freqs, divisors, strict=True))


def _llama3(
    freqs: tuple[float, ...], rope: Mapping[str, Any], factor: float, length: float
) -> tuple[float, ...]:
    """Divides low frequencies by ``factor`` and keeps high ones, with a linear ramp between."""
    names = ("low_freq_factor", "high_freq_factor")
    low, high = (positive(f"RoPE's {name}", rope.get(name)) for name in names)
    if low >= high:
        raise ValueError(f"RoPE's low_freq_factor {low} must be below its high_freq_factor {high}")
    turns = [length * freq / (2 * math.pi) for freq in freqs]
    return _ramp(freqs, [(turn - low) / (high - low) for turn in turns], factor)


def _yarn(
    freqs: tuple[float, ...], rope: Mapping[str, Any], theta: float, factor: float, length: float
) -> tuple[float, ...]:
    """Like ``_llama3``, but the ramp is linear in the index of the frequency."""
    if theta <= 1:
        raise ValueError(f"rope_theta must be over 1 for YaRN, got {theta}")
    dim = 2 * len(freqs)
    bounds = []
    for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        turns = positive(f"RoPE's {name}", rope.get(name) or default)
        bounds.append(dim * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta)))
    low, high = bounds
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    return _ramp(freqs, [1 - (i - low) / width for i in range(len(freqs))], factor)


def _ramp(freqs: tuple[float, ...], kept: list[float], factor: float) -> tuple[float, ...]:
    """Interpolates between each frequency (where ``kept`` is 1) and frequency / ``factor`` (0)."""
    kept = [min(max(share, 0.0), 1.0) for share in kept]
    return tuple(
        freq * (share + (1 - share) / factor) for freq, share in zip(freqs, kept, strict=True)
    )


def _yarn_scale(rope: Mapping[str, Any], factor: float) -> float:
    def scale(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        numerator, denominator = (
            positive(f"RoPE's {name}", rope[name]) for name in ("mscale", "mscale_all_dim")
        )
        return scale(numerator) / scale(denominator)
    return scale(1.0)


def _longrope(
    config: RopeConfig, hf: Mapping[str, Any], rope: Mapping[str, Any], length: float
) -> RopeConfig:
    if length <= 1:
        raise ValueError(f"original_max_position_embeddings must be over 1, got {length}")
    factor = rope.get("factor") or hf["max_position_embeddings"] / length
    factor = positive("the RoPE factor", factor)
    scale = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    short = _divide(config.inv_freq, rope.get("short_factor"), "values of short_factor")
    long = _divide(config.inv_freq, rope.get("long_factor"), "values of long_factor")
    scale = positive("RoPE's attention_factor", rope.get("attention_factor") or scale)
    return RopeConfig(short, scale, config.interleaved, (int(length), long))
