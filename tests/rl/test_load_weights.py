"""Weights that are replaced in a running engine. The reference is an engine that was started with
them."""

import random
import re
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nanovllm import LLM
from nanovllm.checkpoints.weights import WeightTable
from nanovllm.rl import weights as rl_weights
from tests.checkpoints.test_mxfp4 import random_mxfp4
from tests.conftest import check_idle
from tests.rl.conftest import PARAMS, PROMPTS, SETTINGS, Pair, answers
from tests.tables import each

# Packed in two ways, tied and untied, norms with an offset, over all heads, attention sinks,
# reordered heads, biases, experts one by one and fused, and names with a multimodal prefix.
FAMILIES = [
    "qwen3",
    "qwen3-tied",
    "qwen2",
    "phi3",
    "gemma3",
    "gemma3-vision",
    "olmo2",
    "glm4",
    "gpt-oss",
    "mixtral",
    "qwen3-moe",
]


def in_one_call(llm: LLM, pair: Pair) -> None:
    llm.load_weights(pair.tensors.items())


def one_by_one(llm: LLM, pair: Pair) -> None:
    for each_pair in pair.tensors.items():
        llm.load_weights([each_pair])


def shuffled(llm: LLM, pair: Pair) -> None:
    names = sorted(pair.tensors)
    random.Random(3).shuffle(names)
    llm.load_weights((name, pair.tensors[name]) for name in names)


def of_transformers(llm: LLM, pair: Pair) -> None:
    """Some names differ from those in files: experts are fused."""
    llm.load_weights(pair.make_model().named_parameters())


def in_batches(llm: LLM, pair: Pair) -> None:
    names = sorted(pair.tensors)
    for start in range(0, len(names), 7):
        llm.load_weights([(name, pair.tensors[name]) for name in names[start : start + 7]])


@pytest.mark.parametrize("name", FAMILIES)
def test_an_engine_with_new_weights_equals_one_started_with_them(name: str, pairs: Any):
    """Tokens and log-probabilities are equal, for every way to send the weights."""
    pair: Pair = pairs(name)
    with LLM(pair.old, **SETTINGS) as llm:
        before = answers(llm)
        assert before != pair.wanted()
        for load in (in_one_call, one_by_one, shuffled, in_batches, of_transformers):
            load(llm, pair)
            assert answers(llm) == pair.wanted(), load
            llm.load_weights(pair.old_tensors.items())
            assert answers(llm) == before


@pytest.mark.parametrize("engine", ["float32", "bfloat16"])
def test_tensors_of_any_dtype_are_converted_as_those_of_a_checkpoint(engine: str, pairs: Any):
    """Gemma's norms add 1 to the tensor's values, in fp32."""
    pair: Pair = pairs("gemma3")
    with LLM(pair.old, dtype=engine, **SETTINGS) as llm:
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            folder = pair.new.with_name(f"gemma3-{dtype}")
            pair.make_model().to(dtype).save_pretrained(folder)
            with LLM(folder, dtype=engine, **SETTINGS) as fresh:
                wanted = answers(fresh)
            llm.load_weights(load_file(folder / "model.safetensors").items())
            assert answers(llm) == wanted, dtype


def values(llm: LLM) -> dict[str, torch.Tensor]:
    """Copies of all parameters, in the plain layout."""
    named = llm.model_runner.model.named_parameters()
    return {name: (p.to_dense() if p.is_mkldnn else p.detach()).clone() for name, p in named}


def test_a_part_changes_nothing_else(pairs: Any):
    """One tensor of a packed parameter, one expert, one norm: the other rows and parameters keep
    their bits."""
    pair: Pair = pairs("qwen3-moe")
    layer = "model.layers.0."
    parts = {
        "self_attn.k_proj.weight": ("self_attn.qkv_proj.weight", slice(64, 96)),
        "mlp.experts.5.up_proj.weight": ("mlp.experts.gate_up_proj", (5, slice(32, 64))),
        "mlp.experts.2.down_proj.weight": ("mlp.experts.down_proj", 2),
        "mlp.gate.weight": ("mlp.gate.weight", slice(None)),
        "input_layernorm.weight": ("input_layernorm.weight", slice(None)),
    }
    with LLM(pair.old, **SETTINGS) as llm:
        wanted = values(llm)
        for tensor, (parameter, rows) in parts.items():
            new = torch.randn_like(pair.tensors[layer + tensor])
            llm.load_weights([(layer + tensor, new)])
            wanted[layer + parameter][rows] = new
            found = values(llm)
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                assert torch.equal(found[name], value), (tensor, name)


