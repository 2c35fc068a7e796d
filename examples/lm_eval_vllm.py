"""Evaluates a model by lm-evaluation-harness's own command line, with nanovllm as its vLLM.

    pip install -e . "lm-eval[hf]"
    python examples/lm_eval_vllm.py --model_args pretrained=MODEL,dtype=float32 --batch_size auto

runs the two small tasks in ``lm_eval_task/``. Any option of ``lm_eval`` can follow, with paths from
the current folder; ``--model hf`` runs the same on transformers.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from nanovllm.compat import register_as_vllm

TASKS = Path(__file__).parent / "lm_eval_task"

if __name__ == "__main__":
    register_as_vllm()
    from lm_eval.__main__ import cli_evaluate

    with TemporaryDirectory() as folder:
        for task in TASKS.glob("*.yaml"):  # which name their data without a folder
            text = task.read_text("utf-8").replace("test: ", f"test: {TASKS.resolve()}/")
            Path(folder, task.name).write_text(text, "utf-8")
        tasks = ["--include_path", folder, "--tasks", "everyday_choices,sentence_ends"]
        sys.argv[1:] = ["--model", "vllm", *tasks, *sys.argv[1:]]
        cli_evaluate()
