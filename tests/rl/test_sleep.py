"""Engines that free their memory, and what they refuse until they have it back."""

import logging
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import Qwen3Config

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.engine import kv_layout, startup
from nanovllm.utils import cuda_vmm
from tests import fake_cuda
from tests.conftest import check_idle
from tests.rl.conftest import PARAMS, PROMPTS, SETTINGS, Pair, answers
from tests.tables import each
from tests.tiny_models import BASE, TinyModels


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def storage_bytes(llm: LLM) -> tuple[int, int]:
    """The sizes of plain weights and of the KV cache."""
    params = [p for p in llm.model_runner.model.parameters() if not p.is_mkldnn]
    weights = sum(param.untyped_storage().nbytes() for param in params)
    return weights, llm.model_runner.kv_cache.untyped_storage().nbytes()


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied", "qwen3-moe"])
def test_level_1_keeps_the_weights_and_level_2_needs_all_of_them(name: str, pairs: Any):
    pair: Pair = pairs(name)
    with LLM(pair.old, **SETTINGS) as llm:
        before, (weights, cache) = answers(llm), storage_bytes(llm)
        llm.sleep()
        assert storage_bytes(llm) == (weights, 0)
        assert llm.wake_up() is True
        assert storage_bytes(llm) == (weights, cache)
        assert answers(llm) == before
        llm.sleep(level=2)
        assert storage_bytes(llm) == (0, 0)
        assert llm.wake_up() is True
        assert storage_bytes(llm) == (weights, cache)
        left = sorted(pair.tensors)
        while left:
            with pytest.raises(ValueError, match=r"sleep\(level=2\): give load_weights") as error:
                answers(llm)
            assert left[0] in str(error.value)
            name = left.pop()
            llm.load_weights([(name, pair.tensors[name])])
        assert answers(llm) == pair.wanted()
        check_idle(llm)


def test_the_weights_that_are_missing_are_named(pairs: Any):
    """A packed parameter is complete with all of its parts, in one call or several."""
    pair: Pair = pairs("qwen3")
    left = {f"model.layers.{i}.self_attn.{x}_proj.weight" for i in range(2) for x in "vo"}
    with LLM(pair.old, **SETTINGS) as llm:
        llm.sleep(level=2)
        llm.wake_up()
        llm.load_weights((name, t) for name, t in pair.tensors.items() if name not in left)
        with pytest.raises(ValueError) as error:
            llm.add_request(PROMPTS[0], PARAMS)
        assert str(error.value).endswith(f"give load_weights {', '.join(sorted(left))}")
        llm.sleep(level=1)  # which does not give them values
        llm.wake_up()
        with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.v_proj\.weight"):
            answers(llm)
        llm.load_weights((name, pair.tensors[name]) for name in left)
        assert answers(llm) == pair.wanted()


def test_weights_can_be_loaded_before_the_kv_cache_wakes(pairs: Any):
    """As trainers do, whose own memory is freed in between."""
    pair: Pair = pairs("qwen3")
    with LLM(pair.old, **SETTINGS) as llm:
        llm.sleep(level=2)
        with pytest.raises(ValueError, match=r"weights are asleep: call wake_up\(\['weights'\]\)"):
            llm.load_weights(pair.tensors.items())
        assert llm.wake_up(tags=["weights"]) is False
        assert storage_bytes(llm)[1] == 0
        llm.load_weights(pair.tensors.items())
        with pytest.raises(ValueError, match=r"the engine is asleep \(kv_cache\)"):
            answers(llm)
        assert llm.is_sleeping()
        assert llm.wake_up(tags=["kv_cache"]) is True
        assert answers(llm) == pair.wanted()


