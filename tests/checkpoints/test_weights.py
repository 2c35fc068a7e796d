"""The weight loader's accounts: every checkpoint tensor lands once, every parameter is filled."""

import pytest
import torch
from torch import nn

from nanovllm.checkpoints.weights import expand, load_model
from nanovllm.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
)
from nanovllm.models.weight_names import WeightNames
from nanovllm.utils.loader import copy_weight


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(4, 2, 2, 1, bias=True)
        self.gate_up_proj = MergedColumnParallelLinear(4, [3, 3])
        self.down_proj = ReplicatedLinear(3, 4)
        self.norm = nn.LayerNorm(4, bias=False)  # a parameter without a weight_loader


BLOCK = "blocks.{block}."
ROWS = (
    (BLOCK + "q_proj.{kind}", BLOCK + "qkv_proj.{kind}", "q"),
    (BLOCK + "k_proj.{kind}", BLOCK + "qkv_proj.{kind}", "k"),
    (BLOCK + "v_proj.{kind}", BLOCK + "qkv_proj.{kind}", "v"),
    (BLOCK + "gate_proj.{kind}", BLOCK + "gate_up_proj.{kind}", 0),
    (BLOCK + "up_proj.{kind}", BLOCK + "gate_up_proj.{kind}", 1),
)


class Model(nn.Module):
    """Two blocks and a head that can be tied."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        fields = {"block": range(2), "kind": ("weight", "bias")}
        self.weight_names = WeightNames(ROWS, fields, skipped=("head.*",) * tied)
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        for param in self.parameters():
            param.requires_grad_(False).fill_(torch.nan)


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
    with pytest.raises(ValueError, match=rf"has {name}, which the model does not have"):
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
    with pytest.raises(ValueError, match=f"{name} occurs twice"):
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
    with pytest.raises(ValueError, match=f"{name}: the model needs shape .* got ") as error:
        load(tensors)
    assert str(list(shape)) in str(error.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("name", ["embed.weight", "blocks.0.q_proj.weight"])
def test_an_integer_tensor_is_refused(name, dtype):
    """Guards a quantised checkpoint of fitting shapes, whose codes are no weights."""
    tensors = checkpoint()
    tensors[name] = tensors[name].to(dtype)
    with pytest.raises(ValueError, match=rf"{name}: dtype {dtype} is not supported"):
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


def test_a_parameter_without_a_loader_gets_the_whole_tensor():
    model = nn.Linear(3, 2, bias=False)  # whose weight requires gradients
    tensor = torch.ones(2, 3, dtype=torch.bfloat16)
    model.weight_names = WeightNames((), {})
    load_model(model, [("weight", tensor)])
    assert torch.equal(model.weight.data, torch.ones(2, 3)) and model.weight.requires_grad


def test_weights_are_replaced_as_they_were_loaded():
    """Guards a loader that counts on a model without weights: training sends new ones."""
    model, tensors = load(checkpoint()), checkpoint()
    new = {name: tensor + 1 for name, tensor in tensors.items()}
    load_model(model, new.items())
    pairs = zip(model.parameters(), load(new).parameters(), strict=True)
    assert all(torch.equal(found, expected) for found, expected in pairs)


class Experts(nn.Module):
    """The gate and up projections of three experts in one parameter, and one of each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(3, 2, 4), requires_grad=False)
        self.gate_up.weight_loader = self.place
        self.router = nn.Linear(4, 3, bias=False)
        rows = (
            ("experts.{expert}.gate.weight", "gate_up", 0),
            ("experts.{expert}.up.weight", "gate_up", 1),
            ("gate.weight", "router.weight"),
        )
        self.weight_names = WeightNames(rows, {"expert": range(3)})

    def place(self, param: nn.Parameter, tensor: torch.Tensor, shard_id: int, expert: int) -> None:
        copy_weight(param.data[expert, shard_id], tensor)


def expert_tensors() -> dict[str, torch.Tensor]:
    tensors = {"gate.weight": torch.ones(3, 4)}
    for expert in range(3):
        for shard, name in enumerate(("gate", "up")):
            tensors[f"experts.{expert}.{name}.weight"] = torch.full((4,), 10.0 * expert + shard)
    return tensors


def test_a_field_of_the_tensor_alone_reaches_the_weight_loader():
    model = Experts()
    load_model(model, expert_tensors().items())
    assert model.gate_up[..., 0].tolist() == [[0, 1], [10, 11], [20, 21]]
    assert bool((model.router.weight == 1).all())


@pytest.mark.parametrize("name", ["experts.2.up.weight", "experts.0.gate.weight"])
def test_a_missing_expert_is_named(name):
    tensors = expert_tensors()
    del tensors[name]
    with pytest.raises(ValueError, match=rf"lacks {name}$"):
        load_model(Experts(), tensors.items())


def test_an_expert_too_many_is_named():
    name = "experts.3.up.weight"
    with pytest.raises(ValueError, match=rf"has {name}, which the model does not have"):
        tensors = {**expert_tensors(), name: torch.ones(4)}
        load_model(Experts(), tensors.items())


def test_names_are_spelled_out_for_every_value_of_their_fields():
    names = WeightNames((("a.{x}.{y}", "b.{x}", "q"), ("c.{y}", "d")), {"x": range(2), "y": "pq"})
    assert list(expand(names)) == [
        ("a.0.p", "b.0", ["q"], {"y": "p"}),
        ("a.0.q", "b.0", ["q"], {"y": "q"}),
        ("a.1.p", "b.1", ["q"], {"y": "p"}),
        ("a.1.q", "b.1", ["q"], {"y": "q"}),
        ("c.p", "d", [], {"y": "p"}),
        ("c.q", "d", [], {"y": "q"}),
    ]


def test_copy_weight_refuses_to_broadcast():
    with pytest.raises(ValueError, match=r"shape \[2, 3\], got \[3\]"):
        copy_weight(torch.zeros(2, 3), torch.ones(3))


class Fused(nn.Module):
    """A parameter that checkpoints have under either of two names, or in two parts."""

    weight_names = WeightNames(
        (("old", "both"), ("new", "both"), ("part.{part}", "both")), {"part": range(2)}
    )

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.zeros(2, 3), requires_grad=False)
        self.both.weight_loader = lambda param, tensor, part=slice(None): copy_weight(  # type: ignore[attr-defined]
            param[part], tensor
        )


@pytest.mark.parametrize("names", [["old"], ["new"], ["part.0", "part.1"]], ids=str)
def test_a_parameter_with_several_names(names):
    values = torch.randn(2, 3)
    parts = {"part.0": values[0], "part.1": values[1]}
    model = Fused()
    load_model(model, [(name, parts.get(name, values)) for name in names])  # type: ignore[arg-type]
    assert torch.equal(model.both, values)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["old", "new"], "new occurs twice"),
        (["old", "old"], "old occurs twice"),
        (["part.0", "new"], "new occurs twice"),
        (["new", "part.0"], "part.0 occurs twice"),
        (["part.1"], "lacks part.0"),
        ([], "lacks part.0, part.1"),
    ],
    ids=str,
)
def test_exactly_one_of_several_names(names, message):
    with pytest.raises(ValueError, match=message):
        load_model(Fused(), [(n, torch.zeros((3,) if "." in n else (2, 3))) for n in names])  # type: ignore[arg-type]
