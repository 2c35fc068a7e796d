"""Prefill by flash-attn 4: a stand-in for the package, and where there is a GPU the package."""

import inspect
import os
import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
import triton

from nanovllm.config import ATTENTION_BACKENDS
from nanovllm.kernels.attention import backend as selection
from nanovllm.kernels.attention import decode, flash_attn_4_backend, prefix_decode
from nanovllm.kernels.attention.backend import AttentionShape, select_attention_backend
from nanovllm.kernels.attention.base import ALL_FEATURES, AttentionParams
from nanovllm.kernels.attention.flash_attn_4_backend import FlashAttention4
from nanovllm.kernels.attention.triton_backend import TritonAttention
from nanovllm.kernels.rope import RopeInputs
from nanovllm.layers.attention import Attention
from nanovllm.utils.context import step_context
from tests.kernels.attention.test_attention import Paged

TILE = 128
CACHE_SETTINGS = [f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}" for name in ("ENABLED", "DIR")]


def stand_in(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    block_sparse_tensors=None,
    aux_tensors=None,
    aux_scalars=None,
    return_lse=False,
    scheduler_metadata=None,
    seqlen_k_per_split=None,
    disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False,
    gather_bwd_token_chunk=None,
):
    """What the arguments that we pass mean to the real function, which has this signature: whole
    tiles of keys count, those past the context with weight 0."""
    assert causal and q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
    assert (cu_seqlens_k is None) == (page_table is not None) == (seqused_k is not None)
    num_seqs = len(cu_seqlens_q) - 1
    for lens in (cu_seqlens_q, cu_seqlens_k, seqused_k):
        assert lens is None or (lens.dtype == torch.int32 and lens.is_contiguous())
    if page_table is not None:
        assert page_table.dtype == torch.int32 and page_table.size(0) == len(seqused_k) == num_seqs
    outs = []
    for i, (start, end) in enumerate(pairwise(cu_seqlens_q)):
        if page_table is None:
            first, len_k = cu_seqlens_k[i], cu_seqlens_k[i + 1] - cu_seqlens_k[i]
            read = slice(first, first + -(-len_k // TILE) * TILE)
            keys, values = k[read], v[read]
        else:
            len_k, page_size = seqused_k[i], k.size(1)
            pages = page_table[i, : -(-len_k // page_size)]
            read = slice(None if page_size == TILE else len_k)
            keys, values = (x[pages].flatten(0, 1)[read] for x in (k, v))
        group = q.size(1) // k.size(-2)
        keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[start:end].double(), keys) * softmax_scale
        seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(~seen.tril(len_k - (end - start)), -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype))
    return torch.cat(outs), None


def install(monkeypatch, function, capability=9) -> None:
    """As if the package had this function, on a GPU of this compute capability."""
    package, module = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    module.flash_attn_varlen_func = function
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    if torch.cuda.is_available():
        # Triton's driver keeps the function that it finds at its first use.
        triton.runtime.driver.active.get_current_target()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (capability, 0))


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in CACHE_SETTINGS:
        monkeypatch.setenv(name, "")  # so that it is as before after the test
        monkeypatch.delenv(name)


@pytest.fixture(params=["stand-in", pytest.param("package", marks=pytest.mark.gpu)])
def backend(request, monkeypatch) -> FlashAttention4:
    """The backend, which lists its calls of the function in ``calls``."""
    if request.param == "stand-in":
        install(monkeypatch, stand_in)
    else:
        pytest.importorskip("flash_attn.cute")
    backend = FlashAttention4()
    varlen, backend.calls = backend.varlen, []

    def spy(*args, **kwargs):
        backend.calls.append(kwargs)
        return varlen(*args, **kwargs)

    backend.varlen = spy
    return backend


DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
SHAPES = pytest.mark.parametrize(
    "shape",  # q_heads, kv_heads, head_dim, block_size
    [
        pytest.param((4, 2, 128, 256), id="d128"),
        pytest.param((9, 3, 64, 144), id="d64-group3"),
        pytest.param((2, 2, 256, 256), id="d256-mha"),
    ],
)


def test_the_stand_in_has_the_signature_of_the_package():
    cute = pytest.importorskip("flash_attn.cute")
    theirs, ours = map(inspect.signature, (cute.flash_attn_varlen_func, stand_in))
    assert [(p.name, p.default, p.kind) for p in theirs.parameters.values()] == [
        (p.name, p.default, p.kind) for p in ours.parameters.values()
    ]


@SHAPES
@DTYPES
def test_prefill_of_whole_prompts(backend, shape, dtype, device, monkeypatch):
    lens = [1, 5, 150] if device == "cpu" else [1, 5, 150, 700, 64]
    paged = Paged(lens, lens, *shape, dtype, device)
    paged.check(backend, paged.context(paged=False), monkeypatch)
    assert len(backend.calls) == 1


@SHAPES
@DTYPES
def test_prefill_of_chunks_reads_the_cache(backend, shape, dtype, device, monkeypatch):
    lens, new = [30, 5, 150, 300], [7, 5, 1, 64]
    if device == "cuda":
        lens, new = [*lens, 900, 1000], [*new, 300, 129]
    paged = Paged(lens, new, *shape, dtype, device)
    paged.check(backend, paged.context(), monkeypatch)
    assert len(backend.calls) == 1


@pytest.mark.parametrize("paged", [False, True])
@SHAPES
@DTYPES
def test_prefill_of_last_tokens_only(backend, shape, paged, dtype, device, monkeypatch):
    lens, new = [1, 40, 150, 64], [1, 1, 1, 0]
    batch = Paged(lens, new, *shape, dtype, device)
    batch.check(backend, batch.context(paged=paged), monkeypatch)
    assert len(backend.calls) == 1


def test_decode_is_our_own(backend, device, monkeypatch):
    lens = [3, 300]
    paged = Paged(lens, [1, 1], 2, 1, 64, 256, torch.float16, device)
    paged.check_decode(backend, True, monkeypatch)
    assert not backend.calls


@pytest.mark.parametrize("paged", [False, True])
def test_prefill_with_a_window_is_our_own(backend, paged, device, monkeypatch):
    params = AttentionParams(0.125, window=9)
    batch = Paged([5, 40], [5, 40], 2, 1, 64, 256, torch.float16, device)
    batch.check(backend, batch.context(paged=paged), monkeypatch, params)
    assert not backend.calls


def test_prefill_of_many_sequences_is_our_own(backend, device, monkeypatch):
    """Guards seconds of compiling in the middle of a run."""
    monkeypatch.setattr(flash_attn_4_backend, "MAX_SEQS", 3)
    for lens in ([5, 2, 9], [5, 2, 9, 1]):
        paged = Paged(lens, lens, 4, 2, 64, 256, torch.float16, device)
        paged.check(backend, paged.context(paged=False), monkeypatch)
    assert len(backend.calls) == 1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("spoilt", ["qkv", "v"])
def test_what_is_not_finite_stays_in_its_own_sequence(backend, bad, spoilt, device):
    """Guards 0 x NaN in the tile that a sequence shares with the next; and hides nothing."""
    lens = [40, 3, 150, 7]
    paged = Paged(lens, lens, 4, 2, 64, 256, torch.bfloat16, device)
    layer, outs = Attention(4, 64, AttentionParams(0.125), 2), []
    layer.backend = backend
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in lens]).to(device)
    as_it_is = torch.eye(2, device=device)[0].repeat_interleave(32).repeat(150, 1)
    for value in (1.0, bad):
        for name in spoilt:
            getattr(paged, f"{name}s")[2][100] = value
        qkv = [torch.cat(x) for x in (paged.qs, paged.ks, paged.vs)]
        with step_context(paged.context(paged=False)):
            out = layer(*qkv, RopeInputs(positions, as_it_is))
        outs.append(out.split(lens))
    for i, (clean, got) in enumerate(zip(*outs, strict=True)):
        if i != 2:
            assert torch.equal(clean, got)
        else:
            assert not (got[100:].abs() < 1e3).all()