def test_only_the_given_tags_wake_up(pairs: Any):
    with LLM(pairs("qwen3").old, **SETTINGS) as llm:
        before = answers(llm)
        llm.sleep()
        assert llm.wake_up([]) is False
        with pytest.raises(ValueError, match=r"asleep \(weights and kv_cache\)"):
            answers(llm)
        assert llm.wake_up(tag for tag in ("weights",)) is False
        with pytest.raises(ValueError, match=r"asleep \(kv_cache\)"):
            answers(llm)
        assert llm.wake_up({"kv_cache": 1}) is True
        assert llm.wake_up([]) is True
        assert answers(llm) == before


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_sleep_frees_the_part_that_is_awake(tag: str, pairs: Any, caplog: pytest.LogCaptureFixture):
    """The other part stays as it is: weights that level 1 has kept are not lost by level 2."""
    pair: Pair = pairs("qwen3")
    with LLM(pair.old, **SETTINGS) as llm:
        before = answers(llm)
        llm.sleep(level=1)
        llm.wake_up([tag])
        llm.sleep(level=2)
        assert storage_bytes(llm)[1] == 0
        assert (storage_bytes(llm)[0] == 0) == (tag == "weights")
        assert llm.wake_up() is True
        if tag == "weights":
            llm.load_weights(pair.old_tensors.items())
        assert answers(llm) == before
    assert not [r for r in caplog.records if r.levelno == logging.WARNING]


def test_what_an_engine_does_while_it_is_asleep(pairs: Any, caplog: pytest.LogCaptureFixture):
    """As in vLLM, sleeping twice and waking what is awake are warnings."""
    pair: Pair = pairs("qwen3")
    llm = LLM(pair.old, **SETTINGS)
    before, prepared = answers(llm), llm.prepare(PROMPTS[0], PARAMS)
    assert llm.wake_up() is True
    llm.sleep()
    for call in (
        lambda: answers(llm),
        lambda: llm.generate([], PARAMS),
        lambda: llm.generate(PROMPTS, PARAMS, on_error="return"),
        lambda: llm.add_request(PROMPTS[0], PARAMS),
        lambda: llm.add_request(prepared),
        lambda: next(llm.generate_stream(PROMPTS, PARAMS)),
    ):
        with pytest.raises(
            ValueError, match=r"asleep \(weights and kv_cache\): call wake_up first"
        ):
            call()
    assert llm.is_sleeping() and llm.is_finished() and llm.step() == []
    assert llm.metrics().num_waiting == 0 and llm.reset_prefix_cache()
    llm.sleep(level=2)  # has no effect: the weights are kept
    assert llm.wake_up(tags=["kv_cache"]) is False
    assert llm.wake_up(tags=["kv_cache"]) is False
    assert llm.wake_up() is True and not llm.is_sleeping()
    assert answers(llm) == before
    messages = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert [m.partition(":")[2] for m in messages] == [
        " not asleep: the engine",
        " the engine is already asleep",
        " not asleep: kv_cache",
    ]
    llm.sleep()
    llm.close()
    with pytest.raises(ValueError, match="closed"):
        llm.wake_up()


@each(
    "call, message",
    [
        (lambda llm: llm.sleep(level=0), "level must be 1"),
        (lambda llm: llm.sleep(level="2"), "level must be 1"),
        (lambda llm: llm.wake_up(["weight"]), "tags must be a list of weights and kv_cache"),
        (lambda llm: llm.wake_up("weights"), "tags must be a list"),
        (lambda llm: llm.wake_up(5), "tags must be a list of weights and kv_cache, got 5"),
        (lambda llm: llm.wake_up([["weights"]]), "tags must be a list"),
    ],
)
def test_wrong_arguments(call: Any, message: str, pairs: Any):
    with LLM(pairs("qwen3").old, **SETTINGS) as llm, pytest.raises(ValueError, match=message):
        call(llm)


def test_a_gpu_needs_the_mode(pairs: Any, monkeypatch: pytest.MonkeyPatch):
    with LLM(pairs("qwen3").old, **SETTINGS) as llm:
        monkeypatch.setattr(llm.model_runner, "device", torch.device("cuda", 0))
        with pytest.raises(ValueError, match=r"needs LLM\(\.\.\., enable_sleep_mode=True\)"):
            llm.sleep()
        monkeypatch.undo()
    assert not Config.create("model").enable_sleep_mode


