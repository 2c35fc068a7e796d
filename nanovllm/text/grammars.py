"""An engine's grammars. Imports the compiler when the first request has a grammar."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, wait
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from nanovllm.text.structured import GrammarCompiler, Lazy

T = TypeVar("T")
WAIT_SECONDS = 0.1  # longest wait between two calls of ``meanwhile``


class Grammars:
    """Compiles an engine's grammars and waits for them. Creates the GrammarCompiler when the first
    request has a grammar. Thread-safe.

    Args:
        arguments: the arguments of GrammarCompiler.
    """

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments
        self._lock = Lock()
        self._compiler: GrammarCompiler | None = None
        self._is_closed = False

    @property
    def compiler(self) -> "GrammarCompiler":
        from nanovllm.text.structured import GrammarCompiler

        with self._lock:
            if self._is_closed:
                raise ValueError("the engine was closed: make a new one")
            if self._compiler is None:
                self._compiler = GrammarCompiler(*self._arguments)
            return self._compiler

    def check(self, grammar: "Lazy | None", check_open: Callable[[], None]) -> None:
        """Compiles a grammar from ``GrammarCompiler.find``, or waits until another thread has
        compiled it.

        Args:
            grammar: the grammar; None if there is none.
            check_open: called repeatedly during the wait. Raises ValueError if the engine has been
                closed.

        Raises:
            ValueError: the schema, regex or grammar is malformed, cannot be enforced, or matches
                no text; llguidance is not installed or cannot read the tokenizer; or the model has
                no EOS token.
        """
        for _, result in self.when_compiled([grammar], lambda grammar: grammar, check_open):
            if isinstance(result, ValueError):
                raise result

    def when_compiled(
        self,
        items: Iterable[T],
        grammar_of: "Callable[[T], Lazy | None]",
        meanwhile: Callable[[], bool | None],
    ) -> "Generator[tuple[int, T | ValueError]]":
        """Yields each item with its index, as soon as its grammar is compiled.

        Items without a grammar are yielded immediately. Items with a grammar are yielded in their
        order. If a grammar cannot be compiled, its ValueError is yielded in place of the item.

        Args:
            items: the items.
            grammar_of: returns an item's grammar, which ``GrammarCompiler.find`` has returned, or
                None.
            meanwhile: does other work. Called repeatedly once all items have been read, until all
                grammars are compiled. Returns whether there was work to do. Raises an error if the
                engine has been closed, because some grammars may then never be compiled.
        """
        compiling: deque[tuple[int, T, Lazy]] = deque()
        futures: dict[Lazy, Future[Any]] = {}

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
                    futures[grammar] = self.compiler.submit(grammar)
                compiling.append((index, item, grammar))
                yield from compiled()
            while compiling:
                if not meanwhile():
                    wait((futures[compiling[0][2]],), WAIT_SECONDS)
                yield from compiled()
        finally:
            for future in futures.values():
                future.cancel()

    def close(self) -> None:
        """Ends the compiler's threads. No other compiler is created after that."""
        with self._lock:
            self._is_closed = True
        if self._compiler is not None:
            self._compiler.close()
