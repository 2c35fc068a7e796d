"""How trainers written for vLLM use an engine: its arguments, and the ways to new weights. The
reference is an engine that was started with the new weights."""

import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.compat import names
from nanovllm.compat.alias import AliasFinder
from tests.checkpoints.test_fp8 import write_fine_grained
from tests.checkpoints.test_gguf import write_gguf
from tests.tiny_models import BASE, CONFIGS, TinyModels

# The arguments that TRL passes to LLM in its mode "colocate".
TRAINERS_ARGUMENTS = {
    "tensor_parallel_size": 1,
    "gpu_memory_utilization": 0.3,
    "max_model_len": 64,
    "max_num_seqs": 8,
    "enable_sleep_mode": True,
    "model_impl": "auto",
    "distributed_executor_backend": "external_launcher",
    "seed": 0,
    "max_num_batched_tokens": 4096,
    "logprobs_mode": "processed_logprobs",
    "quantization": None,
    "trust_remote_code": False,
}
PROMPTS = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [*range(8, 40)]}]


@pytest.fixture(scope="module")
def new_model():
    """A model of another training step than the checkpoint."""
    config_class, changes = CONFIGS["qwen3-tied"]
    return TinyModels.build(config_class(**{**BASE, **changes}), seed=17)


@pytest.fixture(scope="module")
def new_path(new_model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("new")
    new_model.save_pretrained(path)
    return path


def make_llm(path, **arguments):
    return LLM(model=str(path), **{**TRAINERS_ARGUMENTS, **arguments}, skip_tokenizer_init=True)


def reload(llm, path):
    llm.collective_rpc("reload_weights", kwargs={"weights_path": path})


def rollouts(llm):
    """The tokens and log-probabilities of samples, in the way in which TRL reads them."""
    params = SamplingParams(
        n=1, repetition_penalty=1.0, temperature=0.7, top_p=1.0, top_k=0, min_p=0.0, max_tokens=6,
        logprobs=0, seed=3, detokenize=False,
    )  # fmt: skip
    completions = [
        completion
        for output in llm.generate(PROMPTS, sampling_params=params, use_tqdm=False)
        for completion in output.outputs
    ]
    for completion in completions:
        for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
            assert position.keys() == {token_id} and position[token_id].rank >= 1
    return [
        (c.token_ids, [[x.logprob for x in position.values()] for position in c.logprobs])
        for c in completions
    ]


def send(llm, model):
    """Sends the weights as TRL does: one at a time."""
    for name, parameter in model.named_parameters():
        engine = llm.llm_engine
        engine.model_executor.driver_worker.model_runner.model.load_weights(
            [(name, parameter.data)]
        )
    llm.reset_prefix_cache()


@pytest.fixture(scope="module")
def expected(new_path):
    with make_llm(new_path, enable_sleep_mode=False) as llm:
        return rollouts(llm)


def test_new_weights_one_at_a_time(tiny_models, new_model, expected):
    with make_llm(tiny_models.path("qwen3-tied")) as llm:
        assert rollouts(llm) != expected
        send(llm, new_model)
        assert rollouts(llm) == expected


def test_new_weights_with_sleep_in_between(tiny_models, new_model, expected):
    """The order of the calls is TRL's. It generates a second time without new weights."""
    with make_llm(tiny_models.path("qwen3-tied")) as llm:
        for _ in range(2):
            llm.sleep(level=2)
            llm.wake_up(tags=["weights"])
            send(llm, new_model)
            llm.wake_up(tags=["kv_cache"])
            assert rollouts(llm) == expected


@pytest.fixture
def vllm_alias(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [AliasFinder, *sys.meta_path])
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.mark.usefixtures("vllm_alias")
def test_an_engine_beside_the_trainers_model(tiny_models, new_model, expected):
    """Trainers that start an engine on a GPU of its own replace two functions meanwhile, and send
    all weights at once, tied ones twice."""
    check = "vllm.worker.worker.Worker._assert_memory_footprint_increased_during_profiling"
    with patch("torch.distributed.get_world_size", return_value=1), patch(check) as checked:
        llm = make_llm(tiny_models.path("qwen3-tied"))
    assert not checked.called
    worker = llm.llm_engine.model_executor.driver_worker
    worker.model_runner.model.load_weights(new_model.state_dict().items())
    assert rollouts(llm) == expected
    llm.llm_engine.engine_core.shutdown()
    with pytest.raises(ValueError, match="closed"):
        llm.generate(PROMPTS, use_tqdm=False)


def test_deleting_the_engine_closes_it(tiny_models):
    llm = make_llm(tiny_models.path("qwen3-tied"))
    assert llm.llm_engine.tokenizer is None
    del llm.llm_engine
    with pytest.raises(ValueError, match="closed"):
        llm.generate(PROMPTS, use_tqdm=False)


def test_reload_weights(tiny_models, new_model, new_path, expected, monkeypatch, tmp_path):
    path = tiny_models.path("qwen3-tied")
    monkeypatch.chdir(path.parent)
    with make_llm(Path(path.name)) as llm:
        monkeypatch.chdir(tmp_path)
        old = rollouts(llm)
        send(llm, new_model)
        assert llm.collective_rpc("reload_weights") == [None]
        assert rollouts(llm) == old
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        reload(llm, new_path)
        llm.wake_up(tags=["kv_cache"])
        assert rollouts(llm) == expected

        for method in ("update_weight", lambda worker: None):
            with pytest.raises(ValueError, match="the supported methods are reload_weights"):
                llm.collective_rpc(method, args=(1,))


@pytest.mark.parametrize(
    ("other", "fields"),
    [("mistral", "architecture, layers"), ("qwen3-tied", "tie_word_embeddings")],
)
def test_reload_weights_refuses_another_model(tiny_models, other, fields):
    with make_llm(tiny_models.path("qwen3")) as llm:
        old = rollouts(llm)
        with pytest.raises(ValueError, match=f"differs from the engine's in .*{fields}"):
            reload(llm, tiny_models.path(other))
        assert rollouts(llm) == old


def test_reload_weights_loads_all_weights(tiny_models, new_model, tmp_path):
    new_model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    llm = make_llm(tiny_models.path("qwen3-tied"))
    with llm, pytest.raises(ValueError, match=r"lacks model\.norm\.weight"):
        reload(llm, tmp_path)


def test_reload_weights_from_fp8(tiny_models, tmp_path):
    """The scales of activations, which only the FP8 checkpoint's config skips, are not loaded."""
    path = tmp_path / "fp8"
    write_fine_grained(
        tiny_models.path("qwen3"), path, weight_block_size=None, activation_scheme="static"
    )
    with make_llm(path) as llm:
        expected = rollouts(llm)
    with make_llm(tiny_models.path("qwen3")) as llm:
        reload(llm, path)
        assert rollouts(llm) == expected
    tensors, name = load_file(path / "model.safetensors"), "model.layers.0.mlp.down_proj.weight"
    dequantised = tensors[name].float() * tensors[f"{name}_scale_inv"].float()
    with make_llm(tiny_models.path("qwen3"), quantization="fp8") as llm:  # rounds them once more
        reload(llm, path)
        found = llm.model_runner.model.model.layers[0].mlp.down_proj.weight.to_dense()
        torch.testing.assert_close(found, dequantised, rtol=1 / 16, atol=1e-4)


def test_reload_weights_from_gguf(tiny_models, new_model, expected, tmp_path):
    """It has the floats of the config in fp32, which is not another model."""
    path = write_gguf(tmp_path / "m.gguf", new_model, "qwen3")
    with make_llm(tiny_models.path("qwen3-tied")) as llm:
        reload(llm, path)
        assert rollouts(llm) == expected


def test_several_ranks_of_an_external_launcher_are_refused(tiny_models):
    with pytest.raises(ValueError, match="'external_launcher' with tensor_parallel_size=2 is not"):
        make_llm(tiny_models.path("qwen3-tied"), tensor_parallel_size=2)


def test_sending_weights_to_a_server_is_refused():
    for name in ("get_ip", "get_open_port", "trainer_init", "packed_nccl_broadcast_producer"):
        with pytest.raises(ValueError, match="weights to a vLLM server is not supported here"):
            getattr(names, name)()
