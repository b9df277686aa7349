"""Calls that wait for a store which is out of reach."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from fedsir.errors import RunFailed, StoreUnreachable
from mlflow_tracking import outage
from mlflow_tracking.delivery import attempt, patiently
from mlflow_tracking.outage import Reach
from mlflow_tracking.store import Store

LONG_S = 60.0


class Flaky:
    """A call that fails so often before it works."""

    def __init__(self, failures: int, error: Exception | None = None) -> None:
        self.failures = failures
        self.error = ConnectionRefusedError(111, "Connection refused") if error is None else error
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return "done"


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(outage, "LONGEST_PAUSE_S", 0.02)


@pytest.fixture
def here(store: Store) -> Store:
    """The session's store as nobody else sees it."""
    return replace(store, lock=threading.RLock(), reach=Reach())


def test_it_waits_until_the_store_is_back(here: Store, caplog: pytest.LogCaptureFixture) -> None:
    call, again = Flaky(9), Flaky(3)
    assert patiently(here, call, LONG_S) == "done"
    assert call.calls == 10
    assert patiently(here, call, LONG_S) == "done"
    # Said once, however often it was tried.
    assert [r.levelno for r in caplog.records] == [logging.WARNING] * 2
    lost, back = (r.getMessage() for r in caplog.records)
    assert "cannot be used just now: Connection refused." in lost
    assert "can be used again, after " in back
    call = Flaky(100)
    assert patiently(here, call, LONG_S, again=again) == "done"
    assert (call.calls, again.calls) == (1, 4)


def test_it_gives_up_when_patience_ends(here: Store) -> None:
    call = Flaky(10**6)
    begin = time.monotonic()
    with pytest.raises(StoreUnreachable, match=r"mlflow.db could not be used.*: Connection refused$") as caught:
        patiently(here, call, 0.2)
    assert time.monotonic() - begin >= 0.2
    assert isinstance(caught.value, RunFailed)
    assert caught.value.__cause__ is call.error
    assert call.calls > 2


def test_those_who_follow_do_not_wait_all_over_again(here: Store) -> None:
    with pytest.raises(StoreUnreachable):
        patiently(here, Flaky(10**6), 0.2, since_lost=True)
    call, back = Flaky(10**6), Flaky(1)
    with pytest.raises(StoreUnreachable):
        patiently(here, call, 0.2, since_lost=True)
    # Only if nobody has just tried.
    assert call.calls <= 1
    time.sleep(0.05)
    # Patience begins anew once the store has been back.
    assert patiently(here, Flaky(0), 0.2, since_lost=True) == "done"
    assert patiently(here, back, LONG_S, since_lost=True) == "done"
    assert back.calls == 2


def test_without_patience_it_tries_once(here: Store) -> None:
    for known in (False, True):
        call = Flaky(10**6)
        # Also where others have just seen that it is out of reach.
        assert bool(here.reach.pause) == known
        with pytest.raises(StoreUnreachable):
            patiently(here, call, 0.0)
        assert call.calls == 1


def test_other_errors_are_raised_at_once(here: Store) -> None:
    call = Flaky(1, ValueError("wrong"))
    with pytest.raises(ValueError, match="wrong"):
        patiently(here, call, LONG_S)
    assert call.calls == 1
    assert here.reach.pause == 0


def test_a_run_that_is_stopped_waits_no_longer(here: Store) -> None:
    stopping = threading.Event()
    timer = threading.Timer(0.1, stopping.set)
    timer.start()
    with pytest.raises(StoreUnreachable, match="when the run was stopped"):
        patiently(here, Flaky(10**6), LONG_S, stopping)
    timer.join()
    # What the store can take is still recorded.
    here.reach.found()
    assert patiently(here, Flaky(0), LONG_S, stopping) == "done"


def test_others_use_the_store_while_one_waits(here: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "FIRST_PAUSE_S", LONG_S)
    monkeypatch.setattr(outage, "LONGEST_PAUSE_S", LONG_S)
    failed, stopping = threading.Event(), threading.Event()
    ended = list[str]()

    def first() -> str:
        failed.set()
        raise ConnectionResetError

    def wait() -> None:
        try:
            patiently(here, first, LONG_S, stopping)
        except StoreUnreachable as error:
            ended.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    assert failed.wait(LONG_S)
    assert here.lock.acquire(timeout=LONG_S / 2)
    here.lock.release()
    assert thread.is_alive()
    stopping.set()
    thread.join(LONG_S)
    assert len(ended) == 1


def test_of_many_that_wait_one_tries(here: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "FIRST_PAUSE_S", 0.2)
    monkeypatch.setattr(outage, "LONGEST_PAUSE_S", 0.2)
    tries = list[float]()

    def call() -> Any:
        tries.append(time.monotonic())
        if len(tries) < 4:
            raise ConnectionResetError
        return None

    threads = [threading.Thread(target=patiently, args=(here, call, LONG_S)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    # Three that failed, one pause apart, and then one success for each.
    assert len(tries) == 3 + len(threads)
    assert all(later - earlier >= 0.15 for earlier, later in pairwise(tries[:4]))


def test_an_attempt_does_not_wait(here: Store) -> None:
    call = Flaky(1)
    with pytest.raises(ConnectionRefusedError):
        attempt(here, call)
    assert here.reach.pause > 0
    assert attempt(here, call) == "done"
    assert here.reach.pause == 0
