"""What surrounds generate: tokenizer, default parameters, the engine's loop, other modules."""

from vllm import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=3)


def tokenizer_encodes(llm):
    return llm.get_tokenizer().encode("The capital of France is")


def tokenizer_decodes(llm):
    return llm.get_tokenizer().decode([504, 3575, 282, 4649, 314])


def tokenizer_special_tokens(llm):
    tokenizer = llm.get_tokenizer()
    return [tokenizer.eos_token_id, tokenizer.eos_token, tokenizer.pad_token_id]


def tokenizer_of_the_engine(llm):
    return llm.llm_engine.get_tokenizer().encode("Hello")


def default_params(llm):
    p = llm.get_default_sampling_params()
    return [p.temperature, p.top_k, p.top_p, p.repetition_penalty, p.max_tokens]


def default_params_are_new_each_time(llm):
    p = llm.get_default_sampling_params()
    p.max_tokens, p.temperature = 3, 0.0
    q = llm.get_default_sampling_params()
    return [p is q, q.max_tokens, q.temperature]


def default_params_type(llm):
    return isinstance(llm.get_default_sampling_params(), SamplingParams)


def model_length(llm):
    return llm.llm_engine.model_config.max_model_len


def model_length_of_the_config(llm):
    return llm.llm_engine.vllm_config.model_config.max_model_len


def model_config_of_llm(llm):
    return llm.model_config.max_model_len


def vocabulary_size(llm):
    return llm.llm_engine.model_config.get_vocab_size()


def dtype_of_the_model(llm):
    return str(llm.llm_engine.model_config.dtype)


def hf_config(llm):
    config = llm.llm_engine.model_config.hf_config
    return [config.model_type, config.num_hidden_layers, config.vocab_size]


def ranks(llm):
    return llm.llm_engine.vllm_config.parallel_config.tensor_parallel_size


def most_sequences(llm):
    return isinstance(llm.llm_engine.vllm_config.scheduler_config.max_num_seqs, int)


def nothing_to_do(llm):
    engine = llm.llm_engine
    return [engine.has_unfinished_requests(), engine.get_num_unfinished_requests()]


def loop_over_steps(llm):
    engine, texts = llm.llm_engine, {}
    prompts = {"a": "The capital of France is", "b": "One, two,"}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, SamplingParams(temperature=0, max_tokens=3))
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                texts[output.request_id] = output.outputs[0].text
    return texts


def requests_are_counted(llm):
    engine = llm.llm_engine
    engine.add_request("a", "One, two,", GREEDY)
    counts = [engine.get_num_unfinished_requests(), engine.has_unfinished_requests()]
    while engine.has_unfinished_requests():
        engine.step()
    return [*counts, engine.get_num_unfinished_requests()]


def request_of_token_ids(llm):
    engine, out = llm.llm_engine, []
    prompt = {"prompt_token_ids": [504, 3575, 282, 4649, 314]}
    engine.add_request("ids", prompt, GREEDY)
    while engine.has_unfinished_requests():
        out += [o for o in engine.step() if o.finished]
    return [out[0].request_id, out[0].outputs[0].text]


def abort_a_request(llm):
    engine = llm.llm_engine
    engine.add_request("a", "One, two,", GREEDY)
    engine.abort_request(["a"])
    while engine.has_unfinished_requests():
        engine.step()
    return engine.get_num_unfinished_requests()


def reset_prefix_cache(llm):
    return llm.reset_prefix_cache()


def generate_after_reset(llm):
    llm.reset_prefix_cache()
    return llm.generate("The capital of France is", GREEDY)[0].outputs[0].text


def version():
    import vllm

    return vllm.__version__


def names_of_the_package():
    import vllm

    names = ["LLM", "SamplingParams", "TextPrompt", "TokensPrompt", "RequestOutput"]
    names += ["CompletionOutput", "EngineArgs", "LLMEngine", "PromptType"]
    return [name for name in names if not hasattr(vllm, name)]


def names_of_the_modules():
    import importlib

    names = {
        "vllm.sampling_params": ["SamplingParams", "StructuredOutputsParams", "RequestOutputKind"],
        "vllm.outputs": ["RequestOutput", "CompletionOutput"],
        "vllm.inputs": ["TextPrompt", "TokensPrompt"],
        "vllm.entrypoints.llm": ["LLM"],
        "vllm.logprobs": ["Logprob"],
        "vllm.lora.request": ["LoRARequest"],
        "vllm.engine.arg_utils": ["EngineArgs"],
    }
    return [
        f"{module}.{name}"
        for module, members in names.items()
        for name in members
        if not hasattr(importlib.import_module(module), name)
    ]


