"""Checkpoints in safetensors: a directory, or a hub id to fetch one. ``gguf.py`` has the other
format; ``open_checkpoint`` picks."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from nanovllm.models.gguf import GGUFCheckpoint
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.registry import get_model_class

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
# generation_config.json's names, and SamplingParams'.
GENERATION_FIELDS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


class Checkpoint(Protocol):
    """A model on disk.

    Attributes:
        config: its facts.
        eos_token_ids: every token that its files say ends a sequence.
        recommended_sampling: what its files say of SamplingParams' fields.
    """

    config: ModelConfig
    eos_token_ids: frozenset[int]
    recommended_sampling: dict[str, Any]

    def load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer, or None where the checkpoint has none."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Streams the weights as (transformers' name, CPU tensor)."""


def open_checkpoint(model: str) -> Checkpoint:
    """Opens a local directory, a ``.gguf`` file, or the hub repository of that id.

    Raises:
        ValueError: nothing there, or not a checkpoint that is served.
    """
    path = Path(os.path.expanduser(model))
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path} is a file, but no .gguf: name the checkpoint's directory")
        return GGUFCheckpoint(path)
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    return SafetensorsCheckpoint(_download(model))


class SafetensorsCheckpoint:
    """A directory in transformers' layout: config.json, *.safetensors, tokenizer files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        raw = _read_json(path / "config.json")
        if raw is None:
            raise ValueError(f"{path} has no config.json: it is not a model checkpoint")
        named = raw.get("architectures")
        architecture = str(named[0] if isinstance(named, list) and named else named)
        model_class = get_model_class(architecture)
        try:
            hf = AutoConfig.from_pretrained(path).to_dict()
        except Exception as error:  # transformers raises whatever its validators meet
            raise ValueError(f"{path / 'config.json'} is not a valid config: {error}") from error
        flags = model_class.config_flags(bool(hf.get("attention_bias")), bool(hf.get("mlp_bias")))
        self.config = ModelConfig.from_hf(architecture, hf, flags)
        generation = _read_json(path / "generation_config.json") or {}
        self.eos_token_ids = _ids(hf.get("eos_token_id")) | _ids(generation.get("eos_token_id"))
        self.recommended_sampling = {
            ours: generation[theirs]
            for theirs, ours in GENERATION_FIELDS.items()
            if generation.get(theirs) is not None
        }

    def load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        if not any((self.path / name).exists() for name in TOKENIZER_FILES):
            return None
        try:
            return AutoTokenizer.from_pretrained(self.path)
        except Exception as error:  # transformers raises whatever its parsers meet
            raise ValueError(
                f"the tokenizer in {self.path} cannot be read ({error}): fetch its files again, or "
                f"remove them to use token ids only"
            ) from error

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path in self._weight_files():
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 (not a dict)
                        yield name, file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{path} cannot be read ({error}): it is truncated or damaged, fetch it again"
                ) from error

    def _weight_files(self) -> list[Path]:
        index_path, single = (
            self.path / name for name in ("model.safetensors.index.json", "model.safetensors")
        )
        index = _read_json(index_path)
        if index is not None:
            weight_map = index.get("weight_map")
            if not isinstance(weight_map, dict):
                raise ValueError(f"{index_path} has no weight_map of tensor names to files")
            files = [self.path / name for name in sorted(set(weight_map.values()))]
        elif single.is_file():  # others beside it hold the same weights in another layout
            files = [single]
        else:
            files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise ValueError(
                f"{self.path} has no .safetensors weights (for random ones: load_format='dummy')"
            )
        for file in files:
            if not file.is_file():
                raise ValueError(f"{file} is missing, though the checkpoint's index names it")
        return files


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=HUB_PATTERNS))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"{model!r} is neither a local directory, nor a .gguf file, nor a model that can be "
            f"fetched from the hub ({type(error).__name__}: {error})"
        ) from error


def _read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None if there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return value


def _ids(value: Any) -> frozenset[int]:
    """Token ids of a config's field: one, a list, or none."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ValueError(f"eos_token_id must be a token id or a list of them, got {value!r:.80}")
    return frozenset(ids)
