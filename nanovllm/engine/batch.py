"""What one step computes."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import Any, NamedTuple, Self

import numpy as np

from nanovllm.engine.sequence import Sequence
from nanovllm.kernels.attention.prefix_schedule import SharedPrefixes
from nanovllm.kernels.sampling.sampling_row import SAMPLING_ROW


class ScheduledSequence(NamedTuple):
    """Tokens [start, end) of ``seq``, to be computed in one step.

    ``samples`` is true if the range ends at the sequence's last token, so that the step samples the
    next token. It is false for every chunk of a long prompt but the last.
    """

    seq: Sequence
    start: int
    end: int
    samples: bool

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, eq=False)
class Batch:
    """The sequences of one step: a prefill of prompts (``is_prefill``), or a decode of one token
    each. Row i of ``seqs``, ``starts``, ``ends`` and ``samples`` is a ScheduledSequence. A decode
    samples in all rows. Nobody changes these lists, but the sequences change when the step's
    effects are applied: inputs are prepared before that.

    ``block_copies`` are pairs (source, target) of KV blocks. The step copies them first, one after
    the other. Each sequence has ``num_groups`` block tables. A decode reads ``prefixes`` once for
    all sequences that share them.
    """

    # Lists of values, because a tuple for each sequence would be work for the garbage collector.
    seqs: list[Sequence]
    starts: list[int]
    ends: list[int]
    samples: list[bool]
    is_prefill: bool
    block_copies: tuple[tuple[int, int], ...] = ()
    num_groups: int = 1
    prefixes: SharedPrefixes | None = None

    @classmethod
    def of(cls, items: Iterable[ScheduledSequence], *args: Any, **kwargs: Any) -> Self:
        """Makes a batch of rows. The other arguments are those of Batch, from ``is_prefill`` on."""
        columns: Any = [list(column) for column in zip(*items, strict=True)] or [[], [], [], []]
        return cls(*columns, *args, **kwargs)

    def __len__(self) -> int:
        return len(self.seqs)

    @property
    def items(self) -> list[ScheduledSequence]:
        """The rows, made anew: for prefills, which have few."""
        rows = zip(self.seqs, self.starts, self.ends, self.samples, strict=True)
        return [*map(ScheduledSequence._make, rows)]

    @property
    def num_tokens(self) -> int:
        return sum(self.ends) - sum(self.starts)

    @cached_property
    def sampled(self) -> list[Sequence]:
        """The sequences whose next token is sampled, in batch order."""
        return [*compress(self.seqs, self.samples)]

    @cached_property
    def sampling_rows(self) -> np.ndarray:
        """The SAMPLING_ROW of each sampled token."""
        data = bytearray().join([seq.completion.sampling.row for seq in self.sampled])
        rows = np.frombuffer(data, SAMPLING_ROW)
        rows["position"] = [*compress(self.ends, self.samples)]
        return rows

    @cached_property
    def sampling_features(self) -> int:
        """The features that a sampled token needs: see ``sampling_row.py``."""
        return int(np.bitwise_or.reduce(self.sampling_rows["features"]))
