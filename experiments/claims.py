"""Claims on runs: files that keep processes, also of several machines on one file system, off each other's runs.

A claim is a file that its owner touches as a sign of life, since locks of the kernel do not reach across every
network file system; `claim_files` has what is done with the files.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from experiments import claim_files
from experiments.claim_files import RunHeld
from fedsir.errors import BadInput, RunFailed
from fedsir.events import Event, Recorder, RunStopped
from mlflow_tracking.config import sqlite_path

if TYPE_CHECKING:
    from experiments.config import RunFile

HEARTBEAT_S = 15.0


class ClaimNotWritten(BadInput):
    """A claim cannot be written where claims are kept; nor could that of any other run there."""


class RunTakenOver(RunFailed):
    """Another process has taken over the run that this one was working on; it is that process's to record."""


def claims_folder(config: RunFile) -> Path:
    """Where the claims on runs that are recorded in the store of `config` lie.

    Beside a SQLite file, so that all processes that record there agree whatever their work_dir. With a tracking
    server it is in work_dir, and processes without a common one must divide a grid with --shard.
    """
    database = sqlite_path(config.tracking.uri)
    return (config.work_dir if database is None else database.resolve().parent) / "claims"


@contextmanager
def claim_run(config: RunFile) -> Iterator[tuple[Claim, ...]]:
    """Keep other processes off the record and off the checkpoint of a run. Raises as `claim` does."""
    # Two stores may share a work_dir. Sorted: of two processes that need the same two folders, one gets both.
    folders = sorted({claims_folder(config).resolve(), (config.work_dir / "claims").resolve()})
    what = f"{config.name}, {config.method.label}, seed {config.seed}"
    with ExitStack() as stack:
        yield tuple([stack.enter_context(claim(folder, config.identity(), what)) for folder in folders])


@contextmanager
def claim(folder: Path, identity: str, what: str) -> Iterator[Claim]:
    """Hold `<folder>/<identity>.claim` while the context lasts; `what` is what messages call the run.

    A claim is taken over if its owner has been a process of this machine that is gone, or has given no sign of life
    for `EXPIRY_S`. Raises RunHeld if somebody else holds it, ClaimNotWritten if claims
    cannot be written.
    """
    path = folder / f"{identity}.claim"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        token = claim_files.acquire(path, what)
    except OSError as error:
        raise ClaimNotWritten(
            f"{folder}: the claim that keeps other processes off this run ({what}) cannot be written "
            f"({error.strerror or error}).\n"
            "Make the folder writable, or name others with --set tracking.uri=... and --set work_dir=..."
        ) from error
    held = Claim(path, token, what)
    _PULSE.add(held)
    try:
        yield held
    finally:
        _PULSE.remove(held)
        # With the right to take over, so that nobody takes it over between the look and the removal.
        with suppress(OSError, RunHeld), claim_files.exclusively(path, what):
            claim_files.remove(path, token)


class Claim:
    """A run that is this process's, as long as no other one has taken it over."""

    def __init__(self, path: Path, token: str, what: str) -> None:
        self._path = path
        self._token = token
        self._what = what
        self._last_sign = time.time()  # of this machine, for messages only
        self._silence = 0.0
        self._lost = False

    @property
    def lost(self) -> bool:
        """Whether the file says that the claim is no longer ours; a file that cannot be read says nothing."""
        if not self._lost:
            try:
                found = claim_files.read(self._path)
            except OSError:
                return False
            owner = None if found is None else found[0]
            # A file that is gone counts: who took the claim over may have finished the run by now.
            if owner is None or owner.token != self._token:
                self._silence, self._lost = time.time() - self._last_sign, True
        return self._lost

    def beat(self) -> None:
        """Give a sign of life."""
        if not self.lost:
            with suppress(OSError):
                os.utime(self._path)
                self._last_sign = time.time()

    def require(self) -> None:
        """Raise RunTakenOver if the claim is lost."""
        if self.lost:
            raise RunTakenOver(
                f"another process has taken over this run ({self._what}) after {self._silence:.0f} s without a sign "
                f"of life from this one, or {self._path} was deleted.\n"
                "This process was suspended or could not reach the folder; the other one continues from the last "
                "checkpoint."
            )


class ClaimGuard:
    """Recorder that stands before others: only while the claims are held does an event reach them.

    A process that was suspended must neither go on with the run nor write the end of what is no longer its own.
    """

    def __init__(self, claims: Sequence[Claim], recorders: Sequence[Recorder] = ()) -> None:
        self._claims = claims
        self._recorders = recorders

    def record(self, event: Event) -> None:
        """Hand `event` on; raises RunTakenOver if a claim is lost, except when the run has been stopped anyway."""
        if isinstance(event, RunStopped):
            if any(claim.lost for claim in self._claims):
                return
        else:
            for claim in self._claims:
                claim.require()
        for recorder in self._recorders:
            recorder.record(event)


class _Pulse:
    """One thread that gives the signs of life of all claims of this process, and ends with the last of them."""

    def __init__(self) -> None:
        self._claims: set[Claim] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, claim: Claim) -> None:
        with self._changed:
            self._claims.add(claim)
            if self._thread is None:
                self._thread = threading.Thread(target=self._live, name="fedsir-claims", daemon=True)
                self._thread.start()

    def remove(self, claim: Claim) -> None:
        with self._changed:
            self._claims.discard(claim)
            if not self._claims:
                self._changed.notify()

    def _live(self) -> None:
        with self._changed:
            while self._claims:
                self._changed.wait(HEARTBEAT_S)
                for claim in self._claims:
                    claim.beat()
            self._thread = None


_PULSE = _Pulse()
