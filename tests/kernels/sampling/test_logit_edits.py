"""Changes to logits against transformers' processors and plain loops."""

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from nanovllm.kernels.sampling.logit_edits import (
    add_bias,
    apply_mask_reference,
    apply_mask_triton,
    penalise,
)

VOCAB_SIZE = 301


def penalise_rows(logits, penalties, prompts, completions):
    """``penalise`` for one history a row."""
    device = logits.device
    history = [
        (token, generated)
        for prompt, completion in zip(prompts, completions, strict=True)
        for tokens, generated in ((prompt, False), (completion, True))
        for token in tokens
    ]
    lens = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]
    columns = (range(len(lens)), penalties, lens, *zip(*history, strict=True))
    penalise(logits, *(torch.tensor(column, device=device) for column in columns))


def histories(seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and completions of 4 rows with many repeated tokens."""
    generator = torch.Generator().manual_seed(seed)
    lens = [(1, 0), (30, 1), (7, 200), (50, 50)]
    draw = lambda n: torch.randint(0, 40, (n,), generator=generator).tolist()  # noqa: E731
    return [draw(a) for a, _ in lens], [draw(b) for _, b in lens]


@pytest.mark.parametrize("penalty", [0.7, 1.3])
def test_repetition_penalty_is_that_of_transformers(penalty, device):
    logits = torch.randn(4, VOCAB_SIZE, device=device) * 4
    prompts, completions = histories(1)
    expected = logits.clone()
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    for row in range(4):
        ids = torch.tensor([prompts[row] + completions[row]], device=device)
        expected[row] = processor(ids, logits[row : row + 1].clone())[0]
    penalise_rows(logits, [[penalty, 0.0, 0.0]] * 4, prompts, completions)
    torch.testing.assert_close(logits, expected)


def test_frequency_and_presence_count_generated_tokens_only(device):
    logits = torch.randn(4, VOCAB_SIZE, device=device)
    prompts, completions = histories(2)
    penalties = [[1.0, 0.5, 0.25], [1.5, 0.0, -1.0], [1.0, -0.3, 0.0], [1.2, 0.1, 0.2]]
    expected = logits.clone()
    for row, (repetition, frequency, presence) in enumerate(penalties):
        for token in set(prompts[row] + completions[row]):
            value = expected[row, token].item()
            value = value / repetition if value > 0 else value * repetition
            count = completions[row].count(token)
            expected[row, token] = value - frequency * count - presence * (count > 0)
    penalise_rows(logits, penalties, prompts, completions)
    torch.testing.assert_close(logits, expected)


def test_penalties_leave_other_rows_alone(device):
    logits = torch.randn(4, VOCAB_SIZE, device=device)
    before = logits.clone()
    prompts, completions = histories(3)
    penalties = [[1.0, 0.0, 0.0]] * 3 + [[2.0, 1.0, 1.0]]
    penalise_rows(logits, penalties, [[], [], [], prompts[3]], [[], [], [], completions[3]])
    assert torch.equal(logits[:3], before[:3]) and not torch.equal(logits[3], before[3])


def test_forbidden_tokens_stay_forbidden(device):
    logits = torch.full((1, VOCAB_SIZE), -torch.inf, device=device)
    penalise_rows(logits, [[1.5, 1.0, 1.0]], [[1, 2]], [[2, 3, 3]])
    assert (logits == -torch.inf).all()


def test_bias_adds_to_single_logits(device):
    logits = torch.zeros(3, VOCAB_SIZE, device=device)
    rows, tokens = (torch.tensor(x, device=device) for x in ([0, 2, 2], [300, 0, 300]))
    add_bias(logits, rows, tokens, torch.tensor([1.5, -2.0, -torch.inf], device=device))
    expected = torch.zeros(3, VOCAB_SIZE)
    expected[0, 300], expected[2, 0], expected[2, 300] = 1.5, -2.0, -torch.inf
    assert torch.equal(logits.cpu(), expected)


@pytest.mark.parametrize("apply_mask", [apply_mask_triton, apply_mask_reference])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 301, 5000])
def test_mask_forbids_tokens_whose_bit_is_zero(apply_mask, vocab_size, device):
    allowed = torch.rand(3, vocab_size) < 0.5
    words = -(-vocab_size // 32)
    bits = torch.zeros(3, words * 32, dtype=torch.int64)
    bits[:, :vocab_size] = allowed
    weights = 1 << torch.arange(32)
    mask = (bits.view(3, words, 32) * weights).sum(-1).to(torch.int32)  # bit 31 is the sign
    logits = torch.randn(5, vocab_size, device=device)
    expected = logits.cpu().clone()
    for row, keep in zip([4, 0, 2], allowed, strict=True):
        expected[row, ~keep] = -torch.inf
    rows = torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
    apply_mask(logits, rows, mask.to(device))
    assert torch.equal(logits.cpu(), expected)
