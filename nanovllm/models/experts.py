"""Helpers for families with mixtures of experts: sizes from a config, and tensor names."""

from collections.abc import Mapping
from typing import Any

from nanovllm.models.family import MLP
from nanovllm.models.model_config import MoESpec

MAX_EXPERTS = 2**10  # far above any real model's
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


def read_moe(hf: Mapping[str, Any], intermediate_size: str, norm_topk_prob: bool) -> MoESpec:
    """Reads the description of a mixture of experts from a checked config.

    Args:
        hf: the fields of the config.
        intermediate_size: the name of the field that has the intermediate size of one expert.
        norm_topk_prob: as in MoESpec.

    Raises:
        ValueError: a field is missing or has an invalid value.
    """
    # transformers 5 writes num_local_experts for every family.
    num_experts: Any = hf.get("num_local_experts", hf.get("num_experts"))
    top_k: Any = hf.get("num_experts_per_tok")
    columns: Any = hf.get(intermediate_size)
    for name, value, limit in (
        ("the number of experts", num_experts, MAX_EXPERTS),
        ("num_experts_per_tok", top_k, num_experts),
        (intermediate_size, columns, 2**20),
    ):
        if type(value) is not int or not 1 <= value <= limit:
            raise ValueError(f"{name} must be a positive int up to {limit}, got {value!r:.80}")
    if not isinstance(norm_topk_prob, bool):
        raise ValueError(f"norm_topk_prob must be true or false, got {norm_topk_prob!r:.80}")
    return MoESpec(num_experts, top_k, columns, norm_topk_prob)
