"""Hostile requests among good ones: the process lives, each line gets one record, and the good
requests get exactly what they get without the hostile ones."""

import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest

from example import fetch_smollm2
from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput
from nanovllm.run_batch.job import Job
from nanovllm.run_batch.runner import Runner
from nanovllm.sampling_params import StructuredOutputsParams
from tests.conftest import check_idle
from tests.data.hostile import CASES, EITHER, RESULT, TRUSTED, Case
from tests.data.hostile.case import CHAT, COMPLETIONS, encode
from tests.data.hostile.files import FILES

ROOT = Path(__file__).parents[1]
SEED = int(os.environ.get("HOSTILE_SEED", "0"))
SECONDS = 30.0  # for one line
MEGABYTES = 2048.0  # more than the good lines alone take
WINDOW = 4  # twice max_num_seqs: how many lines a job has under way
GAP = WINDOW + 1  # good lines after each hostile one: one of these is under way at a time
SMALL: dict[str, Any] = {
    "kvcache_block_size": 64,
    "num_kvcache_blocks": 64,
    "max_model_len": 128,
    "max_num_seqs": WINDOW // 2,
    "max_num_batched_tokens": 64,
    "device": "cpu",
}
OPTIONS = [word for k, v in SMALL.items() for word in (f"--{k.replace('_', '-')}", str(v))]
GROUPS = sorted({case.group for case in [*CASES, *TRUSTED]})
# The forms of lines and chats; the other groups run on the tiny model alone, as they take long.
ON_REAL_MODEL = [
    "chat sampling",
    "envelope",
    "template",
    "template options",
    "untrusted template",
]
LIGHT = [case for case in CASES if not case.is_heavy]
SOME_FAILED = 1

# Good requests: prompts shorter than a block, so that none finds another's in the prefix cache.
GOOD: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "abc", "temperature": 0}),
    (COMPLETIONS, {"prompt": "hello", "seed": 7, "logprobs": 2, "n": 2}),
    (CHAT, {"messages": [{"role": "user", "content": "q"}], "temperature": 0.7}),
    (COMPLETIONS, {"prompt": [[30, 31], "xyz"], "top_k": 20, "stop": ["q"]}),
    (COMPLETIONS, {"prompt": "pick", "structured_outputs": {"choice": ["yes", "no"]}}),
]


def good_line(i: int) -> bytes:
    url, body = GOOD[i % len(GOOD)]
    name, body = f"good {i}", body | {"max_tokens": 4}
    return encode({"custom_id": name, "method": "POST", "url": url, "body": body})


def lay_out(
    path: Path, cases: Sequence[Case], gap: int = GAP, *, with_hostile: bool = True
) -> dict[int, Case]:
    """Writes a batch file; returns the cases by line number. Without the hostile lines, blank ones
    keep the good lines' numbers."""
    hostile: dict[int, Case] = {}
    with path.open("wb") as file:
        for i in range(WINDOW + len(cases) * (gap + 1)):
            at, rest = divmod(i - WINDOW, gap + 1)
            if i < WINDOW or rest:
                file.write(good_line(i))
            else:
                hostile[i + 1] = cases[at]
                file.write(cases[at].make_line() if with_hostile else b"")
            file.write(b"\n")
    return hostile


# Jobs in processes of their own.


@dataclass
class Watched:
    """A job that has ended.

    Attributes:
        status: its exit status; minus the signal that ended it.
        times: seconds from the start until each record was there.
        peak: most memory in MB that its processes had together.
    """

    status: int = 0
    times: list[float] = field(default_factory=list)
    peak: float = 0.0


def watch(command: list[str], out: Path, log: Path, kill_after: float | None = None) -> Watched:
    """Runs a job to its end, or kills it after so many seconds: the whole process group if these
    are negative."""
    watched, start, offset = Watched(), time.monotonic(), 0
    seen: dict[int, psutil.Process] = {}
    with log.open("ab") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, stderr=stderr, start_new_session=True)
    leader = psutil.Process(process.pid)
    try:
        while process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                seen |= {child.pid: child for child in leader.children(recursive=True)}
            peaks = [_peak(pid) for pid in (process.pid, *seen)]
            watched.peak = max(watched.peak, sum(peaks))
            elapsed = time.monotonic() - start
            if out.exists():
                with out.open("rb") as file:
                    file.seek(offset)
                    new = file.read()
                offset += len(new)
                watched.times += [elapsed] * new.count(b"\n")
            if kill_after is not None and elapsed > abs(kill_after):
                kill = os.killpg if kill_after < 0 else os.kill
                kill(process.pid, signal.SIGKILL)
                process.wait()
            time.sleep(0.02)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    _, alive = psutil.wait_procs(list(seen.values()), timeout=20)
    assert not alive, f"{alive} outlived the job"
    watched.status = process.returncode
    return watched


