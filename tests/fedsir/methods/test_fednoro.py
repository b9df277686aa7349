"""FedNoRo through the coordinator: stages, the ramp of the teacher, aggregation, and runs in pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedsir.aggregation import distance_aware_mean
from fedsir.clients.executor import WorkItem
from fedsir.clients.objective import Distilled, LogitAdjusted
from fedsir.methods import loss_detection
from fedsir.methods.fednoro import FedNoRoConfig
from fedsir.objectives import distilled_la_cross_entropy, la_cross_entropy, la_prior
from fedsir.spectral.identification import Identification

# Warm-up of two rounds, the teacher's ramp from round 2 to round 5.
SHORT: dict[str, Any] = {"name": "fednoro", "warmup": 0.34, "ramp_begin": 0.34, "ramp_end": 0.84}
ROUNDS = {"rounds": 6}


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


def adjusted_fedavg(lab: Any, config: Any) -> Any:
    """Result of FedAvg with every client's logits adjusted, on the data and budget of `config`."""

    def adjusted(items: list[WorkItem]) -> list[WorkItem]:
        if type(items[0].task).__name__ != "LocalTraining":
            return items
        out = []
        for item in items:
            prior = la_prior(np.bincount(item.task.labels, minlength=4)).numpy()  # type: ignore[attr-defined]
            recipe = replace(item.task.recipe, objective=LogitAdjusted(prior))  # type: ignore[attr-defined]
            out.append(replace(item, task=replace(item.task, recipe=recipe)))  # type: ignore[type-var]
        return out

    plain = config.model_copy(update={"method": lab.config("fedavg").method})
    return lab.run(plain, executor=lab.dispatching(lab.executor, change=adjusted))


# -- settings and schedule -------------------------------------------------------------------------------------------


def test_defaults_are_the_official_ones() -> None:
    config = FedNoRoConfig()
    assert (config.warmup, config.kd_weight, config.teacher_temperature) == (0.1, 0.8, 0.8)
    assert (config.detection.votes, config.distance_buffers) == (9, True)


@pytest.mark.parametrize(
    "settings",
    [{"ramp_begin": 0.5, "ramp_end": 0.5}, {"kd_weight": 1.5}, {"teacher_temperature": 0.0}, {"begin": 10}],
)
def test_settings_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FedNoRoConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("t", "weight"),
    [(0, 0.005390), (10, 0.005390), (20, 0.050400), (30, 0.244177), (48, 0.797374), (49, 0.8), (99, 0.8)],
)
def test_weight_of_the_teacher_at_a_hundred_rounds(t: int, weight: float) -> None:
    assert FedNoRoConfig().teacher_weight(t, 100) == pytest.approx(weight, abs=5e-7)


@pytest.mark.parametrize("rounds", [1, 2, 3, 5, 10, 33])
def test_the_ramp_scales_to_any_number_of_rounds(rounds: int) -> None:
    weights = [FedNoRoConfig().teacher_weight(t, rounds) for t in range(rounds + 2)]
    assert weights == sorted(weights)
    assert weights[-1] == 0.8
    assert weights[0] == pytest.approx(0.00539, abs=5e-6)


def test_ten_rounds_exercise_every_stage(lab: Any, verdict: Any) -> None:
    verdict(True, False, True, False)
    _, watched, _ = observe(lab, lab.config("fednoro", training={"rounds": 10}))
    assert [d.round for d in watched.tasks("ClassLosses")] == [1]
    noisy = [d.items[1].task.recipe for d in watched.tasks("LocalTraining")]
    assert [type(r.objective) for r in noisy] == [LogitAdjusted] + [Distilled] * 9
    assert noisy[1].objective.kd_weight == pytest.approx(0.00539, abs=5e-6)
    assert [r.objective.kd_weight for r in noisy[5:]] == [0.8] * 5


# -- stages ----------------------------------------------------------------------------------------------------------


def test_the_warm_up_is_fedavg_with_adjusted_logits(lab: Any) -> None:
    method = {**SHORT, "warmup": 1.0}
    config = lab.config(method)
    result, watched, _ = observe(lab, config)
    assert result.identification is None
    assert watched.tasks("ClassLosses") == []
    assert result.weights_hash == adjusted_fedavg(lab, config).weights_hash


