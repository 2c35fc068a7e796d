"""Conversations to prompts, by the chat template."""

from collections.abc import Sequence
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Any]:
    """Several conversations as they are, still unchecked; a lone one in a list."""
    if not isinstance(messages, (list, tuple)):
        raise TypeError(
            f"messages must be a conversation or a list of them, got {type(messages).__name__}"
        )
    lone = bool(messages) and isinstance(messages[0], dict)
    return [messages] if lone else list(messages)


def render_chat(tokenizer: Any, conversation: Any, options: dict[str, Any]) -> str:
    """The prompt of a conversation, by the tokenizer's ``apply_chat_template``.

    Raises:
        TypeError: not a conversation.
        ValueError: no messages, one without a role, or the template fails.
    """
    if not isinstance(conversation, (list, tuple)):
        raise TypeError(f"a conversation is a list of messages, not {conversation!r:.80}")
    if not conversation:
        raise ValueError("a conversation needs at least one message")
    messages = [_check_message(message) for message in conversation]
    try:
        return tokenizer.apply_chat_template(messages, **{**options, "tokenize": False})
    except Exception as error:  # templates raise whatever their authors thought of
        raise ValueError(f"the chat template fails: {type(error).__name__}: {error}") from error


def _check_message(message: Any) -> Message:
    """The message, text parts (OpenAI's ``[{"type": "text", "text": ...}]``) as one string."""
    if not isinstance(message, dict):
        raise TypeError(f"a message is a dict, not {message!r:.80}")
    if not isinstance(message.get("role"), str):
        raise ValueError(f"a message needs a 'role': {message!r:.80}")
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        is_text = isinstance(part, dict) and part.get("type", "text") == "text"
        text = part.get("text") if is_text else part
        if not isinstance(text, str):
            raise ValueError(f"only text can be served, but a message holds {part!r:.80}")
        texts.append(text)
    return message | {"content": "\n".join(texts)}
