"""Checkpoints in GGUF, llama.cpp's single-file format, with config, tokenizer and weights."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch

from nanovllm.checkpoints.files import CPU, check_bytes
from nanovllm.checkpoints.gguf_architectures import (
    ARCHITECTURES,
    EXPERTS,
    LONGROPE_FACTORS,
    ROPE_DIVISORS,
    TENSOR_NAMES,
    with_gguf_names,
)
from nanovllm.checkpoints.gguf_file import GGUFFile
from nanovllm.checkpoints.gguf_pre_tokenizers import split_as, split_as_phi3
from nanovllm.checkpoints.weights import expand
from nanovllm.models.family import MAX_SIZES
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.registry import get_family
from nanovllm.models.weight_names import WeightNames
from nanovllm.utils.panics import as_value_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PRE_TOKENIZERS_WITH_BOS = ("llama3", "llama-v3", "llama-bpe")
TOKENS = "tokenizer.ggml.tokens"
MAX_TOKENS = 2**20  # including merges; the largest vocabularies have three quarters of that
MAX_TOKEN_LENGTH = 1024
# Tokens that end a turn. llama.cpp knows them by their texts, because files state only one or
# two of them. gpt-oss's <|end|> is not one: it ends a message, such as its reasoning.
END_OF_TURN = {
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>"),
    *("<|return|>", "<|call|>"),
}
NORM = "_norm.weight"
ORIGINAL_LENGTH = "original_max_position_embeddings"
YARN_BETAS = ("beta_fast", "beta_slow")
# Further parameters of llama.cpp's YaRN. Its attention factor multiplies the computed one, while
# that of transformers replaces it.
UNSUPPORTED_YARN = ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier")


class GGUFCheckpoint:
    """A ``.gguf`` file, as a Checkpoint. Its weights are dequantised one tensor at a time, or one
    expert at a time.

    Raises:
        ValueError: the file is damaged or not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.quant_method: str | None = "gguf"
        self.file = GGUFFile(path)
        with as_value_error(f"{path} is not supported:"):
            self.arch = self._field("general.architecture", str)
            if self.arch not in ARCHITECTURES:
                raise ValueError(
                    f"GGUF architecture {self.arch!r:.80} is not supported; "
                    f"supported are {', '.join(ARCHITECTURES)}"
                )
            self._architecture = ARCHITECTURES[self.arch]
            self.config = self._read_config()
            check_bytes(self.config, path.stat().st_size)
            self.eos_token_ids = frozenset(self._end_tokens())
        self.recommended_sampling: dict[str, Any] = {}

    def load_tokenizer(self) -> "PreTrainedTokenizerBase | None":
        if "tokenizer.ggml.model" not in self.file.fields:
            return None
        from tokenizers.decoders import ByteLevel
        from transformers import PreTrainedTokenizerFast

        message = f"the tokenizer in {self.path} cannot be read:"
        with as_value_error(message), TemporaryDirectory() as tmp:
            # transformers does not check the file, and reads other files beside it. So it gets a
            # copy of the checked fields, in an empty directory.
            fields, path = self._tokenizer_fields(), Path(tmp, "m.gguf")
            self.file.write_fields(fields, path, self._architecture.tokenizer)
            kind = self._field("tokenizer.ggml.model", str)
            # If the file has no add_bos_token, llama.cpp decides by the vocabulary and the
            # pre-tokenizer. Always pass the value, because transformers before 5.4 ignores the
            # field in the file.
            pre_tokenizer = self._field("tokenizer.ggml.pre", str, None)
            default = kind == "llama" or pre_tokenizer in PRE_TOKENIZERS_WITH_BOS
            adds_bos = self._field("tokenizer.ggml.add_bos_token", bool, default)
            bos = {"add_bos_token": True} if adds_bos else {}
            tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp, gguf_file="m.gguf", **bos)
            if self.arch == "phi3" and kind == "llama":
                split_as_phi3(tokenizer.backend_tokenizer)
            elif kind == "gpt2":
                split_as(tokenizer.backend_tokenizer, pre_tokenizer)
                # transformers before 5.23 decodes tokens as plain text first.
                tokenizer.backend_tokenizer.decoder = ByteLevel()
        tokenizer.name_or_path = str(self.path)
        return tokenizer

    def tensors(
        self, device: torch.device = CPU, packs_fp8: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        modules = {**TENSOR_NAMES, **self._architecture.names}
        rows = tuple((f"{name}.{{kind}}", f"{hf}.{{kind}}") for name, hf in modules.items())
        names = WeightNames(rows, self.config.weight_names.fields)
        hf_names = {name: hf_name for name, hf_name, *_ in expand(names)}
        for name, (_, data) in self.file.tensors.items():
            hf_name = hf_names.get(name)
            if hf_name and "{expert}" in hf_name:
                for expert, part in enumerate(data):
                    yield hf_name.format(expert=expert), self._dequantize(name, part)
            elif name not in (ROPE_DIVISORS, *LONGROPE_FACTORS.values()):
                yield hf_name or name, self._dequantize(name, data)

    def _end_tokens(self) -> Iterator[int]:
        for name in ("eos_token_id", "eot_token_id"):
            if (token_id := self._field(f"tokenizer.ggml.{name}", int, None)) is not None:
                yield token_id
        tokens = self._field(TOKENS, list, [])
        ends = END_OF_TURN - ({"<|end|>"} if "<|return|>" in tokens else set())
        yield from (token_id for token_id, token in enumerate(tokens) if token in ends)

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

        if (parts := self._field("split.count", int, 1)) > 1:
            raise ValueError(f"it is 1 of {parts} parts: merge them with llama-gguf-split --merge")
        if self.arch == "olmo2" and read("attention.sliding_window", int, 0):
            raise ValueError("OLMo 3, which is olmo2 with windows in llama.cpp, is not supported")
        architecture, tensors = self._architecture, self.file.tensors
        heads, hidden_size = read("attention.head_count", int), read("embedding_length", int)
        head_dim = read("attention.key_length", int, hidden_size // heads if heads else 0)
        vocab_size = read("vocab_size", int, None) or len(self._field(TOKENS, list))
        rope = self._read_rope(read, head_dim)
        hf = {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": read("feed_forward_length", int),
            "num_hidden_layers": read("block_count", int),
            "num_attention_heads": heads,
            "num_key_value_heads": read("attention.head_count_kv", int, heads),
            "head_dim": head_dim,
            "max_position_embeddings": read("context_length", int),
            "original_max_position_embeddings": rope.get(ORIGINAL_LENGTH),
            "rms_norm_eps": read("attention.layer_norm_rms_epsilon", float),
            "tie_word_embeddings": "output.weight" not in tensors,
            "sliding_window": read("attention.sliding_window", int, None) or None,  # 0 for none
            # For the families that have this switch, llama.cpp ignores the window.
            "use_sliding_window": False,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
            "clip_qkv": read("attention.clamp_kqv", float, None),
            # Only layers without a window have it, in families where others have a window.
            "rope_scaling": rope,
            # The dtype of quantised weights does not tell the dtype to compute in. Most models were
            # trained in bf16, and some overflow in fp16.
            "dtype": "bfloat16",
            **architecture.constants,
        }
        hf |= {name: read(field, float) for name, field in architecture.floats.items()}
        hf |= {name: read(field, int) for name, field in architecture.ints.items()}
        if self.arch.startswith("gemma"):
            # As in llama.cpp, the 27B models are recognised by their number of layers. They scale
            # queries by another size than head_dim.
            is_27b = hf["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[self.arch]
            hf["query_pre_attn_scalar"] = hidden_size // heads if is_27b else head_dim
        family = architecture.family or self.arch
        if family == "llama" and read("expert_count", int, 0):
            family, hf = "mixtral", hf | {name: read(EXPERTS[name], int) for name in EXPERTS}
        elif family == "llama" and hf["sliding_window"] is not None:
            family = "mistral"
        return with_gguf_names(get_family(family).read(hf))

    def _read_rope(self, read: Any, head_dim: int) -> dict[str, Any]:
        # llama.cpp scales linearly if a file has a factor without a type. 0 stands for no factor.
        has_factor = read("rope.scaling.factor", float, 0.0) != 0
        kind = read("rope.scaling.type", str, "linear" if has_factor else "none")
        rope: dict[str, Any] = {
            "rope_theta": read("rope.freq_base", float, 10000.0),
            "rope_type": "default" if kind == "none" else kind,
            "partial_rotary_factor": read("rope.dimension_count", int, head_dim) / max(head_dim, 1),
            **self._architecture.rope,
        }
        if kind in ("linear", "yarn"):
            rope["factor"] = read("rope.scaling.factor", float)
        if kind == "yarn":
            rope |= {name: read(f"rope.scaling.yarn_{name}", float, None) for name in YARN_BETAS}
            for name in UNSUPPORTED_YARN:
                if read(f"rope.scaling.{name}", float, None) is not None:
                    raise ValueError(f"{self.arch}.rope.scaling.{name} is not supported")
        if has_factors := any(name in self.file.tensors for name in LONGROPE_FACTORS.values()):
            rope |= {field: self._rope_values(name) for field, name in LONGROPE_FACTORS.items()}
            rope["rope_type"] = "longrope"
            rope["attention_factor"] = read("rope.scaling.attn_factor", float, None)
        if kind == "yarn" or has_factors:
            rope[ORIGINAL_LENGTH] = read("rope.scaling.original_context_length", int)
        if ROPE_DIVISORS in self.file.tensors:  # Llama 3's scaling, precomputed by the converter
            rope["freq_divisors"] = self._rope_values(ROPE_DIVISORS)
        return rope

    def _rope_values(self, name: str) -> Any:
        if name not in self.file.tensors:
            raise ValueError(f"it lacks the tensor {name}")
        data = self.file.tensors[name][1]
        if data.size > 4 * MAX_SIZES["head_dim"]:
            raise ValueError(f"{name} is too large for any head")
        return self._dequantize(name, data).tolist()

    def _dequantize(self, name: str, data: np.ndarray) -> torch.Tensor:
        """Returns a tensor, or the part of it for one expert, in fp32 with its rows in
        transformers' order."""
        kind = self.file.tensors[name][0]
        message = f"{self.path}: tensor {name!r:.80} ({kind.name}) cannot be dequantised:"
        with as_value_error(message):  # an unsupported type, or a shape that does not fit heads
            weight = torch.from_numpy(gguf.quants.dequantize(data, kind).astype("float32"))
            if self._architecture.reorders and ".attn_q." in name:
                return _to_half_split(weight, self.config.num_attention_heads)
            if self._architecture.reorders and ".attn_k." in name:
                return _to_half_split(weight, self.config.num_key_value_heads)
            return weight - 1 if self._architecture.adds_1 and name.endswith(NORM) else weight

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
