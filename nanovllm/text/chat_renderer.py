"""Conversations to prompts, by a chat template that runs in a process of its own."""

import inspect
import pickle
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from nanovllm.text.chat import Form, find_form, fit, read_message
from nanovllm.text.limited_process import LimitedProcess, Unanswered
from nanovllm.text.prompts import map_each, map_good

TEMPLATE_PROCESS = str(Path(__file__).with_name("template_process.py"))
RENDER_SECONDS = 5.0
MEMORY_BYTES = 1 << 30
HEAD_SIZE = struct.Struct("<Q")
# Follows the text that the model is to go on with, to find its end in the prompt.
END_OF_TEXT = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatRenderer:
    """Makes prompts of conversations. A template that takes too much time or memory, or ends its
    process, fails alone.

    Args:
        cpu_seconds: how long a template may run for one conversation.
    """

    def __init__(self, cpu_seconds: float = RENDER_SECONDS) -> None:
        self._process = LimitedProcess(TEMPLATE_PROCESS, cpu_seconds, MEMORY_BYTES)

    def render(
        self, tokenizer: Any, conversations: Iterable[Any], options: dict[str, Any]
    ) -> list[str | Exception]:
        """Returns the text of each conversation, or the TypeError or ValueError that says why
        there is none. The messages are not changed.

        Args:
            tokenizer: a transformers tokenizer, for its templates and special tokens.
            conversations: lists of messages.
            options: ``chat_template``, ``tools``, ``add_generation_prompt`` and
                ``continue_final_message`` as in ``LLM.render_chat``, and any further variables of
                the template.
        """
        try:
            head, form, is_open = _read_options(tokenizer, **options)
        except Exception as error:  # a tool's function, its docstring and others' code
            return [_fails(f"{type(error).__name__}: {error}") for _ in conversations]
        questions = map_each(partial(_prepare, form=form, is_open=is_open), conversations)
        return map_good(partial(self._ask, head), questions)

    def close(self) -> None:
        """Ends the process; the next conversation starts another."""
        self._process.close()

    def _ask(
        self, head: bytes, questions: Sequence[tuple[bytes, str | None]]
    ) -> list[str | Exception]:
        answers = self._process.ask(head + messages for messages, _ in questions)
        opened = (text for _, text in questions)
        return map_each(_read_answer, zip(answers, opened, strict=True))


def _read_options(
    tokenizer: Any,
    chat_template: str | None = None,
    tools: Any = None,
    add_generation_prompt: Any = False,
    continue_final_message: Any = False,
    **variables: Any,
) -> tuple[bytes, Form, bool]:
    """What every question begins with, the form that messages need, and whether the last one is
    left open."""
    if not isinstance(continue_final_message, bool):
        raise TypeError(f"continue_final_message is True or False, not {continue_final_message!r}")
    if continue_final_message and add_generation_prompt:
        raise ValueError("continue_final_message and add_generation_prompt exclude each other")
    if "messages" in variables:
        raise ValueError("the variable 'messages' is the conversation")
    template = tokenizer.get_chat_template(chat_template, tools)
    shared = {
        "documents": None,
        **tokenizer.special_tokens_map,
        **variables,
        "tools": None if tools is None else [_describe(tool) for tool in tools],
        "add_generation_prompt": add_generation_prompt,
    }
    head = _pack((template, shared))
    return HEAD_SIZE.pack(len(head)) + head, find_form(template), continue_final_message


def _describe(tool: Any) -> dict[str, Any]:
    """The JSON schema of a tool."""
    if inspect.isfunction(tool) or inspect.ismethod(tool):
        from transformers.utils import get_json_schema

        return get_json_schema(tool)
    if not isinstance(tool, dict):
        raise ValueError(f"a tool is a dict, or a function with a docstring, not {tool!r:.80}")
    return tool


def _prepare(conversation: Any, form: Form, is_open: bool) -> tuple[bytes, str | None]:
    """The messages, packed; and the text that the model is to go on with, if the last message is
    open.

    Raises:
        TypeError: not a conversation, or something in it is not for templates.
        ValueError: no messages, one that ``read_message`` refuses, or no text to go on with.
    """
    if not isinstance(conversation, (list, tuple)):
        raise TypeError(f"a conversation is a list of messages, not {conversation!r:.80}")
    if not conversation:
        raise ValueError("a conversation needs at least one message")
    messages = fit([read_message(message) for message in conversation], form)
    text = _open_last(messages[-1]) if is_open else None
    return _pack(messages), text


def _open_last(message: dict[str, Any]) -> str:
    """Marks the end of a message's text, which is returned."""
    content = message["content"]
    if isinstance(content, list) and content:
        *parts, part = content
        message["content"] = [*parts, {**part, "text": part["text"] + END_OF_TEXT}]
        return part["text"]
    if not isinstance(content, str):
        raise ValueError("continue_final_message needs a last message with text")
    message["content"] = content + END_OF_TEXT
    return content


def _read_answer(answer: tuple[bytearray | Unanswered, str | None]) -> str:
    """A prompt; raises ValueError if there is none."""
    data, opened = answer
    if isinstance(data, Unanswered):
        raise ValueError(f"the chat template {data}")
    text = str(memoryview(data)[1:], "utf-8", "surrogatepass")
    if data[:1] != b"T":
        raise _fails(text)
    if opened is None:
        return text
    before, mark, after = text.rpartition(END_OF_TEXT.strip())
    if not mark or opened.strip() not in text:
        raise _fails("continue_final_message is set, but it changes or leaves out the last message")
    # A template that strips messages has stripped the mark: what is open is stripped, too.
    return before if after.startswith(" ") else before.rstrip()


def _fails(reason: str) -> ValueError:
    return ValueError(f"the chat template fails: {reason}")


class _NotPlain(Exception):
    pass


class _Packer(pickle.Pickler):
    """Pickles plain data alone."""

    def reducer_override(self, value: Any) -> Any:  # called for what is of no plain type
        raise _NotPlain


def _pack(value: Any) -> bytes:
    """Plain data as bytes. Objects of types derived from plain ones become plain.

    Raises:
        TypeError: there is an object of another type.
        ValueError: lists or dicts are nested too deeply.
    """
    try:
        try:
            return _dump(value)
        except _NotPlain:
            return _dump(_as_plain(value))
    except RecursionError:
        raise ValueError("the conversation is nested too deeply") from None


def _dump(value: Any) -> bytes:
    buffer = BytesIO()
    _Packer(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _as_plain(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return {_as_plain(key): _as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = map(_as_plain, value)
        return list(items) if isinstance(value, list) else tuple(items)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    raise TypeError(
        f"a chat template gets strings, numbers, booleans, None, lists and dicts, not "
        f"{type(value).__name__}: {value!r:.80}"
    )
