"""Safetensors checkpoints: what loads, and what is refused by name."""

import json
import logging
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoints import checkpoint
from nanovllm.checkpoints.checkpoint import load_tokenizer, open_checkpoint
from nanovllm.models.registry import FAMILIES
from tests.tiny_models import VOCAB_SIZE, TinyModels
from tests.tiny_tokenizer import save_tokenizer

SMALL: dict[str, Any] = {"num_kvcache_blocks": 16, "kvcache_block_size": 16, "max_num_seqs": 4}
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PROMPTS = [[1, 2, 3], [400, 7], [9, 8, 7, 6, 5]]
FREE = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def copy(tiny_models: TinyModels, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of one of the tiny checkpoints, to be spoiled."""

    def copy(name: str = "qwen3") -> Path:
        return Path(shutil.copytree(tiny_models.path(name), tmp_path / name))

    return copy


def edit_json(path: Path, **changes: Any) -> None:
    """Sets keys of a JSON file; None drops one."""
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: v for key, v in values.items() if v is not None}))


def edit_tensors(folder: Path, edit: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS)


def mistral_file(name: str) -> Path:
    """A tokenizer of Mistral."""
    import mistral_common  # here, because smoke tests run without it

    return Path(mistral_common.__file__).parent / "data" / name


def plain(param: torch.Tensor) -> torch.Tensor:
    """A parameter's numbers, out of the layout that the device multiplies fastest."""
    return param.to_dense() if param.is_mkldnn else param


def tokens(folder: Path, params: SamplingParams = FREE, **settings: Any) -> list[list[int]]:
    with LLM(folder, **{**SMALL, **settings}) as llm:
        return [out["token_ids"] for out in llm.generate(PROMPTS, params, use_tqdm=False)]


def refuse(folder: Path, match: str, **settings: Any) -> None:
    with pytest.raises(ValueError, match=match):
        LLM(folder, **{**SMALL, **settings})


class TestLayout:
    def test_shards_and_a_single_file_load_equal(self, tiny_models, tmp_path):
        tiny_models.load("qwen3").save_pretrained(tmp_path, max_shard_size="60KB")
        assert (tmp_path / INDEX).exists() and len(list(tmp_path.glob("*.safetensors"))) > 3
        whole = dict(open_checkpoint(str(tiny_models.path("qwen3"))).tensors())
        shards = dict(open_checkpoint(str(tmp_path)).tensors())
        assert whole.keys() == shards.keys()
        assert all(torch.equal(whole[name], shards[name]) for name in whole)
        assert tokens(tmp_path) == tokens(tiny_models.path("qwen3"))

    def test_the_index_of_former_shards_does_not_count(self, tiny_models, tmp_path):
        model = tiny_models.load("qwen3")
        model.save_pretrained(tmp_path, max_shard_size="60KB")
        model.save_pretrained(tmp_path)
        assert (tmp_path / INDEX).exists() and len(list(tmp_path.glob("*.safetensors"))) == 1
        assert tokens(tmp_path) == tokens(tiny_models.path("qwen3"))

    def test_the_index_says_which_files_count(self, copy):
        """Guards other formats' copies of the weights beside the sharded ones, as Mistral's
        consolidated.safetensors."""
        folder = copy()
        names = list(load_file(folder / WEIGHTS))
        (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, WEIGHTS)}))
        save_file({"layers.0.wq": torch.zeros(2)}, folder / "consolidated.safetensors")
        LLM(folder, **SMALL)

    def test_model_safetensors_goes_before_other_files(self, copy):
        """The same for a checkpoint of one file, which needs no index."""
        folder = copy()
        save_file({"layers.0.wq": torch.zeros(2)}, folder / "consolidated.safetensors")
        LLM(folder, **SMALL)

    def test_shards_without_an_index_load(self, copy, tiny_models):
        folder = copy()
        tensors = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        for i, part in enumerate((list(tensors)[::2], list(tensors)[1::2])):
            shard = {name: tensors[name] for name in part}
            save_file(shard, folder / f"model-{i + 1:05}-of-00002.safetensors")
        assert tokens(folder) == tokens(tiny_models.path("qwen3"))

    def test_a_missing_shard_is_named(self, tiny_models, tmp_path):
        tiny_models.load("qwen3").save_pretrained(tmp_path, max_shard_size="60KB")
        shard = sorted(tmp_path.glob("*.safetensors"))[1]
        shard.unlink()
        refuse(tmp_path, f"{shard.name}', which is not in")

    @pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": [1, 2]}', '{"weight_map": null}'])
    def test_a_malformed_index_is_refused_by_file(self, copy, text):
        folder = copy()
        (folder / INDEX).write_text(text)
        refuse(folder, re.escape(str(folder / INDEX)))

    def test_a_directory_without_weights_is_refused(self, copy):
        """Guards nano-vLLM, which loads nothing from an empty folder without a word."""
        folder = copy()
        (folder / WEIGHTS).unlink()
        refuse(folder, r"has no \.safetensors weights.*dummy")

    def test_other_layouts_of_the_same_weights_are_not_downloaded(self, copy, monkeypatch):
        folder = copy()
        files = [file.name for file in folder.iterdir()]
        others = ["consolidated.safetensors", "original/model.safetensors", "onnx/model.onnx"]

        def download(model, revision, allow_patterns, ignore_patterns):
            assert revision is None
            given = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
            assert {*filter_repo_objects([*files, *others], **given)} == {*files}
            return str(folder)

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        assert tokens("somebody/model") == tokens(folder)

    @pytest.mark.parametrize("has_json", [False, True])
    def test_tokenizers_of_mistral_are_read_from_tekken_json(self, has_json, copy):
        """Also where the library mistral-common is installed, which is needed if that is the only
        file. With a tokenizer.json, the library would make transformers ignore that file."""
        folder = copy("mistral")
        tekken = json.loads(mistral_file("tekken_240911.json").read_text())
        tekken["vocab"] = tekken["vocab"][:300]
        sizes = {"default_vocab_size": 400, "default_num_special_tokens": 100}
        tekken["config"] |= {"num_vocab_tokens": 300, **sizes}
        expected = [1, 204, 205, 132, 3]
        if has_json:
            save_tokenizer(folder)
            expected = load_tokenizer(str(folder)).encode("hi [INST]")
        (folder / "tekken.json").write_text(json.dumps(tekken))
        with LLM(folder, **SMALL) as llm:
            tokenizer = llm.tokenizer
            assert tokenizer.encode("hi [INST]") == expected
            assert has_json or tokenizer.decode(expected) == "<s>hi [INST]"
            (output,) = llm.generate(["hi"], FREE, use_tqdm=False)
            assert output["text"] == tokenizer.decode(output["token_ids"], True)

    def test_a_path_is_a_string_or_a_pathlike(self, tiny_models):
        path = tiny_models.path("qwen3")
        assert open_checkpoint(str(path)).config == open_checkpoint(f"{path}/").config
        assert tokens(path) == tokens(str(path))


