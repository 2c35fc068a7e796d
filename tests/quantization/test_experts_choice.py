"""Which kernels the experts of a mixture use."""

import pytest
import torch
from torch import nn

from nanovllm.kernels.moe.grouped import experts_grouped
from nanovllm.kernels.moe.mxfp4_gemv import experts_gemv_mxfp4
from nanovllm.quantization.base import use_batch_invariance
from nanovllm.quantization.experts import new_expert_weights


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_only_the_default_mode_has_a_kernel_for_few_tokens_in_mxfp4(batch_invariant):
    """It sums in another order than the grouped GEMMs."""
    with torch.device("meta"), use_batch_invariance(batch_invariant):
        weights = new_expert_weights(nn.Module(), 7.0, 1.7, True, mxfp4=True)
    for num_tokens, few in ((1, True), (4, True), (5, False), (4096, False)):
        kernel = next(kernel for rows, kernel in weights.kernels if num_tokens in rows)
        expected = experts_gemv_mxfp4 if few and not batch_invariant else experts_grouped
        assert kernel is expected, num_tokens
