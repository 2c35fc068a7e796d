"""Two ranks give what one gives: tokens, log-probabilities, refusals."""

import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.checkpoints.checkpoint import open_checkpoint
from nanovllm.engine import tensor_parallel
from nanovllm.engine.batch import Batch
from nanovllm.engine.in_flight import InFlightStep
from nanovllm.engine.kv_layout import group_layers
from tests.tiny_models import BASE, CONFIGS, TinyModels

# Little of everything: prompts come in chunks, blocks run out, prefixes are shared.
TIGHT: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 17,
    "enable_reordering": False,
}
NUM_NEW_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
# Shapes that ranks do not share evenly; name -> family, changes to its config.
UNEVEN: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2-one-kv-head": ("olmo2", {"num_key_value_heads": 1}),
    "llama-odd-vocabulary": ("llama", {"vocab_size": 511}),
    "qwen2-tied-odd-vocabulary-one-kv-head": (
        "qwen2",
        {"vocab_size": 509, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
}


def make_prompts(num: int = 9, shared_tokens: int = 70) -> list[list[int]]:
    """Of 1 to 200 tokens; every third starts with the same ones."""
    generator = torch.Generator().manual_seed(3)

    def draw(length: int) -> list[int]:
        return torch.randint(0, 500, (length,), generator=generator).tolist()

    shared, lengths = draw(shared_tokens), torch.linspace(1, 130, num).int().tolist()
    return [(shared if i % 3 == 2 else []) + draw(length) for i, length in enumerate(lengths)]


PROMPTS = make_prompts()
# One of each, by the position of the prompt.
MIXED = [
    GREEDY,
    SamplingParams(temperature=0.8, top_k=5, seed=1, max_tokens=10, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=2, n=2, max_tokens=10, ignore_eos=True),
    SamplingParams(temperature=0, logprobs=5, prompt_logprobs=3, max_tokens=12, ignore_eos=True),
    SamplingParams(
        temperature=0,
        presence_penalty=0.7,
        frequency_penalty=0.3,
        repetition_penalty=1.3,
        max_tokens=10,
        ignore_eos=True,
    ),
    SamplingParams(
        temperature=1.0, top_k=20, top_p=0.9, seed=3, n=2, logprobs=2, max_tokens=10, min_tokens=10
    ),
    SamplingParams(temperature=0, logit_bias={7: 3.0}, max_tokens=10, prompt_logprobs=0),
    SamplingParams(temperature=0, logprobs=-1, prompt_logprobs=-1, max_tokens=3),
]
MIXED = [MIXED[i % len(MIXED)] for i in range(len(PROMPTS))]


def generate(llm: LLM, params: Any = GREEDY, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(out.token_ids) for out in output.outputs] for output in outputs]


