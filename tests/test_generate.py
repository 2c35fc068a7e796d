"""What the engine returns for what is asked: several completions, streams, conversations, the ends
of completions and the edits of what may be drawn. A tiny random model with a tokenizer of bytes."""

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from string import ascii_lowercase
from time import time
from typing import Any

import pytest
import torch
import xxhash
from tqdm import tqdm

from nanovllm import LLM, CompletionOutput, RequestOutput, SamplingParams
from nanovllm.engine.batch import Batch
from nanovllm.engine.in_flight import InFlightStep
from tests.conftest import check_idle
from tests.invariants import check_scheduler
from tests.tiny_models import VOCAB_SIZE
from tests.tiny_tokenizer import BOS, CHAT_TEMPLATE, EOS, LETTERS, WORDS

SMALL: dict[str, Any] = {
    "kvcache_block_size": 8,
    "num_kvcache_blocks": 40,
    "max_model_len": 100,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "device": "cpu",
    "max_logprobs": -1,
}
PROMPTS = ["one", "two words", "a prompt that is longer than a block or two", "xyz" * 25]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def shared_llm(model_path: Path) -> Iterator[LLM]:
    with LLM(model_path, **SMALL) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """One engine for all tests: each finds it without requests or cached prefixes, and must leave
    it without requests."""
    shared_llm.reset_prefix_cache()
    yield shared_llm
    check_idle(shared_llm)


def generate(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def one(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> CompletionOutput:
    (out,) = generate(llm, [prompt], params)
    (completion,) = out.outputs
    return completion


def tokens(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    """Of each completion of each request."""
    return [[completion.token_ids for completion in out.outputs] for out in outputs]


def run_steps(llm: LLM, requests: Sequence[tuple[Any, SamplingParams]]) -> list[RequestOutput]:
    """Results in the requests' order; the scheduler's books are checked after each step."""
    ids = [llm.add_request(prompt, params) for prompt, params in requests]
    results: dict[str, RequestOutput] = {}
    while not llm.is_finished():
        for out in llm.step():
            assert out.finished and out.request_id not in results
            results[out.request_id] = out
        check_scheduler(llm.scheduler)
    check_idle(llm)
    return [results[request_id] for request_id in ids]


def watch_batches(llm: LLM, patch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Collects (is_prefill, number of tokens) of each step."""
    run, seen = llm.model_runner.run, []

    def watching(batch: Batch) -> InFlightStep:
        seen.append((batch.is_prefill, batch.num_tokens))
        return run(batch)

    patch.setattr(llm.model_runner, "run", watching)
    return seen


def content(out: RequestOutput) -> RequestOutput:
    """What of a result does not depend on the call: all but its id, its times, the cache."""
    return replace(out, request_id="", metrics=None, num_cached_tokens=0)


def sampled(n: int = 1, seed: int | None = 7, **values: Any) -> SamplingParams:
    values = {"max_tokens": 12, "ignore_eos": True, **values}
    return SamplingParams(n=n, seed=seed, **values)


class TestSeveralCompletions:
    @pytest.fixture(scope="class")
    @staticmethod
    def alone(model_path: Path) -> Iterator[Callable[[list[int], SamplingParams], list[list[int]]]]:
        """The completions of a prompt as separate runs, without a prefix cache: the first with
        the request's seed, each other with that of its number."""

        def run(prompt: list[int], params: SamplingParams) -> list[list[int]]:
            seeds = [params.seed]
            seeds += [
                xxhash.xxh64_intdigest(f"{params.seed}/{i}".encode()) for i in range(1, params.n)
            ]
            each = [replace(params, n=1, seed=seed) for seed in seeds]
            return [ids for (ids,) in tokens(generate(llm, [prompt] * params.n, each))]

        with LLM(model_path, **SMALL, enable_prefix_caching=False) as llm:
            yield run

    @pytest.mark.parametrize("caching", [True, False], ids=["caching", "no-caching"])
    @pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17, 40])
    def test_n_completions_are_n_runs_on_one_prefill(
        self, length, caching, model_path, alone, monkeypatch
    ):
        """Prompts below, at and above the borders of blocks. Beside the prompt, each sibling
        computes its last token, and then all decode."""
        prompt, params = list(range(100, 100 + length)), sampled(4)
        with LLM(model_path, **SMALL, enable_prefix_caching=caching) as llm:
            batches = watch_batches(llm, monkeypatch)
            (out,) = run_steps(llm, [(prompt, params)])
        assert [completion.index for completion in out.outputs] == [0, 1, 2, 3]
        assert tokens([out]) == [alone(prompt, params)]
        assert len({tuple(ids) for ids in tokens([out])[0]}) == 4
        assert batches[0] == (True, length)
        assert not any(is_prefill for is_prefill, _ in batches[1:])
        assert sum(n for _, n in batches) == length + 4 * 12 - 1

    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"enable_prefix_caching": False},
            {"max_num_seqs": 2},
            {"max_num_seqs": 1},
            {"max_num_batched_tokens": 10},
            {"kvcache_block_size": 1, "num_kvcache_blocks": 300},
            {"num_kvcache_blocks": 14},
            {"num_kvcache_blocks": 10, "enable_prefix_caching": False},
        ],
        ids=str,
    )
    def test_completions_depend_on_their_request_alone(self, settings, model_path, alone):
        """Not on the batch around them, the room for them, or preemptions."""
        prompts = [[5] * 20, list(range(200, 209)), [7], list(range(30, 70))]
        params = [sampled(n, seed=n) for n in (3, 6, 1, 2)]
        with LLM(model_path, **{**SMALL, **settings}) as llm:
            outputs = run_steps(llm, list(zip(prompts, params, strict=True)))
            if "num_kvcache_blocks" in settings and settings["num_kvcache_blocks"] < 20:
                assert llm.scheduler.num_preemptions > 0
        assert tokens(outputs) == [alone(p, q) for p, q in zip(prompts, params, strict=True)]

    def test_more_completions_than_residents(self, llm, alone):
        params = sampled(30, max_tokens=5)
        (out,) = run_steps(llm, [([5] * 20, params)])
        assert tokens([out]) == [alone([5] * 20, params)]

    def test_the_first_completion_is_the_run_with_n_1(self, llm):
        (several,) = generate(llm, ["some words"], sampled(5))
        assert several.outputs[0] == one(llm, "some words", sampled(1))

    def test_without_a_seed_all_differ(self, model_path):
        """Guards completions, or equal prompts, that share random numbers; the engine's seed
        makes the whole run repeat itself."""
        runs = []
        for _ in range(2):
            with LLM(model_path, **SMALL, seed=3) as llm:
                runs.append(tokens(generate(llm, ["abc", "abc"], sampled(4, seed=None))))
        assert len({tuple(ids) for request in runs[0] for ids in request}) == 8
        assert runs[0] == runs[1]

    def test_each_completion_ends_for_itself(self, llm):
        """By tokens that only some of them draw; the others go on to their length."""
        free = tokens(generate(llm, ["abc"], sampled(6)))[0]
        stop = free[2][5]
        (out,) = run_steps(llm, [("abc", sampled(6, stop_token_ids=[stop]))])
        for ids, completion in zip(free, out.outputs, strict=True):
            end = ids.index(stop) + 1 if stop in ids else len(ids)
            assert completion.token_ids == ids[:end]
            assert completion.finish_reason == ("stop" if stop in ids else "length")
        assert {completion.finish_reason for completion in out.outputs} == {"stop", "length"}

    @pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 8])
    def test_an_abort_drops_all_completions_and_disturbs_no_other(self, num_steps, llm):
        expected = tokens(generate(llm, [PROMPTS[3]], sampled(2)))
        llm.reset_prefix_cache()
        others = [llm.add_request(PROMPTS[3], sampled(2))]
        aborted = llm.add_request(PROMPTS[2], sampled(4))
        for _ in range(num_steps):
            assert llm.step() == []
        llm.abort_request(aborted)
        check_scheduler(llm.scheduler)
        outputs = []
        while not llm.is_finished():
            outputs += llm.step()
            check_scheduler(llm.scheduler)
        assert [out.request_id for out in outputs] == others
        assert tokens(outputs) == expected

    def test_a_request_is_returned_once_its_last_completion_has_ended(self, llm):
        free = tokens(generate(llm, ["abc"], sampled(3)))[0]
        stop = free[0][2]
        request_id = llm.add_request("abc", sampled(3, stop_token_ids=[stop]))
        steps = 0
        while not llm.is_finished():
            finished = llm.step()
            steps += 1
            assert bool(finished) == llm.is_finished()
        assert [out.request_id for out in finished] == [request_id]
        # The siblings draw their first token one step later, and tokens come a step after that.
        assert steps == 14


