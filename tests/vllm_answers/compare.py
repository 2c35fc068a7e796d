"""Compares recorded answers: ``python -m tests.vllm_answers.compare OURS.json``."""

import json
import math
import sys
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "answers.json"
# Of log-probabilities: two engines add up in different orders.
TOLERANCE = 2e-3

Answers = dict[str, dict[str, Any]]


def read(path: Path) -> Answers:
    return json.loads(path.read_text())["answers"]


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, numbers of which one is a float within ``TOLERANCE``."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, float) or isinstance(other, float):
        numbers = all(isinstance(value, (int, float)) for value in (one, other))
        return numbers and (one == other or math.isclose(one, other, abs_tol=TOLERANCE, rel_tol=0))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


def differences(recorded: Answers, ours: Answers) -> dict[str, str]:
    """For each snippet that differs, a line that says how."""
    lines = {}
    for name, expected in recorded.items():
        group = name.split(".")[0]
        found = ours.get(name) or ours.get(f"{group}.*") or {"raises": "nothing: it did not run"}
        if "answer" in expected and "answer" in found:
            equal = same(expected["answer"], found["answer"])
        else:
            equal = expected.get("raises") == found.get("raises")
        if not equal:
            lines[name] = f"vLLM {_say(expected)}; here {_say(found)}"
    return lines


def _say(answer: dict[str, Any]) -> str:
    if "answer" in answer:
        return f"returns {json.dumps(answer['answer'], ensure_ascii=False):.300}"
    return f"raises {answer['raises']}" + (f" ({answer['message']})" if "message" in answer else "")


if __name__ == "__main__":
    found = differences(read(RECORDED), read(Path(sys.argv[1])))
    for name, line in sorted(found.items()):
        print(f"- `{name}`: {line}")
    print(f"\n{len(read(RECORDED)) - len(found)} of {len(read(RECORDED))} are equal")
