"""The runner's device and start-up: which GPU, which dtype, how long sequences may be, and what a
start that fails leaves behind."""

import os
import weakref
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from nanovllm import LLM
from nanovllm.engine import startup
from nanovllm.engine.device import select_device, select_dtype
from nanovllm.engine.model_runner import ModelRunner, on_device
from tests.tiny_models import BASE, CONFIGS

SMALL: dict[str, Any] = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 8}


@pytest.fixture
def four_gpus(monkeypatch):
    """PyTorch as it is with four GPUs, the third one current."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)


@pytest.mark.parametrize(
    "name, num_ranks, expected",
    [
        ("cpu", 1, ["cpu"]),
        ("cpu", 2, ["cpu", "cpu"]),
        ("cuda", 1, ["cuda:2"]),
        ("auto", 1, ["cuda:2"]),
        ("cuda:1", 1, ["cuda:1"]),
        ("cuda", 2, ["cuda:0", "cuda:1"]),
        ("auto", 4, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ("cuda:0", 2, ["cuda:0", "cuda:1"]),
        ("cuda:2", 2, ["cuda:2", "cuda:3"]),
    ],
)
def test_each_rank_has_a_gpu_by_its_index(name, num_ranks, expected, four_gpus):
    """The device was "cuda" without an index, which is another one after torch.cuda.set_device."""
    devices = [select_device(name, rank, num_ranks) for rank in range(num_ranks)]
    assert [str(device) for device in devices] == expected


@pytest.mark.parametrize(
    "name, num_ranks, match",
    [
        ("cuda:4", 1, r"device='cuda:4', but PyTorch finds only 4 GPUs"),
        ("cuda", 5, r"tensor_parallel_size=5, but PyTorch finds 4 GPUs: lower it"),
        ("cuda:3", 2, r"tensor_parallel_size=2, but PyTorch finds 1 GPUs from cuda:3 on"),
    ],
)
def test_gpus_that_are_not_there_are_refused(name, num_ranks, match, four_gpus):
    with pytest.raises(ValueError, match=match):
        select_device(name, 0, num_ranks)


def test_a_gpu_is_refused_where_there_is_none(model_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cuda", "cuda:1"):
        with pytest.raises(ValueError, match=f"device='{name}', but PyTorch finds no CUDA GPU"):
            LLM(model_path, device=name)


@pytest.mark.parametrize("name", ["tpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "cuda: 1", 1])
def test_names_of_no_device_are_refused(name, model_path):
    with pytest.raises(ValueError, match="device must be one of auto, cpu, cuda, cuda:<index>"):
        LLM(model_path, device=name)


@pytest.mark.parametrize(
    "name, device, checkpoint, has_bf16, expected",
    [
        ("auto", "cpu", "bfloat16", True, "float32"),
        ("auto", "cuda:0", "bfloat16", True, "bfloat16"),
        ("auto", "cuda:0", "bfloat16", False, "float16"),
        ("auto", "cuda:0", "float16", True, "float16"),
        ("auto", "cuda:0", "float32", True, "float32"),
        ("float16", "cuda:0", "bfloat16", True, "float16"),
        ("bfloat16", "cpu", "float32", True, "bfloat16"),
    ],
)
def test_the_dtype_is_the_checkpoints_where_the_gpu_has_it(
    name, device, checkpoint, has_bf16, expected, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    found = select_dtype(name, torch.device(device), getattr(torch, checkpoint))
    assert found is getattr(torch, expected)


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

    methods = (ModelRunner.run, ModelRunner.sample, ModelRunner.loop, ModelRunner.exit)
    for function in (*methods, startup._start):
        assert hasattr(function, "__wrapped__"), f"{function} is not on_device"
    runner = ModelRunner.__new__(ModelRunner)
    runner._pid, runner.device = os.getpid(), torch.device("cuda", 1)
    assert on_device(method)(runner, 5) == 2
    with pytest.raises(ZeroDivisionError):
        on_device(method)(runner, 0)
    assert seen == [1, 1] and current == [0]


def fails_at_the_cache(held: list, monkeypatch) -> None:
    """With a cause, whose traceback has frames of its own."""

    def allocate(runner: ModelRunner) -> None:
        params = [*runner.model.parameters()]
        held.extend(map(weakref.ref, params))
        raise RuntimeError(f"no memory beside {len(params)} parameters")

    def fail(runner: ModelRunner, num_blocks: int) -> None:
        try:
            allocate(runner)
        except RuntimeError as error:
            raise ValueError("the cache does not fit") from error

    monkeypatch.setattr(startup, "allocate_kv_cache", fail)


def fails_in_loading(held: list, monkeypatch) -> None:
    def fail(model: torch.nn.Module, tensors: Any, shows_bar: bool) -> None:
        name, tensor = next(tensors)
        params = [*model.parameters(), tensor]
        held.extend(map(weakref.ref, params))
        raise ValueError(f"{name} is too much beside {len(params)}")

    monkeypatch.setattr(startup, "load_model", fail)


def is_interrupted(held: list, monkeypatch) -> None:
    def interrupt(runner: ModelRunner) -> bool:
        held.extend(map(weakref.ref, runner.model.parameters()))
        raise KeyboardInterrupt

    monkeypatch.setattr(startup, "uses_graphs", interrupt)


@pytest.mark.parametrize(
    "fault, size",
    [(fails_at_the_cache, 1), (fails_in_loading, 1), (is_interrupted, 1), (fails_at_the_cache, 2)],
)
def test_a_failed_start_keeps_no_weights(fault, size, model_path, monkeypatch):
    """They lived as long as the exception, as in a notebook, whose next start found the first
    one's weights still on the GPU."""
    held: list[weakref.ref] = []
    fault(held, monkeypatch)
    with pytest.raises((ValueError, KeyboardInterrupt)) as caught:
        LLM(model_path, tensor_parallel_size=size, **SMALL)
    assert held and not any(ref() is not None for ref in held)
    assert "the cache does not fit" in str(caught.value) or fault is not fails_at_the_cache


def test_by_default_sequences_are_as_long_as_the_cache_holds(tmp_path):
    """Nothing is as long as a model says that it may become: rotary embeddings, block tables."""
    config = CONFIGS["qwen3"][0](**{**BASE, "max_position_embeddings": 2**40})
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    for wanted, expected in ((None, 8 * 16), (100, 100), (1000, 1000)):
        with LLM(tmp_path, load_format="dummy", max_model_len=wanted, **SMALL) as llm:
            runner = llm.model_runner
            assert runner.max_model_len == expected
            (length,) = {
                len(buffer)
                for name, buffer in runner.model.named_buffers()
                if name.endswith("cos_sin_cache")
            }
            assert length == expected
            assert runner.graphs.table_width == -(-expected // 16)
