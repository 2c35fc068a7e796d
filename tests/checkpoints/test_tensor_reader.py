"""Safetensors files read by several threads, against the safetensors library."""

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.checkpoints import tensor_reader
from nanovllm.checkpoints.tensor_reader import read_tensors

DTYPES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool"
)
CPU = torch.device("cpu")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Tensors of many sizes and of every dtype, some larger than a chunk, in two files."""
    monkeypatch.setattr(tensor_reader, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(tensor_reader, "AHEAD_BYTES", 20_000)
    paths = []
    for file in range(2):
        shapes = [(), (0,), (7,), (1000,), (33, 77), (1, 5, 3), (250, 2), (4001,)] * 3
        dtypes = [getattr(torch, name) for name in DTYPES.split()] * 2
        tensors = {
            f"{file}.{i}": torch.randint(0, 2, shape).to(dtype) if i % 3 else torch.ones(shape)
            for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        }
        tensors[f"{file}.bf16"] = torch.randn(6000).bfloat16()
        paths.append(tmp_path / f"{file}.safetensors")
        save_file(tensors, paths[-1], {"format": "pt"})
    return paths


@pytest.mark.parametrize("num_threads", [1, 3])
def test_it_reads_what_the_library_reads(files: list[Path], num_threads: int):
    read = dict(read_tensors(files, CPU, num_threads))
    expected = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
        assert torch.equal(read[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_a_reader_that_is_dropped_leaves_no_threads(files: list[Path]):
    before = threading.active_count()
    reader = read_tensors(files, CPU, 2)
    next(reader)
    assert threading.active_count() > before
    reader.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("damage", [b"", b"\xff" * 100, None])
def test_a_damaged_file_is_named(files: list[Path], damage: bytes | None):
    path = files[1]
    path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
    with pytest.raises(ValueError, match=r"1\.safetensors cannot be read"):
        list(read_tensors(files, CPU))


def test_a_file_that_shrinks_meanwhile_is_named(files: list[Path]):
    reader = read_tensors(files, CPU, 1)
    next(reader)
    files[1].write_bytes(files[1].read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"1\.safetensors cannot be read"):
        list(reader)
