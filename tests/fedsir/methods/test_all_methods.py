"""What holds for every method, so also for one that is added later: hostile federations, the same bits wherever and
in however many pieces a run goes, no look at the truth, and the same start and budget for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsir import checkpoint
from fedsir.federation.federation import Truth
from fedsir.methods.registry import BUILT_IN, find_method
from fedsir.models.flat import FlatWeights

ROUNDS = 6
FEW_ROUNDS = 4
POOL = 16
STAGE_ONE = {"stage_one": {"epochs": 1}}
# What brings every stage of a method into so few rounds of so small a model; other methods run as they are.
SETTINGS: dict[str, dict[str, Any]] = {
    "fedcorr": {
        "stages": {"preprocessing": 0.35, "finetuning": 0.35, "usual": 0.3},
        "relabel_ratio": 1.0,
        "tau": 0.3,
    },
    "fedned": {"lambda_rel": 1.0, "pl_threshold": 0.3, "nd": {"enabled": True, "steps": 2}},
    "fedsir": {**STAGE_ONE, "relabeling": {"every": 2}},
    "spectral_pruning": STAGE_ONE,
    "oct_fedsir": {**STAGE_ONE, "relabeling": {"every": 2}},
}
# Kinds of work that show that every stage came.
STAGES = {
    "rhfl": {"Report", "PrivateTraining"},
    "fedcorr": {"TrainAndMeasure", "CorrectNoisiest", "MixupTraining", "CorrectAll"},
    "fedned": {"LocalTraining", "PoolUncertainty", "TrainTwice", "DistilNegatively"},
    "fedelc": {"LocalTraining", "ClassLosses", "LearnLabels"},
    "fednoro": {"LocalTraining", "ClassLosses"},
    "fedsir": {"StageOne", "LocalTraining", "ProvideSpectra", "FormReference", "Relabel"},
    "spectral_pruning": {"StageOne", "LocalTraining"},
    "oct_fedsir": {"StageOne", "LocalTraining", "ProvideSpectra", "FormReference", "Relabel"},
}
EVALUATION = {"PredictTest", "PredictTestPrivately"}


def settings_of(name: str) -> dict[str, Any]:
    return {"name": name, **SETTINGS.get(name, {})}


@dataclass
class Watch:
    """One whole run: its result, what went to the clients, and what was recorded."""

    config: Any
    condition: Any
    result: Any
    executor: Any
    recorder: Any

    @property
    def dispatches(self) -> list[Any]:
        """Everything but evaluations."""
        return [d for d in self.executor.log if kind(d.items[0]) not in EVALUATION]


def kind(item: Any) -> str:
    return type(item.task).__name__


def common_config(lab: Any, name: str) -> Any:
    return lab.config(settings_of(name), training={"rounds": ROUNDS}, federation={"public_pool": POOL})


@pytest.fixture(scope="module")
def whole(lab: Any) -> Callable[[str], Watch]:
    """The uninterrupted run of a method in this process, made when first asked for."""
    runs: dict[str, Watch] = {}

    def run(name: str) -> Watch:
        if name not in runs:
            config = common_config(lab, name)
            condition = lab.condition(config)
            executor, recorder = lab.dispatching(lab.executor), lab.collector()
            result = lab.run(config, condition=condition, executor=executor, recorder=recorder)
            runs[name] = Watch(config, condition, result, executor, recorder)
        return runs[name]

    return run


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_run_that_the_others_are_held_against_has_every_stage(whole: Any, name: str) -> None:
    kinds = {kind(item) for dispatch in whole(name).dispatches for item in dispatch.items}
    assert kinds
    assert kinds == STAGES.get(name, kinds)


# -- hostile federations -------------------------------------------------------------------------------------------


def dealt(lab: Any, config: Any, parts: list[Any], noisy: int) -> Any:
    """The images dealt by hand; the labels of client `noisy` are wrong throughout, the first images are the pool."""
    classes = lab.dataset(config).num_classes
    labels = lab.dataset(config).train.labels
    observed = [labels[p].astype(np.int64) for p in parts]
    observed[noisy] = (observed[noisy] + 1) % classes
    condition = lab.federation_of(config, parts, observed, [k == noisy for k in range(len(parts))])
    return replace(condition, federation=replace(condition.federation, public_pool=np.arange(POOL, dtype=np.int64)))


def single_class(lab: Any, config: Any) -> Any:
    """A clean and a noisy client that have seen one class only, beside two with all classes."""
    labels = lab.dataset(config).train.labels
    of_class = [POOL + np.flatnonzero(labels[POOL:] == c) for c in range(2)]
    alone = [members[:20] for members in of_class]
    rest = np.setdiff1d(np.arange(POOL, len(labels)), np.concatenate(alone))
    return dealt(lab, config, [alone[0], alone[1], rest[::2], rest[1::2]], noisy=1)


def small_clients(lab: Any, config: Any) -> Any:
    """One image; fewer than a batch; one more than a batch, all of them wrong; everything else."""
    positions = np.random.default_rng(0).permutation(np.arange(POOL, len(lab.dataset(config).train.labels)))
    return dealt(lab, config, [np.sort(p) for p in np.split(positions, [1, 4, 21])], noisy=2)


# Changes of the configuration, and how the images are dealt where the configuration cannot say it.
NASTY: dict[str, tuple[dict[str, Any], Callable[[Any, Any], Any] | None]] = {
    "single_class": ({}, single_class),
    "small_clients": ({}, small_clients),
    "one_clean_of_five": (
        {"federation": {"clients": 5, "clean_clients": 1, "clean_selection": "random"}},
        None,
    ),
    "all_clean": ({"federation": {"noise": {"type": "none"}}}, None),
    "all_noisy": ({"federation": {"clean_clients": 0}}, None),
    "two_classes": ({"data": {"cohort": "wake_forest"}}, None),
}


@dataclass
class CheckpointReader:
    """A recorder that takes the last round's state from the checkpoint and writes it out once more."""

    file: Path
    config: Any
    condition: Any
    state: Any = None

    def record(self, event: Any) -> None:
        if type(event).__name__ != "RoundFinished" or event.record.round < event.total_rounds:
            return
        state_type = find_method(self.config.method.name).build(self.config.method).state_type
        owner = checkpoint.Owner(f"{self.config.identity()}-{self.condition.dataset.digest[:16]}", {})
        self.state = checkpoint.load(self.file, owner, {"state": state_type})["state"]
        again = self.file.with_suffix(".again")
        checkpoint.save(again, owner, {"state": self.state})
        twice = checkpoint.load(again, owner, {"state": state_type})["state"]
        assert type(self.state) is state_type
        arrays: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        assert checkpoint.encode(self.state, arrays[0]) == checkpoint.encode(twice, arrays[1])
        for path, array in arrays[0].items():
            assert array.dtype == arrays[1][path].dtype
            np.testing.assert_array_equal(array, arrays[1][path], err_msg=path)


