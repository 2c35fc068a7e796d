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
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from example import fetch_smollm2
from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput
from nanovllm.run_batch.job import Job
from nanovllm.run_batch.runner import Runner
from nanovllm.structured_outputs import StructuredOutputsParams
from tests.conftest import check_idle
from tests.data.hostile import CASES, EITHER, RESULT, TRUSTED, Case
from tests.data.hostile.case import CHAT, COMPLETIONS, encode
from tests.data.hostile.files import FILES
from tests.forkserver import FORKSERVER

ROOT = Path(__file__).parents[1]
SEED = int(os.environ.get("HOSTILE_SEED", "0"))
SECONDS = 30.0  # for one line, where a core is as fast as that of REFERENCE
REFERENCE = 0.15  # seconds that ``slowness`` works for on a core of a common server
MEGABYTES = 2048.0  # more than the good lines alone take
WINDOW = 4  # twice max_num_seqs: how many lines a job has under way
SMALL: dict[str, Any] = {
    "kvcache_block_size": 64,
    "num_kvcache_blocks": 64,
    "max_model_len": 96,
    "max_num_seqs": WINDOW // 2,
    "max_num_batched_tokens": 64,
    "device": "cpu",
}
OPTIONS = [word for k, v in SMALL.items() for word in (f"--{k.replace('_', '-')}", str(v))]
OPTIONS.append("--no-enable-reordering")  # so that a line's time does not depend on later lines
PARTS = {
    "forms": ["line", "envelope", "field", "type", "sampling", "chat sampling"],
    "prompts": ["prompt", "messages", "template options", "untrusted template"],
    "grammars": ["schema", "grammar"],
    "templates": ["template"],
}
# No attacks, but work, of as many completions as are allowed: for the tiny model alone.
MUCH_WORK = ("sampling: n of 4,096", "prompt: 4,000 prompts", "grammar: ambiguous, of many tokens")
assert {case.group for case in [*CASES, *TRUSTED]} == {*chain.from_iterable(PARTS.values())}
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


def good_line(i: int, more: dict[str, Any]) -> bytes:
    url, body = GOOD[i % len(GOOD)]
    name, body = f"good {i}", body | more
    return encode({"custom_id": name, "method": "POST", "url": url, "body": body})


@dataclass(frozen=True)
class Layout:
    """How good lines stand among hostile ones: ``num_good`` after every ``num_hostile``.

    Attributes:
        more: fields of the good lines' bodies.
    """

    num_hostile: int
    num_good: int
    more: dict[str, Any]

    def write(
        self, path: Path, cases: Sequence[Case], *, with_hostile: bool = True
    ) -> dict[int, Case]:
        """Writes a batch file; returns the cases by line number. Without the hostile lines, blank
        ones keep the good lines' numbers."""
        hostile: dict[int, Case] = {}
        left = deque(cases)
        with path.open("wb") as file:
            for number in count(1):
                at = (number - WINDOW - 1) % (self.num_hostile + self.num_good)
                if number <= WINDOW or at >= self.num_hostile:
                    file.write(good_line(number - 1, self.more))
                elif left:
                    hostile[number] = left.popleft()
                    file.write(hostile[number].make_line() if with_hostile else b"")
                else:
                    return hostile
                file.write(b"\n")
        raise AssertionError


# Jobs in processes of their own.


def slowness() -> float:
    """How much slower a core is here and now than where REFERENCE was taken; at least 1."""
    begin, x = time.thread_time(), torch.ones(64, 64)
    for i in range(15_000):
        x = (x * 0.5).add_(json.loads(json.dumps({"i": [i]}))["i"][0] & 1)
    return max(1.0, (time.thread_time() - begin) / REFERENCE)


