"""Processor time and memory of this program and of all processes below it, as Linux tells them."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fedsir.errors import BadInput

PROC = Path("/proc")
SAMPLE_S = 0.2
"""Seconds between looks at memory."""


def require_proc() -> None:
    """Raise BadInput where the system does not tell what these measurements need."""
    if not (PROC / "self" / "smaps_rollup").exists():
        raise BadInput("processor time and memory of processes are read from /proc, which only Linux has.")


def family(root: int | None = None) -> list[int]:
    """Process ids of `root` (default: this process) and of everything that it has started."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in PROC.iterdir():
        if entry.name.isdecimal() and (fields := _stat(int(entry.name))) is not None:
            children[int(fields[1])].append(int(entry.name))
    found, waiting = [], [os.getpid() if root is None else root]
    while waiting:
        found.append(waiting.pop())
        waiting += children[found[-1]]
    return found


def processor_seconds(pids: Sequence[int]) -> float:
    """Seconds of processor time that living processes have used so far."""
    tick = os.sysconf("SC_CLK_TCK")
    known = [fields for pid in pids if (fields := _stat(pid)) is not None]
    # Fields 14 and 15 of the file: user and system time.
    return sum(int(fields[11]) + int(fields[12]) for fields in known) / tick


def niceness_of(pids: Sequence[int]) -> int | None:
    """Niceness of the first of some processes, or None where there are none."""
    return os.getpriority(os.PRIO_PROCESS, pids[0]) if pids else None


def resident_mb(pid: int) -> float:
    """Megabytes of a process, its share of pages that others have as well; 0 once it has ended."""
    try:
        text = (PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1000 for line in text.splitlines() if line.startswith("Pss:")), 0.0)


@dataclass
class Peaks:
    """Largest megabytes seen: of everything together, and of each group of processes."""

    total: float = 0.0
    groups: dict[str, float] = field(default_factory=dict)

    def see(self, groups: dict[str, float]) -> None:
        """Take note of megabytes per group at one moment."""
        self.total = max(self.total, sum(groups.values()))
        for name, size in groups.items():
            self.groups[name] = max(self.groups.get(name, 0.0), size)


@contextmanager
def watching_memory(group_of: Callable[[int], str]) -> Iterator[Peaks]:
    """Look at the memory of this program's processes, several times a second, while the context lasts."""
    peaks, over = Peaks(), threading.Event()

    def look() -> None:
        while True:
            sizes: dict[str, float] = defaultdict(float)
            for pid in family():
                sizes[group_of(pid)] += resident_mb(pid)
            peaks.see(sizes)
            if over.wait(SAMPLE_S):
                return

    thread = threading.Thread(target=look, name="memory", daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        over.set()
        thread.join()


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat behind the name, which may contain anything; None once the process has ended."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()
