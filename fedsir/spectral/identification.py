"""Who is noisy: two-component split of the clients by their spectral descriptors.

Q numbers: fedsir/CHOICES.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedsir.config.base import Fraction, PositiveFloat, PositiveInt, Section
from fedsir.mixture import fit_two_components
from fedsir.spectral.decomposition import balanced_index, class_spectrum, similarity_matrix
from fedsir.spectral.descriptors import DESCRIPTOR_NAMES, descriptors, moments, standardized, usable_classes

# Share of clients that is declared clean when the split finds nobody clean (a reference set is needed).
_FORCED_CLEAN_SHARE = 0.1


@dataclass(frozen=True)
class MixtureFit:
    """The mixture behind a verdict, in units of z-scores: z = (descriptor - centre) / scale.

    columns: names of the F descriptors. centre, scale: (F,); a scale of 0 marks a descriptor without spread.
    means: (2, F), covariances: (2, F, F), weights: (2,) float64.
    """

    columns: tuple[str, ...]
    centre: NDArray[np.float64]
    scale: NDArray[np.float64]
    means: NDArray[np.float64]
    covariances: NDArray[np.float64]
    weights: NDArray[np.float64]
    clean_component: int


@dataclass(frozen=True)
class ClientSplit:
    """Who is taken for clean, and how that came about.

    p_clean: (K,) float64 posterior, NaN for clients kept out of the fit. clean: (K,) bool. notes: what guard or
    fallback was used, for people. split: `mixture`, `largest_gap`, or `none` where nothing could be compared.
    """

    p_clean: NDArray[np.float64]
    clean: NDArray[np.bool_]
    notes: tuple[str, ...]
    split: str
    mixture: MixtureFit | None


@dataclass(frozen=True)
class Identification:
    """A verdict on clients and the numbers that decided it; the other fields as in `ClientSplit`.

    descriptors: (K, 3) float64 columns mean, energy, maximum of the off-diagonal similarities; NaN without a
    pair. similarity: (K, C, C) float64, NaN where a class is unobserved. Methods that compare no spectra have other
    names of `split` and meanings of `p_clean`: `class_losses`, share of votes for clean (FedNoRo, FedELC); `lid`,
    estimated share of right labels (FedCorr).
    """

    descriptors: NDArray[np.float64]
    similarity: NDArray[np.float64]
    p_clean: NDArray[np.float64]
    clean: NDArray[np.bool_]
    notes: tuple[str, ...]
    split: str
    mixture: MixtureFit | None

    @classmethod
    def without_spectra(
        cls,
        num_classes: int,
        p_clean: NDArray[np.float64],
        clean: NDArray[np.bool_],
        split: str,
        notes: tuple[str, ...] = (),
    ) -> Identification:
        """A verdict (K,) of a method that compares no spectra: descriptors and similarity are NaN."""
        nothing = np.full((len(clean), num_classes, num_classes), np.nan)
        return cls(np.full((len(clean), 3), np.nan), nothing, p_clean, clean, notes, split, mixture=None)


class IdentificationSettings(Section):
    """How clients are told apart; the defaults are OCT-FedSIR's (Q1-Q6).

    FedSIR: balance false, descriptors (mean, energy), no_pairs zeros, covariance full, regularization 1e-6,
    clean_component first_descriptor.
    """

    balance: bool = Field(default=True, description="oversample observed classes before the decomposition")
    feature_norm: Literal["none", "l2"] = "none"
    similarity_sign: Literal["abs", "oriented"] = "abs"
    min_class_count: PositiveInt = Field(
        default=20, description="images a class needs, unless fewer than two classes have as many"
    )
    descriptors: tuple[Literal["mean", "energy", "maximum"], ...] = Field(
        default=("mean", "energy", "maximum"), min_length=1
    )
    no_pairs: Literal["noisy", "zeros", "clean"] = Field(
        default="noisy",
        description="clients with fewer than two classes: verdict, or zeros in the fit",
    )
    split: Literal["mixture", "largest_gap"] = "mixture"
    covariance: Literal["tied", "full"] = "tied"
    regularization: PositiveFloat = 1e-2
    n_init: PositiveInt = 30
    max_iter: PositiveInt = 2000
    clean_component: Literal["mean_score", "first_descriptor"] = "mean_score"
    threshold: Fraction = Field(default=0.5, description="posterior from which a client counts as clean")
    mixture_min_clients: PositiveInt = Field(
        default=3, description="with fewer clients to compare, the largest gap replaces the mixture"
    )


def client_similarity(
    features: NDArray[np.floating],
    observed: NDArray[np.int64],
    num_classes: int,
    settings: IdentificationSettings,
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    """S_k (C, C) of one client from features (n, d) and observed labels (n,): what stage I sends (eq. 12).

    NaN for classes that are unobserved or left out as too small.
    """
    rows = np.asarray(features, dtype=np.float64)
    if settings.feature_norm == "l2":
        rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    used = usable_classes(np.bincount(observed, minlength=num_classes), settings.min_class_count)
    index = balanced_index(observed, rng) if settings.balance else np.arange(len(observed))
    leading: list[NDArray[np.float64] | None] = [None] * num_classes
    for c in np.flatnonzero(used).tolist():
        spectrum = class_spectrum(rows[index[observed[index] == c]], kappa=1.0, max_residual=0)
        leading[c] = None if spectrum is None else spectrum.leading
    return similarity_matrix(leading, settings.similarity_sign)


def identify(similarity: NDArray[np.float64], settings: IdentificationSettings, seed: int) -> Identification:
    """Verdict over all clients from their similarities (K, C, C), in client order."""
    values = np.stack([descriptors(s) for s in similarity])
    split = split_clients(values, settings, seed)
    return Identification(values, similarity, **vars(split))


def split_clients(values: NDArray[np.float64], settings: IdentificationSettings, seed: int) -> ClientSplit:
    """Clean or noisy from descriptors (K, 3) with NaN rows for clients without a pair of classes.

    The chosen descriptors are z-scored over the clients in the fit; the group with the lower values is clean.
    Guards, each with a note: clients without a pair get the verdict of `no_pairs`; fewer than two clients to
    compare, or no spread between them, are all taken as clean, since nothing speaks against them; if nobody
    at all comes out clean, the tenth with the lowest scores is declared clean, since relabelling needs
    someone to learn from.
    """
    num_clients = len(values)
    notes: list[str] = []
    columns = [DESCRIPTOR_NAMES.index(name) for name in settings.descriptors]
    chosen = values[:, columns]
    paired = np.all(np.isfinite(chosen), axis=1)
    if not paired.all():
        without = ", ".join(map(str, np.flatnonzero(~paired).tolist()))
        meaning = {
            "noisy": "treated as noisy and kept out of the fit",
            "clean": "treated as clean and kept out of the fit",
            "zeros": "entered into the fit with descriptors 0",
        }[settings.no_pairs]
        notes.append(f"clients with fewer than two usable classes ({without}) are {meaning}.")
    if settings.no_pairs == "zeros":
        chosen = np.where(paired[:, None], chosen, 0.0)
        paired = np.ones(num_clients, dtype=np.bool_)

    p_clean = np.full(num_clients, np.nan)
    clean = np.full(num_clients, settings.no_pairs == "clean")
    if not paired.any():
        notes.append("no client has two usable classes, so nothing can be compared: everybody counts as clean.")
        return ClientSplit(p_clean, np.ones(num_clients, dtype=np.bool_), tuple(notes), "none", None)

    posterior, how, mixture = _posterior(chosen[paired], settings, seed, notes)
    p_clean[paired] = posterior
    clean[paired] = posterior >= settings.threshold
    if not clean.any():
        scores = np.full(num_clients, np.inf)
        scores[paired] = standardized(chosen[paired]).mean(axis=1)
        forced = np.argsort(scores, kind="stable")[: ceil(_FORCED_CLEAN_SHARE * num_clients)]
        clean[forced[paired[forced]]] = True
        notes.append("the split found nobody clean: the clients with the lowest scores were declared clean.")
    elif clean.all() and num_clients > 1:
        notes.append("every client counts as clean.")
    return ClientSplit(p_clean, clean, tuple(notes), how, mixture)


def _posterior(
    values: NDArray[np.float64], settings: IdentificationSettings, seed: int, notes: list[str]
) -> tuple[NDArray[np.float64], str, MixtureFit | None]:
    """(M,) probability of being clean from descriptors (M, F) of the clients in the fit, and how it was made."""
    z = standardized(values)
    if len(z) < 2:
        notes.append("a single client has descriptors and no other to be compared with: it counts as clean.")
        return np.ones(len(z)), "none", None
    if not np.any(z):
        notes.append("all clients in the fit have equal descriptors: they count as clean.")
        return np.ones(len(z)), "none", None
    if settings.split == "mixture" and len(z) < settings.mixture_min_clients:
        notes.append(f"{len(z)} clients are too few for a mixture: split at the largest gap.")
    elif settings.split == "mixture":
        return _mixture(values, settings, seed, notes)
    return _largest_gap(z.mean(axis=1)), "largest_gap", None


def _mixture(
    values: NDArray[np.float64], settings: IdentificationSettings, seed: int, notes: list[str]
) -> tuple[NDArray[np.float64], str, MixtureFit]:
    fit = fit_two_components(
        standardized(values),
        settings.covariance,
        settings.regularization,
        settings.n_init,
        settings.max_iter,
        seed,
    )
    if not fit.converged:
        notes.append(f"the mixture did not converge in {settings.max_iter} iterations.")
    first = settings.clean_component == "first_descriptor"
    component = int(np.argmin(fit.means[:, 0] if first else fit.means.mean(axis=1)))
    centre, scale = moments(values)
    mixture = MixtureFit(
        settings.descriptors, centre, scale, fit.means, fit.covariances, fit.weights, clean_component=component
    )
    return fit.responsibilities[:, component], "mixture", mixture


def _largest_gap(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 below and 0 above the largest gap between neighbouring scores (M,), M >= 2."""
    ordered = np.sort(scores)
    edge = ordered[int(np.argmax(np.diff(ordered)))]
    return np.where(scores <= edge, 1.0, 0.0)
