"""The scheduler, run with a simulated device that remembers what each KV slot holds."""

import gc
import random
from bisect import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.config import Config
from nanovllm.engine.batch import Batch
from nanovllm.engine.block_manager import BlockCache
from nanovllm.engine.kv_layout import longest_sequence
from nanovllm.engine.model_inputs import prepare_decode, prepare_prefill
from nanovllm.engine.policy import FirstComeFirstServed
from nanovllm.engine.prefix_cache import PrefixCache
from nanovllm.engine.recovery import preempt_batch
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Finish, Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams
from tests.conftest import needs_asserts
from tests.invariants import check_scheduler, prefix_cache

EOS = (3, 4)
STOP_TEXT = "a stop string"
Result = tuple[list[int], str | None, int | str | None]


def make_scheduler(**kwargs: Any) -> Scheduler:
    """Arguments of Scheduler or, if it has none of that name, fields of its Config."""
    defaults: dict[str, Any] = {"num_blocks": 64, "max_model_len": 128, "eos_token_ids": EOS}
    defaults |= {"policy": None, "windows": (None,)}
    arguments = {name: kwargs.pop(name, value) for name, value in defaults.items()}
    settings = {"kvcache_block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, **kwargs}
    config = Config("model", **settings)
    runner: Any = SimpleNamespace(config=config, windows=arguments["windows"])
    cache_len = longest_sequence(runner, arguments["num_blocks"])
    return Scheduler(config, eos_token_id=min(EOS), cache_len=cache_len, **arguments)


def launch(scheduler: Scheduler) -> Batch:
    """The next step, as launched."""
    batch = scheduler.schedule()
    scheduler.launched(batch)
    return batch


def next_token(tokens: list[int], salt: int) -> int:
    """Stands for the model: a token that depends on all before it, as a greedy one does; where
    the salt is odd, once in a while none."""
    token = random.Random(hash((salt, *tokens))).randrange(60)
    return -1 if salt % 2 and not token else token % 12


class Prefixes:
    """Numbers each distinct prefix of tokens. That is what the keys and values of a token
    depend on: it and all tokens before it, and nothing else."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, int], int] = {}
        self.tokens: list[tuple[int, ...]] = [()]

    def of(self, tokens: Iterable[int]) -> list[int]:
        """The number of each prefix, shortest first."""
        numbers = [0]
        for token in tokens:
            key = (numbers[-1], token)
            if key not in self.numbers:
                self.numbers[key] = len(self.tokens)
                self.tokens.append((*self.tokens[numbers[-1]], token))
            numbers.append(self.numbers[key])
        return numbers[1:]


@cache
def chain_hash(tokens: tuple[int, ...], block_size: int) -> int:
    """Of the last of some full blocks."""
    before, block = tokens[:-block_size], list(tokens[-block_size:])
    return PrefixCache.compute_hash(block, chain_hash(before, block_size) if before else None)


class Device:
    """Runs batches on a cache that holds, per slot, the group of layers and the number of the
    prefix whose keys and values were stored there."""

    def __init__(self, block_size: int, windows: tuple[int | None, ...] = (None,)) -> None:
        self.block_size = block_size
        self.windows = windows
        self.prefixes = Prefixes()
        self.cache: dict[int, tuple[int, int] | None] = {}
        self.drawn: dict[Sequence, int] = {}  # by the last step, in the order of its rows
        self.block_tables: dict[tuple[int, int], list[int]] = {}  # by group and row

    def tokens(self, seq: Sequence) -> list[int]:
        """A sequence's tokens, the one that is still on its way included."""
        expected = [seq] * (len(seq) - len(seq.token_ids))
        return seq.token_ids + [self.drawn[seq] for seq in expected]

    def run(self, batch: Batch) -> None:
        """Copies blocks and stores all new tokens, then reads each sequence's within the windows,
        as attention layers do; all that is read must be that of the sequence's own tokens."""
        self.copy(batch.block_copies)
        prepare = prepare_prefill if batch.is_prefill else prepare_decode
        inputs = prepare(batch, self.block_size)
        truth = [self.prefixes.of(self.tokens(item.seq)[: item.end]) for item in batch.items]
        expected = [
            (item.seq, position, numbers[position])
            for item, numbers in zip(batch.items, truth, strict=True)
            for position in range(item.start, item.end)
        ]
        drawn = list(self.drawn.values())
        input_ids = [token if token >= 0 else drawn[-1 - token] for token in inputs.input_ids]
        for token, position, (seq, true_position, _) in zip(
            input_ids, inputs.positions.tolist(), expected, strict=True
        ):
            assert (token, position) == (self.tokens(seq)[true_position], true_position)
        assert inputs.context.slot_mapping is not None
        stored: list[int] = []
        for group, row in enumerate(inputs.context.slot_mapping.tolist()):
            slots = row[: len(input_ids)]
            stored += [slot for slot in slots if slot != -1]
            for slot, (seq, position, number) in zip(slots, expected, strict=True):
                assert (slot == -1) == (position < seq.num_cached_tokens)
                if slot != -1:
                    self.cache[slot] = group, number
        assert len(set(stored)) == len(stored), "a slot is stored twice in one step"
        new_blocks = inputs.tables.new_blocks
        for group, entries in enumerate(inputs.tables.entries.tolist()):
            for (row, length, first_new, num_new), item, numbers in zip(
                entries, batch.items, truth, strict=True
            ):
                kept = self.block_tables.get((group, row), [])[: length - num_new]
                table = kept + new_blocks[first_new:][:num_new].tolist()
                self.block_tables[group, row] = table
                assert table == item.seq.block_tables[group][: item.seq.table_len]
                self.check_read(group, table, item.start, numbers)

    def copy(self, block_copies: Iterable[tuple[int, int]]) -> None:
        size = self.block_size
        for source, target in block_copies:
            for i in range(size):
                self.cache[target * size + i] = self.cache.get(source * size + i)

    def read(self, block_table: list[int], start: int, end: int) -> list[tuple[int, int] | None]:
        size = self.block_size
        return [self.cache.get(block_table[p // size] * size + p % size) for p in range(start, end)]

    def check_read(self, group: int, table: list[int], query: int, numbers: list[int]) -> None:
        """What a query attends to, and the tokens after it, must have these numbers."""
        window = self.windows[group]
        start = 0 if window is None else max(0, query - window + 1)
        own = [(group, number) for number in numbers[start:]]
        assert self.read(table, start, len(numbers)) == own

    def check(self, scheduler: Scheduler) -> None:
        """Between two steps, all that counts as cached or can be shared has been computed, but
        for the copies that the next step begins with."""
        before = dict(self.cache)
        self.copy(scheduler.block_copies)
        for seq in scheduler.running:
            numbers = self.prefixes.of(self.tokens(seq)[: seq.num_cached_tokens])
            for group, table in enumerate(seq.block_tables):
                self.check_read(group, table, min(seq.num_cached_tokens, len(seq) - 1), numbers)
        for key, block_id in prefix_cache(scheduler.block_manager).hash_to_block_id.items():
            values = self.read([block_id], 0, self.block_size)
            assert None not in values, "a block can be shared that was never stored"
            tokens = self.prefixes.tokens[values[-1][1]]
            group = key >> 64
            own = [(group, number) for number in self.prefixes.of(tokens)[-self.block_size :]]
            assert values == own
            assert key - (group << 64) == chain_hash(tokens, self.block_size)
        self.cache = before


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    salt: int = 0  # requests of one salt and prompt have one completion
    arrives: int = 0  # step
    aborts: int | None = None  # step
    stop_text_at: int | None = None  # completion tokens that make up a stop string

    def siblings(self) -> list["Request"]:
        """A request for each of the ``n`` completions."""
        return [replace(self, salt=self.salt + 10 * i) for i in range(self.params.n)]

    def result(self, max_len: int) -> Result:
        """What it must return, whatever else runs: completion, finish and stop reason."""
        params, tokens = self.params, list(self.prompt)
        while True:
            token = next_token(tokens, self.salt)
            if token == -1:
                return tokens[len(self.prompt) :], "error", None
            tokens.append(token)
            completion = tokens[len(self.prompt) :]
            if len(completion) == self.stop_text_at:
                return completion, "stop", STOP_TEXT
            if len(completion) > params.min_tokens:
                if token in EOS and not params.ignore_eos:
                    return completion, "stop", None if token == min(EOS) else token
                if token in (params.stop_token_ids or ()):
                    return completion, "stop", token
            if len(completion) == params.max_tokens or len(tokens) == max_len:
                return completion, "length", None


class Engine:
    """The loop around the scheduler, which checks whatever can be checked at each turn.

    ``unfinished`` is the model of the two queues: completions in their order of arrival, those
    of one request together. With ``overlap``, a step's tokens arrive only after the next step
    has been launched.
    """

    def __init__(self, scheduler: Scheduler, overlap: bool = False) -> None:
        self.scheduler = scheduler
        self.overlap = overlap
        self.under_way: tuple[Batch, list[int]] | None = None
        self.most_now: dict[bool, int] = {}  # tokens of the next step after one did not fit
        manager = scheduler.block_manager
        self.device = Device(manager.block_size, manager.windows)
        self.unfinished: dict[Sequence, Request] = {}
        self.results: list[tuple[Request, Result]] = []
        self.finishes: dict[Sequence, Finish] = {}
        self.batches: list[Batch] = []
        self.check()

    def add(self, request: Request) -> Sequence:
        requests = request.siblings()
        seqs = [Sequence(r.prompt, r.params, self.device.block_size) for r in requests]
        seqs[0].siblings = seqs[1:]
        self.scheduler.add(seqs[0])
        for seq, sibling in zip(seqs, requests, strict=True):
            seq.request_id = seqs[0].request_id
            self.unfinished[seq] = sibling
        self.check()
        return seqs[0]

    def completions(self, seq: Sequence) -> list[Sequence]:
        """The unfinished ones of a sequence's request, its own included."""
        return [other for other in self.unfinished if other.request_id == seq.request_id]

    def abort(self, seq: Sequence) -> None:
        for sibling in self.completions(seq):
            self.scheduler.abort(sibling)
            del self.unfinished[sibling]
            assert sibling.is_finished
            assert not sibling.block_tables and not sibling.siblings
        self.check()

    def step(self, does_not_fit: str | None = None) -> Batch:
        """``does_not_fit``: the part that there is not enough memory for, "run" or "sample"."""
        batch = self.schedule()
        runs = bool(batch.items) and not (does_not_fit == "run" and self.roll_back(batch))
        drawn: dict[Sequence, int] = {}
        if runs:
            self.device.run(batch)
            for seq in batch.sampled:
                drawn[seq] = next_token(self.device.tokens(seq), self.unfinished[seq].salt)
        if self.under_way is not None:
            self.postprocess(*self.under_way)
        if runs and does_not_fit == "sample" and self.roll_back(batch):
            runs, drawn = False, {}
        if runs:
            self.scheduler.launched(batch)
        self.under_way = (batch, list(drawn.values())) if runs else None
        self.device.drawn = drawn
        if self.under_way is not None and not self.overlap:
            self.postprocess(*self.under_way)
            self.under_way = None
        self.check()
        return batch

    def roll_back(self, batch: Batch) -> bool:
        """Rolls back the step just scheduled, unless that would be the end of all."""
        num_tokens, running = batch.num_tokens, list(self.scheduler.running)
        if num_tokens == 1:
            return False
        assert preempt_batch(batch, self.scheduler)
        still = running[: -len(batch)] if batch.is_prefill else running[: num_tokens // 2]
        assert self.scheduler.running == still
        self.most_now[batch.is_prefill] = num_tokens // 2
        return True

    def postprocess(self, batch: Batch, tokens: list[int]) -> None:
        live = [seq for seq in batch.sampled if not seq.is_finished]
        finished = self.scheduler.postprocess(batch, tokens)
        for seq, token in zip(batch.sampled, tokens, strict=True):
            if seq not in live:
                assert seq not in self.unfinished
                continue
            assert token == -1 or seq.last_token == seq.token_ids[-1] == token
            assert (seq in finished) == seq.is_finished
            if seq in finished:
                finish = self.finishes[seq] = finished[seq]
                assert finish.ends_with_stop_token == (finish.reason == "stop")
                assert (finish.error is not None) == (finish.reason == "error") == (token == -1)
            stop_text_at = self.unfinished[seq].stop_text_at
            if token != -1 and seq.num_completion_tokens == stop_text_at:
                if seq not in finished:
                    self.scheduler.abort(seq)
                self.finishes[seq] = Finish("stop", STOP_TEXT)
        for seq in [seq for seq in live if seq.is_finished]:
            request = self.unfinished.pop(seq)
            assert not seq.block_tables
            assert seq.token_ids[: seq.num_prompt_tokens] == request.prompt
            finish = self.finishes[seq]
            result = seq.completion_token_ids, finish.reason, finish.stop_reason
            self.results.append((request, result))

    def schedule(self) -> Batch:
        scheduler = self.scheduler
        before, preemptions = list(scheduler.running), scheduler.num_preemptions
        num_free = len(scheduler.block_manager.free_block_ids)
        num_opening = sum(seq.table_len < seq.num_blocks for seq in before)
        batch = scheduler.schedule()
        assert batch.num_tokens <= scheduler.max_num_batched_tokens
        assert batch.num_tokens <= self.most_now.get(batch.is_prefill, batch.num_tokens)
        self.most_now = {}
        if not batch.items:
            assert self.overlap and scheduler.is_finished(), "there was something to do"
        for item in batch.items:
            assert item.start == min(item.seq.num_cached_tokens, len(item.seq) - 1)
            assert item.start < item.end <= len(item.seq)
            assert item.samples == (item.end == len(item.seq))
        seqs = [item.seq for item in batch.items]
        assert len(set(seqs)) == len(seqs)
        rows = {seq.table_row for seq in scheduler.running}
        assert len(rows) == len(scheduler.running) and rows <= {*range(scheduler.max_num_seqs)}
        if batch.is_prefill:
            assert scheduler.num_preemptions == preemptions
            assert seqs == scheduler.running[-len(seqs) :]
            assert scheduler.running[: len(before)] == before
        else:
            assert seqs == scheduler.running == before[: len(seqs)]
            assert scheduler.num_preemptions - preemptions == len(before) - len(seqs)
            assert (num_opening * len(self.device.windows) > num_free) == (len(seqs) < len(before))
        self.check_order()
        self.batches.append(batch)
        return batch

    def run(self, requests: Iterable[Request] = ()) -> None:
        """Adds requests and steps until all are finished."""
        for request in requests:
            self.add(request)
        for _ in range(self.most_steps()):
            if not self.unfinished:
                break
            self.step()
        assert self.scheduler.is_finished() and not self.unfinished

    def most_steps(self) -> int:
        """Each sequence is admitted at most once per token that it or an older one yields, and
        each time it is prefilled in so many chunks."""
        scheduler = self.scheduler
        num_tokens = sum(len(r.result(scheduler.max_len)[0]) for r in self.unfinished.values())
        chunks = scheduler.max_len // scheduler.max_tokens_now + 1
        return num_tokens * (1 + len(self.unfinished) * chunks) + len(self.unfinished)

    def check(self) -> None:
        check_scheduler(self.scheduler)
        self.device.check(self.scheduler)
        self.check_order()
        if not self.overlap:
            assert self.scheduler.is_finished() == (not self.unfinished)

    def check_order(self) -> None:
        """None lost, none twice; the oldest run, and preemption takes the youngest first.
        Completions whose prompt is not yet computed are with the first of them."""
        scheduler = self.scheduler
        queued = [*scheduler.running, *scheduler.waiting]
        known = [seq for seq in self.unfinished if seq in queued or not self.at_limit(seq)]
        assert [s for seq in queued for s in (seq, *seq.siblings)] == known
        assert len(scheduler.running) <= scheduler.max_num_seqs

    def at_limit(self, seq: Sequence) -> bool:
        """Whether its last token is on its way."""
        num_generated = len(seq) - seq.num_prompt_tokens
        at_end = num_generated == seq.sampling_params.max_tokens
        return self.overlap and (at_end or len(seq) == self.scheduler.max_len)

    def check_results(self) -> None:
        max_len = self.scheduler.max_len
        for request, result in self.results:
            assert result == request.result(max_len)


def prompts(max_size: int) -> st.SearchStrategy[list[int]]:
    """Of few tokens, half of them with a long common prefix."""
    common = [0, 1, 2, 5] * (max_size // 4)
    return st.builds(
        lambda cut, tail: common[:cut] + tail,
        st.integers(0, len(common)),
        st.lists(st.integers(0, 1), min_size=1, max_size=4),
    )


def make_params(max_tokens: int | None, min_tokens: int, **kwargs: Any) -> SamplingParams:
    min_tokens = min(min_tokens, max_tokens or min_tokens)
    return SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, **kwargs)


REQUESTS = st.builds(
    Request,
    prompts(16),
    st.builds(
        make_params,
        n=st.sampled_from([1, 1, 1, 1, 2, 3, 5, 12]),
        max_tokens=st.none() | st.integers(1, 16),
        min_tokens=st.sampled_from([0, 0, 0, 5]),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([None, None, [], [4, 7]]),
    ),
    salt=st.integers(0, 1),
    arrives=st.integers(0, 9),
    aborts=st.none() | st.integers(0, 48),
    stop_text_at=st.none() | st.none() | st.integers(1, 9),
)


def make_windowed(num_blocks: int, windows: tuple[int | None, ...], **kwargs: Any) -> Scheduler:
    """``num_blocks`` for each group."""
    return make_scheduler(num_blocks=num_blocks * len(windows), windows=windows, **kwargs)


SCHEDULERS = st.builds(
    make_windowed,
    num_blocks=st.integers(3, 14),
    windows=st.sampled_from([(None,), (None,), (None, 4), (1,), (3, None, 3), (9, None, 2, 2)]),
    kvcache_block_size=st.integers(1, 5),
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.integers(1, 24),
    max_model_len=st.integers(2, 100),
    enable_prefix_caching=st.sampled_from([True, True, True, False]),
)


@pytest.mark.parametrize("num_examples", [150, pytest.param(800, marks=pytest.mark.exhaustive)])
def test_random_schedules(num_examples: int):
    settings(max_examples=num_examples, deadline=None, derandomize=True)(
        given(
            SCHEDULERS,
            st.lists(REQUESTS, min_size=2, max_size=12),
            st.none() | st.integers(0, 40),
            st.dictionaries(st.integers(0, 24), st.sampled_from(["run", "sample"]), max_size=5),
            st.booleans(),
        )(check_schedule)
    )()


def check_schedule(
    scheduler: Scheduler,
    requests: list[Request],
    reset_at: int | None,
    does_not_fit: dict[int, str],
    overlap: bool,
):
    """Requests come and are aborted between steps, some of which do not fit into memory, and at
    one of which an exception may drop them all: each of the others gets the result that it would
    get alone."""
    engine = Engine(scheduler, overlap)
    num_dropped = 0
    for now in range(25):
        for request in (r for r in requests if r.arrives == now):
            try:
                engine.add(request)
                assert len(request.prompt) < scheduler.max_len
            except ValueError:
                assert len(request.prompt) >= scheduler.max_len
                num_dropped += request.params.n
        for seq, request in list(engine.unfinished.items()):
            if request.aborts == now and seq in engine.unfinished:
                num_dropped += len(engine.completions(seq))
                engine.abort(seq)
        if engine.unfinished:
            if now == reset_at:
                engine.schedule()  # and does not run it
                num_dropped += len(engine.unfinished)
                engine.unfinished.clear()
                engine.under_way = None
                scheduler.reset()
                engine.check()
            else:
                engine.step(does_not_fit.get(now))
    engine.run()
    engine.check_results()
    assert len(engine.results) == sum(r.params.n for r in requests) - num_dropped
    assert len(scheduler.block_manager.free_block_ids) == scheduler.block_manager.num_blocks


def greedy(max_tokens: int | None = 4) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def drain(scheduler: Scheduler) -> Iterator[Batch]:
    """Steps until all is finished, every token a 5."""
    for _ in range(10_000):
        if scheduler.is_finished():
            return
        batch = scheduler.schedule()
        yield batch
        scheduler.launched(batch)
        scheduler.postprocess(batch, [5] * len(batch.sampled))
    raise AssertionError("no end in sight")


def test_prompts_are_admitted_in_order_of_arrival():
    engine = Engine(make_scheduler(max_num_seqs=2, max_num_batched_tokens=10))
    seqs = [engine.add(Request([i] * 6, greedy())) for i in range(4)]
    for seq in seqs[:2]:
        batch = engine.step()
        assert [(i.seq, i.start, i.end) for i in batch.items] == [(seq, 0, 6)]
    engine.run()
    engine.check_results()


def test_a_policy_decides_who_is_admitted_next():
    """Preempted sequences stay ahead of those that have not run."""

    class ShortestFirst(FirstComeFirstServed):
        def add(self, seq: Sequence) -> None:
            self.insert(bisect(self, len(seq), key=len), seq)

    scheduler = make_scheduler(num_blocks=9, max_num_seqs=3, policy=ShortestFirst())
    seqs = [Sequence([i] * (1 + i * 7 % 12), greedy(max_tokens=12), 4) for i in range(12)]
    for seq in seqs:
        scheduler.add(seq)
    admitted: dict[Sequence, None] = {}
    for batch in drain(scheduler):
        admitted |= dict.fromkeys(item.seq for item in batch.items)
    assert list(admitted) == sorted(seqs, key=lambda seq: seq.num_prompt_tokens)
    assert all(seq.num_completion_tokens == 12 for seq in seqs)
    assert scheduler.num_preemptions > 0


def test_a_prompt_that_does_not_fit_holds_up_later_ones():
    """Guards a long prompt that starves because short ones overtake it."""
    engine = Engine(make_scheduler(num_blocks=8))
    engine.add(Request([1] * 16, greedy()))
    engine.step()
    long, short = engine.add(Request([2] * 20, greedy())), engine.add(Request([5], greedy()))
    assert not engine.step().is_prefill
    assert [long.status, short.status] == [SequenceStatus.WAITING] * 2
    engine.run()
    engine.check_results()


def test_requests_join_while_others_decode():
    engine = Engine(make_scheduler())
    engine.add(Request([1, 2, 5], greedy(max_tokens=20)))
    engine.step()
    assert not engine.step().is_prefill
    late = engine.add(Request([5, 2], greedy(max_tokens=20)))
    assert [item.seq for item in engine.step().items] == [late]
    assert len(engine.step()) == 2


def test_long_prompt_is_prefilled_in_chunks_and_yields_one_token():
    engine = Engine(make_scheduler(max_num_batched_tokens=8))
    seq = engine.add(Request([1, 2] * 10, greedy(max_tokens=1)))
    engine.run()
    chunks = [batch.items[0] for batch in engine.batches]
    assert [(c.start, c.end, c.samples) for c in chunks] == [
        (0, 8, False),
        (8, 16, False),
        (16, 20, True),
    ]
    assert len(seq) == 21


def test_budget_bounds_residents_so_that_every_decode_fits():
    engine = Engine(make_scheduler(max_num_seqs=8, max_num_batched_tokens=3))
    engine.run(Request([i], greedy()) for i in range(10))
    assert max(len(batch) for batch in engine.batches) == 3
    engine.check_results()


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "num_tokens", "cause"),
    [
        (64, 16, 16, "max_model_len"),
        (64, 16, 400, "max_model_len"),
        (3, 64, 12, "num_kvcache_blocks"),
        (3, 64, 500, "num_kvcache_blocks"),
        (64, 16, 0, "empty"),
    ],
)
def test_prompt_that_can_never_run_is_refused_when_added(
    num_blocks: int, max_model_len: int, num_tokens: int, cause: str
):
    """Guards a prompt that fails an assert, or loops for ever, in the midst of a batch."""
    scheduler = make_scheduler(num_blocks=num_blocks, max_model_len=max_model_len)
    with pytest.raises(ValueError, match=cause):
        scheduler.check_prompt_len(num_tokens)
    if num_tokens:
        with pytest.raises(ValueError, match=str(num_tokens)):
            scheduler.add(Sequence([1] * num_tokens, block_size=4))
    assert scheduler.is_finished()
    engine = Engine(scheduler)
    engine.run([Request([1] * (scheduler.max_len - 1), greedy())])
    assert [len(completion) for _, (completion, *_) in engine.results] == [1]


def test_only_prompts_longer_than_the_token_budget_are_cut():
    """Guards attention through block tables where the step's own keys would do."""
    engine = Engine(make_scheduler(max_num_batched_tokens=16))
    for i, length in enumerate((6, 8, 4, 30, 16, 1)):
        engine.add(Request([i] * length, greedy()))
    chunks = []
    while (batch := engine.step()).is_prefill:
        chunks.append([(item.start, item.end) for item in batch.items])
    assert chunks == [
        [(0, 6), (0, 8)],
        [(0, 4), (0, 12)],
        [(12, 28)],
        [(28, 30)],
        [(0, 16)],
        [(0, 1)],
    ]
    engine.run()
    engine.check_results()


def test_what_the_cache_holds_of_a_prompt_does_not_count_against_the_budget():
    """Guards a step for each of many prompts with a long prefix in common."""
    engine = Engine(make_scheduler(num_blocks=64, max_num_batched_tokens=16))
    for i in range(5):
        engine.add(Request([3] * 12 + [i], greedy()))
    chunks = []
    while (batch := engine.step()).is_prefill:
        chunks.append([(item.start, item.end) for item in batch.items])
    assert chunks == [[(0, 13), (12, 13), (12, 13), (12, 13)], [(12, 13)]]
    engine.run()
    engine.check_results()


def test_prompt_longer_than_the_token_budget_runs():
    engine = Engine(make_scheduler(max_num_batched_tokens=4))
    engine.run([Request([1] * 100, greedy()), Request([2], greedy())])
    engine.check_results()


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "max_len"), [(64, 20, 20), (3, 64, 12), (4, 16, 16)]
)
@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_length_limit_ends_a_sequence(
    num_blocks: int, max_model_len: int, max_len: int, max_tokens: int | None
):
    """Guards generation that runs past the model's length or the cache."""
    engine = Engine(make_scheduler(num_blocks=num_blocks, max_model_len=max_model_len))
    seq = engine.add(Request([1, 2, 5], greedy(max_tokens)))
    engine.run()
    assert (len(seq), engine.finishes[seq]) == (max_len, Finish("length"))


def test_max_tokens_ends_a_sequence():
    engine = Engine(make_scheduler())
    seq = engine.add(Request([1, 2, 5], greedy(max_tokens=7)))
    engine.run()
    assert (seq.num_completion_tokens, engine.finishes[seq]) == (7, Finish("length"))


@pytest.mark.parametrize("eos", EOS)
def test_each_eos_token_ends_a_sequence(eos: int):
    """Guards a list of EOS ids of which only the first counts."""
    scheduler = make_scheduler()
    stops = Sequence([1, 2], block_size=4)
    goes_on = Sequence([1, 2], SamplingParams(ignore_eos=True), block_size=4)
    scheduler.add(stops)
    scheduler.add(goes_on)
    assert scheduler.postprocess(launch(scheduler), [5, 5]) == {}
    finished = scheduler.postprocess(launch(scheduler), [eos, eos])
    assert [*finished] == [stops] and finished[stops].reason == "stop"
    assert stops.completion_token_ids == [5, eos]
    assert scheduler.running == [goes_on]


STOPPING: dict[str, tuple[dict[str, Any], list[int], Result]] = {
    "eos": ({}, [5, 3], ([5, 3], "stop", None)),
    "other-eos": ({}, [4], ([4], "stop", 4)),
    "eos-ignored": ({"ignore_eos": True}, [3, 4, 5], ([3, 4, 5], "length", None)),
    "eos-as-the-last-token": ({}, [5, 5, 3], ([5, 5, 3], "stop", None)),
    "stop-token": ({"stop_token_ids": [7, 8]}, [5, 8], ([5, 8], "stop", 8)),
    "eos-is-a-stop-token-too": ({"stop_token_ids": [3]}, [3], ([3], "stop", None)),
    "ignored-eos-is-a-stop-token": (
        {"ignore_eos": True, "stop_token_ids": [3]},
        [4, 3],
        ([4, 3], "stop", 3),
    ),
    "min-tokens": ({"min_tokens": 1, "stop_token_ids": [8]}, [8, 8], ([8, 8], "stop", 8)),
    "min-tokens-is-max-tokens": ({"min_tokens": 3}, [3, 3, 3], ([3, 3, 3], "length", None)),
    "length": ({}, [5, 5, 5], ([5, 5, 5], "length", None)),
    "no-token-allowed": ({}, [5, -1], ([5], "error", None)),
    "none-from-the-start": ({"min_tokens": 2}, [-1], ([], "error", None)),
}


@pytest.mark.parametrize("case", STOPPING)
def test_each_end_has_its_reason(case: str):
    values, tokens, expected = STOPPING[case]
    scheduler = make_scheduler()
    seq = Sequence([1, 2], SamplingParams(max_tokens=3, **values), block_size=4)
    other = Sequence([1, 2], greedy(), block_size=4)
    scheduler.add(seq)
    scheduler.add(other)
    for i, token in enumerate(tokens):
        assert not seq.is_finished
        finished = scheduler.postprocess(launch(scheduler), [token, 5])
        assert [*finished] == ([seq] if i == len(tokens) - 1 else [])
    finish = finished[seq]
    assert (seq.completion_token_ids, finish.reason, finish.stop_reason) == expected
    assert finish.ends_with_stop_token == (finish.reason == "stop")
    assert scheduler.running == [other]
    check_scheduler(scheduler)


def test_finished_sequences_free_their_blocks_at_once():
    engine = Engine(make_scheduler(num_blocks=2))
    engine.run([Request([1] * 6, greedy(max_tokens=1)), Request([2] * 6, greedy(max_tokens=1))])
    assert len(engine.batches) == 2
    assert len(engine.scheduler.block_manager.free_block_ids) == 2


def test_youngest_is_preempted_and_resumes_where_it_was():
    engine = Engine(make_scheduler(num_blocks=6))
    seqs = [engine.add(Request([i] * 7, greedy(max_tokens=12))) for i in range(2)]
    while not engine.scheduler.num_preemptions:
        engine.step()
    assert engine.scheduler.running == [seqs[0]]
    assert [s.status for s in seqs] == [SequenceStatus.RUNNING, SequenceStatus.WAITING]
    assert seqs[1].num_completion_tokens > 0
    engine.run()
    engine.check_results()
    assert [request.prompt[0] for request, _ in engine.results] == [0, 1]


@pytest.mark.parametrize("caching", [True, False])
def test_tight_cache_preempts_and_loses_nothing(caching: bool):
    engine = Engine(make_scheduler(num_blocks=12, enable_prefix_caching=caching))
    engine.run(Request([i] * (i + 1), greedy(max_tokens=30)) for i in range(8))
    assert engine.scheduler.num_preemptions > 0
    engine.check_results()
    assert len(engine.results) == 8


def test_preempted_sequence_reuses_what_is_left_of_its_prefix():
    engine = Engine(make_scheduler())
    seq = engine.add(Request(list(range(10, 30)), greedy(max_tokens=20)))
    for _ in range(7):
        engine.step()
    engine.scheduler.preempt(seq)
    engine.check()
    (item,) = engine.step().items
    assert (item.seq, item.start, item.end) == (seq, 24, 27)
    engine.run()
    engine.check_results()


def test_identical_prompts_in_one_step_are_computed_once():
    """Guards equal prompts of one step that are each computed in full."""
    engine = Engine(make_scheduler(max_num_batched_tokens=100))
    for _ in range(5):
        engine.add(Request(list(range(10, 28)), greedy()))
    batch = engine.step()
    assert [item.num_tokens for item in batch.items] == [18, 2, 2, 2, 2]
    engine.run()
    engine.check_results()


def test_fully_cached_prompt_computes_only_its_last_token():
    engine = Engine(make_scheduler(max_num_batched_tokens=100))
    for _ in range(3):
        engine.add(Request(list(range(10, 26)), greedy()))
    batch = engine.step()
    assert [(item.num_tokens, item.samples) for item in batch.items] == [
        (16, True),
        (1, True),
        (1, True),
    ]
    engine.run([Request(list(range(10, 26)), greedy())])
    engine.check_results()


def test_next_turn_of_a_conversation_reuses_the_completion():
    """Guards blocks that decoding has filled and nobody can share."""
    engine = Engine(make_scheduler())
    seq = engine.add(Request([1, 2, 5], greedy(max_tokens=10)))
    engine.run()
    engine.add(Request([*seq.token_ids, 1, 1], greedy()))
    (item,) = engine.step().items
    assert (item.start, item.end) == (12, 15)
    engine.run()
    engine.check_results()


def test_prompt_shares_only_the_chunk_that_is_computed():
    """Guards blocks of a chunked prompt that are shared before they are computed."""
    engine = Engine(make_scheduler(max_num_batched_tokens=10))
    prompt = list(range(10, 30))
    first = engine.add(Request(prompt, greedy()))
    engine.step()
    engine.abort(first)
    second = engine.add(Request(prompt, greedy()))
    assert engine.step().items[0].start == 8
    assert second.block_tables != []
    engine.run()
    engine.check_results()


def test_no_preemption_storm_on_many_short_requests():
    """Guards max_num_seqs that bounds a step but not residents: 2,000 short requests then
    filled the cache, preempted each other, and were prefilled 1.9 times over."""
    scheduler = make_scheduler(
        num_blocks=64 * 16, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=256
    )
    rng = random.Random(0)
    waiting = [
        Sequence([i, *rng.choices(range(12), k=rng.randrange(8, 32))], greedy(max_tokens=16), 4)
        for i in range(2000)
    ]
    for seq in waiting:
        scheduler.add(seq)
    num_prefilled = 0
    for batch in drain(scheduler):
        assert len(scheduler.running) <= 64
        for item in batch.items:
            num_prefilled += max(min(item.end, item.seq.num_prompt_tokens) - item.start, 0)
    assert all(seq.num_completion_tokens == 16 for seq in waiting)
    assert scheduler.num_preemptions == 0
    assert num_prefilled == sum(seq.num_prompt_tokens for seq in waiting)


def test_a_decode_makes_no_object_for_each_sequence():
    """Guards short requests that wait for the host: the garbage collector visits such objects."""
    scheduler = make_scheduler(num_blocks=2000, max_num_seqs=512, max_num_batched_tokens=4096)
    for i in range(512):
        scheduler.add(Sequence([i, 1], greedy(max_tokens=9), 4))
    # The decode fills no block.
    prefill = launch(scheduler)
    scheduler.postprocess(prefill, [5] * len(prefill))
    gc.collect()
    before = len(gc.get_objects())
    batch = launch(scheduler)
    made = len(gc.get_objects()) - before
    assert len(batch) == 512 and not batch.is_prefill and made < 30
    assert not hasattr(batch.seqs[0], "__dict__")


def test_prompts_join_several_at_a_time_while_more_wait_than_find_room():
    """Guards a step for each prompt, between any two decodes."""
    scheduler = make_scheduler(num_blocks=2000, max_num_seqs=64, max_num_batched_tokens=4096)
    rng = random.Random(0)
    for i in range(1000):
        scheduler.add(Sequence([i, 1, 2], greedy(max_tokens=rng.randrange(1, 40)), 4))
    admitted, decoded = [], []
    for batch in drain(scheduler):
        if batch.is_prefill:
            admitted.append(len(batch))
        elif scheduler.waiting:
            decoded.append(len(batch))
    assert sum(admitted) == 1000 and admitted[0] == 64
    assert min(admitted[1:-1]) >= 4
    assert sum(decoded) / len(decoded) > 60


def test_prompts_join_several_at_a_time_where_the_cache_is_smaller_than_the_slots():
    """Guards a prefill of one prompt whenever a sequence finishes: only free slots counted, of
    which there were always enough. These prompts were admitted in 170 steps."""
    scheduler = make_scheduler(num_blocks=1500, max_num_seqs=512, max_num_batched_tokens=4096)
    rng = random.Random(0)
    for i in range(1000):
        scheduler.add(Sequence([i] * 40, greedy(max_tokens=rng.randrange(1, 40)), 4))
    admitted, decoded = [], []
    for batch in drain(scheduler):
        if batch.is_prefill:
            admitted.append(len(batch))
        elif scheduler.waiting:
            decoded.append(len(batch))
    assert sum(admitted) == 1000 and len(admitted) < 120
    assert sum(decoded) / len(decoded) > 100


def test_a_prompt_joins_at_once_where_there_is_room_for_all_that_wait():
    scheduler = make_scheduler(num_blocks=2000, max_num_seqs=64)
    for i in range(63):
        scheduler.add(Sequence([i, 1, 2], greedy(max_tokens=20), 4))
    while not scheduler.running or scheduler.waiting:
        batch = launch(scheduler)
        scheduler.postprocess(batch, [5] * len(batch.sampled))
    scheduler.add(Sequence([99], greedy(), 4))
    assert [item.seq.num_prompt_tokens for item in scheduler.schedule().items] == [1]


@pytest.mark.parametrize(("num_tokens", "admitted"), [(4, True), (5, False)])
def test_admission_leaves_each_resident_a_spare_block(num_tokens: int, admitted: bool):
    """Guards prompts that are prefilled, then preempted at the next block boundary of those
    that run already, over and over."""
    engine = Engine(make_scheduler(num_blocks=5))
    for i in range(2):
        engine.add(Request([i] * 2, greedy()))
    engine.step()
    engine.add(Request([2] * num_tokens, greedy()))
    assert engine.step().is_prefill == admitted
    engine.run()
    engine.check_results()


def test_windows_hold_few_blocks_of_a_long_prompt():
    """20,000 tokens in chunks of up to 2,048, then a decode; windows of 128 tokens in two of three
    groups, which hold 8 full blocks and those of a chunk, or of the token being decoded."""
    scheduler = make_scheduler(
        num_blocks=1272 + 2 * (8 + 1 + 128),
        max_model_len=2**15,
        kvcache_block_size=16,
        max_num_batched_tokens=2048,
        windows=(None, 128, 128),
    )
    manager, size = scheduler.block_manager, 16
    assert scheduler.max_len == 1272 * size
    seq = Sequence([1, 2, 5, 7] * 5000, greedy(max_tokens=300), size)
    scheduler.add(seq)
    for batch in drain(scheduler):
        (item,) = batch.items
        used, past = len(manager.used_block_ids), item.start // size
        num_blocks = -(-len(seq) // size)
        if batch.is_prefill:
            ahead = min(num_blocks, max(past, 8) + 1 + 128)
            assert used == 1250 + 2 * (ahead - max(0, past - 8))
        else:
            assert used == num_blocks + 2 * (num_blocks - past + 8) <= num_blocks + 18
    assert seq.is_finished and len(seq) == 20_300
    assert not manager.used_block_ids


def count_hashes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], int | None]]:
    calls = []
    compute_hash = PrefixCache.compute_hash

    def counting(token_ids: list[int], prefix: int | None = None) -> int:
        calls.append((token_ids, prefix))
        return compute_hash(token_ids, prefix)

    monkeypatch.setattr(PrefixCache, "compute_hash", staticmethod(counting))
    return calls


