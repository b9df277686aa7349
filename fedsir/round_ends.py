"""The ends of rounds: evaluation, checkpoint and record, beside the training of the round that follows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from fedsir import beside
from fedsir.evaluation.run import Figures
from fedsir.methods.base import MethodState
from fedsir.server import RoundCosts


@dataclass(frozen=True)
class Round:
    """What is known of a round once its model is there. number: from 0."""

    number: int
    state: MethodState
    costs: RoundCosts


@dataclass(frozen=True)
class Ended:
    """Figures of a round, and the seconds that saving and recording it took."""

    figures: Figures
    record: float


class RoundEnds:
    """Ends one round at a time. A context: a round whose end is under way is seen to when the block is left early.

    Workers would be idle while this process evaluates, saves and records, and the evaluation seldom occupies all of
    them, so they get the next round's training meanwhile. Nothing in that depends on how the round before ends.

    evaluate: figures of a state; takes long and changes nothing. finish: saves and records a round with its figures;
    never cut off in the middle. overlap: whether there are workers for both at once; otherwise `begin` does it all.
    """

    def __init__(
        self, evaluate: Callable[[MethodState], Figures], finish: Callable[[Round, Figures], None], overlap: bool
    ) -> None:
        self._evaluate = evaluate
        self._finish = finish
        self._overlap = overlap
        self._under_way: Future[Ended] | None = None
        self._finishing = threading.Lock()
        self._called_off = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            # Who interrupts does not want to wait for an evaluation; the round is done again. What is being written is
            # written.
            self._called_off = True
            with self._finishing:
                return
        try:
            # What goes wrong in a round takes nothing from the one before; where that went wrong too, it did so first.
            self.wait()
        except BaseException:
            self._called_off = True
            raise

    def begin(self, ending: Round) -> None:
        """End a round, after the one before: what that raised is to be had from `wait` only."""
        work = partial(self._end, ending)
        if self._overlap:
            self._under_way = beside.begin(work, "end of a round")
        else:
            ended = work()
            self._under_way = Future()
            self._under_way.set_result(ended)

    def wait(self) -> Ended | None:
        """The end of the round that was begun last, once; then None.

        Raises what ending it raised.
        """
        under_way, self._under_way = self._under_way, None
        return None if under_way is None else under_way.result()

    def _end(self, ending: Round) -> Ended:
        started = time.perf_counter()
        figures = self._evaluate(ending.state)
        ending.costs.seconds["evaluate"] += time.perf_counter() - started
        with self._finishing:
            if self._called_off:
                raise CancelledError(f"round {ending.number + 1} was called off")
            started = time.perf_counter()
            self._finish(ending, figures)
        return Ended(figures, time.perf_counter() - started)
