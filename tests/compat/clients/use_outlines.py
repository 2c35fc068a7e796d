"""Text, a choice and a JSON object through outlines."""

import json
import sys
from typing import Literal

import outlines
from pydantic import BaseModel
from vllm import LLM, SamplingParams


class City(BaseModel):
    name: str
    country: str


def main() -> None:
    model = outlines.from_vllm_offline(LLM(sys.argv[1], max_model_len=512))
    params = SamplingParams(temperature=0, max_tokens=64)
    question = "What is the capital of France?"
    results = {
        "text": model(question, sampling_params=params),
        "choice": model(question, Literal["Rome", "Paris"], sampling_params=params),
        "city": model("Name a city and its country.", City, sampling_params=params),
        "batch": model.batch([question, "Hello"], sampling_params=params),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