def test_waiting_prompt_is_not_hashed_again_on_blocked_steps(monkeypatch: pytest.MonkeyPatch):
    """Guards a blocked prompt whose whole prefix is hashed anew at every step."""
    calls = count_hashes(monkeypatch)
    scheduler = make_scheduler(num_blocks=9)
    running = Sequence(range(10, 19), greedy(max_tokens=12), block_size=4)
    blocked = Sequence([*range(10, 18), *range(40, 61)], greedy(), block_size=4)
    scheduler.add(running)
    scheduler.add(blocked)
    steps = drain(scheduler)
    for _ in islice(steps, 9):
        assert list(scheduler.waiting) == [blocked]
    # The running prompt's full blocks and the two that its decoding has filled; the blocked
    # one's two hits and its first miss.
    assert len(calls) == (2 + 2) + (2 + 1)
    list(steps)
    assert len(calls) <= running.num_blocks + blocked.num_blocks


def test_each_block_is_hashed_at_most_once_however_often_it_is_preempted(
    monkeypatch: pytest.MonkeyPatch,
):
    calls = count_hashes(monkeypatch)
    scheduler = make_scheduler(num_blocks=12)
    seqs = [Sequence([i] * 5, greedy(max_tokens=30), block_size=4) for i in range(8)]
    for seq in seqs:
        scheduler.add(seq)
    list(drain(scheduler))
    assert scheduler.num_preemptions > 0
    assert len(calls) <= sum(seq.num_blocks for seq in seqs)


