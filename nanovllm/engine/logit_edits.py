"""Edits of a sequence's logits before sampling: masks, biases and penalties.

A ``SamplingState`` holds a ``LogitEdit`` for each kind of edit that its parameters ask for. To add
a kind, write a class, name it in ``EDIT_KINDS``, and name its parameter in
``SamplingParams.edits_logits``.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch

from nanovllm.kernels.sampling.logit_edits import add_bias, apply_mask, bit_mask, penalise
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.math import cdiv

if TYPE_CHECKING:
    from nanovllm.engine.sampling_state import SamplingStateFactory
    from nanovllm.engine.sequence import Sequence as EngineSequence

Arrays = tuple[np.ndarray, ...]
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


class PreparedEdits:
    """The data that a request's edits need, computed once for all its completions. The grammar is
    not compiled yet.

    Args:
        params: the request's sampling parameters, checked.
        factory: has the engine's tokenizer, vocabulary size, EOS tokens and grammars.

    Attributes:
        grammar: the grammar that the text must match, compiled or not yet; None if there is none.
        allowed: int32 [ceil(vocab_size / 32)], a bit mask of ``allowed_token_ids``; all ones if the
            request has none.
        bias_tokens, bias_values: int32 and fp32 [num_biases], from ``logit_bias``.
        bad_words: sequences of token ids that must not be generated.
        penalties: fp32 [1, 3].
        stop_ids: the tokens that end a completion.

    Raises:
        ValueError: a JSON schema cannot be parsed, or a grammar is too long.
    """

    def __init__(self, params: SamplingParams, factory: "SamplingStateFactory") -> None:
        self.params, self.grammars = params, factory.grammars
        structured, bias = params.structured_outputs, params.logit_bias or {}
        self.grammar = None if structured is None else self.grammars.compiler.find(structured)
        self.allowed = np.full(cdiv(factory.vocab_size, 32), -1, np.int32)
        if params.allowed_token_ids is not None:
            self.allowed = bit_mask(params.allowed_token_ids, factory.vocab_size)
        self.bias_tokens = np.array(list(bias), np.int32)
        self.bias_values = np.array(list(bias.values()), np.float32)
        self.penalties = np.array([[getattr(params, name) for name in PENALTIES]], np.float32)
        words = params.bad_words or ()
        self.bad_words = [ids for word in words for ids in _spellings(factory.tokenizer, word)]
        stops = set(params.stop_token_ids or ())
        self.stop_ids = sorted(stops if params.ignore_eos else stops | factory.eos_token_ids)

    def start(self, prompt_token_ids: Sequence[int]) -> list[list["LogitEdit"]]:
        """Returns the edits of each of the request's ``n`` completions, before their first token.
        Raises ValueError if the grammar cannot be compiled."""
        grammars: list[Any] = [None] * self.params.n
        if self.grammar is not None:
            grammars = self.grammars.compiler.start(self.grammar, self.params.n)
        kinds = [kind for kind in EDIT_KINDS if kind.is_needed(self)]
        return [[kind(self, prompt_token_ids, grammar) for kind in kinds] for grammar in grammars]


def _spellings(tokenizer: Any, word: str) -> list[list[int]]:
    """Returns the token ids of a word at the start of a text, and after a space."""
    word = word.lstrip() or word
    texts = dict.fromkeys((word, " " + word))
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return [list(spelling) for spelling in ids if spelling]


class EditedRow(NamedTuple):
    """A row of a step's logits.

    Attributes:
        row: its index.
        edit: the edit, with the state of its sequence.
        token_ids: all tokens of the sequence, prompt and generated.
    """

    row: int
    edit: Any
    token_ids: Sequence[int]


class LogitEdit:
    """One kind of edit of the logits of one completion.

    Args:
        prepared: the data of the request's edits.
        prompt: its prompt's token ids.
        grammar: the state of its grammar in this completion, if any.

    Attributes:
        kernel: the function that edits a step's logits: (logits, *tensors).
        follows_tokens: whether ``append_token`` must be called for each sampled token. An edit that
            only reads ``EditedRow.token_ids`` needs no call.
        error: why the edit forbids every token; "" if it does not.
    """

    kernel: ClassVar[Callable[..., None]]
    follows_tokens = False
    error = ""

    def __init__(self, prepared: PreparedEdits, prompt: Sequence[int], grammar: Any) -> None:
        self.prepared = prepared
        self.num_prompt_tokens = len(prompt)

    @staticmethod
    def is_needed(prepared: PreparedEdits) -> bool:
        raise NotImplementedError

    @staticmethod
    def arrays(rows: list[EditedRow]) -> Arrays:
        """Returns the kernel's arguments to edit these rows of a step's logits; empty if there is
        nothing to edit."""
        raise NotImplementedError

    def append_token(self, token_id: int) -> bool:
        """Records a sampled token. Returns whether the completion ends here. Raises ValueError if
        the grammar does not accept the token."""
        return False

    def apply(self, logits: torch.Tensor, token_ids: Sequence[int]) -> None:
        """Edits the logits [1, vocab_size] of the token after ``token_ids``, on the CPU."""
        if arrays := self.arrays([EditedRow(0, self, token_ids)]):
            type(self).kernel(logits, *map(torch.from_numpy, arrays))


class TokenMask(LogitEdit):
    """Forbids tokens: ``allowed_token_ids`` and structured outputs."""

    kernel = staticmethod(apply_mask)

    def __init__(self, prepared: PreparedEdits, prompt: Sequence[int], grammar: Any) -> None:
        super().__init__(prepared, prompt, grammar)
        self.grammar = grammar
        self.follows_tokens = grammar is not None

    @staticmethod
    def is_needed(prepared: PreparedEdits) -> bool:
        return prepared.grammar is not None or prepared.params.allowed_token_ids is not None

    def append_token(self, token_id: int) -> bool:
        if self.grammar is None:
            return False
        if not self.grammar.accept(token_id):
            raise ValueError(self.grammar.error)
        return self.grammar.is_finished

    @staticmethod
    def arrays(rows: list[EditedRow]) -> Arrays:
        masks = np.stack([edit.prepared.allowed for _, edit, _ in rows])
        for mask, (_, edit, _) in zip(masks, rows, strict=True):
            if edit.grammar is not None:
                edit.grammar.fill_mask(mask)
                edit.error = edit.grammar.error
                np.bitwise_and(mask, edit.prepared.allowed, out=mask)
        return _indices(rows), masks


class TokenBias(LogitEdit):
    """Adds to the logits of tokens, or forbids them: ``logit_bias``, ``bad_words`` and
    ``min_tokens``."""

    kernel = staticmethod(add_bias)

    @staticmethod
    def is_needed(prepared: PreparedEdits) -> bool:
        return bool(prepared.params.logit_bias or prepared.bad_words or prepared.params.min_tokens)

    @staticmethod
    def arrays(rows: list[EditedRow]) -> Arrays:
        tokens, values = zip(*[edit.biases(ids) for _, edit, ids in rows], strict=True)
        lens = [len(each) for each in tokens]
        if not any(lens):
            return ()
        return np.repeat(_indices(rows), lens), np.concatenate(tokens), np.concatenate(values)

    def biases(self, token_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens whose logits change after ``token_ids``, int32, and by how much."""
        prepared, num_generated = self.prepared, len(token_ids) - self.num_prompt_tokens
        is_short = num_generated < prepared.params.min_tokens
        forbidden = set(prepared.stop_ids if is_short else ())
        for *start, last in prepared.bad_words:
            index = len(token_ids) - len(start)
            if index >= self.num_prompt_tokens and list(token_ids[index:]) == start:
                forbidden.add(last)
        if not forbidden:
            return prepared.bias_tokens, prepared.bias_values
        tokens = np.array([*forbidden], np.int32)
        values = np.full(len(forbidden), -np.inf, np.float32)
        return (
            np.concatenate((prepared.bias_tokens, tokens)),
            np.concatenate((prepared.bias_values, values)),
        )


