"""Figures over many runs: pure functions from data frames and arrays to `Figure`, and from `Figure` to markup."""

from mlflow_tracking.report.figures.identification import Example, identification_figure
from mlflow_tracking.report.figures.markup import as_markup, drawing
from mlflow_tracking.report.figures.performance import cost_figure, curve_figure, ratio_figure
from mlflow_tracking.report.figures.style import MethodStyle, method_order, method_styles

__all__ = [
    "Example",
    "MethodStyle",
    "as_markup",
    "cost_figure",
    "curve_figure",
    "drawing",
    "identification_figure",
    "method_order",
    "method_styles",
    "ratio_figure",
]
