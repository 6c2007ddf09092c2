"""Freed memory is returned to the system."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import saccade
from saccade.web import uploads

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
    if {call}:
        return_freed_memory()
    return megabytes() - before


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
    assert default > 20  # what it is for
    assert returned < 8


@pytest.mark.parametrize(("side", "calls"), [(100, 0), (1100, 1)])
def test_memory_of_a_large_upload_is_returned(tmp_path, monkeypatch, side, calls):
    returned = []
    monkeypatch.setattr(uploads, "return_freed_memory", lambda: returned.append(1))
    Image.new("L", (side, side)).save(tmp_path / "a.png")
    uploads.read_upload(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    (tmp_path / "damaged.png").write_bytes(content[: len(content) // 2])
    with pytest.raises(uploads.BadUpload):
        uploads.read_upload(tmp_path / "damaged.png")
    assert len(returned) == 2 * calls
