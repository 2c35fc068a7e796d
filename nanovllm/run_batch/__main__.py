"""``python -m nanovllm.run_batch``."""

import sys

from nanovllm.run_batch.cli import main

if __name__ == "__main__":
    sys.exit(main())