def test_scheduling_a_decode_looks_at_no_token(monkeypatch: pytest.MonkeyPatch):
    """Guards what lets a step be launched before the tokens of the last one are known."""
    engine = Engine(make_scheduler())
    seqs = [engine.add(Request([i] * 3, greedy(max_tokens=12))) for i in range(3)]
    engine.step()
    for _ in range(10):
        tokens = [seq.token_ids for seq in seqs]
        for seq in seqs:
            seq.token_ids, seq.last_token = [], -1
        with monkeypatch.context() as patch:
            patch.delattr(PrefixCache, "compute_hash")
            batch = engine.schedule()
        for seq, token_ids in zip(seqs, tokens, strict=True):
            seq.token_ids, seq.last_token = token_ids, token_ids[-1]
        engine.device.run(batch)
        engine.scheduler.launched(batch)
        engine.scheduler.postprocess(batch, [5] * 3)
        engine.check()


def in_state(state: str) -> tuple[Engine, Sequence]:
    """An engine whose second sequence is in the given state, with others around it."""
    engine = Engine(make_scheduler(num_blocks=9, max_num_batched_tokens=10, max_model_len=32))
    engine.add(Request([1] * 6, greedy(max_tokens=20)))
    seq = engine.add(Request([2] * 11, greedy(max_tokens=20)))
    if state != "waiting":
        engine.step()
    if state in ("decoding", "preempted"):
        while seq.num_completion_tokens < 2:
            engine.step()
    if state == "preempted":
        while seq.status is SequenceStatus.RUNNING:
            engine.step()
    engine.add(Request([5] * 3, greedy(max_tokens=20)))
    return engine, seq


