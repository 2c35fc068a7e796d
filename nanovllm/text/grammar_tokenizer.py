"""A model's tokenizer as llguidance needs it: the bytes of every token."""

import copy
import json
from typing import Any

# Their UTF-8 has every byte that can begin or continue a character of several bytes.
MULTIBYTE_CODE_POINTS = (
    *range(0x80, 0x800),
    *range(0x800, 0xD800, 0x400),
    *range(0xE000, 0x10000, 0x400),
    *range(0x10000, 0x110000, 0x10000),
)


def make_grammar_tokenizer(tokenizer: Any, vocab_size: int, eos_token_ids: list[int]) -> Any:
    """An ``llguidance.LLTokenizer`` whose token bytes are those that decoding yields.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: the length of the model's logits; token ids that the tokenizer lacks have no
            text.
        eos_token_ids: the tokens that end a text.

    Raises:
        ValueError: llguidance cannot read the tokenizer, or reads other bytes.
        ImportError: llguidance is missing.
    """
    from llguidance import LLTokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"a {type(tokenizer).__name__} is not a fast tokenizer")
    readable = copy.copy(backend)
    readable.no_padding()
    readable.no_truncation()
    # llguidance takes any sequence with ByteFallback for SentencePiece's. Some releases of
    # transformers put it before ByteLevel, where it changes nothing, when they read GGUF files.
    if (byte_level := _find_byte_level(backend.decoder)) is not None:
        readable.decoder = byte_level
    n_vocab = max(vocab_size, len(tokenizer))
    ll_tokenizer = LLTokenizer(readable.to_str(), n_vocab=n_vocab, eos_token=eos_token_ids)
    _check_token_bytes(backend, ll_tokenizer, len(tokenizer), eos_token_ids[0])
    return ll_tokenizer


def _find_byte_level(decoder: Any) -> Any:
    """A ByteLevel decoder if ``decoder`` is a sequence with one; otherwise None."""
    from tokenizers import decoders

    state = json.loads(decoder.__getstate__()) if decoder is not None else {}
    kinds = [step["type"] for step in state.get("decoders", [])]
    return decoders.ByteLevel() if "ByteLevel" in kinds else None


def _check_token_bytes(backend: Any, ll_tokenizer: Any, num_tokens: int, eos_token_id: int) -> None:
    """Raises ValueError unless the tokens decode to the bytes that llguidance has for them."""
    token_bytes = [ll_tokenizer.decode_bytes([i]) for i in range(num_tokens)]
    # Special tokens and those without bytes are no text, so a grammar never chooses them for it.
    ids = [i for i, b in enumerate(token_bytes) if b and not ll_tokenizer.is_special_token(i)]

    # One call decodes all tokens, which takes a tenth of a call each. A token of plain text
    # between any two keeps bytes from joining into characters, and spaces from being stripped.
    words = (i for i in ids if len(token_bytes[i]) > 1 and token_bytes[i].isalpha())
    separator = next(words, eos_token_id)
    start = _decode(backend, [separator])
    between = _decode(backend, [separator, separator])[len(start) :]
    spaced = [separator, *(x for i in ids for x in (i, separator))]
    texts = (token_bytes[i].decode(errors="replace") + between for i in ids)
    if _decode(backend, spaced) != start + "".join(texts):
        raise ValueError(_describe_difference(backend, token_bytes, ids, separator))

    # A part of a character has no text of its own: these are seen where they join.
    id_of = {token_bytes[i]: i for i in ids if len(token_bytes[i]) == 1}
    characters = [chr(code).encode() for code in MULTIBYTE_CODE_POINTS]
    known = [c for c in characters if all(bytes([byte]) in id_of for byte in c)]
    joined = _decode(backend, [separator, *(id_of[bytes([b])] for c in known for b in c)])
    if joined != start + b"".join(known).decode():
        raise ValueError("bytes join into other characters than the grammar engine expects")


def _describe_difference(
    backend: Any, token_bytes: list[bytes], ids: list[int], separator: int
) -> str:
    length = len(_decode(backend, [separator]))
    for i in ids:
        text = _decode(backend, [separator, i])[length:]
        if text != token_bytes[i].decode(errors="replace"):
            return f"token {i} decodes to {text!r:.80}, not to {token_bytes[i]!r:.80}"
    return "tokens decode to other texts beside each other than alone"


def _decode(backend: Any, token_ids: list[int]) -> str:
    return backend.decode(token_ids, skip_special_tokens=False)
