"""Runs a file of requests in OpenAI's batch format: ``python -m nanovllm.run_batch --help``.

    input file -> Line -> BatchRequest -> Runner (one engine) -> record -> Writer -> output file

``Line``, ``BatchRequest`` and records are plain values, so that the middle can be elsewhere.
"""
