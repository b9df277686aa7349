"""What runs of one condition and seed share: the federation, the first weights and stage I."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fedsir.condition import Condition
from fedsir.server import Memory

KEPT = 2
"""Conditions kept although no run uses them: the last one, and its noise-free twin."""


@dataclass
class _Entry:
    memory: Memory = field(default_factory=Memory)
    condition: Condition | None = None
    users: int = 0


class Conditions:
    """Conditions in use by runs that may go on at the same time, each built once."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        # Each once, and one after the other: they would only take turns at the interpreter.
        self._building = threading.Lock()

    @contextmanager
    def using(self, identity: str, build: Callable[[], Condition]) -> Iterator[tuple[Condition, Memory]]:
        """The condition of this identity and its runs' memory, kept while the context lasts."""
        with self._lock:
            entry = self._entries.setdefault(identity, _Entry())
            self._entries.move_to_end(identity)
            entry.users += 1
        try:
            with self._building:
                if entry.condition is None:
                    entry.condition = build()
            yield entry.condition, entry.memory
        finally:
            with self._lock:
                entry.users -= 1
                unused = [key for key, other in self._entries.items() if other.users == 0]
                for key in unused[:-KEPT]:
                    del self._entries[key]
