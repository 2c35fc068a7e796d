"""Checks the type and size of a checkpoint's files before they are read."""

import stat
from pathlib import Path

import torch

from nanovllm.models.model_config import ModelConfig

CPU = torch.device("cpu")

# Twice the largest known tokenizer.json. Parsed JSON takes up to 25 times as much memory.
MAX_METADATA_BYTES = 2**26
MAX_CONFIG_BYTES = 2**23  # lower, because transformers copies these files' contents
CONFIGS = ["config.json", "generation_config.json", "tokenizer_config.json"]
CONFIGS += ["special_tokens_map.json", "added_tokens.json"]
LFS_HEADER, MAX_LFS_BYTES = b"version https://git-lfs.github.com/spec/", 1024


def check_regular(path: Path) -> int:
    """Returns a file's size in bytes.

    Raises:
        ValueError: it is not a regular file or a link to one, or it is a Git LFS pointer. Opening a
            pipe may never return, and reading a device may never end.
    """
    try:
        status = path.stat()
        is_regular, is_pointer = stat.S_ISREG(status.st_mode), False
        if is_regular and status.st_size < MAX_LFS_BYTES:
            with path.open("rb") as file:
                is_pointer = file.read(len(LFS_HEADER)) == LFS_HEADER
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not is_regular:
        raise ValueError(f"{path} is not a regular file ({stat.filemode(status.st_mode)})")
    if is_pointer:
        raise ValueError(f"{path} is a Git LFS pointer: run `git lfs pull` to get the file itself")
    return status.st_size


def check_metadata_file(path: Path) -> None:
    """Checks a file of the config, the tokenizer or the weights' index, which will be read whole.

    Raises:
        ValueError: it is not a regular file, or has over MAX_METADATA_BYTES (MAX_CONFIG_BYTES if it
            is one of CONFIGS).
    """
    most = MAX_CONFIG_BYTES if path.name in CONFIGS else MAX_METADATA_BYTES
    if (size := check_regular(path)) > most:
        raise ValueError(
            f"{path} has {size:,} bytes, but at most {most:,} are allowed: download it again if "
            f"it is damaged, or move it elsewhere if it is not part of the checkpoint"
        )


def check_bytes(model: ModelConfig, num_bytes: int) -> None:
    """Raises ValueError if a model's weights do not fit in ``num_bytes`` of files, even with one
    bit each. Call this before memory for them is allocated."""
    attention = 2 * model.head_dim * (model.num_attention_heads + model.num_key_value_heads)
    mlps = sum(layer.mlp.num_experts * 3 * layer.mlp.intermediate_size for layer in model.layers)
    layers = len(model.layers) * attention + mlps
    num_weights = model.hidden_size * (model.vocab_size + layers)
    if num_weights > 8 * num_bytes:
        raise ValueError(f"{num_weights:,} weights do not fit in {num_bytes:,} bytes of files")