STREAMED: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "sampled": sampled(),
    "may-end": sampled(max_tokens=40, ignore_eos=False, stop_token_ids=list(range(3, 30))),
    "keeps-stop-token": sampled(
        max_tokens=40, stop_token_ids=list(range(3, 60)), include_stop_str_in_output=True
    ),
    "several": sampled(3),
    "stop-string": sampled(max_tokens=60, stop=["a", "bc", "zzz"]),
    "stop-strings-across-tokens": sampled(
        2,
        max_tokens=60,
        allowed_token_ids=[WORDS.index("a"), WORDS.index("b")],
        stop=["abab", "bbaab"],
    ),
    "kept-stop-string": sampled(max_tokens=60, stop=["a"], include_stop_str_in_output=True),
    "special-tokens": sampled(skip_special_tokens=False, logit_bias={EOS: 5.0}),
    "no-text": sampled(detokenize=False),
    "logprobs": sampled(2, logprobs=2, prompt_logprobs=1),
    "one-token": sampled(2, max_tokens=1),
    "no-token-allowed": sampled(allowed_token_ids=[EOS], min_tokens=2, ignore_eos=False),
}


class TestSeveralStreams:
    @pytest.mark.parametrize("aborted", [False, True])
    def test_one_at_its_end_leaves_the_next_alone(self, llm, aborted):
        """Guards a stream that is resumed after its requests are done, and takes the steps of
        another."""
        expected = one(llm, "two words").token_ids
        first = llm.generate_stream("abc", GREEDY)
        out = next(first)
        if aborted:
            llm.abort_request(out.request_id)
        else:
            while not out.finished:
                out = next(first)
        second = llm.generate_stream("two words", GREEDY)
        next(second)
        assert list(first) == []
        *_, out = second
        assert out.finished and out.outputs[0].token_ids == expected
        check_idle(llm)


