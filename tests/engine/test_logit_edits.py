"""Edits of a sequence's logits: whether they leave a token, and that plain sampling has none."""

from typing import Any

import numpy as np
import pytest

from nanovllm.config import Config
from nanovllm.engine.recovery import forbids_all
from nanovllm.engine.sampling_state import SamplingState, SamplingStateFactory
from nanovllm.kernels.sampling.sampling_row import EDITS, SAMPLING_ROW
from nanovllm.sampling_params import SamplingParams

VOCAB_SIZE, EOS, PROMPT = 40, 0, [5, 6, 7]


def make_state(**values: Any) -> SamplingState:
    factory = SamplingStateFactory(None, VOCAB_SIZE, {EOS}, Config("model"))
    (state,) = factory.make(factory.prepare(SamplingParams(**values)), PROMPT)
    return state


@pytest.mark.parametrize(
    ("values", "num_generated", "forbidden"),
    [
        ({}, 0, False),
        ({"presence_penalty": 2.0, "logit_bias": {EOS: -100.0}}, 1, False),
        ({"allowed_token_ids": [EOS], "min_tokens": 2}, 1, True),
        ({"allowed_token_ids": [EOS], "min_tokens": 2}, 2, False),
        ({"allowed_token_ids": [EOS, 39], "min_tokens": 2}, 1, False),
        ({"allowed_token_ids": [EOS, 39], "min_tokens": 2, "stop_token_ids": [39]}, 1, True),
        ({"min_tokens": 2, "stop_token_ids": list(range(VOCAB_SIZE))}, 0, True),
        ({"min_tokens": 2, "stop_token_ids": list(range(1, 39))}, 0, False),
    ],
)
def test_edits_that_forbid_every_token_are_noticed(
    values: dict[str, Any], num_generated: int, forbidden: bool
):
    state = make_state(**values)
    for _ in range(num_generated):
        state.append_token(8)
    assert forbids_all(state, PROMPT + [8] * num_generated) == forbidden


@pytest.mark.parametrize(
    ("values", "num_edits"),
    [
        ({"temperature": 0.5, "top_p": 0.9, "logprobs": 2, "stop_token_ids": [3]}, 0),
        ({"repetition_penalty": 1.1}, 1),
        ({"allowed_token_ids": [3], "logit_bias": {3: 1.0}, "frequency_penalty": 1.0}, 3),
    ],
)
def test_only_parameters_that_edit_logits_make_edits(values: dict[str, Any], num_edits: int):
    state = make_state(**values)
    assert len(state.edits) == num_edits
    (features,) = np.frombuffer(state.row, SAMPLING_ROW)["features"]
    assert bool(features & EDITS) == (num_edits > 0)
    assert state.follows_tokens == any(name.endswith("_penalty") for name in values)
    assert not state.append_token(3) and not any(edit.error for edit in state.edits)
