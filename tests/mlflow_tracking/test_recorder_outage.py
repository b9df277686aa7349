"""A store that is out of reach while runs are recorded: nothing is lost, and nothing comes twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import pytest

from fedsir.coordinator import INTERRUPTIONS
from fedsir.errors import RunFailed, StoreUnreachable
from fedsir.events import RoundFinished, RunFinished, RunStarted, RunStopped
from mlflow_tracking import outage
from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.describe import TAG_RESUMED
from mlflow_tracking.recorder import MlflowRecorder
from mlflow_tracking.states import record_failure, recorded_state
from mlflow_tracking.store import Store, prepare_store

CALLS = (
    *("search_runs", "create_run", "update_run", "get_run", "set_tag", "delete_tag", "log_batch", "log_inputs"),
    *("log_artifacts", "get_metric_history", "set_terminated"),
)
ROUNDS = 4
LONG_S = 60.0
SELDOM = 8
"""Once in so many calls; more than are made together, to look up points of six keys and then to send others."""

Kind = Literal["before", "after"]


class Line:
    """The line to the store. It fails at the calls of given numbers (from 0), before or after they had their effect.

    cut: at all calls. made: names of all calls so far.
    """

    def __init__(self) -> None:
        self.made = list[str]()
        self.at: Sequence[int] = ()
        self.kind: Kind = "before"
        self.cut = False

    def watch(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **named: Any) -> Any:
            number = len(self.made)
            self.made.append(name)
            fails = self.cut or number in self.at
            if fails and self.kind == "before":
                raise ConnectionRefusedError(111, "Connection refused")
            result = function(*args, **named)
            if fails:
                raise ConnectionResetError(104, "Connection reset by peer")
            return result

        return watched

    def fail(self, *at: int, kind: Kind = "before") -> None:
        self.made.clear()
        self.at, self.kind = at, kind


@pytest.fixture
def line(store: Store, monkeypatch: pytest.MonkeyPatch) -> Line:
    line = Line()
    for name in CALLS:
        monkeypatch.setattr(type(store.client), name, line.watch(name, getattr(type(store.client), name)))
    return line


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(outage, "LONGEST_PAUSE_S", 0.001)


@pytest.fixture
def book(store: Store) -> Store:
    """An experiment of its own in the session's store, and nothing known of its being out of reach."""
    return prepare_store(TrackingConfig(uri=store.uri, experiment=uuid4().hex))


@pytest.fixture
def settings() -> TrackingConfig:
    return TrackingConfig(figures=False, weights=False, flush_seconds=0.0, patience_s=LONG_S)


def rounds(synthetic: Any, *numbers: int) -> list[RoundFinished]:
    return [RoundFinished(synthetic.record(t), total_rounds=ROUNDS) for t in numbers]


def started(synthetic: Any, done: int = 0, like: RunStarted | None = None) -> RunStarted:
    """done: rounds that its checkpoint has. like: the same run."""
    config = synthetic.config(synthetic.plain(), training={"rounds": ROUNDS})
    history = tuple(synthetic.record(t) for t in range(1, done + 1))
    event: RunStarted = synthetic.started(config, None if like is None else like.run_id, history)
    return event


def finished(synthetic: Any, event: RunStarted) -> RunFinished:
    return RunFinished(synthetic.result(event, identifies=False, relabels=False))


def contents(store: Store) -> list[dict[str, Any]]:
    """Everything about the runs of an experiment that does not depend on when and as what they were recorded."""
    found = []
    for run in store.runs():
        folder = Path(run.info.artifact_uri.removeprefix("file://"))
        tags = {key: value for key, value in run.data.tags.items() if key not in ("fedsir.run_id", TAG_RESUMED)}
        files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        # Names the run.
        summary = files.pop("summary.json", None)
        found.append(
            {
                "status": run.info.status,
                "tags": tags,
                "params": run.data.params,
                "inputs": [(i.dataset.name, i.dataset.digest) for i in run.inputs.dataset_inputs],
                "metrics": {
                    key: [(p.step, p.value) for p in store.client.get_metric_history(run.info.run_id, key)]
                    for key in run.data.metrics
                },
                "files": files,
                "summed up": summary is not None,
            }
        )
    return found


