"""Batch jobs from the input file to the output file: what each line gets, and that every line gets
it once, whatever happens on the way. A tiny random model with a tokenizer of bytes."""

import json
import logging
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, fields, replace
from functools import partial
from importlib import import_module
from itertools import count, pairwise
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from example import fetch_smollm2
from nanovllm import LLM, SamplingParams, vllm_arguments
from nanovllm.config import Config
from nanovllm.engine.workers import WorkerError
from nanovllm.run_batch import cli, job, runner, writer
from nanovllm.run_batch.cli import main, make_parser
from nanovllm.run_batch.job import Job
from nanovllm.run_batch.journal import Journal
from nanovllm.run_batch.request import BatchRequest
from nanovllm.run_batch.runner import EngineLostError, Runner
from nanovllm.run_batch.stop import StopOnSignal
from nanovllm.run_batch.supervisor import supervise
from nanovllm.run_batch.writer import Writer
from tests.conftest import check_idle
from tests.test_batch_format import FULL, check_record

ROOT = Path(__file__).parents[1]
SMALL: dict[str, Any] = {
    "kvcache_block_size": 8,
    "num_kvcache_blocks": 60,
    "max_model_len": 100,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "device": "cpu",
}
WINDOW = 32  # eight times max_num_seqs
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ALL_DONE, SOME_FAILED, CANNOT_START, FAULT, INTERRUPTED = 0, 1, 2, 70, 75


@pytest.fixture(scope="module")
def shared_llm(model_path: Path) -> Iterator[LLM]:
    with LLM(model_path, **SMALL) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    shared_llm.reset_prefix_cache()
    yield shared_llm
    check_idle(shared_llm)


# Making and reading files.