class TestOverlap:
    """A step is launched before the one before it has been read."""

    def watch(self, llm: LLM, patch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
        """The runner's calls, each with the number of its batch."""
        calls: list[tuple[str, int]] = []
        batches: list[Batch] = []

        def watch(name: str) -> None:
            call = getattr(llm.model_runner, name)

            def watched(argument: Any) -> Any:
                batch = argument if name == "run" else argument.batch
                if not any(batch is known for known in batches):
                    batches.append(batch)
                calls.append((name, [batch is known for known in batches].index(True)))
                return call(argument)

            patch.setattr(llm.model_runner, name, watched)

        for name in ("run", "sample", "wait"):
            watch(name)
        return calls

    @pytest.mark.parametrize("params", [GREEDY, sampled(seed=3, logprobs=2, min_tokens=2)])
    def test_order_of_launching_and_reading(self, llm, monkeypatch, params):
        calls = self.watch(llm, monkeypatch)
        generate(llm, "abc", replace(params, max_tokens=4, ignore_eos=True))
        assert calls == [
            *(("run", 0), ("sample", 0)),
            *(("run", 1), ("wait", 0), ("sample", 1)),
            *(("run", 2), ("wait", 1), ("sample", 2)),
            *(("run", 3), ("wait", 2), ("sample", 3)),
            ("wait", 3),  # its length is known: nothing more is launched
        ]

    def test_an_end_that_nobody_foresees_costs_one_launch(self, llm, monkeypatch):
        token_ids = one(llm, "abc").token_ids
        calls = self.watch(llm, monkeypatch)
        found = one(llm, "abc", replace(GREEDY, stop_token_ids=[token_ids[2]]))
        assert found.token_ids == token_ids[: token_ids.index(token_ids[2]) + 1]
        launched = {number for name, number in calls if name == "run"}
        assert len(launched) == len(found.token_ids) + 1
        assert {number for name, number in calls if name == "wait"} == launched - {max(launched)}

    @pytest.mark.parametrize("when", range(1, 9))
    def test_a_request_can_be_dropped_while_its_token_is_on_its_way(self, llm, when):
        alone = [one(llm, prompt).token_ids for prompt in PROMPTS]
        ids = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
        outputs: dict[str, RequestOutput] = {}
        steps = 0
        while not llm.is_finished():
            outputs |= {out.request_id: out for out in llm.step()}
            steps += 1
            if steps == when:
                llm.abort_request(ids[1])
        found = [outputs[i].outputs[0].token_ids for i in ids if i in outputs]
        assert found == [alone[0], *alone[2:]]
        check_idle(llm)


class TestStream:
    @pytest.mark.parametrize("name", STREAMED)
    def test_the_last_outputs_are_those_of_generate(self, name, llm):
        expected = generate(llm, PROMPTS, STREAMED[name])
        last = {}
        for out in llm.generate_stream(PROMPTS, STREAMED[name]):
            assert not (out.request_id in last and last[out.request_id].finished)
            last[out.request_id] = out
        assert [content(out) for out in last.values()] == [content(out) for out in expected]

    def test_all_kinds_of_requests_stream_side_by_side(self, llm):
        params = list(STREAMED.values())
        expected = generate(llm, ["abc"] * len(params), params)
        last = {out.request_id: out for out in llm.generate_stream(["abc"] * len(params), params)}
        last_in_order = sorted(last.values(), key=lambda out: int(out.request_id))
        assert [content(out) for out in last_in_order] == [content(out) for out in expected]

    @pytest.mark.parametrize("name", STREAMED)
    def test_what_was_shown_only_grows(self, name, llm):
        """Text, tokens and logprobs: each output begins with the one before it, and no text has
        half a character that the whole has not."""
        seen: dict[tuple[str, int], list[CompletionOutput]] = {}
        for out in llm.generate_stream(PROMPTS, STREAMED[name]):
            for completion in out.outputs:
                seen.setdefault((out.request_id, completion.index), []).append(completion)
        for history in seen.values():
            for before, after in pairwise(history):
                assert after.text.startswith(before.text)
                assert after.token_ids[: len(before.token_ids)] == before.token_ids
                assert (after.logprobs or [])[: len(before.logprobs or [])] == (
                    before.logprobs or []
                )
                assert before.finish_reason in (None, after.finish_reason)
            assert history[-1].finish_reason is not None

    def test_each_step_shows_what_it_added(self, llm):
        """One output a request and step: from the prompt's on, one more token in each."""
        counts = [
            [len(completion.token_ids) for completion in out.outputs]
            for out in llm.generate_stream("abc", sampled(2, max_tokens=3))
        ]
        assert counts == [[1, 0], [2, 1], [3, 2], [3, 3]]

    @pytest.mark.parametrize("num_outputs", [1, 5, 30])
    def test_leaving_early_drops_the_rest_and_the_engine_goes_on(self, num_outputs, llm):
        expected = tokens(generate(llm, PROMPTS, sampled(2)))
        for i, _ in enumerate(llm.generate_stream(PROMPTS, sampled(2)), 1):
            if i == num_outputs:
                break
        check_idle(llm)
        assert tokens(generate(llm, PROMPTS, sampled(2))) == expected

    def test_an_error_in_the_loops_body_drops_the_rest(self, llm):
        with pytest.raises(ZeroDivisionError):
            for _ in llm.generate_stream(PROMPTS, GREEDY):
                _ = 1 / 0
        check_idle(llm)

    def test_closing_the_engine_ends_a_stream(self, model_path):
        """Guards an AttributeError where the stream's cleaning up finds no scheduler."""
        llm = LLM(model_path, **SMALL)
        streams = [llm.generate_stream("abc", GREEDY)]
        next(streams[0])
        llm.close()
        with pytest.raises(ValueError, match="closed"):
            next(streams[0])
        with LLM(model_path, **SMALL) as other:
            stream = other.generate_stream("abc", GREEDY)
            next(stream)
        stream.close()

    def test_a_request_may_be_aborted_in_the_loop(self, llm):
        """No more is shown of it, and all of the others."""
        expected = generate(llm, PROMPTS, GREEDY)
        last: dict[str, RequestOutput] = {}
        for out in llm.generate_stream(PROMPTS, GREEDY):
            assert out.request_id not in last or out.prompt != PROMPTS[1]
            last[out.request_id] = out
            if out.prompt == PROMPTS[1]:
                llm.abort_request(out.request_id)
        assert [out.finished for out in last.values()] == [True, False, True, True]
        for i in (0, 2, 3):
            assert content(list(last.values())[i]) == content(expected[i])

    def test_a_bad_prompt_is_refused_before_the_first_output(self, llm):
        with pytest.raises(ValueError, match=r"prompts\[1\]: the prompt is empty"):
            next(llm.generate_stream(["abc", []], GREEDY))

    def test_a_stream_needs_the_engine_to_itself(self, llm):
        request_id = llm.add_request("abc", GREEDY)
        with pytest.raises(ValueError, match="to itself"):
            next(llm.generate_stream("abc", GREEDY))
        llm.abort_request(request_id)

    def test_a_lone_prompt_and_no_prompts(self, llm):
        assert {out.prompt for out in llm.generate_stream("abc", GREEDY)} == {"abc"}
        assert list(llm.generate_stream([], GREEDY)) == []


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


CONVERSATIONS = [
    [user("hello")],
    [{"role": "system", "content": "be brief"}, user("why?")],
    [user("1"), {"role": "assistant", "content": "2"}, user("3")],
]


@pytest.mark.smoke
class TestChat:
    @staticmethod
    def chat(llm: LLM, messages: Any, params: Any = GREEDY, **options: Any) -> list[RequestOutput]:
        return llm.chat(messages, params, use_tqdm=False, **options)

    @staticmethod
    def render(conversation: list[dict[str, Any]], end: str = "[assistant]") -> str:
        """What CHAT_TEMPLATE makes of a conversation."""
        return "<s>" + "".join(f"[{m['role']}]{m['content']}</s>" for m in conversation) + end

    @pytest.mark.parametrize("conversation", CONVERSATIONS, ids=len)
    def test_one_conversation_is_the_prompt_that_the_template_makes(self, conversation, llm):
        (out,) = self.chat(llm, conversation)
        assert out.prompt == self.render(conversation)
        (expected,) = generate(llm, self.render(conversation))
        assert content(out) == content(expected)

    def test_several_conversations_are_answered_in_their_order(self, llm):
        params = [sampled(i + 1, seed=i) for i in range(3)]
        outputs = self.chat(llm, CONVERSATIONS, params)
        prompts = [self.render(conversation) for conversation in CONVERSATIONS]
        expected = generate(llm, prompts, params)
        assert [content(out) for out in outputs] == [content(out) for out in expected]
        assert self.chat(llm, []) == []

    def test_a_list_of_one_conversation_is_that_conversation(self, llm):
        lone, listed, in_tuples = (
            self.chat(llm, form)
            for form in (
                CONVERSATIONS[1],
                CONVERSATIONS[1:2],
                (tuple(CONVERSATIONS[1]),),
            )
        )
        assert content(lone[0]) == content(listed[0]) == content(in_tuples[0])

    def test_there_is_one_bos(self, llm):
        """Guards the BOS of the template that the tokenizer adds again."""
        for out in self.chat(llm, CONVERSATIONS):
            assert out.prompt_token_ids[0] == BOS
            assert out.prompt_token_ids.count(BOS) == 1
        (out,) = self.chat(llm, [user("hi")], chat_template="{{ messages[0]['content'] }}")
        assert BOS not in out.prompt_token_ids

    @pytest.mark.parametrize(
        ("options", "prompt"),
        [
            ({"add_generation_prompt": False}, "<s>[user]hi</s>"),
            (
                {"chat_template_kwargs": {"enable_thinking": True}},
                "<s>[user]hi</s>[assistant](thinking)",
            ),
            ({"chat_template_kwargs": {"enable_thinking": False}}, "<s>[user]hi</s>[assistant]"),
            (
                {
                    "tools": [
                        {"type": "function", "function": {"name": name}} for name in ("f", "g")
                    ]
                },
                "<s>{tools: f g}[user]hi</s>[assistant]",
            ),
            ({"chat_template": "<s>{{ messages | length }}"}, "<s>1"),
            (
                {"chat_template": "<s>{{ x }}{{ y }}", "chat_template_kwargs": {"x": 1, "y": "z"}},
                "<s>1z",
            ),
        ],
        ids=str,
    )
    def test_options_reach_the_template(self, options, prompt, llm):
        (out,) = self.chat(llm, [user("hi")], **options)
        assert out.prompt == prompt

    def test_the_last_message_can_be_continued(self, llm):
        messages = [user("say it"), {"role": "assistant", "content": "The answer is"}]
        (out,) = self.chat(llm, messages, add_generation_prompt=False, continue_final_message=True)
        assert out.prompt == "<s>[user]say it</s>[assistant]The answer is"

    def test_content_may_come_in_parts_of_text(self, llm):
        parts = [{"type": "text", "text": "one"}, "two", {"type": "text", "text": "three"}]
        messages = [user(parts), user("four")]
        before = copy.deepcopy(messages)
        (out,) = self.chat(llm, messages)
        assert out.prompt == self.render([user("one\ntwo\nthree"), user("four")])
        assert messages == before

    @pytest.mark.parametrize(
        ("bad", "exception", "match"),
        [
            ([], ValueError, "at least one message"),
            ([user("x"), "y"], TypeError, "'y'"),
            (["x"], TypeError, "'x'"),
            ([{"content": "x"}], ValueError, "role"),
            ([{"role": 5, "content": "x"}], ValueError, "role"),
            ([{"role": "nobody", "content": "x"}], ValueError, "no such role"),
            ([user([{"type": "image_url", "image_url": {}}])], ValueError, "content must be text"),
            ([user([5])], ValueError, "content must be text"),
        ],
        ids=str,
    )
    def test_a_bad_conversation_is_refused_by_its_number(
        self, bad, exception, match, llm, monkeypatch
    ):
        batches = watch_batches(llm, monkeypatch)
        with pytest.raises(exception, match=rf"messages\[1\].*{match}"):
            self.chat(llm, [[user("good")], bad, [user("good")]])
        assert not batches

    @pytest.mark.parametrize(
        ("messages", "options", "exception", "match"),
        [
            ("hello", {}, TypeError, "str"),
            ({"role": "user"}, {}, TypeError, "dict"),
            (None, {}, TypeError, "NoneType"),
            (["hello"], {}, TypeError, r"messages\[0\].*'hello'"),
            ([user("x")], {"continue_final_message": True}, ValueError, "add_generation_prompt"),
            ([user("x")], {"chat_template": "{% if %}"}, ValueError, "template fails"),
        ],
        ids=str,
    )
    def test_other_mistakes_are_refused(self, messages, options, exception, match, llm):
        with pytest.raises(exception, match=match):
            self.chat(llm, messages, **options)

    def test_a_template_is_needed(self, tiny_models, model_path, tmp_path):
        folder = Path(shutil.copytree(model_path, tmp_path / "model"))
        (folder / "chat_template.jinja").unlink()
        with LLM(folder, **SMALL) as llm:
            with pytest.raises(ValueError, match="no chat template"):
                self.chat(llm, [user("x")])
            (out,) = self.chat(llm, [user("x")], chat_template="<s>{{ messages[0]['content'] }}")
            assert out.prompt_token_ids == llm.get_tokenizer()("x")["input_ids"]
        with LLM(tiny_models.path("qwen3"), **SMALL) as llm:
            assert llm.get_tokenizer() is None
            with pytest.raises(ValueError, match="no tokenizer"):
                self.chat(llm, [user("x")])


def spell(token_ids: Sequence[int]) -> str:
    """Text of tokens of letters."""
    return "".join(WORDS[i] for i in token_ids)


class TestEnds:
    """Where a completion ends, and why. Greedy among tokens of letters, so that texts are plain."""

    @pytest.fixture
    def free(self, llm) -> tuple[SamplingParams, list[int]]:
        """Parameters, and the tokens that they give where nothing ends them early."""
        params = replace(GREEDY, allowed_token_ids=LETTERS, frequency_penalty=1.0)
        token_ids = one(llm, "begin", params).token_ids
        assert len(set(token_ids)) > 10
        return params, token_ids

    def test_length(self, llm, free):
        params, token_ids = free
        completion = one(llm, "begin", params)
        assert completion.text == spell(token_ids)
        assert (completion.finish_reason, completion.stop_reason) == ("length", None)
        assert completion.finished()

    @pytest.mark.parametrize("keep", [False, True])
    @pytest.mark.parametrize("place", [0, 1, 7, 19])
    def test_a_stop_token(self, place, keep, llm, free):
        params, token_ids = free
        end = token_ids.index(token_ids[place])
        stops = [token_ids[place], 300]
        completion = one(
            llm,
            "begin",
            replace(params, stop_token_ids=stops, include_stop_str_in_output=keep),
        )
        assert completion.token_ids == token_ids[: end + 1]
        assert completion.text == spell(token_ids[: end + keep])
        assert (completion.finish_reason, completion.stop_reason) == ("stop", token_ids[place])

    @pytest.mark.parametrize("skip", [False, True])
    @pytest.mark.parametrize("keep", [False, True])
    @pytest.mark.parametrize("streams", [False, True])
    def test_an_end_of_sequence_token(self, streams, keep, skip, llm):
        """It shows in the text only if both the stop and special tokens are to be kept."""
        params = SamplingParams(
            temperature=0,
            allowed_token_ids=[*LETTERS, EOS],
            logit_bias={EOS: 100.0},
            min_tokens=3,
            include_stop_str_in_output=keep,
            skip_special_tokens=skip,
        )
        run = llm.generate_stream if streams else partial(llm.generate, use_tqdm=False)
        *_, out = run("begin", params)
        (completion,) = out.outputs
        assert len(completion.token_ids) == 4 and completion.token_ids[-1] == EOS
        shown = "</s>" if keep and not skip else ""
        assert completion.text == spell(completion.token_ids[:-1]) + shown
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)

    def test_an_ignored_end_of_sequence_token(self, llm):
        params = replace(GREEDY, logit_bias={EOS: 100.0})
        completion = one(llm, "begin", params)
        assert completion.token_ids == [EOS] * 20
        assert (completion.text, completion.finish_reason) == ("", "length")

    @pytest.mark.parametrize("keep", [False, True])
    @pytest.mark.parametrize(("start", "length"), [(0, 1), (0, 3), (4, 2), (9, 5), (12, 1)])
    def test_a_stop_string(self, start, length, keep, llm, free):
        """Wherever it lies among the tokens; those are kept up to the one that completes it."""
        params, token_ids = free
        text = spell(token_ids)
        stop = text[start : start + length]
        end = text.index(stop) + length
        completion = one(
            llm, "begin", replace(params, stop=[stop, "0"], include_stop_str_in_output=keep)
        )
        assert completion.text == text[: end if keep else end - length]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        num_tokens = next(n for n in range(21) if len(spell(token_ids[:n])) >= end)
        assert completion.token_ids == token_ids[:num_tokens]

    def test_a_lone_stop_string_need_not_be_listed(self, llm, free):
        params, token_ids = free
        stop = spell(token_ids)[5:7]
        lone, listed = (one(llm, "begin", replace(params, stop=s)) for s in (stop, [stop]))
        assert lone == listed and lone.stop_reason == stop

    def test_a_stop_string_in_the_prompt_is_none(self, llm, free):
        params, token_ids = free
        assert "eg" not in spell(token_ids)
        assert one(llm, "begin", replace(params, stop="eg")).token_ids == token_ids

    def test_a_stop_string_at_the_last_token_is_the_reason(self, llm, free):
        params, token_ids = free
        params = replace(params, max_tokens=5)
        text = spell(token_ids[:5])
        end = next(n for n in range(1, len(text) + 1) if text.index(text[-n:]) + n == len(text))
        completion = one(llm, "begin", replace(params, stop=text[-end:]))
        assert (completion.finish_reason, completion.text) == ("stop", text[:-end])
        assert completion.token_ids == token_ids[:5]

    @pytest.mark.parametrize("min_tokens", [0, 1, 5, 12])
    def test_min_tokens_holds_off_stop_tokens(self, min_tokens, llm, free):
        """They are not drawn before, rather than drawn and ignored."""
        params, token_ids = free
        stops = token_ids[:3]
        params = replace(params, stop_token_ids=stops, min_tokens=min_tokens)
        completion = one(llm, "begin", params)
        assert len(completion.token_ids) > min_tokens
        assert not set(completion.token_ids[:min_tokens]) & set(stops)
        if min_tokens == 0:
            assert completion.token_ids == token_ids[:1]

    @pytest.mark.parametrize("min_tokens", [0, 1, 5, 12])
    def test_min_tokens_holds_off_stop_strings(self, min_tokens, llm, free):
        """What ends within the first tokens is text as any other."""
        params, token_ids = free
        stops = list(ascii_lowercase)
        completion = one(llm, "begin", replace(params, stop=stops, min_tokens=min_tokens))
        assert completion.token_ids == token_ids[: min_tokens + 1]
        assert completion.text == spell(token_ids[:min_tokens])
        assert completion.stop_reason == WORDS[token_ids[min_tokens]][0]

    def test_max_tokens_none_goes_on_to_the_models_length(self, llm):
        completion = one(llm, [5] * 30, replace(GREEDY, max_tokens=None))
        assert len(completion.token_ids) == SMALL["max_model_len"] - 30
        assert completion.finish_reason == "length"

    def test_no_text_without_detokenizing(self, llm, free):
        params, token_ids = free
        completion = one(llm, "begin", replace(params, detokenize=False))
        assert (completion.text, completion.token_ids) == ("", token_ids)

    def test_special_tokens_may_be_kept_in_the_text(self, llm):
        params = replace(GREEDY, logit_bias={EOS: 100.0}, max_tokens=3)
        assert one(llm, "x", params).text == ""
        assert one(llm, "x", replace(params, skip_special_tokens=False)).text == "</s>" * 3


