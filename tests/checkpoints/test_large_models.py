"""Models too large for a test machine, by shape: on the meta device, where tensors have no memory.

Their parameters are counted, the models are built for several ranks, and the names and shapes of
the released checkpoints' tensors are loaded with the code that loads real ones.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from nanovllm.checkpoints.checkpoint import open_checkpoint
from nanovllm.checkpoints.weights import load_model
from nanovllm.engine.startup import check_split
from nanovllm.kernels.moe.mxfp4 import num_groups
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.model_config import ModelConfig
from nanovllm.utils.distributed import TPGroup, use_tp_group

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
QWEN3_235B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 94,
    "mlp_only_layers": [],
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 94,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GPT_OSS_120B = {
    **json.loads((SHAPES / "gpt-oss-20b" / "config.json").read_text()),
    "num_hidden_layers": 36,
    "num_local_experts": 128,
}
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def attention_shapes(hf: dict[str, Any], prefix: str) -> Shapes:
    hidden, head_dim = hf["hidden_size"], hf["head_dim"]
    q, kv = (hf[f"num_{name}_heads"] * head_dim for name in ("attention", "key_value"))
    for name, rows, columns in (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden)):
        yield f"{prefix}.self_attn.{name}_proj.weight", (rows, columns)
        if hf["attention_bias"]:
            yield f"{prefix}.self_attn.{name}_proj.bias", (rows,)
    yield f"{prefix}.self_attn.o_proj.weight", (hidden, q)
    if hf["attention_bias"]:
        yield f"{prefix}.self_attn.o_proj.bias", (hidden,)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{name}.weight", (hidden,)


def hub_shapes(hf: dict[str, Any]) -> Shapes:
    """The tensors of the released checkpoint."""
    hidden, is_gpt_oss = hf["hidden_size"], hf["model_type"] == "gpt_oss"
    for name in ("model.embed_tokens", "lm_head"):
        yield f"{name}.weight", (hf["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(hf["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield from attention_shapes(hf, prefix)
        if is_gpt_oss:
            yield f"{prefix}.self_attn.sinks", (hf["num_attention_heads"],)
            experts, inner = hf["num_local_experts"], hf["intermediate_size"]
            yield f"{prefix}.mlp.router.weight", (experts, hidden)
            yield f"{prefix}.mlp.router.bias", (experts,)
            for name, rows, columns in (
                ("gate_up_proj", 2 * inner, hidden),
                ("down_proj", hidden, inner),
            ):
                yield f"{prefix}.mlp.experts.{name}_blocks", (experts, rows, columns // 32, 16)
                yield f"{prefix}.mlp.experts.{name}_scales", (experts, rows, columns // 32)
                yield f"{prefix}.mlp.experts.{name}_bias", (experts, rows)
        else:
            for name in ("q_norm", "k_norm"):
                yield f"{prefix}.self_attn.{name}.weight", (hf["head_dim"],)
            experts, inner = hf["num_experts"], hf["moe_intermediate_size"]
            yield f"{prefix}.mlp.gate.weight", (experts, hidden)
            for expert in range(experts):
                for name in ("gate_proj", "up_proj"):
                    yield f"{prefix}.mlp.experts.{expert}.{name}.weight", (inner, hidden)
                yield f"{prefix}.mlp.experts.{expert}.down_proj.weight", (hidden, inner)


def hub_tensors(hf: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, shape in hub_shapes(hf):
        dtype = torch.uint8 if name.endswith(("_blocks", "_scales")) else torch.bfloat16
        yield name, torch.empty(shape, dtype=dtype, device="meta")


class CopiedElements(TorchDispatchMode):
    """Counts the elements of parameters that copy_ writes."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_copy = func is torch.ops.aten.copy_.default
        if is_copy and args[0].dtype != torch.uint8:  # else MXFP4 that is not packed yet
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


def read_config(hf: dict[str, Any], folder: Path) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(hf))
    return open_checkpoint(str(folder)).config


def build(config: ModelConfig, rank: int = 0, num_ranks: int = 1) -> DecoderForCausalLM:
    check_split(config, num_ranks)
    with torch.device("meta"), use_tp_group(TPGroup(rank, num_ranks)):
        return DecoderForCausalLM(config, max_position=64)


