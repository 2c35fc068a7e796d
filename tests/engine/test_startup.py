"""Start-up: how long sequences may be, and what a start that fails leaves behind."""

import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm import LLM
from nanovllm.engine import startup
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.models.model_config import AttentionSpec
from tests.tiny_models import BASE, CONFIGS

SMALL: dict[str, Any] = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 8}


def fails_at_the_cache(held: list, monkeypatch) -> None:
    """With a cause, whose traceback has frames of its own."""

    def allocate(runner: ModelRunner) -> None:
        params = [*runner.model.parameters()]
        held.extend(map(weakref.ref, params))
        raise RuntimeError(f"no memory beside {len(params)} parameters")

    def fail(runner: ModelRunner, num_blocks: int) -> None:
        try:
            allocate(runner)
        except RuntimeError as error:
            raise ValueError("the cache does not fit") from error

    monkeypatch.setattr(startup, "allocate_kv_cache", fail)


def fails_in_loading(held: list, monkeypatch) -> None:
    def fail(model: torch.nn.Module, tensors: Any, shows_bar: bool) -> None:
        name, tensor = next(tensors)
        params = [*model.parameters(), tensor]
        held.extend(map(weakref.ref, params))
        raise ValueError(f"{name} is too much beside {len(params)}")

    monkeypatch.setattr(startup, "load_model", fail)


def is_interrupted(held: list, monkeypatch) -> None:
    def interrupt(runner: ModelRunner, num_blocks: int) -> None:
        held.extend(map(weakref.ref, runner.model.parameters()))
        raise KeyboardInterrupt

    monkeypatch.setattr(startup, "allocate_kv_cache", interrupt)


@pytest.mark.parametrize(
    "fault, size",
    [(fails_at_the_cache, 1), (fails_in_loading, 1), (is_interrupted, 1), (fails_at_the_cache, 2)],
)
def test_a_failed_start_keeps_no_weights(fault, size, model_path, monkeypatch):
    """They lived as long as the exception, as in a notebook, whose next start found the first
    one's weights still on the GPU."""
    held: list[weakref.ref] = []
    fault(held, monkeypatch)
    with pytest.raises((ValueError, KeyboardInterrupt)) as caught:
        LLM(model_path, tensor_parallel_size=size, **SMALL)
    assert held and not any(ref() is not None for ref in held)
    assert "the cache does not fit" in str(caught.value) or fault is not fails_at_the_cache


def test_by_default_sequences_are_as_long_as_the_cache_holds(tmp_path):
    """Nothing is as long as a model says that it may become: rotary embeddings, block tables."""
    config = CONFIGS["qwen3"][0](**{**BASE, "max_position_embeddings": 2**40})
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    for wanted, expected in ((None, 8 * 16), (100, 100), (1000, 1000)):
        with LLM(tmp_path, load_format="dummy", max_model_len=wanted, **SMALL) as llm:
            runner = llm.model_runner
            assert runner.max_model_len == expected
            (length,) = {
                len(buffer)
                for name, buffer in runner.model.named_buffers()
                if name.endswith("cos_sin_cache")
            }
            assert length == expected
            assert runner.block_tables.resident.size(-1) == -(-expected // 16)


def test_backends_are_told_which_features_some_layer_needs():
    """Guards a backend without sinks that fails in the first step."""
    plain = AttentionSpec(4, 2, 16, None)

    def features(*specs: AttentionSpec) -> frozenset[str]:
        model: Any = SimpleNamespace(layers=[SimpleNamespace(attention=spec) for spec in specs])
        return startup.attention_features(model)

    assert features(plain, plain) == frozenset()
    assert features(replace(plain, window=8), plain) == {"window"}
    assert features(plain, replace(plain, softcap=30.0, sinks=True)) == {"softcap", "sinks"}
