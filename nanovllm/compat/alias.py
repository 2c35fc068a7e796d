"""Makes ``import vllm`` find nanovllm, in this process and in its child processes.

Child processes load this file when they start (``startup/sitecustomize.py``), so it imports only
the standard library. nanovllm is imported when a program first uses one of the names.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE_DIR = Path(__file__).resolve().parent
STARTUP_DIR = str(PACKAGE_DIR / "startup")

_NAMES = "nanovllm.compat.names"
_TOKENIZER = {_NAMES: "get_tokenizer TokenizerLike"}
_DISTRIBUTED = {
    _NAMES: "cleanup_dist_env_and_memory destroy_distributed_environment destroy_model_parallel"
}
_LOGPROBS = {
    "nanovllm.outputs": "Logprob",
    _NAMES: "LogprobsOnePosition PromptLogprobs SampleLogprobs",
}
_INPUTS = {"nanovllm": "TextPrompt TokensPrompt", _NAMES: "PromptType"}
_ENGINE = {"nanovllm.compat.engine": "LLMEngine"}
_ENGINE_ARGS = {"nanovllm.compat.engine_args": "EngineArgs"}
_ARGUMENT_PARSER = {"nanovllm.compat.engine_args": "FlexibleArgumentParser"}

# For each module of vLLM: the modules of nanovllm that define its names, and the names.
MODULES: dict[str, dict[str, str]] = {
    "vllm": {
        "nanovllm": "CompletionOutput LLM RequestOutput SamplingParams TextPrompt TokensPrompt",
        _NAMES: "PoolingParams PromptType __version__ __version_tuple__",
        **_ENGINE,
        **_ENGINE_ARGS,
    },
    "vllm.config": {_NAMES: "CompilationConfig"},
    "vllm.distributed": _DISTRIBUTED,
    "vllm.distributed.parallel_state": _DISTRIBUTED,
    "vllm.distributed.weight_transfer.nccl_common": {_NAMES: "trainer_init"},
    "vllm.distributed.weight_transfer.packed_tensor": {_NAMES: "packed_nccl_broadcast_producer"},
    "vllm.engine.arg_utils": _ENGINE_ARGS,
    "vllm.engine.llm_engine": _ENGINE,
    "vllm.entrypoints.chat_utils": {_NAMES: "ChatCompletionMessageParam"},
    "vllm.entrypoints.llm": {"nanovllm": "LLM"},
    "vllm.inputs": _INPUTS,
    "vllm.inputs.data": _INPUTS,
    "vllm.logger": {_NAMES: "init_logger"},
    "vllm.logprobs": _LOGPROBS,
    "vllm.lora.request": {_NAMES: "LoRARequest"},
    # Where older scripts find these names.
    "vllm.model_executor": {_NAMES: "set_random_seed"},
    "vllm.model_executor.parallel_utils.parallel_state": _DISTRIBUTED,
    "vllm.model_executor.utils": {_NAMES: "set_random_seed"},
    "vllm.outputs": {"nanovllm": "CompletionOutput RequestOutput"},
    "vllm.platforms": {_NAMES: "Platform current_platform"},
    "vllm.pooling_params": {_NAMES: "PoolingParams"},
    "vllm.renderers.hf": {_NAMES: "resolve_chat_template"},
    "vllm.sampling_params": {
        "nanovllm.sampling_params": "RequestOutputKind SamplingParams",
        "nanovllm.structured_outputs": "StructuredOutputsParams",
        _NAMES: "BeamSearchParams GuidedDecodingParams",
    },
    "vllm.sequence": _LOGPROBS,
    "vllm.tokenizers": _TOKENIZER,
    "vllm.transformers_utils.tokenizer": _TOKENIZER,
    "vllm.usage.usage_lib": {_NAMES: "UsageContext"},
    "vllm.utils": {**_ARGUMENT_PARSER, _NAMES: "get_ip get_open_port random_uuid"},
    "vllm.utils.argparse_utils": _ARGUMENT_PARSER,
    "vllm.utils.network_utils": {_NAMES: "get_ip get_open_port"},
    "vllm.utils.torch_utils": {_NAMES: "set_random_seed"},
    "vllm.v1.engine.llm_engine": _ENGINE,
    "vllm.version": {_NAMES: "__version__ __version_tuple__"},
    "vllm.worker.worker": {_NAMES: "Worker"},
}
# What to use instead of names that are not here and contain these.
HINTS = {
    "assets": "images, audio and video are not supported",
    "async": "use LLM.generate_stream, or LLM.add_request and LLM.step",
    "entrypoints.openai": "use nanovllm.run_batch for batch files; there is no server",
    "multimodal": "images, audio and video are not supported",
}
for _package in [*MODULES]:  # adds the packages that contain these modules
    while _package := _package.rpartition(".")[0]:
        MODULES.setdefault(_package, {})


def register_as_vllm() -> None:
    """Makes ``import vllm`` find nanovllm, in this process and in child processes started later.

    ``importlib.util.find_spec("vllm")`` and ``importlib.metadata.version("vllm")`` work too. A
    second call has no effect. An installed vLLM is hidden, not changed.

    Raises:
        RuntimeError: this process has already imported the real vLLM.
    """
    if AliasFinder in sys.meta_path:
        return
    if "vllm" in sys.modules:
        raise RuntimeError(
            "vllm has already been imported: call nanovllm.compat.register_as_vllm() before "
            "anything imports it"
        )
    sys.meta_path.insert(0, AliasFinder)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if STARTUP_DIR not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([STARTUP_DIR, *paths])


class AliasModule(ModuleType):
    """A module of vLLM, whose names are imported from nanovllm when they are first used."""

    def __getattr__(self, name: str) -> Any:
        if (source := _source_of(self.__name__, name)) is not None:
            value = getattr(import_module(source), name)
            setattr(self, name, value)
            return value
        if f"{self.__name__}.{name}" in MODULES:
            return import_module(f"{self.__name__}.{name}")
        raise AttributeError(_missing(f"{self.__name__}.{name}"))

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_exports(self.__name__)})


class AliasFinder(Loader):
    """Finds and loads vLLM's modules, and finds its distribution for ``importlib.metadata``."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != "vllm":
            return None
        if name not in MODULES:
            # No name=name, because `from vllm import X` would then replace the message.
            raise ModuleNotFoundError(_missing(name))
        spec = ModuleSpec(name, AliasFinder(), origin=__file__, is_package=True)
        spec.has_location = True  # sets __file__, which some programs print
        return spec

    @staticmethod
    def find_distributions(context: Any) -> Iterator[Any]:
        # A caller that gives a path asks only for distributions that are installed there.
        if context.name in (None, "vllm") and "path" not in vars(context):
            yield _make_distribution()

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return AliasModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__all__"] = _exports(module.__name__)


