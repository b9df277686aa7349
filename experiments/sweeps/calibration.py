"""How long one image takes on this machine: a training step and a forward pass, for what a grid trains."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from experiments.checks import device_of
from experiments.config import RunFile
from fedsir.config.training import BackboneName, ModelConfig, Precision

CPU_BATCH = 16
"""Largest batch that is timed on a CPU, where the time per image hardly depends on it."""

SECONDS = 0.5
"""Time spent on each measurement after the warm-up, unless the fewest calls take longer."""

CALLS = (3, 20)
"""Fewest and most calls that are timed."""


@dataclass(frozen=True)
class Workload:
    """What decides how long an image takes."""

    backbone: BackboneName
    image_size: int
    classes: int
    batch_size: int
    precision: Precision
    threads: int
    device: str


@dataclass(frozen=True)
class Speed:
    """Seconds per image of one training step and of one forward pass."""

    step: float
    forward: float


def workload(config: RunFile, classes: int, images: float) -> Workload:
    """What a client of `images` images asks of the machine."""
    device = device_of(config.execution)
    batch = min(config.training.batch_size, max(2, int(images)))
    return Workload(
        backbone=config.model.backbone,
        image_size=config.data.image_size,
        classes=classes,
        batch_size=batch if device == "cuda" else min(batch, CPU_BATCH),
        precision=config.execution.precision,
        threads=config.execution.threads,
        device=device,
    )


def calibrate(workloads: Iterable[Workload]) -> dict[Workload, Speed]:
    """Time each distinct workload, about two seconds for one; one worker at a time, on random images."""
    return {work: measure(work) for work in dict.fromkeys(workloads)}


def measure(work: Workload) -> Speed:
    """Time training steps and forward passes of a network with random weights as a client makes them."""
    import torch
    import torch.nn.functional as F

    from fedsir.clients.lean_adam import adam
    from fedsir.clients.runtime import set_threads
    from fedsir.clients.training import reset_optimizer
    from fedsir.config.data import TransformConfig
    from fedsir.config.training import OptimizerConfig
    from fedsir.data.transforms import normalize
    from fedsir.models.network import build_network

    set_threads(work.threads)
    device = torch.device(work.device)
    generator = torch.Generator().manual_seed(0)
    shape = (work.batch_size, work.image_size, work.image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)
    labels = torch.randint(0, work.classes, (work.batch_size,), generator=generator).to(device)
    with torch.random.fork_rng(devices=[]):
        network = build_network(ModelConfig(backbone=work.backbone, weights="random"), work.classes).to(device)
    optimizer = adam(network.parameters(), device)
    reset_optimizer(optimizer, OptimizerConfig(lr=1e-6))
    mixed = torch.autocast(work.device, torch.bfloat16, enabled=work.precision == "bf16-mixed")
    transform = TransformConfig()

    def step() -> None:
        network.train()
        with mixed:
            loss = F.cross_entropy(network(normalize(images, transform)), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        # The loop reads every loss, which also waits for a GPU.
        loss.item()

    @torch.no_grad()
    def forward() -> None:
        network.eval()
        with mixed:
            network(normalize(images, transform)).sum().item()

    return Speed(_seconds(step) / work.batch_size, _seconds(forward) / work.batch_size)


def _seconds(work: Callable[[], None]) -> float:
    """Median seconds of a call after the first, which also allocates and chooses algorithms.

    The median, since other programs of the machine now and then delay one call by a multiple of it.
    """
    work()
    fewest, most = CALLS
    taken: list[float] = []
    while len(taken) < fewest or (sum(taken) < SECONDS and len(taken) < most):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)
