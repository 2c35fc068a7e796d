"""The order of admission when many requests are known at once, against a plain model of it."""

import random
import sys
from collections.abc import Iterable
from itertools import count
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.engine import offline_order
from nanovllm.engine.offline_order import OfflineOrder
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from tests.invariants import check_scheduler

BLOCK = 4


def make(prompt: list[int], max_tokens: int = 8, may_reorder: bool = True) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    seq = Sequence(prompt, params, BLOCK)
    seq.may_reorder = may_reorder
    seq.max_len = len(prompt) + max_tokens  # as Scheduler.add sets it
    return seq


def rank(seq: Sequence) -> tuple[int, int]:
    """The lower one goes first, where prefixes do not matter."""
    bounds = [n for i in range(30) for n in (2**i, 3 * 2**i // 2)]
    return -max(n for n in bounds if n <= seq.sampling_params.max_tokens), seq.seq_id


def in_order(seqs: Iterable[Sequence], depth: int = 0) -> list[Sequence]:
    """Sequences that are all queued before the first is admitted: groups that share the next block,
    each by the best of its members, and the same within it."""
    groups: dict[Any, list[Sequence]] = {}
    for seq in seqs:
        block = seq.token_ids[depth * BLOCK : (depth + 1) * BLOCK]
        groups.setdefault(tuple(block) if len(block) == BLOCK else seq.seq_id, []).append(seq)
    result: list[Sequence] = []
    for members in sorted(groups.values(), key=lambda members: min(map(rank, members))):
        result += members if len(members) == 1 else in_order(members, depth + 1)
    return result


def admitted(queue: OfflineOrder) -> list[Sequence]:
    seqs = []
    while queue:
        head = queue.head
        assert head in queue
        assert queue.popleft() is head
        seqs.append(head)
    return seqs


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=3 * BLOCK + 2)
REQUESTS = st.lists(st.tuples(PROMPTS, st.integers(1, 9)), max_size=30)


@given(REQUESTS)
def test_equal_prefixes_are_admitted_together_and_the_longest_first(requests):
    seqs = [make(prompt, max_tokens) for prompt, max_tokens in requests]
    queue = OfflineOrder()
    for seq in seqs:
        queue.add(seq)
    assert sorted(queue, key=rank) == sorted(seqs, key=rank)
    assert admitted(queue) == in_order(seqs)


@given(REQUESTS)
def test_without_a_prefix_cache_the_longest_is_first(requests):
    seqs = [make(prompt, max_tokens) for prompt, max_tokens in requests]
    queue = OfflineOrder(shares_prefixes=False)
    for seq in seqs:
        queue.add(seq)
    assert admitted(queue) == sorted(seqs, key=rank)


@given(REQUESTS, st.randoms(use_true_random=False))
def test_each_sequence_is_admitted_once_whatever_comes_between(requests, rng):
    """Of all that wait, the head is the best of some group. Sequences that may not be reordered,
    and those that are put back, are first."""
    queue, waiting, first = OfflineOrder(), [], []
    for prompt, max_tokens in requests:
        seq = make(prompt, max_tokens, may_reorder=rng.random() < 0.8)
        queue.add(seq)
        (waiting if seq.may_reorder else first).append(seq)
        action = rng.random()
        if action < 0.3:
            seq = queue.popleft()
            assert not first or seq is first[0]
            (first or waiting).remove(seq)
            if rng.random() < 0.3:
                queue.put_back(seq)
                first.insert(0, seq)
        elif action < 0.5:
            seq = rng.choice(waiting + first)
            queue.remove(seq)
            (waiting if seq in waiting else first).remove(seq)
            assert seq not in queue
        assert len(queue) == len(waiting) + len(first)
        assert set(queue) == {*waiting, *first}
    assert admitted(queue)[: len(first)] == first
    assert not queue and not queue.pools


def test_a_prefix_goes_on_while_its_sequences_arrive():
    """Those that begin like one admitted shortly before, whose blocks are still in the cache."""
    queue = OfflineOrder()
    prefixes = [[i] * BLOCK for i in range(3)]
    for i in range(3):
        queue.add(make([*prefixes[i], 9]))
    first = [queue.popleft() for _ in range(2)]
    late = [make([*prefixes[i], 8]) for i in range(3)]
    for seq in late:
        queue.add(seq)
    assert [seq.token_ids[0] for seq in first] == [0, 1]
    assert [seq.token_ids[0] for seq in admitted(queue)] == [1, 0, 2, 2]
    assert (queue.num_grouped, queue.num_longest_first) == (2, 0)


def test_sequences_that_overtake_are_counted():
    """One overtakes if any earlier one still waits, also one from another group."""
    queue = OfflineOrder()
    for i in (1, 2, 1, 2):
        queue.add(make([i] * BLOCK + [9]))
    assert [seq.token_ids[0] for seq in admitted(queue)] == [1, 1, 2, 2]
    assert (queue.num_grouped, queue.num_longest_first) == (1, 0)


def add_interrupted(queue: OfflineOrder, seq: Sequence, line: int) -> bool:
    """Raises KeyboardInterrupt at a line that ``add`` runs; false if it has fewer lines."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal line
        if frame.f_code.co_filename != offline_order.__file__:
            return None
        if event == "line":
            line -= 1
            if line == 0:
                raise KeyboardInterrupt
        return trace

    tracer = sys.gettrace()
    sys.settrace(trace)
    try:
        queue.add(seq)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(tracer)
    return False


@pytest.mark.parametrize("others", [[], [[1] * 9], [[1] * 8 + [i] * 8 for i in range(2)]])
def test_an_interrupted_add_can_be_undone(others):
    """As LLMEngine does, so that the queue still has the other sequences."""
    for line in count(1):
        queue, seqs, seq = (
            OfflineOrder(),
            [make(prompt) for prompt in others],
            make([1] * 4 + [9] * 8),
        )
        for other in seqs:
            queue.add(other)
        if not add_interrupted(queue, seq, line):
            assert line > 10
            return
        if seq in queue:
            queue.remove(seq)
        assert len(queue) == len(seqs)
        assert admitted(queue) == seqs


def test_no_sequence_waits_forever(monkeypatch):
    monkeypatch.setattr(offline_order, "POOL_SIZE", 100)
    queue, short = OfflineOrder(), make([1], max_tokens=1)
    queue.add(short)
    seqs = []
    for _ in range(100):
        queue.add(make([1], max_tokens=50))
        queue.add(make([1], max_tokens=50))
        seqs.append(queue.popleft())
    assert short in seqs


def test_each_prompt_may_be_a_prefix_of_the_next():
    tokens = list(range(300 * BLOCK))
    seqs = [make(tokens[: n * BLOCK], max_tokens=n % 7 + 1) for n in range(200, 301)]
    queue = OfflineOrder()
    for seq in seqs:
        queue.add(seq)
    assert admitted(queue) == in_order(seqs)


def run(
    reorders: bool, requests: list[tuple[list[int], int]], num_blocks: int, num_seqs: int
) -> Any:
    """Runs requests without a model. Returns the scheduler, the number of tokens computed in
    prefills and the number of decodes."""
    config = Config(
        "model",
        kvcache_block_size=BLOCK,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=256,
        enable_reordering=reorders,
    )
    scheduler = Scheduler(config, num_blocks, max_model_len=1024)
    for prompt, max_tokens in requests:
        scheduler.add(make(prompt, max_tokens))
    num_prefilled = num_decodes = 0
    while not scheduler.is_finished():
        batch = scheduler.schedule()
        scheduler.launched(batch)
        scheduler.postprocess(batch, [0] * len(batch.sampled))
        check_scheduler(scheduler)
        num_prefilled += batch.num_tokens if batch.is_prefill else 0
        num_decodes += not batch.is_prefill
    return scheduler, num_prefilled, num_decodes


def test_each_prefix_is_computed_once_though_the_cache_holds_few():
    rng = random.Random(0)
    prefixes = [[rng.randrange(1000) for _ in range(16 * BLOCK)] for _ in range(20)]
    requests = [
        (prefixes[i % 20] + [rng.randrange(1000)] * 3, rng.randrange(1, 9)) for i in range(400)
    ]
    rng.shuffle(requests)
    by_hand = sorted(requests)
    num_unique = 20 * 16 * BLOCK + 400 * 3
    scheduler, num_prefilled, num_decodes = run(True, requests, 6 * 16, 32)
    assert num_prefilled <= 1.02 * num_unique
    assert scheduler.waiting.num_grouped > 300
    assert run(False, requests, 6 * 16, 32)[1] > 3 * num_unique
    assert num_decodes <= 1.05 * run(False, by_hand, 6 * 16, 32)[2]


def test_the_last_sequences_are_short():
    rng = random.Random(0)
    requests = [([rng.randrange(1000)] * 8, rng.randrange(10, 100)) for _ in range(256)]
    by_hand = sorted(requests, key=lambda request: -request[1])
    scheduler, _, num_decodes = run(True, requests, 10_000, 64)
    assert scheduler.waiting.num_longest_first > 100
    longest_first = run(False, by_hand, 10_000, 64)[2]
    assert num_decodes <= 1.03 * longest_first < run(False, requests, 10_000, 64)[2]


SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 24,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
}


@pytest.mark.parametrize("on_error", ["raise", "return"])
def test_the_results_are_those_of_first_come_first_served(on_error, model_path):
    """In the order of the prompts, with the same seeds."""
    rng = random.Random(0)
    prefixes = [[rng.randrange(64) for _ in range(40)] for _ in range(4)]
    prompts = [prefixes[i] + [rng.randrange(64)] for _ in range(5) for i in range(4)]
    params = [
        SamplingParams(max_tokens=rng.randrange(1, 12), temperature=i % 3, ignore_eos=True)
        for i in range(20)
    ]
    results = []
    for reorders in (True, False):
        with LLM(model_path, enable_reordering=reorders, **SETTINGS) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False, on_error=on_error)
            metrics = llm.metrics()
        assert [output.prompt_token_ids for output in outputs] == prompts
        results.append([output["token_ids"] for output in outputs])
        assert (metrics.num_grouped > 0) == reorders
        assert (metrics.num_longest_first > 0) == reorders
    assert results[0] == results[1]


def test_add_request_is_first_come_first_served(model_path):
    def finished(**options: bool) -> list[str]:
        with LLM(model_path, **SETTINGS | {"max_num_seqs": 1}) as llm:
            ids = [
                llm.add_request([1, 2, 3], SamplingParams(max_tokens=n, ignore_eos=True), **options)
                for n in (3, 5, 4)
            ]
            done = []
            while not llm.is_finished():
                done += [ids.index(output.request_id) for output in llm.step()]
        return done

    assert finished() == [0, 1, 2]
    assert finished(may_reorder=True) == [1, 2, 0]
