"""Templates in a process of limits: the same text as in this process, and no harm from any."""

import datetime as dt
import enum
import re
import threading
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from nanovllm import LLM, SamplingParams
from nanovllm.text.chat_renderer import ChatRenderer
from tests.tiny_tokenizer import CHAT_TEMPLATE

# Each looks at other parts of what a template is given.
TEMPLATES = {
    "tiny": CHAT_TEMPLATE,
    "chatml": (
        "{%- if tools %}\n    {{- '<|im_start|>system\\n' }}\n    {%- for tool in tools %}\n"
        "        {{- tool | tojson }}\n    {%- endfor %}\n{%- endif %}\n"
        "{%- set ns = namespace(last=messages|length - 1) %}\n"
        "{%- for message in messages[::-1] %}\n"
        "    {%- if message.role == 'user' and message.content is string %}\n"
        "        {%- set ns.last = messages|length - loop.index %}\n"
        "        {%- break %}\n    {%- endif %}\n{%- endfor %}\n"
        "{% for message in messages %}\n"
        "    {%- if message.role == 'assistant' and '</think>' in message.content %}\n"
        "        {%- set text = message.content.split('</think>')[-1].lstrip('\\n') %}\n"
        "    {%- else %}\n        {%- set text = message.content %}\n    {%- endif %}\n"
        "    {{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>' }}\n"
        "    {% if loop.index0 > ns.last %}\n  after\n    {% endif %}\n"
        "    {%- for call in message.tool_calls or [] %}\n"
        "        {{- (call.function or call).arguments | tojson(indent=1) }}\n"
        "    {%- endfor %}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}\n"
        "    {%- if enable_thinking is defined and enable_thinking is false %}<think>{% endif %}"
        "{%- endif %}"
    ),
    "stripped": "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}\n",
    "parts": (
        "{% for m in messages %}{% for part in m['content'] %}"
        "{{ part.text if part.text is defined else part }}|{% endfor %}{% endfor %}"
    ),
    "everything": (
        "{{ messages }}{{ tools }}{{ documents }}{{ bos_token }}{{ enable_thinking }}{{ options }}"
        "{{ add_generation_prompt }}{{ dict(a=1) }}{{ dict.fromkeys('ab', 1) }}"
        "{{ namespace(a=1, self=2) }}{{ strftime_now is callable }}"
    ),
    "blocks": (
        "{% macro show(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{{ show(m) }}{% filter upper %}{{ m.role }}{% endfilter %}{% endfor %}"
    ),
    "refuses": (
        "{% for m in messages %}{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}"
        "{{ raise_exception('roles must alternate: ' + m.role) }}{% endif %}{{ m.content }}"
        "{% endfor %}"
    ),
    "fails": "{{ messages[0].content + 1 }}",
    "does not compile": "{% for m in messages %}{{ m.content }}{% endfo %}",
    "escapes": "{{ messages.__class__.__mro__ }}",
    "changes": "{{ messages.append(1) }}",
}
RENDERER = ChatRenderer()
GREEDY = SamplingParams(temperature=0, max_tokens=4)

texts = st.text(
    st.sampled_from("ab \n\t<|>{}%'\"\\é中😀\ud800\u2028") | st.characters(), max_size=8
)
contents = texts | st.just("<think>\nx\n</think>\n\ny")
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(texts | st.integers(), inner, max_size=3)
    ),
    max_leaves=5,
)
calls = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": texts, "arguments": st.dictionaries(texts, values, max_size=2)}
        ),
    }
)
messages = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool"]),
        "content": contents,
    },
    optional={
        "tool_calls": st.lists(calls, min_size=1, max_size=2),
        "reasoning_content": texts | st.none(),
        "thinking": texts,
        "name": texts,
        "extra": values,
    },
)
options = st.fixed_dictionaries(
    {
        "add_generation_prompt": st.booleans(),
        "tools": st.none() | st.lists(st.dictionaries(texts, values, max_size=2), max_size=2),
    },
    optional={
        "enable_thinking": st.booleans(),
        "options": values,
        "documents": st.none() | st.just([{"title": "t", "text": "x"}]),
        "bos_token": texts,
    },
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({}, [])), bos_token="<s>", eos_token="</s>"
    )


@pytest.fixture(scope="module")
def llm(model_path) -> LLM:
    return LLM(model_path, max_model_len=64, num_kvcache_blocks=32, kvcache_block_size=16)


def render(tokenizer: Any, template: Any, content: Any, **options: Any) -> Any:
    """The text of one message, or the error."""
    conversation = [{"role": "user", "content": content}]
    options = {"chat_template": template, **options}
    (text,) = RENDERER.render(tokenizer, [conversation], options)
    return text


