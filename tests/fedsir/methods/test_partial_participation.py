"""Rounds that train a share of the clients, for every method that can do with it; and rounds folded in parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsir.clients import parts
from fedsir.federation.participation import draw_participants
from fedsir.methods import fedcorr, loss_detection, stage_one
from fedsir.methods.cost import Scale
from fedsir.methods.registry import BUILT_IN, find_method

ROUNDS = 6
CLIENTS = 6
SHARE = 0.5
POOL = 16
METHODS = [name for name in BUILT_IN if find_method(name).partial_participation]
STAGE_ONE = {"stage_one": {"epochs": 1}}
# What brings every stage of a method into so few rounds.
SETTINGS: dict[str, dict[str, Any]] = {
    "fedcorr": {"stages": {"preprocessing": 0.35, "finetuning": 0.35, "usual": 0.3}, "relabel_ratio": 1.0, "tau": 0.3},
    "fedned": {"lambda_rel": 1.0, "pl_threshold": 0.3, "nd": {"enabled": True, "steps": 2}},
    "fedsir": {**STAGE_ONE, "relabeling": {"every": 2}},
    "spectral_pruning": STAGE_ONE,
    "oct_fedsir": {**STAGE_ONE, "relabeling": {"every": 2}},
}
TRAINING = {
    "LocalTraining",
    "ProximalTraining",
    "TwoViewTraining",
    "RoFLTraining",
    "MixupTraining",
    "LearnLabels",
    "TrainTwice",
}
# Rounds in which everybody trains: warm-up and pre-processing, whose end is a verdict on every client.
EVERYBODY = {"fednoro": {0}, "fedelc": {0}, "fedcorr": {0, 1}}


def config_of(lab: Any, name: str, share: float = SHARE) -> Any:
    return lab.config(
        {"name": name, **SETTINGS.get(name, {})},
        training={"rounds": ROUNDS, "participation": share},
        federation={"public_pool": POOL, "clients": CLIENTS, "clean_clients": 3, "clean_selection": "random"},
    )


def kind(item: Any) -> str:
    return type(item.task).__name__


@dataclass
class Watch:
    config: Any
    condition: Any
    result: Any
    executor: Any
    recorder: Any

    def clients(self, round_: int, kinds: set[str]) -> list[int]:
        """Clients that did work of some kinds in a round, one after the other."""
        return [i.client for d in self.executor.log if d.round == round_ for i in d.items if kind(i) in kinds]


@pytest.fixture(scope="module")
def whole(lab: Any) -> Callable[..., Watch]:
    """The uninterrupted run of a method in this process, made when first asked for."""
    runs: dict[tuple[str, float], Watch] = {}

    def run(name: str, share: float = SHARE) -> Watch:
        if (name, share) not in runs:
            config = config_of(lab, name, share)
            condition = lab.condition(config)
            executor, recorder = lab.dispatching(lab.executor), lab.collector()
            result = lab.run(config, condition=condition, executor=executor, recorder=recorder)
            runs[name, share] = Watch(config, condition, result, executor, recorder)
        return runs[name, share]

    return run


def eligible(watch: Watch, name: str) -> list[int]:
    """Clients from which those of a round are drawn."""
    if name == "spectral_pruning":
        return np.flatnonzero(watch.result.identification.clean).tolist()
    return list(range(CLIENTS))


# -- who trains --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in METHODS if n != "fedcorr"])
def test_the_drawn_clients_train_and_in_warm_ups_everybody(whole: Callable[..., Watch], name: str) -> None:
    watch = whole(name)
    for t in range(ROUNDS):
        among = eligible(watch, name)
        drawn = draw_participants(watch.config.seed, t, among, CLIENTS, SHARE)
        expected = list(range(CLIENTS)) if t in EVERYBODY.get(name, set()) else drawn
        assert watch.clients(t, TRAINING) == expected


def test_fedcorr_visits_everybody_first_and_draws_from_those_who_fine_tune(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = [0, 2, 3, 5]
    chosen = np.isin(np.arange(CLIENTS), tuning)
    monkeypatch.setattr(fedcorr, "finetuning_clients", lambda *_: chosen)
    config = config_of(lab, "fedcorr")
    watched = lab.dispatching(lab.executor)
    lab.run(config, executor=watched)
    preprocessing, finetuning, _ = config.method.stages.rounds(ROUNDS)
    for t in range(ROUNDS):
        kinds = {"TrainAndMeasure"} if t < preprocessing else {"MixupTraining"}
        trained = [i.client for d in watched.log if d.round == t for i in d.items if kind(i) in kinds]
        if t < preprocessing:
            assert trained == list(range(CLIENTS))
        elif t < preprocessing + finetuning:
            assert trained == draw_participants(config.seed, t, tuning, CLIENTS, SHARE)
        else:
            assert trained == draw_participants(config.seed, t, range(CLIENTS), CLIENTS, SHARE)


def test_methods_of_a_condition_train_the_same_clients(whole: Callable[..., Watch]) -> None:
    names = ("fedavg", "fedprox", "rofl", "fedlsr", "fedned", "fedsir", "oct_fedsir")
    rounds = [[whole(name).clients(t, TRAINING) for t in range(ROUNDS)] for name in names]
    assert all(r == rounds[0] for r in rounds)
    assert len({tuple(r) for r in rounds[0]}) > 1


@pytest.mark.parametrize("name", ["oct_fedsir", "fedsir", "spectral_pruning"])
def test_stage_one_is_of_everybody(whole: Callable[..., Watch], name: str) -> None:
    watch = whole(name)
    assert watch.clients(stage_one.STAGE_ONE_ROUND, {"StageOne"}) == list(range(CLIENTS))
    assert len(watch.result.identification.clean) == CLIENTS


def test_relabelling_is_of_everybody(whole: Callable[..., Watch]) -> None:
    watch = whole("oct_fedsir")
    clean = watch.result.identification.clean
    assert watch.clients(2, {"ProvideSpectra"}) == np.flatnonzero(clean).tolist()
    assert watch.clients(2, {"Relabel"}) == np.flatnonzero(~clean).tolist()


@pytest.mark.parametrize("name", METHODS)
def test_it_is_another_run_than_that_of_everybody(whole: Callable[..., Watch], name: str) -> None:
    assert whole(name).result.weights_hash != whole(name, 1.0).result.weights_hash
    assert whole(name).config.identity() != whole(name, 1.0).config.identity()


# -- the same bits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_the_same_bits_on_two_actors(lab: Any, whole: Callable[..., Watch], lane_of: Any, name: str) -> None:
    alone = whole(name)
    found = lab.run(alone.config, condition=alone.condition, executor=lane_of(2))
    assert lab.essence(found) == lab.essence(alone.result)


@pytest.mark.parametrize("name", METHODS)
def test_interrupted_after_every_round_it_ends_with_the_same_bits(
    lab: Any, whole: Callable[..., Watch], tmp_path: Path, name: str
) -> None:
    alone, file = whole(name), tmp_path / "run.safetensors"
    for at in range(1, ROUNDS):
        with pytest.raises(KeyboardInterrupt):
            lab.run(alone.config, condition=alone.condition, recorder=lab.interrupter(at=at), checkpoint=file)
    result = lab.run(alone.config, condition=alone.condition, checkpoint=file)
    assert lab.essence(result) == lab.essence(alone.result)


@pytest.mark.parametrize("share", [SHARE, 1.0])
@pytest.mark.parametrize("name", BUILT_IN)
def test_folded_in_parts_and_as_a_whole_are_the_same_bits(
    lab: Any, whole: Callable[..., Watch], monkeypatch: pytest.MonkeyPatch, name: str, share: float
) -> None:
    if name not in METHODS and share < 1.0:
        pytest.skip("needs every client")
    alone = whole(name, share)
    for constant, value in (("PART_BYTES", 0), ("PART_CLIENTS", 1), ("PART_PER_SLOT", 0)):
        monkeypatch.setattr(parts, constant, value)
    watched, recorder = lab.dispatching(lab.executor), lab.collector()
    result = lab.run(alone.config, condition=alone.condition, executor=watched, recorder=recorder)
    assert lab.essence(result) == lab.essence(alone.result)
    assert [r.notes for r in recorder.rounds] == [r.notes for r in alone.recorder.rounds]
    for found, expected in zip(recorder.rounds, alone.recorder.rounds, strict=True):
        for key in ("train/loss", "bytes/up", "bytes/down", "cost/client_epochs", "cost/forward_units"):
            assert found.metrics[key] == expected.metrics[key], key
    # Of the clients that are left after pruning a single one trains at a time.
    folded = name != "rhfl" and (name, share) != ("spectral_pruning", SHARE)
    assert (len(watched.log) > len(alone.executor.log)) == folded


@pytest.mark.parametrize("name", ["fedavg", "fedelc", "oct_fedsir"])
def test_folded_in_parts_on_two_actors_they_are_too(
    lab: Any, whole: Callable[..., Watch], lane_of: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    alone = whole(name, 1.0)
    for constant, value in (("PART_BYTES", 0), ("PART_CLIENTS", 1), ("PART_PER_SLOT", 1)):
        monkeypatch.setattr(parts, constant, value)
    watched = lab.dispatching(lane_of(2))
    result = lab.run(alone.config, condition=alone.condition, executor=watched)
    assert lab.essence(result) == lab.essence(alone.result)
    assert len(watched.log) > len(alone.executor.log)


# -- what a method makes of those who take part ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fednoro", "fedelc", "oct_fedsir"])
def test_a_single_participant_is_followed_whatever_it_counts_as(lab: Any, name: str) -> None:
    """There is nobody to be far from, so its model is the next global one."""
    watched = lab.dispatching(lab.executor)
    lab.run(config_of(lab, name, 1.0 / CLIENTS), executor=watched)
    followed = 0
    for place, dispatch in enumerate(watched.log):
        if len(dispatch.items) == 1 and kind(dispatch.items[0]) in TRAINING:
            (update,) = dispatch.updates.values()
            after = next(d for d in watched.log[place:] if kind(d.items[0]) == "PredictTest")
            np.testing.assert_array_equal(after.broadcast["weights"].values, update.weights.values)
            followed += 1
    assert followed >= ROUNDS - 1


def test_the_reference_model_is_that_of_the_last_clean_participants(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real, clean = stage_one.identify, np.arange(CLIENTS) < 3
    monkeypatch.setattr(stage_one, "identify", lambda *arguments: replace(real(*arguments), clean=clean))
    config = config_of(lab, "oct_fedsir", 1.0 / CLIENTS)
    watched = lab.dispatching(lab.executor)
    lab.run(config, executor=watched)
    drawn = [draw_participants(config.seed, t, range(CLIENTS), CLIENTS, 1.0 / CLIENTS)[0] for t in range(ROUNDS)]
    # Before the first round it is the mean of the clean clients' models of stage I, where training starts as well.
    reference = watched.tasks("LocalTraining")[0].broadcast["weights"].values
    seen = 0
    for dispatch in watched.log:
        if kind(dispatch.items[0]) == "LocalTraining" and clean[drawn[dispatch.round]]:
            reference = dispatch.updates[drawn[dispatch.round]].weights.values
        elif "reference_model" in dispatch.broadcast:
            np.testing.assert_array_equal(dispatch.broadcast["reference_model"].values, reference)
            seen += 1
    assert seen >= 2
    assert {bool(clean[k]) for k in drawn[:4]} == {True, False}


def test_label_logits_wait_for_their_clients_turn(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody is noisy but client 0; who does not take part enters the next of its rounds with what it had."""
    real = loss_detection.detect

    def detect(*arguments: Any) -> Any:
        return replace(real(*arguments), clean=np.arange(CLIENTS) == 0)

    monkeypatch.setattr(loss_detection, "detect", detect)
    watched = lab.dispatching(lab.executor)
    lab.run(config_of(lab, "fedelc"), executor=watched)
    held: dict[int, Any] = {}
    resumed = 0
    for dispatch in watched.log:
        for item, outcome in zip(dispatch.items, dispatch.outcomes, strict=True):
            if kind(item) == "LearnLabels":
                if item.client in held:
                    resumed += 1
                    np.testing.assert_array_equal(item.task.label_logits, held[item.client])
                held[item.client] = outcome.result.state
    assert resumed > 0


def test_rofl_asks_for_counts_once_whenever_a_client_first_takes_part(whole: Callable[..., Watch]) -> None:
    watch = whole("rofl")
    counts = watch.condition.federation.observed_counts()
    reported: list[int] = []
    for dispatch in watch.executor.tasks("RoFLTraining"):
        for client, update in dispatch.updates.items():
            assert (update.counts is None) == (client in reported)
            if update.counts is not None:
                reported.append(client)
                np.testing.assert_array_equal(update.counts, counts[client])
    assert len(reported) > CLIENTS * SHARE


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "rofl", "fedlsr", "fedelc", "fednoro", "fedsir", "oct_fedsir"])
def test_the_plan_knows_how_much_is_trained(whole: Callable[..., Watch], name: str) -> None:
    watch = whole(name)
    sizes = watch.condition.federation.sizes
    clean = 1.0 if watch.result.predicted_noisy is None else float(1.0 - np.mean(watch.result.predicted_noisy))
    cost = find_method(name).cost
    assert cost is not None
    scale = Scale(watch.config.training, CLIENTS, clean, float(sizes.mean()), POOL)
    expected = cost(watch.config.method, scale)
    assert expected.trained == pytest.approx(watch.result.totals["cost/client_epochs"] / CLIENTS)
