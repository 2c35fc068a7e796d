"""Sampling with temperature, top-k, top-p and min-p: one pass over the logits, and no sort.

Of items with masses m, the argmax of log m - log E, E ~ Exp(1) for each, is a draw in proportion to
the masses (the exponential race). A token is drawn in two races. The first is between groups of 128
consecutive tokens, whose masses are the sums of exp(logit / temperature), the second between the
tokens of the group that won: one exp a logit, and noise for few. The noise E depends on seed,
position and the number of the group or token only (philox.py).

Top-k, top-p and min-p each keep the tokens above some logit, {z >= floor} for one floor on the
logits z. If the token drawn is kept, it is a draw from those kept (rejection sampling). If not, the
kept ones run one flat race of tokens with fresh noise: that of the first races has let a token win
which is not kept, so it is biased against the others of its group. The floor:

- min-p gives it outright: the largest logit + temperature * log(min_p).
- top-k: the k-th largest logit, found by bisection between values that occur. With the largest
  logit of each group at hand, the k-th largest of those bounds it from below, and only groups that
  reach the bound are read again.
- top-p keeps a token if the tokens above it hold less than top_p of the mass that is left. This
  needs no floor: while the token drawn is not kept, raise the floor above it and take the winner of
  the tokens left, by the same scores of the flat race. Those kept are always among them, so this
  ends with the winner of those kept; and soon, since what is not kept holds little mass.

Ties at a floor are all kept. A row with a NaN or an infinite logit draws nothing.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F

from nanovllm.kernels.sampling.philox import (
    GROUP,
    GROUPS,
    LANES,
    REDRAW,
    TOKENS,
    WIDTH,
    exponential_noise,
)
from nanovllm.utils.triton_compat import tl, triton, use_triton

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
TILE = 32  # groups that a program reads at a time
CHOOSE_TILE = 64


def sample_reference(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    settings = rows.cpu().numpy().view(SAMPLING_ROW)[:, 0]
    if not settings["temperature"].any():
        return torch.where(logits.amax(-1).isfinite(), logits.argmax(-1), -1)
    tokens = [_sample_row(z, s) for z, s in zip(logits.float().cpu(), settings, strict=True)]
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def _sample_row(logits: torch.Tensor, settings: np.void) -> int:
    """One token from fp32 [vocab_size] logits; -1 if all are -inf, or any is NaN or inf."""
    temperature, top_k, top_p, min_p, seed, position, _ = settings.item()
    _, token = _draw_reference(logits, temperature, seed, position)
    if token < 0 or temperature == 0:
        return token
    top = logits.max()
    floor = torch.tensor(-math.inf)
    if min_p > 0:
        floor = top + temperature * math.log(min_p)
    if 0 < top_k < len(logits):
        floor = torch.maximum(floor, logits.topk(top_k).values[-1])
    if top_p < 1:
        weights = ((logits - top) / temperature).exp()
        enough = top_p * weights[logits >= floor].sum()
    scores = None
    while logits[token] < floor or (top_p < 1 and weights[logits > logits[token]].sum() >= enough):
        if scores is None:
            scores = _scores(logits * (1 / temperature), seed, position, REDRAW, 0)
        scores[(logits < floor) | (logits <= logits[token])] = -math.inf
        token = int(scores.argmax())
    return token


def _draw_reference(
    logits: torch.Tensor, temperature: float, seed: int, position: int, first_token: int = 0
) -> tuple[float, int]:
    """The score of the group that wins and the token of it that does, -1 if there is none, from
    fp32 [num_tokens] logits. The score is infinite if a logit is NaN or infinite."""
    if not (logits < math.inf).all():
        return math.inf, -1
    # At least one group, though there be no token.
    groups = F.pad(logits, (0, GROUP - len(logits) % GROUP), value=-math.inf).view(-1, GROUP)
    scores = groups.amax(1)
    if temperature > 0:
        log_masses = (groups * (1 / temperature)).logsumexp(1)
        scores = _scores(log_masses, seed, position, GROUPS, first_token // GROUP)
    group = int(scores.argmax())
    best, start = scores[group].item(), first_token + group * GROUP
    scores = groups[group]
    if temperature > 0:
        scores = _scores(scores * (1 / temperature), seed, position, TOKENS, start)
    return best, start + int(scores.argmax()) if best > -math.inf else -1


def _scores(
    log_masses: torch.Tensor, seed: int, position: int, stream: int, start: int
) -> torch.Tensor:
    """log m - log E of the items from ``start`` on."""
    noise = exponential_noise(seed, position, stream, start, start + len(log_masses))
    return log_masses - torch.from_numpy(noise).log()


@triton.jit
def _score(log_mass, word):
    """log m - log E."""
    uniform = (word.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    uniform = tl.minimum(uniform, 0.99999994)  # as philox.LARGEST_UNIFORM
    # -log(1 - u), as a series where 1 - u would round u away.
    series = uniform * (1 + uniform * (0.5 + uniform * 0.33333334))
    noise = tl.where(uniform < 1e-3, series, -tl.log(1 - uniform))
    return log_mass - tl.log(noise)


@triton.jit
def _race(
    values_ptr,
    groups,
    start,
    end,
    floor,
    temperature,
    row_ptr,
    stream,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Best score and its item, each [groups, WIDTH], of the items in these groups that lie between
    ``start`` and ``end`` and have values with keys >= floor.

    value / temperature is the log of a mass; scores are the values for temperature 0.
    """
    column = tl.arange(0, WIDTH)[None, :]
    counter = groups[:, None] * WIDTH + column
    zero = counter * 0
    w0 = zero
    w1 = zero
    w2 = zero
    w3 = zero
    if temperature > 0:
        position = zero + tl.load(row_ptr + 6)
        # philox.ROUNDS
        words = tl.philox(_load_seed(row_ptr), counter, position, zero + stream, zero, 7)
        w0 = words[0].to(tl.int32, bitcast=True)
        w1 = words[1].to(tl.int32, bitcast=True)
        w2 = words[2].to(tl.int32, bitcast=True)
        w3 = words[3].to(tl.int32, bitcast=True)
    best = tl.full(counter.shape, -float("inf"), tl.float32)
    best_item = zero
    for lane in tl.static_range(LANES):
        item = (groups[:, None] * LANES + lane) * WIDTH + column
        exists = (item >= start) & (item < end)
        value = tl.load(values_ptr + item, mask=exists, other=-float("inf")).to(tl.float32)
        word = w0 if lane == 0 else (w1 if lane == 1 else (w2 if lane == 2 else w3))
        score = value
        if temperature > 0:
            score = _score(value * (1 / temperature), word)
        score = tl.where(_key(value) >= floor, score, -float("inf"))
        best_item = tl.where(score > best, item, best_item)
        best = tl.maximum(best, score)
    return best, best_item


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


