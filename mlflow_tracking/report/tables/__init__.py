"""From finished runs to tables: the paper's, and what it has none of."""

from mlflow_tracking.report.tables.build import build_report

__all__ = ["build_report"]