def whole(book: Store, settings: TrackingConfig, synthetic: Any) -> None:
    """A run from its start to its end."""
    event = started(synthetic)
    recorder = MlflowRecorder(book, settings)
    for each in (event, *rounds(synthetic, *range(1, ROUNDS + 1)), finished(synthetic, event)):
        recorder.record(each)


def continued(book: Store, settings: TrackingConfig, synthetic: Any) -> None:
    """A run that failed after two rounds and is continued after three, of which the record lacks one."""
    event = started(synthetic)
    recorder = MlflowRecorder(book, settings)
    for each in (event, *rounds(synthetic, 1, 2), RunStopped(ValueError("client 3 broke"), killed=False)):
        recorder.record(each)
    again = started(synthetic, 3, event)
    recorder = MlflowRecorder(book, settings)
    for each in (again, *rounds(synthetic, 4), finished(synthetic, again)):
        recorder.record(each)


def anew(book: Store, settings: TrackingConfig, synthetic: Any) -> None:
    """A run that vanished and starts anew."""
    event = started(synthetic)
    MlflowRecorder(book, settings).record(event)
    recorder = MlflowRecorder(book, settings)
    for each in (event, *rounds(synthetic, *range(1, ROUNDS + 1)), finished(synthetic, event)):
        recorder.record(each)


@pytest.mark.parametrize(("play", "kind"), [(whole, "before"), (whole, "after"), (continued, "after"), (anew, "after")])
def test_whichever_call_fails_the_record_is_the_same(
    store: Store, settings: TrackingConfig, synthetic: Any, line: Line, play: Callable[..., None], kind: Kind
) -> None:
    """One call in eight fails, each of them in one of eight runs, also those that are made because others failed."""

    def recorded(*failing: int) -> list[dict[str, Any]]:
        book = prepare_store(TrackingConfig(uri=store.uri, experiment=uuid4().hex))
        line.fail(*failing, kind=kind)
        play(book, settings, synthetic)
        line.at = ()
        found = contents(book)
        for run in found:
            # Has the id of the successor.
            run["tags"].pop("fedsir.superseded_by", None)
        return found

    undisturbed = recorded()
    assert undisturbed[0]["status"] == "FINISHED"
    most = 3 * len(line.made)
    for first in range(SELDOM):
        assert recorded(*range(first, most, SELDOM)) == undisturbed


def test_rounds_do_not_wait(
    book: Store, settings: TrackingConfig, synthetic: Any, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "FIRST_PAUSE_S", LONG_S)
    monkeypatch.setattr(outage, "LONGEST_PAUSE_S", LONG_S)
    event, recorder = started(synthetic), MlflowRecorder(book, settings)
    others, other = started(synthetic), MlflowRecorder(book, settings)
    recorder.record(event)
    other.record(others)
    line.fail()
    line.cut = True
    for each in rounds(synthetic, 1, 2, 3):
        recorder.record(each)
        other.record(each)
    # The first round of the one has found out for both of them.
    assert line.made == ["log_batch"]
    line.cut = False
    book.reach.found()
    recorder.record(rounds(synthetic, 4)[0])
    recorder.record(finished(synthetic, event))
    (run,) = (run for run in book.runs() if run.data.tags["fedsir.run_id"] == event.run_id)
    points = book.client.get_metric_history(run.info.run_id, "test/accuracy")
    assert [point.step for point in points] == [1, 2, 3, 4]
    assert [point.timestamp for point in points] == sorted(point.timestamp for point in points)
    assert run.info.status == "FINISHED"


@pytest.mark.parametrize("lost", ["log_batch", "log_artifacts", "set_terminated"])
@pytest.mark.parametrize("kind", ["before", "after"])
def test_what_patience_does_not_suffice_for_is_delivered_later(
    book: Store, settings: TrackingConfig, synthetic: Any, line: Line, lost: str, kind: Kind
) -> None:
    """Also where the store has all of it, and only the answer to the last call was lost."""
    event, recorder = started(synthetic), MlflowRecorder(book, settings.model_copy(update={"patience_s": 0.0}))
    for each in (event, *rounds(synthetic, *range(1, ROUNDS + 1))):
        recorder.record(each)
    at = {"log_batch": 0, "log_artifacts": 1, "set_terminated": 2}[lost]
    line.fail(*range(at, 10), kind=kind)
    with pytest.raises(StoreUnreachable, match=r"unit-plain-s0.*the result could not be recorded.*Connection re"):
        recorder.record(finished(synthetic, event))
    assert line.made[at] == lost
    assert recorder.mlflow_run_id is None
    assert issubclass(StoreUnreachable, INTERRUPTIONS)
    line.fail()
    known = recorded_state(book, event.run_id)
    assert known is not None
    assert known.status == ("finished" if (lost, kind) == ("set_terminated", "after") else "interrupted")

    again = started(synthetic, ROUNDS, event)
    recorder = MlflowRecorder(book, settings)
    recorder.record(again)
    recorder.record(finished(synthetic, again))
    expected = prepare_store(TrackingConfig(uri=book.uri, experiment=uuid4().hex))
    whole(expected, settings, synthetic)
    assert contents(book) == contents(expected)


