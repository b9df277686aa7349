"""OCT-FedSIR through the coordinator: what every switch does, and federations at the edge of what it can handle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import exp
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from fedsir.aggregation import distance_aware_mean, weighted_mean
from fedsir.clients.executor import WorkItem
from fedsir.clients.objective import CrossEntropy, Distilled, LogitAdjusted
from fedsir.methods import stage_one
from fedsir.methods.oct_fedsir import OctFedSIRConfig
from fedsir.methods.registry import parse_method_config
from fedsir.methods.spectral_settings import Relabeling
from fedsir.objectives import la_prior
from fedsir.spectral.identification import Identification

NO_ADJUSTMENT = {"stage_one": False, "clean_clients": False, "noisy_clients": False}


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Fix who counts as clean; the similarities stay what stage I has measured."""

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
    assert 0 <= result.final["test/accuracy"] <= 1
    assert [r.round for r in recorder.rounds] == list(range(1, config.training.rounds + 1))
    return result, watched, recorder


def recipes(dispatch: Any) -> dict[int, Any]:
    return {item.client: item.task.recipe for item in dispatch.items}


def notes(recorder: Any) -> list[str]:
    return [note for record in recorder.rounds for note in record.notes]


# -- what the method reduces to ------------------------------------------------------------------------------------


def test_with_every_switch_off_it_is_fedavg(lab: Any) -> None:
    method = lab.oct(
        init_main="shared_init",
        relabeling={"enabled": False},
        distillation={"enabled": False},
        logit_adjustment=NO_ADJUSTMENT,
        aggregation="sample_weighted",
    )
    off, average = lab.run(lab.config(method)), lab.run(lab.config("fedavg"))
    assert off.weights_hash == average.weights_hash
    assert off.confusion.tolist() == average.confusion.tolist()
    assert off.identification is not None


@pytest.mark.parametrize(
    "switch",
    [
        {"init_main": "clean_aggregate"},
        {"relabeling": {"enabled": True}},
        {"distillation": {"enabled": True}},
        {"logit_adjustment": {"clean_clients": True}},
        {"logit_adjustment": {"noisy_clients": True}},
        {"aggregation": "distance_aware"},
    ],
)
def test_every_switch_alone_makes_a_difference(lab: Any, switch: dict[str, Any]) -> None:
    off = {
        "init_main": "shared_init",
        "relabeling": {"enabled": False},
        "distillation": {"enabled": False},
        "logit_adjustment": NO_ADJUSTMENT,
        "aggregation": "sample_weighted",
    }
    merged = {k: {**v, **switch.get(k, {})} if isinstance(v, dict) else switch.get(k, v) for k, v in off.items()}
    assert lab.run(lab.config(lab.oct(**merged))).weights_hash != lab.run(lab.config("fedavg")).weights_hash


def test_when_everybody_counts_as_clean_it_is_fedavg_with_adjusted_logits(lab: Any) -> None:
    """Threshold 0 lets everybody pass; relabelling, distillation and distances then have nothing to work on."""
    config = lab.config(
        lab.oct(identification={"threshold": 0.0}, init_main="shared_init"),
        federation={"noise": {"type": "none"}},
    )
    result, watched, recorder = observe(lab, config)
    assert result.identification.clean.all()
    assert not result.predicted_noisy.any()
    assert watched.tasks("Relabel") == watched.tasks("ProvideSpectra") == []
    assert any("every client counts as clean" in note for note in notes(recorder))

    def adjusted(items: list[WorkItem]) -> list[WorkItem]:
        if type(items[0].task).__name__ != "LocalTraining":
            return items
        out = []
        for item in items:
            prior = la_prior(np.bincount(item.task.labels, minlength=4)).numpy()  # type: ignore[attr-defined]
            recipe = replace(item.task.recipe, objective=LogitAdjusted(prior))  # type: ignore[attr-defined]
            out.append(replace(item, task=replace(item.task, recipe=recipe)))  # type: ignore[type-var]
        return out

    plain = lab.config("fedavg", federation={"noise": {"type": "none"}})
    expected = lab.run(plain, executor=lab.dispatching(lab.executor, change=adjusted))
    assert result.weights_hash == expected.weights_hash
    assert result.weights_hash != lab.run(plain).weights_hash


