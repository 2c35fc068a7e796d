"""vLLM's arguments, by the recorded table: what is honoured, what is a hint, what is refused."""

import inspect
import json
import logging
import shutil
from dataclasses import fields

import numpy as np
import pytest
import torch
from huggingface_hub import get_token

from nanovllm import LLM, SamplingParams, vllm_arguments
from nanovllm.compat.engine_args import EngineArgs
from nanovllm.config import Config
from nanovllm.vllm_arguments import load_table, translate

CALLS = ("LLM", "generate", "chat")
ENTRIES = [(call, name, entry) for call in CALLS for name, entry in load_table()[call].items()]
GREEDY = SamplingParams(temperature=0, max_tokens=4)


def of_class(kind):
    return [(call, name, entry) for call, name, entry in ENTRIES if entry["class"] == kind]


class TestTheTable:
    def test_generate_and_chat_have_vllms_parameters_in_vllms_order(self):
        for call in ("generate", "chat"):
            vllms = [name for name, e in load_table()[call].items() if "former" not in e]
            ours = list(inspect.signature(getattr(LLM, call)).parameters)[1:]
            positional = vllms[:3] if call == "generate" else vllms  # the others are keywords there
            assert ours[: len(positional)] == positional


class TestTranslate:
    def test_every_argument_is_accepted_at_its_default_and_at_none(self):
        for call, name, entry in ENTRIES:
            translate(call, {name: entry["default"]})
            assert translate(call, {name: None}) == {}

    def test_every_neutral_value_is_accepted_and_any_other_refused_by_name(self):
        for call, name, entry in of_class("neutral"):
            for value in entry["neutral"]:
                assert translate(call, {name: value}) == {}
            with pytest.raises(ValueError, match=f"vLLM's `{name}` is not supported here: "):
                translate(call, {name: "something else"})

    def test_every_hint_is_accepted_at_any_value(self):
        for call, name, _ in of_class("hint"):
            assert translate(call, {name: object()}) == {}

    def test_a_hint_is_logged_once_and_not_at_its_default(self, caplog):
        vllm_arguments._log_hint.cache_clear()
        caplog.set_level(logging.INFO, logger="nanovllm")
        translate("LLM", {"swap_space": load_table()["LLM"]["swap_space"]["default"]})
        assert not caplog.records
        for size in (8, 16):
            translate("LLM", {"swap_space": size, "trust_remote_code": True})
        assert [record.getMessage() for record in caplog.records] == [
            "vLLM's `swap_space` has no effect here",
            "vLLM's `trust_remote_code` has no effect here",
        ]

    def test_honoured_arguments_get_our_names_and_values(self):
        given = {"block_size": 32, "load_format": "safetensors", "dtype": torch.float16, "seed": 1}
        assert translate("LLM", given) == {
            "kvcache_block_size": 32,
            "load_format": "auto",
            "dtype": torch.float16,
            "seed": 1,
        }

    def test_names_that_vllm_does_not_have_are_passed_on(self):
        assert translate("LLM", {"kvcache_block_size": 8, "nonsense": 1}) == {
            "kvcache_block_size": 8,
            "nonsense": 1,
        }

    def test_one_argument_under_two_names_is_refused(self):
        with pytest.raises(TypeError, match="block_size and kvcache_block_size are the same"):
            translate("LLM", {"block_size": 8, "kvcache_block_size": 8})

    @pytest.mark.parametrize("value", [[], [None, None], (None,)], ids=str)
    def test_a_list_of_nothing_asks_for_nothing(self, value):
        assert translate("generate", {"lora_request": value}) == {}

    def test_numpy_values_equal_pythons(self):
        assert translate("LLM", {"pipeline_parallel_size": np.int64(1)}) == {}


