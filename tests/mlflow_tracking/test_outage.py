"""Which errors of a store pass by themselves: real ones of SQLite, of a server, of a disk."""

from __future__ import annotations

import errno
import os
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from mlflow.exceptions import MlflowException, RestException
from mlflow.store.db.utils import _get_managed_session_maker
from mlflow.utils.rest_utils import MlflowHostCreds, augmented_raise_for_status, http_request, http_request_safe
from sqlalchemy.orm import sessionmaker

from mlflow_tracking.outage import COST_FACTOR, FIRST_PAUSE_S, LONGEST_PAUSE_S, Reach, is_outage, reason

Fault = Callable[[Path], tuple[str, str]]
"""Breaks a SQLite file with a table `t`; a statement that fails then, and how."""


def _damaged(file: Path) -> tuple[str, str]:
    file.write_bytes(b"no pages of a database" * 500)
    return "SELECT * FROM t", "not a database"


def _without_folder(file: Path) -> tuple[str, str]:
    file.with_name(file.name + "-journal").mkdir()
    return "INSERT INTO t VALUES (2)", "disk I/O error"


SQLITE: dict[str, tuple[bool, Fault]] = {
    "read-only": (True, lambda _: ("PRAGMA query_only = ON; INSERT INTO t VALUES (2)", "readonly")),
    "full": (True, lambda _: ("PRAGMA max_page_count = 2; INSERT INTO t VALUES (zeroblob(100000))", "full")),
    "without its folder": (True, _without_folder),
    "damaged": (False, _damaged),
    "without a table": (False, lambda _: ("SELECT * FROM absent", "no such table")),
    "violated": (False, lambda _: ("INSERT INTO t VALUES (1)", "UNIQUE")),
}


def through_mlflow(file: Path, statements: str) -> MlflowException:
    """What MLflow raises for the statements, the last of which fails."""
    engine = sqlalchemy.create_engine(f"sqlite:///{file}")

    def execute() -> None:
        with _get_managed_session_maker(sessionmaker(engine), "sqlite")(read_only=False) as session:
            # MLflow itself would wait for 20 s.
            session.execute(sqlalchemy.text("PRAGMA busy_timeout = 0"))
            for statement in statements.split(";"):
                session.execute(sqlalchemy.text(statement))

    try:
        with pytest.raises(MlflowException) as caught:
            execute()
    finally:
        engine.dispose()
    return caught.value


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE t (x UNIQUE)")
        connection.execute("INSERT INTO t VALUES (1)")
    return path


@pytest.mark.parametrize("fault", SQLITE)
def test_of_sqlite(file: Path, fault: str) -> None:
    passes, breaks = SQLITE[fault]
    statements, words = breaks(file)
    error = through_mlflow(file, statements)
    assert words in str(error)
    assert is_outage(error) == passes
    assert words in reason(error)
    assert "\n" not in reason(error)


def test_of_sqlite_that_is_locked(file: Path) -> None:
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        error = through_mlflow(file, "SELECT * FROM t")
    assert is_outage(error)
    assert reason(error) == "database is locked"
    assert not is_outage(sqlite3.ProgrammingError("Cannot operate on a closed database."))


class Answering(HTTPServer):
    """Answers every request with `status`, -1 for none at all, -2 for one that breaks off."""

    status = 200


