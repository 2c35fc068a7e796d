"""The arguments that flash-attn 2 gets. On a GPU, test_gpu.py runs the package itself."""

import sys
from types import ModuleType

import pytest
import torch

from nanovllm.kernels.attention.base import AttentionParams
from nanovllm.kernels.attention.flash_attn_backend import FlashAttention
from nanovllm.kernels.attention.kv_cache import KVCache
from nanovllm.utils.context import Context


@pytest.fixture
def calls(monkeypatch) -> list[dict]:
    """The keyword arguments of each call of the package's two functions."""
    package, calls = ModuleType("flash_attn"), []

    def record(q, k, v, **arguments):
        calls.append(arguments)
        return q

    package.flash_attn_varlen_func = package.flash_attn_with_kvcache = record
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    return calls


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (AttentionParams(0.5), {}),
        (AttentionParams(0.5, window=1), {"window_size": (0, 0)}),
        (AttentionParams(0.5, window=128, softcap=9.0), {"window_size": (127, 0), "softcap": 9.0}),
    ],
)
def test_windows_and_softcaps_are_arguments(calls, params, expected):
    """A window's left side does not count the token itself. Other layers pass what they did."""
    x, context = torch.zeros(1, 2, 16), Context()
    backend, cache = FlashAttention(), KVCache(x, x)
    backend.prefill(x, x, x, cache, context, params)
    backend.decode(x, cache, context, params)
    assert len(calls) == 2
    for call in calls:
        assert call.pop("softmax_scale") == 0.5 and call.pop("causal") is True
        assert {k: v for k, v in call.items() if k in ("window_size", "softcap")} == expected


def test_it_has_no_sinks():
    assert FlashAttention.features == {"window", "softcap"}
