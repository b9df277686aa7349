"""The floor: federated averaging as a bare PyTorch loop over several processes.

Of this package only the network's class takes part. No Lightning, no Ray, no server, no record: weights and images
lie in memory that the processes share, and what is drawn at random was drawn before the clock starts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsir.clients.allocator import keep_memory
from fedsir.config.training import ModelConfig
from fedsir.models.network import build_network

EVALUATION_BATCH = 256
"""Held-out images per forward pass."""

SLICE = 1 << 15
"""Values that are averaged at a time, so that they stay in a core's cache."""

PATIENCE_S = 600.0
"""How long processes wait for each other before they take one for dead."""


@dataclass(frozen=True)
class Step:
    """One optimisation step: positions (B,) int64 among the training images, which to mirror (B,) bool, labels (B,)."""

    positions: NDArray[np.int64]
    flips: NDArray[np.bool_]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """Everything the loop does, decided beforehand.

    images, test_images: (N, H, W) uint8. steps: per round and client the steps of local training. sizes: (K,) images
    per client. values, counters: the first weights, parameters before floating buffers, and the integer buffers.
    """

    model: ModelConfig
    num_classes: int
    lr: float
    weight_decay: float
    mean: float
    std: float
    images: NDArray[np.uint8]
    test_images: NDArray[np.uint8]
    steps: tuple[tuple[tuple[Step, ...], ...], ...]
    sizes: tuple[int, ...]
    values: NDArray[np.float32]
    counters: NDArray[np.int64]


@dataclass(frozen=True)
class FloorTime:
    """Wall seconds of the loop's parts.

    cpu, training_cpu: seconds of processor time of all processes together, for the whole loop and for its training.
    """

    training: float
    averaging: float
    evaluation: float
    cpu: float
    training_cpu: float

    @property
    def wall(self) -> float:
        """Seconds of the whole loop."""
        return self.training + self.averaging + self.evaluation


