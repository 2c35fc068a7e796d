"""Conversations as templates get to see them; what vLLM passes to a template is the reference."""

import copy
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from nanovllm.text.chat_renderer import ChatRenderer

pytestmark = pytest.mark.smoke

SHOW = "{% for m in messages %}<{{ m.role }}|{{ m.content }}>{% endfor %}"
SHOW_CALLS = (
    "{% for m in messages %}<{{ m.content }}{% if m.tool_calls is defined %}"
    "{% for c in m.tool_calls %}|{{ (c.function or c).arguments | tojson }}{% endfor %}"
    "{% endif %}>{% endfor %}"
)
LOOP = (
    "{% for m in messages %}<{{ m.role }}{% if m.role == 'tool' %}|{{ m.content }}{% else %}"
    "{%- for part in m['content'] %}|{{ part.type }}:{{ part.text }}{% endfor %}{% endif %}>"
    "{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{% if m.content is string %}<{{ m.content }}>{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
PARTS = [
    {"type": "text", "text": "a"},
    {"type": "input_text", "text": "b"},
    {"type": "output_text", "text": "c"},
    {"type": "refusal", "refusal": "d"},
    {"type": "thinking", "thinking": "e"},
    {"text": "f"},
    "g",
]


RENDERER = ChatRenderer()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({}, [])))


def render(tokenizer: Any, template: str, *messages: Any) -> str:
    before = copy.deepcopy(messages)
    (prompt,) = RENDERER.render(tokenizer, [messages], {"chat_template": template})
    assert messages == before
    if isinstance(prompt, Exception):
        raise prompt
    return prompt


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "1", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"city": "Paris", "days": [1]}', '{"city": "Paris", "days": [1]}'),
        ({"city": "Paris"}, '{"city": "Paris"}'),
        ("", "{}"),
        (None, "{}"),
        ({}, "{}"),
    ],
)
def test_arguments_of_tool_calls_are_objects(tokenizer, arguments, seen):
    """Guards arguments in OpenAI's form, which came as a quoted string: another prompt."""
    assert render(tokenizer, SHOW_CALLS, call(arguments)) == f"<|{seen}>"
    bare = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}
    assert render(tokenizer, SHOW_CALLS, bare) == f"<|{seen}>"


def test_a_tool_call_without_arguments_has_none(tokenizer):
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "now"}}]}
    assert render(tokenizer, SHOW_CALLS, message) == "<|{}>"


@pytest.mark.parametrize("calls", [None, []])
def test_no_tool_calls_are_left_out(tokenizer, calls):
    template = "{{ 'tool_calls' in messages[0] }}"
    assert render(tokenizer, template, user("x", tool_calls=calls)) == "False"


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}], ids=str)
def test_no_content_is_an_empty_string_or_list(tokenizer, content):
    """Guards the word None in a prompt."""
    message = {"role": "assistant", **content}
    assert render(tokenizer, SHOW, message, user("x")) == "<assistant|><user|x>"
    assert render(tokenizer, LOOP, message, user("x")) == "<assistant><user|text:x>"


def test_parts_of_text_are_joined_for_a_template_of_strings(tokenizer):
    assert render(tokenizer, SHOW, user(PARTS)) == "<user|a\nb\nc\nd\ne\nf\ng>"


def test_a_template_that_loops_over_parts_gets_parts(tokenizer):
    """Guards characters that were taken for parts, and parts that were joined first."""
    parts = "".join(f"|text:{letter}" for letter in "abcdefg")
    prompt = render(tokenizer, LOOP, user(PARTS), user("xy"), {**user(PARTS[:2]), "role": "tool"})
    assert prompt == f"<user{parts}><user|text:xy><tool|a\nb>"


def test_a_template_for_both_gets_what_was_given(tokenizer):
    assert render(tokenizer, EITHER, user("x"), user(PARTS[:2])) == "<x>[a][b]"


def test_developers_speak_as_the_system_where_a_template_has_none(tokenizer):
    developer, system = {"role": "developer", "content": "d"}, {"role": "system", "content": "s"}
    assert render(tokenizer, SHOW, developer, user("x")) == "<system|d><user|x>"
    assert render(tokenizer, SHOW, user("x"), developer) == "<system|d><user|x>"
    assert render(tokenizer, SHOW, system, user("x"), developer) == "<system|s\n\nd><user|x>"
    assert render(tokenizer, SHOW, user("x"), system) == "<user|x><system|s>"
    knows = SHOW + "{% if messages[0].role == 'developer' %}!{% endif %}"
    assert render(tokenizer, knows, developer, user("x")) == "<developer|d><user|x>!"


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (call("{"), "the arguments of a tool call are not JSON"),
        (call("[1]"), r"must be an object, got \[1\]"),
        (call(7), "must be an object, got 7"),
        ({**user("x"), "tool_calls": "f"}, "tool_calls must be a list, got 'f'"),
        ({**user("x"), "tool_calls": ["f"]}, "a tool call is an object with a 'function'"),
        ({**user("x"), "tool_calls": [{"function": "f"}]}, "a tool call is an object"),
        (user([{"type": "image_url", "image_url": {}}]), "message content must be text"),
        (user([{"type": "refusal", "text": "x"}]), "message content must be text"),
        (user([{"type": "text", "text": None}]), "message content must be text"),
        (user([7]), "message content must be text, got 7"),
        (user(5), "'content' must be a string or a list of text parts, got 5"),
        (user({"type": "text", "text": "x"}), "'content' must be a string or a list"),
        ({"content": "x"}, "a message needs a 'role'"),
        ({"role": "user", "text": "x"}, "a user message needs a 'content'"),
    ],
    ids=str,
)
def test_a_message_that_cannot_be_read_is_refused(tokenizer, message, error):
    with pytest.raises(ValueError, match=error):
        render(tokenizer, SHOW, message)
