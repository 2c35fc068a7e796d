"""The two checkpoints on which vLLM's answers were recorded, in transformers' layout.

    python -m tests.vllm_answers.weights

builds both in the cache. vLLM no longer reads GGUF files, so the small real model, which comes as
one, is saved again as safetensors: both engines then read the same float32 weights.
"""

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from example import fetch_smollm2
from nanovllm.checkpoints.checkpoint import open_checkpoint

# The model's own end-of-turn token, then the end-of-text token as a further one. The sampling
# parameters are there for get_default_sampling_params to find.
GENERATION_CONFIG = {
    "bos_token_id": 1,
    "eos_token_id": [2, 0],
    "pad_token_id": 2,
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 40,
    "top_p": 0.9,
    "repetition_penalty": 1.1,
    "max_new_tokens": 64,
}
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
TINY_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}


def cache() -> Path:
    """Where the checkpoints are looked for."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm"


def smollm2(root: Path) -> Path:
    """SmolLM2-135M-Instruct as a folder below ``root``, made there unless it exists."""
    return _made(root / "smollm2-fp32", {})


def tiny_llama(root: Path) -> Path:
    """A Llama of two narrow layers with random weights, and the tokenizer of SmolLM2."""
    return _made(root / "tiny-llama", TINY | TINY_HEADS)


def _made(folder: Path, sizes: dict[str, int]) -> Path:
    """The folder, built under another name first so that it is never seen half written."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent) as tmp:
            _save(Path(tmp, "model"), sizes)
            Path(tmp, "model").rename(folder)
    return folder


def _save(folder: Path, sizes: dict[str, int]) -> None:
    source = open_checkpoint(fetch_smollm2())
    tokenizer = source.load_tokenizer()
    assert tokenizer is not None
    tokenizer.save_pretrained(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "float32",
        **sizes,
    }
    # A random model's layers only need the names and the shapes.
    weights = _random_weights(config) if sizes else dict(source.tensors())
    weights = {name: tensor.float().contiguous() for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG, indent=2))


def _random_weights(config: dict) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (queries, hidden),
            f"{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"{layer}.self_attn.v_proj.weight": (keys, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    weights = {n: 0.1 * torch.randn(s, generator=generator) for n, s in shapes.items()}
    norms = [f"model.layers.{i}.input_layernorm" for i in range(config["num_hidden_layers"])]
    norms += [f"model.layers.{i}.post_attention_layernorm" for i in range(len(norms))]
    return weights | {f"{name}.weight": torch.ones(hidden) for name in [*norms, "model.norm"]}


if __name__ == "__main__":
    print(smollm2(cache()), tiny_llama(cache()))
