"""`fedsir sweep` on tiny grids, with a real SQLite store and without Ray."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.claims import claim_run, claims_folder
from experiments.expansion import expand
from experiments.grid import load_grid
from experiments.session import Session
from experiments.sweeps.parent_run import sweep_run, without_tracking
from fedsir.errors import RunFailed
from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.states import RecordedState, recorded_states
from mlflow_tracking.store import Store, prepare_store
from mlflow_tracking.sweep_run import find_sweep_run

GRID = f"""
name: tiny
base: {Path(__file__).parents[1] / "tiny.yaml"}
set: [execution.actors=in-process]
axes:
  noise:
    - {{label: mild, set: [federation.noise.ratio=0.3]}}
    - {{label: severe, set: [federation.noise.ratio=0.9]}}
methods: [fedavg, fedprox, all_clean]
seeds: [0]
"""
RUNS = 5


class Grid:
    """A tiny grid with a store of its own experiment."""

    def __init__(self, fedsir: Any, folder: Path, uri: str, text: str = GRID) -> None:
        self.fedsir = fedsir
        self.path = folder / "tiny.yaml"
        self.path.write_text(text, encoding="utf-8")
        self.tracking = TrackingConfig(uri=uri, experiment=folder.name)

    def sweep(self, command: str, *argv: str, experiment: str | None = None) -> Any:
        settings = (
            f"tracking.uri={self.tracking.uri}",
            f"tracking.experiment={experiment or self.tracking.experiment}",
        )
        given = [word for setting in settings for word in ("--set", setting)]
        return self.fedsir.call("sweep", command, str(self.path), *given, *argv)

    @property
    def store(self) -> Store:
        return prepare_store(self.tracking)

    @property
    def identities(self) -> dict[str, str]:
        """Label by identity."""
        return {run.identity: run.label for run in expand(load_grid(str(self.path))).runs}

    def states(self) -> dict[str, RecordedState]:
        """Recorded state by label."""
        labels = self.identities
        return {labels[i]: state for i, state in recorded_states(self.store, list(labels)).items()}

    @property
    def above(self) -> tuple[str, dict[str, int]]:
        """Status and counts of the MLflow run above the runs of the grid."""
        mlflow_id = find_sweep_run(self.store, "tiny")
        assert mlflow_id is not None
        assert {run.data.tags["mlflow.parentRunId"] for run in self.store.runs()} == {mlflow_id}
        run = self.store.client.get_run(mlflow_id)
        names = ("planned", "finished", "failed", "missing")
        return run.info.status, {name: int(run.data.tags[f"fedsir.{name}"]) for name in names}

    def hashes(self, experiment: str | None = None) -> dict[str, str]:
        """Hash of the final weights by label, of finished runs; each of them finished once."""
        store = prepare_store(TrackingConfig(uri=self.tracking.uri, experiment=experiment or self.tracking.experiment))
        finished = [run for run in store.runs() if run.info.status == "FINISHED"]
        labels = self.identities
        found = {}
        for run in finished:
            file = store.client.download_artifacts(run.info.run_id, "summary.json")
            found[labels[run.data.tags["fedsir.run_id"]]] = json.loads(Path(file).read_text())["weights_sha256"]
        assert len(found) == len(finished)
        return found


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One store for all tests here, since its schema takes seconds to create; an experiment for each test."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture
def grid(fedsir: Any, tmp_path: Path, book: str) -> Grid:
    return Grid(fedsir, tmp_path, book)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make runs of one label end with an error, until called again with None."""
    run = Session.run

    def fail(name: str | None, error: BaseException | None = None, at: int = 1) -> None:
        def patched(self: Session, config: Any, recorders: Any, **options: Any) -> Any:
            if name is None or f"{config.name} {config.method.label}" != name:
                return run(self, config, recorders, **options)
            if at == 0:
                raise error or RunFailed("broken before it began")

            class Breaker:
                def record(self, event: Any) -> None:
                    if getattr(getattr(event, "record", None), "round", 0) == at:
                        raise error or RunFailed("broken on purpose\nwith details")

            return run(self, config, [*recorders, Breaker()], **options)

        monkeypatch.setattr(Session, "run", patched)

    return fail


