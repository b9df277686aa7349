"""What was predicted for every held-out image is recorded, so that figures can be recomputed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mlflow_tracking import tables
from mlflow_tracking.artifacts import write_finish


def test_a_row_per_image_and_a_column_per_model() -> None:
    true, predicted = np.array([0, 2, 1]), np.array([[0, 2, 2]])
    table = tables.prediction_table(true, predicted, ("a", "b", "c"))
    assert table.to_dict("list") == {"image": [0, 1, 2], "true": ["a", "c", "b"], "predicted": ["a", "c", "c"]}
    several = tables.prediction_table(true, np.array([[0, 2, 2], [1, 1, 1]]), ("a", "b", "c"))
    assert list(several.columns) == ["image", "true", "client_0", "client_1"]
    assert several["client_1"].tolist() == ["b", "b", "b"]


@pytest.mark.parametrize("method", ["fedavg", "rhfl"])
def test_accuracy_can_be_recomputed_from_the_recorded_predictions(lab: Any, tmp_path: Path, method: str) -> None:
    recorder = lab.collector()
    result = lab.run(lab.config(method, training={"rounds": 1}), recorder=recorder)
    write_finish(recorder.started, result, {}, tmp_path)
    table = pd.read_csv(tmp_path / "evaluation" / "predictions.csv")
    models = table.columns[2:]
    assert list(models) == (["predicted"] if method == "fedavg" else [f"client_{k}" for k in range(lab.clients)])
    shares = [(table[model] == table["true"]).mean() for model in models]
    assert np.mean(shares) == pytest.approx(result.final["final/accuracy"])
    counts = pd.crosstab(table["true"], table[models[0]])
    if method == "fedavg":
        names = list(recorder.started.federation.class_names)
        found = counts.reindex(index=names, columns=names, fill_value=0).to_numpy()
        np.testing.assert_array_equal(found, result.confusion)
