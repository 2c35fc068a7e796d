"""Conversations to prompts, by the chat template."""

from collections.abc import Sequence
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]


def as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[list[Message]]:
    """Several conversations as they are; a lone one in a list.

    Raises:
        TypeError: neither.
        ValueError: a conversation without messages, or a message without a role.
    """
    if not isinstance(messages, (list, tuple)):
        raise TypeError(
            f"messages must be a conversation or a list of them, got {type(messages).__name__}"
        )
    lone = bool(messages) and isinstance(messages[0], dict)
    conversations = [messages] if lone else messages
    for i, conversation in enumerate(conversations):
        if not isinstance(conversation, (list, tuple)):
            raise TypeError(f"messages[{i}] must be a list of messages, got {conversation!r:.80}")
        if not conversation:
            raise ValueError(f"messages[{i}] is a conversation without messages")
        for message in conversation:
            if not isinstance(message, dict):
                raise TypeError(f"messages[{i}] holds {message!r:.80}, which is not a message")
            if not isinstance(message.get("role"), str):
                raise ValueError(f"messages[{i}] holds a message without a 'role': {message!r:.80}")
    return [
        [_flatten(message, f"messages[{i}]") for message in conversation]
        for i, conversation in enumerate(conversations)
    ]


def render_chat(
    tokenizer: Any, conversations: list[list[Message]], options: dict[str, Any]
) -> list[str]:
    """The prompt of each conversation, by the tokenizer's ``apply_chat_template``.

    Raises:
        ValueError: no tokenizer or template, or the template fails; names the conversation.
    """
    if tokenizer is None:
        raise ValueError("this model has no tokenizer: use generate with token ids")
    if not (tokenizer.chat_template or options.get("chat_template")):
        raise ValueError("this model has no chat template: pass chat_template, or use generate")
    prompts = []
    for i, conversation in enumerate(conversations):
        try:
            prompts.append(
                tokenizer.apply_chat_template(conversation, **{**options, "tokenize": False})
            )
        except Exception as error:  # templates raise whatever their authors thought of
            raise ValueError(
                f"messages[{i}]: the chat template fails: {type(error).__name__}: {error}"
            ) from error
    return prompts


def _flatten(message: Message, where: str) -> Message:
    """Text parts, OpenAI's ``[{"type": "text", "text": ...}]``, as one string."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        is_text = isinstance(part, dict) and part.get("type", "text") == "text"
        text = part.get("text") if is_text else part
        if not isinstance(text, str):
            raise ValueError(f"{where}: only text can be served, but a message holds {part!r:.80}")
        texts.append(text)
    return message | {"content": "\n".join(texts)}
