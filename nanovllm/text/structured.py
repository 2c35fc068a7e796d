"""Structured outputs: which tokens may come next if the text is to match a schema or a grammar.

llguidance, an optional dependency, does the parsing. Where a completion may end is decided here,
alike for every end-of-sequence token.
"""

import json
import re
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from time import thread_time
from typing import Any, TypeVar

import numpy as np

from nanovllm.kernels.sampling.logit_edits import bit_mask
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.text.grammar_check import GrammarChecker
from nanovllm.text.grammar_tokenizer import make_grammar_tokenizer
from nanovllm.text.json_schema import close_objects
from nanovllm.utils.panics import is_failure

# Longer texts would be refused anyway, but after minutes.
MAX_CHARACTERS = {"json": 1_000_000, "choice": 4_000_000, "regex": 1_000_000, "grammar": 1_000_000}
T = TypeVar("T")
CACHE_SIZE = 64  # compiled grammars, each with its lexer's tables
FREE_SECONDS = 5.0  # that following a request's grammar may take, beside what is usual:
STEP_SECONDS = 0.002  # for each mask, and for each token
WAIT_SECONDS = 0.1  # at most, until ``meanwhile`` is called again
NUM_THREADS = 4
STACK_BYTES = 16 << 20  # of a thread that compiles: more than GrammarChecker lets a grammar need
JSON_OPTIONS = {"whitespace_pattern": " "}  # at most one between two symbols
# Where the text is certain, allow all its tokens, not just those the tokenizer would choose.
LARK_OPTIONS = '%llguidance {"no_forcing": true}'
EBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)  # where Lark has "name:"


