"""One run from beginning to end: wherever it is placed, however often it is interrupted, whatever the truth is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fedsir
from fedsir import checkpoint, coordinator
from fedsir.clients.executor import WorkItem
from fedsir.clients.tasks import LocalTraining
from fedsir.data.transforms import normalize
from fedsir.errors import BadInput, RunFailed
from fedsir.events import FINAL_METRICS, ROUND_METRICS, Event, RoundFinished, RunFinished, RunStarted, RunStopped
from fedsir.federation.federation import Truth
from fedsir.methods.fedavg import FedAvg
from fedsir.methods.stage_one import STAGE_ONE_ROUND
from fedsir.models.binding import FlatBinding
from fedsir.models.network import initial_network
from fedsir.seeding import Stream, generator

METHODS = ("fedavg", "oct_fedsir")


@pytest.fixture(scope="module")
def whole(lab: Any) -> dict[str, tuple[Any, Any]]:
    """Result and recorder of the uninterrupted in-process run of each method."""
    runs = {}
    for method in METHODS:
        recorder = lab.collector()
        runs[method] = lab.run(lab.config(method), recorder=recorder), recorder
    return runs


def without_seconds(metrics: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if not k.startswith("seconds/")}


def histories_match(found: Any, expected: Any) -> bool:
    return [r.round for r in found] == [r.round for r in expected] and all(
        without_seconds(a.metrics) == pytest.approx(without_seconds(b.metrics), rel=0, abs=0, nan_ok=True)
        and a.notes == b.notes
        for a, b in zip(found, expected, strict=True)
    )


def test_the_tiny_run_exercises_identification_and_relabelling(lab: Any, whole: Any) -> None:
    result, _ = whole["oct_fedsir"]
    clean = result.identification.clean
    assert clean.any()
    assert not clean.all()
    changed = [
        int(np.count_nonzero(now != given))
        for now, given in zip(result.labels, lab.condition(lab.config()).federation.observed, strict=True)
    ]
    assert sum(changed) > 0
    assert all(n == 0 for n, trusted in zip(changed, clean, strict=True) if trusted)


@pytest.mark.parametrize("actors", [1, 2, "per-client"])
@pytest.mark.parametrize("method", METHODS)
def test_the_same_bits_wherever_clients_run(
    lab: Any, whole: Any, lane_of: Callable[..., Any], method: str, actors: int | str
) -> None:
    recorder = lab.collector()
    # Another number of actors must not be a reason to start over, either.
    config = lab.config(method, execution={"actors": actors})
    result = lab.run(config, executor=lane_of(actors), recorder=recorder)
    expected, alone = whole[method]
    assert lab.essence(result) == lab.essence(expected)
    assert histories_match(recorder.rounds, alone.rounds)


def test_a_run_can_be_repeated(lab: Any, whole: Any) -> None:
    for method in METHODS:
        assert lab.essence(lab.run(lab.config(method))) == lab.essence(whole[method][0])


def test_another_seed_is_another_run(lab: Any, whole: Any) -> None:
    assert lab.run(lab.config(seed=1)).weights_hash != whole["fedavg"][0].weights_hash


def test_events_come_in_order_and_name_only_documented_figures(lab: Any, whole: Any) -> None:
    for method in METHODS:
        result, recorder = whole[method]
        assert [type(e) for e in recorder.events] == [RunStarted, *[RoundFinished] * 3, RunFinished]
        assert recorder.started.history == ()
        assert recorder.started.run_id == lab.config(method).identity()
        for record in recorder.rounds:
            assert set(record.metrics) <= set(ROUND_METRICS)
        assert {*FINAL_METRICS} - {"final/client_accuracy_sd"} <= {*result.final}
        assert result.final["test/accuracy"] == recorder.rounds[-1].metrics["test/accuracy"]
        assert (
            result.final["final/accuracy_low"] <= result.final["final/accuracy"] <= result.final["final/accuracy_high"]
        )
        assert result.confusion.sum() == 60


def test_traffic_is_the_weights_once_up_and_down_per_client(lab: Any, whole: Any) -> None:
    result, recorder = whole["fedavg"]
    one_way = lab.clients * result.weights.nbytes
    for record in recorder.rounds:
        assert record.metrics["bytes/up"] == one_way
        assert record.metrics["bytes/down"] == one_way
    # Stage I sends the weights once more, and a similarity per pair of classes back.
    first = whole["oct_fedsir"][1].rounds[0].metrics
    assert first["bytes/down"] == 2 * one_way
    assert first["bytes/up"] == 2 * one_way + lab.clients * 16 * 8


# -- interrupted and continued ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupted_run_continues_to_the_same_bits(
    lab: Any, whole: Any, tmp_path: Path, method: str, at: int
) -> None:
    """After round 1 the next thing to happen is relabelling; after round 3 only the end is left to record."""
    config, file = lab.config(method), tmp_path / "run.safetensors"
    first = lab.interrupter(at=at)
    with pytest.raises(KeyboardInterrupt):
        lab.run(config, recorder=first, checkpoint=file)
    assert file.exists()
    assert first.stopped is not None
    assert first.stopped.killed

    second = lab.collector()
    result = lab.run(config, recorder=second, checkpoint=file)
    expected, alone = whole[method]
    assert lab.essence(result) == lab.essence(expected)
    assert [r.round for r in second.started.history] == list(range(1, at + 1))
    assert [r.round for r in second.rounds] == list(range(at + 1, 4))
    assert histories_match([*second.started.history, *second.rounds], alone.rounds)
    assert not file.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_run_stopped_mid_stage_keeps_its_labels(lab: Any, tmp_path: Path) -> None:
    """Interrupted two rounds after a checkpoint of the labels and one before the next."""
    method = lab.oct(relabeling={"every": 4, "first": 1})
    config = lab.config(method, training={"rounds": 6})
    file = tmp_path / "run.safetensors"
    expected = lab.run(config)
    with pytest.raises(KeyboardInterrupt):
        lab.run(config, recorder=lab.interrupter(at=3), checkpoint=file)
    watched = lab.dispatching(lab.executor)
    assert lab.essence(lab.run(config, executor=watched, checkpoint=file)) == lab.essence(expected)
    relabelled = [round_ for round_, tasks in watched.dispatched if "Relabel" in tasks]
    assert relabelled == [5]


def test_a_run_stopped_right_after_stage_one_does_not_repeat_it(lab: Any, tmp_path: Path) -> None:
    # Three clients more than there are for a mixture, so that stage I has something to say.
    config = lab.config(lab.oct(identification={"mixture_min_clients": 7}))
    file, alone = tmp_path / "run.safetensors", lab.collector()
    expected = lab.run(config, recorder=alone)
    assert any("too few for a mixture" in note for note in alone.rounds[0].notes)

    def stop_before_the_first_round(items: list[WorkItem]) -> None:
        if items[0].round == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lab.run(config, executor=lab.dispatching(lab.executor, before=stop_before_the_first_round), checkpoint=file)
    watched, recorder = lab.dispatching(lab.executor), lab.collector()
    result = lab.run(config, executor=watched, recorder=recorder, checkpoint=file)
    assert lab.essence(result) == lab.essence(expected)
    assert recorder.started.history == ()
    assert STAGE_ONE_ROUND not in [round_ for round_, _ in watched.dispatched]
    # What stage I cost and what it had to say belongs to the first round, although another process did it.
    assert histories_match(recorder.rounds, alone.rounds)


def test_interrupted_after_every_round(lab: Any, whole: Any, tmp_path: Path) -> None:
    config, file = lab.config("oct_fedsir"), tmp_path / "run.safetensors"
    for at in (1, 2, 3):
        with pytest.raises(KeyboardInterrupt):
            lab.run(config, recorder=lab.interrupter(at=at), checkpoint=file)
    recorder = lab.collector()
    result = lab.run(config, recorder=recorder, checkpoint=file)
    assert lab.essence(result) == lab.essence(whole["oct_fedsir"][0])
    assert [r.round for r in recorder.started.history] == [1, 2, 3]
    assert recorder.rounds == []
    assert result.final["test/loss"] == whole["oct_fedsir"][0].final["test/loss"]


KILLED = """
import sys, time
from pathlib import Path
from fedsir import coordinator
from fedsir.clients.executor import InProcessExecutor
from fedsir.condition import build_condition
from fedsir.config.run import RunConfig
from fedsir.data.load import load_dataset
from fedsir.events import RoundFinished

