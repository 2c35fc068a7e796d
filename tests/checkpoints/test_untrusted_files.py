"""Checkpoints are untrusted: whatever their bytes, reading one works or raises ValueError or
TypeError, soon and within little memory, and nothing that they bring along is run."""

import json
import logging
import os
import pickle
import random
import struct
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from gguf import GGUFValueType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoints.checkpoint import load_tokenizer, open_checkpoint
from nanovllm.checkpoints.files import CONFIGS, MAX_CONFIG_BYTES, MAX_METADATA_BYTES
from nanovllm.checkpoints.gguf_file import GGUFFile
from nanovllm.checkpoints.tokenizer_growth import _growth
from tests.tables import each

SMALL: dict[str, Any] = {"num_kvcache_blocks": 16, "kvcache_block_size": 16, "max_num_seqs": 4}
NUM_CASES = int(os.environ.get("FUZZ_CASES", "1000"))  # of each sweep, with the slow tests
SEED = int(os.environ.get("FUZZ_SEED", "0"))
SECONDS = 10.0  # for one case, on a machine shared with others
MEGABYTES = 150.0  # the files have kilobytes
VOCABULARY = [*(chr(ord("!") + i) for i in range(90)), "ab", "<s>", "</s>", "<u0>", "<u1>", "<u2>"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
SIZES = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FIELDS: dict[str, tuple[Any, Kind]] = {
    "llama.vocab_size": (SIZES["vocab_size"], Kind.UINT32),
    "llama.embedding_length": (SIZES["hidden_size"], Kind.UINT32),
    "llama.feed_forward_length": (SIZES["intermediate_size"], Kind.UINT32),
    "llama.block_count": (SIZES["num_hidden_layers"], Kind.UINT32),
    "llama.attention.head_count": (SIZES["num_attention_heads"], Kind.UINT32),
    "llama.attention.head_count_kv": (SIZES["num_key_value_heads"], Kind.UINT32),
    "llama.attention.key_length": (SIZES["head_dim"], Kind.UINT32),
    "llama.rope.dimension_count": (SIZES["head_dim"], Kind.UINT32),
    "llama.context_length": (SIZES["max_position_embeddings"], Kind.UINT32),
    "llama.attention.layer_norm_rms_epsilon": (1e-5, Kind.FLOAT32),
    "llama.rope.freq_base": (10000.0, Kind.FLOAT32),
    "tokenizer.ggml.model": ("gpt2", Kind.STRING),
    "tokenizer.ggml.pre": ("qwen2", Kind.STRING),
    "tokenizer.ggml.tokens": (VOCABULARY, Kind.ARRAY),
    "tokenizer.ggml.token_type": ([3 if len(w) > 2 else 1 for w in VOCABULARY], Kind.ARRAY),
    "tokenizer.ggml.scores": ([-float(i) for i in range(len(VOCABULARY))], Kind.ARRAY),
    "tokenizer.ggml.merges": (["a b"], Kind.ARRAY),
    "tokenizer.ggml.bos_token_id": (VOCABULARY.index("<s>"), Kind.UINT32),
    "tokenizer.ggml.eos_token_id": (VOCABULARY.index("</s>"), Kind.UINT32),
    "tokenizer.ggml.add_bos_token": (True, Kind.BOOL),
    "tokenizer.chat_template": (TEMPLATE, Kind.STRING),
    "general.flags": ([True, False], Kind.ARRAY),
    "general.factors": ([0.5, -2.0], Kind.ARRAY),
    "general.tags": (["one", "", "\N{GREEK SMALL LETTER PI}"], Kind.ARRAY),
    "general.counts": (2**40, Kind.UINT64),
}
WORDS = [0, 1, 2, 0x7F, 0xFF, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63]
WORDS += [2**64 - 1]
VALUES = [None, True, 0, -1, 1, 2**31, 2**40, 10**9, 10**400, 0.5, -0.0, 1e308, float("nan")]
VALUES += [float("inf"), "", "x", "1", "float32", "F4", "../x", "\ud800", [], [[]], [1, "x"], {}]
VALUES += [{"x": {"x": [{}]}}, "@nested"]
NESTED = "[" * 5000 + "]" * 5000
Files = dict[str, bytes]


def hf_tensors() -> dict[str, torch.Tensor]:
    hidden, inner, heads, kv_heads = 32, 64, 4 * 8, 2 * 8
    shapes = {"model.embed_tokens": (96, hidden), "model.norm": (hidden,)}
    for i in range(2):
        layer = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (heads, hidden),
            "self_attn.k_proj": (kv_heads, hidden),
            "self_attn.v_proj": (kv_heads, hidden),
            "self_attn.o_proj": (hidden, heads),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return {f"{name}.weight": torch.ones(shape) for name, shape in shapes.items()}


def write_gguf(
    path: Path, changes: dict[str, tuple[Any, Kind]] | None = None, *, num_divisors: int = 4
) -> bytes:
    """A whole "llama" file: codes of two types, rope divisors and a tokenizer of characters."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, (value, kind) in (FIELDS | (changes or {})).items():
        if value is not None:
            writer.add_key_value(name, value, kind)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, SIZES["num_hidden_layers"])
    for name, tensor in hf_tensors().items():
        module, _, leaf = name.rpartition(".")
        quant = Quant.Q8_0 if "proj" in name else Quant.F32
        codes = gguf.quants.quantize(tensor.numpy(), quant)
        writer.add_tensor(f"{table.get_name(module)}.{leaf}", codes, raw_dtype=quant)
    writer.add_tensor("rope_freqs.weight", np.ones(num_divisors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def write_directory(folder: Path) -> None:
    """A whole Llama checkpoint of two shards with an index, and a tokenizer of characters."""
    folder.mkdir()
    config = {
        **SIZES,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": ROPE,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": 92,
        "num_labels": 2,
    }
    generation = {"eos_token_id": [92], "temperature": 0.6, "top_k": 5, "max_new_tokens": 9}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
        "model_max_length": 128,
        "added_tokens_decoder": {"91": {"content": "<s>", "special": True}},
    }
    tensors = hf_tensors()
    shards = {name: f"model-{1 + i % 2}-of-2.safetensors" for i, name in enumerate(tensors)}
    for shard in set(shards.values()):
        save_file({k: v for k, v in tensors.items() if shards[k] == shard}, folder / shard)
    for name, values in {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer_config.json": tokenizer_config,
        "model.safetensors.index.json": {"metadata": {}, "weight_map": shards},
    }.items():
        (folder / name).write_text(json.dumps(values))
    vocabulary = {word: i for i, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The files of a checkpoint's directory."""
    folder = tmp_path_factory.mktemp("directory") / "m"
    write_directory(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def spoil(directory: Files, tmp_path: Path) -> Callable[..., Path]:
    """Lays out the directory with files changed; None drops one, a dict edits keys of JSON."""

    number = count()

    def spoil(changes: dict[str, Any]) -> Path:
        files = dict(directory)
        for file, change in changes.items():
            is_edit = isinstance(change, dict)
            values = {**json.loads(directory[file]), **change} if is_edit else None
            files[file] = json.dumps(values).encode() if is_edit else change
        kept = {file: data for file, data in files.items() if data is not None}
        return lay_out(tmp_path / f"m{next(number)}", kept)

    return spoil


def lay_out(folder: Path, files: Files) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def read(path: Path) -> None:
    """All that an engine reads of a checkpoint."""
    checkpoint = open_checkpoint(str(path))
    assert len(checkpoint.config.layers) > 0
    assert all(isinstance(i, int) for i in checkpoint.eos_token_ids)
    checkpoint.load_tokenizer()
    for _, tensor in checkpoint.tensors():
        assert tensor.shape.numel() < 2**20


@contextmanager
def little_memory() -> Iterator[None]:
    """Fails if the process's memory peaks above what it is now by more than MEGABYTES."""

    def peak() -> float:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is in use now
        before = peak()
    except (OSError, IndexError):  # not a Linux that says
        yield
        return
    yield
    assert peak() - before < MEGABYTES


def outcome(path: Path) -> str:
    """ "read" or "refused"; any other error, a slow or a large one, fails the test."""
    start, error = time.monotonic(), None
    with little_memory():
        try:
            read(path)
        except (ValueError, TypeError) as caught:
            error = caught
    assert time.monotonic() - start < SECONDS
    assert error is None or str(error)
    return "read" if error is None else "refused"


def refuse(path: Path, match: str = ".") -> None:
    """By the engine, soon and within little memory."""
    start = time.monotonic()
    with little_memory(), pytest.raises((ValueError, TypeError), match=match):
        LLM(path, **SMALL, device="cpu")
    assert time.monotonic() - start < SECONDS


def test_the_undamaged_files_are_read(gguf_bytes, directory, tmp_path):
    """Guards tests of files that are refused for another reason."""
    (tmp_path / "m.gguf").write_bytes(gguf_bytes)
    for path in (tmp_path / "m.gguf", lay_out(tmp_path / "m", directory)):
        read(path)
        with LLM(path, **SMALL, device="cpu") as llm:
            (out,) = llm.generate("cab", SamplingParams(max_tokens=2), use_tqdm=False)
        assert out.prompt_token_ids[-2:] == [66, 90]


# Pieces of GGUF files, written by hand after the format's description.


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def field(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + items


def info(name: bytes, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def container(
    fields: list[bytes], infos: list[bytes], data: bytes = b"", *, version: int = 3
) -> bytes:
    counts = struct.pack("<4sIQQ", b"GGUF", version, len(infos), len(fields))
    header = counts + b"".join(fields) + b"".join(infos)
    return header + bytes(-len(header) % 32) + data


ONE = field(b"a", 4, struct.pack("<I", 1))
HUGE = 2**62
# (file, what the refusal names)
CONTAINERS = {
    "empty": (b"", "empty"),
    "other-magic": (b"GGUG" + container([], [])[4:], "GGUG"),
    "version-1": (container([], [], version=1), "version 1"),
    "version-4": (container([], [], version=4), "version 4"),
    "big-endian": (container([], [], version=3 << 24), "version 50331648"),
    "many-fields": (struct.pack("<4sIQQ", b"GGUF", 3, 0, HUGE) + ONE, str(HUGE)),
    "many-tensors": (struct.pack("<4sIQQ", b"GGUF", 3, HUGE, 0) + ONE, str(HUGE)),
    "fields-cut": (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2) + ONE, "items of"),
    "long-name": (container([struct.pack("<Q", HUGE) + b"a" * 40], []), str(HUGE)),
    "long-string": (container([field(b"a", 8, struct.pack("<Q", HUGE))], []), str(HUGE)),
    "long-array": (container([field(b"a", 9, array(5, HUGE))], []), str(HUGE)),
    "array-of-2**64-1": (container([field(b"a", 9, array(0, 2**64 - 1))], []), str(2**64 - 1)),
    "long-string-array": (container([field(b"a", 9, array(8, HUGE))], []), str(HUGE)),
    "string-in-array": (
        container([field(b"a", 9, array(8, 2, text(b"x") + struct.pack("<Q", HUGE)))], []),
        str(HUGE),
    ),
    "nested-arrays": (container([field(b"a", 9, array(9, 1, array(0, 1, b"x")))], []), "type 9"),
    "unknown-type": (container([field(b"a", 13, bytes(8))], []), "type 13"),
    "unknown-item": (container([field(b"a", 9, array(200, 1, bytes(8)))], []), "items 200"),
    "field-twice": (container([ONE, ONE], []), "'a' occurs twice"),
    "name-not-utf8": (container([field(b"\xff", 4, bytes(4))], []), "utf-8"),
    "value-not-utf8": (container([field(b"a", 8, text(b"\xc3"))], []), "utf-8"),
    "item-not-utf8": (container([field(b"a", 9, array(8, 1, text(b"\x80")))], []), "utf-8"),
    "alignment-0": (container([field(b"general.alignment", 4, bytes(4))], []), "alignment 0"),
    "alignment-24": (
        container([field(b"general.alignment", 4, struct.pack("<I", 24))], []),
        "alignment 24",
    ),
    "alignment-negative": (
        container([field(b"general.alignment", 5, struct.pack("<i", -32))], []),
        "alignment -32",
    ),
    "alignment-text": (
        container([field(b"general.alignment", 8, text(b"32"))], []),
        "alignment '32'",
    ),
    "alignment-beyond": (
        container(
            [field(b"general.alignment", 4, struct.pack("<I", 2**31))],
            [info(b"t", (8,))],
            bytes(32),
        ),
        "'t' is cut off",
    ),
    "no-dims": (container([], [info(b"t", ())], bytes(64)), "0 dimensions"),
    "five-dims": (container([], [info(b"t", (1,) * 5)], bytes(64)), "5 dimensions"),
    "dim-0": (container([], [info(b"t", (8, 0))], bytes(64)), "'t' has"),
    "product-wraps": (container([], [info(b"t", (2**32, 2**32))], bytes(64)), "'t' is cut off"),
    "largest-dims": (container([], [info(b"t", (2**64 - 1,) * 4)], bytes(64)), "'t' is cut off"),
    "unknown-codes": (container([], [info(b"t", (8,), 99)], bytes(64)), "99"),
    "part-of-a-block": (container([], [info(b"t", (33,), 8)], bytes(64)), "has sizes .33"),
    "not-in-the-file": (container([], [info(b"t", (17,))], bytes(64)), "'t' is cut off"),
    "far-offset": (container([], [info(b"t", (8,), 0, 2**63)], bytes(64)), "does not follow"),
    "overlap": (
        container([], [info(b"t", (16,)), info(b"u", (8,), 0, 32)], bytes(128)),
        "'u' does not follow",
    ),
    "gap": (
        container([], [info(b"t", (8,)), info(b"u", (8,), 0, 64)], bytes(128)),
        "'u' does not follow",
    ),
    "out-of-order": (
        container([], [info(b"t", (8,), 0, 32), info(b"u", (8,))], bytes(64)),
        "'t' does not follow",
    ),
    "tensor-twice": (
        container([], [info(b"t", (8,)), info(b"t", (8,), 0, 32)], bytes(64)),
        "'t' occurs twice",
    ),
    "tensor-not-utf8": (container([], [info(b"\xf8", (8,))], bytes(64)), "utf-8"),
}


class TestGGUFContainer:
    @each("name", CONTAINERS)
    def test_whatever_is_out_of_order_is_named(self, name, tmp_path):
        path = tmp_path / "bad.gguf"
        data, match = CONTAINERS[name]
        path.write_bytes(data)
        start = time.monotonic()
        with little_memory(), pytest.raises(ValueError, match=rf"bad\.gguf.*{match}"):
            GGUFFile(path)
        assert time.monotonic() - start < SECONDS

    @pytest.mark.parametrize("version", [2, 3])
    def test_fields_and_tensors_equal_the_gguf_librarys(self, version, gguf_bytes, tmp_path):
        path = tmp_path / "m.gguf"
        path.write_bytes(gguf_bytes[:4] + struct.pack("<I", version) + gguf_bytes[8:])
        found, expected = GGUFFile(path), gguf.GGUFReader(path)
        names = [name for name in expected.fields if not name.startswith("GGUF.")]
        assert list(found.fields) == names
        for name in names:
            value = found.fields[name]
            value = value.tolist() if isinstance(value, np.ndarray) else value
            contents = expected.fields[name].contents()
            assert value == contents and type(value) is type(contents), name
        assert list(found.tensors) == [tensor.name for tensor in expected.tensors]
        for tensor in expected.tensors:
            kind, codes = found.tensors[tensor.name]
            assert kind == tensor.tensor_type
            assert np.array_equal(codes.view(tensor.data.dtype), tensor.data), tensor.name

    @pytest.mark.parametrize("alignment", [8, 32, 64])
    def test_every_type_of_field_and_alignment_is_read(self, alignment, tmp_path):
        letters = dict(enumerate("BbHhIif")) | {10: "Q", 11: "q", 12: "d"}
        fields = [field(b"general.alignment", 4, struct.pack("<I", alignment))]
        for kind, letter in letters.items():
            fields.append(field(f"one {kind}".encode(), kind, struct.pack(f"<{letter}", 3)))
            many = array(kind, 2, struct.pack(f"<2{letter}", 1, 2))
            fields.append(field(f"many {kind}".encode(), 9, many))
        fields.append(field(b"nothing", 9, array(5, 0)))
        fields.append(field(b"none", 9, array(8, 0)))
        second = -(-12 // alignment) * alignment
        infos = [info(b"t", (3,)), info(b"u", (2, 1, 2), 1, second)]
        header = struct.pack("<4sIQQ", b"GGUF", 3, 2, len(fields)) + b"".join(fields + infos)
        data = header + bytes(-len(header) % alignment)
        data += struct.pack("<3f", 1, 2, 3).ljust(second, b"\0") + bytes(8)
        path = tmp_path / "m.gguf"
        path.write_bytes(data)
        file = GGUFFile(path)
        for kind in letters:
            assert file.fields[f"one {kind}"] == 3
            assert file.fields[f"many {kind}"].tolist() == [1, 2]
        assert file.fields["nothing"].tolist() == file.fields["none"] == []
        assert file.tensors["t"][1].view(np.float32).tolist() == [1, 2, 3]
        assert file.tensors["u"][1].shape == (2, 1, 4)

    def test_a_header_has_a_limit_of_its_own(self, tmp_path):
        """Guards counts that a large file has the bytes for, and no header the use."""
        path = tmp_path / "bad.gguf"
        path.write_bytes(container([field(b"a", 9, array(8, 2**25))], []))
        os.truncate(path, 2**30)  # sparse
        with little_memory(), pytest.raises(ValueError, match=str(2**25)):
            GGUFFile(path)

    def test_a_large_vocabulary_is_read_fast(self, tmp_path):
        """Guards views of single strings, which take seconds. 0.2 s where nothing else runs."""
        path = tmp_path / "m.gguf"
        words = b"".join(text(f"token {i}".encode()) for i in range(150_000))
        numbers = array(6, 150_000, bytes(4 * 150_000))
        path.write_bytes(
            container([field(b"w", 9, array(8, 150_000, words)), field(b"n", 9, numbers)], [])
        )
        start = time.monotonic()
        file = GGUFFile(path)
        assert time.monotonic() - start < 2
        assert file.fields["w"][-1] == "token 149999" and len(file.fields["n"]) == 150_000
        assert file.fields["n"].base is not None


IDS, NAMES = (Kind.UINT32, Kind.INT32), ("bos", "eos", "unknown", "padding")


class TestGGUFTokenizer:
    @each(
        "changes, match",
        [
            *(({f"{n}_token_id": (96, k)}, f"{n}_token_id is 96") for n in NAMES for k in IDS),
            ({"bos_token_id": (-1, Kind.INT32)}, "bos_token_id is -1"),
            ({"padding_token_id": (2**32 - 1, Kind.UINT32)}, "padding_token_id is 4294967295"),
            ({"bos_token_id": ("1", Kind.STRING)}, "bos_token_id is '1'"),
            ({"eos_token_id": (1.0, Kind.FLOAT32)}, "eos_token_id must be of type int"),
            ({"eos_token_id": ([1], Kind.ARRAY)}, "eos_token_id must be of type int"),
            ({"token_type": ([1] * 95, Kind.ARRAY)}, "tokenizer.ggml.token_type has 95"),
            ({"scores": ([0.5] * 97, Kind.ARRAY)}, "tokenizer.ggml.scores has 97"),
            ({"merges": (["a", "b"], Kind.ARRAY)}, "cannot be read"),
            ({"merges": (["a b c"], Kind.ARRAY)}, "cannot be read"),
            ({"merges": (["a unknown"], Kind.ARRAY)}, "cannot be read"),
            ({"merges": ("a b", Kind.STRING)}, "cannot be read"),
            ({"tokens": ([1] * 96, Kind.ARRAY)}, "tokens must be of type list"),
            ({"tokens": (None, Kind.ARRAY)}, "lacks the field tokenizer.ggml.tokens"),
            ({"tokens": ([*VOCABULARY[1:], "x" * 1025], Kind.ARRAY)}, "too many tokens"),
            ({"model": ("none", Kind.STRING)}, "cannot be read.*none"),
            ({"model": (1, Kind.UINT32)}, "cannot be read"),
            ({"pre": (["qwen2"], Kind.ARRAY)}, "cannot be read"),
            ({"merges": (None, Kind.ARRAY), "scores": (None, Kind.ARRAY)}, "scores"),
        ],
    )
    def test_impossible_fields_are_named(self, changes, match, tmp_path):
        changes = {f"tokenizer.ggml.{name}": change for name, change in changes.items()}
        write_gguf(tmp_path / "bad.gguf", changes)
        refuse(tmp_path / "bad.gguf", rf"bad\.gguf.*{match}")

    def test_tokens_and_merges_have_a_limit(self, gguf_bytes, tmp_path, monkeypatch):
        """Guards hours in transformers' reader, which takes microseconds for each."""
        (tmp_path / "m.gguf").write_bytes(gguf_bytes)
        checkpoint = open_checkpoint(str(tmp_path / "m.gguf"))
        for limit in (97, 96):
            monkeypatch.setattr("nanovllm.checkpoints.gguf.MAX_TOKENS", limit)
            if limit == 97:
                checkpoint.load_tokenizer()
        with pytest.raises(ValueError, match=r"m\.gguf.*too many tokens"):
            checkpoint.load_tokenizer()

    def test_only_checked_fields_reach_transformers(self, gguf_bytes, tmp_path, monkeypatch):
        """Guards a reader that trusts what it reads."""
        seen = []

        def load(folder: str, gguf_file: str, **kwargs: Any) -> Any:
            reader = gguf.GGUFReader(Path(folder, gguf_file))
            seen.extend([[*reader.fields], reader.tensors, os.listdir(folder), kwargs])
            raise KeyError("stop")

        monkeypatch.setattr(PreTrainedTokenizerFast, "from_pretrained", load)
        (tmp_path / "m.gguf").write_bytes(gguf_bytes)
        with pytest.raises(ValueError, match=r"tokenizer in .*m\.gguf cannot be read: 'stop'"):
            open_checkpoint(str(tmp_path / "m.gguf")).load_tokenizer()
        names = [name for name in FIELDS if name.startswith("tokenizer.")]
        counts = ["GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"]
        own = {"add_bos_token": True}  # the file says so
        assert seen == [[*counts, "general.architecture", *names], [], ["m.gguf"], own]

    def test_files_beside_it_are_no_part_of_it(self, gguf_bytes, directory, tmp_path):
        """Guards another model's tokenizer in the same folder, which transformers would take."""
        (tmp_path / "m.gguf").write_bytes(gguf_bytes)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (tmp_path / name).write_text("{")
        tokenizer = open_checkpoint(str(tmp_path / "m.gguf")).load_tokenizer()
        assert tokenizer is not None
        assert tokenizer.encode("cab", add_special_tokens=False) == [66, 90]
        assert tokenizer.chat_template == TEMPLATE
        assert tokenizer.name_or_path == str(tmp_path / "m.gguf")


ABSURD_SIZES = [0, -1, 2**31, 2**40, 10**9, 10**400, 2.5, True, "7", [7], {"a": 7}, float("nan")]
ABSURD_NUMBERS = [0.0, -1.0, float("nan"), float("inf"), "1.0", [1.0], {"a": 1}, True, 10**400]
GGUF_VALUES = [
    (0, Kind.UINT32),
    (-1, Kind.INT32),
    (2**32 - 1, Kind.UINT32),
    (2**40, Kind.UINT64),
    (2**64 - 1, Kind.UINT64),
    (2.0, Kind.FLOAT32),
    (float("nan"), Kind.FLOAT64),
    (True, Kind.BOOL),
    ("7", Kind.STRING),
    ([7, 7], Kind.ARRAY),
    (["7"], Kind.ARRAY),
]


def is_possible(name: str, value: Any, kind: Kind | None = None) -> bool:
    """Positions beyond what is used are no harm; some zeros stand for nothing."""
    if name in ("max_position_embeddings", "llama.context_length"):
        return value in (2**31, 2**40, 10**9, 2**32 - 1)
    if kind == FIELDS.get(name, (0, Kind.UINT8))[1] == Kind.FLOAT32:
        return True
    zeros = ("rms_norm_eps", "rope_theta", "llama.vocab_size", "llama.rope.dimension_count")
    return name in zeros and value == 0 and kind != Kind.BOOL


class TestValues:
    @each(
        "name, value",
        [(n, value) for n in SIZES for value in ABSURD_SIZES if not is_possible(n, value)],
    )
    def test_absurd_sizes_of_a_config_are_refused(self, name, value, spoil):
        refuse(spoil({"config.json": {name: value}}), rf"config\.json.*{name}")

    @each(
        "name, value",
        [
            (name, value)
            for name in ("rms_norm_eps", "rope_theta", *list(ROPE)[1:])
            for value in ABSURD_NUMBERS
            if not is_possible(name, value)
        ],
    )
    def test_absurd_numbers_of_a_config_are_refused(self, name, value, spoil):
        change = {"rope_scaling": {**ROPE, name: value}} if name in ROPE else {name: value}
        refuse(spoil({"config.json": change}), r"config\.json")

    @each(
        "change",
        [
            {"rope_scaling": "linear"},
            {"rope_scaling": [1]},
            {"rope_scaling": {"rope_type": ["llama3"]}},
            {"rope_scaling": {"rope_type": "default", "freq_divisors": [1.0]}},
            {"rope_scaling": {"rope_type": "default", "freq_divisors": 2**40}},
            {"rope_scaling": {"rope_type": "linear", "factor": float("nan")}},
            {"quantization_config": "x"},
            {"quantization_config": [1]},
            {"quantization_config": {"quant_method": {"a": 1}}},
            {"dtype": ["float32"]},
            {"dtype": "__class__"},
            {"hidden_act": {"a": 1}},
            {"tie_word_embeddings": "yes"},
            {"architectures": [["LlamaForCausalLM"]]},
            {"architectures": {"LlamaForCausalLM": 1}},
            {"eos_token_id": "x"},
            {"eos_token_id": {"a": 1}},
            {"sliding_window": -1},
            {"sliding_window": "all"},
        ],
    )
    def test_values_of_wrong_types_are_refused(self, change, spoil):
        refuse(spoil({"config.json": change}))

    @each(
        "change",
        [
            {"hidden_size": 2**16, "intermediate_size": 2**20},
            {"vocab_size": 2**20, "hidden_size": 2**20},
            {"num_hidden_layers": 1024, "intermediate_size": 2**20},
            {"num_attention_heads": 1024, "head_dim": 1024, "hidden_size": 2**18},
        ],
    )
    @each("kind", ["directory", "gguf"])
    def test_more_weights_than_the_files_can_hold_are_refused(self, kind, change, spoil, tmp_path):
        """Guards what is allocated before the first tensor is found to be of another shape."""
        if kind == "directory":
            return refuse(spoil({"config.json": change}), r"config\.json.*[\d,]+ weights")
        names = {
            "hidden_size": "embedding_length",
            "intermediate_size": "feed_forward_length",
            "num_hidden_layers": "block_count",
            "num_attention_heads": "attention.head_count",
            "head_dim": "attention.key_length",
            "vocab_size": "vocab_size",
        }
        changes = {f"llama.{names[name]}": (v, Kind.UINT32) for name, v in change.items()}
        changes["llama.rope.dimension_count"] = (change.get("head_dim", 8), Kind.UINT32)
        write_gguf(tmp_path / "bad.gguf", changes)
        refuse(tmp_path / "bad.gguf", r"bad\.gguf.*([\d,]+ weights|frequency divisors)")

    def test_a_ramp_of_no_width_is_refused(self, spoil):
        """Guards a division by zero, whose NaN would go into every token."""
        change = {"rope_scaling": {**ROPE, "low_freq_factor": 4.0}}
        refuse(spoil({"config.json": change}), r"config\.json.*low_freq_factor 4\.0")

    @each("hidden, head_dim", [(32, 7), (2, None)])
    def test_heads_that_cannot_be_rotated_are_refused(self, hidden, head_dim, tmp_path):
        changes = {
            "llama.embedding_length": (hidden, Kind.UINT32),
            "llama.attention.key_length": (head_dim, Kind.UINT32),
            "llama.rope.dimension_count": (head_dim, Kind.UINT32),
        }
        write_gguf(tmp_path / "bad.gguf", changes)
        refuse(tmp_path / "bad.gguf", r"bad\.gguf.*head_dim (of 7|must be)")

    @pytest.mark.parametrize(("number", "match"), [(5, "5 frequency"), (1025, "too large")])
    def test_rope_divisors_of_another_number_are_refused(self, number, match, tmp_path):
        """The larger ones before they are dequantised."""
        write_gguf(tmp_path / "bad.gguf", num_divisors=number)
        refuse(tmp_path / "bad.gguf", rf"bad\.gguf.*{match}")

    @each(
        "name",
        [
            "config.json",
            "generation_config.json",
            "tokenizer_config.json",
            "tokenizer.json",
            "model.safetensors.index.json",
        ],
    )
    def test_deeply_nested_json_is_refused(self, name, spoil):
        """Guards RecursionError."""
        refuse(spoil({name: NESTED.encode()}))

    def test_other_numbers_cost_nothing(self, spoil):
        """num_labels makes transformers' own configs build a dict of so many entries; positions
        beyond max_model_len are not prepared for."""
        change = {"num_labels": 10**9, "max_position_embeddings": 2**40, "rope_theta": 1e20}
        with little_memory():
            read(spoil({"config.json": change}))

    @each(
        "name, value, kind",
        [
            (name, value, kind)
            for name in FIELDS
            for value, kind in GGUF_VALUES
            if name.startswith("llama.") and not is_possible(name, value, kind)
        ],
    )
    def test_absurd_fields_of_a_gguf_file_are_refused(self, name, value, kind, tmp_path):
        write_gguf(tmp_path / "bad.gguf", {name: (value, kind)})
        refuse(tmp_path / "bad.gguf", r"bad\.gguf")

    @each("value", [-1.0, float("nan"), float("inf"), -float("inf")])
    @each("name", ["rope.freq_base", "attention.layer_norm_rms_epsilon"])
    def test_absurd_numbers_of_a_gguf_file_are_refused(self, name, value, tmp_path):
        write_gguf(tmp_path / "bad.gguf", {f"llama.{name}": (value, Kind.FLOAT32)})
        refuse(tmp_path / "bad.gguf", r"bad\.gguf.*positive number")


READ_WHOLE = ["config.json", "generation_config.json", "model.safetensors.index.json"]
READ_BY_TRANSFORMERS = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
READ_BY_TRANSFORMERS += ["added_tokens.json", "chat_template.jinja", "tokenizer.model"]
READ_BY_TRANSFORMERS += ["vocab.json", "merges.txt", "additional_chat_templates/x.jinja"]


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 + (MAX_CONFIG_BYTES if path.name in CONFIGS else MAX_METADATA_BYTES))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:12ab\nsize 4\n"
FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "large": (sparse, "at most"),
    "pipe": (os.mkfifo, "not a regular file"),
    "endless": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "folder": (Path.mkdir, "not a regular file"),
    "pointer": (lambda path: path.write_text(POINTER), "Git LFS pointer: run `git lfs pull`"),
}


class TestFiles:
    """Guards an open that never returns, and memory for whatever a file's length is."""

    @each("kind", FILES)
    @each("name", [*READ_WHOLE, *READ_BY_TRANSFORMERS])
    def test_a_file_that_is_none_or_too_large_is_refused(self, name, kind, spoil):
        make, match = FILES[kind]
        folder = spoil({name: None})
        (folder / name).parent.mkdir(exist_ok=True)
        make(folder / name)
        refuse(folder, rf"{name}.*{match}")
        if name in READ_BY_TRANSFORMERS:
            with little_memory(), pytest.raises(ValueError, match=rf"{name}.*{match}"):
                load_tokenizer(str(folder))

    @each("kind", ["pipe", "endless", "folder", "pointer"])
    def test_weights_that_are_no_file_are_refused(self, kind, spoil, tmp_path):
        make, match = FILES[kind]
        folder = spoil({SHARD: None})
        make(folder / SHARD)
        refuse(folder, f"{SHARD}.*{match}")
        if kind != "folder":  # the name of a folder is that of a checkpoint
            make(tmp_path / f"{kind}.gguf")
            refuse(tmp_path / f"{kind}.gguf", f"gguf.*{match}")

    def test_links_to_files_are_read(self, directory, tmp_path):
        """As the hub's cache has them. A link to nothing is no file."""
        blobs, folder = lay_out(tmp_path / "blobs", directory), tmp_path / "m"
        folder.mkdir()
        for name in directory:
            (folder / name).symlink_to(blobs / name)
        (folder / "added_tokens.json").symlink_to(blobs / "nothing")
        read(folder)


def header_of(data: bytes) -> dict[str, Any]:
    (size,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + size])


def with_header(data: bytes, header: dict[str, Any] | bytes, size: int | None = None) -> bytes:
    (old,) = struct.unpack_from("<Q", data)
    if isinstance(header, dict):
        header = json.dumps(header).encode()
    return struct.pack("<Q", len(header) if size is None else size) + header + data[8 + old :]


NORM = "model.norm.weight"
SHARD = "model-2-of-2.safetensors"


class TestSafetensors:
    """The safetensors library checks headers; these hold it to it."""

    @each("size", [0, 7, 2**20, 2**40, 2**63, 2**64 - 1])
    def test_a_header_of_another_length_is_refused(self, size, directory, spoil):
        data = directory[SHARD]
        refuse(spoil({SHARD: with_header(data, header_of(data), size)}), f"{SHARD} cannot be read")

    @each(
        "change",
        [
            lambda entry, end: {"data_offsets": [entry[0], entry[1] + 4]},
            lambda entry, end: {"data_offsets": [entry[0] - 4, entry[1] - 4]},
            lambda entry, end: {"data_offsets": [entry[1], entry[0]]},
            lambda entry, end: {"data_offsets": [end, end + 128]},
            lambda entry, end: {"data_offsets": [2**63, 2**63 + 128]},
            lambda entry, end: {"data_offsets": [-128, 0]},
            lambda entry, end: {"data_offsets": [0]},
            lambda entry, end: {"data_offsets": "x"},
            lambda entry, end: {"shape": [33]},
            lambda entry, end: {"shape": [2**40]},
            lambda entry, end: {"shape": [2**32, 2**32]},
            lambda entry, end: {"shape": [2**62, 4, 32]},
            lambda entry, end: {"shape": [-32]},
            lambda entry, end: {"shape": [32.0]},
            lambda entry, end: {"shape": None},
            lambda entry, end: {"dtype": "F64"},
            lambda entry, end: {"dtype": "F16"},
            lambda entry, end: {"dtype": "object"},
            lambda entry, end: {"dtype": 1},
        ],
    )
    def test_an_entry_that_does_not_fit_its_bytes_is_refused(self, change, directory, spoil):
        data = directory[SHARD]
        header = header_of(data)
        end = max(entry["data_offsets"][1] for entry in header.values() if "dtype" in entry)
        header[NORM].update(change(header[NORM]["data_offsets"], end))
        refuse(spoil({SHARD: with_header(data, header)}), f"{SHARD} cannot be read")

    def test_overlapping_tensors_are_refused(self, directory, spoil):
        data = directory[SHARD]
        header = header_of(data)
        first, second, *_ = (name for name in header if name.endswith("norm.weight"))
        header[second]["data_offsets"] = header[first]["data_offsets"]
        refuse(spoil({SHARD: with_header(data, header)}), f"{SHARD} cannot be read")

    def test_a_name_given_twice_is_refused_unless_both_mean_the_same(self, directory, spoil):
        data = directory[SHARD]
        header = header_of(data)
        first, second, *_ = (name for name in header if name != "__metadata__")
        for twice, meant in ((first, second), (first, first)):
            entry = f"{json.dumps(twice)}:{json.dumps(header[meant])}"
            raw = (json.dumps(header)[:-1] + "," + entry + "}").encode()
            folder = spoil({SHARD: with_header(data, raw)})
            if twice != meant:
                refuse(folder, f"{SHARD} cannot be read")
            else:
                assert set(dict(open_checkpoint(str(folder)).tensors())) == set(hf_tensors())

    @each(
        "header",
        [
            b"{",
            b"[]",
            b"null",
            b'"x"',
            b"\xff\xfe",
            b"",
            b'{"a":{}}',
            b'{"a":[1]}',
            NESTED.encode(),
        ],
    )
    def test_a_header_that_is_none_is_refused(self, header, directory, spoil):
        refuse(spoil({SHARD: with_header(directory[SHARD], header)}), f"{SHARD} cannot be read")

    @each("size", [4, 9, 100, -1, -4096])
    def test_a_truncated_file_is_refused(self, size, directory, spoil):
        refuse(spoil({SHARD: directory[SHARD][:size]}), f"{SHARD} cannot be read")

    @each(
        "name",
        [
            "../other.safetensors",
            "sub/../../other.safetensors",
            "/etc/passwd",
            "{absolute}",
            "..",
            ".",
            "",
            "tokenizer.json",
            "x" * 5000 + ".safetensors",
            "a\0b.safetensors",
            1,
            None,
            ["model-1-of-2.safetensors"],
            {},
        ],
    )
    def test_an_index_names_files_of_its_directory_only(self, name, spoil, tmp_path):
        """Guards weights, or anything else, read from wherever a checkpoint points to."""
        other = tmp_path / "other.safetensors"
        save_file({NORM: torch.zeros(32)}, other)
        if name == "{absolute}":
            name = str(other)
        index = "model.safetensors.index.json"
        refuse(spoil({index: {"weight_map": {NORM: name}}}), r"index\.json (names|has no weight)")


def with_code(folder: Path) -> Path:
    """Puts a module into a folder that writes a file there when it is run."""
    ran = folder / "ran"
    code = f"import pathlib\npathlib.Path({str(ran)!r}).touch()\nclass C: pass\n"
    (folder / "evil.py").write_text(code)
    return ran


class Evil:
    def __reduce__(self):
        return os.mkdir, ("ran",)


REPLACE = {"type": "Replace", "pattern": {"String": "a"}}
SPELL_OUT = {**REPLACE, "content": "\ufdfa"}  # which NFKC makes 18 characters of
INSERT = {"type": "Replace", "pattern": {"Regex": ""}, "content": "a"}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def charsmap(replacement: str) -> dict[str, str]:
    """A step that makes this of an "a", by a trie of its root, a node for "a" and its leaf."""
    units, a = [0] * 256, ord("a")
    units[0], units[1 ^ a], units[1 ^ a ^ 2] = 1 << 10, 2 << 10 | 1 << 8 | a, 1 << 31
    table = struct.pack("<257I", 4 * 256, *units) + replacement.encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": b64encode(table).decode()}


class TestNothingRuns:
    @pytest.mark.parametrize("config_type", ["llama", "evil"])
    @pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "C"])
    def test_code_that_a_checkpoint_brings_is_not_run(
        self, config_type, tokenizer_class, spoil, monkeypatch
    ):
        """Nor is anybody asked on stdin whether it may run: transformers would."""
        monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("asked on stdin"))
        names = {"AutoConfig": "evil.C", "AutoTokenizer": ["evil.C", "evil.C"]}
        auto_map = {"auto_map": {**names, "AutoModelForCausalLM": "evil.C"}}
        folder = spoil(
            {
                "config.json": {**auto_map, "model_type": config_type},
                "tokenizer_config.json": {**auto_map, "tokenizer_class": tokenizer_class},
            }
        )
        ran = with_code(folder)
        checkpoint = open_checkpoint(str(folder))
        if tokenizer_class == "C":
            with pytest.raises(ValueError, match="custom code"):
                checkpoint.load_tokenizer()
        else:
            assert checkpoint.load_tokenizer() is not None
        assert len(dict(checkpoint.tensors())) == len(hf_tensors())
        assert not ran.exists()

    def test_no_source_trusts_remote_code_or_reads_pickles(self):
        sources = Path(__file__).parents[2].joinpath("nanovllm").rglob("*.py")
        for path in sources:
            source = path.read_text("utf-8")
            assert "trust_remote_code=True" not in source, path
            assert "torch.load(" not in source, path

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
    def test_pickled_weights_are_never_opened(self, name, directory, spoil, monkeypatch):
        folder = spoil({file: None for file in directory if "safetensors" in file})
        monkeypatch.chdir(folder)
        (folder / name).write_bytes(pickle.dumps(Evil()))
        refuse(folder, r"no \.safetensors weights.*pytorch_model\.bin.*never read")
        assert not (folder / "ran").exists()

    def test_a_pickle_that_the_index_names_is_never_opened(self, spoil, monkeypatch):
        names = dict.fromkeys(hf_tensors(), "pytorch_model.bin")
        folder = spoil({"model.safetensors.index.json": {"weight_map": names}})
        monkeypatch.chdir(folder)
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
        refuse(folder, r"index\.json names 'pytorch_model\.bin'")
        assert not (folder / "ran").exists()

    def test_a_pickle_under_another_name_is_not_loaded(self, spoil, monkeypatch):
        folder = spoil({SHARD: pickle.dumps(Evil())})
        monkeypatch.chdir(folder)
        refuse(folder, f"{SHARD} cannot be read")
        assert not (folder / "ran").exists()

    def test_a_tokenizer_config_cannot_name_a_gguf_file(self, gguf_bytes, spoil):
        """Guards a GGUF file that transformers' reader would see before ours."""
        changes = {"tokenizer_config.json": {"gguf_file": "m.gguf"}, "tokenizer.json": None}
        refuse(spoil({**changes, "m.gguf": gguf_bytes}), "must not name a gguf_file")

    def test_a_tokenizer_config_cannot_name_another_tokenizer_json(self, directory, spoil):
        """Guards one whose growth nobody has checked."""
        name = "tokenizer.4.0.0.json"
        changes = {"tokenizer_config.json": {"fast_tokenizer_files": [name]}}
        folder = spoil({**changes, name: directory["tokenizer.json"]})
        refuse(folder, "must not name a fast_tokenizer_files")

    @pytest.mark.parametrize("name", ["tokenizer_file", "vocab_file", "name_or_path"])
    def test_a_tokenizer_config_cannot_lead_to_other_files(self, name, directory, spoil, tmp_path):
        other = tmp_path / "other.json"
        other.write_bytes(directory["tokenizer.json"].replace(b'"ab":90', b'"zz":90'))
        folder = spoil({"tokenizer_config.json": {name: str(other)}})
        tokenizer = open_checkpoint(str(folder)).load_tokenizer()
        assert tokenizer is not None and "zz" not in tokenizer.get_vocab()

    @each("part", ["normalizer", "decoder"])
    @each("nested", [False, True])
    def test_a_tokenizer_that_multiplies_texts_is_refused(self, part, nested, directory, spoil):
        tokenizer = json.loads(directory["tokenizer.json"])
        replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
        steps = f"{part}s"
        bomb = {"type": "Sequence", steps: [replace] * 5}
        tokenizer[part] = {"type": "Sequence", steps: [bomb]} if nested else bomb
        refuse(spoil({"tokenizer.json": json.dumps(tokenizer).encode()}), "times as long")

    @each(
        "part, steps, match",
        [
            ("normalizer", [{"type": "Prepend", "prepend": "x" * 1000}], "times as long"),
            ("normalizer", [{"type": "Prepend", "prepend": "x" * 20}] * 60, "times as long"),
            ("normalizer", [{"type": "Prepend", "prepend": "x"}] * 101, "102 steps"),
            ("normalizer", [{"type": "ByteLevel"}] * 5, "times as long"),
            ("normalizer", [{"type": "NFKC"}, SPELL_OUT] * 3, "times as long"),
            ("normalizer", [charsmap("y" * 1001)], "times as long"),
            ("normalizer", [{**REPLACE, "type": "x", "content": "a" * 1001}], "times as long"),
            ("normalizer", [["y" * 1001]], "no type"),
            ("normalizer", [{"prepend": "y" * 1001}], "no type"),
            ("normalizer", [INSERT] * 9, "times as long"),
            ("pre_tokenizer", [BYTE_LEVEL] * 5, "times as long"),
            ("pre_tokenizer", [{"type": "Digits", "individual_digits": True}] * 100, "101 steps"),
            ("decoder", [INSERT] * 9, "times as long"),
            ("decoder", [{"type": "BPEDecoder", "suffix": ""}] * 10, "times as long"),
        ],
    )
    def test_a_tokenizer_that_lengthens_texts_in_another_way_is_refused(
        self, part, steps, match, directory, spoil
    ):
        tokenizer = json.loads(directory["tokenizer.json"])
        name = "pretokenizers" if part == "pre_tokenizer" else f"{part}s"
        tokenizer[part] = {"type": "Sequence", name: steps}
        refuse(spoil({"tokenizer.json": json.dumps(tokenizer).encode()}), match)

    @each(
        "step, text",
        [
            ({"type": "NFKC"}, "\ufdfa"),
            ({"type": "NFC"}, "\ufb2c"),
            ({"type": "NFD"}, "\u1f82"),
            ({"type": "ByteLevel"}, "\U0001f600"),
            (INSERT, "a"),
            (charsmap("xy"), "a"),
        ],
    )
    def test_no_step_makes_more_of_a_character_than_is_counted(self, step, text, directory):
        tokenizer = json.loads(directory["tokenizer.json"])
        normalizer = Tokenizer.from_str(json.dumps({**tokenizer, "normalizer": step})).normalizer
        factor, added = _growth(step)
        assert 1 < len(normalizer.normalize_str(text)) <= factor + added

    def test_a_tokenizer_model_that_lengthens_texts_is_refused(self, directory, spoil, monkeypatch):
        """What transformers makes of it is checked: here, of a tokenizer.json that passed."""
        tokenizer = json.loads(directory["tokenizer.json"])
        tokenizer["normalizer"] = {"type": "Prepend", "prepend": "x" * 1000}
        folder = spoil({"tokenizer.json": json.dumps(tokenizer).encode()})
        monkeypatch.setattr(
            "nanovllm.checkpoints.checkpoint._read_json",
            lambda path: {} if path.name == "tokenizer.json" else json.loads(path.read_text()),
        )
        refuse(folder, "times as long")

    def test_a_tokenizer_that_replaces_texts_is_read(self, directory, spoil):
        tokenizer = json.loads(directory["tokenizer.json"])
        tokenizer["normalizer"] = {
            "type": "Sequence",
            "normalizers": [
                {"type": "NFKC"},
                charsmap("x" * 18),  # SentencePiece's own tables have no longer ones
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
                {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
                {"type": "Prepend", "prepend": "▁"},
            ],
        }
        folder = spoil({"tokenizer.json": json.dumps(tokenizer).encode()})
        assert open_checkpoint(str(folder)).load_tokenizer() is not None

    def test_a_panic_of_the_tokenizers_library_is_a_refusal(self, directory, spoil):
        """Guards errors that are no Exception: merges shorter than a prefix to be cut off."""
        tokenizer = json.loads(directory["tokenizer.json"])
        tokenizer["model"]["continuing_subword_prefix"] = "##"
        refuse(spoil({"tokenizer.json": json.dumps(tokenizer).encode()}), "tokenizer in")

    @pytest.mark.parametrize(
        "template",
        [
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ messages.__class__.__base__.__subclasses__() }}",
            "{{ cycler.__init__.__globals__.os.mkdir('ran') }}",
            "{{ raise_exception.__globals__.keys() }}",
            "{% for i in range(10**9) %}{% endfor %}",
            "{{ messages.append(1) }}",
        ],
    )
    @pytest.mark.parametrize("origin", ["argument", "directory", "gguf"])
    def test_a_chat_template_runs_in_a_sandbox(
        self, origin, template, spoil, tmp_path, monkeypatch
    ):
        monkeypatch.chdir(tmp_path)
        path, own = tmp_path / "m.gguf", {"tokenizer.chat_template": (template, Kind.STRING)}
        if origin == "gguf":
            write_gguf(path, own)
        else:
            changes = {"chat_template": template} if origin == "directory" else {}
            path = spoil({"tokenizer_config.json": changes})
        given_template = {"chat_template": template} if origin == "argument" else {}
        with LLM(path, **SMALL, device="cpu") as llm:
            conversation = [{"role": "user", "content": "cab"}]
            with pytest.raises(ValueError, match="chat template fails"):
                llm.chat(conversation, use_tqdm=False, **given_template)
        assert not (tmp_path / "ran").exists()


