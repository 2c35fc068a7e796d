"""Helpers for families with mixtures of experts: sizes from a config, and tensor names."""

from collections.abc import Mapping
from typing import Any

from nanovllm.models.family import MLP
from nanovllm.models.model_config import MoESpec

EXPERT = MLP + "experts.{expert}."
GATE_UP, DOWN = MLP + "experts.gate_up_proj", MLP + "experts.down_proj"
# One tensor per expert, as on the hub, or one for all, as transformers 5 holds them in memory.
EXPERT_NAMES = (
    (EXPERT + "gate_proj.weight", GATE_UP, 0),
    (EXPERT + "up_proj.weight", GATE_UP, 1),
    (EXPERT + "down_proj.weight", DOWN),
    (GATE_UP, GATE_UP),
    (DOWN, DOWN),
)


def read_moe(hf: Mapping[str, Any], size_field: str = "intermediate_size", **flags: Any) -> MoESpec:
    """Reads the description of a mixture of experts from a checked config.

    Args:
        hf: the fields of the config.
        size_field: the name of the field that has the intermediate size of one expert.
        flags: other fields of MoESpec.

    Raises:
        ValueError: a token would have more experts than there are.
        KeyError: a field is missing.
    """
    # transformers 5 writes num_local_experts for every family.
    num_experts = hf.get("num_local_experts") or hf["num_experts"]
    top_k = hf["num_experts_per_tok"]
    if top_k > num_experts:
        raise ValueError(f"num_experts_per_tok must be an int up to {num_experts}, got {top_k}")
    return MoESpec(num_experts, top_k, hf[size_field], **flags)
