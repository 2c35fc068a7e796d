"""Log-probabilities of sampled tokens and of prompts, from the device to the user."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanovllm.engine.batch import Batch
from nanovllm.engine.in_flight import InFlightStep
from nanovllm.engine.sequence import Sequence
from nanovllm.kernels.sampling.logprobs import pack_logprobs
from nanovllm.outputs import Logprob, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import PromptEncoder

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner

# Logits are computed for at most this many prompt positions at a time.
PROMPT_LOGITS_ROWS = 256
LogprobList = list[dict[int, Logprob] | None]
Decode = Callable[[Seq[int], Seq[int]], Seq[str | None]]


@dataclass(slots=True, eq=False)
class PackedLogprobs:
    """The log-probabilities of a sequence in one array, which is smaller than a dict per token.

    Args:
        rows: int32 [positions, 1 + 2 * (1 + k)]. Each row has the rank of the token at the
            position, then pairs of a token id and the bits of its fp32 log-probability: first the
            token at the position, then the k most likely tokens.
        decode: returns the texts of candidate tokens for a position. Its arguments are the token
            ids before the position and the candidates' ids. None leaves the texts out.
        starts_with_none: whether the list starts with None, for a prompt's first token, which has
            no log-probability.
        before: the tokens before the first row, in which a character may begin.
    """

    rows: np.ndarray
    decode: Decode | None = None
    starts_with_none: bool = False
    before: Seq[int] = ()

    def token_logprobs(self) -> np.ndarray:
        """Returns the log-probability of the token at each position, fp32 [positions]."""
        return self.rows[:, 2].view(np.float32)

    def to_list(self) -> LogprobList:
        """Returns a dict of token id -> Logprob for each position. The first entry is the token at
        the position; the k most likely tokens follow in order."""
        out: LogprobList = [None] if self.starts_with_none else []
        before = self.before
        for row in self.rows:
            ids, logprobs = row[1::2].tolist(), row[2::2].view(np.float32).tolist()
            ranks = [int(row[0]), *range(1, len(ids))]
            texts = [None] * len(ids) if self.decode is None else self.decode(before, ids)
            position: dict[int, Logprob] = {}
            for token_id, logprob, rank, text in zip(ids, logprobs, ranks, texts, strict=True):
                position.setdefault(token_id, Logprob(logprob, rank, text))
            out.append(position)
            before = [*before[-3:], ids[0]]  # a character has at most 4 bytes, thus 4 tokens
        return out

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self.to_list(),)  # pickles to a plain list, without the tokenizer


def add_logprobs(output: RequestOutput, seqs: list[Sequence], encoder: PromptEncoder) -> None:
    """Adds the log-probabilities that a request asks for to its result.

    Args:
        output: the result.
        seqs: the request's sequences.
        encoder: decodes the tokens.
    """
    params, no_rows = seqs[0].sampling_params, [np.empty((0, 3), np.int32)]
    decode = encoder.decode_logprob_tokens if params.detokenize else None
    if params.prompt_logprobs is not None:
        rows = np.concatenate(seqs[0].completion.prompt_logprobs or no_rows)
        output.prompt_logprobs = PackedLogprobs(rows, decode, True, seqs[0].token_ids[:1])
    if params.logprobs is not None:
        for completion, seq in zip(output.outputs, seqs, strict=True):
            packed = PackedLogprobs(np.vstack(seq.completion.logprobs or no_rows), decode)
            completion.logprobs = packed
            total = packed.token_logprobs().sum(dtype=np.float64)
            completion.cumulative_logprob = float(total)


def check_num_logprobs(params: SamplingParams, maximum: int, vocab_size: int) -> None:
    """Raises ValueError if a request asks for more log-probabilities per token than ``maximum``,
    where -1 stands for the vocabulary's size."""
    maximum = vocab_size if maximum == -1 else min(maximum, vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and (vocab_size if count == -1 else count) > maximum:
            raise ValueError(
                f"{name} is {count}, but at most {maximum} are allowed: the limit is "
                f"max_logprobs and the vocabulary's size, {vocab_size}"
            )


def collect_logprobs(sampled: list[Sequence], token_ids: Iterable[int], rows: np.ndarray) -> None:
    """Appends the packed logprobs of each new token to its completion, if the request asks for
    logprobs."""
    for seq, token_id, row in zip(sampled, token_ids, rows, strict=True):
        completion = seq.completion
        k = completion.sampling.num_logprobs
        if k is not None and token_id >= 0:
            # A view keeps the step's whole array in memory, so a narrower row is copied.
            narrow = row if len(row) == 3 + 2 * k else row[: 3 + 2 * k].copy()
            completion.logprobs.append(narrow)


def collect_prompt_logprobs(runner: "ModelRunner", step: InFlightStep, batch: Batch) -> None:
    """Computes logprobs of prompt tokens from a step's hidden states, and appends them, packed, to
    each completion whose request asks for them. The token at position i is predicted at position
    i - 1, so a step yields the logprobs of the tokens that follow its own."""
    offset = 0
    for item in batch.items:
        seq, first = item.seq, item.seq.num_prompt_logprobs
        last = min(item.end, seq.num_prompt_tokens - 1)
        if seq.wants_prompt_logprobs and first < last:
            k = seq.sampling_params.prompt_logprobs
            assert k is not None
            for start in range(first, last, PROMPT_LOGITS_ROWS):
                stop = min(start + PROMPT_LOGITS_ROWS, last)
                shift = offset - item.start  # from positions to rows of the hidden states
                logits = runner.call("compute_logits", step, shift + start, shift + stop)
                # The logits at each position predict the next token.
                ids = torch.tensor(seq.token_ids[start + 1 : stop + 1], device=runner.device)
                width = logits.size(1) if k == -1 else k
                rows = pack_logprobs(logits, ids, width).numpy(force=True)
                seq.completion.prompt_logprobs.append(rows)
                seq.num_prompt_logprobs = stop
        offset += item.num_tokens