def test_detection_asks_everybody_about_the_model_that_enters_the_round(lab: Any) -> None:
    config = lab.config(SHORT, training=ROUNDS)
    result, watched, recorder = observe(lab, config)
    (asked,) = watched.tasks("ClassLosses")
    assert asked.round == 2
    entering = watched.tasks("LocalTraining")[2].broadcast["weights"]
    np.testing.assert_array_equal(asked.broadcast["weights"].values, entering.values)
    observed = recorder.started.federation.observed
    for item in asked.items:
        np.testing.assert_array_equal(item.task.labels, observed[item.client])
    losses = np.stack([u.mean for u in asked.updates.values()])
    expected = loss_detection.detect(losses, config.method.detection)
    np.testing.assert_array_equal(result.identification.clean, expected.clean)
    # Metrics on the verdict exist from that round on.
    assert ["ident/accuracy" in r.metrics for r in recorder.rounds] == [False] * 2 + [True] * 4


def test_detection_costs_a_forward_pass_and_two_numbers_per_class(lab: Any, verdict: Any) -> None:
    verdict(True, False, True, True)
    _, _, recorder = observe(lab, lab.config(SHORT, training=ROUNDS))
    before, detection, after = (recorder.rounds[i].metrics for i in (1, 2, 3))
    assert before["cost/forward_units"] == 0
    # The noisy client's teacher is one more pass each round.
    assert detection["cost/forward_units"] == lab.clients + 1
    assert after["cost/forward_units"] == 1
    assert detection["bytes/up"] - after["bytes/up"] == lab.clients * 4 * (8 + 8)
    assert {r.metrics["cost/client_epochs"] for r in recorder.rounds} == {lab.clients}


def test_noisy_clients_distil_from_the_received_model(lab: Any, verdict: Any) -> None:
    verdict(True, False, False, True)
    _, watched, recorder = observe(lab, lab.config({**SHORT, "teacher_temperature": 0.5}, training=ROUNDS))
    for dispatch in watched.tasks("LocalTraining"):
        for item in dispatch.items:
            recipe, labels = item.task.recipe, recorder.started.federation.observed[item.client]
            np.testing.assert_array_equal(item.task.labels, labels)
            np.testing.assert_array_equal(recipe.objective.prior, la_prior(np.bincount(labels, minlength=4)).numpy())
            distilled = dispatch.round >= 2 and item.client in (1, 2)
            assert type(recipe.objective) is (Distilled if distilled else LogitAdjusted)
            assert recipe.teacher_logits == distilled
            if distilled:
                assert item.task.teacher == "weights"
                assert recipe.objective.teacher_temperature == 0.5
                assert recipe.objective.student_temperature == 1.0


@pytest.mark.parametrize("buffers", [True, False])
def test_noisy_models_weigh_by_their_distance_to_the_nearest_clean_one(lab: Any, verdict: Any, buffers: bool) -> None:
    verdict(False, True, True, False)
    result, watched, _ = observe(lab, lab.config({**SHORT, "distance_buffers": buffers}, training=ROUNDS))
    updates = watched.tasks("LocalTraining")[-1].updates
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


# -- what it reduces to ----------------------------------------------------------------------------------------------


def test_when_everybody_is_clean_it_is_fedavg_with_adjusted_logits(lab: Any, verdict: Any) -> None:
    verdict(True, True, True, True)
    config = lab.config(SHORT, training=ROUNDS)
    result, watched, _ = observe(lab, config)
    assert len(watched.tasks("ClassLosses")) == 1
    assert result.identification.clean.all()
    assert result.weights_hash == adjusted_fedavg(lab, config).weights_hash
    assert result.weights_hash != lab.run(lab.config("fedavg", training=ROUNDS)).weights_hash


def test_the_loss_of_a_noisy_client_at_both_ends_of_the_weight() -> None:
    """w = 0 is LA-CE; w = 1 is 0 when the adjusted student predicts what the sharpened teacher does."""
    logits, prior = torch.tensor([[2.0, 1.0, -0.5]]), torch.log(torch.tensor([0.5, 0.3, 0.2]))
    targets, teacher = torch.tensor([1]), 0.8 * (logits + prior)
    hard, soft = (distilled_la_cross_entropy(logits, targets, prior, teacher, w, 0.8, 1.0) for w in (0.0, 1.0))
    torch.testing.assert_close(hard, la_cross_entropy(logits, targets, prior))
    assert soft.item() == pytest.approx(0, abs=1e-7)
    # The temperature is the teacher's alone.
    assert distilled_la_cross_entropy(logits, targets, prior, logits + prior, 1.0, 0.8, 1.0).item() > 1e-3


