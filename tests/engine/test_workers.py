"""Worker processes: messages arrive whole, faults are errors within seconds, nothing is left."""

import multiprocessing as mp
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.engine import workers as workers_module
from nanovllm.engine.batch import Batch
from nanovllm.engine.model_inputs import PackedInputs, prepare_decode
from nanovllm.engine.workers import Worker, Workers
from nanovllm.utils.interrupts import interrupts_delayed
from tests.engine.worker_faults import SCENARIOS, processes_of
from tests.tiny_models import TinyModels

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def link() -> Iterator[tuple[Workers, Worker]]:
    """A worker's handle, and rank 0's handle on it, in one process."""
    ours, theirs = mp.Pipe()
    workers = Workers.__new__(Workers)
    workers._state = workers_module._State([], [ours])
    with ours, theirs:
        yield workers, Worker(1, 1, theirs)


def exchange(link: tuple[Workers, Worker], messages: list[Any]) -> list[Any]:
    """Sends messages from a thread, because pipes hold only small ones."""
    workers, worker = link
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(lambda: [workers.send(message) for message in messages])
        received = [worker.receive() for _ in messages]
        sent.result(30)
    return received


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([0, 1, 7, 1 << 16, 3 << 20]) | st.integers(0, 5000), max_size=6))
def test_workers_get_every_message_whole_and_in_order(
    link: tuple[Workers, Worker], sizes: list[int]
):
    rng = np.random.default_rng(0)
    messages = [rng.bytes(size) for size in sizes]
    assert exchange(link, messages) == messages


def test_no_other_process_can_open_the_pipe_of_calls(link: tuple[Workers, Worker]):
    """What workers read from it they unpickle."""
    (ours,) = link[0]._state.pipes
    for pipe in (ours, link[1].pipe):
        with socket.socket(fileno=os.dup(pipe.fileno())) as end:
            assert (end.family, end.getsockname()) == (socket.AF_UNIX, ""), "it has no name"
        assert not os.get_inheritable(pipe.fileno())
        with pytest.raises(OSError, match="No such device"):
            os.open(f"/proc/self/fd/{pipe.fileno()}", os.O_RDONLY)


DTYPES = [np.bool_, np.int8, np.int16, np.int32, np.int64, np.float32, np.float64]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 7), max_size=3)), max_size=5
    ),
    st.text(min_size=1),
)
def test_arrays_arrive_equal_aligned_and_writable(
    link: tuple[Workers, Worker], shapes: list[Any], method: str
):
    rng = np.random.default_rng(0)
    arrays = [np.asarray(rng.integers(0, 99, shape).astype(dtype)) for dtype, shape in shapes]
    ((name, (found, number, nothing)),) = exchange(link, [(method, (arrays, 5, None))])
    assert (name, number, nothing) == (method, 5, None)
    for array, expected in zip(found, arrays, strict=True):
        np.testing.assert_array_equal(array, expected, strict=True)
        assert array.flags.aligned
        assert array.flags.writeable or array.ndim == 0


def test_an_array_takes_little_more_than_its_bytes(link: tuple[Workers, Worker]):
    array = np.zeros(1 << 12, np.int32)
    link[0].send(("run_step", (array,)))
    assert len(link[1].pipe.recv_bytes()) < array.nbytes + 500


def test_packed_inputs_survive_the_trip(link: tuple[Workers, Worker]):
    packed = prepare_decode(Batch.of((), is_prefill=False), 4, 5).pack()
    ((_, (found,)),) = exchange(link, [("run_step", (packed,))])
    assert isinstance(found, PackedInputs)
    assert (found.tensors.shapes, found.context) == (packed.tensors.shapes, packed.context)
    assert torch.equal(found.tensors.buffer, packed.tensors.buffer)


