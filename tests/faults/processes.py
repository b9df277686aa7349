"""What /proc says of a process and of those that it has started; for the scripts beside this file. Linux only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
ENDED = "ended"
"""Name of a process that is no more."""


@dataclass(frozen=True)
class Usage:
    """memory: bytes that are resident, shared ones included. handles: open files, sockets and pipes."""

    memory: int
    handles: int
    threads: int


def tree(root: int) -> list[int]:
    """Ids of a process and of all that descend from it."""
    parents = {}
    for folder in PROC.glob("[0-9]*"):
        try:
            # The name is in parentheses and may hold anything, more of them as well.
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
    found = {root} & set(parents)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def name(pid: int) -> str:
    """Its role where it has given itself one, as Ray's processes do, else its program, module or script."""
    try:
        words = [
            word for word in (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0") if word
        ]
    except OSError:
        return ENDED
    if not words:
        return ENDED
    program = Path(words[0].split()[0]).name
    if not program.startswith("python"):
        # Actors of Ray add what they are doing.
        return program.partition(".")[0] if program.startswith("ray::") else program
    options = iter(words[1:])
    for word in options:
        if word == "-m":
            return next(options)
        if word == "-c":
            return "fedsir" if "experiments.cli" in next(options) else "python -c"
        if not word.startswith("-"):
            return Path(word).name
    return program


def usage(pid: int) -> Usage | None:
    """What a process takes; None where it has ended."""
    folder = PROC / str(pid)
    try:
        fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        handles = sum(1 for _ in (folder / "fd").iterdir())
    except OSError:
        return None
    if "VmRSS" not in fields:  # ended, but not yet asked for
        return None
    return Usage(int(fields["VmRSS"].split()[0]) * 1024, handles, int(fields["Threads"]))
