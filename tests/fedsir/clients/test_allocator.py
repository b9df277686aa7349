"""What a process gives back to the C library stays with it."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# The block is larger than what glibc keeps by itself, also after it has seen one be freed.
FREED = """
import ctypes, resource, sys
from fedsir.clients.allocator import keep_memory
if sys.argv[1] == "kept":
    assert keep_memory()
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.free.argtypes = [ctypes.c_void_p]
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
block = library.malloc(24 << 20)
ctypes.memset(block, 1, 24 << 20)
before = resident()
library.free(block)
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
@pytest.mark.parametrize(("setting", "kept"), [("kept", True), ("as it is", False)])
def test_freed_memory_stays_with_the_process(setting: str, kept: bool) -> None:
    ended = subprocess.run([sys.executable, "-c", FREED, setting], capture_output=True, text=True, check=True)
    assert (int(ended.stdout) < 1 << 20) == kept
