"""Several sweeps that write into one store at once, real processes all of them: no point is lost or doubled."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from experiments.expansion import expand
from experiments.grid import load_grid
from fedsir.events import FINAL_METRICS
from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.store import Store, prepare_store
from mlflow_tracking.sweep_run import find_sweep_run

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-c", "from experiments.cli import main; main()"]
ROUNDS = 3
GRID = f"""
name: tiny
base: {Path(__file__).parents[1] / "tiny.yaml"}
set:
  - training.rounds={ROUNDS}
  - execution.actors=in-process
  - tracking.figures=false
  # Every round is a call of its own, so that sweeps get in each other's way as often as they can.
  - tracking.flush_seconds=0.0
axes:
  noise:
    - {{label: mild, set: [federation.noise.ratio=0.3]}}
    - {{label: severe, set: [federation.noise.ratio=0.9]}}
methods: [oct_fedsir, fedavg]
seeds: [0, 1]
"""
PER_ROUND = ("test/accuracy", "test/macro_f1", "test/loss", "train/loss", "cost/client_epochs")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _binaries() -> Path | None:
    """The newest PostgreSQL that is installed; Debian keeps its programs off the path."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    known = shutil.which("initdb")
    newest = found[-1] if found else None if known is None else Path(known).resolve()
    return None if newest is None else newest.parent


@dataclass
class Cluster:
    """A throw-away PostgreSQL that listens on a port of the loopback interface."""

    binaries: Path
    folder: Path
    port: int = field(default_factory=_free_port)
    # PostgreSQL refuses to run as root.
    user: tuple[str, ...] = ()

    def run(self, *words: str) -> None:
        command = [*self.user, str(self.binaries / words[0]), *words[1:]]
        ended = subprocess.run(command, cwd="/", capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr

    @property
    def uri(self) -> str:
        return f"postgresql+psycopg://tester@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        data = self.folder / "data"
        self.run("initdb", "-D", str(data), "-U", "tester", "--auth", "trust", "--no-sync")
        settings = f"-p {self.port} -h 127.0.0.1 -k {self.folder} -c fsync=off"
        self.run("pg_ctl", "start", "-w", "-D", str(data), "-l", str(self.folder / "log"), "-o", settings)

    def stop(self) -> None:
        self.run("pg_ctl", "stop", "-w", "-m", "immediate", "-D", str(self.folder / "data"))


@pytest.fixture(scope="module")
def postgres() -> Iterator[Cluster]:
    pytest.importorskip("psycopg", reason="the driver of PostgreSQL is not installed (extra `server`)")
    binaries = _binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed here")
    user: tuple[str, ...] = ()
    # Not pytest's folder, which another user may not enter; short, since the name of a socket is.
    folder = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    if os.getuid() == 0:
        if shutil.which("runuser") is None:
            pytest.skip("PostgreSQL does not run as root, and there is no runuser")
        user = ("runuser", "-u", "nobody", "--")
        shutil.chown(folder, "nobody")
    cluster = Cluster(binaries, folder, user=user)
    try:
        cluster.start()
        yield cluster
    finally:
        if (folder / "data" / "postmaster.pid").exists():
            cluster.stop()
        shutil.rmtree(folder)


@pytest.fixture
def server(postgres: Cluster, tmp_path: Path) -> Iterator[str]:
    """Address of `fedsir tracking serve` on PostgreSQL."""
    port = _free_port()
    words = ["tracking", "serve", "--port", str(port), "--workers", "2", "--artifacts", str(tmp_path / "files")]
    environment = {**os.environ, "MLFLOW_BACKEND_STORE_URI": postgres.uri, "PYTHONUNBUFFERED": "1"}
    log = (tmp_path / "server.log").open("w")
    process = subprocess.Popen(
        [*COMMAND, *words], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("tracking server at"):
                break
        else:
            pytest.fail((tmp_path / "server.log").read_text())
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
        process.communicate()
        log.close()
    assert code == 128 + signal.SIGTERM
    with socket.socket() as probe:
        # Nobody of the server's group is left.
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def _sweeps_at_once(folder: Path, tracking: TrackingConfig, options: Sequence[Sequence[str]]) -> list[str]:
    """What sweeps of the grid print that run at the same time; all of them end well."""
    grid = folder / "tiny.yaml"
    grid.write_text(GRID, encoding="utf-8")
    words = ["sweep", "run", str(grid), "--set", f"tracking.uri={tracking.uri}"]
    words += ["--set", f"tracking.experiment={tracking.experiment}"]
    started = [
        subprocess.Popen(
            [*COMMAND, *words, *more], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for more in options
    ]
    try:
        outs = [process.communicate(timeout=900)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(outs)
    return outs


def _every_point_is_there_once(store: Store, folder: Path) -> None:
    planned = {run.identity for run in expand(load_grid(str(folder / "tiny.yaml"))).runs}
    runs = store.runs()
    assert Counter(run.data.tags["fedsir.run_id"] for run in runs) == Counter(planned)
    parent = find_sweep_run(store, "tiny")
    assert parent is not None
    above = [run for run in store.search() if "fedsir.grid" in run.data.tags]
    assert [(run.info.run_id, run.info.status) for run in above] == [(parent, "FINISHED")]
    for run in runs:
        mlflow_id = run.info.run_id
        assert run.info.status == "FINISHED"
        assert run.data.tags["mlflow.parentRunId"] == parent
        steps = {
            key: sorted(point.step for point in store.client.get_metric_history(mlflow_id, key))
            for key in run.data.metrics
        }
        assert {steps[key] == list(range(1, ROUNDS + 1)) for key in PER_ROUND} == {True}
        assert {key: found for key, found in steps.items() if len(set(found)) < len(found)} == {}
        assert [steps[key] for key in FINAL_METRICS if key in steps] == [[0]] * (len(FINAL_METRICS) - 1)
        assert len(run.inputs.dataset_inputs) == 1
        assert {file.path for file in store.client.list_artifacts(mlflow_id)} >= {"summary.json", "labels.csv"}
    assert {frozenset(run.data.params) for run in runs} == {frozenset(runs[0].data.params)}


def test_four_sweeps_at_once_on_postgres(server: str, tmp_path: Path) -> None:
    tracking = TrackingConfig(uri=server, experiment="four at once")
    parts = [("--shard", f"{part}/4") for part in range(1, 5)]
    _sweeps_at_once(tmp_path, tracking, parts)
    store = prepare_store(tracking)
    _every_point_is_there_once(store, tmp_path)
    # Files went through the server.
    assert len(list((tmp_path / "files").rglob("summary.json"))) == len(store.runs())


def test_two_shards_at_once_on_sqlite(tmp_path: Path) -> None:
    tracking = TrackingConfig(uri=f"sqlite:///{tmp_path}/store/mlflow.db", experiment="two at once")
    _sweeps_at_once(tmp_path, tracking, [("--shard", "1/2"), ("--shard", "2/2")])
    _every_point_is_there_once(prepare_store(tracking), tmp_path)


def test_the_same_sweep_four_times_on_sqlite(tmp_path: Path) -> None:
    """Without shards, claims divide the runs among the processes."""
    tracking = TrackingConfig(uri=f"sqlite:///{tmp_path}/store/mlflow.db", experiment="same")
    outs = _sweeps_at_once(tmp_path, tracking, [()] * 4)
    _every_point_is_there_once(prepare_store(tracking), tmp_path)
    done = [int(number) for out in outs for number in re.findall(r"│ done +│ +(\d+)", out)]
    assert sum(done) == 8