class Stopwatch:
    """Seconds that processes would have taken with cores to themselves: what they computed, and
    the time in which all of them slept; but not that in which others had the cores."""

    def __init__(self, pid: int) -> None:
        self.seconds = 0.0
        self._root = psutil.Process(pid)
        self._at, self._computed = time.monotonic(), 0.0

    def tick(self) -> list[psutil.Process]:
        """Call it often. Returns the processes that there are."""
        processes, computed = [self._root], 0.0
        with suppress(psutil.NoSuchProcess):
            processes += self._root.children(recursive=True)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                computed += sum(process.cpu_times()[:4])  # with children that have ended
        now = time.monotonic()
        elapsed, share = now - self._at, max(0.0, computed - self._computed)
        self.seconds += elapsed if share < elapsed / 20 else min(elapsed, share)
        self._at, self._computed = now, computed
        return processes


@dataclass
class Watched:
    """A job that has ended.

    Attributes:
        status: its exit status; minus the signal that ended it.
        times: seconds of its own (``Stopwatch``) until each of its records was there.
        peak: most memory in MB that its processes had together.
        slowness: of the machine meanwhile.
    """

    status: int = 0
    times: list[float] = field(default_factory=list)
    peak: float = 0.0
    slowness: float = 1.0


def watch(command: list[str], out: Path, log: Path, kill_after: int | None = None) -> Watched:
    """Runs a job to its end, or kills it after so many records of its own: the whole process group
    if these are negative."""
    watched, seen = Watched(slowness=slowness()), set[psutil.Process]()
    offset = out.read_bytes().rfind(b"\n") + 1 if out.exists() else 0

    def look_for_records() -> None:
        nonlocal offset
        with suppress(FileNotFoundError), out.open("rb") as file:
            file.seek(offset)
            new = file.read()
            offset += len(new)
            watched.times += [stopwatch.seconds] * new.count(b"\n")

    with log.open("ab") as stderr:
        # One thread, as here: several wait for each other where others keep the cores busy.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, cwd=ROOT, stderr=stderr, start_new_session=True, env=environment
        )
    stopwatch = Stopwatch(process.pid)
    try:
        while process.poll() is None:
            processes = stopwatch.tick()
            seen |= {*processes[1:]}
            watched.peak = max(watched.peak, sum(_peak(each.pid) for each in processes))
            look_for_records()
            if kill_after is not None and len(watched.times) >= abs(kill_after):
                kill = os.killpg if kill_after < 0 else os.kill
                kill(process.pid, signal.SIGKILL)
                process.wait()
            time.sleep(0.1)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    _, alive = psutil.wait_procs(seen, timeout=20)
    assert not alive, f"{alive} outlived the job"
    look_for_records()
    watched.status = process.returncode
    watched.slowness = max(watched.slowness, slowness())
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


def without_log_probabilities(record: bytes) -> tuple[str, list[float]]:
    """And these, which are all the fractions of a record. Their last bits depend on how many
    sequences a step has, which hostile lines change."""
    values: list[float] = []
    rest = json.loads(record, parse_float=lambda number: values.append(float(number)))
    return json.dumps(rest), values


def is_same(record: bytes, other: bytes) -> bool:
    """Byte for byte, but for the rounding of log-probabilities."""
    (rest, values), (rest2, values2) = map(without_log_probabilities, (record, other))
    return rest == rest2 and values == pytest.approx(values2, rel=1e-4, abs=1e-4)


def check_records(out: Path, hostile: dict[int, Case], calm: dict[int, bytes]) -> None:
    records = by_number(out)
    assert records.keys() == calm.keys() | hostile.keys()
    for number in calm:
        assert is_same(records[number], calm[number]), f"line {number}, which is good, changed"
    for number, case in hostile.items():
        error = json.loads(records[number])["error"]
        assert case.expected in (EITHER, "error" if error else RESULT), (case.name, error)
        # These are no faults of the request, but of the program.
        assert (error or {}).get("code") not in ("internal_error", "engine_failed"), (
            case.name,
            error,
        )


