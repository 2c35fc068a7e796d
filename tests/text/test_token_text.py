"""Texts of single tokens against vLLM 0.32's, for a byte-level vocabulary (SmolLM2's) and one of
SentencePiece's kind."""

import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from example import fetch_smollm2
from nanovllm import LLM, SamplingParams
from nanovllm.checkpoints.gguf import GGUFCheckpoint
from nanovllm.run_batch.request import COMPLETIONS_URL, BatchRequest, Generation
from nanovllm.run_batch.response import make_body
from nanovllm.text.prompts import PromptEncoder

EMOJI = "Hi 😀🎉, 中文 naïve 👩\u200d🚀 ok"
VLLM_EMOJI = [
    *["Hi", "", " 😀", "", "", "🎉", ",", " ", "中", "文", " na", "ïve"],
    *["", "", " 👩", "", "\u200d", "", "", "🚀", " ok"],
]
SPACES = "Hello the  in 日本 😀n"
VLLM_SPACES = [
    *[" ", "H", "e", "l", "l", "o", " ", "t", "h", "e", " ", " ", "i", "n", " "],
    *["", "", "日", "", "", "本", " ", "", "", "", "😀", "n"],
]
PIECES = ["<unk>", "▁", "▁▁", "▁▁▁", "▁Hello", *(f"<0x{byte:02X}>" for byte in range(256))]


@pytest.fixture(scope="module")
def byte_level() -> PreTrainedTokenizerBase:
    tokenizer = GGUFCheckpoint(fetch_smollm2()).load_tokenizer()
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module", params=["metaspace", "normalizer"])
def sentencepiece(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    """Written as newer tokenizer files have it, or as older ones."""
    pieces = [*PIECES, *sorted(set("Hellotheinm"))]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    if request.param == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace("▁", prepend_scheme="first", split=False)]
        )
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def texts_of(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> list[str]:
    """The text of each token after those before it."""
    encoder = PromptEncoder(tokenizer, len(tokenizer))
    rows = [encoder.decode_logprob_tokens(token_ids[:i], [t]) for i, t in enumerate(token_ids)]
    return [text for (text,) in rows]


def test_characters_of_several_tokens_have_vllms_texts(byte_level):
    """Guards texts that are replacement characters: each token was decoded alone."""
    token_ids = byte_level(EMOJI, add_special_tokens=False)["input_ids"]
    assert texts_of(byte_level, token_ids) == VLLM_EMOJI
    assert "".join(VLLM_EMOJI) == EMOJI


def test_spaces_and_bytes_of_sentencepiece_have_vllms_texts(sentencepiece):
    """Guards texts without their leading space, which made every later offset too small."""
    token_ids = sentencepiece(SPACES, add_special_tokens=False)["input_ids"]
    assert texts_of(sentencepiece, token_ids) == VLLM_SPACES


def test_every_space_that_a_piece_begins_with_is_kept(sentencepiece):
    encoder = PromptEncoder(sentencepiece, len(sentencepiece))
    token_ids = [PIECES.index(piece) for piece in ("▁", "▁▁", "▁▁▁", "▁Hello", "<0x20>")]
    assert encoder.decode_logprob_tokens([], token_ids) == [" ", "  ", "   ", " Hello", " "]


def test_the_candidates_of_a_position_do_not_see_each_other(sentencepiece):
    """Each is decoded after the tokens that stand before it."""
    encoder = PromptEncoder(sentencepiece, len(sentencepiece))
    first, second, third = (PIECES.index(f"<0x{value:02X}>") for value in "日".encode())
    other = PIECES.index(f"<0x{'旗'.encode()[-1]:02X}>")  # its first two bytes are those of 日
    context, candidates = [first, second], [third, other, first, PIECES.index("▁Hello")]
    assert encoder.decode_logprob_tokens(context, candidates) == ["日", "旗", "", " Hello"]
    assert encoder.decode_logprob_tokens([*context, third], [third]) == [""]


def test_a_replacement_character_never_ends_a_text(byte_level):
    """Also where the bytes are no character at all."""
    encoder = PromptEncoder(byte_level, len(byte_level))
    parts = [i for i in range(len(byte_level)) if byte_level.decode([i]).endswith("\ufffd")]
    assert len(parts) > 300
    for context in ([], parts[:3], parts[100:103], [parts[0], 28, parts[1]]):
        texts = encoder.decode_logprob_tokens(context, parts)
        assert not any(text.endswith("\ufffd") for text in texts)


def test_the_tokenizer_is_asked_once_for_a_whole_token(byte_level, monkeypatch):
    encoder = PromptEncoder(byte_level, len(byte_level))
    token_ids = byte_level("a plain text", add_special_tokens=False)["input_ids"]
    encoder.decode_logprob_tokens([], token_ids)
    monkeypatch.setattr(encoder._get_token_texts(False, True), "decode", None)
    assert encoder.decode_logprob_tokens(token_ids, token_ids)[0] == "a"


def test_there_are_no_texts_without_a_tokenizer():
    assert PromptEncoder(None, 8).decode_logprob_tokens([1], [2, 3]) == [None, None]


def test_texts_and_offsets_of_a_result_add_up(model_path: Path, sentencepiece, tmp_path: Path):
    """Guards offsets in batch results that were too small by each space lost before, and texts that
    were made with ``detokenize=False``."""
    folder = shutil.copytree(model_path, tmp_path / "model")
    sentencepiece.save_pretrained(folder)
    words = [i for i, piece in enumerate([*PIECES, "H", "e", "l", "o"]) if "<" not in piece]
    kwargs = {"max_tokens": 40, "ignore_eos": True, "seed": 1, "allowed_token_ids": words}
    params = SamplingParams(**kwargs, logprobs=1, prompt_logprobs=0)
    without = SamplingParams(**kwargs, logprobs=1, prompt_logprobs=0, detokenize=False)
    with LLM(folder, device="cpu", max_model_len=128) as llm:
        output, bare = llm.generate([SPACES, SPACES], [params, without])
    assert [next(iter(row.values())).decoded_token for row in output.prompt_logprobs[1:]] == (
        VLLM_SPACES[1:]
    )
    for rows in (bare.outputs[0].logprobs, bare.prompt_logprobs[1:]):
        assert {entry.decoded_token for row in rows for entry in row.values()} == {None}

    request = BatchRequest(1, "0" * 32, "a", COMPLETIONS_URL, {})
    body = make_body(request, Generation("m", params, True, [SPACES]), [output], 0)
    (choice,) = body["choices"]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert " Hello" in tokens
    spans = pairwise([*offsets, len(choice["text"])])
    assert [choice["text"][start:end] for start, end in spans] == tokens
