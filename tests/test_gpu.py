"""The engine on a real GPU: whole-model accuracy, graphs, memory."""

import gc
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.engine import shared_prefixes
from nanovllm.engine.batch import Batch, ScheduledSequence
from nanovllm.engine.completion import Completion
from nanovllm.engine.cuda_graphs import (
    StepGraphs,
    borrowed,
    decode_sizes,
    prefill_sizes,
)
from nanovllm.engine.model_inputs import GraphSize, ModelInputs
from nanovllm.engine.model_runner import CapturedSteps
from nanovllm.engine.sequence import Sequence
from nanovllm.kernels import fallback
from nanovllm.kernels.attention import hopper_prefill, triton_backend
from nanovllm.kernels.gemm import qkv, swiglu
from nanovllm.kernels.gemm.cublas import small_cublas_workspace
from tests.checkpoints.test_fp8 import write_fine_grained
from tests.checkpoints.test_gguf import write_gguf
from tests.invariants import check_scheduler
from tests.test_parity import PROMPTS
from tests.tiny_models import BASE, CONFIGS, TinyModels
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[1]
# By the module that it needs.
BACKENDS = {
    "flash_attn": "flash_attn.flash_attn_interface",
    "triton": "triton",
}


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    pytest.importorskip(BACKENDS[request.param])
    return request.param


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """A Qwen3 with head_dim 64 in bf16, which flash-attn serves too."""
    return save_small_model(tmp_path_factory.mktemp("small") / "qwen3", head_dim=64)


def save_small_model(path: Path, head_dim: int) -> Path:
    changes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 4096}
    config = CONFIGS["qwen3"][0](**{**BASE, **changes, "head_dim": head_dim})
    model = TinyModels.build(config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" not in name:
                param.mul_(0.3)  # 0.09: logits of bf16 stay in its useful range
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def prefill_logits(llm: LLM, prompt: list[int]) -> torch.Tensor:
    """Logits after the prompt, through the engine's own prefill."""
    params = SamplingParams(temperature=0)
    seq = Sequence(prompt, params, llm.config.block_size)
    (state,) = llm.sampling_states.make(llm.sampling_states.prepare(params), prompt)
    seq.completion = Completion(state)
    llm.scheduler.block_manager.allocate(seq)
    batch = Batch.of((ScheduledSequence(seq, 0, len(seq), True),), is_prefill=True)
    with torch.inference_mode():
        inputs = llm.model_runner.prepare(batch, None).to(llm.model_runner.device)
        _, logits = llm.model_runner.run_model(inputs)
    llm.scheduler.block_manager.deallocate(seq)
    return logits[0].float()


def test_logits_are_as_close_to_fp32_as_those_of_transformers(small_model, backend):
    """In bf16, both against transformers in fp32 on the same weights."""
    exact = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32).cuda().eval()
    eager = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.bfloat16).cuda().eval()
    with LLM(small_model, attention_backend=backend, max_num_seqs=8) as llm:
        assert llm.model_runner.dtype is torch.bfloat16
        ours, theirs = [], []
        for prompt in PROMPTS:
            ids = torch.tensor([prompt], device="cuda")
            with torch.inference_mode():
                reference = exact(ids).logits[0, -1].float()
                theirs.append((eager(ids).logits[0, -1].float() - reference).square().mean())
            ours.append((prefill_logits(llm, prompt) - reference).square().mean())
    ours_rms, theirs_rms = (torch.stack(x).mean().sqrt().item() for x in (ours, theirs))
    print(f"rms error against fp32: {ours_rms:.4f}, transformers {theirs_rms:.4f}")
    assert ours_rms <= 1.5 * theirs_rms


def test_every_token_is_nearly_the_most_likely_in_fp32(small_model, backend):
    """Greedy in bf16 may differ from fp32 only where two tokens are within rounding."""
    exact = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32).cuda().eval()
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    with LLM(small_model, attention_backend=backend, max_num_seqs=32) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert_nearly_the_most_likely(exact, PROMPTS, outputs)


def assert_nearly_the_most_likely(exact: Any, prompts: list[list[int]], outputs: Any) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt + output["token_ids"]], device="cuda")
        with torch.inference_mode():
            logits = exact(ids).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
        assert (logits.amax(-1) - chosen).max() < 0.1 * logits.std()


NEEDS_HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)


