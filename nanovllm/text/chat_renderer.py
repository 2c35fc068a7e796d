"""Renders conversations to prompts with a chat template, in a separate process."""

import inspect
import logging
import pickle
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from nanovllm.text.chat import MessageFormat, adapt_messages, detect_format, normalize_message
from nanovllm.text.limited_process import LimitedProcess, ProcessError
from nanovllm.text.prompts import (
    PORTION,
    Message,
    PromptEncoder,
    TokensPrompt,
    as_list,
    map_each,
    map_valid,
)
from nanovllm.utils.progress import slices

logger = logging.getLogger("nanovllm")
TEMPLATE_PROCESS = str(Path(__file__).with_name("template_process.py"))
TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2", ".json", ".txt")  # of files with a template
RENDER_SECONDS = 5.0
MEMORY_BYTES = 1 << 30
# With ``continue_final_message``, this is appended to the last message's text, and marks the end of
# that text in the rendered prompt.
END_OF_TEXT = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatRenderer:
    """Renders conversations to prompts.

    If the template exceeds its time or memory limit or crashes, only that conversation fails.

    Args:
        cpu_seconds: CPU time that the template may take for one conversation.
    """

    def __init__(self, cpu_seconds: float = RENDER_SECONDS) -> None:
        self._process = LimitedProcess(TEMPLATE_PROCESS, cpu_seconds, MEMORY_BYTES)

    def prompts(
        self,
        encoder: PromptEncoder,
        messages: Seq[Message] | Seq[Seq[Message]],
        make_bar: Callable[..., tqdm] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[TokensPrompt | Exception]:
        """Renders and tokenizes conversations. Returns for each conversation its prompt, or a
        TypeError or ValueError if it cannot be rendered or tokenized.

        Args:
            encoder: tokenizes the rendered texts.
            messages: one conversation or several.
            make_bar: makes a progress bar, like ``tqdm``; None to show no bar.

        The other arguments are those of ``LLM.render_chat``.

        Raises:
            TypeError: ``messages`` is neither a conversation nor a list.
            ValueError: there is no tokenizer, or no chat template.
        """
        tokenizer = encoder.tokenizer
        if tokenizer is None:
            raise ValueError("this model has no tokenizer: use generate with token ids")
        if not (tokenizer.chat_template or chat_template):
            raise ValueError("this model has no chat template: pass chat_template, or use generate")
        options = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }
        conversations = as_conversations(messages)
        prompts: list[TokensPrompt | Exception] = []
        for portion in slices(len(conversations), PORTION, make_bar, "Tokenizing"):
            texts = self.render(tokenizer, conversations[portion], options)
            prompts += encoder.encode_texts(texts)  # they contain all special tokens, BOS included
        return prompts

    def render(
        self, tokenizer: Any, conversations: Iterable[Any], options: dict[str, Any]
    ) -> list[str | Exception]:
        """Returns each conversation's prompt, or a TypeError or ValueError with the reason why it
        cannot be rendered. Does not modify the messages.

        Args:
            tokenizer: a transformers tokenizer, for its templates and special tokens.
            conversations: lists of messages.
            options: ``chat_template``, ``tools``, ``add_generation_prompt`` and
                ``continue_final_message`` as in ``LLM.render_chat``, and any other variables for
                the template.
        """
        try:
            shared, message_format, continues = _read_options(tokenizer, **options)
        except RecursionError:
            reason = "its tools or variables are nested too deeply"
            return [_template_error(reason) for _ in conversations]
        except Exception as error:  # reading a tool's function and docstring runs user code
            return [_template_error(f"{type(error).__name__}: {error}") for _ in conversations]
        prepare = partial(_prepare, message_format=message_format, continues=continues)
        return map_valid(partial(self._render, shared), map_each(prepare, conversations))

    def close(self) -> None:
        """Ends the process. The next conversation starts a new one."""
        self._process.close()

    def _render(
        self, shared: bytes, prepared: Seq[tuple[bytes, str | None]]
    ) -> list[str | Exception]:
        responses = self._process.run([(shared, messages) for messages, _ in prepared])
        final_texts = (text for _, text in prepared)
        return map_each(_read_response, zip(responses, final_texts, strict=True))


def as_conversations(messages: Seq[Message] | Seq[Seq[Message]]) -> list[Any]:
    """Returns a list of conversations. A single conversation becomes a list of one. The messages
    are not checked."""
    items = as_list(messages)
    if items is None:
        raise TypeError(
            f"messages must be a conversation or a list of them, got {type(messages).__name__}"
        )
    return [items] if items and isinstance(items[0], dict) else items


