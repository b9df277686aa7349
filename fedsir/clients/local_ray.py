"""Starts or joins Ray for the actors: quiet, bound to the loopback address, for this user alone; signals left alone."""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import signal
import socket
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray._common.utils import get_default_system_temp_dir
from ray._private import ray_constants
from ray._private import utils as worker_utils
from ray._private import worker as ray_worker
from ray._private.node import Node

from fedsir.clients.machine import machine_limits, ray_resources, visible_gpus
from fedsir.config.training import ExecutionConfig
from fedsir.environment import environment
from fedsir.errors import BadInput, first_line

LOOPBACK = "127.0.0.1"
CONNECT_TIMEOUT_S = 5.0
NO_STATISTICS = {
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",
    # Of the load of machine and processes.
    "REPORTER_UPDATE_INTERVAL_MS": str(60 * 60 * 1000),
}
"""What Ray counts for its dashboard, which a local one is started without. Counting takes processor time from clients:
where their rounds are short, more than a hundredth. Users who want it set the variables themselves."""

UNUSED = ("start_api_server", "start_log_monitor", "start_monitor")
"""By which Ray starts a server for its dashboard, a reader of logs and a scaler of clusters, also where it is told that
there is no dashboard, nobody wants the logs and it has this machine alone. The first training step would wait for them
for a tenth of its time, and they take memory as long as a run lasts."""

TOKEN_VARIABLES = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
"""Where users give Ray's token; otherwise it is in their home folder."""

_STARTING = threading.Lock()

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Whose handlers are the caller's, whatever Ray would like."""

# `signal.signal` does the same, but in the main thread alone.
_GET_HANDLER = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int)(("PyOS_getsig", ctypes.pythonapi))
_SET_HANDLER = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(("PyOS_setsig", ctypes.pythonapi))

HANDLER_LOOK_S = 0.02

VITAL = ("gcs_server", "raylet")
"""Processes of Ray that nothing works without."""


def start_ray(config: ExecutionConfig) -> None:
    """Join the configured Ray cluster, or start a quiet local one bound to the loopback address.

    A local one counts the cores, memory and GPUs that this process may use, see `machine`.

    Raises BadInput when the address cannot be joined.
    """
    with _STARTING:
        if not ray.is_initialized():
            try:
                _start_ray(config)
            except BaseException:
                # What has been started so far would stay, unknown to the next attempt.
                ray.shutdown()
                raise


def stop_ray() -> None:
    """Shut Ray down, after its start where another thread is at that: in the middle of it Ray cannot be stopped."""
    with _STARTING:
        ray.shutdown()


def _start_ray(config: ExecutionConfig) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = config.ray_address
    try:
        with _signals_wait():
            if address is None:
                resources = ray_resources(machine_limits(), visible_gpus())
                _keep_token_private()
                own: dict[str, Any] = {"_node_ip_address": LOOPBACK, "_temp_dir": _private_folder()}
                unasked = {name: value for name, value in NO_STATISTICS.items() if name not in os.environ}
                with _loopback_only(), _nothing_unused(), environment(unasked), _handlers_of_the_system():
                    # `local`: a cluster that happens to run on this machine is not joined unasked.
                    ray.init("local", include_dashboard=False, **own, **resources, **quiet)
            else:
                _check_answers(address)
                with _handlers_of_the_system():
                    ray.init(address, **quiet)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        reason = first_line(error)
        if address is None:
            raise BadInput(
                f"Ray cannot be started on this machine: {reason}\n"
                "See `fedsir doctor`, or set execution.actors to in-process to do without Ray."
            ) from error
        raise BadInput(
            f"execution.ray_address: cannot join the Ray cluster at {address}: {reason}\n"
            "Start one with `ray start --head`, or leave execution.ray_address out."
        ) from error


