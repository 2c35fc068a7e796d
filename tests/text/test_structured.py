"""Structured outputs: over a tiny vocabulary every mask is worked out again by brute force; with a
real one, texts drawn at random from the masks are read by json, jsonschema and re."""

import copy
import json
import random
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import jsonschema
import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from example import fetch_smollm2
from nanovllm.structured_outputs import StructuredOutputsParams
from nanovllm.text import structured
from nanovllm.text.grammar_check import GrammarChecker
from nanovllm.text.structured import Grammar, GrammarCompiler

SPECIAL = [b"<pad>", b"<eos>", b"<stop>"]
VOCAB = [
    *SPECIAL,
    *(bytes([byte]) for byte in b'{}[]":,()+-. abx012'),
    *(b"x.", b"ab", b"12", b"((", b"))", b'":', b', "', b'{"', b"  ", b"tr", b"ue", b"true"),
    *("é".encode(), "é".encode()[:1], "é".encode()[1:], "aé".encode()),
]
# The last is a token of plain text that a model's files call an end of sequence all the same.
EOS = {VOCAB.index(token) for token in (b"<eos>", b"<stop>", b"x.")}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"enum": [0, "b"]}, "maxItems": 1}},
    "additionalProperties": False,
}


# How some releases of transformers decode the byte-level tokenizers of GGUF files.
GGUF_DECODER = (
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Replace("▁", " "),
    decoders.ByteLevel(),
)


