"""Loading large libraries, which takes most of the time until the first training step."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class _Pause:
    """Several threads may load at once: the first one stops the search for garbage, the last one resumes it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._inside = 0
        self._resumes = False

    def begin(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._resumes = gc.isenabled()
                gc.disable()
            self._inside += 1

    def end(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._resumes:
                gc.enable()


_PAUSE = _Pause()


@contextmanager
def loading() -> Iterator[None]:
    """Do not look for garbage in this process meanwhile: what modules define stays, and every search goes through it.

    Torch, Lightning and MLflow load a seventh faster. For loading alone: work may leave garbage.
    """
    _PAUSE.begin()
    try:
        yield
    finally:
        _PAUSE.end()
