"""How many runs go on at once, and which of them first."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from experiments.config import load_run_file
from experiments.expansion import PlannedRun
from experiments.sweeps import flights
from experiments.sweeps.flights import available_bytes, flight_limit, wait_for_memory
from experiments.sweeps.queue import queued
from fedsir.clients.machine import Limits
from mlflow_tracking.states import RecordedState


@pytest.mark.parametrize(
    ("slots", "clients", "expected"),
    [(1, 5, 2), (2, 5, 3), (2, 30, 3), (8, 30, 3), (16, 5, 6), (16, 1, 17), (4, 1, 5)],
)
def test_as_many_runs_as_keep_the_workers_busy(slots: int, clients: int, expected: int) -> None:
    assert flight_limit(slots, clients) == expected
    # Without one of them, which is between rounds, there are clients for every worker.
    assert (expected - 1) * clients >= slots


def test_a_run_waits_for_memory_while_others_can_free_some(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_run_file("demo", [])
    monkeypatch.setattr(flights, "PAUSE_S", 0.0)
    seen: list[int] = []
    left = iter([2, 2, 1, 0, 0])

    def running() -> int:
        seen.append(next(left))
        return seen[-1]

    monkeypatch.setattr(flights, "available_bytes", lambda: 0)
    wait_for_memory(config, threading.Event(), running)
    # With nobody left it begins all the same: it cannot become more.
    assert seen == [2, 2, 1, 0]


def test_with_memory_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "available_bytes", lambda: 2**40)
    wait_for_memory(load_run_file("demo", []), threading.Event(), lambda: 5)


def test_waiting_ends_with_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "available_bytes", lambda: 0)
    stopping = threading.Event()
    stopping.set()
    wait_for_memory(load_run_file("demo", []), stopping, lambda: 1)


def test_the_system_says_how_much_there_is() -> None:
    assert 10**6 < available_bytes() < 2**50


@pytest.mark.parametrize(
    ("limit", "told", "expected"),
    [
        (2**40, "MemTotal: 9000 kB\nMemAvailable:    7000 kB\n", 7_168_000),
        # The machine has more than SLURM or a container lets us have.
        (5_000_000, "MemAvailable:    7000 kB\n", 5_000_000),
        (5_000_000, "MemTotal: 9000 kB\n", 5_000_000),
        (5_000_000, None, 5_000_000),
    ],
)
def test_memory_is_what_is_free_up_to_the_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: int, told: str | None, expected: int
) -> None:
    monkeypatch.setattr(flights, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(flights, "machine_limits", lambda: Limits({"cores": 1}, {"memory": 2**50, "cgroup": limit}))
    if told is not None:
        (tmp_path / "meminfo").write_text(told, encoding="ascii")
    assert available_bytes() == expected


def planned(name: str, *overrides: str, group: int = 0) -> PlannedRun:
    config = load_run_file("demo", [f"name={name}", *overrides])
    return PlannedRun(identity=name, config=config, source="demo", label=name, group=group, cells=(), missing=())


def names(runs: list[Any]) -> list[str]:
    return [run.label for run in runs]


RUNS = [planned(name) for name in ("short", "long", "done", "broken", "stopped")]
COSTS = {"short": 1.0, "long": 9.0, "done": 5.0, "broken": 7.0, "stopped": 3.0}
STATES = {
    "done": RecordedState("finished", "1", accuracy=0.5),
    "broken": RecordedState("failed", "2", error="no"),
    "stopped": RecordedState("interrupted", "3"),
}


def test_the_longest_first_and_what_is_done_not_at_all() -> None:
    queue, tally = queued(RUNS, STATES, COSTS, None, retry=False)
    assert names(queue) == ["long", "stopped", "short"]
    assert (tally.finished_before, names(tally.failed_before), tally.left) == (1, ["broken"], 0)


def test_retry_takes_what_has_failed_alone() -> None:
    queue, tally = queued(RUNS, STATES, COSTS, None, retry=True)
    assert names(queue) == ["broken"]
    assert tally.failed_before == []


def test_a_limit_takes_the_longest() -> None:
    queue, tally = queued(RUNS, STATES, COSTS, 1, retry=False)
    assert names(queue) == ["long"]
    assert tally.left == 2


def test_runs_that_share_a_condition_follow_each_other() -> None:
    runs = [planned(name, group=group) for name, group in (("a", 0), ("b", 0), ("c", 1), ("d", 1), ("e", 2))]
    queue, _ = queued(runs, {}, {"a": 1.0, "b": 2.0, "c": 1.5, "d": 9.0, "e": 2.0}, None, retry=False)
    assert names(queue) == ["d", "c", "b", "a", "e"]


def test_runs_that_need_other_workers_do_not_mix() -> None:
    runs = [planned(n, f"execution.threads={t}") for n, t in (("a", 1), ("b", 2), ("c", 1), ("d", 2))]
    queue, _ = queued(runs, {}, {"a": 1.0, "b": 4.0, "c": 3.0, "d": 2.0}, None, retry=False)
    assert names(queue) == ["c", "a", "b", "d"]
