"""Gumbel-max sampling with top-k, top-p and min-p, and no sort of the vocabulary.

Of tokens with logits z, the argmax of z / temperature - log E, E ~ Exp(1), is a draw from their
softmax (the exponential race). The noise E depends on seed, position and token only (philox.py),
so the draw from any subset S of the tokens is the argmax over S of the very same scores.

Top-k, top-p and min-p each keep the tokens above some logit, so S is {z >= floor} for one floor:

- min-p gives a floor outright: the largest logit + temperature * log(min_p).
- top-k: the k-th largest logit, found by bisection between values that occur. With the largest
  logit of each group of 128 tokens at hand, the k-th largest of those bounds it from below, and
  only groups that reach the bound are read again.
- top-p keeps a token if the tokens above it hold less than top_p of the mass that is left. This
  needs no floor: draw, and if the token drawn is not kept, raise the floor above it and draw
  again. Few draws are thrown away, since what is thrown away holds little mass.

Ties at a floor are all kept. A row with a NaN or an infinite logit draws nothing.
"""

import math

import numpy as np
import torch

from nanovllm.kernels.compat import tl, triton, use_triton
from nanovllm.kernels.philox import GROUP, LANES, WIDTH, exponential_noise

# How to draw one token: 32 bytes a row.
SAMPLING_ROW = np.dtype(
    [
        ("temperature", "<f4"),  # 0 takes the largest logit
        ("top_k", "<i4"),  # 0 keeps all
        ("top_p", "<f4"),  # 1 keeps all
        ("min_p", "<f4"),  # 0 keeps all
        ("seed", "<i8"),
        ("position", "<i4"),  # of the token to draw
        ("padding", "<i4"),
    ]
)
ROW_WORDS = SAMPLING_ROW.itemsize // 4
TILE = 32  # groups a program scans


