"""With ``batch_invariant=True`` a request has the same tokens and log-probabilities, bit for bit,
whatever else the engine computes with it. No comparison here has a tolerance."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from benchmarks.batch_invariance_proof import split_by_rows
from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.engine.startup import check_vocabulary
from nanovllm.kernels.attention import torch_invariant
from nanovllm.kernels.attention.backend import AttentionShape, select_attention_backend
from nanovllm.kernels.gemm.onednn import row_block_linear
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.quantization import batch_invariant
from nanovllm.quantization.base import use_batch_invariance, use_quantization
from tests.test_reliability import Memory
from tests.tiny_models import BASE, CONFIGS, TinyModels

# Settings of two engines: one in which everything fits, and one in which prompts come in chunks,
# blocks run out and prefixes are shared.
ROOMY: dict[str, Any] = {
    "device": "cpu",
    "batch_invariant": True,
    "skip_tokenizer_init": True,
    "max_model_len": 176,
    "kvcache_block_size": 32,
    "num_kvcache_blocks": 500,
    "max_logprobs": -1,
    "enable_prefix_caching": False,
}
TIGHT = ROOMY | {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 24,
    "kvcache_block_size": 4,
    "num_kvcache_blocks": 44,
    "enable_prefix_caching": True,
}
MIN_PREEMPTIONS = 10


def make_requests(num: int = 12, num_tokens: int = 24) -> list[tuple[list[int], SamplingParams]]:
    """Requests with prompts of 1 to 130 tokens. Every third prompt starts with the same tokens."""
    generator = torch.Generator().manual_seed(3)

    def random_tokens(length: int) -> list[int]:
        return torch.randint(3, 500, (length,), generator=generator).tolist()

    shared = random_tokens(40)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0.8, "logprobs": 5},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "logprobs": 0},
        {"temperature": 0, "prompt_logprobs": 3, "logprobs": 20},
        {"temperature": 1.0, "min_p": 0.02, "top_p": 0.95, "n": 4, "logprobs": 1},
        {"temperature": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 3},
    ]
    requests = []
    for i in range(num):
        prompt = (shared if i % 3 == 2 else []) + random_tokens(1 + 90 * i // max(1, num - 1))
        options = {"seed": i, "max_tokens": num_tokens, "ignore_eos": True, **kinds[i % len(kinds)]}
        requests.append((prompt, SamplingParams(**options)))
    return requests


REQUESTS = make_requests()


def bits(output: RequestOutput) -> list[Any]:
    """Everything that the model has computed for a request: tokens, and log-probabilities as they
    are stored. hex() tells every float from every other."""

    def of_list(logprobs: Any) -> Any:
        return logprobs and [
            position and [(i, x.logprob.hex(), x.rank) for i, x in position.items()]
            for position in logprobs
        ]

    completions = [(list(out.token_ids), of_list(out.logprobs)) for out in output.outputs]
    return [completions, of_list(output.prompt_logprobs)]


def generate(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    prompts, params = zip(*requests, strict=True)
    return [*map(bits, llm.generate([*prompts], [*params], use_tqdm=False))]


def generate_with_arrivals(
    llm: LLM, requests: list[tuple[list[int], SamplingParams]], interval: int = 3
) -> list[Any]:
    """Adds the last request first, and another one every ``interval`` steps."""
    found: dict[str, Any] = {}
    ids: list[str] = []
    waiting, num_steps = [*requests], 0
    while waiting or not llm.is_finished():
        if waiting and num_steps % interval == 0:
            ids.append(llm.add_request(*waiting.pop()))
        found |= {output.request_id: bits(output) for output in llm.step()}
        num_steps += 1
    return [found[request_id] for request_id in reversed(ids)]


def prove_at_once(
    path: Path, requests: list[tuple[list[int], SamplingParams]], **settings: Any
) -> list[Any]:
    """Asserts that requests have the same bits alone and all at once. Returns them."""
    with LLM(path, **{**ROOMY, **settings}) as llm:
        alone = [generate(llm, [request])[0] for request in requests]
        assert generate(llm, requests) == alone, "all at once"
        assert llm.scheduler.num_preemptions == 0
    return alone


def prove(path: Path, num_blocks: int = 44, **settings: Any) -> None:
    """Asserts that requests have the same bits in all compositions of batches.

    Args:
        num_blocks: KV blocks of the engine in which they run out.
        settings: further arguments of LLM.
    """
    alone = prove_at_once(path, REQUESTS, **settings)
    with LLM(path, **{**TIGHT, **settings, "num_kvcache_blocks": num_blocks}) as llm:
        assert generate(llm, REQUESTS) == alone, "chunks, preemptions"
        cached = llm.scheduler.num_cached_prompt_tokens
        assert generate_with_arrivals(llm, REQUESTS) == alone, "arrivals, cached prefixes"
        assert llm.scheduler.num_cached_prompt_tokens > cached
        assert llm.scheduler.num_preemptions >= MIN_PREEMPTIONS


# The windows of these models free blocks, and a block holds one group of layers only.
BLOCKS = {"gemma2": 80, "gemma3": 180, "gpt-oss": 80}
SLOW, EXHAUSTIVE = pytest.mark.slow, pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("name", "dtype"),
    [  # test_several_ranks has further pairs
        ("qwen3-tied", "float32"),
        pytest.param("qwen3-moe", "bfloat16", marks=EXHAUSTIVE),
        pytest.param("gpt-oss", "bfloat16", marks=SLOW),
        pytest.param("gemma2", "bfloat16", marks=SLOW),
        pytest.param("gemma3", "float32", marks=SLOW),
        pytest.param("olmo2", "float32", marks=EXHAUSTIVE),
        pytest.param("llama-bias", "float16", marks=EXHAUSTIVE),
    ],
)
def test_a_request_has_the_same_bits_in_any_batch(name: str, dtype: str, tiny_models: TinyModels):
    prove(tiny_models.path(name), BLOCKS.get(name, 44), dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype", "kv_cache_dtype"),
    [
        ("qwen3-tied", "bfloat16", "auto"),
        ("qwen3-tied", "bfloat16", "fp8"),
        ("qwen3-tied", "float32", "auto"),
        ("qwen3-moe", "bfloat16", "auto"),
        ("olmoe", "bfloat16", "auto"),  # three experts per token, whose weights are not normalised
        ("gpt-oss", "bfloat16", "auto"),
        ("gpt-oss", "bfloat16", "fp8"),
        ("gemma2", "bfloat16", "auto"),
        ("olmo2", "float16", "auto"),
        ("olmo2", "float16", "fp8"),
    ],
)
def test_a_request_has_the_same_bits_in_any_batch_on_a_gpu(
    name: str, dtype: str, kv_cache_dtype: str, tiny_models: TinyModels
):
    settings = {"dtype": dtype, "device": "cuda", "kv_cache_dtype": kv_cache_dtype}
    prove(tiny_models.path(name), BLOCKS.get(name, 44), **settings)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3-moe", "olmo2"])
def test_two_gpus(name: str, tiny_models: TinyModels):
    settings = {"dtype": "bfloat16", "device": "cuda", "tensor_parallel_size": 2}
    prove(tiny_models.path(name), BLOCKS.get(name, 44), **settings)


@pytest.mark.exhaustive
def test_a_thousand_other_requests(tiny_models: TinyModels):
    requests = make_requests(6, num_tokens=6)
    others = make_requests(1018, num_tokens=4)
    settings = ROOMY | {"max_num_seqs": 1024, "num_kvcache_blocks": 6000}
    with LLM(tiny_models.path("qwen3-moe"), **settings) as llm:
        alone = [generate(llm, [request])[0] for request in requests]
        found = generate(llm, [*others[:500], *requests, *others[500:]])
    assert found[500:506] == alone


@pytest.mark.parametrize(
    ("name", "dtype", "mode"),
    [
        pytest.param("qwen3-tied", "bfloat16", "raw_logprobs", marks=SLOW),
        pytest.param("qwen3-moe", "float32", "processed_logprobs", marks=EXHAUSTIVE),
    ],
)
def test_several_ranks(name: str, dtype: str, mode: str, tiny_models: TinyModels):
    options = {"tensor_parallel_size": 2, "dtype": dtype, "logprobs_mode": mode}
    prove(tiny_models.path(name), BLOCKS.get(name, 44), **options)


@pytest.mark.exhaustive
def test_four_ranks(tmp_path: Path):
    """With three and more ranks, the order in which gloo adds depends on a tensor's size."""
    config_class, changes = CONFIGS["qwen3"]
    config = config_class(**{**BASE, **changes, "vocab_size": 509})
    TinyModels.build(config, seed=5).save_pretrained(tmp_path)
    prove_at_once(tmp_path, make_requests(num_tokens=12), tensor_parallel_size=4)


