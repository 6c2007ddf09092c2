"""Sizes of grids and tiles in plain Python: Triton's functions for them run inside kernels too, and take µs for it."""


def parts(whole: int, size: int) -> int:
    """How many of a size cover the whole."""
    return (whole + size - 1) // size


def power_of_2(number: int) -> int:
    """The smallest that is not smaller. By comparing alone, so that a compiler's symbols go through it."""
    power = 1
    while power < number:
        power *= 2
    return power
