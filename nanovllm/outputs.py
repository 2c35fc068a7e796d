"""What a finished request returns."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: position among the completions of its prompt.
        text: the completion without special tokens; empty where the model has no tokenizer.
        token_ids: every generated token, a final end-of-sequence token included.
        finish_reason: "stop" (an end-of-sequence token) or "length" (``max_tokens``, the
            model's length limit, or the size of the KV cache).
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request, readable in vLLM's style (``out.outputs[0].text``) and in
    nano-vLLM's (``out["text"]``, ``out["token_ids"]``).

    Attributes:
        request_id: what ``add_request`` returned.
        prompt: the prompt's text; None if it was given as token ids.
        prompt_token_ids: the prompt as the model saw it.
        outputs: its completions.
        finished: whether generation has ended.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True

    def __getitem__(self, key: str) -> Any:
        if key in ("text", "token_ids"):
            return getattr(self.outputs[0], key)
        raise KeyError(f"{key!r}: a result has 'text' and 'token_ids'")