def test_interrupts_take_effect_at_the_end_and_once():
    before = signal.getsignal(signal.SIGINT)
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_delayed():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append(True)
    assert done
    assert signal.getsignal(signal.SIGINT) is before
    with interrupts_delayed():
        pass


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *args: None])
def test_delayed_interrupts_go_to_the_programs_own_handler(handler: Any):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with interrupts_delayed():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def models(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints that the scenarios take from beside theirs."""
    root = tmp_path_factory.mktemp("faults")
    for name in ("qwen3", "llama"):
        shutil.copytree(tiny_models.path(name), root / name)
    return root


class Run:
    """A scenario under way, in a fork of a server of its own or of one shared with others."""

    def __init__(self, server: subprocess.Popen, name: str, folder: Path) -> None:
        self.server, self.name, self.folder = server, name, folder
        folder.mkdir()
        assert server.stdin is not None
        server.stdin.write(f"{name} {folder}\n".encode())
        pid = self._answer(60)
        assert pid is not None, "the server does not start"
        self.pid = pid

    def finish(self, seconds: float) -> tuple[int, str]:
        """Its exit code and log. Whatever it does, it ends, and what it left behind with it."""
        status = self._answer(seconds)
        is_stuck = status is None
        if is_stuck:
            os.killpg(self.pid, signal.SIGKILL)
            status = self._answer(10)
        assert status is not None
        start = time.monotonic()
        spared = {int(pid) for pid in self._read("sibling").split()}
        left = self._wait_until_gone(spared)
        seconds_to_end = time.monotonic() - start
        for pid in (*left, *spared):
            os.kill(pid, signal.SIGKILL)
        left += self._wait_until_gone(set(), tracker=True)
        files = list((self.folder / "tmp").iterdir())
        log = self._read("log")
        print(
            f"{log}\nleft at the end: {len(left)} processes; {len(files)} files; "
            f"the last process ended after {seconds_to_end:.2f} s"
        )
        assert not is_stuck, f"stuck\n{log}"
        assert not left, log
        assert not files, log
        return os.waitstatus_to_exitcode(status), log

    def _answer(self, seconds: float) -> int | None:
        """The number that the server says next, if it does in time."""
        assert self.server.stdout is not None
        ready, _, _ = select.select([self.server.stdout], [], [], seconds)
        return int(self.server.stdout.readline()) if ready else None

    def _wait_until_gone(self, spared: set[int], tracker: bool = False) -> list[int]:
        end = time.monotonic() + 5
        while left := [p for p in processes_of(self.pid, tracker=tracker) if p not in spared]:
            if time.monotonic() > end:
                break
            time.sleep(0.02)
        return left

    def _read(self, name: str) -> str:
        file = self.folder / name
        return file.read_text() if file.exists() else ""


@contextmanager
def serve() -> Iterator[subprocess.Popen]:
    with subprocess.Popen(
        [sys.executable, "-c", "from tests.engine.worker_faults import serve; serve()"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    ) as server:
        yield server
        server.kill()


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen]:
    with serve() as server:
        yield server


ENDS_BY_SIGNAL = {
    "killed": signal.SIGKILL,
    "terminated": signal.SIGTERM,
    "all_killed": signal.SIGKILL,
    "all_killed_while_starting": signal.SIGKILL,
}


# Each starts processes, for seconds: those like another one run with the slow tests.
SLOW = {
    "interrupts",
    "worker_killed_while_idle",
    "one_of_three_workers_killed_during_a_decode",
    "a_worker_that_never_meets_the_others",
    "a_cache_that_does_not_fit",
    "terminated",
    "all_killed_while_starting",
    "never_closed",
    "a_worker_that_reads_no_calls",
    "all_killed",
    "an_exception_on_rank_0",
    "forked_children",
    "names_that_others_have_taken",
    "two_engines_at_once",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in SCENARIOS
        if name != "engines_one_after_the_other"
    ],
)
def test_a_fault_is_an_error_within_seconds_and_leaves_nothing(
    name: str, server: subprocess.Popen, models: Path
):
    code, log = Run(server, name, models / name).finish(180)
    assert code == -ENDS_BY_SIGNAL.get(name, 0), log
    if name not in ENDS_BY_SIGNAL:
        assert "done\n" in log
        assert "Exception ignored" not in log
    if name == "interrupts":
        assert "Traceback" not in log, "the terminal shows one error, if any"


@pytest.mark.slow
def test_engines_one_after_the_other_leave_nothing(server: subprocess.Popen, models: Path):
    name = "engines_one_after_the_other"
    code, log = Run(server, name, models / name).finish(500)
    assert code == 0, log
    assert log.count("left: 0 processes, 0 files, 0 ports") == 8


def test_a_script_without_a_main_guard(models: Path, tmp_path: Path):
    """Guards workers that run the script again; also with asserts stripped, and not closed."""
    script = tmp_path / "script.py"
    script.write_text(
        "print('runs')\n"
        "import sys, torch\n"
        "from nanovllm import LLM, SamplingParams\n"
        "torch.set_num_threads(1)\n"
        "llm = LLM(sys.argv[1], tensor_parallel_size=2, device='cpu', num_kvcache_blocks=4)\n"
        "llm.generate([[1, 2]], SamplingParams(max_tokens=4), use_tqdm=False)\n"
        "print('ends')\n"
    )
    result = subprocess.run(
        [sys.executable, "-O", str(script), str(models / "qwen3")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
        text=True,
        timeout=180,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "runs\nends\n", "")


def test_ctrl_c_waits_for_the_start_of_workers_also_beside_another_thread():
    """The signal is blocked in one thread only; the kernel gives it to another one, and Python
    raised it in the middle of starting a worker, which printed a traceback of its own."""
    done, reached = threading.Event(), False
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt), workers_module._interrupts_blocked():
            os.kill(os.getpid(), signal.SIGINT)
            end = time.monotonic() + 0.2
            while time.monotonic() < end:
                pass
            reached = True
    finally:
        done.set()
        thread.join()
    assert reached