STATES = ("waiting", "half prefilled", "decoding", "preempted")


def test_states_are_what_they_are_called():
    seqs = dict(zip(STATES, (in_state(state)[1] for state in STATES), strict=True))
    assert {name: seq.status.name for name, seq in seqs.items()} == {
        "waiting": "WAITING",
        "half prefilled": "RUNNING",
        "decoding": "RUNNING",
        "preempted": "WAITING",
    }
    assert seqs["half prefilled"].num_uncached_tokens > 1
    assert seqs["decoding"].num_uncached_tokens == 1
    assert seqs["preempted"].num_completion_tokens > 0


@pytest.mark.parametrize("state", STATES)
def test_abort_drops_one_sequence_and_leaves_the_others(state: str):
    engine, seq = in_state(state)
    engine.abort(seq)
    engine.run()
    engine.check_results()
    assert len(engine.results) == 2
    assert seq not in engine.finishes


@pytest.mark.parametrize("mid_step", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_reset_leaves_everything_clean(state: str, mid_step: bool):
    """Guards leftovers of a call that was interrupted: requests that show up in the next one,
    or blocks that count as cached but were never computed."""
    engine, _ = in_state(state)
    scheduler = engine.scheduler
    if mid_step:
        engine.schedule()
    scheduler.reset()
    assert scheduler.is_finished()
    manager = scheduler.block_manager
    assert list(manager.free_block_ids) == list(range(9))
    assert not manager.used_block_ids
    assert not manager.prefix_cache.hash_to_block_id
    again = Engine(scheduler)
    again.run([Request([1] * 6, greedy()), Request([2] * 11, greedy())])
    again.check_results()
    assert len(again.results) == 2


def test_reset_keeps_the_settings():
    scheduler = make_scheduler(enable_prefix_caching=False)
    scheduler.reset()
    manager = scheduler.block_manager
    assert (manager.num_blocks, manager.block_size) == (64, 4)
    assert type(manager.prefix_cache) is BlockCache


def several(n: int, max_tokens: int | None = 4, **kwargs: Any) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True, **kwargs)


