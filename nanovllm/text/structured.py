"""Structured outputs: masks the tokens that would break a JSON schema, regex, choice or grammar.

llguidance, an optional dependency, does the parsing. This module decides where a completion may
end, by the same rule for every EOS token.
"""

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from importlib.util import find_spec
from time import thread_time
from typing import Any

import numpy as np

from nanovllm.kernels.sampling.logit_edits import bit_mask
from nanovllm.structured_outputs import StructuredOutputsParams
from nanovllm.text.grammar_check import GrammarChecker
from nanovllm.text.grammar_tokenizer import make_grammar_tokenizer
from nanovllm.text.json_schema import close_objects
from nanovllm.utils.panics import as_value_error, is_failure

# llguidance would refuse longer texts too, but only after minutes.
MAX_CHARACTERS = {"json": 1_000_000, "choice": 4_000_000, "regex": 1_000_000, "grammar": 1_000_000}
UNUSABLE = "structured_outputs cannot be used:"
CACHE_SIZE = 64  # compiled grammars, each with its lexer's tables
# The limit of CPU time for a request's grammar is BUDGET_SECONDS, plus ALLOWANCE_SECONDS for each
# mask and each accepted token. The allowance is what these usually take.
BUDGET_SECONDS = 5.0
ALLOWANCE_SECONDS = 0.002
NUM_THREADS = 4
STACK_BYTES = 16 << 20  # of a compiling thread: more than GrammarChecker's process has
STACK_SIZE = threading.Lock()  # held while ``threading.stack_size`` is changed, for all threads
JSON_OPTIONS = {"whitespace_pattern": " "}  # at most one space between two symbols
# Where only one text can follow, allow every tokenization of it, not only the tokenizer's own.
LARK_OPTIONS = '%llguidance {"no_forcing": true}'
# A string or a character class, or ends of lines, with comments, before an alternative.
GBNF_TOKEN = re.compile(
    r"""("(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\\n])*\])|(?:[ \t]*(?:\#[^\n]*)?\n)+(?=[ \t]*\|)"""
)
GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)  # Lark writes "name:" instead


