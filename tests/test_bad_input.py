"""User mistakes, interruptions and the life of an engine: what is refused before anything runs,
and that the same engine still generates the same tokens afterwards."""

import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.engine.batch import Batch
from nanovllm.engine.in_flight import InFlightStep
from nanovllm.utils.context import Context, get_context
from tests.invariants import check_scheduler
from tests.mistakes import (
    BAD_CONFIG,
    BAD_PARAMS,
    BAD_PROMPTS,
    BAD_SAMPLING,
    GOOD,
    GREEDY,
    MAX_MODEL_LEN,
    NO_SUCH_MODEL,
    PROMPTS,
    SMALL,
    UNKNOWN_KEYWORDS,
    generate,
    refuse_config,
    refused,
    tokens,
)
from tests.tables import each
from tests.tiny_models import VOCAB_SIZE, TinyModels

NEW_SEEDS = count(1000)


@pytest.fixture(scope="module")
def expected(tiny_models: TinyModels) -> list[list[int]]:
    """The tokens of PROMPTS, from an engine that has seen nothing else."""
    with LLM(tiny_models.path("qwen3"), **SMALL) as llm:
        return generate(llm)


@pytest.fixture(scope="module")
def shared_llm(tiny_models: TinyModels) -> Iterator[LLM]:
    with LLM(tiny_models.path("qwen3"), **SMALL) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM, expected: list[list[int]]) -> Iterator[LLM]:
    """One engine for all tests; after each it must be clean and generate as ever."""
    yield shared_llm
    check_sound(shared_llm, expected)


def check_sound(llm: LLM, expected: list[list[int]]) -> None:
    assert llm.is_finished()
    check_scheduler(llm.scheduler)
    assert not llm.scheduler.block_manager.used_block_ids
    assert get_context() == Context()
    assert generate(llm) == expected
    check_scheduler(llm.scheduler)


@pytest.fixture
def nothing_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail(*args: Any) -> None:
        raise AssertionError("the model runs, though the call is refused")

    with monkeypatch.context() as patch:
        patch.setattr(llm.model_runner, "call", fail)
        yield


