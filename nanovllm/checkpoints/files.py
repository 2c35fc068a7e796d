"""What a checkpoint's files must be before anything opens them."""

import stat
from pathlib import Path

import torch

CPU = torch.device("cpu")

MAX_SIDE_BYTES = 2**26  # twice the largest tokenizer.json; JSON takes up to 25 times as much memory
MAX_CONFIG_BYTES = 2**23  # several times the largest; transformers makes copies of what they hold
CONFIGS = ["config.json", "generation_config.json", "tokenizer_config.json"]
CONFIGS += ["special_tokens_map.json", "added_tokens.json"]


def check_regular(path: Path) -> int:
    """Returns a file's bytes. Raises ValueError unless it is a regular file or a link to one:
    opening a pipe may never return, and a device has no end."""
    try:
        status = path.stat()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is no regular file ({stat.filemode(status.st_mode)})")
    return status.st_size


def check_side_file(path: Path) -> None:
    """The same for a file that is read whole: it has at most MAX_SIDE_BYTES, or, if it is one of
    CONFIGS, MAX_CONFIG_BYTES."""
    most = MAX_CONFIG_BYTES if path.name in CONFIGS else MAX_SIDE_BYTES
    if (size := check_regular(path)) > most:
        raise ValueError(
            f"{path} has {size:,} bytes, of at most {most:,}: it is damaged, or no part of the "
            f"checkpoint and must lie elsewhere"
        )
