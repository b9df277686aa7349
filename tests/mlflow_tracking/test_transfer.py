"""Runs in a file: everything arrives once, and nothing but such files is let in."""

from __future__ import annotations

import json
import math
import stat
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from fedsir.errors import BadInput
from fedsir.events import RoundFinished, RunFinished, RunStopped
from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.recorder import MlflowRecorder
from mlflow_tracking.store import Store, prepare_store
from mlflow_tracking.sweep_run import SweepFacts, begin_sweep_run, end_sweep_run, find_sweep_run
from mlflow_tracking.transfer import Imported, export_runs, import_runs

SETTINGS = TrackingConfig(figures=False)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another store, into which runs are imported."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('other')}/mlflow.db"
    prepare_store(TrackingConfig(uri=uri))
    return uri


@pytest.fixture
def book(store: Store) -> Store:
    """An experiment of its own in the session's store."""
    return prepare_store(TrackingConfig(uri=store.uri, experiment=uuid4().hex))


@pytest.fixture
def carry(book: Store, other: str, tmp_path: Path) -> Callable[[], Imported]:
    """Carry the runs of `book` to the other store."""

    def carried() -> Imported:
        file = tmp_path / f"{uuid4().hex}.zip"
        export_runs(book.uri, [book.experiment], file, print)
        return import_runs(other, file, print)

    return carried


@pytest.fixture
def there(book: Store, other: str) -> Store:
    return prepare_store(TrackingConfig(uri=other, experiment=book.experiment))


def _record(store: Store, synthetic: Any, identity: str, parent: str | None = None, finish: bool = True) -> Any:
    started = synthetic.started(synthetic.config(), identity)
    recorder = MlflowRecorder(store, SETTINGS, parent)
    recorder.record(started)
    for round_ in (1, 2):
        recorder.record(RoundFinished(synthetic.record(round_), total_rounds=3))
    recorder.record(RunFinished(synthetic.result(started)) if finish else RunStopped(KeyboardInterrupt(), killed=True))
    return started


def _content(store: Store, sweeps: bool = False) -> dict[str, Any]:
    """Everything about the runs by name and identity, except for ids of MLflow."""
    found: dict[str, Any] = {}
    for run in store.search() if sweeps else store.runs():
        own = ("mlflow.parentRunId", "fedsir.superseded_by", "fedsir.imported_from", "fedsir.imported_state")
        folder = Path(store.client.download_artifacts(run.info.run_id, "")) if run.data.params or sweeps else None
        files = [] if folder is None else [path for path in folder.rglob("*") if path.is_file()]
        found[f"{run.info.run_name} {run.data.tags.get('fedsir.run_id')} {run.info.status}"] = {
            "times": (run.info.start_time, run.info.end_time),
            "params": run.data.params,
            "tags": {k: v for k, v in run.data.tags.items() if k not in own},
            "points": {
                key: sorted(
                    (p.step, p.timestamp, p.value) for p in store.client.get_metric_history(run.info.run_id, key)
                )
                for key in run.data.metrics
            },
            "datasets": [
                (d.dataset.to_dictionary(), [(t.key, t.value) for t in d.tags]) for d in run.inputs.dataset_inputs
            ],
            "files": {} if folder is None else {str(p.relative_to(folder)): p.read_bytes() for p in files},
        }
    return found


def test_everything_arrives_once(book: Store, there: Store, carry: Callable[[], Imported], synthetic: Any) -> None:
    sweep = SweepFacts("grid", "name: grid\n", ("about",), ("a1", "b2"))
    parent = begin_sweep_run(book, sweep)
    _record(book, synthetic, "a1", parent)
    _record(book, synthetic, "b2", parent, finish=False)
    end_sweep_run(book, parent, sweep, stopped=True)
    book.client.log_metric(book.runs()[0].info.run_id, "odd", math.inf, timestamp=5, step=7)
    assert carry() == Imported(added=3, experiments=[book.experiment])
    here = _content(book, sweeps=True)
    assert len(here) == 3
    assert _content(there, sweeps=True) == here
    copied = find_sweep_run(there, "grid")
    assert {run.data.tags["mlflow.parentRunId"] for run in there.runs()} == {copied}
    note = there.client.get_experiment(there.experiment_id).tags["mlflow.note.content"]
    assert note == book.client.get_experiment(book.experiment_id).tags["mlflow.note.content"]

    assert carry() == Imported(skipped=3, experiments=[book.experiment])
    assert _content(there, sweeps=True) == here


def test_a_run_that_has_gone_on_replaces_its_copy(
    book: Store, there: Store, carry: Callable[[], Imported], synthetic: Any
) -> None:
    started = _record(book, synthetic, "a1", finish=False)
    carry()
    assert [run.info.status for run in there.runs()] == ["KILLED"]
    recorder = MlflowRecorder(book, SETTINGS)
    recorder.record(replace(started, history=(synthetic.record(1), synthetic.record(2))))
    recorder.record(RoundFinished(synthetic.record(3), total_rounds=3))
    # A run that somebody works on arrives as one that nobody works on.
    assert carry().replaced == 1
    (copy,) = there.runs()
    assert copy.info.status == "KILLED"
    recorder.record(RunFinished(synthetic.result(started)))
    assert carry() == Imported(replaced=1, experiments=[book.experiment])
    assert _content(there) == _content(book)
    assert carry().skipped == 1


