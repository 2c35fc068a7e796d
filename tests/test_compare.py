"""benchmarks/compare.py runs this project as it would another engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import BASE, CONFIGS, TinyModels
from tests.tiny_tokenizer import save_tokenizer

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "compare.py"


@pytest.mark.slow
def test_each_workload_has_a_line(tmp_path):
    sizes = {"vocab_size": 10_001, "max_position_embeddings": 4096, "num_hidden_layers": 1}
    TinyModels.build(CONFIGS["qwen3"][0](**{**BASE, **sizes})).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    names = ["single", "prefix"]
    options = ["--num-prompts", "1", "--repeat", "1"]
    options += ["--workload", *names]
    result = subprocess.run(
        [sys.executable, SCRIPT, "--engine", "nanovllm", "--model", tmp_path, *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    single, prefix = (json.loads(line) for line in result.stdout.splitlines())
    assert (single["workload"], prefix["workload"]) == ("single", "prefix x 1")
    for line, num_tokens in ((single, 512), (prefix, 64)):
        (seconds,) = line["seconds"]
        assert abs(line["output_tokens_per_second"] * seconds / num_tokens - 1) < 0.01


def test_an_engine_that_is_not_installed_is_named(tmp_path):
    command = [sys.executable, SCRIPT, "--engine", "nano-vllm", "--model", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "nano-vllm is not installed here" in result.stderr


def test_the_benchmarks_hide_no_module_of_python():
    """The script's folder has a profile.py, on which ``import cProfile`` failed, as PyTorch's
    compiler does it."""
    code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import compare, cProfile"
    subprocess.run([sys.executable, "-c", code], check=True)
