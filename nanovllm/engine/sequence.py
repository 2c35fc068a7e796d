"""One request's state. Knows nothing of tensors or of other requests."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from enum import Enum, auto
from itertools import count
from typing import TYPE_CHECKING, Any

from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.math import cdiv

if TYPE_CHECKING:
    import numpy as np

    from nanovllm.engine.sampling_state import SamplingState
    from nanovllm.text.detokenizer import IncrementalDetokenizer


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


FINISHED = SequenceStatus.FINISHED  # looked up often, and slowly as an attribute

# What another process needs to compute the next step, besides tokens.
SHIPPED = (
    *("seq_id", "block_size", "block_table", "sampling_params", "last_token", "num_tokens"),
    *("num_prompt_tokens", "num_cached_tokens", "num_prompt_logprobs", "wants_prompt_logprobs"),
)


class Sequence:
    """A prompt and the tokens generated after it.

    Three counts order its tokens: the first ``num_cached_tokens`` have their keys and values
    in the KV cache, ``num_prompt_tokens`` came with the request, ``len(seq)`` exist so far.
    One uncached token makes it a decode; more make it a prefill. The newest token exists, and
    has a place, from the moment that a step has been launched to draw it; only when it reaches
    the host is it in ``token_ids``.

    Attributes:
        seq_id: unique in the process, rising with age.
        request_id: of the request that it belongs to.
        last_token: the newest token's id; -1 - row while only the device knows it, drawn in that
            row of the last step.
        block_table: physical KV block of each logical block.
        block_hashes: chain hash of each full block hashed so far (see BlockManager).
        siblings: other completions of the same prompt, which the scheduler starts on copies of
            this one's blocks once the prompt is computed.
        finish_reason: "stop", "length" or "error" once finished.
        stop_reason: the stop token or string that ended it, if one did.
        error: what went wrong, for "error".
        ends_with_stop_token: whether its last token ended it, and so is no part of its text.
        num_cached_prompt_tokens: prompt tokens that the prefix cache held when it first ran.
        is_isolated: shares no blocks with others, as it has once had no token to draw: theirs may
            have been the cause.
        wants_prompt_logprobs: each prompt token has to be computed, to have its logits.
        prompt_logprobs, logprobs: packed rows, collected from the steps.
        sampling: what drawing its tokens takes; set by the engine, on rank 0 only.
        detokenizer: its text so far; None if it is to have none.
        watched_tokens: whether a token, by its id, means more to the engine than its place in the
            sequence; None if none does.
    """

    counter = count()
    sampling: "SamplingState"

    def __init__(
        self,
        token_ids: Seq[int],
        sampling_params: SamplingParams | None = None,
        block_size: int = 256,
    ) -> None:
        assert token_ids, "a sequence starts with at least one token"
        self.seq_id = next(Sequence.counter)
        self.request_id = str(self.seq_id)
        self.status = SequenceStatus.WAITING
        self.sampling_params = sampling_params or SamplingParams()
        self.block_size = block_size
        self.token_ids = list(token_ids)
        self.num_tokens = len(token_ids)
        self.num_prompt_tokens = len(token_ids)
        self.num_cached_tokens = 0
        self.last_token = self.token_ids[-1]
        self.block_table: list[int] = []
        self.block_hashes: list[int] = []
        self.siblings: list[Sequence] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.ends_with_stop_token = False
        self.num_cached_prompt_tokens: int | None = None
        self.is_isolated = False
        self.wants_prompt_logprobs = False
        self.num_prompt_logprobs = 0
        self.prompt_logprobs: list[np.ndarray] = []
        self.logprobs: list[np.ndarray] = []
        self.detokenizer: IncrementalDetokenizer | None = None
        self.watched_tokens: Mapping[int, bool] | None = None

    def __len__(self) -> int:
        return self.num_tokens

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"len={self.num_tokens}, cached={self.num_cached_tokens}, blocks={self.block_table})"
        )

    @property
    def is_finished(self) -> bool:
        return self.status is FINISHED

    @property
    def num_uncached_tokens(self) -> int:
        return self.num_tokens - self.num_cached_tokens

    @property
    def num_completion_tokens(self) -> int:
        """Generated tokens that have reached the host."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_reusable_tokens(self) -> int:
        """How many of its tokens may come from the prefix cache."""
        if self.is_isolated:
            return 0
        if self.wants_prompt_logprobs and self.num_prompt_logprobs < self.num_prompt_tokens - 1:
            return self.num_prompt_logprobs
        return self.num_tokens

    @property
    def num_cached_blocks(self) -> int:
        """Full blocks whose keys and values are in the cache."""
        return self.num_cached_tokens // self.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks that all tokens need."""
        return cdiv(self.num_tokens, self.block_size)

    @property
    def last_block_num_tokens(self) -> int:
        return self.num_tokens - (self.num_blocks - 1) * self.block_size

    def block(self, i: int) -> list[int]:
        """Token ids of logical block i."""
        assert 0 <= i < self.num_blocks
        return self.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def expect_token(self, row: int) -> None:
        """Makes place for the token that the last step draws in this row."""
        assert self.num_tokens == len(self.token_ids)
        self.last_token = -1 - row
        self.num_tokens += 1

    def append_token(self, token_id: int) -> None:
        """The newest token, expected or not."""
        self.token_ids.append(token_id)
        self.last_token = token_id
        self.num_tokens = len(self.token_ids)

    def isolated(self) -> "Sequence":
        """A copy that waits to be computed once more, from the start, prompt log-probabilities
        included."""
        new = object.__new__(Sequence)
        vars(new).update(vars(self))
        new.status, new.is_isolated = SequenceStatus.WAITING, True
        new.finish_reason = new.error = None
        new.block_table, new.block_hashes, new.num_cached_tokens = [], [], 0
        new.prompt_logprobs, new.num_prompt_logprobs = [], 0
        new.logprobs = list(self.logprobs)
        new.last_token, new.num_tokens = self.token_ids[-1], len(self.token_ids)
        return new

    # Only the tokens not yet cached travel, so that a decode ships one whatever its history.

    def __getstate__(self) -> tuple[Any, ...]:
        first = min(self.num_cached_tokens, len(self.token_ids) - 1)
        return first, self.token_ids[first:], *(getattr(self, name) for name in SHIPPED)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        first, tail, *values = state
        # Positions already cached are never read there; the padding keeps indices true.
        self.__init__([-1] * first + tail)  # type: ignore[misc]
        for name, value in zip(SHIPPED, values, strict=True):
            setattr(self, name, value)
        self.status = SequenceStatus.RUNNING
