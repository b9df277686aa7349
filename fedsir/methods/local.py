"""Local training as the method files ask for it: the run's budget and optimizer, and what many objectives need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsir.clients.module import Objective
from fedsir.clients.objective import LogitAdjusted
from fedsir.clients.tasks import ClientResult, ClientTask, LocalTraining
from fedsir.clients.training import LocalUpdate, Recipe
from fedsir.federation.participation import draw_participants
from fedsir.methods.aggregate import Mean, SampleMean
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


def participants(server: Server, t: int, among: Sequence[int] | None = None) -> list[int]:
    """Clients that train in round t: the share `training.participation` of `among` (default: of all), rising."""
    clients = server.federation.num_clients
    return draw_participants(
        server.seed, t, range(clients) if among is None else among, clients, server.training.participation
    )


def train_round(
    server: Server, tasks: Mapping[int, ClientTask[LocalUpdate]], t: int, weights: FlatWeights
) -> dict[int, LocalUpdate]:
    """Updates by client after every task has trained from the global `weights`; all their models are kept."""
    return {k: r.update for k, r in server.run_clients(tasks, t, {"weights": weights}).items()}


def fold_round(
    server: Server, tasks: Mapping[int, ClientTask[LocalUpdate]], t: int, broadcast: Mapping[str, Any], mean: Mean
) -> dict[int, Any]:
    """Give the update of every task to `mean` as it comes; what the clients keep for themselves, by client."""

    def take(client: int, result: ClientResult[LocalUpdate]) -> Any:
        mean.add(client, result.update)
        return result.state

    return server.fold_clients(tasks, t, broadcast, take)


def averaged_round(
    server: Server, tasks: Mapping[int, ClientTask[LocalUpdate]], t: int, weights: FlatWeights
) -> FlatWeights:
    """Sample-weighted mean after every task has trained from the global `weights`; no model of a client is kept."""
    mean = SampleMean(server, tasks)
    fold_round(server, tasks, t, {"weights": weights}, mean)
    return mean.result(weights)


def stage_rounds(share: float, rounds: int) -> int:
    """Rounds of a stage that takes `share` of the budget, at least one."""
    return max(1, round(share * rounds))