def check_times(runs: list[Watched], out: Path, hostile: dict[int, Case]) -> None:
    """A line is read once all but WINDOW of the lines before it have records: its time is at most
    that since then. What was under way when a run was killed is put off to the next one's end:
    there, such lines are not measured, and others are read before these have records."""
    order = list(by_number(out))
    assert len(order) == sum(len(run.times) for run in runs)
    measured = []
    for run, put_off in zip(runs, [0, *[WINDOW] * len(runs)], strict=False):
        places = {number: i for i, number in enumerate(sorted(order))}
        for number, seconds in zip(order, run.times, strict=False):
            if number in hostile and places[number] >= put_off:
                begin = run.times[max(0, places[number] - WINDOW - 1 - put_off)]
                measured.append(((seconds - begin) / run.slowness, hostile[number].name))
        order = order[len(run.times) :]
    print(f"slowness {[run.slowness for run in runs]}, the slowest: {sorted(measured)[-8:]}")
    assert max(measured)[0] < SECONDS, max(measured)


@dataclass
class Bench:
    """A model, and what good requests get and take on it."""

    model: Path
    llm: LLM
    good_megabytes: float
    layout: Layout

    def calm(self, folder: Path, cases: Sequence[Case]) -> dict[int, bytes]:
        """The good lines' records without the hostile lines."""
        in_, out = folder / "calm.in", folder / "calm.out"
        if out.exists():
            return by_number(out)
        self.layout.write(in_, cases, with_hostile=False)
        self.llm.reset_prefix_cache()
        with closing(Job(in_, out)) as job:
            runner = Runner(lambda: self.llm, [str(self.model)], job.journal)
            job.write(runner.run(job.requests()), show_progress=False)
        return by_number(out)


def make_bench(model: Path, folder: Path, layout: Layout) -> Iterator[Bench]:
    in_, out = folder / "good.in", folder / "good.out"
    layout.write(in_, LIGHT[:8], with_hostile=False)
    watched = watch(command(model, in_, out), out, folder / "log")
    assert watched.status == 0, (folder / "log").read_text()
    with LLM(model, **SMALL) as llm:
        yield Bench(model, llm, watched.peak, layout)


