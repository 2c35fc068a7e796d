"""Hostile files of a checkpoint: what to change in a copy of a good folder, and a prompt that
meets it."""

# ruff: noqa: E501 (a case is a line)

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.data.hostile.case import EITHER, ERROR
from tests.data.hostile.prompts import LOOPS

GIGABYTE = 1 << 30
Edit = Callable[[Path], None]


def edit(name: str, change: Callable[[dict[str, Any]], Any]) -> Edit:
    """Changes the values of a JSON file."""

    def apply(folder: Path) -> None:
        path = folder / name
        values = json.loads(path.read_text()) if path.exists() else {}
        change(values)
        path.write_text(json.dumps(values))

    return apply


def tokenizer(**values: Any) -> Edit:
    return edit("tokenizer.json", lambda found: found.update(values))


def added(*tokens: tuple[int, str]) -> Edit:
    """Adds tokens to the tokenizer alone."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    entries = [{"id": i, "content": content, **flags} for i, content in tokens]
    return edit("tokenizer.json", lambda found: found["added_tokens"].extend(entries))


def splitting(pattern: str) -> Edit:
    split = {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return tokenizer(pre_tokenizer={"type": "Split", **split})


def replacing(part: str, pattern: dict[str, str], content: str, times: int) -> Edit:
    step = {"type": "Replace", "pattern": pattern, "content": content}
    return tokenizer(**{part: {"type": "Sequence", f"{part}s": [step] * times}})


def starting(count: int) -> Edit:
    """A post-processor that writes so many tokens before each text."""
    token = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    special = {"<s>": {"id": "<s>", "ids": [1] * count, "tokens": ["<s>"] * count}}
    single = {"single": [token, text], "pair": [token, text, text], "special_tokens": special}
    return tokenizer(post_processor={"type": "TemplateProcessing", **single})


def template(text: str) -> Edit:
    def apply(folder: Path) -> None:
        (folder / "chat_template.jinja").write_text(text)

    return apply


def sparse(name: str, size: int) -> Edit:
    """A file of NULs that takes no space on the disk."""

    def apply(folder: Path) -> None:
        with (folder / name).open("wb") as file:
            file.truncate(size)

    return apply


def lists(name: str, count: int) -> Edit:
    """JSON that takes many times its bytes in memory."""

    def apply(folder: Path) -> None:
        (folder / name).write_text(f'{{"x": [{"[]," * count}[]]}}')

    return apply


def instead(name: str, make: Callable[[Path], None]) -> Edit:
    def apply(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return apply


def pipe(name: str) -> Edit:
    return instead(name, os.mkfifo)


def link(name: str, target: str) -> Edit:
    return instead(name, lambda path: path.symlink_to(target))


def generation(**values: Any) -> Edit:
    return edit("generation_config.json", lambda found: found.update(values))


LETTER = {"String": "a"}
CHAT: Any = [{"role": "user", "content": "hi"}]
PADDING = {
    "strategy": {"Fixed": 10**9},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "<unk>",
}
# What becomes of the engine's start, or else of the prompt: text, or a conversation.
FILES: dict[str, tuple[str, Edit, Any]] = {
    "a letter becomes 10**15": (ERROR, replacing("normalizer", LETTER, "a" * 1000, 5), "a"),
    "a pattern's match becomes 10**15": (
        ERROR, replacing("normalizer", {"Regex": "a"}, "a" * 1000, 5), "a"
    ),
    "nothing becomes 10**6": (ERROR, replacing("normalizer", {"Regex": ""}, "a" * 10**6, 2), "a"),
    "a token becomes 10**15": (ERROR, replacing("decoder", LETTER, "a" * 1000, 5), "a"),
    "a token becomes 10**9": (ERROR, replacing("decoder", {"Regex": ""}, "ab", 20), "a"),
    "a byte becomes characters, 20 times": (
        ERROR,
        tokenizer(normalizer={"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 20}),
        "a",
    ),
    "a prefix, 1,000 times": (
        ERROR,
        tokenizer(normalizer={
            "type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "x" * 10_000}] * 1000}),
        "a",
    ),
    "a start of a million tokens": (ERROR, starting(10**6), "a"),
    "padding to 10**9": (EITHER, tokenizer(padding=PADDING), "a"),
    "truncation to nothing": (
        EITHER,
        tokenizer(truncation={
            "direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 0}),
        "abc",
    ),
    "a token beyond the embedding": (ERROR, added((512, "<|beyond|>")), "x <|beyond|> y"),
    "a token far beyond": (ERROR, added((4_000_000_000, "<|far|>")), "x <|far|> y"),
    "a token of no characters": (EITHER, added((512, "")), "abc"),
    "a token of 5 MB": (EITHER, added((512, "t" * 5_000_000)), "abc"),
    "200,000 more tokens": (
        EITHER, added(*((512 + i, f"<|more {i}|>") for i in range(200_000))), "<|more 7|>"
    ),
    "a split that backtracks": (EITHER, splitting("(a+)+$|(b|b)+$"), "a" * 40 + "!"),
    "a split that backtracks further": (EITHER, splitting("(x+x+)+y|(x+x+)+z"), "x" * 100),
    "a split by nothing": (EITHER, splitting(""), "abc"),
    "a split with a deep pattern": (EITHER, splitting("(" * 5000 + "a" + ")" * 5000), "abc"),
    "a template that loops": (ERROR, template(LOOPS), CHAT),
    "a template of 4 GB": (ERROR, template("{{ 'a' * 4000000000 }}"), CHAT),
    "a template that is no text": (EITHER, template("\x00" * 100), CHAT),
    "a template of 50 MB": (EITHER, template("{# " + "x" * 50_000_000 + " #}hi"), CHAT),
    "a config of 3 GB": (ERROR, sparse("config.json", 3 * GIGABYTE), "a"),
    "a tokenizer of 3 GB": (ERROR, sparse("tokenizer.json", 3 * GIGABYTE), "a"),
    "a tokenizer's config of 3 GB": (ERROR, sparse("tokenizer_config.json", 3 * GIGABYTE), "a"),
    "settings of 3 GB": (ERROR, sparse("generation_config.json", 3 * GIGABYTE), "a"),
    "a template's file of 3 GB": (ERROR, sparse("chat_template.jinja", 3 * GIGABYTE), "a"),
    "merges of 3 GB": (ERROR, sparse("merges.txt", 3 * GIGABYTE), "a"),
    "a tokenizer.model of 3 GB": (ERROR, sparse("tokenizer.model", 3 * GIGABYTE), "a"),
    "a tokenizer's config of 20 million lists": (
        ERROR, lists("tokenizer_config.json", 20_000_000), "a"
    ),
    "a tokenizer's config of 2.7 million lists": (
        EITHER, lists("tokenizer_config.json", 2_700_000), "a"
    ),
    "weights of 3 GB of NULs": (ERROR, sparse("model.safetensors", 3 * GIGABYTE), "a"),
    "an index of 3 GB": (ERROR, sparse("model.safetensors.index.json", 3 * GIGABYTE), "a"),
    "a pipe for a config": (ERROR, pipe("config.json"), "a"),
    "a pipe for a tokenizer": (ERROR, pipe("tokenizer.json"), "a"),
    "a pipe for a tokenizer's config": (ERROR, pipe("tokenizer_config.json"), "a"),
    "a pipe for settings": (ERROR, pipe("generation_config.json"), "a"),
    "a pipe for weights": (ERROR, pipe("model.safetensors"), "a"),
    "a pipe for a template": (ERROR, pipe("chat_template.jinja"), "a"),
    "a config without end": (ERROR, link("config.json", "/dev/zero"), "a"),
    "a tokenizer without end": (ERROR, link("tokenizer.json", "/dev/zero"), "a"),
    "a template without end": (ERROR, link("chat_template.jinja", "/dev/zero"), "a"),
    "weights without end": (ERROR, link("model.safetensors", "/dev/zero"), "a"),
    "a config that is itself": (ERROR, link("config.json", "config.json"), "a"),
    "a folder for a config": (ERROR, instead("config.json", Path.mkdir), "a"),
    "a folder for weights": (ERROR, instead("model.safetensors", Path.mkdir), "a"),
    "a folder for a tokenizer": (ERROR, instead("tokenizer.json", Path.mkdir), "a"),
    "a million ends": (EITHER, generation(eos_token_id=[*range(10**6)]), "a"),
    "an end of 10**400": (EITHER, generation(eos_token_id=10**400), "a"),
    "recommended nonsense": (
        EITHER, generation(temperature=10**400, top_k=-(10**30), top_p=-1, repetition_penalty=0), "a"
    ),
    "recommended words": (EITHER, generation(temperature="hot", top_k=[5]), "a"),
}  # fmt: skip
