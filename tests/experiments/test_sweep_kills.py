"""Kill -9 in the middle of a sweep: real processes, real Ray, a real SQLite store.

Whatever is killed, the same command leads to the record of a sweep that nobody disturbed.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.session import Session
from fedsir.errors import WorkersLost
from fedsir.events import RoundFinished
from mlflow_tracking.store import prepare_store

# Shared with the faults at random times; every import mode of pytest finds it by this.
sys.path.append(str(Path(__file__).parents[1] / "faults"))
from tiny_sweep import ACTOR, LIMIT_S, Halfway, TinySweep

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and stops processes")

# oct_fedsir and fedcorr have stages, fedelc keeps state of its clients.
METHODS = ("oct_fedsir", "fedcorr", "fedelc", "fedavg")
RUNS = 2 * len(METHODS)


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One store for all tests here, since its schema takes seconds to create; an experiment for each test."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, uri: str) -> dict[str, dict[str, Any]]:
    """The record of a sweep that nobody disturbs."""
    here = TinySweep(tmp_path_factory.mktemp("undisturbed"), uri, METHODS)
    ended = here.sweep()
    assert (ended.code, ended.err) == (0, "")
    record = here.record()
    assert set(record) == set(here.labels.values())
    for run in record.values():
        assert [step for step, _ in run["figures"]["test/accuracy"]] == list(range(1, here.rounds + 1))
        assert re.fullmatch("[0-9a-f]{64}", run["summary"]["weights_sha256"])
    return record


@pytest.fixture
def kill(tmp_path: Path, uri: str) -> Iterator[TinySweep]:
    """The sweep, and its end also where the test fails while it is stopped."""
    sweep = TinySweep(tmp_path, uri, METHODS)
    yield sweep
    sweep.clean_up()


def _the_same_command_finishes(kill: TinySweep, undisturbed: dict[str, dict[str, Any]], before: Halfway) -> None:
    """Run the sweep again and look at everything that it leaves."""
    states, rounds, recorded = kill.states(), kill.checkpoints(), kill.recorded_rounds()
    finished = {identity for identity, state in states.items() if state == "finished"}
    assert "failed" not in states.values()
    assert set(before.rounds) <= finished | set(rounds)
    for identity, done in rounds.items():
        # A checkpoint is written before its round is recorded: what it lacks is one round that had not ended.
        assert recorded.get(identity, []) in (list(range(1, done + 1)), list(range(1, done)))
        assert done >= before.rounds.get(identity, 0)

    ended = kill.sweep()
    assert (ended.code, ended.err) == (0, "")
    assert re.search(rf"skipped: finished before │ +{len(finished)} ", ended.out)
    for identity, label in kill.labels.items():
        lines = re.findall(rf"^ *\d+/{RUNS} {label}: .*", ended.out, re.MULTILINE)
        continued = [int(r) for line in lines for r in re.findall(r"continued after round (\d+)", line)]
        assert len(lines) == (identity not in finished)
        done = 0 if identity in finished else rounds.get(identity, 0)
        assert continued == ([done] if done > 0 else [])

    # Killed between the record of its end and the removal of its checkpoint, a run leaves that one behind.
    _record_is(kill, undisturbed, finished & set(rounds))
    deadline = time.monotonic() + LIMIT_S
    while (left := kill.ray()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == {}


def _record_is(
    kill: TinySweep, undisturbed: dict[str, dict[str, Any]], checkpoints: Collection[str] = frozenset()
) -> None:
    record = kill.record()
    assert set(record) == set(undisturbed)
    for label, run in undisturbed.items():
        assert record[label]["summary"] == run["summary"]
        assert record[label]["figures"] == run["figures"]
        assert record[label]["files"] == run["files"]
    assert {path.name for path in kill.checkpoints_folder.iterdir()} == {f"{i}.safetensors" for i in checkpoints}
    assert kill.claims() == []
    assert list((Path(kill.tracking.uri.removeprefix("sqlite:///")).parent / "claims").iterdir()) == []


def test_a_killed_sweep_continues(kill: TinySweep, undisturbed: dict[str, dict[str, Any]]) -> None:
    command = kill.start()
    before = kill.halfway(command)
    command.signal(signal.SIGKILL)
    assert command.wait().code == -signal.SIGKILL
    assert kill.checkpoints() == before.rounds
    for identity in before.rounds:
        # As if it had been killed while it wrote.
        (kill.checkpoints_folder / f"{identity}.safetensors.{command.pid}.partial").write_bytes(b"half of it")
    _the_same_command_finishes(kill, undisturbed, before)


def test_a_killed_actor_is_replaced(kill: TinySweep, undisturbed: dict[str, dict[str, Any]]) -> None:
    """The sweep goes on to its end, and no run notices."""
    command = kill.start()
    before = kill.halfway(command)
    os.kill(_one(before, ACTOR), signal.SIGKILL)
    command.signal(signal.SIGCONT)
    ended = command.wait()
    assert (ended.code, ended.err) == (0, "")
    assert "continued" not in ended.out
    assert len(re.findall(rf"^ *\d/{RUNS} ", ended.out, re.MULTILINE)) == RUNS
    _record_is(kill, undisturbed)
    assert set(kill.states().values()) == {"finished"}


def test_workers_that_are_lost_end_the_sweep_but_fail_no_run(
    kill: TinySweep, fedsir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every further run would fail as well, for no fault of its own."""
    run = Session.run

    class Loss:
        def record(self, event: Any) -> None:
            if isinstance(event, RoundFinished) and event.record.round == 2:
                raise WorkersLost("they are gone")

    def losing(self: Session, config: Any, recorders: Any, **options: Any) -> Any:
        return run(self, config, [*recorders, Loss()], **options)

    argv = kill.argv("execution.actors=in-process", "training.rounds=3")
    with monkeypatch.context() as patch:
        patch.setattr(Session, "run", losing)
        ended = fedsir.call(*argv, "--only", "method=fedavg")
    assert (ended.code, ended.err) == (1, "fedsir: they are gone\n")
    (interrupted,) = prepare_store(kill.tracking).runs()
    assert interrupted.info.status == "KILLED"
    again = fedsir.call(*argv, "--only", "method=fedavg")
    assert (again.code, again.err) == (0, "")
    assert again.out.count("continued after round 2") == 1
    assert {run.info.status for run in prepare_store(kill.tracking).runs()} == {"FINISHED"}


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["raylet", "gcs_server"])
def test_a_sweep_without_ray_ends_and_continues(
    kill: TinySweep, undisturbed: dict[str, dict[str, Any]], victim: str
) -> None:
    command = kill.start()
    before = kill.halfway(command)
    os.kill(_one(before, victim), signal.SIGKILL)
    command.signal(signal.SIGCONT)
    ended = command.wait()
    assert ended.code == 1
    # Without its raylet Ray may end the process before it can say anything.
    if victim == "gcs_server":
        assert re.fullmatch(r"fedsir: Ray has died: .* gcs_server .*\n.*The same command continues.*\n", ended.err)
        assert set(kill.states().values()) == {"finished", "interrupted"}
        assert kill.claims() == []
    _the_same_command_finishes(kill, undisturbed, before)


def _one(before: Halfway, name: str) -> int:
    """Process of that name."""
    return next(pid for pid, known in before.ray.items() if known == name)