class TestDamage:
    @pytest.mark.parametrize(
        "damage",
        [
            lambda data: b"",
            lambda data: data[:5],
            lambda data: data[:100],
            lambda data: data[:-100],
            lambda data: data[: len(data) // 2],
            lambda data: data + b"more",
            lambda data: bytes(range(256)) * 100,
        ],
        ids=["empty", "5-bytes", "in-header", "tail", "half", "longer", "garbage"],
    )
    def test_a_damaged_weight_file_is_named(self, copy, damage):
        path = copy() / WEIGHTS
        path.write_bytes(damage(path.read_bytes()))
        refuse(path.parent, rf"{path} cannot be read|weights do not fit in \d+ bytes")

    def test_a_directory_without_config_is_refused(self, tmp_path):
        refuse(tmp_path, f"{tmp_path} has no config.json")

    @pytest.mark.parametrize("text", ["{", "[1]", "", '"text"', b"\xff\xfe\x00"])
    @pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
    def test_invalid_json_is_refused_by_file(self, copy, name, text):
        path = copy() / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        refuse(path.parent, f"{path}")

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
    def test_a_damaged_tokenizer_is_refused_by_file(self, copy, name):
        folder = copy()
        (folder / name).write_text("{")
        refuse(folder, str(folder))

    def test_a_tokenizer_of_sentencepiece_names_the_package(self, copy, monkeypatch):
        folder = copy()
        shutil.copy(mistral_file("tokenizer.model.v1"), folder / "tokenizer.model")
        monkeypatch.setattr(checkpoint, "find_spec", lambda name: None)
        monkeypatch.setitem(sys.modules, "sentencepiece", None)
        refuse(folder, r"token ids\), or install sentencepiece for its tokenizer\.model: ")

    @pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], ["T5Model"], None, []])
    def test_an_unknown_architecture_is_refused_with_those_served(self, copy, architectures):
        """Guards nano-vLLM, which loads any architecture as Qwen3."""
        folder = copy()
        edit_json(folder / "config.json", architectures=architectures, model_type="gpt2")
        name = architectures[0] if architectures else "gpt2"
        served = ".*".join(family.architecture for family in FAMILIES)
        refuse(folder, f"'{name}' is not supported.*{served}")

    @pytest.mark.parametrize("architectures", [None, []])
    def test_without_an_architecture_the_model_type_counts(self, copy, architectures):
        folder = copy()
        expected = open_checkpoint(str(folder)).config
        edit_json(folder / "config.json", architectures=architectures)
        assert open_checkpoint(str(folder)).config == expected
        edit_json(folder / "config.json", model_type=None)
        refuse(folder, "has no architectures, and no model_type")

    def test_an_invalid_field_is_refused_by_file(self, copy):
        folder = copy()
        edit_json(folder / "config.json", num_attention_heads="four")
        refuse(folder, r"config\.json.*num_attention_heads")

    def test_a_file_that_is_no_gguf_is_refused(self, copy):
        refuse(copy() / WEIGHTS, "give the checkpoint's directory")

    @pytest.mark.parametrize(
        "model", ["/no/such/folder", "no/such-model", "./missing", "a/b/c", "~/no/such/folder"]
    )
    def test_a_missing_model_is_refused_at_once(self, model, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        start = time.monotonic()
        with pytest.raises(ValueError, match=rf"'{model}' is neither a local directory"):
            LLM(model)
        assert time.monotonic() - start < 5


class TestTensors:
    """Guards parameters that keep uninitialised memory, and tensors that nobody reads."""

    @pytest.mark.parametrize(
        "name",
        [
            "lm_head.weight",
            "model.norm.weight",
            "model.embed_tokens.weight",
            "model.layers.1.self_attn.k_proj.weight",
            "model.layers.2.mlp.up_proj.weight",
            "model.layers.0.self_attn.q_norm.weight",
        ],
    )
    def test_a_missing_tensor_is_named(self, copy, name):
        folder = copy()
        edit_tensors(folder, lambda tensors: tensors.pop(name))
        refuse(folder, f"lacks {name}")

    @pytest.mark.parametrize(
        "name",
        [
            "model.layers.3.mlp.up_proj.weight",
            "model.layers.0.self_attn.q_proj.bias",
            "visual.weight",
        ],
    )
    def test_a_leftover_tensor_is_named(self, copy, name):
        folder = copy()
        edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(64)}))
        refuse(folder, f"has {name}, which the model does not have")

    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            ("lm_head.weight", (VOCAB_SIZE + 8, 64)),
            ("model.norm.weight", (1,)),
            ("model.layers.1.self_attn.k_proj.weight", (64, 64)),
            ("model.layers.1.mlp.down_proj.weight", (128, 64)),
        ],
    )
    def test_a_misshapen_tensor_is_named(self, copy, name, shape):
        folder = copy()
        edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(shape)}))
        refuse(folder, f"{name}: the model needs shape")

    def test_an_integer_tensor_is_named(self, copy):
        folder, name = copy(), "model.layers.1.mlp.down_proj.weight"
        edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name].char()}))
        refuse(folder, rf"{name}: dtype torch\.int8 is not supported")

    def test_a_tensor_in_two_files_is_named(self, copy):
        folder, name = copy(), "model.norm.weight"
        save_file({name: torch.ones(64)}, folder / "model-extra.safetensors")
        weight_map = dict.fromkeys(load_file(folder / WEIGHTS), WEIGHTS)
        weight_map["extra"] = "model-extra.safetensors"
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        refuse(folder, f"{name} occurs twice")

    def test_a_tied_checkpoint_with_a_redundant_head_loads(self, copy, tiny_models):
        folder = copy("qwen3-tied")
        assert "lm_head.weight" not in load_file(folder / WEIGHTS)
        edit_tensors(
            folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
        )
        assert tokens(folder) == tokens(tiny_models.path("qwen3-tied"))

    @pytest.mark.parametrize("copies_embedding", [True, False])
    def test_a_tied_config_with_another_head_uses_the_head(self, copies_embedding, copy, caplog):
        """As transformers does, and unlike vLLM, which ties them nevertheless."""
        folder = copy("qwen3-tied")
        head = load_file(folder / WEIGHTS)["model.embed_tokens.weight"].clone()
        if not copies_embedding:
            head[:9] = head[:9].flip(0)
        edit_tensors(folder, lambda t: t.update({"lm_head.weight": head}))
        found = tokens(folder)
        assert ("another lm_head.weight" in caplog.text) != copies_embedding
        edit_json(folder / "config.json", tie_word_embeddings=False)
        assert found == tokens(folder)

    def test_an_untied_config_without_a_head_is_refused(self, copy):
        """Guards a head of uninitialised memory."""
        folder = copy("qwen3-tied")
        edit_json(folder / "config.json", tie_word_embeddings=False)
        refuse(folder, r"lacks lm_head\.weight")

    def test_old_rotary_buffers_are_passed_over(self, copy, tiny_models):
        folder, name = copy("llama"), "model.layers.0.self_attn.rotary_emb.inv_freq"
        edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(8)}))
        assert tokens(folder) == tokens(tiny_models.path("llama"))

    @pytest.mark.parametrize(
        ("names", "line"),
        [
            (
                [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(3)],
                "skipped 3 tensors: *.rotary_emb.inv_freq",
            ),
            (["model.rotary_emb.inv_freq"], "skipped 1 tensors: *.rotary_emb.inv_freq"),
            (
                ["mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight", "mtp.norm.weight"],
                "skipped 3 tensors: mtp.*",
            ),
            (["model.mtp_layers.0.input_proj.weight"], "skipped 1 tensors: *.mtp_layers.*"),
            (
                ["mtp.norm.weight", "model.rotary_emb.inv_freq"],
                "skipped 2 tensors: *.rotary_emb.inv_freq, mtp.*",
            ),
        ],
        ids=lambda value: value[0] if isinstance(value, list) else "",
    )
    def test_what_is_not_needed_is_skipped_and_logged(self, names, line, copy, tiny_models, caplog):
        """RoPE's frequencies, and heads for multi-token prediction."""
        folder = copy("qwen3")
        edit_tensors(folder, lambda tensors: tensors.update({n: torch.ones(8) for n in names}))
        with caplog.at_level(logging.INFO, "nanovllm"):
            assert tokens(folder) == tokens(tiny_models.path("qwen3"))
        lines = [record.message for record in caplog.records if "skipped" in record.message]
        assert [set(found.replace(",", "").split()) for found in lines] == [
            set(line.replace(",", "").split())
        ]


