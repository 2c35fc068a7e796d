"""Tiny random-weight checkpoints, made by transformers: the oracle that the engine must match."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

VOCAB_SIZE = 512
BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
SEEDS = {"mistral": 2}  # 1 otherwise: no near ties in the parity tests
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
    "rope_theta": 10000.0,
}
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen3": (Qwen3Config, {}),
    "qwen3-tied": (Qwen3Config, {"tie_word_embeddings": True}),
    "llama": (LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear": (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "llama-bias": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2Config, {}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    # The second of three layers has no RoPE; or, as in the released model, the fourth.
    "smollm3": (SmolLM3Config, {"no_rope_layer_interval": 2, "pad_token_id": 0}),
    # A dense layer between two mixtures.
    "qwen3-moe": (Qwen3MoeConfig, {**MIXTURE, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3-moe-every-second": (
        Qwen3MoeConfig,
        {**MIXTURE, "decoder_sparse_step": 2, "num_experts_per_tok": 3},
    ),
    "olmoe": (OlmoeConfig, {"num_experts": 8, "num_experts_per_tok": 3}),
    "gpt-oss": (
        GptOssConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 2048},
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "sliding_window": None}),
    "smollm3-every-fourth": (SmolLM3Config, {"num_hidden_layers": 5, "pad_token_id": 0}),
}


@dataclass
class TinyModels:
    """Makes each checkpoint once, in its own folder under ``root``."""

    root: Path

    def path(self, name: str) -> Path:
        """The checkpoint directory of one of CONFIGS."""
        path = self.root / name
        if not path.exists():
            config_class, changes = CONFIGS[name]
            config = config_class(**{**BASE, **changes})
            self.build(config, SEEDS.get(name, 1)).save_pretrained(path)
        return path

    def load(self, name: str) -> PreTrainedModel:
        """The same checkpoint in transformers, in fp32."""
        return AutoModelForCausalLM.from_pretrained(self.path(name), dtype=torch.float32).eval()

    @staticmethod
    def build(config: Any, seed: int = 1) -> PreTrainedModel:
        """A model with every weight random, biases and norms included; matrices are large, to
        spread the logits, so that the argmax does not hang on rounding."""
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "norm" in name:
                    param.uniform_(0.5, 1.5)
                else:
                    param.normal_(0, 0.1 if name.endswith("bias") else 0.3)
        return model