class TestWhatMayBeDrawn:
    @pytest.mark.parametrize("temperature", [0, 1.5])
    def test_allowed_token_ids_are_the_only_ones(self, temperature, llm):
        allowed = [3, 31, 32, 63, 64, 511]
        params = sampled(temperature=temperature, max_tokens=60, allowed_token_ids=allowed)
        drawn = one(llm, "abc", params).token_ids
        assert set(drawn) <= set(allowed)
        assert temperature == 0 or set(drawn) == set(allowed)

    @pytest.mark.timeout(10)
    @pytest.mark.parametrize(
        "values", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9}, {"top_p": 1e-60}], ids=str
    )
    def test_the_narrowest_choice_is_the_most_likely_token(self, values, llm):
        """Also for a positive top_p that fp32 rounds to 0: no draw would ever be good enough."""
        assert one(llm, "abc", sampled(max_tokens=20, **values)) == one(llm, "abc")

    def test_a_large_bias_decides(self, llm):
        free = one(llm, "abc").token_ids
        assert one(llm, "abc", replace(GREEDY, logit_bias={77: 100.0})).token_ids == [77] * 20
        never = one(llm, "abc", replace(GREEDY, logit_bias=dict.fromkeys(free, -100.0))).token_ids
        assert not set(never) & set(free)

    def test_a_small_bias_changes_the_odds(self, llm):
        """Of one token in some hundred draws, by about as much as exp(bias)."""
        params = sampled(max_tokens=50, allowed_token_ids=[40, 41, 42, 43])
        counts = [
            sum(
                completion.token_ids.count(40)
                for out in generate(llm, ["abc"], replace(params, n=4, logit_bias={40: bias}))
                for completion in out.outputs
            )
            for bias in (-4.0, 0.0, 4.0)
        ]
        assert counts[0] < counts[1] < counts[2]

    def test_a_bad_word_of_one_token_never_comes(self, llm):
        params = replace(GREEDY, allowed_token_ids=LETTERS)
        free = one(llm, "abc", params).token_ids
        word = WORDS[free[0]]
        drawn = one(llm, "abc", replace(params, bad_words=[word])).token_ids
        assert free[0] not in drawn

    def test_a_bad_word_of_several_tokens_never_comes_whole(self, llm):
        """Its first tokens may come, and its last one elsewhere."""
        params = replace(GREEDY, allowed_token_ids=LETTERS, frequency_penalty=1.0)
        tokenizer = llm.get_tokenizer()
        free = one(llm, "abc", params).token_ids
        for n in (2, 3):
            at = next(
                i
                for i in range(20 - n)
                if tokenizer(spell(free[i : i + n]), add_special_tokens=False)["input_ids"]
                == free[i : i + n]
            )
            word = free[at : at + n]
            drawn = one(llm, "abc", replace(params, bad_words=[spell(word)])).token_ids
            assert drawn[: at + n - 1] == free[: at + n - 1]
            assert word not in [drawn[i : i + n] for i in range(20)]

    def test_a_bad_word_counts_after_a_space_too(self, llm):
        """Both spellings of vLLM: at the start of a text, and in the middle."""
        space, x = llm.get_tokenizer()(" x", add_special_tokens=False)["input_ids"]
        params = replace(GREEDY, allowed_token_ids=[space, x], bad_words=["x"])
        assert one(llm, "abc", params).token_ids == [space] * 20

    @pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
    def test_penalties_move_on_from_what_was_generated(self, name, llm):
        """The higher, the more different tokens there are among as many draws."""
        params = sampled(8, max_tokens=25, allowed_token_ids=LETTERS, temperature=2.0)
        counts = []
        for penalty in (-2.0, 0.0, 2.0):
            drawn = tokens(generate(llm, ["abc"], replace(params, **{name: penalty})))[0]
            counts.append(sum(len(set(token_ids)) for token_ids in drawn))
        assert counts[0] < counts[1] < counts[2]

    def test_a_repetition_penalty_counts_the_prompt_too(self, llm):
        prompt = list(range(100, 160))
        free = one(llm, prompt, replace(GREEDY, logit_bias=dict.fromkeys(prompt, 20.0)))
        assert set(free.token_ids) & set(prompt)
        drawn = one(llm, prompt, replace(GREEDY, repetition_penalty=100.0)).token_ids
        assert not set(drawn) & set(prompt)
        assert len(set(drawn)) == 20

    @pytest.mark.parametrize(("temperature", "n"), [(0, 1), (1.0, 1), (1.0, 3)])
    def test_a_request_without_a_token_costs_its_neighbours_nothing(self, temperature, n, llm):
        """It ends with an error and keeps what it had: here, one token."""
        neighbours = [sampled(2, seed=3), GREEDY]
        expected = generate(llm, ["one", "two"], neighbours)
        stuck = sampled(
            n,
            temperature=temperature,
            allowed_token_ids=[40, 41],
            bad_words=[WORDS[a] + WORDS[b] for a in (40, 41) for b in (40, 41)],
            logprobs=1,
        )
        llm.reset_prefix_cache()
        params = [neighbours[0], stuck, neighbours[1]]
        outputs = run_steps(llm, list(zip(["one", "stuck", "two"], params, strict=True)))
        assert [content(outputs[0]), content(outputs[2])] == [content(out) for out in expected]
        for completion in outputs[1].outputs:
            assert len(completion.token_ids) == len(completion.logprobs) == 1
            assert completion.text == spell(completion.token_ids)
            assert (completion.finish_reason, completion.stop_reason) == ("error", None)

    @pytest.mark.parametrize("streams", [False, True])
    def test_an_error_leaves_the_text_as_any_end_would(self, streams, llm, monkeypatch):
        """Half a character is left out, streamed or not."""
        start = WORDS.index("ä")  # the byte E4, first of three
        wait, count = llm.model_runner.wait, iter(range(1000))

        def stuck(step: InFlightStep) -> None:
            wait(step)
            if next(count) >= 2:
                step.token_ids = torch.tensor([-1])

        monkeypatch.setattr(llm.model_runner, "wait", stuck)
        generate = llm.generate_stream if streams else partial(llm.generate, use_tqdm=False)
        *_, out = generate("abc", replace(GREEDY, allowed_token_ids=[start]))
        (completion,) = out.outputs
        assert (completion.token_ids, completion.finish_reason) == ([start] * 2, "error")
        assert completion.text == ""


