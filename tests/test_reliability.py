"""What goes wrong in the middle of a run costs the request that it happens to, and nothing else."""

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanovllm import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from nanovllm.engine import preparation
from nanovllm.text.prompts import PromptEncoder
from nanovllm.utils import throughput
from tests.invariants import check_scheduler
from tests.tiny_models import VOCAB_SIZE, TinyModels

SMALL: dict[str, Any] = {
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 32,
    "max_model_len": 120,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
POISON = VOCAB_SIZE - 1
PROMPTS = [[1, 2, 3], [400, 7] * 20, [9, 8, 7, 6, 5], list(range(50, 120)), [3] * 33, [11, 12]]
POISONED = [*PROMPTS[1][:20], POISON, 5]
PARAMS = {
    "greedy": {"temperature": 0},
    "sampled": {"seed": 3},
    "truncated": {"seed": 3, "top_p": 0.9, "top_k": 20},
    "penalised": {"seed": 3, "repetition_penalty": 1.2},
    "logprobs": {"seed": 3, "logprobs": 3, "prompt_logprobs": 2},
}


def params(name: str = "greedy", **fields: Any) -> SamplingParams:
    bias = {POISON: -1000.0} if name != "greedy" else None  # a poisoned token is never drawn
    fields = {"max_tokens": 20, "ignore_eos": True, "logit_bias": bias, **PARAMS[name], **fields}
    return SamplingParams(**fields)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for out in outputs for completion in out.outputs]


def check_clean(llm: LLM) -> None:
    assert llm.is_finished()
    check_scheduler(llm.scheduler)
    assert not llm.scheduler.block_manager.used_block_ids


@pytest.fixture(scope="module")
def shared_llm(tiny_models: TinyModels) -> Iterator[LLM]:
    with LLM(tiny_models.path("qwen3"), **SMALL) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    shared_llm.reset_prefix_cache()
    yield shared_llm
    check_clean(shared_llm)


def run(llm: LLM, prompts: Any = PROMPTS, sampling: Any = None, **kwargs: Any) -> Any:
    return llm.generate(prompts, sampling or params(), use_tqdm=False, **kwargs)


