"""GGUF files, written here tensor by tensor, against transformers on the same weights."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Quant
from packaging.version import Version
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedModel

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoints.checkpoint import open_checkpoint
from nanovllm.checkpoints.gguf_architectures import ARCHITECTURES, OUTPUT_NORMS, TENSOR_NAMES
from nanovllm.utils.device import select_dtype
from tests.tiny_models import LLAMA3_ROPE, VOCAB_SIZE, TinyModels

pytestmark = pytest.mark.smoke

SMALL: dict[str, Any] = {"num_kvcache_blocks": 256, "kvcache_block_size": 16, "max_num_seqs": 4}
# Early releases of transformers 5 cannot build a model with LongRoPE in a part of a head.
HAS_LONGROPE = Version(transformers.__version__) >= Version("5.4")
needs_longrope = pytest.mark.skipif(not HAS_LONGROPE, reason="transformers lacks partial LongRoPE")
MODELS = {
    "llama": "llama",
    "llama-linear": "llama",
    "llama-bias": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3-tied": "qwen3",
    "smollm3-every-fourth": "smollm3",
    "gemma2-scalar": "gemma2",
    "gemma3-scalar": "gemma3",
    "granite": "granite",
    "olmo2": "olmo2",
    "llama-yarn": "llama",
    "phi3": "phi3",
    **({"phi3-longrope": "phi3"} if HAS_LONGROPE else {}),
    "mixtral": "llama",
    "qwen3-moe-all": "qwen3moe",
    "olmoe": "olmoe",
    "granitemoe": "granitemoe",
    "gpt-oss": "gpt-oss",
}
MIXTURES = ("mixtral", "qwen3-moe-all", "olmoe", "granitemoe", "gpt-oss")
REORDERED = ("granite", "granitemoe", "llama", "smollm3")
HAVE_OUTPUT_NORMS = ("gemma2", "gemma3", "olmo2")
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
# transformers' names and llama.cpp's.
TOP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    # Phi-3
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    # mixtures of experts
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}


# Where norms follow attention and MLP.
OUTPUT_NORM_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# Metadata of mixtures of experts. The first of a config's fields that exists has the value.
COUNTS = {
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
}
# Metadata, and the config's field with its value.
FLOATS = {
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in (1, 7, 40, 300)
    ]


@torch.inference_mode()
def transformers_greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    ids, cache, out = torch.tensor([prompt]), None, []
    for _ in range(num_tokens):
        result = model(ids, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        ids = result.logits[:, -1:].argmax(-1)
        out.append(int(ids))
    return out


def gguf_name(name: str, arch: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in TOP_NAMES:
        return f"{TOP_NAMES[module]}.{kind}"
    _, _, layer, module = module.split(".", 3)
    names = {**LAYER_NAMES, **OUTPUT_NORM_NAMES} if arch in HAVE_OUTPUT_NORMS else LAYER_NAMES
    if arch == "gpt-oss":
        names = {**names, "post_attention_layernorm": "post_attention_norm"}
    return f"blk.{layer}.{names[module]}.{kind}"


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp rotates neighbouring rows of a head, transformers row i with row i + D/2, so a
    "llama" file's q and k rows are stored 0, D/2, 1, D/2 + 1, ..."""
    head_dim = len(weight) // num_heads
    order = [
        head * head_dim + half * head_dim // 2 + i
        for head in range(num_heads)
        for i in range(head_dim // 2)
        for half in (0, 1)
    ]
    return weight[order]


def llama3_divisors(head_dim: int) -> np.ndarray:
    """What llama.cpp's converter writes for Llama 3's rope scaling."""
    rope, out = LLAMA3_ROPE, []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * i / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if turns > high:
            out.append(1.0)
        elif turns < low:
            out.append(rope["factor"])
        else:
            smooth = (turns - low) / (high - low)
            out.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(out, dtype=np.float32)


def rope_of(config: Any) -> dict[str, Any]:
    return config.rope_parameters.get("full_attention", config.rope_parameters)


def file_tensors(model: PreTrainedModel, arch: str) -> Iterator[tuple[str, np.ndarray]]:
    """(llama.cpp's name, fp32 weight) as its converter lays them out."""
    config = model.config
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = tensor.float().numpy()
        if arch in REORDERED and ".q_proj." in name:
            weight = interleaved(weight, config.num_attention_heads)
        if arch in REORDERED and ".k_proj." in name:
            weight = interleaved(weight, config.num_key_value_heads)
        if arch.startswith("gemma") and "norm" in name:
            weight = weight + 1
        if name.endswith(".sinks"):
            yield f"blk.{name.split('.')[2]}.attn_sinks.weight", weight
        elif ".experts." in name or weight.ndim == 3:
            for part, expert_weight in stacked_experts(name, weight, arch):
                yield gguf_name(part, arch), expert_weight
        else:
            yield gguf_name(name, arch), weight
    if rope_of(config)["rope_type"] == "llama3":
        yield "rope_freqs.weight", llama3_divisors(config.head_dim)
    for length in ("short", "long"):
        if rope_of(config)["rope_type"] == "longrope":
            factors = np.array(rope_of(config)[f"{length}_factor"], np.float32)
            yield f"rope_factors_{length}.weight", factors


def stacked_experts(name: str, weight: np.ndarray, arch: str) -> Iterator[tuple[str, np.ndarray]]:
    """A tensor [experts, ...] of all experts as llama.cpp has it: gate and up are two tensors. In
    gpt-oss, transformers holds [experts, in, out], with the columns of gate and up in turn."""
    name = name.replace("block_sparse_moe", "mlp")
    # Granite's names in early transformers 5.
    name = name.replace("input_linear.weight", "experts.gate_up_proj")
    name = name.replace("output_linear.weight", "experts.down_proj")
    module, kind = name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
    if arch == "gpt-oss" and kind == "weight":
        weight = weight.swapaxes(1, 2)
    if module.endswith(".down_proj"):
        yield f"{module}.{kind}", weight
        return
    is_mixed = arch == "gpt-oss"
    halves = (weight[:, ::2], weight[:, 1::2]) if is_mixed else np.split(weight, 2, axis=1)
    for part, half in zip(("gate_proj", "up_proj"), halves, strict=True):
        yield f"{module.replace('gate_up_proj', part)}.{kind}", half


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    arch: str,
    quant: Quant = Quant.F32,
    *,
    edit: Callable[[dict[str, np.ndarray]], Any] = lambda tensors: None,
    fields: Callable[[gguf.GGUFWriter], Any] = lambda writer: None,
    drop: tuple[str, ...] = (),
    packed: dict[str, np.ndarray] | None = None,
) -> Path:
    """Matrices in ``quant``, vectors in fp32; ``edit`` changes the tensors, ``fields`` adds
    metadata and ``drop`` leaves some out. Tensors in ``packed`` have these bytes, in MXFP4."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    metadata = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": int(
            config.head_dim * rope_of(config).get("partial_rotary_factor", 1)
        ),
    }
    for name, candidates in COUNTS.items():
        if found := [getattr(config, field) for field in candidates if hasattr(config, field)]:
            metadata[name] = found[0]
    for name, value in metadata.items():
        if name not in drop:
            writer.add_uint32(f"{arch}.{name}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    rope = rope_of(config)
    writer.add_float32(f"{arch}.rope.freq_base", rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_string(f"{arch}.rope.scaling.type", rope["rope_type"])
        writer.add_float32(f"{arch}.rope.scaling.factor", rope["factor"])
    if rope["rope_type"] in ("yarn", "longrope"):
        length = rope["original_max_position_embeddings"]
        if "rope.scaling.original_context_length" not in drop:
            writer.add_uint32(f"{arch}.rope.scaling.original_context_length", length)
    if rope["rope_type"] == "longrope":
        scale = math.sqrt(1 + math.log(rope["factor"]) / math.log(length))
        writer.add_float32(f"{arch}.rope.scaling.attn_factor", scale)
    for name, field in FLOATS.items():
        if (number := getattr(config, field, None)) is not None:
            writer.add_float32(f"{arch}.{name}", number)
    if arch.startswith(("gemma", "gpt-oss", "phi3")) and "attention.sliding_window" not in drop:
        writer.add_sliding_window(config.sliding_window or 0)
    fields(writer)
    tensors = dict(file_tensors(model, arch))
    edit(tensors)
    for name, weight in tensors.items():
        if packed and name in packed:
            writer.add_tensor(name, packed[name], raw_dtype=Quant.MXFP4)
        elif weight.ndim < 2 or name.endswith(".bias"):
            writer.add_tensor(name, np.ascontiguousarray(weight))
        else:
            codes = gguf.quants.quantize(np.ascontiguousarray(weight), quant)
            writer.add_tensor(name, codes, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dequantized(model: PreTrainedModel, quant: Quant) -> PreTrainedModel:
    """The same model with the numbers that survive ``quant``."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() > 1 and not name.endswith("bias"):
                is_transposed = type(model).__name__ == "GptOssForCausalLM" and ".experts." in name
                rows = param.transpose(1, 2) if is_transposed else param
                codes = gguf.quants.quantize(rows.contiguous().numpy(), quant)
                rows.copy_(torch.from_numpy(gguf.quants.dequantize(codes, quant).copy()))
    return model


