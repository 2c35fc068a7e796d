"""Tensor parallelism: one runner per rank. Rank 0 sends each of its calls to the other ranks."""

from dataclasses import replace
from typing import Any

import torch

from nanovllm.checkpoints.checkpoint import open_checkpoint
from nanovllm.config import Config
from nanovllm.engine.in_flight import InFlightStep
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.startup import start
from nanovllm.engine.workers import Worker, Workers
from nanovllm.kernels.comm.all_reduce import make_one_shot_all_reduces
from nanovllm.utils.device import on_device, select_device
from nanovllm.utils.distributed import RankOrderTPGroup, TPGroup, make_tp_group
from nanovllm.utils.interrupts import interrupts_delayed


class RankRunner(ModelRunner):
    """The runner of one of several ranks.

    Attributes:
        link: connects to the other ranks: ``Workers`` on rank 0, a ``Worker`` on the others.
    """

    link: Workers | Worker

    def barrier(self) -> None:
        self.link.barrier()

    def join_ranks(self) -> None:
        self.barrier()  # workers may still be importing modules
        rank, size, device = self.link.rank, self.config.tensor_parallel_size, self.device
        with self.link.open_store() as store:
            group_class = RankOrderTPGroup if self.config.batch_invariant else TPGroup
            self.tp = make_tp_group(rank, size, store, device, group_class)
            self.tp.min(0, device)  # the first collective, in which NCCL uses the store
            if device.type == "cuda":
                devices = [select_device(self.config.device, rank, size) for rank in range(size)]
                one_shots = make_one_shot_all_reduces(
                    self.tp, store, self.dtype, self.model_config.hidden_size, devices
                )
                self.tp = replace(self.tp, one_shots=one_shots)


class MainRunner(RankRunner):
    """Rank 0's runner. Its constructor starts the worker processes.

    Attributes:
        link: the handle on the worker processes.
    """

    def __init__(self, config: Config, *args: Any) -> None:
        super().__init__(config, *args)
        size = config.tensor_parallel_size
        self.link: Workers = Workers(size, run_worker, config, self.max_model_len)
        self.link.on_failure(self._abort)

    def _abort(self) -> None:
        self.tp.abort()  # looked up when a worker fails, because ``join_ranks`` replaces the group

    def call(self, method: str, step: InFlightStep | None, *args: Any) -> Any:
        with interrupts_delayed():
            try:
                self.link.send((method, args))
                return super().call(method, step, *args)
            except BaseException as error:
                self.link.fail(error)
                raise

    def wait(self, step: InFlightStep) -> None:
        super().wait(step)
        self.link.check()  # on a GPU, all-reduces return wrong sums if a rank has died

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.link.close()

    def abort(self, error: BaseException) -> None:
        try:
            self.link.fail(error)  # the others first: they wait for this rank
        finally:
            super().abort(error)


class WorkerRunner(RankRunner):
    """The runner of a worker, which makes the same calls as rank 0."""

    link: Worker

    def __init__(self, worker: Worker, *args: Any) -> None:
        super().__init__(*args)
        self.link = worker

    @on_device
    def loop(self) -> None:
        """The worker loop: receives rank 0's calls and makes them, until ``exit``."""
        step: InFlightStep | None = None
        while True:
            method, args = self.link.receive()
            if method == "exit":
                return self.exit()
            result = getattr(self, method)(step, *args)
            step = result if isinstance(result, InFlightStep) else step


def run_worker(worker: Worker, config: Config, max_model_len: int) -> None:
    """The main function of a worker process."""
    torch.set_num_threads(worker.num_threads)
    checkpoint = open_checkpoint(config.model)
    device = select_device(config.device, worker.rank, config.tensor_parallel_size)
    runner = WorkerRunner(worker, config, checkpoint.config, max_model_len, device)
    start(runner, checkpoint)
    runner.loop()
