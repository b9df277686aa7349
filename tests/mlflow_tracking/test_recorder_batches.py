"""Rounds reach the store together, none of them is lost, and recording takes few calls."""

from __future__ import annotations

from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

from fedsir.errors import RunFailed
from fedsir.events import FINAL_METRICS, ROUND_METRICS, RoundFinished, RunFinished, RunStarted, RunStopped
from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.recorder import MlflowRecorder
from mlflow_tracking.store import Store

NEVER = 1e9


def settings(flush_seconds: float) -> TrackingConfig:
    return TrackingConfig(figures=False, weights=False, flush_seconds=flush_seconds)


def steps(store: Store, run_id: str, key: str = "train/loss") -> list[int]:
    """Rounds that the store has of the only run of this identity, in the order in which they were sent."""
    (run,) = store.runs(f"tags.`fedsir.run_id` = '{run_id}'")
    return [point.step for point in store.client.get_metric_history(run.info.run_id, key)]


def rounds(synthetic: Any, *numbers: int) -> list[RoundFinished]:
    return [RoundFinished(synthetic.record(t), total_rounds=9) for t in numbers]


def test_zero_sends_every_round_at_once(store: Store, synthetic: Any) -> None:
    started, recorder = synthetic.started(), MlflowRecorder(store, settings(0.0))
    recorder.record(started)
    for t, event in enumerate(rounds(synthetic, 1, 2, 3), start=1):
        recorder.record(event)
        assert steps(store, started.run_id) == list(range(1, t + 1))
    recorder.record(RunStopped(KeyboardInterrupt(), killed=True))


def test_rounds_wait_until_the_time_is_over(store: Store, synthetic: Any, clock: Any) -> None:
    started, recorder = synthetic.started(), MlflowRecorder(store, settings(5.0))
    recorder.record(started)
    seen = []
    # Half a second per round at first, then rounds so long that nothing is gained by waiting.
    for event, pause in zip(rounds(synthetic, *range(1, 8)), (0.5, 0.5, 3.5, 1.0, 1.0, 5.0, 60.0), strict=True):
        clock.now += pause
        recorder.record(event)
        seen.append(len(steps(store, started.run_id)))
    assert seen == [0, 0, 0, 4, 4, 6, 7]
    recorder.record(RunStopped(KeyboardInterrupt(), killed=True))


def test_the_end_sends_what_waits(store: Store, synthetic: Any) -> None:
    started, recorder = synthetic.started(), MlflowRecorder(store, settings(NEVER))
    for event in (started, *rounds(synthetic, 1, 2)):
        recorder.record(event)
    assert steps(store, started.run_id) == []
    recorder.record(RunFinished(synthetic.result(started)))
    assert steps(store, started.run_id) == [1, 2]
    assert steps(store, started.run_id, "final/accuracy") == [0]


def test_a_stop_sends_what_waits(store: Store, synthetic: Any) -> None:
    started, recorder = synthetic.started(), MlflowRecorder(store, settings(NEVER))
    for event in (started, *rounds(synthetic, 1, 2), RunStopped(ValueError("broke"), killed=False)):
        recorder.record(event)
    assert steps(store, started.run_id) == [1, 2]
    (run,) = store.runs(f"tags.`fedsir.run_id` = '{started.run_id}'")
    assert (run.info.status, run.data.tags["fedsir.error"]) == ("FAILED", "ValueError: broke")


