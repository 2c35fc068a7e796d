"""What test_workers.py does to engines of several ranks.

Each scenario runs in a process of its own, forked from one that has imported everything: a
quarter of the time that a fresh one takes. Lines on stdin name a scenario and its folder; the
answers are the process id and, at its end, the wait status.
"""

import atexit
import faulthandler
import gc
import os
import pickle
import signal
import stat
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanovllm import LLM, SamplingParams
from nanovllm.engine import kv_cache, startup, tensor_parallel
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.tensor_parallel import run_worker
from nanovllm.engine.workers import Worker, WorkerError, Workers

SMALL: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 100,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 16,
}
PROMPTS = [[1, 2, 3], [400, 7] * 10, list(range(50, 90))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DEADLINE_S = 15


# Where things are left: all processes of a session, and what those have open.


def processes_of(session: int, zombies: bool = False, tracker: bool = False) -> list[int]:
    """All but this one; also zombies that this one should have reaped, and the tracker of shared
    memory that the standard library starts."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, _, its_session = (entry / "stat").read_text().split(") ")[-1].split()[:4]
            command = (entry / "cmdline").read_text()
        except OSError:
            continue
        counts = zombies and int(parent) == os.getpid() if state == "Z" else True
        if not tracker and "resource_tracker" in command:
            counts = False
        if counts and int(its_session) == session and entry.name != str(os.getpid()):
            found.append(int(entry.name))
    return found


def named_memory_of(session: int) -> set[str]:
    """Shared memory and semaphores that a killed process would leave behind by their names; of this
    process and all others of its session."""
    found = set()
    for pid in (os.getpid(), *processes_of(session, tracker=True)):
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= {line.split()[5] for line in lines if "/dev/shm/" in line and "(del" not in line}
    return found


def temporary_files() -> list[str]:
    """In this scenario's own folder for them."""
    return os.listdir(tempfile.gettempdir())


def listening_ports_of(pid: int) -> list[str]:
    """Addresses on which a process waits for connections."""
    sockets = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(fd))
        except FileNotFoundError:
            continue
    rows = [
        row.split()
        for kind in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


class WatchedWorkers(Workers):
    """Looks at what the ranks share while they start."""

    def barrier(self) -> None:
        super().barrier()
        assert not named_memory_of(os.getsid(0))
        assert not temporary_files()

    @contextmanager
    def open_store(self) -> Iterator[dist.Store]:
        with super().open_store() as store:
            yield store
            (name,) = temporary_files()
            status = os.stat(os.path.join(tempfile.gettempdir(), name))
            assert stat.S_IMODE(status.st_mode) == 0o700
            assert status.st_uid == os.getuid()


def make(
    folder: Path, size: int = 2, model: str = "qwen3", workers: Any = WatchedWorkers, **kwargs: Any
) -> LLM:
    tensor_parallel.Workers = workers  # type: ignore[misc]
    llm = LLM(folder.parent / model, tensor_parallel_size=size, **{**SMALL, **kwargs})
    assert len(processes_of(os.getsid(0))) >= size - 1
    assert not named_memory_of(os.getsid(0))
    assert not temporary_files()
    ports = listening_ports_of(os.getpid())
    assert all(port.startswith("0100007F:") for port in ports), f"open to other hosts: {ports}"
    return llm


def check_nothing_left() -> None:
    """By now, or within a second."""
    end = time.monotonic() + 1
    while True:
        gc.collect()
        left = {
            "processes": processes_of(os.getsid(0), zombies=True),
            "files": temporary_files(),
            "ports": listening_ports_of(os.getpid()),
        }
        if not any(left.values()):
            print("left: 0 processes, 0 files, 0 ports")
            return
        assert time.monotonic() < end, left
        time.sleep(0.02)


@contextmanager
def deadline(what: str, seconds: float = DEADLINE_S) -> Iterator[None]:
    """A hang ends the process and shows where it was."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    start = time.monotonic()
    yield
    faulthandler.cancel_dump_traceback_later()
    print(f"{what}: {time.monotonic() - start:.2f} s", flush=True)


def tokens(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def expected_tokens(folder: Path) -> list[list[int]]:
    with LLM(folder.parent / "qwen3", **SMALL) as llm:
        return tokens(llm)


def worker_of(llm: LLM, rank: int = 1) -> int:
    pid = llm.model_runner.link._state.processes[rank - 1].pid
    assert pid is not None
    return pid


def fails(call: Callable[[], Any], *parts: str, error: type[BaseException] = WorkerError) -> str:
    """Makes a call that has to fail with all of these in its message."""
    try:
        call()
    except BaseException as raised:
        assert type(raised) is error, repr(raised)
        message = str(raised)
    else:
        raise AssertionError("it does not fail")
    for part in parts:
        assert part in message, message
    return message


def in_the_middle(llm: LLM, step: int, action: Callable[[], None]) -> None:
    """Does something between two layers of rank 0's forward pass of a step, once."""
    steps = iter(range(step + 1))

    def hook(*args: Any) -> None:
        if next(steps, None) == step:
            action()

    llm.model_runner.model.model.layers[1].register_forward_pre_hook(hook)


def fail_dead(llm: LLM, *parts: str) -> None:
    """The first call fails, and every other, at once; then nothing is left."""
    with deadline("error"):
        fails(lambda: tokens(llm), *parts)
    with deadline("again", 1):
        fails(lambda: tokens(llm), *parts)
    with deadline("end of the workers", 2):
        while processes_of(os.getsid(0)):
            time.sleep(0.01)
    with deadline("close", 2):
        llm.close()
    check_nothing_left()


# Scenarios: a worker dies.


def worker_killed_while_idle(folder: Path) -> None:
    llm = make(folder)
    os.kill(worker_of(llm), signal.SIGKILL)
    fail_dead(llm, "rank 1 failed", "Killed")


def worker_killed_during_a_prefill(folder: Path) -> None:
    llm = make(folder)
    in_the_middle(llm, 0, lambda: os.kill(worker_of(llm), signal.SIGKILL))
    fail_dead(llm, "rank 1 failed", "Killed")


def one_of_three_workers_killed_during_a_decode(folder: Path) -> None:
    """After it, the others fail too: the error names the one that was first."""
    expected = expected_tokens(folder)
    llm = make(folder, 4)
    assert tokens(llm) == expected
    in_the_middle(llm, 4, lambda: os.kill(worker_of(llm, 2), signal.SIGKILL))
    fail_dead(llm, "rank 2 failed", "Killed")


# Scenarios: a worker raises. What it runs instead of run_worker is found by its name.


def raises_in_a_step(worker: Worker, *args: Any) -> None:
    steps, run_step = iter(range(99)), ModelRunner.run_step

    def failing(self: ModelRunner, *args: Any) -> Any:
        return run_step(self, *args) if next(steps) < 3 else {}["the third step"]

    ModelRunner.run_step = failing  # type: ignore[method-assign]
    run_worker(worker, *args)


def raises_in_loading(worker: Worker, *args: Any) -> None:
    def failing(*args: Any) -> None:
        raise OSError("no such shard")

    startup.load_model = failing
    run_worker(worker, *args)


def leaves_before_meeting(worker: Worker, *args: Any) -> None:
    tensor_parallel.make_tp_group = lambda *args: os._exit(7)
    run_worker(worker, *args)


def raises_after_meeting(worker: Worker, *args: Any) -> None:
    def failing(*args: Any) -> int:
        raise MemoryError("no room")

    kv_cache.measure_kv_cache = failing
    run_worker(worker, *args)


def an_exception_in_a_step(folder: Path) -> None:
    tensor_parallel.run_worker = raises_in_a_step
    llm = make(folder)
    fail_dead(llm, "rank 1 failed: KeyError: 'the third step'", "Traceback", "in raises_in_a_step")


def _fails_to_start(folder: Path, target: Any, *parts: str, **kwargs: Any) -> None:
    tensor_parallel.run_worker = target
    with deadline("error, start included"):
        fails(lambda: make(folder, **kwargs), "rank 1 failed", *parts)
    check_nothing_left()


def a_load_that_fails(folder: Path) -> None:
    parts = ("OSError: no such shard", "Traceback", "in load_weights")
    _fails_to_start(folder, raises_in_loading, *parts)


def a_worker_that_never_meets_the_others(folder: Path) -> None:
    _fails_to_start(folder, leaves_before_meeting, "exit code 7")


def a_cache_that_does_not_fit(folder: Path) -> None:
    """While rank 0 waits for it in a collective."""
    parts = ("MemoryError: no room", "Traceback")
    _fails_to_start(folder, raises_after_meeting, *parts, num_kvcache_blocks=-1)


# Scenarios: rank 0 fails, or is interrupted.


def an_exception_on_rank_0(folder: Path) -> None:
    """Out of step with the others it is final; elsewhere it is as with one rank."""
    expected = expected_tokens(folder)
    llm = make(folder)
    with deadline("errors"):
        for method in ("prepare", "wait"):
            setattr(llm.model_runner, method, lambda *args: 1 / 0)
            fails(lambda: tokens(llm), error=ZeroDivisionError)
            delattr(llm.model_runner, method)
        assert tokens(llm) == expected
        in_the_middle(llm, 2, lambda: {}["a layer"])
        fails(lambda: tokens(llm), error=KeyError)
    fail_dead(llm, "rank 0 failed: KeyError: 'a layer'")


def interrupts(folder: Path) -> None:
    """A terminal's Ctrl-C, which every process of the group gets: between layers, in sampling, at
    any time; and in the middle of a start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # fork keeps a shell's "ignore"
    expected = expected_tokens(folder)

    def interrupt() -> None:
        os.killpg(0, signal.SIGINT)

    load_weights = startup.load_weights
    startup.load_weights = lambda runner, _: runner.tp.rank == 0 and interrupt()
    with deadline("interrupted start"):
        fails(lambda: make(folder), error=KeyboardInterrupt)
    startup.load_weights = load_weights
    check_nothing_left()
    llm = make(folder)
    worker = worker_of(llm)

    def interrupted(call: Callable[[], Any]) -> None:
        fails(call, error=KeyboardInterrupt)
        assert not llm.requests
        assert tokens(llm) == expected

    with deadline("interrupts"):
        for step in (0, 3):
            in_the_middle(llm, step, interrupt)
            interrupted(lambda: tokens(llm))
        handle = llm.model_runner.sampler.register_forward_pre_hook(
            lambda *args: handle.remove() or interrupt()
        )
        interrupted(lambda: tokens(llm))
    num_interrupts = 0
    for delay in torch.linspace(0.001, 0.08, 8).tolist():
        timer = threading.Timer(delay, interrupt)
        with deadline("an interrupt at any time"):
            try:
                timer.start()
                end = time.monotonic() + 2
                while time.monotonic() < end:
                    tokens(llm)
            except KeyboardInterrupt:
                num_interrupts += 1
            assert tokens(llm) == expected
    assert num_interrupts >= 6, "Python drops one that lands inside a __del__"
    assert worker_of(llm) == worker
    llm.close()
    check_nothing_left()


def killed(folder: Path, number: int = signal.SIGKILL) -> None:
    """Rank 0 in the middle of a step. Another child that lives on keeps its pipes open."""
    llm = make(folder)
    sibling = os.fork()
    if sibling == 0:
        time.sleep(60)
        os._exit(0)
    (folder / "sibling").write_text(str(sibling))
    in_the_middle(llm, 3, lambda: os.kill(os.getpid(), number))
    with deadline("end"):
        tokens(llm)


def terminated(folder: Path) -> None:
    killed(folder, signal.SIGTERM)


def all_killed(folder: Path) -> None:
    """Rank 0, workers and the standard library's resource tracker: nobody is left to tidy up."""
    llm = make(folder)
    tokens(llm)
    assert len(listening_ports_of(os.getpid())) == 1, "gloo's own; the store has none"
    os.killpg(0, signal.SIGKILL)


class KilledWorkers(WatchedWorkers):
    def barrier(self) -> None:
        os.killpg(0, signal.SIGKILL)


def all_killed_while_starting(folder: Path) -> None:
    make(folder, workers=KilledWorkers)


def names_that_others_have_taken(folder: Path) -> None:
    """A folder that is there already is neither used nor removed, whoever foresaw its name."""
    taken = Path(tempfile.gettempdir(), "nanovllm-foreseen")
    taken.mkdir()
    (taken / "store").write_text("not a store")
    names = tempfile._get_candidate_names  # type: ignore[attr-defined]
    tempfile._get_candidate_names = lambda: iter(["foreseen", "free"])  # type: ignore[attr-defined]
    with LLM(folder.parent / "qwen3", tensor_parallel_size=2, **SMALL) as llm:
        tempfile._get_candidate_names = names  # type: ignore[attr-defined]
        assert tokens(llm) == expected_tokens(folder)
    assert (taken / "store").read_text() == "not a store"
    (taken / "store").unlink()
    taken.rmdir()
    check_nothing_left()


def a_worker_that_reads_no_calls(folder: Path) -> None:
    """Guards a rank 0 that waits for ever to write its last call into a full pipe."""
    llm = make(folder)
    os.kill(worker_of(llm), signal.SIGSTOP)
    (pipe,) = llm.model_runner.link._state.pipes
    os.set_blocking(pipe.fileno(), False)
    try:
        while True:
            os.write(pipe.fileno(), bytes(1000))
    except BlockingIOError:
        os.set_blocking(pipe.fileno(), True)
    with deadline("close", 8):
        llm.close()
    check_nothing_left()


# Scenarios: the program forks.


def forked_children(folder: Path) -> None:
    """A forked child that ended took its parent's workers along, and hung. Here children end, or
    close or drop their copy of the engine first; one forks amid a stream."""
    expected = expected_tokens(folder)
    llm = make(folder)
    workers = llm.model_runner.link._state.processes
    stream = llm.generate_stream(PROMPTS, GREEDY)
    next(stream)

    def generates() -> None:
        stream.close()
        fails(lambda: tokens(llm), "forked child", error=ValueError)
        torch.set_num_threads(2)
        fails(lambda: make(folder), "PyTorch's threads", "spawn", error=ValueError)
        fails(lambda: pickle.dumps(llm), "cannot be pickled", error=TypeError)

    def closes() -> None:
        llm.close()

    def deletes() -> None:
        nonlocal llm, stream
        del llm, stream
        gc.collect()

    for action in (generates, closes, deletes):
        pid = os.fork()
        if pid == 0:
            signal.alarm(DEADLINE_S - 3)
            action()
            sys.exit(0)
        with deadline(action.__name__):
            _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert all(worker.exitcode is None for worker in workers)
    last = {output.request_id: output.outputs[0].token_ids for output in stream}
    assert sorted(last.values()) == sorted(expected)
    assert tokens(llm) == expected
    llm.close()
    check_nothing_left()


# Scenarios: engines come and go.


def two_engines_at_once(folder: Path) -> None:
    """Their steps in turn; one loses its worker, the other goes on; a third takes its place."""
    expected = expected_tokens(folder)
    with LLM(folder.parent / "llama", **SMALL) as one:
        expected_of_other = tokens(one)
    llm, other = make(folder), make(folder, model="llama")
    both = {llm: expected, other: expected_of_other}
    with deadline("in turn"):
        ids = {engine: [engine.add_request(p, GREEDY) for p in PROMPTS] for engine in both}
        results: dict[LLM, dict[str, list[int]]] = {llm: {}, other: {}}
        while not all(engine.is_finished() for engine in both):
            for engine, result in results.items():
                done = engine.step()
                result.update({out.request_id: out.outputs[0].token_ids for out in done})
        for engine, result in results.items():
            assert [result[i] for i in ids[engine]] == both[engine]
    in_the_middle(other, 2, lambda: os.kill(worker_of(other), signal.SIGKILL))
    with deadline("one dies"):
        fails(lambda: tokens(other), "rank 1 failed")
        assert tokens(llm) == expected
        other.close()
        assert tokens(llm) == expected
    with make(folder, model="llama") as third, deadline("a third"):
        assert tokens(third) == expected_of_other
        assert tokens(llm) == expected
    llm.close()
    del results, both, ids, engine
    check_nothing_left()


def deleted(folder: Path) -> None:
    llm = make(folder)
    tokens(llm)
    runner = llm.model_runner
    things = [runner, runner.link, runner.kv_cache, *runner.model.parameters()]
    watched = [weakref.ref(thing) for thing in things]
    del runner, things
    with deadline("del", 5):
        del llm
    gc.collect()
    assert not [ref for ref in watched if ref() is not None]
    check_nothing_left()


def never_closed(folder: Path) -> None:
    """Nor ever collected before the interpreter ends."""
    llm = make(folder)
    tokens(llm)
    sys.never_closed = [llm]  # type: ignore[attr-defined]
    atexit.register(faulthandler.cancel_dump_traceback_later)
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)