def outcome(function: Any) -> tuple[bool, str]:
    """Whether there is a text, and the text or the error."""
    try:
        result = function()
    except Exception as error:
        return False, f"the chat template fails: {type(error).__name__}: {error}"
    return not isinstance(result, Exception), str(result)


@given(st.sampled_from(list(TEMPLATES)), st.lists(messages, min_size=1, max_size=4), options)
@settings(max_examples=100, deadline=None)
def test_texts_and_errors_are_those_of_transformers(tokenizer, name, conversation, options):
    # Other forms of content are changed before, which test_chat.py is about.
    if name == "parts":
        conversation = [
            {**message, "role": "user", "content": [{"type": "text", "text": str(message)}]}
            for message in conversation
        ]
    options = {"chat_template": TEMPLATES[name], **options}
    expected = partial(tokenizer.apply_chat_template, conversation, tokenize=False, **options)
    (rendered,) = RENDERER.render(tokenizer, [conversation], options)
    assert outcome(lambda: rendered) == outcome(expected)


@given(st.sampled_from(["tiny", "chatml", "stripped", "blocks"]), texts, texts)
@settings(max_examples=100, deadline=None)
def test_open_messages_are_those_of_transformers(tokenizer, name, question, begun):
    conversation = [{"role": "user", "content": question}, {"role": "assistant", "content": begun}]
    options = {"chat_template": TEMPLATES[name], "continue_final_message": True}
    expected = tokenizer.apply_chat_template(conversation, tokenize=False, **options)
    assert RENDERER.render(tokenizer, [conversation], options) == [expected]


@pytest.mark.parametrize(
    ("template", "content", "options", "error"),
    [
        ("{{ messages|length }}", "x", {}, "changes or leaves out the last message"),
        ("{{ messages[0].content }}", [], {}, None),  # an empty text stays open
        ("{{ messages[0].content[:3] }}", "abcdef", {}, "changes or leaves out the last message"),
        (
            "{% set m = messages[0] %}{% for part in m.content %}{{ part.text }}{% endfor %}",
            [],
            {},
            "needs a last message with text",
        ),
        ("{{ messages[0].content }}", 7, {}, "must be a string or a list of text parts"),
        ("{{ messages }}", "x", {"add_generation_prompt": True}, "exclude each other"),
        ("{{ messages }}", "x", {"continue_final_message": "name"}, "is True or False"),
    ],
)
def test_a_message_that_cannot_stay_open_is_an_error(tokenizer, template, content, options, error):
    options = {"continue_final_message": True, **options}
    text = render(tokenizer, template, content, **options)
    if error is None:
        assert text == ""
    else:
        assert re.search(error, str(text)) and isinstance(text, ValueError)


def weather(city: str) -> None:
    """Tells the weather.

    Args:
        city: where
    """


def test_functions_are_described_to_the_template(tokenizer):
    template = "{{ tools | tojson }}"
    conversation = [{"role": "user", "content": "x"}]
    options = {"chat_template": template, "tools": [weather]}
    expected = tokenizer.apply_chat_template(conversation, tokenize=False, **options)
    assert render(tokenizer, template, "x", tools=[weather]) == expected
    assert "Tells the weather" in expected
    error = render(tokenizer, template, "x", tools=["weather"])
    assert isinstance(error, ValueError) and "a tool is a dict" in str(error)


def test_a_template_that_ignores_tools_is_reported_once(tokenizer, caplog):
    for _ in range(2):
        assert render(tokenizer, "no use: {{ messages[0].content }}", "x", tools=[weather])
    assert caplog.text.count("the chat template ignores tools") == 1


def test_the_path_of_a_template_is_not_a_template(tokenizer):
    error = str(render(tokenizer, "/tmp/template.jinja", "x"))
    assert "'/tmp/template.jinja' is a path: read the file, or use LLM(chat_template=path)" in error


def test_named_templates_are_the_tokenizers(tokenizer, monkeypatch):
    named = {"default": "default", "tool_use": "tools", "other": "other"}
    monkeypatch.setattr(tokenizer, "chat_template", named)
    assert render(tokenizer, None, "x") == "default"
    assert render(tokenizer, None, "x", tools=[{}]) == "tools"
    assert render(tokenizer, "other", "x") == "other"
    monkeypatch.setattr(tokenizer, "chat_template", {"other": "other"})
    assert "multiple chat templates" in str(render(tokenizer, None, "x"))


class Size(enum.IntEnum):
    LARGE = 3


class Name(enum.StrEnum):
    ADA = "Ada"


def test_subclasses_of_plain_types_are_plain(tokenizer):
    values = {"a": [Size.LARGE, Name.ADA, np.float64(0.5), np.str_("x")]}
    assert render(tokenizer, "{{ x.a }}", "x", x=values) == "[3, 'Ada', 0.5, 'x']"


