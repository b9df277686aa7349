"""How many runs of a sweep go on at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import ceil
from pathlib import Path

from experiments.config import RunFile
from experiments.sweeps.estimate import flight_bytes
from fedsir.clients.machine import machine_limits

SPARE_BYTES = 500_000_000
"""Memory that a further run must leave free beside what it needs itself."""

MEMORY = Path("/proc/meminfo")
PAUSE_S = 1.0
"""How often memory is looked at again."""


def flight_limit(slots: int, clients: int) -> int:
    """Runs in flight that keep `slots` workers busy: one more than can use them all, for beginnings and ends.

    clients: of the smallest federation; a run uses at most so many workers. More runs than workers help nobody.
    """
    return max(2, min(slots, ceil(slots / clients) + 1) + 1)


def wait_for_memory(config: RunFile, stopping: threading.Event, running: Callable[[], int]) -> None:
    """Wait until there is memory for one more run, as long as others are running whose end would free some."""
    need = SPARE_BYTES + flight_bytes(config)
    while running() > 0 and available_bytes() < need:
        if stopping.wait(PAUSE_S):
            return


def available_bytes() -> int:
    """Memory that this process could be given now, at most; what Ray's object store holds is not part of it.

    What others below the same cgroup or SLURM limit have taken of it already is not known, and not taken off.
    """
    limit = machine_limits().usable_memory
    try:
        with MEMORY.open(encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return min(limit, int(line.split()[1]) * 1024)
    except OSError:
        pass
    return limit
