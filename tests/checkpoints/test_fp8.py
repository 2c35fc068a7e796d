"""FP8 weights, against transformers' own dequantisation and that of compressed-tensors."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoints import fp8 as checkpoints_fp8
from nanovllm.checkpoints.checkpoint import open_checkpoint
from nanovllm.checkpoints.fp8 import CHANNEL, TENSOR, dequantize_fp8, pack_fp8
from nanovllm.checkpoints.tensor_reader import read_tensors
from nanovllm.engine import startup
from nanovllm.kernels import fp8 as kernels_fp8
from nanovllm.quantization import experts, fp8_experts
from nanovllm.quantization import fp8 as quantization_fp8
from nanovllm.utils.rope import RopeConfig
from tests.tiny_models import TinyModels

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FP8 = torch.float8_e4m3fn
PROMPTS = [[*range(3, 40)], [7, 400]]
SMALL: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
Tensors = dict[str, torch.Tensor]


def tokens(folder: Path, **settings: Any) -> list[list[int]]:
    with LLM(folder, **{**SMALL, **settings}) as llm:
        return [out["token_ids"] for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def assert_greedy(found: list[list[int]], model: torch.nn.Module) -> None:
    """Each token is the most probable one of a model in transformers."""
    for prompt, token_ids in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == token_ids


def edit_json(folder: Path, **changes: Any) -> None:
    """Changes fields of the ``quantization_config``. None drops one."""
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    fields = {**config["quantization_config"], **changes}
    config["quantization_config"] = {name: v for name, v in fields.items() if v is not None}
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, edit: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)


def write(folder: Path, source: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """Writes a checkpoint with the config of ``source`` and a ``quantization_config``."""
    folder.mkdir()
    fields = json.loads((source / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    return folder


def write_fine_grained(source: Path, folder: Path, **settings: Any) -> Path:
    """Quantises a checkpoint's linear layers, but for the LM head, with transformers' code."""
    config = FineGrainedFP8Config(modules_to_not_convert=["lm_head"], **settings)
    quantize = Fp8Quantize(SimpleNamespace(quantization_config=config))
    tensors: Tensors = {}
    for name, tensor in load_file(source / WEIGHTS).items():
        if "_proj." in name:
            tensors |= quantize.convert({name: tensor})
            if config.activation_scheme == "static" and name.endswith("weight"):
                scale = name.replace("weight", "activation_scale")
                tensors[scale] = torch.tensor(0.5, dtype=torch.bfloat16)
        else:
            tensors[name] = tensor
    assert sum(tensor.dtype is FP8 for tensor in tensors.values()) >= 12
    return write(folder, source, config.to_dict(), tensors)


FINE_GRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "blocks": ("qwen3", {"weight_block_size": (32, 16)}),
    "fused in the checkpoint": ("phi3", {"weight_block_size": (16, 32)}),
    "experts": ("qwen3-moe", {"weight_block_size": (16, 16)}),
    # Matrices of other sizes than multiples of the blocks' stay unquantised.
    "some weights": ("qwen3-moe", {"weight_block_size": (64, 32)}),
    "tensor": ("mistral", {"weight_block_size": None, "activation_scheme": "static"}),
    "scales of one byte": ("qwen3", {"weight_block_size": (32, 32), "scale_fmt": "ue8m0"}),
}


@pytest.fixture
def quantized(tiny_models: TinyModels, tmp_path: Path) -> Path:
    """A Qwen3 checkpoint with blocks of 32 x 32, to be spoiled."""
    source = tiny_models.path("qwen3")
    return write_fine_grained(source, tmp_path / "fp8", weight_block_size=(32, 32))


@pytest.mark.parametrize("case", FINE_GRAINED)
def test_tokens_equal_transformers(case: str, tiny_models: TinyModels, tmp_path: Path):
    name, settings = FINE_GRAINED[case]
    folder = write_fine_grained(tiny_models.path(name), tmp_path / "fp8", **settings)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    assert_greedy(tokens(folder), model.eval())


def write_compressed(source: Path, folder: Path, weights: dict[str, Any], static: bool) -> Tensors:
    """Quantises a checkpoint's linear layers with the compressed-tensors package.

    Args:
        source: the checkpoint.
        folder: the new checkpoint.
        weights: the strategy for weights.
        static: whether activations and the KV cache have scales in the checkpoint, too.

    Returns:
        The weights, dequantised by the package.
    """
    pytest.importorskip("compressed_tensors", minversion="0.20")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    fp8 = {"num_bits": 8, "type": "float"}
    inputs = {"strategy": "tensor"} if static else {"strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": fp8 | weights, "input_activations": fp8 | inputs}
    ignored = ["lm_head", r"re:model\.layers\.1\..*down_proj"]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    names = set(model.state_dict())
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"fp8": group}, ignore=ignored)
    )
    for module in model.modules():
        if (scale := getattr(module, "weight_scale", None)) is not None:
            weight = module.weight.detach().abs()
            sizes = {"tensor": weight.shape, "channel": (1, weight.size(1))}
            rows, columns = weights.get("block_structure") or sizes[weights["strategy"]]
            blocks = [part.split(columns, 1) for part in weight.split(rows)]
            largest = torch.tensor([[block.max() for block in row] for row in blocks])
            args = module.quantization_scheme.weights
            scale.data.copy_(calculate_qparams(-largest, largest, args)[0].view(scale.shape))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    edit_json(folder, ignore=ignored)
    if static:
        edit_json(folder, kv_cache_scheme={**fp8, "strategy": "tensor"})
        names_of_kv = [
            f"model.layers.{i}.self_attn.{kind}_scale" for i in range(3) for kind in "kv"
        ]
        edit_tensors(
            folder, lambda tensors: tensors.update({n: torch.ones(1) for n in names_of_kv})
        )
    compressor.decompress_model(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name in names}


@pytest.mark.parametrize(
    ("weights", "static"),
    [
        ({"strategy": "tensor"}, True),
        ({"strategy": "channel"}, False),
        ({"strategy": "block", "block_structure": [48, 40]}, False),
    ],
    ids=["tensor", "channel", "block"],
)
def test_compressed_tensors(weights, static, tiny_models: TinyModels, tmp_path: Path):
    """Tokens equal those of transformers with the weights that the package dequantises."""
    folder = tmp_path / "fp8"
    dequantized = write_compressed(tiny_models.path("qwen3"), folder, weights, static)
    num_fp8 = sum(tensor.dtype is FP8 for tensor in load_file(folder / WEIGHTS).values())
    assert num_fp8 == 3 * 7 - 1
    model = tiny_models.load("qwen3")
    model.load_state_dict(dequantized)
    assert_greedy(tokens(folder), model)


def write_by_rows(source: Path, folder: Path, strategy: str) -> None:
    """Quantises all projections with a scale for each tensor or channel. No number is as large as
    the largest FP8 number, so the weights do not tell their scales."""
    tensors: Tensors = {}
    for name, tensor in load_file(source / WEIGHTS).items():
        tensors[name] = tensor
        if name.endswith(checkpoints_fp8.PROJECTIONS):
            largest = tensor.abs().amax(-1, True)
            if strategy == "tensor":
                largest = tensor.abs().max().reshape(1, 1)
            scale = tensors[f"{name}_scale"] = largest.float() / 300
            tensors[name] = (tensor.float() / scale).to(FP8)
    weights = {"type": "float", "num_bits": 8, "strategy": strategy}
    groups = {"all": {"weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    write(folder, source, config | {"config_groups": groups}, tensors)


def test_which_weights_are_kept(tiny_models: TinyModels, tmp_path: Path):
    def kept(name: str) -> str | None:
        return open_checkpoint(str(tmp_path / name)).config.quantization

    source = tiny_models.path("qwen3")
    write_by_rows(source, tmp_path / "rows", "channel")
    assert kept("rows") == "fp8"
    bf16 = torch.zeros(32, 32, dtype=torch.bfloat16)
    drop = lambda t: t.update({DOWN: bf16}) or t.pop(f"{DOWN}_scale")  # noqa: E731
    edit_tensors(tmp_path / "rows", drop)
    assert kept("rows") is None, "one projection is not in FP8"
    write_fine_grained(source, tmp_path / "blocks", weight_block_size=(32, 16))
    assert kept("blocks") is None, "other widths than groups have"
    write_by_rows(tiny_models.path("mixtral"), tmp_path / "mixtral", "channel")
    assert kept("mixtral") == "fp8"
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    edit_tensors(tmp_path / "mixtral", lambda t: t.update({name: t[name].to(torch.bfloat16)}))
    assert kept("mixtral") is None, "one expert is not in FP8"


def test_what_a_gpu_keeps(tiny_models: TinyModels, tmp_path: Path):
    """Experts too, unless blocks do not divide their sizes on each rank."""
    source = tiny_models.path("qwen3-moe")
    write_by_rows(source, tmp_path / "rows", "channel")
    model = open_checkpoint(str(tmp_path / "rows")).config

    def kept(stored: str, num_ranks: int = 1, **settings: Any) -> str | None:
        values = {"quantization": None, "batch_invariant": False, **settings}
        config = SimpleNamespace(tensor_parallel_size=num_ranks, **values)
        changed = replace(model, quantization=stored)
        device = torch.device("cuda")
        return startup.weight_quantization(
            SimpleNamespace(config=config, device=device, model_config=changed)
        )

    assert kept("fp8") == kept("fp8", 2) == "fp8"
    assert kept("fp8", batch_invariant=True) is None
    assert kept("fp8_groups") is None
    mlps = [replace(layer.mlp, intermediate_size=256) for layer in model.layers]
    attention = replace(model.layers[0].attention, num_heads=4, head_dim=128)
    layers = [replace(model.layers[0], mlp=mlp, attention=attention) for mlp in mlps]
    model = replace(model, hidden_size=512, layers=layers)
    assert kept("fp8_groups") == kept("fp8_groups", 2) == "fp8_groups"
    assert kept("fp8_groups", 4) is None
    # What the checkpoint's blocks do not fit is quantised again, if that was asked for.
    assert kept("fp8_groups", 4, quantization="fp8") == "fp8"
    assert kept("fp8_groups", 2, quantization="fp8") == "fp8_groups"
    reordered = RopeConfig((1.0,) * 64, interleaved=True)
    for head_dim, expected in ((128, "fp8_groups"), (256, None)):
        changed = replace(attention, head_dim=head_dim, rope=reordered)
        model = replace(model, layers=[replace(layer, attention=changed) for layer in layers])
        assert kept("fp8_groups") == expected, "rows move only within blocks of 128 rows"


FORMS = {  # model, and strategy or size of a block
    "tensor": ("qwen3", "tensor"),
    "channel": ("qwen3", "channel"),
    "blocks": ("qwen3", 16),
    "fused": ("phi3", 16),
    "experts by channel": ("qwen3-moe", "channel"),
    "experts in blocks": ("qwen3-moe", 16),
    "experts of Mixtral": ("mixtral", "channel"),
    "experts of Granite": ("granitemoe", "channel"),
}


@pytest.mark.parametrize("form", FORMS)
def test_fp8_weights_are_kept_as_on_a_gpu(form, tiny_models: TinyModels, tmp_path, monkeypatch):
    """The kept weights are those that would be dequantised, so tokens are the same. Matmuls take
    inputs that are not quantised."""
    folder, (name, scheme) = tmp_path / "fp8", FORMS[form]
    if isinstance(scheme, str):
        write_by_rows(tiny_models.path(name), folder, scheme)
    else:
        write_fine_grained(tiny_models.path(name), folder, weight_block_size=(scheme, scheme))
    expected = tokens(folder)
    with LLM(folder, **SMALL) as llm:
        names = dict(llm.model_runner.model.named_parameters())
        plain = {name: param.to_dense() for name, param in names.items()}
    group = 16 if scheme == 16 else None
    for module in (kernels_fp8, checkpoints_fp8, quantization_fp8, fp8_experts, startup):
        if hasattr(module, "GROUP"):
            monkeypatch.setattr(module, "GROUP", 16)
    weight_class = {
        None: quantization_fp8.StoredFp8Weight,
        16: quantization_fp8.StoredGroupedFp8Weight,
    }[group]
    monkeypatch.setattr(
        quantization_fp8, "new_fp8_weight", lambda layer, has_groups: weight_class(layer)
    )
    choose = experts._fp8_class
    monkeypatch.setattr(experts, "_fp8_class", lambda method, on_cpu: choose(method, False))
    monkeypatch.setattr(
        startup, "weight_quantization", lambda runner: runner.model_config.quantization
    )
    monkeypatch.setattr(startup, "rounds_to_fp8", lambda runner: False)
    with LLM(folder, **SMALL) as llm:
        found = dict(llm.model_runner.model.named_modules())
    for name, weight in plain.items():
        layer = found[name.rpartition(".")[0]]
        param = getattr(layer, name.rpartition(".")[2])
        has_experts = name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj")
        is_kept = name.endswith("_proj.weight") or has_experts
        assert (param.dtype is FP8) == is_kept, name
        if has_experts:
            kept = layer.weights._experts.dequantized(torch.float32)
            assert torch.equal(kept.down if "down" in name else kept.gate_up, weight), name
        elif is_kept:
            rows = kernels_fp8.Fp8Rows(param, layer.weight_scale)
            assert torch.equal(kernels_fp8.dequantize(rows), weight), name
    assert tokens(folder) == expected


def test_the_log_tells(quantized: Path, caplog: pytest.LogCaptureFixture):
    edit_tensors(
        quantized, lambda t: t.update({UP.replace("weight", "input_scale"): torch.ones(1)})
    )
    edit_tensors(quantized, lambda t: t.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}))
    with caplog.at_level(logging.INFO, logger="nanovllm"):
        tokens(quantized)
    messages = [record.message for record in caplog.records]
    assert sum("FP8 weights are dequantised as they are read" in text for text in messages) == 1
    assert "skipped 2 tensors: *.input_scale, *.k_scale" in messages


def as_auto_fp8(tensors: Tensors) -> Tensors:
    renamed = {name.replace("_scale_inv", "_scale"): tensor for name, tensor in tensors.items()}
    return {name.replace("activation_scale", "input_scale"): t for name, t in renamed.items()}


def per_channel(tensors: Tensors) -> Tensors:
    """With the one scale of each weight repeated."""
    for name, weight in tensors.items():
        if weight.dtype is FP8:
            scale = tensors[f"{name}_scale"]
            tensors[f"{name}_scale"] = scale.expand(weight.size(0), 1).contiguous()
    return tensors


MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
OTHER_FORMS: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors]]] = {
    "AutoFP8": ({"quant_method": "fp8", "activation_scheme": "static"}, as_auto_fp8),
    "ModelOpt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, as_auto_fp8),
    "nested ModelOpt": (MODELOPT, as_auto_fp8),
    "FBGEMM": ({"quant_method": "fbgemm_fp8"}, lambda tensors: per_channel(as_auto_fp8(tensors))),
}


@pytest.fixture
def by_tensor(tiny_models: TinyModels, tmp_path: Path) -> Path:
    """A checkpoint with one scale for each weight, and one for its activations."""
    source, settings = tiny_models.path("qwen3"), {"activation_scheme": "static"}
    return write_fine_grained(source, tmp_path / "tensor", weight_block_size=None, **settings)


@pytest.mark.parametrize("form", [*OTHER_FORMS, "ModelOpt's own file"])
def test_other_forms_are_read(form: str, by_tensor: Path, tmp_path: Path):
    """They hold the same numbers as transformers' under other names."""
    config, convert = OTHER_FORMS.get(form, ({}, as_auto_fp8))
    folder = write(tmp_path / "form", by_tensor, config, convert(load_file(by_tensor / WEIGHTS)))
    if not config:
        (folder / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    expected, found = (dict(open_checkpoint(str(f)).tensors()) for f in (by_tensor, folder))
    weights = {name for name in found if not name.endswith("scale")}
    assert weights == {name for name in expected if not name.endswith("scale")}
    assert all(torch.equal(found[name], expected[name]) for name in weights)
    assert tokens(folder) == tokens(by_tensor)


@pytest.mark.parametrize("block", [(128, 128), (2, 50), (7, 3), TENSOR, CHANNEL], ids=str)
@pytest.mark.parametrize("shape", [(1, 7), (5, 123), (130, 257), (3, 9, 129)], ids=str)
def test_blocks_at_the_edges_are_smaller(block: tuple[int, int], shape: tuple[int, ...]):
    weight = torch.randn(shape).to(FP8)
    rows, columns = (torch.arange(n) // size for n, size in zip(shape[-2:], block, strict=True))
    scale = torch.rand(*shape[:-2], rows[-1] + 1, columns[-1] + 1) + 0.1
    expected = weight.double() * scale.double()[..., rows[:, None], columns]
    assert torch.equal(dequantize_fp8(weight, scale, [block]), expected.float())
    while scale.dim() and scale.size(-1) == 1:
        scale = scale[..., 0]
        assert torch.equal(dequantize_fp8(weight, scale, [block]), expected.float())


def test_groups_of_weights_may_have_different_blocks():
    weight = torch.randn(6, 8).to(FP8)
    for scale, block in ((torch.rand(6, 1), CHANNEL), (torch.rand(2, 2), (4, 4))):
        expected = dequantize_fp8(weight, scale, [block])
        assert torch.equal(dequantize_fp8(weight, scale, [CHANNEL, (4, 4)]), expected)
    with pytest.raises(ValueError, match=r"must have shape \[2, 1\] or \[2, 1\]"):  # ambiguous
        dequantize_fp8(weight, torch.rand(2, 1), [(4, 8), (3, 8)])


def shard(folder: Path) -> None:
    """Puts the scales into a file of their own, which is read last."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    file_of = {name: f"model-{'scale_inv' in name}.safetensors" for name in tensors}
    for file in set(file_of.values()):
        part = {name: tensor for name, tensor in tensors.items() if file_of[name] == file}
        save_file(part, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": file_of}))


def test_scales_may_be_in_another_file(quantized: Path):
    expected = dict(open_checkpoint(str(quantized)).tensors())
    shard(quantized)
    checkpoint = open_checkpoint(str(quantized))
    files = sorted(quantized.glob("*.safetensors"))
    assert len(files) == 2
    # The threaded reader of GPUs, which yields tensors in another order, is used on the CPU here.
    threaded = checkpoint._fp8.dequantize(read_tensors(files, torch.device("cpu")), files)
    for found in (dict(checkpoint.tensors()), dict(threaded)):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.gpu
def test_a_gpu_dequantizes_to_the_same_weights(quantized: Path):
    checkpoint = open_checkpoint(str(quantized))
    expected = dict(checkpoint.tensors())
    for name, tensor in checkpoint.tensors(torch.device("cuda", 0)):
        assert tensor.is_cuda and torch.equal(tensor.cpu(), expected[name])


@pytest.mark.slow
def test_two_ranks_generate_the_tokens_of_one(tiny_models: TinyModels, tmp_path: Path):
    """With experts and an ordinary MLP."""
    source = tiny_models.path("qwen3-moe")
    folder = write_fine_grained(source, tmp_path / "fp8", weight_block_size=(16, 32))
    assert tokens(folder, tensor_parallel_size=2) == tokens(folder)


def test_dummy_weights_are_those_of_an_unquantized_config(quantized: Path):
    (quantized / WEIGHTS).unlink()
    found = tokens(quantized, load_format="dummy")
    edit_json(quantized, quant_method=None, weight_block_size=None)
    config = json.loads((quantized / "config.json").read_text("utf-8"))
    del config["quantization_config"]
    (quantized / "config.json").write_text(json.dumps(config))
    assert found == tokens(quantized, load_format="dummy")


def set_scale(value: Any) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({f"{UP}_scale_inv": value})


def spoil_scale(value: float) -> Callable[[Tensors], Any]:
    def spoil(tensors: Tensors) -> None:
        tensors[f"{UP}_scale_inv"][1, 1] = value

    return spoil


def spoil_weight(tensors: Tensors) -> None:
    tensors[UP].view(torch.uint8)[3, 5] = 255


INVALID = rf"{UP}_scale_inv: scales must be finite and at least 0"
DAMAGES: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "no scale": (lambda t: t.pop(f"{UP}_scale_inv"), f"{UP} is torch.float8_e4m3fn, but it has no"),
    "no weight": (lambda t: t.pop(UP), f"{UP} is missing, though it has a scale"),
    "no weight nor scale": (
        lambda t: [t.pop(name) for name in (UP, f"{UP}_scale_inv")],
        f"lacks {UP}",
    ),
    "NaN": (spoil_scale(float("nan")), INVALID),
    "inf": (spoil_scale(float("inf")), INVALID),
    "negative": (spoil_scale(-1.0), INVALID),
    "zero": (spoil_scale(0.0), f"{UP}: one of its scales is 0, but the weights"),
    "integers": (set_scale(torch.ones(4, 2, dtype=torch.int32)), "a scale cannot be torch.int32"),
    "more rows": (set_scale(torch.ones(5, 2)), rf"{UP}: .* shape \[4, 2\], but has \[5, 2\]"),
    "transposed": (set_scale(torch.ones(2, 4)), rf"{UP}: .* shape \[4, 2\], but has \[2, 4\]"),
    "one number": (set_scale(torch.tensor(1.0)), rf"{UP}: .* shape \[4, 2\], but has \[\]"),
    "two scales": (
        lambda t: t.update({f"{UP}_scale": t[f"{UP}_scale_inv"].clone()}),
        f"{UP} has two scales",
    ),
    "unquantised": (
        lambda t: t.update({UP: t[UP].float()}),
        f"{UP}: .* float8_e4m3fn, got torch.f",
    ),
    "another FP8": (
        lambda t: t.update({UP: t[UP].float().to(torch.float8_e5m2)}),
        f"{UP}: .* must be float8_e4m3fn, got torch.float8_e5m2",
    ),
    "one dimension": (lambda t: t.update({UP: t[UP].flatten()}), f"{UP}: FP8 weights must be matr"),
    "NaN weights": (spoil_weight, f"{UP}: its FP8 numbers contain NaN"),
    "no rows": (lambda t: t.update({UP: t[UP][:0].clone()}), f"{UP}: FP8 weights must be matrices"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints_are_refused(damage: str, quantized: Path):
    spoil, match = DAMAGES[damage]
    edit_tensors(quantized, spoil)
    with pytest.raises(ValueError, match=match):
        tokens(quantized)


@pytest.mark.parametrize("nan", [127, 255])
@pytest.mark.parametrize("block", [TENSOR, CHANNEL, (128, 128)])
def test_weights_that_are_kept_are_checked_before_any_part_is_loaded(block: Any, nan: int):
    weight = torch.zeros(384, 128).to(FP8)
    weight.view(torch.uint8)[383, 5] = nan
    num_scales = {TENSOR: 1, CHANNEL: 384}.get(block, 3)
    for function in (pack_fp8, dequantize_fp8):
        with pytest.raises(ValueError, match="its FP8 numbers contain NaN"):
            function(weight, torch.ones(num_scales, 1), [block])


def test_a_scale_of_zero_weights_may_be_zero(quantized: Path):
    def spoil(tensors: Tensors) -> None:
        weight = tensors[UP].float()
        weight[32:64, 32:] = 0.0
        tensors[UP], tensors[f"{UP}_scale_inv"][1, 1] = weight.to(FP8), 0.0

    edit_tensors(quantized, spoil)
    assert dict(open_checkpoint(str(quantized)).tensors())[UP][32:64, 32:].count_nonzero() == 0


def group(**changes: Any) -> dict[str, Any]:
    """The config_groups of compressed-tensors."""
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", **changes}
    return {"group_0": {"targets": ["Linear"], "weights": weights}}


FLOAT = {"quant_method": "compressed-tensors", "format": "float-quantized"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "AWQ": ({"quant_method": "awq"}, "'awq'"),
    "GPTQ": ({"quant_method": "gptq"}, "'gptq'"),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "'bitsandbytes'"),
    "unknown": ({"quant_method": "magic"}, "'magic'"),
    "int8 without a method": ({"load_in_8bit": True}, "'bitsandbytes'"),
    "no method": ({"bits": 4}, "'unknown'"),
    "FP4 experts": ({"quant_method": "fp8", "expert_dtype": "fp4"}, "'fp8 with fp4 experts'"),
    "NVFP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt NVFP4'"),
    "nested NVFP4": ({"quantization": {"quant_algo": "NVFP4"}}, "'modelopt NVFP4'"),
    "compressed int4": (
        {**FLOAT, "format": "pack-quantized", "config_groups": group(type="int", num_bits=4)},
        "'compressed-tensors pack-quantized'",
    ),
    "compressed int8": (
        {**FLOAT, "format": "int-quantized", "config_groups": group(type="int")},
        "'compressed-tensors int-quantized'",
    ),
    "naive int8": (
        {**FLOAT, "format": "naive-quantized", "config_groups": group(type="int")},
        "'compressed-tensors int8 with a scale per channel'",
    ),
    "groups of columns": (
        {**FLOAT, "config_groups": group(strategy="group", group_size=128)},
        "'compressed-tensors float8 with a scale per group'",
    ),
    "one group in int4": (
        {**FLOAT, "config_groups": group() | {"b": {"weights": {}, "format": "pack-quantized"}}},
        "'compressed-tensors pack-quantized'",
    ),
    "sparse": (
        {**FLOAT, "config_groups": group(), "sparsity_config": {"format": "sparse-24-bitmask"}},
        "'compressed-tensors sparse-24-bitmask'",
    ),
    "transforms": (
        {**FLOAT, "config_groups": group(), "transform_config": {"config_groups": {"R3": {}}}},
        "'compressed-tensors with transforms'",
    ),
}
REFUSED = {
    name: (config, f"{what} quantisation is not supported: use an unquantised, FP8 or GGUF")
    for name, (config, what) in REFUSED.items()
}
for number, size in enumerate(([128], [128, 0], [128, True], [1.0, 128], "128")):
    REFUSED[f"block size {number}"] = (
        {"quant_method": "fp8", "weight_block_size": size},
        "weight_block_size must be a list of two positive ints",
    )
REFUSED |= {
    "no groups": (FLOAT, "config_groups must be an object"),
    "weights of a group": (
        {**FLOAT, "config_groups": {"group_0": {"weights": "x"}}},
        "weights must be an object, got 'x'",
    ),
    "a list of transforms": (
        {**FLOAT, "config_groups": group(), "transform_config": [1]},
        r"transform_config must be an object, got \[1\]",
    ),
    "no block": ({**FLOAT, "config_groups": group(strategy="block")}, "block_structure must be"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_quantizations_are_refused_by_name(
    case: str, tiny_models: TinyModels, tmp_path: Path
):
    config, match = REFUSED[case]
    folder = write(tmp_path / "refused", tiny_models.path("qwen3"), config, {})
    with pytest.raises(ValueError, match=match):
        open_checkpoint(str(folder))


def test_fp8_weights_need_a_group(quantized: Path):
    """The groups are empty if only the KV cache was in FP8."""
    edit_json(quantized, **FLOAT, config_groups={})
    with pytest.raises(ValueError, match="the config_groups in the config describe no weights"):
        dict(open_checkpoint(str(quantized)).tensors())


def test_other_spellings_of_the_config(quantized: Path):
    expected = tokens(quantized)
    edit_json(quantized, quant_method="FP8")
    assert tokens(quantized) == expected


@pytest.mark.parametrize("place", ["quantization_config", "compression_config"])
def test_other_places_of_the_config(place: str, tiny_models: TinyModels, tmp_path: Path):
    config = {**FLOAT, "quant_method": "compressed_tensors", "config_groups": group()}
    folder = write(tmp_path / "fp8", tiny_models.path("qwen3"), config, {})
    (folder / WEIGHTS).unlink()
    fields = json.loads((folder / "config.json").read_text("utf-8"))
    fields[place] = fields.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(fields))
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint._fp8.blocks == (CHANNEL,)
    assert checkpoint.quant_method == "compressed-tensors"


def test_groups_without_weights_do_not_count(tiny_models: TinyModels, tmp_path: Path):
    """Those are about activations, and those about attention."""
    config = {**FLOAT, "config_groups": group() | {"attention": {"weights": None}}}
    folder = write(tmp_path / "fp8", tiny_models.path("qwen3"), config, {})
    (folder / WEIGHTS).unlink()
    assert open_checkpoint(str(folder))._fp8.blocks == (CHANNEL,)
