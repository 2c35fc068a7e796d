"""Processed logits against a plain loop over one row at a time, and against what is sampled."""

import math

import numpy as np
import pytest
import torch

from nanovllm.kernels.sampling.processed_logits import processed_logits
from nanovllm.kernels.sampling.sample_reference import sample_reference
from nanovllm.kernels.sampling.sampling_row import SAMPLING_ROW

SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 0},
    {"top_k": 1},
    {"top_k": 7, "temperature": 1.7},
    {"top_p": 0.3},
    {"top_p": 0.9, "temperature": 0.2},
    {"min_p": 0.2},
    {"min_p": 0.05, "top_k": 9, "top_p": 0.8, "temperature": 2.0},
    {"top_k": 1000},
]


def sampling_rows(settings: list[dict[str, float]]) -> torch.Tensor:
    rows = np.zeros(len(settings), SAMPLING_ROW)
    rows["temperature"] = rows["top_p"] = 1
    rows["position"] = np.arange(len(settings))
    for row, values in zip(rows, settings, strict=True):
        for name, value in values.items():
            row[name] = value
    return torch.from_numpy(rows.view(np.int32).reshape(len(settings), -1))


def processed_row(logits: list[float], values: dict[str, float]) -> list[float]:
    """By the definition, in double precision: sort, cut, one row."""
    scaled = [z / (values.get("temperature", 1) or 1) for z in logits]
    floor = max(scaled) + math.log(values["min_p"]) if "min_p" in values else -math.inf
    kept = [z for z in sorted(scaled, reverse=True) if z >= floor]
    kept = kept[: int(values.get("top_k", len(kept)))]
    total, mass, enough = sum(map(math.exp, kept)), 0.0, []
    for z in kept:
        if "top_p" not in values or mass < values["top_p"] * total:
            enough.append(z)
        mass += math.exp(z)
    return [z if z >= enough[-1] else -math.inf for z in scaled]


@pytest.mark.parametrize("values", SETTINGS, ids=str)
def test_it_equals_the_definition(values: dict[str, float]):
    logits = 3 * torch.randn(5, 123)
    rows = sampling_rows([values] * 5)
    out = processed_logits(logits, rows, logits.argmax(-1), truncates=True)
    expected = [processed_row(row, values) for row in logits.double().tolist()]
    assert out.dtype == torch.float32
    assert torch.equal(out.isneginf(), torch.tensor(expected).isneginf())
    torch.testing.assert_close(out, torch.tensor(expected))


def test_rows_do_not_depend_on_each_other():
    logits = torch.randn(len(SETTINGS), 200)
    rows, best = sampling_rows(SETTINGS), logits.argmax(-1)
    together = processed_logits(logits, rows, best, truncates=True)
    for i in range(len(SETTINGS)):
        part = slice(i, i + 1)
        alone = processed_logits(logits[part], rows[part], best[part], truncates=True)
        assert torch.equal(together[part], alone)


@pytest.mark.parametrize("values", SETTINGS, ids=str)
def test_what_is_sampled_has_a_finite_logit(values: dict[str, float]):
    """With many ties and near ties at the borders."""
    logits = (torch.randn(64, 50) * 4).round() / 4 + torch.randn(64, 50) * 1e-7
    rows = sampling_rows([values] * 64)
    tokens = sample_reference(logits, rows)
    out = processed_logits(logits, rows, tokens, truncates=True)
    assert out.gather(1, tokens.unsqueeze(1)).isfinite().all()


def test_tokens_tied_with_the_last_one_are_kept():
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    out = processed_logits(logits, sampling_rows([{"top_k": 2}]), torch.tensor([0]), True)
    assert out.tolist() == [[2.0, 1.0, 1.0, -math.inf]]


def test_a_forbidden_token_stays_forbidden():
    logits = torch.tensor([[2.0, -math.inf, 1.0]])
    for truncates in (False, True):
        out = processed_logits(logits, sampling_rows([{}]), torch.tensor([0]), truncates)
        assert out.tolist() == [[2.0, -math.inf, 1.0]]
