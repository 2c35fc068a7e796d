"""Tokens of the last step, put where the next inputs refer to them."""

import pytest
import torch

from nanovllm.kernels.sampling.sampled_tokens import fill_in_sampled


@pytest.mark.parametrize("num_tokens", [1, 3, 256, 300])
def test_placeholders_become_the_tokens_that_they_stand_for(num_tokens, device):
    sampled = torch.randint(0, 2**20, (512,))
    sampled[5] = -1  # no token was allowed
    input_ids = torch.randint(-512, 2**20, (num_tokens,), dtype=torch.int32)
    input_ids[0] = -6
    expected = [i if i >= 0 else max(int(sampled[-1 - i]), 0) for i in input_ids.tolist()]
    found = input_ids.to(device)
    fill_in_sampled(found, sampled.to(device))
    assert found.dtype == torch.int32 and found.tolist() == expected
    assert expected[0] == 0
