"""The public class ``LLM``: the engine with chat templates."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import Any

from tqdm.auto import tqdm

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.preparation import PORTION
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.chat import Message, to_conversation_list
from nanovllm.text.chat_renderer import ChatRenderer
from nanovllm.text.prompts import TokensPrompt, map_valid, raise_errors
from nanovllm.utils.progress import bar_maker, slices


class LLM(LLMEngine):
    """Loads a model and generates completions for lists of prompts.

    Examples:
        >>> with LLM("path/to/model") as llm:
        ...     outputs = llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=32))
        ...     print(outputs[0].outputs[0].text)  # or outputs[0]["text"]

    The arguments are the fields of ``nanovllm.config.Config``. ``close()``, leaving the ``with``
    block or deleting the object frees its memory. A process can have several ``LLM`` objects at
    the same time.
    """

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        *,
        on_error: str = "raise",
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Generates responses to conversations. Works like ``generate``.

        Args:
            messages: one conversation or several, each a list of ``{"role": ..., "content": ...}``.
            sampling_params: one for all conversations, or a list with one for each.
            use_tqdm: as in ``generate``.
            on_error: as in ``generate``.
            template_options: as in ``render_chat``.

        Raises:
            TypeError, ValueError: an invalid argument. If a conversation is invalid, the message
                has its index.
        """
        prompts = self._render_chat(messages, bar_maker(use_tqdm), **template_options)
        return self._generate(prompts, sampling_params, use_tqdm, on_error, "messages")

    def render_chat(
        self, messages: Seq[Message] | Seq[Seq[Message]], **template_options: Any
    ) -> list[TokensPrompt]:
        """Renders conversations to prompts for ``generate`` or ``add_request``.

        The template runs in a separate process. A conversation for which it takes over 5 s of CPU
        time, over 1 GiB of memory, or returns over 64 MiB of text, is an error.

        Args:
            messages: one conversation or several.
            template_options: ``chat_template``: a Jinja template to use instead of the model's;
                ``add_generation_prompt=True``: start the assistant's turn at the end of the prompt;
                ``continue_final_message=False``: let the model continue the last message (this
                needs ``add_generation_prompt=False``); ``tools``: JSON schemas of functions, or
                functions with docstrings; ``chat_template_kwargs``: further variables for the
                template, such as ``enable_thinking``.

        Raises:
            TypeError, ValueError: an invalid argument. If a conversation is invalid, the message
                has its index.
        """
        return raise_errors(self._render_chat(messages, **template_options), "messages")

    def _render_chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        make_bar: Callable[..., tqdm] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[TokensPrompt | Exception]:
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: use generate with token ids")
        if not (self.tokenizer.chat_template or chat_template):
            raise ValueError("this model has no chat template: pass chat_template, or use generate")
        options = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }
        conversations = to_conversation_list(messages)
        prompts: list[TokensPrompt | Exception] = []
        for portion in slices(len(conversations), PORTION, make_bar, "Tokenizing"):
            texts = self._chat_renderer.render(self.tokenizer, conversations[portion], options)
            # The rendered text contains all special tokens, BOS included.
            encoded = self.prompt_encoder.encode(texts, add_special_tokens=False)
            prompts += map_valid(with_tokens, encoded)
        return prompts

    @cached_property
    def _chat_renderer(self) -> ChatRenderer:
        return ChatRenderer()

    def close(self) -> None:
        super().close()
        self._chat_renderer.close()

    exit = close  # the name in nano-vLLM

    def get_tokenizer(self) -> Any:
        """Returns the transformers tokenizer, or None if the engine has none."""
        return self.tokenizer


def with_tokens(encoded: list[tuple[str, list[int]]]) -> list[TokensPrompt]:
    """Converts pairs of text and token ids to prompts with both."""
    return [{"prompt": text, "prompt_token_ids": token_ids} for text, token_ids in encoded]
