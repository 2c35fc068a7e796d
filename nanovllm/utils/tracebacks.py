"""Frees what the tracebacks of a stored exception keep alive."""

import traceback


def clear_frames(error: BaseException) -> None:
    """Clears the local variables in the tracebacks of an exception and of its causes."""
    chain = [error]
    for cause in chain:
        traceback.clear_frames(cause.__traceback__)
        causes = (cause.__cause__, cause.__context__)
        chain += [other for other in causes if other is not None and other not in chain]
