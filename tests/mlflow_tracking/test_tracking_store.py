from __future__ import annotations

import shutil
import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fedsir.errors import BadInput
from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.store import Store, check_place, check_store, prepare_store

PREPARE = """
import sys
from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.store import prepare_store
store = prepare_store(TrackingConfig(uri=sys.argv[1], experiment="race"))
run = store.client.create_run(store.experiment_id)
store.client.log_metric(run.info.run_id, "x", 1.0)
store.client.set_terminated(run.info.run_id)
"""


def config_for(path: Path, **changes: str) -> TrackingConfig:
    return TrackingConfig(uri=f"sqlite:///{path}", **changes)


def refusal(config: TrackingConfig) -> str:
    with pytest.raises(BadInput) as caught:
        prepare_store(config)
    text = str(caught.value)
    assert "uri:" in text
    assert "reason:" in text
    assert "remedy:" in text
    assert len(text.splitlines()) <= 5
    assert "Traceback" not in text
    status = check_store(config)
    assert not status.reachable
    assert status.runs is None
    return text


def test_two_processes_may_create_the_same_store_quietly(tmp_path: Path, start_python: Any) -> None:
    uri = f"sqlite:///{tmp_path}/new/mlflow.db"
    both = [start_python(PREPARE, uri) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (0, "", "")
    status = check_store(TrackingConfig(uri=uri, experiment="race"))
    assert (status.reachable, status.runs) == (True, 2)


def test_preparing_again_finds_the_same_experiment(store: Store, store_file: Path) -> None:
    assert prepare_store(config_for(store_file)).experiment_id == store.experiment_id
    other = prepare_store(config_for(store_file, experiment="other"))
    assert other.experiment_id != store.experiment_id
    assert (store_file.parent / "artifacts").is_dir()


def test_deleted_experiment_is_refused(store: Store, store_file: Path) -> None:
    gone = prepare_store(config_for(store_file, experiment="gone"))
    store.client.delete_experiment(gone.experiment_id)
    with pytest.raises(BadInput, match=f"mlflow experiments restore --experiment-id {gone.experiment_id}"):
        prepare_store(config_for(store_file, experiment="gone"))


def test_folder_under_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("not a folder")
    assert "cannot be" in refusal(config_for(tmp_path / "plain" / "runs" / "mlflow.db"))


def test_database_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").mkdir()
    refusal(config_for(tmp_path / "mlflow.db"))


def test_damaged_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"these are not the pages you are looking for" * 50)
    assert "damaged" in refusal(config_for(tmp_path / "mlflow.db"))


def test_truncated_database_is_refused(store_file: Path, tmp_path: Path) -> None:
    content = store_file.read_bytes()
    (tmp_path / "mlflow.db").write_bytes(content[:8192])
    assert "damaged" in refusal(config_for(tmp_path / "mlflow.db"))


def test_locked_database_is_refused(store_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlflow_tracking.sqlite_file.SQLITE_TIMEOUT_S", 0.1)
    path = shutil.copy(store_file, tmp_path / "mlflow.db")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert "database is locked\n  remedy: end the program that holds the file" in refusal(config_for(path))
    assert prepare_store(config_for(path)).experiment_id


def test_database_that_cannot_be_written_is_refused(store_file: Path, tmp_path: Path) -> None:
    path = shutil.copy(store_file, tmp_path / "mlflow.db")
    # SQLite cannot write beside it; permission bits would not keep root from it.
    (tmp_path / "mlflow.db-journal").mkdir()
    assert "cannot be written (disk I/O error)" in refusal(config_for(path))


def test_database_of_another_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "patients.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE patients (id INTEGER)")
    connection.close()
    before = path.read_bytes()
    assert "another program" in refusal(config_for(path))
    assert path.read_bytes() == before


def test_unreachable_server_is_refused_at_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    assert f"no server answers at 127.0.0.1:{port}" in refusal(TrackingConfig(uri=f"http://127.0.0.1:{port}"))


def test_password_does_not_appear_in_refusals() -> None:
    assert "s3cret" not in refusal(TrackingConfig(uri="postgresql+nodriver://ann:s3cret@127.0.0.1:1/db"))


def test_checking_creates_nothing(tmp_path: Path) -> None:
    status = check_store(config_for(tmp_path / "deep" / "mlflow.db"))
    assert (status.reachable, status.runs) == (True, 0)
    assert "does not exist yet" in status.detail
    assert list(tmp_path.iterdir()) == []
    empty = tmp_path / "empty.db"
    empty.touch()
    assert check_store(config_for(empty)).runs == 0
    assert [p.name for p in tmp_path.iterdir()] == ["empty.db"]
    assert empty.stat().st_size == 0


def test_runs_are_paged(store_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = prepare_store(config_for(store_file, experiment="paged"))
    for _ in range(5):
        paged.client.create_run(paged.experiment_id)
    monkeypatch.setattr("mlflow_tracking.store.PAGE", 2)
    assert len(paged.runs()) == 5
    assert check_store(config_for(store_file, experiment="paged")).runs == 5


def test_a_look_finds_places_that_cannot_be_and_makes_no_store(tmp_path: Path, store_file: Path) -> None:
    (tmp_path / "file").write_text("no database, but some text")
    with pytest.raises(BadInput, match="not a database"):
        check_place(config_for(tmp_path / "file"))
    with pytest.raises(BadInput, match="cannot be created"):
        check_place(config_for(tmp_path / "file" / "mlflow.db"))
    with pytest.raises(BadInput, match="no server answers"):
        check_place(TrackingConfig(uri="http://127.0.0.1:1", experiment="race"))
    for path in (tmp_path / "deep" / "mlflow.db", store_file):
        check_place(config_for(path))
    assert not list(tmp_path.rglob("*.db"))
    assert not (tmp_path / "deep").exists()
