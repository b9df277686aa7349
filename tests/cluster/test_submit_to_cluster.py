"""A grid submitted through the Jobs API to a Ray cluster of three nodes on this machine, guarded by a token."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.store import prepare_store

# Without ray[default] there is no dashboard and no Jobs API.
pytest.importorskip("aiohttp_cors")
pytestmark = pytest.mark.slow

START_S, LIMIT_S = 300.0, 1800.0
COMMAND = [sys.executable, "-c", "from experiments.cli import main; main()"]
SMALL = (
    *("data.train_images=400", "data.test_images=80", "data.image_size=32", "federation.clients=6"),
    *("training.local_epochs=1", "evaluation.bootstrap_samples=20", "tracking.figures=false"),
)


@dataclass(frozen=True)
class Cluster:
    """address: of the dashboard. environment: of whoever may talk to it. nodes: the process that started each."""

    address: str
    environment: dict[str, str]
    runs: Path
    nodes: list[subprocess.Popen[bytes]]

    def fedsir(self, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *argv, "--address", self.address],
            env={**self.environment, **environment},
            cwd=self.runs,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def submit(self, rounds: int, *more: str) -> subprocess.CompletedProcess[str]:
        settings = [word for value in (*SMALL, f"training.rounds={rounds}") for word in ("--set", value)]
        store = ["--store-on-head", str(self.runs / "store"), "--python", sys.executable, "--only", "method=fedavg"]
        return self.fedsir("submit", "quickstart", *store, *settings, *more)

    def states(self, experiment: str) -> dict[str, list[str]]:
        """Rows of the record: names of runs by status."""
        question = (
            "select r.status, r.name from runs r join experiments e on e.experiment_id = r.experiment_id "
            "where e.name = ? and r.name like 'quickstart-%' order by r.name"
        )
        connection = sqlite3.connect(self.runs / "store" / "mlflow.db")
        try:
            found: dict[str, list[str]] = {}
            for status, name in connection.execute(question, (experiment,)):
                found.setdefault(status, []).append(name)
            return found
        finally:
            connection.close()

    def lose_a_node(self) -> None:
        """End everything on the last node at once, as when its machine goes down."""
        session = self.nodes[-1].pid
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                # After the name, which may hold anything: state, parent, group, session.
                if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                    os.kill(int(folder.name), signal.SIGKILL)

    def await_a_round(self, store: Path, job: str) -> None:
        """Wait until a round of a run is done."""
        until = time.monotonic() + START_S
        while not list((store / "checkpoints").glob("*.safetensors")):
            assert time.monotonic() < until, self.fedsir("jobs", "logs", job, "--no-wait").stdout
            time.sleep(0.2)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _answers(address: str) -> bool:
    try:
        urllib.request.urlopen(address, timeout=2).close()
    except HTTPError:
        return True
    except OSError:
        return False
    return True


def _environment(folder: Path) -> dict[str, str]:
    """This process's without a cluster, and with an image cache in `folder`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, "RAY_USAGE_STATS_ENABLED": "0", "FEDSIR_CACHE": str(folder / "cache")}