@NEEDS_HOPPER
def test_large_prefills_use_the_kernels_for_hopper(tmp_path, monkeypatch):
    """A start that tries them out may also find that they do not work here."""
    path, used = save_small_model(tmp_path / "qwen3", head_dim=128), []
    exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).cuda().eval()

    def spy(module: Any, name: str) -> None:
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: used.append(module) or function(*args))

    spy(swiglu, "launch")
    spy(qkv, "_launch")
    spy(triton_backend, "hopper_prefill")
    prompts = [[i, *PROMPTS[3] * 8] for i in range(6)]  # 929 tokens each
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(path, attention_backend="triton", enforce_eager=True, max_num_seqs=64) as llm:
        used.clear()
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert {swiglu, qkv, triton_backend} == set(used) and not fallback._failed
    assert_nearly_the_most_likely(exact, prompts, outputs)


@NEEDS_HOPPER
def test_both_prefill_kernels_read_a_quantized_cache_alike(tmp_path, monkeypatch):
    """One reads copies, which are rounded to bf16."""
    monkeypatch.setattr(hopper_prefill, "MIN_TOKENS", 1)
    path, used = save_small_model(tmp_path / "qwen3", head_dim=128), []
    settings = {"attention_backend": "triton", "enforce_eager": True, "max_num_seqs": 8}
    with LLM(path, kv_cache_dtype="fp8", **settings) as llm:
        kernel = triton_backend.hopper_prefill
        monkeypatch.setattr(
            triton_backend, "hopper_prefill", lambda *args: used.append(args) or kernel(*args)
        )
        prompt = PROMPTS[3] * 8
        ours = prefill_logits(llm, prompt)
        assert len(used) == BASE["num_hidden_layers"] - 1 and not fallback._failed
        monkeypatch.setattr(triton_backend, "can_launch", lambda *_: False)
        expected = prefill_logits(llm, prompt)
    assert 0 < (ours - expected).abs().max() < 0.2 * expected.std()


def decode_batch(llm: LLM, num_seqs: int) -> Batch:
    """Prefills prompts, and gives the decode step that comes next."""
    for prompt in (PROMPTS * 2)[:num_seqs]:
        llm.add_request(prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    llm.step()
    return llm.scheduler.schedule()


def widened(inputs: ModelInputs) -> ModelInputs:
    """With block tables as wide as a graph's: flash-attn chooses its KV splits by that."""
    return replace(inputs, context=replace(inputs.context, max_seqlen_k=0))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_graphs_replay_exactly_what_eager_computes(small_model, backend, dtype):
    """Bit for bit, at every captured size; and with padding rows, up to rounding."""
    if backend != "triton" and dtype == "float32":
        with pytest.raises(ValueError, match=backend):
            LLM(small_model, attention_backend=backend, dtype=dtype)
        return
    with LLM(small_model, attention_backend=backend, dtype=dtype, max_num_seqs=32) as llm:
        runner = llm.model_runner
        shared = {size for size in runner.graphs.graphs if size.shares_prefixes}
        plain = sorted(runner.graphs.graphs.keys() - shared)
        most_tokens, _ = runner.backend.max_captured_prefill(False)
        assert plain == decode_sizes(32) + prefill_sizes(most_tokens, 32, 10**6)
        sizes = {size.num_seqs for size in shared}
        assert sizes == ({4, 8, 16, 32} if runner.backend.shares_prefixes else set())
        for num_seqs in [1, 2, 3, 4, 8, 11, 16, 31, 32]:
            batch = decode_batch(llm, num_seqs)
            inputs = runner.prepare(batch, runner.graphs.size_for(batch))
            as_is = runner.prepare(batch, None)
            drawn = runner.sampled_tokens.clone()  # by the prefill; each run takes them as inputs
            with torch.inference_mode(), small_cublas_workspace():
                replayed = runner.graphs.replay(inputs).clone()
                runner.sampled_tokens.copy_(drawn)
                _, eager = runner.run_model(widened(inputs.to(runner.device)))
                runner.sampled_tokens.copy_(drawn)
                _, unpadded = runner.run_model(as_is.to(runner.device))
            assert torch.equal(replayed[:num_seqs], eager[:num_seqs])
            # Padding changes the products' shapes, so their rounding; bf16 is 8 times as coarse.
            tolerance = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.4}[dtype]
            assert (replayed[:num_seqs] - unpadded).abs().max() < tolerance * unpadded.std()
            llm.scheduler.reset()
            llm.requests.clear()
            llm.loop.in_flight = None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_graphs_with_shared_prefixes_replay_exactly_what_eager_computes(
    small_model, dtype, monkeypatch
):
    """Bit for bit; and up to rounding what they compute without shared prefixes."""
    monkeypatch.setattr(shared_prefixes, "MIN_SAVED_BYTES", 1)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    settings = {"attention_backend": "triton", "dtype": dtype, "max_num_seqs": 32}
    with LLM(small_model, **settings) as llm:
        runner = llm.model_runner
        common = [i % 4000 for i in range(600)]
        for num_seqs in [4, 5, 16, 31, 32]:
            for i in range(num_seqs):
                llm.add_request(common + [i + 5] * (1 + 3 * i), params)
            llm.step()
            plain = llm.scheduler.schedule()
            assert not plain.is_prefill and len(plain) == num_seqs
            batch = runner.prefix_finder.add_prefixes(plain)
            assert len(batch.prefixes.groups) == 1 and len(batch.prefixes.members) == num_seqs
            size = runner.graphs.size_for(batch)
            assert size.shares_prefixes and size.num_seqs >= num_seqs
            inputs, as_is = runner.prepare(batch, size), runner.prepare(plain, None)
            drawn = runner.sampled_tokens.clone()
            with torch.inference_mode(), small_cublas_workspace():
                replayed = runner.graphs.replay(inputs).clone()
                runner.sampled_tokens.copy_(drawn)
                _, eager = runner.run_model(inputs.to(runner.device))
                runner.sampled_tokens.copy_(drawn)
                _, unshared = runner.run_model(as_is.to(runner.device))
            assert torch.equal(replayed[:num_seqs], eager[:num_seqs])
            tolerance = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.4}[dtype]
            assert (replayed[:num_seqs] - unshared).abs().max() < tolerance * unshared.std()
            llm.scheduler.reset()
            llm.requests.clear()
            llm.loop.in_flight = None


