"""``LLM`` with weights that can be replaced, and memory that can be freed, between calls of
``generate``."""

import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nanovllm import llm
from nanovllm.checkpoints.weights import some_of
from nanovllm.engine.request import Request
from nanovllm.outputs import RequestOutput
from nanovllm.rl.memory import TAGS, WEIGHTS, release, restore
from nanovllm.rl.weights import MissingWeights, WeightUpdate, live_model

logger = logging.getLogger("nanovllm")

IN_USE = "{} cannot run while there are unfinished requests: finish or abort them first"


class LLM(llm.LLM):
    """Adds what reinforcement learning needs to ``nanovllm.llm.LLM``."""

    def __init__(self, model: Any, **kwargs: Any) -> None:
        self._asleep: set[str] = set()  # the tags of the memory that is freed
        self._missing = MissingWeights()
        self._is_loading = False  # whether ``load_weights`` is running
        self._num_prompt_tokens = 0  # of the scheduler, when the prefix cache was last emptied
        super().__init__(model, **kwargs)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replaces weights of the model, on all ranks, and empties the prefix cache.

        Weights that are not given keep their values. A part of a packed parameter can be given
        alone, such as ``q_proj`` without ``k_proj`` and ``v_proj``. Tensors that the model does not
        need are ignored, as when a checkpoint is loaded: a tied ``lm_head.weight``, a vision tower.

        Waits until other threads have no unfinished requests.

        Args:
            weights: names as in the model's Hugging Face checkpoint, and tensors in the shapes of
                the checkpoint, on any device and in any floating-point dtype. An iterator is read
                one pair at a time. A tensor may be changed or freed once the next pair is
                requested. The iterator cannot call the engine, but for ``close``.

        Raises:
            TypeError: not pairs of a string and a tensor.
            ValueError: a name that the model does not have, a name that occurs twice, a wrong shape
                or dtype, a tensor that is not dense, unfinished requests of this thread, or weights
                that are asleep. The message says what has been loaded before. If ``weights`` is a
                list or another collection, all names are checked before anything is changed.
            Exception: what the iterator raises, with a note about what has been loaded before. The
                engine can be used after that.
        """
        with self.acquire(IN_USE.format("load_weights")):
            if WEIGHTS in self._asleep:
                raise ValueError("the weights are asleep: call wake_up(['weights']) first")
            update = WeightUpdate(self.model_runner, self._missing)
            self._is_loading = True
            try:
                if isinstance(weights, Collection):
                    update.check_names(weights)
                for pair in update.read(weights):
                    self.turns.check_still_open()
                    update.load(pair)
            finally:
                self._is_loading = False
                self._missing.incomplete = set(update.live.incomplete().values())
                self._empty_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Frees the memory of the KV cache and the weights, and empties the prefix cache. Until
        ``wake_up``, the engine refuses requests. What is already asleep stays as it is.

        On a GPU this needs ``enable_sleep_mode=True``. CUDA graphs stay captured. On a CPU, level 1
        frees the KV cache only, because the weights are in host memory anyway.

        Waits until other threads have no unfinished requests.

        Args:
            level: 1 keeps the weights in host memory. 2 discards them, so that after ``wake_up``
                all of them must be loaded with ``load_weights``.

        Raises:
            ValueError: another level, a GPU without ``enable_sleep_mode``, or unfinished requests
                of this thread.
        """
        if level not in (1, 2):
            raise ValueError(
                f"level must be 1 (keep weights) or 2 (discard them), got {level!r:.80}"
            )
        with self.acquire(IN_USE.format("sleep")):
            runner = self.model_runner
            if runner.device.type == "cuda" and not self.config.enable_sleep_mode:
                raise ValueError("on a GPU, sleep needs LLM(..., enable_sleep_mode=True)")
            if self._asleep == set(TAGS):
                logger.warning("sleep: the engine is already asleep")
                return
            self._empty_prefix_cache()
            if level == 2 and WEIGHTS not in self._asleep:
                self._missing.add_all(live_model(runner).table)
            for tag in TAGS:
                if tag not in self._asleep:
                    runner.call("apply", None, release, tag, tag == WEIGHTS and level == 1)
                    self._asleep.add(tag)

    def wake_up(self, tags: Iterable[str] | None = None) -> bool:
        """Allocates the memory that ``sleep`` has freed, at the same addresses on a GPU. Does
        nothing if a part of it is awake already.

        Args:
            tags: a list of "weights", "kv_cache" or both; None for all that is asleep.

        Returns:
            Whether all memory is awake.

        Raises:
            ValueError: an unknown tag.
            RuntimeError: the GPU has too little free memory. With one rank, the memory is still
                asleep, and ``wake_up`` can be called again.
        """
        names = None
        if tags is not None:
            names = [*tags] if isinstance(tags, Iterable) else [tags]
            if isinstance(tags, str) or any(name not in TAGS for name in names):
                raise ValueError(f"tags must be a list of {' and '.join(TAGS)}, got {tags!r:.80}")
        with self.acquire(IN_USE.format("wake_up")):
            waking = set(self._asleep if names is None else names)
            if not waking <= self._asleep:
                logger.warning("wake_up: not asleep: %s", " and ".join(waking))
            elif names is None and not waking:
                logger.warning("wake_up: not asleep: the engine")
            else:
                for tag in sorted(waking, key=TAGS.index):
                    self.model_runner.call("apply", None, restore, tag)
                    self._asleep.remove(tag)
            return not self._asleep

    def is_sleeping(self) -> bool:
        """Returns whether weights or KV cache are asleep."""
        self.turns.check_open()
        return bool(self._asleep)

    @contextmanager
    def acquire(self, conflict: str, alone: bool = True) -> Iterator[None]:
        with super().acquire(conflict, alone):
            if self._is_loading:  # in this thread, because others wait for their turn
                raise ValueError(
                    "load_weights is running: its iterator cannot call the engine, do so after it"
                )
            yield

    def _empty_prefix_cache(self) -> None:
        """Empties the prefix cache, unless no prompt has started since the last time: trainers may
        load one tensor per call."""
        if self._num_prompt_tokens != self.scheduler.num_prompt_tokens:
            self._num_prompt_tokens = self.scheduler.num_prompt_tokens
            self.scheduler.reset()

    def _check_ready(self) -> None:
        """Raises ValueError if the engine cannot run requests now."""
        if self._asleep:
            tags = " and ".join(tag for tag in TAGS if tag in self._asleep)
            raise ValueError(f"the engine is asleep ({tags}): call wake_up first")
        if missing := self._missing.names():
            raise ValueError(
                f"weights have no values since sleep(level=2): give load_weights {some_of(missing)}"
            )
        if incomplete := self._missing.incomplete:
            raise ValueError(
                "MXFP4 blocks and their scales are loaded together: give load_weights "
                f"{some_of(incomplete)}"
            )

    def _generate(self, *args: Any, **kwargs: Any) -> list[RequestOutput]:
        self._check_ready()  # before prompts are tokenised
        return super()._generate(*args, **kwargs)

    def add_prepared(self, *args: Any, **kwargs: Any) -> Request:
        self._check_ready()
        return super().add_prepared(*args, **kwargs)
