"""``LLM(...)`` as scripts write it. The answer is whether the model starts."""

import argparse
import os

import numpy as np
import torch
from vllm import LLM, EngineArgs, SamplingParams


def quickstart(tiny):
    return LLM(model=tiny)


def by_position(tiny):
    return LLM(tiny)


def with_dtype_half(tiny):
    return LLM(model=tiny, dtype="half")


def with_dtype_float(tiny):
    return LLM(tiny, dtype="float", enforce_eager=True)


def with_torch_dtype(tiny):
    return LLM(tiny, dtype=torch.bfloat16)


def for_a_notebook(tiny):
    return LLM(model=tiny, trust_remote_code=True, max_model_len=2048, gpu_memory_utilization=0.9)


def of_tensor_parallel_scripts(tiny):
    size = int(os.environ.get("WORLD_SIZE", "1"))
    return LLM(model=tiny, tensor_parallel_size=size, trust_remote_code=True, dtype="bfloat16")


def of_a_throughput_benchmark(tiny):
    return LLM(
        model=tiny,
        tokenizer=tiny,
        quantization=None,
        tensor_parallel_size=1,
        seed=0,
        trust_remote_code=False,
        dtype="auto",
        max_model_len=None,
        gpu_memory_utilization=0.9,
        enforce_eager=False,
        kv_cache_dtype="auto",
        enable_prefix_caching=False,
        download_dir=None,
        enable_chunked_prefill=True,
        max_num_batched_tokens=4096,
        distributed_executor_backend=None,
        load_format="auto",
        disable_log_stats=True,
    )


def of_an_evaluation_harness(tiny):
    args = {
        "model": tiny,
        "gpu_memory_utilization": 0.9,
        "revision": None,
        "dtype": "auto",
        "tokenizer": tiny,
        "tokenizer_mode": "auto",
        "tokenizer_revision": None,
        "trust_remote_code": False,
        "tensor_parallel_size": 1,
        "max_model_len": 2048,
        "max_num_seqs": None,
        "quantization": None,
        "seed": 1234,
        "enable_lora": False,
        "max_lora_rank": 16,
    }
    return LLM(**args)


def of_a_code_benchmark(tiny):
    kwargs = {"tensor_parallel_size": 1, "dtype": "bfloat16", "trust_remote_code": False}
    return LLM(model=tiny, max_model_len=1024, enable_prefix_caching=False, **kwargs)


def of_a_trainer_beside_the_model(tiny):
    return LLM(
        model=tiny,
        tensor_parallel_size=1,
        gpu_memory_utilization=0.3,
        max_num_seqs=32,
        max_model_len=1024,
        seed=0,
        max_num_batched_tokens=4096,
        enable_sleep_mode=False,
        model_impl="vllm",
        logprobs_mode="processed_logprobs",
        distributed_executor_backend="mp",
    )


def of_a_rollout_worker(tiny):
    return LLM(
        tiny,
        dtype="bfloat16",
        enforce_eager=True,
        load_format="dummy",
        skip_tokenizer_init=False,
        disable_custom_all_reduce=True,
        disable_log_stats=True,
        enable_chunked_prefill=False,
        enable_prefix_caching=True,
        max_model_len=1024,
        max_num_batched_tokens=8192,
        trust_remote_code=True,
        seed=1,
    )


def of_a_data_pipeline(tiny):
    kwargs = {"generation_config": None, "structured_outputs_config": None, "hf_token": None}
    return LLM(
        tiny,
        dtype="auto",
        trust_remote_code=False,
        quantization=None,
        revision=None,
        tokenizer=None,
        tokenizer_mode="auto",
        tokenizer_revision=None,
        skip_tokenizer_init=False,
        chat_template=None,
        seed=0,
        **{name: value for name, value in kwargs.items() if value is not None},
    )


def of_a_chain(tiny):
    return LLM(
        model=tiny,
        tensor_parallel_size=1,
        trust_remote_code=True,
        dtype="auto",
        download_dir=None,
        **{"max_model_len": 512},
    )


def from_vars_of_engine_args(tiny):
    engine_args = EngineArgs(model=tiny, max_model_len=512, enforce_eager=True)
    return LLM(**vars(engine_args))


def from_engine_args(tiny):
    return LLM.from_engine_args(EngineArgs(model=tiny, max_model_len=512))


def from_a_command_line(tiny):
    parser = argparse.ArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.add_argument("--max-tokens", type=int)
    line = ["--model", tiny, "--max-model-len", "512", "--dtype", "half", "--seed", "3"]
    args = vars(parser.parse_args(line))
    args.pop("max_tokens")
    return LLM(**args)


def from_an_empty_command_line(tiny):
    parser = argparse.ArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model=tiny)
    return LLM(**vars(parser.parse_args([])))


def with_a_numpy_seed(tiny):
    return LLM(tiny, seed=np.random.default_rng(0).integers(100))


def with_a_seed_of_none(tiny):
    return LLM(tiny, seed=None)


def with_a_numpy_length(tiny):
    return LLM(tiny, max_model_len=np.int64(512))


def with_download_dir(tiny):
    return LLM(model=tiny, download_dir="/tmp/models", disable_log_stats=False)


def with_a_slow_tokenizer(tiny):
    return LLM(model=tiny, tokenizer_mode="slow")


def with_block_size(tiny):
    return LLM(model=tiny, block_size=32, max_num_seqs=64)


def with_prefix_caching(tiny):
    return LLM(model=tiny, enable_prefix_caching=True, gpu_memory_utilization=0.4)


def with_chunked_prefill(tiny):
    return LLM(model=tiny, enable_chunked_prefill=True, max_num_batched_tokens=2048)


