"""The choice of an attention backend."""

import pytest
import torch

from nanovllm.config import ATTENTION_BACKENDS
from nanovllm.kernels.attention import backend as selection
from nanovllm.kernels.attention import decode, prefix_decode
from nanovllm.kernels.attention.backend import AttentionShape, select_attention_backend
from nanovllm.kernels.attention.base import ALL_FEATURES
from nanovllm.kernels.attention.triton_backend import TritonAttention


@pytest.fixture(autouse=True)
def _tried_out_here(monkeypatch, device):
    """Backends for a GPU are tried out on the device that there is. In Triton's interpreter fewer
    programs are faster."""
    if device == "cpu":
        monkeypatch.setattr(decode, "NUM_MULTIPROCESSORS", 2)
        monkeypatch.setattr(prefix_decode, "HOPPER_MULTIPROCESSORS", 4)
    on, here = selection._try_out, torch.device(device)
    monkeypatch.setattr(
        selection, "_try_out", lambda backend, shape: on(backend, shape._replace(device=here))
    )


def choose(name="auto", features=()) -> str:
    """The name of what is chosen for a GPU."""
    features = frozenset(features)
    shape = AttentionShape(2, 1, 64, 256, torch.float16, torch.device("cuda"), features)
    return select_attention_backend(name, shape).name


def wrong(self, q, *args):
    return torch.zeros_like(q)


def broken(self, q, *args):
    raise RuntimeError("no kernel")


def test_our_own_kernels_come_first():
    assert choose() == choose("triton") == "triton"


@pytest.mark.parametrize(
    ("prefill", "reason"),
    [
        (wrong, "ValueError: its attention over one token is wrong"),
        (broken, "RuntimeError: no kernel"),
    ],
)
def test_a_backend_that_does_not_work_is_passed_over(monkeypatch, caplog, prefill, reason):
    monkeypatch.setattr(TritonAttention, "prefill", prefill)
    monkeypatch.setattr(selection.FlashAttention, "features", frozenset())
    with caplog.at_level("WARNING", "nanovllm"):
        assert choose(features=["window"]) == "torch"
    assert f"skipped: triton: {reason}" in caplog.text
    with pytest.raises(ValueError, match=f"triton: {reason}"):
        choose("triton")


def test_features_that_a_backend_lacks_are_refused_by_name(monkeypatch):
    assert choose(features=ALL_FEATURES) == "triton"
    monkeypatch.setattr(TritonAttention, "features", frozenset(("window",)))
    assert choose(features=["sinks"]) == "torch"
    assert choose(features=["window"]) == "triton"
    with pytest.raises(ValueError, match=r"has no attention with sinks and softcap.*'auto'"):
        choose("triton", features=ALL_FEATURES)
    assert choose("torch", features=ALL_FEATURES) == "torch"


def test_no_kernels_on_a_gpu_is_worth_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(TritonAttention, "features", frozenset())
    monkeypatch.setattr(selection.FlashAttention, "features", frozenset())
    with caplog.at_level("WARNING", "nanovllm"):
        assert choose("torch") == "torch"
        assert not caplog.records
        assert choose(features=["sinks"]) == "torch"
    assert "backend torch: the fastest that works here; skipped: triton" in caplog.text


def test_every_backend_can_be_asked_for():
    assert set(ATTENTION_BACKENDS) == {"auto", *selection.BACKENDS}
