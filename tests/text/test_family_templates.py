"""What the chat templates of the supported families rely on: special tokens before the text that
are there once, roles that are refused, dates, thoughts, and the files that templates come in.

The templates here are shorter than the real ones, and have the features that differ."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from nanovllm.checkpoints.checkpoint import load_tokenizer, open_checkpoint
from nanovllm.text.chat_renderer import ChatRenderer
from nanovllm.text.prompts import PromptEncoder

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
RENDERER = ChatRenderer()
USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be brief"}
TURNS = [USER, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "why?"}]


class Style(NamedTuple):
    """A family's special tokens and template. The tokenizer puts ``prefix`` before plain texts."""

    tokens: tuple[str, ...]
    prefix: tuple[str, ...]
    bos: str | None
    eos: str
    template: str


STYLES = {
    "gemma": Style(
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        ("<bos>",),
        "<bos>",
        "<eos>",
        "{{ bos_token }}{% if messages[0].role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
        "<start_of_turn>{{ role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    ),
    "glm4": Style(
        ("[gMASK]", "<sop>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"),
        ("[gMASK]", "<sop>"),
        None,
        "<|endoftext|>",
        "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    ),
    "mistral": Style(
        ("<s>", "</s>", "[INST]", "[/INST]"),
        ("<s>",),
        "<s>",
        "</s>",
        "{{ bos_token }}{% for m in messages %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if m['role'] == 'user' %}{{ '[INST]' + m['content'] + '[/INST]' }}"
        "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}",
    ),
    "llama3": Style(
        ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
        ("<|begin_of_text|>",),
        "<|begin_of_text|>",
        "<|eot_id|>",
        "{{- bos_token }}\n"
        "{%- set date = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}\n"
        "{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date + '<|eot_id|>' }}\n"
        "{%- for m in messages %}\n"
        "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim }}\n"
        "{{- '<|eot_id|>' }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n"
        "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}\n",
    ),
    "gpt-oss": Style(
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|endoftext|>"),
        (),
        None,
        "<|return|>",
        "{%- macro turn(name, text, channel=none) -%}\n"
        "{{ '<|start|>' + name }}{% if channel %}{{ '<|channel|>' + channel }}{% endif %}"
        "{{ '<|message|>' + text + '<|end|>' }}\n{%- endmacro -%}\n"
        "{%- set effort = reasoning_effort | default('medium') -%}\n"
        "{{- turn('system', 'Date: ' + strftime_now('%Y-%m-%d') + ' Reasoning: ' + effort) }}\n"
        "{%- for m in messages -%}\n"
        "{%- if m.role in ['developer', 'system'] -%}{{ turn('developer', m.content) }}\n"
        "{%- elif m.role == 'assistant' -%}\n"
        "{%- if 'thinking' in m -%}{{ turn('assistant', m.thinking, 'analysis') }}{%- endif -%}\n"
        "{{ turn('assistant', m.content, 'final') }}\n"
        "{%- else -%}{{ turn(m.role, m.content) }}{%- endif -%}\n{%- endfor -%}\n"
        "{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}",
    ),
    "qwen3": Style(
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        (),
        None,
        "<|im_end|>",
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}"
        "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}",
    ),
}


def make_tokenizer(folder: Path, style: Style) -> Path:
    """Saves a byte-level tokenizer without a template."""
    vocab = {token: i for i, token in enumerate([*style.tokens, *BYTES])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.add_special_tokens([*style.tokens])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if style.prefix:
        backend.post_processor = processors.TemplateProcessing(
            single=" ".join([*style.prefix, "$A"]),
            special_tokens=[(token, vocab[token]) for token in style.prefix],
        )
    names = {"bos_token": style.bos, "eos_token": style.eos}
    names = {name: token for name, token in names.items() if token}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder)
    return folder


@pytest.fixture(params=STYLES)
def style(request: pytest.FixtureRequest) -> Style:
    return STYLES[request.param]


@pytest.fixture
def encoder(style: Style, tmp_path: Path) -> PromptEncoder:
    folder = make_tokenizer(tmp_path, style)
    (folder / "chat_template.jinja").write_text(style.template)
    return PromptEncoder(load_tokenizer(str(folder)), 512, 2048)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("conversation", [[USER], TURNS], ids=len)
def test_prompts_are_those_of_transformers(conversation, style, encoder):
    """And the same from ``generate``, given the rendered text. Guards a BOS, or GLM's two special
    tokens, that the template writes and the tokenizer adds again."""
    (prompt,) = RENDERER.prompts(encoder, conversation)
    assert not isinstance(prompt, Exception)
    ids = prompt["prompt_token_ids"]
    assert ids == encoder.tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, return_dict=False
    )
    assert encoder.encode([prompt["prompt"]]) == [(prompt["prompt"], ids)]
    for token in style.prefix:
        assert ids.count(encoder.tokenizer.convert_tokens_to_ids(token)) == 1
    (plain,) = encoder.encode(["hi"])
    assert plain == ("hi", encoder.tokenizer("hi").input_ids)
    assert len(plain[1]) == 2 + len(style.prefix)


