"""The runner's calls are made on its own GPU."""

import os
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from nanovllm.engine import startup
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.tensor_parallel import WorkerRunner
from nanovllm.utils.device import on_device


@pytest.fixture
def current(monkeypatch) -> list[int]:
    """Indices of the GPUs that PyTorch is told to make current, the innermost last."""
    stack = [0]

    @contextmanager
    def device(wanted: torch.device):
        assert wanted.index is not None
        stack.append(wanted.index)
        try:
            yield
        finally:
            stack.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    return stack


def test_calls_run_on_the_runners_gpu_and_leave_the_programs_current(current, monkeypatch):
    """A step after torch.cuda.set_device in user code launched kernels on another GPU than the
    weights are on, and a start with several ranks left another GPU current."""
    seen = []

    def method(self: Any, x: int) -> int:
        seen.append(current[-1])
        return 10 // x

    methods = (ModelRunner.run, ModelRunner.sample, WorkerRunner.loop, ModelRunner.exit)
    for function in (*methods, startup.start):
        assert hasattr(function, "__wrapped__"), f"{function} is not on_device"
    runner = ModelRunner.__new__(ModelRunner)
    runner._pid, runner.device = os.getpid(), torch.device("cuda", 1)
    assert on_device(method)(runner, 5) == 2
    with pytest.raises(ZeroDivisionError):
        on_device(method)(runner, 0)
    assert seen == [1, 1] and current == [0]
