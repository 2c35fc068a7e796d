"""Handles panics of Rust libraries as errors. Their class is not a subclass of Exception."""

from collections.abc import Iterator
from contextlib import contextmanager


def is_failure(error: BaseException) -> bool:
    """Returns whether ``error`` is a failure and not an interruption such as KeyboardInterrupt.

    Failures are Exceptions and panics of PyO3, whose class derives from BaseException and cannot be
    imported.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def as_value_error(prefix: str) -> Iterator[None]:
    """Context manager that converts any failure to a ValueError, for code that runs other libraries
    on a user's input. The message is ``prefix`` and the message of the failure."""
    try:
        yield
    except BaseException as error:
        if not is_failure(error):
            raise
        raise ValueError(f"{prefix} {error}") from error
