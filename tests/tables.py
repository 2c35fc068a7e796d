"""Tests of many cheap cases: one test goes through a whole table."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import pytest


def each(names: str, table: Iterable[Any]) -> Callable[[Callable], Callable]:
    """Like ``pytest.mark.parametrize``, but within one test: it calls the test with every entry,
    also after one has failed, and reports all that fail by name.

    Fixtures are set up once for the whole table.

    Args:
        names: The test's arguments that an entry gives, separated by commas.
        table: The entries: a tuple each if there are several names.
    """
    keys, entries = [name.strip() for name in names.split(",")], list(table)

    def decorate(test: Callable) -> Callable:
        @wraps(test)
        def run(*args: Any, **fixtures: Any) -> None:
            assert entries, "the table is empty"
            errors: list[BaseException] = []
            for number, entry in enumerate(entries):
                values = dict(zip(keys, entry if len(keys) > 1 else [entry], strict=True))
                try:
                    test(*args, **fixtures, **values)
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"entry {number}: {values}")
                    errors.append(error)
            if errors:
                failed = "; ".join(error.__notes__[-1][:200] for error in errors)
                message = f"{len(errors)} of {len(entries)} entries fail: {failed}"
                raise BaseExceptionGroup(message, errors)

        signature = inspect.signature(test)
        kept = [p for name, p in signature.parameters.items() if name not in keys]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate
