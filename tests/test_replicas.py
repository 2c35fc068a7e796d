"""Batch jobs on several engines, which Ray spreads over a cluster: the same records as with
one engine, each once, whatever dies. The cluster is this machine."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from nanovllm import LLM
from nanovllm.llm import LLM as Engine
from nanovllm.run_batch.cli import main
from nanovllm.run_batch.request import BatchRequest
from nanovllm.run_batch.runner import EngineLostError
from nanovllm.run_batch.stop import StopOnSignal
from tests.test_run_batch import (
    ALL_DONE,
    CANNOT_START,
    INTERRUPTED,
    SMALL,
    SOME_FAILED,
    arguments,
    by_id,
    mixed_lines,
    read_output,
    request,
    run,
    wait_until,
    write_input,
)

ray = pytest.importorskip("ray", reason="needs Ray (the extra ray)")
replicas = pytest.importorskip("nanovllm.run_batch.replicas")
Replica = replicas.Replica

ROOT = Path(__file__).parents[1]
TWO = ("--replicas=2", "--no-progress")
SECONDS = 200  # within which a job's processes start or end, where others use the machine, too

pytestmark = [
    pytest.mark.timeout(3 * SECONDS),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The environment of processes that shall run on it; this one is connected."""
    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, logging_level="error"
    )
    signal.signal(signal.SIGTERM, handler)  # which ray.init has replaced
    yield {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    pids = replica_pids("ALIVE", "RESTARTING", "DEAD")
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), SECONDS)
    ray.shutdown()
    os.environ.clear()
    os.environ.update(before)


def replica_pids(*states: str) -> list[int]:
    actors = ray._private.state.actors().values()
    return [a["Pid"] for a in actors if a["State"] in states]


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def long_lines(num: int) -> list[Any]:
    """Greedy, seeded and neither; one is short, the others end one after the other."""
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 5}, {}]
    items = [
        request(str(i), prompt=f"line {i}", max_tokens=60 - i % 8, ignore_eos=True, **kinds[i % 3])
        for i in range(num)
    ]
    items[0]["body"]["max_tokens"] = 1
    return items


@pytest.fixture(scope="module")
def one_engine(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Any]:
    """What one engine makes of an input, by the ids of the records."""
    folder, cache = tmp_path_factory.mktemp("one_engine"), {}

    def run_one(in_: Path) -> dict[str, Any]:
        data = in_.read_bytes()
        if data not in cache:
            out = folder / str(len(cache))
            with LLM(model_path, **SMALL) as llm:
                run(llm, in_, out)
            cache[data] = by_id(read_output(out))
        return cache[data]

    return run_one


@pytest.mark.slow
def test_a_replica_that_is_killed_loses_and_repeats_nothing(
    cluster, model_path: Path, one_engine, tmp_path: Path, caplog
):
    """Each line once, also those that fail; then there is nothing left to do."""
    items = [*long_lines(40), *mixed_lines(20, longest=8)]
    in_, out = write_input(tmp_path / "in", items), tmp_path / "out"
    num_at_kill = []

    def kill() -> None:
        wait_until(lambda: out.exists() and out.stat().st_size, SECONDS)
        os.kill(replica_pids("ALIVE")[0], signal.SIGKILL)
        num_at_kill.append(num_lines(out))

    killer = Thread(target=kill)
    killer.start()
    assert main(arguments(model_path, in_, out, "--served-model-name=model", *TWO)) == SOME_FAILED
    killer.join()
    print(num_at_kill)
    assert num_at_kill[0] < 40
    assert "of 2 engines are ready" in caplog.text
    assert "a replica has died" in caplog.text
    assert by_id(read_output(out)) == one_engine(in_)
    data = out.read_bytes()
    assert main(arguments(model_path, in_, out, *TWO)) == SOME_FAILED  # with nothing to do
    assert out.read_bytes() == data


@pytest.mark.slow
def test_a_job_that_is_stopped_and_killed_goes_on(
    cluster, model_path: Path, one_engine, tmp_path: Path
):
    """First with SIGTERM, after which what runs is finished and written; then with SIGKILL. Then
    one engine takes what is left."""
    in_, out, log = (
        write_input(tmp_path / "in", long_lines(60)),
        tmp_path / "out",
        tmp_path / "log",
    )
    args = arguments(model_path, in_, out, "--served-model-name=model")
    sizes = []
    for number, status in ((signal.SIGTERM, INTERRUPTED), (signal.SIGKILL, -signal.SIGKILL)):
        num_before = num_lines(out)
        with (
            log.open("wb") as file,
            subprocess.Popen(
                [sys.executable, "-m", "nanovllm.run_batch", *args, "--replicas=1"],
                cwd=ROOT,
                env=cluster,
                stdout=file,
                stderr=file,
            ) as process,
        ):
            try:
                # After the first line nothing more may have reached the engine.
                wait_until(lambda num=num_before + 2: num_lines(out) >= num, SECONDS)
                sizes.append(num_lines(out))
                process.send_signal(number)
                assert process.wait(SECONDS) == status, log.read_text()
            except BaseException:
                process.kill()
                print(log.read_text())
                raise
        sizes.append(num_lines(out))
    print(sizes)
    assert sizes[0] < sizes[1] <= sizes[2] <= sizes[3] < 60
    assert main(args) == ALL_DONE
    assert by_id(read_output(out)) == one_engine(in_)


