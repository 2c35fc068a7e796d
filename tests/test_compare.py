"""benchmarks/compare.py runs one engine on the workloads of the comparison."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import compare
from benchmarks.workloads import SHAPES, random_workload
from tests.tiny_models import BASE, CONFIGS, TinyModels
from tests.tiny_tokenizer import save_tokenizer

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "compare.py"


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_this_project_runs_a_workload_on_a_checkpoint(tmp_path):
    config = CONFIGS["qwen3"][0](**{**BASE, "vocab_size": compare.MAX_TOKEN_ID + 1})
    TinyModels.build(config).save_pretrained(tmp_path / "tiny")
    save_tokenizer(tmp_path / "tiny")
    arguments = ["--model", "tiny", "--workloads", "single", "--max-model-len", "1024"]
    done = run("--engine", "nanovllm", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (record,) = map(json.loads, done.stdout.splitlines())
    assert record["engine"].startswith("nanovllm ")
    assert (record["model"], record["workload"], record["num_gpus"]) == ("tiny", "single", 1)
    assert len(record["seconds"]) == 2
    rate = 512 / min(record["seconds"])
    assert record["output_tokens_per_second"] == pytest.approx(rate, rel=0.01)
    assert record["input_tokens_per_second"] == pytest.approx(rate / 4, rel=0.01)


def test_an_engine_that_is_not_there_is_named(tmp_path):
    done = run("--engine", "nano-vllm", "--model", "tiny", cwd=tmp_path)
    assert done.returncode == 1
    assert "nano-vllm is not installed here" in done.stderr


def test_workloads_are_those_of_bench():
    for name in compare.WORKLOADS.keys() & SHAPES.keys():
        workload = random_workload(name)
        assert compare.make_workload(name) == (workload.prompts, workload.output_lens), name
    prompts, output_lens = compare.make_workload("prefix")
    assert {tuple(prompt[:2048]) for prompt in prompts} == {tuple(prompts[0][:2048])}
    assert {len(prompt) for prompt in prompts} == {2048 + 128}
    assert output_lens == [64] * 512


def test_repetitions_have_no_prefix_in_common():
    prompts, _ = compare.make_workload("batch8")
    first, second = (compare.fresh(prompts, number) for number in (0, 1))
    assert all(a[0] != b[0] and a[1:] == b[1:] for a, b in zip(first, second, strict=True))
