"""Communication between the GPUs of a tensor-parallel group."""
