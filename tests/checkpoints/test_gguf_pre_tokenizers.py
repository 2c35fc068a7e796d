"""How tokenizers of GGUF files split text, by hand for the rules in which they differ."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from nanovllm.checkpoints.gguf_pre_tokenizers import SPLITS, split_as

TEXT = "DON'T HelloWorld 12345!//\n x"
PIECES = {
    "llama-bpe": ["DON", "'T", " HelloWorld", " ", "123", "45", "!//\n", " x"],
    "tekken": ["DON", "'T", " Hello", "World", " ", "1", "2", "3", "4", "5", "!//\n", " x"],
    "gpt-4o": ["DON'T", " Hello", "World", " ", "123", "45", "!//\n", " x"],
    "default": ["DON", "'", "T", " HelloWorld", " 12345", "!//", "\n", " x"],  # GPT-2's
}


@pytest.mark.parametrize("name", PIECES)
def test_pieces(name):
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    split_as(tokenizer, name)
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)]
    assert [piece.replace("\u0120", " ").replace("\u010a", "\n") for piece in pieces] == PIECES[
        name
    ]


def test_names_of_the_same_rules():
    assert SPLITS["llama3"] == SPLITS["llama-v3"] == SPLITS["llama-bpe"] == SPLITS["dbrx"]
