"""Counter-based random numbers: a function of (seed, position, stream, item), without state.

Philox4x32-7 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") maps a key and a
counter to four 32-bit words. Seven rounds are the fewest that pass all tests of the paper. The key
is the request's seed. The counter consists of the position of the sampled token, the stream (the
purpose of the noise), and an item counter. Items are tokens or groups of tokens. In each GROUP of
128 consecutive items, the four items whose numbers differ by multiples of 32 share an item counter,
and each uses one of the four words. ``tl.philox`` computes the same function.
"""

import numpy as np

from nanovllm.utils.math import cdiv

GROUP = 128
LANES = 4  # words per counter
WIDTH = GROUP // LANES  # counters per group
ROUNDS = 7
# Streams of noise, which are independent because their counters differ.
GROUP_STREAM, TOKEN_STREAM, RESAMPLE_STREAM = range(3)
LARGEST_UNIFORM = np.float32(1 - 2**-24)  # 1 would give infinite noise, and a score of -inf

_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85


def philox(seed: int, counter: np.ndarray, position: int, stream: int) -> list[np.ndarray]:
    """Computes Philox4x32 for an array of counters.

    Args:
        seed: the key, 64 bits.
        counter: uint64, the first word of each counter, below 2^32.
        position: the second word.
        stream: the third word.

    Returns:
        Four uint64 arrays of 32-bit words, in the shape of ``counter``.
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
    """Returns a sample of Exp(1) for each of the items [start, end), fp32 [end - start]."""
    first, last = start // GROUP, cdiv(end, GROUP)
    counter = np.arange(first * WIDTH, last * WIDTH, dtype=np.uint64)
    lanes = [word.reshape(-1, WIDTH) for word in philox(seed, counter, position, stream)]
    words = np.stack(lanes, axis=1).ravel()[start - first * GROUP : end - first * GROUP]
    # Small noise wins the argmax, so small numbers get the finest resolution, 2^-32.
    uniform = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
    return -np.log1p(-np.minimum(uniform, LARGEST_UNIFORM))
