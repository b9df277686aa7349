"""Kill -9 in the middle of a sweep: real processes, real Ray, a real SQLite store.

Whatever is killed, the same command leads to the record of a sweep that nobody disturbed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from experiments.expansion import expand
from experiments.grid import load_grid
from experiments.session import Session
from fedsir.errors import WorkersLost
from fedsir.events import RoundFinished
from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.states import recorded_states
from mlflow_tracking.store import prepare_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and stops processes")

ROUNDS = 6
# oct_fedsir and fedcorr have stages, fedelc keeps state of its clients.
METHODS = ("oct_fedsir", "fedcorr", "fedelc", "fedavg")
RUNS = 2 * len(METHODS)
GRID = f"""
name: tiny
base: demo
set:
  - data.image_size=32
  - data.train_images=160
  - data.test_images=60
  - federation.clients=4
  - training.rounds={ROUNDS}
  - training.batch_size=16
  - evaluation.bootstrap_samples=20
  - execution.actors=2
  - tracking.figures=false
  - tracking.weights=false
  # What the store knows of a killed process is compared with its checkpoints.
  - tracking.flush_seconds=0.0
axes:
  noise:
    - {{label: mild, set: [federation.noise.ratio=0.3]}}
    - {{label: severe, set: [federation.noise.ratio=0.9]}}
methods: [{", ".join(METHODS)}]
seeds: [0]
"""
ENDS_WITHIN_S = 120
"""Bound on a hang; a minute is what Ray itself would take to notice, and machines may be busy."""


@dataclass
class Halfway:
    """A sweep that is stopped in the middle of its grid.

    out: what it has printed. rounds: per identity of a run in flight those in its checkpoint. ray: Ray's processes.
    """

    out: str
    rounds: dict[str, int]
    ray: dict[int, str]


class Kill:
    """A tiny grid that is recorded in an experiment of its own from a folder of its own."""

    def __init__(self, commands: Any, folder: Path, uri: str) -> None:
        self.commands = commands
        self.folder = folder
        self.tracking = TrackingConfig(uri=uri, experiment=folder.name)
        self.grid = folder / "tiny.yaml"
        self.grid.write_text(GRID, encoding="utf-8")
        self.labels = {run.identity: run.label for run in expand(load_grid(str(self.grid))).runs}

    def argv(self, *settings: str) -> list[str]:
        """The command that runs the grid."""
        where = (f"tracking.uri={self.tracking.uri}", f"tracking.experiment={self.tracking.experiment}")
        return ["sweep", "run", str(self.grid), *(word for s in (*where, *settings) for word in ("--set", s))]

    def start(self) -> subprocess.Popen[str]:
        process: subprocess.Popen[str] = self.commands.start(self.folder, *self.argv())
        return process

    def sweep(self) -> Any:
        return self.commands.wait(self.start())

    def halfway(self, process: subprocess.Popen[str]) -> Halfway:
        """Stop the sweep where one run is finished and two are in flight, one of them at least between two rounds."""
        out = self.commands.read_until(process, rf"^1/{RUNS} ")
        while True:
            os.kill(process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            found = Halfway(out, self.checkpoints(), _ray_processes(self.folder))
            # The store is not asked: the stopped process may hold its lock.
            if len(self.claims()) >= 2 and any(1 <= done < ROUNDS for done in found.rounds.values()):
                return found
            assert process.poll() is None, "it was never caught in the middle"
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(0.05)

    @property
    def checkpoints_folder(self) -> Path:
        return self.folder / "fedsir-runs" / "checkpoints"

    def claims(self) -> list[Path]:
        return list((self.folder / "fedsir-runs" / "claims").glob("*.claim"))

    def checkpoints(self) -> dict[str, int]:
        """Rounds in every checkpoint, by identity."""
        found = {}
        for path in self.checkpoints_folder.glob("*.safetensors"):
            with safe_open(path, framework="numpy") as file:
                found[path.stem] = len(json.loads(file.metadata()["structure"])["history"])
        return found

    def states(self) -> dict[str, str]:
        """Recorded state by identity."""
        return {i: s.status for i, s in recorded_states(prepare_store(self.tracking), list(self.labels)).items()}

    def recorded_rounds(self) -> dict[str, list[int]]:
        """Rounds in the store, by identity, of runs that go on; each as often as it is there."""
        store = prepare_store(self.tracking)
        return {
            run.data.tags["fedsir.run_id"]: [
                point.step for point in store.client.get_metric_history(run.info.run_id, "test/accuracy")
            ]
            for run in store.runs()
            if "fedsir.superseded_by" not in run.data.tags
        }

    def record(self) -> dict[str, dict[str, Any]]:
        """Figures and files of finished runs, without times, by label; everything else has been left behind."""
        store = prepare_store(self.tracking)
        found = {}
        for run in store.runs():
            if run.info.status != "FINISHED":
                assert run.info.status == "KILLED"
                assert "fedsir.superseded_by" in run.data.tags
                continue
            label = self.labels[run.data.tags["fedsir.run_id"]]
            assert label not in found, f"{label} finished twice"
            folder = Path(store.client.download_artifacts(run.info.run_id, ""))
            files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
            # Names the experiment, which each test has of its own.
            del files["config.yaml"]
            summary = json.loads(files.pop("summary.json"))
            del summary["seconds"]
            summary["final"] = {k: v for k, v in summary["final"].items() if not k.startswith("seconds/")}
            figures = {
                key: [(point.step, point.value) for point in store.client.get_metric_history(run.info.run_id, key)]
                for key in run.data.metrics
                if not key.startswith("seconds/")
            }
            found[label] = {"figures": figures, "summary": summary, "files": files}
        return found


def _ray_processes(folder: Path) -> dict[int, str]:
    """Ids and names of Ray's processes that were started in `folder`."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            name = (process / "comm").read_text().strip()
            if name.startswith(("raylet", "gcs_server", "ray::ClientActo")) and (process / "cwd").readlink() == folder:
                found[int(process.name)] = name
        except OSError:  # it has just ended
            continue
    return found


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One store for all tests here, since its schema takes seconds to create; an experiment for each test."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, uri: str, module_commands: Any) -> dict[str, dict[str, Any]]:
    """The record of a sweep that nobody disturbs."""
    here = Kill(module_commands, tmp_path_factory.mktemp("undisturbed"), uri)
    ended = here.sweep()
    assert (ended.code, ended.err) == (0, "")
    record = here.record()
    assert set(record) == set(here.labels.values())
    for run in record.values():
        assert [step for step, _ in run["figures"]["test/accuracy"]] == list(range(1, ROUNDS + 1))
        assert re.fullmatch("[0-9a-f]{64}", run["summary"]["weights_sha256"])
    return record