def _read_options(
    tokenizer: Any,
    chat_template: str | None = None,
    tools: Any = None,
    add_generation_prompt: Any = False,
    continue_final_message: Any = False,
    **variables: Any,
) -> tuple[bytes, MessageFormat, bool]:
    """Returns the part that all requests to the process share, the template's message format, and
    whether the model continues the last message."""
    if not isinstance(continue_final_message, bool):
        raise TypeError(f"continue_final_message is True or False, not {continue_final_message!r}")
    if continue_final_message and add_generation_prompt:
        raise ValueError("continue_final_message and add_generation_prompt exclude each other")
    if "messages" in variables:
        raise ValueError("the template variable 'messages' is reserved for the conversation")
    template = tokenizer.get_chat_template(chat_template, tools)
    if "{" not in template and Path(template).suffix in TEMPLATE_SUFFIXES:
        raise ValueError(
            f"chat_template must be a template, but {template!r:.80} is a path: read the file, or "
            f"use LLM(chat_template=path)"
        )
    if tools and "tools" not in template:
        _warn_of_ignored_tools(template)
    shared = {
        "documents": None,
        **tokenizer.special_tokens_map,
        **variables,
        "tools": None if tools is None else [_tool_schema(tool) for tool in tools],
        "add_generation_prompt": add_generation_prompt,
    }
    return _pack((template, shared)), detect_format(template), continue_final_message


@lru_cache(maxsize=16)  # once for each template; requests may bring many
def _warn_of_ignored_tools(template: str) -> None:
    logger.warning("the chat template ignores tools, so the model does not see them")


def _tool_schema(tool: Any) -> dict[str, Any]:
    """Returns the JSON schema of a tool, which may be a dict or a function."""
    if inspect.isfunction(tool) or inspect.ismethod(tool):
        from transformers.utils import get_json_schema

        return get_json_schema(tool)
    if not isinstance(tool, dict):
        raise ValueError(f"a tool is a dict, or a function with a docstring, not {tool!r:.80}")
    return tool


def _prepare(
    conversation: Any, message_format: MessageFormat, continues: bool
) -> tuple[bytes, str | None]:
    """Returns the pickled messages, and the last message's text if the model continues it.

    Raises:
        TypeError: the conversation is not a list, or holds an object that is not plain data.
        ValueError: there are no messages, ``normalize_message`` refuses one, the message to
            continue has no text, or lists or dicts are nested too deeply.
    """
    try:
        items = as_list(conversation)
        if items is None:
            raise TypeError(f"a conversation is a list of messages, not {conversation!r:.80}")
        if not items:
            raise ValueError("a conversation needs at least one message")
        normalized = [normalize_message(message) for message in items]
        messages = adapt_messages(normalized, message_format)
        text = _mark_end(messages[-1]) if continues else None
        return _pack(messages), text
    except RecursionError:
        raise ValueError("the conversation is nested too deeply") from None


def _mark_end(message: dict[str, Any]) -> str:
    """Appends END_OF_TEXT to the message's text, in place. Returns the text without it."""
    content = message["content"]
    if isinstance(content, list) and content:
        *parts, part = content
        message["content"] = [*parts, {**part, "text": part["text"] + END_OF_TEXT}]
        return part["text"]
    if not isinstance(content, str):
        raise ValueError("continue_final_message needs a last message with text")
    message["content"] = content + END_OF_TEXT
    return content


def _read_response(response: tuple[bytes | ProcessError, str | None]) -> str:
    """Returns the prompt. Raises ValueError if the template failed."""
    data, final_text = response
    if isinstance(data, ProcessError):
        raise ValueError(f"the chat template {data}")
    text = data[1:].decode("utf-8", "surrogatepass")
    if data[:1] != b"T":
        raise _template_error(text)
    if final_text is None:
        return text
    before, mark, after = text.rpartition(END_OF_TEXT.strip())
    if not mark or final_text.strip() not in text:
        raise _template_error("it changes or leaves out the last message (continue_final_message)")
    # If END_OF_TEXT has lost its trailing space, the template strips messages: strip the text too.
    return before if after.startswith(" ") else before.rstrip()


def _template_error(reason: str) -> ValueError:
    return ValueError(f"the chat template fails: {reason}")


def _pack(value: Any) -> bytes:
    """Pickles plain data: strings, numbers, booleans, None, lists, tuples and dicts. Instances of
    their subclasses are converted to these types first.

    Raises:
        TypeError: the data holds an object of another type.
        RecursionError: lists or dicts are nested too deeply.
    """
    return pickle.dumps(_as_plain(value), pickle.HIGHEST_PROTOCOL)


def _as_plain(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return {_as_plain(key): _as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_as_plain(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    raise TypeError(
        f"a chat template accepts strings, numbers, booleans, None, lists and dicts, not "
        f"{type(value).__name__}: {value!r:.80}"
    )
