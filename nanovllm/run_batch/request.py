"""Parses a line of the input file into prompts and sampling parameters."""

import difflib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn, TypeAlias

import xxhash

from nanovllm.run_batch.lines import MAX_LINE_BYTES, Line
from nanovllm.run_batch.records import LineInfo, Record, RequestError, error_record
from nanovllm.sampling_params import SamplingParams
from nanovllm.structured_outputs import StructuredOutputsParams

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
MAX_CHOICES = 4096  # of one request: the number of its prompts times n
MAX_BRACKETS = 4_000_000  # [ and { in a line; each makes a list or dict of about 100 bytes
MAX_LOGPROBS = 20  # per token, the limit of OpenAI and vLLM
DEFAULT_MAX_TOKENS = 16  # of completions; chats are limited by the model's length only

# The repr of SamplingParams contains only fields that have an effect.
SAMPLING_FIELDS = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.repr and field.name not in ("prompt_logprobs", "detokenize")
)


def _is_list(value: Any, is_valid: Callable[[Any], bool]) -> bool:
    """Returns whether a value is a list of valid items, at least one."""
    return isinstance(value, list) and bool(value) and all(map(is_valid, value))


def _is_prompt(value: Any) -> bool:
    is_text = isinstance(value, str) and value != ""
    return is_text or _is_list(value, lambda item: type(item) is int)


# What the value of a field must be, and a function that checks it.
Check: TypeAlias = tuple[str, Callable[[Any], bool]]
ANY: Check = ("anything", lambda value: True)  # SamplingParams or the functions below check it
BOOLEAN: Check = ("true or false", lambda value: isinstance(value, bool))
OBJECT: Check = ("an object", lambda value: isinstance(value, dict))
MESSAGES: Check = (
    "a list of messages",
    lambda value: _is_list(value, lambda item: isinstance(item, dict)),
)
PROMPTS: Check = (
    "a non-empty string, a list of token ids, or a list of either",
    lambda value: _is_prompt(value) or _is_list(value, _is_prompt),
)
NUM_LOGPROBS: Check = (
    f"an integer from 0 to {MAX_LOGPROBS}",
    lambda value: type(value) is int and 0 <= value <= MAX_LOGPROBS,
)
SHARED_FIELDS = dict.fromkeys((*SAMPLING_FIELDS, "model"), ANY) | {
    "response_format": OBJECT,
    "structured_outputs": OBJECT,
}
FIELDS: dict[str, dict[str, Check]] = {
    COMPLETIONS_URL: SHARED_FIELDS | {"prompt": PROMPTS, "logprobs": NUM_LOGPROBS},
    CHAT_URL: SHARED_FIELDS
    | {
        "messages": MESSAGES,
        "max_completion_tokens": ANY,
        "logprobs": BOOLEAN,
        "top_logprobs": NUM_LOGPROBS,
        "tools": ("a list of functions", lambda value: isinstance(value, list)),
        "chat_template": ("a Jinja template", lambda value: isinstance(value, str)),
        "chat_template_kwargs": OBJECT,
        "add_generation_prompt": BOOLEAN,
        "continue_final_message": BOOLEAN,
    },
}
REQUIRED_FIELDS = {COMPLETIONS_URL: "prompt", CHAT_URL: "messages"}
# Fields that do not affect the response.
IGNORED_FIELDS = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
}
# Fields that are accepted only with these values. Null is accepted for any field.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "priority": (0,),
    "include_reasoning": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}
ERROR_PREFIX = re.compile(r"^((prompts\[0\]|sampling_params): )+")


@dataclass(frozen=True, slots=True)
class BatchRequest(LineInfo):
    """A valid request line. Its body has not been checked yet.

    Attributes:
        custom_id: the user's name for the request.
        url: CHAT_URL or COMPLETIONS_URL.
        body: the body as parsed from JSON.
    """

    custom_id: str
    url: str
    body: dict[str, Any]

    @property
    def has_template(self) -> bool:
        """Whether the request has its own chat template."""
        options = self.body.get("chat_template_kwargs")
        inner = options.get("chat_template") if isinstance(options, dict) else None
        return self.body.get("chat_template") is not None or inner is not None

    @property
    def has_grammar(self) -> bool:
        """Whether the request asks for structured outputs."""
        fields = ("response_format", "structured_outputs")
        return any(self.body.get(name) is not None for name in fields)


