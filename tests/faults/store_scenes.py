"""Faults of the store that meet a tiny sweep at a random time; its record is that of an undisturbed one."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack

from fault_scene import Scene
from store_faults import Fault, Locked, Server, Unwritable
from tiny_sweep import LIMIT_S

from mlflow_tracking.config import sqlite_path
from mlflow_tracking.store import prepare_database

LOCKED_S = 25.0
"""Longer than MLflow waits for a lock."""

SHORTEST_S, LONGEST_S = 1.0, 60.0

ENDS_WITHIN_S = 60.0
"""Bound on the end of a sweep that nothing may keep, on a machine that is busy."""


def make_unwritable(scene: Scene) -> None:
    database = sqlite_path(scene.sweep.uri)
    assert database is not None
    _out_of_reach(scene, Unwritable(database), scene.random.uniform(SHORTEST_S, LONGEST_S / 4))


def lock(scene: Scene) -> None:
    database = sqlite_path(scene.sweep.uri)
    assert database is not None
    _out_of_reach(scene, Locked(database), LOCKED_S)


def drop_server(scene: Scene) -> None:
    """All processes of the tracking server are killed; after up to a minute it is started again."""
    folder = scene.folder / "server"
    folder.mkdir()
    server = Server(folder / "mlflow.db")
    prepare_database(f"sqlite:///{server.database}")
    with ExitStack() as stack:
        stack.callback(server.kill)
        server.start()
        scene.configure(store=server.address)
        _out_of_reach(scene, server, scene.random.uniform(SHORTEST_S, LONGEST_S))


def interrupt_in_outage(scene: Scene) -> None:
    """Ctrl-C while the store cannot be written; runs may wait for it by then. It is back once the sweep has ended."""
    database = sqlite_path(scene.sweep.uri)
    assert database is not None
    fault = Unwritable(database)
    command = scene.started()
    fault.begin()
    try:
        # Mostly in the middle of rounds, or when nothing but the ends of runs is left to do.
        time.sleep(scene.random.uniform(0.0, scene.random.choice((SHORTEST_S, LONGEST_S / 4))))
        command.signal(signal.SIGINT)
        ended = command.wait(ENDS_WITHIN_S)
    finally:
        fault.end()
    scene.ended_with(ended, 130)
    scene.nobody_left()
    scene.finish()
    scene.all_the_same()


def _out_of_reach(scene: Scene, fault: Fault, seconds: float) -> None:
    """The store has the fault for so many seconds while the sweep works."""
    command = scene.started()
    fault.begin()
    try:
        time.sleep(min(seconds, LIMIT_S / 2))
    finally:
        fault.end()
    scene.ended_with(command.wait(), 0)
    scene.all_the_same()
