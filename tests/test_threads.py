"""Calls from several threads: each waits its turn, and none gets another's results or half of its
own. Grammars are compiled beside running requests. Any thread may close the engine."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.text import grammars, structured
from tests.conftest import check_idle
from tests.tiny_models import TinyModels

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[i + 1, 7, i + 30] for i in range(24)]


@pytest.fixture(scope="module")
def llm(tiny_models: TinyModels) -> Iterator[LLM]:
    settings: dict[str, Any] = {"kvcache_block_size": 16, "num_kvcache_blocks": 64}
    with LLM(tiny_models.path("qwen3"), max_model_len=128, max_num_seqs=4, **settings) as llm:
        yield llm
        check_idle(llm)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    return [out["token_ids"] for out in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def in_thread(call: Callable[[], Any]) -> "Result":
    return Result(call)


class Result:
    """What a call in a thread of its own gives, or raises."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.started = threading.Event()

        def run() -> Any:
            self.started.set()
            return call()

        self.future = self.pool.submit(run)
        assert self.started.wait(10)

    def get(self) -> Any:
        try:
            return self.future.result(30)
        finally:
            self.pool.shutdown(wait=False)


def tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert all(out.finished for out in outputs)
    return [out["token_ids"] for out in outputs]


def test_calls_of_generate_wait_their_turn(llm: LLM, expected: list[list[int]]):
    """Guards an AssertionError without a text, or results cut short, where two threads stepped one
    engine."""
    with ThreadPoolExecutor(6) as pool:
        parts = [PROMPTS[i::6] for i in range(6)] * 2
        results = list(pool.map(lambda part: tokens(llm, part), parts))
    for i, result in enumerate(results):
        assert result == expected[i % 6 :: 6]


def test_generate_waits_until_another_threads_stream_ends(llm: LLM, expected: list[list[int]]):
    stream = llm.generate_stream(PROMPTS[:2], PARAMS)
    next(stream)
    waiting = in_thread(lambda: tokens(llm, PROMPTS[2:4]))
    last = {out.request_id: out for out in stream}
    assert [last[i]["token_ids"] for i in sorted(last)] == expected[:2]
    assert waiting.get() == expected[2:4]


def test_the_thread_whose_own_stream_is_open_is_told(llm: LLM, expected: list[list[int]]):
    """It would wait for itself."""
    stream = llm.generate_stream(PROMPTS[0], PARAMS)
    next(stream)
    with pytest.raises(ValueError, match="generate needs the engine to itself"):
        tokens(llm, PROMPTS)
    for call in (llm.step, lambda: llm.add_request(PROMPTS[1], PARAMS)):
        with pytest.raises(ValueError, match="has not ended"):
            call()
    assert [*stream][-1]["token_ids"] == expected[0]


def test_requests_may_be_added_and_stepped_beside_a_waiting_call(
    llm: LLM, expected: list[list[int]]
):
    first = llm.add_request(PROMPTS[0], PARAMS)
    waiting = in_thread(lambda: tokens(llm, PROMPTS[4:8]))
    dropped, second = (llm.add_request(prompt, PARAMS) for prompt in PROMPTS[1:3])
    llm.abort_request(dropped)
    results = {}
    while results.keys() != {first, second}:
        results |= {out.request_id: out["token_ids"] for out in llm.step()}
    assert [results[first], results[second]] == [expected[0], expected[2]]
    assert waiting.get() == expected[4:8]


def test_a_request_added_during_generate_runs_after_it(llm: LLM, expected: list[list[int]]):
    adding: list[Result] = []
    step = llm.run_step

    def step_and_add() -> Any:
        if not adding:
            adding.append(in_thread(lambda: llm.add_request(PROMPTS[3], PARAMS)))
        return step()

    llm.run_step = step_and_add  # type: ignore[method-assign]
    try:
        assert tokens(llm, PROMPTS[:3]) == expected[:3]
    finally:
        del llm.run_step
    request_id = adding[0].get()
    results = []
    while not llm.is_finished():
        results += llm.step()
    assert [(out.request_id, out["token_ids"]) for out in results] == [(request_id, expected[3])]