def test_an_import_that_was_interrupted_is_completed(
    book: Store, there: Store, carry: Callable[[], Imported], synthetic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _record(book, synthetic, "a1")

    def broken(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mlflow.tracking.MlflowClient.log_inputs", broken)
        with pytest.raises(KeyboardInterrupt):
            carry()
    carry()
    assert _content(there) == _content(book)


def test_results_that_are_there_already_are_skipped(
    book: Store, there: Store, carry: Callable[[], Imported], synthetic: Any, tmp_path: Path
) -> None:
    """The same run finished on both sides; and what was carried away comes back."""
    for store in (book, there):
        _record(store, synthetic, "a1")
    _record(there, synthetic, "b2", finish=False)
    assert carry() == Imported(skipped=1, experiments=[book.experiment])
    assert len(there.runs()) == 2
    for source, target, count in ((there, book, 1), (book, there, 0)):
        file = tmp_path / f"{count}.zip"
        export_runs(source.uri, [source.experiment], file, print)
        assert import_runs(target.uri, file, print).added == count
    assert len(there.runs()) == len(book.runs()) == 2


def test_runs_that_were_started_anew_name_their_successors(
    book: Store, there: Store, carry: Callable[[], Imported], synthetic: Any
) -> None:
    for finish in (False, True):
        _record(book, synthetic, "a1", finish=finish)
    carry()
    by_status = {run.info.status: run for run in there.runs()}
    assert by_status["KILLED"].data.tags["fedsir.superseded_by"] == by_status["FINISHED"].info.run_id


def test_what_cannot_be_exported_is_refused(book: Store, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no experiment 'nowhere'"):
        export_runs(book.uri, ["nowhere"], tmp_path / "a.zip", print)
    with pytest.raises(BadInput, match="no such file"):
        export_runs(f"sqlite:///{tmp_path}/none.db", [], tmp_path / "a.zip", print)
    with pytest.raises(BadInput, match="cannot be written"):
        export_runs(book.uri, [book.experiment], tmp_path / "no" / "a.zip", print)
    (tmp_path / "b.zip").write_text("mine")
    with pytest.raises(BadInput, match="exists already"):
        export_runs(book.uri, [book.experiment], tmp_path / "b.zip", print)
    assert [path.name for path in tmp_path.iterdir()] == ["b.zip"]


MANIFEST = {"format": "fedsir-tracking", "version": 1, "experiments": []}
RUN = "0" * 32


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({}, "no manifest.json"),
        ({"manifest.json": json.dumps({**MANIFEST, "format": "other"})}, "manifest.json: format"),
        ({"manifest.json": json.dumps({**MANIFEST, "extra": 1})}, "manifest.json: extra"),
        ({"manifest.json": json.dumps({**MANIFEST, "version": 2})}, "newer fedsir"),
        ({"manifest.json": "no json"}, "manifest.json"),
        ({"manifest.json": json.dumps(MANIFEST), f"runs/{RUN}/run.json": "{}"}, "run.json: run_id"),
        *(
            ({"manifest.json": json.dumps(MANIFEST), name: "x"}, "it holds")
            for name in (
                "../evil",
                "/etc/evil",
                f"runs/{RUN}/artifacts/../../../evil",
                f"runs/{RUN}/artifacts//evil",
                f"runs/{RUN}/artifacts/..\\evil",
                f"runs/{RUN}/other",
                "runs/evil/run.json",
                "evil.py",
            )
        ),
    ],
)
def test_other_archives_are_refused(members: dict[str, str], why: str, other: str, tmp_path: Path) -> None:
    file = tmp_path / "a.zip"
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    with pytest.raises(BadInput, match=why):
        import_runs(other, file, print)
    assert not (tmp_path / "evil").exists()


def test_links_and_files_of_other_kinds_are_refused(other: str, tmp_path: Path) -> None:
    file = tmp_path / "a.zip"
    with zipfile.ZipFile(file, "w") as archive:
        link = zipfile.ZipInfo(f"runs/{RUN}/artifacts/link")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr("manifest.json", json.dumps(MANIFEST))
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(BadInput, match="link"):
        import_runs(other, file, print)
    file.write_text("no archive")
    with pytest.raises(BadInput, match="not an archive"):
        import_runs(other, file, print)
    with pytest.raises(BadInput, match="cannot be read"):
        import_runs(other, tmp_path / "none.zip", print)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_ways_of_compression_are_refused(other: str, tmp_path: Path, method: int) -> None:
    """Python unpacks them without a limit on what a few bytes may become."""
    file = tmp_path / "a.zip"
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("manifest.json", json.dumps(MANIFEST))
    with pytest.raises(BadInput, match="neither stored nor deflated"):
        import_runs(other, file, print)


def test_damage_is_found(book: Store, other: str, synthetic: Any, tmp_path: Path) -> None:
    _record(book, synthetic, "a1")
    file = tmp_path / "a.zip"
    export_runs(book.uri, [book.experiment], file, print)
    content = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        where = archive.getinfo(f"runs/{book.runs()[0].info.run_id}/run.json").header_offset + 200
    content[where : where + 20] = bytes(20)
    file.write_bytes(bytes(content))
    with pytest.raises(BadInput, match="damaged"):
        import_runs(other, file, print)
