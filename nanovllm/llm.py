"""The public class ``LLM``: the engine with chat templates."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import Message, TokensPrompt, raise_errors
from nanovllm.utils.progress import bar_maker

if TYPE_CHECKING:
    from nanovllm.text.chat_renderer import ChatRenderer


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
        """Generates a response to each conversation, as ``generate`` completes prompts.

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
        with self.turns.until_closed():
            prompts = self._chat_renderer.prompts(
                self.preparer.encoder, messages, bar_maker(use_tqdm), **template_options
            )
        return self._generate(prompts, sampling_params, use_tqdm, on_error, "messages")

    def render_chat(
        self, messages: Seq[Message] | Seq[Seq[Message]], **template_options: Any
    ) -> list[TokensPrompt]:
        """Renders conversations to prompts for ``generate`` or ``add_request``.

        The template runs in a separate process. For one conversation it may use 5 s of CPU time
        and 1 GiB of memory, and return 64 MiB of text. Exceeding a limit is an error.

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
        with self.turns.until_closed():
            encoder = self.preparer.encoder
            prompts = self._chat_renderer.prompts(encoder, messages, **template_options)
        return raise_errors(prompts, "messages")

    @cached_property
    def _chat_renderer(self) -> "ChatRenderer":
        from nanovllm.text.chat_renderer import ChatRenderer

        renderer = ChatRenderer()
        self._on_close.append(renderer.close)
        return renderer