def test_prefill_graphs_replay_exactly_what_eager_computes(small_model, backend):
    """Bit for bit; and with padding, and keys and values that are cached, up to rounding."""
    check_prefill_graphs(small_model, backend)


def test_prefill_graphs_with_heads_of_128_replay_exactly_what_eager_computes(tmp_path):
    check_prefill_graphs(save_small_model(tmp_path / "qwen3", head_dim=128), "triton")


def check_prefill_graphs(path: Path, backend: str) -> None:
    with LLM(path, attention_backend=backend, max_num_seqs=150) as llm:
        runner = llm.model_runner
        common = [i % 4000 for i in range(600)]
        llm.generate([common], SamplingParams(max_tokens=1), use_tqdm=False)
        few = [(1,), (9, 4), (130,), (20,) * 64, (700, 3, 500), (1900,), (64, 1000, 1500)]
        # Triton's backend also has larger graphs. From 4,097 tokens on, Hopper has another kernel.
        many = [(2000, 1900, 1500), (70,) * 125, (1, 2, 3, 127, 128, 129, 1300, 2000, 1950)]
        many += [(160,) * 100, (1200, 2000, *[2040] * 6)]
        for lens in few + many if backend == "triton" else few:
            prompts = [[(i * i + j) % 4001 for j in range(n)] for i, n in enumerate(lens, 7)]
            if len(lens) > 1 and lens[0] < 1500:
                prompts[0] = common[:512] + prompts[0]
            for prompt in prompts:
                llm.add_request(prompt, SamplingParams(temperature=0, max_tokens=2))
            batch = llm.scheduler.schedule()
            assert batch.is_prefill and len(batch) == len(lens)
            size = runner.graphs.size_for(batch)
            assert size is not None
            inputs, plain = runner.prepare(batch, size), runner.prepare(batch, None)
            with torch.inference_mode(), small_cublas_workspace():
                replayed = runner.graphs.replay(inputs).clone()
                drawn = runner.sampled_tokens[: len(lens)].clone()
                _, eager = runner.run_model(inputs.to(runner.device))
                _, unpadded = runner.run_model(plain.to(runner.device))
            assert torch.equal(replayed[: len(lens)], eager[: len(lens)])
            assert torch.equal(drawn, replayed[: len(lens)].argmax(-1))
            assert (replayed[: len(lens)] - unpadded).abs().max() < 0.4 * unpadded.std()
            llm.scheduler.reset()
            llm.requests.clear()
            llm.loop.in_flight = None
            llm.generate([common], SamplingParams(max_tokens=1), use_tqdm=False)


def test_graphs_and_eager_give_the_same_tokens(small_model):
    """Sequences end one after the other, so that every captured size is replayed, padded."""
    each = [SamplingParams(temperature=0, max_tokens=2 + i, ignore_eos=True) for i in range(32)]
    results = []
    for enforce_eager in (False, True):
        with LLM(small_model, dtype="float32", max_num_seqs=32, enforce_eager=enforce_eager) as llm:
            assert (type(llm.model_runner.graphs) is CapturedSteps) == enforce_eager
            outputs = llm.generate((PROMPTS * 2)[:32], each, False)
            results.append([out["token_ids"] for out in outputs])
    assert results[0] == results[1]


def test_batches_over_the_largest_graph_run_eagerly(small_model):
    with LLM(small_model, max_num_seqs=8) as llm:
        llm.model_runner.graphs.graphs.pop(GraphSize(False, 8, 8))
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        outputs = llm.generate(PROMPTS[:8], params, use_tqdm=False)
        assert all(len(output["token_ids"]) == 8 for output in outputs)