def engine_args_of_a_script():
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model="m", dtype="float32", max_model_len=128, seed=1)
    return [args.model, args.dtype, args.max_model_len, args.seed, args.tensor_parallel_size]


def engine_args_of_a_command_line():
    import argparse

    from vllm.engine.arg_utils import EngineArgs

    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    line = ["--model", "m", "--dtype", "half", "--max-model-len", "128", "--enforce-eager"]
    args = EngineArgs.from_cli_args(parser.parse_args(line))
    return [args.model, args.dtype, args.max_model_len, args.enforce_eager, args.tokenizer]


def command_line_into_vars():
    import argparse

    from vllm.engine.arg_utils import EngineArgs

    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.set_defaults(model="m")
    args = vars(parser.parse_args(["--tensor-parallel-size", "1", "--no-enable-prefix-caching"]))
    names = ["model", "tensor_parallel_size", "enable_prefix_caching", "trust_remote_code"]
    return [args[name] for name in names]


def lora_request_attributes():
    from vllm.lora.request import LoRARequest

    request = LoRARequest("adapter", 1, "/path")
    return [request.lora_name, request.lora_int_id, request.lora_path]


def lora_request_refused(llm):
    from vllm.lora.request import LoRARequest

    request = LoRARequest("adapter", 1, "/path/that/does/not/exist")
    return llm.generate("One", GREEDY, lora_request=request)[0].outputs[0].text


def beam_search(llm):
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=2, max_tokens=3)
    out = llm.beam_search([{"prompt": "The capital of France is"}], params)
    return out[0].sequences[0].text


def score_refused(llm):
    return len(llm.score("One", "Two"))


def embed_refused(llm):
    return len(llm.embed("One"))


def world_size(llm):
    return llm.get_world_size()


def facts_of_the_model_config(llm):
    config = llm.llm_engine.model_config
    return [config.max_logprobs, config.seed, config.model.endswith("smollm2-fp32")]


def facts_of_the_cache_config(llm):
    config = llm.llm_engine.vllm_config.cache_config
    return [config.block_size, config.enable_prefix_caching]


def intermediate_outputs(llm):
    engine, lengths = llm.llm_engine, []
    engine.add_request("a", "One, two,", SamplingParams(temperature=0, max_tokens=3))
    while engine.has_unfinished_requests():
        lengths += [len(o.outputs[0].token_ids) for o in engine.step()]
    return [lengths[-1], lengths == sorted(lengths)]


def intermediate_outputs_when_only_the_last_is_asked_for(llm):
    from vllm.sampling_params import RequestOutputKind

    engine, flags = llm.llm_engine, []
    params = SamplingParams(temperature=0, max_tokens=3, output_kind=RequestOutputKind.FINAL_ONLY)
    engine.add_request("a", "One, two,", params)
    while engine.has_unfinished_requests():
        flags += [o.finished for o in engine.step()]
    return flags


def number_of_intermediate_outputs(llm):
    engine, count = llm.llm_engine, 0
    engine.add_request("a", "One, two,", SamplingParams(temperature=0, max_tokens=4))
    while engine.has_unfinished_requests():
        count += len(engine.step())
    return count


def same_request_id_twice(llm):
    engine = llm.llm_engine
    engine.add_request("a", "One, two,", GREEDY)
    try:
        engine.add_request("a", "One, two,", GREEDY)
    finally:
        while engine.has_unfinished_requests():
            engine.step()


def names_for_cleaning_up():
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
    )

    functions = [cleanup_dist_env_and_memory, destroy_model_parallel]
    return [callable(f) for f in [*functions, destroy_distributed_environment]]


def names_of_tools():
    import importlib

    names = {
        "vllm.utils.argparse_utils": ["FlexibleArgumentParser"],
        "vllm.tokenizers": ["get_tokenizer", "TokenizerLike"],
        "vllm.platforms": ["current_platform"],
        "vllm.sampling_params": ["BeamSearchParams"],
        "vllm.pooling_params": ["PoolingParams"],
        "vllm.v1.engine.llm_engine": ["LLMEngine"],
        "vllm.engine.llm_engine": ["LLMEngine"],
    }
    return [
        f"{module}.{name}"
        for module, members in names.items()
        for name in members
        if not hasattr(importlib.import_module(module), name)
    ]


def version_of_the_distribution():
    import importlib.util

    return importlib.util.find_spec("vllm") is not None