class TestBadRequests:
    BAD: tuple[Any, ...] = ([], [VOCAB_SIZE], "text", [1] * 120, None)

    def mixed(self) -> list[Any]:
        return [PROMPTS[0], *self.BAD[:2], PROMPTS[1], *self.BAD[2:], PROMPTS[2]]

    def test_with_return_they_become_results_and_the_others_run(self, llm):
        outputs = run(llm, self.mixed(), on_error="return")
        errors = {i: out.outputs[0].error for i, out in enumerate(outputs) if out.outputs[0].error}
        assert {i: outputs[i].outputs[0].finish_reason for i in errors} == dict.fromkeys(
            (1, 2, 4, 5, 6), "error"
        )
        assert "empty" in errors[1] and "outside the vocabulary" in errors[2]
        assert "no tokenizer" in errors[4] and outputs[4].prompt == "text"
        assert "limited to 120" in errors[5] and "not NoneType" in errors[6]
        assert all(outputs[i].finished and outputs[i]["token_ids"] == [] for i in errors)
        good = [outputs[i] for i in (0, 3, 7)]
        assert tokens(good) == tokens(run(llm, PROMPTS[:3]))

    def test_of_parameters_too(self, llm):
        each = [params(), params(stop_token_ids=[VOCAB_SIZE]), None]
        outputs = run(llm, PROMPTS[:3], each, on_error="return")
        assert [out.outputs[0].finish_reason for out in outputs] == ["length", "error", "error"]
        assert "stop_token_ids holds 512" in outputs[1].outputs[0].error
        assert "must be SamplingParams" in outputs[2].outputs[0].error
        assert tokens(outputs)[:1] == tokens(run(llm, PROMPTS[:1]))

    def test_otherwise_one_exception_names_all_and_nothing_runs(self, llm, monkeypatch):
        monkeypatch.setattr(llm, "run_step", None)
        with pytest.raises(ValueError, match="5 of 8 prompts are invalid") as caught:
            run(llm, self.mixed())
        lines = str(caught.value).splitlines()[1:]
        assert [line.partition(":")[0] for line in lines] == [
            f"prompts[{i}]" for i in (1, 2, 4, 5, 6)
        ]

    @pytest.mark.parametrize("name", ["greedy", "sampled"])
    def test_others_run_while_the_rest_is_looked_at(self, llm, name, monkeypatch):
        monkeypatch.setattr(preparation, "PORTION", 2)
        good = [[100 + i, *prompt] for i, prompt in enumerate(PROMPTS * 4)]
        expected = tokens(run(llm, good, params(name, max_tokens=1)))
        llm.reset_prefix_cache()
        encode, step, calls = llm.preparer.encoder.encode, llm.run_step, []
        monkeypatch.setattr(
            llm.preparer.encoder, "encode", lambda x: calls.append("e") or encode(x)
        )
        monkeypatch.setattr(llm, "run_step", lambda: calls.append("s") or step())
        prompts = [*good[:18], [], *good[18:], [-1]]
        outputs = run(llm, prompts, params(name, max_tokens=1), on_error="return")
        assert calls.index("s") < 5 and calls[5:].count("e") > 5
        errors = [i for i, out in enumerate(outputs) if out.outputs[0].error]
        assert errors == [18, 25]
        assert tokens([out for i, out in enumerate(outputs) if i not in errors]) == expected
        calls.clear()
        with pytest.raises(ValueError, match="2 of 26"):
            run(llm, prompts, params(name))
        assert set(calls) == {"e"}, "nothing runs where the whole call may be refused"

    def test_thousands_are_named_by_index_alone(self, llm):
        with pytest.raises(ValueError, match="2000 of 2000") as caught:
            run(llm, [[]] * 2000)
        assert str(caught.value).count("is empty") == 10
        assert str(caught.value).endswith(", 1998, 1999")

    def test_only_type_errors_make_a_type_error(self, llm):
        with pytest.raises(TypeError, match="2 of 3"):
            run(llm, [PROMPTS[0], [1.5], [None]])

    def test_parameters_for_all_are_the_call_itself(self, llm):
        with pytest.raises(ValueError, match=r"^sampling_params: stop_token_ids"):
            run(llm, PROMPTS, params(stop_token_ids=[VOCAB_SIZE]), on_error="return")

    @pytest.mark.parametrize("value", ["ignore", None, True])
    def test_on_error_is_one_of_two(self, llm, value):
        with pytest.raises(ValueError, match="'raise' or 'return'"):
            run(llm, on_error=value)


