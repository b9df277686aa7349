"""What the coordinator tells recorders: plain data, in order, one event at a time, not always in one thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from fedsir.federation.federation import Federation, FederationFacts, Truth
from fedsir.federation.labels import LabelCheckpoint
from fedsir.models.flat import FlatSchema, FlatWeights
from fedsir.spectral.identification import Identification
from fedsir.spectral.relabeling import ReferenceFacts

if TYPE_CHECKING:
    from fedsir.config.run import RunConfig

# Every metric key that a run may report, with step = rounds finished. MLflow's comparison view slows down with
# many keys, so the list is short and fixed; anything finer is an artifact.
ROUND_METRICS = (
    "test/accuracy",
    "test/macro_f1",
    "test/balanced_accuracy",
    "test/loss",
    "train/loss",
    "ident/accuracy",
    "ident/clean_f1",
    "ident/noisy_recall",
    "ident/margin",
    "relabel/edit",
    "relabel/recovery",
    "relabel/precision",
    "relabel/false_correction",
    "relabel/residual",
    "cost/client_epochs",
    "cost/forward_units",
    "bytes/up",
    "bytes/down",
    # See `fedsir.server.RunServer`. The last two may pass beside the training of the next round.
    "seconds/data",
    "seconds/compute",
    "seconds/ship",
    "seconds/aggregate",
    "seconds/evaluate",
    "seconds/record",
)
# Of these a run's total is of interest.
TOTALS = ("cost/client_epochs", "cost/forward_units", "bytes/up", "bytes/down")
# Logged once at the end, without a step, for sorting. The last is the population standard deviation of the accuracy
# over client models, only where a method has no global model (its other figures are means over these models).
FINAL_METRICS = ("final/accuracy", "final/accuracy_low", "final/accuracy_high", "final/client_accuracy_sd")


@dataclass(frozen=True)
class RoundRecord:
    """Figures after `round` finished rounds (1-based); keys from `ROUND_METRICS`, absent where undefined.

    notes: what a user should know about the round (a client left out, steps skipped).
    """

    round: int
    metrics: dict[str, float]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class DatasetFacts:
    """What a record says about the images."""

    name: str
    kind: str
    digest: str
    class_names: tuple[str, ...]
    train_images: int
    test_images: int
    train_patients: int
    test_patients: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class RunStarted:
    """A run begins or, when `history` is not empty, continues after that many rounds."""

    run_id: str
    config: RunConfig
    dataset: DatasetFacts
    federation: Federation
    truth: Truth
    facts: FederationFacts
    history: tuple[RoundRecord, ...]


@dataclass(frozen=True)
class RoundFinished:
    """One more round is done and safely checkpointed."""

    record: RoundRecord
    total_rounds: int


@dataclass(frozen=True)
class RunResult:
    """Everything a finished run leaves behind.

    final: `FINAL_METRICS` plus the last round's figures; `final/client_accuracy_sd` only for methods without a
    global model. confusion: (C, C) int64, rows are true classes, of the last round's global model, or the sum over
    the client models. test_labels, predicted: (N,) and (M, N) int64, true classes of the held-out images and what the
    global model (M = 1) or each client model takes them for. labels: per client the current training labels (None
    where the method never changes labels). predicted_noisy: (K,) bool or None where the method does not identify
    clients.
    identification_figures: accuracy, clean_precision, clean_recall, clean_f1, noisy_recall, missed_noisy,
    accused_clean, margin, unflipped_noisy, unflipped_noisy_missed (empty without identification).
    totals: `TOTALS` summed over the run. label_history, margins, agreement, references: how labels came to
    change, as in `MethodState` and `RelabelingEvidence` (empty or None where they did not). weights: the final
    global model, None without one. weights_hash: hex SHA-256 of the final weights, or of all client models in order.
    """

    config: RunConfig
    final: Mapping[str, float]
    totals: Mapping[str, float]
    confusion: NDArray[np.int64]
    test_labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    labels: tuple[NDArray[np.int64], ...] | None
    predicted_noisy: NDArray[np.bool_] | None
    identification: Identification | None
    identification_figures: Mapping[str, float]
    label_history: tuple[LabelCheckpoint, ...]
    margins: tuple[NDArray[np.float32], ...] | None
    agreement: tuple[NDArray[np.bool_], ...] | None
    references: tuple[ReferenceFacts, ...] | None
    weights: FlatWeights | None
    schema: FlatSchema
    weights_hash: str
    seconds: float


@dataclass(frozen=True)
class RunFinished:
    """The run reached its last round."""

    result: RunResult


@dataclass(frozen=True)
class RunStopped:
    """The run ended early: `killed` by the user or failed with `error`."""

    error: BaseException
    killed: bool


Event = RunStarted | RoundFinished | RunFinished | RunStopped


class Recorder(Protocol):
    """Receives the events of one run in order."""

    def record(self, event: Event) -> None:
        """Take note of `event`; raising stops the run, at a round's end after the next round's training."""
        ...
