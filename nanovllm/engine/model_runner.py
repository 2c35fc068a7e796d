"""Runs scheduled batches on one rank's device. Never decides who runs."""

import gc
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import pairwise
from time import perf_counter
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from nanovllm.checkpoints.checkpoint import Checkpoint, open_checkpoint
from nanovllm.config import Config
from nanovllm.engine import model_inputs
from nanovllm.engine.batch import Batch, ScheduledSequence, StepOutput
from nanovllm.engine.cuda_graphs import StepGraphs, decode_sizes, graph_bytes, prefill_sizes
from nanovllm.engine.kv_cache import (
    CPU_CACHE_BYTES,
    block_bytes,
    num_blocks_on_cpu,
    num_blocks_on_gpu,
)
from nanovllm.engine.model_inputs import GraphSize, ModelInputs, PackedInputs
from nanovllm.engine.sampling_inputs import prepare_sample, sampling_rows
from nanovllm.engine.sampling_state import SamplingState
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.workers import Worker, Workers, interrupts_delayed
from nanovllm.kernels.attention.backend import select_attention_backend
from nanovllm.kernels.comm.all_reduce import make_one_shots
from nanovllm.kernels.gemm.cublas import small_cublas_workspace
from nanovllm.kernels.sampling.logprobs import pack_logprobs
from nanovllm.kernels.sampling.sampled_tokens import fill_in_drawn
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.sampler import Sampler, SamplingInputs
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.registry import get_model_class
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.compile_ahead import compiling_only
from nanovllm.utils.context import step_context
from nanovllm.utils.distributed import TPGroup, make_tp_group, use_tp_group
from nanovllm.utils.forks import leave_to_parent
from nanovllm.utils.loader import load_model
from nanovllm.utils.math import cdiv, heads_per_rank
from nanovllm.utils.triton_compat import HAS_TRITON

# The CUDA context and libraries take up to this much outside PyTorch's books (H200, CUDA 13).
CONTEXT_BYTES = 600 << 20
# Prompt positions whose logits exist at once where prompt_logprobs are asked for.
PROMPT_LOGITS_ROWS = 256
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class LaunchedStep:
    """A step under way: its batch, and its results, some still on their way to the host."""

    batch: Batch
    token_ids: torch.Tensor
    logprobs: torch.Tensor | None = None
    prompt_logprobs: dict[int, np.ndarray] = field(default_factory=dict)
    arrived: torch.cuda.Event | None = None

    def wait(self) -> StepOutput:
        if self.arrived is not None:
            self.arrived.synchronize()
        logprobs = None if self.logprobs is None else self.logprobs.numpy()
        return StepOutput(self.token_ids.tolist(), logprobs, self.prompt_logprobs)


def on_device(
    method: Callable[Concatenate["ModelRunner", P], R],
) -> Callable[Concatenate["ModelRunner", P], R]:
    """Makes the runner's GPU PyTorch's current device during a call, whatever the user's program,
    another thread or another engine has chosen. In a forked child the call is a ValueError."""

    @wraps(method)
    def call(self: "ModelRunner", *args: P.args, **kwargs: P.kwargs) -> R:
        if self.is_forked:
            raise ValueError(
                f"this engine belongs to process {self._pid}, of which this one is a forked child: "
                f"make another engine here, or start the process with spawn instead of fork"
            )
        if self.device.type == "cpu":
            return method(self, *args, **kwargs)
        with torch.cuda.device(self.device):
            return method(self, *args, **kwargs)

    return call


