"""The evaluator of a run: the only holder of the truth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsir.config.run import RunConfig
from fedsir.data.dataset import Dataset
from fedsir.evaluation.classification import (
    bootstrap_interval,
    classification_figures,
    confusion_matrix,
    mean_log_loss,
)
from fedsir.evaluation.identification import flipped_counts, identification_figures
from fedsir.evaluation.relabeling import relabeling_figures
from fedsir.federation.federation import Federation, Truth
from fedsir.methods.base import MethodState
from fedsir.seeding import Stream, generator


@dataclass(frozen=True)
class Figures:
    """metrics: keys of `fedsir.events.ROUND_METRICS`. confusion: (C, C) int64. identification: see `RunResult`."""

    metrics: Mapping[str, float]
    confusion: NDArray[np.int64]
    identification: Mapping[str, float]


class Evaluator:
    """Compares predictions, verdicts and corrected labels with the truth."""

    def __init__(self, config: RunConfig, dataset: Dataset, federation: Federation, truth: Truth) -> None:
        self._config = config
        self._test_labels = np.asarray(dataset.test.labels)
        self._num_classes = dataset.num_classes
        self._federation = federation
        self._truth = truth
        self._flipped = flipped_counts(truth.labels, federation.observed)

    def evaluate(self, state: MethodState, test_logits: NDArray[np.float32]) -> Figures:
        """All figures of one round; `test_logits` (N, C) are the global model's."""
        confusion = confusion_matrix(self._test_labels, test_logits.argmax(axis=1), self._num_classes)
        scores = classification_figures(confusion)
        metrics = {
            "test/accuracy": scores.accuracy,
            "test/macro_f1": scores.macro_f1,
            "test/balanced_accuracy": scores.balanced_accuracy,
            "test/loss": mean_log_loss(test_logits, self._test_labels),
        }
        verdict: Mapping[str, float] = {}
        if state.identification is not None:
            predicted_noisy = ~state.identification.clean
            verdict = identification_figures(
                self._truth.noisy, predicted_noisy, state.identification.descriptors, self._flipped
            )
            metrics.update({f"ident/{k}": verdict[k] for k in ("accuracy", "clean_f1", "noisy_recall", "margin")})
            if state.labels is not None:
                relabeled = relabeling_figures(
                    self._truth.labels, self._federation.observed, state.labels, predicted_noisy
                )
                metrics.update({f"relabel/{k}": v for k, v in relabeled.items()})
        return Figures(metrics, confusion, verdict)

    def final(self, figures: Figures) -> dict[str, float]:
        """`fedsir.events.FINAL_METRICS`: accuracy of the last round with its bootstrap interval."""
        evaluation = self._config.evaluation
        low, high = bootstrap_interval(
            figures.confusion,
            evaluation.bootstrap_samples,
            evaluation.confidence,
            generator(self._config.seed, Stream.BOOTSTRAP),
        )
        return {
            "final/accuracy": figures.metrics["test/accuracy"],
            "final/accuracy_low": low,
            "final/accuracy_high": high,
        }
