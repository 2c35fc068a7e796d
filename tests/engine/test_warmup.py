"""The largest steps that run, or are compiled, before the first request."""

from contextlib import contextmanager
from typing import Any

import pytest

from nanovllm import LLM
from nanovllm.engine import cuda_graphs, warmup
from nanovllm.engine.model_inputs import GraphSize

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 5,
    "max_num_batched_tokens": 64,
    "kvcache_block_size": 4,
    "num_kvcache_blocks": 36,
    "max_model_len": 40,
}


def watched(runner: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The numbers of tokens and of sequences of each forward pass."""
    steps, run_model = [], runner.run_model

    def run(inputs: Any) -> Any:
        hidden_states, logits = run_model(inputs)
        steps.append((len(inputs.input_ids), len(logits)))
        return hidden_states, logits

    monkeypatch.setattr(runner, "run_model", run)
    return steps


def test_a_warm_up_has_the_most_tokens_in_the_most_and_the_fewest_sequences(
    model_path, monkeypatch
):
    with LLM(model_path, **SETTINGS) as llm:
        steps = watched(llm.model_runner, monkeypatch)
        warmup.warmup_model(llm.model_runner)
        assert sorted(steps) == [(64, 2), (64, 5)]


def test_steps_of_few_tokens_are_compiled_before_they_are_captured(model_path, monkeypatch):
    """Beside those of the warm-up."""
    is_compiling = []

    @contextmanager
    def compiling_only():
        is_compiling.append(True)
        yield
        is_compiling.pop()

    monkeypatch.setattr(warmup, "compiling_only", compiling_only)
    monkeypatch.setattr(cuda_graphs, "PREFILL_TOKENS", [16, 48])
    with LLM(model_path, **SETTINGS) as llm:
        runner = llm.model_runner
        monkeypatch.setattr(runner.backend, "capturable", True, raising=False)
        assert cuda_graphs.graph_sizes(runner) == [
            *(GraphSize(True, num_tokens, 5) for num_tokens in (16, 48)),
            *(GraphSize(False, num_seqs, num_seqs) for num_seqs in (1, 2, 4, 5)),
        ]
        steps = watched(runner, monkeypatch)

        def check(*args: Any) -> None:
            assert is_compiling

        runner.model.register_forward_pre_hook(check)
        warmup.compile_kernels(runner)
        captured = [(16, 5), (48, 5), (1, 1), (2, 2), (4, 4), (5, 5)]
        assert sorted(steps) == sorted([(64, 2), (64, 5), *captured])
