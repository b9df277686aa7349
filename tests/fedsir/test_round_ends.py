"""The end of a round beside the next round's training: what order holds, and what becomes of errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from fedsir.round_ends import Round, RoundEnds
from fedsir.server import RoundCosts

LIMIT_S = 60.0


class Script:
    """Evaluations that wait until they may go on; what was finished, in order."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.entered = threading.Event()
        self.finishing: Callable[[], Any] = lambda: None
        self.finished: list[tuple[int, Any]] = []
        self.threads: set[threading.Thread] = set()
        self.evaluation: Callable[[Any], Any] = lambda state: f"figures of {state}"

    def evaluate(self, state: Any) -> Any:
        self.threads.add(threading.current_thread())
        self.entered.set()
        assert self.go_on.wait(LIMIT_S)
        return self.evaluation(state)

    def finish(self, ended: Round, figures: Any) -> None:
        self.finishing()
        self.finished.append((ended.number, figures))

    def ends(self, overlap: bool = True) -> RoundEnds:
        return RoundEnds(self.evaluate, self.finish, overlap)


def ending(number: int) -> Round:
    return Round(number, f"state {number}", RoundCosts())  # type: ignore[arg-type]


def test_a_round_ends_beside_its_caller_and_is_waited_for_once() -> None:
    script, first = Script(), ending(0)
    with script.ends() as ends:
        assert ends.wait() is None
        ends.begin(first)
        assert script.finished == []
        script.go_on.set()
        ended = ends.wait()
        assert ended is not None
        assert ended.figures == "figures of state 0"
        assert ends.wait() is None
    assert script.finished == [(0, "figures of state 0")]
    assert threading.current_thread() not in script.threads
    assert first.costs.seconds["evaluate"] > 0


def test_without_workers_to_spare_it_ends_at_once_in_this_thread() -> None:
    script = Script()
    script.go_on.set()
    with script.ends(overlap=False) as ends:
        ends.begin(ending(0))
        assert script.finished == [(0, "figures of state 0")]
    assert script.threads == {threading.current_thread()}


@pytest.mark.parametrize("overlap", [True, False])
def test_what_goes_wrong_in_the_end_of_a_round_is_raised(overlap: bool) -> None:
    script = Script()
    script.go_on.set()
    script.evaluation = lambda _: int("no number")

    def through() -> None:
        with script.ends(overlap) as ends:
            ends.begin(ending(0))
            ends.wait()

    with pytest.raises(ValueError, match="no number"):
        through()
    assert script.finished == []


def test_a_round_that_fails_takes_nothing_from_the_one_before() -> None:
    script = Script()

    def through() -> None:
        with script.ends() as ends:
            ends.begin(ending(0))
            script.go_on.set()
            raise ArithmeticError("the next round")

    with pytest.raises(ArithmeticError, match="the next round"):
        through()
    assert script.finished == [(0, "figures of state 0")]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_who_interrupts_does_not_wait_for_an_evaluation(kind: type[BaseException]) -> None:
    script = Script()

    def through() -> None:
        with script.ends() as ends:
            ends.begin(ending(0))
            assert script.entered.wait(LIMIT_S)
            raise kind

    with pytest.raises(kind):
        through()
    script.go_on.set()
    for thread in script.threads:
        thread.join(LIMIT_S)
    assert script.finished == []


def test_what_is_being_written_is_written_when_somebody_interrupts() -> None:
    script, writing = Script(), threading.Event()
    script.go_on.set()
    released = threading.Timer(0.2, lambda: None)

    def finishing() -> None:
        writing.set()
        released.start()
        released.join(LIMIT_S)

    script.finishing = finishing

    def through() -> None:
        with script.ends() as ends:
            ends.begin(ending(0))
            assert writing.wait(LIMIT_S)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        through()
    assert script.finished == [(0, "figures of state 0")]


def test_where_the_end_of_a_round_and_the_next_round_fail_the_older_error_is_raised() -> None:
    script = Script()
    script.go_on.set()

    def full() -> None:
        raise OSError("No space left")

    script.finishing = full

    def through() -> None:
        with script.ends() as ends:
            ends.begin(ending(0))
            raise ArithmeticError("the next round")

    with pytest.raises(OSError, match="No space left") as caught:
        through()
    assert isinstance(caught.value.__context__, ArithmeticError)