@pytest.mark.parametrize(
    ("preset", "switched"),
    [
        ("no_relabeling", {"relabeling": {"enabled": False}}),
        ("no_kd", {"distillation": {"enabled": False}}),
        ("no_la", {"logit_adjustment": NO_ADJUSTMENT}),
        ("no_daagg", {"aggregation": "sample_weighted"}),
        ("equal_steps", {"stage_one": {"length": "steps"}}),
    ],
)
def test_ablations_switch_off_what_they_say_and_nothing_else(preset: str, switched: dict[str, Any]) -> None:
    expected = OctFedSIRConfig().model_dump()
    for section, values in switched.items():
        expected[section] = {**expected[section], **values} if isinstance(values, dict) else values
    found = parse_method_config(f"oct_fedsir/{preset}").model_dump()
    assert found == {**expected, "preset": preset}


def test_another_method_meets_the_same_federation_and_first_weights(lab: Any) -> None:
    first = {}
    for method in ("fedavg", "oct_fedsir"):
        watched, recorder = lab.dispatching(lab.executor), lab.collector()
        lab.run(lab.config(method), executor=watched, recorder=recorder)
        first[method] = watched.log[0].broadcast["weights"], recorder.started
    (a, started), (b, other) = first.values()
    np.testing.assert_array_equal(a.values, b.values)
    for one, two in zip(started.federation.observed, other.federation.observed, strict=True):
        np.testing.assert_array_equal(one, two)
    for one, two in zip(started.federation.indices, other.federation.indices, strict=True):
        np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(started.truth.noisy, other.truth.noisy)


# -- stages --------------------------------------------------------------------------------------------------------


def test_stage_one_trains_everybody_on_observed_labels_by_its_own_recipe(lab: Any) -> None:
    config = lab.config(lab.oct(stage_one={"epochs": 2, "batch_size": 7, "lr": 1e-3, "weight_decay": 0.1}))
    result, watched, recorder = observe(lab, config)
    dispatch = watched.log[0]
    assert type(dispatch.items[0].task).__name__ == "StageOne"
    for item in dispatch.items:
        recipe = item.task.recipe
        assert (recipe.epochs, recipe.batch_size) == (2, 7)
        assert (recipe.optimizer.lr, recipe.optimizer.weight_decay) == (1e-3, 0.1)
        observed = recorder.started.federation.observed[item.client]
        np.testing.assert_array_equal(item.task.labels, observed)
        np.testing.assert_array_equal(recipe.objective.prior, la_prior(np.bincount(observed, minlength=4)).numpy())
    similarity = np.stack([u.similarity for u in dispatch.updates.values()])
    np.testing.assert_array_equal(result.identification.similarity, similarity)


@pytest.mark.parametrize("start", ["clean_aggregate", "shared_init"])
def test_the_main_stage_starts_where_it_is_told(lab: Any, start: str) -> None:
    result, watched, _ = observe(lab, lab.config(lab.oct(init_main=start)))
    clean = result.identification.clean
    trained = {k: u.training for k, u in watched.log[0].updates.items() if clean[k]}
    mean = weighted_mean([u.weights for u in trained.values()], [u.samples for u in trained.values()])
    assert mean is not None
    expected = mean if start == "clean_aggregate" else watched.log[0].broadcast["weights"]
    np.testing.assert_array_equal(watched.tasks("LocalTraining")[0].broadcast["weights"].values, expected.values)