class Halt:
    def record(self, event):
        if isinstance(event, RoundFinished) and event.record.round == 2:
            Path(sys.argv[3]).touch()
            time.sleep(300)

config = RunConfig.model_validate_json(Path(sys.argv[1]).read_text())
condition = build_condition(config, load_dataset(config.data))
coordinator.run(config, condition, InProcessExecutor(), [Halt()], Path(sys.argv[2]), "cpu")
"""


def test_a_killed_process_loses_one_round_at_most(lab: Any, whole: Any, tmp_path: Path) -> None:
    config = lab.config("oct_fedsir")
    described, file, reached = tmp_path / "run.json", tmp_path / "kept" / "run.safetensors", tmp_path / "reached"
    described.write_text(config.model_dump_json())
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(described), str(file), str(reached)],
        env={**os.environ, "PYTHONPATH": str(Path(fedsir.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not reached.exists():
        if process.poll() is not None:
            pytest.fail(f"the process ended by itself: {process.communicate()[1]}")
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL

    recorder = lab.collector()
    result = lab.run(config, recorder=recorder, checkpoint=file)
    assert lab.essence(result) == lab.essence(whole["oct_fedsir"][0])
    assert [r.round for r in recorder.started.history] == [1, 2]
    assert [r.round for r in recorder.rounds] == [3]


@pytest.mark.parametrize("method", METHODS)
def test_a_run_stopped_at_a_round_whose_successor_is_under_way_continues(
    lab: Any, whole: Any, lane_of: Callable[..., Any], tmp_path: Path, method: str
) -> None:
    config, file = lab.config(method, execution={"actors": 2}), tmp_path / "run.safetensors"
    with pytest.raises(KeyboardInterrupt):
        lab.run(config, executor=lane_of(2), recorder=lab.interrupter(at=1), checkpoint=file)
    recorder = lab.collector()
    result = lab.run(config, executor=lane_of(2), recorder=recorder, checkpoint=file)
    assert lab.essence(result) == lab.essence(whole[method][0])
    assert [r.round for r in recorder.started.history] == [1]
    assert histories_match(recorder.rounds, whole[method][1].rounds[1:])


def test_actors_train_while_the_round_before_ends(lab: Any, lane_of: Callable[..., Any]) -> None:
    begun = threading.Event()

    def seen(items: list[WorkItem]) -> None:
        if isinstance(items[0].task, LocalTraining) and items[0].round == 1:
            begun.set()

    class Patient(lab.collector):  # type: ignore[misc, name-defined]
        def record(self, event: Event) -> None:
            super().record(event)
            if isinstance(event, RoundFinished) and event.record.round == 1:
                assert begun.wait(60)

    recorder = Patient()
    lab.run(lab.config(), executor=lab.dispatching(lane_of(2), before=seen), recorder=recorder)
    assert [r.round for r in recorder.rounds] == [1, 2, 3]


def test_a_checkpoint_of_another_run_is_refused_before_any_work(lab: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    with pytest.raises(KeyboardInterrupt):
        lab.run(lab.config(), recorder=lab.interrupter(at=1), checkpoint=file)
    content = file.read_bytes()
    for other, difference in (
        (lab.config(seed=1), r"seed 0 there, 1 here"),
        (lab.config("oct_fedsir"), r'method.name "fedavg" there, "oct_fedsir" here'),
        (lab.config(training={"batch_size": 8}), r"Different: training.batch_size 16 there, 8 here\."),
    ):
        recorder, watched = lab.collector(), lab.dispatching(lab.executor)
        with pytest.raises(BadInput, match=rf"belongs to run .*\n.*{difference}.*\nRemove"):
            lab.run(other, executor=watched, recorder=recorder, checkpoint=file)
        assert recorder.events == []
        assert watched.dispatched == []
    assert file.read_bytes() == content


def test_a_checkpoint_of_other_images_is_refused(lab: Any, tmp_path: Path) -> None:
    """The configuration names a folder; what is in it may have changed meanwhile."""
    config, file = lab.config(), tmp_path / "run.safetensors"
    with pytest.raises(KeyboardInterrupt):
        lab.run(config, recorder=lab.interrupter(at=1), checkpoint=file)
    condition = lab.condition(config)
    changed = replace(condition, dataset=replace(condition.dataset, digest="0" * 64))
    with pytest.raises(BadInput, match=r'its images.*\nDifferent: images "[0-9a-f]{16}" there, "0{16}" here\.'):
        lab.run(config, condition=changed, checkpoint=file)


def test_damaged_checkpoints_are_refused(lab: Any, tmp_path: Path) -> None:
    config, file = lab.config(), tmp_path / "run.safetensors"
    with pytest.raises(KeyboardInterrupt):
        lab.run(config, recorder=lab.interrupter(at=1), checkpoint=file)
    for damaged in (file, checkpoint.previous(file)):
        damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(BadInput, match=r"is damaged(.|\n)*Remove"):
        lab.run(config, checkpoint=file)


@pytest.mark.parametrize("method", METHODS)
def test_a_damaged_checkpoint_gives_way_to_the_round_before(lab: Any, whole: Any, tmp_path: Path, method: str) -> None:
    config, file = lab.config(method), tmp_path / "run.safetensors"
    with pytest.raises(KeyboardInterrupt):
        lab.run(config, recorder=lab.interrupter(at=2), checkpoint=file)
    file.write_bytes(file.read_bytes()[:-100])
    recorder = lab.collector()
    result = lab.run(config, recorder=recorder, checkpoint=file)
    expected, alone = whole[method]
    assert lab.essence(result) == lab.essence(expected)
    assert [r.round for r in recorder.started.history] == [1]
    remark, *notes = recorder.rounds[0].notes
    assert "is damaged" in remark
    assert "continuing from the one before it" in remark
    assert notes == list(alone.rounds[1].notes)
    assert list(tmp_path.iterdir()) == []


# -- what a result may depend on -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_truth_is_out_of_reach(lab: Any, whole: Any, method: str) -> None:
    """Scrambled true labels and status of the clients change figures, and nothing else."""
    config = lab.config(method)
    condition = lab.condition(config)
    rng = np.random.default_rng(7)
    scrambled = Truth(
        labels=tuple(rng.integers(0, 4, len(y)) for y in condition.truth.labels), noisy=~condition.truth.noisy
    )
    recorder = lab.collector()
    result = lab.run(config, condition=replace(condition, truth=scrambled), recorder=recorder)
    expected, alone = whole[method]
    assert lab.essence(result) == lab.essence(expected)
    ours = ("test/", "train/", "bytes/")
    for found, wanted in zip(recorder.rounds, alone.rounds, strict=True):
        assert {k: v for k, v in found.metrics.items() if k.startswith(ours)} == {
            k: v for k, v in wanted.metrics.items() if k.startswith(ours)
        }
        assert found.notes == wanted.notes
    if method == "oct_fedsir":
        # The scrambling did reach the evaluator.
        assert result.identification_figures["accuracy"] != expected.identification_figures["accuracy"]


def test_training_labels_of_the_data_set_are_out_of_reach(lab: Any, whole: Any) -> None:
    """The data set itself holds true labels; once the federation is built nobody may look at them."""
    config = lab.config("oct_fedsir")
    condition = lab.condition(config)
    train = condition.dataset.train
    hidden = replace(train, labels=np.zeros_like(train.labels), patients=train.patients[::-1].copy())
    result = lab.run(config, condition=replace(condition, dataset=replace(condition.dataset, train=hidden)))
    assert lab.essence(result) == lab.essence(whole["oct_fedsir"][0])


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_noise_of_ratio_zero_is_no_noise(lab: Any, whole: Any, kind: str) -> None:
    none = lab.run(lab.config(federation={"noise": {"type": "none"}}))
    zero = lab.run(lab.config(federation={"noise": {"type": kind, "ratio": 0.0, "label_map": "kermany"}}))
    assert zero.weights_hash == none.weights_hash
    assert zero.confusion.tolist() == none.confusion.tolist()
    assert none.weights_hash != whole["fedavg"][0].weights_hash


@pytest.mark.parametrize("weight_decay", [0.0, 5e-2])
def test_one_client_is_centralised_training(lab: Any, weight_decay: float) -> None:
    """Bit for bit a plain PyTorch loop over all images, with the documented streams for order and flips."""
    config = lab.config(
        seed=3,
        federation={"clients": 1, "clean_clients": 1, "public_pool": 0, "noise": {"type": "none"}},
        training={"rounds": 2, "local_epochs": 2, "optimizer": {"lr": 2e-3, "weight_decay": weight_decay}},
    )
    result = lab.run(config)
    dataset = lab.dataset(config)
    network = initial_network(config.model, dataset.num_classes, config.seed)
    # The last bits of some kernels depend on where tensors begin in memory and on the order of their axes.
    FlatBinding(network)
    layout = normalize(torch.from_numpy(np.array(dataset.train.images[:16])), config.data.transform)
    pixels = torch.from_numpy(np.array(dataset.train.images)).float() / 255
    labels = torch.from_numpy(dataset.train.labels.copy())
    network.train()
    for round_ in range(2):
        optimizer = torch.optim.Adam(network.parameters(), lr=2e-3, weight_decay=weight_decay, fused=True)
        rng = generator(3, Stream.BATCHES, 0, round_)
        draws = [(rng.permutation(160), rng.random(160) < 0.5) for _ in range(2)]
        for order, flips in draws:
            for start in range(0, 160, 16):
                chosen = order[start : start + 16]
                batch = torch.stack([pixels[i].flip(-1) if flips[i] else pixels[i] for i in chosen.tolist()])
                images = torch.empty_like(layout).copy_(((batch - 0.5) / 0.5).unsqueeze(1).repeat(1, 3, 1, 1))
                optimizer.zero_grad()
                F.cross_entropy(network(images), labels[chosen]).backward()
                optimizer.step()
    plain = network.state_dict()
    for name, value in result.schema.named(result.weights):
        np.testing.assert_array_equal(value, plain[name].numpy(), err_msg=name)
    network.eval()
    test = ((torch.from_numpy(np.array(dataset.test.images)).float() / 255 - 0.5) / 0.5).unsqueeze(1)
    with torch.no_grad():
        predicted = network(test.repeat(1, 3, 1, 1)).argmax(1).numpy()
    assert result.final["test/accuracy"] == pytest.approx(float(np.mean(predicted == dataset.test.labels)))


@pytest.mark.parametrize("actors", [None, 2])
def test_the_order_of_the_clients_changes_nothing(
    lab: Any, whole: Any, lane_of: Callable[..., Any], actors: int | None
) -> None:
    """Tasks in another order and with misleading costs; results belong to the clients they were asked for."""
    rng = np.random.default_rng(0)

    class Shuffled(lab.dispatching):  # type: ignore[misc, name-defined]
        def run(self, items: Any, broadcast: Any) -> Any:
            order = rng.permutation(len(items)).tolist()
            given = [replace(items[i], cost=int(rng.integers(100))) for i in order]
            outcomes = self.inner.run(given, broadcast)
            back = dict(zip(order, outcomes, strict=True))
            return [back[i] for i in range(len(items))]

    executor = Shuffled(lab.executor if actors is None else lane_of(actors))
    result = lab.run(lab.config("oct_fedsir"), executor=executor)
    assert lab.essence(result) == lab.essence(whole["oct_fedsir"][0])


def test_results_come_in_client_order_whatever_the_order_of_the_tasks(
    lab: Any, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Averages are summed in the order of the results."""
    original = FedAvg.round
    orders = []

    class Backwards:
        def __init__(self, server: Any) -> None:
            self.server = server

        def __getattr__(self, name: str) -> Any:
            return getattr(self.server, name)

        def fold_clients(self, tasks: Any, *arguments: Any) -> Any:
            kept = self.server.fold_clients(dict(reversed(tasks.items())), *arguments)
            orders.append(list(kept))
            return kept

    monkeypatch.setattr(FedAvg, "round", lambda self, server, *rest: original(self, Backwards(server), *rest))
    assert lab.run(lab.config()).weights_hash == whole["fedavg"][0].weights_hash
    assert orders == [[0, 1, 2, 3]] * 3