@pytest.fixture(scope="module")
def llm(pairs: Any) -> Iterator[LLM]:
    with LLM(pairs("qwen3-tied").old, **SETTINGS) as llm:
        yield llm
        check_idle(llm)


NORM = ("model.norm.weight", torch.ones(64))
EMBEDDING = ("model.embed_tokens.weight", torch.zeros(512, 64))


@each(
    "wrong, error, message",
    [
        (("model.norm.weights", torch.ones(64)), ValueError, "has no tensor model.norm.weights"),
        (("model.layers.3.input_layernorm.weight", torch.ones(64)), ValueError, "layers.3"),
        (("model.layers.0.self_attn.qkv_proj.weight", torch.ones(64)), ValueError, "qkv_proj"),
        (NORM, ValueError, "model.norm.weight occurs twice"),
        (("language_model.model.norm.weight", NORM[1]), ValueError, "norm.weight occurs twice"),
        (
            (EMBEDDING[0], torch.zeros(512, 65)),
            ValueError,
            r"needs shape \[512, 64\], got \[512, 65\]",
        ),
        ((EMBEDDING[0], torch.tensor(0.0)), ValueError, "needs shape"),
        ((EMBEDDING[0], EMBEDDING[1].int()), ValueError, "dtype torch.int32 is not supported"),
        ((EMBEDDING[0], EMBEDDING[1].to(torch.float8_e4m3fn)), ValueError, "dequantise it"),
        ("model.norm.weight", TypeError, "pairs of a name and a tensor"),
        ((NORM[1], "model.norm.weight"), TypeError, "pairs of a name and a tensor"),
        (("model.norm.weight", [1.0] * 64), TypeError, "pairs of a name and a tensor"),
        ((EMBEDDING[0], EMBEDDING[1].to("meta")), ValueError, "needs a dense .* device meta"),
        ((EMBEDDING[0], EMBEDDING[1].to_sparse()), ValueError, "needs a dense .* torch.sparse_coo"),
        ((EMBEDDING[0], EMBEDDING[1].to_mkldnn()), ValueError, "needs a dense .* torch._mkldnn"),
        ((EMBEDDING[0], torch.nested.nested_tensor([NORM[1]])), ValueError, "needs a dense"),
    ],
)
def test_an_error_says_what_was_changed(llm: LLM, wrong: Any, error: type, message: str):
    before, norm = values(llm), torch.rand(64)
    changed = rf"{message}.*; 1 tensor was loaded before \(model.norm.weight\), and all others keep"
    try:
        with pytest.raises(error, match=changed):
            llm.load_weights(iter([(NORM[0], norm), wrong]))
        after = values(llm)
        assert torch.equal(after.pop(NORM[0]), norm)
        assert all(torch.equal(value, before[name]) for name, value in after.items())
        assert answers(llm)
    finally:
        llm.load_weights([(NORM[0], before[NORM[0]])])


@each(
    "wrong",
    [
        ("model.norm.weights", NORM[1]),
        NORM,
        "model.norm.weight",
        (EMBEDDING[0], EMBEDDING[1].to("meta")),
    ],
)
def test_a_list_with_a_wrong_name_or_layout_changes_nothing(llm: LLM, wrong: Any):
    before = values(llm)
    with pytest.raises((TypeError, ValueError), match="; no weight was changed"):
        llm.load_weights([NORM, wrong])
    assert all(torch.equal(value, before[name]) for name, value in values(llm).items())


