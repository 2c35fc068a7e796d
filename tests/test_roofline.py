"""What the benchmarks state about mixtures of experts and the KV cache."""

import pytest
import torch

from benchmarks.experts import count_experts
from benchmarks.roofline import num_experts_read, roofline_seconds
from benchmarks.workloads import Workload
from nanovllm import LLM
from nanovllm.checkpoints.checkpoint import open_checkpoint
from nanovllm.models.model_config import MLPSpec, MoESpec
from tests.tiny_models import TinyModels


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_the_number_of_experts_read(num_tokens):
    """The mean over random routings, all of them equally probable."""
    chosen = torch.rand(2000, num_tokens, 16).argsort(-1)[..., :3].flatten(1)
    read = torch.zeros(2000, 16).scatter_(1, chosen, 1.0).sum(-1).mean()
    assert num_experts_read(MoESpec(16, 3, 8), num_tokens) == pytest.approx(float(read), rel=0.02)
    assert num_experts_read(MLPSpec(8), num_tokens) == 1


def test_experts_of_decode_steps_are_counted(tiny_models: TinyModels):
    """With one sequence every layer reads ``top_k`` experts, with more at most all."""
    settings = {"device": "cpu", "load_format": "dummy", "num_kvcache_blocks": 8}
    with LLM(tiny_models.path("qwen3-moe"), **settings) as llm:  # type: ignore[arg-type]
        assert count_experts(llm, 1) == 2
        assert 2 < count_experts(llm, 3) < 6
        assert count_experts(llm, 8) is None  # one block each, and another one to grow


def test_a_quantized_cache_is_read_in_fewer_bytes(tiny_models: TinyModels):
    """Where the bandwidth is the limit, the steps of long contexts take half the time."""
    model = open_checkpoint(str(tiny_models.path("qwen3"))).config
    seconds = []
    for num_tokens in (1, 10**7):  # with one token, almost all bytes are weights
        workload = Workload("one", [range(num_tokens)], [2])  # type: ignore[list-item]
        plain, quantized = (
            roofline_seconds(model, workload, 1.0, 1e30, quantizes_kv=q) for q in (False, True)
        )
        seconds.append(plain / quantized)
    assert seconds[0] == pytest.approx(1, rel=0.01)
    assert seconds[1] == pytest.approx(2 * 16 / (16 + 4), rel=0.01)


def test_fp8_weights_have_half_of_the_bytes_and_of_the_matmul_time(tiny_models: TinyModels):
    """All but the LM head."""
    model = open_checkpoint(str(tiny_models.path("qwen3"))).config
    head = model.vocab_size * model.hidden_size
    for prompt, out, bandwidth, rate in ((1, 2, 1.0, 1e30), (8, 1, 1e30, 1.0)):
        workload = Workload("one", [range(prompt)], [out])  # type: ignore[list-item]
        plain, fp8 = (
            roofline_seconds(model, workload, bandwidth, rate, has_fp8=has) for has in (False, True)
        )
        # The head has two bytes, or two FLOP, for each number.
        assert fp8 - 2 * head == pytest.approx((plain - 2 * head) / 2, rel=0.05)
