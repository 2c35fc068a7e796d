"""Records vLLM's arguments in ``nanovllm/vllm_arguments.json``.

Run it in an environment with the vLLM version of ``VERSION``; nanovllm need not be installed there:

    python tests/vllm_answers/record_arguments.py

Names, defaults and command-line flags are read from vLLM. How each argument is treated here is the
classification below, written by hand; the script fails if an argument has none. The file:

    {"vllm": "0.32.0",
     "LLM": {name: entry}, "generate": {...}, "chat": {...}, "SamplingParams": {...}}

``LLM`` holds the parameters of ``LLM`` and the fields of ``EngineArgs``. An entry has

    class: "honoured", "hint" (any value is accepted and changes no result) or "neutral" (accepted
        only at values that ask for nothing, refused by name at others).
    as: honoured under this other name of ours.
    default: vLLM's default. Objects, sets and enumerations are recorded as null, {}, lists and
        names: see ``as_json``.
    values: of an honoured argument, vLLM's values that have another name here, or that are a choice
        between equals here. Values that are not listed are passed on as they are.
    neutral: the values, besides the default and None, that ask for nothing.
    why: of a neutral argument, what is not served.
    former: true for an argument of earlier versions that scripts still pass. vLLM itself no longer
        accepts it.
    cli: the flags of ``EngineArgs.add_cli_args``, with "type" ("int", "float", "str", "bool" or
        "json", which may also be a plain string), "choices" and "nargs" as argparse has them. Flags
        of a bool take no value, and those that begin with "--no-" mean False.

For ``LLM``'s arguments None always means the default. ``SamplingParams`` has a meaning of None for
each field, which its own checks know.
"""

import argparse
import dataclasses
import enum
import inspect
import json
from pathlib import Path
from typing import Any

VERSION = "0.32.0"
TABLE = Path(__file__).parents[2] / "nanovllm" / "vllm_arguments.json"

HONOURED = {
    "LLM": """
        model tokenizer dtype max_model_len seed tensor_parallel_size gpu_memory_utilization
        enforce_eager max_num_seqs max_num_batched_tokens enable_prefix_caching load_format
        block_size max_logprobs skip_tokenizer_init logprobs_mode num_gpu_blocks_override
        attention_backend chat_template generation_config override_generation_config hf_token
        revision tokenizer_revision enable_sleep_mode kv_cache_dtype quantization
    """,
    "generate": "prompts sampling_params use_tqdm",
    "chat": """
        messages sampling_params use_tqdm chat_template add_generation_prompt
        continue_final_message tools chat_template_kwargs
    """,
    "SamplingParams": """
        n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed
        stop stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs detokenize
        skip_special_tokens spaces_between_special_tokens include_stop_str_in_output bad_words
        allowed_token_ids logit_bias structured_outputs
    """,
}
OUR_NAMES = {"block_size": "kvcache_block_size", "num_gpu_blocks_override": "num_kvcache_blocks"}
OUR_VALUES = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8_per_token_head": "fp8"},
    # Ways of reading the same safetensors or GGUF files.
    "load_format": dict.fromkeys(
        ["hf", "safetensors", "gguf", "fastsafetensors", "instanttensor", "runai_streamer"], "auto"
    ),
}

