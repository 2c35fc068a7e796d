"""Sampling options through the whole engine: logprobs and penalties against transformers, seeds
under every way of cutting up the work, and structured outputs from a real model."""

import json
import os
import re

import jsonschema
import pytest
import torch
from transformers import PreTrainedModel, RepetitionPenaltyLogitsProcessor

from example import fetch_smollm2
from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from tests.tiny_models import VOCAB_SIZE, TinyModels

ON_GPU = torch.cuda.is_available()
TOLERANCE = 1e-3 if ON_GPU else 1e-4  # a GPU's sums take another order
ENGINE = {"dtype": "float32", "max_model_len": 512, "kvcache_block_size": 16, "max_num_seqs": 16}
if ON_GPU:
    ENGINE |= {"num_kvcache_blocks": 512, "attention_backend": "triton"}


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """1 to 100 tokens each; every second one starts with the same 40."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist()  # noqa: E731
    shared, lens = draw(40), [1, 2, 16, 17, 33, 48, 64, 100]
    return [(shared if i % 2 else []) + draw(lens[i % len(lens)]) for i in range(count)]


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels) -> PreTrainedModel:
    return tiny_models.load("qwen3")


def make_llm(tiny_models: TinyModels, **changes) -> LLM:
    return LLM(tiny_models.path("qwen3"), **{**ENGINE, **changes})


@torch.inference_mode()
def exact_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """fp64 [tokens, vocab_size]."""
    return model(torch.tensor([token_ids])).logits[0].double()


def check_logprobs(found, tokens: list[int], exact: torch.Tensor, k: int) -> None:
    """Each position's dict against fp64 logprobs: the token there, the k best, their ranks."""
    assert len(found) == len(tokens)
    for entry, token, logprobs in zip(found, tokens, exact, strict=True):
        best = logprobs.topk(k)
        assert next(iter(entry)) == token
        assert set(entry) == {token, *best.indices.tolist()}
        for token_id, item in entry.items():
            own = logprobs[token_id]
            assert item.logprob == pytest.approx(own.item(), abs=TOLERANCE)
            num_ahead = (logprobs > own + TOLERANCE).sum()  # rounding may swap what is nearer
            assert num_ahead < item.rank <= (logprobs > own - TOLERANCE).sum()


@pytest.mark.parametrize("changes", [{}, {"max_num_batched_tokens": 24}], ids=["whole", "chunked"])
@pytest.mark.parametrize("cached", [False, True], ids=["uncached", "cached"])
def test_logprobs_are_those_of_transformers(tiny_models, model, changes, cached):
    """Also of prompts whose prefix is in the cache, and in chunks."""
    given = prompts(8)
    params = SamplingParams(
        temperature=0.9, seed=1, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=5
    )
    with make_llm(tiny_models, **changes) as llm:
        if cached:
            llm.generate(given, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        outputs = llm.generate(given, params, use_tqdm=False)
    for prompt, output in zip(given, outputs, strict=True):
        completion = output.outputs[0]
        exact = exact_logits(model, prompt + completion.token_ids).log_softmax(-1)
        assert output.prompt_logprobs[0] is None
        check_logprobs(output.prompt_logprobs[1:], prompt[1:], exact[: len(prompt) - 1], 5)
        check_logprobs(completion.logprobs, completion.token_ids, exact[len(prompt) - 1 : -1], 3)
        total = sum(
            entry[t].logprob
            for entry, t in zip(completion.logprobs, completion.token_ids, strict=True)
        )
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.7},
        {"temperature": 0, "logit_bias": {7: 3.0}},
        {"temperature": 1.3, "top_k": 20},
        {"temperature": 0.8, "top_p": 0.8},
        {"temperature": 0.5, "min_p": 0.05, "allowed_token_ids": list(range(100))},
        {"temperature": 1.0, "repetition_penalty": 1.5, "top_k": 9, "top_p": 0.9},
    ],
    ids="-".join,
)
def test_processed_logprobs_are_of_what_is_sampled_from(tiny_models, model, fields):
    """After masks, biases, penalties, temperature and truncation, renormalised; a prompt's stay
    raw."""
    params = SamplingParams(
        seed=1, max_tokens=10, ignore_eos=True, logprobs=4, prompt_logprobs=2, **fields
    )
    given = prompts(4)
    with make_llm(tiny_models, logprobs_mode="processed_logprobs") as llm:
        outputs = llm.generate(given, params, use_tqdm=False)
    penalise = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
    for prompt, output in zip(given, outputs, strict=True):
        completion = output.outputs[0]
        token_ids = prompt + completion.token_ids
        exact = exact_logits(model, token_ids)
        raw = exact.log_softmax(-1)
        check_logprobs(output.prompt_logprobs[1:], prompt[1:], raw[: len(prompt) - 1], 2)
        for i, entry in enumerate(completion.logprobs):
            logits = exact[len(prompt) - 1 + i].clone()
            if params.allowed_token_ids:
                logits[len(params.allowed_token_ids) :] = -torch.inf
            for token_id, bias in (params.logit_bias or {}).items():
                logits[token_id] += bias
            before = torch.tensor([token_ids[: len(prompt) + i]])
            logits = penalise(before, logits.unsqueeze(0))[0] / (params.temperature or 1)
            logits[logits < logits.max() + torch.tensor(params.min_p).log()] = -torch.inf
            if params.top_k > 0:
                logits[logits < logits.topk(params.top_k).values[-1]] = -torch.inf
            best = logits.softmax(-1).sort(descending=True)
            enough = best.values.cumsum(-1) - best.values >= params.top_p
            logits[best.indices[enough]] = -torch.inf
            expected = logits.log_softmax(-1)
            token_id = completion.token_ids[i]
            assert next(iter(entry)) == token_id and len(entry) <= 5
            assert entry[token_id].logprob == pytest.approx(expected[token_id].item(), abs=2e-4)
            for other, item in entry.items():
                assert item.logprob == pytest.approx(expected[other].item(), abs=2e-4)


