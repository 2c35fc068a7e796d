"""The two ends of the engine where text and tokens meet, with a tokenizer of SentencePiece's kind:
words begin with a space that is lost at the start of a text, and rare characters come in bytes."""

import copy
from collections import UserList

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import BatchEncoding, PreTrainedTokenizerFast

from nanovllm import SamplingParams
from nanovllm.text.prompts import PromptEncoder, as_prompt_list

PIECES = ["<unk>", "<s>", "</s>", "▁", *"theinm", *(f"<0x{byte:02X}>" for byte in range(256))]


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    vocab = {piece: i for i, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    return PromptEncoder(wrapped, len(vocab))


def complete(encoder: PromptEncoder, prompt: str, token_ids: list[int], **params) -> str:
    """The text of a completion, made at once; a stream of it has to give the same."""
    last = encoder.tokenizer(prompt)["input_ids"][-1]
    given = SamplingParams(**params)
    whole, stream = encoder.detokenizer(last, given), encoder.detokenizer(last, given)
    whole.extend(token_ids)
    for token_id in token_ids:
        stream.append(token_id)
    whole.finish()
    stream.finish()
    assert stream.text == whole.text
    return whole.text


def ids(encoder: PromptEncoder, text: str) -> list[int]:
    return encoder.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_space_between_prompt_and_completion_is_kept(encoder):
    assert complete(encoder, "the", ids(encoder, " in")) == " in"
    assert complete(encoder, "the", ids(encoder, "in")) == "in"


@pytest.mark.parametrize("num_bytes", range(10))
def test_a_character_cut_off_spoils_none_before_it(encoder, num_bytes):
    token_ids = ids(encoder, "日本語")
    assert len(token_ids) == 9
    assert complete(encoder, "the", token_ids[:num_bytes]) == "日本語"[: num_bytes // 3]


def test_special_tokens_are_left_out_or_not(encoder):
    token_ids = [*ids(encoder, "in"), encoder.tokenizer.eos_token_id]
    assert complete(encoder, "the", token_ids) == "in"
    assert "</s>" in complete(encoder, "the", token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("piece", ["</s>", "<0xE4>"])
def test_the_work_for_a_token_is_bounded(encoder, piece, monkeypatch):
    """Guards a tail that is decoded again and again while nothing whole comes."""
    decoded = []
    encoder = PromptEncoder(encoder.tokenizer, len(PIECES))
    stream = encoder.detokenizer(5, SamplingParams(stop=["zzz"]))
    decode = stream._texts.decode
    monkeypatch.setattr(stream._texts, "decode", lambda t: decoded.append(len(t)) or decode(t))
    for _ in range(500):
        stream.append(PIECES.index(piece))
    assert max(decoded, default=0) <= 40


class Column(UserList[str]):
    """A lazy column of datasets is a Sequence, but no list."""


class Series:
    """A column of polars."""

    def __len__(self) -> int:
        return 2

    def to_list(self) -> list[str]:
        return ["a", "b"]


@pytest.mark.parametrize(
    "items", [("a", "b"), Column(["a", "b"]), np.array(["a", "b"]), Series()], ids=type
)
def test_a_column_is_as_good_as_a_list(items):
    assert as_prompt_list(items) == ["a", "b"]


def test_integers_are_one_prompt_whatever_holds_them(encoder):
    for ids in ([1, 2], (1, 2), range(1, 3), np.array([1, 2]), torch.tensor([1, 2])):
        assert as_prompt_list(ids) == [[1, 2]]
    assert encoder.encode([torch.tensor([4, 5]), {"prompt_token_ids": np.array([6])}]) == [
        (None, [4, 5]),
        (None, [6]),
    ]
    assert as_prompt_list(torch.tensor([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]
    for other in (np.int64(5), torch.tensor(5), b"ab"):
        with pytest.raises(TypeError, match="prompts must be a prompt or a list of them"):
            as_prompt_list(other)


def test_what_a_tokenizer_returns_is_refused_with_what_to_pass():
    with pytest.raises(TypeError, match="got BatchEncoding: use its 'input_ids', or chat"):
        as_prompt_list(BatchEncoding({"input_ids": [1, 2]}))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, r"`multi_modal_data` .*: images"),
        ({"prompt_embeds": [0.5]}, r"`prompt_embeds` is not supported here: embeddings"),
        ({"prompt_token_ids": np.array([0.5])}, r"token ids must be ints, got 0.5"),
        ({"prompt_token_ids": [1], "mm_processor_kwargs": "x"}, r"mm_processor_kwargs"),
        ({"prompt_token_ids": [1], "prompt": 7}, r"must be a string"),
        ("a\ud83d", r"not valid Unicode"),
    ],
    ids=str,
)
def test_what_would_be_dropped_silently_is_refused(encoder, prompt, message):
    good, bad = encoder.encode(["the", prompt])
    assert good == ("the", ids(encoder, "the"))
    with pytest.raises((TypeError, ValueError), match=message):
        raise bad


def test_keys_of_a_dict_prompt_may_be_none(encoder):
    assert encoder.encode([{"prompt": None, "prompt_token_ids": [4, 5]}]) == [(None, [4, 5])]


def test_a_cache_salt_changes_nothing():
    """vLLM's way to keep prompts from sharing cached prefixes."""
    encoder = PromptEncoder(None, 10)
    assert encoder.encode([{"prompt_token_ids": [1], "cache_salt": "x"}]) == [(None, [1])]


LONG_PIECES = ["a", " ", "b", "\u4e16", "a" * 60, " " * 100, "ab" * 8]


@pytest.fixture(scope="module")
def limited() -> PromptEncoder:
    """Of sequences of up to 50 tokens; some tokens are long."""
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *((x, -1.0) for x in LONG_PIECES)], 0))
    return PromptEncoder(PreTrainedTokenizerFast(tokenizer_object=tokenizer), 8, max_len=50)


@given(st.lists(st.sampled_from(LONG_PIECES), min_size=1, max_size=120))
@example(["a", *[" " * 100] * 8])  # the cut leaves 99 spaces, each a token
def test_a_text_that_fits_is_never_refused_for_its_length(limited, pieces):
    text = "".join(pieces)
    expected = limited.tokenizer(text)["input_ids"]
    (item,) = limited.encode([text])
    if isinstance(item, ValueError):
        assert len(expected) > limited.max_len
        assert "over 50 tokens" in str(item)
    else:
        assert item == (text, expected)


def test_a_text_that_is_far_too_long_is_not_tokenized(limited):
    lengths = []
    real = limited.tokenizer

    class Counting:
        bos_token = None
        get_vocab = real.get_vocab
        convert_ids_to_tokens = real.convert_ids_to_tokens

        def __call__(self, texts, **options):
            lengths.extend(map(len, [texts] if isinstance(texts, str) else texts))
            return real(texts, **options)

    encoder = copy.copy(limited)
    encoder.tokenizer = Counting()
    good, bad = encoder.encode(["ab", "ab " * 1_000_000])
    assert good == ("ab", real("ab")["input_ids"])
    assert "3000000 characters has over 50 tokens" in str(bad)
    assert sum(lengths) < 3000