def test_flash_attn_is_refused_at_start_for_a_block_size_it_lacks(small_model):
    pytest.importorskip(BACKENDS["flash_attn"])
    with pytest.raises(ValueError, match="block size 48"):
        LLM(small_model, attention_backend="flash_attn", kvcache_block_size=48)
    with LLM(small_model, kvcache_block_size=48, max_num_seqs=2) as llm:
        assert llm.model_runner.backend.name == "triton"


@pytest.mark.parametrize("utilization", [0.2, 0.5])
def test_memory_stays_within_the_budget(small_model, backend, utilization):
    """While the largest batch runs: a full token budget, then max_num_seqs decodes."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.mem_get_info()
    with LLM(
        small_model,
        attention_backend=backend,
        gpu_memory_utilization=utilization,
        max_num_seqs=256,
        max_num_batched_tokens=32768,
    ) as llm:
        prompts = [[i % 4000] * 1024 for i in range(256)]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True), False)
        assert len(outputs) == 256
        used = before[0] - torch.cuda.mem_get_info()[0]
        total = before[1]
        assert torch.cuda.max_memory_reserved() <= total * utilization
        assert used <= total * utilization
        assert used >= total * utilization * 0.85, "the budget is used"


@pytest.mark.parametrize("max_model_len", [None, 2048])
def test_a_cache_too_small_for_one_sequence_is_refused_with_the_figures(max_model_len, small_model):
    """If the user sets no length, start-up lowers it, and one block would be enough."""
    needs = "one block of the KV cache" if max_model_len is None else "max_model_len=2048"
    with pytest.raises(ValueError, match=rf"{needs} takes .* GiB"):
        LLM(small_model, gpu_memory_utilization=0.004, max_model_len=max_model_len)


def test_close_gives_all_memory_back(small_model, backend):
    params = SamplingParams(temperature=0, max_tokens=8)
    texts = []
    with LLM(small_model, attention_backend=backend, max_num_seqs=16) as llm:
        llm.generate(PROMPTS, params, False)  # libraries allocate their workspaces once
    gc.collect()
    torch.cuda.empty_cache()
    allocated, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    for _ in range(2):
        llm = LLM(small_model, attention_backend=backend, max_num_seqs=16)
        texts.append([out["token_ids"] for out in llm.generate(PROMPTS, params, False)])
        llm.close()
        assert torch.cuda.memory_allocated() <= allocated + (1 << 20)
        assert torch.cuda.mem_get_info()[0] >= free - (64 << 20)
    assert texts[0] == texts[1]


def test_deleting_the_last_reference_frees_the_memory(small_model):
    gc.collect()
    before = torch.cuda.memory_allocated()
    llm = LLM(small_model, max_num_seqs=4)
    assert torch.cuda.memory_allocated() > before + (1 << 30)
    del llm
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


def test_what_was_in_freed_blocks_does_not_matter(small_model, backend):
    """Guards 0 x NaN in a kernel that reads more than it needs."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(small_model, attention_backend=backend, max_num_seqs=32) as llm:
        expected = [out["token_ids"] for out in llm.generate(PROMPTS, params, False)]
        llm.reset_prefix_cache()
        llm.model_runner.kv_cache.fill_(torch.nan)
        assert [out["token_ids"] for out in llm.generate(PROMPTS, params, False)] == expected


