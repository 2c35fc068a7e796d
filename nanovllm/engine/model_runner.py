"""Runs scheduled batches on one rank's device. Never decides who runs."""

from typing import Any

import torch
from torch import nn

from nanovllm.config import Config
from nanovllm.engine import model_inputs
from nanovllm.engine.batch import Batch
from nanovllm.engine.kv_cache import block_bytes, num_blocks_on_cpu
from nanovllm.engine.model_inputs import ModelInputs
from nanovllm.kernels.attention_backend import select_attention_backend
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.sampler import Sampler
from nanovllm.models.checkpoint import Checkpoint
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.registry import get_model_class
from nanovllm.utils.context import step_context
from nanovllm.utils.distributed import TPGroup, use_tp_group
from nanovllm.utils.loader import load_model


class ModelRunner:
    """One rank: the model's shard, its part of the KV cache, and the steps run on them.

    Attributes:
        num_kvcache_blocks: blocks that the cache has.
    """

    def __init__(
        self, config: Config, checkpoint: Checkpoint, max_model_len: int, tp: TPGroup
    ) -> None:
        self.config = config
        self.model_config = checkpoint.config
        self.max_model_len = max_model_len
        self.tp = tp
        self.device = select_device(config.device)
        self.dtype = select_dtype(config.dtype, self.device, checkpoint.config.dtype)
        self.backend = select_attention_backend(config.attention_backend)
        self.model = self._build_model(checkpoint)
        self.attention_layers = [m for m in self.model.modules() if isinstance(m, Attention)]
        for layer in self.attention_layers:
            layer.backend = self.backend
        self.sampler = Sampler()
        self.generator = torch.Generator(self.device).manual_seed(config.seed)
        self.num_kvcache_blocks = self.allocate_kv_cache()

    def call(self, method: str, *args: Any) -> Any:
        """Runs a method by name, on every rank at once where there are several."""
        return getattr(self, method)(*args)

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[int]:
        """Computes a batch; on rank 0, draws one token for each of its sampled sequences."""
        prepare = self.prepare_prefill if batch.is_prefill else self.prepare_decode
        logits = self.run_model(prepare(batch))
        if logits is None:
            return []
        temperatures = self.prepare_sample(batch)
        return self.sampler(logits, temperatures, self.generator).tolist()

    def run_model(self, inputs: ModelInputs) -> torch.Tensor | None:
        """Logits [num_sampled, vocab_size] on rank 0, None on the others."""
        with step_context(inputs.context):
            hidden_states = self.model(inputs.input_ids, inputs.positions)
            return self.model.compute_logits(hidden_states)

    def prepare_prefill(self, batch: Batch) -> ModelInputs:
        return model_inputs.prepare_prefill(batch, self.config.kvcache_block_size).to(self.device)

    def prepare_decode(self, batch: Batch) -> ModelInputs:
        return model_inputs.prepare_decode(batch, self.config.kvcache_block_size).to(self.device)

    def prepare_sample(self, batch: Batch) -> torch.Tensor | None:
        temperatures = model_inputs.prepare_sample(batch)
        return None if temperatures is None else temperatures.to(self.device)

    def allocate_kv_cache(self) -> int:
        """Gives each attention layer its view of one [2, layers, blocks, block_size, kv_heads,
        head_dim] tensor; returns the number of blocks."""
        config, model = self.config, self.model_config
        block_size = config.kvcache_block_size
        num_blocks = config.num_kvcache_blocks
        if num_blocks == -1:
            num_bytes = block_bytes(model, block_size, self.tp.size, self.dtype.itemsize)
            num_blocks = num_blocks_on_cpu(
                num_bytes, block_size, config.max_num_seqs, self.max_model_len
            )
        # Not zeroed: no slot is read before it is written, and a CPU's pages stay unused till then.
        first = self.attention_layers[0]
        blocks = (len(self.attention_layers), num_blocks, block_size)
        heads = (first.num_kv_heads, first.head_dim)
        self.kv_cache = torch.empty(2, *blocks, *heads, dtype=self.dtype, device=self.device)
        for layer, k_cache, v_cache in zip(self.attention_layers, *self.kv_cache, strict=True):
            layer.k_cache, layer.v_cache = k_cache, v_cache
        return num_blocks

    def _build_model(self, checkpoint: Checkpoint) -> DecoderForCausalLM:
        """The model on this rank's device in its dtype, with weights."""
        model_class = get_model_class(self.model_config.architecture)
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.device(self.device), use_tp_group(self.tp):
                model = model_class(self.model_config, self.max_model_len)
        finally:
            torch.set_default_dtype(default_dtype)
        with torch.inference_mode():
            if self.config.load_format == "dummy":
                fill_with_dummy_weights(model, self.config.seed)
            else:
                load_model(model, checkpoint.tensors())
            for module in model.modules():
                if isinstance(module, (LinearBase, ParallelLMHead)):
                    module.pack()
        return model.eval()


def select_device(name: str) -> torch.device:
    """Raises ValueError for "cuda" without a GPU."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("device='cuda', but PyTorch finds no CUDA GPU: use device='cpu'")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def select_dtype(name: str, device: torch.device, checkpoint: torch.dtype) -> torch.dtype:
    if name != "auto":
        return getattr(torch, name)
    return torch.float32 if device.type == "cpu" else checkpoint


def fill_with_dummy_weights(model: nn.Module, seed: int) -> None:
    """Norm weights stay 1, biases become 0, matrices are drawn from N(0, 0.02)."""
    for name, param in model.named_parameters():
        if param.dim() > 1:
            generator = torch.Generator(param.device).manual_seed(seed)
            param.normal_(0, 0.02, generator=generator)
        elif name.endswith("bias"):
            param.zero_()