def test_a_sweep_runs_everything_once(grid: Grid) -> None:
    ended = grid.sweep("run")
    assert (ended.code, ended.err) == (0, "")
    lines = re.findall(rf"^\d/{RUNS} .*", ended.out, re.MULTILINE)
    assert len(lines) == RUNS
    for line, label in zip(lines, grid.identities.values(), strict=True):
        assert label in line
        assert "phantom images, accuracy " in line
    states = grid.states()
    assert set(states) == set(grid.identities.values())
    assert {state.status for state in states.values()} == {"finished"}
    assert all(state.accuracy is not None for state in states.values())
    assert set(grid.hashes()) == set(states)
    assert grid.above == ("FINISHED", {"planned": 5, "finished": 5, "failed": 0, "missing": 0})
    before = {run.info.run_id: run.info.end_time for run in grid.store.runs()}

    again = grid.sweep("run")
    assert (again.code, again.err) == (0, "")
    assert "skipped: finished before │      5" in again.out
    assert {run.info.run_id: run.info.end_time for run in grid.store.runs()} == before

    status = grid.sweep("status")
    assert status.code == 0
    rows = re.findall(r"│ (\w+) +│ +(\d+) │ +(\d+) │ +(\d+) │ +(\d+) │ +(\d+) │", status.out)
    counts = {name: [int(number) for number in numbers] for name, *numbers in rows}
    assert counts == {
        "fedavg": [2, 2, 0, 0, 0],
        "fedprox": [2, 2, 0, 0, 0],
        "all_clean": [1, 1, 0, 0, 0],
        "all": [5, 5, 0, 0, 0],
    }


def test_a_failing_run_stops_nothing_and_is_retried(grid: Grid, failing: Callable[..., None]) -> None:
    failing("tiny-mild fedprox")
    ended = grid.sweep("run")
    assert ended.code == 1
    assert "mild fedprox s0: failed: broken on purpose" in ended.out
    states = grid.states()
    assert {label for label, state in states.items() if state.status == "finished"} == set(states) - {"mild fedprox s0"}
    assert len(states) == RUNS
    assert states["mild fedprox s0"].status == "failed"
    assert grid.above == ("FAILED", {"planned": 5, "finished": 4, "failed": 1, "missing": 0})

    status = grid.sweep("status")
    assert "failed: mild fedprox s0: RunFailed: broken on purpose" in status.out
    assert "with details" not in status.out

    failing(None)
    # Running again leaves it alone, and still says that it is not well.
    assert grid.sweep("run").code == 1
    assert grid.states()["mild fedprox s0"].status == "failed"

    retried = grid.sweep("retry")
    assert (retried.code, retried.err) == (0, "")
    assert "continued after round 1" in retried.out
    assert retried.out.count("accuracy") == 1
    assert {state.status for state in grid.states().values()} == {"finished"}
    assert grid.above[0] == "FINISHED"
    undisturbed = grid.sweep("run", "--only", "method=fedprox", "--only", "noise=mild", experiment="undisturbed")
    assert undisturbed.code == 0
    assert grid.hashes()["mild fedprox s0"] == grid.hashes("undisturbed")["mild fedprox s0"]
    assert grid.sweep("run").code == 0


def test_a_run_that_fails_before_it_is_recorded_is_recorded(grid: Grid, failing: Callable[..., None]) -> None:
    """Such as one whose federation is impossible."""
    failing("tiny-mild fedavg", ValueError("no such thing"), at=0)
    assert grid.sweep("run", "--only", "method=fedavg").code == 1
    assert grid.sweep("retry").code == 1
    state = grid.states()["mild fedavg s0"]
    assert (state.status, state.error) == ("failed", "ValueError: no such thing")
    assert sum(run.info.status == "FAILED" for run in grid.store.runs()) == 1
    failing(None)
    assert grid.sweep("retry").code == 0
    assert grid.states()["mild fedavg s0"].status == "finished"


