"""How a local Ray is started: signals wait, handlers and environment come back, unreachable clusters are refused."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private import ray_constants, utils
from ray._private import worker as ray_worker
from ray._private.node import Node

from fedsir.clients import local_ray
from fedsir.config.training import ExecutionConfig
from fedsir.errors import BadInput

VARIABLE = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR


class Terminated(Exception):
    """What the caller's own handler of SIGTERM does."""


@pytest.fixture
def handlers() -> Iterator[None]:
    """The caller's handlers, put in for the test."""

    def stop(*_: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def ray_that(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], list[dict[str, Any]]]:
    """Replace Ray by one whose start does something; the list gets the settings of every start that was finished."""

    def replace(work: Callable[[], None]) -> list[dict[str, Any]]:
        finished: list[dict[str, Any]] = []

        def init(address: str, **settings: Any) -> None:
            # As Ray does.
            if threading.current_thread() is threading.main_thread():
                utils.set_sigterm_handler(lambda *_: os._exit(99))
            work()
            finished.append({"address": address, **settings})

        monkeypatch.setattr(
            local_ray, "ray", SimpleNamespace(init=init, is_initialized=lambda: False, shutdown=lambda: None)
        )
        return finished

    return replace


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)], ids=["SIGINT", "SIGTERM"]
)
@pytest.mark.usefixtures("handlers")
def test_signal_during_the_start_waits_for_its_end(
    ray_that: Any, number: signal.Signals, raised: type[BaseException]
) -> None:
    finished = ray_that(lambda: signal.raise_signal(number))
    with pytest.raises(raised):
        local_ray.start_ray(ExecutionConfig())
    assert len(finished) == 1


@pytest.mark.usefixtures("handlers")
def test_handlers_and_environment_come_back(ray_that: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), utils.set_sigterm_handler
    enabled = ray_constants.ENABLE_RAY_CLUSTER
    during = []
    ray_that(lambda: during.append((os.environ[VARIABLE], ray_constants.ENABLE_RAY_CLUSTER)))
    local_ray.start_ray(ExecutionConfig())
    assert during == [("0", False)]
    assert (os.environ[VARIABLE], ray_constants.ENABLE_RAY_CLUSTER) == ("1", enabled)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), utils.set_sigterm_handler) == before


@pytest.mark.usefixtures("handlers")
def test_handlers_of_libraries_do_not_stay_where_another_thread_starts_ray(ray_that: Any) -> None:
    """As that of Ray, which is set below Python, so that `signal.getsignal` knows nothing of it."""
    before, seen = local_ray._GET_HANDLER(signal.SIGTERM), []

    def work() -> None:
        local_ray._SET_HANDLER(signal.SIGTERM, 0)
        deadline = time.monotonic() + 30
        while local_ray._GET_HANDLER(signal.SIGTERM) != before and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(local_ray._GET_HANDLER(signal.SIGTERM))
        # And once more at the very end.
        local_ray._SET_HANDLER(signal.SIGTERM, 0)

    ray_that(work)
    thread = threading.Thread(target=local_ray.start_ray, args=(ExecutionConfig(),))
    thread.start()
    thread.join()
    assert seen == [before]
    assert local_ray._GET_HANDLER(signal.SIGTERM) == before


def test_local_ray_is_its_own_and_has_no_dashboard(ray_that: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that somebody runs on this machine is not joined unasked."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    variables = local_ray.NO_STATISTICS
    inherited: dict[str, str | None] = {}
    finished = ray_that(lambda: inherited.update({name: os.environ.get(name) for name in variables}))
    before = {name: os.environ.get(name) for name in variables}
    local_ray.start_ray(ExecutionConfig(threads=3))
    assert finished[0]["address"] == "local"
    assert finished[0]["include_dashboard"] is False
    # An environment of the job would make workers wait for another process.
    assert inherited == variables
    assert "runtime_env" not in finished[0]
    assert {name: os.environ.get(name) for name in variables} == before


def test_ray_starts_nothing_that_serves_nobody(ray_that: Any) -> None:
    """And what is left out is there again for those who start Ray themselves."""
    before = {name: getattr(Node, name) for name in local_ray.UNUSED}
    during = {}

    def look() -> None:
        node = Node.__new__(Node)
        during.update({name: getattr(node, name)(raise_on_failure=False) for name in local_ray.UNUSED})

    ray_that(look)
    local_ray.start_ray(ExecutionConfig())
    assert during == dict.fromkeys(local_ray.UNUSED)
    assert {name: getattr(Node, name) for name in local_ray.UNUSED} == before
    assert utils.get_dashboard_dependency_error() is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.usefixtures("local_ray")
def test_a_local_ray_is_nothing_but_what_it_needs() -> None:
    assert ray_worker._global_node is not None
    started = {name for name, processes in ray_worker._global_node.all_processes.items() if processes}
    # Without help of the kernel a reaper ends them with the program.
    assert started - {"reaper"} == set(local_ray.VITAL)
    (raylet,) = ray_worker._global_node.all_processes["raylet"]
    assert "--minimal" in Path(f"/proc/{raylet.process.pid}/cmdline").read_text()


def test_statistics_that_the_user_wants_are_kept(ray_that: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = "RAY_enable_metrics_collection"
    monkeypatch.setenv(wanted, "1")
    during: list[str] = []
    ray_that(lambda: during.append(os.environ[wanted]))
    local_ray.start_ray(ExecutionConfig())
    assert during == ["1"]


def test_failing_start_is_explained(ray_that: Any) -> None:
    def fail() -> None:
        raise RuntimeError("no space left\nmore")

    ray_that(fail)
    with pytest.raises(BadInput, match=r"(?s)cannot be started on this machine: no space left\n.*in-process"):
        local_ray.start_ray(ExecutionConfig())


def test_cluster_that_answers_is_joined(ray_that: Any) -> None:
    finished = ray_that(lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        local_ray.start_ray(ExecutionConfig(ray_address=address, threads=3))
    assert finished[0]["address"] == address
    # Workers would wait for another process that makes it.
    assert "runtime_env" not in finished[0]
    assert "_node_ip_address" not in finished[0]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "[::1]:1", "127.0.0.1:99999"])
def test_cluster_that_does_not_answer_is_refused_before_ray_tries(ray_that: Any, address: str) -> None:
    finished = ray_that(lambda: time.sleep(3600))
    with pytest.raises(BadInput, match=r"execution\.ray_address: cannot join"):
        local_ray.start_ray(ExecutionConfig(ray_address=address))
    assert finished == []
