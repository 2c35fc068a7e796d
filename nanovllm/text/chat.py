"""Normalizes chat messages and converts them to the format that a chat template expects."""

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from nanovllm.text.prompts import Message

# The content-part types that hold text, each with the key of its text.
TEXT_KEYS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
# LOOPS_OVER_CONTENT matches a template that loops over content parts. CHECKS_FOR_STRING matches one
# that tests whether content is a string.
LOOPS_OVER_CONTENT = re.compile(
    r"\{%[-+]?\s*for\s+\w+\s+in\s+(\w+\[['\"]content['\"]\]|(\w+\.)?content\b)"
)
CHECKS_FOR_STRING = re.compile(r"\bis\s+(not\s+)?string\b")
# Keys under which clients send a message's reasoning. Templates read the first or the second.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """The message format that a chat template expects, as detected in its source.

    Attributes:
        accepts_parts: whether content may be a list of parts.
        accepts_strings: whether content may be a string.
        supports_developer_role: whether messages may have the role "developer".
    """

    accepts_parts: bool
    accepts_strings: bool
    supports_developer_role: bool


def normalize_message(message: Any) -> Message:
    """Converts a message from any variant of OpenAI's format to one format. Returns a copy.

    Content parts become a list of ``{"type": "text", "text": ...}``; content that may be missing
    becomes an empty list. Tool-call arguments are parsed from JSON to an object; missing arguments
    become an empty object. An empty ``tool_calls`` and keys with the value None are dropped.
    Reasoning is stored under both keys that templates read.

    Raises:
        TypeError: the message is not a dict.
        ValueError: the message has no role, a system's or user's message has no content, content is
            not text, or a tool call is invalid.
        RecursionError: the message is nested too deeply.
    """
    if not isinstance(message, dict):
        raise TypeError(f"a message is a dict, not {message!r:.80}")
    if not isinstance(message.get("role"), str):
        raise ValueError(f"a message needs a 'role': {message!r:.80}")
    if message["role"] in ("system", "user") and "content" not in message:
        raise ValueError(f"a {message['role']} message needs a 'content': {message!r:.80}")
    content, calls = message.get("content"), message.get("tool_calls")
    message = {
        key: value for key, value in message.items() if value is not None or key == "content"
    }
    if not calls:
        message.pop("tool_calls", None)
    else:
        if not isinstance(calls, (list, tuple)):
            raise ValueError(f"tool_calls must be a list, got {calls!r:.80}")
        message["tool_calls"] = [_normalize_tool_call(call) for call in calls]
    if not isinstance(content, (str, list, tuple, type(None))):
        raise ValueError(
            f"a message's 'content' must be a string or a list of text parts, got {content!r:.80}"
        )
    if content is None or isinstance(content, (list, tuple)):
        message["content"] = [{"type": "text", "text": _part_text(part)} for part in content or ()]
    if keys := [key for key in REASONING_KEYS if key in message]:
        reasoning = message[keys[0]]
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _part_text(part: Any) -> str:
    """Returns the text of a content part, which may be a string or a dict."""
    text = part
    if isinstance(part, dict):
        kind = part.get("type", "text")
        text = part.get(TEXT_KEYS.get(kind)) if isinstance(kind, str) else None
    if not isinstance(text, str):
        raise ValueError(
            f"message content must be text, got {part!r:.80}; images and audio are not supported"
        )
    return text


def _normalize_tool_call(call: Any) -> dict[str, Any]:
    """Returns a copy of a tool call whose arguments are an object, not JSON text."""
    is_bare = isinstance(call, dict) and "name" in call  # the function without its wrapper
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
def detect_format(template: str) -> MessageFormat:
    """Detects the message format that a template expects."""
    accepts_parts = bool(LOOPS_OVER_CONTENT.search(template))
    return MessageFormat(
        accepts_parts=accepts_parts,
        accepts_strings=not accepts_parts or bool(CHECKS_FOR_STRING.search(template)),
        supports_developer_role="'developer'" in template or '"developer"' in template,
    )


def adapt_messages(messages: list[Message], target: MessageFormat) -> list[Message]:
    """Converts normalized messages to the format that a template expects."""
    adapted = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list) and (not target.accepts_parts or message["role"] == "tool"):
            content = _join_parts(content)
        elif isinstance(content, str) and not target.accepts_strings and message["role"] != "tool":
            content = [{"type": "text", "text": content}]
        adapted.append({**message, "content": content})
    if not target.supports_developer_role and any(
        message["role"] == "developer" for message in messages
    ):
        return _developer_to_system(adapted)
    return adapted


def _join_parts(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _developer_to_system(messages: list[Message]) -> list[Message]:
    """Turns developer messages into system messages, for templates without a developer role.

    Templates expect a single system message at the start. If there are several, or the only one
    comes later, they are joined into one message at the start."""
    messages = [
        {**message, "role": "system"} if message["role"] == "developer" else message
        for message in messages
    ]
    others = [message for message in messages if message["role"] != "system"]
    if messages[1:] == others:
        return messages
    texts = [_join_parts(message["content"]) for message in messages if message["role"] == "system"]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]
