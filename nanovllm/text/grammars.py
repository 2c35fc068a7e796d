"""An engine's grammars. Imports the compiler when the first request has a grammar."""

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from itertools import chain
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from nanovllm.text.structured import GrammarCompiler, Lazy

T = TypeVar("T")


class Grammars:
    """Makes the engine's GrammarCompiler when it is first needed. Thread-safe.

    Args:
        arguments: the arguments of GrammarCompiler.
    """

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments
        self._lock = Lock()
        self._compiler: GrammarCompiler | None = None

    @property
    def compiler(self) -> "GrammarCompiler":
        from nanovllm.text.structured import GrammarCompiler

        with self._lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler(*self._arguments)
            return self._compiler

    def check(self, grammar: "Lazy | None") -> None:
        """Waits until a grammar is compiled. Raises ValueError if it cannot be compiled."""
        if grammar is not None:
            self.compiler.check(grammar)

    def when_compiled(
        self,
        items: Iterable[T],
        grammar_of: "Callable[[T], Lazy | None]",
        meanwhile: Callable[[], bool | None],
    ) -> "Generator[tuple[int, T | ValueError]]":
        """Yields each item with its index, as soon as its grammar is compiled: see
        ``GrammarCompiler.when_compiled``."""
        rest = iter(items)
        for start, item in enumerate(rest):
            if grammar_of(item) is not None:
                ready = self.compiler.when_compiled(chain([item], rest), grammar_of, meanwhile)
                with closing(ready):
                    for index, each in ready:
                        yield start + index, each
            else:
                yield start, item

    def close(self) -> None:
        """Ends the compiler's threads."""
        if self._compiler is not None:
            self._compiler.close()
