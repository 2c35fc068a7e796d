"""Lines of the output file: what became of a request."""

import json
from hashlib import blake2b
from typing import Any, Protocol, TypeAlias

Record: TypeAlias = dict[str, Any]
ID_PREFIX = "batch_req_"  # and the line's number
DUPLICATE = "duplicate_custom_id"  # the error of a line whose custom_id an earlier one has


class RequestError(ValueError):
    """A request that cannot be answered.

    Args:
        message: what is wrong, and what to do.
        status: as of HTTP.
        code: the kind of error.
        param: the field of the body that is to blame.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class Origin(Protocol):
    """What a record says of the line that it answers: see ``Line``."""

    @property
    def number(self) -> int: ...
    @property
    def digest(self) -> str: ...


def success_record(origin: Origin, custom_id: str, body: dict[str, Any]) -> Record:
    """``body`` is the response's."""
    return _record(origin, custom_id, 200, body, None)


def error_record(origin: Origin, custom_id: str | None, error: RequestError) -> Record:
    """The error as the response's body, where OpenAI has it, and beside the response."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    message = str(error)
    body = {"message": message, "type": kind, "param": error.param, "code": error.code}
    brief = {"code": error.code, "message": message}
    return _record(origin, custom_id, error.status, {"error": body}, brief)


def key_of(custom_id: str) -> str:
    """A name of at most 64 characters for a custom_id, which may have megabytes."""
    if len(custom_id) <= 64:
        return custom_id
    return blake2b(custom_id.encode(errors="surrogatepass"), digest_size=32).hexdigest()


def encode_record(record: Record) -> bytes:
    """As a line. Escapes make it ASCII: it can be cut nowhere but between characters, and has no
    character that some reader takes for the end of a line."""
    return json.dumps(record, allow_nan=False).encode("ascii") + b"\n"


def _record(
    origin: Origin,
    custom_id: str | None,
    status: int,
    body: dict[str, Any],
    error: dict[str, str] | None,
) -> Record:
    return {
        "id": f"{ID_PREFIX}{origin.number}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": origin.digest, "body": body},
        "error": error,
    }
