"""A process with limits: every question has its answer or its reason, and nothing is left."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import psutil
import pytest

from nanovllm.text import limited_process
from nanovllm.text.limited_process import LimitedProcess, ProcessError

MODULE = """
import os, signal, sys, time

def handle(request):
    word, _, rest = request.partition(b" ")
    if word == b"echo":
        return rest
    if word == b"pid":
        return str(os.getpid()).encode()
    if word == b"repeat":
        return b"x" * int(rest)
    if word == b"loop":
        while True:
            pass
    if word == b"power":
        return str(10**9**9).encode()
    if word == b"sleep":
        time.sleep(3600)
    if word == b"memory":
        return b"x" * (1 << 40)
    if word == b"abort":
        os.abort()
    if word == b"exit":
        os._exit(0)
    if word == b"raise":
        raise ValueError("not expected of a module")
    if word == b"write":
        open(rest, "w").write("x")
    if word == b"babble":
        os.write(1, b"\\xff" * 1000)
        return b""
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("module") / "module.py"
    path.write_text(MODULE)
    return str(path)


@pytest.fixture
def process(module):
    with_limits = LimitedProcess(module, cpu_seconds=0.3, memory_bytes=1 << 28)
    yield with_limits
    with_limits.close()


def ask(process: LimitedProcess, *questions: bytes) -> list[bytes | str]:
    """Answers, or reasons."""
    answers = process.run(list(questions))
    return [str(a) if isinstance(a, ProcessError) else bytes(a) for a in answers]


def pid_of(process: LimitedProcess) -> int:
    (pid,) = ask(process, b"pid")
    return int(pid)


def test_answers_come_in_order_whatever_their_sizes(process):
    """Guards a deadlock of two full pipes."""
    sizes = [0, 1, 10, 1 << 16, (1 << 20) + 1, 3, 1 << 22, *range(2000)]
    questions = [b"echo " + bytes([i % 256]) * size for i, size in enumerate(sizes)]
    assert ask(process, *questions) == [question[5:] for question in questions]
    assert ask(process, *(b"repeat 100000" for _ in range(200))) == [b"x" * 100_000] * 200
    assert ask(process, *(b"echo " + b"x" * 100_000 for _ in range(200))) == [b"x" * 100_000] * 200
    assert ask(process) == []


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        (b"loop", r"takes over 0.3 s"),
        (b"power", r"takes over 0.3 s|takes too much memory"),
        (b"memory", r"takes too much memory"),
        (b"abort", r"ends its process"),
        (b"exit", r"ends its process"),
        (b"raise", r"ends its process"),
        (b"repeat 200000000", r"has too long a response|takes too much memory"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_question_that_ends_the_process_has_a_reason_and_costs_no_other(
    process, question, reason
):
    before, bad, between, again, after = process.run(
        [b"echo a", question, b"echo b", question, b"echo c"]
    )
    assert (before, between, after) == (b"a", b"b", b"c")
    for answer in (bad, again):
        assert isinstance(answer, ProcessError)
        assert re.fullmatch(reason, str(answer))


def test_a_question_that_sleeps_is_given_up(process, monkeypatch):
    ask(process, b"echo a")
    monkeypatch.setattr(limited_process, "WALL_SECONDS", 0.5)
    answer, *_ = process.run([b"sleep"])
    assert isinstance(answer, ProcessError) and str(answer) == "takes over 0.5 s"
    monkeypatch.undo()
    assert ask(process, b"echo a") == [b"a"]


def test_the_limit_of_time_is_for_each_question(process):
    questions = [b"repeat 5000000"] * 80  # over 0.3 s together
    assert all(len(answer) == 5_000_000 for answer in process.run(questions))


def test_what_a_module_prints_is_no_answer(process):
    assert ask(process, b"babble", b"echo a") == [b"", b"a"]


def test_the_process_writes_no_file(process, tmp_path: Path):
    path = tmp_path / "written"
    ask(process, b"write " + str(path).encode())
    assert not path.exists() or path.stat().st_size == 0


def test_a_process_that_was_killed_between_questions_is_started_again(process):
    pid = pid_of(process)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert pid_of(process) != pid


def test_ctrl_c_while_a_question_sleeps_leaves_the_process_usable(process):
    ask(process, b"echo a")
    main = threading.main_thread().ident
    assert main is not None

    def interrupt():
        signal.pthread_kill(main, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.2, interrupt).start()
        process.run([b"sleep", *(b"echo " + bytes(1 << 16) for _ in range(20))])
    assert ask(process, b"echo b") == [b"b"]


def test_threads_take_turns(process):
    results = {}

    def work(name: int) -> None:
        questions = [f"echo {name}.{i}".encode() for i in range(300)]
        results[name] = ask(process, *questions) == [question[5:] for question in questions]

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), True)


def test_a_module_that_cannot_be_imported_is_an_error(tmp_path: Path):
    path = tmp_path / "module.py"
    path.write_text("import no_such_module")
    process = LimitedProcess(str(path), cpu_seconds=1, memory_bytes=1 << 28)
    before = set(psutil.Process().children())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"does not start: ModuleNotFoundError: .*no_such"):
            ask(process, b"echo a")
    assert set(psutil.Process().children()) <= before


def num_open_files() -> int:
    return psutil.Process().num_fds()


@pytest.mark.parametrize("how", ["close", "garbage"])
def test_nothing_is_left_of_a_process(module, how):
    gc.collect()
    before = num_open_files()
    process = LimitedProcess(module, cpu_seconds=1, memory_bytes=1 << 28)
    assert num_open_files() == before
    child = psutil.Process(pid_of(process))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if how == "close":
            process.close()
            process.close()
        del process
        gc.collect()
    assert not child.is_running()
    assert num_open_files() == before


def test_a_forked_child_leaves_the_process_alone_and_has_its_own(process):
    pid = pid_of(process)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            own = pid_of(process)
            process.close()
            os.write(writer, str(own).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    own = int(os.read(reader, 100))
    os.close(reader)
    os.close(writer)
    assert own != pid
    assert not psutil.pid_exists(own)
    assert pid_of(process) == pid


def test_a_forked_child_that_outlives_its_parent_does_not_keep_the_process(module):
    """Guards a copy of the pipe in the child, for which the process would go on waiting."""
    code = f"""
import os, signal, time
from nanovllm.text.limited_process import LimitedProcess
process = LimitedProcess({module!r}, 1, 1 << 28)
(pid,) = process.run([b"pid"])
child = os.fork()
if child == 0:
    time.sleep(3600)
print(pid.decode(), child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert command.stdout
    with command, command.stdout:
        pid, child = map(int, command.stdout.readline().split())
        command.wait(60)
        deadline = time.monotonic() + 60
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
