"""Handles panics of Rust libraries as errors, although they are no subclass of Exception."""


def is_failure(error: BaseException) -> bool:
    """Returns whether ``error`` is a failure and not an interruption such as KeyboardInterrupt.

    Failures are Exceptions and panics of PyO3, whose class derives from BaseException and cannot be
    imported.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
