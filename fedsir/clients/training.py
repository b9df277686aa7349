"""The local loop: Lightning Fabric drives the module's own hooks over whole-batch-transformed uint8 images."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsir.clients.module import Batch, Objective
from fedsir.clients.runtime import Client
from fedsir.config.training import OptimizerConfig, TrainingConfig
from fedsir.data.transforms import draw_flips, flip, normalize
from fedsir.models.flat import FlatWeights
from fedsir.seeding import Stream

FORWARD_BATCH = 256
"""Images per forward-only pass; fixed, so that predictions do not depend on how work is spread."""


@dataclass(frozen=True)
class LocalUpdate:
    """What a client uploads after local training.

    samples: weight in the aggregation, 0 when more than half of the steps had a non-finite loss (then
    `weights` are the received ones). loss: mean over finished steps.
    """

    weights: FlatWeights
    samples: int
    loss: float
    steps: int
    skipped: int


@runtime_checkable
class WithTraining(Protocol):
    """An update that brings the result of local training together with something else."""

    @property
    def training(self) -> LocalUpdate:
        """What local training gave."""
        ...


@dataclass(frozen=True)
class Recipe:
    """How to train: objective, budget and optimizer.

    extras: per-sample arrays (n, ...) handed to the objective with each batch.
    teacher_logits: give the objective the eval-mode logits of the teacher on each augmented image.
    steps: number of optimisation steps, the same for clients of any size, instead of `epochs`.
    """

    objective: Objective
    epochs: int
    batch_size: int
    optimizer: OptimizerConfig
    extras: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    teacher_logits: bool = False
    steps: int | None = None

    @classmethod
    def within(
        cls,
        budget: TrainingConfig,
        objective: Objective,
        extras: Mapping[str, NDArray[Any]] | None = None,
        teacher_logits: bool = False,
    ) -> Recipe:
        """One round's local training: the budget is the same for every method of a condition."""
        return cls(objective, budget.local_epochs, budget.batch_size, budget.optimizer, extras or {}, teacher_logits)


def batch_slices(n: int, batch_size: int) -> list[slice]:
    """Slices over a shuffled epoch of n samples; nothing is dropped.

    A last batch of one sample joins the one before: batch statistics of a single image are useless.
    """
    starts = list(range(0, n, batch_size))
    if len(starts) > 1 and n - starts[-1] == 1:
        starts.pop()
    return [slice(a, b) for a, b in pairwise([*starts, n])]


