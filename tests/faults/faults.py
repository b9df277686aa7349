"""Faults that meet a tiny sweep at a random time, and what must become of it.

Every fault runs sweeps in processes of their own and ends all of them.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fault_scene import Scene, Undisturbed, check
from memory_scenes import exhaust_memory, kill_by_kernel, kill_by_ray
from store_scenes import drop_server, interrupt_in_outage, lock, make_unwritable
from tiny_sweep import LIMIT_S, Command, Ended

# -- actors --------------------------------------------------------------------------------------------------------


def kill_actor(scene: Scene) -> None:
    command = scene.started()
    _signal([scene.actor()], signal.SIGKILL)
    scene.ended_with(command.wait(), 0)
    scene.all_the_same()


def kill_actors(scene: Scene) -> None:
    command = scene.started()
    _signal(scene.sweep.actors(), signal.SIGKILL)
    scene.ended_with(command.wait(), 0)
    scene.all_the_same()


def hang_client(scene: Scene) -> None:
    # An actor that has not done anything for a run yet has the time of a start in addition.
    scene.configure("execution.task_timeout_s=3.0", "execution.startup_timeout_s=30.0")
    command = scene.started()
    _signal([scene.actor()], signal.SIGSTOP)
    scene.ended_with(command.wait(), 0)
    scene.all_the_same()


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


# -- clients and coordinators --------------------------------------------------------------------------------------


def client_raises(scene: Scene) -> None:
    _one_run_fails(scene, "raise", r"client 3, round \d+: Raising failed: ArithmeticError: injected")


def coordinator_raises(scene: Scene) -> None:
    _one_run_fails(scene, "coordinator", r"ArithmeticError\('injected'\)")


def _one_run_fails(scene: Scene, fault: str, reason: str) -> None:
    scene.ended_with(scene.start_with(fault), 1)
    label, said = scene.failed_run()
    check(re.search(reason, said) is not None, f"{label} failed with another reason: {said}")
    scene.others_unharmed(label)
    scene.finish("retry")
    scene.all_the_same()


def client_diverges(scene: Scene) -> None:
    scene.ended_with(scene.start_with("diverge"), 0)
    record = scene.sweep.record()
    check(set(record) == set(scene.calm.record), "a run has no record")
    changed = [label for label, run in scene.calm.record.items() if record[label] != run]
    check(len(changed) == 1, f"{len(changed)} runs differ: {changed}")
    run = record[changed[0]]
    notes = [entry["note"] for entry in run["summary"]["notes"]]
    check(any("client 3 returned non-finite weights" in note for note in notes), f"nothing is said of it: {notes}")
    # The store takes no figures that are not finite: one that is missing would be one of them.
    figures = scene.calm.record[changed[0]]["figures"]
    check({k: len(v) for k, v in run["figures"].items()} == {k: len(v) for k, v in figures.items()}, "figures lack")


# -- sweep and Ray -------------------------------------------------------------------------------------------------


def stop_sweep(number: int, code: int) -> Callable[[Scene], None]:
    """The sweep gets a signal and ends with `code`."""

    def inject(scene: Scene) -> None:
        command = scene.started()
        command.signal(number)
        scene.ended_with(command.wait(), code)
        scene.nobody_left()
        scene.finish()
        scene.all_the_same()

    return inject


def kill_ray(name: str) -> Callable[[Scene], None]:
    """A vital process of Ray dies. Without its raylet Ray may end the sweep before that can say anything."""

    def inject(scene: Scene) -> None:
        command = scene.started()
        _signal([pid for pid, known in scene.sweep.ray().items() if known == name], signal.SIGKILL)
        ended = command.wait()
        scene.ended_with(ended, 1)
        told = "The same command continues" in ended.err
        check(told or name == "raylet", f"it did not say what to do: {ended.err.strip()}")
        check(not scene.failed_runs(), f"a run counts as failed: {scene.failed_runs()}")
        scene.finish()
        scene.all_the_same()

    return inject


# -- disks ---------------------------------------------------------------------------------------------------------


def damage_checkpoints(scene: Scene) -> None:
    """The newest checkpoint of every run that was interrupted and has another before it."""
    command = scene.started()
    folder = scene.sweep.checkpoints_folder
    command.until(lambda: any(_pairs(folder)), "a second checkpoint")
    command.signal(signal.SIGKILL)
    command.wait()
    damaged = {scene.sweep.labels[path.stem] for path in list(_pairs(folder)) if _damage(path, scene.random)}
    finished = {label for label, state in scene.sweep.recorded().items() if state.status == "finished"}
    scene.finish()
    scene.all_the_same(notes=False)
    record = scene.sweep.record()
    for label in damaged - finished:
        notes = [entry["note"] for entry in record[label]["summary"]["notes"]]
        check(any("continuing from the one before it" in n for n in notes), f"{label} says nothing of it: {notes}")


def _pairs(folder: Path) -> Iterator[Path]:
    """Checkpoints that have another before them."""
    for path in folder.glob("*.safetensors"):
        if path.with_name(f"{path.name}.previous").exists():
            yield path


def _damage(path: Path, random_numbers: random.Random) -> bool:
    content = bytearray(path.read_bytes())
    place = random_numbers.randrange(len(content))
    kind = random_numbers.choice(("flipped", "cut", "empty"))
    if kind == "flipped":
        content[place] ^= 1 << random_numbers.randrange(8)
    path.write_bytes(content if kind == "flipped" else content[: place if kind == "cut" else 0])
    return True


def fill_work_dir(scene: Scene) -> None:
    """The disk of the checkpoints and claims is full until the sweep has ended."""
    disk = scene.disk()
    scene.configure(f"work_dir={disk}")
    scene.sweep.work_dir = disk
    ended = _filled(scene.started(), disk)
    scene.ended_with(ended, 0, 1, 2)
    if ended.code != 0:
        check("No space left" in ended.err and str(disk) in ended.err, f"it did not say why: {ended.err.strip()}")
    _finished_with_room(scene)


def fill_store(scene: Scene) -> None:
    """The disk of the store is full until the sweep has ended."""
    disk = scene.disk()
    scene.configure("tracking.patience_s=2.0", store=disk)
    scene.ended_with(_filled(scene.started(), disk), 0, 1, 2)
    _finished_with_room(scene)


def _filled(command: Command, disk: Path) -> Ended:
    """The end of a sweep whose disk is full from now on, also where it removes something; then there is room again."""
    filler = disk / "filler"
    deadline = time.monotonic() + LIMIT_S
    with filler.open("ab", buffering=0) as file:
        while command.process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError):
                while file.write(bytes(1 << 12)):
                    pass
            time.sleep(0.01)
    ended = command.wait()
    filler.unlink()
    return ended


def _finished_with_room(scene: Scene) -> None:
    for label, reason in scene.failed_runs().items():
        check(False, f"{label} failed, though it can be continued: {reason}")
    scene.finish()
    scene.all_the_same()


# -- all of them ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """inject: makes it happen; raises AssertionError where the outcome is not the `stated` one, NotHere where this
    machine does not allow it."""

    inject: Callable[[Scene], None]
    stated: str


SAME = "same bits, no run notices"
CONTINUES = "the same command continues; same bits"
FAILS = "that run is marked failed with the reason, the others are unharmed; `sweep retry` gives the same bits"

FAULTS: dict[str, Fault] = {
    "actor-killed": Fault(kill_actor, SAME),
    "all-actors-killed": Fault(kill_actors, SAME),
    "client-hung": Fault(hang_client, f"its actor is killed after the limit; {SAME}"),
    "actor-out-of-memory": Fault(exhaust_memory, f"the actor is replaced; {SAME}"),
    "actor-killed-in-cgroup": Fault(kill_by_kernel, f"the kernel kills it for want of memory; {SAME}"),
    "actor-killed-by-ray": Fault(kill_by_ray, f"its memory monitor kills it; {SAME}"),
    "client-raises": Fault(client_raises, FAILS),
    "client-diverges": Fault(client_diverges, "left out of the average with a note; the other runs are unharmed"),
    "coordinator-raises": Fault(coordinator_raises, FAILS),
    "sweep-killed": Fault(stop_sweep(signal.SIGKILL, -signal.SIGKILL), CONTINUES),
    "sweep-terminated": Fault(stop_sweep(signal.SIGTERM, 143), f"ends with 143; {CONTINUES}"),
    "sweep-interrupted": Fault(stop_sweep(signal.SIGINT, 130), f"ends with 130; {CONTINUES}"),
    "gcs-killed": Fault(kill_ray("gcs_server"), f"ends and says so; {CONTINUES}"),
    "raylet-killed": Fault(kill_ray("raylet"), f"ends, not always with a word; {CONTINUES}"),
    "checkpoint-damaged": Fault(damage_checkpoints, "the one before it serves, with a note; same bits"),
    "work-dir-full": Fault(fill_work_dir, f"ends and names the folder; with room again {CONTINUES}"),
    "store-full": Fault(fill_store, f"goes on or ends; with room again {CONTINUES}"),
    "store-unwritable": Fault(make_unwritable, f"rounds do not wait, starts and ends do; {SAME}"),
    "store-locked": Fault(lock, f"rounds do not wait, starts and ends do; {SAME}"),
    "outage-interrupted": Fault(interrupt_in_outage, f"ends with 130 while the store is away; {CONTINUES}"),
    "server-killed": Fault(drop_server, f"for up to a minute: rounds do not wait, starts and ends do; {SAME}"),
}
"""By name. A fault of another part of the machinery is one more entry."""


@dataclass(frozen=True)
class Outcome:
    """problem: in what the outcome was another than the stated one, or nothing.

    repeated: tasks that were sent in addition to those of the undisturbed sweep. seconds: of all commands, likewise.
    """

    problem: str
    repeated: int
    seconds: float


class Bench:
    """Tries faults on sweeps in folders below `folder`, at times that follow from `seed`."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self._folder = folder
        self._seed = seed
        self._number = 0
        # The first command creates it.
        self._store = folder / "store"
        scene = self._scene("undisturbed", random.Random(seed), Undisturbed({}, 0, 0.0))
        try:
            scene.finish()
            scene.nobody_left()
            self.calm = Undisturbed(scene.sweep.record(), scene.tasks, scene.seconds)
        finally:
            scene.close()

    def _scene(self, name: str, random_numbers: random.Random, calm: Undisturbed) -> Scene:
        self._number += 1
        return Scene(self._folder / f"{self._number}-{name}", self._store, random_numbers, calm)

    def outcome(self, name: str, repetition: int = 0) -> Outcome:
        """Inject a fault once. Raises NotHere where this machine does not allow it."""
        scene = self._scene(name, random.Random(f"{self._seed} {name} {repetition}"), self.calm)
        problem = ""
        try:
            FAULTS[name].inject(scene)
        except AssertionError as error:
            problem = str(error) or "a record that no sweep may leave"
        except subprocess.TimeoutExpired as error:
            problem = f"the sweep did not end within {error.timeout:g} s"
        finally:
            scene.close()
        return Outcome(problem, scene.tasks - self.calm.tasks, scene.seconds - self.calm.seconds)
