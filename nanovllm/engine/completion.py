"""A sequence's results for the user: its text, log-probabilities and finish reason."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from nanovllm.engine.sampling_state import SamplingState
from nanovllm.engine.sequence import Finish, Sequence
from nanovllm.text.detokenizer import IncrementalDetokenizer


@dataclass(slots=True, eq=False)
class Completion:
    """One completion of a request's prompt, on rank 0.

    Attributes:
        sampling: how its tokens are sampled.
        detokenizer: holds its text so far; None if its tokens are not converted to text.
        tokens_to_process: maps a token id to whether ``process`` must be called as soon as that
            token is sampled. Other tokens can wait, and are detokenized several at a time. None if
            all tokens can wait.
        finish: how it ended; None while it runs.
        logprobs: a packed row for each token, if asked for (see ``pack_logprobs``).
        prompt_logprobs: packed rows for the prompt, one array for each step that computed some.
        processes_every_token: whether no token can wait, as for a stream. ``tokens_to_process`` is
            then always EVERY_TOKEN, which maps every id to true.
    """

    sampling: SamplingState
    detokenizer: IncrementalDetokenizer | None = None
    tokens_to_process: Mapping[int, bool] | None = None
    finish: Finish | None = None
    logprobs: list[np.ndarray] = field(default_factory=list)
    prompt_logprobs: list[np.ndarray] = field(default_factory=list)
    processes_every_token: bool = False

    def process(self, seq: Sequence, token_id: int) -> Finish | None:
        """Extends the text by the sequence's new tokens.

        Args:
            token_id: the newest token, if ``tokens_to_process`` is true for it; otherwise -1.

        Returns:
            The finish, if a stop string or the grammar ends the sequence; otherwise None. It
            replaces the finish that the newest token caused, if any.

        Raises:
            Exception: any exception that the tokenizer or the grammar raises.
        """
        state, text, finish = self.sampling, self.detokenizer, None
        if token_id >= 0 and state.append_token(token_id) and not seq.is_finished:
            finish = Finish("stop")
        if text is None:
            return finish
        end = finish or self.finish
        may_stop = not (end and end.error) and (
            seq.num_completion_tokens > seq.sampling_params.min_tokens
        )
        num_tokens = len(seq.token_ids)
        if end and end.ends_with_stop_token and not text.keep_stop:
            num_tokens -= 1
        first = seq.num_prompt_tokens + text.num_tokens
        stop = text.extend(seq.token_ids[first:num_tokens], may_stop)
        if stop is None and end:
            stop = text.finish(may_stop)
        if not self.processes_every_token:
            self.tokens_to_process = text.stop_candidates
        return finish if stop is None else Finish("stop", stop)
