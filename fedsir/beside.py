"""Work beside the caller, in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def begin(work: Callable[[], T], name: str) -> Future[T]:
    """Start `work`; the future has its result or what it raised, interruptions included."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    # A daemon, so that an interrupted program does not wait for what nobody wants any more.
    Thread(target=run, name=name, daemon=True).start()
    return future
