"""What replaces a kernel that fails."""

import pytest
import torch

from nanovllm.kernels import fallback
from nanovllm.kernels.fallback import has_failed, run_or_replace

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_failures(monkeypatch):
    monkeypatch.setattr(fallback, "_failed", set())


def raising(error):
    def run():
        raise error

    return run


def test_a_kernel_that_fails_is_replaced_from_then_on(caplog):
    assert run_or_replace("test kernel", CPU, lambda: "fast", lambda: "slow") == "fast"
    run = raising(TypeError("no such layout"))
    assert run_or_replace("test kernel", CPU, run, lambda: "slow") == "slow"
    assert run_or_replace("test kernel", CPU, lambda: "fast", lambda: "slow") == "slow"
    assert has_failed("test kernel", CPU) and not has_failed("other kernel", CPU)
    assert caplog.text.count("the test kernel for Hopper failed") == 1


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700),
    ],
)
def test_errors_that_are_not_the_kernels_are_raised(error):
    with pytest.raises(type(error)):
        run_or_replace("test kernel", CPU, raising(error), lambda: "slow")
    assert not has_failed("test kernel", CPU)
