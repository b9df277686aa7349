"""RoFL: small-loss training with class centroids that clients and server exchange (Yang et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedsir.clients.module import Batch
from fedsir.clients.runtime import Client
from fedsir.clients.tasks import Broadcast, ClientResult
from fedsir.clients.training import LocalUpdate, Recipe, forward_pass, train_locally
from fedsir.config.base import Fraction, NonNegativeFloat
from fedsir.config.method import MethodConfig
from fedsir.config.training import TrainingConfig
from fedsir.methods.aggregate import SampleMean
from fedsir.methods.base import MethodState, Server
from fedsir.methods.cost import Cost, Scale
from fedsir.methods.local import participants, stage_rounds
from fedsir.methods.registry import MethodEntry
from fedsir.models.network import Network
from fedsir.objectives import entropy, linear_ramp
from fedsir.prototypes import class_means, merged_centroids, moved_centroids, nearest_centroid

CentroidReduction = Literal["mean_per_dim", "sum"]


class RoFLConfig(MethodConfig):
    """Settings of RoFL; stages are shares of the rounds.

    The published codes detach the features in the centroid loss, which then has no gradient at all, and sum it
    over batch and dimensions. `cen_grad: false` with `cen_reduction: sum` reproduces them; the defaults give the
    loss the gradient that the paper intends, on a scale that does not swamp the cross entropy.
    """

    name: Literal["rofl"] = "rofl"
    lambda_cen: NonNegativeFloat = Field(default=1.0, description="weight of the centroid loss after its ramp")
    lambda_e: NonNegativeFloat = Field(default=0.8, description="weight of the entropy of predictions")
    forget_rate: Annotated[float, Field(strict=True, ge=0, lt=1)] = Field(
        default=0.2, description="share of each batch, largest losses first, that is left out after the ramp"
    )
    forget_ramp: Fraction = Field(default=0.1, description="T_k: rounds until the forget rate is reached")
    pseudo_label_start: Fraction = Field(
        default=0.1, description="T_pl: rounds before pseudo-labels are used; also the ramp of lambda_cen"
    )
    cen_grad: bool = Field(default=True, description="the centroid loss moves the features")
    cen_reduction: CentroidReduction = Field(
        default="mean_per_dim", description="mean over selected samples and dimensions, or the sum over both"
    )


@dataclass(frozen=True)
class Terms:
    """How one round weighs the parts of the loss."""

    forget_rate: float
    lambda_cen: float
    lambda_e: float
    cen_grad: bool
    cen_reduction: CentroidReduction


def terms_of_round(config: RoFLConfig, t: int, rounds: int) -> tuple[Terms, bool]:
    """Weights in round t of `rounds`, and whether pseudo-labels are used in it.

    The forget rate grows linearly from 0 to its final value in T_k values, as `linspace` would give them.
    """
    forget_rounds = stage_rounds(config.forget_ramp, rounds)
    first_pseudo = stage_rounds(config.pseudo_label_start, rounds)
    terms = Terms(
        config.forget_rate * linear_ramp(t, max(forget_rounds - 1, 1)),
        config.lambda_cen * linear_ramp(t, first_pseudo),
        config.lambda_e,
        config.cen_grad,
        config.cen_reduction,
    )
    return terms, t >= first_pseudo


def small_loss_samples(losses: Tensor, forget_rate: float) -> Tensor:
    """Positions, ascending, of the max(1, floor((1 - R) b)) smallest of `losses` (b,); ties: earlier ones."""
    # The small constant keeps a product such as (1 - 0.9) * 10 from falling below the integer it stands for.
    keep = max(1, int((1.0 - forget_rate) * len(losses) + 1e-9))
    return torch.argsort(losses.detach(), stable=True)[:keep].sort().values


def rofl_loss(
    logits: Tensor,
    features: Tensor,
    labels: Tensor,
    centroids: Tensor,
    terms: Terms,
    pseudo_labels: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """L_c + lambda_cen L_cen + lambda_e L_e (scalar), and the positions of the selected samples.

    logits (b, C), features (b, d), given labels (b,) int64, centroids (C, d), pseudo_labels (b,) int64. A
    selected sample whose nearest centroid is that of its label keeps the label and is drawn to the centroid;
    the others learn from their pseudo-label, or from the given label where pseudo-labels are None.
    """
    chosen = small_loss_samples(F.cross_entropy(logits, labels, reduction="none"), terms.forget_rate)
    logits, features, labels = logits[chosen], features[chosen], labels[chosen]
    agrees = nearest_centroid(features, centroids) == labels
    targets = labels if pseudo_labels is None else torch.where(agrees, labels, pseudo_labels[chosen])
    drawn = features if terms.cen_grad else features.detach()
    distances = agrees * (drawn - centroids[labels]).square().sum(dim=1)
    centroid_loss = distances.sum() if terms.cen_reduction == "sum" else distances.mean() / features.shape[1]
    loss = (
        F.cross_entropy(logits, targets)
        + terms.lambda_cen * centroid_loss
        + terms.lambda_e * entropy(logits.softmax(dim=1)).mean()
    )
    return loss, chosen


class CentroidObjective:
    """`rofl_loss` with centroids (C, d) that follow the selected samples after each batch.

    Reads the per-sample extra `pseudo_labels` (b,) int64 where it is given. A batch whose loss is not finite
    takes no step, so it does not move the centroids either.
    """

    def __init__(self, centroids: Tensor, terms: Terms) -> None:
        self.centroids = centroids
        self.terms = terms

    def __call__(self, network: Network, batch: Batch) -> Tensor:
        features = network.features(batch.images)
        logits = network.logits(features)
        loss, chosen = rofl_loss(
            logits, features, batch.labels, self.centroids, self.terms, batch.extras.get("pseudo_labels")
        )
        if bool(torch.isfinite(loss)):
            means, counts = class_means(features[chosen], batch.labels[chosen], len(self.centroids))
            self.centroids = moved_centroids(self.centroids, means, counts)
        return loss


@dataclass(frozen=True)
class RoFLUpdate:
    """training: the local model. centroids: (C, d) float32. counts: (C,) int64 observed labels, if asked for."""

    training: LocalUpdate
    centroids: NDArray[np.float32]
    counts: NDArray[np.int64] | None


@dataclass(frozen=True)
class RoFLTraining:
    """Train from broadcast `weights` and `centroids`; without `centroids`, from the client's own class means.

    report_counts: the client has not yet told how many images it has of each class.
    """

    labels: NDArray[np.int64]
    num_classes: int
    budget: TrainingConfig
    terms: Terms
    use_pseudo_labels: bool
    report_counts: bool

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[RoFLUpdate]:
        runtime = client.runtime
        runtime.binding.load(broadcast["weights"])
        if "centroids" in broadcast:
            centroids = torch.from_numpy(broadcast["centroids"].copy()).to(runtime.device)
        else:
            given = torch.from_numpy(self.labels.copy()).to(runtime.device)
            centroids, _ = class_means(forward_pass(client, "features"), given, self.num_classes)
        extras: Mapping[str, NDArray[Any]] = {}
        if self.use_pseudo_labels:
            extras = {"pseudo_labels": forward_pass(client, "logits").argmax(dim=1).cpu().numpy()}
        objective = CentroidObjective(centroids, self.terms)
        recipe = Recipe.within(self.budget, objective, extras)
        update = train_locally(client, broadcast["weights"], self.labels, recipe)
        counts = np.bincount(self.labels, minlength=self.num_classes) if self.report_counts else None
        return ClientResult(RoFLUpdate(update, objective.centroids.cpu().numpy(), counts))


@dataclass(frozen=True)
class RoFLState(MethodState):
    """centroids: (C, d) float32 of the server. counts: (K, C) int64 that the clients reported, 0 of those that have not
    taken part yet. None before round 0."""

    centroids: NDArray[np.float32] | None = field(default=None, kw_only=True)
    counts: NDArray[np.int64] | None = field(default=None, kw_only=True)


class RoFL:
    """Clients train on small losses guided by centroids; the server averages models and merges centroids."""

    state_type = RoFLState

    def __init__(self, config: RoFLConfig) -> None:
        self.config = config

    def begin(self, server: Server) -> RoFLState:
        return RoFLState(weights=server.initial_weights)

    def round(self, server: Server, state: RoFLState, t: int) -> RoFLState:
        federation = server.federation
        terms, use_pseudo_labels = terms_of_round(self.config, t, server.training.rounds)
        counts = np.zeros((federation.num_clients, federation.num_classes), dtype=np.int64)
        if state.counts is not None:
            counts = state.counts.copy()
        tasks = {
            k: RoFLTraining(
                federation.observed[k],
                federation.num_classes,
                server.training,
                terms,
                use_pseudo_labels,
                report_counts=not counts[k].any(),
            )
            for k in participants(server, t)
        }
        broadcast: dict[str, Any] = {"weights": state.weights}
        if state.centroids is not None:
            broadcast["centroids"] = state.centroids
        mean = SampleMean(server, tasks)

        def take(client: int, result: ClientResult[RoFLUpdate]) -> tuple[NDArray[np.float32], bool]:
            update = result.update
            mean.add(client, update.training)
            if update.counts is not None:
                counts[client] = update.counts
            return update.centroids, update.training.samples > 0 and bool(np.isfinite(update.centroids).all())

        returned = server.fold_clients(tasks, t, broadcast, take)
        return replace(
            state,
            weights=mean.result(state.weights),
            centroids=_merged(state.centroids, returned, counts),
            counts=counts,
        )


def _merged(
    current: NDArray[np.float32] | None,
    returned: Mapping[int, tuple[NDArray[np.float32], bool]],
    counts: NDArray[np.int64],
) -> NDArray[np.float32]:
    """The server's centroids from those that came back, by client and with whether they are usable."""
    of_clients = np.stack([centroids for centroids, _ in returned.values()])
    if current is None:
        current = np.zeros_like(of_clients[0])
    usable = np.array([fine for _, fine in returned.values()])
    return merged_centroids(current, of_clients[usable], counts[list(returned)][usable])


def cost(config: RoFLConfig, scale: Scale) -> Cost:
    """A pass for class means in the first round, one for pseudo-labels in the rounds that use them."""
    rounds = scale.training.rounds
    with_pseudo_labels = max(0, rounds - stage_rounds(config.pseudo_label_start, rounds))
    return Cost(scale.passes, scale.share * (1.0 + with_pseudo_labels))


METHOD = MethodEntry(
    config=RoFLConfig,
    build=RoFL,
    summary="small-loss selection with exchanged class centroids and pseudo-labels",
    source="Yang et al., IEEE Intelligent Systems 2022, arXiv 2012.01700",
    cost=cost,
    partial_participation=True,
)
