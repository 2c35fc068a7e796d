"""Mistakes of users, and what the error of each has to say.

The module imports little: ``test_bad_input.py`` also checks it in a process of its own, under
``python -O``, which compiles all that it imports.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest

from nanovllm import LLM, RequestOutput, SamplingParams, StructuredOutputsParams

VOCAB_SIZE = 512  # as tests/tiny_models.py has it, which imports transformers
MAX_MODEL_LEN = 100
SMALL: dict[str, Any] = {
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 16,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
PROMPTS = [[1, 2, 3], [400, 7] * 10, [9, 8, 7, 6, 5], list(range(50, 125))]  # cut: over 64
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
GOOD = [1, 2, 3]

# Mistakes: what is given, the exception, and what its message must say.
BAD_PROMPTS: dict[str, tuple[Any, type[Exception], str]] = {
    "none": (None, TypeError, "prompts must be a prompt or a list of them, got NoneType"),
    "int": (5, TypeError, "prompts must be a prompt or a list of them, got int"),
    "float": (0.5, TypeError, "prompts must be a prompt or a list of them, got float"),
    "set": ({1, 2}, TypeError, "prompts must be a prompt or a list of them, got set"),
    "generator": ((p for p in ()), TypeError, "prompts must be a prompt or a list of them"),
    "object": (object(), TypeError, "prompts must be a prompt or a list of them, got object"),
    "empty-ids": ([[]], ValueError, r"prompts\[0\]: the prompt is empty"),
    "empty-second": ([GOOD, []], ValueError, r"prompts\[1\]: the prompt is empty"),
    "empty-dict-ids": ({"prompt_token_ids": []}, ValueError, r"prompts\[0\]: the prompt is empty"),
    "none-in-list": ([GOOD, None], TypeError, r"prompts\[1\]: a prompt is .* not NoneType"),
    "int-in-list": ([GOOD, 5], TypeError, r"prompts\[1\]: a prompt is .* not int"),
    "lone-floats": ([1.0, 2.0], TypeError, r"prompts\[0\]: a prompt is .* not float"),
    "lone-bools": ([True, False], TypeError, r"prompts\[0\]: a prompt is .* not bool"),
    "float-id": ([GOOD, [1, 2.0]], TypeError, r"prompts\[1\]: token ids must be ints, got 2\.0"),
    "bool-id": ([GOOD, [1, True]], TypeError, r"prompts\[1\]: token ids must be ints, got True"),
    "none-id": ([[None]], TypeError, r"prompts\[0\]: token ids must be ints, got None"),
    "string-id": ([["1"]], TypeError, r"prompts\[0\]: token ids must be ints, got '1'"),
    "nested": ([[[1, 2]]], TypeError, r"prompts\[0\]: token ids must be ints, got \[1, 2\]"),
    "negative-id": (
        [GOOD, [5, -1]],
        ValueError,
        r"prompts\[1\]: token id -1 is outside the vocabulary: ids are 0 to 511",
    ),
    "id-too-large": ([[VOCAB_SIZE]], ValueError, r"prompts\[0\]: token id 512 is outside"),
    "id-far-too-large": ([GOOD, GOOD, [2**70]], ValueError, r"prompts\[2\]: token id .* outside"),
    "dict-without-keys": ([GOOD, {}], ValueError, r"prompts\[1\]: a dict prompt needs 'prompt_"),
    "dict-other-keys": (
        {"text": "hi"},
        ValueError,
        r"prompts\[0\]: a dict prompt has .*not 'text'",
    ),
    "dict-none": (
        {"prompt_token_ids": None},
        ValueError,
        r"prompts\[0\]: a dict prompt needs 'prompt_",
    ),
    "dict-string-ids": ({"prompt_token_ids": "ab"}, TypeError, r"prompts\[0\]: a prompt is .* str"),
    "dict-float-ids": ([{"prompt_token_ids": [0.5]}], TypeError, r"prompts\[0\]: token ids must"),
    "dict-int-prompt": ([{"prompt": 5}], TypeError, r"prompts\[0\]: a prompt is .* not int"),
    "text": ("hello", ValueError, r"prompts\[0\]: this model has no tokenizer: give .* token ids"),
    "text-in-list": ([GOOD, "hello"], ValueError, r"prompts\[1\]: this model has no tokenizer"),
    "text-in-dict": ({"prompt": "hello"}, ValueError, r"prompts\[0\]: this model has no tokenizer"),
    "too-long": (
        [GOOD, [1] * MAX_MODEL_LEN],
        ValueError,
        r"prompts\[1\]: the prompt has 100 tokens .* limited to 100 tokens by max_model_len: "
        r"shorten the prompt or raise it",
    ),
    "far-too-long": ([[1] * 100_000], ValueError, r"prompts\[0\]: the prompt has 100000 tokens"),
}
BAD_PARAMS: dict[str, tuple[Any, type[Exception], str]] = {
    "too-many": ([GREEDY] * 3, ValueError, "2 prompts but 3 sampling_params: give one for all or"),
    "too-few": ([GREEDY], ValueError, "2 prompts but 1 sampling_params"),
    "empty": ([], ValueError, "2 prompts but 0 sampling_params"),
    "dict": (
        {"temperature": 0},
        TypeError,
        r"sampling_params must be SamplingParams, got dict",
    ),
    "float": (0.5, TypeError, r"sampling_params must be SamplingParams, got float"),
    "none-in-list": ([GREEDY, None], TypeError, r"\[1\]: sampling_params must be .* NoneType"),
    "class": (SamplingParams, TypeError, r"sampling_params must be SamplingParams"),
    "stop-token-outside": (
        [GREEDY, SamplingParams(stop_token_ids=[3, VOCAB_SIZE])],
        ValueError,
        r"prompts\[1\]: sampling_params: stop_token_ids holds 512, which is outside the "
        r"vocabulary: ids are 0 to 511",
    ),
    "allowed-token-outside": (
        SamplingParams(allowed_token_ids=[VOCAB_SIZE]),
        ValueError,
        r"sampling_params: allowed_token_ids holds 512",
    ),
    "biased-token-outside": (
        [GREEDY, SamplingParams(logit_bias={10**6: 1.0})],
        ValueError,
        r"prompts\[1\]: sampling_params: logit_bias holds 1000000",
    ),
    "too-many-logprobs": (
        [GREEDY, SamplingParams(logprobs=VOCAB_SIZE + 1)],
        ValueError,
        r"prompts\[1\]: sampling_params: logprobs is 513, but at most 20 are allowed",
    ),
    "too-many-prompt-logprobs": (
        [GREEDY, SamplingParams(prompt_logprobs=VOCAB_SIZE + 1)],
        ValueError,
        r"prompts\[1\]: sampling_params: prompt_logprobs is 513",
    ),
    "stop-string-without-tokenizer": (
        [GREEDY, SamplingParams(stop="x")],
        ValueError,
        r"prompts\[1\]: sampling_params: this model has no tokenizer, which stop strings need",
    ),
    "bad-words-without-tokenizer": (
        [GREEDY, SamplingParams(bad_words=["x"])],
        ValueError,
        r"prompts\[1\]: sampling_params: this model has no tokenizer, which bad_words need",
    ),
    "grammar-without-tokenizer": (
        [GREEDY, SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))],
        ValueError,
        r"prompts\[1\]: structured_outputs cannot be used: .*tokenizer",
    ),
}
BAD_SAMPLING: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "temperature-negative": (
        {"temperature": -0.1},
        ValueError,
        r"temperature .* at least 0.* -0\.1",
    ),
    "temperature-nan": ({"temperature": math.nan}, ValueError, "temperature .* at most 1e.30"),
    "temperature-inf": ({"temperature": math.inf}, ValueError, "temperature .* at most 1e.30"),
    "temperature-huge": ({"temperature": 10**400}, ValueError, "temperature .* at most 1e.30"),
    "temperature-text": ({"temperature": "1"}, TypeError, "temperature must be a number, got '1'"),
    "temperature-none": ({"temperature": None}, TypeError, "temperature must be a number"),
    "temperature-bool": ({"temperature": True}, TypeError, "temperature must be a number"),
    "max-tokens-0": ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1, got 0"),
    "max-tokens-negative": (
        {"max_tokens": -5},
        ValueError,
        "max_tokens must be at least 1, got -5",
    ),
    "max-tokens-float": ({"max_tokens": 1.5}, TypeError, r"max_tokens must be an int.*1\.5"),
    "max-tokens-text": ({"max_tokens": "8"}, TypeError, "max_tokens must be an int"),
    "max-tokens-bool": ({"max_tokens": True}, TypeError, "max_tokens must be an int"),
    "ignore-eos-int": ({"ignore_eos": 1}, TypeError, "ignore_eos must be True or False, got 1"),
    "n-without-randomness": ({"n": 2, "temperature": 0}, ValueError, "n=2 greedy .* temperature"),
    "empty-stop": ({"stop": ["a", ""]}, ValueError, "stop must not contain an empty string"),
    "min-over-max": ({"min_tokens": 17}, ValueError, "min_tokens is 17, more than max_tokens, 16"),
    "infinite-bias": (
        {"logit_bias": {5: math.inf}},
        ValueError,
        r"logit_bias\[5\] must be",
    ),
    "unknown": ({"temprature": 1.0}, TypeError, "temprature"),
}
# Values that each field of Config refuses, naming itself.
BAD_CONFIG: dict[str, list[Any]] = {
    "model": ["", None, 5, b"bytes", ["list"]],
    "max_num_batched_tokens": [0, -1, 1.5, "8", True],
    "max_num_seqs": [0, -1, 1.5, "8", True],
    "max_model_len": [1, 0, -2, 1.5, "8", True],
    "gpu_memory_utilization": [0, -0.5, 1.1, math.nan, math.inf, "0.9", True],
    "tensor_parallel_size": [0, -1, 9, 1.0, "1", True],
    "enforce_eager": [1, 0, "yes"],
    "kvcache_block_size": [0, -1, 16.0, "16", True],
    "num_kvcache_blocks": [0, -2, 1.5, "8", True],
    "device": ["tpu", "", 0],
    "dtype": ["float64", "int8", "fp16", "", 16],
    "attention_backend": ["fast", ""],
    "enable_prefix_caching": [1, 0, "yes"],
    "enable_reordering": [1, 0, "yes"],
    "enable_sleep_mode": [1, 0, "yes"],
    "batch_invariant": [1, 0, "yes"],
    "kv_cache_dtype": ["fp8_e5m2", "int8", "", 8],
    "quantization": ["awq", "", 8],
    "load_format": ["pt", ""],
    "seed": [-1, 2**64, 1.5, "0", True],
    "tokenizer": ["", 5, True],
    "skip_tokenizer_init": [1, "yes"],
    "max_logprobs": [-2, 1.5, "5", True],
    "logprobs_mode": ["raw_logits", "", 5],
}
UNKNOWN_KEYWORDS = {
    "max_num_seq": "max_num_seqs",
    "tensor_parallel": "tensor_parallel_size",
    "max_len": "max_model_len",
    "enforce_eagerly": "enforce_eager",
}
NO_SUCH_MODEL = "/no/such/model"


def refused(
    call: Callable[[], Any], exception: type[Exception] | tuple[type[Exception], ...], match: str
) -> None:
    with pytest.raises(exception, match=match):
        call()


def refuse_config(field: str, value: Any) -> None:
    """Refused by its name, before the checkpoint (which is not there) is looked for."""
    arguments = {"model": NO_SUCH_MODEL, field: value}
    model = arguments.pop("model")
    refused(lambda: LLM(model, **arguments), (TypeError, ValueError), rf"\b{field}\b")


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [out["token_ids"] for out in outputs]


def generate(llm: LLM, prompts: Any = PROMPTS, params: Any = GREEDY) -> list[list[int]]:
    return tokens(llm.generate(prompts, params, use_tqdm=False))


def check_mistakes(path: str) -> None:
    """Every refusal of the tables above, without pytest and without assert."""
    with LLM(path, **SMALL) as llm:
        before = generate(llm)
        for prompts, exception, match in BAD_PROMPTS.values():
            refused(lambda p=prompts: generate(llm, p), exception, match)
        for params, exception, match in BAD_PARAMS.values():
            refused(lambda p=params: generate(llm, [GOOD, GOOD], p), exception, match)
        for values, exception, match in BAD_SAMPLING.values():
            refused(lambda v=values: SamplingParams(**v), exception, match)
        for field, values in BAD_CONFIG.items():
            for value in values:
                refuse_config(field, value)
        for name, near in UNKNOWN_KEYWORDS.items():
            refused(lambda n=name: LLM(path, **{n: 1}), TypeError, near)
        refused(lambda: llm.abort_request("no-such-id"), ValueError, "no unfinished request")
        llm.add_request(GOOD)
        refused(lambda: generate(llm), ValueError, "finish the other requests")
        while not llm.is_finished():
            llm.step()
        if generate(llm) != before:
            raise RuntimeError("the tokens have changed")
    refused(lambda: generate(llm), ValueError, "closed")
    print("optimised" if not __debug__ else "plain", "done")