def test_references_come_from_clean_clients_under_their_latest_mean(lab: Any) -> None:
    result, watched, recorder = observe(lab, lab.config("oct_fedsir"))
    clean = result.identification.clean
    given, asked = watched.tasks("ProvideSpectra"), watched.tasks("Relabel")
    assert [d.round for d in given] == [d.round for d in asked] == [1, 2]
    training = watched.tasks("LocalTraining")
    for spectra, relabel in zip(given, asked, strict=True):
        assert [i.client for i in spectra.items] == np.flatnonzero(clean).tolist()
        assert [i.client for i in relabel.items] == np.flatnonzero(~clean).tolist()
        before = training[spectra.round - 1].updates
        trusted = [before[k] for k in np.flatnonzero(clean)]
        mean = weighted_mean([u.weights for u in trusted], [u.samples for u in trusted])
        assert mean is not None
        for dispatch in (spectra, relabel):
            np.testing.assert_array_equal(dispatch.broadcast["reference_model"].values, mean.values)
        # Labels are corrected from the observed ones each time, never from the last correction.
        for item in relabel.items:
            np.testing.assert_array_equal(item.task.observed, recorder.started.federation.observed[item.client])


def test_corrected_labels_are_trained_on_and_reported(lab: Any) -> None:
    result, watched, recorder = observe(lab, lab.config("oct_fedsir"))
    observed = recorder.started.federation.observed
    for relabel in watched.tasks("Relabel"):
        training = watched.tasks("LocalTraining")[relabel.round]
        corrected = {i.client: o.result.state.targets for i, o in zip(relabel.items, relabel.outcomes, strict=True)}
        for item in training.items:
            np.testing.assert_array_equal(item.task.labels, corrected.get(item.client, observed[item.client]))
    for k, labels in enumerate(result.labels):
        np.testing.assert_array_equal(labels, corrected.get(k, observed[k]))


def test_the_history_of_labels_has_an_entry_for_every_checkpoint(lab: Any) -> None:
    config = lab.config(lab.oct(relabeling={"first": 1, "every": 2}), training={"rounds": 6})
    result, watched, recorder = observe(lab, config)
    observed = recorder.started.federation.observed
    asked = watched.tasks("Relabel")
    assert [entry.round for entry in result.label_history] == [d.round for d in asked] == [1, 3, 5]
    for entry, dispatch in zip(result.label_history, asked, strict=True):
        corrected = {i.client: o.result.state.targets for i, o in zip(dispatch.items, dispatch.outcomes, strict=True)}
        for k, labels in enumerate(entry.labels):
            assert labels.dtype == np.int16
            np.testing.assert_array_equal(labels, corrected.get(k, observed[k]))
    for last, labels in zip(result.label_history[-1].labels, result.labels, strict=True):
        np.testing.assert_array_equal(last, labels)


def test_a_checkpoint_leaves_evidence_of_every_decision(lab: Any, verdict: Any) -> None:
    verdict(True, False, False, True)
    result, watched, recorder = observe(lab, lab.config("oct_fedsir"))
    observed = recorder.started.federation.observed
    (*_, last) = watched.tasks("Relabel")
    outcomes = {i.client: o.result.state for i, o in zip(last.items, last.outcomes, strict=True)}
    assert set(outcomes) == {1, 2}
    for k, labels in enumerate(observed):
        margins, agreement = result.margins[k], result.agreement[k]
        assert margins.shape == (len(labels), 2)
        assert margins.dtype == np.float32
        assert agreement.shape == (len(labels),)
        if k not in outcomes:
            assert np.isnan(margins).all()
            assert agreement.all()
            continue
        assert (margins >= 0).all()
        np.testing.assert_allclose(margins[:, 0], outcomes[k].representative_margin, rtol=1e-6)
        np.testing.assert_allclose(margins[:, 1], outcomes[k].residual_margin, rtol=1e-6)
        np.testing.assert_array_equal(agreement, outcomes[k].agreement)
        changed = result.labels[k] != labels
        assert not changed[~agreement].any()
    assert [fact.class_name for fact in result.references] == list(recorder.started.federation.class_names)
    for fact in result.references:
        # Ids of clients, not positions among the clean ones.
        assert fact.providers
        assert set(fact.providers) <= {0, 3}
        assert 1 <= fact.directions <= 12
        assert 0 <= fact.strength <= 1 + 1e-9
    assert any(3 in fact.providers for fact in result.references)


