"""From a checkpoint to a ModelRunner that can step: device, ranks, model, weights, KV cache."""

import torch

from nanovllm.checkpoints.checkpoint import Checkpoint
from nanovllm.checkpoints.weights import fill_with_dummy_weights, load_model
from nanovllm.config import Config
from nanovllm.engine.model_runner import ModelRunner, NoGraphs, on_device
from nanovllm.kernels.attention.backend import select_attention_backend
from nanovllm.kernels.attention.block_tables import BlockTables
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.sampler import Sampler
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.utils.device import select_device, select_dtype
from nanovllm.utils.distributed import use_tp_group
from nanovllm.utils.math import cdiv, heads_per_rank
from nanovllm.utils.timer import Timer


def start_ranks(config: Config, checkpoint: Checkpoint, max_model_len: int) -> ModelRunner:
    """Rank 0's runner, with workers behind it if there are several ranks.

    Raises:
        ValueError: the device or the attention backend is not there, or the KV cache does not fit.
        WorkerError: a worker could not start.
        Exception: any other, of loading and capturing. Of all of them, no worker is left, and the
            memory that start-up had taken is free again, whoever keeps the exception.
    """
    device = select_device(config.device, 0, config.tensor_parallel_size)
    runner_class: type[ModelRunner] = ModelRunner
    if config.tensor_parallel_size > 1:
        from nanovllm.engine.tensor_parallel import MainRunner

        runner_class = MainRunner
    runner = runner_class(config, checkpoint.config, max_model_len, device)
    try:
        start(runner, checkpoint)
    except BaseException as error:
        runner.abandon(error)
        raise
    return runner


@on_device
def start(runner: ModelRunner, checkpoint: Checkpoint) -> None:
    """Every rank: makes a runner ready to step."""
    config, model_config, device = runner.config, runner.model_config, runner.device
    timed = Timer(runner.startup_seconds, device)
    on_gpu = device.type == "cuda"
    runner.dtype = select_dtype(config.dtype, device, model_config.dtype)
    bytes_before = torch.cuda.memory_allocated(device) if on_gpu else 0
    timed("device")
    size = config.tensor_parallel_size
    runner.backend = select_attention_backend(
        config.attention_backend,
        num_heads=model_config.num_attention_heads // size,
        num_kv_heads=heads_per_rank(model_config.num_key_value_heads, size),
        head_dim=model_config.head_dim,
        block_size=config.kvcache_block_size,
        dtype=runner.dtype,
        device=device,
    )
    timed("attention backend")
    runner.join_ranks()
    timed("ranks")
    num_blocks = config.num_kvcache_blocks
    if num_blocks == -1:
        from nanovllm.engine.kv_cache import most_blocks

        num_blocks = most_blocks(runner)
    limit_model_len(runner, num_blocks)  # before the rotary embedding's cache is as long
    runner.model = build_model(runner)
    runner.sampler = Sampler(runner.model.lm_head)
    runner.sampled_tokens = torch.zeros(config.max_step_seqs, dtype=torch.int64, device=device)
    runner.graphs = NoGraphs()
    timed("model without weights")
    load_weights(runner, checkpoint)
    runner.barrier()
    timed("weights")
    if on_gpu:
        from nanovllm.engine.warmup import compile_kernels

        compile_kernels(runner)  # for packed weights: not while they are loaded
    timed("kernels")
    if on_gpu or config.num_kvcache_blocks == -1:
        from nanovllm.engine.kv_cache import measure_kv_cache

        num_blocks = measure_kv_cache(runner, bytes_before, timed)
    num_blocks = runner.tp.min(num_blocks, device)
    limit_model_len(runner, num_blocks)
    allocate_kv_cache(runner, num_blocks)
    timed("KV cache")
    if on_gpu:
        from nanovllm.engine.cuda_graphs import capture_cudagraph

        capture_cudagraph(runner)
    runner.barrier()
    timed("CUDA graphs")


def build_model(runner: ModelRunner) -> DecoderForCausalLM:
    """The model on this rank's device in its dtype, without weights."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(runner.dtype)
    try:
        with torch.device(runner.device), use_tp_group(runner.tp):
            model = DecoderForCausalLM(runner.model_config, runner.max_model_len).eval()
    finally:
        torch.set_default_dtype(default_dtype)
    for layer in _attention_layers(model):
        layer.backend = runner.backend
    return model


@torch.inference_mode()
def load_weights(runner: ModelRunner, checkpoint: Checkpoint) -> None:
    if runner.config.load_format == "dummy":
        fill_with_dummy_weights(runner.model, runner.config.seed)
    else:
        load_model(runner.model, checkpoint.tensors(runner.device), runner.tp.rank == 0)
    for module in runner.model.modules():
        if isinstance(module, (LinearBase, ParallelLMHead)):
            module.pack()


def limit_model_len(runner: ModelRunner, num_blocks: int) -> None:
    """Limits sequences to what so many blocks hold, unless the limit is the user's."""
    if runner.config.max_model_len is None:
        num_tokens = num_blocks * runner.config.kvcache_block_size
        runner.max_model_len = min(runner.max_model_len, num_tokens)


def allocate_kv_cache(runner: ModelRunner, num_blocks: int) -> None:
    """Allocates ``kv_cache``, and gives each attention layer its view of it."""
    layers = _attention_layers(runner.model)
    blocks = (len(layers), num_blocks, runner.config.kvcache_block_size)
    shape = (2, *blocks, layers[0].num_kv_heads, layers[0].head_dim)
    # Not zeroed: no slot is read before it is written, and a CPU's pages stay unused till then.
    try:
        runner.kv_cache = torch.empty(shape, dtype=runner.dtype, device=runner.device)
    except RuntimeError as error:
        raise ValueError(
            f"a KV cache of {num_blocks} blocks does not fit into memory ({error}): lower "
            f"num_kvcache_blocks"
        ) from error
    runner.num_kvcache_blocks = num_blocks
    width = cdiv(runner.max_model_len, runner.config.kvcache_block_size)
    runner.block_tables = BlockTables(1, runner.config.max_step_seqs, width, runner.device)
    for layer, k_cache, v_cache in zip(layers, *runner.kv_cache, strict=True):
        layer.k_cache, layer.v_cache = k_cache, v_cache


def _attention_layers(model: DecoderForCausalLM) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]