class TestMistakes:
    @each("mistake", BAD_PROMPTS)
    def test_a_bad_prompt_is_refused_with_its_index(self, llm, nothing_runs, mistake):
        """Guards nano-vLLM's asserts and IndexErrors, which take the whole batch with them."""
        prompts, exception, match = BAD_PROMPTS[mistake]
        refused(lambda: generate(llm, prompts), exception, match)

    @each("mistake", BAD_PARAMS)
    def test_bad_sampling_params_are_refused(self, llm, nothing_runs, mistake):
        """Guards mismatched lists that zip cuts to the shorter one."""
        params, exception, match = BAD_PARAMS[mistake]
        refused(lambda: generate(llm, [GOOD, GOOD], params), exception, match)

    @each("mistake", BAD_SAMPLING)
    def test_a_bad_sampling_value_is_refused(self, mistake):
        """Guards max_tokens=0, which never stopped."""
        values, exception, match = BAD_SAMPLING[mistake]
        refused(lambda: SamplingParams(**values), exception, match)

    @each("field, value", [(field, value) for field in BAD_CONFIG for value in BAD_CONFIG[field]])
    def test_a_bad_setting_is_refused_by_name(self, field, value):
        refuse_config(field, value)

    def test_none_stands_for_the_default_of_a_setting(self):
        names = [field.name for field in fields(Config) if field.name != "model"]
        assert Config.create("m", **dict.fromkeys(names)) == Config("m")

    def test_the_default_block_size_is_one_that_the_backend_takes(self):
        assert Config("m").block_size == 128
        assert Config("m", attention_backend="flash_attn").block_size == 256
        given = {"kvcache_block_size": 128, "attention_backend": "flash_attn"}
        assert Config("m", **given).block_size == 128  # start-up refuses it by name

    @each(
        "field, value, kept",
        [
            ("seed", np.int64(3), 3),
            ("max_num_seqs", np.uint8(4), 4),
            ("gpu_memory_utilization", np.float32(0.5), 0.5),
            ("dtype", "half", "float16"),
            ("dtype", "float", "float32"),
            ("dtype", torch.bfloat16, "bfloat16"),
            ("tokenizer", Path("a/b"), "a/b"),
            ("enforce_eager", np.bool_(True), True),
        ],
    )
    def test_what_users_write_becomes_pythons_own(self, field, value, kept):
        read = getattr(Config.create("m", **{field: value}), field)
        assert read == kept and type(read) is type(kept)

    def test_every_setting_has_a_bad_value_here(self):
        assert set(BAD_CONFIG) == {field.name for field in fields(Config)}

    @each("name", UNKNOWN_KEYWORDS)
    def test_an_unknown_setting_is_refused_with_the_nearest(self, name):
        """Guards nano-vLLM, which drops unknown keywords without a word."""
        match = f"unknown argument '{name}'; did you mean '{UNKNOWN_KEYWORDS[name]}'"
        refused(lambda: LLM(NO_SUCH_MODEL, **{name: 1}), TypeError, match)

    def test_an_unknown_setting_like_no_other_is_refused_with_all(self):
        refused(lambda: LLM(NO_SUCH_MODEL, zzz=1), TypeError, "'zzz'.*max_num_seqs.*seed")

    @each("mistake", ["empty-ids", "negative-id", "too-long", "text", "bool-id"])
    def test_add_request_refuses_the_same(self, llm, nothing_runs, mistake):
        prompts, exception, match = BAD_PROMPTS[mistake]
        prompt = prompts if isinstance(prompts, str) else prompts[-1]
        match = match.partition(": ")[2]
        refused(lambda: llm.add_request(prompt), exception, match)
        assert llm.is_finished()

    def test_add_request_refuses_bad_sampling_params(self, llm, nothing_runs):
        refused(lambda: llm.add_request(GOOD, {"temperature": 0}), TypeError, "SamplingParams")

    def test_a_prompt_over_the_kv_cache_is_refused(self, tiny_models):
        """Guards a prompt that waits for ever for blocks that do not exist."""
        settings = {**SMALL, "num_kvcache_blocks": 3}
        with LLM(tiny_models.path("qwen3"), **settings) as llm:
            match = (
                r"prompts\[1\]: the prompt has 48 tokens .* limited to 48 tokens by the KV cache "
                r"\(3 blocks of 16\): raise num_kvcache_blocks"
            )
            refused(lambda: generate(llm, [GOOD, [1] * 48]), ValueError, match)
            assert len(generate(llm, [[1] * 47])[0]) == 1

    def test_an_unknown_request_cannot_be_aborted(self, llm):
        for request_id in ("no-such-id", "", 7, None):
            refused(lambda r=request_id: llm.abort_request(r), ValueError, "no unfinished request")

    @each(
        "call",
        [generate, lambda llm: next(llm.generate_stream(PROMPTS)), LLM.reset_prefix_cache],
    )
    def test_some_calls_need_the_engine_to_themselves(self, llm, nothing_runs, call):
        request_id = llm.add_request(GOOD, GREEDY)
        refused(lambda: call(llm), ValueError, "(?i)finish .*the (other )?requests|finish or abort")
        llm.abort_request(request_id)

    @each("mistake", [*BAD_PROMPTS, *BAD_PARAMS])
    def test_a_stream_refuses_the_same(self, llm, nothing_runs, mistake):
        prompts, params = [GOOD, GOOD], GREEDY
        if mistake in BAD_PROMPTS:
            prompts, exception, match = BAD_PROMPTS[mistake]
        else:
            params, exception, match = BAD_PARAMS[mistake]
        refused(lambda: next(llm.generate_stream(prompts, params)), exception, match)

    @each(
        "call",
        [
            lambda llm: llm.generate(PROMPTS, use_tqdm=False),
            lambda llm: llm.generate([]),
            lambda llm: next(llm.generate_stream(PROMPTS)),
            lambda llm: llm.add_request(GOOD),
            lambda llm: llm.step(),
            lambda llm: llm.is_finished(),
            lambda llm: llm.reset_prefix_cache(),
        ],
    )
    @each("close", [LLM.close, LLM.exit])
    def test_a_closed_engine_says_so(self, tiny_models, call, close):
        llm = LLM(tiny_models.path("qwen3"), **SMALL)
        close(llm)
        close(llm)  # closing twice is no mistake
        refused(lambda: call(llm), ValueError, "closed")

    def test_a_cache_that_cannot_be_allocated_is_refused(self, tiny_models):
        """Guards the allocator's own error, which names no setting."""
        settings = {**SMALL, "num_kvcache_blocks": 10**12}
        path = tiny_models.path("qwen3")
        refused(lambda: LLM(path, **settings), ValueError, "num_kvcache_blocks")

    @pytest.mark.filterwarnings("error")
    def test_a_failed_start_leaves_nothing_behind(self, tiny_models, tmp_path):
        """Guards an error in start-up that is followed by one in __del__."""
        refused(lambda: LLM(tmp_path), ValueError, r"config\.json")
        refused(lambda: LLM(tiny_models.path("qwen3"), seed=-1), ValueError, "seed")
        gc.collect()


