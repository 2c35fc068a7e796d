"""The order in which waiting sequences are admitted."""

from collections import deque

from nanovllm.engine.sequence import Sequence


class FirstComeFirstServed(deque[Sequence]):
    """The waiting sequences, the next one to admit first.

    The scheduler admits the head only, so another policy is a subclass that places new sequences
    elsewhere. Results do not depend on the order.
    """

    def add(self, seq: Sequence) -> None:
        """Places a new sequence."""
        self.append(seq)

    def put_back(self, seq: Sequence) -> None:
        """Places a sequence that has run and must be computed again."""
        self.appendleft(seq)
