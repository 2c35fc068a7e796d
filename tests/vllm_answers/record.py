"""Runs the snippets with one engine, and writes down what each returns or raises.

vLLM's answers, in an environment with the version in ``record_arguments.VERSION``:

    export VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0
    export VLLM_WORKER_MULTIPROC_METHOD=fork OMP_NUM_THREADS=1
    python -m tests.vllm_answers.record --engine vllm \\
        --smollm2 FOLDER --tiny FOLDER --out tests/vllm_answers/answers.json

The folders are those that ``python -m tests.vllm_answers.weights`` makes. ``test_answers.py`` runs
the same with ``--engine nanovllm``, where ``import vllm`` is ours. The file written is

    {"vllm": "0.32.0", "answers": {"group.snippet": {"answer": ...} or {"raises": "ValueError"}}}
"""

import argparse
import importlib
import inspect
import json
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

GROUPS = (
    "params",
    "outputs",
    "logprobs",
    "processed",
    "greedy",
    "prompts",
    "chat",
    "structured",
    "engine",
    "llm_calls",
)
# One line of settings for both engines. Eager mode spares vLLM's compiler.
SETTINGS = {"dtype": "float32", "max_model_len": 256, "block_size": 32, "enforce_eager": True}
PROCESSED = {**SETTINGS, "logprobs_mode": "processed_logprobs", "max_logprobs": -1}
# Errors are compared by these. vLLM has a class for what a caller did wrong that is no ValueError.
CALLERS_FAULT = "VLLMClientError"
FAMILIES = (ValueError, TypeError, AttributeError, NotImplementedError, KeyError, AssertionError)


def snippets(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """The public functions that a module of snippets defines, by name."""
    return {
        name: function
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and not name.startswith("_")
    }


def family(error: Exception) -> str:
    """The name of the error's class that both engines share."""
    if any(kind.__name__ == CALLERS_FAULT for kind in type(error).__mro__):
        return "ValueError"
    kind = next((kind for kind in FAMILIES if isinstance(error, kind)), type(error))
    return kind.__name__


class Models:
    """What snippets ask for by the names of their parameters; models are made once."""

    def __init__(self, smollm2: str, tiny: str) -> None:
        self.smollm2 = smollm2
        self.made: dict[str, Any] = {"tiny": tiny}

    def get(self, name: str) -> Any:
        if name not in self.made:
            from vllm import LLM

            settings = {"llm": SETTINGS, "processed_llm": PROCESSED}[name]
            try:
                self.made[name] = LLM(model=self.smollm2, **settings)
            except Exception as error:
                self.made[name] = error
        if isinstance(self.made[name], Exception):
            raise self.made[name]
        return self.made[name]


def as_json(value: Any) -> Any:
    """What is compared of a value that a snippet returns. A model has started, and is closed."""
    from vllm import LLM

    if isinstance(value, LLM):
        close = getattr(value, "close", None) or value.llm_engine.engine_core.shutdown
        close()
        return "starts"
    return json.loads(json.dumps(value))


def answer(function: Callable[..., Any], models: Models) -> dict[str, Any]:
    """What a snippet returns or raises. A model that cannot be made counts as raised."""
    try:
        arguments = {name: models.get(name) for name in inspect.signature(function).parameters}
        return {"answer": as_json(function(**arguments))}
    except Exception as error:  # whatever an engine raises is its answer
        traceback.print_exc()
        return {"raises": family(error), "message": f"{type(error).__name__}: {error!s:.300}"}


def run(groups: list[str], models: Models) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each snippet's name and answer."""
    for group in groups:
        try:
            module = importlib.import_module(f"tests.vllm_answers.snippets.{group}")
        except ImportError as error:  # a name of vLLM's that is missing: no snippet has an answer
            yield f"{group}.*", {"raises": "ImportError", "message": str(error)}
            continue
        for name, function in snippets(module).items():
            start = time.perf_counter()
            result = answer(function, models)
            print(f"{group}.{name}: {time.perf_counter() - start:.2f} s", flush=True)
            yield f"{group}.{name}", result


def without_compiling() -> None:
    """Makes vLLM run every model eagerly: whether a call is accepted is known in seconds then."""
    from vllm import EngineArgs

    create = EngineArgs.create_engine_config

    def create_eager(args: Any, *rest: Any, **kwargs: Any) -> Any:
        args.enforce_eager = True
        return create(args, *rest, **kwargs)

    EngineArgs.create_engine_config = create_eager


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=["vllm", "nanovllm"], required=True)
    parser.add_argument("--smollm2", required=True)
    parser.add_argument("--tiny", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--groups", nargs="+", default=GROUPS)
    args = parser.parse_args()
    if args.engine == "nanovllm":
        import torch

        from nanovllm.compat import register_as_vllm

        register_as_vllm()
        torch.set_num_threads(1)
    else:
        without_compiling()
    import vllm

    answers = dict(run(args.groups, Models(args.smollm2, args.tiny)))
    if args.engine == "vllm":  # its messages are its own affair
        answers = {n: {k: v for k, v in a.items() if k != "message"} for n, a in answers.items()}
    lines = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in answers.items())
    head = f'"vllm": {json.dumps(vllm.__version__)},\n"answers": {{\n'
    args.out.write_text("{\n" + head + ",\n".join(lines) + "\n}\n}\n")


if __name__ == "__main__":
    main()