def test_prompt_logprobs_survive_preemption(tiny_models, model):
    """A cache so tight that sequences are recomputed: each prompt position is there once."""
    given = prompts(6)
    params = SamplingParams(
        temperature=0, max_tokens=60, ignore_eos=True, prompt_logprobs=0, logprobs=0
    )
    with make_llm(tiny_models, num_kvcache_blocks=18) as llm:
        outputs = llm.generate(given, params, use_tqdm=False)
        assert llm.scheduler.num_preemptions > 0
    for prompt, output in zip(given, outputs, strict=True):
        completion = output.outputs[0]
        exact = exact_logits(model, prompt + completion.token_ids).log_softmax(-1)
        check_logprobs(output.prompt_logprobs[1:], prompt[1:], exact[: len(prompt) - 1], 0)
        check_logprobs(completion.logprobs, completion.token_ids, exact[len(prompt) - 1 : -1], 0)


def test_all_logprobs(tiny_models, model):
    with make_llm(tiny_models, max_logprobs=-1) as llm:
        params = SamplingParams(max_tokens=2, logprobs=-1, prompt_logprobs=-1, ignore_eos=True)
        output = llm.generate(prompts(3)[2], params, use_tqdm=False)[0]
    entry = output.outputs[0].logprobs[1]
    assert len(entry) == VOCAB_SIZE == len(output.prompt_logprobs[1])
    assert torch.tensor([x.logprob for x in entry.values()]).exp().sum() == pytest.approx(1, 1e-4)


def penalised(logits, prompt, completion, repetition, frequency, presence) -> torch.Tensor:
    """transformers' repetition penalty; OpenAI's formula for the others."""
    history = torch.tensor([prompt + completion])
    logits = RepetitionPenaltyLogitsProcessor(repetition)(history, logits[None].clone())[0]
    counts = torch.bincount(torch.tensor(completion, dtype=torch.int64), minlength=VOCAB_SIZE)
    return logits - frequency * counts - presence * (counts > 0)


@pytest.mark.parametrize(
    "penalties", [(1.3, 0.0, 0.0), (1.0, 0.8, 0.0), (1.0, 0.0, 1.5), (1.2, 0.4, -0.7)], ids=str
)
def test_penalties_lead_to_transformers_greedy_tokens(tiny_models, model, penalties):
    """Beside requests without any, and with preemptions."""
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    plain = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    params = SamplingParams(
        temperature=0, max_tokens=40, ignore_eos=True, **dict(zip(names, penalties, strict=True))
    )
    given = prompts(6)
    with make_llm(tiny_models, num_kvcache_blocks=18) as llm:
        outputs = llm.generate(given, [plain, params] * 3, use_tqdm=False)
        assert llm.scheduler.num_preemptions > 0
    num_compared = 0
    for prompt, output in list(zip(given, outputs, strict=True))[1::2]:
        tokens = output.outputs[0].token_ids
        raw = exact_logits(model, prompt + tokens)[len(prompt) - 1 : -1]
        for i, token in enumerate(tokens):
            best = penalised(raw[i], prompt, tokens[:i], *penalties).topk(2)
            if best.values[0] - best.values[1] < 1e-3:
                break
            assert token == best.indices[0]
            num_compared += 1
    assert num_compared > 100


# Every kind of drawing, each request with a seed of its own.
SEEDED = [
    SamplingParams(seed=i, max_tokens=24, ignore_eos=True, **options)
    for i, options in enumerate(
        [
            {"temperature": 0.5},
            {"temperature": 1.5},
            {"top_k": 20},
            {"top_p": 0.8},
            {"min_p": 0.05},
            {"top_k": 50, "top_p": 0.9, "temperature": 1.2},
            {"presence_penalty": 0.5, "frequency_penalty": 0.3},
            {"logit_bias": {5: 3.0, 9: -4.0}, "logprobs": 2},
        ]
    )
]


