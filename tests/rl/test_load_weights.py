"""Weights that are replaced in a running engine. The reference is an engine that was started with
them."""

import pytest

from nanovllm import LLM
from tests.rl.conftest import SETTINGS, answers


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied", "gemma3", "qwen3-moe"])
def test_an_engine_with_new_weights_equals_one_started_with_them(name, pairs):
    pair = pairs(name)
    with LLM(pair.old, **SETTINGS) as llm:
        assert answers(llm) != pair.wanted()
        llm.load_weights(pair.tensors.items())
        assert answers(llm) == pair.wanted()
