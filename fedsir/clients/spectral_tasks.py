"""Client tasks of the spectral methods: similarity for stage I, spectra of clean clients, relabelling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedsir.clients.runtime import Client
from fedsir.clients.tasks import Broadcast, ClientResult
from fedsir.clients.training import LocalUpdate, Recipe, forward_pass, train_locally
from fedsir.data.transforms import draw_flips
from fedsir.seeding import Stream
from fedsir.spectral.decomposition import ClassSpectrum, class_spectra
from fedsir.spectral.identification import IdentificationSettings, client_similarity
from fedsir.spectral.references import ClassReference, ReferenceSettings, class_reference
from fedsir.spectral.relabeling import Relabeling, RelabelingRule, relabel


@dataclass(frozen=True)
class StageOneUpdate:
    """training: the client's stage-I model. similarity: (C, C) float64, NaN for unused classes."""

    training: LocalUpdate
    similarity: NDArray[np.float64]


@dataclass(frozen=True)
class StageOne:
    """Local fine-tuning from broadcast `weights`, then class similarity of the client's own features."""

    labels: NDArray[np.int64]
    num_classes: int
    recipe: Recipe
    settings: IdentificationSettings
    transform: Literal["plain", "train"] = "plain"

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[StageOneUpdate]:
        update = train_locally(client, broadcast["weights"], self.labels, self.recipe)
        client.runtime.binding.load(update.weights)
        rng = client.generator(Stream.IDENTIFICATION)
        flipping = self.transform == "train" and client.runtime.setup.transform.horizontal_flip
        flips = draw_flips(client.size, rng) if flipping else None
        features = forward_pass(client, "features", flips).cpu().numpy()
        similarity = client_similarity(features, self.labels, self.num_classes, self.settings, rng)
        return ClientResult(StageOneUpdate(update, similarity))


@dataclass(frozen=True)
class ProvideSpectra:
    """Spectra of the client's classes under the broadcast clean reference model `reference_model`."""

    labels: NDArray[np.int64]
    num_classes: int
    kappa: float
    residual_directions: int

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[tuple[ClassSpectrum | None, ...]]:
        client.runtime.binding.load(broadcast["reference_model"])
        features = forward_pass(client, "features").cpu().numpy()
        spectra = class_spectra(features, self.labels, self.num_classes, self.kappa, self.residual_directions)
        return ClientResult(spectra)


@dataclass(frozen=True)
class FormReference:
    """Reference of one class from what the clean clients sent: server-side work that any worker can do."""

    spectra: tuple[ClassSpectrum | None, ...]
    settings: ReferenceSettings

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[ClassReference | None]:  # noqa: ARG002
        return ClientResult(class_reference(self.spectra, self.settings))


@dataclass(frozen=True)
class Relabel:
    """Corrected labels from broadcast `references` and `reference_model`; they stay with the client."""

    observed: NDArray[np.int64]
    rule: RelabelingRule
    keep_unreferenced: bool

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[None]:
        client.runtime.binding.load(broadcast["reference_model"])
        features = forward_pass(client, "features").cpu().numpy()
        outcome: Relabeling = relabel(
            features, broadcast["references"], self.observed, self.rule, self.keep_unreferenced
        )
        return ClientResult(None, state=outcome)