class TestConfig:
    def test_both_releases_spellings_give_equal_tokens(self, copy, tiny_models):
        """Release 4's rope_theta, rope_scaling with "type", and torch_dtype."""
        folder = copy("llama-linear")
        edit_json(
            folder / "config.json",
            rope_parameters=None,
            rope_theta=10000.0,
            rope_scaling={"type": "linear", "factor": 4.0},
            dtype=None,
            torch_dtype="float32",
        )
        original = tiny_models.path("llama-linear")
        assert open_checkpoint(str(folder)).config == open_checkpoint(str(original)).config
        assert tokens(folder) == tokens(original)

    def test_a_sliding_window_does_not_limit_the_length(self, copy):
        folder = copy("mistral")
        edit_json(folder / "config.json", sliding_window=128)
        with LLM(folder, **SMALL) as llm:
            assert llm.scheduler.max_len > 128
            windows = {layer.attention.window for layer in llm.model_runner.model_config.layers}
            assert windows == {128}

    def test_a_window_that_is_not_used_is_ignored(self, copy):
        folder = copy("qwen2")
        edit_json(folder / "config.json", sliding_window=128, use_sliding_window=False)
        with LLM(folder, **SMALL, max_model_len=2048) as llm:
            assert llm.model_runner.max_model_len == 2048

    def test_a_quantized_checkpoint_is_refused(self, copy):
        folder = copy()
        quantization = {"quant_method": "gptq", "bits": 4}
        edit_json(folder / "config.json", quantization_config=quantization)
        refuse(folder, "'gptq' quantisation is not supported")

    def test_an_unknown_activation_is_refused(self, copy):
        folder = copy()
        edit_json(folder / "config.json", hidden_act="gelu")
        refuse(folder, "hidden_act 'gelu' is not supported")

    def test_every_end_of_sequence_id_stops(self, copy, tiny_models):
        """Guards a list of EOS ids in generation_config.json that is ignored: the ids of the
        list, and the config's own, each end a sequence, with reason "stop"."""
        free = tokens(tiny_models.path("qwen3"))
        # One id from each prompt's free run, of its middle.
        ends = [free_run[5 + 4 * i] for i, free_run in enumerate(free)]
        assert len(set(ends)) == 3
        folder = copy()
        edit_json(folder / "config.json", eos_token_id=ends[0])
        edit_json(folder / "generation_config.json", eos_token_id=ends[1:])
        assert open_checkpoint(str(folder)).eos_token_ids == set(ends)
        expected = []
        for free_run in free:
            first = next(i for i, token in enumerate(free_run) if token in ends)
            expected.append(free_run[: first + 1])
        assert {run[-1] for run in expected} == set(ends)
        with LLM(folder, **SMALL) as llm:
            params = SamplingParams(temperature=0, max_tokens=24)
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            assert [out["token_ids"] for out in outputs] == expected
            assert [out.outputs[0].finish_reason for out in outputs] == ["stop"] * 3
            outputs = llm.generate(PROMPTS, FREE, use_tqdm=False)
            assert [out["token_ids"] for out in outputs] == free
            assert [out.outputs[0].finish_reason for out in outputs] == ["length"] * 3

    def test_a_checkpoint_without_a_generation_config_loads(self, copy):
        folder = copy()
        (folder / "generation_config.json").unlink()
        checkpoint = open_checkpoint(str(folder))
        assert checkpoint.eos_token_ids == {2}
        assert checkpoint.recommended_sampling == {}

    @pytest.mark.parametrize(
        ("advice", "expected"),
        [
            ({}, {}),
            ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
            ({"top_k": 20, "min_p": 0.05}, {"top_k": 20, "min_p": 0.05}),
            ({"repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
            ({"presence_penalty": 1.5, "frequency_penalty": 0.5},) * 2,
            ({"max_new_tokens": 100}, {"max_tokens": 100}),
            ({"temperature": 0}, {"temperature": 0}),
            ({"max_length": 4096, "do_sample": False, "num_beams": 4, "typical_p": 0.5}, {}),
        ],
        ids=str,
    )
    def test_sampling_advice_is_read_and_the_rest_ignored(self, copy, advice, expected):
        folder = copy()
        edit_json(folder / "generation_config.json", **advice)
        assert open_checkpoint(str(folder)).recommended_sampling == expected

    def test_sampling_advice_may_be_null(self, copy):
        folder = copy()
        file = folder / "generation_config.json"
        file.write_text(json.dumps({"temperature": None, "top_k": None, "max_new_tokens": None}))
        assert open_checkpoint(str(folder)).recommended_sampling == {}

    @pytest.mark.parametrize(
        ("advice", "name"),
        [
            ({"temperature": -1.0}, "temperature"),
            ({"top_p": "0.9"}, "top_p"),
            ({"top_k": 5.5}, "top_k"),
            ({"max_new_tokens": 0}, "max_tokens"),
        ],
        ids=str,
    )
    def test_impossible_sampling_advice_is_refused_where_it_is_followed(self, copy, advice, name):
        folder = copy()
        edit_json(folder / "generation_config.json", **advice)
        with LLM(folder, **SMALL) as llm:
            for follow in (llm.get_default_sampling_params, lambda: llm.generate([[1]])):
                with pytest.raises((ValueError, TypeError), match=rf"config\.json: {name} must be"):
                    follow()
            assert llm.generate([[1]], SamplingParams(max_tokens=1), use_tqdm=False)

    @pytest.mark.parametrize("eos", ["x", [2, "x"], 2.5, True], ids=str)
    def test_an_eos_that_is_no_token_id_is_refused(self, copy, eos):
        folder = copy()
        edit_json(folder / "generation_config.json", eos_token_id=eos)
        refuse(folder, "eos_token_id must be a token id")

    def test_an_eos_outside_the_vocabulary_is_no_eos(self, copy):
        """Guards logits of another row, or of none, changed for min_tokens."""
        folder = copy()
        edit_json(folder / "generation_config.json", eos_token_id=[2, 10**6])
        params = [
            SamplingParams(temperature=0, max_tokens=3, min_tokens=2),
            SamplingParams(temperature=0, max_tokens=3, allowed_token_ids=[88], ignore_eos=True),
        ]
        with LLM(folder, **SMALL) as llm:
            outputs = llm.generate([[5], [6], [7]], [*params, params[0]], use_tqdm=False)
        assert outputs[1]["token_ids"] == [88] * 3


class TestWeights:
    def logits(self, folder: Path, **settings: Any) -> torch.Tensor:
        """Of the first step over PROMPTS."""
        seen = []
        with LLM(folder, **{**SMALL, **settings}) as llm:
            sampler = llm.model_runner.sampler
            sampler.register_forward_pre_hook(lambda _, args: seen.append(args[0].float()))
            llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        return seen[0]

    def test_dummy_weights_need_only_a_config(self, copy, tmp_path):
        (tmp_path / "only").mkdir()
        shutil.copy(copy() / "config.json", tmp_path / "only")
        logits = self.logits(tmp_path / "only", load_format="dummy")
        assert logits.shape == (len(PROMPTS), VOCAB_SIZE)
        assert logits.isfinite().all() and logits.std() > 0

    def test_dummy_weights_follow_the_seed(self, tiny_models):
        path = tiny_models.path("llama-bias")
        first, again, other, real = (
            self.logits(path, **settings)
            for settings in (
                {"load_format": "dummy", "seed": 3},
                {"load_format": "dummy", "seed": 3},
                {"load_format": "dummy", "seed": 4},
                {},
            )
        )
        assert torch.equal(first, again)
        assert not torch.allclose(first, other)
        assert not torch.allclose(first, real)

    def test_dummy_matrices_differ_from_each_other(self, tiny_models):
        """Guards one generator seed for all: layers of equal weights are no model at all."""
        with LLM(tiny_models.path("qwen3"), **SMALL, load_format="dummy") as llm:
            matrices = [p for p in llm.model_runner.model.parameters() if p.dim() > 1]
            starts = {tuple(plain(matrix).flatten()[:8].tolist()) for matrix in matrices}
            assert len(starts) == len(matrices)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_precision_runs_on_a_cpu(self, tiny_models, dtype):
        path = tiny_models.path("qwen3")
        exact = self.logits(path, device="cpu")
        half = self.logits(path, device="cpu", dtype=dtype)
        assert half.isfinite().all()
        assert not torch.equal(half, exact)
        # Three layers of weights drawn with deviation 0.3 amplify rounding, but not beyond this.
        eps = torch.finfo(getattr(torch, dtype)).eps
        assert (half - exact).norm() / exact.norm() < 20 * eps

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_parameters_and_cache_take_the_dtype(self, tiny_models, dtype):
        with LLM(tiny_models.path("qwen3"), **SMALL, dtype=dtype) as llm:
            runner = llm.model_runner
            dtypes = {param.dtype for param in runner.model.parameters()} | {runner.kv_cache.dtype}
            assert dtypes == {getattr(torch, dtype)}
        assert torch.get_default_dtype() == torch.float32

    def test_auto_dtype_is_float32_on_a_cpu(self, copy):
        """The checkpoint's bf16 numbers, in fp32 arithmetic."""
        folder = copy()
        edit_json(folder / "config.json", dtype="bfloat16")
        edit_tensors(folder, lambda t: t.update({k: v.bfloat16() for k, v in t.items()}))
        with LLM(folder, **SMALL, device="cpu") as llm:
            assert llm.model_runner.dtype == torch.float32
            weight = plain(llm.model_runner.model.lm_head.weight)
            assert torch.equal(weight, load_file(folder / WEIGHTS)["lm_head.weight"].float())
