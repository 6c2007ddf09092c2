"""Freed memory goes back to the system."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import saccade

CODE = """
import ctypes, runpy, sys

return_freed_memory = runpy.run_path(sys.argv[1])["return_freed_memory"]  # without torch
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]


def megabytes():
    return int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0]) / 1024


def freed_but_resident():
    '''Megabytes that remain after 30 blocks of 1 MB have been freed, when a block of 24 MB had been freed before.'''
    libc.free(libc.malloc(24 << 20))  # raises glibc's thresholds
    before = megabytes()
    blocks = [libc.malloc(1 << 20) for _ in range(30)]
    for block in blocks:
        ctypes.memset(block, 1, 1 << 20)
    for block in blocks:
        libc.free(block)
    return megabytes() - before


if {call}:
    assert return_freed_memory()
print(freed_but_resident())
"""


@pytest.mark.skipif(not os.path.exists("/lib64/ld-linux-x86-64.so.2"), reason="needs glibc")
def test_freed_memory_is_returned():
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    file = str(Path(saccade.__file__).parent / "web" / "memory.py")
    default, returned = (
        float(
            subprocess.check_output(
                [sys.executable, "-c", CODE.replace("{call}", call), file], env=environment, text=True
            )
        )
        for call in ("False", "True")
    )
    assert default > 20  # what the options are for
    assert returned < 8
