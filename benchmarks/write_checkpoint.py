"""Writes a checkpoint of random weights: ``python -m benchmarks.write_checkpoint SHAPE FOLDER``.

The checkpoint has safetensors shards, a config and a tokenizer with the model's vocabulary size, so
that it can stand for a real one when start-up is measured. ``--tokenizer`` copies a tokenizer from
a folder instead.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SHAPE_FOLDER = Path(__file__).parent / "shapes"
SHARD_BYTES = 4 * 10**9
TOKENIZER_FILES = ("tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json", "*.jinja")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shapes = sorted(path.name for path in SHAPE_FOLDER.iterdir())
    parser.add_argument("shape", help=f"{', '.join(shapes)}, or a folder with a config.json")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="folder to copy the tokenizer from")
    args = parser.parse_args()
    shape = SHAPE_FOLDER / args.shape
    write_checkpoint(shape if shape.exists() else Path(args.shape), args.folder, args.tokenizer)


def write_checkpoint(shape: Path, folder: Path, tokenizer: Path | None = None) -> None:
    """Writes a checkpoint for the config.json in ``shape`` into ``folder``, which may exist."""
    config = json.loads((shape / "config.json").read_text("utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    for pattern in TOKENIZER_FILES if tokenizer else ():
        for file in tokenizer.glob(pattern):
            shutil.copy(file, folder)
    if not tokenizer:
        write_tokenizer(config, folder)
    write_weights(config, folder)


def weight_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the names and shapes of weights, as transformers has them."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = (head_dim * config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, shape in {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }.items():
            yield f"{layer}.{name}.weight", shape
        if config["model_type"] == "qwen3":
            for name in ("q_norm", "k_norm"):
                yield f"{layer}.self_attn.{name}.weight", (head_dim,)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def write_weights(config: dict[str, Any], folder: Path) -> None:
    """Writes bf16 weights. Norm weights are 1. All matrices reuse 16 million numbers from a normal
    distribution."""
    random_values = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    random_values = random_values.bfloat16()
    shards: list[dict[str, torch.Size]] = [{}]
    num_bytes = 0
    for name, shape in weight_shapes(config):
        size = torch.Size(shape)
        if num_bytes + 2 * size.numel() > SHARD_BYTES and shards[-1]:
            shards.append({})
            num_bytes = 0
        shards[-1][name] = size
        num_bytes += 2 * size.numel()
    files = {}
    for i, shard in enumerate(shards, start=1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for j, (name, size) in enumerate(shard.items()):
            if len(size) == 1:
                tensors[name] = torch.ones(size, dtype=torch.bfloat16)
            else:
                repeats = size.numel() // len(random_values) + 1
                values = random_values.roll(997 * j).repeat(repeats)[: size.numel()]
                tensors[name] = values.view(size).contiguous()
        save_file(tensors, folder / file, {"format": "pt"})
        files |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = json.dumps({"metadata": {}, "weight_map": files})
        (folder / "model.safetensors.index.json").write_text(index, "utf-8")


def write_tokenizer(config: dict[str, Any], folder: Path) -> None:
    """Writes a byte-level BPE tokenizer, of slightly fewer tokens than the vocabulary: bytes, and
    words of up to four letters."""
    size = config["vocab_size"] - 300  # as in real models, some embedding rows have no token
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = []
    for length in (2, 3, 4):
        for letters in product(ascii_lowercase, repeat=length):
            if len(words) < size:
                merges.append(("".join(letters[:-1]), letters[-1]))
                words.append("".join(letters))
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    is_qwen = config["model_type"].startswith("qwen")
    tokenizer_config = {
        "tokenizer_class": "Qwen2Tokenizer" if is_qwen else "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), "utf-8")


if __name__ == "__main__":
    main()
