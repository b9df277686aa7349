"""Want of memory that meets a tiny sweep at a random time: of one actor, or of everything that Ray looks at."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fault_scene import LEAVES_WITHIN_S, NotHere, Scene, check

from fedsir.clients.machine import CGROUPS, MEMBERSHIP

MIB = 2**20

ROOM = 4096 * MIB
"""Bytes that a whole sweep and the hog beside it may take; the sweep alone takes about half of it."""

THRESHOLD = 0.6
"""Share of the room beyond which Ray kills; far enough below all of it for the kernel to have no reason to."""

STEP = 16 * MIB
HOG = f"""
import sys, time
held = []
for _ in range(int(sys.stdin.readline() or 0)):
    held.append(b"x" * {STEP})
    time.sleep(0.005)
sys.stdin.read()
"""
"""Takes as many steps of memory as it is told, one after the other; Ray looks several times before it is through."""

JOIN = 'echo $$ > "$0" && exec "$@"'
LIKE_A_CONTAINER = 'echo $$ > "$0/cgroup.procs" && mount --bind "$0" "$1" && shift && exec "$@"'
"""Ray reads the memory of the outermost group that it sees, which in a container is that of the container."""


@dataclass(frozen=True)
class MemoryGroup:
    """A control group (version 1 or 2) that limits the memory of the processes in it, and of those that they start.

    mount: where groups are mounted.
    """

    folder: Path
    mount: Path

    def limit(self, size: int) -> None:
        """Bytes that its processes may take from now on; what they have already counts where it was taken."""
        self._file("memory.limit_in_bytes", "memory.max").write_text(str(size), "ascii")

    @property
    def kills(self) -> int:
        """How many of its processes the kernel has killed for want of memory."""
        events = self._file("memory.oom_control", "memory.events").read_text("ascii").splitlines()
        return next(int(line.split()[1]) for line in events if line.startswith("oom_kill "))

    @property
    def used(self) -> int:
        """Bytes, without the cache of files, which is what Ray looks at as well."""
        taken = int(self._file("memory.usage_in_bytes", "memory.current").read_text("ascii"))
        figures = dict(line.split() for line in (self.folder / "memory.stat").read_text("ascii").splitlines())
        kinds = ("active_file", "inactive_file")
        return taken - sum(int(figures.get(f"total_{kind}", figures.get(kind, "0"))) for kind in kinds)

    @property
    def processes(self) -> Path:
        """The file whose lines are the processes in the group; what is written into it joins."""
        return self.folder / "cgroup.procs"

    def _file(self, *names: str) -> Path:
        return next(self.folder / name for name in names if (self.folder / name).exists())


@contextmanager
def memory_group(name: str) -> Iterator[MemoryGroup]:
    """A new group, without a limit so far; in the end everything in it is killed.

    Raises NotHere where none can be made or joined.
    """
    mount, parent = _place(name)
    group = MemoryGroup(parent / name, mount)
    group.folder.mkdir()
    try:
        yield group
    finally:
        _removed(group)


def _place(name: str) -> tuple[Path, Path]:
    """Where groups are mounted, and the one there in which another can be made, limited and joined.

    That is tried with one of its own, since what was ever in a group may leave something that counts.
    """
    for mount, parent in _parents():
        trial = MemoryGroup(parent / f"{name}-trial", mount)
        if not (parent / "cgroup.procs").exists():
            continue
        try:
            trial.folder.mkdir()
        except OSError:
            continue
        try:
            limits = (trial.folder / "memory.limit_in_bytes", trial.folder / "memory.max")
            if any(os.access(limit, os.W_OK) for limit in limits):
                join = ["sh", "-c", JOIN, str(trial.processes), "true"]
                if subprocess.run(join, capture_output=True, check=False).returncode == 0:
                    return mount, parent
        finally:
            _removed(trial)
    raise NotHere("no memory control group can be made and joined")


def _parents() -> Iterator[tuple[Path, Path]]:
    """Mounts of control groups, with groups there that may take another one: that of this process, the outermost."""
    for line in MEMBERSHIP.read_text("ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") or controllers == "":
            mount = CGROUPS / controllers
            yield from ((mount, parent) for parent in (mount / path.lstrip("/"), mount))


def _removed(group: MemoryGroup) -> None:
    deadline = time.monotonic() + LEAVES_WITHIN_S
    while True:
        for pid in group.processes.read_text("ascii").split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            group.folder.rmdir()
        except OSError:  # what was killed is not quite gone
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def exhaust_memory(scene: Scene) -> None:
    """The address space of an actor may not grow any more."""
    # Where that does not come to an error, something in the actor may wait for ever.
    scene.configure("execution.task_timeout_s=10.0", "execution.startup_timeout_s=30.0")
    command = scene.started()
    pid = scene.actor()
    with suppress(ProcessLookupError, FileNotFoundError):
        size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (size, size))
    scene.ended_with(command.wait(), 0)
    scene.all_the_same()


def kill_by_kernel(scene: Scene) -> None:
    """An actor may not take more memory than it has.

    That stays with the group where it was taken, and serves many tasks: a limit of some MiB might never be met.
    """
    group = scene.enter(memory_group(_name(scene)))
    group.limit(0)
    command = scene.started(spare=scene.calm.tasks // 2)
    with suppress(ProcessLookupError):
        group.processes.write_text(str(scene.actor()), "ascii")
    scene.ended_with(command.wait(), 0)
    check(group.kills > 0, "the kernel has not killed the actor")
    scene.all_the_same()


def kill_by_ray(scene: Scene) -> None:
    """Ray's memory monitor kills actors, since another process takes what memory there is."""
    if _available() < ROOM:
        raise NotHere(f"less than {ROOM // MIB} MiB of memory are free")
    group = scene.enter(memory_group(_name(scene)))
    group.limit(ROOM)
    within = ("unshare", "--mount", "sh", "-c", LIKE_A_CONTAINER, str(group.folder), str(group.mount))
    tried = subprocess.run([*within, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        raise NotHere(f"Ray cannot be shown another memory control group: {tried.stderr.strip()}")
    scene.configure(within=within)
    ray = {"RAY_memory_usage_threshold": str(THRESHOLD), "RAY_memory_monitor_refresh_ms": "50"}
    with _hog(scene, group) as take:
        command = scene.started(spare=scene.calm.tasks // 2, **ray)
        log, actors = _ray_log(scene), set(scene.sweep.actors())
        take()
        command.until(lambda: not actors <= set(scene.sweep.actors()), "the end of an actor")
        gone = actors - set(scene.sweep.actors())
    scene.ended_with(command.wait(), 0)
    killed = {int(pid) for pid in re.findall(r"Selected to kill: .*\bpid=(\d+)", log.read_text("utf-8"))}
    check(gone <= killed, f"Ray has killed {killed or 'nobody'}, but {gone} ended")
    check(group.kills == 0, "the kernel has killed as well")
    scene.all_the_same()


@contextmanager
def _hog(scene: Scene, group: MemoryGroup) -> Iterator[Callable[[], None]]:
    """Another process of the group; what is yielded lets it take memory, a random part of what Ray leaves free.

    For the least of it one actor must go, for the most all of them.
    """
    share = THRESHOLD + (1 - THRESHOLD) * scene.random.uniform(0.1, 0.5)
    words = ["sh", "-c", JOIN, str(group.processes), sys.executable, "-IS", "-c", HOG]
    process = subprocess.Popen(words, cwd=scene.folder, stdin=subprocess.PIPE, text=True, start_new_session=True)

    def take() -> None:
        assert process.stdin is not None
        process.stdin.write(f"{int(ROOM * share - group.used) // STEP}\n")
        process.stdin.flush()

    try:
        yield take
    finally:
        process.kill()
        process.communicate()


def _ray_log(scene: Scene) -> Path:
    """Where the raylet of a running sweep writes what it does."""
    server = next(pid for pid, name in scene.sweep.ray().items() if name == "gcs_server")
    words = Path(f"/proc/{server}/cmdline").read_text("utf-8").split("\0")
    return Path(next(word for word in words if word.startswith("--log_dir=")).partition("=")[2]) / "raylet.out"


def _available() -> int:
    """Bytes of memory that the system can give to new processes."""
    figures = dict(line.split(":") for line in Path("/proc/meminfo").read_text("ascii").splitlines())
    return int(figures["MemAvailable"].split()[0]) * 1024


def _name(scene: Scene) -> str:
    return f"fedsir-{os.getpid()}-{scene.folder.name}"
