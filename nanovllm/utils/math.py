"""Integer helpers."""


def cdiv(a: int, b: int) -> int:
    """Returns a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Returns the smallest power of two that is at least n, for n > 0."""
    return 1 << (n - 1).bit_length()


def heads_per_rank(num_heads: int, num_ranks: int) -> int:
    """Returns the number of heads per rank: an equal share, or 1 if there are more ranks than
    heads, which are then replicated."""
    return 1 if num_ranks % num_heads == 0 else divide(num_heads, num_ranks)


def divide(a: int, b: int) -> int:
    """Returns a / b.

    Raises:
        ValueError: b does not divide a.
    """
    if a % b:
        raise ValueError(f"{a} cannot be split evenly into {b} parts")
    return a // b
