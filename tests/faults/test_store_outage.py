"""The store is out of reach while real runs work: they go on, and the record becomes that of undisturbed ones."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from store_faults import Fault, Locked, Proxy, ReadOnly, Server, Unwritable, later, mounted
from tiny_sweep import TINY, Ended

from experiments import cli
from experiments.session import Session
from experiments.sweeps.progress import SweepProgress
from fedsir.clients.executor import InProcessExecutor
from fedsir.events import RoundFinished
from mlflow_tracking import outage
from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.states import recorded_states
from mlflow_tracking.store import Store, prepare_database, prepare_store

ROUNDS = 4
SETTINGS = (
    f"training.rounds={ROUNDS}",
    "execution.actors=in-process",
    "tracking.figures=false",
    "tracking.flush_seconds=0.0",
)
GRID = f"""
name: tiny
base: {TINY}
set: [{", ".join(SETTINGS)}]
axes:
  noise:
    - {{label: mild, set: [federation.noise.ratio=0.3]}}
    - {{label: medium, set: [federation.noise.ratio=0.6]}}
    - {{label: severe, set: [federation.noise.ratio=0.9]}}
methods: [fedavg]
seeds: [0]
"""
RUNS = 3
SOON_S = 0.3
ENOUGH_S = 120.0


@dataclass
class Commands:
    """Calls `fedsir` in this process, with a store that `uri` names.

    at: what is to happen when a run has recorded a round. trained: clients that were trained since the last call
    began. opened: the store of the latest run.
    """

    uri: str
    experiment: str
    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch
    at: dict[int, Callable[[], object]] = field(default_factory=dict)
    trained: list[int] = field(default_factory=list)
    opened: Store | None = None

    def __post_init__(self) -> None:
        run, work, commands = Session.run, InProcessExecutor.run, self

        def watched(session: Session, config: Any, recorders: Any, *given: Any, **options: Any) -> Any:
            class At:
                def record(self, event: Any) -> None:
                    if isinstance(event, RoundFinished):
                        commands.at.get(event.record.round, lambda: None)()

            commands.opened = session.store(config)
            return run(session, config, [*recorders, At()], *given, **options)

        def counted(executor: InProcessExecutor, items: Any, broadcast: Any) -> Any:
            commands.trained += [item.client for item in items if type(item.task).__name__ == "LocalTraining"]
            return work(executor, items, broadcast)

        self.monkeypatch.setattr(Session, "run", watched)
        self.monkeypatch.setattr(InProcessExecutor, "run", counted)

    @property
    def store(self) -> Store:
        return prepare_store(TrackingConfig(uri=self.uri, experiment=self.experiment))

    def call(self, *words: str, patience: float = ENOUGH_S) -> Ended:
        self.capsys.readouterr()
        self.trained.clear()
        settings = (f"tracking.uri={self.uri}", f"tracking.experiment={self.experiment}")
        given = [word for s in (*settings, f"tracking.patience_s={patience}") for word in ("--set", s)]
        self.monkeypatch.setattr(sys, "argv", ["fedsir", *words, *given])
        try:
            cli.main()
            code: object = 0
        except SystemExit as end:
            code = end.code or 0
        assert isinstance(code, int)
        return Ended(code, *self.capsys.readouterr())

    def run(self, patience: float = ENOUGH_S) -> Ended:
        """One run of FedAvg."""
        settings = (*SETTINGS, "method.name=fedavg")
        return self.call("run", str(TINY), *(word for s in settings for word in ("--set", s)), patience=patience)

    def sweep(self, patience: float = ENOUGH_S) -> Ended:
        """The grid."""
        Path("tiny.yaml").write_text(GRID, encoding="utf-8")
        return self.call("sweep", "run", "tiny.yaml", patience=patience)

    def record(self) -> dict[str, dict[str, Any]]:
        """By identity everything about finished runs but times; each of them is there once, and nothing else."""
        store = self.store
        found: dict[str, dict[str, Any]] = {}
        for run in store.runs():
            assert run.info.status == "FINISHED"
            identity = run.data.tags["fedsir.run_id"]
            assert identity not in found
            folder = Path(store.client.download_artifacts(run.info.run_id, ""))
            files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
            # Names the store.
            del files["config.yaml"]
            summary = json.loads(files.pop("summary.json"))
            figures = {
                key: [(p.step, p.value) for p in store.client.get_metric_history(run.info.run_id, key)]
                for key in run.data.metrics
                if not key.startswith("seconds/")
            }
            assert [step for step, _ in figures["test/accuracy"]] == list(range(1, ROUNDS + 1))
            times = [p.step for p in store.client.get_metric_history(run.info.run_id, "seconds/compute")]
            assert times == list(range(1, ROUNDS + 1))
            found[identity] = {
                "figures": figures,
                "weights": summary["weights_sha256"],
                "files": files,
                "params": run.data.params,
                "inputs": len(run.inputs.dataset_inputs),
            }
        return found


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for all tests here, since its schema takes seconds to create; an experiment for each test."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    prepare_database(f"sqlite:///{path}")
    return path


@pytest.fixture
def commands(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cache: Path,
) -> Callable[[str, str], Commands]:
    """Commands in an empty folder, for a store and an experiment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSIR_CACHE", str(cache))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(outage, "FIRST_PAUSE_S", 0.05)
    return lambda uri, experiment: Commands(uri, experiment, capsys, monkeypatch)


