"""`fedsir run` and `compare` as a user meets them: real processes, real Ray, a real SQLite store."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow.tracking import MlflowClient
from safetensors import safe_open

from experiments.commands import terminated_like_interrupted

ROUNDS = 60
SETTINGS = (
    f"training.rounds={ROUNDS}",
    "method.relabeling.every=15",
    "execution.actors=2",
    # What the store knows of a killed process is compared with its checkpoint.
    "tracking.flush_seconds=0.0",
)
STOPPED = "fedsir: stopped. The same command continues after the last finished round."
RAY = ("raylet", "gcs_server", "ray::ClientActo")


class Store:
    """One SQLite store for all tests here, since its schema takes seconds to create; an experiment for each test."""

    def __init__(self, folder: Path) -> None:
        self.uri = f"sqlite:///{folder}/mlflow.db"

    def settings(self, folder: Path) -> tuple[str, str]:
        return f"tracking.uri={self.uri}", f"tracking.experiment={folder.name}"

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    def runs(self, folder: Path) -> list[Any]:
        """Runs that were recorded from `folder`, oldest first."""
        experiment = self.client.get_experiment_by_name(folder.name)
        assert experiment is not None
        return list(self.client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"]))

    def rounds(self, run: Any) -> list[int]:
        """The steps of the accuracy curve as recorded."""
        return [point.step for point in self.client.get_metric_history(run.info.run_id, "test/accuracy")]


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


def _descendants(root: int) -> set[int]:
    """Process ids of `root` and everything below it."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
    tree = {root}
    while grown := {child for child, parent in parents.items() if parent in tree} - tree:
        tree |= grown
    return tree


def _listening(pids: set[int]) -> set[str]:
    """Addresses in the kernel's hexadecimal on which these processes accept TCP connections."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = descriptor.readlink().name
            except OSError:
                continue
            inodes |= set(re.findall(r"socket:\[(\d+)\]", target))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and cells[9] in inodes:
                found.add(cells[1].partition(":")[0])
    return found


# 127.0.0.1, and the same in IPv6 notation.
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def _ray_processes(folder: Path) -> list[str]:
    """Ray's processes that were started in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            name = (process / "comm").read_text().strip()
            if name.startswith(RAY) and (process / "cwd").readlink() == folder:
                found.append(name)
        except OSError:
            continue
    return found