class _Handler(BaseHTTPRequestHandler):
    def _answer(self) -> None:
        assert isinstance(self.server, Answering)
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.status == -1:
            self.close_connection = True
            return
        self.send_response(200 if self.server.status == -2 else self.server.status)
        self.send_header("Content-Length", "20")
        self.end_headers()
        self.wfile.write(b"broken off" if self.server.status == -2 else b"as a proxy says it. ")

    do_GET = do_PUT = do_POST = _answer  # noqa: N815 - names of the standard library

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def answering() -> Iterator[Answering]:
    with Answering(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `prepare_store` has it."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def creds(port: int) -> MlflowHostCreds:
    return MlflowHostCreds(f"http://127.0.0.1:{port}")


PASSING = (-1, -2, 408, 429, 500, 502, 503, 504, 507, 520)
STAYING = (400, 401, 403, 404, 409, 501)


@pytest.mark.parametrize("status", [*PASSING, *STAYING])
def test_of_a_server(answering: Answering, status: int) -> None:
    answering.status = status
    with pytest.raises(MlflowException) as caught:
        http_request_safe(creds(answering.server_port), "/api/2.0/mlflow/x", "POST", json={})
    assert is_outage(caught.value) == (status in PASSING)


@pytest.mark.parametrize("status", [507, 503, 403])
def test_of_a_server_for_files(answering: Answering, status: int) -> None:
    answering.status = status
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of requests or of MLflow
        augmented_raise_for_status(http_request(creds(answering.server_port), "/x", "PUT", data=b"content"))
    assert is_outage(caught.value) == (status != 403)


def test_of_a_server_that_is_gone() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(MlflowException) as caught:
        http_request_safe(creds(port), "/api/2.0/mlflow/x", "GET")
    assert is_outage(caught.value)
    assert reason(caught.value) == os.strerror(errno.ECONNREFUSED)


def test_of_a_server_that_hangs() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(MlflowException) as caught:
            http_request_safe(creds(silent.getsockname()[1]), "/api/2.0/mlflow/x", "GET", timeout=0.2)
    assert is_outage(caught.value)
    assert reason(caught.value) == "timed out"


def test_of_what_a_server_says() -> None:
    """Where the user has asked MLflow to try again, its last answer comes through."""
    for code, passes in (("TEMPORARILY_UNAVAILABLE", True), ("INTERNAL_ERROR", True), ("RESOURCE_EXHAUSTED", True)):
        assert is_outage(RestException({"error_code": code, "message": "said"})) == passes
    for code in ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "PERMISSION_DENIED", "NOT_IMPLEMENTED"):
        assert not is_outage(RestException({"error_code": code, "message": "said"}))
    # MLflow's word for everything that it does not know, also of its own mistakes.
    assert not is_outage(MlflowException("cannot be parsed"))
    assert not is_outage(RestException({"detail": "Not Found"}))


def test_of_disks() -> None:
    for name in ("ENOSPC", "EROFS", "EIO", "EACCES", "ESTALE"):
        assert is_outage(OSError(getattr(errno, name), "said"))
    for error in (OSError("disk full"), FileNotFoundError(errno.ENOENT, "said"), OSError(errno.EMFILE, "said")):
        assert not is_outage(error)
    assert not is_outage(ValueError("wrong"))
    assert not is_outage(KeyError())


def test_causes_count_and_what_was_dealt_with_does_not() -> None:
    error, cause = MlflowException("request failed"), ConnectionResetError(errno.ECONNRESET, "reset by peer")
    assert not is_outage(error)
    error.__context__ = cause
    assert is_outage(error)
    assert reason(error) == "reset by peer"
    # As `raise ... from None` does it.
    error.__suppress_context__ = True
    assert not is_outage(error)
    error.__cause__ = cause
    assert is_outage(error)


def test_pauses_grow_up_to_a_limit_and_begin_anew(clock: Any) -> None:
    reach = Reach()
    assert reach.pause == 0
    assert reach.found() is None
    for _ in range(2):
        pauses = []
        for number in range(8):
            assert reach.lost(0.0) == (number == 0)
            pauses.append(reach.pause)
            clock.now += reach.pause
            assert reach.pause == 0
        assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
        assert pauses[-2:] == [LONGEST_PAUSE_S, LONGEST_PAUSE_S]
        assert reach.found() == pytest.approx(sum(pauses))
        assert reach.pause == 0


def test_tries_that_take_long_are_rare(clock: Any) -> None:
    reach = Reach()
    clock.now += 60.0
    reach.lost(60.0)
    assert reach.pause == 60.0 * COST_FACTOR
    clock.now += 10.0
    assert reach.found() == 70.0