@pytest.mark.slow
def test_processed_log_probabilities(tiny_models: TinyModels):
    """They need sums over the vocabulary for top-p."""
    prove(tiny_models.path("qwen3"), logprobs_mode="processed_logprobs")


def test_mixtures_of_experts_in_bf16_at_once(tiny_models: TinyModels):
    requests = make_requests(6, num_tokens=8)
    settings = {"dtype": "bfloat16", "logprobs_mode": "processed_logprobs"}
    prove_at_once(tiny_models.path("qwen3-moe"), requests, **settings)


def test_weights_rounded_to_fp8(tiny_models: TinyModels):
    """They are those of an engine without batch invariance."""
    path, requests = tiny_models.path("qwen3-moe"), make_requests(6, num_tokens=8)
    rounded = prove_at_once(path, requests, quantization="fp8", dtype="float32")
    found = {}
    for quantization in ("fp8", None):
        settings = ROOMY | {"batch_invariant": False, "quantization": quantization}
        with LLM(path, **settings, dtype="float32") as llm:
            found[quantization] = generate(llm, requests)

    def tokens(answers: list[Any]) -> list[Any]:
        return [[token_ids for token_ids, _ in completions] for completions, _ in answers]

    assert tokens(found["fp8"]) == tokens(rounded) != tokens(found[None])


