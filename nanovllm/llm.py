"""The public face of the engine."""

from nanovllm.engine.llm_engine import LLMEngine


class LLM(LLMEngine):
    """A model and everything needed to run it over a pile of prompts.

    >>> with LLM("path/to/model") as llm:
    ...     outputs = llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=32))
    ...     print(outputs[0].outputs[0].text)  # or outputs[0]["text"]

    Arguments are the fields of ``nanovllm.config.Config``. ``close()``, leaving the ``with``
    block or deleting the object frees its memory; any number can live side by side.
    """