def test_what_is_not_finite_is_left_alone_where_it_can(backend, device, monkeypatch):
    """Of a lone prompt it has to show; paged keys and our own kernels need no such thing."""
    monkeypatch.setattr(flash_attn_4_backend, "MAX_SEQS", 3)
    for lens, paged, expected in (
        ([40], False, 0),
        ([40, 3], False, TILE - 1),
        ([40, 3], True, 0),
        ([1] * 4, False, 0),
    ):
        context = Paged(lens, lens, 4, 2, 64, 256, torch.float16, device).context(paged=paged)
        assert backend.clamp_end(context) == expected
    assert (
        backend.clamp_end(Paged([2], [1], 4, 2, 64, 256, torch.float16, device).context(True)) == 0
    )


def test_compiled_kernels_are_kept_in_the_users_own_folder(monkeypatch, tmp_path):
    install(monkeypatch, stand_in)
    FlashAttention4()
    enabled, folder = (os.environ[name] for name in CACHE_SETTINGS)
    assert enabled == "1" and folder == str(tmp_path / "nanovllm" / "flash_attn_4")
    monkeypatch.setenv(CACHE_SETTINGS[1], "elsewhere")
    FlashAttention4()
    assert os.environ[CACHE_SETTINGS[1]] == "elsewhere"


