"""Local training as the method files ask for it: the run's budget and optimizer, and what many objectives need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsir.clients.module import Objective
from fedsir.clients.objective import LogitAdjusted
from fedsir.clients.tasks import ClientTask, LocalTraining
from fedsir.clients.training import LocalUpdate, Recipe
from fedsir.methods.base import Server
from fedsir.models.flat import FlatWeights
from fedsir.objectives import la_prior


def recipe(
    server: Server,
    objective: Objective,
    extras: Mapping[str, NDArray[Any]] | None = None,
    teacher_logits: bool = False,
) -> Recipe:
    """One round's local training within the run's budget."""
    return Recipe.within(server.training, objective, extras, teacher_logits)


def local_training(
    server: Server,
    labels: NDArray[np.int64],
    objective: Objective,
    extras: Mapping[str, NDArray[Any]] | None = None,
    teacher_logits: bool = False,
) -> LocalTraining:
    """Task: train from broadcast `weights` under `labels` (n,) int64."""
    return LocalTraining(labels, recipe(server, objective, extras, teacher_logits))


def la_objective(server: Server, k: int) -> LogitAdjusted:
    """Logit-adjusted cross entropy with the prior of client k's observed labels."""
    counts = np.bincount(server.federation.observed[k], minlength=server.federation.num_classes)
    return LogitAdjusted(la_prior(counts).numpy())


def train_round(
    server: Server, tasks: Mapping[int, ClientTask[LocalUpdate]], t: int, weights: FlatWeights
) -> dict[int, LocalUpdate]:
    """Updates by client after every task has trained from the global `weights`."""
    return {k: r.update for k, r in server.run_clients(tasks, t, {"weights": weights}).items()}


def stage_rounds(share: float, rounds: int) -> int:
    """Rounds of a stage that takes `share` of the budget, at least one."""
    return max(1, round(share * rounds))
