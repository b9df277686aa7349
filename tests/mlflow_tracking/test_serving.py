"""Servers on a store: what is refused before one starts, and what it is started with."""

from __future__ import annotations

import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsir.errors import BadInput, RunFailed
from mlflow_tracking import serving
from mlflow_tracking.serving import ServerSettings, artifact_place, host_of, run_tables, serve, server_command
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


@pytest.mark.parametrize(
    ("given", "host", "listens_at", "address", "is_open"),
    [
        ("::", "::", "[::]:80", "http://[::1]:80", True),
        ("[::]", "::", "[::]:80", "http://[::1]:80", True),
        ("[::1]", "::1", "[::1]:80", "http://[::1]:80", False),
        ("[fe80::1]", "fe80::1", "[fe80::1]:80", "http://[fe80::1]:80", True),
        ("0:0:0:0:0:0:0:0", "0:0:0:0:0:0:0:0", "[0:0:0:0:0:0:0:0]:80", "http://[::1]:80", True),
        ("node1", "node1", "node1:80", "http://node1:80", True),
        ("0.0.0.0", "0.0.0.0", "0.0.0.0:80", "http://127.0.0.1:80", True),
    ],
)
def test_addresses_of_ipv6_have_brackets(given: str, host: str, listens_at: str, address: str, is_open: bool) -> None:
    settings = ServerSettings("sqlite:///x.db", host=host_of(given), port=80)
    assert (settings.host, settings.listens_at, settings.address) == (host, listens_at, address)
    assert settings.is_open == is_open


SERVES = """
import sys
from mlflow_tracking import serving
serving.server_command = lambda _: ([sys.executable, "-c", sys.argv[2]], {})
serving._wait_until_it_answers = lambda *_: None
serving.prepare_database = lambda _: None
serving.serve(serving.ServerSettings(sys.argv[1], port=int(sys.argv[3])), lambda: print("ready", flush=True))
"""
# A server with a worker that takes its time to end, and says whether it got to that.
SERVER = """
import os, signal, sys, time
def stop(*_):
    time.sleep(1)
    os.write(1, b"ended\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
os.fork()
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signal")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_server_and_workers_end_with_the_terminal(settings: ServerSettings, start_python: Any, number: int) -> None:
    """Which may tell several times."""
    process = start_python(SERVES, settings.uri, SERVER, str(settings.port))
    lines = [process.stdout.readline() for _ in range(3)]
    assert sorted(lines) == ["ready\n", "up\n", "up\n"]
    process.send_signal(number)
    time.sleep(0.3)
    process.send_signal(signal.SIGHUP)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert out.count("ended") == 2


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signal")
def test_nohup_keeps_the_server(settings: ServerSettings, start_python: Any) -> None:
    ignoring = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    process = start_python(ignoring + SERVES, settings.uri, SERVER, str(settings.port))
    while process.stdout.readline() != "ready\n":
        assert process.poll() is None
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


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