def _peak(pid: int) -> float:
    """MB; 0 of a process that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, IndexError):
        return 0.0


def command(model: Path, in_: Path, out: Path, *more: str) -> list[str]:
    paths = ["-i", str(in_), "-o", str(out), "--model", str(model)]
    return [sys.executable, "-m", "nanovllm.run_batch", *paths, *OPTIONS, *more]


def by_number(out: Path) -> dict[int, bytes]:
    """Records by line number, in the order in which they came, without their times."""
    records: dict[int, bytes] = {}
    for line in out.read_bytes().splitlines():
        number = int(json.loads(line)["id"].removeprefix("batch_req_"))
        assert number not in records, f"line {number} has two records"
        records[number] = re.sub(rb'"created": \d+', b'"created": 0', line)
    return records


def check_records(out: Path, hostile: dict[int, Case], calm: dict[int, bytes]) -> None:
    records = by_number(out)
    assert records.keys() == calm.keys() | hostile.keys()
    changed = [number for number in calm if records[number] != calm[number]]
    assert not changed, f"lines {changed} of good requests changed"
    for number, case in hostile.items():
        error = json.loads(records[number])["error"]
        assert case.expected in (EITHER, "error" if error else RESULT), (case.name, error)
        # These are no faults of the request, but of the program.
        assert (error or {}).get("code") not in ("internal_error", "engine_failed"), (
            case.name,
            error,
        )


def check_times(watched: Watched, out: Path, hostile: dict[int, Case]) -> None:
    """A line is read once all but WINDOW of the lines before it have records: its time is at most
    that since then."""
    order = list(by_number(out))
    lines = {number: i for i, number in enumerate(sorted(order))}
    assert len(order) == len(watched.times)
    for number, seconds in zip(order, watched.times, strict=True):
        begin = watched.times[max(0, lines[number] - GAP)]
        if number in hostile:
            assert seconds - begin < allowed_seconds(), hostile[number].name


def allowed_seconds() -> float:
    """SECONDS, or more on a machine that others keep busy."""
    return SECONDS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@dataclass
class Bench:
    """A model, and what good requests get and take on it."""

    model: Path
    llm: LLM
    good_megabytes: float
    gap: int

    def calm(self, folder: Path, cases: Sequence[Case]) -> dict[int, bytes]:
        """The good lines' records without the hostile lines."""
        in_, out = folder / "calm.in", folder / "calm.out"
        if out.exists():
            return by_number(out)
        lay_out(in_, cases, self.gap, with_hostile=False)
        self.llm.reset_prefix_cache()
        with Job(in_, out) as job:
            runner = Runner(lambda: self.llm, [str(self.model)])
            job.write(runner.run(job.requests()), show_progress=False)
        return by_number(out)


def make_bench(model: Path, folder: Path, gap: int) -> Iterator[Bench]:
    in_, out = folder / "good.in", folder / "good.out"
    lay_out(in_, LIGHT[:8], with_hostile=False)
    watched = watch(command(model, in_, out), out, folder / "log")
    assert watched.status == 0, (folder / "log").read_text()
    with LLM(model, **SMALL) as llm:
        yield Bench(model, llm, watched.peak, gap)


