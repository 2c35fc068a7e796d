"""Starts processes of tests as forks of a server, which has imported what is slow to import.

A fork of the process that runs the tests could wait forever for a lock that one of its threads
held.
"""

import multiprocessing

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.conftest", "nanovllm.engine.startup"])
