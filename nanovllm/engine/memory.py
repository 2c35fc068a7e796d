"""Out of memory: told from other errors, and put into figures."""

import torch

# What libraries say, where it is no exception of PyTorch's own kind.
SIGNS = ("out of memory", "can't allocate memory", "_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
    )


def release_unused(device: torch.device) -> None:
    """Gives back what PyTorch keeps for later, on a GPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def held_bytes(device: torch.device) -> int | None:
    """What this process holds of the GPU through PyTorch; None on a CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else None


def describe_memory(device: torch.device) -> str:
    """What is in use, for a message."""
    if device.type != "cuda":
        return "the CPU's"
    free, total = torch.cuda.mem_get_info(device)
    used, held = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    figures = [f"{num_bytes / 2**30:.2f} GiB" for num_bytes in (total, free, used, held)]
    return "{}, {} free; of this process {} in use, {} held by PyTorch".format(*figures)