class TestNaN:
    """A prompt with the poisoned token has logits of nothing but NaN."""

    @pytest.fixture
    def poisoned(self, llm: LLM) -> Iterator[LLM]:
        weight = llm.model_runner.model.model.embed_tokens.weight
        before = weight[POISON].clone()
        weight.data[POISON] = torch.nan
        yield llm
        weight.data[POISON] = before

    @pytest.mark.parametrize("name", PARAMS)
    def test_ends_its_request_alone(self, name, llm, request):
        expected = tokens(run(llm, PROMPTS, params(name)))
        poisoned = request.getfixturevalue("poisoned")
        poisoned.reset_prefix_cache()
        prompts = [PROMPTS[0], POISONED, *PROMPTS[1:4], POISONED[:21], *PROMPTS[4:]]
        outputs = run(poisoned, prompts, params(name))
        for i in (5, 1):
            (completion,) = outputs.pop(i).outputs
            assert (completion.finish_reason, completion.token_ids) == ("error", [])
            assert "NaN" in completion.error
        assert tokens(outputs) == expected

    def test_a_token_that_could_not_be_sampled_does_not_count(self, poisoned):
        num_before = poisoned.metrics().num_generated_tokens
        good, bad = run(poisoned, [PROMPTS[0], POISONED], params("greedy"))
        assert bad.metrics.first_token_time is None and good.metrics.first_token_time
        num_generated = poisoned.metrics().num_generated_tokens - num_before
        assert num_generated == len(good.outputs[0].token_ids) > 0

    @pytest.mark.parametrize("limits", [{}, {"max_tokens": 1}, {"n": 2}, {"max_tokens": 2}])
    def test_its_blocks_are_not_shared_with_prompts_to_come(self, limits, llm, request):
        """Guards a prefix cache that keeps what one bad step has left in it."""
        sampling = params("sampled", **limits)
        prompt = [POISON, *PROMPTS[3]]
        expected = tokens(run(llm, [prompt], sampling))
        llm.reset_prefix_cache()
        poisoned = request.getfixturevalue("poisoned")
        weight = poisoned.model_runner.model.model.embed_tokens.weight
        (bad,) = run(poisoned, [prompt], sampling)
        assert {completion.finish_reason for completion in bad.outputs} == {"error"}
        weight.data[POISON] = torch.randn(weight.size(1)) * 0  # finite again
        good = run(poisoned, [prompt], sampling)
        assert good[0].num_cached_tokens == 0
        assert len(tokens(good)[0]) == len(expected[0])

    def test_what_was_in_freed_blocks_does_not_matter(self, llm):
        """Guards 0 x NaN in an attention that reads more than it needs."""
        expected = tokens(run(llm))
        llm.reset_prefix_cache()
        llm.model_runner.kv_cache.fill_(torch.nan)
        assert tokens(run(llm)) == expected

    def test_prompt_logprobs_are_not_doubled_where_it_is_computed_again(self, llm, monkeypatch):
        """Guards a list that the first try and the second shared: 39 rows for 20 tokens."""
        prompt = list(range(60, 80))
        sampling = params("logprobs", prompt_logprobs=1)
        (expected,) = run(llm, [prompt], sampling)
        llm.reset_prefix_cache()
        wait, failed = llm.model_runner.wait, []

        def passing_nan(step: Any) -> None:
            wait(step)
            if not failed and step.batch.sampled:
                failed.append(step)
                step.token_ids = torch.tensor([-1, *step.token_ids[1:]])

        monkeypatch.setattr(llm.model_runner, "wait", passing_nan)
        (out,) = run(llm, [prompt], sampling)
        assert failed and out["token_ids"] == expected["token_ids"]
        assert len(out.prompt_logprobs) == len(prompt)
        assert len(out.outputs[0].logprobs) == len(out["token_ids"])
        assert np.allclose(
            token_logprobs(out.prompt_logprobs), token_logprobs(expected.prompt_logprobs)
        )


class TestNoTokenAllowed:
    def test_it_is_an_error_at_once(self, llm, monkeypatch):
        """What parameters forbid they forbid again: computing it twice is for nothing."""
        computed = []
        schedule = llm.scheduler.schedule

        def counted() -> Any:
            batch = schedule()
            computed.extend(batch.items)
            return batch

        monkeypatch.setattr(llm.scheduler, "schedule", counted)
        bad = params(
            allowed_token_ids=[5, 6], stop_token_ids=[5, 6], min_tokens=4, prompt_logprobs=0
        )
        (out,) = run(llm, [PROMPTS[3]], bad)
        assert out.outputs[0].finish_reason == "error"
        assert len(out.prompt_logprobs) == len(PROMPTS[3])
        assert sum(item.num_tokens for item in computed if item.start == 0) == 64
        assert sum(item.samples and item.end == len(PROMPTS[3]) for item in computed) == 1