def num_computed(engine: Engine, prompt_len: int) -> int:
    """Prompt tokens in all batches so far."""
    items = (item for batch in engine.batches for item in batch.items)
    return sum(max(min(item.end, prompt_len) - item.start, 0) for item in items)


class TestSiblings:
    """Several completions of one prompt."""

    @pytest.mark.parametrize("caching", [True, False])
    @pytest.mark.parametrize("budget", [64, 5])
    @pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 16])
    def test_a_prompt_is_computed_once(self, length: int, budget: int, caching: bool):
        """Each sibling computes the last token again, for its own logits; no other is."""
        engine = Engine(
            make_scheduler(max_num_batched_tokens=budget, enable_prefix_caching=caching)
        )
        engine.run([Request(list(range(20, 20 + length)), several(4))])
        engine.check_results()
        assert num_computed(engine, length) == length + 3
        assert len({tuple(completion) for _, (completion, *_) in engine.results}) == 4
        assert engine.scheduler.num_preemptions == 0

    def test_they_stand_behind_their_first_and_before_later_requests(self):
        engine = Engine(make_scheduler())
        first = engine.add(Request([5] * 6, several(3)))
        later = engine.add(Request([1] * 6, greedy()))
        siblings = list(first.siblings)
        assert [item.seq for item in engine.step().items] == [first, later]
        engine.step()
        assert engine.scheduler.running == [first, *siblings, later]

    def test_they_are_residents_before_they_start(self):
        """Guards prompts that are admitted into places that siblings are about to take."""
        engine = Engine(make_scheduler(max_num_seqs=4, max_num_batched_tokens=8))
        engine.add(Request([5] * 12, several(3)))
        waiting = [engine.add(Request([i] * 2, greedy())) for i in range(2)]
        assert [len(engine.step()) for _ in range(2)] == [1, 2]  # two chunks; one more fits
        assert [seq.status.name for seq in waiting] == ["RUNNING", "WAITING"]
        engine.run()
        engine.check_results()

    @pytest.mark.parametrize(("num_blocks", "admitted"), [(6, True), (5, False)])
    def test_admission_leaves_each_of_them_a_spare_block(self, num_blocks: int, admitted: bool):
        """Two blocks for the prompt, one to come for each sibling and for who is there already."""
        engine = Engine(make_scheduler(num_blocks=num_blocks))
        engine.add(Request([1] * 2, greedy()))
        engine.step()
        engine.add(Request([5] * 5, several(3)))
        assert engine.step().is_prefill == admitted
        engine.run()
        engine.check_results()

    def test_a_request_waits_until_all_its_completions_fit(self):
        engine = Engine(make_scheduler(max_num_seqs=4))
        engine.add(Request([1], greedy(max_tokens=6)))
        engine.step()
        group = engine.add(Request([5] * 6, several(4)))
        while not engine.scheduler.is_finished() and group.status is SequenceStatus.WAITING:
            assert len(engine.step()) == 1 or not engine.unfinished
        engine.run()
        engine.check_results()
        assert len(engine.results) == 5

    @pytest.mark.parametrize("caching", [True, False])
    @pytest.mark.parametrize("n", [5, 8, 20])
    def test_more_completions_than_max_num_seqs_run_in_turns(self, n: int, caching: bool):
        """Guards a request that waits for ever for more places than there are."""
        engine = Engine(make_scheduler(max_num_seqs=4, enable_prefix_caching=caching))
        engine.run([Request([1], greedy()), Request([5] * 9, several(n)), Request([2], greedy())])
        engine.check_results()
        assert len(engine.results) == n + 2

    @pytest.mark.parametrize("caching", [True, False])
    @pytest.mark.parametrize("num_blocks", [4, 7, 12])
    def test_a_tight_cache_loses_nothing(self, num_blocks: int, caching: bool):
        """Down to a cache that holds one completion at a time."""
        scheduler = make_scheduler(
            num_blocks=num_blocks, max_model_len=16, enable_prefix_caching=caching
        )
        engine = Engine(scheduler)
        engine.run(Request([i] * (5 + i), several(5, max_tokens=9)) for i in range(3))
        engine.check_results()
        assert len(engine.results) == 15
        assert scheduler.num_preemptions > 0
        assert not scheduler.block_manager.used_block_ids

    def test_the_copied_block_may_be_freed_and_taken_before_it_is_copied(self):
        """The first completion ends with its first token; a new prompt takes its block in the
        very step that copies from it."""
        engine = Engine(make_scheduler(num_blocks=6))
        engine.add(Request([5] * 6, several(2, max_tokens=1)))
        engine.add(Request([2] * 6, greedy(max_tokens=1)))
        engine.step()
        late = engine.add(Request([1] * 6, greedy()))
        batch = engine.step()
        assert [item.seq for item in batch.items] == [late]
        ((source, _),) = batch.block_copies
        assert source in late.block_tables[0]
        engine.run()
        engine.check_results()

    def test_copies_of_a_step_that_does_not_fit_are_made_by_the_next_one(self):
        engine = Engine(make_scheduler())
        engine.add(Request([2] * 6, several(4)))
        engine.step()
        assert len(engine.step(does_not_fit="run").block_copies) == 3
        engine.run()
        engine.check_results()

    @pytest.mark.parametrize("num_steps", range(6))
    def test_an_abort_drops_all_completions_and_no_other(self, num_steps: int):
        """Waiting, half prefilled, with copies due, decoding."""
        engine = Engine(make_scheduler(num_blocks=12, max_num_batched_tokens=8))
        engine.add(Request([1] * 3, greedy(max_tokens=20)))
        group = engine.add(Request([2] * 10, several(3, max_tokens=20)))
        for _ in range(num_steps):
            engine.step()
        engine.abort(group)
        engine.add(Request([5] * 10, several(2)))
        engine.run()
        engine.check_results()
        assert len(engine.results) == 3

    @pytest.mark.parametrize("num_steps", range(5))
    def test_reset_forgets_copies_that_are_due(self, num_steps: int):
        """Guards a copy of an interrupted call that overwrites a block of the next one."""
        engine = Engine(make_scheduler(max_num_batched_tokens=8))
        engine.add(Request([2] * 10, several(3)))
        for _ in range(num_steps):
            engine.step()
        engine.scheduler.reset()
        assert engine.scheduler.is_finished()
        again = Engine(engine.scheduler)
        again.add(Request([2] * 10, several(3)))
        assert again.step().block_copies == ()
        again.run()
        again.check_results()

    def test_one_without_a_token_costs_the_others_nothing(self):
        scheduler = make_scheduler()
        seqs = [Sequence([5] * 6, several(3), block_size=4) for _ in range(3)]
        seqs[0].siblings = seqs[1:]
        scheduler.add(seqs[0])
        finishes = scheduler.postprocess(launch(scheduler), [-1])
        assert [*finishes] == [seqs[0]]
        finishes |= scheduler.postprocess(launch(scheduler), [7, -1])
        assert [*finishes] == [seqs[0], seqs[2]]
        assert {finish.reason for finish in finishes.values()} == {"error"}
        check_scheduler(scheduler)
        list(drain(scheduler))
        assert all(seq.is_finished for seq in seqs)
        assert [len(seq.completion_token_ids) for seq in seqs] == [0, 4, 0]

    def test_cached_tokens_of_the_prompt_are_counted_once_it_first_runs(self):
        """However much of its own the sequence finds there after a preemption."""
        engine = Engine(make_scheduler())
        first = engine.add(Request(list(range(20, 30)), greedy(max_tokens=1)))
        engine.run()
        again = engine.add(Request(list(range(20, 30)), greedy(max_tokens=9)))
        whole = engine.add(Request(list(range(20, 28)), greedy(max_tokens=9)))
        for _ in range(4):
            engine.step()
        engine.scheduler.preempt(whole)
        engine.run()
        found = [seq.num_cached_prompt_tokens for seq in (first, again, whole)]
        assert found == [0, 8, 7]  # the last token's logits are always computed


