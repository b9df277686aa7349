"""Runs the runs of a plan, several at the same time; nothing that one of them does stops the others."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from experiments.claim_files import RunHeld
from experiments.claims import ClaimNotWritten, RunTakenOver
from experiments.expansion import PlannedRun
from experiments.session import FinishedElsewhere, Session
from experiments.sweeps.flights import flight_limit, wait_for_memory
from experiments.sweeps.progress import SweepProgress
from experiments.sweeps.queue import Tally
from fedsir.checkpoint import NotWritten
from fedsir.clients.executor import InProcessExecutor
from fedsir.clients.pool import ActorPool
from fedsir.clients.runtime import Work
from fedsir.errors import StoreUnreachable, WorkersLost
from mlflow_tracking.delivery import patiently
from mlflow_tracking.states import record_failure

PATIENCE_S = 60.0
"""How long an interrupted sweep waits for its runs to note that they were stopped."""


@dataclass
class _Postponed:
    """Runs that are to be tried again. held: by other processes. undelivered: the store was out of reach."""

    held: list[PlannedRun] = field(default_factory=list)
    undelivered: list[PlannedRun] = field(default_factory=list)


class Sweep:
    """Runs planned runs through one session, whose images, workers and store they share."""

    def __init__(self, session: Session, progress: SweepProgress, tally: Tally, parent: str | None = None) -> None:
        """tally: of the runs that need nothing; what is done is added to it. parent: see `parent_run`."""
        self._session = session
        self._progress = progress
        self._tally = tally
        self._parent = parent
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._broken: list[BaseException] = []

    def run(self, queue: Sequence[PlannedRun], in_flight: int | None = None) -> Tally:
        """Work on the runs of a queue, `in_flight` of them at the same time (None: as workers and memory allow).

        Those that other processes hold, and those whose store was out of reach, are tried once more at the end.
        """
        begin = time.monotonic()
        try:
            first = self._fly_all(queue, in_flight)
            if first.undelivered:
                # Until then nobody would try whether the store is back.
                self._stopping.wait(max(self._session.store(run.config).reach.pause for run in first.undelivered))
            last = self._fly_all([*first.held, *first.undelivered], in_flight)
            self._tally.held += last.held
            self._tally.undelivered += last.undelivered
        finally:
            self._tally.seconds = time.monotonic() - begin
        return self._tally

    def _fly_all(self, queue: Sequence[PlannedRun], in_flight: int | None) -> _Postponed:
        postponed = _Postponed()
        for _, part in groupby(queue, key=lambda run: run.config.execution):
            self._fly(list(part), in_flight, postponed)
        return postponed

    def _fly(self, runs: Sequence[PlannedRun], in_flight: int | None, postponed: _Postponed) -> None:
        """Runs with one way of execution."""
        workers = self._session.workers(runs[0].config)
        waiting = deque(runs)
        if isinstance(workers, InProcessExecutor):
            # Here, since torch's random numbers and Ctrl-C belong to the process and its main thread.
            self._take(waiting, postponed)
            return
        workers.take_work()
        clients = min(run.config.federation.clients for run in runs)
        limit = in_flight or flight_limit(workers.slots, clients)
        threads = [
            threading.Thread(target=self._guarded, args=(waiting, postponed), name=f"run {n}", daemon=True)
            for n in range(min(limit, len(runs)))
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:
            self._stop(workers, threads)
            raise
        if self._broken:
            raise self._broken[0]
        self._tally.work, self._tally.slots = self._tally.work or Work(), workers.slots
        self._tally.work.add(workers.take_work())

    def _stop(self, workers: ActorPool, threads: Sequence[threading.Thread]) -> None:
        """Make runs end where they are, each with its record."""
        self._stopping.set()
        workers.abort()
        until = time.monotonic() + PATIENCE_S
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))

    def _guarded(self, waiting: deque[PlannedRun], postponed: _Postponed) -> None:
        try:
            self._take(waiting, postponed)
        except BaseException as error:
            # The first counts: the workers are gone, or it is a fault of the sweep itself. Interrupts reach a thread
            # only when the sweep stops. All are kept, since freeing what they hold of Ray's memory ends the process
            # if Ray has died.
            self._broken.append(error)
            self._stopping.set()

    def _take(self, waiting: deque[PlannedRun], postponed: _Postponed) -> None:
        while not self._stopping.is_set():
            try:
                run = waiting.popleft()
            except IndexError:
                return
            wait_for_memory(run.config, self._stopping, lambda: self._progress.counts().running)
            try:
                self._visit(run)
            except (RunHeld, RunTakenOver):
                self._progress.held(run)
                postponed.held.append(run)
            except StoreUnreachable as error:
                if not self._stopping.is_set():
                    self._progress.undelivered(run, error)
                postponed.undelivered.append(run)

    def _visit(self, run: PlannedRun) -> None:
        """Do one run, whatever comes of it.

        Raises RunHeld or RunTakenOver where it is another process's, StoreUnreachable where the store is out of reach,
        WorkersLost, NotWritten or ClaimNotWritten where no run can go on.
        """
        watch = self._progress.watch(run)
        try:
            result = self._session.run(
                run.config, [watch], unless_finished=True, parent=self._parent, stopping=self._stopping
            )
        except FinishedElsewhere:
            # Another process has finished it since the sweep began.
            self._progress.elsewhere(run)
            with self._lock:
                self._tally.finished_before += 1
        except (RunHeld, RunTakenOver, StoreUnreachable, WorkersLost, NotWritten, ClaimNotWritten):
            raise
        except Exception as error:
            # Whatever it is, it concerns this run; the user finds it in the record and in the table.
            self._progress.failed(run, error)
            with self._lock:
                self._tally.failed.append(run)
            self._record(run, error)
        else:
            self._progress.done(run, result)
            with self._lock:
                self._tally.done += 1

    def _record(self, run: PlannedRun, error: Exception) -> None:
        try:
            store = self._session.store(run.config)
            record = partial(record_failure, store, run.config, run.identity, error, self._parent)
            patiently(store, record, run.config.tracking.patience_s, self._stopping, since_lost=True)
        except Exception as again:  # the store itself may be what fails
            self._progress.unrecorded(run, again)