def num_weights(hf: dict[str, Any], folder: Path, rank: int = 0, num_ranks: int = 1) -> int:
    """Counted where MXFP4 is not packed."""
    fields = {key: value for key, value in hf.items() if key != "quantization_config"}
    model = build(read_config(fields, folder), rank, num_ranks)
    return sum(param.numel() for param in model.parameters())


@pytest.fixture(autouse=True)
def packs_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """MXFP4's packing reads values, which tensors on the meta device do not have."""

    def pack_blocks(blocks: torch.Tensor) -> torch.Tensor:
        rows, num_blocks, _ = blocks.shape
        return blocks.new_empty(num_groups(num_blocks * 32), rows, 32, dtype=torch.int16)

    def pack_scales(scales: torch.Tensor) -> torch.Tensor:
        rows, num_blocks = scales.shape
        return scales.new_empty(num_groups(num_blocks * 32), rows, dtype=torch.int32)

    monkeypatch.setattr("nanovllm.quantization.experts.pack_mxfp4", pack_blocks)
    monkeypatch.setattr("nanovllm.quantization.experts.pack_mxfp4_scales", pack_scales)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("hf", "billions", "num_tensors"),
    [
        # Its 36,945 tensors take 20 seconds.
        pytest.param(
            QWEN3_235B, 235.09, 94 * 393 + 3, id="Qwen3-235B-A22B", marks=pytest.mark.slow
        ),
        pytest.param(GPT_OSS_120B, 116.83, 36 * 19 + 3, id="gpt-oss-120b"),
    ],
)
class TestLargeModels:
    def test_weights_are_those_of_transformers(self, hf, billions, num_tensors, tmp_path):
        found = num_weights(hf, tmp_path)
        assert found / 1e9 == pytest.approx(billions, abs=0.01)
        assert len(list(hub_shapes(hf))) == num_tensors
        fields = {key: value for key, value in hf.items() if key != "quantization_config"}
        with torch.device("meta"):
            reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
        assert found == sum(param.numel() for param in reference.parameters())

    @pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (1, 2), (3, 4), (7, 8)])
    def test_every_tensor_fills_its_parameter_once(
        self, hf, billions, num_tensors, rank, num_ranks, tmp_path
    ):
        config = read_config(hf, tmp_path)
        if num_ranks > 2 and hf is GPT_OSS_120B:  # 720 columns are 22.5 blocks of MXFP4
            with pytest.raises(ValueError, match=r"multiples of 32, but .* columns of each expert"):
                build(config, rank, num_ranks)
            return
        model = build(config, rank, num_ranks)
        with CopiedElements() as copied:
            load_model(model, hub_tensors(hf))
        assert copied.count == sum(param.numel() for param in model.parameters())
        # Every rank has the norms and routers, and more if there are fewer KV heads than ranks.
        share = num_weights(hf, tmp_path, rank, num_ranks) * num_ranks / 1e9
        assert billions - 0.01 < share < billions * 1.03

    def test_a_missing_or_a_further_tensor_is_named(self, hf, billions, num_tensors, tmp_path):
        model = build(read_config(hf, tmp_path))
        tensors = list(hub_tensors(hf))
        name, tensor = tensors.pop()
        with pytest.raises(ValueError, match=f"lacks {name}"):
            load_model(model, tensors)
        renamed = name.replace("model.layers.", "model.layers.9")
        with pytest.raises(ValueError, match=f"lacks {name} and has {renamed}"):
            load_model(model, [*tensors, (renamed, tensor)])


@pytest.mark.parametrize("num_ranks", [3, 5, 7, 128])
def test_ranks_that_cannot_share_the_heads_are_refused_by_name(num_ranks, tmp_path):
    for hf in (QWEN3_235B, GPT_OSS_120B):
        match = f"tensor_parallel_size={num_ranks} cannot split this model's 64 attention heads"
        with pytest.raises(ValueError, match=match):
            build(read_config(hf, tmp_path), 0, num_ranks)