class Lazy:
    """A value that is computed when it is first needed, by the first thread that calls ``get``.

    Args:
        make: computes the value. If it raises a ValueError, ``get`` raises the same from then on.

    Attributes:
        is_done: whether ``make`` has returned or raised.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make: Callable[[], Any] | None = make
        self._lock = threading.Lock()
        self._value: Any = None
        self._error: str | None = None

    @property
    def is_done(self) -> bool:
        return self._make is None

    def get(self) -> Any:
        """Returns the value. Computes it, or waits for the thread that is computing it, if
        necessary. Raises ValueError if that failed."""
        with self._lock:
            if self._make is not None:
                try:
                    self._value = self._make()
                except ValueError as error:
                    self._error = str(error)  # the exception's traceback would keep objects alive
                self._make = None
        if self._error is not None:
            raise ValueError(self._error)
        return self._value


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary, and caches them (least recently used).

    Thread-safe. Compiling a grammar may take many seconds, mostly without the GIL. It runs in a
    thread pool, because it needs a larger stack than the caller's thread may have.

    JSON is generated on one line with at most one space between symbols. If any whitespace were
    allowed, a model at a high temperature might generate nothing else. Properties come in the
    schema's order. JSON schema keywords that cannot be enforced are refused. The ``format`` of
    numbers, annotations, and keywords that JSON schema does not define are ignored.

    Regular expressions match the whole text and use Rust's syntax, without look-around and
    back-references. As in Lark, terminals match greedily. An EBNF rule that consists of terminals
    becomes a terminal. Special tokens are allowed only where a Lark grammar names them.

    Args:
        tokenizer: the model's fast tokenizer, converted at the first compilation; None if the
            model has none.
        vocab_size: the length of the model's logits, which may differ from the tokenizer's size.
        eos_token_ids: the tokens that end a completion. A grammar cannot allow them as text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(i for i in eos_token_ids if 0 <= i < vocab_size)
        self.eos_mask = bit_mask(self.eos_ids, vocab_size)
        self.text_mask = bit_mask(set(range(vocab_size)) - self.eos_ids, vocab_size)
        ll_tokenizer = Lazy(partial(_make_tokenizer, tokenizer, vocab_size, self.eos_ids))
        self._checker = checker = GrammarChecker()
        self._lock = threading.Lock()
        self._cached = lru_cache(CACHE_SIZE)(
            lambda kind, text: Lazy(partial(_make_matcher, checker, ll_tokenizer, kind, text))
        )
        self._pool = ThreadPoolExecutor(NUM_THREADS, "nanovllm-grammars")

    def find(self, params: StructuredOutputsParams) -> Lazy:
        """Returns the grammar of ``params``, from the cache if it is there. It may not be compiled
        yet: ``submit`` starts its compilation, and ``Grammars`` waits for that.

        Raises:
            ValueError: the JSON schema cannot be read, or the text is too long.
        """
        with as_value_error(UNUSABLE):
            kind, text = _spec_of(params)
            if len(text) > (limit := MAX_CHARACTERS[kind]):
                raise ValueError(f"the {kind} has {len(text)} characters, but the limit is {limit}")
        with self._lock:
            return self._cached(kind, text)

    def submit(self, grammar: Lazy) -> Future[Any]:
        """Compiles a grammar from ``find`` in another thread, unless it is compiled already."""
        with STACK_SIZE:
            default = threading.stack_size(STACK_BYTES)
            try:
                return self._pool.submit(grammar.get)
            finally:
                threading.stack_size(default)

    def start(self, grammar: Lazy, n: int = 1) -> list["Grammar"]:
        """Returns ``n`` independent states of a grammar from ``find``, each at the grammar's start.
        They share the CPU budget of one request. A grammar that is not compiled yet is compiled in
        the calling thread. Raises ValueError if it cannot be compiled."""
        budget = CPUBudget()
        return [Grammar(grammar.get().deep_copy(), self, budget) for _ in range(n)]

    def close(self) -> None:
        """Ends the threads: waits for running compilations and cancels the others."""
        self._pool.shutdown(cancel_futures=True)
        self._checker.close()


class CPUBudget:
    """A limit of the CPU time that a request spends on its grammar. An ambiguous grammar may take a
    second for each token, during which all other requests wait."""

    def __init__(self) -> None:
        self._seconds = BUDGET_SECONDS

    @contextmanager
    def charge(self) -> Iterator[None]:
        """Charges the CPU time of the ``with`` block: one mask, or one accepted token."""
        start = thread_time()
        yield
        self._seconds += ALLOWANCE_SECONDS - (thread_time() - start)

    @property
    def is_exhausted(self) -> bool:
        """Whether the CPU time is used up."""
        return self._seconds < 0


class Grammar:
    """The state of a grammar within one completion.

    Attributes:
        error: if no token, not even an EOS token, satisfies the grammar, the reason; otherwise "".
    """

    def __init__(self, matcher: Any, compiler: GrammarCompiler, budget: CPUBudget) -> None:
        self._matcher = matcher
        self._compiler = compiler
        self._budget = budget
        self._at_end = False  # an EOS token was accepted, or no other token is allowed
        self.error = ""

    @property
    def is_finished(self) -> bool:
        """Whether only an EOS token is allowed next, or one has been accepted."""
        return self._at_end or self._matcher.is_stopped()

    def fill_mask(self, mask: np.ndarray) -> None:
        """Writes the mask of the tokens that the grammar allows next.

        The mask is empty, and ``error`` is set, if no token in the vocabulary satisfies the
        grammar, or the grammar has become too complex.

        Args:
            mask: int32 [ceil(vocab_size / 32)]; bit i of word w stands for token 32 * w + i.
        """
        try:
            if self._budget.is_exhausted:
                raise ValueError("its grammar has used up its CPU time")
            with self._budget.charge():
                allowed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        except BaseException as error:
            if not is_failure(error):
                raise
            self.error = f"the structured output cannot continue: {error}"
            mask[:] = 0
            return
        np.bitwise_and(allowed[: len(mask)], self._compiler.text_mask, out=mask)
        if self._at_end:
            mask[:] = 0
        elif not mask.any():
            self._at_end = self._matcher.is_accepting()
            if not self._at_end:
                self._fail()
        if self._can_end():
            mask |= self._compiler.eos_mask

    def accept(self, token_id: int) -> bool:
        """Advances by one token. Returns False, without a change, if the grammar does not allow
        the token."""
        if token_id in self._compiler.eos_ids:
            self._at_end = self._can_end()
            return self._at_end
        if self._at_end or not 0 <= token_id < self._compiler.vocab_size:
            return False
        with self._budget.charge():
            num_accepted = self._matcher.try_consume_tokens([token_id])
        if num_accepted == 1:
            return True
        if self._matcher.is_error():
            self._fail()
        return False

    def _can_end(self) -> bool:
        return not self.error and (self.is_finished or self._matcher.is_accepting())

    def _fail(self) -> None:
        reason = self._matcher.get_error()
        if not reason or reason.startswith("NoExtension"):
            reason = "no token in the vocabulary satisfies the grammar"
        self.error = f"the structured output cannot continue: {_shorten(reason)}"


def _make_tokenizer(tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> Any:
    """Converts the tokenizer to llguidance's format. Raises ValueError if that is impossible."""
    if tokenizer is None or not eos_ids:
        raise ValueError("the model has no tokenizer or no EOS token")
    if find_spec("llguidance") is None:
        raise ValueError('llguidance is not installed: pip install "nanovllm[structured]"')
    with as_value_error("llguidance cannot use this tokenizer:"):
        return make_grammar_tokenizer(tokenizer, vocab_size, sorted(eos_ids))