@pytest.mark.slow
def test_mistakes_are_refused_under_python_O(tiny_models):
    """Guards checks of user input that are asserts, which vanish under ``python -O``."""
    code = "import sys; from tests.mistakes import check_mistakes; check_mistakes(sys.argv[1])"
    result = subprocess.run(
        [sys.executable, "-O", "-c", code, str(tiny_models.path("qwen3"))],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["optimised", "done"]
    assert "Exception ignored" not in result.stderr


class TestPromptForms:
    @each(
        "form",
        [
            lambda ids: ids,
            tuple,
            lambda ids: [ids],
            lambda ids: [tuple(ids)],
            lambda ids: (ids,),
            lambda ids: [np.int64(i) for i in ids],
            lambda ids: {"prompt_token_ids": ids},
            lambda ids: [{"prompt_token_ids": ids}],
            lambda ids: {"prompt_token_ids": tuple(ids)},
        ],
    )
    def test_every_form_gives_the_same_tokens(self, llm, expected, form):
        (out,) = llm.generate(form(PROMPTS[1]), GREEDY, use_tqdm=False)
        assert out["token_ids"] == expected[1]
        assert out.prompt_token_ids == PROMPTS[1]
        assert all(type(i) is int for i in out.prompt_token_ids)
        assert out.prompt is None

    def test_token_ids_go_before_the_text_beside_them(self, llm, expected):
        """vLLM's dict may name the text that the ids came from; it is not tokenised again."""
        prompt = {"prompt": "some text", "prompt_token_ids": PROMPTS[0]}
        (out,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert out["token_ids"] == expected[0]
        assert (out.prompt, out.prompt_token_ids) == ("some text", PROMPTS[0])

    def test_no_prompts_give_no_results(self, llm, nothing_runs):
        assert llm.generate([]) == []
        assert llm.generate((), [], use_tqdm=False) == []

    def test_default_sampling_params(self, llm):
        (out,) = llm.generate(GOOD, use_tqdm=False)
        assert 1 <= len(out["token_ids"]) <= SamplingParams().max_tokens

    def test_arguments_stay_as_they_are(self, llm):
        """Guards results that share a list with the caller's prompt."""
        prompts, params = [list(p) for p in PROMPTS], [GREEDY] * len(PROMPTS)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert prompts == PROMPTS and params == [GREEDY] * len(PROMPTS)
        for out in outputs:
            out.prompt_token_ids.append(7)
        assert prompts == PROMPTS


@pytest.mark.smoke
class TestResults:
    def test_order_is_the_prompts_whatever_finishes_first(self, llm, expected):
        lengths = [20, 1, 7, 3]
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [out.prompt_token_ids for out in outputs] == PROMPTS
        assert tokens(outputs) == [run[:n] for run, n in zip(expected, lengths, strict=True)]

    def test_both_styles_of_access(self, llm, expected):
        """Scripts for nano-vLLM and for vLLM read the same result."""
        (out,) = llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)
        assert out["token_ids"] == out.outputs[0].token_ids == expected[0]
        assert out["text"] == out.outputs[0].text == ""
        assert (out.outputs[0].index, out.outputs[0].finish_reason) == (0, "length")
        assert (out.prompt, out.prompt_token_ids, out.finished) == (None, PROMPTS[0], True)
        assert isinstance(out.request_id, str)
        with pytest.raises(KeyError, match=r"'logprobs'.*'text' and 'token_ids'"):
            out["logprobs"]

    def test_request_ids_are_unique(self, llm):
        outputs = [out for _ in range(2) for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        assert len({out.request_id for out in outputs}) == len(outputs)

    def test_more_prompts_than_max_num_seqs(self, llm):
        """Guards a batch larger than what was planned for, in nano-vLLM a StopIteration."""
        prompts = [[i, i + 1, 2 * i + 3] for i in range(50)]
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        together = generate(llm, prompts, params)
        assert together == [generate(llm, [prompt], params)[0] for prompt in prompts]

    def test_an_end_of_sequence_token_stops(self, tiny_models, tmp_path, expected):
        folder = Path(shutil.copytree(tiny_models.path("qwen3"), tmp_path / "model"))
        end = expected[2][6]
        for name in ("config.json", "generation_config.json"):
            text = (folder / name).read_text()
            (folder / name).write_text(
                re.sub(r'"eos_token_id": \d+', f'"eos_token_id": {end}', text)
            )
        with LLM(folder, **SMALL) as llm:
            params = SamplingParams(temperature=0, max_tokens=20)
            (out,) = llm.generate([PROMPTS[2]], params, use_tqdm=False)
        assert out["token_ids"] == expected[2][: expected[2].index(end) + 1]
        assert out.outputs[0].finish_reason == "stop"

    @pytest.mark.parametrize("max_tokens", [None, 10**9])
    def test_generation_stops_at_max_model_len(self, llm, max_tokens):
        """Guards generation that runs past the model's positions."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        prompts = [[1], [2] * 50, [3] * (MAX_MODEL_LEN - 1)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        lengths = [len(out["token_ids"]) for out in outputs]
        assert lengths == [MAX_MODEL_LEN - len(prompt) for prompt in prompts]
        assert {out.outputs[0].finish_reason for out in outputs} == {"length"}

    def test_generation_stops_where_the_cache_ends(self, tiny_models):
        """One sequence that outgrows the whole cache finishes; it does not wait for ever."""
        settings = {**SMALL, "num_kvcache_blocks": 2}
        with LLM(tiny_models.path("qwen3"), **settings) as llm:
            params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
            outputs = llm.generate([[1], [2] * 20, [3] * 31], params, use_tqdm=False)
            assert [len(out["token_ids"]) for out in outputs] == [31, 12, 1]
            assert {out.outputs[0].finish_reason for out in outputs} == {"length"}
            check_scheduler(llm.scheduler)

    def test_the_bar_counts_finished_prompts(self, llm, capsys):
        llm.generate(PROMPTS, GREEDY, use_tqdm=True)
        err = capsys.readouterr().err
        assert "4/4" in err and "tok/s" in err
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert not capsys.readouterr().err

    def test_the_seed_decides_the_draws(self, tiny_models):
        params = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)
        draws = []
        for seed in (5, 5, 6):
            with LLM(tiny_models.path("qwen3"), **SMALL, seed=seed) as llm:
                draws.append(generate(llm, PROMPTS, params))
        assert draws[0] == draws[1] != draws[2]

    @each("temperature", [1e-20, 1e-38, 1e-45])
    def test_a_tiny_temperature_is_greedy(self, llm, expected, temperature):
        """Guards logits / temperature that overflow to inf, whose softmax is NaN and whose
        argmax is token 0."""
        params = SamplingParams(temperature=temperature, max_tokens=20, ignore_eos=True)
        assert generate(llm, PROMPTS, params) == expected


class TestStepLoop:
    def run(self, llm: LLM) -> dict[str, list[int]]:
        results = {}
        while not llm.is_finished():
            for out in llm.step():
                assert out.request_id not in results
                results[out.request_id] = out["token_ids"]
            check_scheduler(llm.scheduler)
        return results

    def test_step_equals_generate(self, llm, expected):
        ids = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
        results = self.run(llm)
        assert [results[request_id] for request_id in ids] == expected
        assert llm.step() == []

    def test_requests_may_join_at_any_step(self, llm, expected):
        ids, results = [], {}
        for prompt in PROMPTS:
            ids.append(llm.add_request(prompt, GREEDY))
            for _ in range(3):
                results.update({out.request_id: out["token_ids"] for out in llm.step()})
        results.update(self.run(llm))
        assert [results[request_id] for request_id in ids] == expected

    @pytest.mark.parametrize("num_steps", [0, 1, 2, 10])
    def test_an_aborted_request_leaves_no_trace(self, llm, expected, num_steps):
        """Waiting, half prefilled or decoding; the others go on undisturbed."""
        ids = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
        for _ in range(num_steps):
            assert llm.step() == []
        llm.abort_request(ids[1])
        llm.abort_request(ids[3])
        check_scheduler(llm.scheduler)
        refused(lambda: llm.abort_request(ids[1]), ValueError, "no unfinished request")
        results = self.run(llm)
        assert results == {ids[0]: expected[0], ids[2]: expected[2]}

    def test_a_finished_request_cannot_be_aborted(self, llm):
        request_id = llm.add_request(GOOD, SamplingParams(temperature=0, max_tokens=1))
        assert llm.step() == []  # launched; its token comes with the next
        assert [out.request_id for out in llm.step()] == [request_id]
        refused(lambda: llm.abort_request(request_id), ValueError, "no unfinished request")


# At which lines of a call an interrupt is tried: one in so many.
FEW_LINES = {"add_request": 17, "abort_request": 5, "step": 47, "generate": 503, "stream": 509}
FEW_LINES["close"] = 7
MANY_LINES = {"add_request": 2, "step": 4, "generate": 41, "stream": 43}
MANY_LINES |= {"abort_request": 1, "close": 1}


class Stop(Exception):
    """An error that nothing in the engine knows."""


def interrupt_at(line: int, call: Callable[[], Any]) -> bool:
    """Raises KeyboardInterrupt at the so manieth line that runs in the engine's own code; false
    if it ends before."""
    left = line

    def trace_line(frame: Any, event: str, arg: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if not left and event == "line":
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace_line

    def trace(frame: Any, event: str, arg: Any) -> Any:
        code = frame.f_code
        own = "/nanovllm/engine/" in code.co_filename.replace("\\", "/")
        return trace_line if own and code.co_name not in ("__enter__", "__exit__") else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


class TestInterruption:
    """Guards leftovers of an interrupted call that mix into the next one's results, and blocks
    registered in the prefix cache whose keys were never computed. Each call has prompts that no
    call before had, lest old blocks hold the right keys by chance."""

    @pytest.fixture(scope="class")
    @staticmethod
    def reference(tiny_models: TinyModels) -> Iterator[LLM]:
        settings = {**SMALL, "enable_prefix_caching": False}
        with LLM(tiny_models.path("qwen3"), **settings) as llm:
            yield llm

    @staticmethod
    def new_prompts() -> list[list[int]]:
        generator = torch.Generator().manual_seed(next(NEW_SEEDS))
        lengths = (3, 20, 33, 70)
        return [torch.randint(0, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]

    @pytest.fixture
    def fresh(self, llm: LLM, reference: LLM) -> Iterator[list[list[int]]]:
        """Prompts for the call that is interrupted; afterwards they give the right tokens."""
        prompts = self.new_prompts()
        yield prompts
        assert generate(llm, prompts) == generate(reference, prompts)

    def interrupt(
        self, llm: LLM, patch: pytest.MonkeyPatch, step: int, error: BaseException, after: bool
    ) -> None:
        """Makes the given step of the model runner fail, before or after it has run."""
        run, count = llm.model_runner.run, iter(range(1000))

        def failing(batch: Batch) -> InFlightStep:
            fails = next(count) == step
            if fails and not after:
                raise error
            output = run(batch)
            if fails:
                raise error
            return output

        patch.setattr(llm.model_runner, "run", failing)

    @pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
    @pytest.mark.parametrize(
        ("error", "step"),
        [*((KeyboardInterrupt, step) for step in (0, 1, 2, 9)), (Stop, 1), (MemoryError, 2)],
    )
    def test_generate_leaves_a_clean_engine(
        self, llm, expected, fresh, monkeypatch, error, step, after
    ):
        with monkeypatch.context() as patch:
            self.interrupt(llm, patch, step, error(), after)
            with pytest.raises(error):
                generate(llm, fresh)
        outputs = llm.generate([PROMPTS[2]], GREEDY, use_tqdm=False)
        assert [out.prompt_token_ids for out in outputs] == [PROMPTS[2]]
        assert tokens(outputs) == [expected[2]]

    @pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
    @pytest.mark.parametrize("step", [0, 1, 2, 9])
    def test_a_stream_of_several_completions_leaves_a_clean_engine(
        self, llm, fresh, monkeypatch, step, after
    ):
        """Guards copies of blocks that are still due, and siblings that turn up later."""
        params = SamplingParams(n=3, max_tokens=20, ignore_eos=True)
        with monkeypatch.context() as patch:
            self.interrupt(llm, patch, step, Stop(), after)
            with pytest.raises(Stop):
                list(llm.generate_stream(fresh, params))
        assert llm.is_finished()
        (out,) = llm.generate([PROMPTS[2]], params, use_tqdm=False)
        assert [len(completion.token_ids) for completion in out.outputs] == [20] * 3

    @pytest.mark.parametrize("error", [KeyboardInterrupt, Stop])
    def test_step_leaves_a_clean_engine(self, llm, fresh, monkeypatch, error):
        ids = [llm.add_request(prompt, GREEDY) for prompt in fresh]
        llm.step()
        with monkeypatch.context() as patch:
            self.interrupt(llm, patch, 0, error(), after=True)
            with pytest.raises(error):
                llm.step()
        assert llm.is_finished() and llm.step() == []
        refused(lambda: llm.abort_request(ids[0]), ValueError, "no unfinished request")

    @pytest.mark.parametrize("error", [KeyboardInterrupt, Stop])
    def test_an_error_between_two_layers(self, llm, fresh, error):
        """The first layer has stored its keys and values, the others have not."""

        def fail(*args: Any) -> None:
            raise error

        hook = llm.model_runner.model.model.layers[1].register_forward_pre_hook(fail)
        try:
            with pytest.raises(error):
                generate(llm, fresh)
        finally:
            hook.remove()

    @pytest.mark.parametrize(
        ("call", "stride"),
        [
            *FEW_LINES.items(),
            *(pytest.param(*item, marks=pytest.mark.slow) for item in MANY_LINES.items()),
        ],
    )
    def test_ctrl_c_at_any_line(self, llm, expected, call, stride):
        """At every line or, where a call has many, at one line in ``stride``.
        Afterwards the engine may have dropped the requests or not, but works, and has lost no
        block."""
        num_blocks = llm.model_runner.num_kvcache_blocks
        params = replace(GREEDY, max_tokens=6)
        stream: Any = None

        def work(ids: list[str]) -> None:
            if call == "add_request":
                llm.add_request(PROMPTS[0], params)
            elif call == "abort_request":
                llm.abort_request(ids[0])
            elif call == "step":
                llm.step()
            elif call == "generate":
                llm.generate(PROMPTS[:2], params, use_tqdm=False)
            elif call == "stream":
                list(llm.generate_stream(PROMPTS[:2], params))
            else:
                stream.close()

        num_tried = 0
        for line in count(1, stride):
            ids = []
            if call in ("abort_request", "step"):
                ids = [llm.add_request(prompt, params) for prompt in PROMPTS[:2]]
                llm.step()
            elif call == "close":
                stream = llm.generate_stream(PROMPTS[:2], params)
                next(stream)
            if not interrupt_at(line, partial(work, ids)):
                break
            num_tried += 1
            if call == "close":  # it may end before it can drop its requests
                for request_id in list(llm.requests):
                    llm.abort_request(request_id)
            while not llm.is_finished():
                llm.step()
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert tokens(outputs) == expected
            llm.reset_prefix_cache()
            assert len(llm.scheduler.block_manager.free_block_ids) == num_blocks
        print(num_tried)
        assert num_tried > 5
        while not llm.is_finished():
            llm.step()

    @pytest.mark.parametrize("method", ["schedule", "postprocess"])
    def test_an_error_in_the_scheduler(self, llm, fresh, monkeypatch, method):
        """Its books are half written: blocks handed out, some tokens appended."""
        original, count = getattr(llm.scheduler, method), iter(range(1000))

        def failing(*args: Any) -> Any:
            result = original(*args)
            if next(count) == 4:
                raise Stop
            return result

        with monkeypatch.context() as patch:
            patch.setattr(llm.scheduler, method, failing)
            with pytest.raises(Stop):
                generate(llm, fresh)

    def test_an_error_while_requests_are_queued(self, llm, fresh, monkeypatch):
        add, count = llm.scheduler.add, iter(range(1000))

        def failing(seq: Any) -> None:
            if next(count) == 2:
                raise KeyboardInterrupt
            add(seq)

        with monkeypatch.context() as patch:
            patch.setattr(llm.scheduler, "add", failing)
            with pytest.raises(KeyboardInterrupt):
                generate(llm, fresh)

    def test_an_error_while_requests_are_queued_beside_the_first_step(
        self, llm, fresh, monkeypatch
    ):
        """Which starts as soon as there are prompts for a full one, while others are tokenised."""
        add, run, adds, runs = llm.scheduler.add, llm.model_runner.run, [], []

        def failing(seq: Any) -> None:
            adds.append(seq)
            if len(adds) == 4:
                raise KeyboardInterrupt
            add(seq)

        def counting(batch: Batch) -> None:
            runs.append(batch)
            run(batch)

        with monkeypatch.context() as patch:
            patch.setattr(llm.scheduler, "add", failing)
            patch.setattr(llm.model_runner, "run", counting)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([fresh[3], *fresh], GREEDY, use_tqdm=False, on_error="return")
        assert len(runs) == 1 and llm.is_finished()

    @pytest.mark.parametrize("use_tqdm", [pytest.param(False, marks=pytest.mark.slow), True])
    def test_ctrl_c_at_any_moment(self, llm, expected, reference, use_tqdm):
        """A real SIGINT from another thread, after 10 delays of 1 to 60 ms."""
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupts = 0
        try:
            for delay in torch.linspace(0.001, 0.06, 10).tolist():
                prompts = self.new_prompts()
                timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
                try:
                    timer.start()
                    end = time.monotonic() + 5
                    while time.monotonic() < end:
                        llm.generate(prompts, GREEDY, use_tqdm=use_tqdm)
                except KeyboardInterrupt:
                    interrupts += 1
                assert generate(llm, prompts) == generate(reference, prompts)
                check_sound(llm, expected)
        finally:
            signal.signal(signal.SIGINT, handler)
        # Python drops an interrupt that lands inside a __del__.
        assert interrupts >= 8


class TestLife:
    def make(self, tiny_models: TinyModels, name: str = "qwen3") -> LLM:
        return LLM(tiny_models.path(name), **SMALL)

    def watch(self, llm: LLM) -> list[weakref.ref]:
        runner = llm.model_runner
        watched = [runner, runner.model, runner.kv_cache, *runner.model.parameters()]
        return [weakref.ref(thing) for thing in watched]

    def test_del_frees_the_model_and_the_cache(self, tiny_models, expected):
        """Guards nano-vLLM's atexit hook, which keeps every engine for ever."""
        llm = self.make(tiny_models)
        watched = self.watch(llm)
        assert generate(llm) == expected
        assert all(ref() is not None for ref in watched)
        del llm
        gc.collect()
        assert not [ref for ref in watched if ref() is not None]

    def test_del_frees_after_an_error(self, tiny_models):
        llm = self.make(tiny_models)
        watched = self.watch(llm)
        with pytest.raises(ValueError, match="empty"):
            generate(llm, [[]])
        llm.model_runner.sampler.register_forward_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generate(llm)
        del llm
        gc.collect()
        assert not [ref for ref in watched if ref() is not None]

    def test_with_closes(self, tiny_models):
        with self.make(tiny_models) as llm:
            watched = self.watch(llm)
        assert not [ref for ref in watched if ref() is not None]
        refused(lambda: generate(llm), ValueError, "this engine is closed: make a new one")

    def test_with_closes_after_an_error(self, tiny_models):
        with pytest.raises(Stop), self.make(tiny_models) as llm:
            watched = self.watch(llm)
            llm.add_request(GOOD)
            raise Stop
        assert not [ref for ref in watched if ref() is not None]

    def test_two_engines_one_after_the_other(self, tiny_models, expected):
        for _ in range(2):
            llm = self.make(tiny_models)
            assert generate(llm) == expected
            del llm

    def test_two_engines_side_by_side(self, tiny_models, expected):
        """Another model, another block size, steps in turn: neither sees the other's."""
        with LLM(tiny_models.path("llama"), **{**SMALL, "kvcache_block_size": 8}) as other:
            other_expected = generate(other)
            assert other_expected != expected
            with self.make(tiny_models) as llm:
                engines = (llm, other)
                ids = [[engine.add_request(p, GREEDY) for p in PROMPTS] for engine in engines]
                results: tuple[dict[str, list[int]], ...] = ({}, {})
                while not all(engine.is_finished() for engine in engines):
                    for engine, result in zip(engines, results, strict=True):
                        result.update({o.request_id: o["token_ids"] for o in engine.step()})
                assert [results[0][i] for i in ids[0]] == expected
                assert [results[1][i] for i in ids[1]] == other_expected
            # One of them is closed now; the other goes on.
            assert generate(other) == other_expected

    def test_process_wide_settings_stay_as_they_are(self, tiny_models):
        path = tiny_models.path("qwen3")
        torch.manual_seed(123)
        state = torch.get_rng_state()
        with LLM(path, **SMALL, dtype="bfloat16") as llm:
            generate(llm, PROMPTS, SamplingParams(temperature=1.0))
        assert torch.get_default_dtype() == torch.float32
        assert torch.empty(0).device.type == "cpu"
        assert torch.equal(torch.get_rng_state(), state)
        assert not torch.is_inference_mode_enabled()


WORDS = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, VOCAB_SIZE))]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['content'] }} {{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %} w4{% endif %}"
)


