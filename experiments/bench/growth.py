"""How a round's time grows: with clients at constant images, with the share of them that takes part, with images, and
from method to method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from experiments.bench.cases import settings
from experiments.bench.federated import Federated, RunTime, federated
from experiments.bench.floor import Floor, FloorTime
from experiments.bench.plan import count_steps, floor_plan
from experiments.bench.processes import niceness_of, require_proc
from experiments.bench.programs import Say
from experiments.config import RunFile
from fedsir.methods.registry import method_names

CLIENTS = (10, 30, 100, 300, 1000)
IMAGES = (1_000, 3_000, 10_000, 30_000, 100_000)
PARTICIPATIONS = (0.01, 0.1, 1.0)
AT_IMAGES, AT_CLIENTS = 10_000, 30
"""Images while clients grow, clients while images grow."""

PIXELS = 32


@dataclass(frozen=True)
class Growth:
    """One size or method: medians of seconds per round; the floor's are None where it has no such loop."""

    axis: str
    value: str
    clients: int
    images: int
    steps: int | None
    round: float
    floor: float | None

    @property
    def ratio(self) -> float | None:
        """Seconds of a round over those of the bare loop."""
        return None if self.floor is None else self.round / self.floor

    def as_json(self) -> dict[str, object]:
        """All figures."""
        return {**vars(self), "ratio": self.ratio}


def growth(quick: bool, say: Say) -> list[Growth]:
    """Measure along all axes, with the backbone `tiny`. Raises BadInput where there is no /proc."""
    require_proc()
    found = []
    with federated() as warm:
        for axis, value, config, with_floor in cases(warm, quick):
            found.append(measure(warm, config, axis, value, with_floor, times=1 if quick else 3))
            say(f"{axis} {value}: {found[-1].round:.2f} s a round")
    return found


def cases(warm: Federated, quick: bool) -> Iterator[tuple[str, str, RunFile, bool]]:
    """Axis, value, run file and whether the bare loop does the same."""
    rounds = 1 if quick else 3
    base = 120 if quick else AT_IMAGES
    for clients in (4, 12) if quick else CLIENTS:
        yield "clients", str(clients), warm.config(_sized(warm.folder, clients, base, rounds)), True
    for share in (0.5, 1.0) if quick else PARTICIPATIONS:
        values = _sized(warm.folder, 12 if quick else CLIENTS[-1], base, rounds, share)
        yield "participation", f"{share:g}", warm.config(values), False
    for images in (60, 120) if quick else IMAGES:
        clients = 4 if quick else AT_CLIENTS
        yield "images", str(images), warm.config(_sized(warm.folder, clients, images, rounds)), True
    for method in ("fedavg", "oct_fedsir") if quick else method_names():
        # Stages of methods begin at shares of the rounds; ten give each of them one.
        values = settings("tiny", PIXELS, 4 if quick else 10, 120 if quick else 1000, 2 if quick else 10, method)
        yield "method", method, warm.config(values), False


def measure(warm: Federated, config: RunFile, axis: str, value: str, with_floor: bool, times: int) -> Growth:
    """Time the run, and in turn with it the bare loop, after one of each that does not count."""
    condition = warm.condition(config)
    slots = warm.session.workers(config).slots
    plan = floor_plan(config, condition) if with_floor else None
    floor = None if plan is None else Floor(plan, slots, niceness_of(warm.actors(config)))
    runs: list[RunTime] = []
    loops: list[FloorTime] = []
    try:
        for _ in range(times + 1):
            if floor is not None:
                loops.append(floor.run())
            runs.append(warm.run(config))
    finally:
        if floor is not None:
            floor.close()
    rounds = config.training.rounds
    return Growth(
        axis=axis,
        value=value,
        clients=config.federation.clients,
        images=len(condition.dataset.train),
        steps=None if plan is None else count_steps(plan) // rounds,
        round=median(run.rounds for run in runs[1:]) / rounds,
        floor=median(loop.wall for loop in loops[1:]) / rounds if loops else None,
    )


def _sized(folder: Path, clients: int, images: int, rounds: int, participation: float = 1.0) -> Mapping[str, Any]:
    values = settings("tiny", PIXELS, clients, images, rounds, participation=participation)
    archive = folder / f"images-{images}.npz"
    if not archive.exists():
        _write_noise(archive, images)
    return {**values, "data": {"source": "medmnist", "path": str(archive), "image_size": PIXELS, "cache_dir": folder}}


def _write_noise(archive: Path, images: int) -> None:
    """Random pixels in four classes: drawing so many phantoms would take longer than training on them."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    # A thousand to test on whatever the size, so that growth is that of training.
    for part, count in (("train", images), ("val", 4), ("test", min(images, 1000))):
        arrays[f"{part}_images"] = rng.integers(0, 256, (count, PIXELS, PIXELS), dtype=np.uint8)
        arrays[f"{part}_labels"] = (np.arange(count) % 4).astype(np.int64)[:, None]
    np.savez(archive, **arrays)