class Penalties(LogitEdit):
    """Penalises tokens of the prompt and of the completion."""

    kernel = staticmethod(penalise)
    follows_tokens = True

    def __init__(self, prepared: PreparedEdits, prompt: Sequence[int], grammar: Any) -> None:
        super().__init__(prepared, prompt, grammar)
        self.history, self.generated = array("i", prompt), bytearray(len(prompt))

    @staticmethod
    def is_needed(prepared: PreparedEdits) -> bool:
        return prepared.params.penalises

    def append_token(self, token_id: int) -> bool:
        self.history.append(token_id)
        self.generated.append(1)
        return False

    @staticmethod
    def arrays(rows: list[EditedRow]) -> Arrays:
        return (
            _indices(rows),
            np.concatenate([edit.prepared.penalties for _, edit, _ in rows]),
            np.array([len(edit.history) for _, edit, _ in rows], np.int32),
            np.frombuffer(bytearray().join([edit.history for _, edit, _ in rows]), np.int32),
            np.frombuffer(bytearray().join([edit.generated for _, edit, _ in rows]), np.bool_),
        )


def _indices(rows: list[EditedRow]) -> np.ndarray:
    return np.array([row for row, _, _ in rows], np.int32)


EDIT_KINDS: tuple[type[LogitEdit], ...] = (TokenMask, TokenBias, Penalties)  # in calling order


def step_edits(seqs: "list[EngineSequence]") -> dict[Callable[..., None], tuple[torch.Tensor, ...]]:
    """Returns the kernels that edit a step's logits, in calling order, and their arguments after
    the logits. ``seqs`` has the sequence of each row. Rows of finished ones are not edited."""
    found: dict[type[LogitEdit], list[EditedRow]] = {kind: [] for kind in EDIT_KINDS}
    for row, seq in enumerate(seqs):
        for edit in () if seq.is_finished else seq.completion.sampling.edits:
            found[type(edit)].append(EditedRow(row, edit, seq.token_ids))
    edits = {kind.kernel: kind.arrays(rows) for kind, rows in found.items() if rows}
    return {kernel: tuple(map(torch.from_numpy, args)) for kernel, args in edits.items() if args}