@dataclass(frozen=True, slots=True)
class Generation:
    """The content of a request's body.

    Attributes:
        model: the model name for the response.
        params: the sampling parameters of the first prompt; see ``params_of`` for the others.
        has_seed: whether the body sets a seed, which is then used for all prompts.
        prompts: the prompts of a completion request: strings or lists of token ids, at least one.
        messages: the conversation of a chat request.
        template: the keyword arguments of ``LLM.render_chat`` for a chat request.
    """

    model: str
    params: SamplingParams
    has_seed: bool
    prompts: list[str | list[int]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    template: dict[str, Any] = field(default_factory=dict)

    def params_of(self, index: int) -> SamplingParams:
        """Returns the sampling parameters of a prompt. Without a seed in the body, each prompt has
        its own seed."""
        if index == 0 or self.has_seed:
            return self.params
        return replace(self.params, seed=_make_seed(self.params.seed, index))


def parse_line(line: Line, trusts_templates: bool = True) -> BatchRequest | Record:
    """Parses a line. Returns its request, or an error record if the line is invalid.

    Args:
        line: the line.
        trusts_templates: whether the request may have its own chat template.
    """
    custom_id = None
    try:
        request = _parse_object(line.text)
        if not isinstance(request.get("custom_id"), str):
            raise RequestError(
                f"custom_id must be a string, got {_brief(request.get('custom_id'))}",
                code="invalid_custom_id",
            )
        custom_id = request["custom_id"]
        if request.get("method") != "POST":
            raise RequestError(f"method must be POST, got {_brief(request.get('method'))}")
        url, body = request.get("url"), request.get("body")
        if not isinstance(url, str) or url not in FIELDS:
            raise RequestError(f"url must be {' or '.join(FIELDS)}, got {_brief(url)}")
        if not isinstance(body, dict):
            raise RequestError(f"body must be an object, got {_brief(body)}")
        parsed = BatchRequest(line.number, line.digest, custom_id, url, body)
        if not trusts_templates and parsed.has_template:
            raise RequestError(
                "a request's own chat_template is a program that this job does not trust: "
                "--trust-request-chat-template allows it",
                param="chat_template",
            )
        return parsed
    except RequestError as error:
        return error_record(line, custom_id, error)


def read_body(
    request: BatchRequest,
    defaults: SamplingParams,
    model_names: Sequence[str],
    max_tokens: int | None = None,
) -> Generation:
    """Checks and parses a request's body.

    Args:
        request: the request.
        defaults: the values of fields that the body does not set, except ``max_tokens``. A request
            without a seed gets one that is derived from ``defaults.seed``, which must be set.
        model_names: the names of the model. The first is the default.
        max_tokens: the default of chat completions; None allows up to ``max_model_len`` tokens.
            That of other completions is 16.

    Raises:
        RequestError: a field is invalid, missing or not supported.
    """
    # In the functions below, ``given`` is the body without fields that are null.
    given = {name: value for name, value in request.body.items() if value is not None}
    has_seed = given.get("seed", -1) != -1
    if not has_seed:
        given["seed"] = _make_seed(defaults.seed, request.digest)
    _check_fields(given, request.url)
    model = given.get("model", model_names[0])
    if model not in model_names:
        names = " or ".join(repr(name) for name in model_names)
        raise RequestError(
            f"the model {_brief(model)} does not exist: this job runs {names} "
            f"(--served-model-name adds names)",
            status=404,
            code="model_not_found",
            param="model",
        )
    params = _read_params(given, defaults, request.url, max_tokens)
    if request.url == CHAT_URL:
        content = {"messages": given["messages"], "template": _read_template(given)}
        num_choices = params.n
    else:
        prompt = given["prompt"]
        prompts = [prompt] if _is_prompt(prompt) else prompt
        content = {"prompts": prompts}
        num_choices = params.n * len(prompts)
    if num_choices > MAX_CHOICES:
        raise RequestError(
            f"the request asks for {num_choices} completions, but may have at most {MAX_CHOICES}: "
            f"split it into several requests",
            param="n",
        )
    return Generation(model, params, has_seed, **content)


def _make_seed(seed: int | None, name: object) -> int:
    return xxhash.xxh64_intdigest(f"{seed}/{name}".encode())


def bad_request(error: Exception) -> RequestError:
    """Converts an exception of ``LLM`` to a RequestError. Removes the index from the start of the
    message, because the call had only one prompt or conversation."""
    message = ERROR_PREFIX.sub("", str(error)).replace("messages[0]: ", "messages: ", 1)
    name = re.match(r"\w*", message)  # messages about a field begin with the field's name
    param = name[0] if name and name[0] in (*SHARED_FIELDS, "messages") else None
    return RequestError(message, param=param)


def _parse_object(text: bytes | None) -> dict[str, Any]:
    if text is None:
        raise RequestError(f"the line has {MAX_LINE_BYTES} bytes or more", code="line_too_long")
    if text.count(b"[") + text.count(b"{") > MAX_BRACKETS:
        raise RequestError(f"the line has over {MAX_BRACKETS} brackets", code="line_too_long")
    try:
        value = json.loads(text.decode("utf-8").lstrip("\ufeff"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise RequestError(f"the line is not UTF-8: {error}", code="invalid_json") from None
    except ValueError as error:
        raise RequestError(f"the line is not JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise RequestError("the line is nested too deeply", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError(f"the line is not a JSON object: {_brief(value)}", code="invalid_json")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")


def _check_fields(given: dict[str, Any], url: str) -> None:
    known = FIELDS[url]
    neutral = NEUTRAL_VALUES | {"add_special_tokens": (url == COMPLETIONS_URL,)}
    # A missing required field is checked with the value None.
    for name, value in ({REQUIRED_FIELDS[url]: None} | given).items():
        if name in known:
            expected, is_valid = known[name]
            if not is_valid(value):
                raise _invalid(name, expected, value)
        elif name not in IGNORED_FIELDS and value not in neutral.get(name, ()):
            if name in neutral:
                hint = f"; use {' or '.join(map(_brief, neutral[name]))}"
            elif name.startswith("guided_"):
                hint = "; use structured_outputs"
            else:
                near = difflib.get_close_matches(name[:80], [*known, *neutral], n=1, cutoff=0.75)
                hint = f"; did you mean {near[0]}?" if near else ""
            message = f"the field {_brief(name)} is not supported (value {_brief(value)}){hint}"
            raise _unsupported(name[:80], message)


def _read_params(
    given: dict[str, Any], defaults: SamplingParams, url: str, max_tokens: int | None
) -> SamplingParams:
    values = {name: given[name] for name in SAMPLING_FIELDS if name in given}
    if url == CHAT_URL:
        wants_logprobs, top_logprobs = given.get("logprobs", False), given.get("top_logprobs", 0)
        if top_logprobs and not wants_logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        values["logprobs"] = top_logprobs if wants_logprobs else None
        default = given.get("max_tokens", max_tokens)
        values["max_tokens"] = given.get("max_completion_tokens", default)
    else:
        values.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    values["logit_bias"] = _read_logit_bias(given.get("logit_bias"))
    values["structured_outputs"] = _read_structured_outputs(given)
    try:
        return replace(defaults, **values)
    except (TypeError, ValueError) as error:
        raise bad_request(error) from None


def _read_logit_bias(biases: Any) -> Any:
    """Converts the keys from strings, as in JSON, to ints. SamplingParams checks the values."""
    if not isinstance(biases, dict):
        return biases
    for key in biases:
        if not re.fullmatch(r"[0-9]{1,18}", key):
            raise _invalid("logit_bias", "an object with token ids for keys", key)
    return {int(key): bias for key, bias in biases.items()}


def _read_structured_outputs(given: dict[str, Any]) -> StructuredOutputsParams | None:
    params = _read_response_format(given)
    extra = given.get("structured_outputs")
    if extra is None:
        return params
    if params is not None:
        raise RequestError(
            "response_format and structured_outputs exclude each other: set one of them",
            param="structured_outputs",
        )
    names = [f.name for f in fields(StructuredOutputsParams)]
    if unknown := [name for name in extra if name not in names and extra[name]]:
        message = f"structured_outputs.{unknown[0]:.80} is not supported: use {', '.join(names)}"
        raise _unsupported("structured_outputs", message)
    try:
        return StructuredOutputsParams(**{name: extra[name] for name in names if name in extra})
    except (TypeError, ValueError) as error:
        raise RequestError(str(error), param="structured_outputs") from None


def _read_response_format(given: dict[str, Any]) -> StructuredOutputsParams | None:
    response_format = given.get("response_format", {"type": "text"})
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind != "json_schema":
        raise _invalid("response_format.type", "text, json_object or json_schema", kind)
    wrapper = response_format.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
    if not isinstance(schema, dict):
        raise _invalid("response_format.json_schema.schema", "a JSON schema", schema)
    return StructuredOutputsParams(json=schema)


def _read_template(given: dict[str, Any]) -> dict[str, Any]:
    names = ("chat_template", "chat_template_kwargs")
    options = {name: given[name] for name in names if name in given}
    continues = given.get("continue_final_message", False)
    adds_prompt = given.get("add_generation_prompt", not continues)
    if continues and adds_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    # Tool calls in the response are not parsed.
    tools = None if given.get("tool_choice") == "none" else given.get("tools") or None
    options |= {"continue_final_message": continues, "add_generation_prompt": adds_prompt}
    return options | {"tools": tools}


def _unsupported(name: str, message: str) -> RequestError:
    return RequestError(message, code="unsupported_parameter", param=name)


def _invalid(name: str, expected: str, value: Any) -> RequestError:
    param = name.partition(".")[0]
    return RequestError(f"{name} must be {expected}, got {_brief(value)}", param=param)


def _brief(value: Any) -> str:
    """Returns a value as JSON, shortened to 80 characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:  # some Python versions can parse deeper nesting than they can write
        return "a deeply nested value"
    return text if len(text) <= 80 else text[:77] + "..."
