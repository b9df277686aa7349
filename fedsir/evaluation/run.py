"""The evaluator of a run: the only holder of the truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsir.config.run import RunConfig
from fedsir.data.dataset import Dataset
from fedsir.evaluation.classification import (
    bootstrap_interval,
    bootstrap_mean_interval,
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
    """metrics: keys of `fedsir.events.ROUND_METRICS`. confusion: (C, C) int64. identification: see `RunResult`.

    predicted: (M, N) int64, the class of each of N held-out images by the global model (M = 1) or by each client
    model. client_correct: (K, N) bool, which of them each client model gets right, or None where one global model is
    evaluated.
    """

    metrics: Mapping[str, float]
    confusion: NDArray[np.int64]
    identification: Mapping[str, float]
    predicted: NDArray[np.int64]
    client_correct: NDArray[np.bool_] | None


class Evaluator:
    """Compares predictions, verdicts and corrected labels with the truth."""

    def __init__(self, config: RunConfig, dataset: Dataset, federation: Federation, truth: Truth) -> None:
        self._config = config
        self._test_labels = np.asarray(dataset.test.labels)
        self._num_classes = dataset.num_classes
        self._federation = federation
        self._truth = truth
        self._flipped = flipped_counts(truth.labels, federation.observed)

    def evaluate(self, state: MethodState, test_logits: Sequence[NDArray[np.float32]]) -> Figures:
        """All figures of one round; `test_logits` are (N, C), of the global model or of each client model.

        With several models the figures are means over them and the confusion matrix is their sum. Figures of
        relabelling are over the predicted-noisy clients or, where a method has no verdict on clients, over all.
        """
        predicted = np.stack([logits.argmax(axis=1) for logits in test_logits])
        confusions = [confusion_matrix(self._test_labels, p, self._num_classes) for p in predicted]
        scores = [classification_figures(c) for c in confusions]
        metrics = {
            "test/accuracy": float(np.mean([s.accuracy for s in scores])),
            "test/macro_f1": float(np.mean([s.macro_f1 for s in scores])),
            "test/balanced_accuracy": float(np.mean([s.balanced_accuracy for s in scores])),
            "test/loss": float(np.mean([mean_log_loss(logits, self._test_labels) for logits in test_logits])),
        }
        confusion = np.sum(confusions, axis=0)
        verdict: Mapping[str, float] = {}
        # Without a verdict any client's labels may have been changed.
        predicted_noisy = np.ones_like(self._truth.noisy)
        if state.identification is not None:
            predicted_noisy = ~state.identification.clean
            verdict = identification_figures(
                self._truth.noisy, predicted_noisy, state.identification.descriptors, self._flipped
            )
            metrics.update({f"ident/{k}": verdict[k] for k in ("accuracy", "clean_f1", "noisy_recall", "margin")})
        if state.labels is not None:
            relabeled = relabeling_figures(self._truth.labels, self._federation.observed, state.labels, predicted_noisy)
            metrics.update({f"relabel/{k}": v for k, v in relabeled.items()})
        client_correct = None if state.client_models is None else predicted == self._test_labels
        return Figures(metrics, confusion, verdict, predicted, client_correct)

    def final(self, figures: Figures) -> dict[str, float]:
        """`fedsir.events.FINAL_METRICS`: accuracy of the last round with its bootstrap interval."""
        settings, rng = self._config.evaluation, generator(self._config.seed, Stream.BOOTSTRAP)
        samples, confidence = settings.bootstrap_samples, settings.confidence
        spread = {}
        if figures.client_correct is None:
            low, high = bootstrap_interval(figures.confusion, samples, confidence, rng)
        else:
            low, high = bootstrap_mean_interval(figures.client_correct.mean(axis=0), samples, confidence, rng)
            spread = {"final/client_accuracy_sd": float(figures.client_correct.mean(axis=1).std())}
        accuracy = figures.metrics["test/accuracy"]
        return {"final/accuracy": accuracy, "final/accuracy_low": low, "final/accuracy_high": high, **spread}