@pytest.fixture(scope="module")
def tiny(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield from make_bench(model_path, tmp_path_factory.mktemp("tiny"), GAP)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """With one good line after each hostile one, as they take long."""
    yield from make_bench(fetch_smollm2(), tmp_path_factory.mktemp("real"), 1)


def run_among_good_lines(bench: Bench, cases: Sequence[Case], folder: Path) -> float:
    """Returns seconds that the job took."""
    in_, out, log = folder / "in", folder / "out", folder / "log"
    hostile = lay_out(in_, cases, bench.gap)
    trust = ["--trust-request-chat-template"] if cases[0] in TRUSTED else []
    watched = watch(command(bench.model, in_, out, *trust), out, log)
    assert watched.status in (0, SOME_FAILED), log.read_text()[-5000:]
    check_records(out, hostile, bench.calm(folder, cases))
    if bench.gap == GAP:
        check_times(watched, out, hostile)
    assert watched.peak < bench.good_megabytes + MEGABYTES
    has_errors = any(json.loads(record)["error"] for record in by_number(out).values())
    assert watched.status == (SOME_FAILED if has_errors else 0)
    return watched.times[-1]


def run_killed(bench: Bench, cases: Sequence[Case], folder: Path, moments: list[float]) -> None:
    """Kills a job after each of so many seconds, then lets it end."""
    in_, out, log = folder / "in", folder / "killed", folder / "log"
    hostile = lay_out(in_, cases, bench.gap)
    trust = ["--trust-request-chat-template"] if cases[0] in TRUSTED else []
    job = command(bench.model, in_, out, *trust)
    for moment in moments:
        status = watch(job, out, log, moment).status
        assert status in (-signal.SIGKILL, 0, SOME_FAILED), log.read_text()[-5000:]
    status = watch(job, out, log).status
    assert status in (0, SOME_FAILED), log.read_text()[-5000:]
    check_records(out, hostile, bench.calm(folder, cases))


def of_group(group: str) -> list[Case]:
    return [case for case in [*CASES, *TRUSTED] if case.group == group]


def test_hostile_lines_change_no_other_and_have_one_record(tiny, tmp_path):
    """Every eighth of the cases; the slow tests run all. Then the same again, killed on its way."""
    cases = LIGHT[SEED % 8 :: 8]
    seconds = run_among_good_lines(tiny, cases, tmp_path)
    moment = random.Random(SEED).uniform(0.5, 1) * seconds
    print(f"seed {SEED}: killed after {moment:.2f} s")
    run_killed(tiny, cases, tmp_path, [moment])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "group, model", [*product(GROUPS, ["tiny"]), *product(ON_REAL_MODEL, ["real"])]
)
def test_every_hostile_line(group, model, request, tmp_path):
    """Killed at random moments the second time: the job's process, or all of its group."""
    bench, cases = request.getfixturevalue(model), of_group(group)
    seconds = run_among_good_lines(bench, cases, tmp_path)
    rng = random.Random(f"{SEED} {group}")
    moment = rng.choice([-1, 1]) * rng.uniform(0.2, 1) * seconds
    print(f"seed {SEED}: killed after {moment} s")
    run_killed(bench, cases, tmp_path, [moment])


# The same requests through the library.


def as_calls(llm: LLM, body: dict[str, Any]) -> list[tuple[Any, SamplingParams]]:
    """Prompts and parameters of a request's body. Raises TypeError or ValueError."""
    given = {k: v for k, v in body.items() if v is not None}
    values = {k: v for k, v in given.items() if k in SamplingParams.__dataclass_fields__}
    if isinstance(values.get("logit_bias"), dict):
        values["logit_bias"] = {int(k): v for k, v in values["logit_bias"].items()}
    if isinstance(asked := given.get("structured_outputs"), dict):
        values["structured_outputs"] = StructuredOutputsParams(**asked)
    with suppress(KeyError, TypeError):
        schema = given["response_format"]["json_schema"]["schema"]
        values["structured_outputs"] = StructuredOutputsParams(json=schema)
    params = SamplingParams(**values)
    if "messages" in given:
        keys = ("chat_template", "chat_template_kwargs", "tools", "continue_final_message")
        prompts = llm.render_chat(given["messages"], **{k: given[k] for k in keys if k in given})
    else:
        prompt = given.get("prompt")
        is_several = isinstance(prompt, list) and not all(type(item) is int for item in prompt)
        prompts = prompt if is_several else [prompt]
    return [(prompt, params) for prompt in prompts[:3]]


def all_calls(llm: LLM, cases: Sequence[Case]) -> list[tuple[Case, Any, SamplingParams]]:
    """Those that can be made; the others are refused where they are made."""
    calls = []
    for case in cases:
        if (body := case.body()) is None:
            continue
        try:
            calls += [(case, *call) for call in as_calls(llm, body)]
        except (TypeError, ValueError) as error:
            assert case.expected != RESULT, (case.name, error)
    return calls


GOOD_CALLS: list[tuple[Any, SamplingParams]] = [
    ("abc", SamplingParams(temperature=0, max_tokens=6)),
    ("hello", SamplingParams(seed=7, logprobs=2, n=2, max_tokens=6)),
    ([30, 31, 32], SamplingParams(seed=8, top_k=20, max_tokens=6)),
]


def what_is_said(output: RequestOutput) -> list[Any]:
    return [(each.text, each.token_ids, each.finish_reason) for each in output.outputs]


def is_error(output: RequestOutput) -> bool:
    return any(completion.finish_reason == "error" for completion in output.outputs)


def through_generate(llm: LLM, calls: list[tuple[Any, SamplingParams]]) -> list[RequestOutput]:
    prompts, params = zip(*calls, strict=True)
    return llm.generate([*prompts], [*params], use_tqdm=False, on_error="return")


