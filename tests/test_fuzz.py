"""Arguments of any kind: each is refused with a TypeError or a ValueError that says something, or
served; and whatever it is, the request beside it gets its tokens."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.config import Config
from tests.tiny_models import VOCAB_SIZE

SMALL: dict[str, Any] = {
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 32,
    "max_model_len": 100,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
GOOD = [1, 2, 3, 4]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
FEW, MANY = 60, pytest.param(400, marks=pytest.mark.slow)  # examples of each kind
sizes = pytest.mark.parametrize("num_examples", [FEW, MANY])
counts: Counter[str] = Counter()

ODD: list[Any] = [
    *(None, True, False, "", "x", b"x", "\ud800", "\x00", [], {}, (), set(), [None], [[]], [""]),
    *(0, 1, -1, 2, 7, 511, 512, 2**31, 2**63, 2**64, -(2**63), 10**30, 10**400),
    *(0.0, 0.5, 1.0, -0.5, 1e-12, 1e308, math.nan, math.inf, -math.inf, 1j),
    *(np.int64(3), np.float32(0.5), np.nan, np.array([1, 2]), np.array(3), object(), int, ...),
    *({"a": 1}, {1: 2.0}, {1: math.nan}, {-1: 0.0}, {10**9: 1.0}, [3, 4], [-1], [2**70], range(3)),
    *("stop", ["stop", 5], ["a", "b"], [True], lambda: None, Exception("x")),
]
odd = st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=8)
odd |= st.lists(odd, max_size=3) | st.dictionaries(st.text(max_size=3), odd, max_size=2)
token_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=60)
prompts = (
    odd
    | token_ids
    | st.lists(odd | st.integers(0, 600), max_size=120)
    | st.text(max_size=200)
    | st.fixed_dictionaries({}, optional={"prompt": odd, "prompt_token_ids": odd | token_ids})
)
sensible = {
    "n": st.integers(1, 3),
    "temperature": st.floats(0, 3),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 600),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "stop": st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "stop_token_ids": token_ids,
    "min_tokens": st.integers(0, 3),
    "logprobs": st.integers(-1, 20),
    "prompt_logprobs": st.integers(-1, 5),
    "bad_words": st.lists(st.text(min_size=1, max_size=3), max_size=2),
    "allowed_token_ids": token_ids,
    "logit_bias": st.dictionaries(st.integers(0, 511), st.floats(-100, 100), max_size=4),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.5, 2),
    "structured_outputs": st.sampled_from(
        [StructuredOutputsParams(choice=["a", "bc"]), StructuredOutputsParams(regex="[a-c]{2}")]
    ),
}
sensible_settings = {
    "model": st.just("x"),
    "gpu_memory_utilization": st.floats(0.01, 1),
    "device": st.sampled_from(["auto", "cpu"]),
    "dtype": st.sampled_from(["auto", "float32"]),
    "attention_backend": st.sampled_from(["auto", "torch"]),
    "load_format": st.sampled_from(["auto", "dummy"]),
    **dict.fromkeys(("enforce_eager", "enable_prefix_caching"), st.booleans()),
}


@st.composite
def mostly(draw: Any, usual: st.SearchStrategy) -> Any:
    return draw(usual if draw(st.integers(0, 9)) else odd)


names = [field.name for field in fields(SamplingParams)]


def fuzz(num_examples: int) -> settings:
    return settings(
        max_examples=num_examples,
        deadline=10_000,  # ms: none hangs
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


def check_message(error: Exception) -> None:
    assert type(error) in (TypeError, ValueError), repr(error)
    assert len(str(error)) > 5


@pytest.fixture(scope="module")
def llm(model_path: Path) -> Iterator[LLM]:
    with LLM(model_path, **SMALL) as llm:
        yield llm
    print(dict(counts))


@pytest.fixture(scope="module")
def expected(model_path: Path) -> list[int]:
    with LLM(model_path, **SMALL) as llm:
        return llm.generate([GOOD], GREEDY, use_tqdm=False)[0]["token_ids"]


def check_served_beside(llm: LLM, expected: list[int], prompt: Any, params: Any) -> str:
    """Runs a request beside a good one. Returns what became of it."""
    outputs = llm.generate([GOOD, prompt], [GREEDY, params], use_tqdm=False, on_error="return")
    assert outputs[0]["token_ids"] == expected
    assert llm.is_finished() and not llm.scheduler.block_manager.used_block_ids
    completions = outputs[1].outputs
    assert all(completion.finish_reason for completion in completions)
    errors = [completion.error for completion in completions if completion.finish_reason == "error"]
    assert all(error and len(error) > 5 for error in errors)
    return "refused" if errors else "served"


@sizes
def test_prompts(num_examples, llm, expected):
    @fuzz(num_examples)
    @given(prompt=prompts)
    def check(prompt):
        counts["prompts " + check_served_beside(llm, expected, prompt, GREEDY)] += 1

    check()


@sizes
def test_sampling_params(num_examples, llm, expected):
    @fuzz(num_examples)
    @given(data=st.data())
    def check(data):
        chosen = data.draw(st.lists(st.sampled_from(names), max_size=4, unique=True))
        options = {
            name: data.draw(mostly(sensible.get(name, st.booleans())), name) for name in chosen
        }
        try:
            params = SamplingParams(**options)
        except Exception as error:
            check_message(error)
            counts["sampling params refused"] += 1
            return
        if params.n > 8 or (params.max_tokens or 999) > 8:
            options |= {"n": min(params.n, 8), "max_tokens": max(4, min(params.min_tokens, 90))}
            params = SamplingParams(**options)
        try:
            become = check_served_beside(llm, expected, GOOD[:3], params)
        except Exception as error:  # what cannot be served is no result but refused as a whole
            check_message(error)
            become = "refused by the model"
        counts["sampling params " + become] += 1

    check()


@sizes
def test_what_is_no_sampling_params(num_examples, llm, expected):
    @fuzz(num_examples)
    @given(value=odd)
    def check(value):
        if value is not None and not isinstance(value, (list, tuple)):
            with pytest.raises(TypeError, match="must be SamplingParams"):
                llm.generate([GOOD], value, use_tqdm=False)
        counts["no sampling params " + check_served_beside(llm, expected, GOOD, value)] += 1

    check()


DEFAULT_IS_NONE = {field.name for field in fields(Config) if field.default is None}


@sizes
def test_settings(num_examples):
    """Before anything is looked for on the disk; what passes there is a setting that can be."""

    @fuzz(num_examples)
    @given(field=st.sampled_from([field.name for field in fields(Config)]), data=st.data())
    def check(field, data):
        value = data.draw(odd | sensible_settings.get(field, st.integers(1, 8)), "value")
        try:
            config = Config.create(**{"model": "x", field: value})
        except Exception as error:
            check_message(error)
            counts["settings refused"] += 1
        else:
            kept = getattr(config, field)
            # None stands for the default, which may itself be None: no value, or one chosen later.
            is_unset = value is None and field in DEFAULT_IS_NONE
            assert isinstance(kept, (int, float, str)) or (kept is None and is_unset)
            counts["settings accepted"] += 1

    check()


@pytest.mark.parametrize("num_examples", [8, pytest.param(40, marks=pytest.mark.slow)])
def test_engines_of_extreme_settings_run_or_are_refused(num_examples, model_path, expected):
    @fuzz(num_examples)
    @given(
        field=st.sampled_from(["max_num_seqs", "max_num_batched_tokens", "kvcache_block_size"]),
        value=st.sampled_from([1, 2, 3, 100, 1000, 2**16, 2**20, 2**24, 2**31 - 1]),
    )
    def check(field, value):
        try:
            with LLM(model_path, **{**SMALL, "num_kvcache_blocks": -1, field: value}) as llm:
                assert llm.generate([GOOD], GREEDY, use_tqdm=False)[0]["token_ids"] == expected
                counts["engines run"] += 1
        except ValueError as error:
            check_message(error)
            counts["engines refused"] += 1

    check()


@sizes
def test_calls(num_examples, llm):
    @fuzz(num_examples)
    @given(
        prompts=st.lists(prompts, max_size=3) | prompts,
        on_error=st.sampled_from(["raise", "return"]),
    )
    def check(prompts, on_error):
        try:
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False, on_error=on_error)
        except Exception as error:
            check_message(error)
            counts["calls refused"] += 1
        else:
            assert all(out.finished for out in outputs)
            counts["calls served"] += 1
        assert llm.is_finished()

    check()


texts = st.text(max_size=20)
messages = st.fixed_dictionaries({"role": mostly(texts), "content": mostly(texts)})


@sizes
def test_chats(num_examples, llm):
    @fuzz(num_examples)
    @given(
        conversations=mostly(st.lists(mostly(st.lists(mostly(messages), max_size=3)), max_size=3))
    )
    def check(conversations):
        try:
            llm.chat(conversations, GREEDY, use_tqdm=False)
        except Exception as error:
            check_message(error)
            counts["chats refused"] += 1
        else:
            counts["chats served"] += 1
        assert llm.is_finished()

    check()
