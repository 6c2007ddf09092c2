"""Options of glibc's allocator for a process that decodes images of any size for weeks."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h
LARGE = 4 << 20  # bytes


def return_freed_memory() -> bool:
    """Return freed memory to the system; False where the C library is not glibc.

    By default, glibc keeps up to 64 MB of freed memory in each arena once a large block has been freed, and has eight
    arenas per core: the memory of the server would grow with the largest uploads it has ever decoded.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    options = {M_ARENA_MAX: 2, M_MMAP_THRESHOLD: LARGE, M_TRIM_THRESHOLD: LARGE}
    return mallopt is not None and all(mallopt(option, value) == 1 for option, value in options.items())
