"""Runs scheduled batches on one rank's device. Never decides who runs."""

import gc
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.engine import model_inputs
from nanovllm.engine.batch import Batch
from nanovllm.engine.in_flight import InFlightStep
from nanovllm.engine.model_inputs import GraphSize, ModelInputs, PackedInputs
from nanovllm.engine.sampling_inputs import prepare_sample, sampling_rows
from nanovllm.kernels.attention.backend import AttentionBackend
from nanovllm.kernels.attention.block_tables import BlockTables
from nanovllm.kernels.sampling.sampled_tokens import fill_in_sampled
from nanovllm.layers.sampler import Sampler, SamplingInputs
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.model_config import ModelConfig
from nanovllm.utils.context import step_context
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.forks import leave_to_parent
from nanovllm.utils.math import cdiv, heads_per_rank
from nanovllm.utils.tracebacks import clear_frames

if TYPE_CHECKING:
    from nanovllm.engine.cuda_graphs import StepGraphs

Method = TypeVar("Method", bound=Callable[..., Any])


def on_device(method: Method) -> Method:
    """Makes the runner's GPU PyTorch's current device during a call, whatever the user's program,
    another thread or another engine has chosen. In a forked child the call is a ValueError."""

    @wraps(method)
    def call(self: "ModelRunner", *args: Any, **kwargs: Any) -> Any:
        if self.is_forked:
            raise ValueError(
                f"this engine belongs to process {self._pid}, of which this one is a forked child: "
                f"make another engine here, or start the process with spawn instead of fork"
            )
        if self.device.type == "cpu":
            return method(self, *args, **kwargs)
        with torch.cuda.device(self.device):
            return method(self, *args, **kwargs)

    return cast(Method, call)


class NoGraphs:
    """Stands for captured steps (``StepGraphs``) where there are none."""

    def size_for(self, batch: Batch) -> GraphSize | None:
        """No captured size fits."""

    def replay(self, inputs: PackedInputs) -> torch.Tensor:
        raise NotImplementedError