class TestAddRequest:
    def test_one_that_fails_disturbs_no_other(self, llm, monkeypatch):
        """Guards an engine that dropped every request in flight for a bad seed of one."""
        expected = tokens(run(llm, PROMPTS[:2]))
        ids = [llm.add_request(prompt, params()) for prompt in PROMPTS[:2]]
        finished = {out.request_id: out for out in llm.step()}
        with monkeypatch.context() as patch:
            patch.setattr(llm.sampling_states, "make", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.add_request(PROMPTS[2], params())
        while not llm.is_finished():
            finished |= {out.request_id: out for out in llm.step()}
        assert tokens([finished[i] for i in ids]) == expected

    def test_a_seed_of_numpys_is_a_seed(self, llm):
        sampling = params("sampled", seed=np.int64(7))
        request_id = llm.add_request(PROMPTS[0], sampling)
        finished = {}
        while not llm.is_finished():
            finished |= {out.request_id: out for out in llm.step()}
        assert tokens([finished[request_id]]) == tokens(
            run(llm, PROMPTS[:1], params("sampled", seed=7))
        )


class TestSamplingParamsOfACall:
    def test_they_are_copied_once_for_each_object(self, llm, monkeypatch):
        clone, cloned = SamplingParams.clone, []
        monkeypatch.setattr(SamplingParams, "clone", lambda p: cloned.append(p) or clone(p))
        one, other = params(max_tokens=1), params(max_tokens=2)
        run(llm, PROMPTS * 4, one)
        assert cloned == [one]
        run(llm, PROMPTS[:4], [one, other, one, other])
        assert cloned == [one, one, other]

    def test_what_becomes_of_them_later_does_not_matter(self, llm):
        sampling = params()
        expected = tokens(run(llm, PROMPTS[:1], sampling))
        request_id = llm.add_request(PROMPTS[0], sampling)
        sampling.max_tokens, sampling.temperature = 1, 1.0
        finished = {}
        while not llm.is_finished():
            finished |= {out.request_id: out for out in llm.step()}
        assert tokens([finished[request_id]]) == expected

    @pytest.mark.parametrize(
        ("field", "value"),
        [("logit_bias", {-1: 5.0}), ("allowed_token_ids", [5, -1]), ("stop", ["a", ""])],
    )
    def test_what_is_changed_in_place_is_checked_when_they_are_used(self, llm, field, value):
        """Guards a negative token id that reached the kernels, or lost every request in flight."""
        sampling = params(logit_bias={7: 1.0}, allowed_token_ids=[5], detokenize=True)
        kept = getattr(sampling, field)
        kept.clear()
        kept.update(value) if field == "logit_bias" else kept.extend(value)
        with pytest.raises(ValueError, match=field):
            llm.add_request(PROMPTS[0], sampling)
        assert llm.is_finished()

    def test_a_contradiction_made_later_is_refused_when_they_are_used(self, llm):
        sampling = params()
        sampling.n = 2
        with pytest.raises(ValueError, match="n=2 greedy"):
            run(llm, PROMPTS[:1], sampling)


class TestFailuresOnTheWay:
    def test_a_detokenizer_that_raises_ends_its_request(self, with_words):
        llm, prompts = with_words
        expected = [out["text"] for out in run(llm, prompts, params(stop=["\x00"]))]
        ids = [llm.add_request(prompt, params(stop=["\x00"])) for prompt in prompts]
        seq = llm.requests[ids[1]].seqs[0]

        def fail(*args: Any) -> None:
            raise KeyError("no such piece")

        seq.completion.detokenizer.append = fail
        results = {}
        while not llm.is_finished():
            results |= {out.request_id: out for out in llm.step()}
        completion = results[ids[1]].outputs[0]
        assert completion.finish_reason == "error"
        assert "KeyError: 'no such piece'" in completion.error
        assert [results[i]["text"] for i in (ids[0], ids[2])] == [expected[0], expected[2]]
        check_clean(llm)

    def test_a_tokenizer_that_fails_on_one_completion_spares_the_others(
        self, with_words, monkeypatch
    ):
        llm, prompts = with_words
        expected = run(llm, prompts, params())
        detokenizer, made = llm.preparer.encoder.detokenizer, []

        def fails_on_one(*args: Any) -> Any:
            made.append(detokenizer(*args))
            if len(made) == 2:
                made[1].extend = fail
            return made[-1]

        def fail(*args: Any) -> None:
            raise IndexError("piece id is out of range")

        monkeypatch.setattr(llm.preparer.encoder, "detokenizer", fails_on_one)
        outputs = run(llm, prompts, params())
        assert outputs[1].outputs[0].finish_reason == "error"
        assert "IndexError: piece id" in outputs[1].outputs[0].error
        assert [outputs[i]["token_ids"] for i in (0, 2)] == [
            expected[i]["token_ids"] for i in (0, 2)
        ]
        assert [outputs[i]["text"] for i in (0, 2)] == [expected[i]["text"] for i in (0, 2)]

    def test_a_tokenizer_that_panics_on_one_prompt_spares_the_others(self, with_words):
        """Its regular expression gives up, which is no Exception."""
        llm, prompts = with_words
        expected = tokens(run(llm, prompts, params()))
        backend = llm.tokenizer.backend_tokenizer
        before = backend.pre_tokenizer
        hostile = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
        try:
            backend.pre_tokenizer = pre_tokenizers.Sequence([hostile, before])
            mixed = [prompts[0], "x" * 45, *prompts[1:]]
            with pytest.raises(ValueError, match=r"prompts\[1\].*PanicException"):
                llm.generate(mixed, params(), use_tqdm=False)
            with pytest.raises(ValueError, match="PanicException"):
                llm.add_request(mixed[1], params())
            outputs = llm.generate(mixed, params(), use_tqdm=False, on_error="return")
        finally:
            backend.pre_tokenizer = before
        bad = outputs.pop(1).outputs[0]
        assert bad.finish_reason == "error" and "retry-limit" in bad.error
        assert tokens(outputs) == expected
        check_clean(llm)

    def test_a_grammar_that_panics_ends_its_request(self, model_path):
        class PanicException(BaseException):
            """As PyO3's."""

        def panic(*args: Any) -> None:
            raise PanicException("index out of bounds")

        bound = params(structured_outputs=StructuredOutputsParams(regex="[a-z]+"))
        with LLM(model_path, **SMALL) as llm:
            expected = tokens(run(llm, PROMPTS, params()))
            ids = [llm.add_request(prompt, params()) for prompt in PROMPTS]
            bad = llm.add_request(PROMPTS[0], bound)
            llm.requests[bad].seqs[0].completion.sampling.edits[
                0
            ].grammar._matcher = SimpleNamespace(
                compute_bitmask=panic, is_stopped=lambda: False, is_accepting=lambda: False
            )
            results = {}
            while not llm.is_finished():
                results |= {out.request_id: out for out in llm.step()}
            assert results[bad].outputs[0].finish_reason == "error"
            assert "index out of bounds" in results[bad].outputs[0].error
            assert tokens([results[i] for i in ids]) == expected
            check_clean(llm)

    def test_tokens_that_the_model_has_no_embedding_for_cost_their_prompt_alone(self, tiny_models):
        with LLM(tiny_models.path("qwen3"), **SMALL) as llm:
            words = {f"w{i}": i for i in range(VOCAB_SIZE + 2)}
            backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
            backend.pre_tokenizer = pre_tokenizers.Whitespace()
            llm.tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
            llm.preparer.encoder = PromptEncoder(llm.tokenizer, VOCAB_SIZE)
            texts = ["w1 w2", f"w1 w{VOCAB_SIZE}", f"w{VOCAB_SIZE - 1}"]
            with pytest.raises(ValueError, match=rf"token id {VOCAB_SIZE} .*0 to {VOCAB_SIZE - 1}"):
                llm.add_request(texts[1], params())
            outputs = llm.generate(texts, params(), use_tqdm=False, on_error="return")
            assert [out.outputs[0].finish_reason for out in outputs] == [
                "length",
                "error",
                "length",
            ]
            assert [out.prompt_token_ids for out in outputs] == [[1, 2], [], [VOCAB_SIZE - 1]]
            check_clean(llm)

    @pytest.mark.parametrize("portion", [1, 32])
    def test_a_tokenizer_that_fails_on_one_prompt_spares_the_others(
        self, with_words, portion, monkeypatch
    ):
        llm, prompts = with_words
        monkeypatch.setattr(preparation, "PORTION", portion)
        expected = run(llm, prompts, params())
        tokenize = llm.preparer.encoder.tokenize

        def fails_on_one(texts: list[str], *args: Any) -> list[list[int]]:
            if prompts[1] in texts:
                raise OverflowError("int too big to convert")
            return tokenize(texts, *args)

        monkeypatch.setattr(llm.preparer.encoder, "tokenize", fails_on_one)
        outputs = run(llm, prompts, params(), on_error="return")
        assert "OverflowError: int too big" in outputs[1].outputs[0].error
        assert [outputs[i]["text"] for i in (0, 2)] == [expected[i]["text"] for i in (0, 2)]
        with pytest.raises(ValueError, match=r"prompts\[1\]: the tokenizer failed: OverflowError"):
            run(llm, prompts, params())
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        options = {"chat_template": "{{ messages[0].content }}", "use_tqdm": False}
        outputs = llm.chat(chats, params(), on_error="return", **options)
        assert "OverflowError: int too big" in outputs[1].outputs[0].error
        assert [outputs[i]["text"] for i in (0, 2)] == [expected[i]["text"] for i in (0, 2)]
        with pytest.raises(ValueError, match=r"messages\[1\]: the tokenizer failed: OverflowError"):
            llm.chat(chats, params(), **options)

    @pytest.mark.parametrize("where", ["compute_bitmask", "try_consume_tokens"])
    def test_a_grammar_that_leads_nowhere_ends_its_request(self, where, model_path):
        choice = params(structured_outputs=StructuredOutputsParams(choice=["abcd"]))
        with LLM(model_path, **SMALL) as llm:
            good = [out["text"] for out in run(llm, ["one", "two"], [params(), choice])]
            assert good[1] == "abcd"
            pairs = [("one", params()), ("two", choice)] * 2
            ids = [llm.add_request(*pair) for pair in pairs]
            grammar = llm.requests[ids[1]].seqs[0].completion.sampling.edits[0].grammar
            grammar._matcher = StuckMatcher(grammar._matcher, where)
            results = {}
            while not llm.is_finished():
                results |= {out.request_id: out for out in llm.step()}
            bad = results.pop(ids[1]).outputs[0]
            assert (bad.finish_reason, bad.stop_reason) == ("error", None)
            assert "too complex" in bad.error and "abcd".startswith(bad.text)
            assert [out["text"] for out in map(results.get, sorted(results))] == [*good[:1], *good]


class StuckMatcher:
    """One that fails at the second call of a method, as llguidance's does at its limits."""

    def __init__(self, matcher: Any, where: str) -> None:
        self.matcher, self.where, self.num_calls = matcher, where, 0

    def __getattr__(self, name: str) -> Any:
        if name == self.where:
            self.num_calls += 1
        if self.num_calls < 2:
            return getattr(self.matcher, name)
        stuck = {
            "compute_bitmask": bytes(4 * VOCAB_SIZE // 32),
            "try_consume_tokens": 0,
            "get_error": "grammar too complex",
            "is_error": True,
            "is_stopped": True,
            "is_accepting": False,
        }
        return lambda *args: stuck[name]


@pytest.fixture
def with_words(tiny_models: TinyModels, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The engine with a tokenizer of one word a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from nanovllm.text.prompts import PromptEncoder

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    monkeypatch.setattr(llm, "tokenizer", tokenizer)
    monkeypatch.setattr(llm.sampling_states, "tokenizer", tokenizer)
    monkeypatch.setattr(llm.preparer, "encoder", PromptEncoder(tokenizer, VOCAB_SIZE))
    return llm, ["w1 w2 w3", "w400 w7 w9", "w20"]


class Memory:
    """Makes parts of a step run out of memory where ``fits`` says no."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch, part: str, fits: Any) -> None:
        self.num_failures = 0
        whole = getattr(llm.model_runner, part)

        def limited(argument: Any) -> Any:
            if not fits(argument if part == "run" else argument.batch):
                self.num_failures += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
            return whole(argument)

        monkeypatch.setattr(llm.model_runner, part, limited)


FITS: dict[str, Callable[[Any], bool]] = {
    "small prefills": lambda batch: not batch.is_prefill or batch.num_tokens <= 17,
    "single tokens": lambda batch: batch.num_tokens == 1,
    "small decodes": lambda batch: batch.is_prefill or len(batch) <= 2,
}


def token_logprobs(positions: list[Any]) -> np.ndarray:
    """The log-probability of the token at each position."""
    return np.array([next(iter(position.values())).logprob for position in positions if position])


slow = pytest.mark.slow


class TestOutOfMemory:
    def test_an_engine_that_ran_out_of_memory_is_as_fast_as_before(self, llm, monkeypatch):
        """Guards limits that stayed at one sequence a step: 526 steps where 8 had been enough."""
        num_steps = []
        schedule = llm.scheduler.schedule
        monkeypatch.setattr(llm.scheduler, "schedule", lambda: num_steps.append(1) or schedule())
        run(llm)
        before = len(num_steps)
        with monkeypatch.context() as patch:
            Memory(llm, patch, "run", lambda batch: False)
            with pytest.raises(RuntimeError, match="smallest step"):
                run(llm)
        llm.reset_prefix_cache()
        num_steps.clear()
        run(llm)
        assert len(num_steps) <= before

    @pytest.mark.parametrize(
        ("name", "part"),
        [
            pytest.param(
                name,
                part,
                marks=[] if (name, part) in (("sampled", "sample"), ("logprobs", "run")) else slow,
            )
            for name in ("greedy", "sampled", "penalised", "logprobs")
            for part in ("run", "sample")
        ],
    )
    @pytest.mark.parametrize("fits", FITS)
    def test_smaller_steps_give_the_same_tokens(self, fits, name, part, llm, monkeypatch, caplog):
        prompts = [*PROMPTS, PROMPTS[1], PROMPTS[3], [*PROMPTS[3], 5]]  # also shared blocks
        sampling = params(name, n=1 if name == "greedy" else 2, max_tokens=10)
        expected = run(llm, prompts, sampling)
        llm.reset_prefix_cache()
        memory = Memory(llm, monkeypatch, part, FITS[fits])
        outputs = run(llm, prompts, sampling)
        assert tokens(outputs) == tokens(expected)
        for out, reference in zip(outputs, expected, strict=True):
            if name == "logprobs":
                found, known = (token_logprobs(x.prompt_logprobs) for x in (out, reference))
                assert np.allclose(found, known, atol=1e-4)
        assert memory.num_failures > 0
        assert "out of memory in a step of" in caplog.text

    def test_with_one_failure_the_limits_come_back(self, llm, monkeypatch):
        failing = iter([True, True])
        Memory(llm, monkeypatch, "run", lambda batch: not next(failing, False))
        run(llm)
        limits = llm.scheduler.max_tokens_now, llm.scheduler.max_seqs_now
        assert limits != (64, 8)
        num_runs = 0
        while limits != (64, 8):
            num_runs += 1
            assert num_runs <= 30
            run(llm)
            limits = llm.scheduler.max_tokens_now, llm.scheduler.max_seqs_now

    def test_where_nothing_fits_it_says_what_is_in_use_and_goes_on_after(self, llm, monkeypatch):
        expected = tokens(run(llm))
        with monkeypatch.context() as patch:
            Memory(llm, patch, "run", lambda batch: False)
            with pytest.raises(RuntimeError, match="out of memory in the smallest step") as caught:
                run(llm)
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        check_clean(llm)
        assert tokens(run(llm)) == expected

    def test_other_errors_are_not_taken_for_it(self, llm, monkeypatch):
        monkeypatch.setattr(llm.model_runner, "run", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(llm)

    def test_blocks_of_a_step_that_did_not_run_are_not_shared(self, llm, monkeypatch):
        """Guards a prefix cache that counts on keys that were never computed."""
        prompt, other = PROMPTS[3], [1, 2]
        expected = tokens(run(llm, [prompt], params()))
        llm.reset_prefix_cache()
        llm.model_runner.kv_cache.zero_()
        with monkeypatch.context() as patch:
            Memory(llm, patch, "run", lambda batch: False)
            request_id = llm.add_request(prompt, params())
            llm.step()  # taken back
            check_scheduler(llm.scheduler)
            llm.abort_request(request_id)
        assert tokens(run(llm, [other, prompt], params()))[1:] == expected


class TestMetrics:
    def test_say_what_the_engine_is_doing(self, llm):
        before = llm.metrics()
        assert (before.num_running, before.num_waiting, before.kv_cache_usage) == (0, 0, 0)
        assert before.gpu_memory_bytes is None
        for prompt in [*PROMPTS, *PROMPTS]:
            llm.add_request(prompt, params())
        assert llm.metrics().num_waiting == 12
        for _ in range(4):
            llm.step()
        during = llm.metrics()
        assert 0 < during.num_running <= 8
        assert during.num_running + during.num_waiting == 12
        used = llm.scheduler.block_manager.used_block_ids
        assert during.kv_cache_usage == len(used) / 32 > 0
        while not llm.is_finished():
            llm.step()
        after = llm.metrics()
        assert after.num_generated_tokens - before.num_generated_tokens == 12 * 20
        started = after.num_prompt_tokens - before.num_prompt_tokens
        assert started == 2 * sum(map(len, PROMPTS))
        assert after.generated_tokens_per_second > 0 < after.prompt_tokens_per_second

    def test_prefix_hits_and_preemptions_are_counted(self, tiny_models):
        with LLM(tiny_models.path("qwen3"), **{**SMALL, "num_kvcache_blocks": 8}) as llm:
            assert llm.metrics().prefix_cache_hit_rate == 0
            run(llm, [PROMPTS[3]])
            run(llm, [PROMPTS[3]])
            assert llm.metrics().prefix_cache_hit_rate == 64 / 140
            run(llm, [[i, *PROMPTS[3][:28]] for i in range(8)], params(max_tokens=60))
            assert llm.metrics().num_preemptions == llm.scheduler.num_preemptions > 0

    def test_a_long_run_logs_a_line_now_and_then(self, llm, monkeypatch, caplog):
        monkeypatch.setattr(throughput, "WINDOW_SECONDS", 0.0)
        with caplog.at_level(logging.INFO, "nanovllm"):
            run(llm)
        lines = [message for message in caplog.messages if message.startswith("running ")]
        assert len(lines) > 10
        assert "KV cache" in lines[0] and "prefill" in lines[0] and "decode" in lines[0]

    def test_nothing_is_printed(self, llm, capfd):
        run(llm)
        assert capfd.readouterr() == ("", "")

    def test_a_closed_engine_has_none(self, tiny_models):
        llm = LLM(tiny_models.path("qwen3"), **SMALL)
        llm.close()
        with pytest.raises(ValueError, match="closed"):
            llm.metrics()