@pytest.mark.parametrize("style", [STYLES["gemma"], STYLES["mistral"]], ids=["gemma", "mistral"])
def test_a_role_that_a_template_refuses_is_an_error_of_its_conversation(style, encoder):
    prompts = RENDERER.prompts(encoder, [[USER], [SYSTEM, USER], TURNS])
    alone = [RENDERER.prompts(encoder, messages)[0] for messages in ([USER], TURNS)]
    reason = "System role not supported|roles must alternate"
    with pytest.raises(ValueError, match=f"the chat template fails: TemplateError: ({reason})"):
        raise prompts[1]
    assert [prompts[0], prompts[2]] == alone


@pytest.mark.parametrize("style", [STYLES["gpt-oss"]], ids=["gpt-oss"])
def test_gpt_oss_has_a_date_thoughts_and_an_effort(style, encoder):
    turns = [SYSTEM, USER, {"role": "assistant", "reasoning_content": "Hm.", "content": "Yes."}]
    days = [datetime.now().strftime("%Y-%m-%d")]
    options = {"chat_template_kwargs": {"reasoning_effort": "high"}}
    (prompt,) = RENDERER.prompts(encoder, [*turns, USER], **options)
    days.append(datetime.now().strftime("%Y-%m-%d"))  # another one at midnight
    assert not isinstance(prompt, Exception)
    assert prompt["prompt"] in [
        f"<|start|>system<|message|>Date: {day} Reasoning: high<|end|>"
        "<|start|>developer<|message|>be brief<|end|><|start|>user<|message|>hi<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes.<|end|>"
        "<|start|>user<|message|>hi<|end|><|start|>assistant"
        for day in days
    ]
    special = {token: encoder.tokenizer.convert_tokens_to_ids(token) for token in style.tokens}
    counts = {token: prompt["prompt_token_ids"].count(i) for token, i in special.items()}
    assert counts["<|start|>"] == 7 and counts["<|channel|>"] == 2


NAMED = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools | length }} tools"}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("kind", ["list", "jinja files", "chat_template.json"])
def test_files_that_templates_come_in(kind, tmp_path):
    folder = make_tokenizer(tmp_path, STYLES["qwen3"])
    if kind == "list":
        named = [{"name": name, "template": template} for name, template in NAMED.items()]
        edit_json(folder / "tokenizer_config.json", chat_template=named)
    elif kind == "jinja files":
        (folder / "chat_template.jinja").write_text(NAMED["default"])
        (folder / "additional_chat_templates").mkdir()
        tool_use = folder / "additional_chat_templates" / "tool_use.jinja"
        tool_use.write_text(NAMED["tool_use"])
    else:  # of multimodal checkpoints
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": NAMED["default"]}))
    encoder = PromptEncoder(load_tokenizer(str(folder)), 512, 2048)
    (prompt,) = RENDERER.prompts(encoder, [USER])
    assert not isinstance(prompt, Exception) and prompt["prompt"] == "hi"
    if kind != "chat_template.json":
        (prompt,) = RENDERER.prompts(encoder, [USER], tools=[TOOL])
        assert not isinstance(prompt, Exception) and prompt["prompt"] == "1 tools"


def test_named_templates_without_a_default_are_an_error_that_says_so(tmp_path):
    folder = make_tokenizer(tmp_path, STYLES["qwen3"])
    named = [{"name": "rag", "template": "x"}]
    edit_json(folder / "tokenizer_config.json", chat_template=named)
    encoder = PromptEncoder(load_tokenizer(str(folder)), 512, 2048)
    (error,) = RENDERER.prompts(encoder, [USER])
    assert isinstance(error, ValueError) and "rag" in str(error)
    (prompt,) = RENDERER.prompts(encoder, [USER], chat_template="rag")
    assert not isinstance(prompt, Exception) and prompt["prompt"] == "x"


@pytest.mark.parametrize("template", [{"a": 1}, [{"name": "default"}], [5], 5], ids=str)
def test_a_template_of_another_type_is_an_error(template, tmp_path):
    folder = make_tokenizer(tmp_path, STYLES["qwen3"])
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ValueError, match=r"chat_template\.json must hold a chat_template"):
        load_tokenizer(str(folder))


# The released checkpoints' EOS: in config.json, in generation_config.json, and all of them.
END_IDS: dict[str, tuple[Any, Any, set[int]]] = {
    "gemma2": (1, [1, 107], {1, 107}),
    "gemma3": ([1, 106], [1, 106], {1, 106}),
    "gpt-oss": (200002, [200002, 199999, 200012], {200002, 199999, 200012}),
    "llama": ([128001, 128008, 128009], [128001, 128008, 128009], {128001, 128008, 128009}),
    "qwen3": (151645, [151645, 151643], {151645, 151643}),
    "glm4": ([151329, 151336, 151338], None, {151329, 151336, 151338}),
    "phi3": (32000, [32000, 32001, 32007], {32000, 32001, 32007}),
    "mistral": (2, 2, {2}),
}


@pytest.mark.parametrize("name", END_IDS)
def test_every_eos_of_the_files_counts(name, tiny_models, tmp_path):
    in_config, in_generation_config, expected = END_IDS[name]
    config = json.loads((tiny_models.path(name) / "config.json").read_text())
    config |= {"eos_token_id": in_config, "vocab_size": 262144}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if in_generation_config is not None:
        generation_config = {"eos_token_id": in_generation_config}
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    assert open_checkpoint(str(tmp_path)).eos_token_ids == expected