@pytest.mark.parametrize(
    "value", [object(), dt.date(2026, 1, 1), np.int64(1), len, Size], ids=lambda x: type(x).__name__
)
def test_what_is_not_plain_is_refused(tokenizer, value):
    """Guards numbers that came as bytes, and code that is run where data is read."""
    error = render(tokenizer, "{{ x }}", "x", x=value)
    assert isinstance(error, ValueError) and "a chat template accepts strings" in str(error)
    message = {"role": "user", "content": "x", "extra": [value]}
    (error,) = RENDERER.render(tokenizer, [[message]], {"chat_template": "x"})
    assert isinstance(error, TypeError) and "a chat template accepts strings" in str(error)


def test_deep_nesting_is_an_error_of_its_conversation(tokenizer):
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    good = [{"role": "user", "content": "x"}]
    bad: list[Any] = [
        {"content": deep},
        [{"role": "user", "content": "x", "extra": deep}],
        [{"role": "user", "content": "x", "extra": [Size.LARGE, deep]}],
        [{"role": "user", "content": [deep]}],
        [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[" * 100_000}]}],
    ]
    rendered = RENDERER.render(tokenizer, [good, *bad, good], {"chat_template": "y"})
    assert (rendered[0], rendered[-1]) == ("y", "y")
    for error in rendered[1:-1]:
        assert isinstance(error, ValueError) and "nested too deeply" in str(error)
    for options in ({"tools": [{"parameters": deep}]}, {"extra": deep}):
        error = render(tokenizer, "y", "x", **options)
        assert isinstance(error, ValueError) and "variables are nested too deeply" in str(error)
    while deep:  # freed at once, it would overflow the stack of some Pythons
        (deep,) = deep


def test_variables_are_the_same_for_every_conversation(tokenizer):
    template = (
        "{% set ns = namespace(x=x) %}{% set ns.x = 2 %}{% set x = 3 %}{{ messages[0].content }}"
        "{{ y.update(a=1) if messages[0].content == 'b' }}{{ y }}"
    )
    chats = [[{"role": "user", "content": c}] for c in "abc"]
    first, error, last = RENDERER.render(
        tokenizer, chats, {"chat_template": template, "x": 1, "y": {}}
    )
    assert (first, last) == ("a{}", "c{}") and "SecurityError" in str(error)


def test_threads_render_their_own(tokenizer):
    results: dict[int, bool] = {}

    def work(number: int) -> None:
        template = "{{ messages[0].content }}" + str(number)
        results[number] = all(
            render(tokenizer, template, str(i)) == f"{i}{number}" for i in range(100)
        )

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), True)


TIME, MEMORY = "takes over 0.3 s", "takes too much memory"
ANY = f"{TIME}|{MEMORY}|ends its process|the chat template fails: "
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}"
ENDS = "{% endfor %}{% endfor %}"
HOSTILE = {
    "loops": (TIME, NESTED + ENDS),
    "loops that write": (f"{TIME}|{MEMORY}", NESTED + "{{ a }}" + ENDS),
    "a namespace that grows": (
        f"{TIME}|{MEMORY}",
        "{% set ns = namespace(x=[1]) %}" + NESTED + "{% set ns.x = ns.x + ns.x %}" + ENDS,
    ),
    "a long string": (MEMORY, "{{ 'a' * 4000000000 }}"),
    "a large power": (f"{TIME}|{MEMORY}", "{{ 10 ** (9 ** 9) }}"),
    "a wide number": (ANY, '{{ "%1000000000d" % 1 }}'),
    "a wide format": (ANY, "{{ '{:1000000000}'.format(1) }}"),
    "center": (ANY, "{{ 'a' | center(1000000000) }}"),
    "center, the method": (ANY, "{{ 'a'.center(1000000000) }}"),
    "indent": (ANY, "{{ 'a\nb' | indent(1000000000) }}"),
    "ljust": (ANY, "{{ 'a'.ljust(1000000000) }}"),
    "doubling": (
        ANY,
        "{% set ns = namespace(x='ab') %}{% for i in range(50) %}{% set ns.x = ns.x ~ ns.x %}"
        "{% endfor %}{{ ns.x }}",
    ),
    "macros": ("RecursionError", "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"),
    "macros that double": (
        ANY,
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(60) }}",
    ),
    "lipsum": (ANY, "{{ lipsum(n=100000000) }}"),
    "replace": (ANY, "{{ 'aaaaaaaaaa'" + ".replace('a', 'aaaaaaaaaa')" * 12 + " }}"),
    "join": (ANY, "{{ range(99999) | join('a' * 99999) }}"),
    "batch": (ANY, "{{ [1] | batch(1000000000, 0) | list }}"),
    "tojson": (ANY, "{{ messages | tojson(indent=1000000000) }}"),
    "wordwrap": (ANY, "{{ ('a ' * 9999999) | wordwrap(1) }}"),
    "sum of lists": (ANY, "{{ ([[1] * 99999] * 99999) | sum(start=[]) | length }}"),
    "a long error": (ANY, "{{ raise_exception('a' * 99999999) }}"),
    "parentheses": (ANY, "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}"),
    "a long template": (ANY, "{{ 1 }}" * 1_000_000),
    "a chain of filters": (ANY, "{{ 'a'" + "|upper" * 50_000 + " }}"),
}