def assert_same(ours: list[RequestOutput], expected: list[RequestOutput], rtol: float = 0.0) -> int:
    """Equal tokens, and log-probabilities within fp32 rounding; returns how many those were."""
    assert tokens(ours) == tokens(expected)
    num_compared = 0
    for output, other in zip(ours, expected, strict=True):
        pairs = [(output.prompt_logprobs, other.prompt_logprobs)]
        for ours_, theirs in zip(output.outputs, other.outputs, strict=True):
            pairs.append((ours_.logprobs, theirs.logprobs))
        for found, whole in pairs:
            assert (found is None) == (whole is None)
            for a, b in zip(found or [], whole or [], strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    assert set(a) == set(b)
                    values = ([d[i].logprob for i in sorted(d)] for d in (a, b))
                    np.testing.assert_allclose(*values, rtol=rtol, atol=1e-4)
                    num_compared += len(a)
    return num_compared


@contextmanager
def count_events(llm: LLM, events: Counter[str]) -> Iterator[None]:
    """Counts what the engine's steps run into."""
    run, started = llm.model_runner.run, set()

    def counted(batch: Batch) -> InFlightStep:
        events["copied blocks"] += len(batch.block_copies)
        for item in batch.items:
            events["prefix hits"] += item.start > 0 and item.seq.seq_id not in started
            events["chunks"] += not item.samples
            started.add(item.seq.seq_id)
        return run(batch)

    llm.model_runner.run = counted  # type: ignore[method-assign]
    yield
    del llm.model_runner.run
    events["preemptions"] = llm.scheduler.num_preemptions


@pytest.fixture(scope="module")
def path_of(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("uneven")

    def path(name: str) -> Path:
        if name in CONFIGS:
            return tiny_models.path(name)
        if not (root / name).exists():
            family, changes = UNEVEN[name]
            config = CONFIGS[family][0](**{**BASE, **changes})
            TinyModels.build(config, seed=5).save_pretrained(root / name)
        return root / name

    return path


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("qwen3", marks=pytest.mark.exhaustive),
        pytest.param("smollm3", marks=pytest.mark.exhaustive),
        pytest.param("qwen3-moe", marks=pytest.mark.slow),
        pytest.param("olmoe", marks=pytest.mark.slow),
        pytest.param("gpt-oss", marks=pytest.mark.slow),
        pytest.param("llama-odd-vocabulary", marks=pytest.mark.exhaustive),
        pytest.param("gemma2", marks=pytest.mark.exhaustive),
        pytest.param("gemma3", marks=pytest.mark.slow),
        pytest.param("glm4", marks=pytest.mark.slow),
        pytest.param("granite", marks=pytest.mark.exhaustive),
        pytest.param("olmo2-one-kv-head", marks=pytest.mark.slow),
        pytest.param("olmo3", marks=pytest.mark.exhaustive),
        pytest.param("phi3-longrope", marks=pytest.mark.slow),
        pytest.param("ministral3", marks=pytest.mark.slow),
        "qwen2-tied-odd-vocabulary-one-kv-head",
    ],
)
def test_all_outputs_equal_those_of_one_rank(name: str, path_of: Callable):
    """Across chunked prefill, prefix hits, preemption, siblings that copy blocks, and everything
    that a request can ask for; the second run finds the first one's prefixes."""
    results = []
    for tensor_parallel_size in (1, 2):
        events: Counter[str] = Counter()
        settings = {**TIGHT, "tensor_parallel_size": tensor_parallel_size, "max_logprobs": -1}
        layers = open_checkpoint(str(path_of(name))).config.layers
        windows = [layer.attention.window for layer in layers]
        if name == "gpt-oss":  # three groups of layers; two of them have windows
            settings["num_kvcache_blocks"] *= 2
        elif any(windows):
            settings["num_kvcache_blocks"] *= len(group_layers(windows))
        if name in UNEVEN:
            settings["logprobs_mode"] = "processed_logprobs"
        with LLM(path_of(name), **settings) as llm, count_events(llm, events):
            results.append([generate(llm), generate(llm, MIXED)])
        if any(windows):  # the blocks that windows free may be enough for all
            events["preemptions"] += 1
        assert min(events.values()) > 0
        assert set(events) == {"copied blocks", "prefix hits", "chunks", "preemptions"}
    rtol = 2e-5 if name == "gemma2" else 0.0  # its log-probabilities go down to -14
    assert_same(results[1][0], results[0][0], rtol)
    assert assert_same(results[1][1], results[0][1], rtol) > 1000


@pytest.mark.slow
def test_messages_larger_than_a_pipe_holds(tiny_models: TinyModels):
    """Blocks of one token make tables of more than a megabyte."""
    settings: dict[str, Any] = {
        "device": "cpu",
        "max_num_seqs": 160,
        "kvcache_block_size": 1,
        "num_kvcache_blocks": 4000,
    }
    shared = [i % 500 for i in range(1800)]
    prompts = [[*shared, i] for i in range(160)]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    results, sizes = [], []
    for size in (1, 2):
        with LLM(tiny_models.path("llama"), tensor_parallel_size=size, **settings) as llm:
            generate(llm, params, [shared])
            if size == 2:
                workers = llm.model_runner.link
                send = workers.send

                def watched(message: Any, send: Any = send) -> None:
                    sizes.append(len(pickle.dumps(message, 5)))
                    send(message)

                workers.send = watched
            results.append(tokens(generate(llm, params, prompts)))
    assert results[0] == results[1]
    assert len(sizes) == 3, "one for each step"
    assert sizes[0] > 1 << 20, "the prefill's"


@pytest.mark.parametrize(
    "changes, size, match",
    [
        ({}, 3, "tensor_parallel_size=3 cannot split this model's 4 attention heads evenly"),
        ({}, 8, "tensor_parallel_size=8 cannot split this model's 4 attention heads evenly"),
        ({"intermediate_size": 130}, 4, "tensor_parallel_size=4 .* 130 MLP columns evenly"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 192},
            4,
            "tensor_parallel_size=4 cannot split this model's 6 key-value heads evenly",
        ),
    ],
)
def test_a_model_that_does_not_split_is_refused_before_any_process_starts(
    changes: dict[str, Any], size: int, match: str, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(tensor_parallel, "Workers", None)
    CONFIGS["qwen3"][0](**{**BASE, **changes}, architectures=["Qwen3ForCausalLM"]).save_pretrained(
        tmp_path
    )
    with pytest.raises(ValueError, match=match):
        LLM(tmp_path, tensor_parallel_size=size, load_format="dummy", **TIGHT)


@pytest.mark.skipif(torch.cuda.device_count() > 7, reason="has GPUs enough")
def test_too_few_gpus_are_refused_before_any_process_starts(tiny_models: TinyModels, monkeypatch):
    monkeypatch.setattr(tensor_parallel, "Workers", None)
    settings = {**TIGHT, "device": "cuda"}
    match = "GPUs: lower it" if torch.cuda.is_available() else "no CUDA GPU"
    with pytest.raises(ValueError, match=match):
        LLM(tiny_models.path("qwen3"), tensor_parallel_size=2, **settings)
