"""Decodes that read a prefix once give the tokens of decodes that read it for each sequence."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine import shared_prefixes, startup
from nanovllm.engine.batch import Batch, ScheduledSequence
from nanovllm.engine.shared_prefixes import PrefixFinder
from nanovllm.kernels.attention import decode, prefix_decode
from nanovllm.kernels.attention.prefix_schedule import SharedPrefixes
from nanovllm.kernels.attention.torch_backend import TorchAttention
from nanovllm.kernels.attention.triton_backend import TritonAttention

SYSTEM = [(7 * i) % 500 + 3 for i in range(33)]
PROMPTS = [[*SYSTEM, *range(10, 10 + 9 * i)] for i in range(4)]
PROMPTS += [[(11 * i) % 500 + 3 for i in range(20)]]


@pytest.fixture(autouse=True)
def short_prefixes_pay(monkeypatch):
    monkeypatch.setattr(shared_prefixes, "MIN_TOKENS", 16)
    monkeypatch.setattr(shared_prefixes, "MIN_SAVED_BYTES", 1)


def generate(path, shares: bool, monkeypatch):
    """Tokens in fp32 and the number of steps with shared prefixes. On a CPU the decode kernels run
    in Triton's interpreter, where fewer programs are faster, or PyTorch runs instead."""
    if not torch.cuda.is_available():
        backend = TritonAttention if shares else TorchAttention
        monkeypatch.setattr(startup, "select_attention_backend", lambda *_, **__: backend())
        monkeypatch.setattr(TritonAttention, "prefill", TorchAttention.prefill)
        monkeypatch.setattr(decode, "NUM_MULTIPROCESSORS", 2)
        monkeypatch.setattr(prefix_decode, "HOPPER_MULTIPROCESSORS", 4)
    monkeypatch.setattr(TritonAttention, "shares_prefixes", shares)
    params = [SamplingParams(temperature=0, max_tokens=3, ignore_eos=True) for _ in PROMPTS]
    params[-1] = SamplingParams(n=4, seed=0, max_tokens=3, ignore_eos=True)
    settings = {"kvcache_block_size": 16, "num_kvcache_blocks": 200, "dtype": "float32"}
    settings["attention_backend"] = "triton"
    with LLM(path, **settings) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        num_steps = llm.metrics().num_shared_prefix_steps
    return [x.token_ids for output in outputs for x in output.outputs], num_steps


@pytest.mark.parametrize(
    "name", ["qwen3-one-layer", pytest.param("gemma2", marks=pytest.mark.slow)]
)
def test_the_same_tokens_with_and_without_shared_prefixes(name, tiny_models, monkeypatch):
    """Of a system prompt and of several completions; also in a model of which some layers have a
    window."""
    expected, num_steps = generate(tiny_models.path(name), False, monkeypatch)
    assert num_steps == 0
    tokens, num_steps = generate(tiny_models.path(name), True, monkeypatch)
    assert tokens == expected and num_steps >= 2


def batch_of(tables: list[list[int]], is_prefill: bool = False) -> Batch:
    seqs: list[Any] = [SimpleNamespace(block_tables=[[0], table]) for table in tables]
    items = tuple(ScheduledSequence(seq, 0, 1, True) for seq in seqs)
    return Batch.of(items, is_prefill)


def test_a_search_is_made_only_for_a_new_batch(monkeypatch):
    searches = []
    search = shared_prefixes.find_shared_prefixes
    monkeypatch.setattr(
        shared_prefixes, "find_shared_prefixes", lambda *args: searches.append(1) or search(*args)
    )
    tables = [[1, 2, 10 + i] for i in range(6)]
    finder = PrefixFinder(16, 1, 1)

    def find(tables: list[list[int]], is_prefill: bool = False) -> SharedPrefixes | None:
        return finder.add_prefixes(batch_of(tables, is_prefill)).prefixes

    assert find(tables, is_prefill=True) is None
    first = find(tables)
    assert first is not None and first.groups["end"].tolist() == [32]
    tables[0].append(100)
    assert find(tables) is first and len(searches) == 1
    fewer = find(tables[1:])
    assert fewer is not None and fewer.members.tolist() == [0, 1, 2, 3, 4]
    another = find([*tables[1:3], [3], *tables[4:]])  # as many as before
    assert another is not None and another.members.tolist() == [0, 1, 3, 4]
    assert find(tables[:3]) is None
    assert finder.num_steps == 4 and len(searches) == 4
