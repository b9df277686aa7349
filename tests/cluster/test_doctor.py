"""`fedsir doctor`: what works and what does not, side by side."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import doctor

COMMAND = [sys.executable, "-c", "from experiments.cli import main; main()", "doctor"]


def _run(folder: Path, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *argv],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200", "RAY_prestart_worker_first_driver": "0", **environment},
        timeout=180,
        check=False,
    )


def _rows(text: str) -> dict[str, tuple[str, str]]:
    cells = [[c.strip() for c in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]
    return {name: (value, state) for name, value, state in cells if name}


def test_healthy_machine(tmp_path: Path) -> None:
    """Starts a Ray of its own and leaves nothing behind."""
    ended = _run(tmp_path, FEDSIR_CACHE=str(tmp_path / "cache"))
    rows = _rows(ended.stdout)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    assert {state for _, state in rows.values()} == {"ok"}
    assert {"python", "torch", "gpu", "ray", "ray cluster", "image cache", "store"} <= rows.keys() | {"gpu"}
    assert "CPU" in rows["ray cluster"][0]
    assert "does not exist yet" in rows["store"][0]
    assert list(tmp_path.iterdir()) == []


def test_problems_are_told_together(tmp_path: Path) -> None:
    (tmp_path / "regular").write_text("x")
    ended = _run(
        tmp_path,
        *("--tracking-uri", "sqlite:////proc/fedsir/x.db", "--ray-address", "127.0.0.1:1"),
        FEDSIR_CACHE=str(tmp_path / "regular" / "cache"),
    )
    rows = _rows(ended.stdout)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert {name for name, (_, state) in rows.items() if state == "problem"} == {"ray cluster", "image cache", "store"}
    assert "127.0.0.1:1" in rows["ray cluster"][0]
    assert "FEDSIR_CACHE" in rows["image cache"][0]
    assert "/proc/fedsir" in rows["store"][0]


def test_store_that_cannot_be_one_is_explained_without_jargon() -> None:
    ((_, text, healthy),) = doctor._store("mlruns")
    assert not healthy
    assert "sqlite:///mlruns/mlflow.db" in text
    assert "pydantic" not in text


def test_missing_package_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "no-such-package"))
    rows = {name: healthy for name, _, healthy in doctor._python()}
    assert rows == {"python": True, "torch": True, "no-such-package": False}


def test_cluster_variables_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert ("SLURM_JOB_ID", "17", True) in doctor._environment()
