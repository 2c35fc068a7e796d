"""Integer helpers."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def heads_per_rank(num_heads: int, num_ranks: int) -> int:
    """Heads that each rank holds: an equal share, or a copy of one where ranks are more."""
    return 1 if num_ranks % num_heads == 0 else divide(num_heads, num_ranks)


def divide(a: int, b: int) -> int:
    """a / b where b must divide a."""
    if a % b:
        raise ValueError(f"{a} cannot be split evenly into {b} parts")
    return a // b
