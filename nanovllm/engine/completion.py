"""What the user gets of a sequence: its text, its log-probabilities, and how it ended."""

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
        detokenizer: its text so far; None if it is to have none.
        tokens_to_process: whether a token, by its id, needs processing as soon as it is sampled,
            rather than with the next batch of tokens that become text; None if none does.
        finish: how it ended; None while it runs.
        logprobs: a packed row for each token, if asked for (see ``pack_logprobs``).
        prompt_logprobs: packed rows for the prompt, a part for each step.
        processes_every_token: whether ``tokens_to_process`` stays EVERY_TOKEN, as for a stream.
    """

    sampling: SamplingState
    detokenizer: IncrementalDetokenizer | None = None
    tokens_to_process: Mapping[int, bool] | None = None
    finish: Finish | None = None
    logprobs: list[np.ndarray] = field(default_factory=list)
    prompt_logprobs: list[np.ndarray] = field(default_factory=list)
    processes_every_token: bool = False

    def process(self, seq: Sequence, token_id: int) -> Finish | None:
        """Brings the text up to the sequence's newest token.

        Args:
            token_id: the newest token, if it needs processing; -1 if not.

        Returns:
            How the text or the grammar ends the sequence, in place of how its token does.

        Raises:
            Exception: of the tokenizer's or the grammar's code.
        """
        state, text, finish = self.sampling, self.detokenizer, None
        if token_id >= 0 and state.follows_tokens:
            state.append_token(token_id)
            if state.is_finished and not seq.is_finished:
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