def test_the_memory_goes_back_to_the_system(tmp_path: Path):
    """60 MB of weights and 60 MB of KV cache."""
    sizes = {"vocab_size": 1000, "hidden_size": 512, "intermediate_size": 2048}
    layers = {"num_hidden_layers": 4, "num_key_value_heads": 4}
    config = Qwen3Config(**BASE | sizes | layers, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(tmp_path)
    settings: dict[str, Any] = {**SETTINGS, "max_model_len": 2048, "num_kvcache_blocks": 1900}
    with LLM(tmp_path, load_format="dummy", **settings) as llm:
        model, cache = llm.model_runner.model, llm.model_runner.kv_cache
        weight_bytes = sum(param.numel() * 4 for param in model.parameters())
        assert weight_bytes > 50 << 20 and cache.nbytes > 50 << 20
        cache.zero_()  # so that all of its pages are in memory
        answers(llm)
        awake = resident_bytes()
        llm.sleep(level=1)
        asleep = resident_bytes()
        assert awake - asleep > 0.9 * cache.nbytes
        llm.wake_up()
        llm.sleep(level=2)
        assert asleep - resident_bytes() > 0.9 * weight_bytes


def test_closing_frees_what_was_loaded_and_slept(pairs: Any):
    """Tables of names and memory refer to parameters. Guards a reference that keeps them."""
    pair: Pair = pairs("qwen3-tied")
    llm = LLM(pair.old, **SETTINGS)
    llm.load_weights(pair.tensors.items())
    llm.sleep(level=2)
    llm.wake_up()
    runner = llm.model_runner
    tensors = [weakref.ref(param) for param in runner.model.parameters()]
    tensors.append(weakref.ref(runner.kv_cache))
    llm.close()
    assert [ref for ref in tensors if ref() is not None] == []


TINY = BASE | {"num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}


def cycle(path: Path, num_cycles: int) -> None:
    """Sleeps, wakes, loads and generates again and again. Memory is flat, and results are right."""
    one = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    settings: dict[str, Any] = {**SETTINGS, "num_kvcache_blocks": 4000}  # 8 MB
    with LLM(path, **settings) as llm:

        def tokens() -> list[int]:
            return llm.generate([5, 6, 7], one, use_tqdm=False)[0].outputs[0].token_ids

        model = TinyModels.build(Qwen3Config(**TINY))
        old = {name: t.detach().clone() for name, t in model.state_dict().items()}
        weights = [old, {name: tensor.roll(1, 0) for name, tensor in old.items()}]
        wanted: list[Any] = []
        for tensors in weights:
            llm.load_weights(tensors.items())
            wanted.append(tokens())
        assert wanted[0] != wanted[1]
        after_warm_up = 0
        for i in range(num_cycles):
            llm.sleep(level=1 + i % 3 % 2)
            llm.wake_up(["weights"])
            llm.load_weights(weights[i % 2].items())
            llm.wake_up(["kv_cache"])
            assert tokens() == wanted[i % 2]
            if i == num_cycles // 4:
                after_warm_up = resident_bytes()
        assert resident_bytes() - after_warm_up < 4 << 20
        check_idle(llm)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    TinyModels.build(Qwen3Config(**TINY)).save_pretrained(folder)
    return folder


def test_cycles_take_no_memory(small: Path):
    cycle(small, 60)


@pytest.mark.slow
def test_many_cycles_take_no_memory(small: Path):
    cycle(small, 1000)


def test_threads_wait_or_are_refused(pairs: Any):
    """A thread that generates gets right answers, or is told that the engine is asleep."""
    pair: Pair = pairs("qwen3")
    with LLM(pair.old, **SETTINGS) as llm:
        before, stop = answers(llm), threading.Event()

        def ask() -> int:
            num_answers = 0
            while not stop.is_set():
                try:
                    assert answers(llm) == before
                    num_answers += 1
                except ValueError as error:
                    assert "asleep" in str(error)
            return num_answers

        with ThreadPoolExecutor(2) as pool:
            asking = [pool.submit(ask) for _ in range(2)]
            for _ in range(10):
                llm.sleep()
                llm.wake_up()
                assert answers(llm) == before
            stop.set()
            assert all(future.result() for future in asking)


def test_an_engine_in_arenas(pairs: Any, monkeypatch: pytest.MonkeyPatch):
    """As on a GPU, with a driver in Python. Weights and KV cache keep their addresses. In bf16,
    because fp32 weights on a CPU are packed."""
    library = fake_cuda.install(monkeypatch)
    monkeypatch.setattr(cuda_vmm, "CHUNK_BYTES", 64 * fake_cuda.GRANULARITY)
    for module in (startup, kv_layout):
        monkeypatch.setattr(module, "uses_arenas", lambda runner: True)
    for name in ("move_parameters", "empty_in_arena"):
        function = getattr(cuda_vmm, name)

        def call(*args: Any, function: Any = function, **kwargs: Any) -> Any:
            kwargs.pop("device", None)
            args = args[:1] if function is cuda_vmm.move_parameters else args
            return function(*args, **kwargs, device=fake_cuda.DEVICE)

        monkeypatch.setattr(startup if name == "move_parameters" else kv_layout, name, call)
    pair: Pair = pairs("gemma3")
    wanted = pair.wanted(dtype="bfloat16")
    with LLM(pair.old, dtype="bfloat16", **SETTINGS) as llm:
        runner = llm.model_runner
        tensors = [runner.kv_cache, *runner.model.parameters()]
        addresses, before = [tensor.data_ptr() for tensor in tensors], answers(llm)
        arenas = {cuda_vmm.arena_of(tensor) for tensor in tensors}
        assert len(arenas) == 2
        for level in (1, 2):
            llm.sleep(level)
            assert not library.mapped
            llm.wake_up(["weights"])
            if level == 2:
                llm.load_weights(pair.tensors.items())
            llm.wake_up(["kv_cache"])
            assert addresses == [tensor.data_ptr() for tensor in tensors]
            assert answers(llm) == (before if level == 1 else wanted)
        llm.sleep(level=1)
        library.left = 0
        with pytest.raises(RuntimeError, match="out of memory"):
            llm.wake_up()
        assert llm.is_sleeping() and not library.mapped
        library.left = 1 << 30
        assert llm.wake_up() and answers(llm) == wanted
        del runner, tensors, arenas
    assert not library.reserved


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 2])
def test_a_gpu_is_free_while_the_engine_is_asleep(level: int, pairs: Any):
    """CUDA graphs are not captured again, and read the same addresses."""
    pair: Pair = pairs("qwen3")
    settings = {**SETTINGS, "device": "cuda", "num_kvcache_blocks": 20_000}
    with LLM(pair.new, **settings) as fresh:
        wanted = answers(fresh)
    path = pair.new if level == 1 else pair.old
    with LLM(path, enable_sleep_mode=True, **settings) as llm:
        answers(llm)
        runner = llm.model_runner
        graphs, cache = runner.graphs, runner.kv_cache
        addresses = [cache.data_ptr(), *(p.data_ptr() for p in runner.model.parameters())]
        free, _ = torch.cuda.mem_get_info()
        llm.sleep(level)
        freed = torch.cuda.mem_get_info()[0] - free
        assert freed >= cache.nbytes
        assert torch.cuda.memory_reserved() <= 1 << 30
        llm.wake_up(["weights"])
        if level == 2:
            llm.load_weights((name, t.cuda()) for name, t in pair.tensors.items())
        llm.wake_up(["kv_cache"])
        assert runner.graphs is graphs and runner.kv_cache is cache
        assert addresses == [cache.data_ptr(), *(p.data_ptr() for p in runner.model.parameters())]
        assert answers(llm) == wanted
    assert torch.cuda.mem_get_info()[0] >= free


@pytest.mark.gpu
@pytest.mark.parametrize("is_asleep", [False, True])
def test_a_script_that_leaves_its_engine_open_ends_without_error(is_asleep: bool, pairs: Any):
    """PyTorch frees the tensors of an arena by calling Python, perhaps at the interpreter's end."""
    script = f"""
from nanovllm import LLM, SamplingParams
settings = {SETTINGS | {"device": "cuda", "num_kvcache_blocks": 2000}!r}
llm = LLM({str(pairs("qwen3").old)!r}, enable_sleep_mode=True, **settings)
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
cycle = [llm.model_runner.kv_cache]
cycle.append(cycle)
if {is_asleep}:
    llm.sleep()
print("done")
"""
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (result.returncode, result.stdout.splitlines()[-1:]) == (0, ["done"]), result.stderr
