"""nanovllm: offline-batch LLM inference.

The names are imported at their first use, so that ``python -m nanovllm.run_batch`` can start its
job's process before PyTorch is loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.compat.llm import LLM
    from nanovllm.engine.metrics import EngineMetrics
    from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput
    from nanovllm.sampling_params import SamplingParams
    from nanovllm.structured_outputs import StructuredOutputsParams
    from nanovllm.text.prompts import TextPrompt, TokensPrompt

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineMetrics",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]
_MODULES = {
    "CompletionOutput": "nanovllm.outputs",
    "EngineMetrics": "nanovllm.engine.metrics",
    "LLM": "nanovllm.compat.llm",
    "Logprob": "nanovllm.outputs",
    "RequestOutput": "nanovllm.outputs",
    "SamplingParams": "nanovllm.sampling_params",
    "StructuredOutputsParams": "nanovllm.structured_outputs",
    "TextPrompt": "nanovllm.text.prompts",
    "TokensPrompt": "nanovllm.text.prompts",
}


def __getattr__(name: str) -> Any:
    missing = AttributeError(f"module 'nanovllm' has no attribute {name!r}")
    if name.startswith("_"):
        raise missing
    try:
        if name not in _MODULES:
            return import_module("nanovllm.compat.alias").find_name(name)
        module = import_module(_MODULES[name])
    except ModuleNotFoundError as error:  # the engine works without nanovllm/compat
        if error.name not in ("nanovllm.compat", "nanovllm.compat.llm"):
            raise
        if name not in _MODULES:
            raise missing from None
        module = import_module("nanovllm.llm")
    globals()[name] = value = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
