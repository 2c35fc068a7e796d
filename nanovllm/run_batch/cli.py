"""The command line: ``python -m nanovllm.run_batch -i in.jsonl -o out.jsonl --model ...``."""

import argparse
import inspect
import logging
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from tqdm.contrib.logging import logging_redirect_tqdm

from nanovllm.compat.llm import LLM
from nanovllm.config import Config
from nanovllm.run_batch.job import Job
from nanovllm.run_batch.runner import EngineLostError, Runner
from nanovllm.run_batch.stop import StopOnSignal
from nanovllm.run_batch.supervisor import (
    DEFAULT_GRACE,
    INTERNAL_ERROR,
    INTERRUPTED,
    RESUME_HINT,
    end_with,
    print_message,
)
from nanovllm.utils.garbage import collecting_new_objects_only
from nanovllm.vllm_arguments import LLM_ARGUMENTS, load_table, translate
from nanovllm.vllm_flags import add_flags, parse_int

if TYPE_CHECKING:
    from nanovllm.run_batch.replicas import Replicas

logger = logging.getLogger("nanovllm.run_batch")

CONFIG_FIELDS = {field.name for field in fields(Config)}
ALL_DONE, SOME_FAILED, CANNOT_START = 0, 1, 2
PARSERS: dict[Any, Any] = {int: parse_int, float: float, str: str}
METAVARS: dict[Any, str] = {int: "N", float: "X", str: "NAME"}
DESCRIPTION = """\
Runs the requests of a file in OpenAI's batch format: one JSON object per line, for a completion or
a chat completion. Writes a record of each request to another file as soon as it finishes. If a job
ends early, for whatever reason, the same command resumes it."""
LLM_HELP = {
    "generation_config": "auto: what a request does not set has the value in the model's "
    "generation_config.json; vllm: vLLM's defaults (default: auto)",
    "override_generation_config": "JSON object with values that override fields of that file",
    "hf_token": "token for downloads from the hub (default: HF_TOKEN, or that of hf auth login)",
    "revision": "branch, tag or commit of a model on the hub (default: its main branch)",
    "tokenizer_revision": "that of the tokenizer (default: the model's)",
}
ENGINE_DESCRIPTION = """\
vLLM's flags for engine arguments work too. A flag that does not affect results is ignored, and the
log names it. A flag that is not supported is refused, unless its value has no effect."""
EPILOG = """\
exit status: 0 every line has a response; 1 every line has a record, but some are errors; 2 wrong
usage, or the job cannot start; 70 internal error; 75 interrupted. After 70 and 75, the same command
resumes the job."""


