"""A stand-in tokenizer for models of random weights, in which each token id has a text."""

import os
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PARTIAL_EVERY = 64  # about 1 in 64 of Qwen3's tokens begins or ends within a UTF-8 character


def stand_in_tokenizer(vocab_size: int) -> Path:
    """Returns the folder of a byte-level tokenizer with this many tokens. Creates the tokenizer if
    it does not exist.

    Its tokens are the single bytes, words of four letters (half of them after a space), and
    sequences that contain incomplete UTF-8 characters.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm"
    folder = cache / f"stand-in-tokenizer-{vocab_size}"
    if not (folder / "tokenizer_config.json").exists():  # written last, so the others exist too
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        words = ["".join(word) for word in islice(product(ascii_lowercase, repeat=4), vocab_size)]
        # Lead and continuation bytes of UTF-8, as a byte-level vocabulary writes them.
        leads, continuations = "äåæçèé", "".join(map(chr, range(0x122, 0x143)))
        partials = ["".join(chars) for chars in product(leads, continuations, continuations, leads)]
        pieces = [
            partials[i // PARTIAL_EVERY] if i % PARTIAL_EVERY == 0 else "Ġ" * (i % 2) + word
            for i, word in enumerate(words)
        ]
        tokens = list(dict.fromkeys([*letters, *pieces]))[:vocab_size]
        tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
