"""Dispatches in parts: the same results in the same order, and no more of them in memory than needed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsir.clients.executor import Outcome, WorkItem
from fedsir.clients.parts import PART_BYTES, PART_CLIENTS, PART_PER_SLOT, in_parts, run_in_parts
from fedsir.clients.runtime import Work
from fedsir.clients.tasks import ClientResult
from fedsir.errors import RunFailed

PATIENCE_S = 20.0


def items(count: int) -> list[WorkItem]:
    return [WorkItem(k, 0, lambda *_: ClientResult(None), 1) for k in range(count)]


class Update:
    """Something that can be watched being let go of."""

    def __init__(self, client: int) -> None:
        self.client = client


@dataclass
class Recording:
    """An executor of two slots that notes which parts it was given, and may wait or fail before it answers."""

    slots: int = 2
    failing: dict[int, BaseException] = field(default_factory=dict)
    gates: dict[int, threading.Event] = field(default_factory=dict)
    begun: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    began: threading.Condition = field(default_factory=threading.Condition)

    def prepare(self, setup: Any) -> None: ...

    def close(self) -> None: ...

    def run(self, items: Sequence[WorkItem], broadcast: Any) -> list[Outcome]:  # noqa: ARG002
        first = items[0].client
        with self.began:
            self.begun.append(first)
            self.began.notify_all()
        if first in self.gates:
            assert self.gates[first].wait(PATIENCE_S)
        self.ended.append(first)
        if first in self.failing:
            raise self.failing[first]
        return [Outcome(ClientResult(Update(i.client)), Work()) for i in items]

    def wait_for(self, first: int) -> None:
        with self.began:
            assert self.began.wait_for(lambda: first in self.begun, PATIENCE_S)


@given(st.integers(0, 3000), st.integers(1, 10**8), st.integers(1, 64))
def test_parts_are_the_items_in_order_and_nearly_equal(count: int, nbytes: int, slots: int) -> None:
    given_items = items(count)
    parts = in_parts(given_items, nbytes, slots)
    assert [i for part in parts for i in part] == given_items
    most = max(PART_BYTES // nbytes, PART_CLIENTS, PART_PER_SLOT * slots)
    lengths = [len(part) for part in parts]
    assert all(0 < n <= most for n in lengths)
    assert max(lengths, default=0) - min(lengths, default=0) <= 1
    # No more parts than are needed.
    assert (len(parts) - 1) * most < count or count == 0


def test_the_federations_of_the_paper_go_as_a_whole() -> None:
    assert len(in_parts(items(30), 16 * 2**20, slots=2)) == 1


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_outcomes_come_in_order(slots: int, number: int) -> None:
    executor = Recording(slots)
    parts = [items(6 * number)[6 * p : 6 * p + 6] for p in range(number)]
    found = [o.result.update.client for outcomes in run_in_parts(executor, parts, {}) for o in outcomes]
    assert found == list(range(6 * number))
    assert sorted(executor.begun) == [6 * p for p in range(number)]


def test_without_parts_nothing_runs() -> None:
    executor = Recording()
    assert list(run_in_parts(executor, [], {})) == []
    assert executor.begun == []


def test_the_next_part_is_worked_on_while_the_last_is_looked_at_and_the_one_after_waits() -> None:
    executor = Recording()
    outcomes = run_in_parts(executor, [[i] for i in items(4)], {})
    next(outcomes)
    executor.wait_for(1)
    assert 2 not in executor.begun
    next(outcomes)
    executor.wait_for(2)
    assert 3 not in executor.begun


@pytest.mark.parametrize("slots", [1, 2])
def test_what_was_looked_at_is_let_go_of(slots: int) -> None:
    executor = Recording(slots)
    alive: list[weakref.ref[Update]] = []
    largest = 0
    for outcomes in run_in_parts(executor, [[i] for i in items(8)], {}):
        alive.append(weakref.ref(outcomes[0].result.update))
        gc.collect()
        largest = max(largest, sum(a() is not None for a in alive))
        del outcomes
    assert largest == 1


@pytest.mark.parametrize("error", [RunFailed("client 0 failed"), KeyboardInterrupt()])
def test_an_error_waits_for_nothing(error: BaseException) -> None:
    gate = threading.Event()
    executor = Recording(failing={0: error}, gates={1: gate})
    with pytest.raises(type(error)):
        list(run_in_parts(executor, [[i] for i in items(4)], {}))
    assert executor.ended == [0]
    gate.set()
