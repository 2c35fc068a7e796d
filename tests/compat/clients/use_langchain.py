"""A prompt and a chain of two through LangChain."""

import json
import sys

from langchain_community.llms import VLLM
from langchain_core.prompts import PromptTemplate


def main() -> None:
    llm = VLLM(
        model=sys.argv[1],
        trust_remote_code=True,
        max_new_tokens=8,
        temperature=0,
        vllm_kwargs={"max_model_len": 512, "swap_space": 1, "gpu_memory_utilization": 0.8},
    )
    chain = PromptTemplate.from_template("The capital of {country} is") | llm
    results = {
        "text": llm.invoke("The capital of France is"),
        "chain": chain.batch([{"country": "Japan"}, {"country": "Italy"}], stop=["\n"]),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
