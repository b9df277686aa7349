"""Spectral pruning: whom it trains, on which labels, and what it reduces to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsir.clients.objective import CrossEntropy, LogitAdjusted
from fedsir.methods import stage_one
from fedsir.methods.oct_fedsir import OctFedSIRConfig
from fedsir.methods.registry import parse_method_config
from fedsir.methods.spectral_pruning import SpectralPruningConfig
from fedsir.objectives import la_prior
from fedsir.spectral.identification import Identification

SHORT: dict[str, Any] = {"name": "spectral_pruning", "stage_one": {"epochs": 1}}


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Fix who counts as clean."""

    def fix(*clean: bool) -> None:
        real = stage_one.identify

        def decide(*arguments: Any) -> Identification:
            return replace(real(*arguments), clean=np.array(clean, dtype=np.bool_))

        monkeypatch.setattr(stage_one, "identify", decide)

    return fix


def observe(lab: Any, config: Any, condition: Any = None) -> tuple[Any, Any, Any]:
    """Result, everything that went to the clients, and the recorder."""
    watched, recorder = lab.dispatching(lab.executor), lab.collector()
    result = lab.run(config, executor=watched, condition=condition, recorder=recorder)
    assert np.isfinite(result.weights.values).all()
    return result, watched, recorder


def test_it_identifies_as_oct_fedsir_does() -> None:
    ours, theirs = SpectralPruningConfig(), OctFedSIRConfig()
    assert ours.stage_one == theirs.stage_one
    assert ours.identification == theirs.identification
    equal = parse_method_config("spectral_pruning/equal_steps")
    assert isinstance(equal, SpectralPruningConfig)
    assert equal.stage_one.length == "steps"


def test_its_verdict_is_that_of_oct_fedsir(lab: Any) -> None:
    ours, watched, recorder = observe(lab, lab.config(SHORT))
    theirs = lab.run(lab.config("oct_fedsir"))
    for name in ("similarity", "descriptors", "p_clean", "clean"):
        np.testing.assert_array_equal(getattr(ours.identification, name), getattr(theirs.identification, name))
    for item in watched.log[0].items:
        observed = recorder.started.federation.observed[item.client]
        objective = item.task.recipe.objective
        assert isinstance(objective, LogitAdjusted)
        np.testing.assert_array_equal(objective.prior, la_prior(np.bincount(observed, minlength=4)).numpy())
        assert item.task.settings.balance


def test_pruned_clients_are_never_touched_again(lab: Any, verdict: Any) -> None:
    verdict(True, False, False, True)
    config = lab.config(SHORT)
    _, watched, recorder = observe(lab, config)
    assert [i.client for i in watched.log[0].items] == [0, 1, 2, 3]
    later = watched.log[1:]
    assert [d.round for d in watched.tasks("LocalTraining")] == [0, 1, 2]
    for dispatch in later:
        kind = type(dispatch.items[0].task).__name__
        assert kind in ("LocalTraining", "PredictTest")
        if kind == "LocalTraining":
            assert [i.client for i in dispatch.items] == [0, 3]
    for record in recorder.rounds[1:]:
        assert record.metrics["cost/client_epochs"] == 2
        assert record.metrics["cost/forward_units"] == 0


def test_the_main_stage_starts_from_the_shared_state_with_plain_cross_entropy(lab: Any, verdict: Any) -> None:
    verdict(True, False, False, True)
    config = lab.config(SHORT)
    result, watched, _ = observe(lab, config)
    first = watched.tasks("LocalTraining")[0]
    np.testing.assert_array_equal(first.broadcast["weights"].values, lab.condition(config).initial_weights.values)
    assert all(isinstance(i.task.recipe.objective, CrossEntropy) for i in first.items)
    assert result.labels is None
    assert result.predicted_noisy.tolist() == [False, True, True, False]


def test_observed_labels_are_trained_on_never_the_true_ones(lab: Any, verdict: Any) -> None:
    """Two of these clients are noisy and mistaken for clean."""
    verdict(True, True, True, True)
    _, watched, recorder = observe(lab, lab.config(SHORT))
    observed, truth = recorder.started.federation.observed, recorder.started.truth
    for item in watched.tasks("LocalTraining")[-1].items:
        np.testing.assert_array_equal(item.task.labels, observed[item.client])
        assert np.array_equal(item.task.labels, truth.labels[item.client]) == (not truth.noisy[item.client])


# -- what it reduces to ------------------------------------------------------------------------------------------------


def test_when_everybody_counts_as_clean_it_is_fedavg(lab: Any, verdict: Any) -> None:
    verdict(True, True, True, True)
    pruned, average = lab.run(lab.config(SHORT)), lab.run(lab.config("fedavg"))
    assert pruned.weights_hash == average.weights_hash
    assert pruned.confusion.tolist() == average.confusion.tolist()


def test_under_a_perfect_verdict_neither_ratio_nor_kind_of_noise_matters(lab: Any, verdict: Any) -> None:
    kinds = (
        {"type": "symmetric", "ratio": 0.3},
        {"type": "symmetric", "ratio": 0.9},
        {"type": "asymmetric", "ratio": 0.6, "label_map": "kermany"},
    )
    configs = [lab.config(SHORT, federation={"noise": noise}) for noise in kinds]
    noisy = lab.condition(configs[0]).truth.noisy
    assert noisy.tolist() == [False, True, True, False]
    verdict(*~noisy)
    results = [lab.run(config) for config in configs]
    assert len({r.weights_hash for r in results}) == 1
    assert len({r.identification.similarity.tobytes() for r in results}) == 3


# -- edges and whole runs ----------------------------------------------------------------------------------------------


def test_a_single_clean_client_trains_alone(lab: Any, verdict: Any) -> None:
    verdict(False, False, True, False)
    result, watched, _ = observe(lab, lab.config(SHORT))
    (update,) = watched.tasks("LocalTraining")[-1].updates.values()
    np.testing.assert_array_equal(result.weights.values, update.weights.values)


def test_an_all_clean_federation_is_survived(lab: Any) -> None:
    result, _, _ = observe(lab, lab.config(SHORT, federation={"noise": {"type": "none"}}))
    assert result.identification.clean.any()


def test_a_run_can_be_repeated_and_continued(lab: Any, tmp_path: Path) -> None:
    config, alone = lab.config(SHORT), lab.collector()
    expected = lab.essence(lab.run(config, recorder=alone))
    assert lab.essence(lab.run(config)) == expected
    file = tmp_path / "run.safetensors"
    with pytest.raises(KeyboardInterrupt):
        lab.run(config, recorder=lab.interrupter(at=2), checkpoint=file)
    watched, recorder = lab.dispatching(lab.executor), lab.collector()
    assert lab.essence(lab.run(config, executor=watched, recorder=recorder, checkpoint=file)) == expected
    assert watched.tasks("StageOne") == []
    assert recorder.rounds[-1].metrics["test/loss"] == alone.rounds[-1].metrics["test/loss"]
