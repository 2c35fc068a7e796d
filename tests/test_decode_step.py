"""benchmarks/decode_step.py leaves out what it says, and only while it says so."""

import pytest

from benchmarks.decode_step import decode_inputs, parts_of, without
from nanovllm import LLM, SamplingParams
from nanovllm.layers import moe
from nanovllm.layers.attention import Attention
from nanovllm.models.decoder import DecoderMLP


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe-all"])
def test_steps_run_without_a_part(family, tiny_models):
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    with LLM(tiny_models.path(family), device="cpu", num_kvcache_blocks=16) as llm:
        with pytest.raises(SystemExit, match="use a GPU"):
            decode_inputs(llm)
        whole = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0]["token_ids"]
        parts = parts_of(llm)
        assert parts == ["attention", *(["MLP"] if family == "qwen3" else ["mixture", "routing"])]
        forwards = [owner.forward for owner in (Attention, DecoderMLP, moe.MoE)], moe.route
        for part in parts:
            with without(part):
                tokens = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0]["token_ids"]
            assert len(tokens) == 6 and (tokens != whole or part == "routing")
        assert ([o.forward for o in (Attention, DecoderMLP, moe.MoE)], moe.route) == forwards
        assert llm.generate([[5, 6, 7]], params, use_tqdm=False)[0]["token_ids"] == whole
