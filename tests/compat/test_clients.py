"""Programs that are written for vLLM run unmodified, on a real small model.

The packages are those of the extra ``clients``. Each program runs in a process of its own, under
``python -m nanovllm.compat``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import regex

from tests.once import once
from tests.vllm_answers import weights

ROOT = Path(__file__).parents[2]
CLIENTS = Path(__file__).parent / "clients"
COMPAT = ["-m", "nanovllm.compat"]
VLLM_VERSION = "0.32.0"
PARIS = "The capital of France is Paris."

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def model() -> Path:
    """SmolLM2-135M-Instruct as a checkpoint folder."""
    return weights.smollm2(weights.cache())


def run(*command, cwd=None) -> str:
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    env.pop("TRITON_INTERPRET", None)  # for the kernels of these tests' own process
    result = subprocess.run(
        [sys.executable, *map(str, command)],
        check=False,
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def run_client(name, *arguments):
    """What the client prints last, as JSON."""
    return json.loads(run(*COMPAT, CLIENTS / name, *arguments).splitlines()[-1])


@pytest.mark.exhaustive
def test_outlines(model):
    results = run_client("use_outlines.py", model)
    assert results["text"] == PARIS
    assert results["choice"] == "Paris"
    assert json.loads(results["city"]).keys() == {"name", "country"}
    assert results["batch"][0] == [PARIS] and len(results["batch"]) == 2


@pytest.mark.exhaustive
def test_langchain(model):
    results = run_client("use_langchain.py", model)
    assert results["text"].startswith(" Paris")
    assert [text.split(".")[0] for text in results["chain"]] == [" Tokyo", " Rome"]


@pytest.mark.exhaustive
def test_evalplus(model):
    solutions = run_client("use_evalplus.py", model)
    assert len(solutions) == 2 and solutions[0] == solutions[1]
    assert "def add(a, b):" in solutions[0] and "```" not in solutions[0]


@pytest.mark.exhaustive
def test_distilabel(model, tmp_path):
    results = run_client("use_distilabel.py", model, tmp_path)
    assert results["texts"][0] == [PARIS] and results["pipeline"] == [PARIS]
    assert results["num_logprobs"] == [tokens[0] for tokens in results["num_tokens"]]


# Trainings of a tiny model. Every second one has no sleep mode.
TRL_SETTINGS = [
    {"temperature": 0.5, "top_p": 1.0, "max_steps": 6, "vllm_enable_sleep_mode": True},
    {"temperature": 0.7, "top_p": 1.0, "max_steps": 6},
    {"temperature": 1.0, "top_p": 1.0, "max_steps": 30, "vllm_enable_sleep_mode": True},
    {"temperature": 0.7, "top_p": 0.9, "max_steps": 6},
    {"temperature": 1.0, "top_p": 0.9, "max_steps": 6, "vllm_enable_sleep_mode": True},
]


@pytest.fixture(scope="module")
def trl(model_path, tmp_path_factory):
    """What ``use_trl.py`` prints about each training of TRL_SETTINGS."""

    def train():
        folder = tmp_path_factory.mktemp("trl")
        return run_client("use_trl.py", model_path, folder, json.dumps(TRL_SETTINGS))

    return once(tmp_path_factory, "trl", train)


@pytest.mark.exhaustive
class TestTrl:
    """TRL's GRPOTrainer with use_vllm=True and vllm_mode="colocate", in float32."""

    @pytest.mark.parametrize("index", range(len(TRL_SETTINGS)))
    def test_importance_ratios(self, trl, index):
        """The trainer does not apply top_p, so its probability of a token over the engine's is the
        probability of all tokens that top_p keeps."""
        settings, ratios = TRL_SETTINGS[index], trl[index]["ratios"]
        assert len(ratios) == settings["max_steps"]
        for generation in ratios:
            assert generation["error"] < 0.01
            if settings["top_p"] == 1:
                assert 0.99 < generation["min"] <= generation["max"] < 1.01
            else:
                assert 0.89 < generation["min_expected"] < 0.95
        assert ratios[-1]["old"] > 0.5  # so the weights of the checkpoint would be noticed

    def test_the_reward_rises(self, trl):
        rewards = trl[2]["rewards"]
        assert sum(rewards[-5:]) / 5 > 0.3 + sum(rewards[:5]) / 5


@pytest.fixture(scope="module")
def lm_eval(model, tmp_path_factory):
    """For each of the harness's backends its scores, and by task its answers."""
    return once(tmp_path_factory, "lm_eval", lambda: run_lm_eval(model, tmp_path_factory))


def run_lm_eval(model, tmp_path_factory):
    results = {}
    for backend, batch_size in (("vllm", "auto"), ("hf", 8)):
        folder = tmp_path_factory.mktemp(backend)
        arguments = ["--model_args", f"pretrained={model},dtype=float32,max_length=2048"]
        # The checkpoint recommends a penalty, which transformers' generate would apply.
        arguments += ["--gen_kwargs", "repetition_penalty=1.0", "--device", "cpu"]
        arguments += ["--batch_size", batch_size, "--log_samples", "--output_path", folder]
        run(ROOT / "examples" / "lm_eval_vllm.py", "--model", backend, *arguments)
        (scores,) = folder.rglob("results_*.json")
        results[backend] = {
            "scores": json.loads(scores.read_text("utf-8"))["results"],
            "answers": {
                task: answers(*folder.rglob(f"samples_{task}_*.jsonl"))
                for task in ("everyday_choices", "sentence_ends")
            },
        }
    return results


