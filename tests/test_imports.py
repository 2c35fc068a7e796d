"""What a run imports: nothing that it does not use."""

import subprocess
import sys
from pathlib import Path

import pytest

# Slow to import, and each for some runs only.
HEAVY = {"transformers", "huggingface_hub", "tokenizers", "gguf", "llguidance", "jinja2", "ray"}
RUN = """
import sys
from nanovllm import LLM, SamplingParams
print(*sys.modules)
with LLM({model!r}, device="cpu", skip_tokenizer_init={ids_only}) as llm:
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2), use_tqdm=False)
print(*sys.modules)
"""


def modules_of(model: str, ids_only: bool) -> list[set[str]]:
    """Names of the packages loaded after the import, and after a run."""
    code = RUN.format(model=model, ids_only=ids_only)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200
    )
    return [{name.partition(".")[0] for name in line.split()} for line in result.stdout.split("\n")]


@pytest.mark.parametrize("ids_only", [True, False])
def test_a_run_imports_what_it_uses(model_path: Path, ids_only: bool):
    """The import took 1.85 times as long as PyTorch's."""
    imported, ran, _ = modules_of(str(model_path), ids_only)
    assert "torch" in imported and not HEAVY & imported
    used = set() if ids_only else {"transformers", "huggingface_hub", "tokenizers", "jinja2"}
    assert HEAVY & ran <= used
