"""A grid on a Ray cluster of three nodes (on this machine): the record is that of one machine, whatever a node does."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.expansion import expand
from experiments.grid import load_grid
from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.store import prepare_store

pytestmark = pytest.mark.slow

GRID = """
name: nodes
base: {base}
set: [federation.clients=6, training.rounds={rounds}]
axes:
  noise:
    - {{label: mild, set: [federation.noise.ratio=0.3]}}
    - {{label: severe, set: [federation.noise.ratio=0.9]}}
methods: [fedavg, oct_fedsir]
seeds: [0]
"""
RUNS = 4
STORE = 80 * 2**20
# Read by every Python of the nodes: kills workers of Ray where they begin to import what actors need, as long as a file
# says so. `once`: the first that comes.
CRASH = """
import os, signal, sys


class Crash:
    def find_spec(self, name, path=None, target=None):
        if name != "fedsir.clients.actors" or not sys.argv[0].endswith("default_worker.py"):
            return
        try:
            with open({file!r}) as file:
                if file.read() == "once":
                    os.unlink({file!r})
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


sys.meta_path.insert(0, Crash())
"""


class Clustered:
    """Three nodes of one CPU each, the first of them the head, and grids that are run on them or in this process.

    crash: file that says which actors die while they start, see `CRASH`.
    """

    def __init__(self, folder: Path, cache: Path, command: list[str]) -> None:
        from ray.cluster_utils import Cluster

        self.folder, self._cache, self._command = folder, cache, command
        self.crash = folder / "site" / "crash"
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(CRASH.format(file=str(self.crash)), encoding="utf-8")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(folder / "site"), prepend=os.pathsep)
            head = {"num_cpus": 1, "object_store_memory": STORE}
            self.cluster: Any = Cluster(initialize_head=True, head_node_args=head)
            self.nodes = [self.cluster.add_node(num_cpus=1, object_store_memory=STORE) for _ in range(2)]

    def start(self, name: str, rounds: int, *settings: str) -> subprocess.Popen[str]:
        """`fedsir sweep run` of the grid, recorded in the experiment `name`."""
        grid = self.folder / f"{name}.yaml"
        grid.write_text(GRID.format(base=Path(__file__).parents[1] / "tiny.yaml", rounds=rounds), encoding="utf-8")
        given = (f"tracking.uri={self.uri}", f"tracking.experiment={name}", f"work_dir={self.folder / name}", *settings)
        return subprocess.Popen(
            [*self._command, "sweep", "run", str(grid), *(w for s in given for w in ("--set", s))],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "FEDSIR_CACHE": str(self._cache), "PYTHONUNBUFFERED": "1"},
        )

    def on_nodes(self, name: str, rounds: int, *settings: str) -> subprocess.Popen[str]:
        return self.start(name, rounds, f"execution.ray_address={self.cluster.address}", *settings)

    @property
    def uri(self) -> str:
        return f"sqlite:///{self.folder}/mlflow.db"

    def hashes(self, name: str) -> dict[str, str]:
        """Hash of the final weights by label of the finished runs."""
        labels = {run.identity: run.label for run in expand(load_grid(str(self.folder / f"{name}.yaml"))).runs}
        store = prepare_store(TrackingConfig(uri=self.uri, experiment=name))
        found = {}
        for run in store.runs():
            identity = run.data.tags.get("fedsir.run_id")
            if identity in labels and run.info.status == "FINISHED":
                file = store.client.download_artifacts(run.info.run_id, "summary.json")
                found[labels[identity]] = json.loads(Path(file).read_text(encoding="utf-8"))["weights_sha256"]
        return found

    def rounds_recorded(self, name: str) -> int:
        """Rounds of all runs that are in the store by now."""
        runs = prepare_store(TrackingConfig(uri=self.uri, experiment=name)).runs()
        return sum(1 for run in runs if "test/accuracy" in run.data.metrics)


def ended_well(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, out + err
    return out


@pytest.fixture(scope="module")
def clustered(tmp_path_factory: pytest.TempPathFactory, cache: Path, module_commands: Any) -> Iterator[Clustered]:
    found = Clustered(tmp_path_factory.mktemp("nodes"), cache, module_commands.command)
    yield found
    found.cluster.shutdown()


@pytest.fixture(scope="module")
def one_machine(clustered: Clustered) -> Callable[[int], dict[str, str]]:
    """Hashes of the grid in one process."""
    known: dict[int, dict[str, str]] = {}

    def hashes(rounds: int) -> dict[str, str]:
        if rounds not in known:
            name = f"alone{rounds}"
            ended_well(clustered.start(name, rounds, "execution.actors=in-process"))
            known[rounds] = clustered.hashes(name)
            assert len(known[rounds]) == RUNS
        return known[rounds]

    return hashes


def test_the_record_of_three_nodes_is_that_of_one_machine(
    clustered: Clustered, one_machine: Callable[[int], dict[str, str]]
) -> None:
    ended_well(clustered.on_nodes("three", 2))
    assert clustered.hashes("three") == one_machine(2)


def test_an_actor_that_dies_while_it_starts_is_started_once_more(
    clustered: Clustered, one_machine: Callable[[int], dict[str, str]]
) -> None:
    clustered.crash.write_text("once")
    assert "on 3 workers" in ended_well(clustered.on_nodes("crash", 2))
    assert not clustered.crash.exists()
    assert clustered.hashes("crash") == one_machine(2)


def test_actors_that_never_start_are_told_before_a_run_is_recorded(clustered: Clustered) -> None:
    clustered.crash.write_text("always")
    try:
        process = clustered.on_nodes("crashes", 2)
        _, err = process.communicate(timeout=400)
    finally:
        clustered.crash.unlink()
    assert process.returncode == 2
    assert "client actors cannot start" in err
    assert "Traceback" not in err
    assert clustered.hashes("crashes") == {}


def test_a_node_that_is_lost_in_mid_run_costs_the_tasks_on_it(
    clustered: Clustered, one_machine: Callable[[int], dict[str, str]]
) -> None:
    """It leaves in the middle of the first runs; nothing can take its place, so two actors do the rest."""
    expected = one_machine(6)
    process = clustered.on_nodes("lost", 6)
    try:
        until = time.monotonic() + 120
        while clustered.rounds_recorded("lost") == 0:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.2)
        assert len(clustered.hashes("lost")) < RUNS
        clustered.cluster.remove_node(clustered.nodes.pop())
        ended_well(process)
    finally:
        process.kill()
    assert clustered.hashes("lost") == expected