class Once:
    """What a function makes, called once however many threads need it.

    Args:
        make: the function; what it raises is remembered too.

    Attributes:
        is_done: whether ``run`` has nothing left to do.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make: Callable[[], Any] | None = make
        self._lock = threading.Lock()
        self._value: Any = None
        self._error: str | None = None

    @property
    def is_done(self) -> bool:
        return self._make is None

    def run(self) -> None:
        """Calls the function, or waits while another thread does."""
        with self._lock:
            if self._make is None:
                return
            try:
                self._value = self._make()
            except BaseException as error:
                if not is_failure(error):
                    raise
                self._error = str(error)  # a traceback would keep all that its frames hold
            self._make = None

    def get(self) -> Any:
        """What the function has returned. Raises ValueError with the message of what it raised."""
        if self._error is not None:
            raise ValueError(self._error)
        return self._value


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary, and remembers the latest.

    Any thread may call it. Compiling takes up to many seconds, most of it without the interpreter's
    lock, so it is done in threads of this object's own, whose stacks are as large as it needs.

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
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(i for i in eos_token_ids if 0 <= i < vocab_size)
        self.eos_mask = bit_mask(self.eos_ids, vocab_size)
        self.text_mask = bit_mask(set(range(vocab_size)) - self.eos_ids, vocab_size)
        self._tokenizer = Once(partial(_make_tokenizer, tokenizer, vocab_size, self.eos_ids))
        self._checker = GrammarChecker()
        self._lock = threading.Lock()
        self._latest: dict[tuple[str, bytes], Once] = {}  # the least recently used one first
        self._threads = ThreadPoolExecutor(NUM_THREADS, "nanovllm-grammars")

    def find(self, params: StructuredOutputsParams) -> Once:
        """The grammar of ``params``, compiled or still to be.

        Raises:
            ValueError: it is no JSON schema.
        """
        with _refusals():
            kind, text = _read(params)
            if len(text) > (limit := MAX_CHARACTERS[kind]):
                raise ValueError(f"the {kind} has {len(text)} characters, but may have {limit}")
        key = kind, blake2b(text.encode(errors="surrogatepass")).digest()
        with self._lock:
            grammar = self._latest.pop(key, None)
            if grammar is None:
                grammar = Once(partial(_compile, self._checker, self._tokenizer, kind, text))
            self._latest[key] = grammar
            if len(self._latest) > CACHE_SIZE:
                del self._latest[next(iter(self._latest))]
        return grammar

    def check(self, grammar: Once | None) -> None:
        """Returns when a grammar that ``find`` has returned is compiled.

        Raises:
            ValueError: the schema, expression or grammar is malformed, asks for what cannot be
                enforced, or matches no text; or llguidance, a tokenizer that it can read, or an
                end-of-sequence token is missing.
        """
        if grammar is None:
            return
        if not grammar.is_done:
            future = self._submit(grammar)
            try:
                future.result()
            finally:
                future.cancel()
        grammar.get()

    def when_compiled(
        self,
        items: Iterable[T],
        grammar_of: Callable[[T], Once | None],
        meanwhile: Callable[[], bool | None],
    ) -> Generator[tuple[int, T | ValueError]]:
        """Yields items with their indices: those with a grammar when it is compiled, in their own
        order, or the ValueError that says why it cannot be served; the others at once.

        Args:
            items: what to yield.
            grammar_of: what ``find`` has returned for an item; None if it has no grammar.
            meanwhile: called again and again while there is nothing but grammars to wait for;
                returns whether it had anything to do.
        """
        compiling: deque[tuple[int, T, Once]] = deque()
        futures: dict[Once, Future[None]] = {}

        def compiled() -> Iterator[tuple[int, T | ValueError]]:
            while compiling and compiling[0][2].is_done:
                index, item, grammar = compiling.popleft()
                try:
                    grammar.get()
                except ValueError as error:
                    yield index, error
                else:
                    yield index, item

        try:
            for index, item in enumerate(items):
                grammar = grammar_of(item)
                if grammar is None:
                    yield index, item
                    continue
                if not grammar.is_done and grammar not in futures:
                    futures[grammar] = self._submit(grammar)
                compiling.append((index, item, grammar))
                yield from compiled()
            while compiling:
                if not meanwhile():
                    wait((futures[compiling[0][2]],), WAIT_SECONDS)
                yield from compiled()
        finally:
            for future in futures.values():
                future.cancel()

    def start(self, grammar: Once, effort: "Effort") -> "Grammar":
        """A grammar that ``find`` has returned, before the first token; ``effort`` is the
        request's. Raises ValueError as ``check``."""
        self.check(grammar)
        return Grammar(grammar.get().deep_copy(), self, effort)

    def compile(self, params: StructuredOutputsParams) -> "Grammar":
        """The grammar of ``params``, before the first token. Raises ValueError as ``check``."""
        return self.start(self.find(params), Effort())

    def close(self) -> None:
        """Ends the threads. What they are compiling is waited for, what has not begun is not."""
        self._threads.shutdown(cancel_futures=True)
        self._checker.close()

    def _submit(self, grammar: Once) -> Future[None]:
        with self._lock:
            default = threading.stack_size(STACK_BYTES)
            try:
                return self._threads.submit(grammar.run)
            finally:
                threading.stack_size(default)


class Effort:
    """The CPU time that a request's completions take to follow their grammar. An ambiguous one may
    take a second for each token, while all other requests wait."""

    def __init__(self) -> None:
        self._seconds = FREE_SECONDS

    @contextmanager
    def of_a_step(self) -> Iterator[None]:
        """Within its block a mask is computed, or a token accepted."""
        start = thread_time()
        yield
        self._seconds += STEP_SECONDS - (thread_time() - start)

    @property
    def is_over(self) -> bool:
        """Whether the time is used up."""
        return self._seconds < 0


class Grammar:
    """How far one completion has come in its grammar.

    Attributes:
        error: why nothing can follow, not even an end; empty as long as something can.
    """

    def __init__(self, matcher: Any, compiler: GrammarCompiler, effort: Effort) -> None:
        self._matcher = matcher
        self._compiler = compiler
        self._effort = effort
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
        try:
            if self._effort.is_over:
                raise ValueError("its grammar takes too long to follow")
            with self._effort.of_a_step():
                allowed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        except BaseException as error:
            if not is_failure(error):
                raise
            self.error = f"the structured output cannot go on: {error}"
            mask[:] = 0
            return
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
        with self._effort.of_a_step():
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
            reason = "no token of this vocabulary can follow"
        self.error = f"the structured output cannot go on: {_brief(reason)}"