def test_what_cannot_start_is_one_line(cluster, model_path: Path, tmp_path: Path, capfd):
    in_, out = write_input(tmp_path / "in", [request("a")]), tmp_path / "out"
    wrong = {
        "neither a local directory": arguments(Path("/no/such/model"), in_, out, *TWO),
        "needs 1 GPU of one machine": arguments(model_path, in_, out, *TWO, "--device=cuda"),
        "--replicas must be at least 1": arguments(model_path, in_, out, "--replicas=0"),
    }
    for message, args in wrong.items():
        assert main(args) == CANNOT_START
        last = capfd.readouterr().err.splitlines()[-1]
        assert last.startswith("run_batch: error: ") and message in last
    assert out.read_bytes() == b""


def test_without_ray_it_says_what_to_install(model_path: Path, tmp_path: Path, capfd, monkeypatch):
    for name in ("ray", "nanovllm.run_batch.replicas"):
        monkeypatch.setitem(sys.modules, name, None)
    in_ = write_input(tmp_path / "in", [request("a")])
    assert main(arguments(model_path, in_, tmp_path / "out", *TWO)) == CANNOT_START
    assert 'pip install "nanovllm[ray]"' in capfd.readouterr().err


def test_one_engine_needs_no_ray():
    code = "import sys, nanovllm.run_batch.cli; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.slow
def test_a_request_that_ends_replicas_fails_alone(
    cluster, model_path: Path, one_engine, tmp_path: Path, monkeypatch
):
    calm = write_input(tmp_path / "calm", long_lines(30))
    items = long_lines(30)
    items[11]["body"]["prompt"] = "poison"
    in_, out = write_input(tmp_path / "in", items), tmp_path / "out"

    class Poisoned(Replica):
        def __init__(self, *args: Any) -> None:
            def step(llm: LLM) -> Any:
                if any(
                    "poison" in str(request.prepared.prompt) for request in llm.requests.values()
                ):
                    os.kill(os.getpid(), signal.SIGKILL)
                return ordinary(llm)

            ordinary = Engine.step
            Engine.step = step
            super().__init__(*args)

    monkeypatch.setattr(replicas, "Replica", Poisoned)
    assert main(arguments(model_path, in_, out, "--served-model-name=model", *TWO)) == SOME_FAILED
    records = by_id(read_output(out))
    assert records.pop("batch_req_12")["error"]["code"] == "process_died"
    expected = one_engine(calm)
    del expected["batch_req_12"]
    assert records == expected


# The driver, with replicas that have no engine. What Ray runs is local, so that it goes by value.


def run_with(replica: type, num_requests: int, monkeypatch, num_replicas: int = 2) -> list[str]:
    """The names of the records that come."""
    monkeypatch.setattr(replicas, "Replica", replica)
    options = {"max_num_seqs": 64, "tensor_parallel_size": 1, "device": "cpu"}
    options["enable_reordering"] = True
    items = [BatchRequest(i, "", str(i), "", {}) for i in range(num_requests)]
    with closing(replicas.Replicas(options, ["model"], num_replicas, num_requests)) as runner:
        return [record["custom_id"] for record in runner.run(items)]


@pytest.mark.parametrize(
    ("max_num_seqs", "reorders", "limit"),
    [
        (64, True, 512),
        (64, False, 256),
        (None, True, 4096),
        (None, False, 2048),
        (10000, True, 20000),
    ],
)
def test_the_number_of_requests_of_a_replica(monkeypatch, max_num_seqs, reorders, limit):
    monkeypatch.setattr(replicas, "_connect", lambda: False)
    monkeypatch.setattr(replicas, "_find_resources", lambda *_: {"num_cpus": 1, "num_gpus": 0})
    monkeypatch.setattr(
        replicas.Replicas, "_start", lambda _, each: setattr(each, "is_ready", True)
    )
    options = {"max_num_seqs": max_num_seqs, "enable_reordering": reorders}
    assert replicas.Replicas(options, ["model"], 2, 10**6)._max_requests == limit


