"""Translates vLLM's arguments to nanovllm's, with the recorded table ``vllm_arguments.json``.

The table puts each argument into one of three classes. "honoured": supported, perhaps under another
name here. "hint": accepted and ignored, because it does not affect results. "neutral": not
supported, and accepted only at values that have no effect.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

logger = logging.getLogger("nanovllm.vllm_arguments")

# vLLM's names of the formats of quantised checkpoints that load, beside "fp8".
DECLARED_METHODS = "compressed-tensors", "fbgemm_fp8", "gguf", "modelopt", "mxfp4"
CACHE_DTYPES = "bfloat16", "float16"
# Arguments of ``nanovllm.LLM`` that the engine's Config does not take, or only with other values.
LLM_ARGUMENTS: dict[str, Sequence[str] | None] = {
    "chat_template": None,
    "generation_config": None,
    "override_generation_config": None,
    "hf_token": None,
    "revision": None,
    "tokenizer_revision": None,
    "quantization": DECLARED_METHODS,
    "kv_cache_dtype": CACHE_DTYPES,
}


@cache
def load_table() -> dict[str, Any]:
    """Loads the recorded table of vLLM's arguments: function name -> argument name -> entry. The
    script ``tests/vllm_answers/record_arguments.py`` describes the entries. "vllm" is the version
    of vLLM whose API this package implements."""
    return json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))


def translate(function: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Translates vLLM's arguments to nanovllm's. Arguments that vLLM does not have are kept.

    Args:
        function: "LLM", "generate" or "chat".
        given: the keyword arguments; None always means the default.

    Raises:
        ValueError: an unsupported argument has a value other than its neutral ones.
        TypeError: an argument is given under both names.
    """
    entries = load_table()[function]
    translated = {name: value for name, value in given.items() if name not in entries}
    for name, value in given.items():
        entry = entries.get(name)
        if entry is None or value is None:
            continue
        if entry["class"] == "honoured":
            ours = entry.get("as", name)
            if ours in translated:
                raise TypeError(f"{name} and {ours} are the same argument: pass only one of them")
            values = entry.get("values", {})
            translated[ours] = values.get(value, value) if isinstance(value, str) else value
        elif _equals(value, entry["default"]):
            continue
        elif entry["class"] == "hint":
            _log_hint(name)
        elif not any(_equals(value, neutral) for neutral in entry["neutral"]):
            raise ValueError(f"vLLM's `{name}` is not supported here: {entry['why']}")
    return translated


def _equals(value: Any, recorded: Any) -> bool:
    """Returns whether an argument equals a value of the table, where sets and tuples are lists."""
    if isinstance(value, (list, tuple, set, frozenset)):
        # A list with None for each prompt is the same as an empty list.
        value = [item for item in value if item is not None]
    return bool(value == recorded)


@cache  # once for each name
def _log_hint(name: str) -> None:
    logger.info("vLLM's `%s` has no effect here", name)
