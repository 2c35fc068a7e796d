"""What is captured, and that steps padded to it give what they give as they are."""

import random
import weakref
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine import cuda_graphs, shared_prefixes, startup
from nanovllm.engine.batch import Batch
from nanovllm.engine.cuda_graphs import (
    StepGraphs,
    decode_sizes,
    graph_bytes,
    graph_sizes,
    prefill_sizes,
)
from nanovllm.engine.model_inputs import GraphSize, ModelInputs, PackedInputs, prepare_decode
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.shared_prefixes import PrefixFinder
from nanovllm.kernels.attention import decode, prefix_decode
from nanovllm.kernels.attention.block_tables import BlockTables
from nanovllm.kernels.attention.torch_backend import TorchAttention
from nanovllm.kernels.attention.triton_backend import TritonAttention
from tests.invariants import check_scheduler
from tests.tiny_models import VOCAB_SIZE


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 100, 257, 512, 600, 1024, 2048, 9999])
def test_no_batch_size_lacks_a_graph(max_num_seqs):
    """Decodes of more than 512 sequences had none, and ran eagerly."""
    captured = decode_sizes(max_num_seqs)
    assert captured == sorted(set(captured))
    assert captured[-1] == GraphSize(False, min(max_num_seqs, 2048), min(max_num_seqs, 2048))
    sizes = [size.num_seqs for size in captured]
    for a, b in pairwise(sizes):
        assert b - a <= (16 if a < 64 else max(32, a // 4)), "at most a third is padding"
    assert len(captured) <= 32


@pytest.mark.parametrize("max_num_tokens", [1, 16, 64, 1000, 5000, 16384])
@pytest.mark.parametrize("max_num_seqs", [1, 20, 600])
def test_prefills_within_the_limits_are_captured(max_num_tokens, max_num_seqs):
    captured = prefill_sizes(max_num_tokens, max_num_seqs, 10**6)
    assert captured == sorted(set(captured)) and bool(captured) == (max_num_tokens >= 64)
    for size in captured:
        assert size.is_prefill and size.num_seqs == min(max_num_seqs, size.num_tokens)
    sizes = [size.num_tokens for size in captured]
    assert not sizes or sizes[-1] == max_num_tokens
    for a, b in pairwise(sizes):
        assert b <= 2 * a and (b <= 1.35 * a or b <= 2048 or b in (6144, 8192)), "padding"


def test_large_models_have_graphs_of_few_tokens_only():
    assert prefill_sizes(16384, 64, 440_000_000)[-1].num_tokens == 16384
    assert prefill_sizes(16384, 64, 970_000_000)[-1].num_tokens == 8192
    assert prefill_sizes(8000, 64, 970_000_000)[-1].num_tokens == 8000
    assert prefill_sizes(8000, 64, 1_010_000_000)[-1].num_tokens == 6144
    assert prefill_sizes(16384, 64, 6_950_000_000)[-1].num_tokens == 1024
    assert prefill_sizes(16384, 64, 10**12) == []


@pytest.mark.parametrize(
    ("backend", "kv_cache_dtype", "expected"),
    [
        (TritonAttention, "auto", (16384, 128)),
        (TritonAttention, "fp8", (4096, 128)),
        (TorchAttention, "auto", (4096, 64)),
    ],
)
def test_the_backend_limits_the_prefills_that_are_captured(
    backend, kv_cache_dtype, expected, tiny_models, monkeypatch
):
    settings = {"max_num_seqs": 150, "num_kvcache_blocks": 8, "kv_cache_dtype": kv_cache_dtype}
    with LLM(tiny_models.path("qwen3-one-layer"), device="cpu", **settings) as llm:
        monkeypatch.setattr(llm.model_runner, "backend", backend())
        prefills = [size for size in graph_sizes(llm.model_runner) if size.is_prefill]
    assert prefills[-1] == GraphSize(True, *expected)


def test_the_memory_of_graphs_is_counted_for_all_of_them():
    """Each graph kept logits of its own, which counted as often as there are graphs; what the
    driver keeps for a graph does count."""
    assert graph_bytes([], 0) == 0
    assert graph_bytes([10 << 30], 1) == 10 << 30
    assert graph_bytes([1 << 30, 0], 28) == (1 << 30) + 27 * (8 << 20)
    assert graph_bytes([1 << 30, 20 << 20], 3) == (1 << 30) + 2 * (20 << 20)


def test_captures_leave_other_threads_alone_and_keep_no_logits(monkeypatch):
    """In the global capture mode another thread's allocation broke the capture; and each graph kept
    its logits, 1.5 GiB for 28 decodes with a vocabulary of 152,000."""
    captures, logits, streams = [], [], []

    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            captures.append((pool, capture_error_mode, *streams))

        def capture_end(self):
            pass

    @contextmanager
    def use_stream(stream):
        streams.append(stream)
        yield
        streams.pop()

    monkeypatch.setattr(torch.cuda, "stream", use_stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"a stream of {device}")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(cuda_graphs, "borrowed", lambda tensor: tensor.shape)

    def run_model(inputs: ModelInputs) -> tuple[None, torch.Tensor]:
        out = torch.zeros(len(inputs.input_ids), 100)
        logits.append(weakref.ref(out))
        return None, out

    def prepare(batch: Batch, size: GraphSize) -> PackedInputs:
        return prepare_decode(batch, 16, size.num_seqs).pack(size)

    runner: Any = SimpleNamespace(
        device=torch.device("cpu"),
        block_tables=BlockTables(1, 8, 4, torch.device("cpu")),
        model=SimpleNamespace(model=SimpleNamespace(layers=[])),
        prepare=prepare,
        run_model=run_model,
    )
    graphs = StepGraphs(runner)
    graphs.capture(decode_sizes(8))
    shapes = [graph.logits for graph in graphs.graphs.values()]
    assert shapes == [(8, 100), (4, 100), (2, 100), (1, 100)]
    assert len(logits) == 8 and not any(ref() is not None for ref in logits)
    assert set(captures) == {(graphs.pool, "thread_local", "a stream of cpu")}
    assert len({graph.buffer.data_ptr() for graph in graphs.graphs.values()}) == 1


class PlainGraphs(StepGraphs):
    """Steps of the captured shapes without a GPU."""

    def capture(self, sizes: list[GraphSize]) -> None:
        for size, step in self.make_steps(sizes):
            step()
            self.graphs[size] = step
        self.num_replays = {True: 0, False: 0}

    def replay(self, inputs):
        step = self.graphs[inputs.graph_size]
        self.num_replays[inputs.context.is_prefill] += 1
        self.buffer.fill_(-1)
        inputs.tensors.copy_to(self.buffer)
        return step()


@pytest.fixture
def capture(monkeypatch) -> Callable[[ModelRunner], PlainGraphs]:
    """Makes a runner on a CPU pad its steps to captured sizes, and returns its graphs."""
    monkeypatch.setattr(cuda_graphs, "PREFILL_TOKENS", [16, 48])
    monkeypatch.setattr(TorchAttention, "max_captured_prefill", lambda *_: (48, 64))
    monkeypatch.setattr(cuda_graphs, "StepGraphs", PlainGraphs)
    monkeypatch.setattr(cuda_graphs, "small_cublas_workspace", nullcontext)

    def capture_on_cpu(runner: ModelRunner) -> PlainGraphs:
        monkeypatch.setattr(runner.backend, "capturable", True, raising=False)
        cuda_graphs.capture_cudagraph(runner)
        assert isinstance(runner.graphs, PlainGraphs)
        return runner.graphs

    return capture_on_cpu


def run(model_path, capture: Callable | None) -> tuple[list, list, dict[bool, int]]:
    """Prompts with common prefixes, long ones in chunks, several samples and logprobs, in a cache
    that is too small for all."""
    draw = random.Random(0)
    common = [draw.randrange(VOCAB_SIZE) for _ in range(21)]
    prompts, params = [], []
    for i in range(14):
        own = [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice([1, 5, 12, 40, 90]))]
        prompts.append(common[: draw.choice([0, 8, 21])] + own)
        params.append(
            SamplingParams(
                temperature=0.0 if i % 3 else 0.9,
                seed=i,
                n=2 if i % 6 == 0 else 1,
                max_tokens=draw.randint(5, 25),
                ignore_eos=True,
                logprobs=2 if i % 4 == 0 else None,
                prompt_logprobs=1 if i == 5 else None,
            )
        )
    with LLM(
        model_path,
        max_num_seqs=5,
        max_num_batched_tokens=64,
        kvcache_block_size=4,
        num_kvcache_blocks=36,
        max_model_len=140,
    ) as llm:
        graphs = None
        if capture is not None:
            graphs = capture(llm.model_runner)
            assert {size.is_prefill for size in graphs.graphs} == {True, False}
        outputs = llm.generate(prompts, params, use_tqdm=False)
        check_scheduler(llm.scheduler)
        assert llm.metrics().num_preemptions
        tokens = [x.token_ids for output in outputs for x in output.outputs]
        found = [output.prompt_logprobs for output in outputs]
        found += [x.logprobs for output in outputs for x in output.outputs]
        positions = [position for row in found if row is not None for position in row]
        logprobs = [
            {token: entry.logprob for token, entry in position.items()}
            for position in positions
            if position is not None
        ]
        return tokens, logprobs, dict(getattr(graphs, "num_replays", {}))


def test_padded_steps_give_the_same_tokens(model_path, capture):
    expected, expected_logprobs, none = run(model_path, None)
    assert not none and len(expected_logprobs) > 50
    tokens, logprobs, num_replays = run(model_path, capture)
    assert tokens == expected
    for found, plain in zip(logprobs, expected_logprobs, strict=True):
        assert found == pytest.approx(plain, abs=1e-4)
    assert num_replays[True] >= 5 and num_replays[False] >= 20


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs kernels in Triton's interpreter")
def test_steps_with_shared_prefixes_have_graphs_of_their_own(tiny_models, capture, monkeypatch):
    """In Triton's interpreter fewer programs are faster."""
    monkeypatch.setattr(startup, "select_attention_backend", lambda *_, **__: TritonAttention())
    monkeypatch.setattr(TritonAttention, "prefill", TorchAttention.prefill)
    monkeypatch.setattr(decode, "NUM_MULTIPROCESSORS", 2)
    monkeypatch.setattr(prefix_decode, "HOPPER_MULTIPROCESSORS", 4)
    monkeypatch.setattr(cuda_graphs, "decode_sizes", lambda _: [GraphSize(False, 5, 5)])
    monkeypatch.setattr(shared_prefixes, "MIN_TOKENS", 1)
    monkeypatch.setattr(shared_prefixes, "MIN_SAVED_BYTES", 1)
    params = SamplingParams(max_tokens=3, ignore_eos=True, n=4, seed=0)
    settings = {"num_kvcache_blocks": 60, "kvcache_block_size": 4, "max_model_len": 32}
    tokens = []
    for captures in (False, True):
        path = tiny_models.path("qwen3-one-layer")
        with LLM(path, device="cpu", max_num_seqs=5, **settings) as llm:
            if captures:
                graphs = capture(llm.model_runner)
                decodes = [size for size in graphs.graphs if not size.is_prefill]
                assert {size.shares_prefixes for size in decodes} == {True, False}
            (output,) = llm.generate([[*range(3, 16)]], params, use_tqdm=False)
            assert llm.metrics().num_shared_prefix_steps >= 2
        tokens.append([x.token_ids for x in output.outputs])
    assert tokens[0] == tokens[1] and graphs.num_replays[False] >= 2


@pytest.mark.parametrize("max_num_seqs", [1, 3, 4, 5, 32, 300, 512, 2048])
def test_decodes_have_graphs_for_shared_prefixes_if_enough_sequences_can_share(max_num_seqs):
    """9 sequences ran in a graph of 64 rows."""
    model = SimpleNamespace(model=SimpleNamespace(layers=torch.nn.Linear(1, 1)))
    config = SimpleNamespace(max_num_batched_tokens=16, quantizes_kv=False)
    runner: Any = SimpleNamespace(config=config, max_model_len=16, model=model)
    runner.backend = TritonAttention()
    runner.max_num_seqs = max_num_seqs
    for finder in (None, PrefixFinder(16, 0, 1)):
        runner.prefix_finder = finder
        decodes = [size for size in graph_sizes(runner) if not size.is_prefill]
        assert decodes == sorted(decodes)
        plain = [size for size in decodes if not size.shares_prefixes]
        assert plain == decode_sizes(max_num_seqs)
        shared = [size.num_seqs for size in decodes if size.shares_prefixes]
        assert len(shared) <= 10 and bool(shared) == (finder is not None and max_num_seqs >= 4)
        for num_seqs in range(4, max_num_seqs + 1) if shared else ():
            assert num_seqs <= min(size for size in shared if size >= num_seqs) < 2 * num_seqs


def test_what_is_too_large_runs_eagerly(model_path, capture):
    with LLM(model_path, max_num_seqs=3, num_kvcache_blocks=60, kvcache_block_size=4) as llm:
        runner = llm.model_runner
        capture(runner)
        for prompts, size in (
            ([[1] * 10], GraphSize(True, 16, 3)),
            ([[1] * 10, [2] * 6], GraphSize(True, 16, 3)),
            ([[1] * 10, [2] * 7, [3]], GraphSize(True, 48, 3)),
            ([[1] * 49], None),
        ):
            for prompt in prompts:
                llm.add_request(prompt, SamplingParams(max_tokens=1))
            batch = llm.scheduler.schedule()
            assert runner.graphs.size_for(batch) == size
            llm.scheduler.reset()
            llm.requests.clear()
        llm.add_request([1] * 10, SamplingParams(max_tokens=1, prompt_logprobs=1))
        assert runner.graphs.size_for(llm.scheduler.schedule()) is None
