"""What a run imports: nothing that it does not use."""

import subprocess
import sys
from pathlib import Path

# Slow to import, and each for some runs only.
HEAVY = {"transformers", "huggingface_hub", "tokenizers", "gguf", "llguidance", "jinja2", "ray"}
RUN = """
import sys
from nanovllm import LLM, SamplingParams
print(*sys.modules)
for ids_only in (True, False):
    with LLM({model!r}, device="cpu", skip_tokenizer_init=ids_only) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2), use_tqdm=False)
    print(*sys.modules)
"""


def modules_of(model: str) -> list[set[str]]:
    """Names of the packages loaded after the import, after a run of token ids, and after one with
    a tokenizer."""
    code = RUN.format(model=model)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200
    )
    return [{name.partition(".")[0] for name in line.split()} for line in result.stdout.split("\n")]


def test_a_run_imports_what_it_uses(model_path: Path):
    """The import took 1.85 times as long as PyTorch's."""
    imported, ran_ids, ran_text, _ = modules_of(str(model_path))
    assert "torch" in imported and not HEAVY & imported
    assert not HEAVY & ran_ids
    assert HEAVY & ran_text <= {"transformers", "huggingface_hub", "tokenizers", "jinja2"}
