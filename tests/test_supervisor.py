"""Jobs whose process dies: what was under way is found out, and costs nobody else anything."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.llm import LLM
from nanovllm.run_batch import runner, supervisor
from nanovllm.run_batch.journal import Journal, note_death
from nanovllm.run_batch.supervisor import INTERNAL_ERROR, INTERRUPTED, journal_path, supervise
from tests.test_run_batch import (
    ALL_DONE,
    SOME_FAILED,
    Jobs,
    arguments,
    by_id,
    jobs,
    long_lines,
    read_output,
    request,
    running,
    wait_until,
    write_input,
)

__all__ = ["jobs"]  # the fixture
POISON = "poison"
NUM_LINES = 40


# What ends a process, or keeps it from ending. Each is called in the process above the job's.


def on_poison(action: Callable[[], None]) -> None:
    """Does something in each step in which the engine has the poisonous prompt."""
    add_request, step, held = LLM.add_request, LLM.step, set()

    def add(self: LLM, prompt: Any, *args: Any, **options: Any) -> str:
        request_id = add_request(self, prompt, *args, **options)
        if POISON in str(prompt):
            held.add(request_id)
        return request_id

    def do(self: LLM) -> Any:
        if held:
            action()
        return step(self)

    LLM.add_request, LLM.step = add, do  # type: ignore[method-assign, assignment]


def die(number: int) -> None:
    signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
    os.kill(os.getpid(), number)


def crash_in_step() -> None:
    on_poison(partial(die, signal.SIGSEGV))


def be_killed_in_step() -> None:
    """As by the kernel, for want of memory."""
    on_poison(partial(die, signal.SIGKILL))


def exit_in_step() -> None:
    """As a library may, that is not asked to."""
    on_poison(partial(os._exit, 0))


def crash_when_prepared() -> None:
    read_body = runner.read_body

    def read(found: Any, *args: Any) -> Any:
        if POISON in str(found.body):
            die(signal.SIGABRT)
        return read_body(found, *args)

    runner.read_body = read


def all_be_killed() -> None:
    """With the process above, as where a container goes whole."""
    parent = os.getpid()

    def kill() -> None:
        os.kill(parent, signal.SIGKILL)
        time.sleep(1000)

    on_poison(kill)


def crash_at_start() -> None:
    from nanovllm.run_batch import cli

    cli.Job = lambda *args, **options: die(signal.SIGSEGV)  # type: ignore[misc, assignment]


def hang_in_step() -> None:
    """As native code that never returns: no handler of Python's runs any more."""

    def hang() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        print("hanging", flush=True)
        time.sleep(1000)

    supervisor.MARGIN_SECONDS = 1.0
    on_poison(hang)


def lines_with(num: int, *poisonous: int) -> list[Any]:
    items = [request(str(i), prompt="x y z"[: i % 5 + 1], max_tokens=i % 7 + 1) for i in range(num)]
    for i in poisonous:
        items[i]["body"]["prompt"] = POISON
    return items


@pytest.fixture(scope="module")
def expected(jobs: Jobs, model_path: Path, tmp_path_factory) -> dict[str, Any]:
    """The records of the lines that do not end the process."""
    folder = tmp_path_factory.mktemp("calm")
    in_ = write_input(folder / "in", lines_with(NUM_LINES, 9, 25))
    args = arguments(model_path, in_, folder / "out")
    assert jobs.run(args, folder / "log") == ALL_DONE
    records = by_id(read_output(folder / "out"))
    return {k: v for k, v in records.items() if v["custom_id"] not in ("9", "25")}


def check_blamed(out: Path, expected: dict[str, Any]) -> None:
    """The poisonous lines have error records, the others what they always have; no journal is
    left."""
    records = by_id(read_output(out))
    assert len(records) == NUM_LINES
    for number in (10, 26):
        error = records.pop(f"batch_req_{number}")["error"]
        assert error["code"] == "process_died"
        assert "died 3 times while running this request" in error["message"]
    assert records == expected
    assert not journal_path(out).exists()


