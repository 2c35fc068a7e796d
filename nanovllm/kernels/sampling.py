"""Gumbel-max sampling: one pass over the logits draws from their softmax.

p_i / E_i with E_i ~ Exp(1) is largest at i with probability p_i (the exponential race), so an
argmax samples with no sort, no cumulative sum and no host sync; in logs, the argmax of
logit / temperature - log E.
"""

import torch

from nanovllm.kernels.compat import tl, triton, use_triton


def sample_reference(
    logits: torch.Tensor, temperatures: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    greedy = logits.argmax(-1)
    # Rows that are greedy keep temperature 1 here and are overruled below.
    scale = torch.where(temperatures == 0, 1.0, temperatures).unsqueeze(-1)
    noise = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    noise.exponential_(generator=generator)
    # The noise can round to 0, and 0 / 0 is NaN; its smallest normal stands in for it.
    noise.clamp_(min=torch.finfo(torch.float32).tiny)
    probs = torch.softmax(logits.float() / scale, dim=-1)
    return torch.where(temperatures == 0, greedy, probs.div_(noise).argmax(-1))


@triton.jit(do_not_specialize=["seed"])
def _sample_kernel(
    logits_ptr,
    temperatures_ptr,
    best_score_ptr,
    best_token_ptr,
    seed,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = token < vocab_size
    offset = row.to(tl.int64) * vocab_size + token
    scores = tl.load(logits_ptr + offset, mask=mask, other=-float("inf")).to(tl.float32)
    temperature = tl.load(temperatures_ptr + row)
    if temperature > 0:
        # Philox noise counted by position in the batch. E = -log(1 - u), whose resolution near
        # 0 is what rare tokens hang on: there it is summed as a series.
        u = tl.rand(seed, offset)
        noise = tl.where(u < 1e-3, u + 0.5 * u * u, -tl.log(1 - u))
        noise = tl.maximum(noise, 1e-10)
        scores = scores / temperature - tl.log(noise)
        scores = tl.where(mask, scores, -float("inf"))
    best, index = tl.max(scores, axis=0, return_indices=True)
    tl.store(best_score_ptr + row * num_chunks + chunk, best)
    tl.store(best_token_ptr + row * num_chunks + chunk, chunk * CHUNK + index)


def sample_triton(logits: torch.Tensor, temperatures: torch.Tensor, seed: int) -> torch.Tensor:
    """Each program scans one chunk of one row; the chunks' winners meet in a small argmax."""
    assert logits.is_contiguous() and temperatures.shape == logits.shape[:1]
    num_rows, vocab_size = logits.shape
    chunk = min(8192, triton.next_power_of_2(vocab_size))
    num_chunks = triton.cdiv(vocab_size, chunk)
    scores = logits.new_empty(num_rows, num_chunks, dtype=torch.float32)
    tokens = logits.new_empty(num_rows, num_chunks, dtype=torch.int64)
    if num_rows:
        _sample_kernel[(num_rows, num_chunks)](
            logits,
            temperatures,
            scores,
            tokens,
            seed,
            vocab_size,
            num_chunks,
            CHUNK=chunk,
            num_warps=8,
        )
    return tokens.gather(1, scores.argmax(-1, keepdim=True)).squeeze(1)


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Draws one token a row.

    Args:
        logits: [N, vocab_size].
        temperatures: fp32 [N]; 0 takes the row's largest logit.
        generator: a CPU generator; its state decides the draw, and moves on.

    Returns:
        int64 [N].
    """
    if use_triton(logits):
        seed = int(torch.randint(2**31, (), generator=generator))
        return sample_triton(logits, temperatures, seed)
    return sample_reference(logits, temperatures, generator)
