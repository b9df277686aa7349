"""Which runs a store knows as finished, failed or interrupted."""

from __future__ import annotations

from collections.abc import Callable
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
        recorder = MlflowRecorder(book)
        recorder.record(started)
        recorder.record(RoundFinished(RoundRecord(1, {}), total_rounds=2))
        if ending == "finished":
            recorder.record(RunFinished(synthetic.result(started)))
        elif ending != "running":
            recorder.record(RunStopped(ValueError("client 3 broke"), killed=ending == "killed"))
        return str(started.run_id)

    return run


def test_states(book: Store, record: Callable[..., str]) -> None:
    identities = {ending: record(ending) for ending in ("finished", "failed", "killed", "running")}
    unknown = uuid4().hex[:16]
    states = recorded_states(book, [*identities.values(), unknown])
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


def test_only_what_is_asked_for(book: Store, record: Callable[..., str]) -> None:
    first, _ = record("finished"), record("finished")
    assert set(recorded_states(book, [first])) == {first}


def test_a_finished_run_counts_whatever_came_after_it(book: Store, record: Callable[..., str]) -> None:
    identity = record("finished")
    record("failed", identity)
    assert recorded_states(book, [identity])[identity].status == "finished"


def test_of_unfinished_runs_the_latest_counts(book: Store, record: Callable[..., str]) -> None:
    identity = record("failed")
    record("killed", identity)
    assert recorded_states(book, [identity])[identity].status == "interrupted"


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