@pytest.mark.parametrize(
    "sabotage, cause",
    [
        (crash_in_step, "Segmentation fault"),
        pytest.param(be_killed_in_step, "Killed", marks=pytest.mark.slow),
        pytest.param(exit_in_step, "exit status 0", marks=pytest.mark.slow),
        pytest.param(crash_when_prepared, "Aborted", marks=pytest.mark.slow),
    ],
)
def test_a_request_that_ends_the_process_fails_alone(
    jobs: Jobs, model_path: Path, tmp_path: Path, expected, sabotage, cause
):
    in_, out, log = tmp_path / "in", tmp_path / "out", tmp_path / "log"
    write_input(in_, lines_with(NUM_LINES, 9, 25))
    name = f"{__name__}:{sabotage.__name__}"
    assert jobs.run(arguments(model_path, in_, out), log, name) == SOME_FAILED, log.read_text()
    check_blamed(out, expected)
    deaths = re.findall(r"the process died \((.*)\) with (\d+) requests in flight", log.read_text())
    assert {found for found, _ in deaths} == {cause}
    assert 3 <= len(deaths) <= 6
    assert deaths[-1][1] == "1"  # it was alone


def test_a_request_with_which_everything_is_killed_fails_in_the_end(
    jobs: Jobs, model_path: Path, tmp_path: Path, expected
):
    in_, out, log = tmp_path / "in", tmp_path / "out", tmp_path / "log"
    write_input(in_, lines_with(NUM_LINES, 9, 25))
    args = arguments(model_path, in_, out)
    for _ in range(20):
        status = jobs.run(args, log, f"{__name__}:all_be_killed")
        if status != -signal.SIGKILL:
            break
    assert status == SOME_FAILED, log.read_text()
    check_blamed(out, expected)


def test_a_process_that_dies_without_a_request_ends_the_job(
    jobs: Jobs, model_path: Path, tmp_path: Path
):
    in_, out, log = tmp_path / "in", tmp_path / "out", tmp_path / "log"
    write_input(in_, lines_with(3))
    args = arguments(model_path, in_, out)
    assert jobs.run(args, log, f"{__name__}:crash_at_start") == INTERNAL_ERROR
    assert log.read_text() == (
        "run_batch: the process died (Segmentation fault) with no known request in flight; run "
        "the same command again to resume\n"
    )
    assert jobs.run(args, log) == ALL_DONE


def test_a_job_that_hears_no_signal_ends_soon_after_its_grace(
    jobs: Jobs, model_path: Path, tmp_path: Path
):
    items = lines_with(60, 59)  # more than a job has under way
    in_, out, log = write_input(tmp_path / "in", items), tmp_path / "out", tmp_path / "log"
    args = arguments(model_path, in_, out, "--grace=0")
    with running(jobs, args, out, log, f"{__name__}:hang_in_step") as pid:
        wait_until(lambda: "hanging" in log.read_text())
        os.kill(pid, signal.SIGTERM)
        assert jobs.wait(pid, 15) == INTERRUPTED
    assert "the job did not end within 1 s and is killed" in log.read_text()
    assert jobs.run(args, log) == ALL_DONE
    assert len(by_id(read_output(out))) == len(items)


def state_of(log: Path) -> str:
    """The state of the job's process, as one letter."""
    (pid,) = re.findall(r"child (\d+)", log.read_text())
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def tell_pid() -> None:
    def tell() -> None:
        if not told:
            told.append(True)
            print("child", os.getpid(), flush=True)

    told: list[bool] = []
    on_poison(tell)


def test_a_job_that_is_suspended_goes_on(jobs: Jobs, model_path: Path, tmp_path: Path):
    items = long_lines()
    items[1]["body"]["prompt"] = POISON
    in_, out, log = write_input(tmp_path / "in", items), tmp_path / "out", tmp_path / "log"
    args = arguments(model_path, in_, out)
    with running(jobs, args, out, log, f"{__name__}:tell_pid") as pid:
        wait_until(lambda: "child" in log.read_text())
        os.kill(pid, signal.SIGTSTP)
        wait_until(lambda: state_of(log) == "T")
        os.kill(pid, signal.SIGCONT)
        assert jobs.wait(pid) == ALL_DONE
    assert len(by_id(read_output(out))) == len(items)


