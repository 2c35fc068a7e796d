"""A tokenizer for shapes, which have none of their own: each id has a text, like a real one's."""

import os
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PART_EVERY = 64  # about such a share of Qwen3's tokens end or begin within a character


def stand_in_tokenizer(vocab_size: int) -> Path:
    """The folder of a byte-level tokenizer with this many tokens, made the first time: the bytes,
    words of four letters, half of them after a space, and characters with a part of another."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm"
    folder = cache / f"stand-in-tokenizer-{vocab_size}"
    if not (folder / "tokenizer_config.json").exists():  # which is written last
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        words = ["".join(word) for word in islice(product(ascii_lowercase, repeat=4), vocab_size)]
        firsts, others = "äåæçèé", "".join(map(chr, range(0x122, 0x143)))  # bytes of characters
        parts = ["".join(part) for part in product(firsts, others, others, firsts)]
        pieces = [
            parts[i // PART_EVERY] if i % PART_EVERY == 0 else "Ġ" * (i % 2) + word
            for i, word in enumerate(words)
        ]
        tokens = list(dict.fromkeys([*letters, *pieces]))[:vocab_size]
        tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