@pytest.fixture
def here(commands: Any, database: Path, tmp_path: Path) -> Commands:
    found: Commands = commands(f"sqlite:///{database}", tmp_path.name)
    return found


@pytest.fixture(scope="module")
def undisturbed_runs() -> dict[str, dict[str, Any]]:
    """The record of what nobody disturbed, filled by the first test that needs it."""
    return {}


def expected(commands: Any, database: Path, kept: dict[str, dict[str, Any]], what: str) -> dict[str, Any]:
    """The record of an undisturbed `run` or `sweep` in the same folder."""
    if what not in kept:
        alone = commands(f"sqlite:///{database}", f"undisturbed {what}")
        assert getattr(alone, what)().code == 0
        kept[what] = alone.record()
    return kept[what]


@pytest.fixture
def undisturbed(
    commands: Any, database: Path, undisturbed_runs: dict[str, dict[str, Any]]
) -> Callable[[str], dict[str, Any]]:
    return partial(expected, commands, database, undisturbed_runs)


@pytest.fixture
def unwritable(database: Path) -> Iterator[Unwritable]:
    fault = Unwritable(database)
    yield fault
    fault.end()


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("mlflow_tracking")]


def test_a_run_goes_on_while_its_store_is_out_of_reach(
    undisturbed: Any, here: Commands, unwritable: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    whole = undisturbed("run")
    here.at = {1: unwritable.begin, 3: unwritable.end}
    ended = here.run()
    assert (ended.code, ended.err) == (0, "")
    assert here.record() == whole
    lost, back = _said(caplog)
    assert "cannot be used just now: disk I/O error" in lost
    assert "can be used again" in back


def test_the_end_of_a_run_waits_for_its_store(undisturbed: Any, here: Commands, unwritable: Fault) -> None:
    whole = undisturbed("run")
    here.at = {2: unwritable.begin, ROUNDS: partial(later, SOON_S, unwritable.end)}
    ended = here.run()
    assert (ended.code, ended.err) == (0, "")
    assert here.record() == whole


def test_after_too_long_an_outage_the_same_command_delivers_without_training(
    undisturbed: Any, here: Commands, unwritable: Fault
) -> None:
    whole = undisturbed("run")
    here.at = {2: unwritable.begin}
    ended = here.run(patience=0.1)
    assert ended.code == 1
    assert "the result could not be recorded: " in ended.err
    assert "disk I/O error" in ended.err
    (checkpoint,) = Path("fedsir-runs/checkpoints").glob("*.safetensors")
    assert f"The rounds of this run are kept in {checkpoint}." in ended.err
    assert "Traceback" not in ended.err
    assert len(here.trained) == ROUNDS * 4

    # As long as the store is out of reach, the command says so at once.
    ended = here.run()
    assert ended.code == 2
    assert "The MLflow store cannot be used." in ended.err

    unwritable.end()
    here.at = {}
    (interrupted,) = here.store.runs()
    assert interrupted.info.status == "RUNNING"
    ended = here.run()
    assert (ended.code, ended.err) == (0, "")
    assert f"continuing after round {ROUNDS}" in ended.out
    assert here.trained == []
    assert here.record() == whole
    assert list(checkpoint.parent.iterdir()) == []


def test_ctrl_c_ends_the_waiting(undisturbed: Any, here: Commands, unwritable: Fault) -> None:
    whole = undisturbed("run")
    here.at = {
        3: unwritable.begin,
        ROUNDS: partial(later, SOON_S, lambda: os.kill(os.getpid(), signal.SIGINT)),
    }
    ended = here.run()
    assert ended.code == 130
    assert "The same command continues" in ended.err
    # It did not wait until patience had ended.
    assert "(setting tracking.patience_s)" not in ended.err
    unwritable.end()
    here.at = {}
    assert here.run().code == 0
    assert here.trained == []
    assert here.record() == whole


def test_a_sweep_with_an_outage_in_its_middle_ends_complete(
    undisturbed: Any, here: Commands, unwritable: Unwritable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than patience: for the end of one run, and for the start of the next."""
    whole = undisturbed("sweep")
    put_off, note = list[str](), SweepProgress.undelivered

    def noted(self: SweepProgress, run: Any, error: BaseException) -> None:
        put_off.append(run.label)
        note(self, run, error)
        if len(put_off) == 2:
            unwritable.end()

    monkeypatch.setattr(SweepProgress, "undelivered", noted)
    begun = list[int]()

    def begin_once() -> None:
        if not begun:
            begun.append(1)
            unwritable.begin()

    here.at = {2: begin_once}
    ended = here.sweep(patience=0.1)
    assert (ended.code, ended.err) == (0, "")
    # The third may come before anybody has tried again.
    assert ended.out.count("not recorded yet, to be tried again: ") == len(put_off) >= 2
    assert f"continued after round {ROUNDS}" in ended.out
    assert "out of reach" not in ended.out
    # Nothing was trained twice.
    assert len(here.trained) == RUNS * ROUNDS * 4
    assert here.record() == whole


@pytest.mark.slow
def test_a_sweep_whose_store_does_not_come_back_fails_no_run(
    undisturbed: Any, here: Commands, unwritable: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    whole = undisturbed("sweep")
    begun = list[int]()

    def begin_once() -> None:
        if not begun:
            begun.append(1)
            unwritable.begin()

    here.at = {3: begin_once}
    ended = here.sweep(patience=0.05)
    assert ended.code == 1
    assert f"not recorded: the store was out of reach │      {RUNS}" in ended.out
    assert ended.out.count("\nnot recorded: ") == RUNS
    assert re.search(r"│ failed +│ +0 ", ended.out)
    assert "is kept in fedsir-runs/checkpoints; fedsir sweep run (or retry) continues there" in ended.out
    # One run went to its end, the others had not begun.
    assert len(here.trained) == ROUNDS * 4
    assert not any(record.exc_info for record in caplog.records)

    unwritable.end()
    states = recorded_states(here.store, list(whole))
    assert [state.status for state in states.values()] == ["interrupted"]
    here.at = {}
    ended = here.sweep()
    assert (ended.code, ended.err) == (0, "")
    assert len(here.trained) == (RUNS - 1) * ROUNDS * 4
    assert here.record() == whole


@pytest.mark.slow
def test_a_store_that_somebody_else_locks(
    undisturbed: Any, here: Commands, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow waits for 20 s before it says so."""
    monkeypatch.setattr(outage, "COST_FACTOR", 0)
    whole = undisturbed("run")
    fault = Locked(database)
    here.at = {2: fault.begin, 3: fault.end}
    try:
        ended = here.run()
    finally:
        fault.end()
    assert (ended.code, ended.err) == (0, "")
    assert here.record() == whole


def test_a_store_that_becomes_read_only(undisturbed: Any, here: Commands, caplog: pytest.LogCaptureFixture) -> None:
    whole = undisturbed("run")

    def opened() -> Store:
        assert here.opened is not None
        return here.opened

    fault = ReadOnly(opened)
    here.at = {2: fault.begin, ROUNDS: partial(later, SOON_S, fault.end)}
    ended = here.run()
    assert (ended.code, ended.err) == (0, "")
    assert here.record() == whole
    assert "cannot be used just now: attempt to write a readonly database" in _said(caplog)[0]


def test_a_store_that_is_read_only_from_the_start(commands: Any, tmp_path: Path) -> None:
    folder = tmp_path / "mounted"
    folder.mkdir()
    with mounted(folder) as again:
        if again is None:
            pytest.skip("this user may not mount file systems")
        again("ro")
        there: Commands = commands(f"sqlite:///{folder}/mlflow.db", "read-only")
        ended = there.run()
        assert ended.code == 2
        assert "it cannot be written ([Errno 30] Read-only file system" in ended.err
        assert there.trained == []


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    database = tmp_path_factory.mktemp("server") / "mlflow.db"
    prepare_database(f"sqlite:///{database}")
    found = Server(database)
    found.start()
    yield found
    found.kill()


@pytest.mark.slow
def test_a_server_that_is_killed_and_started_again(
    undisturbed: Any, commands: Any, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    whole = undisturbed("run")
    there: Commands = commands(server.address, "killed")
    there.at = {1: server.kill, ROUNDS: partial(later, 3.0, server.start)}
    ended = there.run()
    assert (ended.code, ended.err) == (0, "")
    assert there.record() == whole
    lost, back = _said(caplog)
    assert "cannot be used just now: Connection refused" in lost
    assert "can be used again" in back


@pytest.mark.slow
def test_a_sweep_whose_server_is_gone_for_a_while(undisturbed: Any, commands: Any, server: Server) -> None:
    whole = undisturbed("sweep")
    there: Commands = commands(server.address, "sweep")
    begun = list[int]()

    def gone() -> None:
        begun.append(1)
        if len(begun) == 2:
            server.kill()
            later(5.0, server.start)

    there.at = {2: gone}
    ended = there.sweep()
    assert (ended.code, ended.err) == (0, "")
    assert there.record() == whole
    assert len(there.trained) == RUNS * ROUNDS * 4


@pytest.mark.slow
def test_answers_that_are_lost(undisturbed: Any, commands: Any, server: Server) -> None:
    """The server does what it is asked, but its answer does not arrive."""
    whole = undisturbed("run")
    proxy = Proxy(server.port)
    try:
        there: Commands = commands(proxy.address, "lost answers")
        assert there.store.runs() == []
        endings = ("runs/create", "runs/log-batch", "runs/log-inputs", "runs/update", "runs/search", "summary.json")
        proxy.lose = dict.fromkeys(endings, 2)
        ended = there.run()
    finally:
        proxy.stop()
    assert (ended.code, ended.err) == (0, "")
    assert set(proxy.lost) == set(endings)
    there.uri = server.address
    assert there.record() == whole
