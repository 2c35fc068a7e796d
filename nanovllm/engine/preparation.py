"""Turns prompts and sampling parameters into requests, which ``LLMEngine`` then runs."""

import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, TypeAlias

from tqdm.auto import tqdm

from nanovllm.engine.request import PreparedRequest, grammar_of
from nanovllm.engine.sampling_state import PreparedParams, SamplingStateFactory
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import PORTION, PromptEncoder, raise_errors
from nanovllm.utils.progress import slices

Checked: TypeAlias = PreparedRequest | Exception  # a request, or why it is refused


@dataclass(eq=False)
class RequestPreparer:
    """Checks and tokenises prompts, and compiles their grammars. Any thread may use it.

    Attributes:
        encoder: tokenises prompts.
        sampling_states: checks sampling parameters.
        check_prompt_len: takes a number of prompt tokens. Raises ValueError if such a prompt can
            never run.
        check_open: raises ValueError if the engine has been closed.
    """

    encoder: PromptEncoder
    sampling_states: SamplingStateFactory
    check_prompt_len: Callable[[int], None]
    check_open: Callable[[], None]

    def prepare_all(
        self,
        prompts: Seq[Any],
        sampling_params: SamplingParams | Seq[SamplingParams],
        what: str,
        make_bar: Callable[..., tqdm] | None = None,
    ) -> list[PreparedRequest]:
        """Prepares all prompts, and waits for their grammars.

        Args:
            sampling_params: one for all prompts, or one each.
            what: the name of the prompts in errors, such as "prompts".
            make_bar: makes the progress bar; None for none.

        Raises:
            TypeError or ValueError: some prompts cannot run. The message lists them, as
                ``what[index]``.
        """
        checked = self.prepare_each(prompts, sampling_params, make_bar)
        ready = dict(
            self.sampling_states.grammars.when_compiled(checked, grammar_of, self.check_open)
        )
        return raise_errors([ready[i] for i in range(len(prompts))], what)

    def prepare_each(
        self,
        prompts: Seq[Any],
        sampling_params: SamplingParams | Seq[SamplingParams],
        make_bar: Callable[..., tqdm] | None = None,
    ) -> Iterator[Checked]:
        """Yields a request for each prompt, or the exception that says what is wrong with it. The
        grammars are not compiled yet. The prompts are checked lazily, PORTION at a time.

        Args:
            sampling_params: one for all prompts, or one each. One for all is checked before the
                first prompt.
            make_bar: makes the progress bar; None for none.

        Raises:
            TypeError or ValueError: the number of ``sampling_params`` is not that of the prompts,
                or the one for all is invalid.
        """
        if isinstance(sampling_params, (list, tuple)):
            if len(sampling_params) != len(prompts):
                raise ValueError(
                    f"{len(prompts)} prompts but {len(sampling_params)} sampling_params: give one "
                    f"for all or one each"
                )
            return self._prepare_each(prompts, sampling_params, make_bar)
        prepared = self.sampling_states.prepare(sampling_params)  # type: ignore[arg-type]
        self.sampling_states.grammars.check(prepared.grammar, self.check_open)
        return self._prepare_each(prompts, [prepared] * len(prompts), make_bar)

    def _prepare_each(
        self, prompts: Seq[Any], each_params: Seq[Any], make_bar: Callable[..., tqdm] | None
    ) -> Iterator[Checked]:
        copies: dict[int, PreparedParams] = {}  # by id(): each object is checked and copied once
        preparer = weakref.ref(self)
        for portion in slices(len(prompts), PORTION, make_bar, "Tokenizing"):
            self.check_open()
            encoded = self.encoder.encode(prompts[portion])
            for item, params in zip(encoded, each_params[portion], strict=True):
                try:
                    if not isinstance(params, PreparedParams) and id(params) not in copies:
                        copies[id(params)] = self.sampling_states.prepare(params)
                    if isinstance(item, Exception):
                        raise item
                    self.check_prompt_len(len(item[1]))
                except (TypeError, ValueError) as error:
                    yield error
                else:
                    yield PreparedRequest(*item, copies.get(id(params), params), preparer)
