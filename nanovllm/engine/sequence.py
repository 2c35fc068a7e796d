"""The tokens, KV blocks and status of one sequence. Contains no tensors."""

from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.math import cdiv

if TYPE_CHECKING:
    from nanovllm.engine.completion import Completion


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


FINISHED = SequenceStatus.FINISHED  # a global, because the attribute lookup is slow


class Finish(NamedTuple):
    """How a sequence ended.

    Attributes:
        reason: "stop", "length" or "error".
        stop_reason: the stop token or stop string that ended it, if one did.
        error: what went wrong, for "error".
        ends_with_stop_token: whether the last token is the stop token. The text leaves it out,
            unless ``include_stop_str_in_output`` is set.
    """

    reason: str
    stop_reason: int | str | None = None
    error: str | None = None
    ends_with_stop_token: bool = False


@dataclass(slots=True, eq=False, repr=False)  # slots: each step visits all sequences several times
class Sequence:
    """A prompt and the tokens generated after it.

    The sequence has ``len(seq)`` tokens. The first ``num_prompt_tokens`` are the prompt. The first
    ``num_cached_tokens`` have their keys and values in the KV cache, whether this sequence computed
    them or the prefix cache had them. A waiting sequence is prefilled. A running one with more than
    one uncached token goes on with its prefill, and one with a single uncached token is decoded. A
    token counts in ``len(seq)`` as soon as the step that samples it is launched. It is in
    ``token_ids`` only after it has reached the host.

    Attributes:
        seq_id: unique in the process. Newer sequences have higher ids.
        request_id: the id of the request that it belongs to.
        last_token: the newest token's id. While the token is only on the device: -1 - row, where
            row is its row among the tokens that the last step sampled.
        block_tables: of each group of layers, the physical KV block of each logical block. A group
            with a window has freed its first blocks (see BlockManager).
        last_blocks: the last entry of each of these tables.
        table_len: number of logical blocks that have an entry in all tables.
        num_full_blocks: number of computed full blocks. Groups with a window have freed
            the blocks before the window.
        table_row: its row in the device's block tables while it has blocks.
        num_sent_blocks: number of leading entries of each table that the device has.
        block_hashes: chain hash of each full block hashed so far (see PrefixCache).
        siblings: other completions of the same prompt. The scheduler starts them with copies of
            this sequence's blocks when the prompt is computed.
        num_cached_prompt_tokens: prompt tokens that were in the prefix cache when it first ran.
        shares_no_blocks: whether it shares no blocks with other sequences. Set when it is retried
            because no token could be sampled: shared blocks may have been the cause.
        may_reorder: whether it may overtake other such sequences, and be overtaken by them (see
            OfflineOrder).
        wants_prompt_logprobs: whether it needs the logits of each prompt token.
        num_prompt_logprobs: number of prompt log-probabilities computed so far.
        stop_token_ids: tokens that end it; set by the scheduler, as is max_len.
        max_len: number of tokens, prompt included, at which it ends.
        completion: its results for the user; set by the engine.
    """

    counter: ClassVar = count()

    token_ids: list[int]
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    block_size: int = 128
    seq_id: int = field(init=False)
    request_id: str = field(init=False)
    status: SequenceStatus = SequenceStatus.WAITING
    num_tokens: int = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_cached_tokens: int = 0
    last_token: int = field(init=False)
    block_tables: list[list[int]] = field(default_factory=list)
    last_blocks: list[int] = field(default_factory=list)
    table_len: int = 0
    num_full_blocks: int = 0
    table_row: int = -1
    num_sent_blocks: int = 0
    block_hashes: list[int] = field(default_factory=list)
    siblings: "list[Sequence]" = field(default_factory=list)
    num_cached_prompt_tokens: int | None = None
    shares_no_blocks: bool = False
    may_reorder: bool = False
    wants_prompt_logprobs: bool = False
    num_prompt_logprobs: int = 0
    completion: "Completion" = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    max_len: int = field(init=False)

    def __post_init__(self) -> None:
        assert self.token_ids, "a sequence starts with at least one token"
        self.token_ids = list(self.token_ids)
        self.seq_id = next(Sequence.counter)
        self.request_id = str(self.seq_id)
        self.num_tokens = self.num_prompt_tokens = len(self.token_ids)
        self.last_token = self.token_ids[-1]

    def __len__(self) -> int:
        return self.num_tokens

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
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_blocks(self) -> int:
        """Number of blocks that all tokens need."""
        return cdiv(self.num_tokens, self.block_size)

    def block(self, i: int) -> list[int]:
        """Token ids of logical block i."""
        assert 0 <= i < self.num_blocks
        return self.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def expect_token(self, row: int) -> None:
        """Counts the token that the step in flight samples, before its id is known. ``row`` is its
        row among the tokens that this step samples."""
        assert self.num_tokens == len(self.token_ids)
        self.last_token = -1 - row
        self.num_tokens += 1

    def append_token(self, token_id: int) -> None:
        """Appends the newest token, whether ``expect_token`` has counted it or not."""
        self.token_ids.append(token_id)
        self.last_token = token_id
        self.num_tokens = len(self.token_ids)
