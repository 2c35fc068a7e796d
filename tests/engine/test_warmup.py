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


def test_a_warm_up_has_the_most_sequences_and_the_longest(model_path, monkeypatch):
    """Some kernels are for long prompts only, so the longest must not be shorter than others."""
    with LLM(model_path, **SETTINGS) as llm:
        runner, lens = llm.model_runner, []
        prepare = runner.prepare

        def watch(batch: Any, size: Any) -> Any:
            lens.append([item.num_tokens for item in batch.items])
            return prepare(batch, size)

        monkeypatch.setattr(runner, "prepare", watch)
        warmup.warmup_model(runner)
        assert sorted(lens) == [[13, 13, 13, 13, 12], [40, 24]]
        lens.clear()
        monkeypatch.setattr(runner, "max_num_seqs", 2)
        warmup.warmup_model(runner)
        assert sorted(lens) == [[32, 32], [40, 24]]
        lens.clear()
        monkeypatch.setattr(runner, "max_num_seqs", 1)
        warmup.warmup_model(runner)
        assert lens == [[40]]


def test_steps_are_compiled_before_they_are_captured(model_path, monkeypatch):
    """Beside those of the warm-up: all of few tokens; and larger prefills if their number of tokens
    is a power of two or the largest."""
    is_compiling = []

    @contextmanager
    def compiling_only():
        is_compiling.append(True)
        yield
        is_compiling.pop()

    monkeypatch.setattr(warmup, "compiling_only", compiling_only)
    monkeypatch.setattr(warmup, "MAX_ROWS", 8)
    monkeypatch.setattr(cuda_graphs, "PREFILL_TOKENS", [8, 12, 16, 24, 32, 48])
    with LLM(model_path, **{**SETTINGS, "max_num_batched_tokens": 60}) as llm:
        runner = llm.model_runner
        monkeypatch.setattr(runner.backend, "capturable", True, raising=False)
        assert cuda_graphs.graph_sizes(runner) == [
            *(GraphSize(True, num_tokens, 5) for num_tokens in (8, 12, 16, 24, 32, 48, 60)),
            *(GraphSize(False, num_seqs, num_seqs) for num_seqs in (1, 2, 4, 5)),
        ]
        steps = watched(runner, monkeypatch)

        def check(*args: Any) -> None:
            assert is_compiling

        runner.model.register_forward_pre_hook(check)
        warmup.compile_kernels(runner)
        prefills = [(num_tokens, 5) for num_tokens in (8, 16, 32, 60)]
        decodes = [(1, 1), (2, 2), (4, 4), (5, 5)]
        assert sorted(steps) == sorted([(60, 2), (60, 5), *prefills, *decodes])


def test_matmuls_of_over_4096_rows_are_not_loaded(model_path, monkeypatch):
    """Those of the LM head would need gigabytes."""
    loaded = []
    monkeypatch.setattr(warmup, "load_kernels", lambda _, row_counts: loaded.extend(row_counts))
    monkeypatch.setattr(warmup.torch.cuda, "synchronize", lambda: None)
    with LLM(model_path, **SETTINGS) as llm:
        warmup.load_cublas_kernels(llm.model_runner)
    assert loaded == sorted(loaded) and (loaded[0], loaded[-1]) == (128, 4096)