def test_a_long_job_survives_nan_and_a_full_gpu(caplog, tmp_path):
    """50,000 prompts on Qwen3-0.6B's shapes: one in a hundred has logits of NaN, and in the middle
    somebody takes all of the GPU's memory for a while."""
    rng, poisoned_id = random.Random(3), 151_000
    shapes = Path(__file__).parents[1] / "benchmarks" / "shapes"
    shape = json.loads((shapes / "qwen3-0.6b" / "config.json").read_text())
    shape["tie_word_embeddings"] = False
    (tmp_path / "config.json").write_text(json.dumps(shape))
    settings = {"max_model_len": 256, "gpu_memory_utilization": 0.5}
    # Eagerly, because the memory of captured steps is allocated at start-up.
    with LLM(tmp_path, load_format="dummy", enforce_eager=True, **settings) as llm:
        model = llm.model_runner.model
        model.model.embed_tokens.weight.data[poisoned_id] = torch.nan
        model.lm_head.weight.data[poisoned_id] = 0  # at this temperature it is never drawn
        starts = [[rng.randrange(1000) for _ in range(300)] for _ in range(10)]
        bad, lengths = set(), {}
        for i in range(50_000):
            prompt = [*rng.choice(starts)[: rng.randint(4, 40)], i]
            if i % 100 == 7:
                prompt.insert(rng.randrange(len(prompt)), poisoned_id)
            sampling = SamplingParams(
                temperature=0.1, seed=i, max_tokens=1 + i % 16, ignore_eos=True
            )
            request_id = llm.add_request(prompt, sampling)
            lengths[request_id] = 1 + i % 16
            if i % 100 == 7:
                bad.add(request_id)
        hogs, num_steps, done = [], 0, set()
        while not llm.is_finished():
            for output in llm.step():
                (completion,) = output.outputs
                assert output.request_id not in done
                done.add(output.request_id)
                if output.request_id in bad:
                    assert completion.finish_reason == "error" and "NaN" in completion.error
                else:
                    assert completion.finish_reason == "length"
                    assert len(completion.token_ids) == lengths[output.request_id]
            num_steps += 1
            if num_steps == 40:
                torch.cuda.empty_cache()
                free = torch.cuda.mem_get_info()[0]
                # PyTorch takes 20 MiB at once for what is over 1 MiB, else 2.
                hogs.append(torch.empty(free - (16 << 20), dtype=torch.uint8, device="cuda"))
            elif num_steps == 120:
                hogs.clear()
        assert done == lengths.keys()
        check_scheduler(llm.scheduler)
        assert not llm.scheduler.block_manager.used_block_ids
    assert "out of memory in a step of" in caplog.text
    print(f"{num_steps} steps, {caplog.text.count('out of memory in a step')} out of memory")


def test_a_step_that_never_fits_is_an_error_and_the_engine_goes_on(small_model):
    params = SamplingParams(temperature=0, max_tokens=8)
    # In fp32, since prompts that find their beginning cached are rounded otherwise; and eagerly,
    # since a captured step has its memory already.
    settings = {"dtype": "float32", "gpu_memory_utilization": 0.3, "max_num_seqs": 16}
    settings["enforce_eager"] = True
    with LLM(small_model, **settings) as llm:
        expected = [out["token_ids"] for out in llm.generate(PROMPTS[:8], params, False)]
        torch.cuda.empty_cache()
        hogs = []
        for size in (1 << 30, 1 << 24, 1 << 20, 1 << 16, 512):  # to the last bytes
            try:
                while True:
                    hogs.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                pass
        with pytest.raises(RuntimeError, match=r"out of memory in the smallest step .*GiB"):
            llm.generate(PROMPTS[:8], params, use_tqdm=False)
        hogs.clear()
        torch.cuda.empty_cache()
        assert [out["token_ids"] for out in llm.generate(PROMPTS[:8], params, False)] == expected


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
FEW = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def tokens_of(llm: LLM, params: SamplingParams = FEW) -> list[list[int]]:
    outputs = llm.generate(PROMPTS[:12], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def current_gpu():
    """The first one, before the test and after it."""
    torch.cuda.set_device(0)
    yield
    torch.cuda.set_device(0)


@two_gpus
def test_the_programs_current_gpu_does_not_matter(small_model, current_gpu):
    """After torch.cuda.set_device in the program, steps launched kernels on another GPU than the
    weights are on. Graphs, eager steps and sampling with penalties, amid a run too."""
    penalised = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, presence_penalty=0.5)
    for enforce_eager in (False, True):
        settings = {"max_num_seqs": 16, "dtype": "float32", "enforce_eager": enforce_eager}
        with LLM(small_model, **settings) as llm:
            assert llm.model_runner.device == torch.device("cuda", 0)
            expected = [tokens_of(llm, params) for params in (FEW, penalised)]
            torch.cuda.set_device(1)
            assert [tokens_of(llm, params) for params in (FEW, penalised)] == expected
            for prompt in PROMPTS[:12]:
                llm.add_request(prompt, FEW)
            done, index = {}, 0
            while not llm.is_finished():
                torch.cuda.set_device(index := 1 - index)
                done |= {out.request_id: out.outputs[0].token_ids for out in llm.step()}
                assert torch.cuda.current_device() == index
            assert [list(done[i]) for i in sorted(done, key=int)] == expected[0]
            torch.cuda.set_device(1)
            llm.close()
            assert torch.cuda.current_device() == 1
            torch.cuda.set_device(0)


@two_gpus
def test_engines_on_two_gpus_side_by_side(small_model, current_gpu):
    """The second one's graphs were captured on a stream of the first one's GPU."""
    with LLM(small_model, device="cuda:0", max_num_seqs=16, dtype="float32") as first:
        expected = tokens_of(first)
        before = torch.cuda.memory_allocated(0)
        with LLM(small_model, device="cuda:1", max_num_seqs=16, dtype="float32") as second:
            assert torch.cuda.memory_allocated(0) <= before + (1 << 20)
            assert torch.cuda.memory_allocated(1) > 1 << 30
            assert second.model_runner.device == torch.device("cuda", 1)
            assert second.model_runner.graphs.graphs
            assert {param.device.index for param in second.model_runner.model.parameters()} == {1}
            for _ in range(2):
                assert tokens_of(second) == expected
                assert tokens_of(first) == expected
            assert torch.cuda.current_device() == 0


