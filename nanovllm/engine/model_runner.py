"""Runs scheduled batches on one rank's device. Never decides who runs."""

import gc
from dataclasses import replace
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
from nanovllm.engine.model_inputs import ModelInputs, PackedInputs
from nanovllm.engine.sampling_inputs import prepare_sample
from nanovllm.engine.sampling_state import SamplingState
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.workers import Worker, Workers, interrupts_delayed
from nanovllm.kernels.all_reduce import OneShotAllReduce, can_one_shot
from nanovllm.kernels.attention_backend import select_attention_backend
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.sampler import Sampler, SamplingInputs, pack_logprobs
from nanovllm.models.checkpoint import Checkpoint, open_checkpoint
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.registry import get_model_class
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.context import step_context
from nanovllm.utils.distributed import TPGroup, connect_store, make_tp_group, use_tp_group
from nanovllm.utils.loader import load_model
from nanovllm.utils.math import cdiv, heads_per_rank

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
        self,
        config: Config,
        checkpoint: Checkpoint,
        max_model_len: int,
        workers: Workers | None = None,
        worker: Worker | None = None,
    ) -> None:
        self.config = config
        self.model_config = checkpoint.config
        self.max_model_len = max_model_len
        self.workers = workers
        self.worker = worker
        self.hidden_states: torch.Tensor | None = None
        self.startup_seconds: dict[str, float] = {}
        self._last_part = perf_counter()
        rank, size = worker.rank if worker else 0, config.tensor_parallel_size
        self.device = select_device(config.device, rank, size)
        self.dtype = select_dtype(config.dtype, self.device, checkpoint.config.dtype)
        self._bytes_before = self._allocated_bytes()
        self._meet_ranks()
        self.tp = self._make_tp_group(rank, size)
        self._timed("device and ranks")
        self.backend = select_attention_backend(
            config.attention_backend,
            num_heads=self.model_config.num_attention_heads // size,
            num_kv_heads=heads_per_rank(self.model_config.num_key_value_heads, size),
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
        self._meet_ranks()
        self._timed("weights")
        self.sampler = Sampler()
        self.graphs = self._new_graphs()
        self.num_kvcache_blocks = self.tp.min(self.measure_kv_cache(), self.device)
        self.allocate_kv_cache(self.num_kvcache_blocks)
        self._timed("warm-up and KV cache")
        if self.uses_graphs:
            self.capture_cudagraph(capture_sizes(self.max_num_seqs))
        self._meet_ranks()
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
        """Rank 0: runs a method by name, on every rank at once where there are several. It is
        done whole or never again.

        Raises:
            WorkerError: another rank has failed; so does every later call.
        """
        if self.workers is None:
            return getattr(self, method)(*args)
        with interrupts_delayed():
            try:
                self.write_shm(method, *args)
                return getattr(self, method)(*args)
            except BaseException as error:
                self.workers.fail(error)
                raise

    def write_shm(self, method: str, *args: Any) -> None:
        """Rank 0: mirrors a call to the workers."""
        assert self.workers is not None
        self.workers.send(method, args)

    def read_shm(self) -> tuple[str, tuple[Any, ...]]:
        """A worker: the next call to mirror."""
        assert self.worker is not None
        return self.worker.receive()

    def loop(self) -> None:
        """A worker's life: does what rank 0 does, until ``exit``."""
        method = ""
        while method != "exit":
            method, args = self.read_shm()
            getattr(self, method)(*args)

    def run(self, batch: Batch) -> StepOutput:
        """Rank 0: computes a batch and draws a token for each of its sampled sequences.

        Raises:
            WorkerError: another rank has failed; so does every later call.
        """
        with torch.inference_mode():
            inputs = self.prepare_prefill(batch) if batch.is_prefill else self.prepare_decode(batch)
            logits = self.call("run_step", inputs, batch.block_copies)
            prompt_logprobs = self.compute_prompt_logprobs(batch) if batch.is_prefill else {}
            output = StepOutput([], None, prompt_logprobs)
            if num_sampled := len(batch.sampled):
                token_ids, logprobs = self.sampler(logits[:num_sampled], self.prepare_sample(batch))
                output = StepOutput(
                    token_ids.tolist(),
                    None if logprobs is None else logprobs.numpy(force=True),
                    prompt_logprobs,
                )
        if self.workers is not None:
            self.workers.check()  # on a GPU, a rank that dies leaves sums that are none
        return output

    @torch.inference_mode()
    def run_step(
        self, inputs: PackedInputs, block_copies: tuple[tuple[int, int], ...] = ()
    ) -> torch.Tensor | None:
        """Every rank: logits [num_sampled or more, vocab_size] on rank 0, None on the others."""
        self.hidden_states = None
        self.copy_blocks(block_copies)
        if not inputs.context.is_prefill and inputs.batch_size in self.graphs.graphs:
            return self.graphs.replay(inputs)
        self.hidden_states, logits = self.run_model(inputs.to(self.device))
        return logits

    @torch.inference_mode()
    def compute_logits(self, start: int, stop: int) -> torch.Tensor | None:
        """Every rank: logits of rows [start, stop) of the last step's hidden states."""
        assert self.hidden_states is not None
        return self.model.compute_logits(self.hidden_states[start:stop])

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

    def compute_prompt_logprobs(self, batch: Batch) -> dict[int, np.ndarray]:
        """Packed rows of the prompt tokens that follow this step's, by seq_id, for sequences that
        ask for them and up to where they have them."""
        found: dict[int, np.ndarray] = {}
        offset = 0
        for item in batch.items:
            seq, first = item.seq, item.seq.num_prompt_logprobs
            last = min(item.end, seq.num_prompt_tokens - 1)
            if seq.wants_prompt_logprobs and first < last:
                k = seq.sampling_params.prompt_logprobs
                assert k is not None
                parts = []
                for start in range(first, last, PROMPT_LOGITS_ROWS):
                    stop = min(start + PROMPT_LOGITS_ROWS, last)
                    row = offset - item.start
                    logits = self.call("compute_logits", row + start, row + stop)
                    # The logits of a token are those of the token before it.
                    ids = torch.tensor(seq.token_ids[start + 1 : stop + 1], device=self.device)
                    width = logits.size(1) if k == -1 else k
                    parts.append(pack_logprobs(logits, ids, width).numpy(force=True))
                found[seq.seq_id] = np.concatenate(parts)
            offset += item.num_tokens
        return found

    def prepare_prefill(self, batch: Batch) -> PackedInputs:
        """Inputs on the host."""
        inputs = model_inputs.prepare_prefill(batch, self.config.kvcache_block_size)
        return inputs.pack(pin_memory=self.device.type == "cuda")

    def prepare_decode(self, batch: Batch) -> PackedInputs:
        """Inputs on the host, padded for a graph if there is one."""
        block_size = self.config.kvcache_block_size
        size = self.graphs.padded_size(len(batch))
        if size is None:
            inputs = model_inputs.prepare_decode(batch, block_size)
        else:
            width = self.graphs.table_width
            inputs = model_inputs.prepare_decode(batch, block_size, size, width)
        return inputs.pack(pin_memory=self.device.type == "cuda")

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
        batch = Batch(tuple(items), is_prefill=True)
        logits = self.run_step(self.prepare_prefill(batch))
        if logits is not None:
            self.sampler(logits, self.prepare_sample(batch))
        self.hidden_states = None

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
        del self.graphs, self.kv_cache, self.model, self.attention_layers, self.hidden_states
        gc.collect()  # parameters and their weight loaders refer to each other
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        self.tp.close()  # frees its buffers, and does not wait for peers as its destructor might

    def close(self) -> None:
        """Rank 0: ends the workers, then itself."""
        if self.workers is not None:
            self.workers.close()
        self.exit()

    def _meet_ranks(self) -> None:
        """Rank 0 goes on once all workers have come as far, and hears at once of one that has
        failed; collectives, which would wait for it, start only then."""
        if self.workers is not None:
            self.workers.wait_ready()
        if self.worker is not None:
            self.worker.report_ready()

    def _make_tp_group(self, rank: int, size: int) -> TPGroup:
        link = self.workers or self.worker
        if link is None:
            return TPGroup()
        store = connect_store(link.port, size)
        group = make_tp_group(rank, size, store, self.device)
        if self.device.type == "cuda" and can_one_shot(size):
            one_shot = OneShotAllReduce(rank, size, store, self.dtype, self.device)
            group = replace(group, one_shot=one_shot)
            group.min(0, self.device)  # no flag may be raised before it has been zeroed
        if self.workers is not None:
            self.workers.on_failure(group.abort)
        return group

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


def start_ranks(config: Config, checkpoint: Checkpoint, max_model_len: int) -> ModelRunner:
    """Rank 0's runner, with workers behind it if there are several ranks.

    Raises:
        WorkerError: a worker could not start. None is left then.
    """
    if config.tensor_parallel_size == 1:
        return ModelRunner(config, checkpoint, max_model_len)
    select_device(config.device, 0, config.tensor_parallel_size)  # before any process starts
    workers = Workers(config.tensor_parallel_size, run_worker, config, max_model_len)
    try:
        return ModelRunner(config, checkpoint, max_model_len, workers)
    except BaseException as error:
        try:
            workers.fail(error)
        finally:
            workers.close()
        raise


def run_worker(worker: Worker, config: Config, max_model_len: int) -> None:
    """What a worker process does."""
    torch.set_num_threads(worker.num_threads)
    ModelRunner(config, open_checkpoint(config.model), max_model_len, worker=worker).loop()


def select_device(name: str, rank: int = 0, num_ranks: int = 1) -> torch.device:
    """Raises ValueError for "cuda" without a GPU, or with fewer than ranks."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("device='cuda', but PyTorch finds no CUDA GPU: use device='cpu'")
    if not available or name == "cpu":
        return torch.device("cpu")
    if torch.cuda.device_count() < num_ranks:
        raise ValueError(
            f"tensor_parallel_size={num_ranks}, but PyTorch finds {torch.cuda.device_count()} "
            f"GPUs: lower it, or use device='cpu'"
        )
    return torch.device("cuda", rank) if num_ranks > 1 else torch.device("cuda")


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