@contextmanager
def num_threads(num: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "name",
    [pytest.param("qwen3-tied", marks=SLOW), pytest.param("qwen3-moe", marks=EXHAUSTIVE)],
)
def test_any_number_of_threads(name: str, tmp_path: Path):
    """Of a model whose tensors are large enough for several threads."""
    config_class, changes = CONFIGS[name]
    sizes = {"hidden_size": 512, "intermediate_size": 1500, "vocab_size": 40_000}
    config = config_class(**{**BASE, **changes, **sizes, "moe_intermediate_size": 700})
    TinyModels.build(config).save_pretrained(tmp_path)
    requests = make_requests(num_tokens=8)[::3]
    with LLM(tmp_path, **ROOMY) as llm:
        alone = [generate(llm, [request])[0] for request in requests]
        for num in (2, 3):
            with num_threads(num):
                assert generate(llm, requests) == alone


def test_siblings_are_the_same_as_requests_with_their_seeds(tiny_models: TinyModels):
    """A completion's seed is the hash of the request's seed and its index."""
    prompt = REQUESTS[5][0]

    def params(seed: int, n: int = 1) -> SamplingParams:
        return SamplingParams(seed=seed, n=n, max_tokens=20, ignore_eos=True, logprobs=3)

    seeds = [7, *(xxhash.xxh64_intdigest(f"7/{i}".encode()) for i in range(1, 4))]
    with LLM(tiny_models.path("qwen3-tied"), **TIGHT) as llm:
        (siblings,) = generate(llm, [(prompt, params(7, n=4))])
        alone = [generate(llm, [(prompt, params(seed))])[0] for seed in seeds]
    assert [[completion] for completion in siblings[0]] == [single[0] for single in alone]


@pytest.mark.slow
def test_settings_of_the_engine_and_processes_do_not_matter(tiny_models: TinyModels):
    path = tiny_models.path("qwen3-tied")
    with LLM(path, **TIGHT) as llm:
        expected = generate(llm, REQUESTS)
    code = (
        "import sys; from tests.test_batch_invariance import *; torch.set_num_threads(1)\n"
        "with LLM(sys.argv[1], **ROOMY | {'kvcache_block_size': 7}) as llm: "
        "print(generate(llm, REQUESTS))"
    )
    command = [sys.executable, "-c", code, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert result.stdout.splitlines()[-1] == str(expected)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("aten", "onednn"),
    [
        pytest.param("avx2", "AVX2", marks=EXHAUSTIVE),
        pytest.param("default", "SSE41", marks=EXHAUSTIVE),
    ],
)
def test_cpus_with_other_instructions(aten: str, onednn: str):
    """PyTorch and oneDNN choose their kernels by the CPU's instructions. Runs the fast tests."""
    files = ["test_batch_invariance.py", "kernels/test_batch_invariant_rows.py"]
    files += ["kernels/gemm/test_onednn.py", "kernels/attention/test_torch_invariant.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-n0", *(f"tests/{name}" for name in files)]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn}
    subprocess.run(command, env=environment, check=True, timeout=1400)