def make_tokenizer(*decoder: Any, more: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of VOCAB, in which printable Latin-1 stands for itself."""
    ids = {token.decode("latin-1").replace(" ", "Ġ"): i for i, token in enumerate(VOCAB)}
    ids |= {token: i for i, token in enumerate(more, len(VOCAB))}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.Sequence([*decoder]) if decoder else decoders.ByteLevel()
    tokenizer.add_special_tokens([token.decode() for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(make_tokenizer(), len(VOCAB), EOS)


def start(compiler: GrammarCompiler, **kwargs: Any) -> Grammar:
    return compiler.start(compiler.find(StructuredOutputsParams(**kwargs)))[0]


def allowed_ids(grammar: Grammar, vocab_size: int = len(VOCAB)) -> set[int]:
    """The token ids of a mask, read bit by bit; none is beyond the vocabulary."""
    mask = np.full(-(-vocab_size // 32), 0x5A5A5A5A, dtype=np.int32)
    grammar.fill_mask(mask)
    ids = {32 * w + i for w, word in enumerate(mask.tolist()) for i in range(32) if word >> i & 1}
    assert bool(ids) != bool(grammar.error)
    assert max(ids, default=0) < vocab_size
    return ids


def feed(grammar: Grammar, text: bytes) -> bool:
    """Whether the text is accepted, a byte a token."""
    return all(grammar.accept(VOCAB.index(bytes([byte]))) for byte in text)


def expected_ids(
    is_start: Callable[[bytes], bool], prefix: bytes, complete: bool, vocab_size: int = len(VOCAB)
) -> set[int]:
    """What may follow a prefix, if ``is_start`` tells what some whole text starts with."""
    text_ids = set(range(len(SPECIAL), min(vocab_size, len(VOCAB)))) - EOS
    ids = {i for i in text_ids if is_start(prefix + VOCAB[i])}
    return ids | {i for i in EOS if complete and i < vocab_size}


def check_all_masks(
    grammar: Grammar, language: set[bytes], vocab_size: int = len(VOCAB), max_prefix: int = 99
) -> None:
    """Compares the masks after every prefix of a language, and what is accepted there."""
    starts = {text[:n] for text in language for n in range(len(text) + 1)}
    states = {b"": grammar}
    seen = set()
    while states:
        prefix, grammar = states.popitem()
        seen.add(prefix)
        expected = expected_ids(starts.__contains__, prefix, prefix in language, vocab_size)
        assert grammar.is_finished == (expected <= EOS), prefix
        assert allowed_ids(grammar, vocab_size) == expected, prefix
        for token_id in range(-1, len(VOCAB) + 40):
            after = copy.copy(grammar)
            after._matcher = grammar._matcher.deep_copy()
            assert after.accept(token_id) == (token_id in expected), (prefix, token_id)
            if token_id not in expected:
                assert allowed_ids(after, vocab_size) == expected
            elif token_id in EOS:
                assert after.is_finished
                assert not any(after.accept(text_id) for text_id in expected - EOS)
                assert allowed_ids(after, vocab_size) == {i for i in EOS if i < vocab_size}
            elif (text := prefix + VOCAB[token_id]) not in seen and len(text) <= max_prefix:
                states[text] = after
    assert len(seen) > 1


def matches(pattern: str, alphabet: str, max_len: int) -> set[bytes]:
    texts = ("".join(chars) for n in range(max_len + 1) for chars in product(alphabet, repeat=n))
    return {text.encode() for text in texts if re.fullmatch(pattern, text)}


def spellings(*values: Any) -> set[bytes]:
    """The values in JSON, with nothing or one space between any two symbols."""
    texts = set()
    for value in values:
        symbols = re.findall(r'"[^"]*"|[\w-]+|\S', json.dumps(value, ensure_ascii=False))
        for spaces in product(("", " "), repeat=len(symbols) - 1):
            texts.add("".join(a + b for a, b in zip(symbols, (*spaces, ""), strict=True)))
    return {text.encode() for text in texts}


CHOICES = ["a", "ab", "", "é", '{"a', "12 12", "a", "a.b"]
CASES = {
    "regex": ({"regex": "a?(b|12){1,2}"}, matches("a?(b|12){1,2}", "ab12", 5)),
    "regex-anchors": ({"regex": "^a|b$"}, {b"a", b"b"}),
    "regex-lazy": ({"regex": r"[ab]{0,2}?\.x?"}, matches(r"[ab]{0,2}?\.x?", "ab.x", 4)),
    "regex-unicode": ({"regex": r"(a\w|b){1,2}x"}, matches(r"(a\w|b){1,2}x", "aébx012", 5)),
    "choice": ({"choice": CHOICES}, {choice.encode() for choice in CHOICES}),
    "enum": ({"json": {"enum": [1, 12, "ab", True, "é"]}}, spellings(1, 12, "ab", True, "é")),
    "const": ({"json": '{"const": {"a": [1]}}'}, spellings({"a": [1]})),
    "integer": (
        {"json": {"type": "integer", "minimum": -12, "maximum": 20}},
        {str(n).encode() for n in range(-12, 21)} & matches("-?[012]+", "-012", 3) | {b"-0"},
    ),
    "object": ({"json": SCHEMA}, spellings({}, {"a": []}, {"a": [0]}, {"a": ["b"]})),
    "lark": (
        {"grammar": 'start: "a" b?\nb: "(" "x"~1..2 ")" | "."'},
        {b"a", b"a.", b"a(x)", b"a(xx)"},
    ),
    "ebnf": (
        {"grammar": '  root ::= "a" b-c? # comment\n\n  b-c ::= "(" "x" "x"? ")" | "."\n'},
        {b"a", b"a.", b"a(x)", b"a(xx)"},
    ),
    "ebnf in lines": (
        {"grammar": 'root ::= "a" # an "a\n\n  # or\n  | "." | b\n b ::= [x\\-] "\\u00e9"\n| "b"'},
        {b"a", b".", "xé".encode(), "-é".encode(), b"b"},
    ),
}
PARENTHESES = {b"(" * n + b"x" + b")" * n for n in range(16)}


@pytest.mark.parametrize("name", CASES)
def test_every_mask_equals_brute_force(compiler, name):
    kwargs, language = CASES[name]
    check_all_masks(start(compiler, **kwargs), language)


@pytest.mark.parametrize("grammar", ['start: "(" start ")" | "x"', 'root ::= "(" root ")" | "x"'])
def test_grammars_may_be_recursive(compiler, grammar):
    check_all_masks(start(compiler, grammar=grammar), PARENTHESES, max_prefix=6)


LETTERS = {VOCAB.index(x.encode()): x for x in ("a", "b", "x", "é", "aé", "1", "12", "ab", ".")}
PATTERNS = st.sampled_from(["a", "b", "x", "ab", "[ab]", "[^a.]", "é", "12", r"\.", "."])


@settings(max_examples=50, deadline=None, database=None)
@given(
    pattern=st.recursive(
        PATTERNS,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map("({0[0]}|{0[1]})".format),
            st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "*?"])).map(
                "({0[0]}){0[1]}".format
            ),
        ),
        max_leaves=6,
    ),
    seed=st.integers(0, 2**32),
)
def test_masks_of_any_regex_equal_partial_matching(compiler, pattern, seed):
    """The regex package tells whether a text can still become a match."""
    draw = random.Random(seed)
    expression = regex.compile(pattern)
    grammar, text = start(compiler, regex=pattern), ""
    for _ in range(8):
        expected = {i for i in LETTERS if expression.fullmatch(text + LETTERS[i], partial=True)}
        if expression.fullmatch(text):
            expected |= EOS
        assert allowed_ids(grammar) & (set(LETTERS) | EOS) == expected
        if not expected - EOS:
            break
        token_id = draw.choice(sorted(expected - EOS))
        assert grammar.accept(token_id)
        text += LETTERS[token_id]


@pytest.mark.parametrize(("pattern", "digits"), [(r"\d", "3"), (r"[\d.]", "3"), (r"\D", "٣")])
def test_digits_of_a_regex_are_ascii(pattern, digits):
    """As in the patterns of a JSON schema. In Rust's syntax they would be those of all scripts."""
    lark = structured._to_lark("regex", pattern, GrammarChecker())
    for digit in "3٣":
        matcher = LLMatcher(LLTokenizer("byte"), lark)
        taken = matcher.try_consume_tokens(list(digit.encode()))
        assert (taken == len(digit.encode())) == (digit in digits)


@pytest.mark.parametrize("vocab_size", [len(VOCAB) - 4, len(VOCAB) - 1, 64, 65, 128])
@pytest.mark.parametrize("name", ["regex-unicode", "enum", "ebnf"])
def test_the_models_vocabulary_may_be_smaller_or_larger_than_the_tokenizers(name, vocab_size):
    kwargs, language = CASES[name]
    compiler = GrammarCompiler(make_tokenizer(), vocab_size, EOS | {vocab_size, 2**31})
    check_all_masks(start(compiler, **kwargs), language, vocab_size)


def test_json_object_is_any_object_and_whitespace_is_bounded(compiler):
    for text in (b"{}", b'{"a":1}', b'{ "a" : [ 1.0, -2 , {"b":"x"} ] }'):
        grammar = start(compiler, json_object=True)
        assert feed(grammar, text)
        assert grammar.is_finished
    for text in (b" ", b"1", b"[", b"{  ", b'{"a"  ', b'{"a":  ', b'{"a":1} '):
        assert not feed(start(compiler, json_object=True), text)


def test_special_tokens_come_where_a_lark_grammar_names_them(compiler):
    grammar = start(compiler, grammar='start: "a" <pad> "b"')
    assert feed(grammar, b"a")
    assert allowed_ids(grammar) == {VOCAB.index(b"<pad>")}
    assert grammar.accept(VOCAB.index(b"<pad>"))
    assert allowed_ids(grammar) == {VOCAB.index(b"b")}


def test_a_schema_comes_as_a_dict_a_string_or_a_class(compiler):
    class Model:
        @classmethod
        def model_json_schema(cls) -> dict[str, Any]:
            return SCHEMA

    for schema in (SCHEMA, json.dumps(SCHEMA), Model):
        check_all_masks(start(compiler, json=schema), CASES["object"][1], max_prefix=2)


def test_the_same_params_compile_once(monkeypatch):
    compiled = []
    make = structured._make_matcher
    monkeypatch.setattr(
        structured, "_make_matcher", lambda *args: compiled.append(args) or make(*args)
    )
    compiler = GrammarCompiler(make_tokenizer(), len(VOCAB), EOS)
    first = start(compiler, json=dict(SCHEMA))
    assert feed(first, b'{"a"')
    second = start(compiler, json=dict(SCHEMA))
    assert allowed_ids(second) == {VOCAB.index(b"{"), VOCAB.index(b'{"')}
    start(compiler, regex="a")
    assert len(compiled) == 2


def test_threads_that_need_the_same_grammar_compile_it_once(monkeypatch):
    both, compiled, make = threading.Barrier(4), [], structured._make_matcher

    def make_slowly(*args: Any) -> Any:
        compiled.append(args)
        return make(*args)

    monkeypatch.setattr(structured, "_make_matcher", make_slowly)
    compiler = GrammarCompiler(make_tokenizer(), len(VOCAB), EOS)

    def compile_and_feed(i: int) -> set[int]:
        both.wait(60)
        grammar = start(compiler, regex="ab|12")
        assert feed(grammar, b"a" if i % 2 else b"1")
        return allowed_ids(grammar)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(compile_and_feed, range(4)))
    assert len(compiled) == 1
    assert results == [{VOCAB.index(b"2")}, {VOCAB.index(b"b")}] * 2


