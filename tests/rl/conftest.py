"""Two checkpoints of a family that differ in all weights, and what engines generate with them."""

from collections.abc import Sequence
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import PreTrainedModel

from nanovllm import LLM, SamplingParams
from tests.tiny_models import BASE, CONFIGS, TinyModels

SETTINGS: dict[str, Any] = {
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 48,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "skip_tokenizer_init": True,
    "device": "cpu",
}
# More than two full blocks, so that the prefix cache has some of the first.
PROMPTS = [[*range(3, 43)], [5, 6, 7]]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)


def answers(llm: LLM, prompts: Sequence[list[int]] = PROMPTS) -> list[Any]:
    """The tokens and log-probabilities of greedy completions."""
    outputs = [output.outputs[0] for output in llm.generate(prompts, PARAMS, use_tqdm=False)]
    return [
        (out.token_ids, [{i: x.logprob for i, x in position.items()} for position in out.logprobs])
        for out in outputs
    ]


class Pair:
    """Two checkpoints of one of ``tiny_models.CONFIGS``, whose weights are all different.

    Attributes:
        old, new: their folders.
        old_tensors, tensors: their tensors.
    """

    def __init__(self, models: TinyModels, name: str) -> None:
        self.old, self.new = models.path(name), models.root / f"{name}-new"
        config_class, changes = CONFIGS[name]
        self._config = config_class(**(changes if "text_config" in changes else BASE | changes))
        if not self.new.exists():
            self.make_model().save_pretrained(self.new)
        self.old_tensors, self.tensors = (
            load_file(folder / "model.safetensors") for folder in (self.old, self.new)
        )
        self._wanted: dict[Any, Any] = {}

    def make_model(self) -> PreTrainedModel:
        """The new weights in transformers."""
        return TinyModels.build(self._config, seed=17)

    def wanted(self, **settings: Any) -> list[Any]:
        """The answers of an engine that was started with the new weights."""
        key = tuple(sorted(settings.items()))
        if key not in self._wanted:
            with LLM(self.new, **SETTINGS, **settings) as llm:
                self._wanted[key] = answers(llm)
        return self._wanted[key]


@pytest.fixture(scope="session")
def pairs(tiny_models: TinyModels) -> Any:
    """A function from the name of a family to its Pair."""
    known: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in known:
            known[name] = Pair(tiny_models, name)
        return known[name]

    return get
