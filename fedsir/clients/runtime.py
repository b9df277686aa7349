"""What a process needs to serve any client of a run: its network (see `engine`), images and settings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsir.config.data import TransformConfig
from fedsir.config.training import ModelConfig, Precision
from fedsir.seeding import Stream, generator

if TYPE_CHECKING:
    from fedsir.clients.engine import Engine


@dataclass(frozen=True)
class RuntimeSetup:
    """Everything a worker must know to serve any client of one run; shipped once per run, images once per data set.

    train_images, test_images: (N, H, W) uint8. indices: K arrays of positions in `train_images`. public_pool:
    (P,) positions of images that no client holds. deterministic, compile: see `ExecutionConfig`.
    """

    model: ModelConfig
    num_classes: int
    transform: TransformConfig
    train_images: NDArray[np.uint8]
    test_images: NDArray[np.uint8]
    indices: tuple[NDArray[np.int64], ...]
    public_pool: NDArray[np.int64]
    seed: int
    threads: int
    device: str
    precision: Precision
    deterministic: bool = True
    compile: bool = False


@dataclass
class Work:
    """What one task took.

    data: seconds preparing batches. compute: all other seconds. training: the part of `compute` that went into
    optimisation steps. trained, forwarded: local images trained on and only forwarded.
    """

    data: float = 0.0
    compute: float = 0.0
    training: float = 0.0
    trained: int = 0
    forwarded: int = 0

    def add(self, other: Work) -> None:
        """Count `other` as well."""
        self.data += other.data
        self.compute += other.compute
        self.training += other.training
        self.trained += other.trained
        self.forwarded += other.forwarded


class ClientRuntime:
    """Serves the clients of one run in one process.

    It holds only caches: whatever must survive a task travels in the task's result.
    """

    def __init__(self, setup: RuntimeSetup, engine: Engine | None = None) -> None:
        """engine: one that other runs use as well; its own by default."""
        self.setup = setup
        if engine is None:
            # Not at the top: the methods' settings are read without Lightning, which takes seconds to load.
            from fedsir.clients.engine import Engine

            engine = Engine.of(setup)
        self.fabric, self.module, self.binding = engine.fabric, engine.module, engine.binding
        self.fabric_module, self.fabric_optimizer = engine.fabric_module, engine.fabric_optimizer
        self.network = engine.module.network
        self.optimizer: torch.optim.Optimizer = engine.fabric_optimizer.optimizer
        self.device = engine.fabric.device
        self._on_device: dict[int, Tensor] = {}

    def client_images(self, client: int, positions: Tensor) -> Tensor:
        """Raw images (B, H, W) uint8 of a client on its device, by position (B,) int64 there within the client."""
        indices = self.setup.indices[client]
        if self.device.type == "cpu":
            # The shared array is read-only memory; picking copies just the batch.
            return torch.from_numpy(self.setup.train_images[indices[positions.numpy()]])
        if client not in self._on_device:
            self._on_device[client] = torch.from_numpy(self.setup.train_images[indices]).to(self.device)
        return self._on_device[client][positions]

    def pool_images(self, start: int, stop: int) -> Tensor:
        """Raw images (B, H, W) uint8 of the public pool on the device, by position within the pool."""
        positions = self.setup.public_pool[start:stop]
        return torch.from_numpy(self.setup.train_images[positions]).to(self.device)

    def test_images(self, start: int, stop: int) -> Tensor:
        """Raw held-out images (B, H, W) uint8 on the device."""
        return torch.from_numpy(np.array(self.setup.test_images[start:stop])).to(self.device)


@dataclass(frozen=True)
class Client:
    """The client a task works for: its identity, its randomness and the runtime that serves it."""

    id: int
    round: int
    runtime: ClientRuntime
    work: Work

    @property
    def size(self) -> int:
        """Number of images the client holds."""
        return len(self.runtime.setup.indices[self.id])

    def generator(self, stream: Stream) -> np.random.Generator:
        """Random numbers that depend on run seed, purpose, client and round only."""
        return generator(self.runtime.setup.seed, stream, self.id, self.round)

    @contextmanager
    def timing_data(self) -> Iterator[None]:
        """Counts the enclosed time as preparing data."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.work.data += time.perf_counter() - begin


def set_threads(threads: int) -> None:
    """Threads of torch and of NumPy's linear algebra; part of what determines bits, see `ExecutionConfig.threads`."""
    # Without asking first: `get_num_threads` tells OpenMP's number, and MKL's can be another one (MKL_NUM_THREADS).
    torch.set_num_threads(threads)
    _linear_algebra().limit(limits=threads)


@cache
def _linear_algebra() -> Any:
    """Thread pools of the libraries behind NumPy, which do not listen to torch; finding them takes a moment."""
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    return ThreadpoolController().select(user_api="blas")
