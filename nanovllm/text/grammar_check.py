"""Checks in a separate process that a grammar can be compiled, before the engine compiles it.

llguidance's native code recurses along chains of references, so a long chain overflows the stack
and ends the process. Some grammars of 50 characters compile to automata with millions of states:
for example, integers with a large ``multipleOf``.
"""

from pathlib import Path

from nanovllm.text.limited_process import LimitedProcess, ProcessError

CHECK_SECONDS = 5.0
MEMORY_BYTES = 4 << 30
GRAMMAR_PROCESS = str(Path(__file__).with_name("grammar_process.py"))


class GrammarChecker(LimitedProcess):
    """A process that compiles grammars, and may crash or run out of time or memory."""

    def __init__(self) -> None:
        super().__init__(GRAMMAR_PROCESS, CHECK_SECONDS, MEMORY_BYTES)

    def check(self, lark: str) -> None:
        """Checks that the engine's process can compile a grammar safely. Does not check that the
        grammar is valid.

        Raises:
            ValueError: compiling the grammar crashes, takes too long or takes too much memory.
        """
        (response,) = self.run([lark.encode()])
        if isinstance(response, ProcessError):
            raise ValueError(
                f"the grammar is nested too deeply, or too large: compiling it {response}"
            )
