"""A pipeline of distilabel, whose steps are processes of their own; then a model loaded, asked and
unloaded in this process. (distilabel forks, and PyTorch's threads do not survive a fork: a process
that has computed on the CPU can start no pipeline.)"""

import json
import sys

from distilabel.models.llms import vLLM
from distilabel.pipeline import Pipeline
from distilabel.steps import LoadDataFromDicts
from distilabel.steps.tasks import TextGeneration

QUESTION = "What is the capital of France?"
GREEDY = {"temperature": 0.0, "max_new_tokens": 16}


def make_llm() -> vLLM:
    # Without NVIDIA's driver distilabel cannot choose a GPU.
    return vLLM(
        model=sys.argv[1],
        dtype="float32",
        extra_kwargs={"max_model_len": 512},
        disable_cuda_device_placement=True,
    )


def main() -> None:
    with Pipeline("capitals", cache_dir=sys.argv[2]) as pipeline:
        task = TextGeneration(name="task", llm=make_llm())
        LoadDataFromDicts(data=[{"instruction": QUESTION}]) >> task
    settings = {"task": {"llm": {"generation_kwargs": GREEDY}}}
    dataset = pipeline.run(parameters=settings, use_cache=False)["default"]["train"]

    llm = make_llm()
    llm.load()
    chats = [[{"role": "user", "content": text}] for text in (QUESTION, "Hello")]
    outputs = llm.generate_outputs(inputs=chats, logprobs=1, **GREEDY)
    llm.unload()

    results = {
        "texts": [output["generations"] for output in outputs],
        "num_logprobs": [len(output["logprobs"][0]) for output in outputs],
        "num_tokens": [output["statistics"]["output_tokens"] for output in outputs],
        "pipeline": list(dataset["generation"]),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