def through_add_request(
    llm: LLM, calls: list[tuple[Any, SamplingParams]]
) -> list[RequestOutput | None]:
    """None for those that are refused."""
    ids: list[str | None] = []
    outputs: dict[str | None, RequestOutput | None] = {None: None}
    try:
        for prompt, params in calls:
            try:
                ids.append(llm.add_request(prompt, params))
            except (TypeError, ValueError) as error:
                assert str(error)
                ids.append(None)
        while not llm.is_finished():
            outputs |= {output.request_id: output for output in llm.step()}
    finally:  # nothing is left to the next test
        for request_id in ids:
            with suppress(ValueError):  # it has finished, or was refused
                llm.abort_request(request_id or "")
    return [outputs[request_id] for request_id in ids]


def check_calls(llm: LLM, cases: Sequence[Case], run: Callable[..., list[Any]]) -> None:
    calls = all_calls(llm, cases)
    between = [call for _, *call in calls]
    expected = [what_is_said(output) for output in through_generate(llm, GOOD_CALLS)]
    start, before = time.monotonic(), _peak(os.getpid())
    outputs = run(llm, [*GOOD_CALLS, *between, *GOOD_CALLS])
    assert time.monotonic() - start < allowed_seconds() * max(1, len(cases) / 10)
    assert _peak(os.getpid()) - before < MEGABYTES
    num_good = len(GOOD_CALLS)
    for good in (outputs[:num_good], outputs[-num_good:]):
        assert [what_is_said(output) for output in good] == expected
    for (case, *_), output in zip(calls, outputs[num_good:-num_good], strict=True):
        if case.expected == RESULT:
            assert output is not None and not is_error(output), case.name
    check_idle(llm)


@pytest.mark.parametrize("run", [through_generate, through_add_request])
def test_hostile_calls_change_no_other(run, tiny):
    check_calls(tiny.llm, LIGHT[SEED % 8 :: 8], run)


def test_hostile_conversations_change_no_other(tiny):
    bodies = [case.body() for case in LIGHT if case.group == "messages"]
    chats = [body["messages"] for body in bodies if body and isinstance(body["messages"], list)]
    good = [{"role": "user", "content": "q"}]
    params = SamplingParams(temperature=0, max_tokens=6)
    (alone,) = tiny.llm.chat([good], params, use_tqdm=False)
    outputs = tiny.llm.chat([good, *chats, good], params, use_tqdm=False, on_error="return")
    assert what_is_said(outputs[0]) == what_is_said(outputs[-1]) == what_is_said(alone)
    assert any(map(is_error, outputs)) and not all(map(is_error, outputs[1:-1]))
    check_idle(tiny.llm)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("run", [through_generate, through_add_request])
@pytest.mark.parametrize("group", GROUPS)
def test_every_hostile_call(group, run, tiny):
    llm, cases = tiny.llm, of_group(group)
    for some in [
        [case for case in cases if not case.is_heavy],
        *([c] for c in cases if c.is_heavy),
    ]:
        check_calls(llm, some, run)


# Files of a checkpoint.


def try_files(folder: Path, prompt: Any, answer: Any) -> None:
    """In a process of its own: whether an engine starts on these files and runs the prompt."""
    limit = (4 << 30) + psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before = psutil.Process().memory_info().rss >> 20
    outcome = "error"
    with suppress(TypeError, ValueError), LLM(folder, **SMALL) as llm:
        ids, params = [30, 31, 32], SamplingParams(temperature=0, max_tokens=4)
        run = llm.chat if isinstance(prompt, list) else llm.generate
        (output,) = run([prompt], params, use_tqdm=False, on_error="return")
        text = prompt if isinstance(prompt, str) else ids
        outputs = llm.generate([ids, text, ids], params, use_tqdm=False, on_error="return")
        assert outputs[0].outputs[0].token_ids == outputs[-1].outputs[0].token_ids
        assert not is_error(outputs[0])
        check_idle(llm)
        outcome = "error" if is_error(output) else RESULT
    answer.send((outcome, _peak(os.getpid()) - before))


FEW = (
    "a letter becomes 10**15",
    "a start of a million tokens",
    "a token far beyond",
    "a split that backtracks",
    "a template of 4 GB",
    "weights without end",
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in FILES]
)
def test_hostile_files_are_refused_or_cost_their_prompt_alone(name, model_path, tmp_path):
    expected, change, prompt = FILES[name]
    folder = tmp_path / "model"
    shutil.copytree(model_path, folder)
    change(folder)
    receive, answer = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=try_files, args=(folder, prompt, answer))
    process.start()
    process.join(allowed_seconds())
    process.kill()
    process.join()
    assert process.exitcode == 0, "it ran into its limit of time" if process.exitcode == -9 else ""
    outcome, megabytes = receive.recv()
    assert megabytes < MEGABYTES
    assert expected in (EITHER, outcome)