def engines_one_after_the_other(folder: Path) -> None:
    """Guards what outlives an engine: files, threads, state that the next one trips over."""
    expected, open_after = None, []
    for _ in range(8):
        start = time.monotonic()
        with make(folder) as llm:
            ready = time.monotonic()
            expected = expected or tokens(llm)
            assert tokens(llm) == expected
            closing = time.monotonic()
        print(f"start {ready - start:.2f} s, close {time.monotonic() - closing:.2f} s")
        del llm
        check_nothing_left()
        open_after.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    print("open files and threads:", open_after)
    assert open_after[-1] <= open_after[1]


SCENARIOS: dict[str, Callable[[Path], None]] = {
    f.__name__: f
    for f in (
        worker_killed_while_idle,
        worker_killed_during_a_prefill,
        one_of_three_workers_killed_during_a_decode,
        an_exception_in_a_step,
        a_load_that_fails,
        a_worker_that_never_meets_the_others,
        a_cache_that_does_not_fit,
        an_exception_on_rank_0,
        interrupts,
        killed,
        terminated,
        all_killed,
        all_killed_while_starting,
        names_that_others_have_taken,
        a_worker_that_reads_no_calls,
        forked_children,
        two_engines_at_once,
        deleted,
        never_closed,
        engines_one_after_the_other,
    )
}


def serve() -> None:
    """Forks a process for each line; returns in it, when its scenario is over."""
    torch.set_num_threads(1)
    gc.freeze()  # closing an engine collects garbage, and would copy what the forks share
    for line in sys.stdin:
        name, folder = line.split()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.umask(0)
            log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT)
            for fd in (1, 2):
                os.dup2(log, fd)
            tempfile.tempdir = os.environ["TMPDIR"] = f"{folder}/tmp"
            os.mkdir(tempfile.tempdir)
            SCENARIOS[name](Path(folder))
            print("done", flush=True)
            return
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


if __name__ == "__main__":
    serve()
