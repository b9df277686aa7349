"""Ray starts while something else goes on, is waited for, and ends with it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from fedsir.clients import local_ray, ray_ahead
from fedsir.config.training import ExecutionConfig
from fedsir.errors import BadInput


class FakeRay:
    """Starts when it is let; notes which threads did what."""

    def __init__(self) -> None:
        self.starting = threading.Event()
        self.may_start = threading.Event()
        self.running = False
        self.happened: list[tuple[str, str]] = []
        self.fails = 0

    def init(self, *_: Any, **__: Any) -> None:
        self.starting.set()
        assert self.may_start.wait(30)
        if self.fails:
            self.fails -= 1
            raise RuntimeError("no room")
        self.note("started")
        self.running = True

    def is_initialized(self) -> bool:
        return self.running

    def shutdown(self) -> None:
        self.note("shut down")
        self.running = False

    def note(self, what: str) -> None:
        self.happened.append((what, threading.current_thread().name))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    found = FakeRay()
    used = SimpleNamespace(init=found.init, is_initialized=found.is_initialized, shutdown=found.shutdown)
    monkeypatch.setattr(local_ray, "ray", used)
    monkeypatch.setattr(ray_ahead, "ray", used)
    return found


def test_it_starts_beside_the_caller_and_is_waited_for(fake: FakeRay) -> None:
    with ray_ahead.ray_ahead(ExecutionConfig()):
        assert fake.starting.wait(30)
        assert not fake.running
        threading.Timer(0.2, fake.may_start.set).start()
        local_ray.start_ray(ExecutionConfig())
        assert fake.running
        # Linux would end Ray's processes with it.
        assert "start of Ray" in {thread.name for thread in threading.enumerate()}
    assert fake.happened == [("started", "start of Ray"), ("shut down", "start of Ray")]
    assert "start of Ray" not in {thread.name for thread in threading.enumerate()}


def test_an_early_end_waits_for_the_start(fake: FakeRay) -> None:
    def interrupted() -> None:
        with ray_ahead.ray_ahead(ExecutionConfig()):
            threading.Timer(0.2, fake.may_start.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [what for what, _ in fake.happened] == ["started", "shut down"]


def test_what_is_wrong_is_said_to_whoever_needs_it(fake: FakeRay) -> None:
    fake.fails = 2
    fake.may_start.set()
    with ray_ahead.ray_ahead(ExecutionConfig()), pytest.raises(BadInput, match="no room"):
        local_ray.start_ray(ExecutionConfig())
    # Nobody needs it here.
    fake.fails = 1
    with ray_ahead.ray_ahead(ExecutionConfig()):
        pass
    assert "started" not in [what for what, _ in fake.happened]


def test_a_session_that_is_closed_meanwhile_waits_for_the_start(fake: FakeRay) -> None:
    """As where Ctrl-C comes while the workers wait for Ray."""
    with ray_ahead.ray_ahead(ExecutionConfig()):
        assert fake.starting.wait(30)
        threading.Timer(0.2, fake.may_start.set).start()
        local_ray.stop_ray()
    assert fake.happened[0] == ("started", "start of Ray")
    assert fake.happened[1] == ("shut down", "MainThread")


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_another_kind_is_said_once(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: ExecutionConfig) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(ray_ahead, "start_ray", failing)
    with ray_ahead.ray_ahead(ExecutionConfig()):
        pass
    assert fake.happened == [("shut down", "start of Ray")]


def test_a_ray_that_runs_already_is_left_alone(fake: FakeRay) -> None:
    fake.running = True
    with ray_ahead.ray_ahead(ExecutionConfig()):
        pass
    assert fake.happened == []
    assert fake.running