def survives(lab: Any, method: Any, federation: str, folder: Path) -> None:
    """A few rounds of the method: finite weights and figures, and a state that the checkpoint gives back."""
    changes, deal = NASTY[federation]
    held = {"public_pool": POOL, **changes.get("federation", {})}
    config = lab.config(method, training={"rounds": FEW_ROUNDS}, **{**changes, "federation": held})
    condition = lab.condition(config) if deal is None else deal(lab, config)
    recorder, reader = lab.collector(), CheckpointReader(folder / "run.safetensors", config, condition)

    class Both:
        def record(self, event: Any) -> None:
            recorder.record(event)
            reader.record(event)

    result = lab.run(config, condition=condition, recorder=Both(), checkpoint=reader.file)

    models = [v for f in fields(reader.state) for v in weights_in(getattr(reader.state, f.name))]
    assert models
    for model in models:
        assert np.isfinite(model.values).all()
    if result.weights is not None:
        np.testing.assert_array_equal(reader.state.weights.values, result.weights.values)
    assert len(recorder.rounds) == FEW_ROUNDS
    for record in recorder.rounds:
        for key, value in record.metrics.items():
            # Shares of nothing are undefined; everything else is a number.
            assert np.isfinite(value) or (key.startswith(("ident/", "relabel/")) and np.isnan(value)), key
    assert {"test/accuracy", "train/loss"} <= recorder.rounds[-1].metrics.keys()
    if result.labels is not None:
        classes = condition.federation.num_classes
        for now, given in zip(result.labels, condition.federation.observed, strict=True):
            assert now.shape == given.shape
            assert now.min() >= 0
            assert now.max() < classes
    if result.identification is not None:
        assert result.identification.clean.any()