class Floor:
    """Warm processes, one torch thread each, that run a plan as often as they are told. Close it to end them.

    niceness: of the processes; None leaves it as it is. Ray starts its own at 15, and what is compared must be equal
    there where other programs run.
    """

    def __init__(self, plan: Plan, processes: int, niceness: int | None = None) -> None:
        context = mp.get_context("spawn")
        clients = len(plan.sizes)
        # Shared by all processes; `local` is what clients hand in.
        self._shared = {
            "images": torch.from_numpy(np.array(plan.images)),
            "test_images": torch.from_numpy(np.array(plan.test_images)),
            "weights": torch.from_numpy(plan.values.copy()),
            "counters": torch.from_numpy(plan.counters.copy()),
            "local": torch.zeros(clients, plan.values.size),
            "local_counters": torch.zeros(clients, plan.counters.size, dtype=torch.int64),
            "logits": torch.zeros(len(plan.test_images), plan.num_classes),
        }
        for tensor in self._shared.values():
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        barrier, turn = context.Barrier(processes), context.Value("q", 0)
        small = replace(plan, images=plan.images[:0], test_images=plan.test_images[:0])
        self._ends: list[Any] = []
        self._processes: list[Any] = []
        for rank in range(processes):
            here, there = context.Pipe()
            arguments = (rank, processes, niceness, small, self._shared, barrier, turn, there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)
        for end in self._ends:
            end.recv()

    def run(self) -> FloorTime:
        """All rounds from the first weights. Raises EOFError when a process has died."""
        for end in self._ends:
            end.send(True)
        times = [end.recv() for end in self._ends]
        training, averaging, evaluation = times[0][:3]
        return FloorTime(training, averaging, evaluation, sum(t[3] for t in times), sum(t[4] for t in times))

    def weights(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Values and counters after the last round."""
        return self._shared["weights"].numpy().copy(), self._shared["counters"].numpy().copy()

    def logits(self) -> NDArray[np.float32]:
        """(N, C) float32 logits of the last weights on the held-out images."""
        return self._shared["logits"].numpy().copy()

    def close(self) -> None:
        """End the processes."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(timeout=10.0)
            if process.is_alive():
                process.terminate()


def _serve(
    rank: int,
    processes: int,
    niceness: int | None,
    plan: Plan,
    shared: dict[str, Tensor],
    barrier: Any,
    turn: Any,
    orders: Any,
) -> None:
    if niceness is not None:
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    keep_memory()
    # Lightning sets it where it is imported, and then every step of Adam asks the driver for GPUs.
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    torch.set_num_threads(1)
    network = build_network(plan.model, plan.num_classes)
    loop = _Loop(rank, processes, plan, shared, turn, lambda: barrier.wait(PATIENCE_S), network)
    orders.send(True)
    try:
        while orders.recv():
            orders.send(loop.run())
    except EOFError:  # the other end was closed
        return


class _Loop:
    """What one process does. wait: returns when all processes have called it."""

    def __init__(
        self,
        rank: int,
        processes: int,
        plan: Plan,
        shared: dict[str, Tensor],
        turn: Any,
        wait: Callable[[], object],
        network: nn.Module,
    ) -> None:
        self._rank, self._processes, self._plan, self._shared = rank, processes, plan, shared
        self._turn, self._wait, self._network = turn, wait, network
        # Longest first; whoever is free takes the next one.
        self._order = sorted(range(len(plan.sizes)), key=lambda k: -plan.sizes[k])
        buffers = list(network.buffers())
        self._floating: list[Tensor] = [*network.parameters(), *(b for b in buffers if b.is_floating_point())]
        self._integers = [b for b in buffers if not b.is_floating_point()]
        bounds = np.cumsum([0, *(t.numel() for t in self._floating)]).tolist()
        self._slices = [slice(a, b) for a, b in pairwise(bounds)]
        values = shared["weights"].numel()
        edges = [values * r // processes for r in range(processes + 1)]
        self._share = range(edges[rank], edges[rank + 1])

    def run(self) -> tuple[float, float, float, float, float]:
        """Seconds of training, averaging and evaluation by the clock; of processor time in all and of training."""
        shared, plan = self._shared, self._plan
        if self._rank == 0:
            shared["weights"].copy_(torch.from_numpy(plan.values))
            shared["counters"].copy_(torch.from_numpy(plan.counters))
            self._turn.value = 0
        self._wait()
        spent, trained = [0.0, 0.0, 0.0], 0.0
        processor, last = time.process_time(), time.perf_counter()
        for clients in plan.steps:
            stages: tuple[Callable[[], None], ...] = (partial(self._train, clients), self._average, self._evaluate)
            for part, work in enumerate(stages):
                before = time.process_time()
                work()
                trained += time.process_time() - before if part == 0 else 0.0
                self._wait()
                now = time.perf_counter()
                spent[part] += now - last
                last = now
        return spent[0], spent[1], spent[2], time.process_time() - processor, trained

    def _train(self, clients: tuple[tuple[Step, ...], ...]) -> None:
        while (place := self._next()) < len(self._order):
            k = self._order[place]
            self._load()
            self._network.train()
            optimizer = torch.optim.Adam(
                self._network.parameters(), lr=self._plan.lr, weight_decay=self._plan.weight_decay, fused=True
            )
            for step in clients[k]:
                images = self._shared["images"][torch.from_numpy(step.positions)]
                flips = torch.from_numpy(step.flips).view(-1, 1, 1)
                images = torch.where(flips, images.flip(-1), images)
                loss = F.cross_entropy(self._network(self._normalized(images)), torch.from_numpy(step.labels))
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            with torch.no_grad():
                for tensor, part in zip(self._floating, self._slices, strict=True):
                    self._shared["local"][k, part].view(tensor.shape).copy_(tensor)
                for number, counter in enumerate(self._integers):
                    self._shared["local_counters"][k, number] = counter

    def _next(self) -> int:
        with self._turn.get_lock():
            place = int(self._turn.value)
            self._turn.value = place + 1
        return place

    @torch.no_grad()
    def _load(self) -> None:
        for tensor, part in zip(self._floating, self._slices, strict=True):
            tensor.copy_(self._shared["weights"][part].view(tensor.shape))
        for counter, value in zip(self._integers, self._shared["counters"], strict=True):
            counter.copy_(value)

    def _normalized(self, images: Tensor) -> Tensor:
        scaled = images.unsqueeze(1).float().div_(255).sub_(self._plan.mean).div_(self._plan.std)
        # Channels last is what makes convolutions fast on processors.
        return scaled.expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)

    def _average(self) -> None:
        """The mean by images, each process over its own part of the vector; in double precision, in client order."""
        if self._rank == 0:
            self._turn.value = 0
            self._shared["counters"].copy_(self._shared["local_counters"].max(dim=0).values)
        local, mean = self._shared["local"].numpy(), self._shared["weights"].numpy()
        sizes = np.array(self._plan.sizes, dtype=np.float64)
        shares = sizes / sizes.sum()
        product = np.empty(SLICE)
        for start in range(self._share.start, self._share.stop, SLICE):
            stop = min(start + SLICE, self._share.stop)
            total = np.zeros(stop - start)
            for row, share in zip(local, shares, strict=True):
                np.multiply(row[start:stop], share, out=product[: stop - start], dtype=np.float64)
                total += product[: stop - start]
            mean[start:stop] = total

    @torch.no_grad()
    def _evaluate(self) -> None:
        images, logits = self._shared["test_images"], self._shared["logits"]
        starts = range(0, len(images), EVALUATION_BATCH)
        mine = starts[self._rank :: self._processes]
        if len(mine):
            self._load()
            self._network.eval()
        for start in mine:
            part = slice(start, start + EVALUATION_BATCH)
            logits[part] = self._network(self._normalized(images[part]))