class Corrupt:
    """One way to break each invariant, where ``seq`` is decoding and another is waiting."""

    @staticmethod
    def too_many_residents(scheduler: Scheduler, seq: Sequence) -> None:
        scheduler.max_num_seqs = len(scheduler.running) - 1

    @staticmethod
    def status_of_a_running_sequence(scheduler: Scheduler, seq: Sequence) -> None:
        seq.status = SequenceStatus.WAITING

    @staticmethod
    def status_of_a_waiting_sequence(scheduler: Scheduler, seq: Sequence) -> None:
        scheduler.waiting[0].status = SequenceStatus.FINISHED

    @staticmethod
    def blocks_of_a_waiting_sequence(scheduler: Scheduler, seq: Sequence) -> None:
        scheduler.waiting[0].block_tables = [[0]]

    @staticmethod
    def too_few_blocks(scheduler: Scheduler, seq: Sequence) -> None:
        scheduler.block_manager.deallocate(seq)

    @staticmethod
    def too_long(scheduler: Scheduler, seq: Sequence) -> None:
        scheduler.max_len = len(seq)

    @staticmethod
    def blocks_that_nobody_holds(scheduler: Scheduler, seq: Sequence) -> None:
        scheduler.running.remove(seq)


@needs_asserts
@pytest.mark.parametrize("name", [name for name in vars(Corrupt) if not name.startswith("_")])
def test_invariants_notice(name: str):
    engine, seq = in_state("decoding")
    getattr(Corrupt, name)(engine.scheduler, seq)
    with pytest.raises(AssertionError):
        check_scheduler(engine.scheduler)