def test_clients_have_streams_of_their_own(lab: Any) -> None:
    """Two clients with the same images and labels are shuffled differently, and so end up differently."""
    config = lab.config(training={"rounds": 1})
    same = np.arange(0, 160, 3)
    condition = lab.federation_of(config, [same, same])
    seen: dict[int, Any] = {}

    class Watching(lab.dispatching):  # type: ignore[misc, name-defined]
        def run(self, items: Any, broadcast: Any) -> Any:
            outcomes = self.inner.run(items, broadcast)
            if hasattr(outcomes[0].result.update, "weights"):
                seen.update({i.client: o.result.update.weights.values for i, o in zip(items, outcomes, strict=True)})
            return outcomes

    lab.run(config, condition=condition, executor=Watching(lab.executor))
    assert not np.array_equal(seen[0], seen[1])


# -- failures --------------------------------------------------------------------------------------------------


def test_a_failing_recorder_stops_the_run_and_every_recorder_learns_of_it(lab: Any) -> None:
    class Broken(lab.interrupter):  # type: ignore[misc, name-defined]
        def record(self, event: Event) -> None:
            super().record(event)
            if isinstance(event, RunStopped):
                raise OSError("still no space left")

    broken, other = Broken(at=2, error=OSError("no space left")), lab.collector()
    config = lab.config()
    with pytest.raises(RunFailed, match="no space left") as caught:
        coordinator.run(config, lab.condition(config), lab.executor, [broken, other], None, "cpu")
    assert isinstance(caught.value.__cause__, OSError)
    assert "still" not in str(caught.value)
    assert other.stopped is not None
    assert not other.stopped.killed
    assert str(other.stopped.error) == "no space left"
    assert [r.round for r in other.rounds] == [1]


def test_a_failing_method_is_named(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("by hand")

    monkeypatch.setattr(FedAvg, "round", broken)
    recorder = lab.collector()
    with pytest.raises(RunFailed, match=r"fedavg, seed 0.*by hand"):
        lab.run(lab.config(), recorder=recorder)
    assert isinstance(recorder.stopped.error, ZeroDivisionError)
