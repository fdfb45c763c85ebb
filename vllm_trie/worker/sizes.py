"""Whole numbers that launches of kernels need. Triton has the same functions, of which each call takes microseconds."""


def cdiv(count: int, size: int) -> int:
    """Parts of `size`, the last one maybe less."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """The first power of two that is not below `count`, 1 or more."""
    return 1 << (count - 1).bit_length()