@pytest.fixture(scope="module")
def alone(tiny_models) -> list[list[int]]:
    """The seeded requests' tokens, one at a time."""
    with make_llm(tiny_models, enforce_eager=True) as llm:
        return [
            llm.generate([prompt], params, use_tqdm=False)[0]["token_ids"]
            for prompt, params in zip(prompts(8), SEEDED, strict=True)
        ]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"kvcache_block_size": 256}, marks=[] if ON_GPU else pytest.mark.slow),
        {"kvcache_block_size": 7} if not ON_GPU else {"kvcache_block_size": 32},
        {"num_kvcache_blocks": 20},
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 20},
        {"enable_prefix_caching": False},
        *([{"enforce_eager": True}] if ON_GPU else []),
    ],
    ids=str,
)
def test_seeded_requests_give_the_same_tokens_in_any_batch(tiny_models, alone, changes):
    """Among each other, in another order, among strangers; with graphs where there is a GPU."""
    given = prompts(8)
    if changes.get("kvcache_block_size") == 256:
        changes = {**changes, "num_kvcache_blocks": 64} if ON_GPU else changes
    with make_llm(tiny_models, **changes) as llm:
        together = llm.generate(given, SEEDED, use_tqdm=False)
        assert [output["token_ids"] for output in together] == alone
        if changes.get("num_kvcache_blocks") == 20:
            assert llm.scheduler.num_preemptions > 0
        strangers = prompts(5, seed=9)
        others = [SamplingParams(max_tokens=30, ignore_eos=True)] * 5
        mixed = llm.generate(strangers + given[::-1], others + SEEDED[::-1], use_tqdm=False)
        assert [output["token_ids"] for output in mixed[5:]] == alone[::-1]


def test_unseeded_runs_repeat_with_the_engine_not_within_it(tiny_models):
    given, params = prompts(4), SamplingParams(max_tokens=16, ignore_eos=True)

    def run(seed: int) -> list[list[list[int]]]:
        with make_llm(tiny_models, seed=seed) as llm:
            return [
                [output["token_ids"] for output in llm.generate(given, params, use_tqdm=False)]
                for _ in range(2)
            ]

    first, second = run(3)
    assert first != second
    assert run(3) == [first, second]
    assert run(4)[0] != first


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 15},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "address"],
    "additionalProperties": False,
}
REGEX = r"(Mon|Tues|Wednes)day, [0-9]{1,2}:[0-5][0-9] (am|pm)( \(UTC[+-][0-9]{1,2}\))?"
CHOICES = ["yes", "no", "perhaps", "it depends"]
GRAMMAR = """
start: expr
expr: term (("+" | "-") term){0,3}
term: NUMBER | "(" NUMBER "*" NUMBER ")"
NUMBER: /[0-9]{1,3}/
"""


@pytest.mark.skipif(
    ON_GPU
    and not os.path.exists(os.path.expanduser("~/.cache/nanovllm/SmolLM2-135M-Instruct.Q4_1.gguf")),
    reason="the model is not on this machine, which cannot fetch it",
)
@pytest.mark.slow
def test_structured_outputs_of_a_real_model_are_all_valid():
    """80 completions at temperature 1.5, of four kinds."""
    num_rounds = 4
    kinds = {
        "json": StructuredOutputsParams(json=SCHEMA),
        "regex": StructuredOutputsParams(regex=REGEX),
        "choice": StructuredOutputsParams(choice=CHOICES),
        "grammar": StructuredOutputsParams(grammar=GRAMMAR),
    }
    order = [*["json"] * 8, *["regex"] * 8, "choice", "choice", "grammar", "grammar"]
    order *= num_rounds
    params = [
        SamplingParams(temperature=1.5, max_tokens=200, structured_outputs=kinds[kind], seed=i)
        for i, kind in enumerate(order)
    ]
    messages = [
        [{"role": "user", "content": f"Describe person number {i}."}] for i in range(len(order))
    ]
    with LLM(fetch_smollm2(), max_model_len=512, max_num_seqs=64) as llm:
        outputs = llm.chat(messages, params, use_tqdm=False)
    texts: dict[str, list[str]] = {kind: [] for kind in kinds}
    for kind, output in zip(order, outputs, strict=True):
        assert output.outputs[0].finish_reason == "stop", output
        texts[kind].append(output["text"])
    for text in texts["json"]:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert all(re.fullmatch(REGEX, text) for text in texts["regex"])
    assert set(texts["choice"]) <= set(CHOICES)
    number = r"([0-9]{1,3}|\([0-9]{1,3}\*[0-9]{1,3}\))"
    assert all(re.fullmatch(rf"{number}([+-]{number}){{0,3}}", text) for text in texts["grammar"])
    assert len(set(texts["json"])) > 7 * num_rounds, "at this temperature they differ"


@pytest.mark.parametrize("top_p", [1e-60, 1e-38, 1e-6])
def test_a_vanishing_top_p_is_greedy(tiny_models, top_p):
    """Guards a bound that rounds to 0 in fp32, for which no token is good enough."""
    with make_llm(tiny_models) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        narrow = SamplingParams(top_p=top_p, max_tokens=8, ignore_eos=True)
        first, second = llm.generate([[5, 6], [5, 6]], [greedy, narrow], use_tqdm=False)
    assert first["token_ids"] == second["token_ids"]
