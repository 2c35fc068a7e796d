"""Runs a file of requests in OpenAI's batch format: ``python -m nanovllm.run_batch --help``.

    input file -> Line -> BatchRequest -> Runner (one engine) -> record -> Writer -> output file

A supervisor process runs all of this in a child process, and restarts the child if it dies.

``Line``, ``BatchRequest`` and records are plain values that can be pickled. ``replicas.py`` sends
requests to other machines and gets records back.
"""