def _await_no_ray(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while (left := _ray_processes(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("undisturbed")


@pytest.fixture(scope="module")
def undisturbed(folder: Path, book: Store, module_commands: Any) -> dict[str, Any]:
    """One whole run through Ray, watched while it works."""
    argv = module_commands.tiny_options(*SETTINGS, *book.settings(folder))
    process = module_commands.start(folder, "run", *argv)
    begun = module_commands.read_until(process, r"round +6/")
    tree = _descendants(process.pid)
    seen = {"listening": _listening(tree), "ray": _ray_processes(folder)}
    return {"ended": module_commands.wait(process, begun), **seen}


def test_run_ends_with_its_table_and_nothing_else(undisturbed: dict[str, Any], book: Store) -> None:
    """No warning or hint of a library is among the lines."""
    ended = undisturbed["ended"]
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    title = "demo, oct_fedsir, seed 0 (phantom images), last round"
    told = "/60: accuracy|: no predicted-clean client|: identification: "
    run = rf"demo: oct_fedsir, seed 0 \(phantom images\)$|round +\d+({told})"
    rest = rf"note: |[┏┃┡│├└]|recorded in |see it | +{re.escape(title)} +$"
    assert [line for line in lines if not re.match(f"{run}|{rest}", line)] == []
    assert any("wrong labels left %" in line for line in lines)
    assert sum("/60: accuracy " in line for line in lines) == 11
    assert lines[-1] == f"see it with: fedsir ui --tracking-uri {book.uri}"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_listens_beyond_loopback(undisturbed: dict[str, Any]) -> None:
    assert undisturbed["listening"], "Ray listens somewhere; where was not found"
    assert undisturbed["listening"] <= LOOPBACK


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ray_ends_with_the_command(undisturbed: dict[str, Any], folder: Path) -> None:
    assert {name[:6] for name in undisturbed["ray"]} == {name[:6] for name in RAY}
    _await_no_ray(folder)


def test_run_is_recorded(undisturbed: dict[str, Any], book: Store, folder: Path) -> None:
    (run,) = book.runs(folder)
    client = book.client
    assert run.info.status == "FINISHED"
    assert run.data.params["method"] == "oct_fedsir"
    assert run.data.params["clients"] == "4"
    assert run.data.tags["fedsir.data_kind"] == "phantom"
    assert len(run.data.metrics) <= 30
    assert book.rounds(run) == list(range(1, ROUNDS + 1))
    files = {f.path for f in client.list_artifacts(run.info.run_id)}
    files |= {f.path for d in list(files) for f in client.list_artifacts(run.info.run_id, d)}
    assert {
        "config.yaml",
        "federation/federation.csv",
        "evaluation/confusion.png",
        "identification/similarity.png",
        "clients.csv",
        "labels.csv",
        "weights/last.safetensors",
        "summary.json",
    } <= files
    assert f"{100 * run.data.metrics['final/accuracy']:.1f}  (95 % bootstrap" in undisturbed["ended"].out


def test_summary_and_weights_carry_the_printed_hash(
    undisturbed: dict[str, Any], book: Store, folder: Path, tmp_path: Path
) -> None:
    (run,) = book.runs(folder)
    client = book.client
    summary = json.loads(Path(client.download_artifacts(run.info.run_id, "summary.json", str(tmp_path))).read_text())
    assert summary["weights_sha256"].startswith(undisturbed["ended"].weights)
    weights = client.download_artifacts(run.info.run_id, "weights/last.safetensors", str(tmp_path))
    with safe_open(weights, framework="numpy") as file:
        assert file.metadata()["sha256"] == summary["weights_sha256"]


def test_finished_run_leaves_no_checkpoint(undisturbed: dict[str, Any], folder: Path) -> None:
    assert undisturbed["ended"].code == 0
    assert list((folder / "fedsir-runs" / "checkpoints").iterdir()) == []


# Becomes the command after making the terminal at its input the one whose Ctrl-C reaches it.
AT_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class _Terminal:
    """A process at a pseudo-terminal of 80 columns."""

    def __init__(self, folder: Path, argv: list[str]) -> None:
        self.text = ""
        self._screen, inside = pty.openpty()
        fcntl.ioctl(self._screen, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}
        environment |= {"TERM": "xterm-256color", "RAY_prestart_worker_first_driver": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", AT_TERMINAL, *argv],
            cwd=folder,
            stdin=inside,
            stdout=inside,
            stderr=inside,
            env=environment,
        )
        os.close(inside)

    def read(self) -> bool:
        """Read what has come; False at the end."""
        try:
            data = os.read(self._screen, 65536)
        except OSError:
            return False
        self.text += data.decode(errors="ignore")
        return bool(data)

    def press(self, key: bytes) -> None:
        os.write(self._screen, key)

    def wait(self) -> int:
        while self.read():
            pass
        os.close(self._screen)
        return self._process.wait(timeout=60)

    @property
    def lines(self) -> list[str]:
        colourless = re.sub(r"\x1b\[[0-9;]*m", "", self.text)
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\r", colourless)
        return [line for line in re.split(r"[\r\n]+", plain) if line.strip()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and needs a pseudo-terminal")
def test_stopped_run_continues(fedsir: Any, tmp_path: Path, book: Store, undisturbed: dict[str, Any]) -> None:
    """Terminated, killed, interrupted at a terminal: each time the same command goes on where it was.

    No round is repeated, none is missing, and the weights are those of a run that was never stopped.
    """
    argv = ["run", *fedsir.tiny_options(*SETTINGS, *book.settings(tmp_path))]

    def stopped(status: str) -> str:
        """What the next start says. A checkpoint is written just before its round is recorded, so a run that is
        stopped in between continues one round later than the record knows."""
        (run,) = book.runs(tmp_path)
        assert run.info.status == status
        _await_no_ray(tmp_path)
        last = max(book.rounds(run))
        return rf"continuing after round ({last}|{last + 1})\b"

    terminated = fedsir.start(tmp_path, *argv)
    begun = fedsir.read_until(terminated, r"round +6/")
    terminated.terminate()
    ended = fedsir.wait(terminated, begun)
    assert (ended.code, ended.err) == (143, f"{STOPPED}\n")
    after = stopped("KILLED")

    killed = fedsir.start(tmp_path, *argv)
    begun = fedsir.read_until(killed, r"round +24/")
    killed.kill()
    ended = fedsir.wait(killed, begun)
    assert ended.code == -signal.SIGKILL
    assert re.search(after, ended.out), ended.out
    after = stopped("RUNNING")

    # Ctrl-C reaches the whole process group, Ray's processes among them.
    terminal = _Terminal(tmp_path, [*fedsir.command, *argv])
    while not re.search(r"\b[3-5]\d/60", terminal.text):
        assert terminal.read(), terminal.text
    terminal.press(b"\x03")
    assert terminal.wait() == 130
    _live_line_is_all_there_is(terminal.lines, after)
    after = stopped("KILLED")

    # Where a run executes is no part of it, so Ray need not start once more.
    ended = fedsir.call(*argv, "--set", "execution.actors=in-process")
    assert (ended.code, ended.err) == (0, "")
    assert re.search(after, ended.out), ended.out
    assert ended.weights == undisturbed["ended"].weights
    (run,) = book.runs(tmp_path)
    assert run.info.status == "FINISHED"
    assert run.data.tags["fedsir.resumed"] == "3"
    assert book.rounds(run) == list(range(1, ROUNDS + 1))


def test_exit_code_of_a_termination_survives_ray() -> None:
    """Ray turns an exit that finds it waiting into one with code 1."""
    with pytest.raises(SystemExit) as ended, terminated_like_interrupted():  # noqa: PT012
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit:
            raise SystemExit(1) from None
    assert ended.value.code == 143
    with pytest.raises(SystemExit) as ended, terminated_like_interrupted():
        raise SystemExit(2)
    assert ended.value.code == 2


def _live_line_is_all_there_is(lines: list[str], after: str) -> None:
    """No warning or hint of a library breaks the live line, and it fits."""
    assert lines[-1] == STOPPED
    waiting = r". (loading torch|opening the MLflow store|starting the workers)"
    rest = (
        r"note: |demo: oct_fedsir|[━╸╺ ]{20} +\d+/60 |round \d+: (no predicted-clean|identification: )|fedsir: stopped"
    )
    assert [line for line in lines if not re.match(f"{waiting}|{rest}", line)] == []
    start = rf"demo: oct_fedsir, seed 0 \(phantom images\), {after}"
    assert any(re.fullmatch(start, s.strip()) for s in lines), lines
    # The terminal itself puts ^C behind the line.
    assert all(len(line.removesuffix("^C")) <= 80 for line in lines)


def test_fresh_starts_over(fedsir: Any, tmp_path: Path, book: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted run is left behind and marked; the new one has every round."""
    from experiments.console import LiveLine

    record = LiveLine.record

    def interrupted(self: LiveLine, event: Any) -> None:
        record(self, event)
        if getattr(getattr(event, "record", None), "round", 0) == 2:
            raise KeyboardInterrupt

    settings = ("training.rounds=3", *book.settings(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(LiveLine, "record", interrupted)
        stopped = fedsir.tiny_run(*settings)
    assert (stopped.code, stopped.err) == (130, f"{STOPPED}\n")
    options = fedsir.tiny_options("execution.actors=in-process", *settings)
    ended = fedsir.call("run", "demo", *options, "--fresh")
    assert ended.code == 0
    assert "continuing" not in ended.out
    old, new = book.runs(tmp_path)
    assert (old.info.status, new.info.status) == ("KILLED", "FINISHED")
    assert old.data.tags["fedsir.superseded_by"] == new.info.run_id
    assert book.rounds(new) == [1, 2, 3]


def _recorded_configuration(book: Store, run: Any, target: Path) -> dict[str, Any]:
    target.mkdir()
    path = book.client.download_artifacts(run.info.run_id, "config.yaml", str(target))
    found: dict[str, Any] = yaml.safe_load(Path(path).read_text())
    return found


def test_compare(fedsir: Any, tmp_path: Path, book: Store) -> None:
    """One federation per seed for all methods; settings of one method do not reach the other."""
    settings = ("execution.actors=in-process", "method.relabeling.every=1", *book.settings(tmp_path))
    argv = ["compare", "demo", "--methods", "oct_fedsir,fedavg,all_clean", "--seeds", "0-1"]
    ended = fedsir.call(*argv, *fedsir.tiny_options(*settings))
    assert (ended.code, ended.err) == (0, "")
    runs = book.runs(tmp_path)
    noise = [r.data.params["noise_type"] for r in runs]
    assert noise == ["symmetric", "symmetric", "none"] * 2
    assert [r.data.params["method"] for r in runs] == ["oct_fedsir", "fedavg", "fedavg"] * 2
    assert [r.data.params["seed"] for r in runs] == ["0"] * 3 + ["1"] * 3
    digests = [r.data.tags["fedsir.federation"] for r in runs]
    assert digests[0] == digests[1] != digests[2]
    assert digests[3] == digests[4] != digests[0]
    methods = [_recorded_configuration(book, run, tmp_path / str(i))["method"] for i, run in enumerate(runs)]
    assert methods[0]["relabeling"]["every"] == methods[3]["relabeling"]["every"] == 1
    assert methods[1] == methods[2] == {"name": "fedavg", "preset": None}
    # The table says what the store says.
    title = "demo (phantom images), last of 2 rounds"
    assert title in ended.out
    rows = re.findall(r"│ *(\w*) *│ *([01]) *│ *([\d.]+) *│ *([\d.]+) *│", ended.out)
    order = [runs[i] for i in (0, 3, 1, 4, 2, 5)]
    shown = [
        (f"{100 * r.data.metrics['final/accuracy']:.1f}", f"{100 * r.data.metrics['test/macro_f1']:.1f}") for r in order
    ]
    assert [row[2:] for row in rows] == shown
    assert [row[0] for row in rows] == ["oct_fedsir", "", "fedavg", "", "all_clean", ""]
    assert ended.out.count("Images are synthetic phantoms") == 1


def test_data_inspect(fedsir: Any, tmp_path: Path) -> None:
    """Counts add up, noise changes labels of noisy clients only, and nothing is recorded."""
    ended = fedsir.call("data", "inspect", "demo", *fedsir.tiny_options())
    assert (ended.code, ended.err) == (0, "")
    assert "(phantom images, 32x32)" in ended.out
    clients = re.findall(r"│ (\d) +│ (clean|noisy) +│ +(\d+) │ +(\d+) │", ended.out)
    assert len(clients) == 4
    assert sum(int(images) for _, _, images, _ in clients) == 159
    assert "1 image set aside as the public pool" in ended.out
    assert all((int(wrong) > 0) == (status == "noisy") for _, status, _, wrong in clients)
    assert list(tmp_path.iterdir()) == []


def test_methods(fedsir: Any) -> None:
    ended = fedsir.call("methods")
    assert (ended.code, ended.err) == (0, "")
    for name in ("fedavg", "oct_fedsir", "all_clean"):
        assert name in ended.out


def test_cohort_with_named_classes_runs(fedsir: Any, tmp_path: Path, book: Store) -> None:
    """Classes are a mapping in the configuration; runs of such cohorts share decoded images like any other."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(1)
    rows = ["path,label,patient_id"]
    for number, label in enumerate(["GA", "CGA", "NCGA", "NGA", "NGA", "NGA"] * 10):
        Image.fromarray(rng.integers(0, 255, (36, 36), dtype=np.uint8)).save(tmp_path / f"{number}.png")
        rows.append(f"{number}.png,{label},P{number}")
    (tmp_path / "manifest.csv").write_text("\n".join(rows))
    settings = (
        f"data.manifest={tmp_path}/manifest.csv",
        "data.image_size=32",
        "federation.clients=3",
        "federation.partition.min_client_size=2",
        "model.backbone=tiny",
        "model.weights=random",
        "training.rounds=1",
        "execution.actors=in-process",
        *book.settings(tmp_path),
    )
    argv = [word for s in settings for word in ("--set", s)]
    ended = fedsir.call("compare", "wake_forest", "--methods", "fedavg,all_clean", *argv)
    assert (ended.code, ended.err) == (0, "")
    assert "wake_forest (real images)" in ended.out
    assert ended.out.count("class GA is made of the labels GA, CGA, NCGA") == 1
