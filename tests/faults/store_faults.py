"""Faults of a store, each of which begins and ends when it is told to."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Protocol

import sqlalchemy

from mlflow_tracking.serving import ServerSettings, server_command
from mlflow_tracking.store import Store

LIMIT_S = 120.0


class Fault(Protocol):
    """Something that is wrong with a store for a while."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


@dataclass
class Unwritable:
    """SQLite cannot create its journal beside the file, and for fear of an old one does not read it either."""

    database: Path

    @property
    def _journal(self) -> Path:
        return self.database.with_name(f"{self.database.name}-journal")

    def begin(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                self._journal.mkdir()
            except FileExistsError:  # somebody is writing just now
                assert time.monotonic() < deadline
                time.sleep(0.001)
            else:
                return

    def end(self) -> None:
        with suppress(FileNotFoundError):
            self._journal.rmdir()


@dataclass
class Locked:
    """Another connection has the file for itself."""

    database: Path
    _other: sqlite3.Connection | None = None

    def begin(self) -> None:
        self._other = sqlite3.connect(self.database, isolation_level=None, check_same_thread=False)
        self._other.execute("BEGIN EXCLUSIVE")

    def end(self) -> None:
        if self._other is not None:
            self._other.close()
            self._other = None


@dataclass
class ReadOnly:
    """SQLite refuses to write, as on a file system that has become read-only. store: gives the opened one.

    Mounting it so does not go while the file is open for writing.
    """

    store: Callable[[], Store]
    _writes: bool = True
    _listens: bool = False

    def begin(self) -> None:
        self._writes = False
        if not self._listens:
            engine = self.store().client._tracking_client.store.engine
            sqlalchemy.event.listen(engine, "checkout", self._checked_out)
            self._listens = True

    def end(self) -> None:
        self._writes = True

    def _checked_out(self, connection: sqlite3.Connection, *_: object) -> None:
        connection.execute(f"PRAGMA query_only = {'OFF' if self._writes else 'ON'}")


@contextmanager
def mounted(folder: Path) -> Iterator[Callable[[str], None] | None]:
    """A file system at `folder`, and what mounts it again as `ro` or `rw`; None where this user may not mount any."""
    if not _run("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)):
        yield None
        return

    def again(how: str) -> None:
        assert _run("mount", "-o", f"remount,{how}", str(folder))

    try:
        yield again
    finally:
        _run("umount", "-l", str(folder))


def _run(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """MLflow's server on a SQLite file, killed with all of its processes and started again at the same port."""

    database: Path
    port: int = field(default_factory=free_port)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        files = str(self.database.parent / "files")
        words, environment = server_command(ServerSettings(f"sqlite:///{self.database}", files, port=self.port))
        with self.database.with_name("server.log").open("ab") as log:
            self._process = subprocess.Popen(words, env=environment, start_new_session=True, stdout=log, stderr=log)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self.database.with_name("server.log").read_text()
            with suppress(OSError), opener.open(f"{self.address}/health", timeout=2):
                return
            time.sleep(0.1)
        raise AssertionError("the server never answered")

    def kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(LIMIT_S)
            self._process = None

    begin, end = kill, start


class Proxy(ThreadingHTTPServer):
    """Stands before a server and loses answers: what is asked is done, but who asked never hears of it.

    lose: by the end of an address how many of its answers from now on. lost: the addresses of those that were.
    """

    daemon_threads = True

    def __init__(self, port: int) -> None:
        """port: of the server, on this machine."""
        super().__init__(("127.0.0.1", 0), _Forward)
        self.target = port
        self.lose: dict[str, int] = {}
        self.lost: list[str] = []
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def loses(self, path: str) -> bool:
        """Whether this answer is one to lose."""
        with self._guard:
            for ending, left in self.lose.items():
                if left > 0 and path.partition("?")[0].endswith(ending):
                    self.lose[ending] -= 1
                    self.lost.append(ending)
                    return True
            return False

    def stop(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Forward(BaseHTTPRequestHandler):
    def _forward(self) -> None:
        assert isinstance(self.server, Proxy)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection", "accept-encoding")}
        connection = HTTPConnection("127.0.0.1", self.server.target, timeout=LIMIT_S)
        try:
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if self.server.loses(self.path):
            self.close_connection = True
            return
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.getheader("Content-Type", "application/json"))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _forward  # noqa: N815 - names of the standard library

    def log_message(self, *_: object) -> None:
        pass


def later(seconds: float, call: Callable[[], None]) -> threading.Timer:
    """`call` in another thread after so many seconds."""
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    return timer
