"""Draws the figures of a run: those of its start in memory, those of its end into the folder that holds their data."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import matplotlib

from fedsir.events import RunResult, RunStarted
from fedsir.spectral.identification import Identification
from mlflow_tracking import figures
from mlflow_tracking.artifacts import subfolder
from mlflow_tracking.describe import plot_label
from mlflow_tracking.identification import compares_spectra, evidence, judging_settings, method_settings
from mlflow_tracking.relabeling import (
    Relabeled,
    checkpoint_table,
    label_flows,
    margin_counts,
    margin_medians,
    relabeled,
)
from mlflow_tracking.tables import class_counts

# matplotlib is not thread-safe, also without pyplot: all figures of a process share its font cache, its text layouts
# and the renderer's font objects. So this lock belongs to the process, unlike the one of a store.
_LOCK = threading.Lock()


@contextmanager
def _drawing() -> Iterator[None]:
    # Names of runs and classes are no formulas, whatever dollar signs they have; under the lock, since the setting
    # belongs to the process.
    with _LOCK, matplotlib.rc_context({"text.parse_math": False}):
        yield


def draw_start(event: RunStarted) -> dict[str, bytes]:
    """The federation as a heat map: contents of a PNG file by its path."""
    png = BytesIO()
    federation, truth = event.federation, event.truth
    with _drawing():
        figures.save_png(
            figures.counts_figure(
                class_counts(truth.labels, federation.num_classes),
                federation.observed_counts(),
                truth.noisy,
                federation.class_names,
                plot_label(event),
            ),
            png,
        )
    return {"federation/counts.png": png.getvalue()}


def draw_finish(event: RunStarted, result: RunResult, folder: Path) -> None:
    """Confusion matrix, and identification and relabelling where the method has them."""
    label = plot_label(event)
    done = relabeled(event.federation, event.truth, result)
    with _drawing():
        confusion = figures.confusion_figure(result.confusion, event.federation.class_names, label)
        figures.save_png(confusion, subfolder(folder, "evaluation") / "confusion.png")
        if result.identification is not None:
            _draw_identification(event, result, result.identification, label, subfolder(folder, "identification"))
        if done is not None:
            _draw_relabeling(done, label, subfolder(folder, "relabeling"))


def _draw_identification(
    event: RunStarted, result: RunResult, verdict: Identification, label: str, target: Path
) -> None:
    """Similarities and descriptors only for methods that compare spectra."""
    noisy, predicted = event.truth.noisy, result.predicted_noisy
    if not compares_spectra(verdict):
        posterior = figures.posterior_figure(verdict.p_clean, noisy, predicted, label, evidence(verdict.split))
        figures.save_png(posterior, target / "posterior.png")
        return
    names, threshold = event.federation.class_names, judging_settings(method_settings(result.config)).get("threshold")
    figures.save_png(
        figures.similarity_figure(verdict.similarity, noisy, predicted, names, label), target / "similarity.png"
    )
    descriptors = figures.descriptor_figure(
        verdict.descriptors, verdict.p_clean, noisy, predicted, label, verdict.mixture, threshold
    )
    figures.save_png(descriptors, target / "descriptors.png")


def _draw_relabeling(done: Relabeled, label: str, target: Path) -> None:
    figures.save_png(figures.checkpoint_figure(checkpoint_table(done), label), target / "checkpoints.png")
    title = f"Labels of {len(done.clients)} clients, relabelled after round {done.checkpoints[-1][0]}"
    flows = label_flows(done, done.corrected)
    figures.save_png(figures.flow_figure(flows, done.class_names, title, label), target / "flow.png")
    histogram = margin_counts(done)
    if histogram is not None:
        figures.save_png(figures.margin_figure(*histogram, margin_medians(done), label), target / "margins.png")
