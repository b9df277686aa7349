"""Which runs a store knows as finished, failed or interrupted."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from fedsir.events import RoundFinished, RoundRecord, RunFinished, RunStopped
from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.describe import MAX_ERROR
from mlflow_tracking.recorder import MlflowRecorder
from mlflow_tracking.states import record_failure, recorded_state, recorded_states
from mlflow_tracking.store import Store, prepare_store


@pytest.fixture(scope="module")
def book(store: Store) -> Store:
    """An experiment of its own in the session's store."""
    return prepare_store(TrackingConfig(uri=store.uri, experiment="states"))


@pytest.fixture(scope="module")
def record(book: Store, synthetic: Any) -> Callable[..., str]:
    """Record a run that ends as named; its identity."""

    def run(ending: str, identity: str | None = None) -> str:
        started = synthetic.started(synthetic.config(), identity or uuid4().hex[:16])
        recorder = MlflowRecorder(book, TrackingConfig(figures=False))
        recorder.record(started)
        recorder.record(RoundFinished(RoundRecord(1, {}), total_rounds=2))
        if ending == "finished":
            recorder.record(RunFinished(synthetic.result(started)))
        elif ending != "running":
            recorder.record(RunStopped(ValueError("client 3 broke"), killed=ending == "killed"))
        return str(started.run_id)

    return run


@pytest.fixture(params=["tables", "search"])
def seen(book: Store, request: pytest.FixtureRequest) -> Store:
    """`book` as `recorded_states` reads a SQLite file, without MLflow, and as it reads a server."""
    return replace(book, client=None) if request.param == "tables" else replace(book, uri="http://elsewhere:5000")


def test_states(book: Store, seen: Store, record: Callable[..., str]) -> None:
    identities = {ending: record(ending) for ending in ("finished", "failed", "killed", "running")}
    unknown = uuid4().hex[:16]
    states = recorded_states(seen, [*identities.values(), unknown])
    assert {ending: states[identity].status for ending, identity in identities.items()} == {
        "finished": "finished",
        "failed": "failed",
        "killed": "interrupted",
        "running": "interrupted",
    }
    assert unknown not in states
    assert states[identities["failed"]].error == "ValueError: client 3 broke"
    assert states[identities["finished"]].accuracy is not None
    for identity, state in states.items():
        assert recorded_state(book, identity) == state
    assert recorded_state(book, unknown) is None


def test_only_what_is_asked_for(seen: Store, record: Callable[..., str]) -> None:
    first, _ = record("finished"), record("finished")
    assert set(recorded_states(seen, [first])) == {first}


def test_a_finished_run_counts_whatever_came_after_it(seen: Store, record: Callable[..., str]) -> None:
    identity = record("finished")
    record("failed", identity)
    assert recorded_states(seen, [identity])[identity].status == "finished"


def test_of_unfinished_runs_the_latest_counts(seen: Store, record: Callable[..., str]) -> None:
    identity = record("failed")
    record("killed", identity)
    assert recorded_states(seen, [identity])[identity].status == "interrupted"


def test_deleted_runs_other_experiments_and_runs_of_others_do_not_count(
    book: Store, seen: Store, record: Callable[..., str], synthetic: Any
) -> None:
    deleted = record("finished")
    (run,) = book.runs(f"tags.`fedsir.run_id` = '{deleted}'")
    book.client.delete_run(run.info.run_id)
    elsewhere = prepare_store(TrackingConfig(uri=book.uri, experiment="states of others"))
    started = synthetic.started()
    MlflowRecorder(elsewhere, TrackingConfig(figures=False)).record(started)
    book.client.create_run(book.experiment_id)
    assert recorded_states(seen, [deleted, started.run_id]) == {}
    assert set(recorded_states(elsewhere, [started.run_id])) == {started.run_id}


def test_tables_that_have_changed_are_left_to_mlflow(book: Store, record: Callable[..., str], tmp_path: Path) -> None:
    identity = record("finished")
    with sqlite3.connect(tmp_path / "other.db") as connection:
        connection.execute("CREATE TABLE runs (identity TEXT)")
    connection.close()
    for file in ("other.db", "missing.db"):
        known = recorded_states(replace(book, uri=f"sqlite:///{tmp_path / file}"), [identity])
        assert known == recorded_states(book, [identity])
        assert known[identity].status == "finished"
    assert not (tmp_path / "missing.db").exists()


def test_a_failure_before_the_start_is_recorded_once(book: Store, synthetic: Any) -> None:
    identity = uuid4().hex[:16]
    for text in ("first", "x" * 2 * MAX_ERROR):
        record_failure(book, synthetic.config(), identity, ValueError(text))
    (run,) = book.runs(f"tags.`fedsir.run_id` = '{identity}'")
    assert (run.info.status, run.info.run_name) == ("FAILED", "unit-spectral-s0")
    state = recorded_state(book, identity)
    assert state is not None
    assert state.error == f"ValueError: {'x' * 2 * MAX_ERROR}"[:MAX_ERROR]


def test_a_failure_is_noted_at_the_run_that_was_interrupted(book: Store, synthetic: Any, record: Any) -> None:
    identity = record("running")
    record_failure(book, synthetic.config(), identity, ValueError("no workers"))
    (run,) = book.runs(f"tags.`fedsir.run_id` = '{identity}'")
    assert (run.info.status, run.data.tags["fedsir.error"]) == ("FAILED", "ValueError: no workers")


def test_a_finished_run_is_never_marked_as_failed(book: Store, synthetic: Any, record: Any) -> None:
    identity = record("finished")
    record_failure(book, synthetic.config(), identity, ValueError("later"))
    state = recorded_state(book, identity)
    assert state is not None
    assert state.status == "finished"