# Arguments that move work or memory, or that only report. None of them changes a result.
HINTS = {
    "LLM": """
        served_model_name trust_remote_code code_revision download_dir
        safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
        model_loader_extra_config use_tqdm_on_load pt_load_map_location max_parallel_loading_workers
        allow_deprecated_quantization

        compilation_config cudagraph_capture_sizes max_cudagraph_capture_size optimization_level
        performance_mode ir_op_priority kernel_config enable_flashinfer_autotune moe_backend
        linear_backend sparse_indexer_topk_backend all2all_backend gdn_prefill_backend
        kda_prefill_backend kda_decode_backend disable_cascade_attn jit_monitor_mode
        jit_monitor_verbose

        master_addr master_port distributed_timeout_seconds cpu_distributed_timeout_seconds
        numa_bind numa_bind_nodes numa_bind_cpus dcp_comm_backend dcp_q_replicate
        dcp_kv_cache_interleave_size cp_kv_cache_interleave_size data_parallel_address
        data_parallel_rpc_port data_parallel_backend dp_sync_interval
        disable_nccl_for_dp_synchronization enable_hc_sp enable_expert_parallel
        enable_batch_sharded_sampling enable_ep_weight_filter elastic_ep_max_dp_size enable_dbo
        ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold eplb_config enable_eplb
        expert_placement_strategy disable_custom_all_reduce enable_shm_tensor_arena
        ray_workers_use_nsight enable_nccl_comm_suspend _api_process_count _api_process_rank
        enable_fault_tolerance fault_tolerance_config shutdown_timeout

        kv_cache_memory_bytes prefix_caching_hash_algo prefix_cache_retention_interval
        prefix_match_unit swa_bounded_replay disable_hybrid_kv_cache_manager
        kv_sharing_fast_prefill kv_offloading_size kv_offloading_backend
        offload_backend cpu_offload_gb cpu_offload_params offload_group_size offload_num_in_group
        offload_prefetch_step offload_params enable_cumem_allocator sleep_mode_offload_cudagraph
        sleep_preserve_parameter_names watermark

        enable_chunked_prefill max_num_scheduled_tokens long_prefill_token_threshold
        long_prefill_token_threshold_adaptive max_num_active_seqs scheduler_reserve_full_isl
        prefill_schedule_interval scheduling_policy async_scheduling stream_interval
        disable_chunked_mm_input

        disable_log_stats aggregate_engine_logging show_hidden_metrics_for_version
        otlp_traces_endpoint collect_detailed_traces per_request_spec_decode_metrics
        kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets cudagraph_metrics
        enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details
        enable_mm_processor_stats profiler_config logging_config log_level log_config_file
        fail_on_environ_validation

        allowed_local_media_path allowed_media_domains language_model_only limit_mm_per_prompt
        interleave_mm_strings media_io_kwargs mm_processor_kwargs mm_processor_cache_gb
        mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb
        mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
        mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin renderer_num_workers
        skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device
        mm_ipc_gpu_memory_gb mm_device_do_normalize

        max_loras max_lora_rank fully_sharded_loras max_cpu_loras lora_dtype lora_target_modules
        enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format
        enable_moe_shared_loras max_lora_cls_labels

        mamba_config mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode
        enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm mamba_backend
        mamba_ssu_algorithm enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds
    """,
    "generate": "priority mm_processor_kwargs",
    "chat": "priority mm_processor_kwargs",
    "SamplingParams": """
        extra_args skip_clone skip_reading_prefix_cache stream_interval output_text_buffer_length
    """,
}

LORA = "LoRA adapters: merge them into the weights"
DATA_PARALLEL = "data parallelism within one LLM: start one process per replica"
PIPELINE = "pipeline parallelism: use tensor_parallel_size"
NODES = "more than one node"
CONTEXT_PARALLEL = "context parallelism"
SPECULATION = "speculative decoding"
QUANTIZATION = "quantising while loading: pass a checkpoint that is quantised"
OVERRIDES = "another config than the checkpoint's: edit its config.json"
POOLING = "pooling and embedding models"
TRANSFER = "moving KV caches between engines"
PLUGIN = "classes of vLLM's engine"
TOKENIZER = "other tokenizer implementations than transformers'"
EXPERTS = "returning which experts each token took"
MEDIA = "images, audio and video"
TRACE = "forcing the sampled tokens"
SCORES = "log-probabilities of chosen tokens: use logprobs=-1"
GUIDED = "options of the grammar engine"

STRUCTURED_BACKENDS = ["auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer"]

