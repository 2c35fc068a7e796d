"""One request's state. Knows nothing of tensors or of other requests."""

from collections.abc import Sequence as Seq
from enum import Enum, auto
from itertools import count
from typing import Any

from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.math import cdiv


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """A prompt and the tokens generated after it.

    Three counts order its tokens: the first ``num_cached_tokens`` have their keys and values
    in the KV cache, ``num_prompt_tokens`` came with the request, ``len(seq)`` exist so far.
    One uncached token makes it a decode; more make it a prefill.

    Attributes:
        seq_id: unique in the process, rising with age.
        block_table: physical KV block of each logical block.
        block_hashes: chain hash of each full block hashed so far (see BlockManager).
        finish_reason: "stop" or "length" once finished.
    """

    counter = count()

    def __init__(
        self,
        token_ids: Seq[int],
        sampling_params: SamplingParams | None = None,
        block_size: int = 256,
    ) -> None:
        assert token_ids, "a sequence starts with at least one token"
        self.seq_id = next(Sequence.counter)
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
        self.finish_reason: str | None = None

    def __len__(self) -> int:
        return self.num_tokens

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"len={self.num_tokens}, cached={self.num_cached_tokens}, blocks={self.block_table})"
        )

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def num_uncached_tokens(self) -> int:
        return self.num_tokens - self.num_cached_tokens

    @property
    def num_completion_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

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

    def append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.last_token = token_id
        self.num_tokens += 1

    # What a worker needs to run the next step: counts, blocks, and the tokens not yet cached,
    # so that a decode ships one token whatever its history.

    def __getstate__(self) -> tuple[Any, ...]:
        first = min(self.num_cached_tokens, self.num_tokens - 1)
        return (
            self.seq_id,
            self.block_size,
            self.num_tokens,
            self.num_prompt_tokens,
            self.num_cached_tokens,
            self.block_table,
            self.sampling_params,
            self.token_ids[first:],
        )

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        (
            self.seq_id,
            self.block_size,
            self.num_tokens,
            self.num_prompt_tokens,
            self.num_cached_tokens,
            self.block_table,
            self.sampling_params,
            tail,
        ) = state
        # Positions already cached are never read on a worker; the padding keeps indices true.
        self.token_ids = [-1] * (self.num_tokens - len(tail)) + tail
        self.last_token = tail[-1]
        self.status = SequenceStatus.RUNNING
        self.block_hashes = []
        self.finish_reason = None
