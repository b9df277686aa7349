"""FedCorr: stages, verdicts and label correction, alone and through the coordinator."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

from fedsir.clients import fedcorr_tasks
from fedsir.methods import fedcorr
from fedsir.methods.fedcorr import FedCorrConfig, StageShares, finetuning_clients, known_or_median

# Three rounds of pre-processing, four of fine-tuning, three of usual training.
STAGES = {"preprocessing": 0.3, "finetuning": 0.4, "usual": 0.3}
ROUNDS = 10
# A tiny model is certain of little after a few rounds.
LABELS_MOVE = {"name": "fedcorr", "stages": STAGES, "tau": 0.3, "relabel_ratio": 1.0}
PLAIN = {"name": "fedcorr", "prox_beta": 0.0, "mixup_alpha": 0.0, "relabel_ratio": 0.0, "tau": 1.0, "kappa": 1.0}


def fix_verdict(monkeypatch: pytest.MonkeyPatch, *noisy: bool) -> None:
    monkeypatch.setattr(fedcorr, "high_group", lambda *_: np.array(noisy, dtype=np.bool_))


def fix_noise_levels(monkeypatch: pytest.MonkeyPatch, level: float) -> None:
    monkeypatch.setattr(fedcorr_tasks, "noise_level", lambda *_: level)


def observe(lab: Any, method: Any, rounds: int = ROUNDS, condition: Any = None, **changes: Any) -> tuple[Any, Any, Any]:
    """Result, everything that went to the clients, and the recorder."""
    watched, recorder = lab.dispatching(lab.executor), lab.collector()
    config = lab.config(method, training={"rounds": rounds}, **changes)
    result = lab.run(config, executor=watched, condition=condition, recorder=recorder)
    assert np.isfinite(result.weights.values).all()
    assert len(recorder.rounds) == rounds
    return result, watched, recorder


def visits(watched: Any) -> list[tuple[int, str, list[int]]]:
    """(round, kind of task, clients) of every dispatch that was not an evaluation."""
    return [
        (d.round, type(d.items[0].task).__name__, [i.client for i in d.items])
        for d in watched.log
        if type(d.items[0].task).__name__ != "PredictTest"
    ]


def notes(recorder: Any) -> list[str]:
    return [note for record in recorder.rounds for note in record.notes]


# -- settings and pure parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "stages"),
    [(100, (5, 50, 45)), (20, (1, 10, 9)), (10, (1, 5, 4)), (3, (1, 1, 1)), (2, (1, 1, 0)), (1, (1, 0, 0))],
)
def test_stages_scale_with_the_rounds(total: int, stages: tuple[int, int, int]) -> None:
    assert StageShares().rounds(total) == stages


@given(total=st.integers(1, 300), first=st.integers(1, 98), data=st.data())
def test_stages_fill_the_rounds_and_none_is_left_out(total: int, first: int, data: st.DataObject) -> None:
    second = data.draw(st.integers(1, 99 - first))
    stages = StageShares(preprocessing=first / 100, finetuning=second / 100, usual=(100 - first - second) / 100)
    lengths = stages.rounds(total)
    assert sum(lengths) == total
    assert min(lengths) >= (1 if total >= 3 else 0)


def test_defaults() -> None:
    config = FedCorrConfig()
    assert config.model_dump(exclude={"name", "preset"}) == {
        "stages": {"preprocessing": 0.05, "finetuning": 0.5, "usual": 0.45},
        "sequential": False,
        "lid_k": 20,
        "prox_beta": 5.0,
        "relabel_ratio": 0.5,
        "tau": "auto",
        "kappa": 0.1,
        "mixup_alpha": 1.0,
        "bounded_loss": True,
    }


@pytest.mark.parametrize(("classes", "threshold"), [(2, 0.75), (4, 0.625), (10, 0.55), (1000, 0.5005)])
def test_the_confidence_threshold_depends_on_the_classes(classes: int, threshold: float) -> None:
    assert FedCorrConfig().threshold(classes) == pytest.approx(threshold)
    assert FedCorrConfig(tau=0.4).threshold(classes) == 0.4


@pytest.mark.parametrize(
    "settings",
    [
        {"stages": {"preprocessing": 0.1}},
        {"stages": {"preprocessing": 0.0, "finetuning": 0.5, "usual": 0.5}},
        {"lid_k": 1},
        {"tau": "half"},
        {"tau": 1.5},
        {"relabel_ratio": -0.1},
        {"beta": 5.0},
    ],
)
def test_settings_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FedCorrConfig.model_validate({"name": "fedcorr", **settings})


def test_clients_with_little_noise_fine_tune() -> None:
    levels = np.array([0.0, 0.1, 0.11, 0.6])
    np.testing.assert_array_equal(finetuning_clients(levels, 0.1), [True, True, False, False])
    np.testing.assert_array_equal(finetuning_clients(np.zeros(4), 0.1), [True] * 4)


def test_without_a_clean_client_the_least_noisy_fine_tune() -> None:
    np.testing.assert_array_equal(finetuning_clients(np.array([0.6, 0.3, 0.3, 0.9]), 0.1), [False, True, False, False])
    assert np.flatnonzero(finetuning_clients(np.linspace(0.9, 0.2, 30), 0.1)).tolist() == [27, 28, 29]


def test_undefined_dimensions_take_the_median() -> None:
    np.testing.assert_array_equal(known_or_median(np.array([1.0, np.nan, 4.0, 2.0, np.inf])), [1, 2, 4, 2, 2])
    np.testing.assert_array_equal(known_or_median(np.full(3, np.nan)), np.zeros(3))


# -- what the method reduces to ------------------------------------------------------------------------------------


def test_without_proximal_term_mixup_and_correction_it_is_fedavg(lab: Any) -> None:
    plain, _, _ = observe(lab, PLAIN, rounds=4)
    average = lab.run(lab.config("fedavg", training={"rounds": 4}))
    assert plain.weights_hash == average.weights_hash
    if plain.labels is not None:
        observed = lab.condition(lab.config()).federation.observed
        assert [y.tolist() for y in plain.labels] == [y.tolist() for y in observed]


@pytest.mark.parametrize("switch", [{"mixup_alpha": 1.0}, {"kappa": 0.0}, {"tau": 0.25}, {"prox_beta": 5.0}])
def test_every_switch_alone_makes_a_difference(
    lab: Any, monkeypatch: pytest.MonkeyPatch, switch: dict[str, float]
) -> None:
    fix_verdict(monkeypatch, False, False, True, True)
    fix_noise_levels(monkeypatch, 0.6)
    plain = {**PLAIN, "stages": STAGES}
    alone, _, _ = observe(lab, {**plain, **switch}, rounds=6)
    off, _, _ = observe(lab, plain, rounds=6)
    assert alone.weights_hash != off.weights_hash


def test_when_nobody_is_noisy_fine_tuning_is_fedavg(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All noise levels are 0, so that everybody fine-tunes, no term pulls and no label moves."""
    fix_verdict(monkeypatch, *[False] * 4)
    result, watched, recorder = observe(lab, {"name": "fedcorr", "mixup_alpha": 0.0}, rounds=4)
    assert result.weights_hash == lab.run(lab.config("fedavg", training={"rounds": 4})).weights_hash
    assert result.labels is None
    assert {kind for _, kind, _ in visits(watched)} == {"TrainAndMeasure", "MixupTraining"}
    assert all(clients == [0, 1, 2, 3] for _, _, clients in visits(watched))
    assert notes(recorder) == []


