"""Communication among the GPUs of a tensor-parallel group."""
