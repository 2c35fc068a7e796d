"""The order in which waiting sequences are admitted."""

from collections import deque

from nanovllm.engine.sequence import Sequence


class FirstComeFirstServed(deque[Sequence]):
    """The waiting sequences, in the order of admission.

    The scheduler admits only the head of the queue. A subclass can choose another head (see
    ``OfflineOrder``). The order does not change the generated tokens, except through rounding.

    Attributes:
        num_grouped, num_longest_first: see ``EngineMetrics``.
    """

    num_grouped = num_longest_first = 0

    @property
    def head(self) -> Sequence:
        """The sequence to admit next. There must be one."""
        return self[0]

    def add(self, seq: Sequence) -> None:
        """Queues a new sequence."""
        self.append(seq)

    def put_back(self, seq: Sequence) -> None:
        """Queues a sequence that was preempted or is retried, at the head."""
        self.appendleft(seq)