def test_a_refusal_is_remembered_and_a_long_text_is_refused_at_once(compiler, monkeypatch):
    for _ in range(2):
        with pytest.raises(ValueError, match="unclosed group"):
            start(compiler, regex="(ab")
        monkeypatch.setattr(structured, "_make_matcher", None)
    values = [f"value {i}" for i in range(200_000)]
    with pytest.raises(ValueError, match=r"the json has \d+ characters, but the limit is 1000000"):
        start(compiler, json={"enum": values})


def test_where_no_token_can_follow_none_is_allowed_and_the_error_says_so():
    """The tokenizer has no z."""
    compiler = GrammarCompiler(make_tokenizer(), len(VOCAB), EOS)
    grammar = start(compiler, regex="az|b")
    assert feed(grammar, b"a")
    assert not grammar.error
    assert allowed_ids(grammar) == set()
    assert "no token in the vocabulary satisfies the grammar" in grammar.error
    assert not feed(grammar, b"b")
    assert not grammar.accept(min(EOS))


BAD = {
    "not-json": ({"json": "{'type': 1}"}, "cannot be used: Expecting property name"),
    "not-an-object": ({"json": "[1]"}, r"a JSON schema is an object, got \[1\]"),
    "not-serializable": ({"json": {"enum": {1}}}, "set is not JSON serializable"),
    "unknown-type": ({"json": {"type": "integr"}}, "Invalid type: integr"),
    "unserved-keyword": ({"json": {"uniqueItems": True}}, 'Unimplemented keys: ."uniqueItems"'),
    "unserved-not": ({"json": {"not": {"type": "null"}}}, "Unimplemented keys"),
    "overlapping-one-of": (
        {"json": {"oneOf": [{"type": "integer"}, {"minimum": 3}]}},
        "oneOf constraints are not supported",
    ),
    "missing-ref": ({"json": {"$ref": "#/$defs/x"}}, "'/.defs/x' does not exist"),
    "contradiction": ({"json": {"type": "integer", "minimum": 2, "maximum": 1}}, "Unsatisfiable"),
    "endless-ref": ({"json": {"$ref": "#"}}, "it matches no text"),
    "schema-pattern": ({"json": {"type": "string", "pattern": "("}}, "unclosed group"),
    "regex": ({"regex": "(a"}, "cannot be used: .*unclosed group"),
    "look-ahead": ({"regex": "(?=a)b"}, "look-ahead"),
    "back-reference": ({"regex": r"(a)\1"}, "backreferences are not supported"),
    "empty-grammar": ({"grammar": ""}, "cannot be used: no start rule"),
    "lark-syntax": ({"grammar": 'start: "a'}, "lexer error"),
    "lark-rule": ({"grammar": "start: b"}, 'unknown name: "b"'),
    "lark-start": ({"grammar": 'rule: "b"'}, "no start rule"),
    "lark-empty-language": ({"grammar": "start: start"}, "it matches no text"),
    "ebnf-syntax": ({"grammar": 'root ::= ("a"'}, "Expected '\\)'"),
    "ebnf-rule": ({"grammar": "root ::= b"}, "Rule 'b' not found"),
    "ebnf-root": ({"grammar": 'top ::= "a"'}, "No 'root' rule"),
    "regex-class": ({"regex": "["}, "cannot be used"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_served_is_refused(compiler, name):
    kwargs, message = BAD[name]
    with pytest.raises(ValueError, match=f"(?s){message}") as info:
        start(compiler, **kwargs)
    assert "%llguidance" not in str(info.value)  # nor the rest of how it is put to the library


@pytest.mark.parametrize(
    "tokenizer, eos, message",
    [
        (None, EOS, "the model has no tokenizer"),
        (make_tokenizer(), set(), "no EOS token"),
        (make_tokenizer(), {len(VOCAB)}, "no EOS token"),
        (
            PreTrainedTokenizerFast(
                tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
            ),
            EOS,
            "cannot use this tokenizer",
        ),
        ([], EOS, "cannot use this tokenizer: a list is not a fast tokenizer"),
    ],
    ids=["no-tokenizer", "no-eos", "eos-beyond-vocabulary", "words", "slow"],
)
def test_a_model_that_cannot_be_constrained_says_so(tokenizer, eos, message):
    compiler = GrammarCompiler(tokenizer, len(VOCAB), eos)  # asks nothing of the tokenizer yet
    with pytest.raises(ValueError, match=message):
        start(compiler, regex="a")


@pytest.mark.parametrize("name", ["regex-unicode", "enum", "object", "choice"])
def test_a_byte_level_tokenizer_may_be_decoded_in_several_steps(name):
    """Guards bytes that were taken for the characters which stand for them in the vocabulary: so
    line breaks and other control characters came into JSON strings."""
    kwargs, language = CASES[name]
    compiler = GrammarCompiler(make_tokenizer(*GGUF_DECODER), len(VOCAB), EOS)
    check_all_masks(start(compiler, **kwargs), language)


SWAPPED = (decoders.Replace("©", "¨"), decoders.ByteLevel())  # the second byte of é


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (make_tokenizer(*GGUF_DECODER, more=("<0x0A>",)), r"decodes to '\\n', not to b'<0x0A>'"),
        (make_tokenizer(decoders.Replace("a", "b"), decoders.ByteLevel()), "decodes to 'b'"),
        (make_tokenizer(*SWAPPED), "decodes to 'è', not to b'.xc3.xa9'"),
        (make_tokenizer(decoders.ByteFallback(), decoders.Strip("(", 1, 0)), "decodes to ''"),
    ],
    ids=["byte-fallback", "letter", "character", "stripped"],
)
def test_a_tokenizer_that_decodes_to_other_bytes_is_refused(tokenizer, message):
    """Guards against text that does not match, whatever the tokenizer's next surprise is."""
    compiler = GrammarCompiler(tokenizer, len(tokenizer), EOS)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"cannot use this tokenizer: token .* {message}"):
            start(compiler, regex="a")


