"""Settings of PyTorch that the user's program, or a training loop, has changed."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams

SMALL: dict[str, Any] = {
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 24,
    "max_model_len": 100,
    "max_num_seqs": 4,
    "device": "cpu",
}
PROMPTS = [[5, 6, 7, 8, 9] * 6, [9, 8, 7]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(
        temperature=1,
        seed=3,
        max_tokens=8,
        ignore_eos=True,
        top_p=0.9,
        repetition_penalty=1.2,
        allowed_token_ids=list(range(60)),
    ),
]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default dtype": lambda: default_dtype(torch.bfloat16),
    "default device": lambda: default_device("meta"),
    "device": lambda: torch.device("meta"),
    "gradients": torch.enable_grad,
}


def results(llm: LLM) -> list[Any]:
    llm.reset_prefix_cache()
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    first = outputs[0]
    values = [[*first.prompt_logprobs][1:], [*first.outputs[0].logprobs]]
    return [[output.outputs[0].token_ids for output in outputs], values]


@pytest.fixture(scope="module")
def expected(model_path: Path) -> list[Any]:
    with LLM(model_path, **SMALL) as llm:
        return results(llm)


@pytest.mark.parametrize("name", SETTINGS)
def test_they_change_no_result(name: str, model_path: Path, expected: list[Any]):
    with LLM(model_path, **SMALL) as llm:
        with SETTINGS[name]():
            assert results(llm) == expected
        assert results(llm) == expected
    with SETTINGS[name](), LLM(model_path, **SMALL) as llm:
        assert results(llm) == expected


@pytest.mark.gpu
def test_they_change_no_result_on_a_gpu(model_path: Path):
    settings = SMALL | {"device": "cuda", "dtype": "bfloat16"}
    with LLM(model_path, **settings) as llm:
        expected = results(llm)
        for context in (torch.autocast("cuda", torch.float16), default_device("cuda")):
            with context:
                assert results(llm) == expected
    with default_device("cuda"), LLM(model_path, **settings) as llm:
        assert results(llm) == expected


@pytest.mark.parametrize("name", SETTINGS)
def test_they_change_no_weights(name: str, model_path: Path, expected: list[Any]):
    weights = load_file(model_path / "model.safetensors")
    with LLM(model_path, **SMALL) as llm, SETTINGS[name]():
        llm.sleep(level=2)
        llm.wake_up()
        llm.load_weights(weights.items())
        assert results(llm) == expected


def test_engines_that_start_in_several_threads_keep_their_dtypes(model_path: Path):
    """PyTorch's default dtype belongs to the process, so one start changed the dtype of another."""
    found: list[Any] = []

    def start(dtype: str) -> None:
        try:
            with LLM(model_path, dtype=dtype, load_format="dummy", **SMALL) as llm:
                dtypes = {str(p.dtype) for p in llm.model_runner.model.parameters()}
                found.append(dtypes == {f"torch.{dtype}"})
        except BaseException as error:
            found.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        names = ["bfloat16", "float32"] * 4
        threads = [threading.Thread(target=start, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert found == [True] * 8
    assert torch.get_default_dtype() is torch.float32
