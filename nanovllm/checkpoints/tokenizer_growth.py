"""How much longer a tokenizer.json may make a text."""

import json
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

MAX_GROWTH = 1000
MAX_STEPS = 100
UNGROWN = (
    "Sequence Lowercase Strip StripAccents Nmt Prepend Metaspace Split Digits Punctuation "
    "Whitespace WhitespaceSplit UnicodeScripts BertPreTokenizer CharDelimiterSplit FixedLength "
    "ByteFallback Fuse WordPiece"
)
# Characters that a step makes of one, at most, by its type. Unicode normalization: U+FDFA, U+1F82.
# ByteLevel has a character for each byte. The suffix of a BPEDecoder and the delimiter of CTC may
# be empty: a space between any two characters.
GROWTH = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "BertNormalizer": 4}
GROWTH |= dict.fromkeys(UNGROWN.split(), 1) | {"ByteLevel": 4, "BPEDecoder": 2, "CTC": 2}
UNKNOWN = 4  # the library goes by the fields of a step whose type it does not know
PARTS = ("normalizer", "pre_tokenizer", "decoder")


def check_growth(tokenizer: dict[str, Any]) -> None:
    """Raises ValueError if a normalizer, a pre-tokenizer or a decoder may turn one character into
    more than MAX_GROWTH, or has more than MAX_STEPS steps. Five replacements of one character by
    1,000 would fill the memory with a line of text.

    Args:
        tokenizer: what tokenizer.json holds, unchecked.
    """
    for part in PARTS:
        steps = [] if tokenizer.get(part) is None else [*_steps(tokenizer[part])]
        if len(steps) > MAX_STEPS:
            raise ValueError(f"its {part} has {len(steps)} steps, of at most {MAX_STEPS}")
        length = 1.0
        for step in steps:
            factor, added = _growth(step)
            length = length * factor + added
        if length > MAX_GROWTH:
            raise ValueError(f"its {part} makes texts {length:.0e} times as long")


def parts_of(backend: Any) -> dict[str, Any]:
    """What the tokenizer.json of a loaded tokenizer (``tokenizers.Tokenizer``) would hold, as far
    as ``check_growth`` reads it."""
    parts = {name: getattr(backend, name, None) for name in PARTS}
    return {name: json.loads(part.__getstate__()) for name, part in parts.items() if part}


def _steps(step: Any) -> Iterator[dict[str, Any]]:
    """A step, and the steps of sequences in it. The library would guess what a step without a type
    is, or a list of its fields."""
    if not isinstance(step, dict) or not isinstance(step.get("type"), str):
        raise ValueError("a step of its normalizer, pre_tokenizer or decoder has no type")
    yield step
    for value in step.values():
        for inner in value if isinstance(value, list) else ():
            yield from _steps(inner)


def _growth(step: dict[str, Any]) -> tuple[float, int]:
    """Characters that a step makes of each, and those that it adds to each piece of text."""
    kind, pattern, content = step["type"], step.get("pattern"), step.get("content")
    added = len(prefix) if isinstance(prefix := step.get("prepend"), str) else 0
    if kind in ("Metaspace", "ByteLevel", "WordPiece"):
        added += 1  # a space before
    if isinstance(charsmap := step.get("precompiled_charsmap"), str):
        return _longest_in(b64decode(charsmap)), added
    if pattern is not None and isinstance(content, str):  # a Replace
        replaced = pattern.get("String") if isinstance(pattern, dict) else None
        if isinstance(replaced, str) and replaced:
            return max(1.0, len(content) / len(replaced)), added
        return 1.0 + len(content), added + len(content)  # a regex may match between characters
    return GROWTH.get(kind, UNKNOWN), added + (kind not in GROWTH)


def _longest_in(charsmap: bytes) -> int:
    """Characters of the longest replacement in SentencePiece's table: a trie, preceded by its size
    in 4 bytes, then replacements that each end in a NUL."""
    table = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].decode(errors="replace")
    return max(1, *map(len, table.split("\0")))