class TestLLM:
    def test_a_call_as_people_write_it(self, model_path):
        """vLLM's names were refused: of 31 calls found in public repositories about 3 started."""
        with LLM(
            model=str(model_path),
            tokenizer=str(model_path),
            tokenizer_mode="auto",
            trust_remote_code=True,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            dtype=torch.float32,
            max_model_len=np.int64(128),
            max_num_seqs=None,
            block_size=16,
            swap_space=4,
            download_dir="/nowhere",
            disable_log_stats=True,
            enable_chunked_prefill=True,
            quantization=None,
            seed=np.int32(3),
        ) as llm:
            assert llm.config.block_size == 16
            assert llm.scheduler.max_len == 128
            (output,) = llm.generate("ab", GREEDY, use_tqdm=False, lora_request=None, priority=[0])
        assert len(output.outputs[0].token_ids) == 4

    def test_vllms_defaults_start(self, model_path):
        args = EngineArgs(model=str(model_path), max_model_len=64)
        for make in (LLM.from_engine_args, lambda args: LLM(**vars(args))):
            with make(args) as llm:
                assert llm.config.max_logprobs == 20
                assert llm.config.gpu_memory_utilization == 0.92

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("pipeline_parallel_size", 2),
            ("quantization_config", {"quant_method": "awq"}),
            ("speculative_config", {"method": "ngram"}),
            ("enable_lora", True),
        ],
    )
    def test_what_is_not_served_is_refused_by_name(self, name, value, model_path):
        with pytest.raises(ValueError, match=f"vLLM's `{name}` is not supported here"):
            LLM(model_path, **{name: value})

    def test_unknown_names_are_type_errors(self, model_path):
        with pytest.raises(TypeError, match="did you mean 'max_model_len'"):
            LLM(model_path, max_model_length=8)
        with pytest.raises(TypeError, match="unknown argument 'nonsense'; known"):
            LLM(model_path, nonsense=8)
        with pytest.raises(TypeError, match="'temperature': set it in SamplingParams"):
            LLM(model_path, temperature=0.5)

    def test_other_generation_configs_are_refused(self, model_path):
        with pytest.raises(ValueError, match="generation_config must be one of auto, vllm"):
            LLM(model_path, generation_config="folder")

    def test_a_token_for_the_hub_is_used(self, model_path, monkeypatch):
        monkeypatch.setenv("HF_TOKEN", "mine")
        seen = []
        monkeypatch.setattr(
            "huggingface_hub.snapshot_download",
            lambda *args, **kwargs: seen.append(get_token()) or str(model_path),
        )
        for token in ("yours", None):
            LLM("somebody/gated", hf_token=token, num_kvcache_blocks=8).close()
        assert seen == ["yours", "mine"] and get_token() == "mine"

    def test_a_revision_on_the_hub_is_downloaded(self, model_path, monkeypatch):
        """Of the model and of the tokenizer. A local path has none."""
        seen = []

        def download(name, revision, allow_patterns, **kwargs):
            seen.append((name, revision, "*.safetensors" in allow_patterns))
            return str(model_path)

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        settings = {"num_kvcache_blocks": 8, "device": "cpu"}
        model, tokenizer = ("a/model", "v1", True), ("a/model", "v2", False)
        for revisions, expected in (
            (("v1", None), [model]),
            (("v1", "v1"), [model]),
            (("v1", "v2"), [tokenizer, model]),
            ((None, "v2"), [tokenizer, ("a/model", None, True)]),
        ):
            names = dict(zip(("revision", "tokenizer_revision"), revisions, strict=True))
            with LLM("a/model", **names, **settings) as llm:
                assert llm.get_tokenizer() is not None
            assert seen == expected
            seen.clear()
        LLM(model_path, revision="v1", tokenizer_revision="v2", **settings).close()
        LLM("a/model", tokenizer="b/other", tokenizer_revision="v2", **settings).close()
        assert seen == [("b/other", "v2", False), ("a/model", None, True)]
        for names in ({"revision": "v1"}, {"revision": "v1", "tokenizer_revision": "v1"}):
            seen.clear()
            LLM("a/model", tokenizer="b/other", **names, **settings).close()
            assert seen == [("b/other", "v1", False), model]

    def test_generate_and_chat_refuse_by_name(self, llm):
        chat = [{"role": "user", "content": "hi"}]
        for call, prompt in ((llm.generate, "ab"), (llm.chat, chat)):
            with pytest.raises(
                ValueError, match="vLLM's `lora_request` is not supported here: LoRA"
            ):
                call(prompt, GREEDY, lora_request=object())
            with pytest.raises(
                ValueError, match="vLLM's `tokenization_kwargs` is not supported here"
            ):
                call(prompt, GREEDY, tokenization_kwargs={"truncate_prompt_tokens": 2})
            with pytest.raises(TypeError, match="nonsense"):
                call(prompt, GREEDY, nonsense=1)
        with pytest.raises(TypeError, match="'max_tokens': set it in SamplingParams"):
            llm.generate("hi", max_tokens=5)
        with pytest.raises(TypeError, match="'max_tokens': set it in SamplingParams"):
            llm.chat([{"role": "user", "content": "hi"}], max_tokens=5)
        with pytest.raises(TypeError, match="did you mean 'chat_template_kwargs'"):
            llm.chat([{"role": "user", "content": "hi"}], chat_template_kwarg={})
        with pytest.raises(ValueError, match="beside the prompts: pass them as prompts"):
            llm.generate("hi", prompt_token_ids=[[1]])
        with pytest.raises(TypeError, match="token ids, too: pass them as prompts"):
            llm.generate(prompt_token_ids=[[1]])
        with pytest.raises(TypeError, match="prompts must be"):
            llm.generate()
        with pytest.raises(TypeError, match="nonsense"):
            options = {"tokenization_kwargs": {"add_special_tokens": False}}
            llm.generate("hi", GREEDY, **options, nonsense=1)
        with pytest.raises(TypeError, match="add_special_tokens must be True or False"):
            llm.generate("hi", GREEDY, tokenization_kwargs={"add_special_tokens": "no"})

    def test_chat_takes_vllms_positional_order(self, llm):
        chat = [{"role": "user", "content": "hi"}]
        options = {"chat_template": "{{ messages[0].content }}", "add_generation_prompt": False}
        (expected,) = llm.chat(chat, GREEDY, False, **options)
        template = options["chat_template"]
        (output,) = llm.chat(chat, GREEDY, False, None, None, template, "string", False, False)
        assert output.prompt == expected.prompt == "hi"
        assert output["token_ids"] == expected["token_ids"]


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        ({"temprature": 0.1}, ValueError, "config: .* 'temprature'; did you mean 'temperature'"),
        ({"do_sample": False}, ValueError, "config: .* 'do_sample': temperature=0 is greedy"),
        ({"temperature": -1}, ValueError, "override_generation_config: temperature must be"),
        ("temperature=1", TypeError, "override_generation_config must be a dict"),
    ],
)
def test_overrides_of_the_generation_config_are_checked_at_once(
    overrides, error, message, model_path
):
    with pytest.raises(error, match=message):
        LLM(model_path, override_generation_config=overrides)


