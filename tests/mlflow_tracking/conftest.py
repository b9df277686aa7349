"""One SQLite store for the whole session (its schema takes seconds), and runs made of random arrays.

Helpers are fixtures rather than a module, so that tests run under every import mode of pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

import mlflow_tracking
from fedsir.config.method import MethodConfig
from fedsir.config.run import RunConfig
from fedsir.events import DatasetFacts, RoundRecord, RunResult, RunStarted
from fedsir.federation.federation import Federation, FederationFacts, Truth
from fedsir.federation.labels import LabelCheckpoint
from fedsir.models.flat import FlatEntry, FlatSchema, FlatWeights
from fedsir.spectral.identification import Identification, MixtureFit
from fedsir.spectral.relabeling import ReferenceFacts
from mlflow_tracking import delivery, outage
from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.store import Store, prepare_store

CLASSES = ("CNV", "DME", "DRUSEN", "NORMAL")
PHANTOM: dict[str, Any] = {"source": "phantom", "image_size": 32}


class Plain(MethodConfig):
    name: str = "plain"


class Spectral(MethodConfig):
    name: str = "spectral"
    components: int = 12
    relabel_after: int = 20


class Synthetic:
    """Events of a small run; nothing is trained."""

    classes = CLASSES
    plain = Plain
    spectral = Spectral

    @staticmethod
    def config(method: MethodConfig | None = None, data: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
        return RunConfig(name="unit", data=data or PHANTOM, method=method or Spectral(), **changes)

    @staticmethod
    def federation(clients: int = 5, per_client: int = 40, seed: int = 0) -> tuple[Federation, Truth]:
        """The last clients but two are noisy: half of their labels move to the next class."""
        rng = np.random.default_rng(seed)
        classes = len(CLASSES)
        true = [rng.integers(0, classes, per_client) for _ in range(clients)]
        noisy = np.arange(clients) >= 2
        observed = [
            np.where((rng.random(per_client) < 0.5) & bad, (y + 1) % classes, y)
            for y, bad in zip(true, noisy, strict=True)
        ]
        indices = [np.arange(k * per_client, (k + 1) * per_client) for k in range(clients)]
        return Federation(CLASSES, tuple(indices), tuple(observed)), Truth(tuple(true), noisy)

    @staticmethod
    def started(
        config: RunConfig | None = None, run_id: str | None = None, history: tuple[RoundRecord, ...] = ()
    ) -> RunStarted:
        federation, truth = Synthetic.federation()
        dataset = DatasetFacts(
            "phantom-kermany", "phantom", "d" * 64, CLASSES, 200, 60, 50, 15, ("drawn, not scanned",)
        )
        facts = FederationFacts(3, ("the clean set grew by one",))
        return RunStarted(
            run_id or uuid4().hex[:16],
            config or Synthetic.config(),
            dataset,
            federation,
            truth,
            facts,
            history,
        )

    @staticmethod
    def record(round_: int, **changes: float) -> RoundRecord:
        metrics = {
            "test/accuracy": round_ / 10,
            "test/macro_f1": round_ / 20,
            "train/loss": 1 / round_,
            **changes,
        }
        return RoundRecord(round_, metrics)

    @staticmethod
    def result(started: RunStarted, identifies: bool = True, relabels: bool = True) -> RunResult:
        """identifies: with a verdict by spectra; relabels: with labels that changed at two checkpoints."""
        rng = np.random.default_rng(1)
        clients, classes = started.federation.num_clients, len(CLASSES)
        truth = started.truth
        entries = (FlatEntry("head.weight", (2, 3), 0, True), FlatEntry("norm.running_mean", (2,), 6, False))
        schema = FlatSchema(entries, ("norm.num_batches_tracked",))
        weights = FlatWeights(np.arange(8, dtype=np.float32), np.array([7], dtype=np.int64))
        confusion = np.full((classes, classes), 2) + 8 * np.eye(classes, dtype=np.int64)
        verdict = predicted = labels = margins = agreement = references = None
        history: tuple[LabelCheckpoint, ...] = ()
        observed = started.federation.observed
        if identifies:
            similarity = rng.uniform(0.2, 0.9, (clients, classes, classes))
            similarity[1, 2, :] = similarity[1, :, 2] = np.nan
            p_clean = np.where(truth.noisy, 0.1, 0.9)
            p_clean[-1] = np.nan
            predicted = truth.noisy.copy()
            predicted[0] = True
            mixture = MixtureFit(
                columns=("mean", "energy", "maximum"),
                centre=np.full(3, 0.5),
                scale=np.full(3, 0.1),
                means=np.array([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]]),
                covariances=np.stack([np.eye(3), np.eye(3)]),
                weights=np.array([0.6, 0.4]),
                clean_component=1,
            )
            verdict = Identification(
                rng.random((clients, 3)), similarity, p_clean, ~predicted, ("no fallback",), "mixture", mixture
            )
            references = (
                *(ReferenceFacts(name, (1,), 3, 0.75) for name in CLASSES[:-1]),
                ReferenceFacts(CLASSES[-1], (), 0, float("nan")),
            )
            margins = tuple(rng.random((len(y), 2)).astype(np.float32) for y in observed)
            margins[1][:] = np.nan
            agreement = tuple(np.arange(len(y)) % 2 == 0 for y in observed)
        if relabels:
            # Client 1 is taken for clean where clients are judged, so it keeps its labels.
            changes = np.arange(clients) != 1
            first, labels = (
                tuple(
                    np.where((np.arange(len(y)) % every == 0) & change, t, y)
                    for y, t, change in zip(observed, truth.labels, changes, strict=True)
                )
                for every in (4, 2)
            )
            history = tuple(
                LabelCheckpoint(round_, tuple(y.astype(np.int16) for y in after))
                for round_, after in ((1, first), (2, labels))
            )
        return RunResult(
            config=started.config,
            final={
                "final/accuracy": 0.8,
                "final/accuracy_low": 0.7,
                "final/accuracy_high": 0.9,
                "test/loss": float("nan"),
            },
            confusion=confusion,
            test_labels=np.repeat(np.arange(classes), confusion.sum(axis=1)),
            # As the confusion matrix counts them, row by row.
            predicted=np.repeat(np.tile(np.arange(classes), classes), confusion.ravel())[np.newaxis],
            labels=labels,
            predicted_noisy=predicted,
            identification=verdict,
            identification_figures={"accuracy": 0.8, "margin": float("nan")} if identifies else {},
            totals={"cost/client_epochs": 6.0, "cost/forward_units": 1.0, "bytes/up": 4e6, "bytes/down": 2e6},
            label_history=history,
            margins=margins,
            agreement=agreement,
            references=references,
            weights=weights,
            schema=schema,
            weights_hash="ab" * 32,
            seconds=12.5,
        )


@pytest.fixture(scope="session")
def synthetic() -> type[Synthetic]:
    return Synthetic


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("tracking")
    return prepare_store(TrackingConfig(uri=f"sqlite:///{folder}/mlflow.db"))


@pytest.fixture(scope="session")
def store_file(store: Store) -> Path:
    return Path(store.uri.removeprefix("sqlite:///"))


@pytest.fixture(scope="session")
def start_python() -> Callable[..., subprocess.Popen[str]]:
    """Start `python -c CODE ARGS...` with this checkout on its path."""
    root = Path(mlflow_tracking.__file__).parents[1]

    def start(code: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, "PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


class Clock:
    """Seconds as a test sets them."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which it is decided when to send and when to try again."""
    clock = Clock()
    monkeypatch.setattr(delivery, "monotonic", clock)
    monkeypatch.setattr(outage, "monotonic", clock)
    return clock
