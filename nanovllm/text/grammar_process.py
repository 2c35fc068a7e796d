"""Compiles grammars in a process of its own: see ``grammar_check.py``. Needs llguidance alone."""

from contextlib import suppress

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

tokenizer = LLTokenizer("byte")
limits = LLParserLimits(verbose_errors=False)


def answer(lark: bytes) -> bytes:
    """Compiles a grammar in Lark, be it right or wrong."""
    with suppress(Exception):  # the engine's process meets the same, and tells the user
        LLMatcher(tokenizer, lark.decode(), log_level=0, limits=limits).compute_bitmask()
    return b""
