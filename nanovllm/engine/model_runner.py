"""Runs scheduled batches on one rank's device. Never decides who runs."""

import gc
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.engine import model_inputs
from nanovllm.engine.batch import Batch, ScheduledSequence, StepOutput
from nanovllm.engine.cuda_graphs import DecodeGraphs, capture_sizes
from nanovllm.engine.kv_cache import block_bytes, num_blocks_on_cpu, num_blocks_on_gpu
from nanovllm.engine.model_inputs import ModelInputs
from nanovllm.engine.sampling_inputs import prepare_sample
from nanovllm.engine.sampling_state import SamplingState
from nanovllm.engine.sequence import Sequence
from nanovllm.kernels.attention_backend import select_attention_backend
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.sampler import Sampler, SamplingInputs, pack_logprobs
from nanovllm.models.checkpoint import Checkpoint
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.registry import get_model_class
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.context import step_context
from nanovllm.utils.distributed import TPGroup, use_tp_group
from nanovllm.utils.loader import load_model
from nanovllm.utils.math import cdiv

# The CUDA context and libraries take up to this much outside PyTorch's books (H200, CUDA 13).
CONTEXT_BYTES = 600 << 20
# Prompt positions whose logits exist at once where prompt_logprobs are asked for.
PROMPT_LOGITS_ROWS = 256


