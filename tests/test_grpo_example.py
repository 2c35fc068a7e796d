"""``examples/grpo.py`` improves the model."""

import runpy
import statistics

import pytest
import torch

from benchmarks.report import ROOT
from nanovllm import LLM, CompletionOutput, RequestOutput, SamplingParams


@pytest.fixture(scope="module")
def grpo():
    return runpy.run_path(str(ROOT / "examples" / "grpo.py"))


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reward_rises(grpo, seed):
    """It has risen before half of the steps."""
    num_steps = 5
    rewards, before, after = grpo["train"](grpo["fetch_smollm2"](), seed, num_steps)
    assert len(rewards) == num_steps
    assert statistics.mean(rewards[-4:]) > 0.2 + rewards[0]
    assert before < 0.35 and after > 0.25 + before


def test_a_reward_needs_the_capital_and_an_end(grpo):
    completions = [
        CompletionOutput(0, "The capital of Peru is Lima.", [5], finish_reason="stop"),
        CompletionOutput(1, "The capital of Peru is Lima, which", [5], finish_reason="length"),
        CompletionOutput(2, "The capital of Peru is Quito.", [5], finish_reason="stop"),
    ]
    output = RequestOutput("0", None, [5], outputs=completions)
    assert grpo["rewards_of"]([output], ["Peru"]).tolist() == [[1, 0, 0]]


def test_the_loss_of_rollouts_with_the_trainers_weights(grpo, tiny_models, model_path):
    """With ratios of 1 the loss is minus the mean advantage of the tokens, and its gradient makes
    the completion with the reward more likely."""
    model = tiny_models.load("qwen3")
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.0])
    stops = [*range(400, 512)]  # tokens of which some completions soon have one
    params = SamplingParams(n=4, max_tokens=8, logprobs=0, seed=1, stop_token_ids=stops)
    with LLM(model_path, max_model_len=64, device="cpu", logprobs_mode="processed_logprobs") as llm:
        (output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    lengths = torch.tensor([len(completion.token_ids) for completion in output.outputs])
    assert len(set(lengths.tolist())) > 1

    loss, difference = grpo["grpo_loss"](model, output, rewards)
    advantages = (rewards - rewards.mean()) / rewards.std()
    expected = -(advantages * lengths).sum() / lengths.sum()
    assert difference < 1e-3 and loss.item() == pytest.approx(expected.item(), rel=1e-2)

    def logprob_of_the_rewarded() -> float:
        tokens = torch.tensor([output.prompt_token_ids + output.outputs[1].token_ids])
        logprobs = model(tokens).logits[:, 2:-1].log_softmax(-1)
        return logprobs.gather(-1, tokens[:, 3:, None]).sum().item()

    before = logprob_of_the_rewarded()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=1e-4).step()
    assert logprob_of_the_rewarded() > before


def test_the_plot(grpo, tmp_path):
    pytest.importorskip("matplotlib")
    grpo["plot"]({0: ([0.1, 0.5], 0.2, 0.6), 1: ([0.2, 0.4], 0.2, 0.5)}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
