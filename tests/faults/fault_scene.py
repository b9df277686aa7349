"""A sweep that a fault is injected into: when that happens, and what must hold afterwards."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tiny_sweep import Command, Ended, TinySweep

COUNTED = (sys.executable, str(Path(__file__).with_name("fedsir_with_faults.py")))
# Stages and state of the server; state of the clients.
METHODS = ("oct_fedsir", "fedelc")
ROUNDS = 4
DISK_MIB = 64
LEAVES_WITHIN_S = 60.0

Record = Mapping[str, Mapping[str, Any]]
T = TypeVar("T")


class NotHere(Exception):
    """This machine does not allow the fault; the text says what is missing."""


@dataclass(frozen=True)
class Undisturbed:
    """The sweep without a fault: its record, the tasks that were sent, and its seconds."""

    record: Record
    tasks: int
    seconds: float


def check(holds: bool, problem: str) -> None:
    """Raise AssertionError with `problem` unless it holds."""
    if not holds:
        raise AssertionError(problem)


class Scene:
    """One sweep, recorded in an experiment of its own in `store`. Close it to end what it has started.

    A random time is a random number of tasks sent to actors, so that no fault comes before or after the work.
    """

    def __init__(self, folder: Path, store: Path, random_numbers: random.Random, calm: Undisturbed) -> None:
        folder.mkdir()
        self.folder = folder.resolve()
        self.random = random_numbers
        self.calm = calm
        self._tasks = self.folder / "tasks"
        self._tasks.touch()
        self._store = store
        self._stack = ExitStack()
        self.sweep = self._sweep(store)

    def _sweep(self, store: Path | str, *settings: str, within: Sequence[str] = ()) -> TinySweep:
        uri = store if isinstance(store, str) else f"sqlite:///{store}/mlflow.db"
        sweep = TinySweep(self.folder, uri, METHODS, ROUNDS, command=(*within, *COUNTED), settings=settings)
        self._stack.callback(sweep.clean_up)
        return sweep

    def configure(self, *settings: str, store: Path | str | None = None, within: Sequence[str] = ()) -> None:
        """Another way to run and record the sweep, before it is started.

        store: folder of a SQLite file, or a URI. within: the beginning of a command that runs the rest of it.
        """
        self.sweep = self._sweep(store or self._store, *settings, within=within)

    def enter(self, context: AbstractContextManager[T]) -> T:
        """Something that lasts until the scene is closed, longer than the processes of sweeps configured later."""
        return self._stack.enter_context(context)

    def close(self) -> None:
        """End all processes and unmount all disks."""
        self._stack.close()

    @property
    def tasks(self) -> int:
        """Tasks that all commands have sent to actors so far."""
        return self._tasks.stat().st_size

    @property
    def seconds(self) -> float:
        """How long all commands ran."""
        return sum(command.seconds for command in self.sweep.commands)

    def start(self, verb: str = "run", **environment: str) -> Command:
        return self.sweep.start(verb, FEDSIR_TASKS=str(self._tasks), **environment)

    def start_with(self, fault: str) -> Ended:
        """The end of a sweep in which one client or coordinator goes wrong at a random time."""
        # Towards the end there may be no training left to go wrong.
        after = self.random.randrange(1, self.calm.tasks // 2)
        return self.start(FEDSIR_FAULT=fault, FEDSIR_FAULT_AFTER=str(after)).wait()

    def started(self, spare: int = 10, **environment: str) -> Command:
        """A sweep that has just come to a random place of its work. spare: tasks that are left to do, at the least."""
        command = self.start(**environment)
        place = self.random.randrange(1, self.calm.tasks - spare)
        command.until(lambda: self.tasks >= place and len(self.sweep.actors()) == 2, f"task {place}")
        return command

    def actor(self) -> int:
        """A random one."""
        actors = self.sweep.actors()
        check(bool(actors), "no actor is there")
        return self.random.choice(actors)

    def disk(self) -> Path:
        """A small disk of its own. Raises NotHere where this user cannot mount one."""
        if os.geteuid() != 0:
            raise NotHere("only root can mount a small disk")
        place = self.folder / "disk"
        place.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(place)]
        mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
        if mounted.returncode != 0:
            raise NotHere(f"a small disk cannot be mounted: {mounted.stderr.strip()}")
        # Sweeps that are configured later are ended before, and these keep nothing open that matters.
        self._stack.callback(subprocess.run, ["umount", "--lazy", str(place)], check=False)
        return place

    # -- what must hold ------------------------------------------------------------------------------------------------

    def ended_with(self, ended: Ended, *codes: int) -> None:
        if ended.code not in codes:
            why = f"{ended.err.strip()[-500:]} {self.failed_runs() or ''}"
            check(False, f"the sweep ended with {ended.code}: {why}")

    def finish(self, verb: str = "run") -> None:
        """The same command, or another verb, runs to its end."""
        self.ended_with(self.start(verb).wait(), 0)

    def others_unharmed(self, affected: str) -> None:
        """All runs but one have the record of the undisturbed sweep."""
        record = self.sweep.record()
        for label in set(self.calm.record) - {affected}:
            check(label in record, f"{label} has no record")
            check(record[label] == self.calm.record[label], f"{label} differs")

    def all_the_same(self, notes: bool = True) -> None:
        """Every run has the record of the undisturbed sweep, to the bit; nothing is left behind.

        notes: also what it has to say.
        """
        record = self.sweep.record()
        check(set(record) == set(self.calm.record), f"{sorted(set(self.calm.record) - set(record))} are missing")
        for label, run in self.calm.record.items():
            check(_without_notes(record[label]) == _without_notes(run), f"{label} differs")
            check(not notes or record[label] == run, f"the notes of {label} differ")
        states = set(self.sweep.states().values())
        check(states == {"finished"}, f"states are {states}")
        check(self.sweep.claims() == [], "claims are left")
        self.nobody_left()

    def nobody_left(self) -> None:
        """No actor and no vital process of Ray is left. Its agents look for dead parts up to a minute after a kill."""
        deadline = time.monotonic() + LEAVES_WITHIN_S
        while (left := self.sweep.ray()) and time.monotonic() < deadline:
            time.sleep(0.1)
        check(not left, f"processes are left: {left}")

    def failed_run(self) -> tuple[str, str]:
        """Label and reason of the one run that has failed."""
        failed = self.failed_runs()
        check(len(failed) == 1, f"{len(failed)} runs failed: {failed}")
        return next(iter(failed.items()))

    def failed_runs(self) -> dict[str, str]:
        """Reasons of the runs that have failed, by label."""
        return {label: state.error for label, state in self.sweep.recorded().items() if state.status == "failed"}


def _without_notes(run: Mapping[str, Any]) -> dict[str, Any]:
    return {**run, "summary": {k: v for k, v in run["summary"].items() if k != "notes"}}
