"""Trains a tiny model with TRL's GRPOTrainer, which generates with vLLM in its own process.

Arguments: a checkpoint in float32, a folder for TRL's output, and a JSON list with settings of
GRPOConfig for each training. Prints the mean rewards that TRL logs, and about the ratios of the
tokens' probabilities in the trainer and in the engine what ``WatchedTrainer`` describes.
"""

import json
import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

WORDS = ["a", "hello", "the cat", "one two three"]
VOWELS = set("aeiou")


def share_of_vowels(completions: list[str], **kwargs) -> list[float]:
    return [sum(c in VOWELS for c in text) / max(len(text), 1) for text in completions]


def kept_mass(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """The probability of the smallest set of most likely tokens that has at least ``top_p``."""
    sums = probabilities.double().sort(descending=True).values.cumsum(-1)
    return sums.gather(-1, (sums < top_p - 1e-6).sum(-1, keepdim=True)).squeeze(-1)


def probabilities_of(model, batch, temperature: float) -> torch.Tensor:
    """The model's probabilities for each token of the completions, [tokens, vocabulary]."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits
    logits = logits[:, -batch["completion_ids"].size(1) - 1 : -1].float()
    return (logits / temperature).softmax(-1)[batch["completion_mask"].bool()]


class WatchedTrainer(GRPOTrainer):
    """Compares the importance ratios of each generation with what they should be.

    Attributes:
        old_model: a model with the weights of the checkpoint.
        ratios: for each generation the extremes of TRL's ratios, the extremes of what they should
            be, the largest relative error, and the largest distance from 1 of the ratios that
            ``old_model`` would have.
    """

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        mask = batch["completion_mask"].bool()
        ratio = batch["importance_sampling_ratio"][mask]
        expected = kept_mass(probabilities_of(self.model, batch, self.temperature), self.top_p)
        old = probabilities_of(self.old_model, batch, self.temperature)
        old = old.gather(-1, batch["completion_ids"][mask].unsqueeze(-1)).squeeze(-1)
        old_ratio = old / batch["sampling_per_token_logps"][mask].exp()
        self.ratios.append(
            {
                "min": ratio.min().item(),
                "max": ratio.max().item(),
                "min_expected": expected.min().item(),
                "max_expected": expected.max().item(),
                "error": (ratio / expected - 1).abs().max().item(),
                "old": (old_ratio - 1).abs().max().item(),
            }
        )
        return batch


def main() -> None:
    path, folder, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    results = []
    for setting in settings:
        config = GRPOConfig(
            output_dir=folder,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_importance_sampling_mode="token_truncate",
            vllm_importance_sampling_clip_max=100.0,
            vllm_max_model_length=64,
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=12,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **setting,
        )
        trainer = WatchedTrainer(
            model=path,
            reward_funcs=share_of_vowels,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": WORDS * 16}),
        )
        trainer.ratios = []
        trainer.old_model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        trainer.train()
        rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
        results.append({"rewards": rewards, "ratios": trainer.ratios})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