def test_parts_of_characters_are_checked_where_they_join():
    """Each alone decodes to the same replacement character."""
    tokens = [token for token in VOCAB if token not in ("é".encode(), "aé".encode())]
    ids = {token.decode("latin-1").replace(" ", "Ġ"): i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.decoder = decoders.Sequence([*SWAPPED])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    with pytest.raises(ValueError, match="tokens of single bytes do not decode"):
        start(GrammarCompiler(wrapped, len(tokens), EOS), regex="a")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(ValueError, match=r'pip install "nanovllm\[structured\]"'):
        start(GrammarCompiler(make_tokenizer(), len(VOCAB), EOS), regex="a")


PADDING = 13  # logits beyond the tokenizer's vocabulary
SHORT = {"type": "string", "maxLength": 8}
SCHEMAS = {
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 2, "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 150},
            "mail": {"type": "string", "pattern": "^[a-z.]{1,9}@[a-z]{2,9}\\.(com|org)$"},
            "role": {"enum": ["admin", "user", None, 7]},
            "tags": {"type": "array", "items": SHORT, "minItems": 1, "maxItems": 3},
            "score": {"type": "number", "minimum": -2.5, "maximum": 1000},
        },
        "required": ["name", "age", "mail", "role"],
        "additionalProperties": False,
    },
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": SHORT,
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
    },
    "variants": {
        "oneOf": [
            {"type": "integer", "multipleOf": 7, "minimum": -700, "maximum": 700},
            {"type": "string", "format": "date"},
            {"type": "array", "prefixItems": [SHORT, {"type": "boolean"}], "items": False},
        ]
    },
    "mixed": {
        "allOf": [
            {"type": "object", "properties": {"a": SHORT}, "required": ["a"]},
            {"properties": {"b": {"const": {"x": [1, "\u00e9"]}}}, "required": ["b"]},
        ],
        "maxProperties": 3,
        "properties": {"a": {}, "b": {}},
        "patternProperties": {"^k[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    path = fetch_smollm2()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="module", params=["ByteLevel", "Sequence"])
def write(tokenizer, request) -> Callable[..., str]:
    """Draws a text at random; the tokenizer is decoded in one step or in several."""
    tokenizer = copy.deepcopy(tokenizer)
    steps = GGUF_DECODER[-1:] if request.param == "ByteLevel" else GGUF_DECODER
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([*steps])
    vocab_size = len(tokenizer) + PADDING
    eos_ids = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")}
    special_ids = set(tokenizer.all_special_ids)
    compiler = GrammarCompiler(tokenizer, vocab_size, eos_ids)
    mask = np.zeros(-(-vocab_size // 32), dtype=np.int32)

    def write(seed: int, max_tokens: int = 600, **kwargs: Any) -> str:
        draw = random.Random(seed)
        grammar = start(compiler, **kwargs)
        ids = []
        while not grammar.is_finished and len(ids) < max_tokens:
            grammar.fill_mask(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            assert allowed.max() < len(tokenizer)
            specials = special_ids.intersection(allowed.tolist())
            assert specials in (set(), eos_ids)
            ids.append(int(draw.choice(allowed)))
            assert grammar.accept(ids[-1])
        assert grammar.is_finished, f"{max_tokens} tokens were not enough"
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    return write


@pytest.mark.smoke
@pytest.mark.parametrize("name", SCHEMAS)
def test_json_is_valid_against_its_schema(write, name):
    validator = jsonschema.Draft202012Validator(SCHEMAS[name])
    for seed in range(4):
        text = write(seed, json=SCHEMAS[name])
        validator.validate(json.loads(text))
        assert not re.search(r"\s\s", re.sub(r'"(\\.|[^"\\])*"', '""', text)), text


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{3}-\d{4}",
        r"(yes|no|[Mm]aybe)( (?:of course|not at all))?[.!]",
        r"[A-Z][a-z]{1,9}(, [A-Z][a-z]{1,9}){0,3}",
        r"^\w{1,6}@[^\s@]{1,6}$",
        r"[\u4e00-\u4eff]{1,3}|.{4}|😀{2}",
    ],
)
def test_regexes_match_wholly(write, pattern):
    for seed in range(8):
        text = write(seed, regex=pattern)
        assert re.fullmatch(pattern, text), text


def test_choices(write):
    choices = ["positive", "negative", "neutral", "neutral!", "très bien", '😀 "quoted"\n']
    texts = [write(seed, choice=choices) for seed in range(40)]
    assert set(texts) == set(choices)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: sum\nsum: term (("+" | "-") term){0,3}\n'
        'term: NUMBER | "(" sum ")"\nNUMBER: /[1-9][0-9]{0,3}/',
        'root ::= sum\nsum ::= term (("+" | "-") term){0,3}\n'
        'term ::= number | "(" sum ")"\nnumber ::= [1-9] [0-9]{0,3}\n',
    ],
    ids=["lark", "ebnf"],
)
def test_grammars_of_sums_evaluate(write, grammar):
    for seed in range(8):
        text = write(seed, grammar=grammar)
        assert re.fullmatch(r"[-+()0-9]+", text)
        assert isinstance(eval(text), int)


def test_a_grammar_that_takes_long_to_follow_ends(compiler, monkeypatch):
    monkeypatch.setattr(structured, "BUDGET_SECONDS", 0.05)
    monkeypatch.setattr(structured, "ALLOWANCE_SECONDS", 0.0)
    grammar = start(compiler, grammar="start: start start | start start start | /[ab]/")
    letter = VOCAB.index(b"a")
    for _ in range(500):
        if not allowed_ids(grammar):
            break
        assert grammar.accept(letter)
    assert "its grammar has used up its CPU time" in grammar.error
    assert not allowed_ids(start(compiler, choice=["ab"])) - {letter, VOCAB.index(b"ab")}
