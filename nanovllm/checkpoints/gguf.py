"""Checkpoints in GGUF, llama.cpp's single-file format, with config, tokenizer and weights."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch

from nanovllm.checkpoints.files import CPU, check_bytes
from nanovllm.checkpoints.gguf_file import GGUFFile
from nanovllm.checkpoints.weights import expand
from nanovllm.models.family import MAX_SIZES
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.registry import get_family
from nanovllm.models.weight_names import WeightNames
from nanovllm.utils.panics import as_value_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# llama.cpp's architectures, whose names are also model types in transformers. "llama" stands for
# Llama and Mistral. For each: whether llama.cpp reorders the rows of q and k (``_to_half_split``),
# and the architecture under which transformers loads the tokenizer. It is another one if some
# releases of transformers do not know the architecture itself.
ARCHITECTURES = {
    "llama": (True, "llama"),
    "qwen2": (False, "qwen2"),
    "qwen3": (False, "qwen3"),
    "smollm3": (True, "llama"),
}
# The names of modules in llama.cpp and in transformers, the same for all architectures.
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
MAX_TOKENS = 2**20  # including merges; the largest vocabularies have three quarters of that
MAX_TOKEN_LENGTH = 1024
ROPE_DIVISORS = "rope_freqs.weight"


class GGUFCheckpoint:
    """A ``.gguf`` file. Its quantised weights are dequantised one tensor at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = GGUFFile(path)
        with as_value_error(f"{path} is not supported:"):
            self.arch = self._field("general.architecture", str)
            if self.arch not in ARCHITECTURES:
                raise ValueError(
                    f"GGUF architecture {self.arch!r:.80} is not supported; "
                    f"supported are {', '.join(ARCHITECTURES)}"
                )
            self._reorders, self._tokenizer_arch = ARCHITECTURES[self.arch]
            self.config = self._read_config()
            check_bytes(self.config, path.stat().st_size)
            eos_names = ("eos_token_id", "eot_token_id")
            eos = [self._field(f"tokenizer.ggml.{name}", int, None) for name in eos_names]
        self.eos_token_ids = frozenset(token_id for token_id in eos if token_id is not None)
        self.recommended_sampling: dict[str, Any] = {}

    def load_tokenizer(self) -> "PreTrainedTokenizerBase | None":
        if "tokenizer.ggml.model" not in self.file.fields:
            return None
        from transformers import PreTrainedTokenizerFast

        message = f"the tokenizer in {self.path} cannot be read:"
        with as_value_error(message), TemporaryDirectory() as tmp:
            # transformers does not check the file, and reads other files beside it. So it gets a
            # copy of the checked fields, in an empty directory.
            fields, path = self._tokenizer_fields(), Path(tmp, "m.gguf")
            self.file.write_fields(fields, path, self._tokenizer_arch)
            # If the file has no add_bos_token, llama.cpp decides by the pre-tokenizer. Always pass
            # the value, because transformers before 5.4 ignores the field in the file.
            default = self._field("tokenizer.ggml.pre", str, None) in PRE_TOKENIZERS_WITH_BOS
            adds_bos = self._field("tokenizer.ggml.add_bos_token", bool, default)
            bos = {"add_bos_token": True} if adds_bos else {}
            tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp, gguf_file="m.gguf", **bos)
        tokenizer.name_or_path = str(self.path)
        return tokenizer

    def tensors(self, device: torch.device = CPU) -> Iterator[tuple[str, torch.Tensor]]:
        rows = tuple((f"{name}.{{kind}}", f"{hf}.{{kind}}") for name, hf in TENSOR_NAMES.items())
        names = WeightNames(rows, self.config.weight_names.fields)
        hf_names = {name: hf_name for name, hf_name, *_ in expand(names)}
        for name in self.file.tensors:
            if name != ROPE_DIVISORS:
                yield hf_names.get(name) or name, self._dequantize(name)

    def _tokenizer_fields(self) -> Iterator[str]:
        """Yields the names of the tokenizer's fields. Raises ValueError for values that
        transformers misreads or takes too long to read."""
        fields = {name: v for name, v in self.file.fields.items() if name.startswith("tokenizer.")}
        tokens = self._field(TOKENS, list)
        num_strings = sum(len(value) for value in fields.values() if isinstance(value, list))
        if num_strings > MAX_TOKENS or any(len(token) > MAX_TOKEN_LENGTH for token in tokens):
            raise ValueError("the vocabulary has too many tokens, or too long ones")
        for name, value in fields.items():
            if name.endswith("_token_id") and value not in range(len(tokens)):
                raise ValueError(f"{name} is {value!r:.80}, but there are {len(tokens)} tokens")
            if isinstance(value, np.ndarray) and len(value) != len(tokens):
                raise ValueError(f"{name} has {len(value)} values for {len(tokens)} tokens")
            yield name

    def _read_config(self) -> ModelConfig:
        def read(name: str, kind: type, *default: Any) -> Any:
            return self._field(f"{self.arch}.{name}", kind, *default)

        tensors = self.file.tensors
        heads, hidden_size = read("attention.head_count", int), read("embedding_length", int)
        head_dim = read("attention.key_length", int, hidden_size // heads if heads else 0)
        vocab_size = read("vocab_size", int, None) or len(self._field(TOKENS, list))
        hf = {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": read("feed_forward_length", int),
            "num_hidden_layers": read("block_count", int),
            "num_attention_heads": heads,
            "num_key_value_heads": read("attention.head_count_kv", int, heads),
            "head_dim": head_dim,
            "max_position_embeddings": read("context_length", int),
            "rms_norm_eps": read("attention.layer_norm_rms_epsilon", float),
            "tie_word_embeddings": "output.weight" not in tensors,
            "sliding_window": read("attention.sliding_window", int, None),
            "use_sliding_window": True,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
            "rope_parameters": self._read_rope(read, head_dim),
            # The dtype of quantised weights does not tell the dtype to compute in. Most models were
            # trained in bf16, and some overflow in fp16.
            "dtype": "bfloat16",
        }
        return get_family(self.arch).read(hf)

    def _read_rope(self, read: Any, head_dim: int) -> dict[str, Any]:
        kind = read("rope.scaling.type", str, "none")
        rope: dict[str, Any] = {
            "rope_theta": read("rope.freq_base", float, 10000.0),
            "rope_type": "default" if kind == "none" else kind,
            "partial_rotary_factor": read("rope.dimension_count", int, head_dim) / max(head_dim, 1),
        }
        if kind == "linear":
            rope["factor"] = read("rope.scaling.factor", float)
        if ROPE_DIVISORS in self.file.tensors:  # Llama 3's scaling, precomputed by the converter
            if self.file.tensors[ROPE_DIVISORS][1].size > 4 * MAX_SIZES["head_dim"]:
                raise ValueError(f"{ROPE_DIVISORS} is too large for any head")
            rope["freq_divisors"] = self._dequantize(ROPE_DIVISORS).tolist()
        return rope

    def _dequantize(self, name: str) -> torch.Tensor:
        """Returns a tensor in fp32, with its rows in transformers' order."""
        kind, data = self.file.tensors[name]
        message = f"{self.path}: tensor {name!r:.80} ({kind.name}) cannot be dequantised:"
        with as_value_error(message):  # an unsupported type, or a shape that does not fit heads
            weight = torch.from_numpy(gguf.quants.dequantize(data, kind).astype("float32"))
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
    """Undoes llama.cpp's reordering of the rows of q or k. In llama.cpp, RoPE pairs rows 2i and
    2i + 1 of a head; in transformers, rows i and i + head_dim / 2."""
    rows = weight.size(0)
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