@pytest.mark.smoke
class TestTokenizer:
    @pytest.fixture(scope="class")
    @staticmethod
    def make(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory):
        """A tiny checkpoint with a tokenizer of one word a token."""

        def make(adds_bos: bool = True, bos: str | None = "<s>", end: str = "</s>") -> LLM:
            folder = tmp_path_factory.mktemp("with_tokenizer") / "model"
            shutil.copytree(tiny_models.path("qwen3"), folder)
            vocab = {word: i for i, word in enumerate(WORDS)}
            tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
            tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
            if adds_bos:
                tokenizer.post_processor = processors.TemplateProcessing(
                    single="<s> $A", special_tokens=[("<s>", 1)]
                )
            PreTrainedTokenizerFast(
                tokenizer_object=tokenizer,
                bos_token=bos,
                eos_token=end,
                unk_token="<unk>",
                chat_template=CHAT_TEMPLATE,
            ).save_pretrained(folder)
            return LLM(folder, **SMALL)

        return make

    @pytest.fixture(scope="class")
    @staticmethod
    def text_llm(make: Callable[..., LLM]) -> Iterator[LLM]:
        with make() as llm:
            yield llm

    @staticmethod
    def text_of(ids: list[int], prompt: list[int]) -> str:
        """Words after the prompt's last one, if that is no special token."""
        text = "".join(f" {WORDS[i]}" for i in ids if i > 2)
        return text if prompt[-1] > 2 else text.removeprefix(" ")

    def test_the_tokenizers_bos_is_added_once(self, text_llm):
        (out,) = text_llm.generate("w5 w9 w7", GREEDY, use_tqdm=False)
        assert out.prompt_token_ids == [1, 5, 9, 7]
        assert out.prompt == "w5 w9 w7"

    def test_templated_text_gets_no_second_bos(self, text_llm):
        """Guards the BOS that a chat template spells out and the tokenizer adds again."""
        messages = [{"role": "user", "content": "w5 w9"}, {"role": "user", "content": "w8"}]
        text = text_llm.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert text.startswith("<s>")
        (out,) = text_llm.generate(text, GREEDY, use_tqdm=False)
        assert out.prompt_token_ids == [1, 5, 9, 2, 8, 2, 4]
        templated = text_llm.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert out.prompt_token_ids == templated

    def test_plain_and_templated_texts_mix_in_one_batch(self, text_llm):
        prompts = ["<s>w5", "w6", [7, 8], "<s> w9 w10", {"prompt": "w11"}, "w12 <s>"]
        outputs = text_llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [out.prompt_token_ids for out in outputs] == [
            [1, 5],
            [1, 6],
            [7, 8],
            [1, 9, 10],
            [1, 11],
            [1, 12, 1],
        ]
        assert [out.prompt for out in outputs] == [
            "<s>w5",
            "w6",
            None,
            "<s> w9 w10",
            "w11",
            "w12 <s>",
        ]

    def test_a_tokenizer_that_adds_no_bos_is_left_to_it(self, make):
        """Guards a BOS for models that were trained without one, Qwen's."""
        with make(adds_bos=False) as llm:
            assert llm.generate("w5", GREEDY, use_tqdm=False)[0].prompt_token_ids == [5]
        with make(adds_bos=False, bos=None) as llm:
            assert llm.generate("w5", GREEDY, use_tqdm=False)[0].prompt_token_ids == [5]

    def test_text_ids_and_dicts_agree(self, text_llm):
        ids = [1, 5, 9, 7]
        forms = ["w5 w9 w7", {"prompt": "w5 w9 w7"}, ids, {"prompt_token_ids": ids}]
        forms.append({"prompt": "not this", "prompt_token_ids": ids})
        outputs = text_llm.generate(forms, GREEDY, use_tqdm=False)
        assert [out.prompt_token_ids for out in outputs] == [ids] * len(forms)
        assert len({tuple(out["token_ids"]) for out in outputs}) == 1
        assert len({out["text"] for out in outputs}) == 1

    def test_text_is_the_tokens_in_words(self, text_llm):
        for out in text_llm.generate(PROMPTS, GREEDY, use_tqdm=False):
            text = self.text_of(out["token_ids"], out.prompt_token_ids)
            assert out["text"] == out.outputs[0].text == text

    def test_special_tokens_are_not_part_of_the_text(self, make, expected):
        """Guards an end token, or a BOS in the middle, that shows in the text."""
        end = expected[2][3]
        with make(end=WORDS[end]) as llm:
            params = SamplingParams(temperature=0, max_tokens=20)
            stopped, free = llm.generate([PROMPTS[2]] * 2, [params, GREEDY], use_tqdm=False)
        # The tokenizer's end token ends a sequence, though the config names another.
        assert stopped["token_ids"] == expected[2][: expected[2].index(end) + 1]
        assert stopped.outputs[0].finish_reason == "stop"
        assert free["token_ids"] == expected[2]
        for out in (stopped, free):
            ids = [i for i in out["token_ids"] if i != end]
            assert out["text"] == self.text_of(ids, out.prompt_token_ids)

    def test_an_empty_text_without_bos_is_refused(self, make):
        with make(adds_bos=False) as llm:
            match = r"prompts\[1\]: the prompt is empty"
            refused(lambda: generate(llm, ["w5", ""]), ValueError, match)

    def test_a_text_over_the_limit_is_refused(self, text_llm):
        text = " ".join(["w5"] * MAX_MODEL_LEN)
        match = r"prompts\[1\]: the prompt has 101 tokens"
        refused(lambda: generate(text_llm, ["w5", text]), ValueError, match)

    def test_no_prompts_give_no_results(self, text_llm):
        """Guards a tokenizer that decodes no completions into one."""
        assert text_llm.generate([], use_tqdm=False) == []

    def test_add_request_takes_text(self, text_llm):
        request_id = text_llm.add_request("w5 w9", GREEDY)
        outputs = []
        while not text_llm.is_finished():
            outputs += text_llm.step()
        (direct,) = text_llm.generate("w5 w9", GREEDY, use_tqdm=False)
        assert [out.request_id for out in outputs] == [request_id]
        assert outputs[0].prompt == "w5 w9"
        assert (outputs[0]["text"], outputs[0]["token_ids"]) == (
            direct["text"],
            direct["token_ids"],
        )
