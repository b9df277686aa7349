"""The MLflow run above the runs of a grid."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from fedsir.errors import BadInput
from fedsir.events import RoundFinished, RoundRecord, RunFinished, RunStopped
from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.explanation import find_run
from mlflow_tracking.recorder import MlflowRecorder
from mlflow_tracking.states import record_failure, recorded_states
from mlflow_tracking.store import Store, check_store, prepare_store
from mlflow_tracking.sweep_run import SweepFacts, begin_sweep_run, end_sweep_run, find_sweep_run


@pytest.fixture
def book(store: Store) -> Store:
    """An experiment of its own in the session's store."""
    return prepare_store(TrackingConfig(uri=store.uri, experiment=uuid4().hex))


@pytest.fixture
def sweep() -> SweepFacts:
    return SweepFacts('it\'s a "grid"', "name: grid\n", ("2 conditions", "images: phantom"), ("a1", "b2"))


@pytest.fixture
def record(book: Store, synthetic: Any) -> Callable[..., None]:
    def run(identity: str, parent: str | None, error: BaseException | None = None, killed: bool = False) -> None:
        started = synthetic.started(synthetic.config(), identity)
        recorder = MlflowRecorder(book, TrackingConfig(figures=False, weights=False), parent)
        recorder.record(started)
        recorder.record(RoundFinished(RoundRecord(1, {}), total_rounds=2))
        recorder.record(RunFinished(synthetic.result(started)) if error is None else RunStopped(error, killed=killed))

    return run


def test_one_per_grid_however_often_it_begins(book: Store, sweep: SweepFacts) -> None:
    assert find_sweep_run(book, sweep.grid) is None
    first = begin_sweep_run(book, sweep)
    assert begin_sweep_run(book, sweep) == find_sweep_run(book, sweep.grid) == first
    other = begin_sweep_run(book, replace(sweep, grid="other"))
    assert other != first
    assert find_sweep_run(book, sweep.grid) == first


