"""The sampling parameters of a sequence in the form that steps need. Used on rank 0 only."""

from collections.abc import Iterable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from nanovllm.config import Config
from nanovllm.kernels.sampling.sampling_row import EDITS, LOGPROBS, SAMPLING_ROW, TRUNCATES
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.grammars import Grammars
from nanovllm.utils.panics import as_value_error

if TYPE_CHECKING:
    from nanovllm.engine.logit_edits import LogitEdit, PreparedEdits
    from nanovllm.text.structured import Lazy


class SamplingState:
    """Sampling parameters in the form that steps need, computed once.

    Args:
        params: the request's parameters.
        seed: the seed of this sequence, any 64 bits.
        edits: masks, biases and penalties to apply before sampling; empty if there are none.
        vocab_size: the model's vocabulary size.

    Attributes:
        row: a SAMPLING_ROW as bytes, without its position, which each step fills in.
        num_logprobs: number of most likely tokens to report logprobs for; None for no logprobs.
        follows_tokens: whether ``append_token`` must be called for each sampled token.
    """

    def __init__(
        self, params: SamplingParams, seed: int, edits: "Sequence[LogitEdit]", vocab_size: int
    ) -> None:
        temperature = 0.0 if params.is_greedy else params.temperature
        top_k = min(max(params.top_k, 0), vocab_size)
        top_p = max(params.top_p, np.finfo(np.float32).tiny)  # not rounded to 0 in fp32
        signed_seed = (seed + 2**63) % 2**64 - 2**63
        features = TRUNCATES * params.truncates + EDITS * bool(edits)
        features += LOGPROBS * (params.logprobs is not None)
        row = temperature, top_k, top_p, params.min_p, signed_seed, 0, features
        self.row = np.array(row, SAMPLING_ROW).tobytes()
        self.edits = edits
        self.vocab_size = vocab_size
        self.follows_tokens = any(edit.follows_tokens for edit in edits)
        self.num_logprobs = vocab_size if params.logprobs == -1 else params.logprobs

    def append_token(self, token_id: int) -> bool:
        """Records a sampled token. Returns whether an edit ends the completion here.

        Raises:
            ValueError: the grammar does not accept the token.
        """
        ends = [edit.append_token(token_id) for edit in self.edits]
        return any(ends)


class PreparedParams(NamedTuple):
    """A checked copy of sampling parameters, with the data that their edits need.

    Attributes:
        params: a copy of the caller's.
        edits: makes the logit edits; None if the parameters need none.
        grammar: the grammar that the text must match, compiled or not yet; None if there is none.
    """

    params: SamplingParams
    edits: "PreparedEdits | None" = None
    grammar: "Lazy | None" = None


class SamplingStateFactory:
    """Makes the sampling states of one engine's sequences.

    Args:
        tokenizer: a transformers tokenizer, or None.
        vocab_size: the model's vocabulary size.
        eos_token_ids: the model's EOS tokens.
        config: its ``seed`` seeds the generator from which requests without a seed get theirs.
            Its ``max_logprobs`` limits ``logprobs`` and ``prompt_logprobs``.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        config: Config,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_logprobs = config.max_logprobs
        self.eos_token_ids = frozenset(eos_token_ids)
        # Requests with grammars start when their grammars are compiled, so their order varies. They
        # have their own generator, so that the seeds of other requests do not vary.
        self.random, self.grammar_random = Random(config.seed), Random(f"{config.seed}/grammars")
        self.grammars = Grammars(tokenizer, vocab_size, self.eos_token_ids)

    def prepare(self, params: SamplingParams) -> PreparedParams:
        """Checks and copies parameters, which the caller may change later. Any thread may call
        this. It does not compile the grammar.

        Raises:
            TypeError: not SamplingParams.
            ValueError: fields that contradict each other, or are invalid for this model.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        with as_value_error("sampling_params:"):  # tokenizers and compilers may raise anything
            params = params.clone()
            params.check()
            self._check(params)
            if not params.edits_logits:
                return PreparedParams(params)
            from nanovllm.engine.logit_edits import PreparedEdits

            edits = PreparedEdits(params, self)
            return PreparedParams(params, edits, edits.grammar)

    def _check(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            if (largest := max(getattr(params, name) or (-1,))) >= self.vocab_size:
                raise ValueError(
                    f"{name} holds {largest}, which is outside the vocabulary: ids are 0 to "
                    f"{self.vocab_size - 1}"
                )
        if params.logprobs is not None or params.prompt_logprobs is not None:
            from nanovllm.engine.logprobs import check_num_logprobs

            check_num_logprobs(params, self.max_logprobs, self.vocab_size)
        if self.tokenizer is None and (params.stop or params.bad_words):
            name = "stop strings" if params.stop else "bad_words"
            raise ValueError(f"this model has no tokenizer, which {name} need: use token ids")

    def make(
        self, prepared: PreparedParams, prompt_token_ids: Sequence[int]
    ) -> list[SamplingState]:
        """Makes a state for each of the request's ``n`` completions."""
        params, edits, grammar = prepared
        seed = params.seed
        if seed is None:
            generator = self.random if grammar is None else self.grammar_random
            seed = generator.getrandbits(64)
        # The first completion is the same as with n=1.
        seeds = (
            xxhash.xxh64_intdigest(f"{seed % 2**64}/{i}".encode()) if i else seed
            for i in range(params.n)
        )
        edits_of_each = [()] * params.n if edits is None else edits.start(prompt_token_ids)
        return [
            SamplingState(params, seed, own, self.vocab_size)
            for seed, own in zip(seeds, edits_of_each, strict=True)
        ]
