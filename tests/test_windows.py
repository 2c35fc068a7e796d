"""Layers with a window beside layers without one, in an engine: which KV blocks they hold, and that
it changes no token how often blocks are freed, shared and computed again."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from nanovllm import LLM, SamplingParams
from tests.invariants import check_scheduler
from tests.tiny_models import BASE, TinyModels

WINDOW: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 10,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
CPU: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True}
ROOMY = {**CPU, "max_model_len": 128, "enable_prefix_caching": False}
TIGHT = {
    **CPU,
    "max_model_len": 64,
    "kvcache_block_size": 4,
    "num_kvcache_blocks": 40,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 24,
}


def save(folder: Path, **changes: Any) -> Path:
    TinyModels.build(Qwen3Config(**{**BASE, **WINDOW, **changes})).save_pretrained(folder)
    return folder


def test_tokens_do_not_depend_on_how_blocks_come_and_go(tmp_path):
    """Chunks, preemption, siblings and hits of the prefix cache, against a large cache without
    any."""
    path = save(tmp_path)
    shared = [(7 * i) % 500 for i in range(30)]
    prompts = [[*shared[: 3 * i], i, 4, 9] for i in range(10)]
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    sampled = SamplingParams(seed=5, max_tokens=20, ignore_eos=True, n=3)
    params = [sampled if i % 3 == 0 else greedy for i in range(10)]
    results = []
    for settings in (ROOMY, TIGHT):
        with LLM(path, **settings) as llm:
            assert sorted(map(str, llm.model_runner.windows)) == ["10", "10", "None"]
            for _ in range(2):
                outputs = llm.generate(prompts, params, use_tqdm=False)
                results.append([[c.token_ids for c in out.outputs] for out in outputs])
                check_scheduler(llm.scheduler)
                assert not llm.scheduler.block_manager.used_block_ids
            metrics = llm.metrics()
    assert metrics.num_preemptions > 0 and metrics.prefix_cache_hit_rate > 0.1
    assert results[0] == results[1] == results[2] == results[3]


@pytest.mark.slow
def test_a_long_prompt_holds_few_blocks_of_layers_with_windows(tmp_path):
    """20,000 tokens and windows of 128: 8 full blocks and a chunk, in each of two groups."""
    path = save(tmp_path, sliding_window=128, max_position_embeddings=20_100)
    settings = {"kvcache_block_size": 16, "max_num_batched_tokens": 1024, "max_num_seqs": 1}
    most = 0
    with LLM(path, **CPU, **settings, num_kvcache_blocks=1252 + 2 * (8 + 1 + 64)) as llm:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        llm.add_request([(i * i) % 500 for i in range(20_000)], params)
        used = llm.scheduler.block_manager.used_block_ids
        while not llm.is_finished():
            llm.step()
            most = max(most, len(used))
            if llm.scheduler.running and len(llm.scheduler.running[0]) > 20_000:
                assert len(used) <= 1252 + 2 * (8 + 1)
    assert 1250 < most <= 1250 + 2 * (8 + 1 + 64)
