"""Sampling parameters of one sequence in the form that steps need. On rank 0 only."""

from array import array
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np
import xxhash

from nanovllm.kernels.sampling.logit_edits import bit_mask
from nanovllm.kernels.sampling.sampling_row import SAMPLING_ROW
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.structured import CPUBudget, Grammar, GrammarCompiler, Once
from nanovllm.utils.math import cdiv
from nanovllm.utils.panics import is_failure


class SamplingKind(NamedTuple):
    """What sampling a sequence's tokens involves. Steps look at the few kinds of their batch.

    Attributes:
        truncates: top_k, top_p or min_p.
        edits: logits may have to be edited before a token is sampled from them.
        num_logprobs: how many of the most likely tokens to report logprobs for; None for none.
        processed_logprobs: report those of the logits that tokens are sampled from.
    """

    truncates: bool
    edits: bool
    num_logprobs: int | None
    processed_logprobs: bool = False


class SamplingState:
    """Sampling parameters in the form that steps need, computed once.

    Args:
        params: the request's.
        seed: the sequence's own, any 64 bits.
        prompt_token_ids: the prompt.
        vocab_size: the model's.
        eos_token_ids: the model's.
        bad_words: sequences of token ids that must not be generated.
        grammar: the grammar that the text must match, if any.
        processed_logprobs: report log-probabilities of the logits that tokens are sampled from.

    Attributes:
        row: a SAMPLING_ROW as bytes, without its position, which each step fills in.
        kind: what sampling involves.
        history: int32 token ids so far; None without penalties.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        grammar: Grammar | None = None,
        processed_logprobs: bool = False,
    ) -> None:
        row = np.zeros((), SAMPLING_ROW)
        row["temperature"] = 0.0 if params.is_greedy else params.temperature
        row["top_k"] = min(max(params.top_k, 0), vocab_size)
        row["top_p"] = max(params.top_p, np.finfo(np.float32).tiny)  # in fp32, too, above 0
        row["min_p"] = params.min_p
        row["seed"] = np.uint64(seed % 2**64).astype(np.int64)
        self.row = row.tobytes()
        self.num_prompt_tokens = len(prompt_token_ids)
        self.history = array("i", prompt_token_ids) if params.penalises else None
        self.penalties = (
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        self.grammar = grammar
        self.vocab_size, self.mask_words = vocab_size, cdiv(vocab_size, 32)
        self.allowed_mask = None
        if params.allowed_token_ids is not None:
            self.allowed_mask = bit_mask(params.allowed_token_ids, vocab_size)
        self.bad_words = [tuple(word) for word in bad_words]
        bias = params.logit_bias or {}
        self.bias_tokens = np.array(list(bias), np.int32)
        self.bias_values = np.array(list(bias.values()), np.float32)
        self.min_tokens = params.min_tokens
        stops = set(params.stop_token_ids or ())
        self.stop_ids = sorted(stops if params.ignore_eos else stops | set(eos_token_ids))
        self.has_mask = grammar is not None or self.allowed_mask is not None
        self.has_bias = bool(self.bad_words or bias or self.min_tokens)
        self.kind = SamplingKind(
            truncates=params.truncates,
            edits=self.has_mask or self.has_bias or params.penalises,
            num_logprobs=vocab_size if params.logprobs == -1 else params.logprobs,
            processed_logprobs=processed_logprobs and params.logprobs is not None,
        )

    @property
    def follows_tokens(self) -> bool:
        """Whether the state depends on sampled tokens: ``append_token`` must be called."""
        return self.history is not None or self.grammar is not None

    def append_token(self, token_id: int) -> None:
        """Records a sampled token.

        Raises:
            ValueError: the grammar has become too complex to follow.
        """
        if self.history is not None:
            self.history.append(token_id)
        if self.grammar is not None and not self.grammar.accept(token_id):
            raise ValueError(self.grammar.error)

    def fill_mask(self, mask: np.ndarray) -> None:
        """Writes int32 [mask_words], a bit for each token that may be sampled next."""
        if self.grammar is not None:
            self.grammar.fill_mask(mask)
            if self.allowed_mask is not None:
                mask &= self.allowed_mask
        else:
            mask[:] = self.allowed_mask

    def allows_none(self, token_ids: Sequence[int]) -> bool:
        """Whether the parameters forbid every token after these, whatever the logits are."""
        mask = np.full(self.mask_words, -1, np.int32)
        if self.has_mask:
            self.fill_mask(mask)
        tokens, values = self.biases(token_ids)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.vocab_size]
        allowed[tokens[np.isneginf(values)]] = 0
        return not allowed.any()

    def biases(self, token_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns what to add to which logits of the next token: int32 token ids and fp32 values.

        Args:
            token_ids: all tokens so far, prompt and generated.
        """
        num_generated = len(token_ids) - self.num_prompt_tokens
        forbidden = dict.fromkeys(self.stop_ids if num_generated < self.min_tokens else ())
        for *start, last in self.bad_words:
            place = len(token_ids) - len(start)
            if place >= self.num_prompt_tokens and list(token_ids[place:]) == start:
                forbidden[last] = None
        if not forbidden:
            return self.bias_tokens, self.bias_values
        tokens = np.array(list(forbidden), np.int32)
        others = ~np.isin(self.bias_tokens, tokens)
        return (
            np.concatenate((self.bias_tokens[others], tokens)),
            np.concatenate((self.bias_values[others], np.full(len(tokens), -np.inf, np.float32))),
        )