def find_name(name: str) -> Any:
    """Returns what ``from vllm import name`` imports, for ``from nanovllm import name``.

    Raises:
        AttributeError: there is no such name.
        ImportError: there is none, and the message says what to use instead. Python would replace
            the message of an AttributeError.
    """
    if (source := _source_of("vllm", name)) is not None:
        return getattr(import_module(source), name)
    if hints := _hints(name):
        raise ImportError(f"nanovllm has no {name}{hints}")
    raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")


def _source_of(module: str, name: str) -> str | None:
    """Returns the module of nanovllm that defines a name of a module of vLLM; None if none does."""
    sources = (source for source, names in MODULES[module].items() if name in names.split())
    return next(sources, None)


def _exports(module: str) -> list[str]:
    return " ".join(MODULES[module].values()).split()


def _missing(name: str) -> str:
    return f"nanovllm's vllm alias has no {name}{_hints(name)}"


def _hints(name: str) -> str:
    hints = [f": {hint}" for part, hint in HINTS.items() if part.lower() in name.lower()]
    return "".join(hints)


def _make_distribution() -> Any:
    # Few processes need these imports. The first is slow.
    from importlib.metadata import Distribution

    from nanovllm.vllm_arguments import load_table

    class AliasDistribution(Distribution):
        def read_text(self, filename: str) -> str | None:
            metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {load_table()['vllm']}\n"
            return {"METADATA": metadata, "top_level.txt": "vllm\n"}.get(filename)

        def locate_file(self, path: Any) -> Path:
            return PACKAGE_DIR / path

    return AliasDistribution()
