"""How long work reports where it stands without printing anything itself."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called from the thread that asked for the work; `what` names the step ("decoding images")."""

    def __call__(self, done: int, total: int, what: str) -> None: ...


def silent(done: int, total: int, what: str) -> None:
    """The progress callback of callers who do not want one."""
