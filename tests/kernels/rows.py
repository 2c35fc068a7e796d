"""An assertion for batch-invariant functions of rows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

THREADS = (1, 2, 5)
SLICES = ((0, 1), (39, 40), (0, 2), (3, 6), (7, 22), (20, 36), (1, 18))
NUM_ROWS = 40
INTS = {4: torch.int32, 2: torch.int16, 8: torch.int64, 1: torch.int8}


@contextmanager
def num_threads(num: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    as_ints = [x.contiguous().view(INTS[x.element_size()]) for x in (a, b)]
    return a.dtype == b.dtype and torch.equal(*as_ints)


def assert_rows_are_independent(function: Callable[..., Any], *tensors: torch.Tensor) -> None:
    """Asserts that the rows of a function's results have the same bits for all rows and for
    consecutive rows of its inputs, with any number of threads.

    Args:
        function: (*tensors) -> a tensor, or several, with as many rows.
        tensors: with NUM_ROWS rows.
    """

    def call(begin: int, end: int) -> list[torch.Tensor]:
        result = function(*(tensor[begin:end].clone() for tensor in tensors))
        return [result] if isinstance(result, torch.Tensor) else [*result]

    expected = call(0, NUM_ROWS)
    for threads in THREADS:
        with num_threads(threads):
            for begin, end in SLICES if threads == 1 else ((0, 1), (7, 22), (0, NUM_ROWS)):
                for found, whole in zip(call(begin, end), expected, strict=True):
                    assert same_bits(found, whole[begin:end]), f"{threads} threads, {begin}:{end}"
