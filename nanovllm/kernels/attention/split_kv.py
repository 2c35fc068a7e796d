"""Divides the attention of a decode step among a kernel's programs, on the host.

A kernel ends with its last program, so ragged contexts leave multiprocessors idle, and few contexts
never fill them. Long contexts are therefore cut into parts, such that there are a few for each
multiprocessor, and the longest parts start first (FlashInfer's plan, arXiv:2501.01005, is the same
idea). Lengths are known before a step and the same for all layers, so this is done once a step.
"""

import numpy as np

from nanovllm.utils.math import cdiv

# Tokens [begin, end) of one sequence, for each KV head a program.
WORK_ITEM = np.dtype(
    [
        ("seq", "<i4"),
        ("begin", "<i4"),
        ("end", "<i4"),
        ("num_parts", "<i4"),  # of the sequence; 0 for no item at all
        ("part", "<i4"),
        ("first_slot", "<i4"),  # where partial results of the sequence's parts are kept, from on
        ("padding", "<i4", 2),
    ]
)
ITEM_WORDS = WORK_ITEM.itemsize // 4


def num_work_items(num_seqs: int, kv_heads: int, num_programs: int) -> int:
    """Most items that so many sequences are divided into, whatever their lengths."""
    return num_seqs + cdiv(num_programs, kv_heads)


def num_partial_slots(kv_heads: int, num_programs: int) -> int:
    """Most parts that belong to sequences of several parts, in any batch: such a sequence is
    longer than the average part, and has fewer parts than twice its length over that."""
    return 2 * cdiv(num_programs, kv_heads)


def divide_decode(
    context_lens: np.ndarray, kv_heads: int, tile: int, num_programs: int
) -> np.ndarray:
    """Cuts contexts into parts of whole tiles, about as many as programs are wanted.

    Args:
        context_lens: int32 [num_seqs]; a sequence of no tokens is one part.
        kv_heads: programs that each part is worth.
        tile: tokens.
        num_programs: wanted for all heads.

    Returns:
        int32 [num_work_items, ITEM_WORDS], a WORK_ITEM each, the longest first; the number of
        rows depends on the number of sequences alone, as a captured graph needs.
    """
    num_seqs = len(context_lens)
    target = max(cdiv(int(context_lens.sum()), cdiv(num_programs, kv_heads)), 1)
    num_parts = np.maximum(-(-context_lens // target), 1)
    length = np.maximum(-(-context_lens // (num_parts * tile)) * tile, tile)
    num_parts = np.maximum(-(-context_lens // length), 1)  # whole tiles may be fewer
    seq = np.repeat(np.arange(num_seqs), num_parts)
    part = np.arange(len(seq)) - np.repeat(num_parts.cumsum() - num_parts, num_parts)
    num_slots = np.where(num_parts > 1, num_parts, 0)
    items = np.zeros(num_work_items(num_seqs, kv_heads, num_programs), WORK_ITEM)
    used = items[: len(seq)]
    used["seq"], used["part"], used["num_parts"] = seq, part, num_parts[seq]
    used["first_slot"] = (num_slots.cumsum() - num_slots)[seq]
    used["begin"] = part * length[seq]
    used["end"] = np.minimum(used["begin"] + length[seq], context_lens[seq])
    used[:] = used[np.argsort(used["begin"] - used["end"], kind="stable")]
    return items.view(np.int32).reshape(-1, ITEM_WORDS)
