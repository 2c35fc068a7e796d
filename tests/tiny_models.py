"""Tiny random-weight checkpoints, made by transformers: the oracle that the engine must match."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Glm4Config,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
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
# 1 otherwise: no near ties in the parity tests.
SEEDS = {"mistral": 2, "llama-dynamic": 2, "gemma3-vision": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
    "rope_theta": 10000.0,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 256,
    "rope_theta": 10000.0,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
    "partial_rotary_factor": 0.75,
    "rope_theta": 10000.0,
}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
    "attention_bias": True,
}
GEMMA: dict[str, Any] = {"query_pre_attn_scalar": 24, "sliding_window": 40, "pad_token_id": 0}
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen3": (Qwen3Config, {}),
    "qwen3-one-layer": (Qwen3Config, {"num_hidden_layers": 1}),  # for kernels in the interpreter
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
    "llama-yarn": (LlamaConfig, {"rope_parameters": YARN}),
    "llama-dynamic": (LlamaConfig, {"rope_parameters": {**YARN, "rope_type": "dynamic"}}),
    "qwen2-window": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    ),
    "qwen3-window": (
        Qwen3Config,
        {
            "use_sliding_window": True,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mistral-window": (MistralConfig, {"sliding_window": 40}),
    "smollm3-window": (
        SmolLM3Config,
        {
            "no_rope_layer_interval": 2,
            "pad_token_id": 0,
            "use_sliding_window": True,
            "sliding_window": 40,
        },
    ),
    "ministral3": (
        Ministral3Config,
        {
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 64,
                "llama_4_scaling_beta": 0.3,
            },
            "pad_token_id": 0,
        },
    ),
    "olmo2": (Olmo2Config, {"pad_token_id": 0}),
    "olmo3": (
        Olmo3Config,
        {
            "pad_token_id": 0,
            "sliding_window": 40,
            "num_hidden_layers": 4,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "granite": (GraniteConfig, GRANITE),
    "phi3": (Phi3Config, {"pad_token_id": 0}),
    "phi3-longrope": (
        Phi3Config,
        {
            "pad_token_id": 0,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 2048,
            "sliding_window": 40,
        },
    ),
    "glm": (GlmConfig, {"pad_token_id": 0}),
    "glm4": (Glm4Config, {"pad_token_id": 0}),
    "gemma2": (Gemma2Config, GEMMA),
    "gemma3": (Gemma3TextConfig, {**GEMMA, "num_hidden_layers": 7}),
    # A dense layer between two mixtures.
    "qwen3-moe": (Qwen3MoeConfig, {**MIXTURE, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3-moe-every-second": (
        Qwen3MoeConfig,
        {**MIXTURE, "decoder_sparse_step": 2, "num_experts_per_tok": 3},
    ),
    "qwen3-moe-all": (Qwen3MoeConfig, {**MIXTURE, "norm_topk_prob": True}),
    "olmoe": (OlmoeConfig, {"num_experts": 8, "num_experts_per_tok": 3}),
    "gpt-oss": (
        GptOssConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 40},
    ),
    "granitemoe": (GraniteMoeConfig, {**GRANITE, "num_local_experts": 4}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "sliding_window": None}),
    # GGUF files do not state query_pre_attn_scalar.
    "gemma2-scalar": (Gemma2Config, {**GEMMA, "query_pre_attn_scalar": 16}),
    "gemma3-scalar": (
        Gemma3TextConfig,
        {
            **GEMMA,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "gemma3-vision": (
        Gemma3Config,
        {
            "text_config": {**BASE, **GEMMA},
            "tie_word_embeddings": False,
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
        },
    ),
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
            if "text_config" in changes:
                config = config_class(**changes)
            self.build(config, SEEDS.get(name, 1)).save_pretrained(path)
        return path

    def load(self, name: str) -> PreTrainedModel:
        """The same checkpoint in transformers, in fp32."""
        # Early releases of transformers leave Gemma 2's softcaps out of their default attention.
        attention = {"attn_implementation": "eager"} if name.startswith("gemma") else {}
        path = self.path(name)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **attention)
        return model.eval()

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
