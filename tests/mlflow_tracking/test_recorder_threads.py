"""Several runs recorded at the same time: the same record as one after another, one writer and one drawer at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fedsir.errors import RunFailed
from fedsir.events import RoundFinished, RunFinished, RunStarted, RunStopped
from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.recorder import MlflowRecorder
from mlflow_tracking.states import record_failure, recorded_state, recorded_states
from mlflow_tracking.store import Store, prepare_store

THREADS = 4


def all_at_once(work: Sequence[Callable[[], None]]) -> None:
    """Each in a thread of its own; raises what one of them raises."""
    begin = threading.Barrier(len(work))

    def step(one: Callable[[], None]) -> None:
        begin.wait(timeout=60)
        one()

    with ThreadPoolExecutor(len(work)) as threads:
        for done in [threads.submit(step, one) for one in work]:
            done.result(timeout=120)


def play(store: Store, settings: TrackingConfig, started: RunStarted, synthetic: Any) -> None:
    recorder = MlflowRecorder(store, settings)
    recorder.record(started)
    for t in range(1, 5):
        recorder.record(RoundFinished(synthetic.record(t), total_rounds=4))
    spectral = started.config.method.name == "spectral"
    recorder.record(RunFinished(synthetic.result(started, identifies=spectral, relabels=False)))


def contents(store: Store, run_id: str) -> dict[str, Any]:
    """Everything about a run that does not depend on when it was recorded."""
    (run,) = store.runs(f"tags.`fedsir.run_id` = '{run_id}'")
    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    return {
        "status": run.info.status,
        "name": run.info.run_name,
        "tags": run.data.tags,
        "params": run.data.params,
        "inputs": [(i.dataset.name, i.dataset.digest) for i in run.inputs.dataset_inputs],
        "metrics": {
            key: [(p.step, p.value) for p in store.client.get_metric_history(run.info.run_id, key)]
            for key in run.data.metrics
        },
        "files": {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()},
    }


class Gate:
    """Notices calls that overlap, of which each takes at least `pause` seconds."""

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._inside = threading.Lock()
        self.passed = 0
        self.overlapping: list[str] = []

    def watch(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **named: Any) -> Any:
            alone = self._inside.acquire(blocking=False)
            if not alone:
                self.overlapping.append(name)
            try:
                time.sleep(self._pause)
                return function(*args, **named)
            finally:
                self.passed += 1
                if alone:
                    self._inside.release()

        return watched


def test_the_record_is_that_of_runs_one_after_another(store: Store, synthetic: Any) -> None:
    methods = [synthetic.plain(), synthetic.spectral(), synthetic.plain(), synthetic.plain()]
    runs = [synthetic.started(synthetic.config(method, seed=seed)) for seed, method in enumerate(methods)]
    settings = TrackingConfig(flush_seconds=0.0)
    single, several = (
        prepare_store(TrackingConfig(uri=store.uri, experiment=f"threads {name}")) for name in ("no", "yes")
    )
    for started in runs:
        play(single, settings, started, synthetic)
    all_at_once([lambda started=started: play(several, settings, started, synthetic) for started in runs])
    for started in runs:
        expected = contents(single, started.run_id)
        assert expected["status"] == "FINISHED"
        assert len(expected["metrics"]["train/loss"]) == 4
        assert contents(several, started.run_id) == expected


def test_one_writer_at_a_time(store: Store, synthetic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(0.005)
    client = type(store.client)
    for name in (
        *("search_runs", "create_run", "update_run", "set_tag", "delete_tag", "log_batch", "log_inputs"),
        *("log_artifacts", "get_metric_history", "set_terminated"),
    ):
        monkeypatch.setattr(client, name, gate.watch(name, getattr(client, name)))
    settings = TrackingConfig(figures=False, weights=False, flush_seconds=0.0)

    def whole_run() -> None:
        play(store, settings, synthetic.started(), synthetic)

    def stopped_and_resumed() -> None:
        started = synthetic.started()
        for history in ((), (synthetic.record(1),)):
            recorder = MlflowRecorder(store, settings)
            recorder.record(synthetic.started(started.config, started.run_id, history))
            recorder.record(RunStopped(ValueError("broke"), killed=False))
        recorded_state(store, started.run_id)

    def failed() -> None:
        started = synthetic.started()
        record_failure(store, started.config, started.run_id, ValueError("no workers"))
        recorded_states(store, [started.run_id])

    all_at_once([whole_run, stopped_and_resumed, failed, whole_run])
    assert gate.passed > 4 * THREADS
    assert gate.overlapping == []


def test_one_figure_at_a_time(store: Store, synthetic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(0.05)
    for name in ("counts_figure", "confusion_figure", "save_png"):
        monkeypatch.setattr(f"mlflow_tracking.figures.{name}", gate.watch(name, lambda *_: None))
    runs = [synthetic.started(synthetic.config(synthetic.plain())) for _ in range(THREADS)]
    all_at_once([lambda started=started: play(store, TrackingConfig(), started, synthetic) for started in runs])
    assert gate.passed == 4 * THREADS
    assert gate.overlapping == []


def test_a_run_that_fails_lets_the_others_write(store: Store, synthetic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TrackingConfig(figures=False, weights=False)
    broken, *others = [synthetic.started(synthetic.config(seed=seed)) for seed in range(THREADS)]
    send = type(store.client).log_inputs

    def refuse_one(client: Any, run_id: str, **named: Any) -> None:
        if store.client.get_run(run_id).data.tags["fedsir.run_id"] == broken.run_id:
            raise OSError("disk full")
        send(client, run_id, **named)

    monkeypatch.setattr(type(store.client), "log_inputs", refuse_one)

    def fails() -> None:
        with pytest.raises(RunFailed, match=r"the start could not be recorded.*disk full"):
            play(store, settings, broken, synthetic)

    all_at_once([fails, *(lambda started=started: play(store, settings, started, synthetic) for started in others)])
    states = recorded_states(store, [started.run_id for started in (broken, *others)])
    assert states[broken.run_id].status == "failed"
    assert {states[started.run_id].status for started in others} == {"finished"}
