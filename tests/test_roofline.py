"""The roofline of mixtures of experts."""

import pytest
import torch

from benchmarks.roofline import num_experts_read
from nanovllm.models.model_config import MLPSpec, MoESpec


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_the_number_of_experts_read(num_tokens):
    """The mean over random routings, all of them equally probable."""
    chosen = torch.rand(2000, num_tokens, 16).argsort(-1)[..., :3].flatten(1)
    read = torch.zeros(2000, 16).scatter_(1, chosen, 1.0).sum(-1).mean()
    assert num_experts_read(MoESpec(16, 3, 8), num_tokens) == pytest.approx(float(read), rel=0.02)
    assert num_experts_read(MLPSpec(8), num_tokens) == 1
