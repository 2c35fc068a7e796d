"""Lines that are no requests, or hardly."""

# ruff: noqa: E501 (a case is a line)

from tests.data.hostile.case import (
    COMPLETIONS,
    EITHER,
    ERROR,
    RESULT,
    body_cases,
    envelope_cases,
    raw_cases,
)

MEGABYTE = 1 << 20
START = (
    b'{"custom_id": "%s", "method": "POST", "url": "/v1/completions", "body": {"max_tokens": 2, '
)


def start(custom_id: str) -> bytes:
    """A request up to the last field of its body."""
    return START % custom_id.encode()


RAW = {
    "no JSON": (ERROR, b"no json at all"),
    "half an object": (ERROR, start("half")),
    "single quotes": (ERROR, b"{'custom_id': 'x'}"),
    "a comment": (ERROR, b"// " + start("comment") + b'"prompt": "x"}}'),
    "two objects": (ERROR, (start("two") + b'"prompt": "x"}}') * 2),
    "a list": (ERROR, b"[1, 2]"),
    "a string": (ERROR, b'"a string"'),
    "a number": (ERROR, b"1e5"),
    "null": (ERROR, b"null"),
    "NUL bytes": (ERROR, bytes(100)),
    "a NUL within a string": (ERROR, start("nul") + b'"prompt": "a\0b"}}'),
    "NULs after the object": (ERROR, start("tail") + b'"prompt": "x"}}\0\0'),
    "control characters": (ERROR, bytes(set(range(1, 32)) - {9, 10, 11, 12, 13})),
    "a carriage return within": (RESULT, start("cr") + b'\r"prompt":\r"x"}}'),
    "a vertical tab within": (ERROR, start("vt") + b'\x0b"prompt": "x"}}'),
    "invalid UTF-8": (ERROR, start("utf-8") + b'"prompt": "\xff\xfe"}}'),
    "a surrogate as UTF-8": (ERROR, start("cesu") + b'"prompt": "\xed\xa0\x80"}}'),
    "UTF-16": (ERROR, (start("utf-16") + b'"prompt": "x"}}').decode().encode("utf-16-le")[:-1]),
    "a BOM": (EITHER, b"\xef\xbb\xbf" + start("bom") + b'"prompt": "x"}}'),
    "many BOMs": (EITHER, b"\xef\xbb\xbf" * 1000 + start("boms") + b'"prompt": "x"}}'),
    "line separators": (RESULT, start("seps") + '"prompt": "a\u2028b\u2029c\x85d"}}'.encode()),
    "arrays 10,000 deep": (ERROR, b"[" * 10_000 + b"]" * 10_000),
    "a million open brackets": (ERROR, b"[" * 10**6),
    "objects 100,000 deep": (ERROR, b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "a prompt 10,000 deep": (ERROR, start("deep") + b'"prompt": %s%s}}' % (b"[" * 9999, b"]" * 9999)),
    "a prompt 900 deep": (ERROR, start("900") + b'"prompt": %s%s}}' % (b"[" * 900, b"]" * 900)),
    "a number of 5,000 digits": (ERROR, start("digits") + b'"prompt": "x", "top_k": 1%s}}' % (b"0" * 5000)),
    "a prompt given twice": (EITHER, start("twice") + b'"prompt": 5, "prompt": "x"}}'),
    "a body given twice": (EITHER, start("bodies") + b'"prompt": "x"}, "body": []}'),
    "a custom_id given twice": (EITHER, start("first") + b'"prompt": "x"}, "custom_id": "second"}'),
    "64 MiB that are no JSON": (ERROR, lambda: b"x" * (64 * MEGABYTE)),
    "64 MiB of brackets": (ERROR, lambda: b"[" * (64 * MEGABYTE - 2)),
    "just under 64 MiB": (
        ERROR,
        lambda: start("64") + b'"prompt": "%s"}}' % (b"x" * (64 * MEGABYTE - 200)),
    ),
    "100 MiB": (ERROR, lambda: start("100") + b'"prompt": "%s"}}' % (b"x" * (100 * MEGABYTE))),
    "60 MB of backslashes": (ERROR, lambda: start("esc") + b'"prompt": "%s"}}' % (b"\\" * 60_000_000)),
    "60 MB of spaces within": (RESULT, lambda: start("spaces") + b" " * 60_000_000 + b'"prompt": "x"}}'),
    "20 million zeros": (ERROR, lambda: start("zeros") + b'"prompt": [%s0]}}' % (b"0," * 20_000_000)),
    "5 million empty lists": (ERROR, lambda: start("lists") + b'"prompt": [%s[]]}}' % (b"[]," * 5_000_000)),
    "64 MB of lists, 500 deep": (
        ERROR,
        lambda: start("deep") + b'"prompt": [%s0]}}' % ((b"[" * 500 + b"]" * 500 + b",") * 66_000),
    ),
    "a million keys": (
        ERROR,
        lambda: start("keys") + b",".join(b'"%d": 0' % i for i in range(1_000_000)) + b"}}",
    ),
}  # fmt: skip
HEAVY = (
    "64 MiB that are no JSON",
    "64 MiB of brackets",
    "just under 64 MiB",
    "100 MiB",
    "60 MB of backslashes",
    "60 MB of spaces within",
    "20 million zeros",
    "5 million empty lists",
    "64 MB of lists, 500 deep",
    "a million keys",
)
ENVELOPE = {
    "an id of 1 MB": (RESULT, lambda: {"custom_id": "x" * 10**6}),
    "an id of a good line": (ERROR, {"custom_id": "good 1"}),
    "an id with newlines": (RESULT, {"custom_id": 'a\nb\r\n"}\n{'}),
    "an id of NULs": (RESULT, {"custom_id": "\0\0"}),
    "an id of surrogates": (RESULT, {"custom_id": "\ud800\udfff\ud800"}),
    "an empty id": (EITHER, {"custom_id": ""}),
    "an id like a record's": (RESULT, {"custom_id": "batch_req_1"}),
    "null for an id": (ERROR, {"custom_id": None}),
    "a number for an id": (ERROR, {"custom_id": 17}),
    "a list for an id": (ERROR, {"custom_id": ["good 1"]}),
    "true for an id": (ERROR, {"custom_id": True}),
    "method GET": (ERROR, {"method": "GET"}),
    "method in small letters": (ERROR, {"method": "post"}),
    "a list for a method": (ERROR, {"method": ["POST"]}),
    "method of surrogates": (ERROR, {"method": "\ud800"}),
    "another url": (ERROR, {"url": "/v1/embeddings"}),
    "a whole url": (ERROR, {"url": f"http://127.0.0.1{COMPLETIONS}"}),
    "a path for a url": (ERROR, {"url": "../../etc/passwd"}),
    "a list for a url": (ERROR, {"url": [COMPLETIONS]}),
    "an object for a url": (ERROR, {"url": {}}),
    "url of surrogates": (ERROR, {"url": "\udfff"}),
    "a list for a body": (ERROR, {"body": [{"prompt": "x"}]}),
    "a string for a body": (ERROR, {"body": '{"prompt": "x"}'}),
    "null for a body": (ERROR, {"body": None}),
    "an empty body": (ERROR, {"body": {}}),
    "more fields": (EITHER, {"extra": [1], "id": "batch_req_1", "response": {}}),
    "500 kB of another field": (EITHER, lambda: {"extra": ["y"] * 100_000}),
}
FIELDS = {
    "an unknown field": (ERROR, {"temprature": 1}),
    "an unknown field of 1 MB": (ERROR, lambda: {"t" * 10**6: 1}),
    "an unknown field of surrogates": (ERROR, {"\ud800": "\ud800"}),
    "an unknown field of slots": (ERROR, {"__class__": "x", "__init__": []}),
    "1,000 unknown fields": (ERROR, lambda: {f"max_token{i}": i for i in range(1000)}),
    "a stream": (ERROR, {"stream": True}),
    "a stream of 1": (ERROR, {"stream": 1}),
    "a list where false is neutral": (ERROR, {"stream": [[[]]]}),
    "another model": (ERROR, {"model": "gpt-4"}),
    "a model of surrogates": (ERROR, {"model": "\ud800"}),
    "a model that is a path": (ERROR, {"model": "/etc/passwd"}),
    "a list for a model": (ERROR, {"model": ["model"]}),
    "1 MB for a user": (RESULT, lambda: {"user": "u" * 10**6, "metadata": {"\ud800": [[[]]]}}),
    "an image": (ERROR, {"multi_modal_data": {"image": "file:///etc/passwd"}}),
    "vLLM's extra arguments": (ERROR, {"vllm_xargs": {"a": 1}, "lora_request": "x"}),
    "logits processors": (ERROR, {"logits_processors": ["os.system"]}),
    "all values null": (RESULT, dict.fromkeys(["n", "seed", "stop", "logit_bias", "top_k"])),
    "metadata 900 deep": (EITHER, {"metadata": "@json:" + "[" * 900 + "]" * 900}),
}
CASES = [
    *raw_cases("line", RAW, HEAVY),
    *envelope_cases("envelope", ENVELOPE),
    *body_cases("field", FIELDS),
]
