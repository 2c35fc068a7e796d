"""The engine on a real GPU: whole-model accuracy, graphs, memory."""

import gc
import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.engine.batch import Batch, ScheduledSequence
from nanovllm.engine.cuda_graphs import GraphSize, decode_sizes, prefill_sizes
from nanovllm.engine.sequence import Sequence
from nanovllm.kernels.linear import small_cublas_workspace
from tests.test_parity import PROMPTS
from tests.tiny_models import BASE, CONFIGS, TinyModels

pytestmark = pytest.mark.gpu
# By the module that it needs: packages other than flash-attn 2 are below flash_attn too.
BACKENDS = {
    "flash_attn_4": "flash_attn.cute",
    "flash_attn": "flash_attn.flash_attn_interface",
    "triton": "triton",
}


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    pytest.importorskip(BACKENDS[request.param])
    return request.param


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """A Qwen3 with head_dim 64 in bf16, which both flash-attn serve too."""
    path = tmp_path_factory.mktemp("small") / "qwen3"
    changes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "vocab_size": 4096}
    config = CONFIGS["qwen3"][0](**{**BASE, **changes})
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
    seq = Sequence(prompt, params, llm.config.kvcache_block_size)
    (seq.sampling,) = llm.sampling_states.make(params, prompt)
    llm.scheduler.block_manager.allocate(seq)
    batch = Batch((ScheduledSequence(seq, 0, len(seq), True),), is_prefill=True)
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
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt + output["token_ids"]], device="cuda")
        with torch.inference_mode():
            logits = exact(ids).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
        assert (logits.amax(-1) - chosen).max() < 0.1 * logits.std()


def decode_batch(llm: LLM, num_seqs: int) -> Batch:
    """Prefills prompts, and gives the decode step that comes next."""
    for prompt in PROMPTS[:num_seqs]:
        llm.add_request(prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    llm.step()
    return llm.scheduler.schedule()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_graphs_replay_exactly_what_eager_computes(small_model, backend, dtype):
    """Bit for bit, at every captured size; and with padding rows, up to rounding."""
    if backend != "triton" and dtype == "float32":
        with pytest.raises(ValueError, match=backend):
            LLM(small_model, attention_backend=backend, dtype=dtype)
        return
    with LLM(small_model, attention_backend=backend, dtype=dtype, max_num_seqs=32) as llm:
        runner = llm.model_runner
        assert sorted(runner.graphs.graphs) == decode_sizes(32) + prefill_sizes(16384, 32, 10**6)
        for num_seqs in [1, 2, 3, 4, 8, 11, 16, 31, 32]:
            batch = decode_batch(llm, num_seqs)
            inputs = runner.prepare(batch, runner.graphs.size_for(batch))
            as_is = runner.prepare(batch, None)
            drawn = runner.last_tokens.clone()  # by the prefill; each run takes them as inputs
            with torch.inference_mode(), small_cublas_workspace():
                replayed = runner.graphs.replay(inputs).clone()
                runner.last_tokens.copy_(drawn)
                _, eager = runner.run_model(inputs.to(runner.device))
                runner.last_tokens.copy_(drawn)
                _, unpadded = runner.run_model(as_is.to(runner.device))
            assert torch.equal(replayed[:num_seqs], eager[:num_seqs])
            # Padding changes the products' shapes, so their rounding; bf16 is 8 times as coarse.
            tolerance = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.4}[dtype]
            assert (replayed[:num_seqs] - unpadded).abs().max() < tolerance * unpadded.std()
            llm.scheduler.reset()
            llm._requests.clear()
            llm._launched = None


def test_prefill_graphs_replay_exactly_what_eager_computes(small_model, backend):
    """Bit for bit; and with padding, and keys and values that are cached, up to rounding."""
    with LLM(small_model, attention_backend=backend, max_num_seqs=80) as llm:
        runner = llm.model_runner
        common = [i % 4000 for i in range(600)]
        llm.generate([common], SamplingParams(max_tokens=1), use_tqdm=False)
        for lens in [(1,), (9, 4), (130,), (20,) * 64, (700, 3, 500), (1900,), (64, 1000, 1500)]:
            prompts = [[(i * i + j) % 4001 for j in range(n)] for i, n in enumerate(lens, 7)]
            if len(lens) > 1:
                prompts[0] = common[:512] + prompts[0]
            for prompt in prompts:
                llm.add_request(prompt, SamplingParams(temperature=0, max_tokens=2))
            batch = llm.scheduler.schedule()
            assert batch.is_prefill and len(batch) == len(lens)
            inputs = runner.prepare(batch, runner.graphs.size_for(batch))
            plain = runner.prepare(batch, None)
            with torch.inference_mode(), small_cublas_workspace():
                replayed = runner.graphs.replay(inputs).clone()
                drawn = runner.last_tokens[: len(lens)].clone()
                _, eager = runner.run_model(inputs.to(runner.device))
                _, unpadded = runner.run_model(plain.to(runner.device))
            assert torch.equal(replayed[: len(lens)], eager[: len(lens)])
            assert torch.equal(drawn, replayed[: len(lens)].argmax(-1))
            assert (replayed[: len(lens)] - unpadded).abs().max() < 0.4 * unpadded.std()
            llm.scheduler.reset()
            llm._requests.clear()
            llm._launched = None
            llm.generate([common], SamplingParams(max_tokens=1), use_tqdm=False)


def test_graphs_and_eager_give_the_same_tokens(small_model):
    """Sequences end one after the other, so that every captured size is replayed, padded."""
    each = [SamplingParams(temperature=0, max_tokens=2 + i, ignore_eos=True) for i in range(32)]
    results = []
    for enforce_eager in (False, True):
        with LLM(small_model, dtype="float32", max_num_seqs=32, enforce_eager=enforce_eager) as llm:
            assert bool(llm.model_runner.graphs.graphs) != enforce_eager
            results.append([out["token_ids"] for out in llm.generate(PROMPTS, each, False)])
    assert results[0] == results[1]


def test_batches_over_the_largest_graph_run_eagerly(small_model):
    with LLM(small_model, max_num_seqs=8) as llm:
        llm.model_runner.graphs.graphs.pop(GraphSize(False, 8, 8))
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        outputs = llm.generate(PROMPTS[:8], params, use_tqdm=False)
        assert all(len(output["token_ids"]) == 8 for output in outputs)


@pytest.mark.parametrize("name", ["flash_attn_4", "flash_attn"])
def test_flash_attn_is_refused_at_start_for_a_block_size_it_lacks(small_model, name):
    pytest.importorskip(BACKENDS[name])
    with pytest.raises(ValueError, match="block size 48"):
        LLM(small_model, attention_backend=name, kvcache_block_size=48)
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


def test_a_cache_too_small_for_one_sequence_is_refused_with_the_figures(small_model):
    with pytest.raises(ValueError, match=r"max_model_len=2048 .* GiB"):
        LLM(small_model, gpu_memory_utilization=0.004)


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
    with LLM(tmp_path, load_format="dummy", **settings) as llm:
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
        llm.scheduler.check_invariants()
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