def test_without_weight_on_the_teacher_a_lone_noisy_client_is_trained_like_a_clean_one(lab: Any, verdict: Any) -> None:
    verdict(False)
    config = lab.config({**SHORT, "kd_weight": 0.0}, federation={"clients": 1, "clean_clients": 1}, training=ROUNDS)
    result, watched, _ = observe(lab, config)
    kinds = {type(d.items[0].task.recipe.objective) for d in watched.tasks("LocalTraining")}
    assert kinds == {LogitAdjusted, Distilled}
    expected = adjusted_fedavg(lab, config)
    np.testing.assert_allclose(result.weights.values, expected.weights.values, rtol=0, atol=1e-5)


# -- edges -----------------------------------------------------------------------------------------------------------


def test_five_clients_one_of_them_clean(lab: Any, verdict: Any) -> None:
    verdict(False, False, True, False, False)
    config = lab.config(SHORT, federation={"clients": 5, "clean_clients": 1}, training={"rounds": 4})
    observe(lab, config)


def test_a_single_class_client_and_a_class_that_nobody_holds(lab: Any) -> None:
    config = lab.config(SHORT, training=ROUNDS)
    labels = lab.dataset(config).train.labels
    held = np.flatnonzero(labels != 3)
    one = np.flatnonzero(labels == 0)[:12]
    condition = lab.federation_of(config, [one, *np.array_split(np.setdiff1d(held, one), 2)])
    result, watched, _ = observe(lab, config, condition)
    means = np.stack([u.mean for u in watched.tasks("ClassLosses")[0].updates.values()])
    assert np.isnan(means[:, 3]).all()
    assert np.isfinite(means[0]).tolist() == [True, False, False, False]
    assert result.identification.clean.any()


def test_two_classes(lab: Any) -> None:
    config = lab.config(SHORT, data={"cohort": "wake_forest"}, training=ROUNDS)
    result, _, _ = observe(lab, config)
    assert result.identification is not None


def test_an_all_clean_federation_is_survived(lab: Any) -> None:
    config = lab.config(SHORT, federation={"noise": {"type": "none"}}, training=ROUNDS)
    result, _, _ = observe(lab, config)
    assert result.identification.clean.any()


# -- whole runs ------------------------------------------------------------------------------------------------------


def test_it_finds_clients_whose_labels_are_wrong(lab: Any) -> None:
    """Three clients of five agree on what the classes are, two have them all shifted by one."""
    config = lab.config(SHORT, training={**ROUNDS, "optimizer": {"lr": 3e-3}})
    labels = lab.dataset(config).train.labels.astype(np.int64)
    dealt = [np.sort(i) for i in np.array_split(np.random.default_rng(0).permutation(160), 5)]
    noisy = [False, True, False, False, True]
    observed = [(labels[i] + wrong) % 4 for i, wrong in zip(dealt, noisy, strict=True)]
    result, _, _ = observe(lab, config, lab.federation_of(config, dealt, observed, noisy))
    assert result.predicted_noisy.tolist() == noisy
    assert result.final["ident/accuracy"] == 1.0


def test_a_run_can_be_repeated_and_continued(lab: Any, tmp_path: Path) -> None:
    """Stopped in the warm-up, right before the detection, right after it, and in the main stage."""
    config = lab.config(SHORT, training=ROUNDS)
    whole, alone = lab.run(config), lab.collector()
    expected = lab.essence(whole)
    assert lab.essence(lab.run(config, recorder=alone)) == expected
    for at in (1, 2, 3, 5):
        file = tmp_path / f"{at}.safetensors"
        with pytest.raises(KeyboardInterrupt):
            lab.run(config, recorder=lab.interrupter(at=at), checkpoint=file)
        watched, recorder = lab.dispatching(lab.executor), lab.collector()
        assert lab.essence(lab.run(config, executor=watched, recorder=recorder, checkpoint=file)) == expected
        assert len(watched.tasks("ClassLosses")) == (1 if at <= 2 else 0)
        for one, other in zip(recorder.rounds, alone.rounds[at:], strict=True):
            assert one.metrics["test/loss"] == other.metrics["test/loss"]
            assert one.notes == other.notes
