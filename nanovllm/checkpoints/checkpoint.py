"""Opens checkpoints: directories with safetensors files, hub ids, and GGUF files (``gguf.py``)."""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import safe_open

from nanovllm.checkpoints.files import CPU, check_bytes, check_metadata_file, check_regular
from nanovllm.checkpoints.tensor_reader import read_tensors
from nanovllm.checkpoints.tokenizer_growth import check_growth, parts_of
from nanovllm.checkpoints.weights import replace_prefix
from nanovllm.models.family import with_own_head
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.multimodal import TEXT_MODELS, text_config
from nanovllm.models.registry import get_family
from nanovllm.utils.panics import as_value_error

if TYPE_CHECKING:  # the import takes a second, which a run without a tokenizer saves
    from transformers import PreTrainedTokenizerBase

    from nanovllm.checkpoints.fp8 import Fp8Weights

logger = logging.getLogger("nanovllm")

EMBEDDING = "model.embed_tokens.weight"
TOKENIZER_FILES = "tokenizer.json tokenizer.model tokenizer_config.json vocab.json tekken.json"
# Fields that a Mistral tekken.json lacks. Tokenizers in transformers' own format state them.
TEKKEN_FIELDS = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
PENALTIES = "repetition_penalty", "presence_penalty", "frequency_penalty"
# Names of fields in generation_config.json, each with its name in SamplingParams.
GENERATION_FIELDS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", *PENALTIES)},
    "max_new_tokens": "max_tokens",
}
# The fields that are read from a config.json, besides those that the family has defaults for. To
# load a tokenizer, transformers gets only these fields, none of which can make it run code, read
# other files or build models.
CONFIG_FIELDS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim "
    "num_key_value_heads max_position_embeddings rms_norm_eps hidden_act attention_bias mlp_bias "
    "rope_parameters rope_scaling rope_theta partial_rotary_factor "
    "original_max_position_embeddings sliding_window use_sliding_window tie_word_embeddings "
    "dtype torch_dtype eos_token_id quantization_config compression_config tokenizer_class"
)
TOKENIZER_PATTERNS = ["*.json", "*.model", "*.txt", "*.jinja"]
# All files that transformers' tokenizers may open.
TOKENIZER_READ_PATTERNS = [*TOKENIZER_PATTERNS, "*.spm", "*.codes", "*.tokenizer"]
TOKENIZER_READ_PATTERNS += ["additional_chat_templates/*.jinja"]
HUB_PATTERNS = [*TOKENIZER_PATTERNS, "*.safetensors"]
# The same weights once more, in the layouts of other programs.
HUB_IGNORED = ["*/*.safetensors", "consolidated*.safetensors"]


