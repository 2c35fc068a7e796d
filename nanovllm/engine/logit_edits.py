"""Edits of a sequence's logits before sampling: masks, biases and penalties.

A ``SamplingState`` holds a ``LogitEdit`` for each kind of edit that its parameters ask for. To add
a kind, write a class and name it in ``EDITS``.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from nanovllm.kernels.sampling.logit_edits import add_bias, apply_mask, bit_mask, penalise
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.math import cdiv

if TYPE_CHECKING:
    from nanovllm.engine.sampling_state import SamplingStateFactory
    from nanovllm.engine.sequence import Sequence as EngineSequence

Rows = list[tuple[int, Any, Sequence[int]]]  # edited row, its edit, all tokens before it
Arrays = tuple[np.ndarray, ...]
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


class PreparedEdits:
    """What the edits of a request need, made once for all its completions. It does not compile the
    grammar.

    Args:
        params: the request's, checked.
        model: has the engine's tokenizer, vocabulary size, EOS tokens and grammars.

    Attributes:
        grammar: the grammar that the text must match, compiled or not yet; None for any text.
        allowed: int32 [ceil(vocab_size / 32)], the bits of ``allowed_token_ids``.
        bias_tokens, bias_values: int32 and fp32 [any], from ``logit_bias``.
        bad_words: sequences of token ids that must not be generated.
        penalties: PENALTIES' values.
        stop_ids: the tokens that end a completion.

    Raises:
        ValueError: the structured outputs cannot be read.
    """

    def __init__(self, params: SamplingParams, model: "SamplingStateFactory") -> None:
        self.params, self.grammars = params, model.grammars
        structured, bias = params.structured_outputs, params.logit_bias or {}
        self.grammar = None if structured is None else self.grammars.compiler.find(structured)
        self.allowed = np.full(cdiv(model.vocab_size, 32), -1, np.int32)
        if params.allowed_token_ids is not None:
            self.allowed = bit_mask(params.allowed_token_ids, model.vocab_size)
        self.bias_tokens = np.array(list(bias), np.int32)
        self.bias_values = np.array(list(bias.values()), np.float32)
        self.penalties = [getattr(params, name) for name in PENALTIES]
        words = params.bad_words or ()
        self.bad_words = [ids for word in words for ids in _spellings(model.tokenizer, word)]
        stops = set(params.stop_token_ids or ())
        self.stop_ids = sorted(stops if params.ignore_eos else stops | model.eos_token_ids)

    def start(self, prompt_token_ids: Sequence[int]) -> list[list["LogitEdit"]]:
        """Returns the edits of each of the request's ``n`` completions, before their first token.
        Raises ValueError if the grammar cannot be compiled."""
        grammars: list[Any] = [None] * self.params.n
        if self.grammar is not None:
            grammars = self.grammars.compiler.start(self.grammar, self.params.n)
        kinds = [kind for kind in EDITS if kind.is_needed(self)]
        return [[kind(self, prompt_token_ids, grammar) for kind in kinds] for grammar in grammars]


def _spellings(tokenizer: Any, word: str) -> list[list[int]]:
    """Returns the token ids of a word at the start of a text, and after a space."""
    word = word.lstrip() or word
    texts = dict.fromkeys((word, " " + word))
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return [list(spelling) for spelling in ids if spelling]


class LogitEdit:
    """One kind of edit of the logits of one completion.

    Args:
        request: what the request asks for.
        prompt: its prompt's token ids.
        grammar: the state of its grammar in this completion, if any.

    Attributes:
        kernel: the function that edits a step's logits: (logits, *tensors).
        follows_tokens: whether the edit depends on the sampled tokens: ``append_token`` must be
            called.
        is_finished: whether the completion ends here.
        error: why no token can follow; "" if one can.
    """

    kernel: ClassVar[Callable[..., None]]
    follows_tokens = False
    is_finished = False
    error = ""

    def __init__(self, request: PreparedEdits, prompt: Sequence[int], grammar: Any) -> None:
        self.request = request
        self.num_prompt_tokens = len(prompt)

    @staticmethod
    def is_needed(request: PreparedEdits) -> bool:
        raise NotImplementedError

    @staticmethod
    def arrays(rows: Rows, num_rows: int) -> Arrays:
        """Returns the kernel's arguments for a step; empty if there is nothing to edit.

        Args:
            rows: each edited row of the logits, its edit of this kind, and all tokens before it.
            num_rows: of the logits.
        """
        raise NotImplementedError

    def append_token(self, token_id: int) -> None:
        """Records a sampled token. Raises ValueError if it cannot be followed."""

    def apply(self, logits: torch.Tensor, token_ids: Sequence[int]) -> None:
        """Edits logits [1, vocab_size] on the CPU, as they follow ``token_ids``."""
        if arrays := self.arrays([(0, self, token_ids)], 1):
            type(self).kernel(logits, *map(torch.from_numpy, arrays))


class TokenMask(LogitEdit):
    """Forbids tokens: ``allowed_token_ids`` and structured outputs."""

    kernel = staticmethod(apply_mask)

    def __init__(self, request: PreparedEdits, prompt: Sequence[int], grammar: Any) -> None:
        super().__init__(request, prompt, grammar)
        self.grammar = grammar
        self.follows_tokens = grammar is not None

    @staticmethod
    def is_needed(request: PreparedEdits) -> bool:
        return request.grammar is not None or request.params.allowed_token_ids is not None

    def append_token(self, token_id: int) -> None:
        if self.grammar is not None:
            accepted = self.grammar.accept(token_id)
            self.is_finished = self.grammar.is_finished
            if not accepted:
                raise ValueError(self.grammar.error)

    def mask(self) -> np.ndarray:
        """Returns the bits of the tokens that may be sampled next."""
        if self.grammar is None:
            return self.request.allowed
        mask = np.empty_like(self.request.allowed)
        self.grammar.fill_mask(mask)
        self.error = self.grammar.error
        return mask & self.request.allowed

    @staticmethod
    def arrays(rows: Rows, num_rows: int) -> Arrays:
        masks = np.stack([edit.mask() for _, edit, _ in rows])
        return np.array([row for row, _, _ in rows], np.int32), masks


class TokenBias(LogitEdit):
    """Adds to the logits of tokens, or forbids them: ``logit_bias``, ``bad_words`` and
    ``min_tokens``."""

    kernel = staticmethod(add_bias)

    @staticmethod
    def is_needed(request: PreparedEdits) -> bool:
        return bool(request.params.logit_bias or request.bad_words or request.params.min_tokens)

    def biases(self, token_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns what to add to which logits after these tokens: int32 token ids and fp32 values.
        A forbidden token may have a bias, too."""
        request, num_generated = self.request, len(token_ids) - self.num_prompt_tokens
        is_short = num_generated < request.params.min_tokens
        forbidden = dict.fromkeys(request.stop_ids if is_short else ())
        for *start, last in request.bad_words:
            place = len(token_ids) - len(start)
            if place >= self.num_prompt_tokens and list(token_ids[place:]) == start:
                forbidden[last] = None
        tokens = np.array(list(forbidden), np.int32)
        values = np.full(len(tokens), -np.inf, np.float32)
        return np.append(request.bias_tokens, tokens), np.append(request.bias_values, values)

    @staticmethod
    def arrays(rows: Rows, num_rows: int) -> Arrays:
        tokens, values = zip(*(edit.biases(ids) for _, edit, ids in rows), strict=True)
        lens = [len(each) for each in tokens]
        if not any(lens):
            return ()
        bias_rows = np.repeat(np.array([row for row, _, _ in rows], np.int32), lens)
        return bias_rows, np.concatenate(tokens), np.concatenate(values)