def request(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    required = {
        CHAT: {"messages": [{"role": "user", "content": "hi"}]},
        COMPLETIONS: {"prompt": "x"},
    }
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": required[url] | body}


def write_input(path: Path, items: Sequence[Any]) -> Path:
    """Bytes as they are, all else as JSON."""
    lines = [item if isinstance(item, bytes) else json.dumps(item).encode() for item in items]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def read_output(path: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    for record in records:
        check_record(record)
    return records


def by_id(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """None may be there twice. Without what depends on when a request ran."""
    found = {}
    for record in records:
        body = record["response"]["body"]
        if "usage" in body:
            body = {k: v for k, v in body.items() if k != "created"}
            body["usage"] = {k: v for k, v in body["usage"].items() if "details" not in k}
        assert record["id"] not in found
        found[record["id"]] = {**record, "response": {**record["response"], "body": body}}
    return found


def texts(record: dict[str, Any]) -> list[str]:
    choices = record["response"]["body"]["choices"]
    return [choice.get("text", choice.get("message", {}).get("content")) for choice in choices]


class StopAfter:
    """Asks to end once so many records are written, and gives what runs so many more steps."""

    def __init__(self, num_records: int, num_steps: float = inf) -> None:
        self.num_records, self.num_steps = num_records, num_steps
        self.num_looks = 0

    @property
    def requested(self) -> bool:
        return self.num_records <= 0

    @property
    def deadline(self) -> float:
        self.num_looks += 1
        return inf if self.num_looks <= self.num_steps else -inf

    def count(self, records: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for record in records:
            yield record
            self.num_records -= 1


def run(
    make_llm: LLM | Callable[[], LLM], in_: Path, out: Path, stop: StopAfter | None = None
) -> str:
    """Runs a job in this process; returns its summary."""
    make = (lambda: make_llm) if isinstance(make_llm, LLM) else make_llm
    with closing(Job(in_, out)) as work:
        runner = Runner(make, ["model"], work.journal)
        with closing(runner.run(work.requests(), stop)) as records:
            work.write(stop.count(records) if stop else records, show_progress=False)
        return work.summary()


def mixed_lines(num_lines: int, seed: int = 0, longest: int = 30) -> list[Any]:
    """Chats and completions, greedy, seeded and not, lone and several; some lines that fail."""
    rng = random.Random(seed)
    items: list[Any] = []
    for i in range(num_lines):
        body: dict[str, Any] = {"max_tokens": rng.randint(1, longest), "ignore_eos": True}
        kind = rng.randrange(8)
        if kind == 0:
            items.append(rng.choice([b"no json", b"", request("id 0"), {**request("x"), "url": 5}]))
            continue
        if kind < 3:
            body["temperature"] = 0
        elif kind < 5:
            body["seed"] = i
        url = CHAT if rng.random() < 0.5 else COMPLETIONS
        if url == COMPLETIONS and rng.random() < 0.3:
            body["prompt"] = ["one", [1, 5, 6], "two"]
        if body.get("temperature") != 0 and rng.random() < 0.3:
            body["n"] = rng.randint(2, 3)
        if rng.random() < 0.1:
            body["top_p"] = 5  # wrong
        items.append(request(f"id {i}", url, **body))
    return items


# What lines get.


def test_responses_are_what_the_library_gives(llm: LLM, tmp_path: Path):
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hello"}]
    common = {"temperature": 0.7, "seed": 3, "max_tokens": 9, "stop": ["q"], "top_k": 50}
    items = [
        request("chat", CHAT, messages=messages, n=2, **common),
        request("completion", prompt=["abc", [5, 6, 7]], logit_bias={"30": 2}, **common),
        request("greedy", prompt="abc", temperature=0),
        request("long", CHAT, messages=messages, temperature=0, ignore_eos=True),
        request("thinking", CHAT, temperature=0, chat_template_kwargs={"enable_thinking": True}),
    ]
    run(llm, write_input(tmp_path / "in", items), tmp_path / "out")
    found = {record["custom_id"]: record for record in read_output(tmp_path / "out")}
    params = SamplingParams(**common)  # type: ignore[arg-type]
    (chat,) = llm.chat(messages, replace(params, n=2), use_tqdm=False)
    assert texts(found["chat"]) == [completion.text for completion in chat.outputs]
    completions = llm.generate(
        ["abc", [5, 6, 7]], replace(params, logit_bias={30: 2}), use_tqdm=False
    )
    assert texts(found["completion"]) == [out.outputs[0].text for out in completions]
    usage = found["completion"]["response"]["body"]["usage"]
    assert usage["prompt_tokens"] == sum(len(out.prompt_token_ids) for out in completions)
    assert usage["completion_tokens"] == sum(len(o.outputs[0].token_ids) for o in completions)
    reasons = [
        (choice["finish_reason"], choice["stop_reason"])
        for choice in found["completion"]["response"]["body"]["choices"]
    ]
    assert reasons == [(o.outputs[0].finish_reason, o.outputs[0].stop_reason) for o in completions]
    greedy = SamplingParams(temperature=0, max_tokens=16)
    assert texts(found["greedy"]) == [llm.generate("abc", greedy, use_tqdm=False)[0]["text"]]
    (long,) = llm.chat(
        messages,
        SamplingParams(temperature=0, max_tokens=None, ignore_eos=True),
        use_tqdm=False,
    )
    assert texts(found["long"]) == [long["text"]]
    usage = found["long"]["response"]["body"]["usage"]
    assert usage["total_tokens"] == SMALL["max_model_len"]
    (thinking,) = llm.chat(
        [{"role": "user", "content": "hi"}],
        SamplingParams(temperature=0, max_tokens=None),
        use_tqdm=False,
        chat_template_kwargs={"enable_thinking": True},
    )
    assert texts(found["thinking"]) == [thinking["text"]]
    assert found["chat"]["response"]["body"]["model"] == "model"


def test_log_probabilities_are_those_of_the_library(llm: LLM, tmp_path: Path):
    common = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    items = [
        request("chat", CHAT, logprobs=True, top_logprobs=3, **common),
        request("completion", prompt="abc", logprobs=2, **common),
    ]
    run(llm, write_input(tmp_path / "in", items), tmp_path / "out")
    found = {record["custom_id"]: record for record in read_output(tmp_path / "out")}
    chat = found["chat"]["response"]["body"]["choices"][0]["logprobs"]["content"]
    prompt = llm.render_chat([{"role": "user", "content": "hi"}])
    params = SamplingParams(logprobs=3, **common)  # type: ignore[arg-type]
    expected = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].logprobs
    assert expected is not None
    for position, entries in zip(chat, expected, strict=True):
        assert entries is not None
        best = list(entries.values())  # greedy: the drawn token is the best
        assert position["top_logprobs"][0] == {
            k: position[k] for k in ("token", "logprob", "bytes")
        }
        assert [e["token"] for e in position["top_logprobs"]] == [e.decoded_token for e in best]
        logprobs = [e["logprob"] for e in position["top_logprobs"]]
        assert logprobs == pytest.approx([e.logprob for e in best], abs=1e-4)
    completion = found["completion"]["response"]["body"]["choices"][0]["logprobs"]
    assert "".join(completion["tokens"]) == texts(found["completion"])[0]
    assert [len(position) for position in completion["top_logprobs"]] == [2] * 4


def test_structured_outputs_match(llm: LLM, tmp_path: Path):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
    described = {"name": "x", "schema": schema | {"additionalProperties": False}}
    items = [
        request(
            "schema",
            CHAT,
            response_format={"type": "json_schema", "json_schema": described},
        ),
        request("choice", structured_outputs={"choice": ["yes", "no"]}),
        request("refused", structured_outputs={"regex": "("}),
    ]
    run(llm, write_input(tmp_path / "in", items), tmp_path / "out")
    found = {record["custom_id"]: record for record in read_output(tmp_path / "out")}
    assert json.loads(texts(found["schema"])[0])["a"] in (1, 22)
    assert texts(found["choice"])[0] in ("yes", "no")
    assert found["refused"]["response"]["body"]["error"]["param"] == "structured_outputs"


def test_lines_that_cannot_run_have_an_error_and_cost_no_other(llm: LLM, tmp_path: Path):
    items: dict[str, Any] = {
        "good": request("good", temperature=0),
        "not JSON": b"{",
        "custom_id must": {**request("x"), "custom_id": 5},
        "already has the custom_id 'good'": request("good", prompt="other"),
        "method must": {**request("a"), "method": "PUT"},
        "temperature must": request("b", temperature=-1),
        '"stream" is not supported': request("c", CHAT, stream=True),
        "does not exist": request("d", model="other"),
        "the prompt has 151 tokens": request("e", prompt="x" * 150),
        "prompt must be": request("f", prompt=""),
        "outside the vocabulary": request("g", prompt=[5, 10**30]),
        "logit_bias holds 5000": request("h", logit_bias={"5000": 1}),
        "stop_token_ids holds": request("i", CHAT, stop_token_ids=[10**30]),
        "needs a 'role'": request("j", CHAT, messages=[{"content": "x"}]),
        "no such role": request("k", CHAT, messages=[{"role": "nobody", "content": "x"}]),
        "content must be text": request(
            "l", CHAT, messages=[{"role": "user", "content": [{"type": "image"}]}]
        ),
        "--trust-request-chat-template": request("m", CHAT, chat_template="{{ 1 }}"),
        "does not trust": request("q", CHAT, chat_template_kwargs={"chat_template": "{{ 1 }}"}),
        "not valid Unicode": request("n", prompt="\ud800"),
        "prompt must": request("o", prompt=["fine", ""]),
        "the prompt has 152 tokens": request("p", prompt=["fine", "x" * 151, "fine"]),
        "not UTF-8": b'{"custom_id": "\xff"}',
    }
    in_ = write_input(tmp_path / "in", [*items.values(), b"", request("last", temperature=0)])
    summary = run(llm, in_, tmp_path / "out")
    assert summary.startswith(f"2 done, {len(items) - 1} failed, 0 skipped, of {len(items) + 1} ")
    found = by_id(read_output(tmp_path / "out"))
    assert texts(found["batch_req_1"]) == texts(found[f"batch_req_{len(items) + 2}"])
    for number, message in list(enumerate(items, start=1))[1:]:
        record = found[f"batch_req_{number}"]
        assert message in record["error"]["message"]
        assert record["response"]["status_code"] == (404 if "exist" in message else 400)


def test_messages_are_read_as_those_of_chat_are(llm: LLM, tmp_path: Path):
    """Guards templates that would write OpenAI's string as JSON once more."""

    def call(content: Any, arguments: Any) -> list[dict[str, Any]]:
        function = {"name": "f", "arguments": arguments}
        calls = [{"id": "1", "type": "function", "function": function}]
        message = {"role": "assistant", "content": content, "tool_calls": calls}
        return [{"role": "user", "content": "hi"}, message]

    conversations = {
        "string": call(None, '{"a": 1}'),
        "object": call(None, {"a": 1}),
        "are not JSON": call(None, "{"),
        "must be an object, got [1]": call(None, "[1]"),
        "message content must be text": call([{"type": "image_url"}], "{}"),
    }
    template = "{% for m in messages if m.tool_calls %}{{ m.tool_calls|tojson }}{% endfor %}"
    more = {"chat_template": template, "temperature": 0, "max_tokens": 3}
    items = [request(name, CHAT, messages=m, **more) for name, m in conversations.items()]
    in_ = write_input(tmp_path / "in", items)
    with closing(Job(in_, tmp_path / "out", trusts_templates=True)) as work:
        runner = Runner(lambda: llm, ["model"], work.journal)
        work.write(runner.run(work.requests()), show_progress=False)
    found = {record["custom_id"]: record["response"] for record in read_output(tmp_path / "out")}
    string, same = (found.pop(name)["body"] for name in ("string", "object"))
    assert string["choices"] == same["choices"]
    assert string["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"] > 20
    for message, response in found.items():
        error = response["body"]["error"]
        assert response["status_code"] == 400 and error["param"] == "messages"
        assert error["message"].startswith("messages: ") and message in error["message"]


def test_templates_of_requests_run_where_they_are_trusted(llm: LLM, tmp_path: Path):
    template = "{{ messages[0].content }}"
    lines = [
        request("a", CHAT, temperature=0, chat_template=template),
        request("b", CHAT, chat_template="{% for"),
        request("c", CHAT, temperature=0, chat_template_kwargs={"chat_template": template}),
    ]
    in_ = write_input(tmp_path / "in", lines)
    with closing(Job(in_, tmp_path / "out", trusts_templates=True)) as work:
        runner = Runner(lambda: llm, ["model"], work.journal)
        work.write(runner.run(work.requests()), show_progress=False)
    found = by_id(read_output(tmp_path / "out"))
    conversation = lines[0]["body"]["messages"]
    params = SamplingParams(temperature=0, max_tokens=200)
    (expected,) = llm.chat(conversation, params, False, chat_template=template)
    for number in (1, 3):
        assert texts(found[f"batch_req_{number}"]) == [expected["text"]]
    assert "chat template fails" in found["batch_req_2"]["error"]["message"]


def test_absurd_numbers_are_refused_or_served(llm: LLM, tmp_path: Path):
    """Guards values that pass every check, and then overflow in the middle of a step."""
    big = 10**30
    items = [
        request(str(i), **{"max_tokens": 3, **body})
        for i, body in enumerate(
            [
                {"top_k": big},
                {"max_tokens": big},
                {"min_tokens": big, "max_tokens": big},
                {"n": big},
                {"seed": -(2**63)},
                {"seed": 2**64 - 1},
                {"temperature": 1e30},
                {"temperature": 1e-300},
                {"top_p": 1e-300, "min_p": 1},
                {"logit_bias": {"5": 1e30, "6": -1e30}},
                {"frequency_penalty": 2, "presence_penalty": -2, "repetition_penalty": 1e4},
                {"n": 60, "max_tokens": 2},
                {"prompt": ["a"] * 50, "max_tokens": 1},
                {"stop": ["a" * 10**5], "bad_words": ["b" * 1000]},
            ]
        )
    ]
    run(llm, write_input(tmp_path / "in", items), tmp_path / "out")
    found = {record["custom_id"]: record for record in read_output(tmp_path / "out")}
    status = {i: found[str(i)]["response"]["status_code"] for i in range(len(items))}
    assert {i for i, code in status.items() if code != 200} == {3}
    assert status[3] == 400
    assert len(texts(found["11"])) == 60
    assert len(set(texts(found["11"]))) > 30
    assert len(texts(found["12"])) == 50


@pytest.mark.slow
@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.data())
def test_mutated_requests_never_harm_the_engine(
    shared_llm: LLM, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    """Every line gets its record, no other is lost, and nothing counts as a fault."""
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    values = scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.text(), scalars)
    items = []
    for i in range(6):
        url = data.draw(st.sampled_from([CHAT, COMPLETIONS]))
        body = {**FULL[url], "max_tokens": 3, "min_tokens": 0}
        del body["allowed_token_ids"]  # which a schema may exclude
        for name in data.draw(st.lists(st.sampled_from(sorted(body)), max_size=2)):
            body[name] = data.draw(values)
        body["max_tokens"] = 3
        items.append(BatchRequest(i, f"{i:032x}", str(i), url, json.loads(json.dumps(body))))
    journal = Journal(tmp_path_factory.mktemp("mutated") / "journal", 0)
    records = list(Runner(lambda: shared_llm, ["model"], journal).run(items))
    journal.close(is_done=True)
    assert sorted(record["custom_id"] for record in records) == [str(i) for i in range(6)]
    for record in records:
        check_record(record)
        assert record["response"]["status_code"] in (200, 400)
    assert shared_llm.is_finished()


def test_requests_without_a_seed_differ_by_line_and_not_by_run(llm: LLM, tmp_path: Path):
    """Guards a resumed job that draws again what the lines before it drew."""
    items = [request(str(i), max_tokens=12, ignore_eos=True) for i in range(6)]
    in_ = write_input(tmp_path / "in", items)
    run(llm, in_, tmp_path / "out")
    found = by_id(read_output(tmp_path / "out"))
    assert len({texts(record)[0] for record in found.values()}) == 6
    run(llm, in_, tmp_path / "other", StopAfter(2, 0))
    assert 2 <= len(read_output(tmp_path / "other")) < 6
    run(llm, in_, tmp_path / "other")
    assert by_id(read_output(tmp_path / "other")) == found
    with LLM(llm.config.model, **SMALL, seed=1) as other:
        run(other, in_, tmp_path / "seed")
    assert by_id(read_output(tmp_path / "seed")) != found
    several = request("a", prompt=["x", "x"], max_tokens=12, ignore_eos=True)
    run(llm, write_input(tmp_path / "in", [several]), tmp_path / "several")
    assert len(set(texts(read_output(tmp_path / "several")[0]))) == 2


# Reading and writing as it goes.


def test_a_job_reads_no_further_than_its_window(llm: LLM, tmp_path: Path, monkeypatch):
    in_ = write_input(tmp_path / "in", mixed_lines(120, longest=6))
    most = {"requests": 0, "completions": 0, "read": 0}
    num_read = num_written = 0

    def counted(source: Iterator[Any]) -> Iterator[Any]:
        nonlocal num_read
        for item in source:
            num_read += 1
            yield item

    def watched(records: Iterator[Any]) -> Iterator[Any]:
        nonlocal num_written
        for record in records:
            yield record
            num_written += 1
            assert (tmp_path / "out").read_bytes().count(b"\n") == num_written

    work = Job(in_, tmp_path / "out")
    runner = Runner(lambda: llm, ["model"], work.journal)
    assert runner.window == WINDOW
    step = llm.step

    def counting_step() -> Any:
        most["requests"] = max(most["requests"], len(llm.requests))
        num = sum(len(request.seqs) for request in llm.requests.values())
        assert num <= runner.num_in_flight  # some of a request's may have finished
        most["completions"] = max(most["completions"], num)
        most["read"] = max(most["read"], num_read - num_written)
        return step()

    monkeypatch.setattr(llm, "step", counting_step)
    with closing(work):
        work.write(watched(runner.run(counted(work.requests()))), show_progress=False)
        assert work.is_done
    print(most)
    assert 4 <= most["requests"] <= most["completions"] == WINDOW
    assert most["read"] <= WINDOW + 1


@pytest.mark.slow
def test_long_prompts_make_the_window_smaller(llm: LLM, tmp_path: Path, monkeypatch):
    """So that memory is bounded: a job then has twice max_num_seqs requests."""
    monkeypatch.setattr(runner, "MAX_QUEUED_TOKENS", 300)
    in_ = write_input(tmp_path / "in", [request(str(i), prompt="x" * 60) for i in range(40)])
    step, nums = llm.step, []
    monkeypatch.setattr(llm, "step", lambda: nums.append(len(llm.requests)) or step())
    run(llm, in_, tmp_path / "out")
    assert len(read_output(tmp_path / "out")) == 40
    assert 4 < max(nums) <= 2 * SMALL["max_num_seqs"]


def test_a_job_starts_with_its_first_lines(llm: LLM, tmp_path: Path, monkeypatch):
    """Guards an engine that waits until a job has read all that it can order."""
    lines = [request(str(i), prompt="x" * 20, max_tokens=40) for i in range(60)]
    step, nums = llm.step, []
    monkeypatch.setattr(llm, "step", lambda: nums.append(len(llm.requests)) or step())
    run(llm, write_input(tmp_path / "in", lines), tmp_path / "out")
    full_step = -(-SMALL["max_num_batched_tokens"] // 21)
    assert nums[0] == full_step < nums[1] <= 2 * full_step and max(nums) == WINDOW


def test_a_job_runs_equal_prefixes_together_and_the_longest_first(model_path, tmp_path: Path):
    """Among 6 prefixes; the KV cache holds 4 prompts. The records are those of the file's order,
    also without seeds."""
    rng = random.Random(0)
    prefixes = [[rng.randrange(5, 60) for _ in range(64)] for _ in range(6)]
    lines = []
    for i in range(120):
        prompt = prefixes[i % 6] + [rng.randrange(5, 60) for _ in range(3)]
        body = {"max_tokens": rng.randint(1, 9), "ignore_eos": True, "temperature": i % 3 / 2}
        lines.append(request(str(i), prompt=prompt, **body))
    rng.shuffle(lines)
    in_ = write_input(tmp_path / "in", lines)
    found, num_computed = {}, {}
    for reorders in (True, False):
        num_computed[reorders], out = 0, tmp_path / str(reorders)
        options = {**SMALL, "max_num_batched_tokens": 256, "num_kvcache_blocks": 36}
        with LLM(model_path, **options, dtype="float32", enable_reordering=reorders) as llm:
            model_run = llm.model_runner.run

            def counting(batch: Any, reorders: bool = reorders, run: Any = model_run) -> Any:
                num_computed[reorders] += batch.num_tokens * batch.is_prefill
                return run(batch)

            llm.model_runner.run = counting  # type: ignore[method-assign]
            run(llm, in_, out)
            metrics = llm.metrics()
            assert (metrics.num_grouped > 40) == (metrics.num_longest_first > 5) == reorders
        found[reorders] = by_id(read_output(out))
    assert found[True] == found[False]
    assert num_computed[True] < 0.5 * num_computed[False], num_computed


def test_short_requests_do_not_wait_for_long_ones(llm: LLM, tmp_path: Path):
    long = request("long", max_tokens=80, ignore_eos=True)
    items = [long, *(request(str(i), max_tokens=2) for i in range(30))]
    run(llm, write_input(tmp_path / "in", items), tmp_path / "out")
    order = [record["custom_id"] for record in read_output(tmp_path / "out")]
    assert order[-1] == "long"


def test_a_run_is_of_any_requests_and_takes_records_along(llm: LLM, tmp_path: Path):
    """Also of requests whose lines have the same digest."""
    journal = Journal(tmp_path / "journal", 0)
    runner = Runner(lambda: llm, ["model"], journal)
    items: list[Any] = [
        BatchRequest(i, "0" * 32, str(i), COMPLETIONS, {"prompt": "x"}) for i in "12"
    ]
    for _ in range(2):
        records = list(runner.run([items[0], {"a": "record"}, items[1]]))
        assert records[0] == {"a": "record"}
        assert sorted(record["custom_id"] for record in records[1:]) == ["1", "2"]
    assert list(runner.run([])) == []
    found = list(runner.run([BatchRequest(1, "0" * 32, "x", COMPLETIONS, {}), items[0]]))
    assert [record["custom_id"] for record in found] == ["x", "1"] and found[0]["error"]
    wide = BatchRequest(3, "0" * 32, "3", COMPLETIONS, {"prompt": ["x"] * 50})
    left = runner.run([{"a": "record"}, items[0], wide])
    assert next(left) == {"a": "record"}
    assert next(left)["custom_id"] == "1"
    assert not runner.is_idle
    left.close()
    assert runner.is_idle
    journal.close(is_done=True)


# Going on.


def test_a_job_goes_on_from_any_cut_of_its_output(llm: LLM, tmp_path: Path):
    items = [request("a", max_tokens=1), request("b", CHAT, max_tokens=1), request("c", n=0)]
    items += [b"no json", request("a", prompt=["x", "y"], max_tokens=1)]
    in_, out = write_input(tmp_path / "in", items), tmp_path / "out"
    run(llm, in_, out)
    data = out.read_bytes()
    expected = by_id(read_output(out))
    assert {record["error"] is None for record in expected.values()} == {True, False}
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    cuts = {end + d for end in ends for d in (-1, 0, 1)} | set(range(0, len(data), len(data) // 30))
    cuts = {cut for cut in cuts if cut <= len(data)}
    for cut in sorted(cuts):
        out.write_bytes(data[:cut])
        summary = run(llm, in_, out)
        assert f"{data[:cut].count(10)} skipped" in summary
        assert by_id(read_output(out)) == expected, cut
    assert len(cuts) > 40


def test_of_equal_lines_the_first_runs_and_the_others_are_duplicates(llm: LLM, tmp_path: Path):
    """A job that ended before the first had its record took the second's error for it."""
    in_, out = write_input(tmp_path / "in", [request("a", max_tokens=2)] * 3), tmp_path / "out"
    run(llm, in_, out)
    expected = by_id(read_output(out))
    assert [record["error"] is None for _, record in sorted(expected.items())] == [
        True,
        False,
        False,
    ]
    lines = out.read_bytes().splitlines(True)
    out.write_bytes(b"".join(line for line in lines if json.loads(line)["error"]))
    run(llm, in_, out)
    assert by_id(read_output(out)) == expected


def test_preempted_requests_are_running_when_a_job_is_asked_to_end(model_path, tmp_path):
    journal = Journal(tmp_path / "journal", 0)
    with LLM(model_path, **SMALL | {"num_kvcache_blocks": 16}) as llm:
        runner = Runner(lambda: llm, ["model"], journal)
        body = {"max_tokens": 60, "ignore_eos": True}
        source = (
            BatchRequest(i, f"{i:032x}", str(i), COMPLETIONS, {"prompt": [5 + i] * 20} | body)
            for i in range(4)
        )
        records: list[dict[str, Any]] = []
        while not llm.scheduler.num_preemptions:
            records += runner.advance(source) or []
        assert llm.scheduler.waiting and not records
        runner.end_unstarted()
        while (new := runner.advance(iter(()))) is not None:
            records += new
    journal.close(is_done=True)
    assert {record["custom_id"] for record in records} == {"0", "1", "2", "3"}


@pytest.mark.slow
def test_records_that_are_removed_are_made_again(llm: LLM, tmp_path: Path):
    """In any order, as where somebody drops the errors and mends their lines."""
    items = mixed_lines(20, longest=4)
    in_, out = write_input(tmp_path / "in", items), tmp_path / "out"
    run(llm, in_, out)
    expected = by_id(read_output(out))
    rng = random.Random(0)
    for _ in range(5):
        kept = [line for line in out.read_bytes().splitlines(True) if rng.random() < 0.5]
        rng.shuffle(kept)
        out.write_bytes(b"".join(kept))
        run(llm, in_, out)
        assert by_id(read_output(out)) == expected
    bad = [record["id"] for record in expected.values() if record["error"]]
    kept = [line for line in out.read_bytes().splitlines(True) if json.loads(line)["id"] not in bad]
    out.write_bytes(b"".join(kept))
    for i, name in enumerate(bad):
        items[int(name.rpartition("_")[2]) - 1] = request(f"mended {i}", max_tokens=2)
    run(llm, write_input(in_, items), out)
    found = by_id(read_output(out))
    assert found.keys() == expected.keys()
    assert all(record["error"] is None for record in found.values())


def test_lines_may_be_added_to_the_input(llm: LLM, tmp_path: Path):
    items = mixed_lines(12, longest=4)
    run(llm, write_input(tmp_path / "in", items), tmp_path / "all")
    run(llm, write_input(tmp_path / "in", items[:7]), tmp_path / "out")
    run(llm, write_input(tmp_path / "in", items), tmp_path / "out")
    assert by_id(read_output(tmp_path / "out")) == by_id(read_output(tmp_path / "all"))


def test_records_are_known_by_their_custom_ids(llm: LLM, tmp_path: Path):
    """Wherever their lines are now."""
    items = [*mixed_lines(10, longest=4), request("twice", max_tokens=2), b"{"]
    items.append(items[-2])
    in_, out = tmp_path / "in", tmp_path / "out"
    run(llm, write_input(in_, items), out)
    data = out.read_bytes()
    for kept in (items[:6], [], items[3:8] + items[:2], items):
        run(llm, write_input(in_, kept), out)
        assert out.read_bytes() == data or len(kept) == 12
    new = request("new", max_tokens=3)
    write_input(in_, [new, *items[5:10], *items[:5]])
    run(llm, in_, out)
    added = out.read_bytes().removeprefix(data).splitlines()
    assert "new" in [json.loads(line)["custom_id"] for line in added]
    known = {json.loads(line)["custom_id"] for line in data.splitlines()}
    assert not known & {json.loads(line)["custom_id"] for line in added} - {None}


def test_an_output_of_other_requests_is_refused(llm: LLM, tmp_path: Path):
    items = [request(str(i), max_tokens=1) for i in range(5)]
    in_, out = tmp_path / "in", tmp_path / "out"
    run(llm, write_input(in_, items), out)
    data = out.read_bytes()
    others = {
        "changed": [*items[:3], request("3", max_tokens=2), items[4]],
        "changed and moved": [request("3", max_tokens=2), *items[:3]],
        "changed and failing": [*items[:4], request("4", n=-1)],
    }
    for name, other in others.items():
        with pytest.raises(ValueError, match="name another output file"):
            run(llm, write_input(in_, other), out)
        assert out.read_bytes() == data, name
    run(llm, write_input(in_, [b" " + json.dumps(item).encode() + b"\r" for item in items]), out)
    assert out.read_bytes() == data


def test_a_request_to_end_lets_what_runs_finish(llm: LLM, tmp_path: Path):
    items = [request(str(i), max_tokens=4 + i, ignore_eos=True) for i in range(12)]
    items[6]["body"]["prompt"] = ["a", "b", "c"]
    in_ = write_input(tmp_path / "in", items)
    run(llm, in_, tmp_path / "all")
    for num_records, num_steps in ((0, inf), (1, inf), (5, inf), (5, 0), (5, 3)):
        out = tmp_path / f"{num_records} {num_steps}"
        run(llm, in_, out, StopAfter(num_records, num_steps))
        assert llm.is_finished()
        num_more = len(read_output(out)) - num_records
        if num_records == 0 or num_steps == 0:
            assert num_more == 0
        elif num_steps == inf:
            assert 1 <= num_more <= SMALL["max_num_seqs"]
        run(llm, in_, out)
        assert by_id(read_output(out)) == by_id(read_output(tmp_path / "all"))


def test_a_request_that_started_in_part_is_dropped_at_the_end(llm: LLM, tmp_path: Path):
    """Guards a grace that is spent on prompts whose request cannot be finished."""
    body = {"max_tokens": 30, "ignore_eos": True}
    first = request("first", max_tokens=40, ignore_eos=True)  # the longest, so it runs first
    items = [first, request("wide", prompt=["a"] * 50, **body)]
    in_, out = write_input(tmp_path / "in", items), tmp_path / "out"
    stop = StopAfter(1, 5)
    run(llm, in_, out, stop)
    assert [record["custom_id"] for record in read_output(out)] == ["first"]
    assert stop.num_looks == 0


def test_a_runner_whose_requests_are_dropped_before_a_step_ends(llm: LLM, tmp_path: Path):
    """Guards a replica that never says that it has nothing left to do."""
    in_ = write_input(tmp_path / "in", [request("long", prompt="a b c d e f g h")])
    with closing(Job(in_, tmp_path / "out")) as work:
        runner = Runner(lambda: llm, ["model"], work.journal)
        runner._tokens_per_step = 2
        source = work.requests()
        while not runner.num_tokens_in_flight and not runner._ready and not runner._preparing:
            assert runner.advance(source) == []
        for _ in range(1000):
            if runner._num_new_tokens:
                break
            runner._take_prepared()
            runner._fill_engine()
        assert runner._num_new_tokens > 2
        runner.end_unstarted()
        assert [runner.advance(iter(())) for _ in range(3)][-1] is None


# An engine that fails.


@pytest.fixture
def make(model_path: Path) -> Iterator[Callable[[], LLM]]:
    """Engines of the test's own, which it may break and leave."""
    made: list[LLM] = []

    def make_llm() -> LLM:
        made.append(LLM(model_path, **SMALL))
        return made[-1]

    make_llm.made = made  # type: ignore[attr-defined]
    yield make_llm
    for llm in made:
        llm.close()


def fail_steps(llm: LLM, is_bad: Callable[[list[str]], BaseException | None]) -> list[list[str]]:
    """Makes an engine fail in steps whose prompts ``is_bad`` does not like; returns a list of the
    prompts that it had started at each failure."""
    failures = []
    real = llm.model_runner.run

    def failing(batch: Any) -> Any:
        ids = {item.seq.request_id for item in batch.items}
        prompts = [llm.requests[i].prepared.prompt or "" for i in ids if i in llm.requests]
        if error := is_bad(prompts):
            running = [item for item in llm.requests.values() if item.seqs[0].block_tables]
            failures.append(sorted(request.prepared.prompt or "" for request in running))
            raise error
        return real(batch)

    llm.model_runner.run = failing  # type: ignore[method-assign]
    return failures


def simple_lines(num: int, **body: Any) -> list[Any]:
    return [request(str(i), prompt=f"prompt {i}", max_tokens=5, **body) for i in range(num)]


def test_an_engine_that_fails_once_costs_nothing(make, llm: LLM, tmp_path: Path):
    in_ = write_input(tmp_path / "in", simple_lines(20))
    run(llm, in_, tmp_path / "good")
    for num_step in (0, 1, 7):
        broken, steps = make(), count()
        failures = fail_steps(
            broken, lambda _, n=num_step, s=steps: RuntimeError("oh") if next(s) == n else None
        )
        out = tmp_path / str(num_step)
        run(broken, in_, out)
        assert by_id(read_output(out)) == by_id(read_output(tmp_path / "good"))
        assert len(failures) == 1


@pytest.mark.parametrize(
    "poisoned",
    [
        *(pytest.param(i, marks=pytest.mark.slow) for i in ({0}, {7}, {19}, {3, 4})),
        {0, 1, 2, 10, 19},
    ],
)
def test_a_request_that_always_brings_down_the_engine_fails_alone(
    make, llm: LLM, tmp_path: Path, poisoned: set[int]
):
    in_ = write_input(tmp_path / "in", simple_lines(20))
    run(llm, in_, tmp_path / "good")
    expected = by_id(read_output(tmp_path / "good"))
    bad = {f"prompt {i}" for i in poisoned}
    failures: list[list[str]] = []

    def make_broken() -> LLM:
        broken = make()
        noted = fail_steps(broken, lambda p: RuntimeError("poison") if bad & set(p) else None)
        all_failures.append(noted)
        return broken

    all_failures: list[list[list[str]]] = []
    run(make_broken, in_, tmp_path / "out")
    found = by_id(read_output(tmp_path / "out"))
    assert found.keys() == expected.keys()
    for name, record in found.items():
        if int(record["custom_id"]) in poisoned:
            assert record["response"]["status_code"] == 500
            assert record["error"]["code"] == "engine_failed"
            assert "RuntimeError: poison" in record["error"]["message"]
        else:
            assert record == expected[name]
    failures = [prompts for noted in all_failures for prompts in noted]
    print([len(prompts) for prompts in failures])
    times = [sum(f"prompt {i}" in prompts for prompts in failures) for i in range(20)]
    assert all(times[i] == 3 for i in poisoned)
    assert times.count(3) == len(poisoned)
    assert times.count(2) <= len(poisoned)  # groups of two, the root of the window
    assert max(map(len, failures)) <= WINDOW
    assert len(make.made) <= 1 + len(poisoned)


@pytest.mark.slow
def test_requests_that_waited_while_the_engine_failed_are_not_retried(make, tmp_path: Path):
    """Guards a queue of thousands of requests that runs in small groups after one failure."""
    in_ = write_input(tmp_path / "in", simple_lines(40))
    broken, steps = make(), count()
    failures = fail_steps(broken, lambda _: RuntimeError("oh") if next(steps) == 8 else None)
    step, queued = broken.step, []

    def noting_step() -> Any:
        names = {request.prepared.prompt for request in broken.requests.values()}
        queued.append((len(failures), names))
        return step()

    broken.step = noting_step
    run(broken, in_, tmp_path / "out")
    assert len(by_id(read_output(tmp_path / "out"))) == 40
    (started,) = failures
    before = [names for num_failures, names in queued if not num_failures]
    after = [names for num_failures, names in queued if num_failures]
    assert len(before[-1]) > 3 * len(started) > 0
    num_small = next(i for i, names in enumerate(after) if len(names) > 2)
    assert set().union(*after[:num_small]) == set(started)
    # The others are added again as they were at first: a full prefill before each step.
    full_step = max(len(new - old) for old, new in pairwise([set(), *before]))
    later = after[num_small - 1 :]
    assert all(len(new - old) <= full_step for old, new in pairwise(later))


def test_an_engine_that_always_fails_gives_errors(make, tmp_path: Path, caplog):
    """Each request has three attempts; a new engine is tried once."""
    in_ = write_input(tmp_path / "in", simple_lines(12))
    all_failures = []

    def make_broken() -> LLM:
        broken = make()
        all_failures.append(fail_steps(broken, lambda _: RuntimeError("no luck\nat all")))
        return broken

    with caplog.at_level(logging.WARNING):
        run(make_broken, in_, tmp_path / "out")
    records = read_output(tmp_path / "out")
    assert len(by_id(records)) == 12
    assert {record["error"]["code"] for record in records} == {"engine_failed"}
    assert all(record["error"]["message"].endswith("no luck") for record in records)
    failures = [prompts for noted in all_failures for prompts in noted]
    for i in range(12):
        assert sum(f"prompt {i}" in prompts for prompts in failures) == 3
    assert len(make.made) == 2
    assert "the engine failed with 8 prompts: RuntimeError: no luck" in caplog.text


@pytest.mark.slow
def test_a_dead_worker_is_followed_by_a_new_engine(make, llm: LLM, tmp_path: Path):
    in_ = write_input(tmp_path / "in", simple_lines(20))
    run(llm, in_, tmp_path / "good")

    def make_broken() -> LLM:
        broken = make()
        if len(make.made) <= 2:
            steps = count()
            died = WorkerError("rank 1 failed")
            fail_steps(broken, lambda _: died if next(steps) == 8 else None)
        return broken

    run(make_broken, in_, tmp_path / "out")
    assert by_id(read_output(tmp_path / "out")) == by_id(read_output(tmp_path / "good"))
    assert len(make.made) == 3
    with pytest.raises(ValueError, match="closed"):
        make.made[0].is_finished()


@pytest.mark.slow
def test_a_job_whose_engine_cannot_be_replaced_can_go_on_later(make, llm: LLM, tmp_path: Path):
    in_, out = write_input(tmp_path / "in", simple_lines(20)), tmp_path / "out"
    run(llm, in_, tmp_path / "good")

    def make_once() -> LLM:
        if make.made:
            raise RuntimeError("CUDA error")
        steps = count()
        broken = make()
        fail_steps(broken, lambda _: WorkerError("dead") if next(steps) == 20 else None)
        return broken

    with pytest.raises(EngineLostError, match="cannot be created: RuntimeError: CUDA error"):
        run(make_once, in_, out)
    assert 0 < len(read_output(out)) < 20
    run(llm, in_, out)
    assert by_id(read_output(out)) == by_id(read_output(tmp_path / "good"))


@pytest.mark.parametrize("loses", [False, True])
def test_an_engine_that_fails_to_take_a_request_fails_for_that_alone(
    make, llm: LLM, tmp_path: Path, monkeypatch, loses: bool
):
    """Whether or not the engine loses the others by it."""
    in_ = write_input(tmp_path / "in", simple_lines(20))
    run(llm, in_, tmp_path / "good")
    expected = by_id(read_output(tmp_path / "good"))
    broken = make()
    real = broken.add_request

    def add_request(prepared: Any, **options: Any) -> str:
        if prepared.prompt == "prompt 5":
            if loses:
                for request_id in list(broken.requests):
                    broken.abort_request(request_id)
            raise MemoryError("no room")
        return real(prepared, **options)

    monkeypatch.setattr(broken, "add_request", add_request)
    run(broken, in_, tmp_path / "out")
    found = by_id(read_output(tmp_path / "out"))
    failed = found.pop("batch_req_6")
    assert failed["response"]["status_code"] == 500
    assert "MemoryError: no room" in failed["error"]["message"]
    assert found == {name: record for name, record in expected.items() if name in found}
    assert len(found) == 19


@pytest.mark.slow
def test_an_engine_that_loses_requests_is_noticed(make, llm: LLM, tmp_path: Path, monkeypatch):
    """Guards a job that waits for them forever."""
    in_ = write_input(tmp_path / "in", simple_lines(20))
    run(llm, in_, tmp_path / "good")
    broken = make()
    real, steps = broken.step, count()

    def step() -> Any:
        if next(steps) == 5:
            for request_id in list(broken.requests):
                broken.abort_request(request_id)
        return real()

    monkeypatch.setattr(broken, "step", step)
    run(broken, in_, tmp_path / "out")
    assert by_id(read_output(tmp_path / "out")) == by_id(read_output(tmp_path / "good"))


def test_a_completion_that_ends_with_an_error_is_an_error(llm: LLM, tmp_path: Path, monkeypatch):
    items = [request("many", prompt=["a", "b", "b"]), request("good")]
    real = llm.step

    def step() -> Any:
        outputs = real()
        for out in outputs:
            if out.prompt == "b":
                ended = replace(out.outputs[0], finish_reason="error", error="NaN")
                out.outputs[0] = ended
        return outputs

    monkeypatch.setattr(llm, "step", step)
    run(llm, write_input(tmp_path / "in", items), tmp_path / "out")
    records = read_output(tmp_path / "out")
    found = {record["custom_id"]: record for record in records}
    assert len(found) == len(records) == 2
    assert found["many"]["response"]["status_code"] == 500
    assert found["many"]["error"] == {
        "code": "generation_failed",
        "message": "generation failed: NaN",
    }
    assert found["good"]["error"] is None


def test_faults_of_this_program_cost_one_line(llm: LLM, tmp_path: Path, monkeypatch, caplog):
    from nanovllm.run_batch import runner

    real_body, real_read = runner.make_body, runner.read_body

    def make_body(request: BatchRequest, *args: Any) -> Any:
        return {}["oh"] if request.custom_id == "3" else real_body(request, *args)

    def read_body(request: BatchRequest, *args: Any) -> Any:
        return {}["no"] if request.custom_id == "4" else real_read(request, *args)

    monkeypatch.setattr(runner, "make_body", make_body)
    monkeypatch.setattr(runner, "read_body", read_body)
    summary = run(llm, write_input(tmp_path / "in", simple_lines(8)), tmp_path / "out")
    assert summary.startswith("6 done, 2 failed")
    assert summary.endswith(("first error: internal error: KeyError: 'oh'", "KeyError: 'no'"))
    found = by_id(read_output(tmp_path / "out"))
    assert found["batch_req_4"]["error"]["message"] == "internal error: KeyError: 'oh'"
    assert found["batch_req_5"]["error"]["code"] == "internal_error"
    assert "Traceback" in caplog.text


# The command line.


def arguments(model_path: Path, in_: Path, out: Path, *more: str) -> list[str]:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    return ["-i", str(in_), "-o", str(out), "--model", str(model_path), *options, *more]


def test_every_setting_of_the_engine_is_an_option():
    parser = make_parser()
    for field in fields(Config):
        assert f"--{field.name.replace('_', '-')}" in parser.format_help()
    args = ["--dtype", "bfloat16", "--max-model-len", "5", "--gpu-memory-utilization", "0.5"]
    flags = ["--enforce-eager", "--no-enable-prefix-caching"]
    given = parser.parse_args(["-i", "a", "-o", "b", "--model", "c", *args, *flags])
    assert (given.dtype, given.max_model_len, given.gpu_memory_utilization) == ("bfloat16", 5, 0.5)
    assert (given.enforce_eager, given.enable_prefix_caching) == (True, False)


def test_vllms_flags_are_supported_ignored_or_refused(
    model_path, tmp_path, monkeypatch, capfd, caplog
):
    """vLLM's command lines for run-batch ended with "unrecognized arguments"."""
    vllm_arguments._log_hint.cache_clear()
    made: list[dict[str, Any]] = []

    def make_llm(**options: Any) -> LLM:
        made.append(options)
        raise ValueError("no engine")

    monkeypatch.setattr(cli, "LLM", make_llm)
    job = ["-i", str(write_input(tmp_path / "in", [request("a")])), "-o", str(tmp_path / "out")]
    job += ["--model", str(model_path)]
    flags = "--max-model-len 1k --max-num-batched-tokens=1K --block-size 32 -tp 2 --dtype half"
    flags += " --trust-remote-code --disable-log-stats --disable-log-requests --swap-space 16"
    flags += " --pipeline-parallel-size 1 --tokenizer-mode auto --no-enable-lora"
    assert main([*job, *flags.split()]) == CANNOT_START
    config = Config(
        str(model_path),
        max_model_len=1000,
        max_num_batched_tokens=1024,
        kvcache_block_size=32,
        tensor_parallel_size=2,
        dtype="float16",
    )
    assert made == [asdict(config)]
    capfd.readouterr()
    ignored = {"trust_remote_code", "disable_log_stats", "disable_log_requests", "swap_space"}
    assert set(re.findall(r"vLLM's `(\w+)` has no effect here", caplog.text)) == ignored
    for flag in ("--enable-lora", "--pipeline-parallel-size=2"):
        assert main([*job, flag]) == CANNOT_START
        name = flag.partition("=")[0].removeprefix("--").replace("-", "_")
        assert f"error: vLLM's `{name}` is not supported here: " in capfd.readouterr().err
    for flag in ("--generation-config-path=vllm", "--max-model-len=1.5K"):
        with pytest.raises(SystemExit):
            main([*job, flag])
        assert flag.partition("=")[0] in capfd.readouterr().err.splitlines()[-1]
    assert len(made) == 1


def test_urls_are_refused(capsys):
    for in_, out in (("https://host/x", "out"), ("in", "https://host/x")):
        with pytest.raises(SystemExit) as info:
            main(["-i", in_, "-o", out, "--model", "m"])
        assert info.value.code == CANNOT_START
        assert "'https://host/x' is a URL: use a file" in capsys.readouterr().err


def test_the_help_describes_every_option(capsys):
    with pytest.raises(SystemExit) as info:
        main(["--help"])
    assert info.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "number of GPUs (ranks) over which the model is split (default: 1)" in text
    assert "75 interrupted. After 70 and 75, the same command resumes the job." in text
    for action in make_parser()._actions:
        assert action.help and action.help.strip() != "(default: None)", action.option_strings


def test_a_job_from_the_command_line(model_path: Path, tmp_path: Path, capfd):
    in_, out = tmp_path / "in", tmp_path / "out"
    items = [request("a", max_tokens=2), request("b", model="name", max_tokens=2), b""]
    assert (
        main(arguments(model_path, write_input(in_, items), out, "--served-model-name", "name"))
        == 0
    )
    found = {record["custom_id"]: record for record in read_output(out)}
    assert {record["response"]["body"]["model"] for record in found.values()} == {"name"}
    stdout, stderr = capfd.readouterr()
    assert stdout == ""
    assert stderr.splitlines()[-1] == (
        f"run_batch: 2 done, 0 failed, 0 skipped, of 2 lines; see {out}"
    )
    write_input(in_, [*items, b"no json", request("c", model=str(model_path), max_tokens=1)])
    assert main(arguments(model_path, in_, out)) == SOME_FAILED
    stderr = capfd.readouterr().err
    assert "1 done, 1 failed, 2 skipped, of 4 lines" in stderr
    assert f"{out} has records of the model 'name'" in stderr
    data = out.read_bytes()
    assert main(arguments(Path("/no/such/model"), in_, out)) == SOME_FAILED  # with nothing to do
    assert "0 done, 0 failed, 4 skipped (1 of them with an error)" in capfd.readouterr().err
    assert out.read_bytes() == data
    # Malformed lines are found when they move, and no longer count when they are gone.
    write_input(in_, [b"no json", *items])
    assert main(arguments(model_path, in_, out)) == SOME_FAILED
    assert "0 done, 0 failed, 3 skipped (1 of them with an error)" in capfd.readouterr().err
    write_input(in_, items)
    assert main(arguments(model_path, in_, out)) == 0
    assert "0 done, 0 failed, 2 skipped, of 2 lines" in capfd.readouterr().err
    assert out.read_bytes() == data
    assert main(arguments(model_path, write_input(in_, []), tmp_path / "none")) == 0
    assert (tmp_path / "none").read_bytes() == b""


def test_options_that_llm_has_and_config_lacks(model_path, tmp_path, monkeypatch, capfd):
    """They were "unrecognized arguments", or had no effect (the token) or were refused."""
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }} w1 w2")
    in_, out = write_input(tmp_path / "in", [request("a", CHAT, temperature=0)]), tmp_path / "out"
    override = json.dumps({"max_new_tokens": 3})
    flags = ["--chat-template", str(template), "--override-generation-config", override]
    flags += ["--generation-config", "vllm", "--hf-token", "secret", "--kv-cache-dtype=float16"]
    made: list[dict[str, Any]] = []
    make_llm = cli.LLM
    monkeypatch.setattr(cli, "LLM", lambda **options: made.append(options) or make_llm(**options))
    assert main([*arguments(model_path, in_, out), *flags, "--dtype=half"]) == 0, capfd.readouterr()
    (record,) = read_output(out)
    with LLM(model_path, dtype="half", **SMALL) as llm:
        ids = llm.get_tokenizer().encode("hi w1 w2", add_special_tokens=False)
        (expected,) = llm.generate(ids, SamplingParams(temperature=0, max_tokens=3))
    assert texts(record) == [expected.outputs[0].text]
    assert record["response"]["body"]["usage"]["completion_tokens"] == 3
    assert (made[0]["hf_token"], made[0]["generation_config"]) == ("secret", "vllm")
    for flag, error in {
        "--generation-config=x": "generation_config must be one of auto, vllm, got 'x'",
        "--override-generation-config=x": "override_generation_config must be a dict, got 'x'",
        "--quantization=mxfp4": "quantization='mxfp4' is not the checkpoint's",
        "--chat-template=x": "chat_template is neither a template nor a file",
    }.items():
        assert main([*arguments(model_path, in_, tmp_path / "other"), flag]) == CANNOT_START
        assert error in capfd.readouterr().err.splitlines()[-1]


def test_wrong_usage_is_one_line(model_path: Path, tmp_path: Path, monkeypatch, capfd):
    monkeypatch.setattr(writer, "LOCK_SECONDS", 0.0)
    in_, out = write_input(tmp_path / "in", [request("a")]), tmp_path / "out"
    (tmp_path / "notes").write_text("my notes\n")
    (tmp_path / "link").symlink_to(in_)
    (tmp_path / "no_model").mkdir()
    wrong: dict[str, list[str]] = {
        "No such file": arguments(model_path, tmp_path / "x", out),
        "in is not a regular": arguments(model_path, Path("/dev/null"), out),
        "is not a regular file": arguments(model_path, tmp_path, out),
        "the output file is the input file": arguments(model_path, in_, in_),
        "output file is the input": arguments(model_path, in_, tmp_path / "link"),
        "Is a directory": arguments(model_path, in_, tmp_path),
        "No such file or directory": arguments(model_path, in_, tmp_path / "x" / "y"),
        "line 1 of .*notes is not a batch job.s record": arguments(
            model_path, in_, tmp_path / "notes"
        ),
        "--grace must be at least 0": arguments(model_path, in_, out, "--grace", "-1"),
        "grace must be at least 0": arguments(model_path, in_, out, "--grace", "nan"),
        "max_num_seqs must be at least 1": arguments(model_path, in_, out, "--max-num-seqs=0"),
        "device must be one of": arguments(model_path, in_, out, "--device=tpu"),
        "no config.json": arguments(tmp_path / "no_model", in_, out),
    }
    wrong.pop("in is not a regular")
    for message, args in wrong.items():
        assert main(args) == CANNOT_START
        stdout, stderr = capfd.readouterr()
        assert stdout == ""
        assert re.fullmatch(rf"run_batch: error: .*{message}.*\n", stderr), stderr
    assert not read_output(out)
    with closing(Writer(out)):
        assert main(arguments(model_path, in_, out)) == CANNOT_START
    assert "another job is writing" in capfd.readouterr().err
    for args in (["-i", "a"], [*arguments(model_path, in_, out), "--max-num-seq=5"]):
        with pytest.raises(SystemExit) as info:
            main(args)
        assert info.value.code == CANNOT_START


def test_an_engine_that_does_not_start_is_no_interruption(model_path, tmp_path, monkeypatch, capfd):
    def make_llm(**options: Any) -> LLM:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(cli, "LLM", make_llm)
    in_ = write_input(tmp_path / "in", [request("a")])
    assert main(arguments(model_path, in_, tmp_path / "out")) == CANNOT_START
    stderr = capfd.readouterr().err
    assert "RuntimeError: out of memory" in stderr.splitlines()[-1]


def test_what_ends_a_job_on_its_way_can_be_mended(model_path, tmp_path, monkeypatch, capfd):
    in_, out = write_input(tmp_path / "in", simple_lines(12)), tmp_path / "out"
    real, calls = Writer.write, count()
    errors = iter([OSError(28, "No space left on device"), KeyError("a fault")])

    def write(self: Writer, record: Any) -> None:
        if next(calls) == 3:
            raise next(errors)
        real(self, record)

    monkeypatch.setattr(Writer, "write", write)
    assert main(arguments(model_path, in_, out)) == INTERRUPTED
    assert "No space left on device; when that is fixed, run the same" in capfd.readouterr().err
    assert len(read_output(out)) == 3
    calls = count()
    assert main(arguments(model_path, in_, out)) == FAULT
    assert "KeyError: 'a fault'" in capfd.readouterr().err
    assert len(read_output(out)) == 6
    assert main(arguments(model_path, in_, out)) == ALL_DONE
    assert len(by_id(read_output(out))) == 12


@pytest.mark.parametrize("is_replaced", [False, True])
def test_an_output_that_is_removed_or_replaced_ends_the_job(
    model_path, tmp_path, monkeypatch, capfd, is_replaced
):
    in_, out = write_input(tmp_path / "in", simple_lines(12)), tmp_path / "out"
    real, calls = Writer.write, count()

    def write(self: Writer, record: Any) -> None:
        if next(calls) == 3:
            out.unlink()
            if is_replaced:
                out.write_text("mine\n")
        real(self, record)

    monkeypatch.setattr(Writer, "write", write)
    assert main(arguments(model_path, in_, out)) == INTERRUPTED
    assert "has been removed or replaced" in capfd.readouterr().err
    if is_replaced:
        assert out.read_text() == "mine\n"
    else:
        assert not out.exists()
        assert main(arguments(model_path, in_, out)) == ALL_DONE
        assert len(read_output(out)) == 12


@pytest.mark.parametrize(
    "tail",
    [
        pytest.param(b'{"id": "batch_req_67f0", "custom_id": "a", "response": {}}', id="openai's"),
        pytest.param(b'{"id": "batch_req_1", "custom_id": "a", "response": {}}', id="similar"),
        pytest.param(b'{"id": "batch_req_1"}', id="brief"),
        pytest.param(bytes(100), id="NULs"),
    ],
)
def test_a_last_line_of_somebody_elses_is_kept(tail, model_path, tmp_path, capfd):
    in_, out = write_input(tmp_path / "in", simple_lines(2)), tmp_path / "out"
    out.write_bytes(tail)
    assert main(arguments(model_path, in_, out)) == CANNOT_START
    assert "not a batch job's record" in capfd.readouterr().err
    assert out.read_bytes() == tail


@pytest.mark.slow
@pytest.mark.parametrize("stderr", ["/dev/full", None])
def test_messages_that_cannot_be_written_harm_no_job(stderr, model_path, tmp_path):
    in_, out = write_input(tmp_path / "in", simple_lines(3)), tmp_path / "out"
    command = [sys.executable, "-m", "nanovllm.run_batch", *arguments(model_path, in_, out)]
    command += ["--max_num_seqs", "8"]  # as vLLM, with an underscore
    read, write = os.pipe()
    os.close(read)
    target = os.open(stderr, os.O_WRONLY) if stderr else write
    done = subprocess.run(command, cwd=ROOT, stderr=target, check=False)
    for descriptor in {target, write}:
        os.close(descriptor)
    assert done.returncode == ALL_DONE
    assert len(read_output(out)) == 3


def test_progress_goes_to_the_log_where_there_is_no_terminal(llm, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(job, "LOG_SECONDS", 0.0)
    in_ = write_input(tmp_path / "in", simple_lines(5))
    with closing(Job(in_, tmp_path / "out")) as work, caplog.at_level(logging.INFO, "nanovllm"):
        work.write(Runner(lambda: llm, ["model"], work.journal).run(work.requests()))
    lines = re.findall(r"(\d+) of 5 lines, [\d.]+/s, [\d:]+ left", caplog.text)
    assert lines == ["1", "2", "3", "4", "5"]


# Signals.


def test_signals_before_the_run_interrupt_and_then_ask():
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for number in (signal.SIGINT, signal.SIGTERM):
        with StopOnSignal(100) as stop:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
            assert stop.requested  # where that exception came to nothing
        with StopOnSignal(100) as stop:
            stop.is_running = True
            signal.raise_signal(number)
            assert stop.requested
            assert 50 < stop.deadline - time.monotonic() <= 100
            deadline = stop.deadline
            signal.raise_signal(signal.SIGTERM)
            assert stop.deadline == deadline
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    signal.signal(signal.SIGINT, ours)


def test_ignored_signals_stay_ignored():
    """As a shell ignores Ctrl-C for what it runs in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopOnSignal(5) as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop.requested
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_while_the_engine_starts_ends_the_job(model_path, tmp_path, monkeypatch, capfd):
    def make_llm(**options: Any) -> LLM:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("it goes on")

    monkeypatch.setattr(cli, "LLM", make_llm)
    in_ = write_input(tmp_path / "in", [request("a")])
    assert main(arguments(model_path, in_, tmp_path / "out")) == INTERRUPTED
    assert "interrupted; run the same command again" in capfd.readouterr().err


class Jobs:
    """Jobs in processes of their own, forked from one that has imported everything: a tenth of
    the time that fresh ones take."""

    def __init__(self, server: subprocess.Popen) -> None:
        self.server = server

    def start(self, args: list[str], log: Path, sabotage: str = "") -> int:
        """Its process id. It calls a function, as "module:name", before it begins."""
        return self._ask({"args": args, "log": str(log), "sabotage": sabotage}, 60)

    def wait(self, pid: int, seconds: float = 60) -> int:
        """Its exit status; minus the signal that ended it."""
        return os.waitstatus_to_exitcode(self._ask({"wait": pid}, seconds))

    def run(self, args: list[str], log: Path, sabotage: str = "") -> int:
        return self.wait(self.start(args, log, sabotage))

    def _ask(self, question: dict[str, Any], seconds: float) -> int:
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.write(json.dumps(question).encode() + b"\n")
        ready, _, _ = select.select([self.server.stdout], [], [], seconds)
        assert ready, f"no answer to {question}"
        return int(self.server.stdout.readline())


def serve() -> None:
    """Starts and awaits jobs for the process that writes lines to stdin."""
    from transformers import AutoTokenizer  # noqa: F401  # or each job imports it for itself

    torch.set_num_threads(1)
    for line in sys.stdin:
        question = json.loads(line)
        if "wait" in question:
            print(os.waitpid(question["wait"], 0)[1], flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            log = os.open(question["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for fd in (1, 2):
                os.dup2(log, fd)
            if question["sabotage"]:
                module, _, name = question["sabotage"].partition(":")
                getattr(import_module(module), name)()
            os._exit(supervise(partial(main, question["args"]), question["args"]))
        print(pid, flush=True)


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with subprocess.Popen(
        [sys.executable, "-c", "from tests.test_run_batch import serve; serve()"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    ) as server:
        yield Jobs(server)
        server.kill()


def wait_until(condition: Callable[[], Any], seconds: float = 30, pause: float = 0.005) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(pause)


@pytest.mark.slow
@pytest.mark.parametrize("most_kills", [8, 20])
def test_jobs_that_are_killed_again_and_again_lose_and_repeat_nothing(
    jobs: Jobs, model_path: Path, tmp_path: Path, most_kills: int
):
    """Killed as the output grows, or at any time from the start on; and now and then the last
    records are torn off, as by a machine that goes down."""
    in_ = write_input(tmp_path / "in", mixed_lines(70, longest=12))
    calm, out, log = tmp_path / "calm", tmp_path / "out", tmp_path / "log"
    assert jobs.run(arguments(model_path, in_, calm), log) == SOME_FAILED, log.read_text()
    expected = by_id(read_output(calm))
    mean = calm.stat().st_size / len(expected)
    rng = random.Random(1)
    out.touch()
    num_kills, sizes, torn = 0, [], 0
    while num_kills < most_kills:
        size = out.stat().st_size
        pid = jobs.start(arguments(model_path, in_, out), log)
        if num_kills % 3:
            target = size + int(rng.uniform(1, 3 * mean))
            wait_until(lambda size=target: out.stat().st_size >= size, pause=0.0002)
            time.sleep(rng.uniform(0, 0.003))
        else:
            time.sleep(rng.uniform(0, 0.6))
        os.kill(pid, signal.SIGKILL)
        status = jobs.wait(pid)
        assert status in (-signal.SIGKILL, SOME_FAILED), log.read_text()
        num_kills += status == -signal.SIGKILL
        data = out.read_bytes()
        done = by_id([json.loads(line) for line in data.splitlines(True) if line.endswith(b"\n")])
        wrong = {k: (record, expected[k]) for k, record in done.items() if record != expected[k]}
        assert not wrong
        sizes.append(len(done))
        if len(done) > 0.8 * len(expected) or rng.random() < 0.3:
            torn += 1
            os.truncate(out, rng.randrange(len(data) + 1))
    assert jobs.run(arguments(model_path, in_, out), log) == SOME_FAILED
    assert by_id(read_output(out)) == expected
    print(f"records at each kill: {sizes}; torn {torn} times")
    assert len(set(sizes)) > most_kills // 4


@contextmanager
def running(jobs: Jobs, args: list[str], out: Path, log: Path, sabotage: str = "") -> Iterator[int]:
    """A job that has written its first record; it ends with the block."""
    pid = jobs.start(args, log, sabotage)
    try:
        wait_until(lambda: out.exists() and out.stat().st_size)
        yield pid
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        print(log.read_text())
        raise


NUM_LONG = 18


def long_lines() -> list[Any]:
    items = [request(str(i), max_tokens=60, ignore_eos=True, seed=i) for i in range(NUM_LONG)]
    items[0]["body"]["max_tokens"] = 1
    return items


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_ends_a_job_when_what_runs_is_done(
    jobs: Jobs, model_path: Path, tmp_path: Path, number: int
):
    in_, out, log = write_input(tmp_path / "in", long_lines()), tmp_path / "out", tmp_path / "log"
    args = arguments(model_path, in_, out)
    with running(jobs, args, out, log) as pid:
        os.kill(pid, number)
        assert jobs.wait(pid) == INTERRUPTED, log.read_text()
    num_done = len(read_output(out))
    assert 2 <= num_done <= 1 + 3 * SMALL["max_num_seqs"]
    *_, summary, last = log.read_text().splitlines()
    assert summary.startswith(
        f"run_batch: {num_done} done, 0 failed, 0 skipped, of {NUM_LONG} lines"
    )
    assert last == "run_batch: interrupted; run the same command again to resume"
    assert jobs.run(args, log) == ALL_DONE
    found = by_id(read_output(out))
    assert len(found) == NUM_LONG
    assert f"{NUM_LONG - num_done} done, 0 failed, {num_done} skipped" in log.read_text()
    assert all(record["error"] is None for record in found.values())


def test_no_grace_ends_a_job_at_once(jobs: Jobs, model_path: Path, tmp_path: Path):
    in_, out, log = write_input(tmp_path / "in", long_lines()), tmp_path / "out", tmp_path / "log"
    args = arguments(model_path, in_, out, "--grace=0", "--no-enable-reordering")
    with running(jobs, args, out, log) as pid:
        os.kill(pid, signal.SIGTERM)
        assert jobs.wait(pid) == INTERRUPTED
    assert len(read_output(out)) <= 2
    assert jobs.run(args, log) == ALL_DONE


def test_a_second_interrupt_ends_a_job_at_once(jobs: Jobs, model_path: Path, tmp_path: Path):
    items = long_lines()
    items[1]["body"] |= {"prompt": "y", "n": 300}
    in_, out, log = write_input(tmp_path / "in", items), tmp_path / "out", tmp_path / "log"
    with running(jobs, arguments(model_path, in_, out, "--grace=1000"), out, log) as pid:
        os.kill(pid, signal.SIGINT)
        wait_until(lambda: "stopping" in log.read_text())
        os.kill(pid, signal.SIGINT)
        assert jobs.wait(pid, 5) == INTERRUPTED
    assert "Traceback" not in log.read_text()
    read_output(out)


def test_a_second_job_on_the_same_output_is_refused(
    jobs: Jobs, model_path: Path, tmp_path: Path, capfd, monkeypatch
):
    monkeypatch.setattr(writer, "LOCK_SECONDS", 0.0)
    in_, out, log = write_input(tmp_path / "in", long_lines()), tmp_path / "out", tmp_path / "log"
    args = arguments(model_path, in_, out)
    with running(jobs, args, out, log) as pid:
        assert main(args) == CANNOT_START
        assert "another job is writing" in capfd.readouterr().err
        assert jobs.wait(pid) == ALL_DONE
    assert len(by_id(read_output(out))) == NUM_LONG


# The page.


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path, monkeypatch, capsys):
    page = (ROOT / "docs" / "batch.md").read_text(encoding="utf-8")
    (shell,) = re.findall(r"^```bash\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (python,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    model = "~/.cache/nanovllm/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert model in shell
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        ["bash", "-e", "-c", shell.replace(model, str(fetch_smollm2()))],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "exit status 1\n", done.stderr
    assert "2 done, 1 failed, 0 skipped, of 3 lines" in done.stderr
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(python, {})
    assert "Paris" in capsys.readouterr().out