class ModelRunner:
    """One rank: the model's shard, its part of the KV cache, and the steps run on them.

    ``engine.startup`` makes one and sets what has to be loaded, measured or captured first. With
    several ranks, runners are those of ``engine.tensor_parallel``.

    Attributes:
        device: where it runs; a GPU has an index.
        dtype: of weights, activations and KV cache.
        tp: the tensor-parallel group.
        backend: of attention.
        kv_cache: [2, layers, blocks, block_size, kv_heads / ranks, head_dim].
        block_tables: of all sequences with blocks; one group, as all layers share a table.
        num_kvcache_blocks: blocks that the cache has.
        graphs: captured steps.
        sampled_tokens: int64 [max_num_seqs], the buffer in which each step leaves its tokens, row
            by row, and where the next one, captured or not, finds them.
        startup_seconds: how long each part of start-up took.
    """

    dtype: torch.dtype
    backend: AttentionBackend
    model: DecoderForCausalLM
    sampler: Sampler
    kv_cache: torch.Tensor
    block_tables: BlockTables
    num_kvcache_blocks: int
    graphs: "StepGraphs | NoGraphs"
    sampled_tokens: torch.Tensor

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.max_model_len = max_model_len
        self.device = device
        self.tp = TPGroup()
        self.startup_seconds: dict[str, float] = {}
        self._pid = os.getpid()
        leave_to_parent(self)

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the one that made the runner."""
        return os.getpid() != self._pid

    def call(self, method: str, step: InFlightStep | None, *args: Any) -> Any:
        """Rank 0: calls ``method(step, *args)`` on every rank at once; other ranks pass their own
        InFlightStep. It is done whole or never again.

        Raises:
            WorkerError: another rank has failed; so does every later call.
        """
        return getattr(self, method)(step, *args)

    def join_ranks(self) -> None:
        """Connects the ranks, if there are several."""

    def barrier(self) -> None:
        """Rank 0 goes on once all ranks have come as far, and hears at once of one that has failed;
        collectives, which would wait for it, start only then."""

    @on_device
    @torch.inference_mode()
    def run(self, batch: Batch) -> InFlightStep:
        """Rank 0: launches a step. The tokens of the step before need not have arrived.

        Raises:
            ValueError: this process is a forked child of the one that made the engine.
            WorkerError: another rank has failed; so does every later call.
        """
        inputs = self.prepare(batch, self.graphs.size_for(batch))
        step = self.call("run_step", None, inputs, batch.block_copies)
        step.batch = batch
        return step

    @on_device
    @torch.inference_mode()
    def sample(self, step: InFlightStep) -> InFlightStep:
        """Rank 0: samples the step's tokens, unless its forward pass did, and starts their copy to
        the host. The tokens of the step before must have been applied.

        Raises:
            WorkerError: another rank has failed; so does every later call.
        """
        batch = step.batch
        assert batch is not None
        num_sampled = len(batch.sampled)
        if batch.is_prefill and any(item.seq.wants_prompt_logprobs for item in batch.items):
            from nanovllm.engine.logprobs import collect_prompt_logprobs

            collect_prompt_logprobs(self, step, batch)
        if num_sampled and not self.samples_in_step(batch):
            step.sampling = prepare_sample(batch).to(self.device)
            self.call("sample_step", step, num_sampled)
        step.release()
        step.token_ids = self.sampled_tokens[:num_sampled]
        step.copy_to_host()
        return step

    def wait(self, step: InFlightStep) -> None:
        """Rank 0: waits until a sampled step's results are on the host.

        Raises:
            WorkerError: another rank has failed; so does every later call.
        """
        if step.arrived is not None:
            step.arrived.synchronize()

    def samples_in_step(self, batch: Batch) -> bool:
        """Whether the forward pass samples: sampling needs no more than the sampling rows, which
        are known before any token has arrived."""
        return not any(
            kind.edits or kind.num_logprobs is not None or (kind.truncates and self.tp.size > 1)
            for kind in batch.sampling_kinds
        )

    @torch.inference_mode()
    def run_step(
        self,
        last: InFlightStep | None,
        inputs: PackedInputs,
        block_copies: tuple[tuple[int, int], ...] = (),
    ) -> InFlightStep:
        """Every rank: one step, up to logits or sampled tokens."""
        if last is not None:
            last.release()
        for source, target in block_copies:
            self.kv_cache[:, :, target] = self.kv_cache[:, :, source]
        if inputs.graph_size is not None:
            return InFlightStep(self.graphs.replay(inputs), None)
        hidden_states, logits = self.run_model(inputs.to(self.device))
        return InFlightStep(logits, hidden_states)

    @torch.inference_mode()
    def sample_step(self, step: InFlightStep, num_rows: int) -> InFlightStep:
        """Every rank: samples a step's tokens as rank 0's ``sampling`` says."""
        assert step.logits is not None
        token_ids, step.logprobs = self.sampler(step.logits[:num_rows], step.sampling)
        self.sampled_tokens[:num_rows] = token_ids
        return step

    @torch.inference_mode()
    def compute_logits(self, step: InFlightStep, start: int, stop: int) -> torch.Tensor | None:
        """Every rank: logits of rows [start, stop) of a prefill's hidden states, [stop - start,
        vocabulary] on rank 0 and None on the others."""
        assert step.hidden_states is not None
        logits = self.model.compute_logits(step.hidden_states[start:stop])
        return self.model.lm_head.gather(logits)

    def run_model(self, inputs: ModelInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the hidden states [N, hidden_size] and this rank's logits [num_seqs, vocabulary
        / ranks], and samples the next tokens if the inputs have sampling rows. Fills in
        ``inputs.input_ids``."""
        context, block_size = inputs.context, self.config.kvcache_block_size
        # With PDL, attention may load block tables before the previous kernel ends. So they are
        # updated first, with kernels in between that wait for all kernels before them.
        tables = self.block_tables.update(inputs.tables)[0]
        if inputs.reads_cache:
            columns = cdiv(context.max_seqlen_k, block_size) or None  # unknown in a capture: all
            context = replace(context, block_tables=tables[:, :columns])
        if not context.is_prefill:
            fill_in_sampled(inputs.input_ids, self.sampled_tokens)
        with step_context(context):
            hidden_states = self.model(inputs.input_ids, inputs.positions)
            logits = self.model.compute_logits(hidden_states)
        if inputs.sampling_rows is not None:
            rows = SamplingInputs(inputs.sampling_rows, truncates=self.tp.size == 1)
            self.sampled_tokens[: len(logits)] = self.sampler(logits, rows, per_shard=True)[0]
        return hidden_states, logits

    def prepare(self, batch: Batch, size: GraphSize | None) -> PackedInputs:
        """Builds a step's inputs on the host, padded to ``size`` for a captured step."""
        block_size = self.config.kvcache_block_size
        _, num_tokens, num_seqs = size or (None, 0, 0)
        if batch.is_prefill:
            longest = self.max_model_len if size else 0
            inputs = model_inputs.prepare_prefill(batch, block_size, num_tokens, num_seqs, longest)
        else:
            inputs = model_inputs.prepare_decode(batch, block_size, num_seqs, self._split_kv)
        samples = self.samples_in_step(batch)
        if samples or size:  # a graph samples in any case
            rows = sampling_rows(batch.sampled if samples else [], num_seqs or len(batch))
            inputs = replace(inputs, sampling_rows=rows)
        return inputs.pack(size, pin_memory=self.device.type == "cuda")

    def _split_kv(self, context_lens: np.ndarray) -> np.ndarray | None:
        kv_heads = heads_per_rank(self.model_config.num_key_value_heads, self.tp.size)
        return self.backend.split_kv(context_lens, kv_heads, self.model_config.head_dim, self.dtype)

    @on_device
    def exit(self) -> None:
        """Frees what start-up has set, such as cache and weights, as far as there is any."""
        for name in ModelRunner.__annotations__:
            vars(self).pop(name, None)
        gc.collect()  # parameters and their weight loaders refer to each other
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        self.tp.close()  # frees its buffers, and does not wait for peers as its destructor might
        self.tp = TPGroup()

    def close(self) -> None:
        """Rank 0: ends itself, then the others; does nothing in a forked child."""
        if not self.is_forked:
            self.exit()

    def abandon(self, error: BaseException) -> None:
        """Rank 0: frees what a start that failed has made. The frames in the error's traceback
        would keep that for as long as somebody keeps the exception, as notebooks do."""
        self.tp.abort()  # no kernel waits for a peer any longer
        clear_frames(error)
        with suppress(RuntimeError):  # a GPU that has failed fails again
            self.close()
