"""``python -m nanovllm.run_batch``."""

import os
import sys
from contextlib import suppress

from nanovllm.run_batch.supervisor import open_standard_files, supervise
from nanovllm.vllm_flags import with_dashes


def run_job() -> int:
    """Runs the job in the supervisor's child process. Returns the exit status."""
    # Imported only in the child process: it imports PyTorch, and the supervisor must stay small.
    from nanovllm.run_batch.cli import main

    return main()


if __name__ == "__main__":
    sys.argv[1:] = map(with_dashes, sys.argv[1:])  # also for the child process
    open_standard_files()
    try:
        sys.exit(supervise(run_job, sys.argv[1:]))
    finally:
        try:
            sys.stderr.flush()
        except (OSError, ValueError):
            # Otherwise Python flushes again at exit, fails, and changes the exit status to 120.
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