class TestLogprobs:
    @pytest.fixture(scope="class")
    @staticmethod
    def expected(model_path: Path) -> list[RequestOutput]:
        with LLM(model_path, **SMALL, enable_prefix_caching=False) as llm:
            return [generate(llm, [p], TestLogprobs.params(p))[0] for p in PROMPTS]

    @staticmethod
    def params(prompt: str) -> SamplingParams:
        return sampled(logprobs=2, prompt_logprobs=len(prompt) % 4, stop=["zz"])

    @staticmethod
    def check(found: Any, expected: Any) -> None:
        assert len(found) == len(expected)
        for position, other in zip(found, expected, strict=True):
            if other is None:
                assert position is None
                continue
            assert list(position) == list(other)
            for token_id, entry in position.items():
                assert entry.logprob == pytest.approx(other[token_id].logprob, abs=1e-3)
                assert entry.rank == other[token_id].rank
                assert entry.decoded_token == other[token_id].decoded_token

    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"max_num_batched_tokens": 9},
            {"num_kvcache_blocks": 14},
            {"max_num_seqs": 2, "kvcache_block_size": 1, "num_kvcache_blocks": 200},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.slow), 3])
    def test_they_depend_on_their_request_alone(self, n, settings, model_path, expected):
        """Neither chunks nor cached prefixes, preemptions or siblings leave gaps in them."""
        params = [replace(self.params(prompt), n=n) for prompt in PROMPTS]
        with LLM(model_path, **{**SMALL, **settings}) as llm:
            for _ in range(2):
                outputs = run_steps(llm, list(zip(PROMPTS, params, strict=True)))
                for out, alone in zip(outputs, expected, strict=True):
                    self.check(out.prompt_logprobs, alone.prompt_logprobs)
                    self.check(out.outputs[0].logprobs, alone.outputs[0].logprobs)

    def test_there_is_one_for_each_token_and_they_sum_up(self, expected):
        for out in expected:
            assert len(out.prompt_logprobs) == len(out.prompt_token_ids)
            for i, token_id in enumerate(out.prompt_token_ids[1:], 1):
                assert next(iter(out.prompt_logprobs[i])) == token_id
            (completion,) = out.outputs
            assert [next(iter(p)) for p in completion.logprobs] == completion.token_ids
            total = sum(next(iter(p.values())).logprob for p in completion.logprobs)
            assert completion.cumulative_logprob == pytest.approx(total, abs=1e-4)

    def test_each_token_is_decoded_alone(self, expected):
        entries = [entry for p in expected[0].outputs[0].logprobs for entry in p.items()]
        plain = [(i, entry) for i, entry in entries if i > 2 and WORDS[i].isascii()]
        assert plain
        assert all(entry.decoded_token == WORDS[i] for i, entry in plain)

    @pytest.mark.parametrize("k", [0, 1, VOCAB_SIZE, -1])
    def test_as_many_are_returned_as_were_asked_for(self, k, llm):
        params = sampled(logprobs=k, prompt_logprobs=k, max_tokens=3)
        other = sampled(logprobs=3, max_tokens=3)
        with_k, with_3, without = generate(llm, ["abc"] * 3, [params, other, sampled()])
        count = VOCAB_SIZE if k == -1 else k
        for position in [*with_k.outputs[0].logprobs, *with_k.prompt_logprobs[1:]]:
            assert len(position) in ({count, count + 1} if count < VOCAB_SIZE else {count})
            ranks = [entry.rank for entry in position.values()]
            assert sorted(ranks)[:count] == list(range(1, count + 1))
        assert {len(p) for p in with_3.outputs[0].logprobs} <= {3, 4}
        assert with_3.prompt_logprobs is without.prompt_logprobs is None
        assert without.outputs[0].logprobs is without.outputs[0].cumulative_logprob is None


