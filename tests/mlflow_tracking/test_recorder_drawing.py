"""The federation's figure is drawn beside the rounds: it comes once and in time, and nothing of it is left behind."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from fedsir.errors import RunFailed, StoreUnreachable
from fedsir.events import RoundFinished, RunFinished, RunStarted, RunStopped
from mlflow_tracking import aside, outage
from mlflow_tracking.aside import Drawing
from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.recorder import MlflowRecorder
from mlflow_tracking.states import runs_of
from mlflow_tracking.store import Store, prepare_store

FIGURE = "federation/counts.png"
LONG_S = 60.0
NEVER = 1e6
STOPPED = RunStopped(KeyboardInterrupt(), killed=True)


class Pencil:
    """Draws when it may. drawn: how often it has begun."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.drawn = 0
        self.error: BaseException | None = None

    def __call__(self, event: RunStarted) -> dict[str, bytes]:
        self.drawn += 1
        assert self.may.wait(LONG_S)
        if self.error is not None:
            raise self.error
        return {FIGURE: event.run_id.encode()}


class Sent:
    """Files of each call of `log_artifacts`. broken: it fails like a store that is out of reach."""

    def __init__(self, log_artifacts: Callable[..., None]) -> None:
        self._log_artifacts = log_artifacts
        self.calls: list[set[str]] = []
        self.broken = False

    def __call__(self, client: Any, run_id: str, folder: str) -> None:
        if self.broken:
            raise ConnectionRefusedError(111, "Connection refused")
        self.calls.append({str(p.relative_to(folder)) for p in Path(folder).rglob("*") if p.is_file()})
        self._log_artifacts(client, run_id, folder)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "HEAD_START_S", 0.0)
    monkeypatch.setattr(outage, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(outage, "LONGEST_PAUSE_S", 0.001)


@pytest.fixture
def pencil(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pencil]:
    pencil = Pencil()
    monkeypatch.setattr("mlflow_tracking.drawings.draw_start", pencil)
    yield pencil
    pencil.may.set()


@pytest.fixture
def sent(store: Store, monkeypatch: pytest.MonkeyPatch) -> Sent:
    sent = Sent(type(store.client).log_artifacts)
    monkeypatch.setattr(type(store.client), "log_artifacts", lambda client, *args: sent(client, *args))
    return sent


@pytest.fixture
def book(store: Store) -> Store:
    """An experiment of its own in the session's store, and nothing known of its being out of reach."""
    return prepare_store(TrackingConfig(uri=store.uri, experiment=uuid4().hex))


def recording(book: Store, flush_seconds: float = 0.0, patience_s: float = LONG_S) -> MlflowRecorder:
    return MlflowRecorder(book, TrackingConfig(weights=False, flush_seconds=flush_seconds, patience_s=patience_s))


def round_(synthetic: Any, number: int) -> RoundFinished:
    return RoundFinished(synthetic.record(number), total_rounds=3)


def started(synthetic: Any, done: int = 0, run_id: str | None = None) -> RunStarted:
    config = synthetic.config(synthetic.plain(), training={"rounds": 3})
    event: RunStarted = synthetic.started(config, run_id, tuple(synthetic.record(t) for t in range(1, done + 1)))
    return event


def finished(synthetic: Any, event: RunStarted) -> RunFinished:
    return RunFinished(synthetic.result(event, identifies=False, relabels=False))


def drawers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fedsir-drawing"]


def figure_is_ready() -> None:
    for thread in drawers():
        thread.join(LONG_S)
    assert drawers() == []


def record_of(book: Store, event: RunStarted) -> tuple[str, dict[str, bytes]]:
    """Status and files of the only MLflow run."""
    (run,) = runs_of(book, event.run_id)
    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    return run.info.status, {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_rounds_do_not_wait_for_the_figure_and_the_end_has_it(
    book: Store, synthetic: Any, pencil: Pencil, sent: Sent
) -> None:
    event, recorder = started(synthetic), recording(book)
    for each in (event, round_(synthetic, 1), round_(synthetic, 2)):
        recorder.record(each)
    status, files = record_of(book, event)
    assert status == "RUNNING"
    assert set(files) == {"config.yaml", "federation/federation.csv"}
    assert len(drawers()) == 1
    threading.Timer(0.05, pencil.may.set).start()
    recorder.record(finished(synthetic, event))
    status, files = record_of(book, event)
    assert (status, files[FIGURE]) == ("FINISHED", event.run_id.encode())
    assert [FIGURE in call for call in sent.calls] == [False, True]
    assert drawers() == []


def test_a_run_that_takes_longer_has_it_before_its_end(book: Store, synthetic: Any, pencil: Pencil, sent: Sent) -> None:
    event, recorder = started(synthetic), recording(book)
    recorder.record(event)
    pencil.may.set()
    figure_is_ready()
    sent.broken = True
    recorder.record(round_(synthetic, 1))
    sent.broken = False
    assert FIGURE not in record_of(book, event)[1]
    book.reach.found()
    recorder.record(round_(synthetic, 2))
    assert record_of(book, event)[1][FIGURE] == event.run_id.encode()
    recorder.record(round_(synthetic, 3))
    recorder.record(finished(synthetic, event))
    assert [FIGURE in call for call in sent.calls] == [False, True, False]
    assert pencil.drawn == 1


def test_it_costs_no_call_of_its_own_where_rounds_are_sent_together(
    book: Store, synthetic: Any, pencil: Pencil, sent: Sent
) -> None:
    event, recorder = started(synthetic), recording(book, NEVER)
    recorder.record(event)
    pencil.may.set()
    figure_is_ready()
    recorder.record(round_(synthetic, 1))
    recorder.record(finished(synthetic, event))
    assert [FIGURE in call for call in sent.calls] == [False, True]


@pytest.mark.parametrize("flush_seconds", [0.0, NEVER])
def test_a_failure_of_drawing_fails_the_run_with_the_next_round(
    book: Store, synthetic: Any, pencil: Pencil, flush_seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    event, recorder = started(synthetic), recording(book, flush_seconds)
    pencil.error = ValueError("no such font")
    pencil.may.set()
    recorder.record(event)
    figure_is_ready()
    with pytest.raises(RunFailed, match=r"unit-plain-s0.*federation's figure could not be recorded.*no such font") as e:
        recorder.record(round_(synthetic, 1))
    assert record_of(book, event)[0] == "FAILED"
    recorder.record(RunStopped(e.value, killed=False))
    (run,) = runs_of(book, event.run_id)
    assert run.info.status == "FAILED"
    assert "no such font" in run.data.tags["fedsir.error"]
    assert [point.step for point in book.client.get_metric_history(run.info.run_id, "test/accuracy")] == [1]
    assert caplog.text == ""


def test_a_failure_of_drawing_fails_the_end(book: Store, synthetic: Any, pencil: Pencil) -> None:
    event, recorder = started(synthetic), recording(book)
    recorder.record(event)
    pencil.error = ValueError("no such font")
    pencil.may.set()
    with pytest.raises(RunFailed, match=r"the result could not be recorded.*no such font"):
        recorder.record(finished(synthetic, event))
    assert record_of(book, event)[0] == "FAILED"
    assert drawers() == []


def test_a_failure_of_drawing_does_not_hide_what_stopped_the_run(
    book: Store, synthetic: Any, pencil: Pencil, caplog: pytest.LogCaptureFixture
) -> None:
    event, recorder = started(synthetic), recording(book)
    recorder.record(event)
    pencil.error = ValueError("no such font")
    pencil.may.set()
    recorder.record(RunStopped(OSError("client 3 broke"), killed=False))
    assert "no such font" in caplog.text
    (run,) = runs_of(book, event.run_id)
    assert (run.info.status, run.data.tags["fedsir.error"]) == ("FAILED", "OSError: client 3 broke")


def test_who_interrupts_a_run_while_it_is_drawn_has_the_figure_before_the_end(
    book: Store, synthetic: Any, pencil: Pencil
) -> None:
    event, recorder = started(synthetic), recording(book)
    recorder.record(event)
    threading.Timer(0.05, pencil.may.set).start()
    recorder.record(STOPPED)
    status, files = record_of(book, event)
    assert (status, files[FIGURE]) == ("KILLED", event.run_id.encode())
    assert drawers() == []
    assert recorder.mlflow_run_id is None


def test_nothing_is_drawn_for_who_stops_a_run_during_an_outage(
    book: Store, synthetic: Any, pencil: Pencil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aside, "HEAD_START_S", LONG_S)
    monkeypatch.setattr(outage, "FIRST_PAUSE_S", LONG_S)
    event, recorder = started(synthetic), recording(book)
    recorder.record(event)
    book.reach.lost(LONG_S)
    recorder.record(STOPPED)
    assert drawers() == []
    assert pencil.drawn == 0


@pytest.mark.parametrize("ending", ["interrupted", "undelivered"])
def test_a_run_that_is_continued_has_the_files_of_one_that_was_not(
    book: Store, synthetic: Any, sent: Sent, ending: str
) -> None:
    whole = started(synthetic)
    recorder = recording(book)
    for each in (whole, *(round_(synthetic, t) for t in (1, 2, 3)), finished(synthetic, whole)):
        recorder.record(each)

    event = started(synthetic)
    recorder = recording(book, NEVER, patience_s=0.0)
    recorder.record(event)
    done = 1 if ending == "interrupted" else 3
    for t in range(1, done + 1):
        recorder.record(round_(synthetic, t))
    if ending == "interrupted":
        recorder.record(STOPPED)
    else:
        sent.broken = True
        with pytest.raises(StoreUnreachable, match="the result could not be recorded"):
            recorder.record(finished(synthetic, event))
        sent.broken = False
        assert FIGURE not in record_of(book, event)[1]
    assert drawers() == []
    again, recorder = started(synthetic, done, event.run_id), recording(book)
    for each in (again, *(round_(synthetic, t) for t in range(done + 1, 4)), finished(synthetic, again)):
        recorder.record(each)
    expected, files = record_of(book, whole)[1], record_of(book, event)[1]
    # Names the run.
    assert expected.pop("summary.json") != files.pop("summary.json")
    assert expected[FIGURE].startswith(b"\x89PNG")
    assert files == expected


def test_what_was_drawn_is_let_go_of(book: Store, synthetic: Any) -> None:
    event, recorder = started(synthetic), recording(book)
    recorder.record(event)
    figure_is_ready()
    recorder.record(finished(synthetic, event))
    gone = weakref.ref(event.federation)
    del event
    gc.collect()
    assert gone() is None


def test_what_has_not_begun_when_it_ends_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "HEAD_START_S", LONG_S)
    begun = list[str]()

    def draw() -> dict[str, bytes]:
        begun.append("drawn")
        return {}

    drawing = Drawing(draw)
    assert not drawing.ready
    drawing.end()
    assert begun == []
    assert drawers() == []
    # Whoever waits for it does not wait for the head start.
    assert Drawing(draw).files() == {}
    assert begun == ["drawn"]
