"""Checks that the steps of a tokenizer.json cannot make texts many times longer."""

import json
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

MAX_GROWTH = 1000
MAX_STEPS = 100
NOT_GROWING = (
    "Sequence Lowercase Strip StripAccents Nmt Prepend Metaspace Split Digits Punctuation "
    "Whitespace WhitespaceSplit UnicodeScripts BertPreTokenizer CharDelimiterSplit FixedLength "
    "ByteFallback Fuse WordPiece"
)
# The largest number of characters that a step can turn one character into, by the step's type. The
# worst cases of Unicode normalization are U+FDFA and U+1F82. ByteLevel has a character for each
# byte. BPEDecoder and CTC may insert a space between any two characters, because a suffix or
# delimiter may be empty.
GROWTH = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "BertNormalizer": 4}
GROWTH |= dict.fromkeys(NOT_GROWING.split(), 1) | {"ByteLevel": 4, "BPEDecoder": 2, "CTC": 2}
# For other types. The library ignores an unknown type and guesses the type from the step's fields.
UNKNOWN = 4
PARTS = ("normalizer", "pre_tokenizer", "decoder")


def check_growth(tokenizer: dict[str, Any]) -> None:
    """Checks a tokenizer's normalizer, pre-tokenizer and decoder. For example, five steps that each
    replace one character by 1,000 would turn one character into 10^15.

    Args:
        tokenizer: the contents of tokenizer.json, which are not trusted.

    Raises:
        ValueError: one of the three may turn one character into more than MAX_GROWTH, has more than
            MAX_STEPS steps, or has a step without a type.
    """
    for part in PARTS:
        steps = [] if tokenizer.get(part) is None else [*nested_steps(tokenizer[part])]
        if len(steps) > MAX_STEPS:
            raise ValueError(f"its {part} has {len(steps)} steps, but the limit is {MAX_STEPS}")
        length = 1.0
        for step in steps:
            factor, added = _growth(step)
            length = length * factor + added
        if length > MAX_GROWTH:
            raise ValueError(f"its {part} makes texts {length:.0e} times as long")


def parts_of(backend: Any) -> dict[str, Any]:
    """Returns the parts of a loaded ``tokenizers.Tokenizer`` that ``check_growth`` checks, as they
    would be in its tokenizer.json."""
    parts = {name: getattr(backend, name, None) for name in PARTS}
    return {name: json.loads(part.__getstate__()) for name, part in parts.items() if part}


def nested_steps(step: Any) -> Iterator[dict[str, Any]]:
    """Yields a step and the steps nested in it. Refuses steps without a type, which the library
    would guess."""
    if not isinstance(step, dict) or not isinstance(step.get("type"), str):
        raise ValueError("a step of its normalizer, pre_tokenizer or decoder has no type")
    yield step
    for value in step.values():
        for inner in value if isinstance(value, list) else ():
            yield from nested_steps(inner)


def _growth(step: dict[str, Any]) -> tuple[float, int]:
    """Returns the largest number of characters that a step can turn one character into, and the
    number of characters that it adds to each piece of a text."""
    kind, pattern, content = step["type"], step.get("pattern"), step.get("content")
    added = len(prefix) if isinstance(prefix := step.get("prepend"), str) else 0
    if kind in ("Metaspace", "ByteLevel", "WordPiece"):
        added += 1  # a leading space
    if isinstance(charsmap := step.get("precompiled_charsmap"), str):
        return _longest_in(b64decode(charsmap)), added
    if pattern is not None and isinstance(content, str):  # a Replace
        replaced = pattern.get("String") if isinstance(pattern, dict) else None
        if isinstance(replaced, str) and replaced:
            return max(1.0, len(content) / len(replaced)), added
        return 1.0 + len(content), added + len(content)  # a regex may match between characters
    return GROWTH.get(kind, UNKNOWN), added + (kind not in GROWTH)


def _longest_in(charsmap: bytes) -> int:
    """Returns the length of the longest replacement in SentencePiece's table. The table holds the
    size of a trie in 4 bytes, the trie, and the replacements, each terminated by a NUL."""
    table = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].decode(errors="replace")
    return max(1, *map(len, table.split("\0")))