# What is not served, and the further values that ask for nothing.
NEUTRAL: dict[str, dict[str, tuple[str, list[Any]]]] = {
    "LLM": {
        "runner": (POOLING, ["generate"]),
        "convert": (POOLING, ["none"]),
        "pooler_config": (POOLING, []),
        "model_weights": ("weights in object storage", []),
        "hf_config_path": (OVERRIDES, []),
        "hf_overrides": (OVERRIDES, []),
        "model_class_overrides": ("another model class than the config's architecture", []),
        "config_format": ("configs that are not transformers'", ["hf"]),
        "model_impl": ("models as transformers implements them", ["vllm"]),
        "tokenizer_mode": (TOKENIZER, ["hf", "slow"]),
        "ignore_patterns": ("leaving files of a checkpoint out", [[], "original/**/*"]),
        "enable_prompt_embeds": ("prompts as embeddings", []),
        "quantization_config": (QUANTIZATION, []),
        "kv_cache_dtype_skip_layers": ("layers whose keys and values are not quantised", []),
        "disable_sliding_window": ("choosing between a sliding window and a shorter model", []),
        "enable_lora": (LORA, []),
        "default_mm_loras": (LORA, []),
        "distributed_executor_backend": (
            "classes of vLLM's engine",
            ["mp", "uni", "ray", "external_launcher"],
        ),
        "worker_cls": (PLUGIN, []),
        "worker_extension_cls": (PLUGIN, []),
        "scheduler_cls": (PLUGIN, []),
        "logits_processors": (PLUGIN, [[]]),
        "io_processor_plugin": (PLUGIN, []),
        "additional_config": ("settings of vLLM's platform plugins", []),
        "pipeline_parallel_size": (PIPELINE, []),
        "prefill_context_parallel_size": (CONTEXT_PARALLEL, []),
        "decode_context_parallel_size": (CONTEXT_PARALLEL, []),
        "nnodes": (NODES, []),
        "node_rank": (NODES, []),
        "device_ids": ("a list of devices: pass device='cuda:1'", []),
        "data_parallel_size": (DATA_PARALLEL, []),
        "data_parallel_rank": (DATA_PARALLEL, [0]),
        "data_parallel_start_rank": (DATA_PARALLEL, [0]),
        "data_parallel_size_local": (DATA_PARALLEL, [1]),
        "data_parallel_hybrid_lb": (DATA_PARALLEL, []),
        "data_parallel_external_lb": (DATA_PARALLEL, []),
        "data_parallel_multi_port_external_lb": (DATA_PARALLEL, []),
        "enable_elastic_ep": ("changing the number of ranks while running", []),
        "max_num_queued_reqs": ("refusing requests when many wait", []),
        "max_num_queued_tokens": ("refusing requests when many wait", []),
        "use_fp64_gumbel": ("sampling noise in float64", []),
        "enable_trace_replay": (TRACE, []),
        "return_sampling_mask": ("returning the tokens that could be sampled", []),
        "enable_return_routed_experts": (EXPERTS, []),
        "aux_output_config": (EXPERTS, []),
        "enable_mm_embeds": (MEDIA, []),
        "mm_encoder_only": (MEDIA, []),
        "structured_outputs_config": (
            GUIDED,
            [{"backend": name} for name in STRUCTURED_BACKENDS],
        ),
        "reasoning_parser": ("splitting reasoning from answers", []),
        "reasoning_parser_plugin": ("splitting reasoning from answers", [""]),
        "reasoning_config": ("splitting reasoning from answers", []),
        "speculative_config": (SPECULATION, []),
        "spec_method": (SPECULATION, []),
        "spec_model": (SPECULATION, []),
        "spec_tokens": (SPECULATION, [0]),
        "watermark_config": ("watermarks in the text", []),
        "diffusion_config": ("diffusion models", []),
        "engram_config": ("Engram memory layers", []),
        "attention_config": ("other settings of the attention than its backend", []),
        "kv_transfer_config": (TRANSFER, []),
        "kv_events_config": ("publishing events of the KV cache", []),
        "ec_transfer_config": (MEDIA, []),
        "ec_manager_config": (MEDIA, []),
        "weight_transfer_config": ("receiving weights from a trainer", []),
        "tokens_only": ("vLLM's servers of token ids", []),
    },
    "generate": {
        "lora_request": (LORA, [[]]),
        "tokenization_kwargs": (
            "options of the tokenizer: pass token ids",
            [{}, {"add_special_tokens": True}],
        ),
    },
    "chat": {
        "lora_request": (LORA, [[]]),
        "tokenization_kwargs": (
            "options of the tokenizer: pass token ids to generate()",
            [{}, {"add_special_tokens": False}],
        ),
        "chat_template_content_format": ("message contents as lists in templates", ["string"]),
    },
    "SamplingParams": {
        "output_kind": ("results of only the new tokens", ["FINAL_ONLY"]),
        "watermarking": ("watermarks in the text", [False]),
        "flat_logprobs": ("log-probabilities in vLLM's flat form", []),
        "logprob_token_ids": (SCORES, []),
        "prompt_logprob_token_ids": (SCORES, []),
        "prompt_logprob_start": (SCORES, []),
        "thinking_token_budget": ("limiting the reasoning", [-1]),
        "repetition_detection": ("ending completions that repeat themselves", []),
        "routed_experts_prompt_start": (EXPERTS, []),
        "trace_decode_token_ids": (TRACE, []),
    },
}

