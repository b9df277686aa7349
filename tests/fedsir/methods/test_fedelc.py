"""FedELC through the coordinator: stages, the labels it learns, aggregation, and runs in pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from fedsir.aggregation import distance_aware_mean
from fedsir.clients.label_learning import initial_label_logits
from fedsir.clients.objective import LogitAdjusted
from fedsir.methods import loss_detection
from fedsir.methods.fedelc import FedELCConfig
from fedsir.methods.local import stage_rounds
from fedsir.spectral.identification import Identification

# Warm-up of two rounds; the label keeps so little weight that labels change within a few rounds.
SHORT: dict[str, Any] = {"name": "fedelc", "warmup": 0.25, "label_learning": {"observed_step": 0.0}}
TRAINING = {"rounds": 7, "optimizer": {"lr": 3e-3}}


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Fix who counts as clean."""

    def fix(*clean: bool) -> None:
        real = loss_detection.detect

        def decide(*arguments: Any) -> Identification:
            return replace(real(*arguments), clean=np.array(clean, dtype=np.bool_))

        monkeypatch.setattr(loss_detection, "detect", decide)

    return fix


def observe(lab: Any, config: Any, condition: Any = None) -> tuple[Any, Any, Any]:
    """Result, everything that went to the clients, and the recorder."""
    watched, recorder = lab.dispatching(lab.executor), lab.collector()
    result = lab.run(config, executor=watched, condition=condition, recorder=recorder)
    assert np.isfinite(result.weights.values).all()
    assert [r.round for r in recorder.rounds] == list(range(1, config.training.rounds + 1))
    return result, watched, recorder


def training(watched: Any) -> list[Any]:
    """The dispatches of local training, one per round."""
    return [d for d in watched.log if {type(i.task).__name__ for i in d.items} <= {"LocalTraining", "LearnLabels"}]


# -- settings and schedule -------------------------------------------------------------------------------------------


def test_defaults_are_the_official_ones() -> None:
    config = FedELCConfig()
    learning = config.label_learning
    assert stage_rounds(config.warmup, 100) == 17
    assert (learning.compatibility_step, learning.observed_step) == (1.5625, 7.8125)
    assert (learning.scale, learning.alpha, learning.beta) == (10.0, 0.5, 0.2)
    assert (config.detection.votes, config.distance_buffers) == (9, True)


@pytest.mark.parametrize(
    "settings", [{"warmup": 17}, {"label_learning": {"scale": 0}}, {"label_learning": {"lambda": 1000}}, {"tau": 1}]
)
def test_settings_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FedELCConfig.model_validate(settings)


def test_ten_rounds_exercise_every_stage(lab: Any, verdict: Any) -> None:
    verdict(True, False, True, False)
    _, watched, _ = observe(lab, lab.config("fedelc", training={"rounds": 10}))
    assert [d.round for d in watched.tasks("ClassLosses")] == [2]
    kinds = [[type(i.task).__name__ for i in d.items] for d in training(watched)]
    assert kinds == [["LocalTraining"] * 4] * 2 + [["LocalTraining", "LearnLabels"] * 2] * 8


# -- stages ----------------------------------------------------------------------------------------------------------


def test_warm_up_and_detection_are_those_of_fednoro(lab: Any) -> None:
    ours, theirs = (
        observe(lab, lab.config({"name": name, "warmup": 0.25}, training=TRAINING)) for name in ("fedelc", "fednoro")
    )
    for one, other in zip(ours[2].rounds[:2], theirs[2].rounds[:2], strict=True):
        assert one.metrics["test/loss"] == other.metrics["test/loss"]
    np.testing.assert_array_equal(ours[0].identification.clean, theirs[0].identification.clean)
    np.testing.assert_array_equal(ours[0].identification.p_clean, theirs[0].identification.p_clean)
    assert ours[0].weights_hash != theirs[0].weights_hash