def test_evidence_of_classes_that_cannot_be_referenced(lab: Any, verdict: Any) -> None:
    """With one class left nothing is decided at all."""
    verdict(False, False, True, False)
    config = lab.config("oct_fedsir")
    indices = shares(lab, config, (5, 10, 10, 10), (5, 10, 10, 10), (25, 0, 0, 0), (5, 10, 10, 10))
    result, _, _ = observe(lab, config, lab.federation_of(config, indices))
    first, *others = result.references
    assert (first.providers, first.directions > 0) == ((2,), True)
    for fact in others:
        assert (fact.providers, fact.directions) == ((), 0)
        assert np.isnan(fact.strength)
    for k, (margins, agreement) in enumerate(zip(result.margins, result.agreement, strict=True)):
        assert np.isnan(margins).all()
        assert agreement.all() == (k == 2)
        assert agreement.any() == (k == 2)
    assert len(result.label_history) == 2


def test_without_a_checkpoint_there_is_no_evidence(lab: Any) -> None:
    result = lab.run(lab.config(lab.oct(relabeling={"every": 3})))
    assert (result.margins, result.agreement, result.references) == (None, None, None)
    assert result.label_history == ()


@pytest.mark.parametrize(
    ("settings", "rounds"),
    [
        ({}, [20, 40, 60, 80]),
        ({"every": 50}, [50]),
        ({"every": 30, "first": 10}, [10, 40, 70]),
        ({"every": 20, "first": 95}, [95]),
        ({"every": 100}, []),
        ({"enabled": False}, []),
    ],
)
def test_labels_are_due_before_these_of_a_hundred_rounds(settings: dict[str, Any], rounds: list[int]) -> None:
    schedule = Relabeling(**settings)
    assert [t for t in range(100) if schedule.due(t)] == rounds


def test_the_schedule_is_kept(lab: Any) -> None:
    config = lab.config(lab.oct(relabeling={"every": 2, "first": 1}), training={"rounds": 5})
    _, watched, _ = observe(lab, config)
    assert [d.round for d in watched.tasks("Relabel")] == [1, 3]


# -- losses of the clients -------------------------------------------------------------------------------------------


def test_clean_clients_adjust_logits_and_noisy_ones_distil_as_well(lab: Any, verdict: Any) -> None:
    verdict(True, False, False, True)
    _, watched, recorder = observe(lab, lab.config(lab.oct(distillation={"student_temperature": 2.0})))
    for dispatch in watched.tasks("LocalTraining"):
        for k, recipe in recipes(dispatch).items():
            prior = la_prior(np.bincount(recorder.started.federation.observed[k], minlength=4)).numpy()
            np.testing.assert_array_equal(recipe.objective.prior, prior)
            assert type(recipe.objective) is (LogitAdjusted if k in (0, 3) else Distilled)
            assert recipe.teacher_logits == (k in (1, 2))
            if k in (1, 2):
                assert recipe.objective.student_temperature == 2.0
                assert recipe.objective.teacher_temperature == 1.0
                assert "kd_mask" not in recipe.extras


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ({"kind": "clean_fraction"}, [0.25] * 3),
        ({"kind": "constant", "value": 0.4}, [0.4] * 3),
        ({"kind": "ramp", "maximum": 0.2, "begin": 0, "end": 2}, [0.2 * exp(-5), 0.2 * exp(-1.25), 0.2]),
        ({"kind": "ramp", "maximum": 1.0, "begin": 1, "end": 3}, [exp(-5), exp(-5), exp(-1.25)]),
    ],
)
def test_weight_of_the_teacher(lab: Any, verdict: Any, weight: dict[str, Any], expected: list[float]) -> None:
    verdict(False, False, True, False)
    _, watched, _ = observe(lab, lab.config(lab.oct(distillation={"weight": weight})))
    found = [recipes(d)[0].objective.kd_weight for d in watched.tasks("LocalTraining")]
    assert found == pytest.approx(expected)


