"""One step's work: which tokens of which sequences. A value, built once by the scheduler."""

from dataclasses import dataclass

from nanovllm.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Tokens [start, end) of ``seq``, to be computed in one step.

    ``samples`` is true if the range ends at the sequence's last token, so that the step
    yields its next one; false for every chunk of a long prompt but the last.
    """

    seq: Sequence
    start: int
    end: int
    samples: bool

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one step: prompts (``is_prefill``), or one token each."""

    items: tuple[ScheduledSequence, ...]
    is_prefill: bool

    def __len__(self) -> int:
        return len(self.items)

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)

    @property
    def sampled(self) -> list[ScheduledSequence]:
        """The items that yield a token, in batch order."""
        return [item for item in self.items if item.samples]
