"""The memory layout of one token's sampling parameters, as the kernels read them."""

import numpy as np

# The parameters of one token: 32 bytes, a row of the int32 tensors [N, ROW_WORDS] called ``rows``.
SAMPLING_ROW = np.dtype(
    [
        ("temperature", "<f4"),  # 0 is greedy
        ("top_k", "<i4"),  # 0 disables
        ("top_p", "<f4"),  # 1 disables
        ("min_p", "<f4"),  # 0 disables
        ("seed", "<i8"),
        ("position", "<i4"),  # of the token to sample, in its sequence
        ("features", "<i4"),  # bits that only the host reads
    ]
)
ROW_WORDS = SAMPLING_ROW.itemsize // 4

# The features that a token needs: top_k, top_p or min_p; masks, biases or penalties; logprobs.
TRUNCATES, EDITS, LOGPROBS = 1, 2, 4
