"""Checkpoints in GGUF, llama.cpp's single-file format: config, tokenizer and weights."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch

from nanovllm.checkpoints.files import CPU
from nanovllm.checkpoints.gguf_file import GGUFFile
from nanovllm.checkpoints.weights import expand
from nanovllm.models.family import MAX_SIZES
from nanovllm.models.model_config import ModelConfig, WeightNames
from nanovllm.models.registry import get_family
from nanovllm.utils.panics import as_value_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# llama.cpp's architectures: transformers' model type, whether llama.cpp reorders rows of q and k
# (``_to_half_split``), and the architecture as which every release of transformers can read the
# tokenizer. "llama" is Llama's and Mistral's common graph.
ARCHITECTURES = {
    "llama": ("llama", True, "llama"),
    "qwen2": ("qwen2", False, "qwen2"),
    "qwen3": ("qwen3", False, "qwen3"),
    "smollm3": ("smollm3", True, "llama"),
}
# llama.cpp's modules and transformers', the same for all architectures.
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{layer}.attn_norm": "model.layers.{layer}.input_layernorm",
    "blk.{layer}.attn_q": "model.layers.{layer}.self_attn.q_proj",
    "blk.{layer}.attn_k": "model.layers.{layer}.self_attn.k_proj",
    "blk.{layer}.attn_v": "model.layers.{layer}.self_attn.v_proj",
    "blk.{layer}.attn_output": "model.layers.{layer}.self_attn.o_proj",
    "blk.{layer}.attn_q_norm": "model.layers.{layer}.self_attn.q_norm",
    "blk.{layer}.attn_k_norm": "model.layers.{layer}.self_attn.k_norm",
    "blk.{layer}.ffn_norm": "model.layers.{layer}.post_attention_layernorm",
    "blk.{layer}.ffn_gate": "model.layers.{layer}.mlp.gate_proj",
    "blk.{layer}.ffn_up": "model.layers.{layer}.mlp.up_proj",
    "blk.{layer}.ffn_down": "model.layers.{layer}.mlp.down_proj",
}
PRE_TOKENIZERS_WITH_BOS = ("llama3", "llama-v3", "llama-bpe")
TOKENS = "tokenizer.ggml.tokens"
MAX_TOKENS = 2**20  # with the merges; the largest vocabularies have three quarters of that
MAX_TOKEN_LENGTH = 1024
ROPE_DIVISORS = "rope_freqs.weight"


class GGUFCheckpoint:
    """A ``.gguf`` file; quantised weights are dequantised tensor by tensor as they are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = GGUFFile(path)
        with as_value_error(f"{path} cannot be served"):
            self.arch = self._field("general.architecture", str)
            if self.arch not in ARCHITECTURES:
                raise ValueError(
                    f"GGUF architecture {self.arch!r:.80} is not served; "
                    f"those served are {', '.join(ARCHITECTURES)}"
                )
            self._model_type, self._reorders, self._tokenizer = ARCHITECTURES[self.arch]
            self.config = self._read_config()
            self.config.check_bytes(path.stat().st_size)
            eos_names = ("eos_token_id", "eot_token_id")
            eos = [self._field(f"tokenizer.ggml.{name}", int, None) for name in eos_names]
        self.eos_token_ids = frozenset(token_id for token_id in eos if token_id is not None)
        self.recommended_sampling: dict[str, Any] = {}

    def load_tokenizer(self) -> "PreTrainedTokenizerBase | None":
        if "tokenizer.ggml.model" not in self.file.fields:
            return None
        from transformers import PreTrainedTokenizerFast

        with (
            as_value_error(f"the tokenizer in {self.path} cannot be read"),
            TemporaryDirectory() as tmp,
        ):
            # transformers trusts a file, and takes up others beside it: it gets what was checked.
            self.file.write_fields(self._tokenizer_fields(), Path(tmp, "m.gguf"), self._tokenizer)
            # Where the file does not say, llama.cpp goes by the kind of its pre-tokenizer. What it
            # says is repeated: transformers' first releases of version 5 ignore it.
            is_usual = self._field("tokenizer.ggml.pre", str, None) in PRE_TOKENIZERS_WITH_BOS
            adds_bos = self._field("tokenizer.ggml.add_bos_token", bool, is_usual)
            bos = {"add_bos_token": True} if adds_bos else {}
            tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp, gguf_file="m.gguf", **bos)
        tokenizer.name_or_path = str(self.path)
        return tokenizer

    def tensors(self, device: torch.device = CPU) -> Iterator[tuple[str, torch.Tensor]]:
        rows = tuple((f"{ours}.{{kind}}", f"{hf}.{{kind}}") for ours, hf in TENSOR_NAMES.items())
        names = WeightNames(rows, self.config.weight_names.fields)
        hf_names = {name: hf_name for name, hf_name, *_ in expand(names)}
        for name in self.file.tensors:
            if name != ROPE_DIVISORS:
                yield hf_names.get(name) or name, self._dequantize(name)

    def _tokenizer_fields(self) -> Iterator[str]:
        """Names them; ValueError for those that transformers would hang over, or misread."""
        fields = {name: v for name, v in self.file.fields.items() if name.startswith("tokenizer.")}
        tokens = self._field(TOKENS, list)
        num_strings = sum(len(value) for value in fields.values() if isinstance(value, list))
        if num_strings > MAX_TOKENS or any(len(token) > MAX_TOKEN_LENGTH for token in tokens):
            raise ValueError("too many tokens, or too long ones")
        for name, value in fields.items():
            if name.endswith("_token_id") and value not in range(len(tokens)):
                raise ValueError(f"{name} is {value!r:.80}, of {len(tokens)} tokens")
            if isinstance(value, np.ndarray) and len(value) != len(tokens):
                raise ValueError(f"{len(value)} {name} for {len(tokens)} tokens")
            yield name

    def _read_config(self) -> ModelConfig:
        def fact(name: str, kind: type, *default: Any) -> Any:
            return self._field(f"{self.arch}.{name}", kind, *default)

        tensors = self.file.tensors
        heads, hidden_size = fact("attention.head_count", int), fact("embedding_length", int)
        head_dim = fact("attention.key_length", int, hidden_size // heads if heads else 0)
        vocab_size = fact("vocab_size", int, None) or len(self._field(TOKENS, list))
        hf = {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": fact("feed_forward_length", int),
            "num_hidden_layers": fact("block_count", int),
            "num_attention_heads": heads,
            "num_key_value_heads": fact("attention.head_count_kv", int, heads),
            "head_dim": head_dim,
            "max_position_embeddings": fact("context_length", int),
            "rms_norm_eps": fact("attention.layer_norm_rms_epsilon", float),
            "tie_word_embeddings": "output.weight" not in tensors,
            "sliding_window": fact("attention.sliding_window", int, None),
            "use_sliding_window": True,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
            "rope_parameters": self._read_rope(fact, head_dim),
            # Quantised weights are of no dtype to compute in; most models were trained in bf16, and
            # some overflow in fp16.
            "dtype": "bfloat16",
        }
        return get_family(self._model_type).read(hf)

    def _read_rope(self, fact: Any, head_dim: int) -> dict[str, Any]:
        kind = fact("rope.scaling.type", str, "none")
        rope: dict[str, Any] = {
            "rope_theta": fact("rope.freq_base", float, 10000.0),
            "rope_type": "default" if kind == "none" else kind,
            "partial_rotary_factor": fact("rope.dimension_count", int, head_dim) / max(head_dim, 1),
        }
        if kind == "linear":
            rope["factor"] = fact("rope.scaling.factor", float)
        if ROPE_DIVISORS in self.file.tensors:  # Llama 3's scaling, worked out by the converter
            if self.file.tensors[ROPE_DIVISORS][1].size > 4 * MAX_SIZES["head_dim"]:
                raise ValueError(f"{ROPE_DIVISORS} is too large for any head")
            rope["freq_divisors"] = self._dequantize(ROPE_DIVISORS).tolist()
        return rope

    def _dequantize(self, name: str) -> torch.Tensor:
        """fp32, in the row order that transformers uses."""
        kind, codes = self.file.tensors[name]
        # It may be of a type that gguf does not serve, or have rows that are no heads.
        with as_value_error(
            f"{self.path}: tensor {name!r:.80} ({kind.name}) cannot be dequantised"
        ):
            weight = torch.from_numpy(gguf.quants.dequantize(codes, kind).astype("float32"))
            if self._reorders and ".attn_q." in name:
                return _to_half_split(weight, self.config.num_attention_heads)
            if self._reorders and ".attn_k." in name:
                return _to_half_split(weight, self.config.num_key_value_heads)
            return weight

    def _field(self, name: str, kind: type, *default: Any) -> Any:
        value = self.file.fields.get(name)
        if value is None:
            if default:
                return default[0]
            raise ValueError(f"it lacks the field {name}")
        if type(value) is not kind:
            raise ValueError(f"{name} must be of type {kind.__name__}, got {value!r:.80}")
        return value


def _to_half_split(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undoes llama.cpp's reordering of q and k rows: it rotates neighbours (2i, 2i + 1) where
    transformers rotates halves (i, i + D/2)."""
    rows = weight.size(0)
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
