"""MXFP4 weights of experts, against transformers' own dequantisation."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoints.weights import fill_with_dummy_weights
from nanovllm.kernels.moe.mxfp4 import dequantize_mxfp4, fill_mxfp4, unpack_mxfp4
from nanovllm.layers.moe import Experts
from tests.tiny_models import TinyModels


def random_mxfp4(*shape: int) -> dict[str, torch.Tensor]:
    """Blocks and scales of random weights with magnitudes from 0 to 1.5."""
    blocks = torch.randint(0, 256, (*shape[:-1], shape[-1] // 32, 16), dtype=torch.uint8)
    scales = torch.randint(122, 126, blocks.shape[:-1]).to(torch.uint8)
    return {"blocks": blocks, "scales": scales}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dequantized_as_in_transformers(dtype):
    """Which returns the transpose."""
    packed = random_mxfp4(3, 8, 96)
    expected = convert_moe_packed_tensors(**packed, dtype=dtype).transpose(1, 2)
    assert torch.equal(dequantize_mxfp4(**packed, dtype=dtype), expected)


def write_mxfp4(source: Path, target: Path) -> dict[str, torch.Tensor]:
    """Writes a gpt-oss checkpoint with random experts in MXFP4, and the other weights of
    ``source``. Returns its weights as transformers holds them, dequantised by transformers."""
    config = json.loads((source / "config.json").read_text("utf-8"))
    target.mkdir()
    (target / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}})
    )
    dense, packed = load_file(source / "model.safetensors"), {}
    for name, tensor in dense.items():
        if name.endswith(("gate_up_proj", "down_proj")):  # [experts, in, out]
            parts = random_mxfp4(tensor.size(0), tensor.size(2), tensor.size(1))
            packed |= {f"{name}_{part}": value for part, value in parts.items()}
            dense[name] = convert_moe_packed_tensors(**parts, dtype=torch.float32)
        else:
            packed[name] = tensor
    save_file(packed, target / "model.safetensors")
    return dense


def test_tokens_equal_transformers(tiny_models: TinyModels, tmp_path: Path):
    source = tiny_models.path("gpt-oss")
    dense = write_mxfp4(source, tmp_path / "mxfp4")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    model.load_state_dict(dense)
    prompt, num_tokens = [*range(3, 40)], 12
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    with LLM(tmp_path / "mxfp4", device="cpu", num_kvcache_blocks=4) as llm:
        tokens = llm.generate([prompt], params, use_tqdm=False)[0]["token_ids"]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == tokens


def test_other_quantizations_are_refused(tiny_models: TinyModels, tmp_path: Path):
    for name, method in (("gpt-oss", "gptq"), ("qwen3-moe", "mxfp4")):
        config = json.loads((tiny_models.path(name) / "config.json").read_text("utf-8"))
        config["quantization_config"] = {"quant_method": method}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=f"'{method}' quantisation is not supported"):
            LLM(tmp_path, device="cpu", load_format="dummy")


def test_dummy_weights():
    """Of about the size of those in the model's dtype, none of them NaN."""
    with torch.device("meta"):
        experts = Experts(128, 4, 2, 64, False, None, 1.0, True, mxfp4=True)
    experts.to_empty(device="cpu")
    for param in experts.parameters():
        param.fill_with_dummy_weights = fill_mxfp4
    fill_with_dummy_weights(experts, 0)
    values = unpack_mxfp4(
        experts.gate_up_proj_blocks, experts.gate_up_proj_scales, 128, torch.float32
    )
    assert 0.01 < values.std() < 0.04 and abs(values.mean()) < 0.002


@pytest.mark.parametrize(
    ("blocks", "scales"),
    [
        (torch.zeros(4, 64, 2, 16, dtype=torch.uint8), torch.zeros(4, 64, 3, dtype=torch.uint8)),
        (torch.zeros(4, 64, 2, 16), torch.zeros(4, 64, 2, dtype=torch.uint8)),
        (torch.zeros(4, dtype=torch.uint8), torch.zeros(4, 64, 2, dtype=torch.uint8)),
    ],
    ids=["more scales than blocks", "float blocks", "one dimension"],
)
def test_malformed_tensors_are_refused(blocks, scales):
    with pytest.raises(ValueError, match="MXFP4 needs uint8 blocks of 16 bytes"):
        dequantize_mxfp4(blocks, scales)