# -- stages --------------------------------------------------------------------------------------------------------


def test_every_stage_visits_the_clients_it_should(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fix_verdict(monkeypatch, False, True, False, True)
    fix_noise_levels(monkeypatch, 0.6)
    result, watched, _ = observe(lab, LABELS_MOVE)
    everybody, clean, noisy = [0, 1, 2, 3], [0, 2], [1, 3]
    assert visits(watched) == [
        *[
            (t, kind, who)
            for t in range(3)
            for kind, who in (("TrainAndMeasure", everybody), ("CorrectNoisiest", noisy))
        ],
        *[(t, "MixupTraining", clean) for t in range(3, 7)],
        (6, "CorrectAll", noisy),
        *[(t, "MixupTraining", everybody) for t in range(7, 10)],
    ]
    observed = lab.condition(lab.config()).federation.observed
    for k in clean:
        np.testing.assert_array_equal(result.labels[k], observed[k])
    assert any((result.labels[k] != observed[k]).any() for k in noisy)


def test_corrected_labels_are_those_of_the_next_training(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fix_verdict(monkeypatch, False, False, False, True)
    fix_noise_levels(monkeypatch, 0.9)
    result, watched, _ = observe(lab, LABELS_MOVE)
    current, changes = lab.condition(lab.config()).federation.observed[3], 0
    for dispatch in watched.log:
        for item, outcome in zip(dispatch.items, dispatch.outcomes, strict=True):
            if item.client != 3 or type(item.task).__name__ == "PredictTest":
                continue
            labels = item.task.training.labels if hasattr(item.task, "training") else item.task.labels
            np.testing.assert_array_equal(labels, current)
            if type(item.task).__name__.startswith("Correct"):
                changes += int((outcome.result.state != current).sum())
                current = outcome.result.state
    assert changes > 0
    np.testing.assert_array_equal(result.labels[3], current)


def test_correction_asks_the_average_and_ranks_by_the_local_model(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fix_verdict(monkeypatch, True, False, False, False)
    _, watched, _ = observe(lab, LABELS_MOVE, rounds=3)
    (trained,), (corrected,) = watched.tasks("TrainAndMeasure"), watched.tasks("CorrectNoisiest")
    (task,) = (i.task for i in corrected.items)
    np.testing.assert_array_equal(task.losses, trained.outcomes[0].result.state)
    assert (task.ratio, task.threshold) == (1.0, 0.3)
    (tuned,) = watched.tasks("MixupTraining")[:1]
    np.testing.assert_array_equal(corrected.broadcast["weights"].values, tuned.broadcast["weights"].values)
    assert not np.array_equal(corrected.broadcast["weights"].values, trained.broadcast["weights"].values)


def test_the_verdict_follows_the_accumulated_dimension(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[NDArray[np.float64]] = []

    def split(values: NDArray[np.float64], seed: int) -> NDArray[np.bool_]:  # noqa: ARG001
        seen.append(values.copy())
        return values > np.median(values)

    monkeypatch.setattr(fedcorr, "high_group", split)
    _, watched, _ = observe(lab, {"name": "fedcorr", "stages": STAGES})
    each = [[u.lid for u in d.updates.values()] for d in watched.tasks("TrainAndMeasure")]
    np.testing.assert_allclose(seen, np.cumsum(each, axis=0))
    assert np.all(np.diff(seen, axis=0) > 0)


def test_the_verdict_is_reported_with_the_noise_levels(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one of pre-processing; relabelling is judged over the clients that it names."""
    verdicts = iter(([True, True, False, False], [False, True, False, True]))
    monkeypatch.setattr(fedcorr, "high_group", lambda *_: np.array(next(verdicts), dtype=np.bool_))
    fix_noise_levels(monkeypatch, 0.6)
    stages = {"preprocessing": 0.4, "finetuning": 0.3, "usual": 0.3}
    result, _, recorder = observe(lab, {**LABELS_MOVE, "stages": stages}, rounds=5)
    assert result.identification.split == "lid"
    assert result.identification.clean.tolist() == [True, False, True, False]
    np.testing.assert_allclose(result.identification.p_clean, [1.0, 0.4, 1.0, 0.4])
    assert np.isnan(result.identification.descriptors).all()
    assert result.identification.similarity.shape == (4, 4, 4)
    noisy = lab.condition(lab.config()).truth.noisy
    right = [np.mean(noisy == [True, True, False, False]), *[np.mean(noisy == [False, True, False, True])] * 4]
    assert [r.metrics["ident/accuracy"] for r in recorder.rounds] == pytest.approx(right)


def test_the_pull_follows_the_last_noise_level(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """None in the first round, then beta mu of clients under suspicion, and none after pre-processing."""
    fix_verdict(monkeypatch, False, True, False, False)
    _, watched, _ = observe(lab, {"name": "fedcorr", "stages": STAGES})
    rounds = watched.tasks("TrainAndMeasure")
    levels = [0.0, *[d.updates[1] for d in watched.tasks("CorrectNoisiest")]]
    assert all(0 < level < 1 for level in levels[1:])
    for dispatch, level in zip(rounds, levels, strict=False):
        assert [i.task.training.prox for i in dispatch.items] == [0.0, 5.0 * level, 0.0, 0.0]
    assert all(i.task.prox == 0.0 for d in watched.tasks("MixupTraining") for i in d.items)


def test_clients_take_turns_when_preprocessing_is_sequential(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fix_verdict(monkeypatch, False, False, True, True)
    fix_noise_levels(monkeypatch, 0.6)
    _, watched, _ = observe(lab, {**LABELS_MOVE, "sequential": True})
    turns = watched.tasks("TrainAndMeasure")
    assert [len(d.items) for d in turns] == [1] * 12
    orders = [[d.items[0].client for d in turns if d.round == t] for t in range(3)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    for before, after in pairwise(turns):
        received = after.broadcast["weights"].values
        np.testing.assert_array_equal(received, before.outcomes[0].result.update.weights.values)
    first = watched.tasks("MixupTraining")[0]
    last = turns[-1].outcomes[0].result.update.weights
    np.testing.assert_array_equal(first.broadcast["weights"].values, last.values)
    losses = {i.client: i.task.losses for i in watched.tasks("CorrectNoisiest")[0].items}
    measured = {d.items[0].client: d.outcomes[0].result.state for d in turns if d.round == 0}
    for k, values in losses.items():
        np.testing.assert_array_equal(values, measured[k])


def test_what_is_uploaded_is_the_model_and_few_numbers(lab: Any) -> None:
    _, _, correcting = observe(lab, LABELS_MOVE, rounds=3)
    plain = lab.collector()
    lab.run(lab.config("fedavg", training={"rounds": 3}), recorder=plain)
    assert correcting.rounds[0].metrics["bytes/up"] == plain.rounds[0].metrics["bytes/up"]


# -- edges ---------------------------------------------------------------------------------------------------------


def test_with_one_clean_client_of_five_it_fine_tunes_alone(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fix_verdict(monkeypatch, True, True, False, True, True)
    fix_noise_levels(monkeypatch, 0.6)
    _, watched, _ = observe(lab, LABELS_MOVE, federation={"clients": 5})
    assert [clients for _, kind, clients in visits(watched) if kind == "MixupTraining"][:4] == [[2]] * 4


def test_without_a_clean_client_the_run_says_who_fine_tunes(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fix_verdict(monkeypatch, *[True] * 4)
    fix_noise_levels(monkeypatch, 0.6)
    _, watched, recorder = observe(lab, LABELS_MOVE)
    assert [clients for _, kind, clients in visits(watched) if kind == "MixupTraining"][:4] == [[0]] * 4
    assert notes(recorder) == ["no noise level is at most 0.1; the lowest fine-tune: client 0"]


@pytest.mark.parametrize("rounds", [1, 2])
def test_runs_too_short_for_all_stages_end(lab: Any, rounds: int) -> None:
    observe(lab, LABELS_MOVE, rounds=rounds)


def test_two_classes(lab: Any) -> None:
    data = {"cohort": "wake_forest"}
    result, watched, _ = observe(lab, {"name": "fedcorr", "stages": STAGES}, data=data)
    tasks = [i.task for d in watched.tasks("CorrectNoisiest") for i in d.items]
    assert all(task.threshold == 0.75 for task in tasks)
    assert result.labels is None or all(set(y.tolist()) <= {0, 1} for y in result.labels)


def test_odd_clients(lab: Any) -> None:
    """Fewer images than neighbours, too few for a dimension, one class only, one image only."""
    config = lab.config(LABELS_MOVE, training={"rounds": ROUNDS})
    labels = lab.dataset(config).train.labels
    one_class = np.flatnonzero(labels == 1)[:30]
    rest = np.setdiff1d(np.arange(160), one_class)
    parts = [one_class, rest[:12], rest[12:16], rest[16:17], rest[17:80], rest[80:]]
    condition = lab.federation_of(config, parts)
    _, watched, _ = observe(lab, LABELS_MOVE, condition=condition)
    for dispatch in watched.tasks("TrainAndMeasure"):
        known = [np.isfinite(u.lid) for u in dispatch.updates.values()]
        assert known == [True, True, False, False, True, True]


def test_a_single_client_is_never_noisy(lab: Any) -> None:
    config = lab.config(LABELS_MOVE, training={"rounds": 4})
    condition = lab.federation_of(config, [np.arange(160)])
    result, watched, _ = observe(lab, LABELS_MOVE, rounds=4, condition=condition)
    assert result.labels is None
    assert all(clients == [0] for _, _, clients in visits(watched))


def test_a_client_that_diverges_is_left_out_and_convicts_nobody(lab: Any) -> None:
    """Its dimension is undefined, its losses are not finite, and its model is not averaged."""

    def spoil(items: list[Any]) -> list[Any]:
        if type(items[0].task).__name__ != "TrainAndMeasure":
            return items
        return [replace(i, task=Diverged(i.task)) if i.client == 1 else i for i in items]

    recorder = lab.collector()
    executor = lab.dispatching(lab.executor, change=spoil)
    result = lab.run(lab.config(LABELS_MOVE, training={"rounds": 4}), executor=executor, recorder=recorder)
    assert np.isfinite(result.weights.values).all()
    assert any("client 1 returned non-finite weights" in note for note in notes(recorder))


class Diverged:
    """Training that ends with weights that are not numbers, then the usual measurement."""

    def __init__(self, task: Any) -> None:
        self.task = task

    def __call__(self, client: Any, broadcast: Any) -> Any:
        training = self.task.training

        def spoiled(*arguments: Any) -> Any:
            result = training(*arguments)
            weights = replace(result.update.weights, values=np.full_like(result.update.weights.values, np.nan))
            return replace(result, update=replace(result.update, weights=weights))

        spoiled.labels = training.labels  # type: ignore[attr-defined]
        return replace(self.task, training=spoiled)(client, broadcast)


# -- repetition and resumption -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[False, True], ids=["parallel", "sequential"])
def whole(lab: Any, request: pytest.FixtureRequest) -> tuple[Any, Any]:
    config = lab.config({**LABELS_MOVE, "sequential": request.param}, training={"rounds": ROUNDS})
    return config, lab.run(config)


def test_a_run_repeats_to_the_bit(lab: Any, whole: tuple[Any, Any]) -> None:
    config, result = whole
    assert result.labels is not None
    assert lab.essence(lab.run(config)) == lab.essence(result)


# Within pre-processing, at its end, within fine-tuning, at its end (after the last correction), in the usual stage.
@pytest.mark.parametrize("at", [1, 3, 5, 7, 8])
def test_an_interrupted_run_continues_to_the_same_bits(
    lab: Any, whole: tuple[Any, Any], tmp_path: Path, at: int
) -> None:
    config, result = whole
    file = tmp_path / "run.ckpt"
    with pytest.raises(KeyboardInterrupt):
        lab.run(config, recorder=lab.interrupter(at=at), checkpoint=file)
    recorder = lab.collector()
    assert lab.essence(lab.run(config, recorder=recorder, checkpoint=file)) == lab.essence(result)
    assert [r.round for r in recorder.rounds] == list(range(at + 1, ROUNDS + 1))
