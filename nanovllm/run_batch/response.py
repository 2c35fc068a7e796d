"""Converts the engine's outputs to response bodies in OpenAI's format."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.run_batch.request import CHAT_URL, BatchRequest, Generation

LOWEST_LOGPROB = -9999.0  # replaces minus infinity, which JSON lacks; vLLM uses the same


def make_body(
    request: BatchRequest, generation: Generation, outputs: Sequence[RequestOutput], created: int
) -> dict[str, Any]:
    """Returns the body of a request's response.

    Args:
        request: the request.
        generation: the request's parsed body.
        outputs: the finished output of each prompt, in order.
        created: the time of creation, in seconds since the epoch.
    """
    completions = [completion for output in outputs for completion in output.outputs]
    is_chat = request.url == CHAT_URL
    choices = [
        {
            "index": index,
            **(_chat_content if is_chat else _text_content)(completion, generation),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        for index, completion in enumerate(completions)
    ]
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_completion_tokens = sum(len(completion.token_ids) for completion in completions)
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request.digest}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": generation.model,
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": num_prompt_tokens + num_completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs)
            },
        },
    }


def _chat_content(completion: CompletionOutput, generation: Generation) -> dict[str, Any]:
    adds_prompt = generation.template["add_generation_prompt"]
    role = "assistant" if adds_prompt else generation.messages[-1]["role"]
    logprobs = None
    if completion.logprobs is not None:
        num_best = generation.params.logprobs or 0
        content = [_chat_logprobs(each, num_best) for each in completion.logprobs if each]
        logprobs = {"content": content, "refusal": None}
    message = {"role": role, "content": completion.text, "refusal": None}
    return {"message": message, "logprobs": logprobs}


def _chat_logprobs(entries: dict[int, Logprob], num_best: int) -> dict[str, Any]:
    """Returns the log-probabilities of the sampled token and of the ``num_best`` most likely ones.

    The first entry is the sampled token. The other entries are the most likely tokens, except the
    sampled token."""
    sampled, *others = entries.values()
    best = others
    if len(others) < num_best:  # the sampled token is one of the most likely tokens
        best = sorted(entries.values(), key=lambda entry: entry.rank or 0)
    return _entry(sampled) | {"top_logprobs": [_entry(entry) for entry in best]}


def _entry(entry: Logprob) -> dict[str, Any]:
    token = entry.decoded_token or ""
    return {
        "token": token,
        "logprob": _finite(entry.logprob),
        "bytes": list(token.encode("utf-8", errors="replace")),
    }


def _text_content(completion: CompletionOutput, generation: Generation) -> dict[str, Any]:
    if completion.logprobs is None:
        return {"text": completion.text, "logprobs": None}
    positions = [position for position in completion.logprobs if position]
    sampled = [next(iter(position.values())) for position in positions]
    tokens = [entry.decoded_token or "" for entry in sampled]
    logprobs = {
        "tokens": tokens,
        "token_logprobs": [_finite(entry.logprob) for entry in sampled],
        "top_logprobs": [
            {entry.decoded_token or "": _finite(entry.logprob) for entry in position.values()}
            for position in positions
        ],
        "text_offset": [*accumulate(map(len, tokens), initial=0)][:-1],
    }
    return {"text": completion.text, "logprobs": logprobs}


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