# One of each kind; each takes a third of a second, so that the others run with the slow tests.
FEW_HOSTILE = (
    "loops",
    "a namespace that grows",
    "a long string",
    "a wide number",
    "macros",
    "tojson",
    "a long error",
    "parentheses",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FEW_HOSTILE else pytest.mark.slow) for name in HOSTILE],
)
def test_a_template_without_measure_is_an_error(tokenizer, name):
    renderer = ChatRenderer(cpu_seconds=0.3)
    reason, template = HOSTILE[name]
    conversation = [{"role": "user", "content": "x"}]
    before = psutil.Process().memory_info().rss
    (error,) = renderer.render(tokenizer, [conversation], {"chat_template": template})
    assert isinstance(error, ValueError) and re.search(reason, str(error))
    assert len(str(error)) < 11_000
    assert psutil.Process().memory_info().rss - before < 1 << 30
    assert renderer.render(tokenizer, [conversation], {"chat_template": "y"}) == ["y"]
    renderer.close()


def test_a_text_is_at_most_64_mib(tokenizer):
    assert len(render(tokenizer, "{{ 'é' * 33554432 }}", "x")) == 1 << 25
    error = render(tokenizer, "{{ 'é' * 33554433 }}", "x")
    assert isinstance(error, ValueError) and "longer than 64 MiB" in str(error)


@pytest.mark.parametrize("change", ["namespace(_a=1)", "namespace({'_a': 1})", "dict.__class__()"])
def test_a_template_cannot_reach_what_is_private(tokenizer, change):
    error = render(tokenizer, "{{ " + change + " }}", "x")
    assert isinstance(error, ValueError) and "SecurityError" in str(error)
    error = render(tokenizer, "{% set ns = namespace() %}{% set ns._a = 1 %}", "x")
    assert isinstance(error, ValueError) and "SecurityError" in str(error)


def test_a_conversation_that_a_template_cannot_end_costs_no_other(llm, monkeypatch):
    monkeypatch.setattr(llm, "_chat_renderer", ChatRenderer(cpu_seconds=0.3))
    template = CHAT_TEMPLATE + (
        "{% set n = messages[0].content.count('!') %}{% for i in range(99999) if n %}"
        "{% for j in range(99999) %}{% endfor %}{% endfor %}{% if '?' in messages[0].content %}"
        "{{ 'a' * 4000000000 }}{% endif %}"
    )
    contents = ["a", "b!", "c", "d?", "e!", *map(str, range(40)), "f?", "g"]
    chats = [[{"role": "user", "content": content}] for content in contents]
    outputs = llm.chat(chats, GREEDY, False, chat_template=template, on_error="return")
    good = [chat for chat, content in zip(chats, contents, strict=True) if content.isalnum()]
    expected = iter(llm.chat(good, GREEDY, False, chat_template=template))
    for content, output in zip(contents, outputs, strict=True):
        if content.isalnum():
            alone = next(expected)
            assert output.prompt_token_ids == alone.prompt_token_ids
            assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        else:
            reason = TIME if "!" in content else MEMORY
            assert output.outputs[0].error == f"the chat template {reason}"
    with pytest.raises(ValueError, match=r"messages\[1\]: the chat template takes over 0.3 s"):
        llm.chat(chats[:3], GREEDY, False, chat_template=template)


def test_a_hostile_template_of_a_checkpoint_is_an_error(llm, monkeypatch):
    monkeypatch.setattr(llm, "_chat_renderer", ChatRenderer(cpu_seconds=0.3))
    monkeypatch.setattr(llm.tokenizer, "chat_template", NESTED + ENDS)
    with pytest.raises(ValueError, match=r"messages\[0\]: the chat template takes over"):
        llm.render_chat([{"role": "user", "content": "x"}])


def test_close_ends_the_process_of_templates(model_path):
    before = set(psutil.Process().children(recursive=True))

    def num_new() -> int:
        return len(set(psutil.Process().children(recursive=True)) - before)

    with LLM(model_path, max_model_len=64, num_kvcache_blocks=8, kvcache_block_size=16) as llm:
        assert num_new() == 0
        llm.render_chat([{"role": "user", "content": "x"}])
        assert num_new() == 1
    assert num_new() == 0
    for call in (llm.chat, llm.render_chat):
        with pytest.raises(ValueError, match="this engine is closed"):
            call([{"role": "user", "content": "x"}])
    assert num_new() == 0