def test_requests_of_a_thread_that_has_ended_are_an_error_and_no_deadlock(llm: LLM):
    request_id = in_thread(lambda: llm.add_request(PROMPTS[0], PARAMS))
    added = request_id.get()
    request_id.pool.shutdown(wait=True)
    with pytest.raises(ValueError, match="generate needs the engine to itself"):
        tokens(llm, PROMPTS)
    llm.abort_request(added)


SMALL: dict[str, Any] = {
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 64,
    "max_model_len": 128,
    "max_num_seqs": 4,
}
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def choice(*texts: str, **fields: Any) -> SamplingParams:
    fields = {"temperature": 0, **fields}
    return SamplingParams(
        max_tokens=20, structured_outputs=StructuredOutputsParams(choice=list(texts)), **fields
    )


SLOW = choice("slow", "sluggish")


class Compiler:
    """In place of the function that compiles: grammars that hold "slow" wait until ``go`` is set.

    Attributes:
        begun: that a slow one waits.
        texts: of the grammars whose compilation has ended.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.begun = threading.Event(), threading.Event()
        self.texts: list[str] = []
        make = structured._make_matcher

        def make_slowly(*args: Any) -> Any:
            if "slow" in args[-1]:
                self.begun.set()
                assert self.go.wait(60)
            self.texts.append(args[-1])
            return make(*args)

        monkeypatch.setattr(structured, "_make_matcher", make_slowly)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    compiler = Compiler(monkeypatch)
    yield compiler
    compiler.go.set()


@pytest.fixture
def text_llm(model_path: Path) -> Iterator[LLM]:
    with LLM(model_path, **SMALL) as llm:
        yield llm


class TestGrammars:
    def test_generate_runs_other_requests_while_one_is_compiled(
        self, text_llm, compiler, monkeypatch
    ):
        step, num_steps = text_llm.run_step, 0

        def count_steps() -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 20:
                assert not any("slow" in text for text in compiler.texts)
                compiler.go.set()
            return step()

        monkeypatch.setattr(text_llm, "run_step", count_steps)
        slow, one, other, fast = text_llm.generate(
            ["ab", "cd", "ef", "gh"], [SLOW, LONG, LONG, choice("fast")], False, on_error="return"
        )
        assert slow["text"] in ("slow", "sluggish") and fast["text"] == "fast"
        assert [len(out["token_ids"]) for out in (one, other)] == [60, 60]
        check_idle(text_llm)

    def test_one_that_is_refused_late_costs_its_request_alone(self, text_llm):
        """Not even the seeds of the others change."""
        prompts = ["ab", "cd", "ef", "gh", "ij"]
        sampled = SamplingParams(max_tokens=8, ignore_eos=True)
        letters = SamplingParams(
            max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[a-z]{8}")
        )
        bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
        each = [sampled, bad, letters, sampled, letters]
        outputs = text_llm.generate(prompts, each, False, on_error="return")
        assert "unclosed group" in outputs.pop(1).outputs[0].error
        with pytest.raises(ValueError, match=r"^prompts\[1\]: structured_outputs cannot be used"):
            text_llm.generate(prompts, each, False)
        del prompts[1], each[1]
        with LLM(text_llm.config.model, **SMALL) as other:
            expected = other.generate(prompts, each, False)
        assert [out["token_ids"] for out in outputs] == [out["token_ids"] for out in expected]

    def test_nothing_runs_before_all_are_known_to_be_good(self, text_llm, monkeypatch):
        """They are compiled at the same time: each waits for the other."""
        both, make, made = threading.Barrier(2), structured._make_matcher, []

        def meet(*args: Any) -> Any:
            both.wait(60)
            made.append(make(*args))
            return made[-1]

        monkeypatch.setattr(structured, "_make_matcher", meet)
        step = text_llm.run_step

        def step_after_both() -> Any:
            assert len(made) == 2
            return step()

        monkeypatch.setattr(text_llm, "run_step", step_after_both)
        prompts, each = ["ab", "cd", "ef"], [LONG, choice("one"), choice("two")]
        outputs = text_llm.generate(prompts, each, False)
        assert [out["text"] for out in outputs[1:]] == ["one", "two"]

    @pytest.mark.parametrize("how", ["prepare", "add_request"])
    def test_a_request_is_prepared_beside_the_thread_that_steps(
        self, text_llm, compiler, how, monkeypatch
    ):
        first = text_llm.add_request("ab", LONG)
        other = in_thread(lambda: getattr(text_llm, how)("cd", SLOW))
        results = {}
        for _ in range(20):
            results |= {out.request_id: out for out in text_llm.step()}
        assert not results and compiler.begun.wait(60) and not compiler.texts
        compiler.go.set()
        second = other.get()
        if how == "prepare":
            for owner, name in (
                (structured, "_make_matcher"),
                (text_llm.preparer.encoder, "encode"),
            ):
                monkeypatch.setattr(owner, name, None)  # nothing of it is left to do
            request = second
            second, third = text_llm.add_request(request), text_llm.add_request(request)
        while not text_llm.is_finished():
            results |= {out.request_id: out for out in text_llm.step()}
        assert len(results.pop(first)["token_ids"]) == 60
        assert len({out["text"] for out in results.values()} & {"slow", "sluggish"}) == 1
        assert list(results) == [second, third] if how == "prepare" else [second]

    def test_a_prepared_request_is_for_its_engine_and_has_its_parameters(self, text_llm, llm):
        prepared = text_llm.prepare("ab")
        with pytest.raises(ValueError, match="prepared by another engine"):
            llm.add_request(prepared)
        with pytest.raises(ValueError, match="has its own sampling_params"):
            text_llm.add_request(prepared, LONG)
        with pytest.raises(ValueError, match="is empty"):
            text_llm.prepare([])
        with pytest.raises(TypeError, match="must be SamplingParams"):
            text_llm.prepare("ab", {"temperature": 0})
        check_idle(text_llm)

    @pytest.mark.parametrize("on_error", ["raise", "return"])
    def test_ctrl_c_drops_those_that_wait(self, model_path, compiler, on_error, monkeypatch):
        monkeypatch.setattr(structured, "NUM_THREADS", 1)

        def interrupted(*args: Any) -> None:
            assert compiler.begun.wait(60)
            raise KeyboardInterrupt

        with LLM(model_path, **SMALL) as llm:
            with monkeypatch.context() as patch:
                patch.setattr(grammars, "wait", interrupted)
                patch.setattr(llm, "run_step", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    each = [LONG, SLOW, choice("fast")]
                    llm.generate(["ab", "cd", "ef"], each, False, on_error=on_error)
            check_idle(llm)
            assert len(llm.generate("ab", LONG, False)[0]["token_ids"]) == 60
            compiler.go.set()
        assert len(compiler.texts) == 1 and "slow" in compiler.texts[0]
        assert not [t for t in threading.enumerate() if t.name.startswith("nanovllm-grammars")]


CLOSED = "this engine was closed by another call"


class Paused:
    """An engine in whose third step a thread waits until another one closes it."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.llm, self.begun, self.num_steps = llm, threading.Event(), 0
        runner, step = llm.model_runner, llm.run_step
        self.freed = [weakref.ref(thing) for thing in (runner.model, runner.kv_cache)]

        def count_steps() -> Any:
            self.num_steps += 1
            if self.num_steps == 3:
                self.begun.set()
                wait_until_closing(llm)
            return step()

        monkeypatch.setattr(llm, "run_step", count_steps)

    def close(self) -> None:
        self.llm.close()
        gc.collect()
        assert not [ref for ref in self.freed if ref() is not None]


