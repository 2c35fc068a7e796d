"""Checkpoints in GGUF, llama.cpp's single-file format: config, tokenizer and weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nanovllm.models.model_config import ModelConfig
from nanovllm.models.registry import get_model_class

# llama.cpp's "llama" is Llama's and Mistral's common graph.
ARCHITECTURES = {
    "llama": (gguf.MODEL_ARCH.LLAMA, "LlamaForCausalLM"),
    "qwen2": (gguf.MODEL_ARCH.QWEN2, "Qwen2ForCausalLM"),
    "qwen3": (gguf.MODEL_ARCH.QWEN3, "Qwen3ForCausalLM"),
}
PRE_TOKENIZERS_WITH_BOS = ("llama3", "llama-v3", "llama-bpe")
ROPE_DIVISORS = "rope_freqs.weight"


class GGUFCheckpoint:
    """A ``.gguf`` file; quantised weights are dequantised tensor by tensor as they are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.reader = gguf.GGUFReader(path)
        except Exception as error:  # the reader raises whatever its parsing runs into
            raise ValueError(
                f"{path} cannot be read as GGUF ({error}): it is truncated or damaged"
            ) from error
        self._tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.arch = self._field("general.architecture")
        if self.arch not in ARCHITECTURES:
            raise ValueError(
                f"GGUF architecture {self.arch!r} is not served; "
                f"those served are {', '.join(ARCHITECTURES)}"
            )
        self.config = self._read_config()
        eos_names = ("eos_token_id", "eot_token_id")
        eos = (self._field(f"tokenizer.ggml.{name}", None) for name in eos_names)
        self.eos_token_ids = frozenset(token_id for token_id in eos if token_id is not None)
        self.recommended_sampling: dict[str, Any] = {}

    def load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        if "tokenizer.ggml.model" not in self.reader.fields:
            return None
        kwargs: dict[str, Any] = {}
        # Where the file does not say, llama.cpp goes by the kind of its pre-tokenizer.
        unsaid = "tokenizer.ggml.add_bos_token" not in self.reader.fields
        if unsaid and self._field("tokenizer.ggml.pre", None) in PRE_TOKENIZERS_WITH_BOS:
            kwargs["add_bos_token"] = True
        return AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name, **kwargs)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        name_map = self._hf_names()
        for name, tensor in self._tensors.items():
            if name == ROPE_DIVISORS:
                continue
            yield name_map.get(name, name), self._dequantize(tensor)

    def _read_config(self) -> ModelConfig:
        def fact(name: str, *default: Any) -> Any:
            return self._field(f"{self.arch}.{name}", *default)

        architecture = ARCHITECTURES[self.arch][1]
        heads, hidden_size = fact("attention.head_count"), fact("embedding_length")
        head_dim = fact("attention.key_length", hidden_size // heads if heads else 0)
        vocab_size = fact("vocab_size", None) or len(self._field("tokenizer.ggml.tokens"))
        hf = {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": fact("feed_forward_length"),
            "num_hidden_layers": fact("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": fact("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": fact("context_length"),
            "rms_norm_eps": fact("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "sliding_window": fact("attention.sliding_window", None),
            "rope_parameters": self._read_rope(fact, head_dim),
            "dtype": "float16",  # where a GPU has to choose: quantisation scales are fp16
        }
        flags = get_model_class(architecture).config_flags(
            "blk.0.attn_q.bias" in self._tensors, "blk.0.ffn_up.bias" in self._tensors
        )
        return ModelConfig.from_hf(architecture, hf, flags)

    def _read_rope(self, fact: Any, head_dim: int) -> dict[str, Any]:
        kind = fact("rope.scaling.type", "none")
        rope: dict[str, Any] = {
            "rope_theta": fact("rope.freq_base", 10000.0),
            "rope_type": "default" if kind == "none" else kind,
            "partial_rotary_factor": fact("rope.dimension_count", head_dim) / max(head_dim, 1),
        }
        if kind == "linear":
            rope["factor"] = fact("rope.scaling.factor")
        if ROPE_DIVISORS in self._tensors:  # Llama 3's scaling, worked out by the converter
            rope["freq_divisors"] = self._dequantize(self._tensors[ROPE_DIVISORS]).tolist()
        return rope

    def _hf_names(self) -> dict[str, str]:
        """GGUF tensor name -> transformers' name, through the format's own table."""
        config = self.config
        table = gguf.get_tensor_name_map(ARCHITECTURES[self.arch][0], config.num_hidden_layers)
        layer = ["input_layernorm", "post_attention_layernorm"]
        layer += [f"self_attn.{x}" for x in ("q_proj", "k_proj", "v_proj", "o_proj")]
        layer += ["self_attn.q_norm", "self_attn.k_norm"]
        layer += [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
        modules = ["model.embed_tokens", "model.norm", "lm_head"]
        modules += [f"model.layers.{i}.{x}" for i in range(config.num_hidden_layers) for x in layer]
        names = ((module, table.get_name(module)) for module in modules)
        return {
            f"{gguf_name}.{kind}": f"{module}.{kind}"
            for module, gguf_name in names
            if gguf_name
            for kind in ("weight", "bias")
        }

    def _dequantize(self, tensor: Any) -> torch.Tensor:
        """fp32, in the row order that transformers uses."""
        try:
            array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except Exception as error:  # unknown type, or data cut short
            raise ValueError(
                f"{self.path}: tensor {tensor.name} ({tensor.tensor_type.name}) cannot be "
                f"dequantised: {error}"
            ) from error
        weight = torch.from_numpy(array.astype("float32"))
        if self.arch == "llama" and ".attn_q." in tensor.name:
            return _to_half_split(weight, self.config.num_attention_heads)
        if self.arch == "llama" and ".attn_k." in tensor.name:
            return _to_half_split(weight, self.config.num_key_value_heads)
        return weight

    def _field(self, name: str, *default: Any) -> Any:
        field = self.reader.fields.get(name)
        if field is not None:
            return field.contents()
        if default:
            return default[0]
        raise ValueError(f"{self.path} lacks the field {name}")


def _to_half_split(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undoes llama.cpp's reordering of q and k rows: it rotates neighbours (2i, 2i + 1) where
    transformers rotates halves (i, i + D/2)."""
    rows = weight.size(0)
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
