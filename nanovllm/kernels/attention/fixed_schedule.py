"""Split-KV schedule of a batch-invariant decode step: contexts are cut at the same positions in
every batch (see ``invariant.py``)."""

import numpy as np

from nanovllm.kernels.attention.split_kv import KV_SPLIT, KV_SPLIT_WORDS
from nanovllm.utils.triton_compat import HOPPER_MULTIPROCESSORS

SPLIT = 256  # keys
# Rows of a schedule beyond one per sequence. They also bound the memory for partial results.
EXTRA_ROWS = 512
RESIDENT_PROGRAMS = 2 * HOPPER_MULTIPROCESSORS


def make_fixed_schedule(
    context_lens: np.ndarray, kv_heads: int, window: int | None = None
) -> np.ndarray:
    """Cuts contexts at multiples of SPLIT.

    The first row of a context may have several splits, whose results its program merges one after
    the other. Each other split has a row of its own. With few splits, the first row has one split,
    too. With many, the first rows take about half as long as the step: then the GPU is busy until
    its end, and programs have more keys to load ahead, and fewer partial results to store.

    Args:
        context_lens: int32 [num_seqs].
        kv_heads: the number of KV heads, which have a program each for a row.
        window: the number of tokens that are read, at the end of each context; None for all.

    Returns:
        int32 [num_seqs + EXTRA_ROWS, KV_SPLIT_WORDS], a KV_SPLIT per row, the longest first. The
        first word of padding of row 0 is the number of rows that are used.
    """
    num_seqs, first_split = len(context_lens), np.zeros_like(context_lens)
    if window is not None:
        first_split = np.maximum(context_lens - window, 0) // SPLIT
    num_splits = np.maximum(-(-context_lens // SPLIT) - first_split, 1)
    first_row = max(1, int(num_splits.sum()) * kv_heads // (2 * RESIDENT_PROGRAMS))
    num_rows = np.maximum(num_splits - first_row + 1, 1)
    while num_rows.sum() > num_seqs + EXTRA_ROWS:
        first_row += 1 + first_row // 16
        num_rows = np.maximum(num_splits - first_row + 1, 1)
    seq = np.repeat(np.arange(num_seqs), num_rows)
    part = np.arange(len(seq)) - np.repeat(num_rows.cumsum() - num_rows, num_rows)
    # Splits from this one on have a row each.
    last = (first_split + num_splits - num_rows)[seq] + part
    schedule = np.zeros(num_seqs + EXTRA_ROWS, KV_SPLIT)
    used = schedule[: len(seq)]
    used["seq"], used["split"], used["num_splits"] = seq, part, num_rows[seq]
    num_slots = np.where(num_rows > 1, num_rows, 0)
    used["first_slot"] = (num_slots.cumsum() - num_slots)[seq]
    used["begin"] = np.where(part == 0, first_split[seq], last) * SPLIT
    used["end"] = np.minimum((last + 1) * SPLIT, context_lens[seq])
    used[:] = used[np.argsort(used["begin"] - used["end"], kind="stable")]
    if num_seqs:
        schedule["padding"][0, 0] = len(seq)
    return schedule.view(np.int32).reshape(-1, KV_SPLIT_WORDS)
