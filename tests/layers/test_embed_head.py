"""Vocabulary-parallel embedding and head against the whole matrices; then a whole model."""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.checkpoints.checkpoint import open_checkpoint
from nanovllm.checkpoints.weights import load_model
from nanovllm.engine.startup import make_sampler
from nanovllm.kernels.attention.kv_cache import KVCache
from nanovllm.kernels.attention.torch_backend import TorchAttention
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.linear import LinearBase
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.utils.context import Context, step_context
from nanovllm.utils.distributed import TPGroup, use_tp_group
from tests.layers.test_linear import run_ranks

VOCAB, HIDDEN, NUM_TOKENS = 256, 6, 9
LOGITS_INDICES = [2, 8, 8, 0]
EMBEDDINGS = ["embedding", "one_side"]
LOGITS = ["all_rows", "sampled_rows", "packed_all_rows", "packed_sampled_rows"]
MODELS = ["qwen3", "qwen3-tied", "llama-bias"]
PROMPTS = [[5, 400, 17, 17, 3], [511], [0, 1, 2, 3, 256, 255, 300]]
BLOCK_SIZE = 4


def whole_weight() -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))


def hidden_states() -> torch.Tensor:
    return torch.randn(NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))


def build(layer_class: type[VocabParallelEmbedding], tp: TPGroup) -> VocabParallelEmbedding:
    with use_tp_group(tp):
        layer = layer_class(VOCAB, HIDDEN)
    layer.weight.weight_loader(layer.weight, whole_weight())
    return layer


@torch.inference_mode()
def run_layers(tp: TPGroup) -> dict[str, torch.Tensor | None]:
    embedding, head = build(VocabParallelEmbedding, tp), build(ParallelLMHead, tp)
    packed_head = build(ParallelLMHead, tp)
    packed_head.linear_weight.pack()
    outputs = {
        "embedding": embedding(torch.arange(VOCAB).flip(0)),
        "one_side": embedding(torch.tensor([0, 1, 0])),  # rank 0 holds them all
    }
    for name, layer in (("", head), ("packed_", packed_head)):
        gather = make_sampler(layer).gather
        outputs[f"{name}all_rows"] = gather(layer(hidden_states()))
        with step_context(Context(logits_indices=torch.tensor(LOGITS_INDICES))):
            outputs[f"{name}sampled_rows"] = gather(layer(hidden_states()))
    return outputs


def run_model(path: str, tp: TPGroup) -> list[torch.Tensor | None]:
    """Logits of a prefill that stores its keys and values, then of one decode step."""
    checkpoint = open_checkpoint(path)
    with use_tp_group(tp):
        model = DecoderForCausalLM(checkpoint.config, 64)
    load_model(model, checkpoint.tensors())
    for layer in model.modules():
        if isinstance(layer, LinearBase | ParallelLMHead):
            layer.linear_weight.pack()
    blocks_each = 3
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.backend = TorchAttention()
            shape = (len(PROMPTS) * blocks_each, BLOCK_SIZE, layer.num_kv_heads, layer.head_dim)
            layer.kv_cache = KVCache(torch.zeros(shape), torch.zeros(shape))

    def step(ids: list[int], positions: list[int], context: Context) -> torch.Tensor | None:
        with step_context(context):
            hidden_states = model(torch.tensor(ids), torch.tensor(positions))
            return make_sampler(model.lm_head).gather(model.compute_logits(hidden_states))

    lens = [len(prompt) for prompt in PROMPTS]
    bounds = torch.tensor([0, *lens]).cumsum(0)
    firsts = [i * blocks_each * BLOCK_SIZE for i in range(len(PROMPTS))]
    prefill = Context(
        is_prefill=True,
        slot_mapping=torch.cat([torch.arange(f, f + n) for f, n in zip(firsts, lens, strict=True)]),
        cu_seqlens_q=bounds.int(),
        cu_seqlens_k=bounds.int(),
        max_seqlen_q=max(lens),
        max_seqlen_k=max(lens),
        output_indices=bounds[1:] - 1,
        cu_num_outputs=torch.arange(len(bounds)).int(),
    )
    decode = Context(
        slot_mapping=torch.tensor([f + n for f, n in zip(firsts, lens, strict=True)]),
        block_tables=torch.arange(len(PROMPTS) * blocks_each).view(len(PROMPTS), -1).int(),
        max_seqlen_k=max(lens) + 1,
        context_lens=torch.tensor(lens).int() + 1,
    )
    ids = [token_id for prompt in PROMPTS for token_id in prompt]
    positions = [i for n in lens for i in range(n)]
    return [step(ids, positions, prefill), step([7, 500, 9], lens, decode)]


def run_everything(tp: TPGroup, paths: dict[str, str]) -> dict[str, object]:
    models = {name: run_model(path, tp) for name, path in paths.items()}
    return {**run_layers(tp), **models}