def sample_reference(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    settings = rows.cpu().numpy().view(SAMPLING_ROW)[:, 0]
    if not settings["temperature"].any():
        return torch.where(logits.amax(-1).isfinite(), logits.argmax(-1), -1)
    tokens = [_sample_row(z, s) for z, s in zip(logits.float().cpu(), settings, strict=True)]
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def _sample_row(logits: torch.Tensor, settings: np.void) -> int:
    """One token from fp32 [vocab_size] logits; -1 if all are -inf, or any is NaN or inf."""
    temperature, top_k, top_p = (
        settings[name].item() for name in ("temperature", "top_k", "top_p")
    )
    top = logits.max()
    if not top.isfinite():
        return -1
    if temperature == 0:
        return int(logits.argmax())
    noise = exponential_noise(settings["seed"].item(), settings["position"].item(), len(logits))
    scores = logits * (1 / temperature) - torch.from_numpy(noise).log()
    floor = torch.tensor(-math.inf)
    if settings["min_p"] > 0:
        floor = top + temperature * math.log(settings["min_p"])
    if 0 < top_k < len(logits):
        floor = torch.maximum(floor, logits.topk(top_k).values[-1])
    scores[logits < floor] = -math.inf
    token = int(scores.argmax())
    if top_p >= 1:
        return token
    weights = ((logits - top) / temperature).exp()
    enough = top_p * weights[logits >= floor].sum()
    while weights[logits > logits[token]].sum() >= enough:
        scores[logits <= logits[token]] = -math.inf
        token = int(scores.argmax())
    return token


@triton.jit
def _score(logits, word, temperature):
    """logits / temperature - log E."""
    uniform = (word.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    uniform = tl.minimum(uniform, 0.99999994)  # as philox.LARGEST_UNIFORM
    # -log(1 - u), as a series where 1 - u would round u away.
    series = uniform * (1 + uniform * (0.5 + uniform * 0.33333334))
    noise = tl.where(uniform < 1e-3, series, -tl.log(1 - uniform))
    return logits * (1 / temperature) - tl.log(noise)


@triton.jit
def _draw(
    logits_ptr,
    groups,
    exists,
    vocab_size,
    first_group,
    floor,
    temperature,
    seed,
    position,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Best score, its token, and the largest logit (NaN above all) among keys >= floor, each
    [groups, WIDTH].

    Scores are the logits for temperature 0. ``first_group`` is where in the vocabulary the
    logits begin; tokens are counted from there.
    """
    column = tl.arange(0, WIDTH)[None, :]
    counter = (groups[:, None] + first_group) * WIDTH + column
    zero = counter * 0
    w0 = zero
    w1 = zero
    w2 = zero
    w3 = zero
    if temperature > 0:
        words = tl.philox(seed, counter, zero + position, zero, zero, 7)  # philox.ROUNDS
        w0 = words[0].to(tl.int32, bitcast=True)
        w1 = words[1].to(tl.int32, bitcast=True)
        w2 = words[2].to(tl.int32, bitcast=True)
        w3 = words[3].to(tl.int32, bitcast=True)
    best = tl.full(counter.shape, -float("inf"), tl.float32)
    largest = best
    best_token = zero
    for lane in tl.static_range(LANES):
        token = (groups[:, None] * LANES + lane) * WIDTH + column
        mask = exists[:, None] & (token < vocab_size)
        logits = tl.load(logits_ptr + token, mask=mask, other=-float("inf")).to(tl.float32)
        word = w0 if lane == 0 else (w1 if lane == 1 else (w2 if lane == 2 else w3))
        score = logits
        if temperature > 0:
            score = _score(logits, word, temperature)
        score = tl.where(_key(logits) >= floor, score, -float("inf"))
        best_token = tl.where(score > best, token, best_token)
        best = tl.maximum(best, score)
        largest = tl.maximum(largest, logits, propagate_nan=tl.PropagateNan.ALL)
    return best, best_token, largest


@triton.jit
def _key(x):
    """int32 in the order of fp32; adding 0 makes one of the two zeros."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _first_best(score, token):
    """The token of the highest score, the lowest such token in a tie; -1 if all are -inf."""
    best = tl.max(score)
    winner = tl.min(tl.where(score == best, token, 0x7FFFFFFF))
    return tl.where(best > -float("inf"), winner, -1)


@triton.jit
def _load_seed(row_ptr):
    low = tl.load(row_ptr + 4).to(tl.int64) & 0xFFFFFFFF
    return (tl.load(row_ptr + 5).to(tl.int64) << 32) | low


# Specialised on vocab_size and stride alone: the others follow from them.
@triton.jit(do_not_specialize=["num_groups", "first_group"])
def _scan_kernel(
    logits_ptr,
    rows_ptr,
    group_max_ptr,
    tile_score_ptr,
    tile_token_ptr,
    vocab_size,
    stride,
    num_groups,
    first_group,
    ROW_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """For TILE groups of one row: the winner among all their tokens, each group's largest. Where
    a logit is NaN or infinite, no token wins with an infinite score."""
    row, tile = tl.program_id(0), tl.program_id(1)
    row_ptr = rows_ptr + row * ROW_WORDS
    groups = tile * TILE + tl.arange(0, TILE)
    score, token, largest = _draw(
        logits_ptr + row.to(tl.int64) * stride,
        groups,
        groups < num_groups,
        vocab_size,
        first_group,
        -0x80000000,
        tl.load(row_ptr).to(tl.float32, bitcast=True),
        _load_seed(row_ptr),
        tl.load(row_ptr + 6),
        LANES,
        WIDTH,
    )
    slot = row * tl.num_programs(1) + tile
    largest = tl.where(largest == largest, largest, float("inf"))
    is_bad = tl.max(largest) == float("inf")
    tl.store(tile_score_ptr + slot, tl.where(is_bad, float("inf"), tl.max(score)))
    tl.store(tile_token_ptr + slot, tl.where(is_bad, -1, _first_best(score, token)))
    largest = tl.max(largest, axis=1)
    tl.store(group_max_ptr + row * num_groups + groups, largest, mask=groups < num_groups)


@triton.jit
def _load_keys(
    logits_ptr, list_ptr, start, num_listed, vocab_size, GROUP: tl.constexpr, TILE: tl.constexpr
):
    """Logits of the next TILE listed groups as fp32 and as keys, -inf where there is none."""
    slot = start + tl.arange(0, TILE)
    groups = tl.load(list_ptr + slot, mask=slot < num_listed, other=0)
    token = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = (slot < num_listed)[:, None] & (token < vocab_size)
    logits = tl.load(logits_ptr + token, mask=mask, other=-float("inf")).to(tl.float32)
    return logits, tl.where(mask, _key(logits), -0x80000000)


@triton.jit
def _mass(
    logits_ptr,
    list_ptr,
    num_listed,
    vocab_size,
    floor,
    top,
    temperature,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sum of exp((logit - top) / temperature) over listed tokens with keys >= floor."""
    total = tl.zeros([TILE, GROUP], tl.float32)
    for start in range(0, num_listed, TILE):
        logits, keys = _load_keys(logits_ptr, list_ptr, start, num_listed, vocab_size, GROUP, TILE)
        total += tl.where(keys >= floor, tl.exp((logits - top) / temperature), 0.0)
    return tl.sum(total)


@triton.jit
def _kth_largest(
    logits_ptr,
    list_ptr,
    num_listed,
    vocab_size,
    k,
    low,
    high,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Key of the k-th largest listed logit; ``low`` if fewer than k reach it.

    Bisects [low, high); every step moves a bound onto a key that occurs.
    """
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        count = tl.zeros([TILE, GROUP], tl.int32)
        above = tl.full([TILE, GROUP], 0x7FFFFFFF, tl.int32)
        below = tl.full([TILE, GROUP], -0x80000000, tl.int32)
        for start in range(0, num_listed, TILE):
            _, keys = _load_keys(logits_ptr, list_ptr, start, num_listed, vocab_size, GROUP, TILE)
            hit = keys >= middle
            count += hit.to(tl.int32)
            above = tl.minimum(above, tl.where(hit, keys, 0x7FFFFFFF))
            below = tl.maximum(below, tl.where(hit, -0x80000000, keys))
        num_above = tl.sum(count)
        if num_above >= k:
            low = tl.min(above).to(tl.int64)
            high = tl.where(num_above == k, low + 1, high)
        else:
            high = tl.max(below).to(tl.int64) + 1
    return low


@triton.jit(do_not_specialize=["num_groups", "num_tiles"])
def _choose_kernel(
    logits_ptr,
    rows_ptr,
    group_max_ptr,
    tile_score_ptr,
    tile_token_ptr,
    list_ptr,
    token_ptr,
    vocab_size,
    num_groups,
    num_tiles,
    TRUNCATES: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    MAX_TILES: tl.constexpr,
    MAX_GROUPS: tl.constexpr,
):
    """The winner of one row: of its tiles' winners, or of the tokens that a truncation keeps."""
    row = tl.program_id(0)
    tile = tl.arange(0, MAX_TILES)
    slot = row * num_tiles + tile
    score = tl.load(tile_score_ptr + slot, mask=tile < num_tiles, other=-float("inf"))
    token = _first_best(score, tl.load(tile_token_ptr + slot, mask=tile < num_tiles, other=0))
    if TRUNCATES:
        row_ptr = rows_ptr + row * ROW_WORDS
        temperature = tl.load(row_ptr).to(tl.float32, bitcast=True)
        top_k = tl.load(row_ptr + 1)
        top_p = tl.load(row_ptr + 2).to(tl.float32, bitcast=True)
        min_p = tl.load(row_ptr + 3).to(tl.float32, bitcast=True)
        if top_k >= vocab_size:
            top_k = 0
        truncates = (top_k > 0) | (top_p < 1) | (min_p > 0)
        if truncates & (temperature > 0) & (token >= 0):
            logits_ptr += row.to(tl.int64) * vocab_size
            list_ptr += row * num_groups
            group = tl.arange(0, MAX_GROUPS)
            exists = group < num_groups
            group_max = tl.load(
                group_max_ptr + row * num_groups + group, mask=exists, other=-float("inf")
            )
            group_key = tl.where(exists, _key(group_max), -0x80000000)
            top = tl.max(group_max)
            floor = tl.full([], -0x80000000, tl.int64)
            if min_p > 0:
                floor = _key(top + temperature * tl.log(min_p)).to(tl.int64)
            if (top_k > 0) & (top_k <= num_groups):
                # A bound is enough: 20 halvings of the 2^32 keys.
                low = tl.full([], -0x80000000, tl.int64)
                high = _key(top).to(tl.int64) + 1
                for _ in range(20):
                    middle = low + ((high - low) >> 1)
                    enough = tl.sum((group_key >= middle).to(tl.int32)) >= top_k
                    low = tl.where(enough, middle, low)
                    high = tl.where(enough, high, middle)
                floor = tl.maximum(floor, low)

            reaches = exists & (group_key >= floor)
            place = tl.cumsum(reaches.to(tl.int32)) - 1
            num_listed = tl.sum(reaches.to(tl.int32))
            tl.store(list_ptr + place, group, mask=reaches)
            tl.debug_barrier()  # the list is read by other threads than wrote it

            if top_k > 0:
                floor = _kth_largest(
                    logits_ptr,
                    list_ptr,
                    num_listed,
                    vocab_size,
                    top_k,
                    floor,
                    _key(top).to(tl.int64) + 1,
                    GROUP,
                    TILE,
                )
            kept = top_p * 1.0
            if top_p < 1:
                kept = top_p * _mass(
                    logits_ptr,
                    list_ptr,
                    num_listed,
                    vocab_size,
                    floor,
                    top,
                    temperature,
                    GROUP,
                    TILE,
                )
            key = _key(tl.load(logits_ptr + token).to(tl.float32)).to(tl.int64)
            drawing = key < floor
            checking = top_p < 1
            while drawing | checking:
                if drawing:
                    best = tl.full([TILE, WIDTH], -float("inf"), tl.float32)
                    best_token = tl.zeros([TILE, WIDTH], tl.int32)
                    for start in range(0, num_listed, TILE):
                        listed = start + tl.arange(0, TILE)
                        groups = tl.load(list_ptr + listed, mask=listed < num_listed, other=0)
                        new, new_token, _ = _draw(
                            logits_ptr,
                            groups,
                            listed < num_listed,
                            vocab_size,
                            0,
                            floor,
                            temperature,
                            _load_seed(row_ptr),
                            tl.load(row_ptr + 6),
                            LANES,
                            WIDTH,
                        )
                        best_token = tl.where(new > best, new_token, best_token)
                        best = tl.maximum(best, new)
                    token = _first_best(best, best_token)
                    key = _key(tl.load(logits_ptr + token).to(tl.float32)).to(tl.int64)
                drawing = checking & (
                    _mass(
                        logits_ptr,
                        list_ptr,
                        num_listed,
                        vocab_size,
                        key + 1,
                        top,
                        temperature,
                        GROUP,
                        TILE,
                    )
                    >= kept
                )
                floor = tl.maximum(floor, key + 1)
                checking = drawing
    tl.store(token_ptr + row, token.to(tl.int64))


def sample_triton(logits: torch.Tensor, rows: torch.Tensor, truncates: bool) -> torch.Tensor:
    """Two launches: every tile of every row for itself, then every row."""
    assert logits.is_contiguous()
    num_rows, vocab_size = logits.shape
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    if not num_rows:
        return tokens
    group_max, tile_score, tile_token = _scan(logits, rows, vocab_size, 0)
    num_groups, num_tiles = group_max.size(1), tile_score.size(1)
    listed = logits.new_empty(num_rows, num_groups, dtype=torch.int32)
    _choose_kernel[(num_rows,)](
        logits,
        rows,
        group_max,
        tile_score,
        tile_token,
        listed,
        tokens,
        vocab_size,
        num_groups,
        num_tiles,
        TRUNCATES=truncates,
        ROW_WORDS=ROW_WORDS,
        LANES=LANES,
        WIDTH=WIDTH,
        TILE=TILE,
        GROUP=GROUP,
        MAX_TILES=triton.next_power_of_2(num_tiles),
        MAX_GROUPS=triton.next_power_of_2(num_groups),
        num_warps=8,
    )
    return tokens


def _scan(
    logits: torch.Tensor, rows: torch.Tensor, num_tokens: int, first_token: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The largest logit of each group, fp32 [N, groups]; the best score of each tile of groups
    and its token, fp32 and int32 [N, tiles]."""
    assert rows.shape == (len(logits), ROW_WORDS)
    assert rows.dtype == torch.int32 and rows.is_contiguous()
    num_groups = triton.cdiv(num_tokens, GROUP)
    num_tiles = max(triton.cdiv(num_groups, TILE), 1)
    group_max = logits.new_empty(len(logits), num_groups, dtype=torch.float32)
    tile_score = logits.new_empty(len(logits), num_tiles, dtype=torch.float32)
    tile_token = logits.new_empty(len(logits), num_tiles, dtype=torch.int32)
    _scan_kernel[(len(logits), num_tiles)](
        logits,
        rows,
        group_max,
        tile_score,
        tile_token,
        num_tokens,
        logits.stride(0),
        num_groups,
        first_token // GROUP,
        ROW_WORDS=ROW_WORDS,
        LANES=LANES,
        WIDTH=WIDTH,
        TILE=TILE,
        num_warps=8,
    )
    return group_max, tile_score, tile_token


@triton.jit(do_not_specialize=["num_tiles", "first_token"])
def _pack_kernel(
    tile_score_ptr, tile_token_ptr, out_ptr, num_tiles, first_token, MAX_TILES: tl.constexpr
):
    row = tl.program_id(0)
    tile = tl.arange(0, MAX_TILES)
    slot = row * num_tiles + tile
    score = tl.load(tile_score_ptr + slot, mask=tile < num_tiles, other=-float("inf"))
    token = _first_best(score, tl.load(tile_token_ptr + slot, mask=tile < num_tiles, other=0))
    key = _key(tl.max(score)).to(tl.int64)
    tl.store(out_ptr + row, (key << 32) | (0x7FFFFFFF - tl.maximum(token, 0) - first_token))


def best_of_shard_triton(
    logits: torch.Tensor, rows: torch.Tensor, num_tokens: int, first_token: int
) -> torch.Tensor:
    assert logits.stride(1) == 1
    _, tile_score, tile_token = _scan(logits, rows, num_tokens, first_token)
    out = logits.new_empty(len(logits), dtype=torch.int64)
    num_tiles = tile_score.size(1)
    _pack_kernel[(len(logits),)](
        tile_score,
        tile_token,
        out,
        num_tiles,
        first_token,
        MAX_TILES=triton.next_power_of_2(num_tiles),
    )
    return out


def best_of_shard_reference(
    logits: torch.Tensor, rows: torch.Tensor, num_tokens: int, first_token: int
) -> torch.Tensor:
    settings = rows.cpu().numpy().view(SAMPLING_ROW)[:, 0]
    is_bad = ~(logits[:, :num_tokens].float() < math.inf).all(-1)
    scores = torch.full((len(logits), num_tokens + 1), -math.inf)  # wide enough for a best one
    scores[:, :num_tokens] = logits[:, :num_tokens]
    for row, (temperature, seed, position) in zip(
        scores, settings[["temperature", "seed", "position"]].tolist(), strict=True
    ):
        if temperature > 0:
            noise = exponential_noise(seed, position, first_token + num_tokens)[first_token:]
            row[:num_tokens] = row[:num_tokens] * (1 / temperature) - torch.from_numpy(noise).log()
    scores[is_bad.cpu()] = math.inf
    best, token = scores.max(-1)
    bits = (best + 0.0).view(torch.int32)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    return ((key << 32) | (0x7FFFFFFF - token - first_token)).to(logits.device)


def best_of_shard(
    logits: torch.Tensor, rows: torch.Tensor, num_tokens: int, first_token: int
) -> torch.Tensor:
    """The winner of each row among the tokens of one shard of the vocabulary.

    Args:
        logits: [N, num_tokens or more], of the tokens from ``first_token`` on.
        rows: int32 [N, ROW_WORDS], a SAMPLING_ROW each; truncation is not applied.
        first_token: a multiple of GROUP.

    Returns:
        int64 [N], the score (infinite where a logit is NaN or infinite) above the token: the
        largest over all shards is the winner of all (``winning_token``), a tie going to the first.
    """
    assert first_token % GROUP == 0
    best = best_of_shard_triton if use_triton(logits) else best_of_shard_reference
    return best(logits, rows, num_tokens, first_token)


def winning_token(best: torch.Tensor) -> torch.Tensor:
    """int64 [N] token ids; -1 for a row of nothing but -inf, or with a logit NaN or infinite."""
    infinity = 0x7F800000  # its key; that of -inf is one less than its negative
    score, token = best >> 32, 0x7FFFFFFF - (best & 0xFFFFFFFF)
    return torch.where((score > -infinity - 1) & (score < infinity), token, -1)


def sample(logits: torch.Tensor, rows: torch.Tensor, truncates: bool) -> torch.Tensor:
    """Draws one token a row.

    Args:
        logits: [N, vocab_size].
        rows: int32 [N, ROW_WORDS], a SAMPLING_ROW each.
        truncates: whether any row has top_k, top_p or min_p set.

    Returns:
        int64 [N]; -1 for a row of nothing but -inf, or with a logit that is NaN or infinite.
    """
    if use_triton(logits):
        return sample_triton(logits, rows, truncates)
    return sample_reference(logits, rows)
