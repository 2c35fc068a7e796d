"""Compiles grammars in the process that ``grammar_check.py`` starts. Imports only llguidance."""

from contextlib import suppress

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

tokenizer = LLTokenizer("byte")
limits = LLParserLimits(verbose_errors=False)


def handle(lark: bytes) -> bytes:
    """Compiles a grammar in Lark syntax. Ignores errors in the grammar."""
    with suppress(Exception):  # the engine's process gets the same error and reports it
        LLMatcher(tokenizer, lark.decode(), log_level=0, limits=limits).compute_bitmask()
    return b""
