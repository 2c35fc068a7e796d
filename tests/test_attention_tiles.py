"""benchmarks/attention_tiles.py times steps with distinct tiles, and uses them only meanwhile."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from benchmarks import attention_tiles
from benchmarks.attention_tiles import step_times, tiles_for, use
from nanovllm import LLM
from nanovllm.engine import cuda_graphs, startup
from nanovllm.kernels.attention import decode, triton_backend
from nanovllm.kernels.attention.decode import DecodeTile, decode_tile
from nanovllm.kernels.attention.torch_backend import TorchAttention
from nanovllm.kernels.attention.triton_backend import TritonAttention
from tests.engine.test_cuda_graphs import PlainGraphs


def test_tiles_are_used_only_in_the_block():
    tile = DecodeTile(32, 2, 4, True)
    with use(tile):
        assert decode.decode_tile(1, 8, 4, 64, torch.float16, False) is tile
        assert triton_backend.decode_tile(1, 8, 4, 64, torch.float16, False) is tile
    assert decode.decode_tile is triton_backend.decode_tile is decode_tile


def test_tiles_to_try(tiny_models):
    with LLM(tiny_models.path("qwen3"), device="cpu", num_kvcache_blocks=16) as llm:
        for num_seqs in attention_tiles.NUM_SEQS:
            tiles = tiles_for(llm, num_seqs)
            assert len(tiles) == len({*tiles.values()}) >= len(attention_tiles.TILES)
            assert tiles["now"] == decode_tile(num_seqs, 4, 2, 16, llm.model_runner.dtype, False)


class Graphs(PlainGraphs):
    def capture(self, sizes: list[cuda_graphs.GraphSize]) -> None:
        super().capture(sizes)
        for size in sizes:
            replay = self.graphs[size]
            replay.graph = SimpleNamespace(replay=replay)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs kernels in Triton's interpreter")
def test_each_tile_is_timed_in_steps_with_its_own_schedule(tiny_models, monkeypatch):
    monkeypatch.setattr(startup, "select_attention_backend", lambda *_, **__: TritonAttention())
    monkeypatch.setattr(TritonAttention, "prefill", TorchAttention.prefill)
    monkeypatch.setattr(TritonAttention, "shares_prefixes", False)
    monkeypatch.setattr(decode, "NUM_MULTIPROCESSORS", 1)
    monkeypatch.setattr(attention_tiles, "small_cublas_workspace", nullcontext)
    monkeypatch.setattr(attention_tiles, "compiling_only", nullcontext)
    monkeypatch.setattr(attention_tiles, "TILES", [(16, 2, 4), (32, 1, 1)])
    used = []

    def time_of(replay) -> float:
        replay()  # decode attention asserts that the schedule is for its tile
        used.append(decode.decode_tile())
        return 7.0

    monkeypatch.setattr(attention_tiles, "replay_microseconds", time_of)
    path = tiny_models.path("qwen3-one-layer")
    with LLM(path, device="cpu", max_num_seqs=2, num_kvcache_blocks=8, max_model_len=64) as llm:
        runner = llm.model_runner
        runner.graphs = graphs = Graphs(runner)
        monkeypatch.setattr(runner.backend, "capturable", True, raising=False)
        graphs.capture(cuda_graphs.decode_sizes(2))
        times = step_times(llm, [9, 20])
        now = decode_tile(2, 4, 2, 16, runner.dtype, False)
    assert times == {"now": 7.0, "16x2x4": 7.0, "32x1x1": 7.0}
    assert used == [now, DecodeTile(16, 2, 4, False), DecodeTile(32, 1, 1, False)]
