"""How much work a run of a method is, known before it begins; `fedsir sweep plan` turns it into hours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedsir.config.training import TrainingConfig
from fedsir.federation.participation import number_of_participants

STEP_FORWARDS = 3.0
"""Forward passes that one pass of training costs: forward, and backward twice that."""


@dataclass(frozen=True)
class Scale:
    """What the work of a run depends on beside its method.

    clean: expected share of clients that keep their labels, 1 without noise. images: of a client, on average, None
    where the images are not known. pool: images of the public pool.
    """

    training: TrainingConfig
    clients: int
    clean: float
    images: float | None
    pool: int

    @property
    def share(self) -> float:
        """Share of the clients that train in a round of FedAvg."""
        return number_of_participants(self.clients, self.training.participation) / self.clients

    @property
    def passes(self) -> float:
        """Training passes of FedAvg over a client's images."""
        return self.share * self.training.rounds * self.training.local_epochs

    @property
    def pool_share(self) -> float:
        """One pass over the public pool as a share of a pass over a client's images."""
        return 0.0 if self.images is None else self.pool / self.images


@dataclass(frozen=True)
class Cost:
    """Work of one run: client-epochs and forward units per client (see `fedsir.server.RoundCosts`).

    trained: passes of training over every client's images. forwarded: passes that only predict. models: how many
    models are evaluated after each round.
    """

    trained: float
    forwarded: float = 0.0
    models: int = 1


CostOf = Callable[[Any, Scale], Cost]
"""Cost of a run with some settings of the method at some scale. Shares of clients that a method judges noisy are
taken to be the true ones, unless it is known to judge otherwise."""


def training_alone(config: object, scale: Scale) -> Cost:  # noqa: ARG001 - settings that change no work
    """The cost of a method that trains every client in every round and does nothing else."""
    return Cost(scale.passes)
