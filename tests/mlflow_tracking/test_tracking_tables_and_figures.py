from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import precision_recall_fscore_support

from mlflow_tracking import figures, tables


def test_class_table_agrees_with_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    true, predicted = rng.integers(0, 3, 200), rng.integers(0, 2, 200)  # class 2 is never predicted
    confusion = np.zeros((3, 3), dtype=np.int64)
    np.add.at(confusion, (true, predicted), 1)
    table = tables.class_table(confusion, ("a", "b", "c"))
    expected = precision_recall_fscore_support(true, predicted, labels=[0, 1, 2], zero_division=0)
    for column, values in zip(("precision", "recall", "f1", "support"), expected, strict=True):
        np.testing.assert_allclose(table[column], values)


def test_client_table_counts_corrections(synthetic: Any) -> None:
    federation, truth = synthetic.federation(clients=3, per_client=4)
    true, seen = np.array([0, 1, 2, 3]), np.array([1, 1, 3, 3])
    federation = type(federation)(federation.class_names, federation.indices, (seen, seen, seen))
    truth = type(truth)((true, true, true), np.array([True, False, True]))
    labels = (np.array([0, 0, 3, 3]), seen, seen)  # one recovered, one spoiled, one left wrong
    row = tables.client_table(federation, truth, labels, None, None).iloc[0]
    assert row[["corrupted", "relabelled", "recovered", "spoiled", "still_wrong"]].tolist() == [2, 2, 1, 1, 2]
    assert np.isnan(row["predicted_noisy"])


def test_label_table_lists_every_image_once(synthetic: Any) -> None:
    federation, truth = synthetic.federation()
    table = tables.label_table(federation, truth, None)
    assert len(table) == federation.sizes.sum()
    assert table["index"].is_unique
    assert (table["observed"] == table["corrected"]).all()
    assert (table["true"] != table["observed"]).sum() == sum(
        int((a != b).sum()) for a, b in zip(truth.labels, federation.observed, strict=True)
    )


@pytest.mark.parametrize(("clients", "classes"), [(2, 2), (30, 4), (7, 8)])
def test_figures_fit_small_and_large_federations(clients: int, classes: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = [f"class {c}" for c in range(classes)]
    counts = rng.integers(0, 90, (clients, classes))
    similarity = rng.random((clients, classes, classes))
    similarity[0] = np.nan
    noisy = np.arange(clients) % 2 == 0
    p_clean = np.where(noisy, np.nan, 0.9)
    descriptors = rng.random((clients, 3))
    descriptors[0] = np.nan
    made = {
        "counts": figures.counts_figure(counts, counts, noisy, names, "PHANTOM DATA"),
        "similarity": figures.similarity_figure(similarity, noisy, ~noisy, names, "PHANTOM DATA"),
        "descriptors": figures.descriptor_figure(descriptors, p_clean, noisy, noisy, "PHANTOM DATA"),
        "confusion": figures.confusion_figure(np.zeros((classes, classes), dtype=np.int64), names, "PHANTOM DATA"),
    }
    for name, figure in made.items():
        figures.save_png(figure, tmp_path / f"{name}.png")
        with Image.open(tmp_path / f"{name}.png") as image:
            image.verify()
        assert "PHANTOM DATA" in [text.get_text() for text in figure.texts]


def test_figures_do_not_touch_pyplot(start_python: Any) -> None:
    code = "import sys, mlflow_tracking.figures; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert start_python(code).wait(timeout=60) == 0


def test_similarity_without_any_pair_is_drawn(tmp_path: Path) -> None:
    nothing, noisy = np.full((3, 2, 2), np.nan), np.array([True, False, True])
    figures.save_png(figures.similarity_figure(nothing, noisy, None, ("a", "b"), "real"), tmp_path / "x.png")


def test_a_thousand_clients_take_no_more_room_and_text_than_a_page_has() -> None:
    counts, noisy = np.ones((1000, 4), dtype=np.int64), np.arange(1000) % 3 == 0
    figure = figures.counts_figure(counts, counts, noisy, ("A", "B", "C", "D"), "PHANTOM DATA")
    assert figure.get_figheight() < 12
    first = figure.axes[0]
    assert len(first.texts) == 0
    assert first.get_ylabel() == "client (334 noisy: orange at the edge)"
    # Every client has one mark.
    assert sorted(int(row) for line in first.lines for row in np.asarray(line.get_ydata())) == list(range(1000))
