"""Random numbers as a function of (seed, position, item): no state, so no order to keep.

Philox4x32-7 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; seven rounds are
the fewest that pass all their tests) turns a key and a counter into four 32-bit words. Here the
key is the request's seed. The counter is a number for four items, the position of the token to
draw, and the stream: what the noise is for. Items are candidate tokens, or groups of them: of each
GROUP of 128 consecutive items, those 32 apart share a counter. ``tl.philox`` is the same function.
"""

import numpy as np

GROUP = 128
LANES = 4  # words per counter
WIDTH = GROUP // LANES  # counters per group
ROUNDS = 7
GROUPS, TOKENS, REDRAW = range(3)  # streams: independent, as their counters differ
LARGEST_UNIFORM = np.float32(1 - 2**-24)  # infinite noise would lose even for a lone token

_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85


def philox(seed: int, counter: np.ndarray, position: int, stream: int) -> list[np.ndarray]:
    """Four uint64 arrays of 32-bit words, in the counter's shape.

    Args:
        seed: 64 bits.
        counter: uint64, each below 2^32.
        position: the counter's second word.
        stream: its third.
    """
    key = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    c0, c1 = counter, np.full_like(counter, position)
    c2, c3 = np.full_like(counter, stream), np.zeros_like(counter)
    for _ in range(ROUNDS):
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = high >> _SHIFT ^ c1 ^ np.uint64(key[0])
        c2 = low >> _SHIFT ^ c3 ^ np.uint64(key[1])
        c1, c3 = high & _MASK, low & _MASK
        key = [(k + w) & 0xFFFFFFFF for k, w in zip(key, _WEYL, strict=True)]
    return [c0, c1, c2, c3]


def exponential_noise(seed: int, position: int, stream: int, start: int, end: int) -> np.ndarray:
    """fp32 [end - start]: a draw from Exp(1) for each of the items from start to end."""
    first, last = start // GROUP, -(-end // GROUP)
    counter = np.arange(first * WIDTH, last * WIDTH, dtype=np.uint64)
    lanes = [word.reshape(-1, WIDTH) for word in philox(seed, counter, position, stream)]
    words = np.stack(lanes, axis=1).ravel()[start - first * GROUP : end - first * GROUP]
    # The winners of a race are the small numbers, so that is where the resolution is: 2^-32.
    uniform = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
    return -np.log1p(-np.minimum(uniform, LARGEST_UNIFORM))
