"""Reinforcement learning in plain PyTorch, in minutes on a CPU: ``python examples/grpo.py``.

SmolLM2-135M-Instruct learns to answer a question about a capital correctly and in one short
sentence. A step of the training, by GRPO (Shao et al. 2024, arXiv:2402.03300):

1. The engine generates several completions of a few questions.
2. Each completion gets a reward.
3. PyTorch takes a gradient step with the model in transformers.
4. The engine loads the new weights.

Before and after, the model is asked about countries that it is not trained on.
``--seeds 0 1 2 --plot docs/grpo.png`` trains three times, and plots the rewards. On a machine that
other programs use too, ``OMP_NUM_THREADS=1`` makes it faster.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

from nanovllm import LLM, RequestOutput, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1]))  # the root of the clone
from example import fetch_smollm2

TRAINED = {
    "France": "Paris", "Japan": "Tokyo", "Peru": "Lima", "Kenya": "Nairobi", "Norway": "Oslo",
    "Egypt": "Cairo", "Greece": "Athens", "Poland": "Warsaw", "Portugal": "Lisbon",
    "Chile": "Santiago", "Ireland": "Dublin", "Finland": "Helsinki", "Hungary": "Budapest",
    "Iraq": "Baghdad", "Lebanon": "Beirut", "Russia": "Moscow", "Spain": "Madrid",
    "Turkey": "Ankara", "Ukraine": "Kyiv", "Venezuela": "Caracas", "Argentina": "Buenos Aires",
    "Canada": "Ottawa", "Colombia": "Bogot", "Denmark": "Copenhagen", "England": "London",
    "Ethiopia": "Addis Ababa", "Iran": "Tehran", "Libya": "Tripoli", "Nepal": "Kathmandu",
    "Senegal": "Dakar", "South Korea": "Seoul", "Zimbabwe": "Harare",
}  # fmt: skip
HELD_OUT = {
    "Germany": "Berlin", "Italy": "Rome", "China": "Beijing", "Cuba": "Havana", "Austria": "Vienna",
    "Belgium": "Brussels", "Thailand": "Bangkok", "Sweden": "Stockholm", "Syria": "Damascus",
    "Afghanistan": "Kabul", "Bulgaria": "Sofia", "Jordan": "Amman", "Mexico": "Mexico City",
    "Romania": "Bucharest", "Vietnam": "Hanoi", "Ecuador": "Quito",
}  # fmt: skip
CAPITALS = TRAINED | HELD_OUT

NUM_STEPS = 12
QUESTIONS_PER_STEP = 4
COMPLETIONS_PER_QUESTION = 8
MAX_TOKENS = 12
LEARNING_RATE = 2e-5
CLIP = 0.2  # a ratio that has moved further from 1 gets no more gradient
MIN_STD = 1e-4  # a group whose rewards are equal has advantages of 0


def generate(llm: LLM, countries: Sequence[str], seed: int) -> list[RequestOutput]:
    """Asks for the capitals. Each output has a group of COMPLETIONS_PER_QUESTION completions."""
    conversations = [
        [
            {"role": "system", "content": ""},  # or the template adds one
            {"role": "user", "content": f"What is the capital of {country}?"},
        ]
        for country in countries
    ]
    params = [
        SamplingParams(
            n=COMPLETIONS_PER_QUESTION,
            temperature=1,
            max_tokens=MAX_TOKENS,
            logprobs=0,  # the log-probability of the sampled token, and of no others
            seed=seed + i,
        )
        for i in range(len(countries))
    ]
    return llm.chat(conversations, params, use_tqdm=False)


def rewards_of(outputs: Sequence[RequestOutput], countries: Sequence[str]) -> torch.Tensor:
    """Returns 1 for each completion that names the capital and ends before MAX_TOKENS, and 0 for
    the others. The shape is [questions, completions]."""
    return torch.tensor(
        [
            [
                float(CAPITALS[country] in completion.text and completion.finish_reason == "stop")
                for completion in output.outputs
            ]
            for output, country in zip(outputs, countries, strict=True)
        ]
    )


def grpo_loss(
    model: PreTrainedModel, output: RequestOutput, rewards: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Returns the loss of a group of completions, and the largest difference between 1 and a
    token's importance ratio.

    Args:
        rewards: [completions]
    """
    prompt = output.prompt_token_ids
    sequences = [torch.tensor(prompt + completion.token_ids) for completion in output.outputs]
    old_logprobs = [
        torch.tensor([at[token].logprob for at, token in zip(c.logprobs, c.token_ids, strict=True)])
        for c in output.outputs
    ]
    tokens = pad_sequence(sequences, batch_first=True)  # [completions, positions]
    old = pad_sequence(old_logprobs, batch_first=True)  # [completions, generated positions]
    lengths = torch.tensor([len(logprobs) for logprobs in old_logprobs])
    mask = torch.arange(old.size(1)) < lengths[:, None]

    # Padding is on the right, where causal attention hides it from all other tokens.
    logits = model(tokens, logits_to_keep=old.size(1) + 1).logits[:, :-1]
    generated = tokens[:, len(prompt) :, None]
    new = logits.log_softmax(-1).gather(-1, generated).squeeze(-1)

    # A completion's advantage is its reward compared with the others of the group.
    advantages = ((rewards - rewards.mean()) / (rewards.std() + MIN_STD))[:, None]
    # The ratios are 1 up to rounding, because the engine generated with this model's weights. With
    # several gradient steps for the same completions they would move away from 1.
    ratios = torch.where(mask, new - old, 0).exp()
    gains = torch.minimum(ratios * advantages, ratios.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -gains[mask].mean(), (ratios - 1).abs().max().item()


def train(path: Path, seed: int, num_steps: int = NUM_STEPS) -> tuple[list[float], float, float]:
    """Trains the model in a GGUF file.

    Returns:
        The mean reward of each step, and those of the held-out countries before and after.
    """
    choices = random.Random(seed)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0)
    rewards_by_step = []
    # The log-probabilities are those of the distribution that the tokens are sampled from.
    with LLM(path, dtype="float32", max_model_len=64, logprobs_mode="processed_logprobs") as llm:

        def held_out_reward() -> float:
            return rewards_of(generate(llm, [*HELD_OUT], seed), [*HELD_OUT]).mean().item()

        before = held_out_reward()
        for step in range(num_steps):
            start = perf_counter()
            countries = choices.sample([*TRAINED], QUESTIONS_PER_STEP)
            outputs = generate(llm, countries, seed=choices.getrandbits(32))
            rewards = rewards_of(outputs, countries)
            generated = perf_counter()

            optimizer.zero_grad()
            differences = []
            for output, group_rewards in zip(outputs, rewards, strict=True):
                loss, difference = grpo_loss(model, output, group_rewards)
                (loss / len(outputs)).backward()
                differences.append(difference)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            trained = perf_counter()

            llm.load_weights(model.named_parameters())
            rewards_by_step.append(rewards.mean().item())
            print(
                f"seed {seed}, step {step + 1}: reward {rewards_by_step[-1]:.2f}, "
                f"ratios within {max(differences):.0e} of 1; "
                f"{generated - start:.1f} s to generate, {trained - generated:.1f} s to train, "
                f"{perf_counter() - trained:.1f} s to load the weights",
                flush=True,
            )
        after = held_out_reward()
    print(f"seed {seed}: reward for held-out countries {before:.2f} before, {after:.2f} after")
    return rewards_by_step, before, after


def plot(results: dict[int, tuple[list[float], float, float]], path: Path) -> None:
    """Draws the rewards of each seed: by step, and for the held-out countries."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), width_ratios=(3, 2), sharey=True)
    for seed, (rewards, before, after) in results.items():
        (line,) = left.plot(range(1, len(rewards) + 1), rewards, alpha=0.8, label=f"seed {seed}")
        right.plot(["before", "after"], [before, after], "o-", color=line.get_color())
    left.set(title="Countries trained on", xlabel="step", ylabel="mean reward", ylim=(0, 1.05))
    right.set(title="Held-out countries")
    right.margins(x=0.3)
    left.legend(loc="lower right")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--plot", type=Path, help="the PNG file to write (needs matplotlib)")
    args = parser.parse_args()
    results = {seed: train(fetch_smollm2(), seed, args.steps) for seed in args.seeds}
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