def test_the_process_above_a_job_is_small():
    code = (
        "import sys, os, nanovllm.run_batch.supervisor\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)\n"
        "assert not os.path.exists('/proc/self/task') or len(os.listdir('/proc/self/task')) == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_wrong_command_line_is_left_to_the_job():
    for argv in (["--grace=soon"], ["-o"]):
        assert supervise(lambda: 2, argv) == 2


def run_supervised(setup: str) -> subprocess.CompletedProcess[str]:
    """Runs a job that does nothing, in a program that first executes ``setup``."""
    code = f"""
import os, signal, sys
from nanovllm.run_batch.supervisor import supervise
{setup}
sys.exit(supervise(lambda: 0, []))
"""
    args = [sys.executable, "-c", code]
    return subprocess.run(args, check=False, capture_output=True, text=True, timeout=60)


def test_the_end_of_a_process_is_noticed_where_signals_without_a_handler_are_dropped():
    """As on macOS."""
    setup = """
def sigwait(signals, wait=signal.sigwait):
    return wait({n for n in signals if n != signal.SIGCHLD or callable(signal.getsignal(n))})
signal.sigwait = sigwait
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
"""
    assert run_supervised(setup).returncode == ALL_DONE


def test_a_process_that_cannot_be_started_ends_the_job():
    setup = """
def fork():
    raise BlockingIOError(11, "no more processes")
os.fork = fork
"""
    ended = run_supervised(setup)
    assert ended.returncode == INTERRUPTED
    assert ended.stderr == (
        "run_batch: error: cannot start a process: [Errno 11] no more processes; when that is "
        "fixed, run the same command again to resume\n"
    )


# The journal.

DIGESTS = [f"{i:032x}" for i in range(6)]
OPERATION = st.one_of(
    st.tuples(st.just("begin"), st.sampled_from(DIGESTS)),
    st.tuples(st.just("end"), st.sampled_from(DIGESTS)),
    st.just(("die", None)),  # and whoever watches notes it
    st.tuples(st.just("kill"), st.booleans()),  # with records or not
    st.just(("close", None)),
)


@given(operations=st.lists(OPERATION, max_size=40))
def test_deaths_count_against_what_was_under_way(tmp_path_factory, operations):
    """Against a plain model of it."""
    path = tmp_path_factory.mktemp("journal") / "journal"
    num_records = 0
    deaths = dict.fromkeys(DIGESTS, 0)
    under_way: set[str] = set()
    journal = Journal(path, num_records)
    for name, argument in operations:
        if name == "begin":
            journal.begin(argument)
            under_way.add(argument)
        elif name == "end":
            journal.end(argument)  # or, where two lines have one digest, once more
            under_way.discard(argument)
        else:
            counts = False
            if name == "die":
                assert note_death(path, os.getpid()) == len(under_way)
                counts = True
            elif name == "kill":
                num_records += argument
                counts = not argument
            else:
                journal.close(is_done=False)
                assert path.exists() == any(deaths.values())
                under_way = set()
            for digest in under_way:
                deaths[digest] = min(9, deaths[digest] + counts)
            under_way = set()
            journal = Journal(path, num_records)
        assert {digest: journal.num_deaths(digest) for digest in DIGESTS} == deaths
    journal.close(is_done=True)
    assert not path.exists()


def test_a_journal_that_is_cut_off_or_foreign_is_read_as_far_as_it_goes(tmp_path: Path):
    path = tmp_path / "journal"
    journal = Journal(path, 0)
    for digest in DIGESTS:
        journal.begin(digest)
    text = path.read_bytes()
    for cut in range(len(text)):
        path.write_bytes(text[:cut])
        if 0 < cut < 37:
            with pytest.raises(ValueError, match="is not a job's journal"):
                Journal(path, 0)
            continue
        found = Journal(path, 0)
        num_whole = max(0, cut // 37 - 1)
        assert [found.num_deaths(digest) for digest in DIGESTS] == [1] * num_whole + [0] * (
            len(DIGESTS) - num_whole
        )


@pytest.mark.parametrize("text", [b"\0\xff anything\n" * 10, b"thesis", b"\n", b"1" * 37])
def test_a_file_that_is_no_journal_is_kept(tmp_path: Path, text):
    path = tmp_path / "journal"
    path.write_bytes(text)
    for read in (partial(Journal, path, 0), partial(note_death, path, 0)):
        with pytest.raises(ValueError, match="is not a job's journal"):
            read()
    assert path.read_bytes() == text
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError):
        Journal(tmp_path / "link", 0)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="not a regular file"):
        Journal(tmp_path / "fifo", 0)


def test_deaths_of_another_process_count_for_nothing(tmp_path: Path):
    path = tmp_path / "journal"
    journal = Journal(path, 0)
    journal.begin(DIGESTS[0])
    assert note_death(path, os.getpid() + 1) == 0
    assert note_death(path, os.getpid()) == 1


def test_what_has_its_record_is_forgotten(tmp_path: Path):
    path = tmp_path / "journal"
    for _ in range(2):
        Journal(path, 0).begin(DIGESTS[0])
    journal = Journal(path, 0)
    assert journal.num_deaths(DIGESTS[0]) == 2
    journal.forget(DIGESTS[0])
    assert Journal(path, 0).num_deaths(DIGESTS[0]) == 0