@as_value_error(UNUSABLE)
def _make_matcher(checker: GrammarChecker, tokenizer: Lazy, kind: str, text: str) -> Any:
    """Compiles a grammar that ``_spec_of`` returned. Returns an llguidance matcher in its start
    state. Raises ValueError if that fails."""
    ll_tokenizer = tokenizer.get()  # raises ValueError if llguidance is not installed
    from llguidance import LLMatcher, LLParserLimits

    lark = f"{_to_lark(kind, text, checker)}\n{LARK_OPTIONS}"
    checker.check(lark)
    limits = LLParserLimits(verbose_errors=False)  # leave the parser's state out of messages
    matcher = LLMatcher(ll_tokenizer, lark, log_level=0, limits=limits)
    matcher.compute_bitmask()  # reports errors that compilation does not
    if matcher.is_error():
        error = matcher.get_error()
        is_empty = error.startswith("NoExtension")
        raise ValueError("it matches no text" if is_empty else _shorten(error))
    return matcher


def _spec_of(params: StructuredOutputsParams) -> tuple[str, str]:
    """Returns the kind of grammar that ``params`` asks for, and its source text."""
    if params.choice is not None:
        return "choice", json.dumps(params.choice)
    if params.regex is not None:
        return "regex", params.regex
    if params.grammar is not None:
        return "grammar", params.grammar
    schema: Any = {"type": "object"} if params.json_object else params.json
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    elif isinstance(schema, str):
        schema = json.loads(schema)
    if not isinstance(schema, Mapping):
        raise ValueError(f"a JSON schema is an object, got {schema!r:.80}")
    return "json", json.dumps({**schema})


def _to_lark(kind: str, text: str, checker: GrammarChecker) -> str:
    """Converts a grammar to llguidance's dialect of Lark. Raises an error of any type if it is
    invalid."""
    from llguidance import LLMatcher, regex_to_lark
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if kind == "json":
        schema = json.loads(text)
        if '"oneOf"' in text:  # check the original: close_objects may make its branches exclusive
            lark = _json_to_lark(schema)
            checker.check(lark)
            if error := LLMatcher.validate_grammar(lark):
                raise ValueError(_shorten(error))
        return _json_to_lark(close_objects(schema))
    if kind == "choice":
        texts = " | ".join(map(json.dumps, json.loads(text)))  # Lark quotes strings as JSON does
        return f"start: CHOICE\nCHOICE: {texts}"
    if kind == "regex":
        return f"start: /{regex_to_lark(text, use_ascii='d')}/"
    return gbnf_to_lark(_plain_gbnf(text)) if GBNF_RULE.search(text) else text


def _plain_gbnf(text: str) -> str:
    r"""Rewrites what xgrammar's EBNF allows and ``gbnf_to_lark`` does not: alternatives that begin
    a line, and the escapes ``\uXXXX`` and, in a character class, ``\-``."""

    def escape(match: re.Match[str]) -> str:
        char = match[1]
        if char == "-":
            return r"\x2d"
        plain = chr(int(char[1:], 16)) if len(char) > 1 else ""
        return plain if plain.isprintable() and plain not in '"\\[]^-' else match[0]

    def rewrite(match: re.Match[str]) -> str:
        if match[1] is None:  # the end of a line, before an alternative
            return " "
        return re.sub(r"\\(u[0-9a-fA-F]{4}|.)", escape, match[1])

    return GBNF_TOKEN.sub(rewrite, text)


def _json_to_lark(schema: dict[str, Any]) -> str:
    options = {**schema.get("x-guidance", {}), **JSON_OPTIONS}
    return f"start: %json {json.dumps({**schema, 'x-guidance': options})}"


def _shorten(error: str) -> str:
    """Returns an llguidance error message without the generated Lark grammar that it quotes."""
    return re.sub(r"(?s)\n( *\d+ \| |<non-verbose/>).*", "", error)