def test_a_gpu_that_is_not_there_is_refused(small_model):
    with pytest.raises(ValueError, match="PyTorch finds only"):
        LLM(small_model, device="cuda:64")


def test_another_thread_uses_the_gpu_during_captures(small_model):
    """Captures were in the global mode: another thread's allocation broke them, and failed."""
    stop, errors, num_rounds = threading.Event(), [], 0

    def use_gpu() -> None:
        nonlocal num_rounds
        try:
            stream = torch.cuda.Stream()
            while not stop.is_set():
                with torch.cuda.stream(stream):
                    # In sizes that the allocator asks the driver for, since captures empty it.
                    tensors = [torch.ones(3 << 20, device="cuda") for _ in range(8)]
                    assert sum(tensor[-1] for tensor in tensors).item() == 8
                num_rounds += 1
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=use_gpu)
    thread.start()
    try:
        with LLM(small_model, max_num_seqs=64, num_kvcache_blocks=200) as llm:
            assert llm.model_runner.graphs.graphs
            assert all(len(token_ids) == 12 for token_ids in tokens_of(llm))
    finally:
        stop.set()
        thread.join()
    assert not errors and num_rounds > 10


def test_six_hundred_sequences_replay_a_graph(small_model):
    """Decodes of more than 512 ran eagerly."""
    prompts = [[i % 4000, i % 7, 5] for i in range(600)]
    results = []
    for enforce_eager in (False, True):
        settings = {"max_num_seqs": 600, "dtype": "float32", "enforce_eager": enforce_eager}
        with LLM(small_model, num_kvcache_blocks=1300, **settings) as llm:
            graphs, replayed = llm.model_runner.graphs, []
            replay = graphs.replay

            def noting(inputs, replay=replay, replayed=replayed):
                logits = replay(inputs)
                replayed.append((inputs.graph_size, logits is not None))
                return logits

            graphs.replay = noting
            outputs = llm.generate(prompts, FEW, use_tqdm=False)
            results.append([output.outputs[0].token_ids for output in outputs])
            graph_size = (GraphSize(False, 600, 600), True)
            assert replayed.count(graph_size) == (0 if enforce_eager else 11)
    assert results[0] == results[1]