def check_tokens(path: Path, model: PreTrainedModel) -> None:
    expected = [transformers_greedy(model, prompt, 16) for prompt in prompts()]
    with LLM(path, **SMALL) as llm:
        outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert [out["token_ids"] for out in outputs] == expected


def refuse(path: Path, match: str, **settings: Any) -> None:
    with pytest.raises(ValueError, match=match):
        LLM(path, **SMALL, **settings)


@pytest.mark.parametrize(
    "quant",
    [pytest.param(Quant.F32, marks=pytest.mark.slow), Quant.Q8_0],
    ids=lambda quant: quant.name,
)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_transformers(name, quant, tiny_models: TinyModels, tmp_path):
    """Guards q and k rows left in llama.cpp's order, rope divisors and linear scaling that are
    ignored, biases that are dropped, and a tied head that is asked for."""
    arch = MODELS[name]
    path = write_gguf(tmp_path / "m.gguf", tiny_models.load(name), arch, quant)
    check_tokens(path, dequantized(tiny_models.load(name), quant))


@pytest.mark.parametrize(
    "quant", [Quant.F16, Quant.BF16, Quant.Q4_0, Quant.Q5_1], ids=lambda quant: quant.name
)
def test_tokens_of_other_quantizations_equal_transformers(quant, tiny_models, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny_models.load("llama"), "llama", quant)
    check_tokens(path, dequantized(tiny_models.load("llama"), quant))