def _make_tokenizer(tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> Any:
    """llguidance's tokenizer. Raises ValueError where there can be none."""
    if tokenizer is None or not eos_ids:
        raise ValueError("they need a model with a tokenizer and an end-of-sequence token")
    try:
        return make_grammar_tokenizer(tokenizer, vocab_size, sorted(eos_ids))
    except ImportError:
        raise ValueError('they need llguidance: pip install "nanovllm[structured]"') from None
    except ValueError as error:
        raise ValueError(f"they cannot use this tokenizer: {error}") from error


def _compile(checker: GrammarChecker, tokenizer: Once, kind: str, text: str) -> Any:
    """An llguidance matcher that stands at the start of a grammar, as ``_read`` gives it. Raises
    ValueError."""
    with _refusals():
        tokenizer.run()
        return _make_matcher(checker, tokenizer.get(), kind, text)


def _make_matcher(checker: GrammarChecker, ll_tokenizer: Any, kind: str, text: str) -> Any:
    from llguidance import LLMatcher, LLParserLimits

    lark = f"{_to_lark(kind, text, checker)}\n{LARK_OPTIONS}"
    checker.check(lark)
    limits = LLParserLimits(verbose_errors=False)  # errors without the parser's whole state
    matcher = LLMatcher(ll_tokenizer, lark, log_level=0, limits=limits)
    matcher.compute_bitmask()  # some mistakes show at the first step only
    if matcher.is_error():
        error = matcher.get_error()
        raise ValueError("it matches no text" if error.startswith("NoExtension") else error)
    return matcher


def _read(params: StructuredOutputsParams) -> tuple[str, str]:
    """Which of its fields ``params`` has, and its value as text."""
    schema = {"type": "object"} if params.json_object else params.json
    if schema is not None:
        return "json", _read_schema(schema)
    if params.choice is not None:
        return "choice", json.dumps(params.choice)
    if params.regex is not None:
        return "regex", params.regex
    return "grammar", params.grammar or ""


def _read_schema(schema: Any) -> str:
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    elif isinstance(schema, str):
        schema = json.loads(schema)
    if not isinstance(schema, Mapping):
        raise ValueError(f"a JSON schema is an object, got {schema!r:.80}")
    return json.dumps({**schema})


def _to_lark(kind: str, text: str, checker: GrammarChecker) -> str:
    """A grammar in llguidance's dialect of Lark; raises whatever is wrong with it."""
    from llguidance import LLMatcher, regex_to_lark
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if kind == "json":
        schema = json.loads(text)
        if '"oneOf"' in text:  # its branches must exclude each other as they are, not just closed
            lark = _json_to_lark(schema)
            checker.check(lark)
            error = LLMatcher.validate_grammar(lark)
            if error:
                raise ValueError(error)
        return _json_to_lark(close_objects(schema))
    if kind == "choice":
        texts = " | ".join(json.dumps(choice) for choice in json.loads(text))  # as Lark's quotes
        return f"start: CHOICE\nCHOICE: {texts}"
    if kind == "regex":
        return f"start: /{regex_to_lark(text, use_ascii='')}/"
    return gbnf_to_lark(text) if EBNF_RULE.search(text) else text


def _json_to_lark(schema: dict[str, Any]) -> str:
    options = {**schema.get("x-guidance", {}), **JSON_OPTIONS}
    return f"start: %json {json.dumps({**schema, 'x-guidance': options})}"


@contextmanager
def _refusals() -> Iterator[None]:
    """Makes a ValueError of whatever is raised within."""
    try:
        yield
    except BaseException as error:  # pydantic and llguidance have exceptions of many kinds
        if not is_failure(error):
            raise
        raise ValueError(f"structured_outputs cannot be served: {_brief(error)}") from error


def _brief(error: object) -> str:
    """llguidance's error message without the Lark made here that it quotes at the end."""
    return re.sub(r"(?s)\n( *\d+ \| |<non-verbose/>).*", "", str(error))
