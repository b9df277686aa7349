"""The files behind claims: created, read, judged and taken over, on any file system that several machines share.

Created with O_EXCL, which is atomic there too (NFS since version 3), and filled afterwards: hard links would make
creation with content atomic, but not every file system has them. A file that stayed empty is a claim of an unknown
owner and expires by its age.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from pydantic import Field, ValidationError

from fedsir.config.base import Section
from fedsir.errors import BadInput

# Long beside the heartbeat: NFS clients may show a time of last change that is a minute old.
EXPIRY_S = 120.0
ATTEMPTS = 10
PAUSE_S = 0.05
MAX_FILE_BYTES = 10_000


class RunHeld(BadInput):
    """Another process is working on this very run."""


class Owner(Section):
    """Content of a claim. started: of the process, in clock ticks since boot, None where the system does not say."""

    host: str
    machine: str
    pid: int = Field(gt=0, lt=2**31)
    started: int | None
    token: str
    since: str


def acquire(path: Path, what: str) -> str:
    """Token of the claim created at `path`. Raises RunHeld, OSError."""
    for _ in range(ATTEMPTS):
        token = _create(path)
        if token is not None:
            return token
        if expired(path, what):
            # Looked at again with the right to remove it: this may by now be the claim of who was faster.
            with exclusively(path, what):
                if expired(path, what):
                    path.unlink(missing_ok=True)
    raise RunHeld(f"this very run ({what}) passes from process to process.\nTry again in a moment.")


@contextmanager
def exclusively(path: Path, what: str) -> Iterator[None]:
    """The right to remove the claim at `path`: itself a claim, since its owner may die too. Raises RunHeld, OSError."""
    right = path.with_name(f"{path.name}.takeover")
    token = acquire(right, what)
    try:
        yield
    finally:
        with suppress(OSError):
            remove(right, token)


def _create(path: Path) -> str | None:
    """Token of the new claim, None where there is one already."""
    process = _process(os.getpid())
    owner = Owner(
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


def remove(path: Path, token: str) -> None:
    found = read(path)
    if found is not None and found[0] is not None and found[0].token == token:
        path.unlink(missing_ok=True)


def read(path: Path) -> tuple[Owner | None, float] | None:
    """Owner, None if unknown, and time of the last sign of life; None where there is no claim. Raises OSError."""
    try:
        # Opening makes NFS ask the server; a mere stat may be answered from memory.
        with path.open("rb") as file:
            content, touched = file.read(MAX_FILE_BYTES), os.fstat(file.fileno()).st_mtime
        return Owner.model_validate_json(content), touched
    except FileNotFoundError:
        return None
    except ValidationError:
        return None, touched


def expired(path: Path, what: str) -> bool:
    """Whether the claim at `path` may be removed, False where there is none. Raises RunHeld if it holds, OSError."""
    found = read(path)
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


def _gone(owner: Owner) -> bool:
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