def test_noisy_clients_start_from_observed_labels_and_go_on_from_their_own(lab: Any, verdict: Any) -> None:
    verdict(True, False, False, True)
    config = lab.config(SHORT, training=TRAINING)
    _, watched, recorder = observe(lab, config)
    observed = recorder.started.federation.observed
    kept = {k: initial_label_logits(observed[k], 4, 10.0) for k in (1, 2)}
    for dispatch in training(watched)[2:]:
        for item, outcome in zip(dispatch.items, dispatch.outcomes, strict=True):
            if item.client not in kept:
                assert type(item.task.recipe.objective) is LogitAdjusted
                continue
            # From the observed labels the loss never departs; what moves is u.
            np.testing.assert_array_equal(item.task.observed, observed[item.client])
            np.testing.assert_array_equal(item.task.label_logits, kept[item.client])
            assert item.task.settings == config.method.label_learning
            kept[item.client] = outcome.result.state
            assert kept[item.client].dtype == np.float32
            assert not np.array_equal(kept[item.client], item.task.label_logits)


def test_label_logits_are_not_uploaded(lab: Any, verdict: Any) -> None:
    verdict(True, False, False, True)
    result, _, recorder = observe(lab, lab.config(SHORT, training=TRAINING))
    one_way = lab.clients * result.weights.nbytes
    uploads = [r.metrics["bytes/up"] for r in recorder.rounds]
    assert uploads == [one_way + (lab.clients * 4 * (8 + 8) if i == 2 else 0) for i in range(7)]
    # One pass over the images of everybody once, and of the noisy clients every round.
    assert [r.metrics["cost/forward_units"] for r in recorder.rounds] == [0, 0, 6, 2, 2, 2, 2]


@pytest.mark.parametrize("buffers", [True, False])
def test_noisy_models_weigh_by_their_distance_to_the_nearest_clean_one(lab: Any, verdict: Any, buffers: bool) -> None:
    verdict(False, True, True, False)
    result, watched, _ = observe(lab, lab.config({**SHORT, "distance_buffers": buffers}, training=TRAINING))
    updates = training(watched)[-1].updates
    expected, other = (
        distance_aware_mean(
            result.schema,
            [u.weights for u in updates.values()],
            [u.samples for u in updates.values()],
            np.array([False, True, True, False]),
            counted,
        )
        for counted in (buffers, not buffers)
    )
    assert expected is not None
    assert other is not None
    np.testing.assert_array_equal(result.weights.values, expected.state.values)
    assert not np.array_equal(result.weights.values, other.state.values)


# -- labels ----------------------------------------------------------------------------------------------------------


def test_current_labels_are_reported(lab: Any, verdict: Any) -> None:
    verdict(True, False, False, True)
    result, watched, recorder = observe(lab, lab.config(SHORT, training=TRAINING))
    observed = recorder.started.federation.observed
    last = training(watched)[-1]
    learnt = {
        i.client: o.result.state.argmax(axis=1)
        for i, o in zip(last.items, last.outcomes, strict=True)
        if i.client in (1, 2)
    }
    for k, labels in enumerate(result.labels):
        assert labels.dtype == np.int64
        np.testing.assert_array_equal(labels, learnt.get(k, observed[k]))
    assert any(np.any(learnt[k] != observed[k]) for k in learnt)
    edits = [r.metrics.get("relabel/edit") for r in recorder.rounds]
    assert edits[:2] == [None, None]
    # One entry per change, under the first round that trains from the new labels.
    assert result.label_history
    assert {c.round for c in result.label_history} <= set(range(3, 8))
    for before, after in pairwise(result.label_history):
        assert any(np.any(a != b) for a, b in zip(before.labels, after.labels, strict=True))
    for now, last_entry in zip(result.labels, result.label_history[-1].labels, strict=True):
        np.testing.assert_array_equal(now, last_entry)
    changed = sum(int(np.count_nonzero(learnt[k] != observed[k])) for k in learnt)
    assert edits[-1] == pytest.approx(changed / sum(len(observed[k]) for k in learnt))


def test_labels_that_do_not_move_make_no_history(lab: Any, verdict: Any) -> None:
    """A model that does not learn and a strong hold on the observed label change no argmax."""
    verdict(True, False, False, True)
    config = lab.config({"name": "fedelc", "warmup": 0.25}, training={"rounds": 5, "optimizer": {"lr": 1e-9}})
    result, _, recorder = observe(lab, config)
    for now, given in zip(result.labels, recorder.started.federation.observed, strict=True):
        np.testing.assert_array_equal(now, given)
    assert recorder.rounds[-1].metrics["relabel/edit"] == 0
    assert result.label_history == ()