def watch_ray(ended: Callable[[str], None]) -> None:
    """Call `ended`, from another thread, with the name of each vital process of Ray when it ends.

    Only of a Ray that this process has started; a joined cluster has them elsewhere. They are waited for rather than
    asked for: without its raylet Ray ends this process, unannounced, as soon as an object is read, written or freed.
    """

    def wait(name: str, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        ended(name)

    node = ray_worker._global_node
    started: Mapping[str, Any] = {} if node is None else node.all_processes
    for name in VITAL:
        for info in started.get(name, ()):
            threading.Thread(target=wait, args=(name, info.process), name=f"watch {name}", daemon=True).start()


def _check_answers(address: str) -> None:
    """Raise OSError where nobody listens at `HOST:PORT`; Ray itself would retry for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back until Ray has started, and keep the caller's handlers.

    For the main thread, the only one that signals interrupt; in another one Ray installs no handler in Python. What it
    installs below Python: `_handlers_of_the_system`.

    Interrupted in the middle of its start, Ray hangs, or goes on as if nothing had happened. It also installs a
    handler of its own for SIGTERM; what a termination means is not for a library to say.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    replaced = worker_utils.set_sigterm_handler
    for number in before:
        signal.signal(number, note)
    worker_utils.set_sigterm_handler = lambda _: None
    try:
        yield
    finally:
        worker_utils.set_sigterm_handler = replaced
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


@contextmanager
def _handlers_of_the_system() -> Iterator[None]:
    """Keep what the system calls for a signal, also where another thread than the main one starts Ray.

    In the middle of its start Ray puts a handler of its own in front of Python's for SIGTERM: it reports a crash, and
    aborts the process unless that ends within three seconds. So it is looked for all the time.
    """
    before = {number: _GET_HANDLER(number) for number in SIGNALS}
    over = threading.Event()

    def put_back() -> None:
        for number, handler in before.items():
            _SET_HANDLER(number, handler)

    def watch() -> None:
        while not over.wait(HANDLER_LOOK_S):
            put_back()

    watcher = threading.Thread(target=watch, name="signal handlers", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        put_back()


def _keep_token_private() -> None:
    """See to it that only this user can read the token that Ray wants of everybody who talks to it.

    Other users of a machine reach the loopback address as well. Ray keeps the token in the home folder, in a file that
    they may be able to read, and does not start where it cannot be written.
    """
    if os.environ.get("RAY_AUTH_MODE", "token") != "token" or TOKEN_VARIABLES & set(os.environ):
        return
    try:
        file = Path.home() / ".ray" / "auth_token"
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix="auth_token-") as new:
            new.write(secrets.token_hex(32))
            new.flush()
            # Whole at once, and not in place of one that is there.
            with suppress(FileExistsError):
                os.link(new.name, file)
        file.chmod(0o600)
    except (OSError, RuntimeError):  # no home folder, or one that is not to be written to
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _private_folder() -> str | None:
    """Where Ray may keep its sockets, logs and spilled objects: a folder in one that only this user can enter.

    Ray makes its own folders writable for everybody, who could then put other sockets in place of its own. None where
    the system has no such users. Raises OSError where somebody else has taken the name.
    """
    if not hasattr(os, "getuid"):
        return None
    folder = Path(get_default_system_temp_dir(), f"ray-{os.getuid()}")  # type: ignore[no-untyped-call]
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else; set RAY_TMPDIR to a folder of your own")
    folder.chmod(0o700)
    return str(folder / "ray")


@contextmanager
def _nothing_unused() -> Iterator[None]:
    """Let Ray start nothing of `UNUSED`, and its agent as in an installation without a dashboard.

    What a version of Ray does not have is passed over.
    """
    no_dashboard = ImportError("no dashboard is wanted")
    stand_ins: list[tuple[Any, str, Callable[..., object]]] = [(Node, name, lambda *_, **__: None) for name in UNUSED]
    stand_ins.append((worker_utils, "get_dashboard_dependency_error", lambda: no_dashboard))
    stand_ins = [(owner, name, stand_in) for owner, name, stand_in in stand_ins if hasattr(owner, name)]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in stand_ins]
    for owner, name, stand_in in stand_ins:
        setattr(owner, name, stand_in)
    try:
        yield
    finally:
        for owner, name, method in kept:
            setattr(owner, name, method)


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Make Ray's servers listen on the loopback address alone, as they do on macOS and Windows.

    Elsewhere Ray replaces a loopback `_node_ip_address` by the address of a network card and listens on all of
    them, unless it is told that there will be no cluster: by this variable, which it has read at import.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        with environment({ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