def train_locally(
    client: Client,
    weights: FlatWeights,
    labels: NDArray[np.int64],
    recipe: Recipe,
    teacher: FlatWeights | None = None,
) -> LocalUpdate:
    """Train from `weights` on the client's images under `labels` (n,) int64.

    The optimizer starts fresh. Shuffling and flips come from the client's BATCHES stream; `teacher`
    (default: `weights`) is only used when the recipe asks for teacher logits.
    """
    runtime, transform = client.runtime, client.runtime.setup.transform
    rng = client.generator(Stream.BATCHES)
    slices = batch_slices(client.size, recipe.batch_size)
    budget = recipe.epochs * len(slices) if recipe.steps is None else recipe.steps
    epochs = []
    for _ in range(-(-budget // len(slices))):
        order = rng.permutation(client.size)
        flips = draw_flips(client.size, rng) if transform.horizontal_flip else np.zeros(client.size, dtype=np.bool_)
        epochs.append((order, flips))

    extras = {name: torch.from_numpy(np.asarray(a)).to(runtime.device) for name, a in recipe.extras.items()}
    teacher_logits: list[Tensor] = []
    if recipe.teacher_logits:
        # The teacher is frozen, so its logits on each epoch's flipped images can be had before the first step
        # with the same module, instead of keeping a second network.
        runtime.binding.load(weights if teacher is None else teacher)
        teacher_logits = [forward_pass(client, "logits", flips) for _, flips in epochs]

    runtime.binding.load(weights)
    reset_optimizer(runtime.optimizer, recipe.optimizer)
    runtime.module.objective = recipe.objective
    if not runtime.module.training:
        # Sets an attribute of every layer.
        runtime.module.train()
    targets = torch.from_numpy(np.array(labels)).to(runtime.device)
    total, steps, skipped = 0.0, 0, 0
    for epoch, (order, flips) in enumerate(epochs):
        # Once per epoch: every copy to a GPU makes the process wait for it.
        places = torch.from_numpy(order).to(runtime.device)
        mirrored = torch.from_numpy(flips).to(runtime.device)
        for index, part in enumerate(slices[: budget - epoch * len(slices)]):
            with client.timing_data():
                where = places[part]
                images = flip(runtime.client_images(client.id, where), mirrored[where])
                batch_extras = {name: tensor[where] for name, tensor in extras.items()}
                if teacher_logits:
                    batch_extras["teacher_logits"] = teacher_logits[epoch][where]
                batch = Batch(normalize(images, transform), targets[where], batch_extras)
            client.work.trained += len(where)
            value = take_step(client, batch, index)
            if not np.isfinite(value):
                skipped += 1
                continue
            total += value
            steps += 1
    if skipped > steps:
        return LocalUpdate(weights, 0, float("nan"), steps, skipped)
    return LocalUpdate(runtime.binding.read(), client.size, total / max(steps, 1), steps, skipped)


def take_step(client: Client, batch: Batch, index: int) -> float:
    """One optimisation step; returns its loss. Where that is not finite, nothing has been changed."""
    begin, runtime = time.perf_counter(), client.runtime
    loss = runtime.fabric_module.training_step(batch, index)
    value = float(loss.detach())
    if np.isfinite(value):
        runtime.fabric_optimizer.zero_grad()
        runtime.fabric.backward(loss)
        runtime.fabric_optimizer.step()
    client.work.training += time.perf_counter() - begin
    return value


def reset_optimizer(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> None:
    """Make a used Adam a fresh one with the given rates."""
    # Zeros are what a fresh one begins with; filling takes half as long as allocating.
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()
    for group in optimizer.param_groups:
        group["lr"] = config.lr
        group["weight_decay"] = config.weight_decay


def forward_pass(client: Client, what: str, flips: NDArray[np.bool_] | None = None) -> Tensor:
    """Eval-mode `features` (n, d) or `logits` (n, C) float32 of the loaded network on all images of the client.

    Images come in the client's order with the plain transform, or flipped where `flips` (n,) says so.
    """
    chunks: list[Tensor] = []
    for start, stop in slices_of(client.size, FORWARD_BATCH):
        with client.timing_data():
            positions = torch.arange(start, stop, device=client.runtime.device)
            images = client.runtime.client_images(client.id, positions)
            if flips is not None:
                images = flip(images, torch.from_numpy(flips[start:stop]))
        client.work.forwarded += stop - start
        chunks.append(forward(client, images, what))
    return torch.cat(chunks)


def exact_logits(client: Client, weights: FlatWeights) -> Tensor:
    """Logits (n, C) float64 on the CPU of `weights` on the client's images: eval mode, plain transform.

    Double precision for what follows: in single precision the probabilities of a saturated network coincide.
    """
    client.runtime.binding.load(weights)
    return forward_pass(client, "logits").cpu().double()


@torch.no_grad()
def forward(client: Client, images: Tensor, what: str) -> Tensor:
    """Eval-mode `features` or `logits` float32 of raw images (B, H, W) uint8."""
    runtime = client.runtime
    if runtime.module.training:
        runtime.module.eval()
    with runtime.fabric.autocast():
        features = runtime.network.features(normalize(images, runtime.setup.transform))
        return (features if what == "features" else runtime.network.logits(features)).float()


def slices_of(total: int, size: int) -> Sequence[tuple[int, int]]:
    """Cut range(total) into (start, stop) shards of `size`."""
    return [(start, min(start + size, total)) for start in range(0, total, size)]
