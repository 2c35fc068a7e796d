"""Messages in the form that chat templates know."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]

# Parts of a message's content that are text, and where each has it.
TEXT_KEYS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
# A template that loops over a message's content, and one that can have it as a string too.
LOOPS_OVER_CONTENT = re.compile(
    r"\{%[-+]?\s*for\s+\w+\s+in\s+(\w+\[['\"]content['\"]\]|(\w+\.)?content\b)"
)
ASKS_FOR_STRING = re.compile(r"\bis\s+(not\s+)?string\b")
# Names of a message's reasoning; templates know the first, or the second.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class Form:
    """What messages a template takes, as far as it shows.

    Attributes:
        takes_parts: content may be a list of parts.
        takes_strings: content may be a string.
        knows_developers: there may be messages of the role "developer".
    """

    takes_parts: bool
    takes_strings: bool
    knows_developers: bool


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Any]:
    """Several conversations as they are, still unchecked; a lone one in a list."""
    if not isinstance(messages, (list, tuple)):
        raise TypeError(
            f"messages must be a conversation or a list of them, got {type(messages).__name__}"
        )
    lone = bool(messages) and isinstance(messages[0], dict)
    return [messages] if lone else list(messages)


def read_message(message: Any) -> Message:
    """A copy of a message in which what OpenAI and its clients write in several ways has one form.

    Content in parts becomes a list of ``{"type": "text", "text": ...}``; no content, or None,
    becomes an empty list. Arguments of tool calls become objects, from JSON or from nothing. No
    tool calls, or None, are left out, as is all else that is None. Reasoning is under both names
    that templates know.

    Raises:
        TypeError: not a dict.
        ValueError: no role, a part that is no text, or a tool call that is none.
    """
    try:
        return _read_message(message)
    except RecursionError:
        raise ValueError("a message is nested too deeply") from None


def _read_message(message: Any) -> Message:
    if not isinstance(message, dict):
        raise TypeError(f"a message is a dict, not {message!r:.80}")
    if not isinstance(message.get("role"), str):
        raise ValueError(f"a message needs a 'role': {message!r:.80}")
    content, calls = message.get("content"), message.get("tool_calls")
    message = {
        key: value for key, value in message.items() if value is not None or key == "content"
    }
    if not calls:
        message.pop("tool_calls", None)
    else:
        if not isinstance(calls, (list, tuple)):
            raise ValueError(f"tool_calls must be a list, got {calls!r:.80}")
        message["tool_calls"] = [_read_tool_call(call) for call in calls]
    if content is None or isinstance(content, (list, tuple)):
        message["content"] = [{"type": "text", "text": _read_text(part)} for part in content or ()]
    if keys := [key for key in REASONING_KEYS if key in message]:
        reasoning = message[keys[0]]
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _read_text(part: Any) -> str:
    """The text of a part of a message's content."""
    text = part
    if isinstance(part, dict):
        kind = part.get("type", "text")
        text = part.get(TEXT_KEYS.get(kind)) if isinstance(kind, str) else None
    if not isinstance(text, str):
        raise ValueError(f"only text can be served, but a message holds {part!r:.80}")
    return text


def _read_tool_call(call: Any) -> dict[str, Any]:
    """A copy of a tool call with its arguments as an object, since templates write that as JSON."""
    is_bare = isinstance(call, dict) and "name" in call  # the function itself
    function = call if is_bare else call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ValueError(f"a tool call is an object with a 'function', got {call!r:.80}")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ValueError(f"the arguments of a tool call are not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of a tool call must be an object, got {arguments!r:.80}")
    function = {**function, "arguments": arguments}
    return function if is_bare else {**call, "function": function}


@lru_cache(4)
def find_form(template: str) -> Form:
    """The form of messages that a template takes."""
    takes_parts = bool(LOOPS_OVER_CONTENT.search(template))
    return Form(
        takes_parts=takes_parts,
        takes_strings=not takes_parts or bool(ASKS_FOR_STRING.search(template)),
        knows_developers="'developer'" in template or '"developer"' in template,
    )


def fit(messages: list[Message], form: Form) -> list[Message]:
    """Messages that ``read_message`` has read, in the form that a template takes."""
    fitted = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list) and (not form.takes_parts or message["role"] == "tool"):
            content = _join(content)
        elif isinstance(content, str) and not form.takes_strings and message["role"] != "tool":
            content = [{"type": "text", "text": content}]
        fitted.append({**message, "content": content})
    if not form.knows_developers and any(message["role"] == "developer" for message in messages):
        return _developer_to_system(fitted)
    return fitted


def _join(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _developer_to_system(messages: list[Message]) -> list[Message]:
    """For a template without developers: their messages become the system's. If one of these is
    not the first message, or there are several, they are joined into one."""
    messages = [
        {**message, "role": "system"} if message["role"] == "developer" else message
        for message in messages
    ]
    others = [message for message in messages if message["role"] != "system"]
    if messages[1:] == others:
        return messages
    texts = [_join(message["content"]) for message in messages if message["role"] == "system"]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]