def test_processes_that_begin_at_once_agree(book: Store, sweep: SweepFacts) -> None:
    """Each with a client and a lock of its own, as processes have."""
    stores = [prepare_store(TrackingConfig(uri=book.uri, experiment=book.experiment)) for _ in range(4)]
    ready, found = threading.Barrier(len(stores)), list[str]()

    def begin(store: Store) -> None:
        ready.wait()
        found.append(begin_sweep_run(store, sweep))

    threads = [threading.Thread(target=begin, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [find_sweep_run(book, sweep.grid)] * len(stores)
    (left,) = book.client.search_runs([book.experiment_id])
    assert left.info.run_id == found[0]


def test_on_a_server_the_eldest_stays(book: Store, sweep: SweepFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has begun to create one before, but it is seen only afterwards."""
    others = list[str]()

    def meanwhile(_: float) -> None:
        created = book.client.create_run(book.experiment_id, start_time=1, tags={"fedsir.grid": sweep.grid})
        others.append(created.info.run_id)

    monkeypatch.setattr("mlflow_tracking.sweep_run.time.sleep", meanwhile)
    assert begin_sweep_run(replace(book, uri="http://elsewhere:5000"), sweep) == others[0]
    (left,) = book.client.search_runs([book.experiment_id])
    assert left.info.run_id == others[0]


def test_what_it_says(book: Store, sweep: SweepFacts, record: Callable[..., None]) -> None:
    mlflow_id = begin_sweep_run(book, sweep)
    record("a1", mlflow_id)
    assert end_sweep_run(book, mlflow_id, sweep, stopped=False) == "KILLED"
    run = book.client.get_run(mlflow_id)
    assert run.info.run_name == f"sweep {sweep.grid}"
    assert {key: run.data.tags[f"fedsir.{key}"] for key in ("planned", "finished", "failed", "missing")} == {
        "planned": "2",
        "finished": "1",
        "failed": "0",
        "missing": "1",
    }
    note = run.data.tags["mlflow.note.content"]
    assert "2 runs planned, 1 finished, 0 failed, 1 missing" in note
    assert "- images: phantom" in note
    assert Path(book.client.download_artifacts(mlflow_id, "grid.yaml")).read_text() == sweep.text
    assert "final/accuracy" in book.client.get_experiment(book.experiment_id).tags["mlflow.note.content"]


@pytest.mark.parametrize(
    ("second", "stopped", "ending"),
    [
        ("finished", False, "FINISHED"),
        # Stopped after the last run had finished: nothing is missing.
        ("finished", True, "FINISHED"),
        ("failed", False, "FAILED"),
        ("failed", True, "KILLED"),
        ("killed", False, "KILLED"),
        ("missing", False, "KILLED"),
    ],
)
def test_how_it_ends(
    book: Store, sweep: SweepFacts, record: Callable[..., None], second: str, stopped: bool, ending: str
) -> None:
    mlflow_id = begin_sweep_run(book, sweep)
    assert book.client.get_run(mlflow_id).info.status == "RUNNING"
    record("a1", mlflow_id)
    if second != "missing":
        record("b2", mlflow_id, None if second == "finished" else ValueError("broken"), second == "killed")
    assert end_sweep_run(book, mlflow_id, sweep, stopped) == ending
    assert book.client.get_run(mlflow_id).info.status == ending
    begin_sweep_run(book, sweep)
    assert book.client.get_run(mlflow_id).info.status == "RUNNING"


def test_it_is_no_run_of_the_grid(book: Store, sweep: SweepFacts, record: Callable[..., None], synthetic: Any) -> None:
    config = TrackingConfig(uri=book.uri, experiment=book.experiment)
    mlflow_id = begin_sweep_run(book, sweep)
    assert (book.runs(), check_store(config).runs) == ([], 0)
    record("a1", mlflow_id)
    record_failure(book, synthetic.config(), "b2", ValueError("early"), mlflow_id)
    runs = book.runs()
    assert {run.data.tags["fedsir.run_id"] for run in runs} == {"a1", "b2"}
    assert {run.data.tags["mlflow.parentRunId"] for run in runs} == {mlflow_id}
    assert check_store(config).runs == 2
    for seen in (book, replace(book, uri="http://elsewhere:5000")):
        assert set(recorded_states(seen, ["a1", "b2", mlflow_id])) == {"a1", "b2"}
    assert find_run(book, "a1").identity == "a1"
    with pytest.raises(BadInput, match="no run"):
        find_run(book, mlflow_id)


def test_a_resumed_run_moves_to_the_sweep_that_resumes_it(book: Store, sweep: SweepFacts, synthetic: Any) -> None:
    started = synthetic.started(synthetic.config(), "a1")
    settings = TrackingConfig(figures=False, weights=False)
    recorder = MlflowRecorder(book, settings)
    recorder.record(started)
    recorder.record(RunStopped(KeyboardInterrupt(), killed=True))
    assert "mlflow.parentRunId" not in book.runs()[0].data.tags
    mlflow_id = begin_sweep_run(book, sweep)
    MlflowRecorder(book, settings, mlflow_id).record(replace(started, history=(synthetic.record(1),)))
    (run,) = book.runs()
    assert run.data.tags["mlflow.parentRunId"] == mlflow_id


def test_a_description_that_people_wrote_stays(book: Store, sweep: SweepFacts) -> None:
    book.client.set_experiment_tag(book.experiment_id, "mlflow.note.content", "ours")
    begin_sweep_run(book, sweep)
    assert book.client.get_experiment(book.experiment_id).tags["mlflow.note.content"] == "ours"


def test_it_adds_no_column(book: Store, sweep: SweepFacts) -> None:
    """A run without parameters and metrics adds no column to the store's table."""
    mlflow_id = begin_sweep_run(book, sweep)
    end_sweep_run(book, mlflow_id, sweep, stopped=True)
    run = book.client.get_run(mlflow_id)
    assert (run.data.params, run.data.metrics) == ({}, {})
