"""Validators for the fields of a dataclass: functions (name, value) -> normalised value.

A field names its validator in its annotation: ``n: Annotated[int, integer(1, 8)] = 1``.
"""

import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

import numpy as np

Validator = Callable[[str, Any], Any]


def validators_of(cls: Any) -> dict[str, Validator]:
    """Returns the validators of a dataclass's annotated fields, by field name."""
    annotated = (f for f in fields(cls) if hasattr(f.type, "__metadata__"))
    return {f.name: f.type.__metadata__[0] for f in annotated}  # type: ignore[union-attr]


def check_names(
    names: Iterable[str], known: Sequence[str], hints: Mapping[str, str] | None = None
) -> None:
    """Raises TypeError for an argument that is not known. The message has its hint, or else the
    nearest known name."""
    for name in names:
        if name not in known:
            if hints and name in hints:
                raise TypeError(f"unknown argument {name!r}: {hints[name]}")
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise TypeError(f"unknown argument {name!r}{hint}")


def optional(validate: Validator) -> Validator:
    """Accepts None as well."""
    return lambda name, value: None if value is None else validate(name, value)


def or_empty(validate: Validator) -> Validator:
    """Accepts None as well, which becomes an empty list."""
    return lambda name, value: [] if value is None else validate(name, value)


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r:.80}")
    return bool(value)


def integer(minimum: int, maximum: float = math.inf) -> Validator:
    """Accepts Python's and numpy's integers from ``minimum`` to ``maximum``."""

    def validate(name: str, value: Any) -> int:
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise TypeError(f"{name} must be an int, got {value!r:.80}")
        value = int(value)
        if not minimum <= value <= maximum:
            bound = f"at least {minimum}" if value < minimum else f"at most {maximum}"
            raise ValueError(f"{name} must be {bound}, got {value!s:.40}")
        return value

    return validate


def number(low: float, high: float, above: bool = False) -> Validator:
    """Accepts numbers from ``low`` to ``high``. If ``above`` is true, ``low`` itself is refused."""

    def validate(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a number, got {value!r:.80}")
        if not low <= value <= high or (above and value == low):  # type: ignore[operator]
            bound = "above" if above else "at least"
            raise ValueError(f"{name} must be {bound} {low} and at most {high}, got {value!r:.40}")
        return float(value)

    return validate


def choice(*choices: str) -> Validator:
    """Accepts these strings only."""

    def validate(name: str, value: Any) -> str:
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r:.80}")
        return value

    return validate


def matching(pattern: str, choices: str) -> Validator:
    """Accepts strings that match a regular expression, which ``choices`` describes."""

    def validate(name: str, value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value, re.ASCII):
            raise ValueError(f"{name} must be one of {choices}, got {value!r:.80}")
        return value

    return validate


def path_or_hub_id(name: str, value: Any) -> str:
    """Accepts a non-empty string or path."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path or a hub id, got {value!r:.80}")
    if not (path := os.fspath(value)):
        raise ValueError(f"{name} must name a checkpoint directory, a .gguf file or a hub id")
    return path


def strings(max_count: int, max_chars: float = math.inf, may_be_empty: bool = False) -> Validator:
    """Accepts a list of valid Unicode strings.

    Args:
        max_count: the maximum number of strings.
        max_chars: the maximum total of their lengths.
        may_be_empty: whether to accept empty strings.
    """

    def validate(name: str, values: Any) -> list[str]:
        if not _is_list(values) or not all(isinstance(v, str) for v in values):
            raise TypeError(f"{name} must be a list of strings, got {values!r:.80}")
        if len(values) > max_count:
            raise ValueError(f"{name} has {len(values)} strings, but the limit is {max_count}")
        if (num_chars := sum(map(len, values))) > max_chars:
            raise ValueError(f"{name} has {num_chars} characters, but the limit is {max_chars}")
        for value in values:
            if not value and not may_be_empty:
                raise ValueError(f"{name} must not contain an empty string")
            try:
                value.encode()
            except UnicodeEncodeError:
                message = f"{name} holds {value!r:.80}, which is not valid Unicode"
                raise ValueError(message) from None
        return list(values)

    return validate


def token_ids(name: str, values: Any) -> list[int]:
    """Accepts a list, range or array of token ids, and drops duplicates."""
    if isinstance(values, (range, np.ndarray)):
        values = list(values)
    if not _is_list(values):
        raise TypeError(f"{name} must be a list of token ids, got {values!r:.80}")
    for value in values:
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise TypeError(f"{name} holds {value!r:.80}, which is not a token id")
        if value < 0:
            raise ValueError(f"{name} holds {value}: token ids are at least 0")
    return list(dict.fromkeys(map(int, values)))


def token_biases(limit: float) -> Validator:
    """Accepts a dict of token id -> number between ``-limit`` and ``limit``."""

    def validate(name: str, value: Any) -> dict[int, float]:
        if not isinstance(value, Mapping):
            raise TypeError(f"{name} must map token ids to numbers, got {value!r:.80}")
        token_ids(name, list(value))
        for token_id, bias in value.items():
            if isinstance(bias, bool) or not isinstance(bias, Real):
                raise TypeError(f"{name}[{token_id}] must be a number, got {bias!r:.80}")
            if not -limit <= bias <= limit:  # type: ignore[operator]
                raise ValueError(
                    f"{name}[{token_id}] must be between -{limit} and {limit}, got {bias!r:.40}: "
                    f"use allowed_token_ids or bad_words to forbid tokens"
                )
        return {int(token_id): float(bias) for token_id, bias in value.items()}

    return validate


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, set, frozenset))
