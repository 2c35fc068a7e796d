"""The public face of the engine."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from tqdm.auto import tqdm

from nanovllm.engine.chat import Message, as_conversations, render_chat
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams


class LLM(LLMEngine):
    """A model and everything needed to run it over a pile of prompts.

    >>> with LLM("path/to/model") as llm:
    ...     outputs = llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=32))
    ...     print(outputs[0].outputs[0].text)  # or outputs[0]["text"]

    Arguments are the fields of ``nanovllm.config.Config``. ``close()``, leaving the ``with``
    block or deleting the object frees its memory; any number can live side by side.
    """

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers conversations; otherwise as ``generate``.

        Args:
            messages: one conversation or several, each a list of ``{"role": ..., "content": ...}``.
            sampling_params: one for all, or one each.
            use_tqdm: as in ``generate``.
            chat_template: a Jinja template instead of the model's own.
            add_generation_prompt: open the assistant's turn.
            continue_final_message: leave the last message open for the model to go on with
                (then ``add_generation_prompt`` has to be False).
            tools: descriptions of functions, for the template.
            chat_template_kwargs: further variables of the template, such as ``enable_thinking``.

        Raises:
            TypeError, ValueError: a bad argument; the message names the conversation.
        """
        options = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }
        prompts = render_chat(self.tokenizer, as_conversations(messages), options)
        # The template spells out every special token, the first one too.
        return self._generate(prompts, sampling_params, use_tqdm, add_special_tokens=False)

    def get_tokenizer(self) -> Any:
        """The checkpoint's transformers tokenizer; None if it has none."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends, else vLLM's defaults.

        Raises:
            ValueError: it recommends what cannot be.
        """
        return self.default_sampling_params()