class PreparedParams(NamedTuple):
    """A checked copy of sampling parameters, with what a tokenizer made of them.

    Attributes:
        params: a copy of the caller's.
        bad_words: sequences of token ids that must not be generated.
        grammar: the grammar that the text must match, compiled or not yet; None for any text.
    """

    params: SamplingParams
    bad_words: list[list[int]]
    grammar: Once | None


class SamplingStateFactory:
    """Makes the sampling states of one engine's sequences.

    Args:
        tokenizer: a transformers tokenizer, or None.
        vocab_size: the model's.
        eos_token_ids: the model's.
        seed: of the generator of seeds, for requests without a seed.
        max_logprobs, logprobs_mode: Config's.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        seed: int,
        max_logprobs: int = -1,
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_logprobs = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)
        self.processed_logprobs = logprobs_mode == "processed_logprobs"
        self.eos_token_ids = frozenset(eos_token_ids)
        # Two generators, because requests with grammars may start later than requests after them.
        self.random, self.grammar_random = Random(seed), Random(f"{seed}/grammars")
        self.grammars = GrammarCompiler(tokenizer, vocab_size, self.eos_token_ids)

    def prepare(self, params: SamplingParams) -> PreparedParams:
        """Checks and copies parameters, which the caller may change later. Any thread may call
        this. It does not compile the grammar.

        Raises:
            TypeError: not SamplingParams.
            ValueError: fields that contradict each other, or that this model cannot follow.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        try:
            params = params.clone()
            params.check()
            self._check(params)
            bad_words = [ids for word in params.bad_words or () for ids in self._spellings(word)]
            structured = params.structured_outputs
            grammar = None if structured is None else self.grammars.find(structured)
        except BaseException as error:  # tokenizers and grammar compilers raise what they like
            if not is_failure(error):
                raise
            raise ValueError(f"sampling_params: {error}") from error
        return PreparedParams(params, bad_words, grammar)

    def _check(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(params, name) or ():
                if token_id >= self.vocab_size:
                    raise ValueError(
                        f"{name} holds {token_id}, which is outside the vocabulary: ids are 0 to "
                        f"{self.vocab_size - 1}"
                    )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if (
                count is not None
                and (self.vocab_size if count == -1 else count) > self.max_logprobs
            ):
                raise ValueError(
                    f"{name} is {count}, but at most {self.max_logprobs} are allowed: the limit is "
                    f"max_logprobs and the vocabulary's size, {self.vocab_size}"
                )
        if self.tokenizer is None and (params.stop or params.bad_words):
            name = "stop strings" if params.stop else "bad_words"
            raise ValueError(f"this model has no tokenizer, which {name} need: give token ids")

    def make(
        self, prepared: PreparedParams, prompt_token_ids: Sequence[int]
    ) -> list[SamplingState]:
        """Makes a state for each of the request's ``n`` completions."""
        params, bad_words, grammar = prepared
        budget = CPUBudget()
        seed = params.seed
        if seed is None:
            seed = (self.random if grammar is None else self.grammar_random).getrandbits(64)
        return [
            SamplingState(
                params,
                # The first completion is the same as with n=1.
                xxhash.xxh64_intdigest(f"{seed % 2**64}/{i}".encode()) if i else seed,
                prompt_token_ids,
                self.vocab_size,
                self.eos_token_ids,
                bad_words,
                None if grammar is None else self.grammars.start(grammar, budget),
                self.processed_logprobs,
            )
            for i in range(params.n)
        ]

    def _spellings(self, word: str) -> list[list[int]]:
        """Returns the token ids of a word at the start of a text, and after a space."""
        word = word.lstrip() or word
        texts = dict.fromkeys((word, " " + word))
        ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        return [list(spelling) for spelling in ids if spelling]