# Sweeps over damage at random places.


def damaged(data: bytes, rng: random.Random) -> bytes:
    """One to three flipped bits, extreme words, cuts, and pieces moved about."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at, kind = rng.randrange(len(changed) + 1), rng.randrange(8)
        if kind < 3 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind < 6:
            size = rng.choice((1, 2, 4, 8))
            word = (rng.choice(WORDS) & (2 ** (8 * size) - 1)).to_bytes(size, "little")
            changed[at : at + size] = word[: len(changed) - at]
        elif kind == 6:
            del changed[at:]
        else:
            piece = changed[at : at + rng.randrange(64)]
            changed[(to := rng.randrange(len(changed) + 1)) : to + len(piece)] = piece
    return bytes(changed)


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything within a JSON value."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    inner = [value[key] for key in keys if isinstance(value[key], (dict, list))]
    return [(value, key) for key in keys] + [place for part in inner for place in places(part)]


def edited(data: bytes, rng: random.Random) -> bytes:
    """One to three values of a JSON file dropped or replaced by absurd ones."""
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        if not (found := places(value)):
            break
        holder, key = rng.choice(found)
        if rng.randrange(8):
            holder[key] = deepcopy(rng.choice(VALUES))
        else:
            del holder[key]
    return json.dumps(value).replace('"@nested"', NESTED).encode()


def edited_header(data: bytes, rng: random.Random) -> bytes:
    """The same for the JSON in a safetensors file."""
    return with_header(data, edited(json.dumps(header_of(data)).encode(), rng))


EDITS: dict[str, list[Callable[[bytes, random.Random], bytes]]] = {
    "config.json": [damaged, edited, edited],
    "generation_config.json": [damaged, edited],
    "tokenizer_config.json": [damaged, edited],
    "tokenizer.json": [damaged, edited, edited],
    "model.safetensors.index.json": [damaged, edited],
    SHARD: [damaged, edited_header, edited_header],
}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


def fuzz(num_cases: int) -> settings:
    return settings(
        max_examples=max(num_cases // 4, 1),
        deadline=None,  # ``outcome`` has one
        derandomize="FUZZ_SEED" not in os.environ,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """What transformers has to say of each damaged file is not kept."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("num_cases", [150, pytest.param(NUM_CASES, marks=pytest.mark.slow)])