def test_points_carry_the_time_of_their_round(store: Store, synthetic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started, recorder = synthetic.started(), MlflowRecorder(store, settings(NEVER))
    recorder.record(started)
    for event, second in zip(rounds(synthetic, 1, 2), (1_800_000_000, 1_800_000_060), strict=True):
        with monkeypatch.context() as patch:
            patch.setattr("mlflow_tracking.delivery.time.time", lambda second=second: second)
            recorder.record(event)
    recorder.record(RunStopped(KeyboardInterrupt(), killed=True))
    (run,) = store.runs(f"tags.`fedsir.run_id` = '{started.run_id}'")
    points = store.client.get_metric_history(run.info.run_id, "train/loss")
    assert [point.timestamp for point in points] == [1_800_000_000_000, 1_800_000_060_000]


def test_rounds_lost_with_the_process_come_back_on_resuming(store: Store, synthetic: Any, clock: Any) -> None:
    started = synthetic.started()
    lost = MlflowRecorder(store, settings(5.0))
    lost.record(started)
    for event, pause in zip(rounds(synthetic, 1, 2, 3), (5.0, 1.0, 1.0), strict=True):
        clock.now += pause
        lost.record(event)
    assert steps(store, started.run_id) == [1]

    history = tuple(synthetic.record(t) for t in (1, 2, 3))
    again = MlflowRecorder(store, settings(5.0))
    again.record(synthetic.started(started.config, started.run_id, history))
    assert steps(store, started.run_id) == [1, 2, 3]
    for event in rounds(synthetic, 4):
        again.record(event)
    again.record(RunFinished(synthetic.result(started)))
    assert steps(store, started.run_id) == [1, 2, 3, 4]


def test_a_round_reported_twice_is_sent_once(store: Store, synthetic: Any) -> None:
    started, recorder = synthetic.started(), MlflowRecorder(store, settings(NEVER))
    for event in (started, *rounds(synthetic, 1, 1, 2), RunStopped(KeyboardInterrupt(), killed=True)):
        recorder.record(event)
    assert steps(store, started.run_id) == [1, 2]


def test_a_store_that_refuses_stops_the_run_when_rounds_are_sent(
    store: Store, synthetic: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MlflowException("run is deleted", INVALID_PARAMETER_VALUE)

    started, recorder = synthetic.started(), MlflowRecorder(store, settings(5.0))
    recorder.record(started)
    first, second = rounds(synthetic, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(type(store.client), "log_batch", refuse)
        recorder.record(first)
        clock.now += 5.0
        with pytest.raises(RunFailed, match=r"unit-spectral-s0.*round 2 could not be recorded.*run is deleted"):
            recorder.record(second)
    # What could not be sent then is tried again as the run is stopped.
    recorder.record(RunStopped(RunFailed("run is deleted"), killed=False))
    assert steps(store, started.run_id) == [1, 2]
    (run,) = store.runs(f"tags.`fedsir.run_id` = '{started.run_id}'")
    assert run.info.status == "FAILED"


def test_rounds_that_cannot_be_sent_do_not_keep_a_run_from_being_stopped(
    store: Store, synthetic: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("server gone")

    started, recorder = synthetic.started(), MlflowRecorder(store, settings(NEVER))
    for event in (started, *rounds(synthetic, 1)):
        recorder.record(event)
    with monkeypatch.context() as patch:
        patch.setattr(type(store.client), "log_batch", refuse)
        recorder.record(RunStopped(ValueError("the real reason"), killed=False))
    (run,) = store.runs(f"tags.`fedsir.run_id` = '{started.run_id}'")
    assert (run.info.status, run.data.tags["fedsir.error"]) == ("FAILED", "ValueError: the real reason")
    assert "the last rounds" in caplog.text


def test_a_short_run_takes_few_calls(store: Store, synthetic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    client = type(store.client)

    def watch(name: str, method: Any) -> None:
        def watched(*args: Any, **named: Any) -> Any:
            called.append(name)
            return method(*args, **named)

        monkeypatch.setattr(client, name, watched)

    for name, method in list(vars(client).items()):
        if callable(method) and not name.startswith("_"):
            watch(name, method)
    started, recorder = synthetic.started(), MlflowRecorder(store, settings(NEVER))
    for event in (started, *rounds(synthetic, *range(1, 7)), RunFinished(synthetic.result(started))):
        recorder.record(event)
    at_the_start = ["search_runs", "create_run", "log_batch", "log_inputs", "log_artifacts"]
    assert called == [*at_the_start, "log_batch", "log_artifacts", "set_terminated"]


def test_more_points_than_one_batch_takes(store: Store, synthetic: Any) -> None:
    started, recorder = synthetic.started(), MlflowRecorder(store, settings(NEVER))
    recorder.record(started)
    every = dict.fromkeys((*ROUND_METRICS, *FINAL_METRICS), 0.5)
    for t in range(1, 101):
        recorder.record(RoundFinished(synthetic.record(t, **every), total_rounds=100))
    recorder.record(RunStopped(KeyboardInterrupt(), killed=True))
    for key in ROUND_METRICS:
        assert steps(store, started.run_id, key) == list(range(1, 101))


def test_started_is_in_the_store_before_anything_else_happens(store: Store, synthetic: Any) -> None:
    started: RunStarted = synthetic.started(history=tuple(synthetic.record(t) for t in (1, 2)))
    recorder = MlflowRecorder(store, settings(NEVER))
    recorder.record(started)
    (run,) = store.runs(f"tags.`fedsir.run_id` = '{started.run_id}'")
    assert run.data.params["method"] == "spectral"
    assert {file.path for file in store.client.list_artifacts(run.info.run_id)} == {"config.yaml", "federation"}
    assert steps(store, started.run_id) == [1, 2]
    recorder.record(RunStopped(KeyboardInterrupt(), killed=True))
