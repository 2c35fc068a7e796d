"""Evaluates a model through lm-evaluation-harness's own vLLM adapter, with nanovllm behind it.

    pip install -e . "lm-eval[hf]" && python examples/lm_eval_vllm.py

The harness's adapter imports ``vllm``. nanovllm speaks the same API, so a handful of modules of
that name, made up by ``register_as_vllm``, are all that it takes. Two small tasks
(``lm_eval_task/``) then run on this backend and on the harness's transformers backend, both in
fp32 on the CPU: one picks answers by log-likelihood, one generates up to a stop string. Prints
both accuracies and exits with status 1 if they differ.

Without ``--model`` it evaluates SmolLM2-135M-Instruct, which ``example.py`` fetches. Tested with
lm-eval 0.4.13.
"""

import argparse
import contextlib
import importlib.metadata
import runpy
import sys
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from time import perf_counter
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import lm_eval
from lm_eval.tasks import TaskManager
from transformers import AutoConfig

import nanovllm
from nanovllm.checkpoints.checkpoint import open_checkpoint

ROOT = Path(__file__).resolve().parent.parent
TASKS = Path(__file__).resolve().parent / "lm_eval_task"
METRICS = {"everyday_choices": "acc,none", "sentence_ends": "exact_match,stripped"}

VLLM_VERSION = "0.18.0"  # the oldest that the adapter asks for
DEVICE = "cpu"
MAX_LENGTH = 2048

# What the adapter hands to vLLM's LLM and nanovllm's does not take, where it asks for nothing.
NEUTRAL = {
    "revision": None,
    "tokenizer": None,
    "tokenizer_mode": "auto",
    "tokenizer_revision": None,
    "trust_remote_code": False,
    "quantization": None,
    "enable_lora": False,
}


class LLM(nanovllm.LLM):
    """nanovllm's LLM, called as the adapter calls vLLM's."""

    def __init__(self, model: str, **kwargs: Any) -> None:
        if kwargs.get("tokenizer") == model:
            del kwargs["tokenizer"]
        if not kwargs.get("enable_lora"):
            kwargs.pop("max_lora_rank", None)  # the adapter always names one
        for name, neutral in NEUTRAL.items():
            if (value := kwargs.pop(name, neutral)) != neutral:
                raise ValueError(f"{name}={value!r} is not served: leave it at {neutral!r}")
        if "block_size" in kwargs:
            kwargs["kvcache_block_size"] = kwargs.pop("block_size")
        given = {name: value for name, value in kwargs.items() if value is not None}
        super().__init__(model, device=DEVICE, **given)  # the adapter keeps ``device`` to itself
        model_config = SimpleNamespace(max_model_len=self.scheduler.max_model_len)
        self.llm_engine = SimpleNamespace(model_config=model_config)

    def generate(self, *args: Any, lora_request: None = None, **kwargs: Any) -> list[Any]:
        if lora_request is not None:
            raise ValueError("LoRA adapters are not served")
        return super().generate(*args, **kwargs)


def get_tokenizer(
    name: str, tokenizer_mode: str, trust_remote_code: bool, revision: str | None
) -> Any:
    """The checkpoint's own; LLM has refused any special wishes by now."""
    return open_checkpoint(name).load_tokenizer()


def resolve_chat_template(
    tokenizer: Any, chat_template: str | None, tools: None, model_config: Any
) -> str | None:
    return chat_template or tokenizer.chat_template


def register_as_vllm() -> None:
    """Makes ``import vllm`` find nanovllm, and imports the harness's adapter with it."""
    modules = {
        "vllm": {
            "LLM": LLM,
            "SamplingParams": nanovllm.SamplingParams,
            "TokensPrompt": dict,  # called with prompt_token_ids=[...]
        },
        "vllm.lora.request": {"LoRARequest": None},
        "vllm.renderers.hf": {"resolve_chat_template": resolve_chat_template},
        "vllm.tokenizers": {"get_tokenizer": get_tokenizer},
    }
    for name, contents in modules.items():
        module = sys.modules[name] = ModuleType(name)
        module.__spec__ = ModuleSpec(name, loader=None)  # for importlib.util.find_spec
        vars(module).update(contents)

    installed_version = importlib.metadata.version

    def version(package: str) -> str:
        return VLLM_VERSION if package == "vllm" else installed_version(package)

    with mock.patch("importlib.metadata.version", version):
        import lm_eval.models.vllm_causallms  # noqa: F401 (binds version for good)


def arguments(model: str, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What nanovllm's and transformers' side are given; ``folder`` is an empty one to use."""
    path = Path(model).expanduser()
    if path.exists():
        path = path.resolve()  # ``evaluate`` changes the folder
        model = str(path)
    common = {"pretrained": model, "dtype": "float32", "max_length": MAX_LENGTH}
    # Blocks as small as vLLM's, so that even these short prompts share cached prefixes.
    ours = {**common, "batch_size": "auto", "block_size": 16}
    theirs = {**common, "batch_size": 8, "device": DEVICE}
    if path.suffix == ".gguf":
        theirs |= {"pretrained": str(path.parent), "gguf_file": path.name}
        # The adapter reads a config.json from ``pretrained``, and hands ``model`` on to LLM.
        AutoConfig.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
        ours |= {"pretrained": folder, "model": model, "tokenizer": model}
    return ours, theirs


def evaluate(backend: str, model_args: dict[str, Any]) -> dict[str, Any]:
    """The harness's results, with every sample."""
    start = perf_counter()
    tasks = TaskManager(include_path=str(TASKS), include_defaults=False)
    with contextlib.chdir(TASKS):  # the tasks name their data relative to it
        results = lm_eval.simple_evaluate(
            backend, model_args, tasks=list(METRICS), task_manager=tasks, bootstrap_iters=0
        )
    print(f"{backend}: {perf_counter() - start:.0f} s", flush=True)
    return results


def agreement(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    """How far the two backends' responses to the same documents are apart, in words."""
    pairs = [
        pair
        for a, b in zip(ours, theirs, strict=True)
        for pair in zip(a["filtered_resps"], b["filtered_resps"], strict=True)
    ]
    if isinstance(pairs[0][0], str):
        return f"{sum(a == b for a, b in pairs)} of {len(pairs)} texts equal"
    largest = max(abs(a - b) for (a, _), (b, _) in pairs)
    return f"{len(pairs)} log-likelihoods, at most {largest:.1e} apart"


def report(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Prints the accuracies; whether they are equal."""
    equal = True
    print(f"\n{'task':<18}{'metric':<13}{'nanovllm':>10}{'transformers':>14}")
    for task, metric in METRICS.items():
        a, b = (results["results"][task][metric] for results in (ours, theirs))
        apart = agreement(ours["samples"][task], theirs["samples"][task])
        print(f"{task:<18}{metric.split(',')[0]:<13}{a:>10.4f}{b:>14.4f}   {apart}")
        equal = equal and a == b
    print(f"\nThe accuracies {'are equal' if equal else 'DIFFER'}.")
    return equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="checkpoint directory, .gguf file or hub id")
    model = parser.parse_args().model
    if model is None:
        model = str(runpy.run_path(str(ROOT / "example.py"))["fetch_smollm2"]())
    register_as_vllm()
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = arguments(model, folder)
        return 0 if report(evaluate("vllm", ours), evaluate("hf", theirs)) else 1


if __name__ == "__main__":
    sys.exit(main())
