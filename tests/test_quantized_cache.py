"""A KV cache in FP8: attention reads the same keys and values however a sequence is computed, and
costs as much accuracy as the same formula in transformers.

Sums in another order change the last bit of a key, and so, rarely, an FP8 number. That changes
log-probabilities by up to about 1e-2, where quantisation changes them by more than 0.1.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.config import Config
from nanovllm.engine.kv_cache import block_bytes
from nanovllm.kernels.attention.backend import AttentionShape, select_attention_backend
from nanovllm.kernels.fp8 import FP8
from tests.tiny_models import VOCAB_SIZE, TinyModels

CPU: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "kvcache_block_size": 16,
    "max_logprobs": -1,
}
ROOMY = {**CPU, "enable_prefix_caching": False, "num_kvcache_blocks": 200}
WAYS = {
    "prefix-cache": {"num_kvcache_blocks": 200},
    "chunked": {"num_kvcache_blocks": 200, "max_num_batched_tokens": 24},
    "preempted": {"num_kvcache_blocks": 14, "max_num_seqs": 8},
    "two-ranks": {"num_kvcache_blocks": 200, "tensor_parallel_size": 2},
}
ATOL = 2e-2
slow = pytest.mark.slow


def random_prompts(lens: list[int]) -> list[list[int]]:
    """Every other prompt begins with the same 35 tokens."""
    generator = torch.Generator().manual_seed(1)
    draw = [torch.randint(0, VOCAB_SIZE, (n,), generator=generator).tolist() for n in [35, *lens]]
    return [draw[0] * (i % 2) + prompt for i, prompt in enumerate(draw[1:])]


PROMPTS = random_prompts([1, 5, 40, 33, 60, 10, 17])


def generate(llm: LLM) -> list[RequestOutput]:
    """Several completions of a prompt start with copies of its last block, which is partly full."""
    common: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "logprobs": 3}
    greedy = SamplingParams(temperature=0, **common)
    params = [SamplingParams(n=2, seed=i, **common) if i % 3 else greedy for i in range(7)]
    return llm.generate(PROMPTS, params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for out in outputs for completion in out.outputs]


def logprobs(outputs: list[RequestOutput]) -> np.ndarray:
    """Those of the sampled tokens."""
    found = []
    for completion in (completion for out in outputs for completion in out.outputs):
        rows = completion.logprobs or []
        found += [row[t].logprob for t, row in zip(completion.token_ids, rows, strict=True)]
    return np.array(found)


@pytest.fixture(scope="module")
def expected(tiny_models: TinyModels):
    """The outputs of a large cache without a prefix cache, computed once a model."""
    known: dict[str, list[RequestOutput]] = {}

    def compute(name: str) -> list[RequestOutput]:
        if name not in known:
            with LLM(tiny_models.path(name), **ROOMY, kv_cache_dtype="fp8") as llm:
                known[name] = generate(llm)
        return known[name]

    return compute


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=slow if name != "qwen3" or way == "two-ranks" else [])
        for name in ("qwen3", "qwen3-window", "gemma2", "gpt-oss")
        for way in WAYS
    ],
)
def test_a_sequence_is_the_same_however_it_is_computed(name, way, tiny_models, expected):
    settings = {**CPU, **WAYS[way], "kv_cache_dtype": "fp8_e4m3"}
    if name != "qwen3":
        settings["num_kvcache_blocks"] *= 3  # groups of layers
    with LLM(tiny_models.path(name), **settings) as llm:
        for _ in range(2):  # the second finds the first one's prefixes
            outputs = generate(llm)
            assert tokens(outputs) == tokens(expected(name))
            difference = np.abs(logprobs(outputs) - logprobs(expected(name)))
            assert difference.max() < ATOL and difference.mean() < ATOL / 20
        metrics = llm.metrics()
    assert metrics.prefix_cache_hit_rate > 0.1
    assert way != "preempted" or name != "qwen3" or metrics.num_preemptions > 0


def test_quantization_changes_more_than_that(tiny_models, expected):
    with LLM(tiny_models.path("qwen3"), **ROOMY) as llm:
        assert llm.model_runner.kv_scales is None
        difference = np.abs(logprobs(generate(llm)) - logprobs(expected("qwen3")))
    assert difference.max() > 5 * ATOL and difference.mean() > ATOL / 4


def stored(path: Path, before: list[list[int]], prompt: list[int], **settings: Any):
    """Returns what the cache holds of a prompt and 20 tokens generated after it: FP8 numbers, as
    int8 [2, layers, tokens, kv_heads, head_dim], and scales [layers, tokens, 2, kv_heads]."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    settings = {**CPU, "num_kvcache_blocks": 100, **settings}
    with LLM(path, kv_cache_dtype="fp8", **settings) as llm:
        llm.generate(before, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        llm.add_request(prompt, params)
        while not llm.scheduler.running or len(llm.scheduler.running[0]) < len(prompt) + 21:
            llm.step()
        (table,) = llm.scheduler.running[0].block_tables
        runner, end = llm.model_runner, len(prompt) + 20
        numbers = runner.kv_cache[:, :, table].flatten(2, 3)[:, :, :end].view(torch.int8)
        scales = runner.kv_scales[:, table].permute(0, 1, 4, 2, 3).flatten(1, 2)[:, :end]
    return numbers.clone(), scales.clone()


def test_the_cache_is_the_same_however_a_sequence_is_computed(tiny_models):
    path, prompt = tiny_models.path("qwen3"), PROMPTS[3]
    numbers, scales = stored(path, [], prompt)
    ways: list[tuple[list[list[int]], dict[str, Any]]] = [
        ([PROMPTS[1], PROMPTS[5]], {}),
        ([], {"max_num_batched_tokens": 24}),
        ([], {"kvcache_block_size": 5}),
    ]
    invariant = [stored(path, [], prompt, batch_invariant=True)]
    for before, settings in ways:
        invariant.append(stored(path, before, prompt, batch_invariant=True, **settings))
        assert all(map(torch.equal, invariant[0], invariant[-1])), "bit for bit"
        found, found_scales = stored(path, before, prompt, **settings)
        assert (found != numbers).sum() <= numbers.numel() / 1000
        torch.testing.assert_close(found_scales, scales, rtol=ATOL, atol=0)
        difference = (found_scales / scales - 1).abs()
        assert difference.median() < 1e-6
        # In the first layer, no key or value depends on attention.
        assert (found[:, 0] != numbers[:, 0]).sum() <= 2 and difference[0].max() < 1e-5


@pytest.mark.parametrize(
    "name", ["qwen3", pytest.param("gemma2", marks=slow), pytest.param("gpt-oss", marks=slow)]
)
def test_in_batch_invariant_engines_all_bits_are_equal(name, tiny_models):
    """Sums have one order there, so the differences above are rounding errors."""
    tight = CPU | WAYS["preempted"] | {"max_num_batched_tokens": 24}
    results = []
    for settings, num_runs in ((ROOMY, 1), (tight, 2)):  # the last finds prefixes in the cache
        num_blocks = settings["num_kvcache_blocks"] * (1 if name == "qwen3" else 3)
        changes = {"batch_invariant": True, "num_kvcache_blocks": num_blocks}
        with LLM(tiny_models.path(name), kv_cache_dtype="fp8", **settings | changes) as llm:
            for _ in range(num_runs):
                outputs = generate(llm)
                results.append((tokens(outputs), logprobs(outputs).tolist()))
            assert settings is ROOMY or name != "qwen3" or llm.metrics().num_preemptions > 0
    assert results[0] == results[1] == results[2]


class QuantizedCache(DynamicCache):
    """The keys and values that attention in transformers gets have been quantised."""

    def update(self, key_states, value_states, *args, **kwargs):
        def quantized(x: torch.Tensor) -> torch.Tensor:
            scale = x.abs().amax(-1, keepdim=True) / 448
            return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale

        return super().update(quantized(key_states), quantized(value_states), *args, **kwargs)


def mean_kl(exact: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Mean KL divergence of log-probabilities [positions, vocabulary]."""
    p, q = (torch.cat(x).double() for x in (exact, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        *(
            pytest.param(name, marks=slow)
            for name in ("gemma2", "gpt-oss", "smollm3", "mistral-window")
        ),
    ],
)
def test_next_token_distributions_are_as_good_as_an_emulations(name, tiny_models):
    prompts = random_prompts([90, 60, 60, 80])
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)

    def ours(kv_cache_dtype: str) -> list[torch.Tensor]:
        with LLM(tiny_models.path(name), **CPU, kv_cache_dtype=kv_cache_dtype) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        return [
            torch.tensor(
                [[row[i].logprob for i in range(VOCAB_SIZE)] for row in out.prompt_logprobs[1:]]
            )
            for out in outputs
        ]

    def theirs(cache: type[DynamicCache]) -> list[torch.Tensor]:
        model = tiny_models.load(name)
        with torch.inference_mode():
            each = [model(torch.tensor([p]), past_key_values=cache()) for p in prompts]
        return [out.logits[0, :-1].log_softmax(-1) for out in each]

    exact, quantized = ours("auto"), ours("fp8")
    kl, expected = mean_kl(exact, quantized), mean_kl(theirs(DynamicCache), theirs(QuantizedCache))
    assert 1e-4 < expected < (0.02 if name == "qwen3" else 1)  # others amplify errors
    assert expected / 1.05 < kl < expected * 1.05


def test_memory_is_counted(tiny_models, caplog):
    """A bf16 key of 128 elements has 256 bytes, an FP8 key 128 and a scale of 4."""
    num_bytes = {}
    for kv_cache_dtype in ("auto", "fp8"):
        settings = {**CPU, "dtype": "bfloat16", "num_kvcache_blocks": 10}
        with (
            caplog.at_level("INFO", "nanovllm"),
            LLM(tiny_models.path("qwen3"), **settings, kv_cache_dtype=kv_cache_dtype) as llm,
        ):
            runner = llm.model_runner
            total = runner.kv_cache.nbytes
            if runner.kv_scales is not None:
                total += runner.kv_scales.nbytes
                assert runner.kv_cache.dtype is FP8
            assert total == 10 * block_bytes(runner)
        assert ("(KV cache in FP8)" in caplog.text) == (kv_cache_dtype == "fp8")
        large: Any = SimpleNamespace(
            config=Config("model", kv_cache_dtype=kv_cache_dtype),
            dtype=torch.bfloat16,
            tp=SimpleNamespace(size=1),
            model_config=SimpleNamespace(num_key_value_heads=8, head_dim=128),
            kv_groups=((*range(28),),),
        )
        num_bytes[kv_cache_dtype] = block_bytes(large)
    assert num_bytes["auto"] / num_bytes["fp8"] == 256 / 132


@pytest.mark.parametrize("value", ["fp8_e5m2", "int8", "bfloat16", "nvfp4"])
def test_other_dtypes_are_refused(value):
    with pytest.raises(ValueError, match=f"kv_cache_dtype must be .*fp8_e4m3.*{value}"):
        Config("model", kv_cache_dtype=value)


def test_backends_and_gpus_without_fp8_are_refused(monkeypatch):
    shape = AttentionShape(2, 1, 64, 16, torch.bfloat16, torch.device("cuda", 0), is_quantized=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    with pytest.raises(ValueError, match="flash_attn: ValueError: it cannot read an FP8 KV cache"):
        select_attention_backend("flash_attn", shape)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (8, 6))
    for name in ("auto", "triton", "torch"):
        with pytest.raises(ValueError, match=r"needs .* 8\.9 or higher .* has 8\.6: leave"):
            select_attention_backend(name, shape)


def test_sleep_frees_numbers_and_scales(tiny_models):
    with LLM(tiny_models.path("qwen3"), **ROOMY, kv_cache_dtype="fp8") as llm:
        expected = tokens(generate(llm))
        scales = llm.model_runner.kv_scales
        assert scales is not None
        llm.sleep()
        assert scales.untyped_storage().nbytes() == 0
        llm.wake_up()
        assert tokens(generate(llm)) == expected


@pytest.mark.parametrize("num_blocks", [150, 151])
def test_the_alignment_does_not_depend_on_the_number_of_blocks(num_blocks, tiny_models):
    """Else Triton would compile the kernel that norms and stores keys for each alignment, with
    another order of summation."""
    settings = CPU | {"kvcache_block_size": 1, "num_kvcache_blocks": num_blocks}
    with LLM(tiny_models.path("qwen3"), **settings, kv_cache_dtype="fp8") as llm:
        runner = llm.model_runner
        assert (runner.kv_cache.data_ptr() - runner.kv_scales.data_ptr()) % 512 == 0