def make_echo(answer: Callable[[str], None], start: Callable[[], str | None]) -> type:
    """A replica that calls ``answer`` with a request's name before it echoes it. ``start`` may tell
    why it has no engine."""

    class Replica:
        def __init__(self, *args: Any) -> None:
            self.requests: list[BatchRequest] = []

        def start(self) -> str:
            if failure := start():
                raise RuntimeError(failure)
            return ray.get_runtime_context().get_node_id()

        def run(self, requests: list[BatchRequest]) -> list[dict[str, Any]]:
            self.requests += requests
            if not self.requests:
                return []
            item = self.requests.pop(0)
            answer(item.custom_id)
            return [{"id": f"batch_req_{item.number}", "custom_id": item.custom_id}]

        def close(self) -> None:
            os._exit(0)

    return Replica


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param("process", marks=pytest.mark.slow),
        "process, and at first its GPU",
        pytest.param("machine", marks=pytest.mark.slow),
    ],
)
def test_requests_of_a_replica_that_dies_run_again(cluster, monkeypatch, tmp_path: Path, lost: str):
    """In its place; or in the other replica, where its machine is lost."""
    death, failure = tmp_path / "death", tmp_path / "failure"
    loses_machine = lost == "machine"

    def answer(name: str) -> None:
        if name == "5":
            death.touch()
            os._exit(1)

    def echo(name: str) -> None:
        while len([*tmp_path.glob("started *")]) < 2:  # until both replicas have
            time.sleep(0.1)
        if not death.exists():
            answer(name)

    def start() -> str | None:
        while loses_machine and death.exists():
            time.sleep(1)
        if "GPU" in lost and death.exists() and not failure.exists():
            failure.touch()
            return "no GPU"
        (tmp_path / f"started {os.getpid()}").touch()
        return None

    if loses_machine:
        monkeypatch.setattr(ray, "nodes", lambda real=ray.nodes: lost_if(death, real()))
    found = run_with(make_echo(echo, start), 200, monkeypatch)
    assert death.exists()
    assert failure.exists() == ("GPU" in lost)
    assert sorted(found, key=int) == [str(i) for i in range(200)]


def test_a_replica_without_an_engine_does_not_end_a_job_that_runs(
    cluster, monkeypatch, tmp_path: Path
):
    first, answered, failure = (tmp_path / name for name in ("first", "answered", "failure"))

    def start() -> str | None:
        try:
            first.touch(exist_ok=False)
        except FileExistsError:
            while not answered.exists():
                time.sleep(0.1)
            if not failure.exists():
                failure.touch()
                return "no model"
        return None

    def answer(name: str) -> None:
        answered.touch()
        while name != "0" and not failure.exists():
            time.sleep(0.1)

    found = run_with(make_echo(answer, start), 50, monkeypatch)
    assert failure.exists()
    assert sorted(found, key=int) == [str(i) for i in range(50)]


def test_no_record_is_lost_if_the_result_of_a_later_call_comes_first(cluster, monkeypatch):
    """Here the later result says that the replica has stopped."""
    stop = StopOnSignal(SECONDS)

    def wait_for_last(calls: list[Any], num_returns: int = 1, **options: Any) -> Any:
        done, rest = wait(calls, num_returns=len(calls) if stop.requested else 1, timeout=SECONDS)
        return done[-1:], rest

    class Stopping(make_echo(lambda name: None, lambda: None)):  # type: ignore[misc]
        is_stopping = False

        def stop(self) -> None:
            self.is_stopping = True

        def run(self, requests: list[BatchRequest]) -> list[dict[str, Any] | None]:
            return super().run(requests) or [None] * self.is_stopping

    wait = ray.wait
    monkeypatch.setattr(ray, "wait", wait_for_last)
    monkeypatch.setattr(replicas, "Replica", Stopping)
    options = {"max_num_seqs": 64, "tensor_parallel_size": 1, "device": "cpu"}
    options["enable_reordering"] = True
    items = [BatchRequest(i, "", str(i), "", {}) for i in range(2)]
    with closing(replicas.Replicas(options, ["model"], 1, len(items))) as runner:
        found = []
        for record in runner.run(items, stop):
            found.append(record["custom_id"])
            stop.requested, stop.deadline = True, time.monotonic() + SECONDS
    assert found == ["0", "1"]


def lost_if(death: Path, nodes: list[Any]) -> list[Any]:
    return [node | {"Alive": not death.exists()} for node in nodes]


@pytest.mark.parametrize("at_start", [pytest.param(True, marks=pytest.mark.slow), False])
def test_replicas_that_die_again_and_again_end_the_job(cluster, monkeypatch, at_start: bool):
    """As where each process runs out of memory: they would be started for ever."""
    monkeypatch.setattr(replicas, "MAX_DEATHS", 1)
    monkeypatch.setattr(replicas, "CLOSE_SECONDS", 1.0)

    def die(name: str = "") -> None:
        os._exit(1)

    replica = make_echo(die, die if at_start else lambda: None)
    with pytest.raises(EngineLostError, match="have died 2 times"):
        run_with(replica, 5, monkeypatch, num_replicas=1)
