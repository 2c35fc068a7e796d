"""The order in which waiting sequences are admitted."""

from collections import deque

from nanovllm.engine.sequence import Sequence


class FirstComeFirstServed(deque[Sequence]):
    """The waiting sequences, in the order of admission.

    The scheduler admits only the head of the queue. Another policy is a subclass that inserts new
    sequences elsewhere. Results do not depend on the order.
    """

    def add(self, seq: Sequence) -> None:
        """Queues a new sequence."""
        self.append(seq)

    def put_back(self, seq: Sequence) -> None:
        """Queues a sequence that was preempted or is retried, at the head."""
        self.appendleft(seq)
