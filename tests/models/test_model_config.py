"""Checkpoint configs read into typed facts, from a dict and from a config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nanovllm.checkpoints.checkpoint import open_checkpoint
from nanovllm.engine.startup import resolve_max_model_len
from nanovllm.models.family import SKIPPED, TIED_HEAD, WEIGHT_NAMES
from nanovllm.models.model_config import AttentionSpec, LayerSpec, MLPSpec, ModelConfig
from nanovllm.models.registry import FAMILIES, get_family
from nanovllm.models.weight_names import WeightNames
from nanovllm.utils.rope import RopeConfig
from tests.layers.test_rotary_embedding import inv_freq_fp64

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
LLAMA3_FACTORS = {
    "factor": 8.0,
    "low_freq_factor": 2.0,
    "high_freq_factor": 6.0,
    "original_max_position_embeddings": 1024,
}


def freqs(theta: float) -> list[float]:
    return [theta ** (-i / 8) for i in range(8)]


# Release 4's spelling, release 5's, and the frequencies that both mean.
SPELLINGS: dict[str, tuple[dict[str, Any], dict[str, Any], list[float]]] = {
    "default": (
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        freqs(5e5),
    ),
    "nothing": ({}, {"rope_parameters": {"rope_theta": 10000.0}}, freqs(1e4)),
    "linear": (
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.5}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.5}},
        [freq / 2.5 for freq in freqs(5e5)],
    ),
    "linear-old": (
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.5}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.5}},
        [freq / 2.5 for freq in freqs(5e5)],
    ),
    "llama3": (
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_FACTORS}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_FACTORS}},
        inv_freq_fp64({"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_FACTORS}, 16).tolist(),
    ),
}
READERS = ["dict", "file"]
each_reader = pytest.mark.parametrize("reader", READERS)


@pytest.fixture
def read(reader, tmp_path: Path):
    """Reads a config in one of two ways: as a dict, or from disk through transformers."""

    def read(changes: dict[str, Any], drop: tuple[str, ...] = ()) -> ModelConfig:
        hf = {key: value for key, value in {**LLAMA, **changes}.items() if key not in drop}
        if reader == "file":
            (tmp_path / "config.json").write_text(json.dumps(hf))
            return open_checkpoint(str(tmp_path)).config
        return get_family(hf["architectures"][0]).read(hf)

    return read


def attention(config: ModelConfig) -> AttentionSpec:
    """Of a config whose layers are all alike."""
    assert len(config.layers) == 3 and len(set(config.layers)) == 1
    return config.layers[0].attention


FIELDS: dict[str, Any] = {"layer": range(3), "kind": ("weight", "bias"), "expert": range(1)}


@each_reader
def test_facts_are_read(read):
    rope = RopeConfig(tuple(10000.0 ** (-i / 16) for i in range(16)))
    layer = LayerSpec(AttentionSpec(4, 2, 32, rope), MLPSpec(128))
    config = read({"head_dim": 32, "dtype": "bfloat16"})
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=512,
        hidden_size=64,
        layers=(layer, layer, layer),
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
        weight_names=WeightNames(WEIGHT_NAMES, FIELDS, skipped=SKIPPED),
    )
    assert (len(config.layers), config.num_attention_heads) == (3, 4)
    assert (config.num_key_value_heads, config.head_dim) == (2, 32)


@each_reader
def test_head_dim_and_kv_heads_have_defaults(read):
    """Guards releases that leave them out or spell them null: head_dim is hidden_size / heads,
    and without grouped queries every head has keys of its own."""
    config = read({"head_dim": None}, drop=("num_key_value_heads",))
    assert (config.head_dim, config.num_key_value_heads) == (16, 4)


@each_reader
@pytest.mark.parametrize("kind", SPELLINGS)
def test_rope_spellings_of_both_releases_are_equal(kind, read):
    """Guards rope scaling that is ignored, and a rope_theta looked for in one place only."""
    release_4, release_5, expected = SPELLINGS[kind]
    rope = attention(read(release_4)).rope
    assert rope is not None
    assert rope.inv_freq == pytest.approx(expected) and rope.scale == 1.0
    assert read(release_4) == read(release_5)


@each_reader
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_spellings_of_both_releases_are_equal(dtype, read):
    expected = getattr(torch, dtype)
    assert read({"torch_dtype": dtype}).dtype == read({"dtype": dtype}).dtype == expected


@pytest.mark.parametrize("reader", ["dict"])
def test_dtype_may_be_torchs_own(read):
    assert read({"dtype": torch.bfloat16}).dtype == torch.bfloat16
    assert read({"dtype": "torch.float16"}).dtype == torch.float16


@each_reader
@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn", "int8"])
def test_other_dtypes_are_refused_by_name(dtype, read):
    with pytest.raises(ValueError, match=dtype):
        read({"dtype": dtype})


@each_reader
@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["proportional", "no-such-kind"])
def test_unknown_rope_kinds_are_refused_by_name(kind, key, read):
    """Guards a model that runs with the wrong rotation and writes nonsense."""
    scaling: dict[str, Any] = {key: kind, "factor": 4.0, "original_max_position_embeddings": 512}
    with pytest.raises(ValueError, match=f"rope type '{kind}' is not supported.*llama3"):
        read({"rope_scaling": scaling})


@each_reader
@pytest.mark.parametrize(
    ("kind", "missing"), [("linear", "factor"), ("llama3", "high_freq_factor"), ("yarn", "factor")]
)
def test_rope_scaling_without_its_factors_is_refused_by_name(kind, missing, read):
    scaling = {"rope_type": kind, **LLAMA3_FACTORS}
    del scaling[missing]
    with pytest.raises(ValueError, match=missing):
        read({"rope_scaling": scaling})


@each_reader
def test_a_partial_rotation_is_refused(read):
    with pytest.raises(ValueError, match=r"partial rotary.*0\.5"):
        read({"partial_rotary_factor": 0.5})


@each_reader
@pytest.mark.parametrize("act", ["gelu", "relu"])
def test_other_activations_are_refused_by_name(act, read):
    with pytest.raises(ValueError, match=f"hidden_act '{act}' is not supported, only 'silu'"):
        read({"hidden_act": act})


@each_reader
@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_quantized_checkpoints_are_refused_by_method(method, read):
    with pytest.raises(ValueError, match=f"'{method}' quantisation is not supported"):
        read({"quantization_config": {"quant_method": method, "bits": 4}})


@pytest.mark.parametrize("reader", ["dict"])
@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    ],
)
def test_a_missing_field_is_named(name, read):
    with pytest.raises(ValueError, match=f"config lacks '{name}'"):
        read({}, drop=(name,))


@pytest.mark.parametrize("reader", ["dict"])
def test_a_field_that_is_null_and_has_no_default_is_missing(read):
    with pytest.raises(ValueError, match="config lacks 'max_position_embeddings'"):
        read({"max_position_embeddings": None})


@each_reader
@pytest.mark.parametrize("value", [0, -1, 2.0, "3", True])
@pytest.mark.parametrize("name", ["num_hidden_layers", "vocab_size", "num_attention_heads"])
def test_an_impossible_size_is_refused(name, value, read):
    with pytest.raises(ValueError):
        read({name: value})


@each_reader
def test_kv_heads_must_divide_the_heads(read):
    with pytest.raises(ValueError, match="4 attention heads cannot share 3 KV heads"):
        read({"num_key_value_heads": 3})


@each_reader
@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({}, set()),
        ({"attention_bias": True}, {"qkv_bias", "o_bias"}),
        ({"mlp_bias": True}, {"mlp_bias"}),
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, {"qkv_bias"}),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, {"qk_norm"}),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "attention_bias": True,
            },
            {"qk_norm", "qkv_bias", "o_bias"},
        ),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "model_type": "mistral",
                "sliding_window": None,
            },
            set(),
        ),
    ],
    ids=["llama", "llama-bias", "llama-mlp-bias", "qwen2", "qwen3", "qwen3-bias", "mistral"],
)
def test_architectures_differ_in_their_flags(changes, flags, read):
    config = read(changes)
    spec, mlp = attention(config), config.layers[0].mlp
    found = {name for name in ("qk_norm", "qkv_bias", "o_bias") if getattr(spec, name)}
    assert found | ({"mlp_bias"} if mlp.bias else set()) == flags


def test_an_unknown_architecture_is_refused_with_those_served():
    """Guards nano-vLLM, which loads any architecture as Qwen3."""
    with pytest.raises(ValueError, match="'GPT2LMHeadModel' is not supported") as error:
        get_family("GPT2LMHeadModel")
    assert all(family.architecture in str(error.value) for family in FAMILIES)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_a_familys_names_are_transformers_own(family):
    """Guards names that were made from each other, which fails for ``Qwen3MoeForCausalLM``."""
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.model_type] == family.architecture
    assert get_family(family.model_type) is get_family(family.architecture) is family


QWEN2_WINDOW = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "sliding_window": 128,
    "max_window_layers": 1,
}
MISTRAL_WINDOW = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 128,
}


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.attention.window for layer in config.layers]


TYPES = ["sliding_attention", "full_attention", "sliding_attention"]


@each_reader
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({**QWEN2_WINDOW, "use_sliding_window": True}, [None, 128, 128]),
        (
            {**QWEN2_WINDOW, "use_sliding_window": True, "layer_types": TYPES},
            [128, None, 128],
        ),
        (MISTRAL_WINDOW, [128, 128, 128]),
    ],
    ids=["qwen2", "qwen2-types", "mistral"],
)
def test_sliding_windows_are_read_for_each_layer(changes, expected, read):
    """Guards full attention where the model was trained with a window: another function."""
    assert windows(read(changes)) == expected


@each_reader
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"layer_types": TYPES},
            "layer_types has sliding windows, but use_sliding_window is false",
        ),
        (
            {"layer_types": TYPES, "use_sliding_window": True, "sliding_window": None},
            "layer_types has sliding windows, but sliding_window is missing",
        ),
        ({"layer_types": TYPES[:2]}, "layer_types has 2 entries for 3 layers"),
        (
            {"layer_types": ["chunked_attention"] * 3},
            "layer_types must be a list of full_attention",
        ),
        ({"max_window_layers": -1, "use_sliding_window": True}, "max_window_layers must be an int"),
    ],
)
def test_windows_that_are_not_served_are_refused(changes, match, read):
    with pytest.raises(ValueError, match=match):
        read({**QWEN2_WINDOW, **changes})


@each_reader
@pytest.mark.parametrize(
    "changes",
    [
        {**QWEN2_WINDOW, "use_sliding_window": False},
        {**MISTRAL_WINDOW, "sliding_window": None},
    ],
    ids=["qwen2-off", "mistral-null"],
)
def test_a_window_that_is_not_used_is_ignored(changes, read):
    assert windows(read(changes)) == [None, None, None]


@pytest.mark.parametrize("reader", ["dict"])
def test_layers_without_their_window_keep_the_rope_of_their_type(read):
    """As in vLLM. Guards the RoPE of full attention in all layers, scaled up to long contexts."""
    gemma = {"architectures": ["Gemma3ForCausalLM"], "hidden_act": "gelu_pytorch_tanh"}
    gemma |= {"sliding_window": None, "sliding_window_pattern": 2, "head_dim": 16}
    config = read({**gemma, "rope_theta": 5e5, "rope_local_base_freq": 1e4})
    assert windows(config) == [None, None, None]
    ropes = [layer.attention.rope.inv_freq for layer in config.layers]
    assert ropes == [pytest.approx(freqs(theta)) for theta in (1e4, 5e5, 1e4)]


@pytest.mark.parametrize("reader", ["dict"])
def test_max_model_len_is_within_the_models_positions(read):
    """Guards a length that was cut without a word."""
    config = read({"max_position_embeddings": 100})
    with pytest.raises(ValueError, match="max_model_len=101 is more than the model's 100"):
        resolve_max_model_len(101, config)
    assert resolve_max_model_len(100, config) == resolve_max_model_len(None, config) == 100
    assert resolve_max_model_len(50, config) == 50


SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}


@each_reader
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 3 layers"),
        ({"no_rope_layers": [1, 0, 2]}, "no_rope_layers must be a list of 0 and 1"),
        ({"no_rope_layers": "110"}, "no_rope_layers must be a list of 0 and 1"),
        ({"no_rope_layers": [[1], {}, 0]}, "no_rope_layers must be a list of 0 and 1"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval must be a positive int"),
        ({"no_rope_layer_interval": 2.5}, "no_rope_layer_interval must be a positive int"),
        ({"no_rope_layer_interval": None}, "lacks 'no_rope_layer_interval'"),
        (
            {"layer_types": ["sliding_attention"] * 3, "sliding_window": 64},
            "layer_types has sliding windows, but use_sliding_window is false",
        ),
    ],
)
def test_what_smollm3_cannot_mean_is_refused(changes, match, read):
    with pytest.raises(ValueError, match=match):
        read({**SMOLLM3, **changes})


@each_reader
def test_smollm3s_layers_without_rope_have_the_window(read):
    window = {"use_sliding_window": True, "sliding_window": 64, "no_rope_layer_interval": 2}
    assert windows(read({**SMOLLM3, **window})) == [None, 64, None]


@each_reader
@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_are_read(tied, read):
    config = read({"tie_word_embeddings": tied})
    assert config.tie_word_embeddings is tied
    assert (config.weight_names.skipped == SKIPPED + TIED_HEAD) is tied


@each_reader
def test_embeddings_are_not_tied_unless_the_config_says_so(read):
    assert read({}, drop=("tie_word_embeddings",)).tie_word_embeddings is False


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("qwen2", {"max_window_layers": None}, "lacks 'max_window_layers'"),
        ("qwen3_moe", {"norm_topk_prob": None}, "lacks 'norm_topk_prob'"),
        ("qwen3_moe", {"decoder_sparse_step": None}, "lacks 'decoder_sparse_step'"),
        ("gpt_oss", {"swiglu_limit": None}, "lacks 'swiglu_limit'"),
        ("qwen2", {"quantization_config": 5}, "quantization_config must be an object"),
        ("qwen2", {"quantization_config": "x"}, "quantization_config must be an object"),
    ],
    ids=str,
)
def test_fields_that_are_null_or_no_object_are_refused(model_type, change, message):
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    config |= {**dict.fromkeys(sizes, 64), "head_dim": 16, **change}
    with pytest.raises(ValueError, match=message):
        get_family(model_type).read(config)
