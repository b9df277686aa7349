"""Claims on runs: files that keep processes, also of several machines on one file system, off each other's runs.

A claim is a file that its owner touches as a sign of life, since locks of the kernel do not reach across every
network file system. Created with O_EXCL, which is atomic there too (NFS since version 3), and filled afterwards: hard
links would make creation with content atomic, but not every file system has them. A file that stayed empty is a claim
of an unknown owner and expires by its age.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, ValidationError

from fedsir.config.base import Section
from fedsir.errors import BadInput, RunFailed
from fedsir.events import Event, Recorder, RunStopped
from mlflow_tracking.config import sqlite_path

if TYPE_CHECKING:
    from experiments.config import RunFile

HEARTBEAT_S = 15.0
# Long beside the heartbeat: NFS clients may show a time of last change that is a minute old.
EXPIRY_S = 120.0
ATTEMPTS = 10
PAUSE_S = 0.05
MAX_FILE_BYTES = 10_000


class RunHeld(BadInput):
    """Another process is working on this very run."""


class RunTakenOver(RunFailed):
    """Another process has taken over the run that this one was working on; it is that process's to record."""


class _Owner(Section):
    """Content of a claim. started: of the process, in clock ticks since boot, None where the system does not say."""

    host: str
    machine: str
    pid: int = Field(gt=0, lt=2**31)
    started: int | None
    token: str
    since: str


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
    for `EXPIRY_S`. Raises RunHeld if somebody else holds it, BadInput if claims cannot be written.
    """
    path = folder / f"{identity}.claim"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        token = _acquire(path, what)
    except OSError as error:
        raise BadInput(
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
        with suppress(OSError, RunHeld), _exclusively(path, what):
            _remove(path, token)


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
                found = _read(self._path)
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


def _acquire(path: Path, what: str) -> str:
    """Token of the claim created at `path`. Raises RunHeld, OSError."""
    for _ in range(ATTEMPTS):
        token = _create(path)
        if token is not None:
            return token
        if _expired(path, what):
            # Looked at again with the right to remove it: this may by now be the claim of who was faster.
            with _exclusively(path, what):
                if _expired(path, what):
                    path.unlink(missing_ok=True)
    raise RunHeld(f"this very run ({what}) passes from process to process.\nTry again in a moment.")


@contextmanager
def _exclusively(path: Path, what: str) -> Iterator[None]:
    """The right to remove the claim at `path`: itself a claim, since its owner may die too. Raises RunHeld, OSError."""
    right = path.with_name(f"{path.name}.takeover")
    token = _acquire(right, what)
    try:
        yield
    finally:
        with suppress(OSError):
            _remove(right, token)


def _create(path: Path) -> str | None:
    """Token of the new claim, None where there is one already."""
    process = _process(os.getpid())
    owner = _Owner(
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        started=None if process is None else process[1],
        token=uuid.uuid4().hex,
        since=datetime.now().astimezone().isoformat(" ", "seconds"),
    )
    try:
        file = path.open("xb", buffering=0)
    except FileExistsError:
        return None
    try:
        with file:
            file.write(owner.model_dump_json().encode())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return owner.token


def _remove(path: Path, token: str) -> None:
    found = _read(path)
    if found is not None and found[0] is not None and found[0].token == token:
        path.unlink(missing_ok=True)


def _read(path: Path) -> tuple[_Owner | None, float] | None:
    """Owner, None if unknown, and time of the last sign of life; None where there is no claim. Raises OSError."""
    try:
        # Opening makes NFS ask the server; a mere stat may be answered from memory.
        with path.open("rb") as file:
            content, touched = file.read(MAX_FILE_BYTES), os.fstat(file.fileno()).st_mtime
        return _Owner.model_validate_json(content), touched
    except FileNotFoundError:
        return None
    except ValidationError:
        return None, touched


def _expired(path: Path, what: str) -> bool:
    """Whether the claim at `path` may be removed, False where there is none. Raises RunHeld if it holds, OSError."""
    found = _read(path)
    if found is None:
        time.sleep(PAUSE_S)  # released just now, though an NFS client may deny a claim that is newer
        return False
    owner, touched = found
    # A file touched now has the time of the file system, the one clock that all machines share.
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".clock-") as probe:
        os.utime(probe.name)
        silence = max(0.0, os.fstat(probe.fileno()).st_mtime - touched)
    if silence > EXPIRY_S or (owner is not None and owner.machine == _machine() and _gone(owner)):
        return True
    who = "a process that left no name" if owner is None else f"process {owner.pid} on {owner.host} since {owner.since}"
    raise RunHeld(
        f"another process is working on this very run ({what}): {who}, last sign of life {silence:.0f} s ago.\n"
        "Wait for its end, or change what this run is: --set seed=..., or where it is kept: --set tracking.uri=... "
        f"--set work_dir=...\nIf that process is gone, the run is free {EXPIRY_S:.0f} s after its last sign of life."
    )


def _machine() -> str:
    """Equal for processes that see each other under the same ids: host, its boot, and the container's ids."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(parts)


def _gone(owner: _Owner) -> bool:
    """Whether the process of an owner on this machine no longer exists."""
    if os.name != "posix":
        return False  # signal 0 is a keyboard interrupt there
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # another user's
    process = _process(owner.pid)
    # Ended but not yet waited for, or another process that got the same id.
    return process is not None and (process[0] in "ZX" or owner.started not in (None, process[1]))


def _process(pid: int) -> tuple[str, int] | None:
    """State and start of a process as Linux tells them, None where it does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return None