def test_a_teacher_of_weight_zero_is_not_asked(lab: Any) -> None:
    silent = {"weight": {"kind": "constant", "value": 0.0}}
    result, watched, _ = observe(lab, lab.config(lab.oct(distillation=silent)))
    assert all(not recipes(d)[k].teacher_logits for d in watched.tasks("LocalTraining") for k in range(4))
    assert result.weights_hash == lab.run(lab.config(lab.oct(distillation={"enabled": False}))).weights_hash


def test_a_ramp_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(ValidationError, match="must end after it begins"):
        OctFedSIRConfig.model_validate({"distillation": {"weight": {"kind": "ramp", "begin": 60}}})


@pytest.mark.parametrize("teacher", ["global", "clean"])
def test_the_teacher_is_the_global_or_the_clean_model(lab: Any, teacher: str) -> None:
    _, watched, _ = observe(lab, lab.config(lab.oct(distillation={"teacher": teacher})))
    for dispatch in watched.tasks("LocalTraining")[1:]:
        named = {i.task.teacher for i in dispatch.items if i.task.recipe.teacher_logits}
        assert named == {"weights" if teacher == "global" else "teacher"}
        if teacher == "clean":
            reference = watched.tasks("ProvideSpectra")[dispatch.round - 1].broadcast["reference_model"]
            np.testing.assert_array_equal(dispatch.broadcast["teacher"].values, reference.values)
            assert not np.array_equal(dispatch.broadcast["teacher"].values, dispatch.broadcast["weights"].values)


def test_distillation_where_the_criteria_disagree(lab: Any) -> None:
    _, watched, _ = observe(lab, lab.config(lab.oct(distillation={"on": "disagree"})))
    training = watched.tasks("LocalTraining")
    assert all("kd_mask" not in r.extras for r in recipes(training[0]).values())
    for relabel in watched.tasks("Relabel"):
        for item, outcome in zip(relabel.items, relabel.outcomes, strict=True):
            mask = recipes(training[relabel.round])[item.client].extras["kd_mask"]
            np.testing.assert_array_equal(mask, ~outcome.result.state.agreement)


def test_the_prior_may_follow_the_corrected_labels(lab: Any) -> None:
    _, watched, recorder = observe(lab, lab.config(lab.oct(logit_adjustment={"prior_source": "corrected"})))
    last = watched.tasks("LocalTraining")[-1]
    moved = 0
    for item in last.items:
        expected = la_prior(np.bincount(item.task.labels, minlength=4)).numpy()
        np.testing.assert_array_equal(item.task.recipe.objective.prior, expected)
        counts = np.bincount(recorder.started.federation.observed[item.client], minlength=4)
        moved += not np.array_equal(expected, la_prior(counts).numpy())
    assert moved > 0


def test_adjustment_can_be_switched_off_by_kind_of_client(lab: Any, verdict: Any) -> None:
    verdict(True, False, False, True)
    settings = {"stage_one": False, "clean_clients": False, "noisy_clients": False}
    _, watched, _ = observe(lab, lab.config(lab.oct(logit_adjustment=settings)))
    assert all(type(i.task.recipe.objective) is CrossEntropy for i in watched.log[0].items)
    last = recipes(watched.tasks("LocalTraining")[-1])
    assert type(last[0].objective) is CrossEntropy
    np.testing.assert_array_equal(last[1].objective.prior, np.zeros(4, np.float32))


@pytest.mark.parametrize("buffers", [False, True])
def test_aggregation_is_distance_aware(lab: Any, buffers: bool) -> None:
    result, watched, _ = observe(lab, lab.config(lab.oct(distance_buffers=buffers)))
    last = watched.tasks("LocalTraining")[-1].updates
    expected = distance_aware_mean(
        result.schema,
        [u.weights for u in last.values()],
        [u.samples for u in last.values()],
        result.identification.clean,
        buffers,
    )
    assert expected is not None
    np.testing.assert_array_equal(result.weights.values, expected.state.values)