class ModelRunner:
    """One rank: the model's shard, its part of the KV cache, and the steps run on them.

    Attributes:
        device: where it runs; a GPU has an index.
        num_kvcache_blocks: blocks that the cache has.
        startup_seconds: how long each part of start-up took.

    Raises:
        ValueError: the device or the attention backend is not there, or the KV cache does not fit.
        WorkerError: another rank has failed.
        Exception: any other, of loading and capturing. Of all of them, the memory that start-up had
            taken is free again, whoever keeps the exception.
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
        # Of the last step: what the model gave (None after a graph), this rank's logits, and on
        # rank 0 what its tokens are to be drawn by, unless it has drawn them itself.
        self.hidden_states: torch.Tensor | None = None
        self.logits: torch.Tensor | None = None
        self.sampling: SamplingInputs | None = None
        self.startup_seconds: dict[str, float] = {}
        self._last_part = perf_counter()
        self.tp = TPGroup()
        self._pid = os.getpid()
        leave_to_parent(self)
        rank = worker.rank if worker else 0
        self.device = select_device(config.device, rank, config.tensor_parallel_size)
        try:
            self._start(checkpoint, rank, config.tensor_parallel_size)
        except BaseException as error:
            try:
                if workers is not None:
                    workers.fail(error)
            finally:
                if worker is None:  # a worker's process ends
                    self._abandon(error)
            raise

    @on_device
    def _start(self, checkpoint: Checkpoint, rank: int, size: int) -> None:
        config = self.config
        self.dtype = select_dtype(config.dtype, self.device, checkpoint.config.dtype)
        self._bytes_before = self._allocated_bytes()
        self.timed("device")
        self.backend = select_attention_backend(
            config.attention_backend,
            num_heads=self.model_config.num_attention_heads // size,
            num_kv_heads=heads_per_rank(self.model_config.num_key_value_heads, size),
            head_dim=self.model_config.head_dim,
            block_size=config.kvcache_block_size,
            dtype=self.dtype,
            device=self.device,
        )
        self.timed("attention backend")
        self._meet_ranks()  # workers import, and try out their backends, while rank 0 does
        self._join_tp_group(rank, size)
        self.timed("ranks")
        self._shorten(self._most_blocks())  # before the rotary embedding's cache is as long
        self.model = self._build_model()
        self.attention_layers = [m for m in self.model.modules() if isinstance(m, Attention)]
        for layer in self.attention_layers:
            layer.backend = self.backend
        self.sampler = Sampler(self.model.lm_head)
        self.last_tokens = torch.zeros(self.max_num_seqs, dtype=torch.int64, device=self.device)
        self.graphs = self._new_graphs()
        self.timed("model without weights")
        self._load_weights(checkpoint)
        self._meet_ranks()
        self.timed("weights")
        self.compile_kernels()  # for packed weights: not while they are loaded
        self.timed("kernels")
        self.num_kvcache_blocks = self.tp.min(self.measure_kv_cache(), self.device)
        self._shorten(self.num_kvcache_blocks)
        self.allocate_kv_cache(self.num_kvcache_blocks)
        self.timed("KV cache")
        if self.uses_graphs:
            self.capture_cudagraph(self._graph_sizes())
        self._meet_ranks()
        self.timed("CUDA graphs")

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the one that made the runner."""
        return os.getpid() != self._pid

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

    @on_device
    def loop(self) -> None:
        """A worker's life: does what rank 0 does, until ``exit``."""
        method = ""
        while method != "exit":
            method, args = self.read_shm()
            getattr(self, method)(*args)

    @on_device
    @torch.inference_mode()
    def run(self, batch: Batch) -> None:
        """Rank 0: launches a step; what the step before has drawn need not have arrived.

        Raises:
            ValueError: this process is a forked child of the one that made the engine.
            WorkerError: another rank has failed; so does every later call.
        """
        inputs = self.prepare(batch, self.graphs.size_for(batch))
        self.call("run_step", inputs, batch.block_copies)

    @on_device
    @torch.inference_mode()
    def sample(self, batch: Batch) -> LaunchedStep:
        """Rank 0: sees to it that the tokens of the batch just run are drawn, and on their way.
        The tokens of the step before must have been booked.

        Raises:
            WorkerError: another rank has failed; so does every later call.
        """
        logprobs, num_sampled = None, len(batch.sampled)
        prompt_logprobs = self.compute_prompt_logprobs(batch) if batch.is_prefill else {}
        if num_sampled and not self.draws_in_step(batch):
            self.sampling = self.prepare_sample(batch)
            logprobs = self.call("draw", num_sampled)
        step = LaunchedStep(batch, self.last_tokens[:num_sampled], logprobs, prompt_logprobs)
        if self.device.type == "cuda":
            step.token_ids = step.token_ids.to("cpu", non_blocking=True)
            if logprobs is not None:
                step.logprobs = logprobs.to("cpu", non_blocking=True)
            step.arrived = torch.cuda.Event()
            step.arrived.record()
        else:
            step.token_ids = step.token_ids.clone()
        return step

    def wait(self, step: LaunchedStep) -> StepOutput:
        """Rank 0: a step's results.

        Raises:
            WorkerError: another rank has failed; so does every later call.
        """
        output = step.wait()
        if self.workers is not None:
            self.workers.check()  # on a GPU, a rank that dies leaves sums that are none
        return output

    def draws_in_step(self, batch: Batch) -> bool:
        """Whether drawing takes no more than sampling rows, known before any token has arrived."""
        return not any(
            kind.edits or kind.num_logprobs is not None or (kind.truncates and self.tp.size > 1)
            for kind in batch.sampling_kinds
        )

    @torch.inference_mode()
    def run_step(
        self, inputs: PackedInputs, block_copies: tuple[tuple[int, int], ...] = ()
    ) -> None:
        """Every rank: one step, up to logits or drawn tokens."""
        self.hidden_states = self.logits = None  # the last step's memory serves this one
        for source, target in block_copies:
            self.kv_cache[:, :, target] = self.kv_cache[:, :, source]
        self.logits = self.graphs.replay(inputs)
        if self.logits is None:
            self.hidden_states, self.logits = self.run_model(inputs.to(self.device))

    @torch.inference_mode()
    def draw(self, num_rows: int) -> torch.Tensor | None:
        """Every rank: draws the last step's tokens as rank 0's ``sampling`` says. Returns packed
        logprobs if those are asked for."""
        assert self.logits is not None
        token_ids, logprobs = self.sampler(self.logits[:num_rows], self.sampling)
        self.last_tokens[:num_rows] = token_ids
        self.sampling = None
        return logprobs

    @torch.inference_mode()
    def compute_logits(self, start: int, stop: int) -> torch.Tensor | None:
        """Every rank: logits of rows [start, stop) of the last step's hidden states, whole on
        rank 0 and None on the others; of a prefill that was asked for all of them."""
        assert self.hidden_states is not None
        logits = self.model.compute_logits(self.hidden_states[start:stop])
        return self.model.lm_head.gather(logits)

    def run_model(self, inputs: ModelInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """What the model gives, and this rank's logits [num_seqs, its part of the vocabulary];
        and where the inputs say how, the next tokens are drawn. Fills in
        ``inputs.input_ids``."""
        if not inputs.context.is_prefill:
            fill_in_drawn(inputs.input_ids, self.last_tokens)
        with step_context(inputs.context):
            hidden_states = self.model(inputs.input_ids, inputs.positions)
            logits = self.model.compute_logits(hidden_states)
        if inputs.sampling_rows is not None:
            rows = SamplingInputs(inputs.sampling_rows, truncates=self.tp.size == 1)
            self.last_tokens[: len(logits)] = self.sampler(logits, rows, each_rank=True)[0]
        return hidden_states, logits

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

    def prepare(self, batch: Batch, size: GraphSize | None) -> PackedInputs:
        """Inputs on the host, padded to the size if there is one."""
        block_size = self.config.kvcache_block_size
        _, num_tokens, num_seqs = size or (None, 0, 0)
        if batch.is_prefill:
            longest = self.max_model_len if size else 0
            inputs = model_inputs.prepare_prefill(batch, block_size, num_tokens, num_seqs, longest)
        else:
            inputs = model_inputs.prepare_decode(batch, block_size, num_seqs, self._plan)
        draws = self.draws_in_step(batch)
        if draws or size:  # a graph draws in any case
            rows = sampling_rows(batch.sampled if draws else [], num_seqs or len(batch))
            inputs = replace(inputs, sampling_rows=rows)
        return inputs.pack(pin_memory=self.device.type == "cuda")

    def prepare_sample(self, batch: Batch) -> SamplingInputs:
        """How to draw the next tokens, on the device."""
        return prepare_sample(batch).to(self.device)

    @on_device
    @torch.inference_mode()
    def compile_kernels(self) -> None:
        """Those that steps launch, several at once; else it would be one by one, each when it is
        launched first. They differ among small batches, and little among large decodes."""
        if self.device.type == "cpu" or not HAS_TRITON:
            return
        self.allocate_kv_cache(1)
        sizes = self._graph_sizes() if self.backend.capturable else []
        decodes = [size for size in sizes if not size.is_prefill and size.num_tokens % 64 == 0]
        few = [size for size in sizes if size.num_tokens <= 64]
        with compiling_only(), self.model.model.few_layers():
            self.warmup_model()
            for _, step in self._new_graphs().make_steps([*{*few, *decodes, *sizes[-1:]}]):
                step()

    @torch.inference_mode()
    def warmup_model(self) -> None:
        """Prefills of as many tokens as a step takes, of the most sequences and of the fewest, for
        which a backend may have another kernel; all sample. All of it goes to one block."""
        num_tokens, most = self.config.max_num_batched_tokens, self.max_num_seqs
        sampling = SamplingState(SamplingParams(), 0, [], self.model_config.vocab_size)
        for num_seqs in {most, min(most, cdiv(num_tokens, self.max_model_len))}:
            items = []
            for i in range(num_seqs):
                length = num_tokens // num_seqs + (i < num_tokens % num_seqs)
                seq = Sequence([0] * min(length, self.max_model_len))
                seq.sampling = sampling
                seq.block_table = [0] * cdiv(len(seq), self.config.kvcache_block_size)
                items.append(ScheduledSequence(seq, 0, len(seq), samples=True))
            self.run_step(self.prepare(Batch(tuple(items), is_prefill=True), None))
        self.hidden_states = self.logits = None

    def measure_kv_cache(self) -> int:
        """How many KV blocks to have."""
        config, num_bytes = self.config, self._block_bytes()
        block_size = config.kvcache_block_size
        if self.device.type == "cpu":
            if config.num_kvcache_blocks != -1:
                return config.num_kvcache_blocks
            return num_blocks_on_cpu(num_bytes, block_size, config.max_num_seqs, self.max_model_len)
        self.allocate_kv_cache(1)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.warmup_model()
        peak = torch.cuda.max_memory_allocated(self.device) - self._bytes_before
        self.timed("warm-up")
        graph_bytes = self._measure_graphs() if self.uses_graphs else 0
        self.timed("memory of CUDA graphs")
        if config.num_kvcache_blocks != -1:
            return config.num_kvcache_blocks
        own = self._allocated_bytes() - self._bytes_before
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
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
            may_shorten=config.max_model_len is None,
        )

    def _most_blocks(self) -> int:
        """No KV cache that is measured has more blocks than these."""
        config, num_bytes = self.config, CPU_CACHE_BYTES
        if config.num_kvcache_blocks != -1:
            return config.num_kvcache_blocks
        if self.device.type == "cuda":
            total_bytes = torch.cuda.mem_get_info(self.device)[1]
            num_bytes = int(total_bytes * config.gpu_memory_utilization)
        return max(1, num_bytes // self._block_bytes())

    def _block_bytes(self) -> int:
        block_size, itemsize = self.config.kvcache_block_size, self.dtype.itemsize
        return block_bytes(self.model_config, block_size, self.tp.size, itemsize)

    def _shorten(self, num_blocks: int) -> None:
        """Limits sequences to what so many blocks hold, unless the limit is the user's."""
        if self.config.max_model_len is None:
            num_tokens = num_blocks * self.config.kvcache_block_size
            self.max_model_len = min(self.max_model_len, num_tokens)

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
    def capture_cudagraph(self, sizes: list[GraphSize]) -> None:
        with small_cublas_workspace():
            self.graphs.capture(sizes)

    @on_device
    def exit(self) -> None:
        """Frees graphs, cache and weights, as far as there are any."""
        held = "graphs kv_cache model attention_layers backend sampler sampling last_tokens"
        for name in (*held.split(), "hidden_states", "logits"):
            vars(self).pop(name, None)
        gc.collect()  # parameters and their weight loaders refer to each other
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        self.tp.close()  # frees its buffers, and does not wait for peers as its destructor might
        self.tp = TPGroup()

    def close(self) -> None:
        """Rank 0: ends itself, then the workers; does nothing in a forked child."""
        if self.is_forked:
            return
        self.exit()
        if self.workers is not None:
            self.workers.close()

    def _abandon(self, error: BaseException) -> None:
        """Frees what a start that failed has made. The frames in its traceback would keep that for
        as long as somebody keeps the exception, as notebooks do."""
        self._abort()  # no kernel waits for a peer any longer
        chain = [error]
        for cause in chain:
            traceback.clear_frames(cause.__traceback__)
            causes = (cause.__cause__, cause.__context__)
            chain += [other for other in causes if other is not None and other not in chain]
        with suppress(RuntimeError):  # a GPU that has failed fails again
            self.exit()

    def _meet_ranks(self) -> None:
        """Rank 0 goes on once all workers have come as far, and hears at once of one that has
        failed; collectives, which would wait for it, start only then."""
        if self.workers is not None:
            self.workers.wait_ready()
        if self.worker is not None:
            self.worker.report_ready()

    def _abort(self) -> None:
        self.tp.abort()  # the group of the day

    def _join_tp_group(self, rank: int, size: int) -> None:
        link = self.workers or self.worker
        if link is None:
            return
        if self.workers is not None:
            self.workers.on_failure(self._abort)
        with link.open_store() as store:
            self.tp = make_tp_group(rank, size, store, self.device)
            self.tp.min(0, self.device)  # the first collective, in which NCCL uses the store
            if self.device.type == "cuda":
                devices = [select_device(self.config.device, rank, size) for rank in range(size)]
                one_shots = make_one_shots(self.tp, store, self.dtype, devices)
                self.tp = replace(self.tp, one_shots=one_shots)

    def _graph_sizes(self) -> list[GraphSize]:
        """Steps to capture, ascending within prefills, then within decodes."""
        max_seqs = self.max_num_seqs
        max_tokens = min(self.config.max_num_batched_tokens, max_seqs * self.max_model_len)
        num_params = sum(p.numel() for p in self.model.model.layers.parameters())
        return prefill_sizes(max_tokens, max_seqs, num_params) + decode_sizes(max_seqs)

    def _plan(self, context_lens: np.ndarray) -> np.ndarray | None:
        kv_heads = heads_per_rank(self.model_config.num_key_value_heads, self.tp.size)
        return self.backend.plan_decode(
            context_lens, kv_heads, self.model_config.head_dim, self.dtype
        )

    def _measure_graphs(self) -> int:
        """A bound on the memory of all graphs, of prefills and of decodes: captures the two largest
        of each on a cache of one block."""
        num_bytes = 0
        with small_cublas_workspace():  # for all of it: the other one's memory would count as well
            for is_prefill in (True, False):
                sizes = [size for size in self._graph_sizes() if size.is_prefill == is_prefill]
                free = [self._free_bytes()]
                for size in sizes[-2:][::-1]:
                    self.capture_cudagraph([size])
                    free.append(self._free_bytes())
                added = [before - after for before, after in pairwise(free)]
                num_bytes += graph_bytes(added, len(sizes))
        self.graphs = self._new_graphs()
        return num_bytes

    def _new_graphs(self) -> StepGraphs:
        width = cdiv(self.max_model_len, self.config.kvcache_block_size)
        step, few_layers = lambda x: self.run_model(x)[1], self.model.model.few_layers
        return StepGraphs(step, self.prepare, self.device, width, few_layers)

    def _build_model(self) -> DecoderForCausalLM:
        """The model on this rank's device in its dtype, without weights."""
        model_class = get_model_class(self.model_config.architecture)
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.device(self.device), use_tp_group(self.tp):
                return model_class(self.model_config, self.max_model_len).eval()
        finally:
            torch.set_default_dtype(default_dtype)

    @torch.inference_mode()
    def _load_weights(self, checkpoint: Checkpoint) -> None:
        if self.config.load_format == "dummy":
            fill_with_dummy_weights(self.model, self.config.seed)
        else:
            load_model(self.model, checkpoint.tensors(self.device), self.worker is None)
        for module in self.model.modules():
            if isinstance(module, (LinearBase, ParallelLMHead)):
                module.pack()

    def _allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _free_bytes(self) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def timed(self, part: str) -> None:
        """Records the time since the last part, once the GPU has finished it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
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
    except BaseException:
        workers.close()
        raise


def run_worker(worker: Worker, config: Config, max_model_len: int) -> None:
    """What a worker process does."""
    torch.set_num_threads(worker.num_threads)
    ModelRunner(config, open_checkpoint(config.model), max_model_len, worker=worker).loop()


def select_device(name: str, rank: int = 0, num_ranks: int = 1) -> torch.device:
    """The device of a rank: "cuda:2" is rank 0's, and the other ranks take the GPUs after it.
    Without an index, a single rank takes PyTorch's current GPU, and several start with GPU 0.

    Raises:
        ValueError: there is no such GPU, or there are fewer than ranks.
    """
    available = torch.cuda.is_available()
    if name.startswith("cuda") and not available:
        raise ValueError(f"device={name!r}, but PyTorch finds no CUDA GPU: use device='cpu'")
    if not available or name == "cpu":
        return torch.device("cpu")
    num_gpus, (_, _, index) = torch.cuda.device_count(), name.partition(":")
    first = int(index) if index else torch.cuda.current_device() if num_ranks == 1 else 0
    if index and first >= num_gpus:
        raise ValueError(f"device={name!r}, but PyTorch finds only {num_gpus} GPUs")
    if first + num_ranks > num_gpus:
        raise ValueError(
            f"tensor_parallel_size={num_ranks}, but PyTorch finds {num_gpus - first} GPUs"
            f"{f' from {name} on' if first else ''}: lower it, or use device='cpu'"
        )
    return torch.device("cuda", first + rank)


def select_dtype(name: str, device: torch.device, checkpoint: torch.dtype) -> torch.dtype:
    """By default the checkpoint's on a GPU; fp16 in place of bf16 on a GPU without that."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cpu":
        return torch.float32
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.float16 if checkpoint is torch.bfloat16 and not has_bf16 else checkpoint


def fill_with_dummy_weights(model: torch.nn.Module, seed: int) -> None:
    """Norm weights stay 1, biases become 0, matrices are drawn from N(0, 0.02)."""
    params = dict(model.named_parameters())
    generator = torch.Generator(next(iter(params.values())).device).manual_seed(seed)
    for name, param in params.items():
        if param.dim() > 1:
            param.normal_(0, 0.02, generator=generator)
        elif name.endswith("bias"):
            param.zero_()
