"""Figures of one run: pure functions from arrays to `Figure`, by subject."""

from mlflow_tracking.figures.base import save_png
from mlflow_tracking.figures.classification import confusion_figure
from mlflow_tracking.figures.federation import counts_figure
from mlflow_tracking.figures.identification import descriptor_figure, posterior_figure, similarity_figure
from mlflow_tracking.figures.relabeling import checkpoint_figure, flow_figure, margin_figure

__all__ = [
    "checkpoint_figure",
    "confusion_figure",
    "counts_figure",
    "descriptor_figure",
    "flow_figure",
    "margin_figure",
    "posterior_figure",
    "save_png",
    "similarity_figure",
]
