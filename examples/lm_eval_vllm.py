"""Evaluates a model by lm-evaluation-harness's own command line, with nanovllm as its vLLM.

    pip install -e . "lm-eval[hf]"
    python examples/lm_eval_vllm.py --model_args pretrained=MODEL,dtype=float32 --batch_size auto

runs the two small tasks in ``lm_eval_task/``. Any option of ``lm_eval`` can follow; ``--model hf``
runs the same on transformers.
"""

import os
import sys
from pathlib import Path

from nanovllm.compat import register_as_vllm

if __name__ == "__main__":
    register_as_vllm()
    from lm_eval.__main__ import cli_evaluate

    os.chdir(Path(__file__).parent / "lm_eval_task")  # the tasks name their data relative to it
    tasks = ["--include_path", ".", "--tasks", "everyday_choices,sentence_ends"]
    sys.argv[1:] = ["--model", "vllm", *tasks, *sys.argv[1:]]
    cli_evaluate()
