"""How BPE tokenizers of GGUF files split text before they merge bytes.

A file only names its pre-tokenizer. The regular expressions are those of the ``tokenizer.json`` of
the models that the names come from. Other names are left to transformers. Older releases of it
split text as GPT-2 does, whatever the name, so that numbers and capitals get other tokens.
"""

from typing import Any

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARK = r"[^\r\n\p{L}\p{N}]?"  # at most one, before a word

_LLAMA3 = rf"{_CONTRACTION}|{_MARK}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_TEKKEN = (
    rf"{_MARK}{_UPPER}*{_LOWER}+|{_MARK}{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT_4O = (
    rf"{_MARK}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_MARK}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
SPLITS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "dbrx", "smaug-bpe"), _LLAMA3),
    "tekken": _TEKKEN,
    "gpt-4o": _GPT_4O,
}


def split_as(tokenizer: Any, name: str | None) -> None:
    """Makes a ``tokenizers.Tokenizer`` split text as the pre-tokenizer ``name`` does, if it is one
    of SPLITS."""
    if name in SPLITS:
        from tokenizers import Regex
        from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

        tokenizer.pre_tokenizer = Sequence(
            [
                Split(Regex(SPLITS[name]), behavior="isolated"),
                ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )


def split_as_phi3(tokenizer: Any) -> None:
    """Makes a tokenizer put a space before the text after each special token, as Phi-3's own does.
    Llama's puts one only before the first text."""
    from tokenizers.normalizers import Prepend, Replace, Sequence

    tokenizer.normalizer = Sequence([Prepend("\u2581"), Replace(" ", "\u2581")])
    tokenizer.pre_tokenizer = None
