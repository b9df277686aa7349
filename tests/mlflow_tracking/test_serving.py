"""Servers on a store: what is refused before one starts, and what it is started with."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from fedsir.errors import BadInput, RunFailed
from mlflow_tracking import serving
from mlflow_tracking.serving import ServerSettings, artifact_place, run_tables, serve, server_command
from mlflow_tracking.store import Store, prepare_database


@pytest.fixture
def settings(store: Store) -> ServerSettings:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return ServerSettings(store.uri, port=probe.getsockname()[1])


def test_only_this_machine_reaches_it_unless_told_otherwise(settings: ServerSettings) -> None:
    words, _ = server_command(settings)
    assert words[words.index("--host") + 1] == "127.0.0.1"
    for host, is_open in (("127.0.0.1", False), ("::1", False), ("localhost", False), ("0.0.0.0", True), ("::", True)):
        assert replace(settings, host=host).is_open == is_open
    assert replace(settings, host="node1.example.org").is_open
    assert replace(settings, host="0.0.0.0", port=80).address == "http://127.0.0.1:80"
    assert replace(settings, host="::1", port=80).address == "http://[::1]:80"


def test_passwords_are_no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere:5000")
    uri = "postgresql+psycopg://me:secret@host/db"
    words, environment = server_command(ServerSettings(uri, artifacts="s3://bucket/files", allowed_hosts="node1"))
    assert not any("secret" in word for word in words)
    assert environment["MLFLOW_BACKEND_STORE_URI"] == uri
    assert "MLFLOW_TRACKING_URI" not in environment
    assert words[words.index("--artifacts-destination") + 1] == "s3://bucket/files"
    assert words[words.index("--allowed-hosts") + 1] == "node1"


def test_where_artifacts_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert artifact_place("sqlite:////data/runs/mlflow.db", None) == "/data/runs/artifacts"
    assert artifact_place("postgresql://host/db", None) == str(tmp_path / "fedsir-runs" / "artifacts")
    assert artifact_place("postgresql://host/db", "files") == str(tmp_path / "files")
    assert artifact_place("postgresql://host/db", "s3://bucket/files") == "s3://bucket/files"


def test_a_port_that_is_taken_is_refused(settings: ServerSettings) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", settings.port))
        taken.listen()
        with pytest.raises(BadInput, match=f"--port {settings.port + 1}"):
            serve(settings, lambda: None)
    with pytest.raises(BadInput, match="nowhere"):
        serve(replace(settings, host="nowhere.invalid"), lambda: None)


def test_stores_and_folders_that_cannot_be_used_are_refused(settings: ServerSettings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no database")
    with pytest.raises(BadInput, match="not a database"):
        serve(replace(settings, uri=f"sqlite:///{tmp_path / 'file'}"), lambda: None)
    with pytest.raises(BadInput, match="artifacts cannot be kept"):
        serve(replace(settings, artifacts=str(tmp_path / "file" / "x")), lambda: None)


def test_a_server_that_ends_at_once_is_a_failure(settings: ServerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "server_command", lambda _: (["false"], {}))
    with pytest.raises(RunFailed, match="did not start"):
        serve(settings, lambda: None)


def test_serving_creates_no_experiment(store: Store, settings: ServerSettings) -> None:
    """Its artifacts would not go through the server."""
    before = {experiment.name for experiment in store.client.search_experiments()}
    prepare_database(store.uri)
    assert {experiment.name for experiment in store.client.search_experiments()} == before
    tables = run_tables(settings)
    assert f"/#/experiments/{store.experiment_id}/runs?" in tables[store.experiment]
    assert "Default" not in tables