def wait_until_closing(llm: LLM) -> None:
    end = time.monotonic() + 60
    while not llm.turns.is_closed:
        assert time.monotonic() < end
        time.sleep(0)


def add_and_step(llm: LLM) -> None:
    llm.add_request("ab", LONG)
    while not llm.is_finished():
        llm.step()


CALLS: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate("ab", LONG, False),
    "return": lambda llm: llm.generate(["ab", "cd"], LONG, False, on_error="return"),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "ab"}], LONG, False),
    "stream": lambda llm: list(llm.generate_stream("ab", LONG)),
    "step": add_and_step,
}


class TestClose:
    @pytest.mark.parametrize("name", CALLS)
    def test_calls_that_run_or_wait_end_with_an_error(self, model_path, name, monkeypatch):
        llm = LLM(model_path, **SMALL)
        engine = Paused(llm, monkeypatch)
        running = in_thread(lambda: CALLS[name](llm))
        assert engine.begun.wait(60)
        waiting = [in_thread(lambda call=call: call(llm)) for call in CALLS.values()]
        closing = [in_thread(engine.close) for _ in range(2)]
        with pytest.raises(ValueError, match=CLOSED):
            running.get()
        for other in waiting:
            with pytest.raises(ValueError, match="closed"):
                other.get()
        for other in closing:
            other.get()
        assert engine.num_steps < 10
        llm.close()

    def test_of_several_ranks_too(self, tiny_models, monkeypatch):
        llm = LLM(tiny_models.path("qwen3"), tensor_parallel_size=2, device="cpu", **SMALL)
        workers = llm.model_runner.link
        engine = Paused(llm, monkeypatch)
        running = in_thread(lambda: llm.generate(PROMPTS[:8], LONG, False))
        assert engine.begun.wait(60)
        engine.close()
        with pytest.raises(ValueError, match=CLOSED):
            running.get()
        assert not any(process.is_alive() for process in workers._state.processes)

    def test_a_stream_between_two_steps(self, model_path):
        llm = LLM(model_path, **SMALL)
        stream = llm.generate_stream("ab", LONG)
        next(stream)
        in_thread(llm.close).get()
        with pytest.raises(ValueError, match=CLOSED):
            next(stream)

    def test_a_stream_that_is_at_its_end_has_no_error(self, model_path):
        llm = LLM(model_path, **SMALL)
        for output in llm.generate_stream("ab", LONG):
            if output.finished:
                llm.close()
        assert len(output["token_ids"]) == 60

    @pytest.mark.parametrize("name", ["prepare", "add_request", "generate", "return"])
    def test_while_a_grammar_is_compiled(self, model_path, compiler, name):
        llm = LLM(model_path, **SMALL)
        calls = {
            "prepare": lambda: llm.prepare("ab", SLOW),
            "add_request": lambda: llm.add_request("ab", SLOW),
            "generate": lambda: llm.generate("ab", SLOW, False),
            "return": lambda: llm.generate(["ab"] * 2, [SLOW, LONG], False, on_error="return"),
        }
        preparing = in_thread(calls[name])
        assert compiler.begun.wait(60)
        closing = in_thread(llm.close)
        wait_until_closing(llm)
        compiler.go.set()
        with pytest.raises(ValueError, match="closed"):
            preparing.get()
        closing.get()
        for call in calls.values():
            with pytest.raises(ValueError, match="this engine is closed"):
                call()

    def test_while_a_grammar_waits_for_a_thread(self, model_path, compiler, monkeypatch):
        """Guards a call that never ended: the grammar that it waited for was cancelled."""
        monkeypatch.setattr(structured, "NUM_THREADS", 1)
        llm = LLM(model_path, **SMALL)
        running = in_thread(lambda: llm.prepare("ab", SLOW))
        assert compiler.begun.wait(60)
        waiting = in_thread(lambda: llm.generate("ab", choice("fast"), False))
        while not llm.grammars.compiler._pool._work_queue.qsize():
            time.sleep(0.01)
        closing = in_thread(llm.close)
        with pytest.raises(ValueError, match=CLOSED):
            waiting.get()
        compiler.go.set()
        with pytest.raises(ValueError, match=CLOSED):
            running.get()
        closing.get()

    def test_metrics_do_not_need_the_model(self, model_path, monkeypatch):
        """If the engine was closed after ``metrics`` had begun, it raised AttributeError."""
        llm = LLM(model_path, **SMALL)

        def close_meanwhile() -> None:
            monkeypatch.undo()
            llm.close()

        monkeypatch.setattr(llm.turns, "check_open", close_meanwhile)
        assert llm.metrics().num_running == 0

    def test_metrics_are_numbers_or_the_error(self, model_path):
        for _ in range(5):
            llm = LLM(model_path, **SMALL)

            def watch(llm: LLM = llm) -> None:
                while True:
                    llm.metrics()

            watching = in_thread(watch)
            llm.close()
            with pytest.raises(ValueError, match="this engine is closed"):
                watching.get()
