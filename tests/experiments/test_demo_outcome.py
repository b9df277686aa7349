"""What the demo and its phantoms promise; minutes long, run by `make bench`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.config import load_run_file
from experiments.session import Session

pytestmark = pytest.mark.slow


@pytest.fixture
def session() -> Iterator[Session]:
    opened = Session()
    yield opened
    opened.close()


def accuracy_and_identification(session: Session, folder: Path, *overrides: str) -> tuple[float, float]:
    places = [f"tracking.uri=sqlite:///{folder}/mlflow.db", f"work_dir={folder}"]
    result = session.run(load_run_file("demo", [*overrides, *places]), [])
    return result.final["final/accuracy"], result.identification_figures.get("accuracy", float("nan"))


@pytest.mark.parametrize("seed", range(5))
def test_demo_finds_all_clients_and_beats_fedavg_by_ten_points(session: Session, tmp_path: Path, seed: int) -> None:
    ours, identified = accuracy_and_identification(session, tmp_path, f"seed={seed}")
    fedavg, _ = accuracy_and_identification(session, tmp_path, f"seed={seed}", "method.name=fedavg")
    assert identified == 1.0
    assert ours >= fedavg + 0.10


@pytest.mark.parametrize("cohort", ["kermany", "uic", "wake_forest"])
def test_phantoms_are_learnable_but_not_trivial(session: Session, tmp_path: Path, cohort: str) -> None:
    accuracy, _ = accuracy_and_identification(
        session,
        tmp_path,
        f"data.cohort={cohort}",
        "data.train_images=2000",
        "federation.clients=1",
        "federation.clean_clients=1",
        "federation.noise.type=none",
        "method.name=fedavg",
        "training.rounds=20",
        "training.local_epochs=1",
        "training.batch_size=64",
        "training.optimizer.lr=1e-3",
        "execution.actors=in-process",
    )
    assert 0.80 <= accuracy <= 0.97
