"""Panics of libraries written in Rust: errors, though Python does not class them as Exceptions."""


def is_failure(error: BaseException) -> bool:
    """Whether code has failed, rather than been interrupted: an Exception, or a panic of PyO3's,
    whose class is derived from BaseException and cannot be imported."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
