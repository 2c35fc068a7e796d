"""Structured outputs: which tokens may come next if the text is to match a schema or a grammar.

llguidance, an optional dependency, does the parsing. Where a completion may end is decided here,
alike for every end-of-sequence token.
"""

import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from nanovllm.kernels.logit_edits import bit_mask
from nanovllm.sampling_params import StructuredOutputsParams

CACHE_SIZE = 64  # compiled grammars, each with its lexer's tables
JSON_OPTIONS = {"whitespace_pattern": " "}  # at most one between two symbols
# Where the text is certain, allow all its tokens, not just those the tokenizer would choose.
LARK_OPTIONS = '%llguidance {"no_forcing": true}'
EBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)  # where Lark has "name:"


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary, and remembers the latest.

    JSON is written on one line with at most one space between symbols, since a model free to
    write any whitespace there may, at a high temperature, never write anything else. Properties
    come in the schema's order. Keywords of JSON schema that cannot be enforced are refused, but
    names that it does not define mean nothing to it and are ignored.

    Regular expressions match the whole text, and have Rust's syntax: no look-around, no
    back-references. As in Lark, a terminal matches as much as it can; an EBNF rule made of
    terminals alone becomes one. Special tokens may come only where a Lark grammar names them.

    Args:
        tokenizer: the model's fast tokenizer, read at the first compile; None if it has none.
        vocab_size: the length of the model's logits, whatever the tokenizer's is.
        eos_token_ids: the tokens that end a completion; they count as nothing else.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(i for i in eos_token_ids if 0 <= i < vocab_size)
        self.eos_mask = bit_mask(self.eos_ids, vocab_size)
        self.text_mask = bit_mask(set(range(vocab_size)) - self.eos_ids, vocab_size)
        self._matcher_of = lru_cache(CACHE_SIZE)(_make_matcher)

    def compile(self, params: StructuredOutputsParams) -> "Grammar":
        """The grammar of ``params``, before the first token.

        Raises:
            ValueError: the schema, expression or grammar is malformed, asks for what cannot be
                enforced, or matches no text; or llguidance, a tokenizer that it can read, or an
                end-of-sequence token is missing.
        """
        tokenizer = self._ll_tokenizer
        try:
            matcher = self._matcher_of(tokenizer, _to_lark(params))
        except Exception as error:  # pydantic and llguidance have exceptions of many kinds
            raise ValueError(f"structured_outputs cannot be served: {_brief(error)}") from error
        return Grammar(matcher.deep_copy(), self)

    @cached_property
    def _ll_tokenizer(self) -> Any:
        if self.tokenizer is None or not self.eos_ids:
            raise ValueError(
                "structured_outputs need a model with a tokenizer and an end-of-sequence token"
            )
        try:
            from llguidance.hf import from_tokenizer

            n_vocab = max(self.vocab_size, len(self.tokenizer))
            return from_tokenizer(self.tokenizer, n_vocab, eos_token=sorted(self.eos_ids))
        except ImportError as error:
            raise ValueError(
                'structured_outputs need llguidance: pip install "nanovllm[structured]"'
            ) from error
        except ValueError as error:
            raise ValueError(f"structured_outputs cannot use this tokenizer: {error}") from error


class Grammar:
    """How far one completion has come in its grammar.

    Attributes:
        error: why nothing can follow, not even an end; empty as long as something can.
    """

    def __init__(self, matcher: Any, compiler: GrammarCompiler) -> None:
        self._matcher = matcher
        self._compiler = compiler
        self._ended = False  # by an end-of-sequence token, or for want of any other
        self.error = ""

    @property
    def is_finished(self) -> bool:
        """Nothing can follow but an end-of-sequence token, or one has been accepted."""
        return self._ended or self._matcher.is_stopped()

    def fill_mask(self, mask: np.ndarray) -> None:
        """Sets the bits of the tokens that may come next. There is none, and ``error`` says why,
        where a grammar gets too complex to follow or leads where this vocabulary has no token.

        Args:
            mask: int32 [ceil(vocab_size / 32)]; bit i of word w stands for token 32 * w + i.
        """
        allowed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        np.bitwise_and(allowed[: len(mask)], self._compiler.text_mask, out=mask)
        if self._ended:
            mask[:] = 0
        elif not mask.any():
            self._ended = self._matcher.is_accepting()
            if not self._ended:
                self._fail()
        if self._can_end():
            mask |= self._compiler.eos_mask

    def accept(self, token_id: int) -> bool:
        """Goes on by one token; False, and nothing has changed, if it may not come next."""
        if token_id in self._compiler.eos_ids:
            self._ended = self._can_end()
            return self._ended
        if self._ended or not 0 <= token_id < self._compiler.vocab_size:
            return False
        if self._matcher.try_consume_tokens([token_id]) == 1:
            return True
        if self._matcher.is_error():
            self._fail()
        return False

    def _can_end(self) -> bool:
        return not self.error and (self.is_finished or self._matcher.is_accepting())

    def _fail(self) -> None:
        reason = self._matcher.get_error()
        if not reason or reason.startswith("NoExtension"):
            reason = "no token of this vocabulary can follow"
        self.error = f"the structured output cannot go on: {_brief(reason)}"


def _make_matcher(ll_tokenizer: Any, lark: str) -> Any:
    """An llguidance matcher that stands at the start of a grammar. Raises ValueError."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False)  # errors without the parser's whole state
    matcher = LLMatcher(ll_tokenizer, f"{lark}\n{LARK_OPTIONS}", log_level=0, limits=limits)
    matcher.compute_bitmask()  # some mistakes show at the first step only
    if matcher.is_error():
        error = matcher.get_error()
        raise ValueError("it matches no text" if error.startswith("NoExtension") else error)
    return matcher


def _to_lark(params: StructuredOutputsParams) -> str:
    """``params`` in llguidance's dialect of Lark; raises whatever is wrong with them."""
    from llguidance import regex_to_lark
    from llguidance.gbnf_to_lark import gbnf_to_lark

    schema = {"type": "object"} if params.json_object else params.json
    if schema is not None:
        return f"start: %json {_read_schema(schema)}"
    if params.regex is not None:
        return f"start: /{regex_to_lark(params.regex, use_ascii='')}/"
    if params.choice is not None:
        texts = " | ".join(json.dumps(text) for text in params.choice)  # Lark's quotes are JSON's
        return f"start: CHOICE\nCHOICE: {texts}"
    grammar = params.grammar or ""
    return gbnf_to_lark(grammar) if EBNF_RULE.search(grammar) else grammar


def _read_schema(schema: Any) -> str:
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    elif isinstance(schema, str):
        schema = json.loads(schema)
    if not isinstance(schema, Mapping):
        raise ValueError(f"a JSON schema is an object, got {schema!r:.80}")
    options = {**schema.get("x-guidance", {}), **JSON_OPTIONS}
    return json.dumps({**schema, "x-guidance": options})


def _brief(error: object) -> str:
    """llguidance's error message without the Lark made here that it quotes at the end."""
    return re.sub(r"(?s)\n( *\d+ \| |<non-verbose/>).*", "", str(error))
