import pytest
import torch

from nanovllm.kernels.sampling.logprobs import top_logprobs_reference, top_logprobs_triton


@pytest.fixture(params=[top_logprobs_triton, top_logprobs_reference], ids=["triton", "reference"])
def top_logprobs(request):
    return request.param


@pytest.mark.parametrize("k", [0, 1, 5, 20])
@pytest.mark.parametrize("vocab_size", [20, 128, 5000])
def test_matches_log_softmax_in_fp64(k, vocab_size, top_logprobs, device):
    logits = torch.randn(7, vocab_size, device=device) * 5
    tokens = torch.randint(vocab_size, (7,), device=device)
    ids, logprobs, ranks = top_logprobs(logits, tokens, k)
    exact = logits.double().log_softmax(-1)
    assert ids.shape == logprobs.shape == (7, 1 + k) and ranks.shape == (7,)
    assert torch.equal(ids[:, 0], tokens)
    assert torch.equal(ids[:, 1:], exact.topk(k).indices)
    torch.testing.assert_close(logprobs.double(), exact.gather(1, ids), atol=1e-5, rtol=1e-5)
    order = exact.argsort(descending=True)
    assert torch.equal(ranks, (order == tokens[:, None]).int().argmax(1) + 1)


def test_more_tokens_than_groups(top_logprobs, device):
    """Whole distributions too: 3 groups cannot vouch for the 300 best."""
    logits = torch.randn(2, 300, device=device)
    ids, logprobs, _ = top_logprobs(logits, torch.tensor([0, 299], device=device), 300)
    assert torch.equal(ids[:, 1:].sort().values, torch.arange(300, device=device).expand(2, -1))
    torch.testing.assert_close(logprobs[:, 1:].exp().sum(-1), torch.ones(2, device=device))


def test_the_best_of_one_group_are_all_found(top_logprobs, device):
    logits = torch.zeros(1, 2000, device=device)
    logits[0, 640:660] = torch.arange(20.0, 0.0, -1, device=device)
    ids, _, _ = top_logprobs(logits, torch.tensor([3], device=device), 20)
    assert ids[0, 1:].tolist() == list(range(640, 660))


def test_half_precision_and_extreme_logits(dtype, top_logprobs, device):
    logits = torch.full((1, 700), -300.0, device=device, dtype=dtype)
    logits[0, 5], logits[0, 600] = 300.0, 298.0
    ids, logprobs, ranks = top_logprobs(logits, torch.tensor([600], device=device), 2)
    assert ids.tolist() == [[600, 5, 600]] and ranks.tolist() == [2]
    exact = logits.double().log_softmax(-1).gather(1, ids)
    torch.testing.assert_close(logprobs.double(), exact, atol=1e-5, rtol=1e-5)


def test_masked_tokens_count_for_nothing(top_logprobs, device):
    logits = torch.full((1, 1000), -torch.inf, device=device)
    logits[0, [7, 900]] = torch.tensor([0.0, 1.0], device=device)
    ids, logprobs, ranks = top_logprobs(logits, torch.tensor([7], device=device), 2)
    assert ids.tolist() == [[7, 900, 7]] and ranks.tolist() == [2]
    assert logprobs[0, 1:].exp().sum().item() == pytest.approx(1, abs=1e-6)