def test_shards_together_give_the_record_of_one_sweep(grid: Grid) -> None:
    for part in ("1/2", "2/2"):
        assert grid.sweep("run", "--shard", part).code == 0
        if part == "1/2":
            assert 0 < len(grid.hashes()) < RUNS
            assert grid.above[0] == "KILLED"
    assert grid.above[0] == "FINISHED"
    assert grid.sweep("run", experiment="whole").code == 0
    hashes = grid.hashes()
    assert len(hashes) == RUNS
    assert hashes == grid.hashes("whole")


def test_only_and_limit(grid: Grid) -> None:
    chosen = ("--only", "noise=severe", "--only", "method=fedavg", "--only", "method=fedprox")
    ended = grid.sweep("run", *chosen, "--limit", "1")
    assert ended.code == 0
    assert "left because of --limit  │      1" in ended.out
    assert set(grid.hashes()) == {"severe fedavg s0"}
    assert grid.sweep("run", *chosen, "--limit", "1").code == 0
    assert set(grid.hashes()) == {"severe fedavg s0", "severe fedprox s0"}


def test_an_interrupted_sweep_continues(grid: Grid, failing: Callable[..., None]) -> None:
    failing("tiny-mild fedprox", KeyboardInterrupt())
    stopped = grid.sweep("run")
    assert stopped.code == 130
    assert "fedsir: stopped" in stopped.err
    assert {label: state.status for label, state in grid.states().items()} == {
        "mild fedavg s0": "finished",
        "mild fedprox s0": "interrupted",
    }
    assert grid.above == ("KILLED", {"planned": 5, "finished": 1, "failed": 0, "missing": 4})
    failing(None)
    ended = grid.sweep("run")
    assert ended.code == 0
    assert "skipped: finished before │      1" in ended.out
    assert ended.out.count("continued after round 1") == 1
    assert len(grid.store.runs()) == RUNS
    assert grid.above[0] == "FINISHED"
    assert set(grid.hashes()) == set(grid.identities.values())


def test_a_run_of_another_process_is_left_to_it(grid: Grid) -> None:
    (held,) = expand(load_grid(str(grid.path)), ["noise=mild", "method=fedavg"]).runs
    with claim_run(held.config.model_copy(update={"tracking": grid.tracking})):
        ended = grid.sweep("run")
    assert ended.code == 0
    assert ended.out.count("another process works on it") == 2
    assert ended.out.count("another process still works on it") == 1
    assert set(grid.hashes()) == set(grid.identities.values()) - {held.label}
    assert grid.sweep("run").code == 0
    assert set(grid.hashes()) == set(grid.identities.values())


def test_the_last_process_ends_the_run_above(grid: Grid) -> None:
    """Another process still works on the grid when this one ends; then that one dies."""
    plan = expand(load_grid(str(grid.path)), ["noise=mild", "method=fedavg"])
    run = plan.runs[0]
    plan = replace(plan, runs=(replace(run, config=run.config.model_copy(update={"tracking": grid.tracking})),))
    store = grid.store
    with sweep_run(store, plan, ["the other"]):
        assert grid.sweep("run", "--only", "method=fedavg").code == 0
        assert grid.above[0] == "RUNNING"
    assert grid.above[0] == "FINISHED"

    folder = claims_folder(plan.runs[0].config)
    with sweep_run(store, plan, ["the other"]):
        (own,) = folder.glob("sweep-*.claim")
        dead = own.with_name(f"{own.name.rpartition('-')[0]}-00000000.claim")
        owner = json.loads(own.read_text())
        # Started at another time than the process that has its id now.
        dead.write_text(json.dumps({**owner, "started": (owner["started"] or 1) + 1}))
    assert grid.above[0] == "FINISHED"
    assert list(folder.glob("sweep-*")) == []