def wrong(q, **kwargs):
    return torch.zeros_like(q), None


def broken(q, **kwargs):
    raise RuntimeError("no kernel")


class TestChoice:
    @pytest.fixture(autouse=True)
    def _tried_out_here(self, monkeypatch, device):
        """Backends for a GPU are tried out on the device that there is. In Triton's interpreter
        fewer programs are faster."""
        if device == "cpu":
            monkeypatch.setattr(decode, "NUM_PROGRAMS", 8)
            monkeypatch.setattr(decode, "NUM_PROGRAMS_SMALL_BATCH", 8)
            monkeypatch.setattr(prefix_decode, "NUM_MULTIPROCESSORS", 4)
        on, here = selection._try_out, torch.device(device)
        monkeypatch.setattr(
            selection, "_try_out", lambda backend, shape: on(backend, shape._replace(device=here))
        )

    def choose(
        self, name="auto", head_dim=64, block_size=256, dtype=torch.float16, features=()
    ) -> str:
        """The name of what is chosen for a GPU."""
        features = frozenset(features)
        shape = AttentionShape(2, 1, head_dim, block_size, dtype, torch.device("cuda"), features)
        return select_attention_backend(name, shape).name

    def test_it_comes_first_where_it_works(self, monkeypatch):
        install(monkeypatch, stand_in)
        assert self.choose() == self.choose("flash_attn_4") == "flash_attn_4"

    def refused(self, caplog, reason, **settings) -> None:
        with caplog.at_level("INFO", "nanovllm"):
            assert self.choose(**settings) == "triton"
        assert f"skipped: flash_attn_4: {reason}" in caplog.text
        with pytest.raises(ValueError, match=f"flash_attn_4: {reason}"):
            self.choose("flash_attn_4", **settings)

    def test_our_own_kernels_come_next(self, monkeypatch, caplog):
        install(monkeypatch, stand_in)
        monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
        self.refused(caplog, "ModuleNotFoundError")

    @pytest.mark.parametrize(
        ("function", "reason"),
        [
            (wrong, "ValueError: its attention over one token is wrong"),
            (broken, "RuntimeError: no"),
        ],
    )
    def test_a_package_that_does_not_work_is_passed_over(
        self, monkeypatch, caplog, function, reason
    ):
        install(monkeypatch, function)
        self.refused(caplog, reason)

    @pytest.mark.parametrize("capability", [8, 12])
    def test_other_gpus_are_not_served(self, monkeypatch, caplog, capability):
        install(monkeypatch, stand_in, capability)
        self.refused(caplog, "ValueError: it needs a GPU of compute capability 9 to 11")

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"dtype": torch.float32}, "ValueError: it needs fp16 or bf16"),
            ({"head_dim": 40}, "ValueError: it needs fp16 or bf16, and a head_dim"),
            ({"block_size": 128}, "ValueError: it needs a kvcache_block_size of more than 128"),
        ],
    )
    def test_what_it_lacks_is_refused(self, monkeypatch, caplog, settings, reason):
        install(monkeypatch, stand_in)
        self.refused(caplog, reason, **settings)

    def test_features_that_a_backend_lacks_are_refused_by_name(self, monkeypatch):
        install(monkeypatch, stand_in)
        assert self.choose(features=ALL_FEATURES) == "flash_attn_4"
        monkeypatch.setattr(FlashAttention4, "features", frozenset(("window",)))
        assert self.choose(features=["sinks"]) == "triton"
        assert self.choose(features=["window"]) == "flash_attn_4"
        with pytest.raises(ValueError, match=r"has no attention with sinks and softcap.*'auto'"):
            self.choose("flash_attn_4", features=ALL_FEATURES)
        assert self.choose("torch", features=ALL_FEATURES) == "torch"

    def test_no_kernels_on_a_gpu_is_worth_a_warning(self, monkeypatch, caplog):
        monkeypatch.setattr(TritonAttention, "features", frozenset())
        monkeypatch.setattr(selection.FlashAttention, "features", frozenset())
        with caplog.at_level("WARNING", "nanovllm"):
            assert self.choose("torch") == "torch"
            assert not caplog.records
            assert self.choose(features=["sinks"]) == "torch"
        assert "backend torch: the fastest that works here; skipped: flash_attn_4" in caplog.text

    def test_every_backend_can_be_asked_for(self):
        assert set(ATTENTION_BACKENDS) == {"auto", *selection.BACKENDS}
