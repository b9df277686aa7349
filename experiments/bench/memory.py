"""Memory of a run: the program, each actor, Ray, and all of it; at few and at many clients.

FedAvg keeps no model of a client; FedNoRo stands for the methods whose distances need all of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from experiments.bench.cases import settings
from experiments.bench.federated import federated
from experiments.bench.processes import Peaks, require_proc, watching_memory
from experiments.bench.programs import Say, in_a_program

METHODS = ("fedavg", "fednoro")
CLIENTS = (10, 1000)
IMAGES, PIXELS = 10_000, 32
PROGRAM, RAY = "program", "Ray"


@dataclass(frozen=True)
class Memory:
    """Peaks in MB during a run; shared pages count once. parts: the program, every actor, and Ray's own processes."""

    method: str
    clients: int
    images: int
    total: float
    parts: Mapping[str, float]

    def as_json(self) -> dict[str, object]:
        """All figures."""
        return {
            "method": self.method,
            "clients": self.clients,
            "images": self.images,
            "total_mb": self.total,
            "parts_mb": dict(self.parts),
        }


def memory(quick: bool, say: Say) -> list[Memory]:
    """Measure each case in a program of its own."""
    require_proc()
    found = []
    for method, clients in product(METHODS[:1] if quick else METHODS, (4, 12) if quick else CLIENTS):
        images = 120 if quick else IMAGES
        # The first of three rounds is the warm-up of FedNoRo.
        values = settings("tiny", PIXELS, clients, images, rounds=1 if quick else 3, method=method, actors=2)
        peaks = in_a_program(partial(_measure, values), say)
        found.append(Memory(method, clients, images, peaks.total, peaks.groups))
        say(f"{method}, {clients} clients: {peaks.total:.0f} MB at most")
    return found


def growth_of_memory(found: Sequence[Memory]) -> dict[str, float]:
    """By method: peak at the most clients over that at the fewest."""
    growth = {}
    for method in dict.fromkeys(m.method for m in found):
        by_clients = sorted((m for m in found if m.method == method), key=lambda m: m.clients)
        growth[method] = by_clients[-1].total / by_clients[0].total
    return growth


def _measure(values: dict[str, Any], _: Say) -> Peaks:
    with federated() as warm:
        config = warm.config(values)
        names = {pid: f"actor {number}" for number, pid in enumerate(warm.actors(config))}
        with watching_memory(lambda pid: PROGRAM if pid == os.getpid() else names.get(pid, RAY)) as peaks:
            warm.run(config)
    return peaks