# Arguments of earlier versions of vLLM that scripts still pass: their last default, and the class.
FORMER_HONOURED: dict[str, dict[str, Any]] = {
    "LLM": {"device": "auto"},
    "SamplingParams": {"guided_decoding": None},
}
FORMER_HINTS: dict[str, dict[str, Any]] = {
    "LLM": {
        "swap_space": 4,
        "use_v2_block_manager": True,
        "max_seq_len_to_capture": 8192,
        "max_context_len_to_capture": None,
        "cuda_graph_sizes": [],
        "full_cuda_graph": False,
        "max_num_partial_prefills": 1,
        "max_long_partial_prefills": 1,
        "scheduler_delay_factor": 0.0,
        "num_scheduler_steps": 1,
        "multi_step_stream_outputs": True,
        "num_lookahead_slots": 0,
        "preemption_mode": None,
        "disable_async_output_proc": False,
        "worker_use_ray": False,
        "disable_log_requests": False,
        "guided_decoding_backend": "auto",
        "logits_processor_pattern": None,
        "tokenizer_pool_size": 0,
        "tokenizer_pool_type": "ray",
        "tokenizer_pool_extra_config": None,
        "disable_mm_preprocessor_cache": False,
        "enable_multimodal_encoder_data_parallel": False,
        "lora_extra_vocab_size": 256,
        "max_prompt_adapters": 1,
        "max_prompt_adapter_token": 0,
        "num_redundant_experts": 0,
        "eplb_window_size": 1000,
        "eplb_step_interval": 3000,
        "eplb_log_balancedness": False,
    },
}
FORMER_NEUTRAL: dict[str, dict[str, tuple[Any, str, list[Any]]]] = {
    "LLM": {
        "task": ("auto", POOLING, ["generate"]),
        "rope_scaling": (None, OVERRIDES, [{}]),
        "rope_theta": (None, OVERRIDES, []),
        "guided_decoding_disable_fallback": (False, GUIDED, [True]),
        "guided_decoding_disable_any_whitespace": (False, GUIDED, []),
        "guided_decoding_disable_additional_properties": (False, GUIDED, []),
        "enable_reasoning": (False, "splitting reasoning from answers", []),
        "enable_prompt_adapter": (False, "prompt adapters", []),
        "long_lora_scaling_factors": (None, LORA, []),
        "qlora_adapter_name_or_path": (None, LORA, []),
        "quantization_param_path": (None, QUANTIZATION, []),
        "calculate_kv_scales": (False, "calibrated scales: each token has its own scales", []),
        "override_pooler_config": (None, POOLING, []),
        "override_neuron_config": (None, OVERRIDES, [{}]),
        "override_attention_dtype": (None, OVERRIDES, []),
        "speculative_model": (None, SPECULATION, []),
        "num_speculative_tokens": (None, SPECULATION, [0]),
    },
    "generate": {
        "prompt_token_ids": (None, "token ids beside the prompts: pass them as prompts", []),
        "prompt_adapter_request": (None, "prompt adapters", []),
        "guided_options_request": (None, "this form: use SamplingParams.structured_outputs", []),
    },
    "SamplingParams": {
        "best_of": (None, "choosing the best of several completions: use n", [1]),
        "use_beam_search": (False, "beam search", []),
        "length_penalty": (1.0, "beam search", []),
        "early_stopping": (False, "beam search", []),
        "logits_processors": (None, "functions that change the logits", [[]]),
        "truncate_prompt_tokens": (None, "truncating prompts", []),
    },
}


def as_json(value: Any) -> Any:
    """A default as JSON: enumerations by name, sets as lists, other objects as null."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (set, frozenset, list, tuple)):
        return [as_json(v) for v in value]
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    return {} if value == {} else None


def cli_type(action: argparse.Action) -> str:
    """What a flag's value is; argparse has functions with many names for it."""
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return "bool"
    parse = action.type or str
    for text in ('{"a": 1}', "{}", "7", "7.5", "seven"):
        try:
            kind = type(parse(text)).__name__
        except (ValueError, TypeError, argparse.ArgumentTypeError):
            continue
        if text != "seven" and kind == "str":
            continue  # any text is a string
        return kind if kind in ("int", "float", "str") else "json"
    return "json"


