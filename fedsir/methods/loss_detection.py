"""Who is noisy by class-wise losses of the global model; FedNoRo and FedELC share it (Wu et al. 2023)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedsir.clients.loss_tasks import ClassLosses
from fedsir.config.base import PositiveFloat, PositiveInt, Section
from fedsir.methods.base import MethodState, Server
from fedsir.methods.cost import Scale
from fedsir.methods.local import participants
from fedsir.mixture import high_group
from fedsir.models.flat import FlatWeights
from fedsir.spectral.identification import Identification

# With fewer clients a full covariance over all classes fits noise.
_FEW_CLIENTS = 10

# Share of clients that is declared clean when the vote leaves nobody.
_FORCED_CLEAN_SHARE = 0.1


class LossDetection(Section):
    """The vote: one mixture per seed 0 .. votes - 1; the noisy set that most of them name wins."""

    votes: PositiveInt = 9
    covariance: Literal["auto", "full", "tied"] = Field(
        default="auto", description="auto: tied below ten clients, else full"
    )
    regularization: PositiveFloat | None = Field(default=None, description="none: 1e-2 if tied, 1e-6 if full")

    def mixture(self, clients: int) -> tuple[Literal["full", "tied"], float]:
        """Covariance and regularization for so many clients."""
        chosen: Literal["full", "tied"]
        chosen = ("tied" if clients < _FEW_CLIENTS else "full") if self.covariance == "auto" else self.covariance
        return chosen, self.regularization or (1e-2 if chosen == "tied" else 1e-6)


@dataclass(frozen=True)
class Vote:
    """noisy: (K,) bool, the winning set. share: (K,) float64, votes that named the client noisy, as a share."""

    noisy: NDArray[np.bool_]
    share: NDArray[np.float64]


def class_loss_matrix(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Losses (K, C), NaN where a client has no image of the class, made comparable between clients: (K, C').

    An absent class gets the lowest loss among its owners, so that it does not speak against the client; a class
    that nobody owns is dropped; an infinite loss, of a model that diverged, becomes the median of the finite ones.
    """
    owned = ~np.isnan(losses)
    finite = np.isfinite(losses)
    kept = finite.any(axis=0)
    out = np.array(losses[:, kept], dtype=np.float64)
    for column, known, has in zip(out.T, finite[:, kept].T, owned[:, kept].T, strict=True):
        column[has & ~known] = np.median(column[known])
        column[~has] = column[known].min()
    return out


def min_max_scaled(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Every column of (K, C) between 0 and 1; a column without spread tells nothing and becomes 0."""
    low = matrix.min(axis=0, keepdims=True)
    spread = matrix.max(axis=0, keepdims=True) - low
    return np.where(spread > 0, (matrix - low) / np.where(spread > 0, spread, 1.0), 0.0)


def winning_set(sets: Sequence[NDArray[np.bool_]]) -> Vote:
    """The most frequent *set* among (K,) bool sets, not a vote on each client; the earliest wins a tie."""
    winner, _ = Counter(tuple(s.tolist()) for s in sets).most_common(1)[0]
    return Vote(np.array(winner, dtype=np.bool_), np.mean(sets, axis=0))


def vote_noisy(scaled: NDArray[np.float64], settings: LossDetection) -> Vote:
    """Who is noisy by scaled losses (K, C): the mixture's component with the larger coordinate sum, voted on."""
    covariance, regularization = settings.mixture(len(scaled))
    return winning_set([high_group(scaled, seed, covariance, regularization) for seed in range(settings.votes)])


def with_somebody_clean(noisy: NDArray[np.bool_], scores: NDArray[np.float64]) -> NDArray[np.bool_]:
    """noisy (K,), but if that is everybody, the tenth with the lowest scores (K,) is taken out."""
    if not noisy.all():
        return noisy
    best = np.argsort(scores, kind="stable")[: ceil(_FORCED_CLEAN_SHARE * len(scores))]
    forced = noisy.copy()
    forced[best] = False
    return forced


def detect(losses: NDArray[np.float64], settings: LossDetection) -> Identification:
    """Verdict from class losses (K, C), NaN for absent classes; `p_clean` is the share of votes for clean."""
    scaled = min_max_scaled(class_loss_matrix(losses))
    vote = vote_noisy(scaled, settings)
    noisy = with_somebody_clean(vote.noisy, scaled.sum(axis=1))
    notes = []
    without = np.flatnonzero(np.isnan(losses).all(axis=1)).tolist()
    if without:
        notes.append(f"clients without any loss ({', '.join(map(str, without))}) look clean for want of evidence.")
    if vote.noisy.all():
        notes.append("the vote found nobody clean: the clients with the lowest losses were declared clean.")
    elif not noisy.any():
        notes.append("every client counts as clean.")
    return Identification.without_spectra(losses.shape[1], 1.0 - vote.share, ~noisy, "class_losses", tuple(notes))


def detect_noisy_clients(server: Server, weights: FlatWeights, t: int, settings: LossDetection) -> Identification:
    """Ask every client for the class losses of `weights` before round t, and split the clients by them."""
    federation = server.federation
    tasks = {k: ClassLosses(labels, federation.num_classes) for k, labels in enumerate(federation.observed)}
    results = server.run_clients(tasks, t, {"weights": weights})
    verdict = detect(np.stack([r.update.mean for r in results.values()]), settings)
    for note in verdict.notes:
        server.note(f"detection: {note}")
    return verdict


def taken_for_clean(server: Server, state: MethodState) -> NDArray[np.bool_]:
    """(K,) bool: clients that train and count as clean; everybody until there is a verdict (the warm-up)."""
    if state.identification is None:
        return np.ones(server.federation.num_clients, dtype=np.bool_)
    return state.identification.clean


def training_clients(server: Server, state: MethodState, t: int) -> list[int]:
    """Clients that train in round t: everybody during the warm-up, whose end is a verdict on everybody, and then the
    participants."""
    return list(range(server.federation.num_clients)) if state.identification is None else participants(server, t)


def training_passes(scale: Scale, following: int) -> float:
    """Passes over a client's images in training where `following` rounds follow the warm-up; see `training_clients`."""
    return (scale.training.rounds - following + scale.share * following) * scale.training.local_epochs