class TestDefaults:
    @pytest.fixture
    def advised(self, model_path, tmp_path) -> Callable[..., LLM]:
        """An engine whose checkpoint's generation_config.json says what is given."""

        def make(**advice: Any) -> LLM:
            folder = Path(shutil.copytree(model_path, tmp_path / "model"))
            file = folder / "generation_config.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), **advice}))
            return LLM(folder, **SMALL)

        return make

    def test_without_advice_they_are_vllms(self, llm):
        assert llm.get_default_sampling_params() == SamplingParams()

    def test_the_checkpoints_advice_is_followed(self, advised):
        """By generate, chat, streams and add_request alike, if they are given no parameters."""
        advice = {"temperature": 0.3, "top_p": 0.8, "top_k": 5, "min_p": 0.1}
        with advised(**advice, repetition_penalty=1.2, max_new_tokens=7, do_sample=True) as llm:
            params = llm.get_default_sampling_params()
            assert params == SamplingParams(**advice, repetition_penalty=1.2, max_tokens=7)
            messages = [user("abc")]
            lengths = [len(out["token_ids"]) for out in llm.generate(PROMPTS, use_tqdm=False)]
            lengths += [len(out["token_ids"]) for out in llm.chat(messages, use_tqdm=False)]
            lengths += [len(list(llm.generate_stream("abc")))]
            llm.add_request("abc")
            while not llm.is_finished():
                lengths += [len(out["token_ids"]) for out in llm.step()]
            assert max(lengths) == 7

    def test_explicit_parameters_are_not_mixed_with_the_advice(self, advised):
        with advised(temperature=0.0, max_new_tokens=3) as llm:
            greedy = one(llm, "abc", llm.get_default_sampling_params())
            assert greedy.token_ids == one(llm, "abc", GREEDY).token_ids[:3]
            assert len(one(llm, "abc", SamplingParams(seed=1, ignore_eos=True)).token_ids) == 16

    def test_the_tokenizer_is_the_checkpoints(self, llm):
        tokenizer = llm.get_tokenizer()
        assert tokenizer("ab")["input_ids"] == [BOS, WORDS.index("ab")]
        assert tokenizer.get_chat_template() == CHAT_TEMPLATE


