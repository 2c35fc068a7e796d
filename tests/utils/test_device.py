"""Which GPU a rank runs on, and in which dtype."""

import pytest
import torch

from nanovllm import LLM
from nanovllm.utils.device import select_device, select_dtype


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
