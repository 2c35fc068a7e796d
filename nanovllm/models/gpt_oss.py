"""gpt-oss (arXiv:2508.10925): a mixture of experts in every layer, biases everywhere, attention
sinks, and a sliding window in every second layer."""

from typing import Any

from nanovllm.models.experts import DOWN, GATE_UP, read_moe
from nanovllm.models.family import (
    ATTENTION,
    MLP,
    WEIGHT_NAMES,
    Family,
    equal_layers,
    with_fields,
    with_windows,
)
from nanovllm.models.model_config import LayerSpec

YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
YARN |= {"truncate": False, "original_max_position_embeddings": 4096}
DEFAULTS: dict[str, Any] = {"head_dim": 64, "num_key_value_heads": 8, "attention_bias": True}
DEFAULTS |= {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "sliding_window": 128}
DEFAULTS |= {"rope_theta": 150000.0, "rope_parameters": YARN, "layer_types": None}
DEFAULTS |= {"num_local_experts": 128, "num_experts_per_tok": 4}
DEFAULTS |= {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
NAMES = (
    (ATTENTION + "sinks", ATTENTION + "attn.sinks"),
    (MLP + "router.{kind}", MLP + "gate.{kind}"),
    (GATE_UP, GATE_UP),
    (GATE_UP + "_blocks", GATE_UP, "blocks"),
    (GATE_UP + "_scales", GATE_UP, "scales"),
    (DOWN, DOWN),
    (DOWN + "_blocks", DOWN, "blocks"),
    (DOWN + "_scales", DOWN, "scales"),
)


def gpt_oss_layers(hf: dict[str, Any]) -> list[LayerSpec]:
    mixture = read_moe(
        hf,
        bias=True,
        limit=hf["swiglu_limit"],
        alpha=hf["swiglu_alpha"],
        interleaved=True,
        mxfp4=bool(hf.get("quantization_config")),
    )
    layers = equal_layers(hf, sinks=True)
    layers = with_windows(hf, layers, lambda layer: layer % 2 == 0)
    return with_fields(layers, mlp=mixture)


GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    layers=gpt_oss_layers,
    defaults=DEFAULTS,
    weight_names=WEIGHT_NAMES + NAMES,
    numerics=lambda hf: {"norm_in_fp32": True},
    quant_methods=("mxfp4",),
)