# -- federations at the edge -----------------------------------------------------------------------------------------


def shares(lab: Any, config: Any, *counts: tuple[int, int, int, int]) -> list[NDArray[np.int64]]:
    """Images dealt by hand: per client how many of each class, in order of the training set."""
    labels = lab.dataset(config).train.labels
    stock = [np.flatnonzero(labels == c).tolist() for c in range(4)]
    return [
        np.sort(np.array([stock[c].pop(0) for c, n in enumerate(of_client) for _ in range(n)])) for of_client in counts
    ]


def with_noise(lab: Any, config: Any, indices: Any, noisy: tuple[int, ...]) -> list[NDArray[np.int64]]:
    """True labels, at noisy clients every second one moved to the next class that the client holds."""
    labels = lab.dataset(config).train.labels
    observed = []
    for k, held in enumerate(indices):
        y = labels[held].copy()
        if k in noisy:
            classes = np.unique(y)
            following = dict(zip(classes.tolist(), np.roll(classes, -1).tolist(), strict=True))
            y[::2] = [following[c] for c in y[::2].tolist()]
        observed.append(y)
    return observed


def test_an_all_clean_federation_runs(lab: Any) -> None:
    """A mixture splits any set of clients; what follows must not need the split to be right."""
    result, _, _ = observe(lab, lab.config("oct_fedsir", federation={"noise": {"type": "none"}}))
    assert result.identification.clean.any()
    assert "relabel/edit" in result.final


def test_five_clients_of_which_one_is_clean(lab: Any) -> None:
    config = lab.config("oct_fedsir", federation={"clients": 5, "clean_clients": 1, "clean_selection": "random"})
    result, _, recorder = observe(lab, config)
    assert recorder.started.truth.noisy.sum() == 4
    assert result.identification.clean.any()


@pytest.mark.parametrize("clients", [1, 2])
def test_hardly_any_clients(lab: Any, clients: int) -> None:
    config = lab.config("oct_fedsir", federation={"clients": clients, "clean_clients": 1})
    result, _, recorder = observe(lab, config)
    assert result.identification.clean.any()
    assert any(note.startswith("identification:") for note in notes(recorder))


def test_a_client_with_a_single_class_is_not_trusted(lab: Any) -> None:
    config = lab.config("oct_fedsir")
    indices = shares(lab, config, (12, 12, 12, 0), (12, 12, 12, 0), (12, 12, 12, 0), (0, 0, 0, 25))
    condition = lab.federation_of(config, indices, with_noise(lab, config, indices, (1,)), [False, True, False, False])
    result, _, recorder = observe(lab, config, condition)
    assert not result.identification.clean[3]
    assert np.isnan(result.identification.descriptors[3]).all()
    assert np.isnan(result.identification.p_clean[3])
    assert any("fewer than two usable classes (3)" in note for note in notes(recorder))
    assert np.isfinite(result.identification_figures["accuracy"])


def test_clients_with_one_class_each(lab: Any) -> None:
    """Nothing can be compared, so nobody is accused and nothing relabelled."""
    config = lab.config("oct_fedsir")
    indices = shares(lab, config, (40, 0, 0, 0), (0, 40, 0, 0), (0, 0, 40, 0), (0, 0, 0, 40))
    result, watched, recorder = observe(lab, config, lab.federation_of(config, indices))
    assert result.identification.clean.all()
    assert watched.tasks("Relabel") == []
    assert any("nothing can be compared" in note for note in notes(recorder))


def test_clients_smaller_than_a_batch_and_of_one_image(lab: Any) -> None:
    config = lab.config("oct_fedsir", training={"batch_size": 64})
    indices = shares(lab, config, (20, 20, 20, 20), (10, 10, 10, 10), (5, 3, 0, 0), (0, 1, 0, 0))
    condition = lab.federation_of(config, indices, with_noise(lab, config, indices, (1, 2)))
    _, watched, _ = observe(lab, config, condition)
    assert {k: u.steps for k, u in watched.tasks("LocalTraining")[0].updates.items()} == {0: 2, 1: 1, 2: 1, 3: 1}


