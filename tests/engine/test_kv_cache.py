"""How many KV blocks fit into memory."""

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from nanovllm.config import Config
from nanovllm.engine import cuda_graphs, kv_cache, warmup
from nanovllm.engine.kv_cache import num_blocks_on_cpu, num_blocks_on_gpu
from nanovllm.engine.kv_layout import group_layers, longest_sequence, most_blocks
from nanovllm.utils.distributed import TPGroup

GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch):
    """Has 64 GiB available."""
    memory = SimpleNamespace(available=64 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return memory


def on_cpu(max_num_seqs: int, max_model_len: int) -> int:
    config = Config("model", kvcache_block_size=16, max_num_seqs=max_num_seqs)
    return num_blocks_on_cpu(config, 1 << 20, max_model_len // 16)


def test_a_cache_on_a_cpu_needs_no_sysconf(machine: SimpleNamespace, monkeypatch):
    """The number of free pages was asked for, which macOS does not have, so every start failed."""
    monkeypatch.setattr(os, "sysconf", lambda name: {}[name])
    assert on_cpu(256, 4096) == 4096, "within 4 GiB"
    assert on_cpu(1, 160) == 10, "of as many as sequences can fill"


def test_the_page_cache_of_a_busy_machine_is_available(machine: SimpleNamespace, monkeypatch):
    """Free pages, of which a busy machine has few, were all that counted."""
    monkeypatch.setattr(os, "sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else 10)
    machine.available = 2 * GIB
    assert on_cpu(256, 4096) == 1024, "half of what is available"
    machine.available = 0
    assert on_cpu(256, 4096) == 1


def on_gpu(may_shorten: bool = False, free_bytes: int = 70 * GIB) -> int:
    length = 131_072
    config = Config(
        "model", gpu_memory_utilization=0.5, max_model_len=None if may_shorten else length
    )
    return num_blocks_on_gpu(
        config,
        16 << 20,
        length,
        length // 256,
        total_bytes=80 * GIB,
        free_bytes=free_bytes,
        own_bytes=8 * GIB,
        activation_bytes=2 * GIB,
        graph_bytes=GIB,
    )


def test_blocks_fill_what_is_left_of_a_gpu():
    assert on_gpu() == (40 - 8 - 2 - 1) * 64
    assert on_gpu(free_bytes=20 * GIB) == (20 - 2 - 1) * 64, "others have the rest"


def test_a_gpu_with_too_little_for_the_longest_sequence():
    """Refused if the length was asked for; by default sequences become shorter."""
    with pytest.raises(ValueError, match=r"max_model_len=131072 takes 8.00 GiB, but 1.00 GiB are"):
        on_gpu(free_bytes=4 * GIB)
    assert on_gpu(free_bytes=4 * GIB, may_shorten=True) == 64
    with pytest.raises(ValueError, match=r"one block .* takes 0.02 GiB, but 0.00 GiB are left"):
        on_gpu(free_bytes=3 * GIB, may_shorten=True)


@pytest.mark.parametrize(
    ("settings", "total_gib", "num_ranks", "windows", "expected"),
    [
        ({}, 140, 1, (None,), 2048),  # 1.1M tokens
        ({}, 48, 1, (None,), (int(43.2 * GIB) - 2 * GIB - kv_cache.CONTEXT_BYTES) // (28 << 20)),
        ({}, 12, 1, (None,), 512),
        ({}, 48, 2, (None,), 2048),  # each rank has half of the keys and values
        ({}, 140, 1, (None, 128, 128, 128), (126 - 2) * 1024 // 28 // 4),  # four blocks each
        ({"num_kvcache_blocks": 2000}, 140, 1, (None,), 1000),
        ({"num_kvcache_blocks": 20}, 140, 1, (None,), 512),
        ({"num_kvcache_blocks": 9000}, 40, 1, (None,), 1844),  # the logits of more are over 1/32
        ({"max_num_batched_tokens": 1024}, 140, 1, (None,), 1024),
        ({"enable_sleep_mode": True}, 140, 1, (None,), 2048),
        ({"enable_sleep_mode": True, "batch_invariant": True}, 140, 1, (None,), 1104),
    ],
)
def test_a_gpu_gets_as_many_sequences_as_its_cache_can_hold(
    settings, total_gib, num_ranks, windows, expected, monkeypatch
):
    """With Qwen3-0.6B's figures: a block of 128 tokens has 14 MiB, logits 151,936 numbers."""
    runner: Any = SimpleNamespace(
        config=Config("model", tensor_parallel_size=num_ranks, **settings),
        device=torch.device("cuda", 0),
        dtype=torch.bfloat16,
        tp=SimpleNamespace(size=num_ranks),
        model_config=SimpleNamespace(num_key_value_heads=8, head_dim=128, vocab_size=151_936),
        kv_groups=((*range(28),),) * len(windows),
        windows=windows,
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, total_gib * GIB))
    assert kv_cache.choose_num_seqs(runner, 2 * GIB) == pytest.approx(expected, abs=12)


def test_what_a_gpu_holds_is_measured_around_the_largest_steps(monkeypatch):
    """The peak of the warm-up above what stays is activations; what was there before the runner is
    not its own. The figures of the GPU are made up, and graphs take 1 GiB."""
    config = Config("model", kvcache_block_size=16, gpu_memory_utilization=0.5)
    runner: Any = SimpleNamespace(
        config=config,
        device=torch.device("cuda", 0),
        dtype=torch.bfloat16,
        tp=TPGroup(),
        max_model_len=4096,
        model_config=SimpleNamespace(num_key_value_heads=8, head_dim=64),
        kv_groups=((0, 2, 4, 6), (1, 3, 5, 7), (8, 9)),
        windows=(None, 128, 128),
    )
    events: list[Any] = []
    for module, name in (
        (kv_cache, "allocate_kv_cache"),
        (warmup, "warmup_model"),
        (cuda_graphs, "measure_graphs"),
    ):

        def note(*args: Any, name: str = name) -> int:
            events.append((name, *args[1:]))
            return GIB

        monkeypatch.setattr(module, name, note)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: events.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 7 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 * GIB, 80 * GIB))
    num_blocks = kv_cache.measure_kv_cache(runner, 2 * GIB, lambda part: None)
    assert events == [("allocate_kv_cache", 1), "reset", ("warmup_model",), ("measure_graphs",)]
    left = 40 * GIB - (3 * GIB + kv_cache.CONTEXT_BYTES) - 2 * GIB - GIB
    assert num_blocks == left // (2 * 4 * 16 * 8 * 64 * 2)
    assert kv_cache.max_num_blocks(runner) == 40 * GIB // (2 * 4 * 16 * 8 * 64 * 2)
    runner.config = replace(config, num_kvcache_blocks=9)
    assert kv_cache.measure_kv_cache(runner, 2 * GIB, lambda part: None) == 9
    assert events[4:] == events[:3], "the largest steps run in any case"


def test_groups_of_layers_are_few_and_waste_little():
    def grouped(pattern: str) -> list[tuple[int | None, int]]:
        windows = [128 if kind == "w" else None for kind in pattern]
        groups = group_layers(windows)
        assert sorted(layer for layers in groups for layer in layers) == list(range(len(windows)))
        assert all({windows[layer] for layer in layers} == {groups[layers]} for layers in groups)
        return [(window, len(layers)) for layers, window in groups.items()]

    assert grouped("f" * 28) == [(None, 28)]
    assert grouped("w" * 32) == [(128, 32)]
    assert grouped("wf" * 12) == [(128, 12), (None, 12)]
    assert grouped(("wwwwwf" * 6)[:34]) == [(128, 5)] * 5 + [(128, 4), (None, 5)]
    assert grouped("wf" * 12 + "w") == [(128, 13), (None, 12)]
    assert grouped(("wwwwwf" * 5)[:26]) == [(128, 4)] * 5 + [(128, 2), (None, 4)]


@pytest.mark.parametrize(
    ("windows", "num_blocks", "expected"),
    [
        ((None,), 7, 7),
        ((None, 40), 12, 6),
        ((None, 40, 40), 30, 12),  # beside it 9: three of the window, six of a chunk of 80
        ((40, 8), 3, 1),
        ((40, 8), 16, (2**31 - 1) // 16),  # three and one, and six each
    ],
)
def test_the_longest_sequence_has_the_cache_to_itself(windows, num_blocks, expected):
    config = Config("model", kvcache_block_size=16, max_num_batched_tokens=80)
    runner: Any = SimpleNamespace(config=config, windows=windows)
    assert longest_sequence(runner, num_blocks) == expected * 16
    assert most_blocks(runner, expected * 16) <= num_blocks
    assert expected > 1000 or most_blocks(runner, expected * 16 + 1) > num_blocks


def test_a_cache_without_a_block_for_each_group_is_refused():
    runner: Any = SimpleNamespace(config=Config("model"), windows=(None, 40, 40))
    with pytest.raises(ValueError, match=r"2 KV blocks hold no token, .* 3 groups"):
        longest_sequence(runner, 2)