def with_max_logprobs(tiny):
    return LLM(model=tiny, max_logprobs=50, logprobs_mode="raw_logprobs")


def with_raw_logits(tiny):
    return LLM(model=tiny, logprobs_mode="raw_logits")


def without_tokenizer(tiny):
    return LLM(model=tiny, skip_tokenizer_init=True)


def with_runner_generate(tiny):
    return LLM(model=tiny, runner="generate", convert="auto")


def with_other_load_formats(tiny):
    return LLM(model=tiny, load_format="safetensors")


def with_empty_overrides(tiny):
    return LLM(model=tiny, hf_overrides={}, override_generation_config={}, compilation_config={})


def with_compilation_level(tiny):
    return LLM(model=tiny, compilation_config=0, enforce_eager=True)


def with_limits_of_images(tiny):
    return LLM(model=tiny, limit_mm_per_prompt={"image": 1}, mm_processor_kwargs=None)


def with_grammar_backend(tiny):
    return LLM(model=tiny, structured_outputs_config={"backend": "guidance"})


def with_generation_config_of_vllm(tiny):
    return LLM(model=tiny, generation_config="vllm")


def with_main_revision(tiny):
    return LLM(model=tiny, revision="main", tokenizer_revision=None, hf_token=None)


def with_async_scheduling(tiny):
    return LLM(model=tiny, async_scheduling=False, scheduling_policy="fcfs")


def with_speculation_of_none(tiny):
    return LLM(model=tiny, speculative_config=None, pipeline_parallel_size=1, data_parallel_size=1)


def with_served_name(tiny):
    return LLM(model=tiny, served_model_name="tiny", max_num_seqs=1)


def with_offloading_of_nothing(tiny):
    return LLM(model=tiny, cpu_offload_gb=0, kv_cache_dtype="auto")


def with_lora(tiny):
    return LLM(model=tiny, enable_lora=True, max_loras=1, max_lora_rank=8)


def of_earlier_versions(tiny):
    return LLM(model=tiny, swap_space=4, max_seq_len_to_capture=8192, task="generate")


def with_a_misspelt_argument(tiny):
    return LLM(model=tiny, max_model_length=512)


def with_a_second_position(tiny):
    return LLM(tiny, tiny)


def with_too_long_a_model(tiny):
    return LLM(model=tiny, max_model_len=100_000)


def with_too_much_memory(tiny):
    return LLM(model=tiny, gpu_memory_utilization=1.5)


def with_no_such_dtype(tiny):
    return LLM(model=tiny, dtype="int7")


def with_no_such_model():
    return LLM(model="/no/such/folder")


def with_no_ranks(tiny):
    return LLM(model=tiny, tensor_parallel_size=0)


def with_no_such_quantization(tiny):
    return LLM(model=tiny, quantization="no-such-method")


def without_model():
    return LLM()


def then_generates(tiny):
    llm = LLM(model=tiny, dtype="float32", max_model_len=64, max_num_seqs=4, enforce_eager=True)
    params = SamplingParams(temperature=0, max_tokens=4)
    out = llm.generate([{"prompt_token_ids": [504, 3575, 282]}], params)
    return list(out[0].outputs[0].token_ids)


def without_tokenizer_then_generates(tiny):
    llm = LLM(model=tiny, dtype="float32", max_model_len=64, skip_tokenizer_init=True)
    params = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
    out = llm.generate([{"prompt_token_ids": [504, 3575, 282]}], params)[0]
    return [out.prompt, out.outputs[0].text, list(out.outputs[0].token_ids)]


def with_another_tokenizer_then_encodes(tiny):
    return len(LLM(model=tiny, tokenizer=tiny, max_model_len=64).get_tokenizer().encode("Hello"))


def with_vllm_defaults_then_asked(tiny):
    llm = LLM(model=tiny, generation_config="vllm", max_model_len=64)
    params = llm.get_default_sampling_params()
    return [params.temperature, params.top_p, params.max_tokens]


def with_overridden_defaults_then_asked(tiny):
    overrides = {"temperature": 0.25, "max_new_tokens": 5}
    llm = LLM(model=tiny, override_generation_config=overrides, max_model_len=64)
    params = llm.get_default_sampling_params()
    return [params.temperature, params.max_tokens]


def without_length_then_asked(tiny):
    return LLM(model=tiny).llm_engine.model_config.max_model_len


def with_chat_template_then_chats(tiny):
    llm = LLM(model=tiny, chat_template="{{ messages[0].content }}!", max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=1)
    return llm.chat([{"role": "user", "content": "Hello"}], params)[0].prompt


def as_an_engine_that_steps(tiny):
    from vllm import LLMEngine

    args = EngineArgs(model=tiny, dtype="float32", max_model_len=64, enforce_eager=True)
    engine, out = LLMEngine.from_engine_args(args), []
    params = SamplingParams(temperature=0, max_tokens=4)
    engine.add_request("0", {"prompt_token_ids": [504, 3575, 282]}, params)
    while engine.has_unfinished_requests():
        out += [o for o in engine.step() if o.finished]
    return [out[0].request_id, list(out[0].outputs[0].token_ids)]


def with_dummy_weights(tiny):
    return LLM(model=tiny, load_format="dummy", max_model_len=64)


def with_length_of_auto(tiny):
    return LLM(model=tiny, max_model_len=-1)


def with_another_config(tiny):
    return LLM(model=tiny, hf_overrides={"rope_theta": 20000.0}, max_model_len=64)


def of_a_chat_benchmark(tiny):
    return LLM(
        model=tiny,
        tensor_parallel_size=torch.cuda.device_count() or 1,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        enable_prefix_caching=True,
        enforce_eager=True,
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
