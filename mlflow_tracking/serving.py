"""Starts MLflow's own server on a store: for one's browser, or as the tracking server of several machines."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from types import FrameType
from urllib.parse import quote, urlencode

from fedsir.errors import BadInput, RunFailed
from mlflow_tracking.config import SERVER_SCHEMES, shown_uri, sqlite_path
from mlflow_tracking.describe import TAG_RUN_ID
from mlflow_tracking.store import prepare_database

LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 120.0
"""Longest time until the server answers; it imports MLflow in every worker."""

END_TIMEOUT_S = 10.0
PAUSE_S = 0.2


@dataclass(frozen=True)
class ServerSettings:
    """What a server serves and where.

    host: name or address to listen at, IPv6 without brackets.
    uri: SQLite file or database. artifacts: folder or address (`s3://BUCKET/FOLDER`) of the files of experiments that
    are created through the server; None where it is only looked at. allowed_hosts: names under which others reach it,
    separated by commas; MLflow refuses requests under unknown names.
    """

    uri: str
    artifacts: str | None = None
    host: str = LOOPBACK
    port: int = 5000
    workers: int = 1
    allowed_hosts: str | None = None

    @property
    def address(self) -> str:
        """Where a browser on this machine finds it."""
        number = _as_number(self.host)
        if number is None or not number.is_unspecified:
            return f"http://{self.listens_at}"
        # A server at all IPv6 addresses need not serve those of IPv4.
        return f"http://{LOOPBACK if number.version == 4 else '[::1]'}:{self.port}"

    @property
    def listens_at(self) -> str:
        """Host and port as addresses have them."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def is_open(self) -> bool:
        """Whether other machines can reach it."""
        number = _as_number(self.host)
        return self.host != "localhost" if number is None else not number.is_loopback


def _as_number(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def host_of(given: str) -> str:
    """A host without the brackets that IPv6 addresses have before a port."""
    return given[1:-1] if given.startswith("[") and given.endswith("]") else given


def artifact_place(uri: str, given: str | None) -> str:
    """Where artifacts go: `given`, a folder made absolute; by default beside a SQLite file or in `fedsir-runs`."""
    if given is not None and "://" in given:
        return given
    database = sqlite_path(uri)
    folder = Path("fedsir-runs") if database is None else database.parent
    place = folder / "artifacts" if given is None else Path(given)
    return str(place.expanduser().absolute())


def serve(settings: ServerSettings, ready: Callable[[], None]) -> None:
    """Serve until Ctrl-C (returns), SIGTERM or the end of the terminal (SystemExit 143 or 129); calls `ready` once the
    server answers.

    Raises BadInput for a store, folder or port that cannot be used, RunFailed if the server does not start or ends.
    """
    _check_port(settings)
    _check_artifacts(settings)
    prepare_database(settings.uri)
    with _terminated_by_signal(), _server(settings) as process:
        try:
            _wait_until_it_answers(process, settings)
            ready()
            code = process.wait()
        except KeyboardInterrupt:
            return
    raise RunFailed(f"the MLflow server at {settings.address} has ended with code {code}; its last lines say why.")


def run_tables(settings: ServerSettings) -> dict[str, str]:
    """By name of experiment the address of its table of runs, best first, without the runs above whole grids."""
    from mlflow.tracking import MlflowClient

    found = MlflowClient(tracking_uri=settings.uri, registry_uri=settings.uri).search_experiments()
    # The dashboard's own names; without the first of them it takes every experiment for one about language models.
    view = {
        "workflowType": "machine_learning",
        "startTime": "ALL",
        "searchFilter": f"tags.{TAG_RUN_ID} != ''",
        "orderByKey": "metrics.`final/accuracy`",
        "orderByAsc": "false",
    }
    words = urlencode(view, quote_via=quote)
    return {
        experiment.name: f"{settings.address}/#/experiments/{experiment.experiment_id}/runs?{words}"
        for experiment in found
        if experiment.name != "Default"
    }


def server_command(settings: ServerSettings) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of MLflow's server; addresses of databases are no arguments, which all users see."""
    words = [sys.executable, "-m", "mlflow", "server", "--host", settings.host, "--port", str(settings.port)]
    words += ["--workers", str(settings.workers), "--uvicorn-opts", "--log-level warning"]
    if settings.allowed_hosts is not None:
        words += ["--allowed-hosts", settings.allowed_hosts]
    environment = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # Jobs are for evaluating language models; each kind has a process of its own.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        # Its libraries' warnings about each other concern nobody here.
        "PYTHONWARNINGS": "ignore",
        **os.environ,
        "MLFLOW_BACKEND_STORE_URI": settings.uri,
        "MLFLOW_REGISTRY_STORE_URI": settings.uri,
    }
    # Settings of clients, which would lead the server back to itself.
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        environment.pop(name, None)
    if settings.artifacts is not None:
        words += ["--artifacts-destination", settings.artifacts]
    return words, environment


@contextmanager
def _server(settings: ServerSettings) -> Iterator[subprocess.Popen[bytes]]:
    words, environment = server_command(settings)
    # A group of its own: MLflow starts workers that a signal to it alone would leave behind.
    process = subprocess.Popen(words, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)
            return


@contextmanager
def _terminated_by_signal() -> Iterator[None]:
    """SIGTERM and the loss of the terminal end the server too, not only this process."""
    # `nohup` has the second ignored, and so it stays. Windows does not have it.
    known = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in known if signal.getsignal(number) is not signal.SIG_IGN}

    def stop(number: int, _: FrameType | None) -> None:
        # A terminal that closes may tell twice; the end of the server must not be cut short by the second time.
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_until_it_answers(process: subprocess.Popen[bytes], settings: ServerSettings) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    # Not through a proxy, which knows nothing of this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RunFailed(f"the MLflow server did not start (code {process.returncode}); its last lines say why.")
        with suppress(OSError), opener.open(f"{settings.address}/health", timeout=PAUSE_S * 10):
            return
        time.sleep(PAUSE_S)
    raise RunFailed(f"the MLflow server has not answered at {settings.address} for {START_TIMEOUT_S:.0f} s.")


def _check_port(settings: ServerSettings) -> None:
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As servers do: a port whose last connections are still being closed is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((settings.host, settings.port))
    except OSError as error:
        raise BadInput(
            f"{settings.listens_at} cannot be served at: {error.strerror or error}.\n"
            f"Choose another port, for example --port {settings.port + 1}, or another --host."
        ) from error


def _check_artifacts(settings: ServerSettings) -> None:
    place = settings.artifacts
    if place is None:
        return
    if "://" not in place:
        try:
            Path(place).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(
                f"artifacts cannot be kept in {place}: {error.strerror or error}.\nGive --artifacts FOLDER."
            ) from error
    elif place.startswith("s3://") and find_spec("boto3") is None:
        raise BadInput(f"{place} needs the package boto3.\npip install 'fedsir[server]'")


def refuse_server(uri: str) -> None:
    """Raise BadInput where `uri` is a server already: it needs none."""
    if uri.partition("://")[0] in SERVER_SCHEMES:
        raise BadInput(f"{shown_uri(uri)} is a tracking server already; open that address in a browser.")