@pytest.mark.parametrize("federation", NASTY)
@pytest.mark.parametrize("name", BUILT_IN)
def test_it_survives(lab: Any, tmp_path: Path, name: str, federation: str) -> None:
    survives(lab, settings_of(name), federation, tmp_path)


VARIANTS = [f"{name}/{preset}" for name in BUILT_IN for preset in find_method(name).presets]


@pytest.mark.slow
@pytest.mark.parametrize("federation", NASTY)
@pytest.mark.parametrize("variant", VARIANTS)
def test_its_variants_survive(lab: Any, tmp_path: Path, variant: str, federation: str) -> None:
    survives(lab, {**settings_of(variant.partition("/")[0]), "name": variant}, federation, tmp_path)


# -- the same bits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("actors", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", BUILT_IN)
def test_the_same_bits_wherever_clients_run(lab: Any, whole: Any, lane_of: Any, name: str, actors: int) -> None:
    alone = whole(name)
    found = lab.run(alone.config, condition=alone.condition, executor=lane_of(actors))
    assert lab.essence(found) == lab.essence(alone.result)


class Kill(KeyboardInterrupt):
    """Stops a run from inside."""


@pytest.mark.parametrize("name", BUILT_IN)
def test_killed_after_every_round_and_within_one_it_ends_with_the_same_bits(
    lab: Any, whole: Any, tmp_path: Path, name: str
) -> None:
    """After every round, so at the boundaries of all stages and inside them; and within the round of most work."""
    alone, file = whole(name), tmp_path / "run.safetensors"
    numbers = [d.round for d in alone.dispatches if d.round < ROUNDS]
    busiest = max(range(ROUNDS), key=lambda t: (numbers.count(t), t))
    seen = 0

    def kill_before_the_last_work_of_the_busiest_round(items: list[Any]) -> None:
        nonlocal seen
        if items[0].round == busiest and kind(items[0]) not in EVALUATION:
            seen += 1
            if seen == numbers.count(busiest):
                raise Kill

    executor = lab.dispatching(lab.executor, before=kill_before_the_last_work_of_the_busiest_round)
    killed = 0
    for at in range(1, ROUNDS + 1):
        for stopper in (lab.interrupter(at=at), lab.interrupter(at=at)):
            try:
                lab.run(alone.config, condition=alone.condition, executor=executor, recorder=stopper, checkpoint=file)
            except Kill:
                killed += 1
            except KeyboardInterrupt:
                break
    recorder = lab.collector()
    result = lab.run(alone.config, condition=alone.condition, recorder=recorder, checkpoint=file)
    assert killed == 1
    assert len(recorder.started.history) == ROUNDS
    assert lab.essence(result) == lab.essence(alone.result)
    assert result.final["test/loss"] == alone.result.final["test/loss"]


# -- what a result may depend on -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILT_IN)
def test_true_labels_and_test_images_change_no_weight(lab: Any, whole: Any, name: str) -> None:
    """Everything that a method may not see is scrambled at once."""
    alone, rng = whole(name), np.random.default_rng(7)
    condition, data = alone.condition, alone.condition.dataset
    train = replace(data.train, labels=np.zeros_like(data.train.labels))
    test = replace(
        data.test,
        labels=(data.test.labels + 1) % data.num_classes,
        images=rng.integers(0, 256, data.test.images.shape, dtype=np.uint8),
    )
    truth = Truth(
        labels=tuple(rng.integers(0, data.num_classes, len(y)) for y in condition.truth.labels),
        noisy=~condition.truth.noisy,
    )
    scrambled = replace(condition, dataset=replace(data, train=train, test=test), truth=truth)
    result = lab.run(alone.config, condition=scrambled)
    seen = ("weights", "labels", "clean", "similarity", "p_clean")
    found, expected = lab.essence(result), lab.essence(alone.result)
    assert {k: found[k] for k in seen} == {k: expected[k] for k in seen}
    assert found["confusion"] != expected["confusion"]


