"""The progress bar of loading weights."""

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from nanovllm.checkpoints import weights
from nanovllm.models.weight_names import WeightNames


class Model(nn.Module):
    weight_names = WeightNames((), {})

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(100)) for _ in range(2))


@pytest.mark.parametrize(
    "large_bytes, shows_bar, is_shown", [(799, True, True), (800, True, False), (0, False, False)]
)
def test_large_weights_have_a_bar(large_bytes, shows_bar, is_shown, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(weights, "LARGE_BYTES", large_bytes)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield from (("a", torch.ones(100)), ("b", torch.ones(100)))

    model = Model()
    weights.load_model(model, tensors(), shows_bar)
    assert ("Loading weights: 100%" in capsys.readouterr().err) == is_shown
    assert all(bool((param == 1).all()) for param in model.parameters())


def test_no_bar_is_drawn_into_a_file(monkeypatch, capsys):
    monkeypatch.setattr(weights, "LARGE_BYTES", 0)
    weights.load_model(Model(), iter([("a", torch.ones(100)), ("b", torch.ones(100))]), True)
    assert capsys.readouterr().err == ""