def answers(path):
    samples = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [s["filtered_resps"] for s in sorted(samples, key=lambda s: s["doc_id"])]


@pytest.mark.exhaustive
class TestLmEval:
    """The harness's own command line gives what its transformers backend gives."""

    def test_scores_are_equal(self, lm_eval):
        for task, metric in (
            ("everyday_choices", "acc,none"),
            ("sentence_ends", "exact_match,stripped"),
        ):
            ours, theirs = (lm_eval[backend]["scores"][task][metric] for backend in ("vllm", "hf"))
            assert ours == theirs > 0.5

    def test_texts_are_equal(self, lm_eval):
        ours, theirs = (lm_eval[b]["answers"]["sentence_ends"] for b in ("vllm", "hf"))
        assert ours == theirs and len(ours) == 18

    def test_log_likelihoods_are_equal(self, lm_eval):
        ours, theirs = (lm_eval[b]["answers"]["everyday_choices"] for b in ("vllm", "hf"))
        pairs = [p for a, b in zip(ours, theirs, strict=True) for p in zip(a, b, strict=True)]
        assert len(pairs) == 240
        for (a, is_greedy), (b, also) in pairs:
            assert float(a) == pytest.approx(float(b), abs=1e-3) and is_greedy == also


@pytest.fixture(scope="module")
def vllm_examples(tmp_path_factory) -> Path:
    """The folder ``examples`` of vLLM's source. pip unpacks the source and fails to build it, for
    which it has no compilers; ``--no-clean`` keeps it."""
    return Path(once(tmp_path_factory, "vllm_examples", lambda: unpack_vllm(tmp_path_factory)))


def unpack_vllm(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("vllm")
    command = [sys.executable, "-m", "pip", "download", "--no-clean", "--no-deps"]
    command += ["--no-build-isolation", "--no-binary=vllm", f"vllm=={VLLM_VERSION}"]
    subprocess.run(
        [*command, "--dest", str(folder)],
        check=False,
        env=os.environ | {"TMPDIR": str(folder)},
        capture_output=True,
    )
    (examples,) = folder.glob("*/vllm_*/examples")
    return str(examples)


@pytest.fixture(scope="module")
def named_models(model, tmp_path_factory) -> Path:
    """A folder in which the models that vLLM's examples name are ours."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("facebook/opt-125m", "Qwen/Qwen2.5-3B-Instruct", "lmsys/longchat-13b-16k"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(model)
    return folder


@pytest.fixture
def example(vllm_examples, named_models):
    """Runs one of vLLM's examples, and returns what it prints."""
    return lambda name, *arguments: run(*COMPAT, vllm_examples / name, *arguments, cwd=named_models)


@pytest.mark.slow
class TestVllmsOwnExamples:
    """Files of vLLM's source distribution, byte for byte."""

    def test_basic(self, example):
        out = example("basic/offline_inference/basic.py")
        assert out.count("Prompt: ") == out.count("Output: ") == 4

    def test_chat(self, example, model):
        options = ["--model", model, "--max-tokens", "12", "--temperature", "0"]
        out = example("basic/offline_inference/chat.py", *options)
        assert out.count("Generated text: ") == 1 + 10
        assert "higher education" in out.partition("Generated text: ")[2]

    def test_generate(self, example, model):
        options = ["--model", model, "--max_model_len", "1K", "--enforce-eager", "--top-k", "5"]
        out = example("basic/offline_inference/generate.py", *options, "--max-tokens", "8")
        assert out.count("Generated text: ") == 4

    def test_structured_outputs(self, example):
        out = example("features/structured_outputs/structured_outputs_offline.py")
        texts = dict(
            line.removeprefix("Structured outputs by ").split(": ", 1)
            for line in out.splitlines()
            if line.startswith("Structured outputs by ")
        )
        assert texts["Choice"] in ("Positive", "Negative")
        # As far as its 50 tokens, sampled at random, go.
        assert regex.fullmatch(r"\w+@\w+\.com", texts["Regex"], partial=True)
        assert texts["JSON"].startswith("{") and texts["Grammar"].startswith("SELECT ")

    def test_automatic_prefix_caching(self, example):
        out = example("features/automatic_prefix_caching/automatic_prefix_caching_offline.py")
        assert out.count("Output: ") == 2 and "Output: 29" in out  # the age of John Doe

    def test_prefix_caching(self, example):
        out = example("features/automatic_prefix_caching/prefix_caching_offline.py")
        assert "Generated answers are the same: True" in out

    def test_engine(self, example, model):
        out = example("deployment/llm_engine_example.py", "--model", model)
        assert out.count("RequestOutput(request_id=") == 3
