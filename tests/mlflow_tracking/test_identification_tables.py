from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from fedsir.clients.training import batch_slices
from fedsir.spectral.identification import Identification, IdentificationSettings, MixtureFit, identify
from mlflow_tracking.identification import (
    component_distances,
    descriptor_table,
    evidence,
    fitted_scores,
    identification_facts,
    similarity_table,
    stage_one_steps,
)

STAGE: dict[str, Any] = {"length": "epochs", "epochs": 5, "steps": 60, "batch_size": None}


def settings_of(identification: IdentificationSettings, **stage: Any) -> dict[str, Any]:
    return {
        "identification": identification.model_dump(mode="json"),
        "stage_one": {**STAGE, **stage},
        "training": {"batch_size": 16},
    }


def two_groups(clients: int = 8, classes: int = 3) -> np.ndarray[Any, Any]:
    """(K, C, C) similarities; the last half of the clients is more alike between classes."""
    rng = np.random.default_rng(0)
    level = np.where(np.arange(clients) < clients // 2, 0.3, 0.6)[:, None, None]
    similarity = np.clip(level + rng.normal(0, 0.08, (clients, classes, classes)), 0, 1)
    similarity = (similarity + similarity.transpose(0, 2, 1)) / 2
    similarity[:, range(classes), range(classes)] = 1.0
    return similarity


def fit(columns: tuple[str, ...] = ("mean", "energy"), scale: tuple[float, ...] = (0.1, 0.2)) -> MixtureFit:
    """Unit covariance at (-1, -1) for clean, covariance 4 at (1, 1) for noisy."""
    return MixtureFit(
        columns,
        centre=np.array([0.5, 0.3]),
        scale=np.array(scale),
        means=np.array([[1.0, 1.0], [-1.0, -1.0]]),
        covariances=np.stack([4 * np.eye(2), np.eye(2)]),
        weights=np.array([0.75, 0.25]),
        clean_component=1,
    )


def test_similarity_table_is_the_matrices_again() -> None:
    similarity = two_groups(2, 3)
    similarity[1, 0, 2] = np.nan
    table = similarity_table(similarity, ("a", "b", "c"))
    assert len(table) == 18
    back = table[table.client == 1].pivot(index="class_a", columns="class_b", values="similarity")
    np.testing.assert_array_equal(back.to_numpy(), similarity[1])


def test_distances_and_log_odds_of_known_components() -> None:
    distances, log_odds = component_distances(fit(), np.array([[-1.0, -1.0], [1.0, 1.0], [np.nan, np.nan]]))
    np.testing.assert_allclose(distances[0, :2], [0.0, np.sqrt(8.0)])
    np.testing.assert_allclose(distances[1, :2], [np.sqrt(8.0) / 2, 0.0])
    # log(w_c / w_n) - (d_c^2 - d_n^2) / 2 + log(sqrt(|S_n| / |S_c|)), the last being log 4
    volume = np.log(4.0)
    np.testing.assert_allclose(log_odds[:2], [np.log(1 / 3) + 1 + volume, np.log(1 / 3) - 4 + volume])
    assert np.isnan(log_odds[2])
    assert np.isnan(distances[:, 2]).all()


@pytest.mark.parametrize("covariance", ["tied", "full"])
def test_log_odds_are_those_of_the_posterior(covariance: Any) -> None:
    settings = IdentificationSettings(covariance=covariance, n_init=2)
    verdict = identify(two_groups(), settings, seed=0)
    table = descriptor_table(verdict, np.full(8, 40), np.arange(8) >= 4, settings_of(settings))
    np.testing.assert_allclose(1 / (1 + np.exp(-table["log_odds"])), verdict.p_clean, atol=1e-9)
    assert ((table["log_odds"] > 0) == ~table["predicted_noisy"]).all()
    assert abs(table["score"].mean()) < 1e-9


def test_scores_of_clients_without_a_pair() -> None:
    descriptors = np.array([[0.6, 0.5, 0.9], [np.nan] * 3, [np.nan] * 3])
    z = fitted_scores(fit(), descriptors, p_clean=np.array([0.2, 0.9, np.nan]))
    np.testing.assert_allclose(z[0], [1.0, 1.0])
    np.testing.assert_allclose(z[1], [-5.0, -1.5])  # entered as zeros
    assert np.isnan(z[2]).all()
    np.testing.assert_allclose(fitted_scores(fit(scale=(0.1, 0.0)), descriptors[:1], np.ones(1)), [[1.0, 0.0]])


@pytest.mark.parametrize("batch_size", [1, 16, 40])
def test_steps_are_those_that_training_makes(batch_size: int) -> None:
    sizes = np.array([1, 2, 15, 16, 17, 33, 81])
    steps = stage_one_steps(sizes, settings_of(IdentificationSettings(), batch_size=batch_size))
    assert steps.tolist() == [5 * len(batch_slices(int(n), batch_size)) for n in sizes]


def test_steps_of_other_lengths_and_methods() -> None:
    sizes = np.array([10, 100])
    fixed = settings_of(IdentificationSettings(), length="steps", steps=7)
    assert stage_one_steps(sizes, fixed).tolist() == [7, 7]
    assert stage_one_steps(sizes, settings_of(IdentificationSettings())).tolist() == [5, 35]
    assert np.isnan(stage_one_steps(sizes, {"training": {"batch_size": 16}})).all()


def test_facts_name_the_components_in_units_of_the_descriptors() -> None:
    descriptors = np.array([[0.4, 0.1, 0.7], [0.6, 0.5, 0.9], [0.7, 0.5, 0.9]])
    p_clean = np.array([0.9, 0.1, 0.0])
    verdict = Identification(
        descriptors, np.zeros((3, 2, 2)), p_clean, p_clean > 0.5, ("a note",), split="mixture", mixture=fit()
    )
    settings = settings_of(IdentificationSettings(descriptors=("mean", "energy")))
    table = descriptor_table(verdict, np.full(3, 20), np.array([False, True, True]), settings)
    facts = identification_facts(verdict, table, settings)
    np.testing.assert_allclose(table["score"], [-1.0, 1.0, 1.5])
    assert facts["gap"] == pytest.approx(2.0)
    assert (facts["split"], facts["threshold"], facts["notes"]) == ("mixture", 0.5, ["a note"])
    clean, noisy = (facts["mixture"]["components"][name] for name in ("clean", "noisy"))
    np.testing.assert_allclose([*clean["mean"], clean["weight"]], [0.4, 0.1, 0.25])
    np.testing.assert_allclose([*noisy["mean"], noisy["weight"], noisy["mean_score"]], [0.6, 0.5, 0.75, 1.0])
    json.dumps(facts, allow_nan=False)


@pytest.mark.parametrize(
    ("split", "words"),
    [("mixture", "posterior"), ("class_losses", "votes"), ("lid", "right labels"), ("of a plugin", "posterior")],
)
def test_the_numbers_of_a_verdict_have_a_name(split: str, words: str) -> None:
    assert words in evidence(split)


@pytest.mark.parametrize("case", ["gap", "one client", "all equal", "votes"])
def test_verdicts_without_a_mixture_are_tabulated(case: str) -> None:
    settings = IdentificationSettings(split="largest_gap", descriptors=("mean",))
    clients = 1 if case == "one client" else 4
    similarity = two_groups(4)[:clients]
    if case == "all equal":
        similarity[:] = similarity[0]
    values = settings_of(settings)
    if case == "votes":
        nothing = np.full((4, 3), np.nan)
        verdict = Identification(
            nothing, np.full((4, 2, 2), np.nan), np.linspace(0, 1, 4), np.arange(4) > 1, (), "class_losses", None
        )
        values = {"training": {"batch_size": 16}}
    else:
        verdict = identify(similarity, settings, seed=0)
    table = descriptor_table(verdict, np.full(clients, 30), np.arange(clients) >= 2, values)
    facts = identification_facts(verdict, table, values)
    assert facts["mixture"] is None
    assert table["log_odds"].isna().all()
    assert (facts["gap"] is not None) == (case == "gap")
    if case == "gap":
        # The score is that of the chosen descriptor alone.
        assert table["score"].corr(table["mean"]) == pytest.approx(1.0)
        assert facts["gap"] > 0
    json.dumps(facts, allow_nan=False)