@pytest.mark.parametrize(("windows", "fewest"), [((16,), 8), ((None, 16), 25)], ids=str)
def test_a_chunk_may_lack_blocks_that_left_its_window_but_are_shared(windows, fewest):
    """A prompt in chunks shares a prefix with a sequence that still runs, so what leaves its window
    is not freed. With few blocks it is preempted; it was a KeyError."""
    num_preemptions = 0
    for num_blocks in range(fewest, 60):
        config = Config("model", max_num_seqs=4, max_num_batched_tokens=8, kvcache_block_size=4)
        scheduler = Scheduler(config, num_blocks, 1000, windows=windows, cache_len=80)
        prefix = list(range(100, 116))
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        first = Sequence([*prefix, 7], params, 4)
        second = Sequence([*prefix, *range(200, 240)], params, 4)
        scheduler.add(first)
        for step in range(200):
            if step == 4:
                scheduler.add(second)
            batch = scheduler.schedule()
            for item in batch.items:  # every new token has a slot
                assert item.end <= item.seq.table_len * 4
            scheduler.launched(batch)
            check_scheduler(scheduler)
            scheduler.postprocess(batch, [5] * len(batch.sampled))
        assert first.is_finished and second.is_finished
        num_preemptions += scheduler.num_preemptions
    assert num_preemptions > 0
