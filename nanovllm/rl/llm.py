"""``LLM`` with weights that can be replaced between calls of ``generate``."""

from collections.abc import Collection, Iterable

import torch

from nanovllm import llm
from nanovllm.rl.weights import WeightUpdate

NEEDS_NO_REQUESTS = "{} needs an engine without requests: finish or abort the requests first"


class LLM(llm.LLM):
    """Adds what reinforcement learning needs to ``nanovllm.llm.LLM``."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replaces weights of the model, on all ranks, and empties the prefix cache.

        Weights that are not given keep their values. A part of a packed parameter can be given
        alone, such as ``q_proj`` without ``k_proj`` and ``v_proj``. Tensors that the model does not
        need are ignored, as when a checkpoint is loaded: a tied ``lm_head.weight``, a vision tower.

        Waits until other threads have no unfinished requests.

        Args:
            weights: names as in the model's Hugging Face checkpoint, and tensors in the shapes of
                the checkpoint, on any device and in any floating-point dtype. An iterator is read
                one pair at a time, and a tensor may be changed or freed once the next pair is
                requested.

        Raises:
            TypeError: not pairs of a string and a tensor.
            ValueError: a name that the model does not have, a name that occurs twice, a wrong shape
                or dtype, or unfinished requests of this thread. The message says what has been
                loaded before. If ``weights`` is a list or another collection, all names are checked
                before anything is changed.
            Exception: what the iterator raises, with a note about what has been loaded before. The
                engine can be used after that.
        """
        with self._running(NEEDS_NO_REQUESTS.format("load_weights")):
            update = WeightUpdate(self.model_runner)
            try:
                if isinstance(weights, Collection):
                    update.check_names(weights)
                for pair in update.read(weights):
                    self.turns.check_still_open()
                    update.load(pair)
            finally:
                self.scheduler.reset()