@needs_longrope
def test_long_contexts_have_the_long_frequencies(tiny_models, tmp_path):
    """transformers chooses the frequencies by each prompt's length, and this engine by the longest
    possible length, so every prompt here has more tokens than the short ones are for."""
    model = tiny_models.load("phi3-longrope")
    original = "phi3.rope.scaling.original_context_length"
    path = write_gguf(
        tmp_path / "m.gguf",
        model,
        "phi3",
        drop=("rope.scaling.original_context_length",),
        fields=lambda writer: writer.add_uint32(original, 32),
    )
    model.config.original_max_position_embeddings = 32
    model.config.rope_parameters["original_max_position_embeddings"] = 32
    prompt = prompts()[-1]
    expected = transformers_greedy(model, prompt, 16)
    with LLM(path, **SMALL) as llm:
        assert llm.generate([prompt], GREEDY, use_tqdm=False)[0]["token_ids"] == expected


def test_mxfp4_experts_equal_transformers(tiny_models, tmp_path):
    """As in the released files: only the experts' weights are in MXFP4. The blocks are packed here,
    from values that MXFP4 can represent, and not by gguf-py: a scale 2^(e - 127), then 16 bytes
    with the codes of features i in the low and i + 16 in the high halves."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    model, rng = tiny_models.load("gpt-oss"), np.random.default_rng(0)
    packed: dict[str, np.ndarray] = {}
    for layer, module in enumerate(model.model.layers):
        for name, param in module.mlp.experts.named_parameters():
            if name.endswith("bias"):
                continue
            num, width, rows = param.shape
            codes = rng.integers(0, 16, (num, rows, width // 32, 32), dtype=np.uint8)
            scales = rng.integers(122, 126, (num, rows, width // 32, 1), dtype=np.uint8)
            weight = values[codes] * 2.0 ** (scales.astype(np.float32) - 127)
            with torch.no_grad():
                weight = weight.reshape(num, rows, width)
                param.copy_(torch.from_numpy(weight).transpose(1, 2))
            bytes_ = np.concatenate([scales, codes[..., :16] | codes[..., 16:] << 4], axis=-1)
            bytes_ = bytes_.reshape(num, rows, -1)
            parts = {"gate": bytes_[:, ::2], "up": bytes_[:, 1::2]}
            for part, data in (parts if "up" in name else {"down": bytes_}).items():
                packed[f"blk.{layer}.ffn_{part}_exps.weight"] = np.ascontiguousarray(data)
    path = write_gguf(tmp_path / "m.gguf", model, "gpt-oss", packed=packed)
    check_tokens(path, model)


@pytest.mark.parametrize("name", MODELS)
def test_config_equals_the_safetensors_one(name, tiny_models, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny_models.load(name), MODELS[name])
    found = open_checkpoint(str(path)).config
    original = open_checkpoint(str(tiny_models.path(name))).config
    for field in found.__slots__:
        if field == "weight_names" and name in MIXTURES:
            assert found.weight_names.fields == original.weight_names.fields
        elif field not in ("layers", "dtype", "rms_norm_eps"):
            assert getattr(found, field) == getattr(original, field), field
    assert found.rms_norm_eps == pytest.approx(original.rms_norm_eps)
    for ours, theirs in zip(found.layers, original.layers, strict=True):
        rope, original_rope = ours.attention.rope, theirs.attention.rope
        scale = theirs.attention.scale
        attention = replace(ours.attention, rope=original_rope, scale=scale)
        output_scale = theirs.output_scale
        assert replace(ours, attention=attention, output_scale=output_scale) == theirs
        assert ours.attention.scale == (scale and pytest.approx(scale))
        assert ours.output_scale == pytest.approx(output_scale)
        assert (rope is None) == (original_rope is None)
        if rope is None:
            continue
        assert rope.inv_freq == pytest.approx(original_rope.inv_freq)
        assert rope.scale == pytest.approx(original_rope.scale)
        assert (rope.long is None) == (original_rope.long is None)
        if rope.long is not None:
            assert rope.long[0] == original_rope.long[0]
            assert rope.long[1] == pytest.approx(original_rope.long[1])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tensor_names_are_those_of_the_formats_own_table(arch):
    kinds = [kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch]
    if not kinds:
        pytest.skip("this release of gguf-py does not know the architecture")
    table = gguf.get_tensor_name_map(kinds[0], 3)
    for name, hf_name in {**TENSOR_NAMES, **ARCHITECTURES[arch].names}.items():
        found = table.get_name(hf_name.format(layer=2).replace(".{expert}", ""))
        some_lack_it = name in {**TENSOR_NAMES, **OUTPUT_NORMS} and arch != "qwen3"
        assert found == name.format(layer=2) or (found is None and some_lack_it)


@pytest.mark.parametrize("quant", [Quant.F16, Quant.BF16, Quant.Q8_0], ids=lambda q: q.name)
def test_a_gpu_computes_in_bf16_where_it_can(quant, tiny_models, tmp_path, monkeypatch):
    """It computed in fp16, in which models that were trained in bf16 overflow."""
    path = write_gguf(tmp_path / "m.gguf", tiny_models.load("llama"), "llama", quant)
    found, gpu = open_checkpoint(str(path)).config.dtype, torch.device("cuda", 0)
    for has_bf16, expected in ((True, torch.bfloat16), (False, torch.float16)):
        answer = Mock(return_value=has_bf16)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", answer)
        assert select_dtype("auto", gpu, found) is expected
        assert select_dtype("float16", gpu, found) is torch.float16, "what is asked for"


def test_weights_are_those_written_bit_for_bit(tiny_models, tmp_path):
    """fp32 takes part in no rounding; the names are transformers'."""
    model = tiny_models.load("llama-bias")
    path = write_gguf(tmp_path / "m.gguf", model, "llama")
    found = dict(open_checkpoint(str(path)).tensors())
    assert found.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_head_dim_and_kv_heads_have_defaults(tiny_models, tmp_path):
    """Older converters write no key_length, and head_count_kv only with grouped queries."""
    path = write_gguf(
        tmp_path / "m.gguf",
        tiny_models.load("llama"),
        "llama",
        drop=("attention.key_length", "attention.head_count_kv", "rope.dimension_count"),
    )
    config = open_checkpoint(str(path)).config
    assert (config.head_dim, config.num_key_value_heads) == (16, 4)