@triton.jit
def _draw(
    logits_ptr,
    log_mass_ptr,
    row_ptr,
    num_tokens,
    num_groups,
    first_token,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    """Of one row, the score of the group that wins and the token of it that does, -1 if there is
    none. The score is infinite if a logit is NaN or infinite."""
    temperature = tl.load(row_ptr).to(tl.float32, bitcast=True)
    GROUP: tl.constexpr = LANES * WIDTH
    first_group = first_token // GROUP
    score, group = _race(
        log_mass_ptr - first_group,
        first_group // GROUP + tl.arange(0, MAX_BLOCKS),
        first_group,
        first_group + num_groups,
        -0x80000000,
        tl.where(temperature > 0, 1.0, 0.0),  # it is in the masses already
        row_ptr,
        0,  # philox.GROUPS
        LANES,
        WIDTH,
    )
    best = tl.max(score)
    group = tl.maximum(_first_best(score, group), first_group)
    score, token = _race(
        logits_ptr - first_token,
        group + tl.zeros([1], tl.int32),
        first_token,
        first_token + num_tokens,
        -0x80000000,
        temperature,
        row_ptr,
        1,  # philox.TOKENS
        LANES,
        WIDTH,
    )
    return best, tl.where(best < float("inf"), _first_best(score, token), -1)


@triton.jit
def _load(logits_ptr, token, vocab_size):
    """Logits as fp32, -inf past the end."""
    return tl.load(logits_ptr + token, mask=token < vocab_size, other=-float("inf")).to(tl.float32)


# Specialised on vocab_size and stride alone: the others follow from them.
@triton.jit(do_not_specialize=["num_groups"])
def _scan_kernel(
    logits_ptr,
    rows_ptr,
    group_max_ptr,
    log_mass_ptr,
    vocab_size,
    stride,
    num_groups,
    ROW_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of TILE groups of one row: the largest logit and the log of the mass, which is the largest
    logit for temperature 0, and infinite where a logit is NaN or infinite."""
    row, tile = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(rows_ptr + row * ROW_WORDS).to(tl.float32, bitcast=True)
    scale = 1 / tl.where(temperature > 0, temperature, 1.0)
    groups = tile * TILE + tl.arange(0, TILE)
    # Four parts of each group: a thread has tokens of all, which leaves little to exchange.
    token = groups[:, None] * (LANES * WIDTH) + tl.arange(0, WIDTH)[None, :]
    logits_ptr += row.to(tl.int64) * stride
    z0 = _load(logits_ptr, token, vocab_size)
    z1 = _load(logits_ptr, token + WIDTH, vocab_size)
    z2 = _load(logits_ptr, token + 2 * WIDTH, vocab_size)
    z3 = _load(logits_ptr, token + 3 * WIDTH, vocab_size)
    largest = tl.max(tl.maximum(tl.maximum(z0, z1), tl.maximum(z2, z3)), axis=1)
    shift = tl.maximum(largest, -3.4028234663852886e38)[:, None]  # finite for groups of -inf
    base2 = scale * 1.4426950408889634
    weights = tl.exp2((z0 - shift) * base2) + tl.exp2((z1 - shift) * base2)
    weights += tl.exp2((z2 - shift) * base2) + tl.exp2((z3 - shift) * base2)
    total = tl.sum(weights, axis=1)
    log_mass = tl.where(temperature > 0, largest * scale + tl.log(total), largest)
    log_mass = tl.where(total == total, log_mass, float("inf"))
    slot = row * num_groups + groups
    tl.store(group_max_ptr + slot, largest, mask=groups < num_groups)
    tl.store(log_mass_ptr + slot, log_mass, mask=groups < num_groups)


@triton.jit
def _load_keys(
    logits_ptr, list_ptr, start, num_listed, vocab_size, GROUP: tl.constexpr, TILE: tl.constexpr
):
    """Logits of the next TILE listed groups as fp32 and as keys, -inf where there is none."""
    slot = start + tl.arange(0, TILE)
    groups = tl.load(list_ptr + slot, mask=slot < num_listed, other=vocab_size)  # past the end
    token = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logits = _load(logits_ptr, token, vocab_size)
    return logits, _key(logits)


@triton.jit
def _list_groups(list_ptr, group_key, group, floor):
    """Lists the groups that have a key >= floor. Returns how many they are."""
    reaches = group_key >= floor
    place = tl.cumsum(reaches.to(tl.int32)) - 1
    tl.store(list_ptr + place, group, mask=reaches)
    tl.debug_barrier()  # the list is read by other threads than wrote it
    return tl.sum(reaches.to(tl.int32))


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
        total += tl.where(keys >= floor, tl.exp((logits - top) * (1 / temperature)), 0.0)
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


@triton.jit(do_not_specialize=["num_groups"])
def _choose_kernel(
    logits_ptr,
    rows_ptr,
    group_max_ptr,
    log_mass_ptr,
    list_ptr,
    token_ptr,
    vocab_size,
    num_groups,
    TRUNCATES: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    MAX_GROUPS: tl.constexpr,
):
    """Draws the token of one row: from all, then if need be from those that a truncation keeps."""
    row = tl.program_id(0)
    row_ptr = rows_ptr + row * ROW_WORDS
    logits_ptr += row.to(tl.int64) * vocab_size
    log_mass_ptr += row * num_groups
    _best, token = _draw(
        logits_ptr,
        log_mass_ptr,
        row_ptr,
        vocab_size,
        num_groups,
        0,
        LANES,
        WIDTH,
        MAX_BLOCKS,
    )
    if TRUNCATES:
        temperature = tl.load(row_ptr).to(tl.float32, bitcast=True)
        top_k = tl.load(row_ptr + 1)
        top_p = tl.load(row_ptr + 2).to(tl.float32, bitcast=True)
        min_p = tl.load(row_ptr + 3).to(tl.float32, bitcast=True)
        if top_k >= vocab_size:
            top_k = 0
        truncates = (top_k > 0) | (top_p < 1) | (min_p > 0)
        if truncates & (temperature > 0) & (token >= 0):
            list_ptr += row * num_groups
            group = tl.arange(0, MAX_GROUPS)
            exists = group < num_groups
            slot = row * num_groups + group
            group_max = tl.load(group_max_ptr + slot, mask=exists, other=-float("inf"))
            group_key = _key(group_max)
            top = tl.max(group_max)
            floor = tl.full([], -0x7F800000, tl.int64)  # all but -inf
            if min_p > 0:
                floor = tl.maximum(floor, _key(top + temperature * tl.log(min_p)))
            if (top_k > 0) & (top_k <= num_groups):
                # A bound is enough: 20 halvings of the 2^32 keys.
                low = tl.full([], -0x7F800000, tl.int64)
                high = _key(top).to(tl.int64) + 1
                for _ in range(20):
                    middle = low + ((high - low) >> 1)
                    enough = tl.sum((group_key >= middle).to(tl.int32)) >= top_k
                    low = tl.where(enough, middle, low)
                    high = tl.where(enough, high, middle)
                floor = tl.maximum(floor, low)
            num_listed = _list_groups(list_ptr, group_key, group, floor)
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
                if (top_k > 0) | (min_p > 0):
                    kept *= _mass(
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
                else:
                    log_mass = tl.load(log_mass_ptr + group, mask=exists, other=-float("inf"))
                    kept *= tl.sum(tl.exp(log_mass - top * (1 / temperature)))
            key = _key(tl.load(logits_ptr + token).to(tl.float32)).to(tl.int64)
            drawing = key < floor
            checking = top_p < 1
            while drawing | checking:
                if drawing:
                    best = tl.full([TILE, WIDTH], -float("inf"), tl.float32)
                    best_token = tl.zeros([TILE, WIDTH], tl.int32)
                    for start in range(0, num_listed, TILE):
                        listed = start + tl.arange(0, TILE)
                        score, item = _race(
                            logits_ptr,
                            tl.load(list_ptr + listed, mask=listed < num_listed, other=vocab_size),
                            0,
                            vocab_size,
                            floor,
                            temperature,
                            row_ptr,
                            2,  # philox.REDRAW
                            LANES,
                            WIDTH,
                        )
                        best_token = tl.where(score > best, item, best_token)
                        best = tl.maximum(best, score)
                    token = _first_best(best, best_token)
                    key = _key(tl.load(logits_ptr + token).to(tl.float32)).to(tl.int64)
                drawing = checking
                if checking:  # whether the tokens above this one, if any, hold too much
                    floor = tl.maximum(floor, key + 1)
                    num_listed = _list_groups(list_ptr, group_key, group, floor)
                    above = _mass(
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
                    drawing = (above >= kept) & (num_listed > 0)
                checking = drawing
    tl.store(token_ptr + row, token.to(tl.int64))


def sample_triton(logits: torch.Tensor, rows: torch.Tensor, truncates: bool) -> torch.Tensor:
    """Two launches: every tile of every row for itself, then every row."""
    assert logits.is_contiguous()
    num_rows, vocab_size = logits.shape
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    if not num_rows:
        return tokens
    group_max, log_mass = _scan(logits, rows, vocab_size)
    num_groups = group_max.size(1)
    listed = logits.new_empty(num_rows, num_groups, dtype=torch.int32)
    _choose_kernel[(num_rows,)](
        logits,
        rows,
        group_max,
        log_mass,
        listed,
        tokens,
        vocab_size,
        num_groups,
        TRUNCATES=truncates,
        ROW_WORDS=ROW_WORDS,
        LANES=LANES,
        WIDTH=WIDTH,
        GROUP=GROUP,
        TILE=CHOOSE_TILE,
        MAX_BLOCKS=triton.next_power_of_2(triton.cdiv(num_groups, GROUP)),
        MAX_GROUPS=triton.next_power_of_2(num_groups),
        num_warps=16,
    )
    return tokens


def _scan(
    logits: torch.Tensor, rows: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each group and the log of its mass, fp32 [N, groups]."""
    assert rows.shape == (len(logits), ROW_WORDS)
    assert rows.dtype == torch.int32 and rows.is_contiguous()
    num_groups = triton.cdiv(num_tokens, GROUP)
    group_max = logits.new_empty(len(logits), num_groups, dtype=torch.float32)
    log_mass = torch.empty_like(group_max)
    _scan_kernel[(len(logits), max(triton.cdiv(num_groups, TILE), 1))](
        logits,
        rows,
        group_max,
        log_mass,
        num_tokens,
        logits.stride(0),
        num_groups,
        ROW_WORDS=ROW_WORDS,
        LANES=LANES,
        WIDTH=WIDTH,
        TILE=TILE,
        num_warps=4,
    )
    return group_max, log_mass


@triton.jit(do_not_specialize=["num_tokens", "stride", "num_groups", "first_token"])
def _pack_kernel(
    logits_ptr,
    rows_ptr,
    log_mass_ptr,
    out_ptr,
    num_tokens,
    stride,
    num_groups,
    first_token,
    ROW_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    row = tl.program_id(0)
    best, token = _draw(
        logits_ptr + row.to(tl.int64) * stride,
        log_mass_ptr + row * num_groups,
        rows_ptr + row * ROW_WORDS,
        num_tokens,
        num_groups,
        first_token,
        LANES,
        WIDTH,
        MAX_BLOCKS,
    )
    key = _key(best).to(tl.int64)
    tl.store(out_ptr + row, (key << 32) | (0x7FFFFFFF - tl.maximum(token, 0)))


def best_of_shard_triton(
    logits: torch.Tensor, rows: torch.Tensor, num_tokens: int, first_token: int
) -> torch.Tensor:
    assert logits.stride(1) == 1
    _, log_mass = _scan(logits, rows, num_tokens)
    out = logits.new_empty(len(logits), dtype=torch.int64)
    num_groups = log_mass.size(1)
    _pack_kernel[(len(logits),)](
        logits,
        rows,
        log_mass,
        out,
        num_tokens,
        logits.stride(0),
        num_groups,
        first_token,
        ROW_WORDS=ROW_WORDS,
        LANES=LANES,
        WIDTH=WIDTH,
        # One more, for the first group may be in the middle of a block.
        MAX_BLOCKS=triton.next_power_of_2(triton.cdiv(num_groups, GROUP) + 1),
        num_warps=8,
    )
    return out


def best_of_shard_reference(
    logits: torch.Tensor, rows: torch.Tensor, num_tokens: int, first_token: int
) -> torch.Tensor:
    settings = rows.cpu().numpy().view(SAMPLING_ROW)[:, 0]
    drawn = [
        _draw_reference(z, temperature, seed, position, first_token)
        for z, (temperature, seed, position) in zip(
            logits[:, :num_tokens].float().cpu(),
            settings[["temperature", "seed", "position"]].tolist(),
            strict=True,
        )
    ]
    best, token = torch.tensor(drawn, dtype=torch.float64).view(-1, 2).unbind(1)
    bits = (best.float() + 0.0).view(torch.int32)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    return ((key << 32) | (0x7FFFFFFF - token.long().clamp(min=0))).to(logits.device)


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