def read_cli() -> dict[str, dict[str, Any]]:
    """The flags of ``EngineArgs.add_cli_args`` by the argument that they set."""
    from vllm.engine.arg_utils import EngineArgs

    parser = argparse.ArgumentParser(add_help=False)
    EngineArgs.add_cli_args(parser)
    clis = {}
    for action in parser._actions:
        cli = {"flags": list(action.option_strings), "type": cli_type(action)}
        if action.choices is not None:
            cli["choices"] = [as_json(choice) for choice in action.choices]
        if action.nargs not in (None, 0):
            cli["nargs"] = action.nargs
        clis[action.dest] = cli
    return clis


def read_defaults() -> dict[str, dict[str, Any]]:
    """Names and defaults of all arguments, by table."""
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs

    def of_function(function: Any) -> dict[str, Any]:
        parameters = inspect.signature(function).parameters.values()
        return {
            p.name: None if p.default is p.empty else as_json(p.default)
            for p in parameters
            if p.name != "self" and p.kind is not p.VAR_KEYWORD
        }

    engine = {}
    for field in dataclasses.fields(EngineArgs):
        made = field.default_factory is not dataclasses.MISSING
        engine[field.name] = as_json(field.default_factory() if made else field.default)
    # Those that LLM names itself have the defaults of its signature; it needs a model.
    signature = of_function(LLM.__init__)
    null = {name for name, value in signature.items() if value is None and name in engine}
    sampling = SamplingParams()
    return {
        "LLM": engine | {k: v for k, v in signature.items() if k not in null} | {"model": None},
        "generate": of_function(LLM.generate),
        "chat": of_function(LLM.chat),
        "SamplingParams": {
            name: as_json(getattr(sampling, name))
            for name in SamplingParams.__struct_fields__
            if not name.startswith("_")
        },
    }


def classify(table: str, name: str) -> dict[str, Any]:
    """How an argument is treated here. Raises KeyError for one without a class."""
    if name in HONOURED[table].split():
        entry: dict[str, Any] = {"class": "honoured"}
        if table == "LLM" and name in OUR_NAMES:
            entry["as"] = OUR_NAMES[name]
        return entry
    if name in HINTS[table].split():
        return {"class": "hint"}
    why, values = NEUTRAL[table][name]
    return {"class": "neutral", "neutral": values, "why": why}


def attention_backends() -> list[str]:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return list(AttentionBackendEnum.__members__)


def record() -> dict[str, Any]:
    """The whole table."""
    clis = read_cli()
    tables: dict[str, Any] = {"vllm": VERSION}
    for table, defaults in read_defaults().items():
        entries = {}
        for name, default in defaults.items():
            entry = classify(table, name) | {"default": default}
            if table == "LLM" and name in OUR_VALUES:
                entry["values"] = OUR_VALUES[name]
            if table == "LLM" and name in clis:
                entry["cli"] = clis[name]
            # A default that is an object can be given as an empty dict.
            if entry["class"] == "neutral" and name.endswith(("_config", "_overrides")):
                entry["neutral"] = [{}, *entry["neutral"]]
            entries[name] = entry
        former = {
            name: {"class": "honoured", "default": default}
            for name, default in FORMER_HONOURED.get(table, {}).items()
        }
        for name, default in FORMER_HINTS.get(table, {}).items():
            former[name] = {"class": "hint", "default": default}
        for name, (default, why, values) in FORMER_NEUTRAL.get(table, {}).items():
            former[name] = {"class": "neutral", "neutral": values, "why": why, "default": default}
        entries |= {name: entry | {"former": True} for name, entry in former.items()}
        tables[table] = entries
    # Backends differ in speed only: ours is chosen here.
    names = attention_backends()
    tables["LLM"]["attention_backend"]["values"] = dict.fromkeys(names, "auto")
    tables["LLM"]["attention_config"]["neutral"] += [{"backend": name} for name in names]
    return tables


def write(tables: dict[str, Any]) -> None:
    """One argument a line, so that a change of one is a line in the diff."""
    parts = []
    for key, value in tables.items():
        if isinstance(value, dict):
            lines = (f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items())
            parts.append(f"{json.dumps(key)}: {{\n" + ",\n".join(lines) + "\n}")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    TABLE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    import vllm

    if vllm.__version__.split("+")[0] != VERSION:
        raise SystemExit(f"this is vLLM {vllm.__version__}, not {VERSION}")
    write(record())
