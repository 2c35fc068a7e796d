"""Decides which sequences run in each step. Counts tokens and blocks; never touches a tensor."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.batch import Batch, ScheduledSequence
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.policy import FirstComeFirstServed
from nanovllm.engine.sequence import FINISHED, Finish, Sequence, SequenceStatus

NO_TOKEN = (
    "no token could be sampled: the model's logits are NaN or infinite, or the sampling parameters "
    "allow no token"
)
# A prefill delays decodes only if it can admit max_num_seqs / 16 prompts, or all that are waiting.
ADMISSION_DIVISOR = 16
RECOVERY_STEPS = 100  # limits lowered by an out-of-memory error double after this many steps


class Scheduler:
    """Continuous batching over two queues.

    Prompts are admitted in the policy's order, as soon as several fit. Their prefill runs before
    the next decode. A prompt longer than the token budget is prefilled in chunks. When decodes run
    out of free blocks, the youngest running sequence is preempted: it returns to the head of the
    waiting queue and is recomputed later.

    A request with n > 1 has a sequence for each completion: the first one, and its siblings. Only
    the first one computes the prompt. Then the siblings start with its blocks. A sequence is
    resident if it is running, or if it is the sibling of a running one. Residents count towards
    max_num_seqs.

    Args:
        config: the block size, the maximum number of sequences and of tokens in a step, and whether
            equal prefixes share blocks.
        num_blocks: KV blocks to hand out.
        max_model_len: longest prompt + completion, in tokens.
        eos_token_ids: tokens that end a sequence.
        eos_token_id: the primary EOS token, reported with ``stop_reason=None``. Any other EOS token
            is reported as the stop reason.
        policy: the order in which waiting sequences are admitted; None for an OfflineOrder with
            ``config.enable_reordering``, and first come, first served without.
        windows: the window of each group of layers; None for a group that attends to all tokens.
        cache_len: the length of the longest sequence that the blocks hold; None if one sequence can
            have all blocks.
        max_num_seqs: maximum number of residents; None for the config's.
    """

    def __init__(
        self,
        config: Config,
        num_blocks: int,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        eos_token_id: int | None = None,
        policy: FirstComeFirstServed | None = None,
        windows: Seq[int | None] = (None,),
        cache_len: int | None = None,
        max_num_seqs: int | None = None,
    ) -> None:
        self.max_num_seqs = max_num_seqs or config.max_step_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_model_len = max_model_len
        # A sequence that has the cache to itself must fit, or it could never finish.
        self.max_len = min(max_model_len, cache_len or num_blocks * config.block_size)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.eos_token_id = eos_token_id
        self._cache_settings = num_blocks, config.block_size, config.enable_prefix_caching
        self.windows = windows
        if policy is None and config.enable_reordering:
            from nanovllm.engine.offline_order import OfflineOrder

            policy = OfflineOrder(config.enable_prefix_caching)
        self.waiting = FirstComeFirstServed() if policy is None else policy
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # of prompts started so far
        self.num_cached_prompt_tokens = 0  # the part of them that was already in the cache
        self.reset()

    def reset(self) -> None:
        """Drops all sequences and the prefix cache, even after an interrupted step."""
        self.block_manager = BlockManager(
            *self._cache_settings, self.windows, self.max_num_batched_tokens
        )
        self.waiting.clear()
        self.running: list[Sequence] = []  # oldest first
        self.block_copies: list[tuple[int, int]] = []  # which the next step begins with
        # Lower than the engine's limits for some steps after a step has run out of memory.
        self.max_tokens_now, self.max_seqs_now = self.max_num_batched_tokens, self.max_num_seqs
        self.steps_since_recovery = 0

    def is_finished(self) -> bool:
        return not self.waiting and not self.running

    def check_prompt_len(self, num_tokens: int) -> None:
        """Raises ValueError for a prompt that could never run."""
        if num_tokens < 1:
            raise ValueError("the prompt is empty: it needs at least one token")
        if num_tokens >= self.max_len:
            if self.max_len < self.max_model_len:
                manager = self.block_manager
                cause = (
                    f"the KV cache ({manager.num_blocks} blocks of {manager.block_size}): "
                    f"raise num_kvcache_blocks or gpu_memory_utilization"
                )
            else:
                cause = "max_model_len: shorten the prompt or raise it"
            raise ValueError(
                f"the prompt has {num_tokens} tokens and needs room for at least one more, but "
                f"a sequence is limited to {self.max_len} tokens by {cause}"
            )

    def add(self, seq: Sequence) -> None:
        """Queues a sequence and its siblings. Raises ValueError if it could never run."""
        self.check_prompt_len(len(seq))
        for each in (seq, *seq.siblings):
            params = each.sampling_params
            eos_token_ids = frozenset() if params.ignore_eos else self.eos_token_ids
            each.stop_token_ids = eos_token_ids.union(params.stop_token_ids or ())
            each.max_len = self.max_len
            if params.max_tokens is not None:
                each.max_len = min(self.max_len, each.num_prompt_tokens + params.max_tokens)
        self.waiting.add(seq)

    def count_new_tokens(self, seq: Sequence) -> int:
        """Returns how many tokens of a waiting sequence are not in the prefix cache."""
        manager = self.block_manager
        return len(seq) - len(manager.prefix_cache.lookup(seq)[0]) * manager.block_size

    def schedule(self) -> Batch:
        """Returns the next step; an empty batch if only the step in flight is left.

        ``launched`` must have been called for the last step, and ``postprocess`` for the step
        before the last. The tokens of the last step need not be known.
        """
        self.steps_since_recovery += 1
        if self.steps_since_recovery % RECOVERY_STEPS == 0:
            self.max_tokens_now = min(2 * self.max_tokens_now, self.max_num_batched_tokens)
            self.max_seqs_now = min(2 * self.max_seqs_now, self.max_num_seqs)
        copies, self.block_copies = tuple(self.block_copies), []
        settings = copies, len(self.windows)
        if items := self._schedule_prefill():
            return Batch.of(items, True, *settings)
        self._extend_decodes()
        ends = [seq.num_tokens for seq in self.running]
        starts, samples = [end - 1 for end in ends], [True] * len(ends)
        return Batch([*self.running], starts, ends, samples, False, *settings)

    def postprocess(self, batch: Batch, token_ids: list[int]) -> dict[Sequence, Finish]:
        """Appends a step's tokens to their sequences, except to those that have finished since the
        step was launched.

        Args:
            token_ids: one for each sampled sequence; -1 if no token could be sampled.

        Returns:
            The sequences that finished, and how. Their blocks have been freed.
        """
        finished: dict[Sequence, Finish] = {}
        for seq, token_id in zip(batch.sampled, token_ids, strict=True):
            finish = None
            if seq.status is FINISHED:
                continue
            if token_id < 0:
                finish = Finish("error", error=NO_TOKEN)
                self.block_manager.prefix_cache.evict(seq)
            else:
                seq.append_token(token_id)
                if token_id in seq.stop_token_ids:
                    finish = self._check_stop(seq)
                if finish is None and seq.num_tokens >= seq.max_len:
                    finish = Finish("length")
            if finish is not None:
                if seq.status is SequenceStatus.WAITING:  # preempted since the launch
                    self.waiting.remove(seq)
                seq.status = SequenceStatus.FINISHED
                self.block_manager.deallocate(seq)
                finished[seq] = finish
        if finished:
            self.running = [seq for seq in self.running if not seq.is_finished]
        return finished

    def launched(self, batch: Batch) -> None:
        """Applies the effects of a launched step that do not depend on the tokens that it samples.
        Sequences that reach their length limit stop running, and their blocks are freed for the
        next steps."""
        self.block_manager.mark_computed(batch)
        for seq in [seq for seq in batch.sampled if seq.siblings]:
            if not seq.is_finished:
                from nanovllm.engine.parallel_sampling import start_siblings

                start_siblings(self, seq)
        complete = set()
        for row, seq in enumerate(batch.sampled):
            if seq.status is not FINISHED:
                seq.expect_token(row)
                if seq.num_tokens >= seq.max_len:
                    self.block_manager.deallocate(seq)
                    complete.add(seq)
        if complete:
            self.running = [seq for seq in self.running if seq not in complete]

    def preempt(self, seq: Sequence) -> None:
        """Frees a running sequence's blocks and puts it back at the head of the queue."""
        self.running.remove(seq)
        self.block_manager.deallocate(seq)
        seq.status = SequenceStatus.WAITING
        self.waiting.put_back(seq)
        self.num_preemptions += 1

    def abort(self, seq: Sequence) -> None:
        """Drops an unfinished sequence."""
        queue: Any = self.running if seq.status is SequenceStatus.RUNNING else self.waiting
        if seq in queue:  # unless it is a sibling not yet started, or at its length limit
            queue.remove(seq)
        self.block_manager.deallocate(seq)
        seq.siblings = []
        seq.status = SequenceStatus.FINISHED

    def _schedule_prefill(self) -> list[ScheduledSequence]:
        """Returns the prefills that fit into the token budget: the next chunk of a prompt that has
        begun, then new prompts."""
        items: list[ScheduledSequence] = []
        budget = self.max_tokens_now
        num_residents = len(self.running) + sum([len(seq.siblings) for seq in self.running])
        # Admission stops where the budget ends, so only the youngest can be partly prefilled.
        if self.running and self.running[-1].num_uncached_tokens > 1:
            seq = self.running[-1]
            if self.block_manager.allocate_next(seq):
                items.append(self._prefill_chunk(seq, budget))
                budget -= items[-1].num_tokens
            else:
                self.preempt(seq)
                num_residents -= 1 + len(seq.siblings)
        if num_residents and not items and not self._can_admit_several(num_residents):
            return []
        while budget and self.waiting and self._can_admit(seq := self.waiting.head, num_residents):
            if items and self._would_be_chunked(seq, budget):
                break
            self.waiting.popleft()
            num_residents += 1 + len(seq.siblings)
            self.block_manager.allocate(seq)
            if seq.num_cached_prompt_tokens is None:
                seq.num_cached_prompt_tokens = min(seq.num_cached_tokens, len(seq) - 1)
                self.num_prompt_tokens += len(seq)
                self.num_cached_prompt_tokens += seq.num_cached_prompt_tokens
            seq.status = SequenceStatus.RUNNING
            self.running.append(seq)
            items.append(self._prefill_chunk(seq, budget))
            budget -= items[-1].num_tokens
        return items

    def _would_be_chunked(self, seq: Sequence, budget: int) -> bool:
        """Whether a prompt that would fit into one step does not fit into the rest of this step's
        budget. If it were split, its second chunk would read the first one's keys and values
        through the block table, which is slower."""
        if budget >= len(seq):
            return False
        return budget < self.count_new_tokens(seq) <= self.max_tokens_now

    def _can_admit_several(self, num_residents: int) -> bool:
        """Whether enough prompts can be admitted to make a prefill worth the delay of the decodes.
        Without this check, each sequence that finishes would cause a prefill of a single prompt."""
        num_waiting, manager = len(self.waiting), self.block_manager
        num_free = self.max_seqs_now - num_residents
        if not num_waiting or num_free < min(num_waiting, self.max_seqs_now // ADMISSION_DIVISOR):
            return False
        # The KV cache may hold fewer than max_num_seqs sequences. So free blocks are checked too:
        # enough for 1/16 as many prompts as there are residents, at most 1/16 of all blocks.
        several = min(num_waiting, num_residents // ADMISSION_DIVISOR)
        needed = several * self.waiting.head.num_blocks * len(self.windows)
        needed = min(needed, manager.num_blocks // ADMISSION_DIVISOR)
        return needed + num_residents * len(self.windows) <= len(manager.free_block_ids)

    def _can_admit(self, seq: Sequence, num_residents: int) -> bool:
        # With a spare block for each resident, all of them can cross their next block boundary.
        # A sequence that runs alone may have more siblings than fit: see start_siblings.
        if not num_residents:
            return self.block_manager.can_allocate(seq)
        others = num_residents + len(seq.siblings)
        return others < self.max_seqs_now and self.block_manager.can_allocate(seq, others)

    def _prefill_chunk(self, seq: Sequence, budget: int) -> ScheduledSequence:
        # The last token is computed even if it is cached, because its logits are needed.
        start = min(seq.num_cached_tokens, len(seq) - 1)
        end = min(start + budget, len(seq), seq.table_len * self.block_manager.block_size)
        # The blocks are cached before they are computed, so that equal prompts in this step share
        # them: each layer stores the keys and values of all the step's tokens before it reads any.
        self.block_manager.prefix_cache.register(seq, start, end)
        return ScheduledSequence(seq, start, end, samples=end == len(seq))

    def _extend_decodes(self) -> None:
        """Gives each running sequence a slot for its next token. Preempts the youngest ones if
        there are too few free blocks."""
        manager, running = self.block_manager, self.running
        size, had_any = manager.block_size, bool(running)
        for seq in [seq for seq in running if seq.num_tokens > seq.table_len * size]:
            while seq.status is SequenceStatus.RUNNING and not manager.allocate_next(seq):
                self.preempt(running[-1])
        assert running or not had_any, "a lone sequence always fits: max_len is within the cache"

    def _check_stop(self, seq: Sequence) -> Finish | None:
        """Returns how a stop token ends the sequence; None if fewer than ``min_tokens`` tokens were
        generated before it."""
        params, token_id = seq.sampling_params, seq.last_token
        if seq.num_completion_tokens <= params.min_tokens:
            return None
        is_primary = token_id == self.eos_token_id and not params.ignore_eos
        return Finish("stop", None if is_primary else token_id, ends_with_stop_token=True)
