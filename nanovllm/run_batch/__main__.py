"""``python -m nanovllm.run_batch``."""

import os
import sys
from contextlib import suppress

from nanovllm.run_batch.supervisor import open_standard_files, supervise


def run_job() -> int:
    """Runs the job in the supervisor's child process. Returns the exit status."""
    from nanovllm.run_batch.cli import main  # imports PyTorch, which the supervisor does without

    return main()


if __name__ == "__main__":
    open_standard_files()
    try:
        sys.exit(supervise(run_job, sys.argv[1:]))
    finally:
        try:
            sys.stderr.flush()
        except (OSError, ValueError):  # Python would flush again, fail, and exit with status 120
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
