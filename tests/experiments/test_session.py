"""What a session starts, and in which order."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from experiments import session as module
from experiments.claim_files import RunHeld
from experiments.claims import claim_run
from experiments.commands import open_session
from experiments.config import RunFile, load_run_file
from experiments.console import new_console
from experiments.session import Session
from fedsir.errors import BadInput


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the session does, in order; the store cannot be opened."""
    found: list[str] = []
    begun = {"actors": threading.Event(), "store": threading.Event()}

    class Pool:
        def __init__(self, _execution: Any, _clients: int, _demand: Any, meanwhile: Callable[[], None] | None) -> None:
            found.append("actors")
            begun["actors"].set()
            # Both go on at once.
            assert begun["store"].wait(30)
            if meanwhile is not None:
                meanwhile()

        def close(self) -> None:
            found.append("closed")

    def opening(_: Any) -> None:
        found.append("store")
        begun["store"].set()
        if "condition" in found:
            assert begun["actors"].wait(30)
        raise BadInput("the store is of a later version")

    build = module.build_condition

    def building(*given: Any) -> Any:
        found.append("condition")
        return build(*given)

    monkeypatch.setattr("fedsir.clients.pool.ActorPool", Pool)
    monkeypatch.setattr("mlflow_tracking.store.prepare_store", opening)
    monkeypatch.setattr(module, "build_condition", building)
    return found


@pytest.fixture
def config(fedsir: Any, store: str) -> RunFile:
    options = fedsir.tiny_options("execution.actors=2", f"tracking.uri={store}")
    return load_run_file("demo", options[1::2])


def test_images_are_looked_at_before_actors_start_and_the_store_is_opened_while_they_do(
    happened: list[str], config: RunFile
) -> None:
    session = Session(started=lambda: happened.append("started"))
    with pytest.raises(BadInput, match="later version"):
        session.run(config, [])
    session.close()
    # The pool ends by itself what it has started.
    assert happened[0] == "condition"
    assert sorted(happened[1:]) == ["actors", "store"]


def test_without_actors_only_the_store_is_opened(happened: list[str], config: RunFile) -> None:
    alone = config.model_copy(update={"execution": config.execution.model_copy(update={"actors": "in-process"})})
    with pytest.raises(BadInput, match="later version"):
        Session().run(alone, [])
    assert happened == ["store"]


def test_a_run_that_another_process_has_is_refused_before_anything_else(happened: list[str], config: RunFile) -> None:
    with claim_run(config), pytest.raises(RunHeld):
        Session().run(config, [])
    assert happened == []


def test_what_is_imported_is_no_garbage_while_a_session_lasts(fedsir: Any, store: str) -> None:
    """Looking through it takes half a second."""
    config = load_run_file("demo", fedsir.tiny_options(f"tracking.uri={store}")[1::2])
    with open_session(new_console(stderr=True)) as session:
        assert gc.get_freeze_count() == 0
        session.run(config, [])
        assert gc.get_freeze_count() > 100_000
    assert gc.get_freeze_count() == 0


IN_PROCESS = """
import sys
from experiments.commands import open_session
from experiments.console import new_console
from fedsir.config.training import ExecutionConfig
with open_session(new_console(stderr=True), ExecutionConfig(actors="in-process")):
    print("ray" in sys.modules)
"""


def test_a_session_without_actors_does_without_ray() -> None:
    ended = subprocess.run([sys.executable, "-c", IN_PROCESS], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"
