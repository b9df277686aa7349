"""RHFL: confidences and losses by hand, what each mode keeps and exchanges, and federations at the edge."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import ValidationError

from fedsir.aggregation import weighted_mean
from fedsir.clients.rhfl_tasks import SymmetricCE
from fedsir.methods.rhfl import RHFLConfig, client_confidence
from fedsir.models.flat import FlatWeights

POOL = {"public_pool": 16}
EXCHANGING = {"name": "rhfl", "pretrain": 0.0}


def observe(lab: Any, config: Any, **more: Any) -> tuple[Any, Any, Any]:
    """Result, everything that went to the clients, and the recorder."""
    watched, recorder = lab.dispatching(lab.executor), lab.collector()
    result = lab.run(config, executor=watched, recorder=recorder, **more)
    assert result.weights is None or np.isfinite(result.weights.values).all()
    assert 0 <= result.final["final/accuracy"] <= 1
    return result, watched, recorder


def notes(recorder: Any) -> list[str]:
    return [note for record in recorder.rounds for note in record.notes]


def same(a: FlatWeights, b: FlatWeights) -> bool:
    return bool(np.array_equal(a.values, b.values) and np.array_equal(a.counters, b.counters))


def kept_models(dispatch: Any) -> list[FlatWeights]:
    """What the clients keep after a dispatch."""
    return [o.result.state for o in dispatch.outcomes]


# -- symmetric cross entropy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probabilities", "alpha", "beta", "expected"),
    [
        ([0.25, 0.25, 0.25, 0.25], 1.0, 0.0, 1.386294),
        ([0.25, 0.25, 0.25, 0.25], 0.0, 1.0, 6.907755),
        ([0.25, 0.25, 0.25, 0.25], 0.1, 1.0, 7.046385),
        ([0.7, 0.1, 0.1, 0.1], 0.0, 1.0, 2.763102),
        ([0.7, 0.1, 0.1, 0.1], 0.1, 1.0, 2.798770),
    ],
)
def test_symmetric_cross_entropy_by_hand(
    probabilities: list[float], alpha: float, beta: float, expected: float
) -> None:
    logits = torch.tensor([probabilities], dtype=torch.float64).log()
    loss = SymmetricCE(alpha=alpha, beta=beta).losses(logits, torch.tensor([0]))
    assert float(loss) == pytest.approx(expected, abs=5e-7)


def test_its_defaults_are_those_of_the_authors() -> None:
    settings = SymmetricCE()
    assert (settings.alpha, settings.beta, settings.clip, settings.p_min) == (0.1, 1.0, 1e-4, 1e-7)


def test_without_the_reverse_term_it_is_plain_cross_entropy() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(9, 4), torch.randint(0, 4, (9,))
    plain = SymmetricCE(alpha=1.0, beta=0.0).losses(logits, labels).mean()
    torch.testing.assert_close(plain, F.cross_entropy(logits, labels))


# -- client confidence ---------------------------------------------------------------------------------------------


def test_confidences_by_hand() -> None:
    confidence = client_confidence(np.full(3, 2.0), np.array([1.0, 1.6, 2.0]), eta=0.5)
    np.testing.assert_allclose(confidence, [0.414742, 0.307248, 0.278010], atol=5e-7)


def test_the_first_time_clients_count_equally() -> None:
    np.testing.assert_array_equal(client_confidence(None, np.array([1.0, 2.0, 9.0]), eta=0.5), [0.5, 0.5, 0.5])


def test_one_and_two_clients() -> None:
    assert client_confidence(None, np.array([1.0]), 0.5).tolist() == [1.0]
    assert client_confidence(np.array([2.0]), np.array([1.0]), 0.5).tolist() == [1.0]
    assert client_confidence(None, np.array([1.0, 2.0]), 0.5).tolist() == [1.0, 1.0]
    pair = client_confidence(np.array([2.0, 2.0]), np.array([1.0, 2.0]), 0.5)
    np.testing.assert_allclose(pair, np.exp([0.5, 0.0]) / np.exp([0.5, 0.0]).sum())


def test_rising_losses_keep_their_sign_unless_the_published_sum_is_asked_for() -> None:
    before, now = np.array([2.0, 2.0, 2.0]), np.array([1.6, 4.0, 4.0])  # F = (0.25, -0.5, -0.5)
    steady = client_confidence(before, now, 0.5)
    assert steady[0] > steady[1] == steady[2]
    turned = client_confidence(before, now, 0.5, "signed")  # sum F = -0.75
    assert turned[0] < turned[1] == turned[2]


@pytest.mark.parametrize("norm", ["abs", "signed"])
@pytest.mark.parametrize(
    ("before", "now"),
    [
        ([2.0, 2.0], [2.0, 2.0]),  # nothing moved
        ([2.0, 3.0], [np.nan, 3.0]),  # a loss is undefined
        ([2.0, 3.0], [0.0, 3.0]),  # a loss of 0 has no relative fall
    ],
)
def test_where_no_quality_is_defined_clients_count_equally(norm: Any, before: list[float], now: list[float]) -> None:
    np.testing.assert_array_equal(client_confidence(np.array(before), np.array(now), 0.5, norm), [0.5, 0.5])


def test_confidences_sum_to_one_even_where_qualities_nearly_cancel() -> None:
    confidence = client_confidence(np.array([2.0, 1.0]), np.array([1.0, 2.0 + 1e-13]), 0.5, "signed")
    assert np.isfinite(confidence).all()
    assert confidence.sum() == pytest.approx(1.0)
    flat = client_confidence(np.array([5.0, 1.0, 2.0]), np.array([1.0, 2.0, 3.0]), eta=0.0)
    np.testing.assert_allclose(flat, 1 / 3)


# -- private mode --------------------------------------------------------------------------------------------------


def test_private_models_stay_with_their_clients_and_are_what_is_evaluated(lab: Any) -> None:
    config = lab.config(EXCHANGING, federation=POOL)
    result, watched, recorder = observe(lab, config)
    rounds = watched.tasks("PrivateTraining")
    initial = lab.condition(config).initial_weights
    models = [initial] * lab.clients
    for dispatch in rounds:
        assert "weights" not in dispatch.broadcast
        assert all(same(i.task.model, m) for i, m in zip(dispatch.items, models, strict=True))
        assert all(u.weights.values.size == 0 for u in dispatch.updates.values())
        models = kept_models(dispatch)
    assert not any(same(a, b) for i, a in enumerate(models) for b in models[:i])
    assert result.weights is None
    evaluated = watched.tasks("PredictTestPrivately")[-1]
    assert all(same(i.task.model, m) for i, m in zip(evaluated.items, models, strict=True))
    assert sum("no global model" in note for note in notes(recorder)) == 1


def test_the_score_is_the_mean_over_the_client_models(lab: Any) -> None:
    config = lab.config("rhfl", federation=POOL)
    result, watched, recorder = observe(lab, config)
    truth = lab.dataset(config).test.labels
    predicted = np.stack([o.argmax(axis=1) for o in watched.tasks("PredictTestPrivately")[-1].updates.values()])
    accuracies = (predicted == truth).mean(axis=1)
    assert len(set(accuracies)) > 1
    assert result.final["final/accuracy"] == pytest.approx(accuracies.mean())
    assert (
        result.final["test/accuracy"] == recorder.rounds[-1].metrics["test/accuracy"] == result.final["final/accuracy"]
    )
    assert result.final["final/client_accuracy_sd"] == pytest.approx(accuracies.std())
    assert result.final["final/accuracy_low"] < result.final["final/accuracy"] < result.final["final/accuracy_high"]
    np.testing.assert_array_equal(result.confusion.sum(axis=1), lab.clients * np.bincount(truth, minlength=4))
    assert np.trace(result.confusion) == (predicted == truth).sum()
    assert "final/client_accuracy_sd" not in lab.run(lab.config()).final


def test_before_the_exchange_clients_learn_alone(lab: Any) -> None:
    """Half of the rounds; a client's model then depends on nobody else's labels."""
    config = lab.config("rhfl", federation=POOL, training={"rounds": 4})
    condition = lab.condition(config)
    _, watched, _ = observe(lab, config)
    assert [d.round for d in watched.tasks("Report")] == [2, 3]
    assert [sorted(d.broadcast) for d in watched.tasks("PrivateTraining")] == [[], [], *[["peer_ids", "peers"]] * 2]

    observed = list(condition.federation.observed)
    observed[3] = (observed[3] + 1) % 4
    other = replace(condition, federation=replace(condition.federation, observed=tuple(observed)))
    _, changed, _ = observe(lab, config, condition=other)
    unchanged = [
        [same(a, b) for a, b in zip(kept_models(x), kept_models(y), strict=True)]
        for x, y in zip(watched.tasks("PrivateTraining"), changed.tasks("PrivateTraining"), strict=True)
    ]
    assert unchanged == [[True, True, True, False]] * 2 + [[False] * 4] * 2


def test_an_exchange_carries_losses_predictions_and_confidences(lab: Any) -> None:
    config = lab.config(EXCHANGING, federation=POOL)
    _, watched, recorder = observe(lab, config)
    losses: list[NDArray[np.float64]] = []
    for report, training in zip(watched.tasks("Report"), watched.tasks("PrivateTraining"), strict=True):
        losses.append(np.array([u.loss for u in report.updates.values()]))
        said = np.stack([u.predictions for u in report.updates.values()])
        np.testing.assert_allclose(said.sum(axis=2), 1.0, rtol=1e-5)
        np.testing.assert_array_equal(training.broadcast["peers"].predictions, said)
        assert training.broadcast["peer_ids"].tolist() == [0, 1, 2, 3]
        expected = client_confidence(losses[-2] if len(losses) > 1 else None, losses[-1], 0.5)
        np.testing.assert_array_equal(training.broadcast["peers"].shares, expected)
    # The public images are 16, the classes 4: no parameters, and what the tasks take along is the clients' own.
    assert recorder.rounds[-1].metrics["bytes/up"] == lab.clients * 16 * 4 * 4
    assert recorder.rounds[-1].metrics["bytes/down"] == lab.clients * (lab.clients * (16 * 4 * 4 + 8 + 8))


def test_a_client_is_not_its_own_peer(lab: Any) -> None:
    """What client 1 said about the pool reaches the others and not client 1."""
    config = lab.config(EXCHANGING, federation=POOL, training={"rounds": 1})

    def turned(items: list[Any]) -> list[Any]:
        if type(items[0].task).__name__ != "Report":
            return items
        return [replace(i, task=Saying(i.task, lambda p: p[:, ::-1].copy())) if i.client == 1 else i for i in items]

    _, watched, _ = observe(lab, config)
    altered = lab.dispatching(lab.executor, change=turned)
    lab.run(config, executor=altered)
    mine, theirs = (kept_models(d.tasks("PrivateTraining")[0]) for d in (watched, altered))
    assert [same(a, b) for a, b in zip(mine, theirs, strict=True)] == [False, True, False, False]


class Saying:
    """A report whose predictions are changed on the way."""

    def __init__(self, task: Any, change: Any) -> None:
        self._task, self._change = task, change

    def __call__(self, client: Any, broadcast: Any) -> Any:
        result = self._task(client, broadcast)
        update = replace(result.update, predictions=self._change(result.update.predictions))
        return replace(result, update=update)


def test_predictions_that_are_not_finite_are_left_out(lab: Any) -> None:
    def spoiled(items: list[Any]) -> list[Any]:
        if type(items[0].task).__name__ != "Report":
            return items
        return [replace(i, task=Saying(i.task, lambda p: p * np.nan)) if i.client in (0, 2) else i for i in items]

    watched = lab.dispatching(lab.executor, change=spoiled)
    result = lab.run(lab.config(EXCHANGING, federation=POOL), executor=watched)
    assert [d.broadcast["peer_ids"].tolist() for d in watched.tasks("PrivateTraining")] == [[1, 3]] * 3
    assert np.isfinite(result.final["test/loss"])


def test_a_model_that_diverges_is_not_kept(lab: Any) -> None:
    def diverging(items: list[Any]) -> list[Any]:
        if type(items[0].task).__name__ != "PrivateTraining" or items[0].round != 1:
            return items
        return [replace(i, task=Diverging(i.task)) if i.client == 2 else i for i in items]

    watched, recorder = lab.dispatching(lab.executor, change=diverging), lab.collector()
    lab.run(lab.config("rhfl", federation=POOL), executor=watched, recorder=recorder)
    # The dispatch with the changed task goes by the kind of its first item, which is unchanged.
    before, _, after = watched.tasks("PrivateTraining")
    assert same(after.items[2].task.model, kept_models(before)[2])
    assert any("client 2 became non-finite" in note for note in recorder.rounds[1].notes)


class Diverging:
    """Local training whose model is infinite afterwards."""

    def __init__(self, task: Any) -> None:
        self._task = task

    def __call__(self, client: Any, broadcast: Any) -> Any:
        result = self._task(client, broadcast)
        state = FlatWeights(np.full_like(result.state.values, np.inf), result.state.counters)
        return replace(result, state=state)


@pytest.mark.parametrize("mode", ["private", "hybrid"])
def test_without_a_pool_clients_learn_alone(lab: Any, mode: str) -> None:
    config = lab.config({"name": "rhfl", "mode": mode, "pretrain": 0.0}, federation={"public_pool": 0})
    _, watched, recorder = observe(lab, config)
    assert watched.tasks("Report") == []
    assert sum("no public pool" in note for note in notes(recorder)) == 1


def test_a_single_client_has_no_peers(lab: Any) -> None:
    config = lab.config(EXCHANGING, federation={**POOL, "clients": 1, "clean_clients": 1})
    result, watched, recorder = observe(lab, config)
    assert watched.tasks("Report") == []
    assert any("no peers" in note for note in notes(recorder))
    assert result.final["final/client_accuracy_sd"] == 0.0


def test_two_clients_and_clients_with_one_class(lab: Any) -> None:
    config = lab.config(EXCHANGING, federation=POOL)
    condition = lab.condition(config)
    true, held = condition.dataset.train.labels, np.sort(np.concatenate(condition.federation.indices))
    parts = [held[true[held] == 0], held[true[held] != 0]]
    federation = replace(
        condition.federation, indices=tuple(parts), observed=tuple(true[p].astype(np.int64) for p in parts)
    )
    truth = replace(condition.truth, labels=federation.observed, noisy=np.zeros(2, dtype=np.bool_))
    result, watched, _ = observe(lab, config, condition=replace(condition, federation=federation, truth=truth))
    assert watched.tasks("PrivateTraining")[0].broadcast["peers"].shares.tolist() == [1.0, 1.0]
    assert np.isfinite(result.final["test/loss"])


# -- hybrid and averaged modes -------------------------------------------------------------------------------------


def test_hybrid_trains_like_private_and_averages_for_evaluation_only(lab: Any) -> None:
    federation = {"federation": POOL}
    _, private, _ = observe(lab, lab.config(EXCHANGING, **federation))
    result, hybrid, _ = observe(lab, lab.config({**EXCHANGING, "mode": "hybrid"}, **federation))
    for a, b in zip(private.tasks("PrivateTraining"), hybrid.tasks("PrivateTraining"), strict=True):
        assert all(same(x, y) for x, y in zip(kept_models(a), kept_models(b), strict=True))
    last = hybrid.tasks("PrivateTraining")[-1]
    sizes = np.array([u.samples for u in last.updates.values()])
    mean = weighted_mean(kept_models(last), sizes * last.broadcast["peers"].shares)
    assert mean is not None
    assert same(result.weights, mean)
    assert hybrid.tasks("PredictTestPrivately") == []
    assert "final/client_accuracy_sd" not in result.final


def test_averaged_mode_weighs_the_average_by_confidence(lab: Any) -> None:
    config = lab.config("rhfl/averaged", federation=POOL, training={"rounds": 2})
    result, watched, recorder = observe(lab, config)
    first, second = watched.tasks("AveragedTraining")
    losses = [np.array([u.loss for u in d.updates.values()]) for d in (first, second)]
    updates = [u.training for u in second.updates.values()]
    confidence = client_confidence(losses[0], losses[1], 0.5)
    mean = weighted_mean([u.weights for u in updates], confidence * [u.samples for u in updates])
    assert mean is not None
    assert same(result.weights, mean)
    assert recorder.rounds[0].metrics["cost/forward_units"] == lab.clients
    assert all(u.predictions is None for u in second.updates.values())


def test_averaged_mode_with_plain_cross_entropy_and_equal_confidence_is_fedavg(lab: Any) -> None:
    plain = {"name": "rhfl", "mode": "averaged", "eta": 0.0, "sce": {"alpha": 1.0, "beta": 0.0}}
    ours, average = lab.run(lab.config(plain)), lab.run(lab.config())
    np.testing.assert_allclose(ours.weights.values, average.weights.values, rtol=1e-4, atol=1e-5)
    assert ours.confusion.tolist() == average.confusion.tolist()


def test_the_global_model_can_be_drawn_to_the_mean_prediction(lab: Any) -> None:
    federation = {"federation": POOL}
    method = {"name": "rhfl", "mode": "averaged", "align_global": True}
    result, watched, _ = observe(lab, lab.config(method, **federation))
    assert result.weights_hash != lab.run(lab.config("rhfl/averaged", **federation)).weights_hash
    trained, aligned = watched.tasks("AveragedTraining"), watched.tasks("AlignGlobal")
    assert len(aligned) == 3
    assert same(trained[1].broadcast["weights"], aligned[0].updates[0])
    said = np.stack([u.predictions for u in trained[0].updates.values()])
    np.testing.assert_allclose(aligned[0].broadcast["peers"].predictions, said.mean(axis=0, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("mode", ["private", "hybrid"])
def test_without_a_global_model_there_is_nothing_to_align(mode: str) -> None:
    with pytest.raises(ValidationError, match="align_global needs mode averaged"):
        RHFLConfig.model_validate({"mode": mode, "align_global": True})


@pytest.mark.parametrize(
    "settings", [{"mode": "global"}, {"eta": -1.0}, {"sce": {"clip": 0.0}}, {"sce": {"A": 1e-4}}, {"pretrain": 1.5}]
)
def test_settings_without_meaning_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RHFLConfig.model_validate(settings)


@pytest.mark.parametrize(
    "method",
    [EXCHANGING, {**EXCHANGING, "mode": "hybrid"}, {"name": "rhfl", "mode": "averaged", "align_global": True}],
)
def test_it_repeats_itself_and_survives_an_interruption(lab: Any, tmp_path: Path, method: dict[str, Any]) -> None:
    config, file = lab.config(method, federation=POOL), tmp_path / "run.safetensors"
    expected = lab.essence(lab.run(config))
    assert lab.essence(lab.run(config)) == expected
    for at in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            lab.run(config, recorder=lab.interrupter(at=at), checkpoint=file)
    assert lab.essence(lab.run(config, checkpoint=file)) == expected


@pytest.mark.slow
def test_it_gives_the_same_bits_on_any_number_of_workers(lab: Any, lane_of: Any) -> None:
    config = lab.config(EXCHANGING, federation=POOL)
    assert lab.essence(lab.run(config, executor=lane_of(2))) == lab.essence(lab.run(config))