class Checkpoint(Protocol):
    """A model on disk.

    Attributes:
        config: the model's configuration.
        eos_token_ids: the tokens that end a sequence, according to any of the files.
        recommended_sampling: fields of SamplingParams that the files recommend, with their values.
        quant_method: the format of quantised weights, by its name in a ``quantization_config``;
            "gguf" for GGUF files, and None for unquantised weights.
    """

    config: ModelConfig
    quant_method: str | None
    eos_token_ids: frozenset[int]
    recommended_sampling: dict[str, Any]

    def load_tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """Loads the tokenizer. Returns None if the checkpoint has none."""

    def tensors(
        self, device: torch.device = CPU, packs_fp8: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each weight's name in transformers and its tensor, on ``device`` or on the CPU.

        Args:
            packs_fp8: if the config has a ``quantization``, yield the projections' FP8 weights
                packed into rows (``kernels.fp8.pack_rows``), not dequantised.
        """


def open_checkpoint(model: str) -> Checkpoint:
    """Opens a checkpoint.

    Args:
        model: a local directory, a ``.gguf`` file, or the id of a repository on the hub.

    Raises:
        ValueError: there is no such checkpoint, or it is not supported.
    """
    path = Path(os.path.expanduser(model))
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if path.exists():
        if path.suffix != ".gguf":
            raise ValueError(f"{path} is not a .gguf file: give the checkpoint's directory instead")
        from nanovllm.checkpoints.gguf import GGUFCheckpoint

        return GGUFCheckpoint(path)
    return SafetensorsCheckpoint(_download(model, HUB_PATTERNS))


class SafetensorsCheckpoint:
    """A directory in transformers' layout: config.json, *.safetensors, tokenizer files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = {file.name: file for file in path.glob("*.safetensors") if file.exists()}
        num_bytes = sum(check_regular(file) for file in self._files.values())
        raw = _read_json(path / "config.json")
        if raw is None:
            files = sorted(path.glob("*.gguf"))
            advice = f": give the GGUF file itself, {files[0]}" if files else ""
            raise ValueError(f"{path} has no config.json: it is not a model checkpoint{advice}")
        named = raw.get("architectures") or raw.get("model_type")
        if not named:
            raise ValueError(f"{path / 'config.json'} has no architectures, and no model_type")
        architecture = str(named[0] if isinstance(named, list) and named else named)
        if architecture in TEXT_MODELS:
            architecture, raw = text_config(architecture, raw)
        family = get_family(architecture)
        fields = {*CONFIG_FIELDS.split(), *family.defaults}
        hf_config = {name: value for name, value in raw.items() if name in fields}
        eos_token_id = hf_config.get("eos_token_id", family.defaults.get("eos_token_id"))
        self._hf_config = {"model_type": family.model_type, **hf_config}
        with as_value_error(f"{path / 'config.json'} is not supported:"):
            self.quant_method, self._fp8 = _read_quantization(path, hf_config)
            if self._fp8 is None:
                self.config = family.read(hf_config)
            else:  # the model gets dequantised weights
                unquantized = {**hf_config, "quantization_config": None}
                self.config = self._fp8.with_skipped_scales(family.read(unquantized))
            if self._files:  # dummy weights need no files
                check_bytes(self.config, num_bytes)
        with suppress(ValueError):  # ``tensors`` reports files that are missing or damaged
            paths = self._weight_files() if self._files else []  # none for dummy weights
            if self.config.tie_word_embeddings and _has_own_head(paths):
                logger.warning(
                    "%s: tie_word_embeddings is true, but the weights have another lm_head.weight "
                    "than the embedding, which is used",
                    path / "config.json",
                )
                self.config = with_own_head(self.config)
            if self._fp8 is not None:
                method = self._fp8.kept_method(paths, self.config)
                self.config = replace(self.config, quantization=method)
        generation = _read_json(path / "generation_config.json") or {}
        self.eos_token_ids = _ids(eos_token_id) | _ids(generation.get("eos_token_id"))
        self.recommended_sampling = sampling_fields(generation)

    def load_tokenizer(self) -> "PreTrainedTokenizerBase | None":
        return _read_tokenizer(self.path, self._hf_config)

    def tensors(
        self, device: torch.device = CPU, packs_fp8: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        paths = self._weight_files()
        tensors = _map_tensors(paths) if device.type == "cpu" else read_tensors(paths, device)
        if self._fp8 is not None:
            tensors = self._fp8.dequantize(tensors, paths, packs_fp8)
        yield from tensors

    def _weight_files(self) -> list[Path]:
        """Returns the files that hold the weights, all of them in the checkpoint's directory."""
        index_path, single = self.path / "model.safetensors.index.json", "model.safetensors"
        index = _read_json(index_path)
        if index is not None:
            weight_map = index.get("weight_map")
            names = list(weight_map.values()) if isinstance(weight_map, dict) else [""]
            if not all(isinstance(name, str) and name for name in names):
                raise ValueError(f"{index_path} has no weight_map of tensor names to files")
            if single in self._files and self._files.keys().isdisjoint(names):
                names = [single]  # save_pretrained keeps the index when it replaces the shards
        else:  # other files beside model.safetensors hold the same weights in another layout
            names = [single] if single in self._files else list(self._files)
        if not names:
            raise ValueError(
                f"{self.path} has no .safetensors weights (pickled weights such as "
                f"pytorch_model.bin are never read; for random weights, set load_format='dummy')"
            )
        for name in names:
            if name not in self._files:
                raise ValueError(f"{index_path} names {name!r:.80}, which is not in its directory")
        return [self._files[name] for name in sorted(set(names))]


def _has_own_head(paths: list[Path]) -> bool:
    """Returns whether the files have an LM head that differs from the embedding."""
    found = {}
    for path in paths:
        with as_value_error(f"{path} cannot be read:"), safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if (plain := replace_prefix(name)) in ("lm_head.weight", EMBEDDING):
                    found[plain] = file.get_tensor(name)
    return len(found) == 2 and not torch.equal(*found.values())


def _map_tensors(paths: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the names and tensors of safetensors files, which are mapped into memory."""
    for path in paths:
        with as_value_error(f"{path} cannot be read:"), safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)


def _read_quantization(
    path: Path, config: dict[str, Any]
) -> tuple[str | None, "Fp8Weights | None"]:
    """Returns the name of a checkpoint's quantisation method, and how it stores FP8 weights. Each
    is None if it does not apply.

    Args:
        path: the checkpoint's directory.
        config: the fields of config.json. Settings that are found elsewhere are copied to its
            ``quantization_config``, and the method gets its name in transformers.
    """
    found, modelopt = config.get("quantization_config"), path / "hf_quant_config.json"
    found = found or config.get("compression_config")  # early releases of compressed-tensors
    if not found and modelopt.exists():  # early releases of ModelOpt write only this file
        found = _read_json(modelopt)
    if not isinstance(found, dict) or not found:
        return None, None  # what is not an object is refused where the config is checked
    if isinstance(fields := found.get("quantization"), dict):  # ModelOpt's, also in config.json
        found = {"quant_method": "modelopt", **found, **fields}
    method = found.get("quant_method")
    if method is None and (found.get("load_in_8bit") or found.get("load_in_4bit")):
        method = "bitsandbytes"
    if isinstance(method, str):
        method = method.lower().replace("compressed_tensors", "compressed-tensors")
        found = {**found, "quant_method": method}
    config["quantization_config"] = found
    from nanovllm.checkpoints.fp8 import Fp8Weights

    return method, Fp8Weights.from_config(found)


def load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """Loads a tokenizer.

    Args:
        name: a local directory (with or without a model), a ``.gguf`` file, or the id of a
            repository on the hub.

    Raises:
        ValueError: there is no tokenizer, or it cannot be read.
    """
    path = Path(os.path.expanduser(name))
    if path.exists() and not path.is_dir():
        tokenizer = open_checkpoint(name).load_tokenizer()
    else:
        tokenizer = _read_tokenizer(path if path.is_dir() else _download(name, TOKENIZER_PATTERNS))
    if tokenizer is None:
        raise ValueError(f"{name} has no tokenizer")
    return tokenizer


def _read_tokenizer(
    path: Path, config: dict[str, Any] | None = None
) -> "PreTrainedTokenizerBase | None":
    """Loads the tokenizer in a directory. Returns None if there is none.

    Args:
        path: the directory.
        config: fields of config.json, by which transformers may choose the tokenizer's class.
    """
    if not any((path / name).exists() for name in TOKENIZER_FILES.split()):
        return None
    for pattern in TOKENIZER_READ_PATTERNS:
        for file in path.glob(pattern):
            if file.exists():  # false for a dangling link
                check_metadata_file(file)
    for name in ("gguf_file", "fast_tokenizer_files"):  # they name files that are not checked
        if name in (_read_json(path / "tokenizer_config.json") or {}):
            raise ValueError(f"{path}: tokenizer_config.json must not name a {name}")
    needs_package = (path / "tokenizer.model").exists() and find_spec("sentencepiece") is None
    hint = ", or install sentencepiece for its tokenizer.model" if needs_package else ""
    message = f"the tokenizer in {path} cannot be read (remove it to use token ids){hint}:"
    with as_value_error(message):
        check_growth(_read_json(path / "tokenizer.json") or {})
        from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

        hf_config = AutoConfig.for_model(**config) if config else None
        tokenizer = AutoTokenizer.from_pretrained(path, config=hf_config, trust_remote_code=False)
        if type(tokenizer).__name__ == "MistralCommonBackend":  # it cannot list special tokens
            fields = {} if (path / "tokenizer.json").exists() else TEKKEN_FIELDS
            tokenizer = PreTrainedTokenizerFast.from_pretrained(path, **fields)
        # Checked again, because transformers may have converted a tokenizer.model instead.
        check_growth(parts_of(getattr(tokenizer, "backend_tokenizer", None)))
        if not tokenizer.chat_template:
            tokenizer.chat_template = _multimodal_template(path)
        return tokenizer


def _multimodal_template(path: Path) -> str | None:
    """Returns the chat template of a multimodal checkpoint's processor, None if there is none."""
    fields = _read_json(path / "chat_template.json")
    template = None if fields is None else fields.get("chat_template")
    if fields is not None and not isinstance(template, str):
        raise ValueError(f"chat_template.json must hold a chat_template, got {template!r:.80}")
    return template


def at_revision(model: str, revision: str, *, only_tokenizer: bool = False) -> str:
    """Returns the folder of a hub repository at a branch, tag or commit. Local paths have none.

    Raises:
        ValueError: it cannot be downloaded.
    """
    if os.path.exists(os.path.expanduser(model)):
        return model
    return str(_download(model, TOKENIZER_PATTERNS if only_tokenizer else HUB_PATTERNS, revision))


def _download(model: str, patterns: list[str], revision: str | None = None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        path = snapshot_download(
            model, revision=revision, allow_patterns=patterns, ignore_patterns=HUB_IGNORED
        )
        return Path(path)
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        name = model if revision is None else f"{model}@{revision}"
        raise ValueError(
            f"{name!r} is neither a local directory, nor a .gguf file, nor a model that can be "
            f"downloaded from the hub ({type(error).__name__}: {error})"
        ) from error


def _read_json(path: Path) -> dict[str, Any] | None:
    """Reads a JSON object. Returns None if the file does not exist."""
    if not path.exists():
        return None
    check_metadata_file(path)
    with as_value_error(f"{path} cannot be read:"):
        value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return value


def sampling_fields(generation: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of SamplingParams that a generation_config.json sets."""
    return {
        ours: generation[theirs]
        for theirs, ours in GENERATION_FIELDS.items()
        if generation.get(theirs) is not None
    }


def _ids(value: Any) -> frozenset[int]:
    """Returns the token ids in a config's field, which may be an id, a list of ids or None."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ValueError(f"eos_token_id must be a token id or a list of them, got {value!r:.80}")
    return frozenset(ids)
