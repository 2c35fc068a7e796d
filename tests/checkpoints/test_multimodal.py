"""The text model of a multimodal checkpoint."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Mistral3Config, Mistral3ForConditionalGeneration

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoints.checkpoint import open_checkpoint
from tests.tiny_models import BASE, VISION

PROMPTS = [[3, 1, 4], list(range(100, 160))]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL = {"num_kvcache_blocks": 64, "kvcache_block_size": 16}


def tokens(folder):
    with LLM(folder, **SMALL) as llm:
        return [out["token_ids"] for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture
def folder(tiny_models, tmp_path):
    return shutil.copytree(tiny_models.path("gemma3-vision"), tmp_path / "model")


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_is_skipped_is_logged_in_one_line(folder, caplog):
    with caplog.at_level(logging.INFO, "nanovllm"):
        tokens(folder)
    (line,) = [record.message for record in caplog.records if "skipped" in record.message]
    num_tensors = sum(not name.startswith("language") for name in load_file(weights(folder)))
    assert line.startswith(f"skipped {num_tensors} tensors: ")
    assert "vision_tower.*" in line and "multi_modal_projector.*" in line


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_text_model_of_mistral3_gives_the_tokens_of_transformers(is_tied, tmp_path, caplog):
    """With the names of the hub: language_model.model.layers..., language_model.lm_head. The config
    of the text model says in both cases that its head is not tied."""
    text = {**BASE, "model_type": "mistral", "sliding_window": None}
    vision = {**VISION, "model_type": "pixtral", "head_dim": 8}
    config = Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=is_tied)
    torch.manual_seed(2)
    model = Mistral3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.uniform_(0.5, 1.5) if "norm" in name else param.normal_(0, 0.3)
    model.save_pretrained(tmp_path)
    names = list(load_file(weights(tmp_path)))
    assert any(name.startswith("language_model.model.layers.") for name in names)
    assert any(name.endswith("lm_head.weight") for name in names) != is_tied
    with caplog.at_level(logging.INFO, "nanovllm"):
        found = tokens(tmp_path)
    (line,) = [record.message for record in caplog.records if "skipped" in record.message]
    num_skipped = sum(not name.startswith("language_model.") for name in names)
    assert line == f"skipped {num_skipped} tensors: multi_modal_projector.*, vision_tower.*"
    for prompt, found_ids in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *found_ids]])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(found_ids)


def weights(folder):
    return folder / "model.safetensors"


def test_both_spellings_of_names_are_read(folder):
    expected = tokens(folder)
    tensors = load_file(weights(folder))
    renamed = {
        name.replace("language_model.model.", "model.language_model.").replace(
            "vision_tower.", "model.vision_tower."
        ): tensor
        for name, tensor in tensors.items()
    }
    assert renamed.keys() != tensors.keys()
    save_file(renamed, weights(folder))
    assert tokens(folder) == expected


def test_fields_outside_of_the_text_config_count(folder):
    (folder / "generation_config.json").unlink()
    edit_config(folder, eos_token_id=[1, 106])
    assert open_checkpoint(str(folder)).eos_token_ids == {1, 106}
    edit_config(folder, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ValueError, match="'gptq' quantisation is not supported"):
        open_checkpoint(str(folder))


def test_without_an_architecture_the_model_type_counts(folder):
    expected = open_checkpoint(str(folder)).config
    edit_config(folder, architectures=[])
    assert open_checkpoint(str(folder)).config == expected


@pytest.mark.parametrize("text", [None, "gemma", [1]])
def test_a_missing_text_config_is_refused(folder, text):
    edit_config(folder, text_config=text)
    with pytest.raises(ValueError, match="needs a text_config"):
        open_checkpoint(str(folder))


def test_a_text_model_of_another_family_is_refused_by_name(folder):
    edit_config(folder, text_config={"model_type": "t5"})
    with pytest.raises(ValueError, match="architecture 't5' is not supported"):
        open_checkpoint(str(folder))


def test_other_tensors_are_an_error(folder):
    tensors = load_file(weights(folder))
    extra = next(iter(tensors.values()))
    save_file({**tensors, "audio_tower.weight": extra.clone()}, weights(folder))
    with pytest.raises(ValueError, match=r"audio_tower\.weight, which the model does not have"):
        LLM(folder, **SMALL)


def test_a_tied_head_is_passed_over_under_its_own_names_only(folder):
    text = json.loads((folder / "config.json").read_text())["text_config"]
    edit_config(folder, text_config={**text, "tie_word_embeddings": True})
    tensors = load_file(weights(folder))
    del tensors["language_model.lm_head.weight"]
    save_file(tensors, weights(folder))
    expected, head = tokens(folder), tensors["language_model.model.embed_tokens.weight"].clone()
    for name in ("lm_head.weight", "language_model.lm_head.weight"):
        save_file({**tensors, name: head}, weights(folder))
        assert tokens(folder) == expected
    save_file({**tensors, "draft.lm_head.weight": head}, weights(folder))
    with pytest.raises(ValueError, match=r"draft\.lm_head\.weight, which the model does not have"):
        LLM(folder, **SMALL)
