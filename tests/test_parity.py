"""Greedy tokens equal transformers' on the same fp32 weights, however the work is cut up."""

import pytest
import torch
from transformers import PreTrainedModel

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoints.checkpoint import open_checkpoint
from nanovllm.engine import startup
from nanovllm.engine.kv_layout import group_layers
from nanovllm.kernels.attention.triton_backend import TritonAttention
from tests.invariants import check_scheduler
from tests.tiny_models import VOCAB_SIZE, TinyModels

ON_GPU = torch.cuda.is_available()
MODELS = [
    "qwen3",
    "qwen3-tied",
    "llama",
    "llama-linear",
    "llama-bias",
    "qwen2",
    "mistral",
    "smollm3",
    "llama-yarn",
    "llama-dynamic",
    "qwen2-window",
    "qwen3-window",
    "mistral-window",
    "smollm3-window",
    "ministral3",
    "gemma2",
    "gemma3",
    "gemma3-vision",
    "olmo2",
    "olmo3",
    "granite",
    "glm",
    "glm4",
    "phi3",
    "phi3-longrope",
    "qwen3-moe",
    "qwen3-moe-every-second",
    "mixtral",
    "olmoe",
    "granitemoe",
    "gpt-oss",
]
if ON_GPU:  # what differs between the others does not touch the device's kernels
    MODELS = ["qwen3", "llama", "smollm3", "qwen3-moe"]
# The models' seed is chosen so that on a CPU no two best logits are within 5e-5. A GPU's other
# order of sums can turn a margin under 1e-3: from there on a sequence is not compared.
SMALLEST_MARGIN = 1e-3 if ON_GPU else 5e-5
NUM_NEW_TOKENS = 48  # one window and three small blocks
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)


