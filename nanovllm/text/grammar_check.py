"""Compiles grammars in a process of its own, before the engine's process compiles them.

llguidance's native code recurses along chains of references: a long one overflows the stack, which
ends the process. And some grammars of 50 characters, as integers that are multiples of a large one,
have automata of millions of states.
"""

from pathlib import Path

from nanovllm.text.limited_process import LimitedProcess, OutOfTime, Unanswered

CHECK_SECONDS = 5.0
MEMORY_BYTES = 4 << 30
GRAMMAR_PROCESS = str(Path(__file__).with_name("grammar_process.py"))


class GrammarChecker:
    """Compiles grammars where a crash, or a compilation without end, costs nobody else anything.
    The process starts with the first grammar."""

    def __init__(self) -> None:
        self._process = LimitedProcess(GRAMMAR_PROCESS, CHECK_SECONDS, MEMORY_BYTES)

    def check(self, lark: str) -> None:
        """Returns if the engine's process may compile a grammar, be it right or wrong.

        Raises:
            ValueError: compiling it ends the process, or takes too long or too much memory.
        """
        (answer,) = self._process.ask(iter([lark.encode()]))
        if isinstance(answer, OutOfTime):
            raise ValueError(f"the grammar {answer} to compile")
        if isinstance(answer, Unanswered):
            raise ValueError("the grammar is nested too deeply, or too large")

    def close(self) -> None:
        """Ends the process."""
        self._process.close()