@pytest.fixture(scope="module")
def outputs_of_two_ranks(tiny_models, tmp_path_factory: pytest.TempPathFactory):
    paths = {name: str(tiny_models.path(name)) for name in MODELS}
    return run_ranks(run_everything, paths, tmp_path_factory.mktemp("embed_head"))


def expected_outputs() -> dict[str, torch.Tensor]:
    logits = hidden_states() @ whole_weight().T
    return {
        "embedding": whole_weight().flip(0),
        "one_side": F.embedding(torch.tensor([0, 1, 0]), whole_weight()),
        "all_rows": logits,
        "sampled_rows": logits[LOGITS_INDICES],
        "packed_all_rows": logits,
        "packed_sampled_rows": logits[LOGITS_INDICES],
    }


@pytest.mark.parametrize("output", EMBEDDINGS + LOGITS)
def test_one_rank_equals_the_whole_matrix(output):
    torch.testing.assert_close(run_layers(TPGroup())[output], expected_outputs()[output])


@pytest.mark.parametrize("output", EMBEDDINGS)
@pytest.mark.parametrize("rank", [0, 1])
def test_both_ranks_embed_every_token(output, rank, outputs_of_two_ranks):
    found = outputs_of_two_ranks[rank][output]
    torch.testing.assert_close(found, expected_outputs()[output])


@pytest.mark.parametrize("output", LOGITS)
def test_logits_are_gathered_on_rank_0_only(output, outputs_of_two_ranks):
    on_rank_0, on_rank_1 = (outputs[output] for outputs in outputs_of_two_ranks)
    torch.testing.assert_close(on_rank_0, expected_outputs()[output])
    assert on_rank_1 is None


@pytest.mark.parametrize("layer_class", [VocabParallelEmbedding, ParallelLMHead])
def test_weight_loader_keeps_this_ranks_rows(layer_class):
    weights = [build(layer_class, TPGroup(rank, 2)).weight for rank in (0, 1)]
    assert [weight.size(0) for weight in weights] == [VOCAB // 2] * 2
    assert torch.equal(torch.cat(weights), whole_weight())


@pytest.mark.parametrize("layer_class", [VocabParallelEmbedding, ParallelLMHead])
def test_weight_loader_refuses_another_shape(layer_class):
    layer = build(layer_class, TPGroup(0, 2))
    for wrong in (whole_weight()[:-2], whole_weight()[:, :1], whole_weight()[0]):
        with pytest.raises(ValueError, match="shape"):
            layer.weight.weight_loader(layer.weight, wrong)


@torch.inference_mode()
def test_packing_a_tied_head_leaves_the_embedding_as_it_is():
    embedding, head = build(VocabParallelEmbedding, TPGroup()), build(ParallelLMHead, TPGroup())
    head.weight = embedding.weight
    head.linear_weight.pack()
    assert torch.equal(embedding.weight, whole_weight())
    ids = torch.arange(VOCAB)
    torch.testing.assert_close(embedding(ids), expected_outputs()["embedding"].flip(0))
    torch.testing.assert_close(head(hidden_states()), expected_outputs()["all_rows"])


@pytest.mark.parametrize("vocab, size", [(300, 2), (257, 4), (1000, 8), (2, 4)])
@pytest.mark.parametrize("layer_class", [VocabParallelEmbedding, ParallelLMHead])
def test_a_vocabulary_that_does_not_split_evenly_ends_in_zeros(layer_class, vocab, size):
    """Guards rows that are lost or held twice, and ranks that have none at all."""
    whole, weights = torch.randn(vocab, HIDDEN), []
    for rank in range(size):
        with use_tp_group(TPGroup(rank, size)):
            layer = layer_class(vocab, HIDDEN)
        layer.weight.data.fill_(torch.nan)
        layer.weight.weight_loader(layer.weight, whole)
        weights.append(layer.weight)
    assert len({weight.shape for weight in weights}) == 1
    assert torch.equal(torch.cat(weights)[:vocab], whole)
    assert not torch.cat(weights)[vocab:].any()


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@torch.inference_mode()
def test_no_sampled_rows_give_no_logits(packed):
    """A step of prompt chunks alone samples nothing."""
    head = build(ParallelLMHead, TPGroup())
    if packed:
        head.linear_weight.pack()
    with step_context(Context(logits_indices=torch.tensor([], dtype=torch.int64))):
        assert head(hidden_states()).shape == (0, VOCAB)


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_model_gives_equal_logits_on_two_ranks(name, tiny_models, outputs_of_two_ranks):
    """Guards biases added once per rank (llama-bias), a tied head that loses its shard
    (qwen3-tied), and heads that meet another rank's keys."""
    with torch.inference_mode():
        expected = run_model(str(tiny_models.path(name)), TPGroup())
    assert outputs_of_two_ranks[1][name] == [None, None]
    for found, whole in zip(outputs_of_two_ranks[0][name], expected, strict=True):
        assert whole.shape == (len(PROMPTS), 512)
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-3)
        assert torch.equal(found.argmax(-1), whole.argmax(-1))