def ragged_prompts() -> list[list[int]]:
    """32 prompts of 1 to 600 tokens; every fourth starts with the same 100 tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 2, 15, 16, 17, 255, 256, 257, 600]
    lengths += torch.randint(3, 600, (32 - len(lengths),), generator=generator).tolist()
    shared = torch.randint(0, VOCAB_SIZE, (100,), generator=generator).tolist()
    prompts = []
    for i, length in enumerate(lengths):
        prompt = torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()
        if i % 4 == 3:
            prompt = (shared + prompt)[:600]
        prompts.append(prompt)
    return prompts


PROMPTS = ragged_prompts()[:16]
slow = pytest.mark.slow
# One family runs in every configuration; the others in the default one, with a prompt of each kind,
# and in all with the slow tests.
THOROUGH = "qwen3"
NUM_FEW = 10
VARIANTS = (  # of a family that another name stands for; they run with the slow tests
    *("qwen3-tied", "llama-linear", "llama-bias", "llama-yarn", "llama-dynamic"),
    *("qwen2-window", "qwen3-window", "smollm3-window", "gemma3-vision", "glm", "phi3-longrope"),
    "qwen3-moe-every-second",
)
EVERY_MODEL = pytest.mark.parametrize(
    "name", [name if name == THOROUGH else pytest.param(name, marks=slow) for name in MODELS]
)
CONFIGURATIONS = {  # and blocks of 16, which test_tokens_survive_prefix_cache_hits has
    "default": {},
    "block1": {"kvcache_block_size": 1},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 64},
    "chunked-block16": {"max_num_batched_tokens": 64, "kvcache_block_size": 16},
}


@torch.inference_mode()
def transformers_greedy(
    model: PreTrainedModel, prompt: list[int], num_tokens: int, draft: list[int] | None = None
) -> list[int]:
    """One prompt alone, without padding, KV cache or generate(). Ends before the first token whose
    margin is too small to compare (which no CPU test allows).

    One forward pass verifies all tokens of ``draft``, as in speculative decoding: the result does
    not depend on them, only the number of passes does.
    """
    out: list[int] = []
    while len(out) < num_tokens:
        rest = (draft or [])[len(out) : num_tokens - 1]
        tokens = torch.tensor([prompt + out + rest])
        logits = model(tokens, logits_to_keep=len(rest) + 1).logits[0]
        for row, drafted in zip(logits, [*rest, None], strict=True):
            (first, second), (token, _) = row.topk(2)
            if first - second < SMALLEST_MARGIN:
                assert ON_GPU, "too close to call in fp32: take another seed"
                return out
            out.append(int(token))
            if out[-1] != drafted:
                break  # the tokens after it continue another text
    return out


def assert_same_tokens(ours: list[list[int]], expected: list[list[int]]) -> None:
    assert len(ours) == len(expected)
    for tokens, oracle in zip(ours, expected, strict=True):
        assert tokens[: len(oracle)] == oracle
    assert sum(map(len, expected)) > 0.8 * sum(map(len, ours)), "most tokens were compared"


@pytest.fixture(scope="module")
def expected(tiny_models: TinyModels):
    """Transformers' tokens for the first PROMPTS, computed once a model. The drafts are ours: they
    spare time where they are right, and change nothing where they are wrong."""
    cache: dict[str, list[list[int]]] = {}

    def compute(name: str, drafts: list[list[int]]) -> list[list[int]]:
        found = cache.setdefault(name, [])
        if len(found) < len(drafts):
            model = tiny_models.load(name)
            found += [
                transformers_greedy(model, PROMPTS[i], NUM_NEW_TOKENS, drafts[i])
                for i in range(len(found), len(drafts))
            ]
        return found[: len(drafts)]

    return compute


# fp32 on each: flash-attn has none.
@pytest.fixture(params=["triton", "torch"] if ON_GPU else ["torch"])
def engine(request) -> dict:
    """Settings common to all: the attention backend, few batch sizes to capture, a small cache."""
    return {
        "attention_backend": request.param,
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "gpu_memory_utilization": 0.1,
    }


def generate(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [out["token_ids"] for out in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize(
    ("name", "configuration"),
    [
        pytest.param(
            name,
            configuration,
            marks=[]
            if name == THOROUGH or (configuration == "default" and name not in VARIANTS)
            else slow,
        )
        for name in MODELS
        for configuration in CONFIGURATIONS
    ],
)
def test_tokens_equal_transformers(name, configuration, engine, tiny_models, expected):
    is_one_of_all = name == THOROUGH or configuration != "default" or name in VARIANTS
    prompts = PROMPTS if is_one_of_all else PROMPTS[:NUM_FEW]
    with LLM(tiny_models.path(name), **engine, **CONFIGURATIONS[configuration]) as llm:
        ours = generate(llm, prompts)
        assert_same_tokens(ours, expected(name, ours))


@EVERY_MODEL
def test_tokens_survive_preemption(name, engine, tiny_models, expected):
    """42 blocks hold one long sequence in each group of layers; everything else waits its turn or
    is preempted. Layers with a window free what they take, so their sequences may only wait."""
    path = tiny_models.path(name)
    layers = open_checkpoint(str(path)).config.layers
    num_blocks = 42 * len(group_layers([layer.attention.window for layer in layers]))
    settings = {**engine, "kvcache_block_size": 16, "num_kvcache_blocks": num_blocks}
    with LLM(path, **settings, enable_reordering=False) as llm:
        ours = generate(llm, PROMPTS)
        assert_same_tokens(ours, expected(name, ours))
        assert llm.scheduler.num_preemptions > 0 or any(llm.model_runner.windows)
        check_scheduler(llm.scheduler)


@EVERY_MODEL
def test_tokens_equal_one_prompt_at_a_time(name, engine, tiny_models, expected):
    with LLM(tiny_models.path(name), **engine, enable_prefix_caching=False) as llm:
        ours = [generate(llm, [prompt])[0] for prompt in PROMPTS[:8]]
        assert_same_tokens(ours, expected(name, ours))


@pytest.mark.smoke
@EVERY_MODEL
def test_tokens_survive_prefix_cache_hits(name, engine, tiny_models, expected):
    """The second call finds every full block of the first one's prompts in the cache."""
    with LLM(tiny_models.path(name), **engine, kvcache_block_size=16) as llm:
        first = generate(llm, PROMPTS)
        oracle = expected(name, first)
        assert_same_tokens(first, oracle)
        assert_same_tokens(generate(llm, PROMPTS), oracle)
        repeated = [PROMPTS[8]] * 6 + [PROMPTS[6]] * 6
        assert_same_tokens(generate(llm, repeated), [oracle[8]] * 6 + [oracle[6]] * 6)


@pytest.mark.skipif(ON_GPU, reason="the tests above run the kernels")
@pytest.mark.parametrize(
    ("name", "lens"),
    [
        ("gemma2", [58]),
        pytest.param("smollm3", [2, 17], marks=slow),
        pytest.param("qwen3", [2, 17, 357], marks=pytest.mark.exhaustive),
        pytest.param("gemma3", [17, 131], marks=pytest.mark.exhaustive),
        pytest.param("mistral-window", [17, 131], marks=slow),
        pytest.param("gpt-oss", [2, 131], marks=slow),
    ],
)
def test_the_kernels_of_attention_in_an_engine(name, lens, tiny_models, monkeypatch):
    """In Triton's interpreter: what the host plans for a decode is what the kernel reads. Chunks
    and windows have 40 tokens, so a prompt of 58 tokens has a block that its window has left."""
    monkeypatch.setattr(startup, "select_attention_backend", lambda *_, **__: TritonAttention())
    model = tiny_models.load(name)
    prompts = [PROMPTS[7][:length] for length in lens]
    oracle = [transformers_greedy(model, prompt, 3) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    settings = {"kvcache_block_size": 16, "num_kvcache_blocks": 200, "max_num_batched_tokens": 40}
    with LLM(tiny_models.path(name), device="cpu", **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert_same_tokens([out["token_ids"] for out in outputs], oracle)