class TestSweeps:
    def test_a_damaged_gguf_header(self, num_cases, gguf_bytes, tmp_path):
        rng, seen = random.Random(SEED), Counter[str]()
        path, end = tmp_path / "m.gguf", gguf_bytes.index(b"rope_freqs") + 64
        with little_memory():
            for i in range(num_cases):
                whole = i % 8 == 0  # so that data is cut off, too
                path.write_bytes(
                    damaged(gguf_bytes, rng)
                    if whole
                    else damaged(gguf_bytes[:end], rng) + gguf_bytes[end:]
                )
                seen[outcome(path)] += 1
        print(f"\n{seen.total()} damaged GGUF files: {dict(seen)}")
        assert seen["read"] and seen["refused"] > num_cases / 4

    @pytest.mark.parametrize("name", EDITS)
    def test_a_damaged_file_of_a_directory(self, num_cases, name, directory, tmp_path):
        rng, seen = random.Random(SEED), Counter[str]()
        folder = lay_out(tmp_path / "m", directory)
        with little_memory():
            for _ in range(num_cases // 2):
                (folder / name).write_bytes(rng.choice(EDITS[name])(directory[name], rng))
                seen[outcome(folder)] += 1
        print(f"\n{seen.total()} directories with a damaged {name}: {dict(seen)}")
        assert seen["refused"] > num_cases / 8

    def test_words_of_a_gguf_header_that_hypothesis_chooses(self, num_cases, gguf_bytes, tmp_path):
        seen, path = Counter[str](), tmp_path / "m.gguf"
        end = gguf_bytes.index(b"rope_freqs") + 64
        word = st.tuples(
            st.integers(0, end), st.sampled_from([1, 2, 4, 8]), st.integers(0, 2**64 - 1)
        )

        @fuzz(num_cases)
        @given(st.lists(word, min_size=1, max_size=3))
        def run(words: list[tuple[int, int, int]]) -> None:
            changed = bytearray(gguf_bytes)
            for at, size, value in words:
                changed[at : at + size] = value.to_bytes(8, "little")[:size]
            path.write_bytes(changed)
            seen[outcome(path)] += 1

        run()  # what hypothesis itself takes is not measured: its table of Unicode is large
        print(f"\n{seen.total()} GGUF files with other words: {dict(seen)}")
        assert seen["refused"]

    @pytest.mark.parametrize("name", [name for name in EDITS if name.endswith(".json")])
    def test_json_values_that_hypothesis_chooses(self, num_cases, name, directory, tmp_path):
        seen, folder = Counter[str](), lay_out(tmp_path / "m", directory)
        num_places = len(places(json.loads(directory[name])))

        @fuzz(num_cases)
        @given(st.integers(0, num_places - 1), json_values)
        def run(place: int, value: Any) -> None:
            edited = json.loads(directory[name])
            holder, key = places(edited)[place]
            holder[key] = value
            (folder / name).write_text(json.dumps(edited))
            seen[outcome(folder)] += 1

        run()
        print(f"\n{seen.total()} directories with other values in {name}: {dict(seen)}")
        assert seen["refused"]
