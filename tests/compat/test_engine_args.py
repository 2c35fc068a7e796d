"""vLLM's ``EngineArgs``, in Python and on a command line."""

import dataclasses
import pickle

import pytest

from nanovllm.compat.engine_args import EngineArgs, FlexibleArgumentParser
from nanovllm.vllm_arguments import load_table

FLAGS = {name: e["cli"] for name, e in load_table()["LLM"].items() if "cli" in e}
EXAMPLES = {
    "int": ("3", 3),
    "float": ("0.5", 0.5),
    "json": ('{"a": 1}', {"a": 1}),
    "str": ("x",) * 2,
}


def parse(*args):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return EngineArgs.from_cli_args(parser.parse_args(args))


def test_an_empty_command_line_gives_the_defaults():
    assert parse() == EngineArgs()
    assert vars(EngineArgs(model="m"))["model"] == "m"
    assert dataclasses.asdict(EngineArgs())["gpu_memory_utilization"] == 0.92
    assert pickle.loads(pickle.dumps(parse())) == EngineArgs()


def test_defaults_that_can_change_are_not_shared():
    EngineArgs().override_generation_config["temperature"] = 1
    assert EngineArgs().override_generation_config == {}


def test_every_flag_sets_its_argument():
    for name, flag in FLAGS.items():
        for spelling in flag["flags"]:
            if flag["type"] == "bool":
                args, expected = [spelling], not spelling.startswith("--no-")
            else:
                text, expected = EXAMPLES[flag["type"]]
                if flag.get("choices"):
                    expected = flag["choices"][0]
                    text = str(expected)
                args = [spelling, text]
                if flag.get("nargs") == "+":
                    expected = [expected]
            assert getattr(parse(*args), name) == expected, spelling


def test_spellings_that_vllm_takes():
    args = parse("--max_model_len", "2k", "--max-num-batched-tokens=1K", "--tokenizer", "None")
    assert (args.max_model_len, args.max_num_batched_tokens, args.tokenizer) == (2000, 1024, None)
    assert parse("--max-model-len", "25.6k").max_model_len == 25_600
    assert parse("--hf_overrides", '{"a": [1]}').hf_overrides == {"a": [1]}


def test_mistakes_on_the_command_line_end_it(capsys):
    for args in (
        ["--max-model-len", "2.5K"],
        ["--max-model-len", "many"],
        ["--nonsense"],
        ["--dtype", "int3"],
    ):
        with pytest.raises(SystemExit):
            parse(*args)
    assert "not an int: 'many'" in capsys.readouterr().err


def test_unknown_fields_are_type_errors():
    with pytest.raises(TypeError, match="nonsense"):
        EngineArgs(nonsense=1)


def test_a_parser_keeps_flags_of_its_own_with_underscores():
    parser = FlexibleArgumentParser()
    parser.add_argument("--with_underscore")
    parser.add_argument("--with-dash")
    args = parser.parse_args(["--with_underscore", "a_b", "--with_dash=c_d"])
    assert (args.with_underscore, args.with_dash) == ("a_b", "c_d")