def _parse_path(text: str) -> Path:
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is a URL: use a file")
    return Path(text)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nanovllm.run_batch",
        usage="%(prog)s -i FILE -o FILE --model MODEL [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
        conflict_handler="resolve",  # an option replaces a flag of vLLM's of the same name
    )
    _add_vllm_flags(parser)
    add = parser.add_argument
    file: dict[str, Any] = {"type": _parse_path, "required": True, "metavar": "FILE"}
    add("-i", "--input-file", help="requests to run", **file)
    add("-o", "--output-file", help="file for records", **file)
    add(
        "--served-model-name",
        dest="model_names",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names that requests may use for the model, besides --model's value",
    )
    add(
        "--grace",
        type=float,
        default=DEFAULT_GRACE,
        metavar="SECONDS",
        help="time in which running requests may finish after SIGTERM or Ctrl-C "
        "(default: %(default).0f)",
    )
    add(
        "--chat-template",
        default=argparse.SUPPRESS,
        metavar="TEMPLATE",
        help="chat template of requests that have none: a Jinja template, or the path of a file "
        "with one (default: the model's)",
    )
    add(
        "--trust-request-chat-template",
        action="store_true",
        help="allow requests to have their own chat_template; templates are programs, so trust the "
        "author of the input file",
    )
    add("--no-progress", action="store_true", help="show no progress")
    add(
        "--replicas",
        type=int,
        metavar="N",
        help="run on N engines, which Ray distributes over the machines of a cluster",
    )
    _add_engine_options(parser.add_argument_group("engine", ENGINE_DESCRIPTION))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a job; returns the exit status."""
    args = make_parser().parse_args(argv)
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    for name in ("run_batch", "vllm_arguments"):
        logging.getLogger(f"nanovllm.{name}").setLevel(logging.INFO)
    with logging_redirect_tqdm(), StopOnSignal(args.grace) as stop:
        try:
            return _run(args, stop)
        except KeyboardInterrupt:
            return end_with(INTERRUPTED, f"interrupted; {RESUME_HINT}")
        except (OSError, EngineLostError) as error:
            return end_with(INTERRUPTED, f"error: {error}; when that is fixed, {RESUME_HINT}")
        except BaseException:  # also a panic of a Rust library, or SystemExit of any library
            logger.exception("internal error")
            return end_with(INTERNAL_ERROR, f"ended by an error; {RESUME_HINT}")


def _run(args: argparse.Namespace, stop: StopOnSignal) -> int:
    names = CONFIG_FIELDS | load_table()["LLM"].keys()
    given = {name: value for name, value in vars(args).items() if name in names}
    for_llm = {
        name: given.pop(name)
        for name, values in LLM_ARGUMENTS.items()
        if name in given and (values is None or given[name] in values)
    }
    runner: Runner | Replicas | None = None
    with ExitStack() as stack:
        try:
            if not args.grace >= 0:
                raise ValueError(f"--grace must be at least 0 seconds, got {args.grace}")
            if args.replicas is not None and args.replicas < 1:
                raise ValueError(f"--replicas must be at least 1, got {args.replicas}")
            options = asdict(Config.create(**translate("LLM", given))) | for_llm
            trusts_templates = args.trust_request_chat_template
            job = Job(args.input_file, args.output_file, trusts_templates=trusts_templates)
            stack.enter_context(closing(job))
            if not job.is_done:
                if others := job.writer.models - {*args.model_names, args.model}:
                    model = min(others)
                    logger.warning("%s has records of the model %.200r", args.output_file, model)
                runner = stack.enter_context(closing(_make_runner(job, options, args)))
        except (EngineLostError, OSError, TypeError, ValueError) as error:
            return end_with(CANNOT_START, f"error: {error}")
        except Exception as error:
            logger.exception("the engine did not start")
            return end_with(CANNOT_START, f"error: {type(error).__name__}: {error}")
        if runner is not None:
            stop.is_running = True
            records = runner.run(job.requests(), stop)
            with closing(records), collecting_new_objects_only():
                job.write(records, show_progress=not args.no_progress)
            stop.is_running = False
    print_message(job.summary())
    if not job.is_done:
        return end_with(INTERRUPTED, f"interrupted; {RESUME_HINT}")
    return SOME_FAILED if job.num_failed or job.num_skipped_failed else ALL_DONE


def _make_runner(
    job: Job, options: dict[str, Any], args: argparse.Namespace
) -> "Runner | Replicas":
    names = [*args.model_names, args.model]
    if args.replicas is None:
        return Runner(lambda: LLM(**options), names, job.journal)
    try:
        from nanovllm.run_batch.replicas import Replicas
    except ImportError as error:
        raise ValueError(f'--replicas needs Ray ({error}): pip install "nanovllm[ray]"') from error
    return Replicas(options, names, args.replicas, job.num_lines - job.num_skipped)


def _add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Adds vLLM's flags for the engine arguments that this program supports, ignores or refuses.
    ``--help`` lists only those in LLM_HELP."""
    known = CONFIG_FIELDS | LLM_ARGUMENTS.keys()
    for name, entry in load_table()["LLM"].items():
        is_known = entry["class"] != "honoured" or entry.get("as", name) in known
        if is_known and ("cli" in entry or "former" in entry):
            text = LLM_HELP.get(name, argparse.SUPPRESS)
            add_flags(parser, name, entry, default=argparse.SUPPRESS, help=text)


def _add_engine_options(group: Any) -> None:
    """Adds a command-line option for each field of Config."""
    descriptions = _field_docs(Config)
    types = get_type_hints(Config)  # drops the validators in ``Annotated[type, validator]``
    for field in fields(Config):
        kind, *_ = get_args(types[field.name]) or [types[field.name]]  # ``int`` for ``int | None``
        description = descriptions[field.name].replace("%", "%%")
        details: dict[str, Any] = {"help": description, "default": argparse.SUPPRESS}
        if kind is bool:
            details["action"] = argparse.BooleanOptionalAction
        else:
            details |= {"type": PARSERS[kind], "metavar": METAVARS[kind]}
        if field.default is MISSING:
            details["required"] = True
        elif field.default is not None:
            details["help"] += f" (default: {field.default})"
        group.add_argument(f"--{field.name.replace('_', '-')}", **details)


def _field_docs(described: type) -> dict[str, str]:
    """Returns the description of each attribute in a class's docstring."""
    text = inspect.getdoc(described) or ""
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return {
        name: " ".join(entry.split()).replace("``", "").removesuffix(".") for name, entry in entries
    }