def test_a_run_above_that_was_killed_is_ended_when_nothing_is_left_to_do(grid: Grid) -> None:
    chosen = ("--only", "noise=mild", "--only", "method=fedavg")
    assert grid.sweep("run", *chosen).code == 0
    mlflow_id = find_sweep_run(grid.store, "tiny")
    grid.store.client.update_run(mlflow_id, status="RUNNING")
    ended = grid.sweep("run", *chosen)
    assert (ended.code, ended.err) == (0, "")
    assert grid.above == ("FINISHED", {"planned": 1, "finished": 1, "failed": 0, "missing": 0})
    note = grid.store.client.get_run(mlflow_id).data.tags["mlflow.note.content"]
    assert "only noise: mild" in note
    assert "tracking" not in note


def test_status_of_a_sweep_that_has_not_begun_creates_nothing(grid: Grid, tmp_path: Path) -> None:
    file = tmp_path / "none" / "mlflow.db"
    grid.tracking = TrackingConfig(uri=f"sqlite:///{file}", experiment="x")
    ended = grid.sweep("status")
    assert (ended.code, ended.err) == (0, "")
    assert "missing" in ended.out
    assert not file.parent.exists()


def test_plan_records_nothing(grid: Grid, tmp_path: Path) -> None:
    ended = grid.sweep("plan")
    assert (ended.code, ended.err) == (0, "")
    assert "2 conditions × 2 methods × 1 seed: 4 method runs" in ended.out
    assert "all_clean: 2 results from 1 run" in ended.out
    assert "distinct runs: 5 for 6 results" in ended.out
    assert sorted(tmp_path.iterdir()) == [grid.path]


def test_plan_says_what_the_paper_lacks(fedsir: Any) -> None:
    ended = fedsir.call("sweep", "plan", "paper")
    assert (ended.code, ended.err) == (0, "")
    assert "117 conditions × 12 methods × 3 seeds: 4212 method runs" in ended.out
    for setting in ("kermany.data.root", "uic.data.manifest", "wake_forest.data.manifest"):
        assert f"--set {setting}=VALUE" in ended.out
    for command in ("run", "retry", "status"):
        refused = fedsir.call("sweep", command, "paper")
        assert refused.code == 2
        assert "kermany.data.root, uic.data.manifest, wake_forest.data.manifest must be set" in refused.err


def test_images_that_do_not_exist_are_found_before_anything_runs(fedsir: Any, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    argv = ("paper", "--only", "task=kermany", "--set", f"kermany.data.root={folder}")
    ended = fedsir.call("sweep", "run", *argv)
    assert ended.code == 2
    assert f"data.root = {folder}: there is no such file or folder" in ended.err
    assert list(tmp_path.iterdir()) == []


def test_two_stores_are_refused(fedsir: Any, tmp_path: Path, store: str) -> None:
    text = GRID.replace("federation.noise.ratio=0.3", "federation.noise.ratio=0.3, tracking.experiment=other")
    grid = Grid(fedsir, tmp_path, store, text)
    ended = fedsir.call("sweep", "run", str(grid.path))
    assert ended.code == 2
    assert "several places" in ended.err
    assert list(tmp_path.iterdir()) == [grid.path]


@pytest.mark.parametrize(
    "setting",
    [
        "tracking.uri=postgresql://u:secret@h/d",
        " tracking.uri='postgresql://u:secret@h/d'",
        "tracking={uri: 'postgresql://u:secret@h/d'}",
    ],
)
def test_settings_of_the_store_are_not_described(setting: str) -> None:
    assert without_tracking([setting, "training.rounds=3"]) == ["training.rounds=3"]
