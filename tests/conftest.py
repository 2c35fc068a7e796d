"""Fixtures shared by all tests. Kernels run under Triton's interpreter where there is no GPU;
the variable must be set before a kernel is defined, so before nanovllm is imported."""

import gc
import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# Without it every process that a test starts compiles all modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# One thread suits tiny models best, and does not suffer when the cores are shared. This is for the
# processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests import gguf_package, triton_interpreter

# Not at run time: the process that hands out tests to xdist's workers would import transformers.
if TYPE_CHECKING:
    from nanovllm import LLM
    from tests.tiny_models import TinyModels

# A shell ignores Ctrl-C for what it runs in the background, and so would the tests of it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)


# Tests that this project's own assertions notice what they are for.
needs_asserts = pytest.mark.skipif(not __debug__, reason="python -O leaves assertions out")


def check_idle(llm: "LLM") -> None:
    """It has no request, and all of its blocks are free."""
    from tests.invariants import check_scheduler

    assert llm.is_finished()
    check_scheduler(llm.scheduler)
    manager = llm.scheduler.block_manager
    assert not manager.used_block_ids
    assert len(manager.free_block_ids) == llm.model_runner.num_kvcache_blocks


def may_take_minutes(item: pytest.Item) -> bool:
    timeout = item.get_closest_marker("timeout")
    return timeout is not None and timeout.args[0] > 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # First, so that no process is left with them when the others have no more tests.
    items.sort(key=may_take_minutes, reverse=True)
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_collection_finish() -> None:
    """Takes what is imported by now out of the garbage collector's sight: closing an engine
    collects, which takes 0.2 s with transformers' modules, and there are a thousand engines."""
    gc.collect()
    gc.freeze()
    triton_interpreter.speed_up()
    gguf_package.speed_up()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> "TinyModels":
    from tests.tiny_models import TinyModels

    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def model_path(tiny_models: "TinyModels") -> Path:
    """A Qwen3 checkpoint with a tokenizer. Tests that damage it make a copy."""
    from tests.tiny_tokenizer import save_tokenizer

    folder = tiny_models.root / "with_tokenizer"
    shutil.copytree(tiny_models.path("qwen3"), folder)
    save_tokenizer(folder)
    return folder
