"""A tiny sweep to break: real processes, real Ray, a real SQLite store, and what they leave behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

from experiments.expansion import expand
from experiments.grid import load_grid
from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.states import RecordedState, recorded_states
from mlflow_tracking.store import prepare_store

COMMAND = (sys.executable, "-c", "from experiments.cli import main; main()")
ACTOR = "ray::ClientActo"
"""Name of an actor's process, cut off by Linux after 15 characters."""

LIMIT_S = 150.0
"""Bound on a hang; a minute is what Ray itself would take to notice, and machines may be busy."""

TINY = Path(__file__).parents[1] / "tiny.yaml"
GRID = """
name: tiny
base: {base}
set:
  - training.rounds={rounds}
  - method.stage_one.epochs=8
  - execution.actors=2
  - tracking.figures=false
  - tracking.weights=false
  # What the store knows of a killed process is compared with its checkpoints.
  - tracking.flush_seconds=0.0
axes:
  noise:
    - {{label: mild, set: [federation.noise.ratio=0.3]}}
    - {{label: severe, set: [federation.noise.ratio=0.9]}}
methods: [{methods}]
seeds: [0]
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


@dataclass
class Halfway:
    """A sweep that is stopped in the middle of its grid.

    out: what it has printed. rounds: per identity of a run in flight those in its checkpoint. ray: Ray's processes.
    """

    out: str
    rounds: dict[str, int]
    ray: dict[int, str]


class Command:
    """A running command; its output goes to files, so that nobody must read along.

    seconds: how long it ran, once it has been waited for.
    """

    def __init__(self, argv: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
        number = len(list(folder.glob("*.out")))
        self._begin = time.monotonic()
        self.seconds = 0.0
        self._out, self._err = folder / f"{number}.out", folder / f"{number}.err"
        # Without the idle workers that Ray starts for every CPU.
        quick = {"RAY_prestart_worker_first_driver": "0", "PYTHONUNBUFFERED": "1"}
        cache = {"FEDSIR_CACHE": str(folder.parent / "cache")}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            # A session of its own: Ctrl-C at a test's terminal is not for this command.
            self.process = subprocess.Popen(
                argv,
                cwd=folder,
                stdout=out,
                stderr=err,
                env={**os.environ, **quick, **cache, **environment},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return self._out.read_text("utf-8")

    def wait(self, limit_s: float = LIMIT_S) -> Ended:
        """Its end. Raises TimeoutExpired, after having killed it, when that does not come."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise
        finally:
            self.seconds = time.monotonic() - self._begin
        return Ended(code, self.out, self._err.read_text("utf-8"))

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until `condition` holds; raises AssertionError where the command ends before."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{what} never came: {self.out}{self._err.read_text('utf-8')}")
            time.sleep(0.005)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        """Kill it if it is still there."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@dataclass
class TinySweep:
    """A tiny grid that is recorded in an experiment of its own from a folder of its own.

    command: what stands before the arguments of `fedsir`.
    """

    folder: Path
    uri: str
    methods: Sequence[str]
    rounds: int = 6
    command: Sequence[str] = COMMAND
    settings: Sequence[str] = ()
    commands: list[Command] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Processes are told by the folder they were started in, which the system gives without links.
        self.folder = self.folder.resolve()
        self.tracking = TrackingConfig(uri=self.uri, experiment=self.folder.name)
        self.grid = self.folder / "tiny.yaml"
        text = GRID.format(base=TINY, rounds=self.rounds, methods=", ".join(self.methods))
        self.grid.write_text(text, encoding="utf-8")
        self.labels = {run.identity: run.label for run in expand(load_grid(str(self.grid))).runs}
        self.work_dir = self.folder / "fedsir-runs"

    def argv(self, *settings: str, verb: str = "run") -> list[str]:
        """The command's arguments that run the grid."""
        where = (f"tracking.uri={self.tracking.uri}", f"tracking.experiment={self.tracking.experiment}")
        given = (*where, *self.settings, *settings)
        return ["sweep", verb, str(self.grid), *(word for s in given for word in ("--set", s))]

    def start(self, verb: str = "run", **environment: str) -> Command:
        self.commands.append(Command([*self.command, *self.argv(verb=verb)], self.folder, environment))
        return self.commands[-1]

    def sweep(self, verb: str = "run") -> Ended:
        """Run it to its end."""
        return self.start(verb).wait()

    def clean_up(self) -> None:
        """End everything that was started from the folder."""
        for command in self.commands:
            command.end()
        for pid in processes(self.folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def halfway(self, command: Command) -> Halfway:
        """Stop the sweep where one run is finished and two are in flight, one of them at least between two rounds."""
        begun = re.compile(rf"^1/{len(self.labels)} ", re.MULTILINE)
        command.until(lambda: begun.search(command.out) is not None, "the end of the first run")
        while True:
            command.signal(signal.SIGSTOP)
            os.waitid(os.P_PID, command.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            found = Halfway(command.out, self.checkpoints(), self.ray())
            # The store is not asked: the stopped process may hold its lock.
            if len(self.claims()) >= 2 and any(1 <= done < self.rounds for done in found.rounds.values()):
                return found
            assert command.process.poll() is None, "it was never caught in the middle"
            command.signal(signal.SIGCONT)
            time.sleep(0.05)

    # -- what it leaves -----------------------------------------------------------------------------------------------

    def ray(self) -> dict[int, str]:
        """Ids and names of its processes of Ray."""
        names = ("raylet", "gcs_server", ACTOR)
        return {pid: name for pid, name in processes(self.folder).items() if name.startswith(names)}

    def actors(self) -> list[int]:
        """Ids of its client actors, the older ones first."""
        return sorted(pid for pid, name in self.ray().items() if name == ACTOR)

    @property
    def checkpoints_folder(self) -> Path:
        return self.work_dir / "checkpoints"

    def claims(self) -> list[Path]:
        return list((self.work_dir / "claims").glob("*.claim"))

    def checkpoints(self) -> dict[str, int]:
        """Rounds in every checkpoint, by identity."""
        found = {}
        for path in self.checkpoints_folder.glob("*.safetensors"):
            with safe_open(path, framework="numpy") as file:
                found[path.stem] = len(json.loads(file.metadata()["structure"])["history"])
        return found

    def recorded(self) -> dict[str, RecordedState]:
        """What the store says of each run, by label."""
        found = recorded_states(prepare_store(self.tracking), list(self.labels))
        return {self.labels[identity]: state for identity, state in found.items()}

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
            label = self.labels[run.data.tags["fedsir.run_id"]]
            if run.info.status != "FINISHED":
                # A run that was interrupted has a successor, one that failed has none unless it is tried again.
                superseded = "fedsir.superseded_by" in run.data.tags
                assert run.info.status == "FAILED" or (run.info.status == "KILLED" and superseded)
                continue
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


def processes(folder: Path) -> dict[int, str]:
    """Ids and names of the processes that were started in `folder`."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == folder:
                found[int(process.name)] = (process / "comm").read_text().strip()
        except OSError:  # it has just ended, or is another user's
            continue
    return found
