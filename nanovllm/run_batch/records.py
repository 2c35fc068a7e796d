"""Records: the lines of the output file, each with a request's response or error."""

import json
from dataclasses import KW_ONLY, dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

Record: TypeAlias = dict[str, Any]
ID_PREFIX = "batch_req_"  # a record's id is this and the line's number
DUPLICATE = "duplicate_custom_id"  # error code of a line that repeats an earlier custom_id


@dataclass(eq=False)
class RequestError(ValueError):
    """A request is invalid or has failed.

    Attributes:
        message: what is wrong, and what to do.
        status: the HTTP status code.
        code: a name for the kind of error.
        param: the field of the request's body that is wrong.
    """

    message: str
    _: KW_ONLY
    status: int = 400
    code: str = "invalid_request"
    param: str | None = None


@dataclass(frozen=True, slots=True)
class LineInfo:
    """The parts of an input line that its record contains.

    Attributes:
        number: the line number, from 1. Blank lines are counted too.
        digest: a hash of the text: 32 hexadecimal digits.
    """

    number: int
    digest: str


def success_record(line: LineInfo, custom_id: str, body: dict[str, Any]) -> Record:
    """Returns the record of a request that succeeded, with the response's body."""
    return _record(line, custom_id, 200, body, None)


def error_record(line: LineInfo, custom_id: str | None, error: RequestError) -> Record:
    """Returns the record of a request that failed. The error is in the response's body, as in
    OpenAI's API, and in the record's field "error"."""
    error_type = "invalid_request_error" if error.status < 500 else "server_error"
    body = {"message": error.message, "type": error_type, "param": error.param, "code": error.code}
    summary = {"code": error.code, "message": error.message}
    return _record(line, custom_id, error.status, {"error": body}, summary)


def key_for(custom_id: str) -> bytes:
    """Returns a short hash of a custom_id, which may be megabytes long."""
    return blake2b(custom_id.encode(errors="surrogatepass"), digest_size=16).digest()


def encode_record(record: Record) -> bytes:
    """Encodes a record as one line of ASCII. It has no multi-byte character, which a crash could
    cut in two, and no Unicode line separator, which a reader could take for the end of a line."""
    return json.dumps(record, allow_nan=False).encode("ascii") + b"\n"


def _record(
    line: LineInfo,
    custom_id: str | None,
    status: int,
    body: dict[str, Any],
    error: dict[str, str] | None,
) -> Record:
    return {
        "id": f"{ID_PREFIX}{line.number}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": line.digest, "body": body},
        "error": error,
    }