def test_contexts_of_many_blocks_in_graphs(small_model):
    """Guards block tables that lie wider than they travel; in prefills that read the cache, too."""
    shared = [i % 4000 for i in range(200)]
    lengths = [1, 15, 16, 17, 100, 255, 700, 1500]
    prompts = [shared + [(i + j) % 4001 for j in range(n)] for i, n in enumerate(lengths)]
    prompts += [[(i * j) % 4001 for j in range(n)] for i, n in enumerate(lengths, 3)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    results = []
    for enforce_eager in (False, True):
        settings = {"kvcache_block_size": 16, "dtype": "float32", "enforce_eager": enforce_eager}
        with LLM(small_model, max_num_seqs=16, **settings) as llm:
            llm.generate([shared], SamplingParams(max_tokens=1), use_tqdm=False)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            results.append([output.outputs[0].token_ids for output in outputs])
    assert results[0] == results[1]


def test_logits_of_graphs_share_memory(small_model):
    """Each of them kept its own."""
    with LLM(small_model, max_num_seqs=256, num_kvcache_blocks=300) as llm:
        runner = llm.model_runner
        runner.graphs = StepGraphs(runner)
        before = torch.cuda.memory_allocated()
        with torch.inference_mode(), small_cublas_workspace():
            runner.graphs.capture(decode_sizes(256))
        kept = torch.cuda.memory_allocated() - before
        inputs = runner.graphs.buffer.nbytes
        logits = sum(graph.logits.nbytes for graph in runner.graphs.graphs.values())
        assert kept - inputs < logits / 4
        assert all(len(token_ids) == 12 for token_ids in tokens_of(llm))


def test_borrowed_memory_is_not_kept():
    x = torch.randn(300, 700, device="cuda").to(torch.bfloat16)
    before = torch.cuda.memory_allocated()
    y = borrowed(x)
    assert y.data_ptr() == x.data_ptr() and y.device == x.device
    assert torch.equal(y, x)
    del x
    assert torch.cuda.memory_allocated() <= before - y.nbytes


@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_gguf_files_run_in_bf16_unless_another_dtype_is_asked_for(dtype, tiny_models, tmp_path):
    """They ran in fp16, in which models that were trained in bf16 overflow."""
    path = write_gguf(tmp_path / "m.gguf", tiny_models.load("llama"), "llama", Quant.Q8_0)
    settings = {"max_num_seqs": 2, "num_kvcache_blocks": 20, "enforce_eager": True}
    with LLM(path, dtype=dtype, **settings) as llm:
        expected = torch.bfloat16 if dtype == "auto" else torch.float16
        assert llm.model_runner.dtype is expected
        assert {param.dtype for param in llm.model_runner.model.parameters()} == {expected}
        (output,) = llm.generate([[1, 2, 3]], FEW, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 12


def does_not_fit(monkeypatch) -> dict:
    return {"num_kvcache_blocks": 10**6}


def fails_to_capture(monkeypatch) -> dict:
    capture = StepGraphs.capture

    def failing(self: StepGraphs, sizes: list) -> None:
        capture(self, sizes[-3:])
        raise RuntimeError("a capture fails")

    monkeypatch.setattr(StepGraphs, "capture", failing)
    return {"num_kvcache_blocks": 2000}


@pytest.mark.parametrize("fault", [does_not_fit, fails_to_capture])
def test_a_failed_start_frees_the_gpu(fault, small_model, monkeypatch):
    """As long as the exception lived, so did the weights: a start after it found less memory."""
    with LLM(small_model, max_num_seqs=4, num_kvcache_blocks=20) as llm:
        expected = tokens_of(llm)  # libraries allocate their workspaces once
    gc.collect()
    torch.cuda.empty_cache()
    allocated, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    with monkeypatch.context() as patch, pytest.raises((ValueError, RuntimeError)) as caught:
        LLM(small_model, max_num_seqs=4, **fault(patch))
    assert torch.cuda.memory_allocated() <= allocated + (1 << 20)
    assert torch.cuda.mem_get_info()[0] >= free - (64 << 20)
    with LLM(small_model, max_num_seqs=4, num_kvcache_blocks=20) as llm:
        assert tokens_of(llm) == expected
    assert caught.value.__traceback__ is not None


def run_script(script: str, *arguments: Any, **env: str) -> tuple[Any, str]:
    """Runs a script in a process of its own. Returns the JSON in its last line, and its stderr."""
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    result = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1]), result.stderr


TWO_RANKS = """
import json, logging, sys
logging.basicConfig(level=logging.INFO)
from nanovllm import LLM, SamplingParams
from tests.test_parity import PROMPTS
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
settings = {"dtype": "float32", "max_num_seqs": 16, "num_kvcache_blocks": 100}
with LLM(sys.argv[1], tensor_parallel_size=2, **settings) as llm:
    num_one_shots = len(llm.model_runner.tp.one_shots)
    outputs = llm.generate(PROMPTS[:12], params, use_tqdm=False)
print(json.dumps([num_one_shots, [list(out.outputs[0].token_ids) for out in outputs]]))
"""


@two_gpus
@pytest.mark.parametrize("expandable", [False, True])
def test_two_ranks_with_and_without_memory_that_they_can_share(expandable, small_model):
    """With expandable segments the start failed; there NCCL does all of the all-reduce."""
    with LLM(small_model, dtype="float32", max_num_seqs=16, num_kvcache_blocks=100) as llm:
        expected = tokens_of(llm)
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if expandable else {}
    (num_one_shots, token_ids), stderr = run_script(TWO_RANKS, small_model, **env)
    assert token_ids == expected
    if expandable:
        assert num_one_shots == 0 and "all-reduce uses NCCL only" in stderr
    else:
        print(f"{num_one_shots} one-shot all-reduces")  # 2 over NVLink


FP8_RANKS = """
import json, sys
from nanovllm import LLM, SamplingParams
from nanovllm.kernels.comm.all_reduce import OneShotAllReduce
from tests.test_parity import PROMPTS
norm, formats = OneShotAllReduce.norm, set()
def noted(self, x, weight, eps, residual, out, scales, group):
    formats.add("bf16" if scales is None else "rows" if group is None else "groups")
    return norm(self, x, weight, eps, residual, out, scales, group)
OneShotAllReduce.norm = noted
params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
settings = {"quantization": "fp8", "max_num_seqs": 16, "num_kvcache_blocks": 100}
with LLM(sys.argv[1], tensor_parallel_size=int(sys.argv[2]), **settings) as llm:
    outputs = [out.outputs[0] for out in llm.generate(PROMPTS[:12], params, use_tqdm=False)]
logprobs = [[row[token].logprob for token, row in zip(o.token_ids, o.logprobs)] for o in outputs]
print(json.dumps([sorted(formats), [list(out.token_ids) for out in outputs], logprobs]))
"""


