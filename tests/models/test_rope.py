"""RoPE frequencies and scales against transformers' ROPE_INIT_FUNCTIONS."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanovllm import LLM, SamplingParams
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.registry import get_family
from nanovllm.models.rope import for_length, read_rope
from nanovllm.utils.rope import RopeConfig
from tests.test_parity import transformers_greedy
from tests.tiny_models import BASE, LONGROPE, TinyModels

HEAD_DIM = 32
SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024}
FACTORS = {
    "short_factor": [1 + i / 10 for i in range(16)],
    "long_factor": [1.0 + i for i in range(16)],
}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": YARN,
    "yarn-betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-gpt-oss": {**YARN, "truncate": False},
    "yarn-one-mscale": {**YARN, "mscale": 1.0},
    "yarn-mscale": {**YARN, "mscale": 1.4, "mscale_all_dim": 0.7},
    "yarn-scale": {**YARN, "attention_factor": 1.3},
    "yarn-below-1": {**YARN, "factor": 0.5},
    "yarn-short": {**YARN, "original_max_position_embeddings": 16},
    "longrope": {"rope_type": "longrope", **FACTORS, "factor": 4.0},
    "longrope-scale": {"rope_type": "longrope", **FACTORS, "attention_factor": 1.19},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}
for kind in KINDS.values():
    kind["rope_theta"] = 5e5
    kind.setdefault("original_max_position_embeddings", 1024)


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_equal_transformers(kind, partial):
    parameters = {**KINDS[kind], "partial_rotary_factor": partial}
    for name in ("short_factor", "long_factor"):
        if name in parameters:
            parameters[name] = parameters[name][: int(16 * partial)]
    rope = read_rope({**SIZES, "rope_parameters": parameters}, interleaved=False)
    config = LlamaConfig(**SIZES, rope_parameters=dict(parameters))
    init = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    cases = [(rope.inv_freq, None)]
    if rope.long is not None:
        assert rope.long[0] == 1024
        cases.append((rope.long[1], 1025))
    for inv_freq, length in cases:
        expected, scale = init(config, seq_len=length)
        torch.testing.assert_close(torch.tensor(inv_freq), expected, rtol=1e-5, atol=0)
        assert rope.scale == pytest.approx(scale)
    assert (len(rope.inv_freq) == 16) == (partial == 1.0)


def test_the_scale_multiplies_cosines_and_sines_of_rotated_features_only():
    cache = RotaryEmbedding(8, 4, RopeConfig((1.0, 0.5), scale=1.5)).cos_sin_cache
    angles = torch.arange(4).float()[:, None] * torch.tensor([1.0, 0.5])
    torch.testing.assert_close(cache[:, :2], 1.5 * angles.cos())
    assert cache[:, 2:4].eq(1).all()
    torch.testing.assert_close(cache[:, 4:6], 1.5 * angles.sin())
    assert cache[:, 6:].eq(0).all()


@pytest.mark.parametrize(
    ("num_pairs", "interleaved", "order"),
    [
        (4, False, None),
        (4, True, [0, 2, 4, 6, 1, 3, 5, 7]),
        (2, False, [0, 1, 4, 5, 2, 3, 6, 7]),
        (2, True, [0, 2, 4, 5, 1, 3, 6, 7]),
    ],
)
def test_pairs_are_moved_to_both_halves_of_a_head(num_pairs, interleaved, order):
    assert RopeConfig((1.0,) * num_pairs, interleaved=interleaved).head_order(8) == order


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"factor": None}, "the RoPE factor must be a positive number"),
        ({"beta_fast": "fast"}, "RoPE's beta_fast must be a positive number"),
        ({"mscale": -1.0, "mscale_all_dim": 1.0}, "RoPE's mscale must be a positive number"),
        ({"rope_theta": 0.5}, "rope_theta must be over 1 for YaRN"),
        (
            {"rope_type": "longrope"},
            "None as values of short_factor do not match 16 pairs of features",
        ),
        ({"rope_type": "longrope", **FACTORS, "long_factor": [1.0]}, "1 values of long_factor"),
        (
            {"rope_type": "longrope", **FACTORS, "short_factor": [0.0] * 16},
            "each of the values of short_factor must be a positive number",
        ),
        ({"partial_rotary_factor": 0.3}, r"partial_rotary_factor 0\.3 gives RoPE to 9 features"),
        ({"partial_rotary_factor": 1.5}, r"partial_rotary_factor 1\.5 gives RoPE to 48 features"),
    ],
)
def test_impossible_parameters_are_refused_by_name(changes, match):
    with pytest.raises(ValueError, match=match):
        read_rope({**SIZES, "rope_parameters": {**YARN, **changes}}, interleaved=False)


def test_yarn_extends_the_number_of_positions():
    """As users do who add it to the config of a model: the original length times the factor."""
    hf = {"vocab_size": 512, "intermediate_size": 64, "num_hidden_layers": 1, **SIZES}
    config = get_family("llama").read({**hf, "rope_scaling": {**YARN, "factor": 32.0}})
    assert config.max_position_embeddings == 32 * 1024
    assert get_family("llama").read({**hf, "rope_scaling": YARN}).max_position_embeddings == 8192


@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
def test_the_engines_length_chooses_longropes_frequencies(long, tmp_path):
    """All prompts have the kind of length for which transformers chooses the same."""
    parameters = {**LONGROPE, "original_max_position_embeddings": 64}
    sizes = {**BASE, "pad_token_id": 0, "original_max_position_embeddings": 64}
    config = Phi3Config(**sizes, rope_parameters=parameters)
    model = TinyModels.build(config).eval()
    model.save_pretrained(tmp_path)
    prompts = [[3 * i % 512 for i in range(length)] for length in ((65, 200) if long else (1, 40))]
    length = 2048 if long else 64
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(tmp_path, max_model_len=length, num_kvcache_blocks=32) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output["token_ids"] == transformers_greedy(model, prompt, 12)


def test_only_longropes_frequencies_depend_on_the_length():
    hf = {"vocab_size": 512, "intermediate_size": 64, "num_hidden_layers": 1, **SIZES}
    plain = get_family("phi3").read(hf)
    assert for_length(plain, 8192) == plain
    scaled = get_family("phi3").read({**hf, "rope_scaling": KINDS["longrope"]})
    assert for_length(scaled, 4096) == scaled
    attention = for_length(scaled, 4097).layers[0].attention
    rope = scaled.layers[0].attention.rope
    assert rope is not None and rope.long is not None
    assert attention.rope == replace(rope, inv_freq=rope.long[1])
