"""Draws beside a run, which goes on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path

from fedsir.events import RunStarted

HEAD_START_S = 0.25
"""So long a run is left alone first: whoever draws keeps the interpreter, and the first steps would wait for it."""

Files = Mapping[str, bytes]
"""Contents by path, with `/` between folders."""


class Drawing:
    """Files that a thread of its own draws once, and ends with that. In memory, so that a killed process leaves none.

    Of drawings that go on at once matplotlib's lock (`mlflow_tracking.drawings`) lets one work at a time.
    """

    def __init__(self, draw: Callable[[], Files]) -> None:
        """draw: begins after `HEAD_START_S`, or as soon as somebody waits for the files."""
        self._wanted = threading.Event()
        self._files: Future[Files] = Future()
        # The thread lets go of its arguments when it ends, and so of the event that was drawn.
        self._thread = threading.Thread(target=self._work, args=(draw,), name="fedsir-drawing")
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether `files` returns, or raises, at once."""
        return self._files.done()

    def wait(self) -> None:
        """Until it is `ready`."""
        self._wanted.set()
        wait([self._files])

    def files(self) -> Files:
        """What was drawn, as soon as it is; raises what drawing raised."""
        self.wait()
        return self._files.result()

    def write(self, folder: Path) -> None:
        """`files` into `folder`."""
        for path, content in self.files().items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)

    def end(self) -> None:
        """Wait for the thread; what it has not begun is not drawn."""
        self._files.cancel()
        self._wanted.set()
        self._thread.join()

    def _work(self, draw: Callable[[], Files]) -> None:
        self._wanted.wait(HEAD_START_S)
        if self._files.set_running_or_notify_cancel():
            try:
                files = draw()
            except BaseException as error:  # raised where the files are asked for
                self._files.set_exception(error)
            else:
                self._files.set_result(files)


def drawing_of_start(event: RunStarted) -> Drawing:
    """The figures of a run's start, about to be drawn."""

    def draw() -> Files:
        from mlflow_tracking.drawings import draw_start  # with matplotlib: a third of a second

        return draw_start(event)

    return Drawing(draw)