class Broken(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(first, second)


def test_an_error_of_the_iterator_is_passed_on_with_a_note(llm: LLM):
    """The error is the same object, because its class may not be made from a message."""
    error, before = Broken(1, 2), answers(llm)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield NORM
        raise error

    norm = values(llm)[NORM[0]]
    with pytest.raises(Broken) as caught:
        llm.load_weights(broken())
    assert caught.value is error
    (note,) = error.__notes__
    assert note.startswith("load_weights: 1 tensor was loaded before (model.norm.weight), and all")
    assert answers(llm) != before  # without blocks of before
    llm.load_weights([(NORM[0], norm)])
    assert answers(llm) == before


def test_tensors_that_the_model_does_not_need_are_ignored(llm: LLM):
    before = answers(llm)
    unneeded = ["lm_head.weight", "model.vision_tower.x", "model.layers.0.rotary_emb.inv_freq"]
    llm.load_weights((name, torch.zeros(3)) for name in unneeded)
    llm.load_weights([])
    assert answers(llm) == before


def test_the_iterator_runs_as_the_users_code(llm: LLM):
    """Not in inference mode, whose tensors cannot be trained. It may reuse one tensor for all."""
    before, buffer = answers(llm), torch.empty(64)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in values(llm).items():
            assert not torch.is_inference_mode_enabled()
            if value.shape == (64,):
                yield name, buffer.copy_(value)

    llm.load_weights(stream())
    assert answers(llm) == before


def test_blocks_computed_with_old_weights_are_not_used(pairs: Any, monkeypatch: pytest.MonkeyPatch):
    """The second half shows that the first could fail."""
    pair: Pair = pairs("qwen3")
    for empties in (True, False):
        with LLM(pair.old, **SETTINGS) as llm:
            answers(llm)
            if not empties:
                monkeypatch.setattr(llm, "_empty_prefix_cache", lambda: None)
            llm.load_weights(pair.tensors.items())
            assert (answers(llm) == pair.wanted()) == empties


def test_the_prefix_cache_is_emptied_only_if_it_may_have_blocks(llm: LLM):
    """A trainer may load one tensor per call."""
    answers(llm)
    manager = llm.scheduler.block_manager
    llm.load_weights([])
    emptied = llm.scheduler.block_manager
    assert emptied is not manager
    llm.load_weights([])
    assert llm.scheduler.block_manager is emptied
    llm.generate([PROMPTS[0]], PARAMS, use_tqdm=False)
    llm.load_weights([])
    assert llm.scheduler.block_manager is not emptied


def test_names_are_looked_up_in_a_table_that_is_made_once(
    pairs: Any, monkeypatch: pytest.MonkeyPatch
):
    tables = []

    def make(model: Any) -> WeightTable:
        tables.append(WeightTable(model))
        return tables[-1]

    monkeypatch.setattr(rl_weights, "WeightTable", make)
    pair: Pair = pairs("qwen3")
    with LLM(pair.old, **SETTINGS) as llm:
        one_by_one(llm, pair)
        assert len(tables) == 1


def test_unfinished_requests_of_this_thread_are_an_error(llm: LLM):
    request_id = llm.add_request(PROMPTS[0], PARAMS)
    for call in (lambda: llm.load_weights([]), llm.sleep, llm.wake_up):
        with pytest.raises(ValueError, match="cannot run while there are unfinished requests"):
            call()
    llm.abort_request(request_id)
    stream = llm.generate_stream(PROMPTS[0], PARAMS)
    next(stream)
    with pytest.raises(ValueError, match="load_weights cannot run while there are"):
        llm.load_weights([])
    assert [*stream][-1].finished


def experts_in_mxfp4(pair: Pair) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Random experts: blocks and scales, and the same weights dequantised by transformers."""
    packed, dense = {}, {}
    for name, tensor in pair.tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):  # [experts, in, out]
            parts = random_mxfp4(tensor.size(0), tensor.size(2), tensor.size(1))
            packed |= {f"{name}_{part}": value for part, value in parts.items()}
            dense[name] = convert_moe_packed_tensors(**parts, dtype=torch.float32)
    return packed, dense


EXPERTS = "model.layers.0.mlp.experts."


def test_mxfp4_blocks_and_scales_in_any_call_and_order(pairs: Any):
    """The trainer reuses one buffer for all. Between a tensor and the other part, the engine does
    not generate with old weights."""
    pair: Pair = pairs("gpt-oss")
    packed, dense = experts_in_mxfp4(pair)
    buffer = torch.empty(max(t.numel() for t in packed.values()), dtype=torch.uint8)

    def stream(names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            tensor = packed[name]
            yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)

    with LLM(pair.old, **SETTINGS) as llm:
        before = answers(llm)
        llm.load_weights(dense.items())
        wanted = answers(llm)
        for names in (sorted(packed), sorted(packed, reverse=True)):
            llm.load_weights(pair.old_tensors.items())
            assert answers(llm) == before
            llm.load_weights(stream(names))
            assert answers(llm) == wanted
            llm.load_weights(pair.old_tensors.items())
            for i, name in enumerate(names):
                llm.load_weights(stream([name]))
                if i % 2 == 0:
                    with pytest.raises(ValueError, match=f"loaded together: .* {names[i + 1]}$"):
                        answers(llm)
            assert answers(llm) == wanted


def test_mxfp4_blocks_without_scales_are_not_said_to_be_loaded(pairs: Any):
    pair: Pair = pairs("gpt-oss")
    packed, _ = experts_in_mxfp4(pair)
    blocks, scales = (EXPERTS + f"down_proj_{part}" for part in ("blocks", "scales"))
    with LLM(pair.old, **SETTINGS) as llm:
        before = answers(llm)
        for wrong, message in (
            ((scales, packed[scales][:, :1]), rf"{scales}: the model needs shape \[4, 64, "),
            ((scales, packed[scales].int()), f"{scales}: dtype torch.int32 is not supported"),
            ((blocks, packed[blocks]), f"{blocks} occurs twice"),
        ):
            end = f"no weight was changed, {blocks} is loaded when {scales} is given"
            with pytest.raises(ValueError, match=f"{message}.*; {end}$"):
                llm.load_weights(iter([(blocks, packed[blocks]), wrong]))
        # The whole weight replaces the blocks, which do not wait any longer.
        llm.load_weights([(EXPERTS + "down_proj", pair.old_tensors[EXPERTS + "down_proj"])])
        assert answers(llm) == before


def test_mxfp4_blocks_do_not_survive_sleep(pairs: Any):
    pair: Pair = pairs("gpt-oss")
    packed, _ = experts_in_mxfp4(pair)
    blocks, scales = (EXPERTS + f"down_proj_{part}" for part in ("blocks", "scales"))
    with LLM(pair.old, **SETTINGS) as llm:
        llm.load_weights([(blocks, packed[blocks])])
        llm.sleep(level=2)
        llm.wake_up()
        llm.load_weights((n, t) for n, t in pair.tensors.items() if n != EXPERTS + "down_proj")
        llm.load_weights([(scales, packed[scales])])
        with pytest.raises(ValueError, match=f"give load_weights {blocks}$"):
            answers(llm)
        llm.load_weights([(EXPERTS + "down_proj", pair.tensors[EXPERTS + "down_proj"])])
        assert answers(llm) == pair.wanted()


@each(
    "call",
    [
        lambda llm: llm.sleep(level=2),
        lambda llm: llm.wake_up(),
        lambda llm: llm.load_weights([]),
        lambda llm: llm.add_request(PROMPTS[0], PARAMS),
        lambda llm: next(llm.generate_stream(PROMPTS[0], PARAMS)),
        answers,
        lambda llm: llm.step(),
        lambda llm: llm.reset_prefix_cache(),
    ],
)
def test_the_iterator_cannot_call_the_engine(llm: LLM, call: Any):
    """It would free weights that are being loaded, or add requests that the end of ``load_weights``
    drops from the scheduler only."""
    before = answers(llm)

    def calling() -> Iterator[tuple[str, torch.Tensor]]:
        call(llm)
        yield NORM

    with pytest.raises(ValueError, match="load_weights is running: its iterator cannot call"):
        llm.load_weights(calling())
    assert llm.is_finished() and not llm.is_sleeping()
    assert answers(llm) == before


def test_threads_get_answers_of_old_or_new_weights_and_no_mixture(pairs: Any):
    pair: Pair = pairs("qwen3")
    with LLM(pair.old, **SETTINGS) as llm:
        known, stop = [answers(llm), pair.wanted()], threading.Event()

        def ask() -> list[int]:
            found = []
            while not stop.is_set():
                found.append(known.index(answers(llm)))
            return found

        with ThreadPoolExecutor(3) as pool:
            asking = [pool.submit(ask) for _ in range(2)]
            for i in range(6):
                llm.load_weights(iter((pair.tensors, pair.old_tensors)[i % 2].items()))
                assert answers(llm) == known[1 - i % 2]
            stop.set()
            assert all(future.result() for future in asking)


def test_an_engine_that_is_closed_meanwhile_says_so(pairs: Any):
    llm = LLM(pairs("qwen3").old, **SETTINGS)

    def closing() -> Iterator[tuple[str, torch.Tensor]]:
        yield NORM
        llm.close()
        yield NORM

    with pytest.raises(ValueError, match="was closed by another call"):
        llm.load_weights(closing())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-tied", "olmo2", "gpt-oss"])
def test_two_ranks(name: str, pairs: Any):
    """Wrong tensors are refused before anything is sent, so that all ranks stay in step."""
    pair: Pair = pairs(name)
    two: dict[str, Any] = {"tensor_parallel_size": 2}
    with LLM(pair.old, **two, **SETTINGS) as llm:
        before = answers(llm)
        wrong = [
            ("model.embed_tokens.weight", torch.zeros(511, 64), "needs shape"),
            ("model.layers.0.self_attn.q_norm.weight", torch.ones(1), "has no tensor|needs shape"),
            ("model.layers.0.self_attn.o_proj.weight", torch.zeros(64, 65), "needs shape"),
            ("nothing", torch.zeros(3), "has no tensor nothing"),
            ("model.norm.weight", torch.ones(64).to_sparse(), "needs a dense tensor"),
        ]
        # Shapes are those of whole tensors.
        down, q = "model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"
        if down in pair.tensors:
            for name_, bad in ((down, torch.zeros(63, 128)), (q, torch.zeros(64))):
                whole = str(list(pair.tensors[name_].shape))
                message = f"needs shape {re.escape(whole)}, got {re.escape(str(list(bad.shape)))}"
                wrong.append((name_, bad, message))
        for name_, bad, message in wrong:
            with pytest.raises(ValueError, match=f"({message}).*; no weight was changed"):
                llm.load_weights(iter([(name_, bad)]))
        assert answers(llm) == before
        # In float64, and negated lazily: their bytes cannot be viewed as they are.
        llm.load_weights((n, torch._neg_view(-t.double())) for n, t in pair.tensors.items())
        assert answers(llm) == pair.wanted(**two)
        llm.sleep(level=1)
        llm.wake_up()
        assert answers(llm) == pair.wanted(**two)
        llm.sleep(level=2)
        with pytest.raises(ValueError, match="asleep"):
            answers(llm)
        llm.wake_up()
        one_by_one(llm, pair)
        assert answers(llm) == pair.wanted(**two)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3-tied", "gemma3", "qwen3-moe"])
def test_captured_graphs_read_the_new_weights(name: str, pairs: Any):
    pair: Pair = pairs(name)
    settings = {**SETTINGS, "device": "cuda"}
    with LLM(pair.new, **settings) as fresh:
        wanted = answers(fresh)
    with LLM(pair.old, **settings) as llm:
        addresses = [param.data_ptr() for param in llm.model_runner.model.parameters()]
        assert answers(llm) != wanted
        for device in ("cpu", "cuda"):
            llm.load_weights((n, t.to(device)) for n, t in pair.tensors.items())
            assert answers(llm) == wanted
        assert addresses == [param.data_ptr() for param in llm.model_runner.model.parameters()]