@pytest.fixture
def kill(fedsir: Any, tmp_path: Path, uri: str) -> Kill:
    return Kill(fedsir, tmp_path, uri)


@pytest.fixture
def process(kill: Kill) -> Iterator[subprocess.Popen[str]]:
    """A sweep, and its end also where the test fails while it is stopped."""
    process = kill.start()
    yield process
    if process.poll() is None:
        process.kill()
        process.communicate()


def _the_same_command_finishes(kill: Kill, undisturbed: dict[str, dict[str, Any]], before: Halfway) -> None:
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
    deadline = time.monotonic() + ENDS_WITHIN_S
    while (left := _ray_processes(kill.folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == {}


def _record_is(kill: Kill, undisturbed: dict[str, dict[str, Any]], checkpoints: Collection[str] = frozenset()) -> None:
    record = kill.record()
    assert set(record) == set(undisturbed)
    for label, run in undisturbed.items():
        assert record[label]["summary"] == run["summary"]
        assert record[label]["figures"] == run["figures"]
        assert record[label]["files"] == run["files"]
    assert {path.name for path in kill.checkpoints_folder.iterdir()} == {f"{i}.safetensors" for i in checkpoints}
    assert kill.claims() == []
    assert list((Path(kill.tracking.uri.removeprefix("sqlite:///")).parent / "claims").iterdir()) == []


def test_a_killed_sweep_continues(
    kill: Kill, process: subprocess.Popen[str], undisturbed: dict[str, dict[str, Any]]
) -> None:
    before = kill.halfway(process)
    process.kill()
    assert kill.commands.wait(process).code == -signal.SIGKILL
    assert kill.checkpoints() == before.rounds
    for identity in before.rounds:
        # As if it had been killed while it wrote.
        (kill.checkpoints_folder / f"{identity}.safetensors.{process.pid}.partial").write_bytes(b"half of it")
    _the_same_command_finishes(kill, undisturbed, before)


def test_a_killed_actor_is_replaced(
    kill: Kill, process: subprocess.Popen[str], undisturbed: dict[str, dict[str, Any]]
) -> None:
    """The sweep goes on to its end, and no run notices."""
    before = kill.halfway(process)
    os.kill(_one(before, "ray::ClientActo"), signal.SIGKILL)
    os.kill(process.pid, signal.SIGCONT)
    ended = kill.commands.wait(process, before.out)
    assert (ended.code, ended.err) == (0, "")
    assert "continued" not in ended.out
    assert len(re.findall(rf"^ *\d/{RUNS} ", ended.out, re.MULTILINE)) == RUNS
    _record_is(kill, undisturbed)
    assert set(kill.states().values()) == {"finished"}


def test_workers_that_are_lost_end_the_sweep_but_fail_no_run(
    kill: Kill, fedsir: Any, monkeypatch: pytest.MonkeyPatch
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
    kill: Kill, process: subprocess.Popen[str], undisturbed: dict[str, dict[str, Any]], victim: str
) -> None:
    before = kill.halfway(process)
    os.kill(_one(before, victim), signal.SIGKILL)
    os.kill(process.pid, signal.SIGCONT)
    _, err = process.communicate(timeout=ENDS_WITHIN_S)
    assert process.returncode == 1
    # Without its raylet Ray may end the process before it can say anything.
    if victim == "gcs_server":
        assert re.fullmatch(r"fedsir: Ray has died: .* gcs_server .*\n.*The same command continues.*\n", err)
        assert set(kill.states().values()) == {"finished", "interrupted"}
        assert kill.claims() == []
    _the_same_command_finishes(kill, undisturbed, before)


def _one(before: Halfway, name: str) -> int:
    """Process of that name."""
    return next(pid for pid, known in before.ray.items() if known == name)