class TestReports:
    def test_any_maker_of_bars_will_do(self, llm):
        bars = []

        class Bar(tqdm):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.steps: list[float] = []
                self.closed = False
                bars.append(self)

            def update(self, n: float | None = 1) -> bool | None:
                self.steps.append(n)
                return super().update(n)

            def close(self) -> None:
                self.closed = True
                super().close()

        with open("/dev/null", "w") as nowhere:
            make = partial(Bar, file=nowhere)
            llm.generate(PROMPTS, sampled(2), use_tqdm=make)
            llm.chat([user("x")], GREEDY, use_tqdm=make)
            with pytest.raises(ValueError, match="empty"):
                llm.generate([[]], GREEDY, use_tqdm=make)
        assert [bar.total for bar in bars] == [4, 1]
        assert [sum(bar.steps) for bar in bars] == [4, 1]
        assert all(bar.closed for bar in bars)

    def test_metrics_are_in_order(self, model_path):
        with LLM(model_path, enable_reordering=False, **SMALL) as llm:
            start = time()
            outputs = generate(llm, PROMPTS * 5, sampled(2))
            end = time()
        for out in outputs:
            times = out.metrics
            assert start <= times.arrival_time <= times.first_token_time
            assert times.first_token_time < times.finished_time <= end
        firsts = [out.metrics.first_token_time for out in outputs]
        assert firsts == sorted(firsts) and firsts[0] < firsts[-1]

    def test_metrics_of_what_still_runs(self, llm):
        """Copies: an output that was given out does not change."""
        outputs = list(llm.generate_stream("abc", sampled(max_tokens=4)))
        assert [out.metrics.finished_time is not None for out in outputs] == [False] * 3 + [True]
        assert len({out.metrics.first_token_time for out in outputs}) == 1
        assert [out.finished for out in outputs] == [False] * 3 + [True]

    def test_a_preempted_request_has_had_its_first_token(self, model_path):
        """Guards a time that is taken again when its tokens are computed anew."""
        with LLM(model_path, **{**SMALL, "num_kvcache_blocks": 14}) as llm:
            firsts: dict[str, set[float]] = {}
            for out in llm.generate_stream([[i] * 20 for i in range(4)], sampled(max_tokens=30)):
                firsts.setdefault(out.request_id, set()).add(out.metrics.first_token_time)
            assert llm.scheduler.num_preemptions > 0
        assert [len(times) for times in firsts.values()] == [1] * 4

    @pytest.mark.parametrize("n", [1, 3])
    @pytest.mark.parametrize(("length", "hits"), [(7, 0), (8, 7), (9, 8), (16, 15), (20, 16)])
    def test_cached_prompt_tokens_are_counted(self, length, hits, n, llm):
        """Full blocks; the last token's logits are computed always."""
        prompt = list(range(100, 100 + length))
        found = [generate(llm, [prompt], sampled(n))[0].num_cached_tokens for _ in range(2)]
        assert found == [0, hits]
        llm.reset_prefix_cache()
        assert generate(llm, [prompt], sampled(n))[0].num_cached_tokens == 0

    def test_nothing_is_cached_without_a_cache_or_where_logits_are_wanted(self, llm, model_path):
        prompt = list(range(100, 120))
        wants = sampled(prompt_logprobs=0)
        found = [generate(llm, [prompt], p)[0].num_cached_tokens for p in (GREEDY, wants, GREEDY)]
        assert found == [0, 0, 16]
        with LLM(model_path, **SMALL, enable_prefix_caching=False) as other:
            found = [generate(other, [prompt])[0].num_cached_tokens for _ in range(2)]
        assert found == [0, 0]

    def test_several_mistakes_are_all_named(self, llm):
        bad = [SamplingParams(logprobs=600), SamplingParams(logprobs=700)]
        with pytest.raises(ValueError, match=r"(?s)\[1\].*logprobs is 600.*\[2\].*is 700"):
            generate(llm, PROMPTS[:3], [GREEDY, *bad])
