"""The workloads of bench.py and compare.py: random tokens with fixed output lengths, and chats."""

import random
import re
from dataclasses import dataclass
from itertools import product
from typing import Any


@dataclass(frozen=True)
class Workload:
    """Prompts of token ids, and the number of tokens to generate for each of ``n`` completions."""

    name: str
    prompts: list[list[int]]
    output_lens: list[int]
    n: int = 1

    @property
    def num_input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return self.n * sum(self.output_lens)


# Name -> number of prompts, (shortest, longest) input, (shortest, longest) output. mixed256 is
# exactly nano-vLLM's benchmark, with the same random numbers.
SHAPES: dict[str, tuple[int, tuple[int, int], tuple[int, int]]] = {
    "mixed256": (256, (100, 1024), (100, 1024)),
    "single": (1, (128, 128), (512, 512)),
    "batch8": (8, (128, 128), (512, 512)),
    "decode256": (256, (64, 64), (512, 512)),
    "prefill": (128, (3900, 3900), (1, 1)),
    "short4000": (4000, (20, 120), (20, 120)),
}


def random_workload(
    name: str,
    num_prompts: int | None = None,
    input_len: tuple[int, int] | None = None,
    output_len: tuple[int, int] | None = None,
) -> Workload:
    """Makes a workload of random tokens.

    Args:
        name: a key of SHAPES, or sizes such as ``8 x (10:20 + 30:40)``: 8 prompts of 10 to 20
            tokens, with 30 to 40 generated tokens each.
        num_prompts, input_len, output_len: replace the sizes that the name stands for, in tokens.
            The workload's name then states the sizes.
    """
    shape = SHAPES.get(name) or _parse(name)
    count, inputs, outputs = num_prompts or shape[0], input_len or shape[1], output_len or shape[2]
    if (count, inputs, outputs) != shape:
        name = f"{count} x ({inputs[0]}:{inputs[1]} + {outputs[0]}:{outputs[1]})"
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(*inputs))] for _ in range(count)]
    return Workload(name, prompts, [rng.randint(*outputs) for _ in range(count)])


def _parse(name: str) -> tuple[int, tuple[int, int], tuple[int, int]]:
    """Returns the sizes in a name such as ``8 x (10:20 + 30:40)``."""
    count, *bounds = map(int, re.findall(r"\d+", name))
    return count, (bounds[0], bounds[1]), (bounds[2], bounds[3])


# Name -> number of prompts, tokens of their common prefix, other tokens, output, completions.
SHARED = {"shared-prefix": (512, 2048, 32, 64, 1), "n64": (32, 0, 1000, 64, 64)}


def shared_workload(name: str, num_prompts: int | None = None) -> Workload:
    """Makes a workload of random tokens whose sequences share prefixes.

    Args:
        name: a key of SHARED.
        num_prompts: replaces the number in SHARED. The workload's name then states the number.
    """
    count, prefix_len, own_len, output_len, n = SHARED[name]
    if num_prompts not in (None, count):
        count, name = num_prompts, f"{name} x {num_prompts}"
    rng = random.Random(0)
    prefix, *own = (
        [rng.randint(0, 10000) for _ in range(length)]
        for length in (prefix_len, *[own_len] * count)
    )
    return Workload(name, [prefix + tokens for tokens in own], [output_len] * count, n)


TOPICS = ["the tides", "a compass", "photosynthesis", "the printing press"]
TOPICS += ["a suspension bridge", "yeast", "the seasons", "a sundial"]
QUESTIONS = [
    "What is {} and how does it work?",
    "Explain {} to a child of six, with one example from daily life.",
    "Write a short poem about {}.",
    "I have to give a talk on {} tomorrow. Which three points should I make, and in what order? "
    "Say for each point why it matters to people who have never heard of the subject before.",
]


LENGTHS = ["", *(f" Use {n} sentences." for n in ("two", "three", "five", "six", "ten"))]
LENGTHS += [" Be brief.", " Take your time."]
# Name -> number of prompts, (shortest, longest) output.
CHATS = {"chat32": (32, (16, 256)), "chats": (2000, (64, 256))}


def chat_workload(name: str, tokenizer: Any, num_prompts: int | None = None) -> Workload:
    """Makes chats with the model's chat template and random output lengths between two bounds.

    Args:
        name: a key of CHATS.
        tokenizer: a transformers tokenizer.
        num_prompts: replaces the number in CHATS. The workload's name then states the number.

    Raises:
        ValueError: the model has no chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"the workload {name} needs a model with a chat template: give --model")
    count, bounds = CHATS[name]
    if num_prompts not in (None, count):
        count = num_prompts
        name = f"{count} chats ({bounds[0]}:{bounds[1]})"
    pairs = [f"{a} or {b}" for a in TOPICS for b in TOPICS if a != b]
    questions = product(LENGTHS, [*TOPICS, *pairs], QUESTIONS)
    texts = [question.format(topic) + length for length, topic, question in questions]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in (texts * (1 + count // len(texts)))[:count]
    ]
    rng = random.Random(0)
    return Workload(name, prompts, [rng.randint(*bounds) for _ in prompts])
