"""A step in flight: everything that exists of it between its launch and its tokens."""

from dataclasses import dataclass

import torch

from nanovllm.engine.batch import Batch
from nanovllm.layers.sampler import SamplingInputs


@dataclass(slots=True, eq=False)
class InFlightStep:
    """One step on one rank, from its launch until its tokens are applied to their sequences.

    Attributes:
        logits: this rank's part, [num_seqs, vocabulary / ranks], until the step has been sampled.
        hidden_states: [N, hidden_size], as long; None after a CUDA graph.
        batch: what was launched. This and all that follows is set on rank 0 only.
        sampling: how to sample; None where the forward pass samples by itself.
        token_ids: int64 [num_sampled], the next token of each sampled item, in batch order; -1 if
            none was allowed. On the host once ``arrived`` has happened.
        logprobs: int32 [num_sampled, 1 + 2 * (1 + k)] as ``pack_logprobs`` lays them out, as
            ``token_ids``; None if no sequence asks for them.
        arrived: recorded after the copies to the host; None on a CPU.
    """

    logits: torch.Tensor | None
    hidden_states: torch.Tensor | None
    batch: Batch | None = None
    sampling: SamplingInputs | None = None
    token_ids: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    arrived: torch.cuda.Event | None = None

    def release(self) -> None:
        """Frees what only sampling needs, for the next step."""
        self.logits = self.hidden_states = self.sampling = None

    def copy_to_host(self) -> None:
        """Starts the copies of its results; ``ModelRunner.wait`` waits for them."""
        assert self.token_ids is not None
        if not self.token_ids.is_cuda:
            self.token_ids = self.token_ids.clone()  # the next step writes over its buffer
            return
        self.token_ids = self.token_ids.to("cpu", non_blocking=True)
        if self.logprobs is not None:
            self.logprobs = self.logprobs.to("cpu", non_blocking=True)
        self.arrived = torch.cuda.Event()
        self.arrived.record()