def test_smaller_steps_after_one_that_ran_out_of_memory(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
):
    requests = make_requests(6, num_tokens=8)
    with LLM(tiny_models.path("qwen3-tied"), **ROOMY) as llm:
        expected = generate(llm, requests)
        memory = Memory(llm, monkeypatch, "run", lambda batch: len(batch) <= 3)
        assert generate(llm, requests) == expected
        assert memory.num_failures > 0


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=SLOW)])
def test_weights_that_change(dtype: str, tiny_models: TinyModels):
    """With bf16, matmuls read a copy of the weights in fp32."""
    path, requests = tiny_models.path("qwen3-tied"), make_requests(2, num_tokens=8)
    state = tiny_models.load("qwen3-tied").state_dict()
    with LLM(path, **ROOMY, dtype=dtype) as llm:
        expected = generate(llm, requests)
        llm.load_weights((name, tensor * 0.9) for name, tensor in state.items())
        assert generate(llm, requests) != expected
        llm.sleep(level=2)
        llm.wake_up()
        llm.load_weights(state.items())
        assert generate(llm, requests) == expected


def test_what_is_refused(tiny_models: TinyModels):
    on_gpu = AttentionShape(4, 2, 16, 16, torch.float32, torch.device("cuda", 0))
    for name in ("flash_attn", "torch"):
        with pytest.raises(ValueError, match=f"{name}: ValueError: it is not batch-invariant"):
            select_attention_backend(name, on_gpu, batch_invariant=True)
    with pytest.raises(ValueError, match="multiple of 16, and this model has 50257 tokens"):
        check_vocabulary(50_257)
    with pytest.raises(ValueError, match="flash_attn: ValueError: it is not batch-invariant"):
        LLM(tiny_models.path("qwen3"), **ROOMY, attention_backend="flash_attn")
    quantization = use_quantization({"quant_method": "awq"})
    with use_batch_invariance(True), quantization, pytest.raises(ValueError, match="'awq'"):
        ReplicatedLinear(8, 8)


def linear_that_splits_k_by_rows(x: torch.Tensor, weight: Any, bias: Any = None) -> torch.Tensor:
    """A GEMM with split-K for small batches, as libraries have it."""
    if len(x) > 4:
        return row_block_linear(x, weight, bias)
    weight, middle = weight.to_dense(), x.size(1) // 2
    halves = (row_block_linear(x[:, k], weight[:, k].contiguous()) for k in halves_of(middle))
    return sum(halves, torch.zeros(())) if bias is None else sum(halves, bias)


def halves_of(middle: int) -> tuple[slice, slice]:
    return slice(middle), slice(middle, None)


def test_a_gemm_that_splits_by_the_number_of_rows_is_noticed(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
):
    """Otherwise the proof would prove nothing."""
    monkeypatch.setattr(batch_invariant, "batch_invariant_linear", linear_that_splits_k_by_rows)
    with pytest.raises(AssertionError, match="all at once"):
        prove_at_once(tiny_models.path("qwen3-tied"), REQUESTS[:4])


@pytest.mark.gpu
def test_a_gemm_that_splits_by_the_number_of_rows_is_noticed_on_a_gpu(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
):
    planted = split_by_rows(batch_invariant.batch_invariant_linear)
    monkeypatch.setattr(batch_invariant, "batch_invariant_linear", planted)
    settings = {"dtype": "bfloat16", "device": "cuda"}
    with pytest.raises(AssertionError, match="all at once"):
        prove_at_once(tiny_models.path("qwen3-tied"), REQUESTS, **settings)


def test_attention_that_splits_by_the_number_of_queries_is_noticed(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
):
    attend = torch_invariant._attend

    def attend_with_split(q: torch.Tensor, *args: Any) -> None:
        monkeypatch.setattr(torch_invariant, "TILE", 16 if len(q) == 1 else 128)
        attend(q, *args)

    monkeypatch.setattr(torch_invariant, "_attend", attend_with_split)
    with pytest.raises(AssertionError, match="all at once"):
        prove_at_once(tiny_models.path("qwen3-tied"), REQUESTS[:4])
