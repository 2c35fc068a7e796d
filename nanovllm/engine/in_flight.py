"""A step in flight: a launched step whose results have not been applied yet."""

from dataclasses import dataclass

import torch

from nanovllm.engine.batch import Batch
from nanovllm.kernels.sampling.pipeline import SamplingInputs


@dataclass(slots=True, eq=False)
class InFlightStep:
    """One step on one rank, from its launch until its tokens are applied to their sequences.

    Attributes:
        logits: this rank's shard, [num_seqs, vocabulary / ranks]; None after sampling.
        hidden_states: the rows that the model returns: see ``DecoderModel``. None after sampling,
            and if the step ran as a CUDA graph.
        batch: the step's batch. This and the following attributes are set on rank 0 only.
        sampling: how to sample; None if the tokens were sampled in the forward pass.
        token_ids: int64 [num_sampled], the next token of each sampled sequence, in batch order; -1
            if none could be sampled. Copied to the host when ``arrived`` is complete.
        logprobs: int32 [num_sampled, 1 + 2 * (1 + k)], packed by ``pack_logprobs`` and copied like
            ``token_ids``. k is the largest number that a sequence asks for. None if none does.
        arrived: the event recorded after the copies to the host; None on a CPU.
    """

    logits: torch.Tensor | None
    hidden_states: torch.Tensor | None
    batch: Batch | None = None
    sampling: SamplingInputs | None = None
    token_ids: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    arrived: torch.cuda.Event | None = None

    def release(self) -> None:
        """Frees the tensors that only sampling needs. The next step can reuse their memory."""
        self.logits = self.hidden_states = self.sampling = None

    def copy_to_host(self, token_ids: torch.Tensor) -> None:
        """Starts copying the results to the host. ``ModelRunner.wait`` waits for the copies.

        Args:
            token_ids: the sampled tokens, in a buffer that the next step writes over.
        """
        if not token_ids.is_cuda:
            self.token_ids = token_ids.clone()
            return
        self.token_ids = token_ids.to("cpu", non_blocking=True)
        if self.logprobs is not None:
            self.logprobs = self.logprobs.to("cpu", non_blocking=True)
        self.arrived = torch.cuda.Event()
        self.arrived.record()
