"""The numbers behind a verdict on clients, as tables; pure functions of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedsir.spectral.descriptors import DESCRIPTOR_NAMES, standardized
from fedsir.spectral.identification import Identification, MixtureFit

if TYPE_CHECKING:
    from fedsir.config.run import RunConfig

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]


_EVIDENCE = {"class_losses": "share of votes for clean", "lid": "estimated share of right labels"}


def evidence(split: str) -> str:
    """What `p_clean` is in a verdict by this `split` (see `fedsir.spectral.identification.Identification`)."""
    return _EVIDENCE.get(split, "posterior of being clean")


def compares_spectra(verdict: Identification) -> bool:
    """Whether the verdict has class similarities, and so descriptors."""
    return bool(np.isfinite(verdict.similarity).any())


def method_settings(config: RunConfig) -> dict[str, Any]:
    """The method's configuration as plain values, with the run's as `training`."""
    return {**config.method.model_dump(mode="json"), "training": config.training.model_dump(mode="json")}


def judging_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """How the method judges clients, from its `method_settings`; empty for methods without such settings."""
    return settings.get("identification") or {}


def similarity_table(similarity: Array, class_names: Sequence[str]) -> pd.DataFrame:
    """(K, C, C) class similarities, one row per client and ordered pair of classes; empty where unobserved."""
    clients, classes, _ = similarity.shape
    k, a, b = (index.ravel() for index in np.indices((clients, classes, classes)))
    names = np.array(class_names, dtype=object)
    return pd.DataFrame({"client": k, "class_a": names[a], "class_b": names[b], "similarity": similarity.ravel()})


def descriptor_table(
    verdict: Identification, sizes: NDArray[np.int64], noisy: Flags, settings: Mapping[str, Any]
) -> pd.DataFrame:
    """One row per client: what it was judged by, the verdict, and whether it is truly noisy.

    steps: optimizer steps of the local training before the verdict, empty if the method has none. mean, energy,
    maximum: descriptors. score: mean of their z-scores over the descriptors in the fit; higher means more
    alignment between classes, so more like noise. p_clean: see `evidence`. log_odds: natural
    logarithm of clean to noisy, which does not saturate as the posterior does. distance_clean, distance_noisy:
    Mahalanobis distances to the two components. The last three are empty for clients outside a mixture.

    settings: see `method_settings`; spectral methods have `identification` and `stage_one` in them.
    """
    nothing = np.full(len(sizes), np.nan)
    distances, log_odds = np.stack([nothing, nothing]), nothing
    if verdict.mixture is not None:
        z = fitted_scores(verdict.mixture, verdict.descriptors, verdict.p_clean)
        distances, log_odds = component_distances(verdict.mixture, z)
        score = z.mean(axis=1)
    else:
        chosen = judging_settings(settings).get("descriptors") or DESCRIPTOR_NAMES
        score = standardized(verdict.descriptors[:, [DESCRIPTOR_NAMES.index(name) for name in chosen]]).mean(axis=1)
    return pd.DataFrame(
        {
            "client": np.arange(len(sizes)),
            "images": sizes,
            "steps": stage_one_steps(sizes, settings),
            **{name: verdict.descriptors[:, column] for column, name in enumerate(DESCRIPTOR_NAMES)},
            "score": score,
            "p_clean": verdict.p_clean,
            "log_odds": log_odds,
            "distance_clean": distances[0],
            "distance_noisy": distances[1],
            "predicted_noisy": ~verdict.clean,
            "truly_noisy": noisy,
        }
    )


def fitted_scores(mixture: MixtureFit, descriptors: Array, p_clean: Array) -> Array:
    """(K, F) z-scores as the mixture saw them; NaN for clients kept out of the fit.

    A client without a pair of classes that is in the fit all the same entered with descriptors 0.
    """
    chosen = descriptors[:, [DESCRIPTOR_NAMES.index(name) for name in mixture.columns]]
    inside = np.isfinite(p_clean)
    chosen = np.where(inside[:, None] & np.isnan(chosen), 0.0, chosen)
    flat = mixture.scale == 0
    z = np.where(flat, 0.0, (chosen - mixture.centre) / np.where(flat, 1.0, mixture.scale))
    return np.asarray(np.where(inside[:, None], z, np.nan), dtype=np.float64)


def component_distances(mixture: MixtureFit, z: Array) -> tuple[Array, Array]:
    """Mahalanobis distances (2, K) to the clean and the noisy component, and log-odds (K,) of being clean.

    log-odds = log(w_c N(z; m_c, S_c)) - log(w_n N(z; m_n, S_n)).
    """
    order = (mixture.clean_component, 1 - mixture.clean_component)
    distances, log_densities = [], []
    for component in order:
        offset = z - mixture.means[component]
        covariance = mixture.covariances[component]
        squared = np.einsum("kf,kf->k", offset, np.linalg.solve(covariance, offset.T).T)
        _, log_volume = np.linalg.slogdet(covariance)
        distances.append(np.sqrt(np.maximum(squared, 0.0)))
        with np.errstate(divide="ignore"):  # a component may be empty
            log_densities.append(np.log(mixture.weights[component]) - 0.5 * (squared + log_volume))
    return np.stack(distances), np.asarray(log_densities[0] - log_densities[1], dtype=np.float64)


def stage_one_steps(sizes: NDArray[np.int64], settings: Mapping[str, Any]) -> Array:
    """(K,) optimizer steps of stage I; NaN for methods that judge clients without local training of its own.

    settings: see `descriptor_table`; `batch_size` none means that of `training`.
    """
    stage = settings.get("stage_one")
    if stage is None:
        return np.full(len(sizes), np.nan)
    if stage["length"] == "steps":
        return np.full(len(sizes), float(stage["steps"]))
    batch = stage["batch_size"] or settings["training"]["batch_size"]
    batches = -(-sizes // batch)
    # A last batch of one image joins the one before (see `fedsir.clients.training.batch_slices`).
    batches = np.where((batches > 1) & ((sizes - 1) % batch == 0), batches - 1, batches)
    return np.asarray(stage["epochs"] * batches, dtype=np.float64)


def identification_facts(verdict: Identification, table: pd.DataFrame, settings: Mapping[str, Any]) -> dict[str, Any]:
    """How the clients were split, as plain values without NaN; `table` is `descriptor_table`'s.

    gap: lowest score of a client judged noisy minus the highest of one judged clean; none with one group only.
    Of a component, `mean` is in units of the descriptors, the rest in z-scores.
    """
    judged = judging_settings(settings)
    noisy = table["predicted_noisy"].to_numpy(dtype=bool)
    score = table["score"].to_numpy(dtype=np.float64)
    low, high = score[noisy & np.isfinite(score)], score[~noisy & np.isfinite(score)]
    return {
        "split": verdict.split,
        "threshold": judged.get("threshold"),
        "descriptors": list(judged.get("descriptors") or DESCRIPTOR_NAMES),
        "gap": float(low.min() - high.max()) if low.size and high.size else None,
        "mixture": None if verdict.mixture is None else _mixture_facts(verdict.mixture),
        "notes": list(verdict.notes),
        "settings": dict(judged),
    }


def _mixture_facts(mixture: MixtureFit) -> dict[str, Any]:
    order = [mixture.clean_component, 1 - mixture.clean_component]
    names = ("clean", "noisy")
    return {
        "columns": list(mixture.columns),
        "centre": mixture.centre.tolist(),
        "scale": mixture.scale.tolist(),
        "components": {
            name: {
                "weight": float(mixture.weights[c]),
                "mean": (mixture.centre + mixture.scale * mixture.means[c]).tolist(),
                "mean_score": float(mixture.means[c].mean()),
                "mean_z": mixture.means[c].tolist(),
                "covariance_z": mixture.covariances[c].tolist(),
            }
            for name, c in zip(names, order, strict=True)
        },
    }
