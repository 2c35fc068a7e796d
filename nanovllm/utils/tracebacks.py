"""Frees what the tracebacks of a stored exception keep alive."""

import traceback


def clear_frames(error: BaseException, kept: BaseException | None = None) -> None:
    """Clears the local variables in the tracebacks of an exception and of its causes, but for
    ``kept`` and its causes."""
    chain = [error]
    for cause in chain:
        traceback.clear_frames(cause.__traceback__)
        causes = (cause.__cause__, cause.__context__)
        chain += [each for each in causes if each not in (None, kept) and each not in chain]
