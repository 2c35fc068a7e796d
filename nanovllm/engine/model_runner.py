"""Runs scheduled batches on one rank's device. Makes no scheduling decisions."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.engine import model_inputs
from nanovllm.engine.batch import Batch
from nanovllm.engine.in_flight import InFlightStep
from nanovllm.engine.model_inputs import GraphSize, ModelInputs, PackedInputs
from nanovllm.engine.sampling_inputs import pad_rows, prepare_sample
from nanovllm.kernels.attention.backend import AttentionBackend
from nanovllm.kernels.attention.block_tables import BlockTables
from nanovllm.kernels.attention.prefix_schedule import SharedPrefixes
from nanovllm.kernels.sampling.pipeline import SamplingInputs
from nanovllm.kernels.sampling.sampled_tokens import fill_in_sampled
from nanovllm.kernels.sampling.sampling_row import EDITS, LOGPROBS, TRUNCATES
from nanovllm.layers.sampler import Sampler
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.model_config import ModelConfig
from nanovllm.utils.context import step_context
from nanovllm.utils.device import on_device
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.forks import LeftToParent
from nanovllm.utils.garbage import collect_all
from nanovllm.utils.math import cdiv, heads_per_rank

if TYPE_CHECKING:
    from nanovllm.engine.shared_prefixes import PrefixFinder


class CapturedSteps:
    """The interface of ``StepGraphs``. This base class has captured no steps."""

    def size_for(self, batch: Batch) -> GraphSize | None:
        """Returns the smallest captured size that fits the batch; None if it must run eagerly."""

    def replay(self, inputs: PackedInputs) -> torch.Tensor:
        """Runs the captured step that the inputs are padded for. Returns its logits, which the next
        replay overwrites."""
        raise NotImplementedError


class ModelRunner(LeftToParent):
    """One rank: the model's shard, its part of the KV cache, and the steps run on them.

    ``engine.startup`` creates the runner, and sets the attributes that have to be loaded, measured
    or captured. With several ranks, it creates the subclasses in ``engine.tensor_parallel``.

    Attributes:
        device: the device on which it runs; a GPU has an index.
        max_num_seqs: the maximum number of sequences in one step.
        dtype: the dtype of weights, activations and, unless it is quantised, the KV cache.
        tp: the tensor-parallel group.
        backend: the attention backend.
        kv_groups: the indices of the layers that share block tables, for each group of layers. A
            model without windows has one group.
        windows: for each group, the number of tokens to which a token attends, itself included;
            None for all.
        kv_cache: [2, layers per group, blocks, block_size, kv_heads / ranks, head_dim]. All groups
            share the blocks: any group may hold any block.
        kv_scales: fp32 [layers per group, blocks, 2, kv_heads / ranks, block_size], the scales of a
            quantised KV cache; None for one in ``dtype``.
        block_tables: the block tables of all sequences with blocks, one per sequence and group.
        num_kvcache_blocks: the number of blocks in the cache.
        graphs: captured steps.
        sampled_tokens: int64 [max_num_seqs], the tokens that the last step sampled, by row. The
            next step reads its input tokens from here.
        prefix_finder: finds prefixes that decodes share; None if attention cannot use them.
        startup_seconds: how long each part of start-up took.
    """

    dtype: torch.dtype
    backend: AttentionBackend
    model: DecoderForCausalLM
    sampler: Sampler
    kv_groups: tuple[tuple[int, ...], ...]
    windows: tuple[int | None, ...]
    kv_cache: torch.Tensor
    kv_scales: torch.Tensor | None
    block_tables: BlockTables
    num_kvcache_blocks: int
    graphs: CapturedSteps
    sampled_tokens: torch.Tensor

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config = config
        self.model_config = model_config
        self.max_model_len = max_model_len
        self.max_num_seqs = config.max_step_seqs
        self.device = device
        self.tp = TPGroup()
        self.prefix_finder: PrefixFinder | None = None
        self.startup_seconds: dict[str, float] = {}

    def call(self, method: str, step: InFlightStep | None, *args: Any) -> Any:
        """Rank 0: calls ``method(step, *args)`` on every rank at the same time. Other ranks pass
        their own InFlightStep as ``step``. If the call fails on any rank, the workers are ended,
        and every later call raises WorkerError.

        Raises:
            WorkerError: another rank has failed.
        """
        return getattr(self, method)(step, *args)

    @on_device
    @torch.inference_mode()
    def apply(self, step: InFlightStep | None, function: Callable[..., Any], *args: Any) -> Any:
        """Every rank: returns ``function(self, *args)``. With ``call``, packages above the engine
        run their functions on all ranks; these are at the top level of a module."""
        return function(self, *args)

    def join_ranks(self) -> None:
        """Connects the ranks, if there are several."""

    def barrier(self) -> None:
        """Rank 0 waits here until all workers have called this. It is used before collectives: if a
        worker fails, this raises WorkerError at once, while a collective would wait for it."""

    @on_device
    @torch.inference_mode()
    def run(self, batch: Batch) -> InFlightStep:
        """Rank 0: launches a step. The tokens of the previous step need not be on the host.

        Raises:
            ValueError: this process is a forked child of the one that made the engine.
            WorkerError: another rank has failed. Every later call raises it too.
        """
        if self.prefix_finder is not None:
            batch = self.prefix_finder.add_prefixes(batch)
        inputs = self.prepare(batch, self.graphs.size_for(batch))
        step = self.call("run_step", None, inputs, batch.block_copies)
        step.batch = batch
        return step

    @on_device
    @torch.inference_mode()
    def sample(self, step: InFlightStep) -> InFlightStep:
        """Rank 0: samples the step's tokens, unless the forward pass has sampled them, and starts
        copying them to the host. The tokens of the previous step must have been applied.

        Raises:
            WorkerError: another rank has failed. Every later call raises it too.
        """
        batch = step.batch
        assert batch is not None
        num_sampled = len(batch.sampled)
        if batch.is_prefill and any(seq.wants_prompt_logprobs for seq in batch.seqs):
            from nanovllm.engine.logprobs import collect_prompt_logprobs

            collect_prompt_logprobs(self, step, batch)
        if num_sampled and not self.samples_in_step(batch):
            processed = self.config.logprobs_mode == "processed_logprobs"
            step.sampling = prepare_sample(batch, processed).to(self.device)
            self.call("sample_step", step, num_sampled)
        step.release()
        step.copy_to_host(self.sampled_tokens[:num_sampled])
        return step

    def wait(self, step: InFlightStep) -> None:
        """Rank 0: waits until a sampled step's results are on the host.

        Raises:
            WorkerError: another rank has failed. Every later call raises it too.
        """
        if step.arrived is not None:
            step.arrived.synchronize()

    def samples_in_step(self, batch: Batch) -> bool:
        """Whether the forward pass samples the tokens. It cannot if sampling needs logit edits,
        log-probabilities, or all logits of several ranks to truncate them."""
        others = EDITS | LOGPROBS | (TRUNCATES if self.tp.size > 1 else 0)
        return not batch.sampling_features & others

    @torch.inference_mode()
    def run_step(
        self,
        last: InFlightStep | None,
        inputs: PackedInputs,
        block_copies: tuple[tuple[int, int], ...] = (),
    ) -> InFlightStep:
        """Every rank: runs the forward pass of one step, up to logits or sampled tokens.

        Args:
            last: a worker's last step, whose tensors are freed; None on rank 0, where ``sample``
                has freed them.
        """
        if last is not None:
            last.release()
        for source, target in block_copies:
            self.kv_cache[:, :, target] = self.kv_cache[:, :, source]
            if self.kv_scales is not None:
                self.kv_scales[:, target] = self.kv_scales[:, source]
        if inputs.graph_size is not None:
            return InFlightStep(self.graphs.replay(inputs), None)
        hidden_states, logits = self.run_model(inputs.to(self.device))
        return InFlightStep(logits, hidden_states)

    @torch.inference_mode()
    def sample_step(self, step: InFlightStep, num_rows: int) -> InFlightStep:
        """Every rank: samples a step's tokens. Only rank 0 needs ``step.sampling``."""
        assert step.logits is not None
        token_ids, step.logprobs = self.sampler(step.logits[:num_rows], step.sampling)
        self.sampled_tokens[:num_rows] = token_ids
        return step

    @torch.inference_mode()
    def compute_logits(self, step: InFlightStep, start: int, stop: int) -> torch.Tensor | None:
        """Every rank: computes the logits of rows [start, stop) of a prefill's hidden states.
        Returns [stop - start, vocabulary] on rank 0, and None on the others."""
        assert step.hidden_states is not None
        logits = self.model.compute_logits(step.hidden_states[start:stop])
        return self.sampler.gather(logits)

    def run_model(self, inputs: ModelInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the hidden states that ``DecoderModel`` returns and this rank's logits,
        [num_seqs, vocabulary / ranks]. Samples the next tokens if the inputs have sampling rows.
        Fills in ``inputs.input_ids``."""
        context, block_size = inputs.context, self.config.block_size
        # With programmatic dependent launch (PDL), attention may load the block tables before the
        # previous kernel has ended. So the tables are updated first: the kernels between the update
        # and attention wait for the update to end.
        tables = self.block_tables.update(inputs.tables)
        # A captured decode has max_seqlen_k=0, and takes all columns.
        columns = cdiv(context.max_seqlen_k, block_size) or None
        reads_cache = inputs.reads_cache or self.kv_scales is not None
        read_tables = tables[:, :, :columns] if reads_cache else None
        contexts = context.of_groups(self.windows, len(inputs.input_ids), read_tables)
        if not context.is_prefill:
            fill_in_sampled(inputs.input_ids, self.sampled_tokens)
        with step_context(*contexts):
            hidden_states = self.model(inputs.input_ids, inputs.positions)
            logits = self.model.compute_logits(hidden_states)
        if inputs.sampling_rows is not None:
            rows = SamplingInputs(inputs.sampling_rows, truncates=self.tp.size == 1)
            self.sampled_tokens[: len(logits)] = self.sampler(logits, rows, per_shard=True)[0]
        return hidden_states, logits

    def prepare(self, batch: Batch, size: GraphSize | None) -> PackedInputs:
        """Builds a step's inputs on the host, padded to ``size`` for a captured step."""
        block_size = self.config.block_size
        num_tokens, num_seqs = (size.num_tokens, size.num_seqs) if size else (0, 0)
        if batch.is_prefill:
            longest = self.max_model_len if size else 0
            inputs = model_inputs.prepare_prefill(batch, block_size, num_tokens, num_seqs, longest)
        else:
            inputs = model_inputs.prepare_decode(batch, block_size, num_seqs, self._split_kv)
        samples = self.samples_in_step(batch)
        if samples or size:  # a graph always samples
            rows = batch.sampling_rows if samples else batch.sampling_rows[:0]
            inputs = replace(inputs, sampling_rows=pad_rows(rows, num_seqs or len(batch)))
        return inputs.pack(size, pin_memory=self.device.type == "cuda")

    def _split_kv(
        self, context_lens: np.ndarray, prefixes: SharedPrefixes | None
    ) -> np.ndarray | None:
        """Returns the split-KV schedules of all distinct windows; None if the backend uses none."""
        model = self.model_config
        size = self.tp.size
        heads = model.num_attention_heads // size, heads_per_rank(model.num_key_value_heads, size)
        arguments = context_lens, *heads, model.head_dim, self.dtype, self.config.quantizes_kv
        windows = dict.fromkeys(self.windows)
        each = (self.backend.split_kv(*arguments, window, prefixes) for window in windows)
        schedules = [schedule for schedule in each if schedule is not None]
        return np.stack(schedules) if schedules else None

    @on_device
    def exit(self) -> None:
        """Frees the attributes that start-up has set, such as the cache and the weights."""
        for name in ModelRunner.__annotations__:
            vars(self).pop(name, None)
        collect_all()  # parameters and their weight loaders refer to each other
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        self.tp.close()  # its destructor might wait for peers
        self.tp = TPGroup()

    def close(self) -> None:
        """Rank 0: calls ``exit``, then ends the workers. Does nothing in a forked child."""
        if not self.is_forked:
            self.exit()

    def abort(self, error: BaseException) -> None:
        """Rank 0: ends kernels that wait for a peer, after a failed start."""
        self.tp.abort()
