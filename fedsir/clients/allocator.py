"""How the C library gives memory back to the system."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers of settings in glibc's `malloc.h`."""


def keep_memory() -> bool:
    """Tell glibc to keep what this process gives back; whether it listens, since other C libraries cannot be told.

    Every step needs the memory of its tensors again, and getting it from the system anew takes a tenth of the time of
    a large network's training.
    """
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    return bool(library.mallopt(M_MMAP_THRESHOLD, 32 << 20) and library.mallopt(M_TRIM_THRESHOLD, 1 << 30))