@pytest.fixture(scope="module")
def tiny(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    layout = Layout(num_hostile=2, num_good=1, more={"max_tokens": 4})
    yield from make_bench(model_path, tmp_path_factory.mktemp("tiny"), layout)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """With fewer tokens and good lines, as they take long. With one seed, for tokens that are all
    the same ones: thousands of draws would have some so near a tie that rounding decides them."""
    layout = Layout(num_hostile=4, num_good=1, more={"max_tokens": 2, "seed": 7})
    yield from make_bench(fetch_smollm2(), tmp_path_factory.mktemp("real"), layout)


def run_among_good_lines(
    bench: Bench, cases: Sequence[Case], folder: Path, name: str, kills: Sequence[int] = ()
) -> None:
    """Runs a job, which is killed after each of so many records (``watch``), to its end."""
    in_, out, log = folder / "in", folder / name, folder / "log"
    hostile = bench.layout.write(in_, cases)
    trust = ["--trust-request-chat-template"] if cases[0] in TRUSTED else []
    job = command(bench.model, in_, out, *trust)
    runs = [watch(job, out, log, kill_after) for kill_after in kills]
    assert all(run.status == -signal.SIGKILL for run in runs), log.read_text()[-5000:]
    runs.append(watch(job, out, log))
    assert runs[-1].status in (0, SOME_FAILED), log.read_text()[-5000:]
    check_records(out, hostile, bench.calm(folder, cases))
    check_times(runs, out, hostile)
    assert max(run.peak for run in runs) < bench.good_megabytes + MEGABYTES
    has_errors = any(json.loads(record)["error"] for record in by_number(out).values())
    assert runs[-1].status == (SOME_FAILED if has_errors else 0)


def at_random(what: str, cases: Sequence[Case]) -> int:
    """After how many records to kill a job: its process, or all of its group."""
    rng = random.Random(f"{SEED} {what}")
    kill_after = rng.choice([-1, 1]) * rng.randint(1, len(cases))
    print(f"seed {SEED}: killed after {kill_after} records")
    return kill_after


def of_part(part: str) -> list[Case]:
    return [case for case in [*CASES, *TRUSTED] if case.group in PARTS[part]]


def test_hostile_lines_change_no_other_and_have_one_record(tiny, tmp_path):
    """One in 24 of the cases, in a job that is killed on its way; the slow tests run one in 8, and
    exhaustive ones all, also on a real model without a kill and through the library."""
    cases = LIGHT[SEED % 24 :: 24]
    run_among_good_lines(tiny, cases, tmp_path, "killed", [at_random("some", cases)])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "share",
    [
        pytest.param(8, id="one in 8", marks=pytest.mark.slow),
        pytest.param(1, id="all", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("part", PARTS)
def test_hostile_lines_on_a_tiny_model(part, share, tiny, tmp_path):
    """In a job that is killed on its way."""
    cases = of_part(part)[SEED % share :: share]
    run_among_good_lines(tiny, cases, tmp_path, "killed", [at_random(part, cases)])


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", PARTS)
def test_hostile_lines_on_a_real_model(part, real, tmp_path):
    """In a job that nothing interrupts."""
    cases = [case for case in of_part(part) if case.name not in MUCH_WORK]
    run_among_good_lines(real, cases, tmp_path, "out")


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


def computed_seconds() -> float:
    """Of this process, of those that it has, and of those that it has had."""
    seconds = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            seconds += sum(process.cpu_times()[:4])
    return seconds


def check_calls(llm: LLM, cases: Sequence[Case]) -> None:
    """Among good ones, in both ways to ask for them."""
    seconds = SECONDS * slowness() * max(1, len(cases) / 10)
    start = computed_seconds()
    calls = all_calls(llm, cases)
    assert computed_seconds() - start < seconds
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
    before = _peak(os.getpid())
    between = [call for _, *call in calls]
    expected = [what_is_said(output) for output in through_generate(llm, GOOD_CALLS)]
    for run in (through_generate, through_add_request):
        start = computed_seconds()
        outputs = run(llm, [*GOOD_CALLS, *between, *GOOD_CALLS])
        assert computed_seconds() - start < seconds
        num_good = len(GOOD_CALLS)
        for good in (outputs[:num_good], outputs[-num_good:]):
            assert [what_is_said(output) for output in good] == expected
        for (case, *_), output in zip(calls, outputs[num_good:-num_good], strict=True):
            if case.expected == RESULT:
                assert output is not None and not is_error(output), case.name
        check_idle(llm)
    assert _peak(os.getpid()) - before < MEGABYTES


def test_hostile_calls_change_no_other(tiny):
    check_calls(tiny.llm, LIGHT[SEED % 16 :: 16])


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


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", PARTS)
def test_hostile_calls_of_each_kind(part, tiny):
    cases = of_part(part)
    light = [case for case in cases if not case.is_heavy]
    heavy = [[case] for case in cases if case.is_heavy]
    for some in filter(None, [light, *heavy]):
        check_calls(tiny.llm, some)


# Files of a checkpoint.


def try_files(folder: Path, prompt: Any, answer: Any) -> None:
    """In a process of its own: whether an engine starts on these files and runs the prompt."""
    seconds = round(SECONDS * slowness())
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
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
    process = FORKSERVER.Process(target=try_files, args=(folder, prompt, answer))
    process.start()
    process.join(10 * SECONDS)  # where it sleeps: while it computes, it has a limit of its own
    process.kill()
    process.join()
    assert process.exitcode == 0, "it ran into its limit of time" if process.exitcode == -9 else ""
    outcome, megabytes = receive.recv()
    assert megabytes < MEGABYTES
    assert expected in (EITHER, outcome)
