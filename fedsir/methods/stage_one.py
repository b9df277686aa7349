"""Stage I, shared by the spectral methods: fine-tune locally, compare class directions, split the clients.

Q numbers: fedsir/CHOICES.md.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field

from fedsir.clients.module import Objective
from fedsir.clients.spectral_tasks import StageOne, StageOneUpdate
from fedsir.clients.training import LocalUpdate, Recipe, batch_slices
from fedsir.config.base import NonNegativeFloat, PositiveFloat, PositiveInt, Section
from fedsir.config.method import MethodConfig
from fedsir.config.training import OptimizerConfig
from fedsir.methods.base import Server
from fedsir.methods.cost import Cost, Scale
from fedsir.seeding import Stream, integer
from fedsir.spectral.identification import Identification, IdentificationSettings, identify

STAGE_ONE_ROUND = 1_000_000
"""Address of stage I in the clients' random streams; no main round has this number."""

UNEVEN_STEPS = 2.0
"""Ratio of most to fewest optimisation steps from which the user is told that the clients are hard to compare."""

SIMILARITY_SETTINGS = {"balance", "feature_norm", "similarity_sign", "min_class_count"}
"""Settings of the identification that decide similarities; the others only split the clients by them."""

SMALL_CLIENT = 500
"""Images below which the evidence of a client is called weak; the paper's clients hold about 3,600."""


class StageOneSettings(Section):
    """Local fine-tuning before identification (Q3, Q4)."""

    length: Literal["epochs", "steps"] = Field(
        default="epochs", description="steps: the same number of optimisation steps for every client"
    )
    epochs: PositiveInt = Field(default=5, description="with length epochs")
    steps: PositiveInt = Field(default=60, description="with length steps")
    batch_size: PositiveInt | None = Field(default=None, description="none: the main stage's")
    lr: PositiveFloat = 5e-5
    weight_decay: NonNegativeFloat = 5e-2
    transform: Literal["plain", "train"] = Field(
        default="plain", description="of the features that are compared; train: with random flips, as FedSIR's code"
    )


class IdentifyingConfig(MethodConfig):
    """Base of the settings of methods that begin with stage I."""

    stage_one: StageOneSettings = StageOneSettings()
    identification: IdentificationSettings = IdentificationSettings()


def stage_one_cost(settings: StageOneSettings, scale: Scale) -> Cost:
    """Local fine-tuning and one pass for features."""
    if settings.length == "epochs" or scale.images is None:
        return Cost(float(settings.epochs), 1.0)
    batch_size = settings.batch_size or scale.training.batch_size
    return Cost(settings.steps * min(batch_size, scale.images) / scale.images, 1.0)


@dataclass(frozen=True)
class StageOneOutcome:
    """The verdict, and every client's stage-I model by client id."""

    verdict: Identification
    models: dict[int, LocalUpdate]


def identify_clients(
    server: Server,
    settings: StageOneSettings,
    identification: IdentificationSettings,
    objective: Callable[[int], Objective],
) -> StageOneOutcome:
    """Run stage I with `objective(k)` for client k.

    Training and similarities are shared by methods of the condition that ask for the same ones; the split is made
    anew, since it costs next to nothing.
    """
    objectives = [objective(k) for k in range(server.federation.num_clients)]
    what = {
        "stage": settings.model_dump(mode="json"),
        "similarity": identification.model_dump(mode="json", include=SIMILARITY_SETTINGS),
        "objectives": hashlib.sha256(pickle.dumps(objectives)).hexdigest(),
    }

    def train() -> dict[int, StageOneUpdate]:
        federation = server.federation
        batch_size = settings.batch_size or server.training.batch_size
        optimizer = OptimizerConfig(lr=settings.lr, weight_decay=settings.weight_decay)
        steps = settings.steps if settings.length == "steps" else None
        tasks = {
            k: StageOne(
                labels,
                federation.num_classes,
                Recipe(objectives[k], settings.epochs, batch_size, optimizer, steps=steps),
                identification,
                settings.transform,
            )
            for k, labels in enumerate(federation.observed)
        }
        results = server.run_clients(tasks, STAGE_ONE_ROUND, {"weights": server.initial_weights})
        return {k: r.update for k, r in results.items()}

    updates = server.once(f"stage-I {json.dumps(what, sort_keys=True)}", train)
    similarity = np.stack([u.similarity for u in updates.values()])
    verdict = identify(similarity, identification, integer(server.seed, Stream.IDENTIFICATION))
    for note in (*verdict.notes, *_evidence(server, settings)):
        server.note(f"identification: {note}")
    return StageOneOutcome(verdict, {k: u.training for k, u in updates.items()})


def _evidence(server: Server, settings: StageOneSettings) -> list[str]:
    """What makes the verdict weak in small federations."""
    sizes = server.federation.sizes
    notes = []
    small = int(np.count_nonzero(sizes < SMALL_CLIENT))
    if small:
        notes.append(
            f"{small} of {len(sizes)} clients hold fewer than {SMALL_CLIENT} images (the smallest {sizes.min()}): "
            "directions from so few are partly chance and look less alike, so read the verdict with its margins."
        )
    if settings.length == "epochs":
        batch_size = settings.batch_size or server.training.batch_size
        steps = [settings.epochs * len(batch_slices(int(n), batch_size)) for n in sizes]
        if max(steps) >= UNEVEN_STEPS * min(steps):
            notes.append(
                f"clients made between {min(steps)} and {max(steps)} optimisation steps, and similarities shrink with "
                "every step, so small clean clients can look noisy; method.stage_one.length=steps evens this out."
            )
    return notes
