"""Two solutions of a small problem through EvalPlus' decoder, which its commands use."""

import json
import sys

from evalplus.provider import make_model

PROBLEM = 'def add(a, b):\n    """Returns the sum of a and b."""\n'


def main() -> None:
    decoder = make_model(
        sys.argv[1],
        backend="vllm",
        dataset="humaneval",
        batch_size=2,
        temperature=0.0,
        dtype="float32",
        instruction_prefix="Please solve this problem in a markdown code block:",
        response_prefix="Below is a Python script:",
    )
    decoder.max_new_tokens = 64
    print(json.dumps(decoder.codegen(PROBLEM, do_sample=False, num_samples=2)))


if __name__ == "__main__":
    main()
