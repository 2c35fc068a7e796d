"""What one step computes, as immutable values."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from nanovllm.engine.sampling_state import SamplingKind
from nanovllm.engine.sequence import Sequence
from nanovllm.kernels.attention.prefix_schedule import SharedPrefixes


class ScheduledSequence(NamedTuple):  # cheap: a step makes one for each of its sequences
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


@dataclass(frozen=True)
class Batch:
    """The sequences of one step: a prefill of prompts (``is_prefill``), or a decode of one token
    each.

    ``block_copies`` are pairs (source, target) of KV blocks. The step copies them first, one after
    the other. Each sequence has ``num_groups`` block tables. A decode reads ``prefixes`` once for
    all sequences that share them.
    """

    items: tuple[ScheduledSequence, ...]
    is_prefill: bool
    block_copies: tuple[tuple[int, int], ...] = ()
    num_groups: int = 1
    prefixes: SharedPrefixes | None = None

    def __len__(self) -> int:
        return len(self.items)

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)

    @cached_property
    def sampled(self) -> list[ScheduledSequence]:
        """The items whose next token is sampled, in batch order."""
        return [item for item in self.items if item.samples]

    @cached_property
    def sampling_kinds(self) -> set[SamplingKind]:
        """The distinct ``SamplingKind`` values of the sampled items, usually only a few."""
        return {item.seq.completion.sampling.kind for item in self.sampled}
