"""The decoder's ways to the same result: all outputs or some, sums apart or in place."""

import json
from dataclasses import replace

import pytest
import torch

from nanovllm.checkpoints.checkpoint import open_checkpoint
from nanovllm.checkpoints.weights import load_model
from nanovllm.engine.cuda_graphs import skip_middle_layers
from nanovllm.kernels.attention.torch_backend import TorchAttention
from nanovllm.layers.attention import Attention
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.model_config import LayerSpec
from nanovllm.quantization import unquantized
from nanovllm.quantization.unquantized import ANY, Choice
from nanovllm.utils.context import Context, step_context
from nanovllm.utils.rope import RopeConfig
from tests.tiny_models import BASE, CONFIGS, VOCAB_SIZE, TinyModels

LENS = [5, 1, 9]


@pytest.fixture(params=[1, 3], ids=["one-layer", "layers"])
def model(request, tmp_path) -> torch.nn.Module:
    config = CONFIGS["qwen3"][0](**{**BASE, "num_hidden_layers": request.param})
    TinyModels.build(config).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    model = DecoderForCausalLM(checkpoint.config, 64)
    load_model(model, checkpoint.tensors())
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.backend = TorchAttention()
    return model


def run(model: torch.nn.Module, has_output: list[bool] | None = None) -> torch.Tensor:
    """Of prompts of LENS: all outputs, or the last ones of some."""
    bounds = torch.tensor([0, *LENS]).cumsum(0).int()
    outputs = {}
    if has_output is not None:
        outputs["output_indices"] = (bounds[1:] - 1)[torch.tensor(has_output)]
        outputs["cu_num_outputs"] = torch.tensor([0, *has_output]).cumsum(0).int()
    context = Context(
        is_prefill=True,
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        max_seqlen_q=max(LENS),
        max_seqlen_k=max(LENS),
        **outputs,
    )
    ids = torch.arange(sum(LENS)) * 7 % VOCAB_SIZE
    with torch.inference_mode(), step_context(context):
        return model(ids, torch.cat([torch.arange(n) for n in LENS]))


@pytest.mark.parametrize(
    "has_output", [[True, True, True], [True, False, True], [False, True, False]]
)
def test_some_outputs_are_those_among_all(model, has_output):
    rows = (torch.tensor(LENS).cumsum(0) - 1)[torch.tensor(has_output)]
    torch.testing.assert_close(run(model, has_output), run(model)[rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("has_output", [None, [True, False, True]], ids=["all", "some"])
def test_sums_in_place_change_nothing_else(model, has_output, monkeypatch):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected, calls = run(model, has_output), []
    always = Choice(ANY, lambda *args: calls.append(args) or True, unquantized._addmm)
    monkeypatch.setitem(unquantized.KERNELS, "matmul_add", (always,))
    torch.testing.assert_close(run(model, has_output), expected, rtol=1e-4, atol=1e-4)
    assert len(calls) == 2 * len(model.model.layers)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_few_layers_stand_for_all(tmp_path):
    """Also while another thread goes through the parameters: they stay."""
    config = CONFIGS["qwen3"][0](**{**BASE, "num_hidden_layers": 5})
    TinyModels.build(config).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    model = DecoderForCausalLM(checkpoint.config, 64)
    load_model(model, checkpoint.tensors())
    ran = []
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.attn.backend = TorchAttention()
        layer.register_forward_hook(lambda *_, i=i: ran.append(i))
    names = [*dict(model.named_parameters())]
    with skip_middle_layers(model.model):
        run(model)
        assert names == [*dict(model.named_parameters())]
    run(model)
    assert ran == [0, 1, 4, 0, 1, 2, 3, 4]
    for i in (2, 3):
        attention = model.model.layers[i].self_attn.attn
        attention.params = attention.params._replace(window=8)
    ran.clear()
    with skip_middle_layers(model.model):
        run(model)
    assert ran == [0, 1, 3, 4]


def test_layers_may_differ_in_all_that_a_layer_spec_says(tmp_path):
    """Each has the shapes of its own spec, and layers of equal RoPE share its table."""
    raw = {**BASE, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = open_checkpoint(str(tmp_path)).config
    plain = config.layers[0]
    biased = LayerSpec(
        replace(plain.attention, qk_norm="head", qkv_bias=True, rope=RopeConfig((1.0,) * 8)),
        replace(plain.mlp, intermediate_size=96, bias=True),
    )
    nope = replace(plain, attention=replace(plain.attention, o_bias=True, rope=None))
    model = DecoderForCausalLM(replace(config, layers=(plain, biased, nope, plain)), 64)
    first, second, third, last = model.model.layers
    columns = [layer.mlp.down_proj.weight.size(1) for layer in model.model.layers]
    assert columns == [128, 96, 128, 128]
    names = [{*dict(layer.named_parameters())} for layer in model.model.layers]
    assert names[0] == names[3]
    assert names[1] - names[0] == {
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
        "self_attn.qkv_proj.bias",
        "mlp.gate_up_proj.bias",
        "mlp.down_proj.bias",
    }
    assert names[2] - names[0] == {"self_attn.o_proj.bias"}
    tables = [layer.self_attn.rotary_emb.cos_sin_cache for layer in (first, second, third)]
    assert last.self_attn.rotary_emb is first.self_attn.rotary_emb
    assert not torch.equal(tables[0], tables[1])
    assert tables[2].tolist() == [[1.0] * 8 + [0.0] * 8] * 64