class Penalties(LogitEdit):
    """Penalises tokens of the prompt and of the completion."""

    kernel = staticmethod(penalise)
    follows_tokens = True

    def __init__(self, request: PreparedEdits, prompt: Sequence[int], grammar: Any) -> None:
        super().__init__(request, prompt, grammar)
        self.history = array("i", prompt)

    @staticmethod
    def is_needed(request: PreparedEdits) -> bool:
        return request.params.penalises

    def append_token(self, token_id: int) -> None:
        self.history.append(token_id)

    @staticmethod
    def arrays(rows: Rows, num_rows: int) -> Arrays:
        indices = [row for row, _, _ in rows]
        penalties = np.tile(np.array([1, 0, 0], np.float32), (num_rows, 1))
        penalties[indices] = [edit.request.penalties for _, edit, _ in rows]
        histories = [np.frombuffer(edit.history, np.int32) for _, edit, _ in rows]
        lens = np.array([len(history) for history in histories])
        starts = np.cumsum(lens) - lens
        first_generated = starts + [edit.num_prompt_tokens for _, edit, _ in rows]
        generated = np.arange(lens.sum()) >= np.repeat(first_generated, lens)
        history_rows = np.repeat(np.array(indices, np.int32), lens)
        return penalties, history_rows, np.concatenate(histories), generated


EDITS: tuple[type[LogitEdit], ...] = (TokenMask, TokenBias, Penalties)  # in calling order


def step_edits(seqs: "list[EngineSequence]") -> dict[Callable[..., None], tuple[torch.Tensor, ...]]:
    """Returns the kernels that edit a step's logits, in calling order, and their arguments after
    the logits. ``seqs`` has the sequence of each row; finished ones ask for no edit."""
    groups: dict[type[LogitEdit], Rows] = {kind: [] for kind in EDITS}
    for row, seq in enumerate(seqs):
        for edit in () if seq.is_finished else seq.completion.sampling.edits:
            groups[type(edit)].append((row, edit, seq.token_ids))
    found = {kind: kind.arrays(rows, len(seqs)) for kind, rows in groups.items() if rows}
    return {
        kind.kernel: tuple(map(torch.from_numpy, arrays))
        for kind, arrays in found.items()
        if arrays
    }
