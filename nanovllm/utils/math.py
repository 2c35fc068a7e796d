"""Integer helpers."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def divide(a: int, b: int) -> int:
    """a / b where b must divide a."""
    if a % b:
        raise ValueError(f"{a} cannot be split evenly into {b} parts")
    return a // b
