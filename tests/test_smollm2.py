"""The real small model that example.py runs: its text makes sense, and its greedy tokens equal
those of transformers reading the same GGUF file, however the work is cut up."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from benchmarks.perplexity import CASES, TEXT, logprobs, read_windows
from example import PROMPTS, fetch_smollm2
from nanovllm import LLM, SamplingParams
from nanovllm.checkpoints.checkpoint import open_checkpoint
from tests.test_parity import transformers_greedy
from tests.test_quantized_cache import QuantizedCache

NUM_NEW_TOKENS = 32
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
QUESTIONS = [
    *PROMPTS,
    "What is 12 + 30?",
    "Name the planets of the solar system.",
    "Translate 'good morning' into Spanish.",
    "How do I boil an egg? " * 12,
]


@pytest.fixture(scope="module", autouse=True)
def _all_cores():
    if "PYTEST_XDIST_WORKER" not in os.environ:  # or threads of several processes wait in turns
        torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def path() -> Path:
    return fetch_smollm2()


@pytest.fixture(scope="module")
def prompts(path: Path) -> list[list[int]]:
    tokenizer = open_checkpoint(str(path)).load_tokenizer()
    assert tokenizer is not None
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Transformers' tokens, recorded: it takes 10 s to load the file. No two best logits are within
    0.01."""
    return json.loads((Path(__file__).parent / "data" / "smollm2_tokens.json").read_text("utf-8"))


@pytest.mark.slow
def test_the_recorded_tokens_are_those_of_transformers(path, prompts, expected):
    """The recorded tokens are the drafts: they spare time where they are right."""
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    for prompt, recorded in zip(prompts, expected, strict=True):
        assert transformers_greedy(model, prompt, NUM_NEW_TOKENS, recorded) == recorded


@pytest.mark.smoke
def test_it_knows_the_capital_of_france(path):
    with LLM(path, dtype="float32") as llm:
        chat = llm.tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is the capital of France?"}],
            tokenize=False,
            add_generation_prompt=True,
        )
        (output,) = llm.generate(chat, SamplingParams(temperature=0, max_tokens=32))
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="default", marks=pytest.mark.slow),
        pytest.param({"kvcache_block_size": 16}, id="block16", marks=pytest.mark.exhaustive),
        pytest.param(
            {"enable_prefix_caching": False}, id="no-prefix-cache", marks=pytest.mark.slow
        ),
        pytest.param({"max_num_batched_tokens": 64}, id="chunked", marks=pytest.mark.slow),
        pytest.param({"max_num_seqs": 1}, id="one-at-a-time", marks=pytest.mark.exhaustive),
        pytest.param(
            {"kvcache_block_size": 16, "num_kvcache_blocks": 17},
            id="preempted",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_tokens_equal_transformers(settings, path, prompts, expected, request):
    with LLM(path, dtype="float32", max_model_len=256, **settings) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        ours = [output["token_ids"] for output in outputs]
        assert ours == expected
        if request.node.callspec.id == "preempted":
            assert llm.scheduler.num_preemptions > 0


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rounds rows to FP8 numbers times the row's scale."""
    scales = x.abs().amax(-1, keepdim=True) / 448
    return (x * (1 / scales)).to(torch.float8_e4m3fn).float() * scales


def emulated_logprobs(path: Path, window: list[int], case: str) -> torch.Tensor:
    """Returns the log-probabilities of the tokens in transformers' model, which rounds what the
    engine keeps in FP8."""
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    projections = [module for name, module in model.named_modules() if name.endswith("_proj")]
    for module in projections if case.startswith("weights") else ():
        module.weight.data = rounded(module.weight.data)
        if case == "weights-inputs":
            module.register_forward_pre_hook(lambda module, args: rounded(args[0]))
    ids = torch.tensor([window])
    with torch.inference_mode():
        logits = model(ids, past_key_values=QuantizedCache() if case == "kv" else None).logits
    return -F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")


@pytest.fixture(scope="module")
def window(path: Path) -> list[int]:
    """1,024 tokens from the middle of the text."""
    return read_windows(path, TEXT, 1024)[20]


@pytest.fixture(scope="module")
def plain(path: Path, window: list[int]) -> torch.Tensor:
    return engine_logprobs(path, window, "plain")


def engine_logprobs(path: Path, window: list[int], case: str) -> torch.Tensor:
    return torch.tensor(logprobs(path, [window], CASES[case], "cpu", "float32")[0])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize(
    ("case", "most_change", "most_difference"),
    [
        pytest.param("weights", 0.02, 0.05, marks=pytest.mark.exhaustive),
        ("weights-inputs", 0.035, 0.9),
        ("kv", 0.015, 0.9),
    ],
)
def test_fp8_changes_log_probabilities_as_an_emulation(
    case, most_change, most_difference, path, window, plain
):
    """Inputs of weights are quantised on GPUs, but not on CPUs. benchmarks/perplexity.py measures
    the whole text."""
    found, expected = engine_logprobs(path, window, case), emulated_logprobs(path, window, case)
    change = math.expm1((plain - found).mean().item())
    # Sums in another order change a few FP8 numbers, and with them later layers. The difference is
    # 1 if the engine quantises nothing, and about 1.4 if its rounding errors are independent.
    difference = ((found - expected).norm() / (expected - plain).norm()).item()
    print(f"{case}: perplexity {change:+.2%}, difference {difference:.3f} of the change")
    assert change < most_change and difference < most_difference


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_the_gpu_writes_the_same_text_as_the_cpu(backend, path, prompts):
    texts = []
    for settings in ({"device": "cpu"}, {"device": "cuda", "attention_backend": backend}):
        with LLM(path, dtype="float32", max_model_len=256, max_num_seqs=16, **settings) as llm:
            texts.append([out["text"] for out in llm.generate(prompts, GREEDY, use_tqdm=False)])
    assert texts[0] == texts[1]
    assert all(texts[0])