# -- what it reduces to ----------------------------------------------------------------------------------------------


def test_when_everybody_is_clean_it_is_the_warm_up_for_all_rounds(lab: Any, verdict: Any) -> None:
    verdict(True, True, True, True)
    result, watched, _ = observe(lab, lab.config(SHORT, training=TRAINING))
    assert len(watched.tasks("ClassLosses")) == 1
    always = lab.run(lab.config({**SHORT, "warmup": 1.0}, training=TRAINING))
    assert always.identification is None
    assert result.weights_hash == always.weights_hash


# -- edges -----------------------------------------------------------------------------------------------------------


def test_everybody_noisy_is_averaged_by_size(lab: Any, verdict: Any) -> None:
    verdict(False, False, False, False)
    result, watched, _ = observe(lab, lab.config(SHORT, training=TRAINING))
    updates = training(watched)[-1].updates
    total = sum(u.samples for u in updates.values())
    mean = sum(u.weights.values.astype(np.float64) * u.samples / total for u in updates.values())
    np.testing.assert_allclose(result.weights.values, mean, rtol=1e-6, atol=1e-7)


def test_five_clients_one_of_them_clean(lab: Any, verdict: Any) -> None:
    verdict(False, False, True, False, False)
    config = lab.config(SHORT, federation={"clients": 5, "clean_clients": 1}, training=TRAINING)
    observe(lab, config)


def test_a_single_class_client_and_a_class_that_nobody_holds(lab: Any, verdict: Any) -> None:
    verdict(False, True, True)
    config = lab.config(SHORT, training=TRAINING)
    labels = lab.dataset(config).train.labels
    held = np.flatnonzero(labels != 3)
    one = np.flatnonzero(labels == 0)[:12]
    condition = lab.federation_of(config, [one, *np.array_split(np.setdiff1d(held, one), 2)])
    result, watched, _ = observe(lab, config, condition)
    assert [i.client for i in training(watched)[-1].items if type(i.task).__name__ == "LearnLabels"] == [0]
    assert set(result.labels[0].tolist()) <= {0, 1, 2, 3}


def test_two_classes(lab: Any) -> None:
    observe(lab, lab.config(SHORT, data={"cohort": "wake_forest"}, training=TRAINING))


def test_an_all_clean_federation_is_survived(lab: Any) -> None:
    config = lab.config(SHORT, federation={"noise": {"type": "none"}}, training=TRAINING)
    result, _, _ = observe(lab, config)
    assert result.identification.clean.any()


# -- whole runs ------------------------------------------------------------------------------------------------------


def test_every_setting_of_label_learning_makes_a_difference(lab: Any, verdict: Any) -> None:
    verdict(True, False, False, True)
    hashes = set()
    changes = [{}, {"compatibility_step": 20.0}, {"observed_step": 7.8125}, {"scale": 3.0}, {"beta": 2.0}]
    for change in changes:
        method = {**SHORT, "label_learning": {**SHORT["label_learning"], **change}}
        hashes.add(lab.run(lab.config(method, training={**TRAINING, "rounds": 4})).weights_hash)
    assert len(hashes) == len(changes)


def test_a_run_can_be_repeated_and_continued(lab: Any, verdict: Any, tmp_path: Path) -> None:
    """Stopped in the warm-up, right before the detection, right after it, and while labels are learnt."""
    verdict(True, False, False, True)
    config, alone = lab.config(SHORT, training=TRAINING), lab.collector()
    expected = lab.essence(lab.run(config, recorder=alone))
    assert lab.essence(lab.run(config)) == expected
    for at in (1, 2, 3, 5):
        file = tmp_path / f"{at}.safetensors"
        with pytest.raises(KeyboardInterrupt):
            lab.run(config, recorder=lab.interrupter(at=at), checkpoint=file)
        watched, recorder = lab.dispatching(lab.executor), lab.collector()
        assert lab.essence(lab.run(config, executor=watched, recorder=recorder, checkpoint=file)) == expected
        assert len(watched.tasks("ClassLosses")) == (1 if at <= 2 else 0)
        for one, other in zip(recorder.rounds, alone.rounds[at:], strict=True):
            assert one.metrics["test/loss"] == other.metrics["test/loss"]
            assert one.metrics.get("relabel/edit") == other.metrics.get("relabel/edit")
