"""Converts a tokenizer to llguidance's format, which holds the bytes of every token."""

import copy
from typing import Any

from nanovllm.text.token_text import decoder_steps

# Code points whose UTF-8 contains every byte that can occur in a multi-byte character.
MULTIBYTE_CODE_POINTS = (
    *range(0x80, 0x800),
    *range(0x800, 0xD800, 0x400),
    *range(0xE000, 0x10000, 0x400),
    *range(0x10000, 0x110000, 0x10000),
)


def make_grammar_tokenizer(tokenizer: Any, vocab_size: int, eos_token_ids: list[int]) -> Any:
    """Returns an ``llguidance.LLTokenizer``, after checking its token bytes against decoding.

    Args:
        tokenizer: a transformers fast tokenizer.
        vocab_size: the length of the model's logits. Token ids beyond the tokenizer's vocabulary
            have no bytes.
        eos_token_ids: the EOS tokens.

    Raises:
        ValueError: llguidance cannot read the tokenizer, or its token bytes differ from what the
            tokens decode to.
    """
    from llguidance import LLTokenizer
    from tokenizers import decoders

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"a {type(tokenizer).__name__} is not a fast tokenizer")
    ll_backend = copy.copy(backend)
    ll_backend.no_padding()
    ll_backend.no_truncation()
    # llguidance knows ByteLevel only as the whole decoder, not in a sequence.
    if any(step["type"] == "ByteLevel" for step in decoder_steps(backend)):
        ll_backend.decoder = decoders.ByteLevel()
    n_vocab = max(vocab_size, len(tokenizer))
    ll_tokenizer = LLTokenizer(ll_backend.to_str(), n_vocab=n_vocab, eos_token=eos_token_ids)
    _check_token_bytes(backend, ll_tokenizer, len(tokenizer), eos_token_ids[0])
    return ll_tokenizer


def _check_token_bytes(backend: Any, ll_tokenizer: Any, num_tokens: int, eos_token_id: int) -> None:
    """Raises ValueError if a token decodes to other bytes than llguidance has for it."""
    token_bytes = [ll_tokenizer.decode_bytes([i]) for i in range(num_tokens)]
    # A grammar never allows special tokens and tokens without bytes as text.
    ids = [i for i, b in enumerate(token_bytes) if b and not ll_tokenizer.is_special_token(i)]

    # One call for all tokens takes a tenth of the time of a call per token. A token of plain text
    # between every two tokens separates them. Otherwise, bytes of different tokens could form a
    # character, or the decoder could strip spaces.
    words = (i for i in ids if len(token_bytes[i]) > 1 and token_bytes[i].isalpha())
    separator = next(words, eos_token_id)
    start = _decode(backend, [separator])
    between = _decode(backend, [separator, separator])[len(start) :]
    spaced = [separator, *(x for i in ids for x in (i, separator))]
    texts = (token_bytes[i].decode(errors="replace") + between for i in ids)
    if _decode(backend, spaced) != start + "".join(texts):
        raise ValueError(_describe_difference(backend, token_bytes, ids, separator))

    # Tokens of a single byte have no text alone, so check them in characters that they form.
    id_of = {token_bytes[i]: i for i in ids if len(token_bytes[i]) == 1}
    characters = [chr(code).encode() for code in MULTIBYTE_CODE_POINTS]
    known = [c for c in characters if all(bytes([byte]) in id_of for byte in c)]
    joined = _decode(backend, [separator, *(id_of[bytes([b])] for c in known for b in c)])
    if joined != start + b"".join(known).decode():
        raise ValueError("tokens of single bytes do not decode to the characters that they form")


def _describe_difference(
    backend: Any, token_bytes: list[bytes], ids: list[int], separator: int
) -> str:
    """Returns an error message that names the first token whose text and bytes differ."""
    length = len(_decode(backend, [separator]))
    for i in ids:
        text = _decode(backend, [separator, i])[length:]
        if text != token_bytes[i].decode(errors="replace"):
            return f"token {i} decodes to {text!r:.80}, not to {token_bytes[i]!r:.80}"
    return "the text of a token depends on the tokens around it"


def _decode(backend: Any, token_ids: list[int]) -> str:
    return backend.decode(token_ids, skip_special_tokens=False)