@pytest.mark.parametrize("rule", ["agree", "sr", "sn"])
def test_a_class_without_reference_keeps_its_labels(lab: Any, verdict: Any, rule: str) -> None:
    verdict(True, True, False, False)
    config = lab.config(lab.oct(relabeling={"rule": rule}))
    indices = shares(lab, config, (10, 10, 10, 0), (10, 10, 10, 0), (10, 10, 10, 20), (5, 5, 5, 15))
    observed = with_noise(lab, config, indices, (2, 3))
    result, _, recorder = observe(lab, config, lab.federation_of(config, indices, observed))
    assert any("no predicted-clean client gives a reference for NORMAL" in note for note in notes(recorder))
    changed = 0
    for before, after in zip(observed, result.labels, strict=True):
        np.testing.assert_array_equal(after[before == 3], 3)
        # Nor does anybody else get a label for which nobody can vouch.
        assert 3 not in after[before != 3]
        changed += int(np.count_nonzero(before != after))
    assert changed > 0


def test_a_class_without_reference_may_be_given_up(lab: Any, verdict: Any) -> None:
    verdict(True, True, False, False)
    config = lab.config(lab.oct(relabeling={"rule": "sr", "keep_unreferenced": False}))
    indices = shares(lab, config, (10, 10, 10, 0), (10, 10, 10, 0), (10, 10, 10, 20), (5, 5, 5, 15))
    result, _, _ = observe(lab, config, lab.federation_of(config, indices))
    assert not any(3 in labels for labels in result.labels[2:])


def test_one_referenced_class_is_not_enough_to_relabel(lab: Any, verdict: Any) -> None:
    verdict(True, False, False, False)
    config = lab.config(lab.oct(relabeling={"rule": "sr"}))
    indices = shares(lab, config, (25, 0, 0, 0), (5, 10, 10, 10), (5, 10, 10, 10), (5, 10, 10, 10))
    observed = with_noise(lab, config, indices, (1, 2, 3))
    result, _, _ = observe(lab, config, lab.federation_of(config, indices, observed))
    for before, after in zip(observed, result.labels, strict=True):
        np.testing.assert_array_equal(before, after)


def test_two_classes(lab: Any) -> None:
    config = lab.config(
        "oct_fedsir",
        data={"cohort": "wake_forest"},
        federation={"noise": {"type": "asymmetric", "label_map": "wake_forest"}},
    )
    result, _, recorder = observe(lab, config)
    assert len(recorder.started.dataset.class_names) == 2
    assert result.confusion.shape == (2, 2)
    assert result.identification.similarity.shape == (4, 2, 2)
    mean, energy, maximum = result.identification.descriptors[~np.isnan(result.identification.descriptors[:, 0])].T
    np.testing.assert_allclose(mean, maximum)
    np.testing.assert_allclose(energy, mean**2)


def test_a_clean_client_that_diverges_is_no_anchor_and_no_reference(lab: Any, verdict: Any) -> None:
    """Its weights are not finite; the round goes on with the other clean client."""
    verdict(True, True, False, False)

    class Ruined:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __call__(self, client: Any, broadcast: Any) -> Any:
            result = self.inner(client, broadcast)
            weights = result.update.weights
            broken = replace(weights, values=np.full_like(weights.values, np.nan))
            return replace(result, update=replace(result.update, weights=broken))

    def ruin(items: list[WorkItem]) -> list[WorkItem]:
        if type(items[0].task).__name__ != "LocalTraining":
            return items
        return [replace(i, task=Ruined(i.task)) if i.client == 1 else i for i in items]

    recorder = lab.collector()
    executor = lab.dispatching(lab.executor, change=ruin)
    result = lab.run(lab.config("oct_fedsir"), executor=executor, recorder=recorder)
    assert np.isfinite(result.weights.values).all()
    assert sum("client 1 returned non-finite weights" in note for note in recorder.rounds[0].notes) >= 1
