"""The weight loader's books: every checkpoint tensor lands once, every parameter is filled."""

from typing import ClassVar

import pytest
import torch
from torch import nn

from nanovllm.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
)
from nanovllm.utils.loader import copy_weight, default_weight_loader, load_model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(4, 2, 2, 1, bias=True)
        self.gate_up_proj = MergedColumnParallelLinear(4, [3, 3])
        self.down_proj = ReplicatedLinear(3, 4)
        self.norm = nn.LayerNorm(4, bias=False)  # a parameter without a weight_loader


class Model(nn.Module):
    """Two blocks and a head that can be tied."""

    packed_modules_mapping: ClassVar[dict[str, tuple[str, str | int]]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tied = tied
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        for param in self.parameters():
            param.requires_grad_(False).fill_(torch.nan)

    def is_redundant_weight(self, name: str) -> bool:
        return self.tied and name == "head.weight"


def checkpoint(tied: bool = False) -> dict[str, torch.Tensor]:
    """A checkpoint that fits, every tensor random."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (5, 4)}
    if not tied:
        shapes["head.weight"] = (5, 4)
    for i in range(2):
        for name, rows in (("q_proj", 4), ("k_proj", 2), ("v_proj", 2)):
            shapes[f"blocks.{i}.{name}.weight"] = (rows, 4)
            shapes[f"blocks.{i}.{name}.bias"] = (rows,)
        for name in ("gate_proj", "up_proj"):
            shapes[f"blocks.{i}.{name}.weight"] = (3, 4)
        shapes[f"blocks.{i}.down_proj.weight"] = (4, 3)
        shapes[f"blocks.{i}.norm.weight"] = (4,)
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def load(tensors: dict[str, torch.Tensor], tied: bool = False) -> Model:
    model = Model(tied)
    load_model(model, tensors.items())
    return model


@pytest.mark.parametrize("order", [1, -1], ids=["forward", "backward"])
def test_every_tensor_lands_in_its_place(order):
    """In any order of the checkpoint's tensors."""
    tensors = checkpoint()
    model = load(dict(list(tensors.items())[::order]))
    for i, block in enumerate(model.blocks):
        for kind in ("weight", "bias"):
            parts = [tensors[f"blocks.{i}.{x}_proj.{kind}"] for x in "qkv"]
            assert torch.equal(getattr(block.qkv_proj, kind), torch.cat(parts))
        parts = [tensors[f"blocks.{i}.{x}_proj.weight"] for x in ("gate", "up")]
        assert torch.equal(block.gate_up_proj.weight, torch.cat(parts))
        assert torch.equal(block.down_proj.weight, tensors[f"blocks.{i}.down_proj.weight"])
        assert torch.equal(block.norm.weight, tensors[f"blocks.{i}.norm.weight"])
    assert torch.equal(model.embed.weight, tensors["embed.weight"])
    assert torch.equal(model.head.weight, tensors["head.weight"])


def test_tensors_are_streamed():
    """Each is placed as it comes, so that no two need to be in memory at once."""
    model, tensors = Model(), checkpoint()

    def stream():
        placed = 0
        for name, tensor in tensors.items():
            assert sum(int((~param.isnan()).sum()) for param in model.parameters()) == placed
            yield name, tensor
            placed += tensor.numel()

    load_model(model, stream())


@pytest.mark.parametrize(
    "name",
    [
        "embed.weight",
        "head.weight",
        "blocks.0.norm.weight",
        "blocks.1.down_proj.weight",
        "blocks.1.k_proj.weight",
        "blocks.0.v_proj.bias",
        "blocks.0.up_proj.weight",
    ],
)
def test_a_missing_tensor_is_named(name):
    """Guards parameters that keep their uninitialised memory without a word, the parts of
    packed ones included."""
    tensors = checkpoint()
    del tensors[name]
    with pytest.raises(ValueError, match=rf"lacks {name}$"):
        load(tensors)


@pytest.mark.parametrize(
    "name",
    [
        "extra.weight",
        "blocks.2.norm.weight",
        "blocks.0.down_proj.bias",
        "blocks.0.qkv_proj.weight",  # only its parts have a place
        "blocks.0.q_proj.scale",
        "q_proj.weight",
    ],
)
def test_a_leftover_tensor_is_named(name):
    with pytest.raises(ValueError, match=rf"has {name}, for which the model has no place"):
        load({**checkpoint(), name: torch.zeros(4)})


def test_missing_and_leftover_tensors_are_named_together():
    """A checkpoint of other names shows at once what it has and what it should have."""
    tensors = checkpoint()
    tensors["blocks.0.rms.weight"] = tensors.pop("blocks.0.norm.weight")
    with pytest.raises(ValueError, match=r"lacks blocks\.0\.norm.* and has blocks\.0\.rms"):
        load(tensors)


def test_long_lists_are_cut_short():
    with pytest.raises(ValueError, match=r"blocks\.0\.down_proj\.weight.* and 17 more") as error:
        load({})
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("name", ["embed.weight", "blocks.0.q_proj.weight"])
def test_a_tensor_that_comes_twice_is_named(name):
    tensors = checkpoint()
    with pytest.raises(ValueError, match=f"{name} comes twice"):
        load_model(Model(), [*tensors.items(), (name, tensors[name])])


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("embed.weight", (6, 4)),
        ("embed.weight", (4, 5)),
        ("blocks.0.norm.weight", (1,)),
        ("blocks.0.norm.weight", ()),
        ("blocks.0.k_proj.weight", (4, 4)),
        ("blocks.0.k_proj.bias", (4,)),
        ("blocks.1.gate_proj.weight", (6, 4)),
        ("blocks.1.down_proj.weight", (1, 3)),
    ],
)
def test_a_misshapen_tensor_is_named_with_both_shapes(name, shape):
    """Guards copy_'s broadcasting, which fills a parameter from a tensor of size 1."""
    tensors = {**checkpoint(), name: torch.zeros(shape)}
    with pytest.raises(ValueError, match=f"{name}: the model needs shape .* has ") as error:
        load(tensors)
    assert str(list(shape)) in str(error.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("name", ["embed.weight", "blocks.0.q_proj.weight"])
def test_an_integer_tensor_is_refused(name, dtype):
    """Guards a quantised checkpoint of fitting shapes, whose codes are no weights."""
    tensors = checkpoint()
    tensors[name] = tensors[name].to(dtype)
    with pytest.raises(ValueError, match=rf"{name}: dtype {dtype} is not served"):
        load(tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_float_dtypes_are_converted(dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in checkpoint().items()}
    model = load(tensors)
    assert model.embed.weight.dtype == torch.float32
    assert torch.equal(model.embed.weight, tensors["embed.weight"].float())


def test_a_tied_head_needs_no_tensor():
    tensors = checkpoint(tied=True)
    model = load(tensors, tied=True)
    assert torch.equal(model.head.weight, tensors["embed.weight"])


def test_a_redundant_tensor_is_passed_over():
    """It does not overwrite the tied parameter either."""
    tensors = checkpoint(tied=True)
    model = load({**tensors, "head.weight": torch.zeros(5, 4)}, tied=True)
    assert torch.equal(model.embed.weight, tensors["embed.weight"])


def test_default_weight_loader_copies_the_whole_tensor():
    param = nn.Parameter(torch.zeros(2, 3))
    default_weight_loader(param, torch.ones(2, 3, dtype=torch.bfloat16))
    assert torch.equal(param.data, torch.ones(2, 3))


def test_copy_weight_refuses_to_broadcast():
    with pytest.raises(ValueError, match=r"shape \[2, 3\], the checkpoint has \[3\]"):
        copy_weight(torch.zeros(2, 3), torch.ones(3))