def test_every_end_of_sequence_id_stops(tiny_models, tmp_path):
    model = tiny_models.load("qwen3")
    free = [transformers_greedy(model, prompt, 16) for prompt in prompts()[:2]]
    ends = [free[0][4], free[1][6]]

    def fields(writer: gguf.GGUFWriter) -> None:
        writer.add_eos_token_id(ends[0])
        writer.add_eot_token_id(ends[1])

    path = write_gguf(tmp_path / "m.gguf", model, "qwen3", fields=fields)
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.eos_token_ids == set(ends)
    assert checkpoint.recommended_sampling == {}
    with LLM(path, **SMALL) as llm:
        params = SamplingParams(temperature=0, max_tokens=16)
        outputs = llm.generate(prompts()[:2], params, use_tqdm=False)
    for out, run in zip(outputs, free, strict=True):
        first = next(i for i, token in enumerate(run) if token in ends)
        assert out["token_ids"] == run[: first + 1]
        assert out.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["<|im_end|>", "<|endoftext|>"], {0, 1}),
        (["<|endoftext|>", "<|end|>", "<|user|>"], {0, 1}),
        (["<|end|>", "<|return|>", "<|call|>"], {1, 2}),
        (["<end_of_turn>", "<eos>"], {0}),
    ],
    ids=["qwen", "phi3", "gpt-oss", "gemma"],
)
def test_tokens_that_end_a_turn_are_known_by_their_texts(tokens, ends, tiny_models, tmp_path):
    """As in llama.cpp, because files state one or two. In gpt-oss, <|end|> ends only a message."""
    words = [*tokens, *(f"w{i}" for i in range(VOCAB_SIZE - len(tokens)))]

    def fields(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(words)

    path = write_gguf(tmp_path / "m.gguf", tiny_models.load("qwen3"), "qwen3", fields=fields)
    assert open_checkpoint(str(path)).eos_token_ids == ends


@pytest.mark.parametrize(("kind", "has_bos"), [("llama", True), ("gpt2", False)])
def test_phi3_files_have_either_kind_of_vocabulary(kind, has_bos, tiny_models, tmp_path):
    """SentencePiece's, as in Phi-3, where llama.cpp adds BOS unless told otherwise; or a byte-level
    one, as in Phi-4, whose tokens would otherwise be read as if they were plain text."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", *"abcdefghijklmnopqrstuvwxyz"] if kind == "llama" else [*"\u0120cab!"]
    words += ["\u2581c"] if kind == "llama" else ["\u0120c", "ab"]
    words += [f"<unused{i}>" for i in range(VOCAB_SIZE - len(words))]

    def fields(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(kind)
        writer.add_tokenizer_pre("default" if kind == "llama" else "dbrx")
        writer.add_token_list(words)
        scores = [-float(i) for i in range(VOCAB_SIZE)]
        writer.add_token_scores(scores)
        kinds = {"<unk>": 3, "<s>": 3, "</s>": 3}
        writer.add_token_types([kinds.get(w, 6 if w.startswith("<0x") else 1) for w in words])
        if kind == "gpt2":
            writer.add_token_merges(["\u0120 c", "a b"])
        for name, token in (("unk", 0), ("bos", 1), ("eos", 2), ("pad", 2)):
            getattr(writer, f"add_{name}_token_id")(token)

    path = write_gguf(tmp_path / "m.gguf", tiny_models.load("phi3"), "phi3", fields=fields)
    tokenizer = open_checkpoint(str(path)).load_tokenizer()
    assert tokenizer is not None
    space_c, a = words.index("\u2581c" if kind == "llama" else "\u0120c"), words.index("a")
    text = "ca" if kind == "llama" else " ca"  # SentencePiece adds the space
    assert tokenizer(text).input_ids == [1] * has_bos + [space_c, a]
    assert tokenizer.decode([space_c, a]).strip() == "ca"
    # In Phi-3, each text after a special token begins with a space.
    after_special = tokenizer("</s>" + text, add_special_tokens=False).input_ids
    assert after_special == [2, space_c, a]


@pytest.mark.parametrize(
    ("name", "pre", "add_bos", "has_bos"),
    [
        ("smollm3-every-fourth", "smollm", None, False),
        ("qwen2", "qwen2", None, False),
        ("qwen3", "qwen2", False, False),
        ("llama-bias", "llama-bpe", True, True),
        ("llama-bias", "smollm", None, False),
        ("llama-bias", "llama-bpe", None, True),
        ("llama-bias", "llama-bpe", False, False),
    ],
)
def test_the_files_tokenizer_reads_and_writes_text(
    name, pre, add_bos, has_bos, tiny_models, tmp_path
):
    """A byte-level vocabulary of one token a character. The file may say whether texts start
    with BOS; where it does not, Llama 3's pre-tokenizer ("llama-bpe") implies it, as llama.cpp
    has it."""
    characters = [chr(ord("!") + i) for i in range(90)]
    words = [*characters, "ab", "xy", "<s>", "</s>"]
    words += [f"<unused{i}>" for i in range(VOCAB_SIZE - len(words))]
    bos, end = words.index("<s>"), words.index("</s>")

    def fields(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(words)
        writer.add_token_types([3 if i in (bos, end) else 1 for i in range(VOCAB_SIZE)])
        writer.add_token_merges(["a b", "x y"])  # transformers 5.0 fails on a lone one
        writer.add_eos_token_id(end)
        writer.add_bos_token_id(bos)
        if add_bos is not None:
            writer.add_add_bos_token(add_bos)

    path = write_gguf(tmp_path / "m.gguf", tiny_models.load(name), MODELS[name], fields=fields)
    ids = [words.index(word) for word in ("c", "ab", "!")]
    with LLM(path, **SMALL) as llm:
        plain, spelled_out = llm.generate(["cab!", "<s>cab!"], GREEDY, use_tqdm=False)
        assert plain.prompt_token_ids == [bos] * has_bos + ids
        assert spelled_out.prompt_token_ids == [bos, *ids]
        # Guards releases of transformers that put other steps before it.
        assert isinstance(llm.tokenizer.backend_tokenizer.decoder, ByteLevel)
        detokenizer = llm.preparer.encoder.detokenizer(bos, SamplingParams())
        detokenizer.extend([bos, *ids, end])
        assert detokenizer.text == "cab!"


def test_the_models_limit_is_the_default_length_and_the_largest(tiny_models, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny_models.load("qwen3"), "qwen3")
    with pytest.raises(ValueError, match="more than the model's 2048 positions"):
        LLM(path, **SMALL, max_model_len=2049)
    with LLM(path, **{**SMALL, "num_kvcache_blocks": 200}) as llm:
        assert llm.scheduler.max_len == 2048


@pytest.fixture(scope="module")
def good(tiny_models, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return write_gguf(path, tiny_models.load("qwen3"), "qwen3").read_bytes()


class TestDamage:
    @pytest.mark.parametrize("size", [0, 3, 8, 23, 24, 60, 1000, 5000, -4096, -32, -1])
    def test_a_truncated_file_is_named(self, good, size, tmp_path):
        path = tmp_path / "cut.gguf"
        path.write_bytes(good[:size])
        refuse(path, r"cut\.gguf.*truncated or damaged")

    def test_another_format_is_named(self, tmp_path):
        path = tmp_path / "other.gguf"
        path.write_bytes(b"PK\x03\x04" + bytes(range(256)) * 50)
        refuse(path, r"other\.gguf.*truncated or damaged")

    @pytest.mark.parametrize("offset", [0, 4, 8, 16])
    def test_a_damaged_header_is_named(self, good, offset, tmp_path):
        """Magic, version, and absurd counts of tensors and fields."""
        path = tmp_path / "bad.gguf"
        path.write_bytes(good[:offset] + b"\xff\xff\xff\x7f" + good[offset + 4 :])
        refuse(path, r"bad\.gguf.*truncated or damaged")

    def test_flipped_bytes_in_the_metadata_never_escape_as_other_errors(self, good, tmp_path):
        """Either the file still opens, or it is refused with ValueError: 300 places."""
        path = tmp_path / "flipped.gguf"
        end = good.index(b"token_embd")
        generator = torch.Generator().manual_seed(0)
        refused = 0
        for position in torch.randint(4, end, (300,), generator=generator).tolist():
            flipped = bytearray(good)
            flipped[position] ^= 1 << (position % 8)
            path.write_bytes(flipped)
            try:
                open_checkpoint(str(path))
            except ValueError:
                refused += 1
        assert refused > 100

    @pytest.mark.parametrize(
        "name", ["output_norm.weight", "blk.1.attn_k.weight", "blk.2.attn_q_norm.weight"]
    )
    def test_a_missing_tensor_is_named(self, name, tiny_models, tmp_path):
        path = tmp_path / "m.gguf"
        write_gguf(path, tiny_models.load("qwen3"), "qwen3", edit=lambda t: t.pop(name))
        refuse(path, r"lacks model\.")

    def test_a_leftover_tensor_is_named(self, tiny_models, tmp_path):
        path, extra = tmp_path / "m.gguf", {"blk.0.ffn_gate_exps.weight": np.zeros(32, np.float32)}
        write_gguf(path, tiny_models.load("qwen3"), "qwen3", edit=lambda t: t.update(extra))
        refuse(path, r"has blk\.0\.ffn_gate_exps\.weight, which the model does not have")

    @pytest.mark.parametrize("shape", [(64,), (8, 32), (7, 32, 64), (9, 32, 64), (8, 32, 32)])
    def test_misshapen_experts_are_named(self, shape, tiny_models, tmp_path):
        """The file has eight experts of [32, 64]."""
        path, wrong = tmp_path / "m.gguf", {"blk.1.ffn_up_exps.weight": np.zeros(shape, np.float32)}
        model = tiny_models.load("qwen3-moe-all")
        write_gguf(path, model, "qwen3moe", edit=lambda t: t.update(wrong))
        refuse(path, r"ffn_up_exps|layers\.1\.mlp\.experts\.\d\.up_proj\.weight")

    def test_missing_experts_are_named(self, tiny_models, tmp_path):
        path, name = tmp_path / "m.gguf", "blk.1.ffn_up_exps.bias"
        write_gguf(path, tiny_models.load("gpt-oss"), "gpt-oss", edit=lambda t: t.pop(name))
        refuse(path, r"lacks model\.layers\.1\.mlp\.experts\.0\.up_proj\.bias")

    def test_shared_experts_are_named(self, tiny_models, tmp_path):
        path, extra = tmp_path / "m.gguf", {"blk.0.ffn_up_shexp.weight": np.zeros(32, np.float32)}
        model = tiny_models.load("granitemoe")
        write_gguf(path, model, "granitemoe", edit=lambda t: t.update(extra))
        refuse(path, r"has blk\.0\.ffn_up_shexp\.weight, which the model does not have")

    def test_a_misshapen_tensor_is_named(self, tiny_models, tmp_path):
        path, wrong = tmp_path / "m.gguf", {"output_norm.weight": np.zeros(32, np.float32)}
        write_gguf(path, tiny_models.load("qwen3"), "qwen3", edit=lambda t: t.update(wrong))
        refuse(path, r"model\.norm\.weight: the model needs shape \[64\]")

    def test_an_integer_tensor_is_named(self, tiny_models, tmp_path):
        """Guards codes of a type that nobody dequantises, taken for weights."""
        path, wrong = tmp_path / "m.gguf", {"output_norm.weight": np.ones(64, np.int32)}
        write_gguf(path, tiny_models.load("qwen3"), "qwen3", edit=lambda t: t.update(wrong))
        refuse(path, r"output_norm\.weight")


class TestRefusals:
    def test_an_unknown_architecture_is_refused_with_those_served(self, tmp_path):
        path = tmp_path / "m.gguf"
        writer = gguf.GGUFWriter(path, "mamba")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        refuse(path, "'mamba' is not supported; supported are llama, qwen2, qwen3")

    @pytest.mark.parametrize(
        "name", ["context_length", "block_count", "attention.head_count", "embedding_length"]
    )
    def test_a_missing_field_is_named(self, name, tiny_models, tmp_path):
        path = write_gguf(tmp_path / "m.gguf", tiny_models.load("qwen3"), "qwen3", drop=(name,))
        refuse(path, rf"m\.gguf.* lacks the field qwen3\.{name}")

    @pytest.mark.parametrize(
        ("name", "field"),
        [
            ("qwen3-moe-all", "expert_count"),
            ("olmoe", "expert_used_count"),
            ("mixtral", "expert_used_count"),
            ("qwen3-moe-all", "expert_feed_forward_length"),
            ("gpt-oss", "attention.sliding_window"),
            ("gemma2", "attention.sliding_window"),
            pytest.param(
                "phi3-longrope", "rope.scaling.original_context_length", marks=needs_longrope
            ),
            ("llama-yarn", "rope.scaling.original_context_length"),
        ],
    )
    def test_a_field_that_a_family_needs_is_named(self, name, field, tiny_models, tmp_path):
        arch = {**MODELS, "gemma2": "gemma2"}[name]
        path = write_gguf(tmp_path / "m.gguf", tiny_models.load(name), arch, drop=(field,))
        refuse(path, rf"m\.gguf.* lacks the field {arch}\.{field}")

    @pytest.mark.parametrize("name", ["yarn_attn_factor", "yarn_log_multiplier"])
    def test_other_factors_of_yarn_are_refused_by_name(self, name, tiny_models, tmp_path):
        path = write_gguf(
            tmp_path / "m.gguf",
            tiny_models.load("llama-yarn"),
            "llama",
            fields=lambda writer: writer.add_float32(f"llama.rope.scaling.{name}", 0.5),
        )
        refuse(path, rf"llama\.rope\.scaling\.{name} is not supported")

    @needs_longrope
    def test_a_missing_tensor_of_longrope_is_named(self, tiny_models, tmp_path):
        path, name = tmp_path / "m.gguf", "rope_factors_long.weight"
        write_gguf(path, tiny_models.load("phi3-longrope"), "phi3", edit=lambda t: t.pop(name))
        refuse(path, r"lacks the tensor rope_factors_long\.weight")

    def test_olmo_3_is_refused_by_name(self, tiny_models, tmp_path):
        """Guards windows that OLMo 2's layers ignore."""
        path = write_gguf(
            tmp_path / "m.gguf",
            tiny_models.load("olmo2"),
            "olmo2",
            fields=lambda writer: writer.add_sliding_window(40),
        )
        refuse(path, r"m\.gguf is not supported: OLMo 3")

    def test_a_part_of_a_split_file_says_how_to_merge(self, tiny_models, tmp_path):
        path = write_gguf(
            tmp_path / "m.gguf",
            tiny_models.load("qwen3"),
            "qwen3",
            fields=lambda writer: writer.add_uint16("split.count", 3),
        )
        refuse(path, "1 of 3 parts: merge them with llama-gguf-split --merge")

    def test_clipped_projections_are_refused(self, tiny_models, tmp_path):
        path = write_gguf(
            tmp_path / "m.gguf",
            tiny_models.load("olmoe"),
            "olmoe",
            fields=lambda writer: writer.add_clamp_kqv(8.0),
        )
        refuse(path, "clip_qkv is not supported")

    @pytest.mark.parametrize("name", ["attention.head_count", "attention.key_length"])
    def test_heads_of_no_size_are_refused(self, name, tiny_models, tmp_path):
        """Guards a division by zero."""
        path = write_gguf(
            tmp_path / "m.gguf",
            tiny_models.load("qwen3"),
            "qwen3",
            drop=(name,),
            fields=lambda writer: writer.add_uint32(f"qwen3.{name}", 0),
        )
        refuse(path, "must be a positive int.*got 0")

    def test_a_file_without_any_vocabulary_is_refused(self, tiny_models, tmp_path):
        drop = ("vocab_size",)
        path = write_gguf(tmp_path / "m.gguf", tiny_models.load("qwen3"), "qwen3", drop=drop)
        refuse(path, "lacks the field")

    def test_an_unknown_rope_kind_is_refused_by_name(self, tiny_models, tmp_path):
        path = write_gguf(
            tmp_path / "m.gguf",
            tiny_models.load("qwen3"),
            "qwen3",
            fields=lambda writer: writer.add_string("qwen3.rope.scaling.type", "other"),
        )
        refuse(path, "rope type 'other' is not supported")

    def test_a_rope_factor_without_a_kind_is_linear(self, tiny_models, tmp_path):
        path = write_gguf(
            tmp_path / "m.gguf",
            tiny_models.load("qwen3"),
            "qwen3",
            fields=lambda writer: writer.add_float32("qwen3.rope.scaling.factor", 8.0),
        )
        rope = open_checkpoint(str(path)).config.layers[0].attention.rope
        assert rope is not None and rope.inv_freq[0] == 1 / 8

    def test_a_partial_rotation_is_refused(self, tiny_models, tmp_path):
        path = write_gguf(
            tmp_path / "m.gguf",
            tiny_models.load("qwen3"),
            "qwen3",
            drop=("rope.dimension_count",),
            fields=lambda writer: writer.add_rope_dimension_count(8),
        )
        refuse(path, "partial rotary")

    def test_a_sliding_window_is_read(self, tiny_models, tmp_path):
        path = write_gguf(
            tmp_path / "m.gguf",
            tiny_models.load("llama"),
            "llama",
            fields=lambda writer: writer.add_sliding_window(128),
        )
        layers = open_checkpoint(str(path)).config.layers
        assert {layer.attention.window for layer in layers} == {128}