@two_gpus
@pytest.mark.parametrize("scales", ["rows", "groups"])
def test_two_ranks_with_fp8_weights_are_as_exact_as_one(scales, tmp_path):
    """The log-probabilities of generated tokens are compared with those of the model in fp32. The
    norm after an all-reduce is part of its kernel, and quantises."""
    source = path = save_small_model(tmp_path / "bf16", head_dim=128)
    if scales == "groups":
        path = write_fine_grained(source, tmp_path / "fp8", weight_block_size=(128, 128))
    exact = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).cuda().eval()
    errors = []
    for num_ranks in (1, 2):
        (formats, completions, logprobs), _ = run_script(FP8_RANKS, path, num_ranks)
        assert (scales in formats) == (num_ranks == 2)
        squares = []
        for prompt, token_ids, found in zip(PROMPTS[:12], completions, logprobs, strict=True):
            ids = torch.tensor([prompt + token_ids], device="cuda")
            with torch.inference_mode():
                rows = exact(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            expected = rows.gather(1, ids[0, len(prompt) :, None])[:, 0]
            squares.append((torch.tensor(found, device="cuda") - expected).square())
        errors.append(torch.cat(squares).mean().sqrt().item())
    print(f"errors of {scales}: {errors}")
    assert errors[1] <= 1.25 * errors[0] < 0.5


FORKS = """
import os, sys
from nanovllm import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
with LLM(sys.argv[1], max_num_seqs=4, num_kvcache_blocks=20) as llm:
    expected = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids
    stream = llm.generate_stream([[1, 2, 3]], params)
    next(stream)
    child = os.fork()
    if child == 0:
        try:
            next(stream)
        except ValueError as error:
            sys.exit(0 if "forked child" in str(error) else 3)
        sys.exit(4)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status
    *_, last = stream
    assert last.outputs[0].token_ids == expected
"""


def test_a_forked_child_leaves_the_gpu_alone(small_model):
    """With a step in flight, and through all of the interpreter's end."""
    result = subprocess.run(
        [sys.executable, "-c", FORKS, str(small_model)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-4000:]


def test_tokens_without_an_embedding_harm_no_other_prompt(small_model, tmp_path):
    """On a GPU a row that is not there would end all of the process's use of it."""
    folder = tmp_path / "model"
    shutil.copytree(small_model, folder)
    save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<extra{i}>" for i in range(4096)])
    tokenizer.save_pretrained(folder)
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(folder, max_model_len=64) as llm:
        alone = llm.generate(["abc", "xyz"], params, use_tqdm=False)
        prompts = ["abc", "a <extra4095> b", "xyz"]
        outputs = llm.generate(prompts, params, use_tqdm=False, on_error="return")
        assert "the model's ids are 0 to 4095" in outputs[1].outputs[0].error
        assert [outputs[i]["token_ids"] for i in (0, 2)] == [out["token_ids"] for out in alone]
        again = llm.generate(["abc", "xyz"], params, use_tqdm=False)
        assert [out["token_ids"] for out in again] == [out["token_ids"] for out in alone]


PROCESSED = """
import json, sys
from nanovllm import LLM, SamplingParams
from tests.test_parity import PROMPTS
params = SamplingParams(temperature=0.8, top_k=4, seed=3, max_tokens=12, logprobs=3)
settings = {"dtype": "float32", "max_num_seqs": 16, "num_kvcache_blocks": 100}
settings["logprobs_mode"] = "processed_logprobs"
with LLM(sys.argv[1], tensor_parallel_size=int(sys.argv[2]), **settings) as llm:
    outputs = llm.generate(PROMPTS[:12], params, use_tqdm=False)
print(json.dumps([
    [[token, {k: v.logprob for k, v in row.items()}] for token, row in zip(o.token_ids, o.logprobs)]
    for o in (out.outputs[0] for out in outputs)
]))
"""


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=two_gpus)])
def test_processed_logprobs_are_of_what_is_sampled_from(num_ranks, small_model):
    """After temperature and top_k, as transformers' logits give them; never the raw ones."""
    exact = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32).cuda().eval()
    completions, _ = run_script(PROCESSED, small_model, num_ranks)
    for prompt, completion in zip(PROMPTS[:12], completions, strict=True):
        ids = torch.tensor([prompt + [token for token, _ in completion]], device="cuda")
        with torch.inference_mode():
            logits = exact(ids).logits[0, len(prompt) - 1 : -1].double() / 0.8
        for row, (token, logprobs) in zip(logits, completion, strict=True):
            kept = row.topk(4)
            expected = dict(
                zip(kept.indices.tolist(), kept.values.log_softmax(-1).tolist(), strict=True)
            )
            assert str(token) in logprobs
            for other, logprob in logprobs.items():
                assert logprob == pytest.approx(expected[int(other)], abs=2e-3)