class ModelRunner:
    """One rank: the model's shard, its part of the KV cache, and the steps run on them.

    Attributes:
        num_kvcache_blocks: blocks that the cache has.
        startup_seconds: how long each part of start-up took.
    """

    def __init__(
        self, config: Config, checkpoint: Checkpoint, max_model_len: int, tp: TPGroup
    ) -> None:
        self.config = config
        self.model_config = checkpoint.config
        self.max_model_len = max_model_len
        self.tp = tp
        self.startup_seconds: dict[str, float] = {}
        self._last_part = perf_counter()
        self.device = select_device(config.device)
        self.dtype = select_dtype(config.dtype, self.device, checkpoint.config.dtype)
        self._bytes_before = self._allocated_bytes()
        self._timed("device")
        self.backend = select_attention_backend(
            config.attention_backend,
            num_heads=self.model_config.num_attention_heads // tp.size,
            num_kv_heads=self.model_config.num_key_value_heads // tp.size,
            head_dim=self.model_config.head_dim,
            block_size=config.kvcache_block_size,
            dtype=self.dtype,
            device=self.device,
        )
        self._timed("attention backend")
        self.model = self._build_model(checkpoint)
        self.attention_layers = [m for m in self.model.modules() if isinstance(m, Attention)]
        for layer in self.attention_layers:
            layer.backend = self.backend
        self._timed("weights")
        self.sampler = Sampler()
        self.graphs = self._new_graphs()
        self.num_kvcache_blocks = self.measure_kv_cache()
        self.allocate_kv_cache(self.num_kvcache_blocks)
        self._timed("warm-up and KV cache")
        if self.uses_graphs:
            self.capture_cudagraph(capture_sizes(self.max_num_seqs))
        self._timed("CUDA graphs")

    @property
    def uses_graphs(self) -> bool:
        on_gpu = self.device.type == "cuda"
        return on_gpu and self.backend.capturable and not self.config.enforce_eager

    @property
    def max_num_seqs(self) -> int:
        """Most sequences that the scheduler puts into one step."""
        return min(self.config.max_num_seqs, self.config.max_num_batched_tokens)

    def call(self, method: str, *args: Any) -> Any:
        """Runs a method by name, on every rank at once where there are several."""
        return getattr(self, method)(*args)

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        """Computes a batch; on rank 0, draws one token for each of its sampled sequences."""
        self.copy_blocks(batch.block_copies)
        prompt_logprobs: dict[int, np.ndarray] = {}
        if batch.is_prefill:
            hidden_states, logits = self.run_model(self.prepare_prefill(batch))
            prompt_logprobs = self.compute_prompt_logprobs(batch, hidden_states)
        elif size := self.graphs.padded_size(len(batch)):
            logits = self.graphs.replay(self.prepare_decode(batch, size))
        else:
            _, logits = self.run_model(self.prepare_decode(batch))
        num_sampled = len(batch.sampled)
        if logits is None or not num_sampled:
            return StepOutput([], None, prompt_logprobs)
        token_ids, logprobs = self.sampler(logits[:num_sampled], self.prepare_sample(batch))
        return StepOutput(
            token_ids.tolist(),
            None if logprobs is None else logprobs.numpy(force=True),
            prompt_logprobs,
        )

    def run_model(self, inputs: ModelInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states [N, hidden_size]; and logits [num_sampled, vocab_size] on rank 0, None
        on the others."""
        with step_context(inputs.context):
            hidden_states = self.model(inputs.input_ids, inputs.positions)
            return hidden_states, self.model.compute_logits(hidden_states)

    def copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copies whole KV blocks, one after the other."""
        for source, target in copies:
            self.kv_cache[:, :, target] = self.kv_cache[:, :, source]

    def compute_prompt_logprobs(
        self, batch: Batch, hidden_states: torch.Tensor
    ) -> dict[int, np.ndarray]:
        """Packed rows of the prompt tokens that follow this step's, by seq_id, for sequences that
        ask for them and up to where they have them."""
        found: dict[int, np.ndarray] = {}
        offset = 0
        for item in batch.items:
            seq, first = item.seq, item.seq.num_prompt_logprobs
            last = min(item.end, seq.num_prompt_tokens - 1)
            if seq.wants_prompt_logprobs and first < last:
                # The logits of a token are those of the token before it.
                rows = hidden_states[offset + first - item.start : offset + last - item.start]
                targets = torch.tensor(seq.token_ids[first + 1 : last + 1], device=self.device)
                k = seq.sampling_params.prompt_logprobs
                assert k is not None
                parts = []
                for part, ids in zip(
                    rows.split(PROMPT_LOGITS_ROWS), targets.split(PROMPT_LOGITS_ROWS), strict=True
                ):
                    logits = self.model.compute_logits(part)
                    if logits is not None:
                        width = logits.size(1) if k == -1 else k
                        parts.append(pack_logprobs(logits, ids, width).numpy(force=True))
                if parts:
                    found[seq.seq_id] = np.concatenate(parts)
            offset += item.num_tokens
        return found

    def prepare_prefill(self, batch: Batch) -> ModelInputs:
        """Inputs on the device."""
        return model_inputs.prepare_prefill(batch, self.config.kvcache_block_size).to(self.device)

    def prepare_decode(self, batch: Batch, padded_size: int = 0) -> ModelInputs:
        """Inputs on the device; or, padded for a graph, on the host."""
        block_size = self.config.kvcache_block_size
        if padded_size:
            width = self.graphs.table_width
            return model_inputs.prepare_decode(batch, block_size, padded_size, width)
        return model_inputs.prepare_decode(batch, block_size).to(self.device)

    def prepare_sample(self, batch: Batch) -> SamplingInputs:
        """How to draw the next tokens, on the device."""
        return prepare_sample(batch).to(self.device)

    @torch.inference_mode()
    def warmup_model(self) -> None:
        """A prefill of the largest batch: as many tokens as a step takes, and as many sampled
        sequences. Nothing is cached yet, so it stores nothing."""
        num_tokens, num_seqs = self.config.max_num_batched_tokens, self.max_num_seqs
        lens = [num_tokens // num_seqs + (i < num_tokens % num_seqs) for i in range(num_seqs)]
        items = []
        sampling = SamplingState(SamplingParams(), 0, [], self.model_config.vocab_size)
        for length in lens:
            seq = Sequence([0] * min(length, self.max_model_len))
            seq.sampling = sampling
            seq.block_table = [0] * cdiv(len(seq), self.config.kvcache_block_size)
            items.append(ScheduledSequence(seq, 0, len(seq), samples=True))
        self.run(Batch(tuple(items), is_prefill=True))

    def measure_kv_cache(self) -> int:
        """How many KV blocks to have."""
        config = self.config
        block_size, itemsize = config.kvcache_block_size, self.dtype.itemsize
        num_bytes = block_bytes(self.model_config, block_size, self.tp.size, itemsize)
        if self.device.type == "cpu":
            if config.num_kvcache_blocks != -1:
                return config.num_kvcache_blocks
            return num_blocks_on_cpu(num_bytes, block_size, config.max_num_seqs, self.max_model_len)
        torch.cuda.reset_peak_memory_stats()
        self.warmup_model()
        peak = torch.cuda.max_memory_allocated() - self._bytes_before
        graph_bytes = self._measure_graphs() if self.uses_graphs else 0
        if config.num_kvcache_blocks != -1:
            return config.num_kvcache_blocks
        own = self._allocated_bytes() - self._bytes_before
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return num_blocks_on_gpu(
            total_bytes=total,
            free_bytes=free,
            own_bytes=own + CONTEXT_BYTES,
            peak_bytes=peak + CONTEXT_BYTES,
            graph_bytes=graph_bytes,
            utilization=config.gpu_memory_utilization,
            bytes_per_block=num_bytes,
            block_size=block_size,
            max_model_len=self.max_model_len,
        )

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Gives each attention layer its view of one [2, layers, blocks, block_size, kv_heads,
        head_dim] tensor."""
        first = self.attention_layers[0]
        blocks = (len(self.attention_layers), num_blocks, self.config.kvcache_block_size)
        heads = (first.num_kv_heads, first.head_dim)
        # Not zeroed: no slot is read before it is written, and a CPU's pages stay unused till then.
        try:
            self.kv_cache = torch.empty(2, *blocks, *heads, dtype=self.dtype, device=self.device)
        except RuntimeError as error:
            raise ValueError(
                f"a KV cache of {num_blocks} blocks does not fit into memory ({error}): lower "
                f"num_kvcache_blocks"
            ) from error
        for layer, k_cache, v_cache in zip(self.attention_layers, *self.kv_cache, strict=True):
            layer.k_cache, layer.v_cache = k_cache, v_cache

    @torch.inference_mode()
    def capture_cudagraph(self, sizes: list[int]) -> None:
        self.graphs.capture(sizes)

    def exit(self) -> None:
        """Frees graphs, cache and weights."""
        del self.graphs, self.kv_cache, self.model, self.attention_layers
        gc.collect()  # parameters and their weight loaders refer to each other
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _measure_graphs(self) -> int:
        """A bound on the memory of all graphs: captures the two largest on a cache of one block,
        and takes what the second adds to their pool for every further one."""
        sizes = capture_sizes(self.max_num_seqs)
        self.allocate_kv_cache(1)
        free = [_free_bytes()]
        for size in sizes[-2:][::-1]:
            self.capture_cudagraph([size])
            free.append(_free_bytes())
        self.graphs = self._new_graphs()
        steps = [before - after for before, after in pairwise(free)]
        return steps[0] + steps[-1] * (len(sizes) - 1)

    def _new_graphs(self) -> DecodeGraphs:
        table_width = cdiv(self.max_model_len, self.config.kvcache_block_size)
        return DecodeGraphs(lambda x: self.run_model(x)[1], table_width, self.device)

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

    def _allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def _timed(self, part: str) -> None:
        """Books the time since the last part."""
        now = perf_counter()
        self.startup_seconds[part] = round(now - self._last_part, 3)
        self._last_part = now


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


def fill_with_dummy_weights(model: torch.nn.Module, seed: int) -> None:
    """Norm weights stay 1, biases become 0, matrices are drawn from N(0, 0.02)."""
    params = dict(model.named_parameters())
    generator = torch.Generator(next(iter(params.values())).device).manual_seed(seed)
    for name, param in params.items():
        if param.dim() > 1:
            param.normal_(0, 0.02, generator=generator)
        elif name.endswith("bias"):
            param.zero_()


def _free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