# -- the same start and budget -------------------------------------------------------------------------------------


def test_methods_of_a_condition_share_everything_but_the_method(lab: Any) -> None:
    conditions = [lab.condition(common_config(lab, name)) for name in BUILT_IN]
    first = conditions[0]
    assert len(first.federation.public_pool) == POOL
    for other in conditions[1:]:
        np.testing.assert_array_equal(other.initial_weights.values, first.initial_weights.values)
        np.testing.assert_array_equal(other.federation.public_pool, first.federation.public_pool)
        for part in ("indices", "observed"):
            for a, b in zip(getattr(other.federation, part), getattr(first.federation, part), strict=True):
                np.testing.assert_array_equal(a, b)
    assert len({common_config(lab, name).condition_identity() for name in BUILT_IN}) == 1


@pytest.mark.parametrize("name", BUILT_IN)
def test_it_starts_from_the_shared_weights_and_the_observed_labels(whole: Any, name: str) -> None:
    alone = whole(name)
    first = alone.dispatches[0]
    assert [item.client for item in first.items] == list(range(alone.condition.federation.num_clients))
    for item in first.items:
        models = [*weights_in(first.broadcast), *weights_in(item.task)]
        assert models
        for model in models:
            np.testing.assert_array_equal(model.values, alone.condition.initial_weights.values)
        given = alone.condition.federation.observed[item.client]
        labels = [a for a in arrays_in(item.task) if a.dtype == np.int64 and a.shape == given.shape]
        assert labels
        for found in labels:
            np.testing.assert_array_equal(found, given)


@pytest.mark.parametrize("name", BUILT_IN)
def test_it_keeps_to_the_budget(lab: Any, whole: Any, name: str) -> None:
    """One epoch of training per client and round; stage I and the second model of FedNed's noisy clients come on top.

    Forward passes and work on public images have no budget and are counted apart.
    """
    alone = whole(name)
    epochs, clients = alone.config.training.local_epochs, lab.clients
    for t, record in enumerate(alone.recorder.rounds):
        again = sum(kind(i) == "TrainTwice" for d in alone.dispatches if d.round == t for i in d.items)
        stage_one = SETTINGS[name]["stage_one"]["epochs"] if t == 0 and "StageOne" in STAGES.get(name, ()) else 0
        spent = record.metrics["cost/client_epochs"]
        assert 0 < spent <= epochs * (clients + again) + stage_one * clients + 1e-9


def test_what_comes_on_top_is_counted(lab: Any, whole: Any) -> None:
    spent = {name: [r.metrics["cost/client_epochs"] for r in whole(name).recorder.rounds] for name in BUILT_IN}
    assert spent["fedavg"] == [lab.clients] * ROUNDS
    assert max(spent["fedned"]) > lab.clients
    assert spent["oct_fedsir"] == [2 * lab.clients, *[lab.clients] * (ROUNDS - 1)]
    assert spent["spectral_pruning"][-1] < lab.clients
    assert min(spent["fedcorr"]) < lab.clients


def values_in(value: Any) -> Iterator[Any]:
    """Everything inside dataclasses, mappings and sequences, the containers included."""
    yield value
    if is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, f.name) for f in fields(value)]
    elif isinstance(value, dict):
        inside = list(value.values())
    elif isinstance(value, (tuple, list)):
        inside = list(value)
    else:
        return
    for part in inside:
        yield from values_in(part)


def weights_in(value: Any) -> list[FlatWeights]:
    return [v for v in values_in(value) if isinstance(v, FlatWeights)]


def arrays_in(value: Any) -> list[Any]:
    return [v for v in values_in(value) if isinstance(v, np.ndarray)]
