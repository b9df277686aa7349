"""The `fedsir` command in this process or as a real one, on federations small enough for tests.

Helpers are fixtures rather than a module, so that tests run under every import mode of pytest.
"""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiments import cli

COMMAND = [sys.executable, "-c", "from experiments.cli import main; main()"]
TINY = (
    "data.image_size=32",
    "data.train_images=160",
    "data.test_images=60",
    "federation.clients=4",
    "training.rounds=2",
    "training.batch_size=16",
    "method.stage_one.epochs=1",
    "evaluation.bootstrap_samples=20",
)
KERMANY = ("CNV", "DME", "DRUSEN", "NORMAL")


def options(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


@dataclass(frozen=True)
class Ended:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def weights(self) -> str:
        """The beginning of the weights' hash in the final table."""
        found = re.search(r"weights\s+│\s+([0-9a-f]{16})", self.out)
        assert found is not None, self.out + self.err
        return found[1]


class Commands:
    """The command in this process: `call`; as a process of its own: `start`, `wait`."""

    tiny = TINY
    command = COMMAND

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def call(self, *argv: str) -> Ended:
        self._capsys.readouterr()
        self._monkeypatch.setattr(sys, "argv", ["fedsir", *argv])
        try:
            cli.main()
            code: object = 0
        except SystemExit as end:
            code = end.code or 0
        out, err = self._capsys.readouterr()
        assert isinstance(code, int)
        return Ended(code, out, err)

    def tiny_run(self, *settings: str) -> Ended:
        """The tiny demo without Ray."""
        return self.call("run", "demo", *options(*TINY, "execution.actors=in-process", *settings))

    @staticmethod
    def tiny_options(*settings: str) -> list[str]:
        return options(*TINY, *settings)

    @staticmethod
    def start(folder: Path, *argv: str) -> subprocess.Popen[str]:
        """A real process in `folder` that the test may signal and must wait for."""
        return subprocess.Popen(
            [*COMMAND, *argv], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=quick_ray()
        )

    @staticmethod
    def read_until(process: subprocess.Popen[str], pattern: str) -> str:
        """Output of a process up to the line with `pattern`."""
        assert process.stdout is not None
        text = ""
        for line in process.stdout:
            text += line
            if re.search(pattern, line):
                return text
        pytest.fail(f"{pattern} was never printed: {text}{process.communicate()[1]}")

    @staticmethod
    def wait(process: subprocess.Popen[str], before: str = "") -> Ended:
        """The end of a process; `before` is what was read of its output already."""
        out, err = process.communicate(timeout=180)
        return Ended(process.returncode, before + out, err)


def quick_ray() -> dict[str, str]:
    """Without the idle workers that Ray starts for every CPU."""
    return {**os.environ, "RAY_prestart_worker_first_driver": "0", "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def fedsir(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> Commands:
    """The command with an empty folder as working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSIR_CACHE", str(cache))
    return Commands(capsys, monkeypatch)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store for everything that must not record a run; its schema takes seconds to create."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture(scope="session")
def recorded_runs() -> Callable[[str], int]:
    """How many runs a SQLite store holds."""

    def count(uri: str) -> int:
        path = Path(uri.removeprefix("sqlite:///"))
        if not path.exists():
            return 0
        connection = sqlite3.connect(path)
        try:
            return int(connection.execute("SELECT count(*) FROM runs").fetchone()[0])
        finally:
            connection.close()

    return count


@pytest.fixture
def kermany_folder(tmp_path: Path) -> Callable[..., Path]:
    """A release folder of three small noise images per class and split, with the faults that are asked for."""

    def build(
        without: Sequence[str] = (), broken: str | None = None, same_patient: bool = False, root: str = "OCT2017"
    ) -> Path:
        rng = np.random.default_rng(0)
        folder = tmp_path / root
        number = 0
        for split in ("train", "test"):
            for name in KERMANY:
                target = folder / split / name
                target.mkdir(parents=True)
                for _ in range(0 if f"{split}/{name}" in without else 3):
                    number += 1
                    patient = 77 if same_patient and name == "CNV" else number
                    pixels = rng.integers(0, 255, (40, 50), dtype=np.uint8)
                    Image.fromarray(pixels).save(target / f"{name}-{patient}-{number}.jpeg")
        if broken is not None:
            path = folder / broken
            path.write_bytes(path.read_bytes()[:60])
        return folder

    return build


@pytest.fixture(scope="module")
def module_commands() -> type[Commands]:
    """Real processes for fixtures that outlive a test."""
    return Commands