def test_quantization_may_name_the_checkpoints_own_format(model_path, tmp_path):
    with pytest.raises(ValueError, match="is not the checkpoint's, which is None: leave it out"):
        LLM(model_path, quantization="compressed-tensors")
    with pytest.raises(ValueError, match="quantization='awq' is not supported: use an unq"):
        LLM(model_path, quantization="awq")
    folder = shutil.copytree(model_path, tmp_path / "fp8")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": []}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    given = {"quantization": "fbgemm_fp8", "load_format": "dummy", "max_model_len": 64}
    with LLM(str(folder), **given) as llm:
        assert llm.config.quantization is None


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_a_kv_cache_in_the_models_dtype(name, model_path):
    with LLM(model_path, dtype=name, kv_cache_dtype=name, max_model_len=64) as llm:
        assert llm.model_runner.kv_cache.dtype is getattr(torch, name)
    with pytest.raises(ValueError, match=f"'{name}' is not supported .* runs in float32"):
        LLM(model_path, dtype="float32", kv_cache_dtype=name, max_model_len=64)


def test_priorities_are_one_integer_for_each_prompt(llm):
    chat = [{"role": "user", "content": "hi"}]
    for priority in ([1], "ab", [1, "a"], 3):
        with pytest.raises(ValueError, match="a list of 2 integers"):
            llm.generate(["x", "y"], GREEDY, priority=priority)
        with pytest.raises(ValueError, match="a list of 2 integers"):
            llm.chat([chat, chat], GREEDY, priority=priority)
    assert len(llm.generate(["x", "y"], GREEDY, priority=[1, 2])) == 2
    assert len(llm.chat(chat, GREEDY, priority=[1])) == 1


def test_missing_methods_say_what_to_do(llm):
    assert not hasattr(llm, "get_metrics") and not hasattr(llm, "nonsense")
    with pytest.raises(AttributeError, match=r"'get_metrics' is not supported\. Use metrics"):
        llm.get_metrics()
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'nonsense'"):
        llm.nonsense  # noqa: B018


def test_the_engines_chat_template_is_that_of_chat_and_of_render_chat(model_path):
    chat = [{"role": "user", "content": "hi"}]
    with LLM(model_path, max_model_len=64, chat_template="<{{ messages[0].content }}>") as llm:
        for options, prompt in (({}, "<hi>"), ({"chat_template": "hello"}, "hello")):
            (rendered,) = llm.render_chat(chat, **options)
            (output,) = llm.chat(chat, GREEDY, **options)
            assert rendered["prompt"] == output.prompt == prompt


@pytest.fixture(scope="module")
def llm(model_path):
    with LLM(model_path, max_model_len=64, device="cpu") as llm:
        yield llm


def test_llm_and_config_and_the_table_name_the_same_arguments():
    """LLM spells its arguments out, so that an editor shows them with types and defaults."""
    of_vllm = {"chat_template", "generation_config", "override_generation_config", "hf_token"}
    of_vllm |= {"revision", "tokenizer_revision"}
    # vLLM has nothing like the former, and an environment variable in place of the latter.
    of_us = {"enable_reordering", "batch_invariant"}
    config = {field.name: field.default for field in fields(Config)}
    del config["model"]
    signature = inspect.signature(LLM).parameters.values()
    assert all(p.annotation is not p.empty for p in signature)
    defaults = {p.name: p.default for p in signature if p.kind is p.KEYWORD_ONLY}
    assert defaults == config | dict.fromkeys(of_vllm)
    table = load_table()["LLM"]
    honoured = {e.get("as", name) for name, e in table.items() if e["class"] == "honoured"}
    assert honoured | of_us == {"model"} | config.keys() | of_vllm