def test_a_start_that_cannot_be_recorded_leaves_the_run_to_be_continued(
    book: Store, settings: TrackingConfig, synthetic: Any, line: Line
) -> None:
    event, recorder = started(synthetic), MlflowRecorder(book, settings.model_copy(update={"patience_s": 0.05}))
    line.fail(*range(2, 10**4))
    begin = time.monotonic()
    with pytest.raises(StoreUnreachable, match="the start could not be recorded"):
        recorder.record(event)
    assert time.monotonic() - begin >= 0.05
    line.fail()
    assert [run.info.status for run in book.runs()] == ["RUNNING"]


def test_what_the_store_refuses_is_no_outage(book: Store, settings: TrackingConfig, synthetic: Any) -> None:
    event, recorder = started(synthetic), MlflowRecorder(book, settings)
    recorder.record(event)
    (run,) = book.runs()
    book.client.delete_run(run.info.run_id)
    with pytest.raises(RunFailed, match="round 1 could not be recorded") as caught:
        recorder.record(rounds(synthetic, 1)[0])
    assert not isinstance(caught.value, StoreUnreachable)


def test_who_stops_a_run_during_an_outage_does_not_wait(
    book: Store, settings: TrackingConfig, synthetic: Any, line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    event, recorder = started(synthetic), MlflowRecorder(book, settings)
    recorder.record(event)
    line.fail()
    line.cut = True
    book.reach.lost(LONG_S)
    recorder.record(RunStopped(KeyboardInterrupt(), killed=True))
    assert line.made == []
    assert "are missing in sqlite:///" in caplog.text
    line.cut = False
    book.reach.found()
    again = started(synthetic, 2, event)
    recorder.record(again)
    recorder.record(RunStopped(KeyboardInterrupt(), killed=True))
    assert [run.info.status for run in book.runs()] == ["KILLED"]


def test_a_failure_is_marked_as_far_as_the_store_allows(
    book: Store, settings: TrackingConfig, synthetic: Any, line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    event, recorder = started(synthetic), MlflowRecorder(book, settings)
    recorder.record(event)
    line.cut = True
    recorder.record(RunStopped(ValueError("client 3 broke"), killed=False))
    line.cut = False
    assert "stays without an end in sqlite:///" in caplog.text
    # No use in showing from where an outage came.
    assert not any(record.exc_info for record in caplog.records)
    record_failure(book, event.config, event.run_id, ValueError("client 3 broke"))
    assert [run.info.status for run in book.runs()] == ["FAILED"]


@pytest.mark.parametrize("kind", ["before", "after"])
def test_a_failure_that_is_noted_again_is_noted_once(book: Store, synthetic: Any, line: Line, kind: Kind) -> None:
    for at in range(3):
        event = started(synthetic)
        line.fail(at, kind=kind)
        for _ in range(2):
            try:
                record_failure(book, event.config, event.run_id, ValueError("client 3 broke"))
            except OSError:
                continue
            break
        line.fail()
        found = book.runs(f"tags.`fedsir.run_id` = '{event.run_id}'")
        assert [run.info.status for run in found] == ["FAILED"]


def test_a_sweep_that_stops_ends_the_waiting(book: Store, settings: TrackingConfig, synthetic: Any, line: Line) -> None:
    stopping = threading.Event()
    event, recorder = started(synthetic), MlflowRecorder(book, settings, stopping=stopping)
    recorder.record(event)
    line.cut = True
    timer = threading.Timer(0.1, stopping.set)
    timer.start()
    with pytest.raises(StoreUnreachable, match="when the run was stopped"):
        recorder.record(finished(synthetic, event))
    timer.join()
