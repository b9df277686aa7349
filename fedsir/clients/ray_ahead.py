"""Ray starts while the program loads other libraries and images: its processes take seconds, mostly waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

import ray

from fedsir.clients.local_ray import start_ray, stop_ray
from fedsir.config.training import ExecutionConfig


@contextmanager
def ray_ahead(config: ExecutionConfig) -> Iterator[None]:
    """Begin to start Ray, which `start_ray` then waits for, and shut it down in the end.

    Nothing is done where Ray runs already. What is wrong with the start is said by `start_ray` alone, which tries
    again; where nobody calls it nobody needs Ray.
    """
    if ray.is_initialized():
        yield
        return
    over = Event()

    def keep_ray() -> None:
        with suppress(Exception):
            start_ray(config)
        # Linux ends Ray's processes with the thread that has started them.
        over.wait()
        # Not left to the end of the interpreter, where Ray may crash while actors still start.
        stop_ray()

    # A daemon: where Ray hangs it must not keep the interpreter as well.
    thread = Thread(target=keep_ray, name="start of Ray", daemon=True)
    try:
        thread.start()
        yield
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()