def _record(folder: Path) -> dict[str, dict[str, Any]]:
    """The quickstart's runs as recorded in `folder`, by identity: figures without times, hashes of all files."""
    store = prepare_store(TrackingConfig(uri=f"sqlite:///{folder}/mlflow.db", experiment="quickstart"))
    found: dict[str, dict[str, Any]] = {}
    for run in store.runs():
        identity = run.data.tags.get("fedsir.run_id")
        if identity is None:  # the sweep's own
            continue
        assert run.info.status == "FINISHED"
        assert "fedsir.resumed" not in run.data.tags
        assert identity not in found
        artifacts = Path(store.client.download_artifacts(run.info.run_id, ""))
        files = {p.relative_to(artifacts).as_posix(): p.read_bytes() for p in artifacts.rglob("*") if p.is_file()}
        # Names the store and the cluster.
        del files["config.yaml"]
        summary = json.loads(files.pop("summary.json"))
        del summary["seconds"]
        summary["final"] = {key: value for key, value in summary["final"].items() if not key.startswith("seconds/")}
        figures = {
            key: [(point.step, point.value) for point in store.client.get_metric_history(run.info.run_id, key)]
            for key in run.data.metrics
            if not key.startswith("seconds/")
        }
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        found[identity] = {"summary": summary, "figures": figures, "files": hashes}
    return found


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The record of the whole quickstart as a laptop makes it."""
    folder = tmp_path_factory.mktemp("alone")
    where = ("--set", f"tracking.uri=sqlite:///{folder}/mlflow.db", "--set", f"work_dir={folder}")
    ended = subprocess.run(
        [*COMMAND, "sweep", "run", "quickstart", "--quiet", *where],
        env=_environment(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = _record(folder)
    assert len(found) == 5
    for run in found.values():
        assert [step for step, _ in run["figures"]["test/accuracy"]] == list(range(1, 9))
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    runs = tmp_path_factory.mktemp("cluster")
    (runs / "token").write_text(uuid.uuid4().hex * 2)
    # Ray's sockets lie below it, and their paths must be short.
    scratch = Path(tempfile.mkdtemp(prefix="fr"))
    environment = {
        **_environment(runs),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(runs / "token"),
    }
    gcs, dashboard, *agents = _free_ports(5)
    address = f"http://127.0.0.1:{dashboard}"
    processes: list[subprocess.Popen[bytes]] = []

    def start(number: int, *options: str) -> None:
        common = ["--num-cpus=1", f"--dashboard-agent-listen-port={agents[number]}", f"--temp-dir={scratch}"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, *common, "--block"]
        memory = "--object-store-memory=200000000"
        with (runs / f"node-{number}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [*command, memory], env=environment, stdout=log, stderr=log, start_new_session=True, cwd=runs
                )
            )

    try:
        start(0, "--head", f"--port={gcs}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}")
        until = time.monotonic() + START_S
        head = ""
        while not (head and _answers(address)):
            told = (runs / "node-0.log").read_text()
            assert processes[0].poll() is None, told
            assert time.monotonic() < until, told
            # What Ray tells people to type on the other nodes.
            head = next((line.split("'")[1] for line in told.splitlines() if "--address='" in line), "")
            time.sleep(0.5)
        for number in (1, 2):
            start(number, f"--address={head}")
            # One after the other: nodes that start on one machine at the same time get into each other's way.
            while "Ray runtime started" not in (runs / f"node-{number}.log").read_text():
                assert time.monotonic() < until, (runs / f"node-{number}.log").read_text()
                if processes[-1].poll() is not None:
                    start(number, f"--address={head}")
                time.sleep(0.5)
        yield Cluster(address, environment, runs, processes)
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                for process in processes:
                    process.wait(timeout=40)
        shutil.rmtree(scratch, ignore_errors=True)


def test_grid_runs_on_three_nodes_and_is_not_run_twice(cluster: Cluster) -> None:
    ended = cluster.submit(2)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "on 3 workers" in ended.stdout
    assert "2/2 done" in ended.stdout
    assert len(cluster.states("quickstart")["FINISHED"]) == 2
    again = cluster.submit(2)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "-2: 2 runs" in again.stdout
    assert len(cluster.states("quickstart")["FINISHED"]) == 2


def test_stopped_grid_is_recorded_as_killed_and_continues(cluster: Cluster) -> None:
    more = ("--set", "tracking.experiment=stopped")
    started = cluster.submit(150, *more, "--no-wait")
    assert started.returncode == 0, started.stderr
    job = started.stdout.split(":")[0].removeprefix("job ")
    cluster.await_a_round(cluster.runs / "store", job)
    stopped = cluster.fedsir("jobs", "stop", job)
    assert "STOPPED" in stopped.stdout, stopped.stderr
    killed = cluster.states("stopped")
    assert set(killed) == {"KILLED"}
    assert cluster.fedsir("jobs", "status", job).returncode == 1
    ended = cluster.submit(150, *more)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert set(cluster.states("stopped")) == {"FINISHED"}


def test_without_the_token_nothing_is_sent(cluster: Cluster) -> None:
    for environment, said in (
        ({"RAY_AUTH_MODE": "disabled"}, "asks for a token"),
        ({"RAY_AUTH_TOKEN": "0" * 64, "RAY_AUTH_TOKEN_PATH": ""}, "refuses the token"),
    ):
        ended = cluster.fedsir("submit", "quickstart", "--store-on-head", "/data", **environment)
        assert ended.returncode == 2
        assert said in ended.stderr


def test_token_is_in_no_log(cluster: Cluster) -> None:
    token = (cluster.runs / "token").read_text()
    listed = cluster.fedsir("jobs", "status")
    assert listed.returncode == 0
    jobs = [word for word in listed.stdout.split() if word.startswith("fedsir-")]
    assert jobs
    for job in jobs:
        assert token not in cluster.fedsir("jobs", "logs", job, "--no-wait").stdout


def test_whole_quickstart_that_loses_a_node_has_the_record_of_one_machine(
    one_machine: dict[str, dict[str, Any]], cluster: Cluster
) -> None:
    """The last test here: the cluster has two nodes afterwards."""
    store = cluster.runs / "whole"
    where = ("--store-on-head", str(store), "--python", sys.executable)
    started = cluster.fedsir("submit", "quickstart", *where, "--no-wait")
    assert started.returncode == 0, started.stderr
    job = started.stdout.split(":")[0].removeprefix("job ")
    cluster.await_a_round(store, job)
    cluster.lose_a_node()
    ended = cluster.fedsir("jobs", "logs", job)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "on 2 workers" in ended.stdout
    found = _record(store)
    assert set(found) == set(one_machine)
    for identity, run in found.items():
        assert run == one_machine[identity]
