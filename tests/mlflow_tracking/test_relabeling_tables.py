from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mlflow_tracking.relabeling import (
    OUTCOMES,
    Relabeled,
    checkpoint_table,
    flow_table,
    label_flows,
    margin_counts,
    margin_medians,
    margin_table,
    outcome_table,
    outcomes,
    reference_table,
    relabeled,
    relabeled_clients_table,
)

TRUE = [np.array([0, 0, 1, 1, 0]), np.array([1, 0])]
OBSERVED = [np.array([0, 1, 1, 0, 1]), np.array([1, 0])]
FIRST = [np.array([0, 1, 0, 0, 1]), np.array([1, 0])]  # one right label spoiled
LAST = [np.array([1, 0, 1, 1, 1]), np.array([1, 0])]  # two recovered, another one spoiled


def made(**changes: Any) -> Relabeled:
    margins = (
        np.array([[0.1, 0.01], [0.4, 0.04], [0.3, 0.03], [0.2, 0.02], [np.nan, np.nan]], dtype=np.float32),
        np.array([[0.5, 0.05], [0.7, 0.07]], dtype=np.float32),
    )
    agreement = (np.array([True, True, True, True, False]), np.array([False, True]))
    done = Relabeled(("a", "b"), (3, 7), TRUE, OBSERVED, ((2, FIRST), (4, LAST)), margins, agreement)
    return replace(done, **changes)


def test_outcomes_tell_edits_and_truth_apart() -> None:
    named = [OUTCOMES[o] for o in outcomes(TRUE[0], OBSERVED[0], LAST[0])]
    assert named == ["corrected wrongly", "corrected rightly", "kept right", "corrected rightly", "kept wrong"]


def test_checkpoints_have_counts_and_shares() -> None:
    table = checkpoint_table(made())
    assert table["after_round"].tolist() == [2, 4]
    counts = ["images", "corrupted", "edited", "recovered", "spoiled", "still_wrong"]
    assert table[counts].to_numpy().tolist() == [[7, 3, 1, 0, 1, 4], [7, 3, 3, 2, 1, 2]]
    last = table.iloc[-1]
    assert last["edit"] == pytest.approx(3 / 7)
    assert last["recovery"] == pytest.approx(2 / 3)
    assert last["precision"] == pytest.approx(2 / 3)
    assert last["false_correction"] == pytest.approx(1 / 4)
    assert last["residual"] == pytest.approx(2 / 7)


def test_clients_have_counts_and_medians_of_edited_and_kept() -> None:
    table = relabeled_clients_table(made()).set_index("client")
    assert table.loc[3, ["images", "edited", "recovered", "spoiled", "still_wrong"]].tolist() == [5, 3, 2, 1, 2]
    assert table.loc[3, ["undecided", "agreed"]].tolist() == [1, 4]
    assert table.loc[3, "S_R edited"] == pytest.approx(0.2)
    assert table.loc[3, "S_R kept"] == pytest.approx(0.3)
    assert np.isnan(table.loc[7, "S_R edited"])
    assert table.loc[7, "S_N kept"] == pytest.approx(0.06)


def test_outcome_table_counts_decided_images() -> None:
    table = outcome_table(made()).set_index("outcome")
    assert table["images"].to_dict() == dict(zip(OUTCOMES, (2, 1, 3, 1), strict=True))
    assert table["decided"].to_dict() == dict(zip(OUTCOMES, (2, 1, 3, 0), strict=True))
    assert table.loc["corrected rightly", "S_R median"] == pytest.approx(0.3)
    assert np.isnan(table.loc["kept wrong", "S_N median"])


def test_margin_histograms_hold_every_decided_image_once() -> None:
    histogram = margin_counts(made())
    assert histogram is not None
    edges, counts = histogram
    assert counts.sum(axis=2).tolist() == [[2, 1, 3, 0]] * 2
    np.testing.assert_allclose(edges[:, 0], 0)
    np.testing.assert_allclose(edges[:, -1], [0.7, 0.07], rtol=1e-6)
    table = margin_table(edges, counts)
    assert table.groupby("criterion")["images"].sum().to_dict() == {"S_R": 6, "S_N": 6}
    (spoiled,) = table[(table.outcome == "corrected wrongly") & (table.criterion == "S_R") & (table.images > 0)].index
    assert table.loc[spoiled, "low"] <= 0.1 <= table.loc[spoiled, "high"]
    np.testing.assert_allclose(margin_medians(made())[1, :3], [0.03, 0.01, 0.05], rtol=1e-6)


def test_flows_count_every_image_and_end_at_the_corrected_label() -> None:
    flows = label_flows(made(), LAST)
    assert flows["true to observed"].tolist() == [[2, 2], [1, 2]]
    assert flows["observed to corrected"].tolist() == [[1, 2], [1, 3]]
    assert flows["true to corrected"].tolist() == [[2, 2], [0, 3]]
    table = flow_table(made())
    assert len(table) == 2 * 3 * 4
    one = table[(table.after_round == 4) & (table.flow == "observed to corrected")]
    assert one.set_index(["from", "to"])["images"].to_dict() == {
        ("a", "a"): 1, ("a", "b"): 2, ("b", "a"): 1, ("b", "b"): 3,
    }  # fmt: skip
    assert table.groupby(["after_round", "flow"])["images"].sum().unique().tolist() == [7]


def test_methods_without_margins_have_fewer_columns() -> None:
    done = made(margins=None, agreement=None)
    assert margin_counts(done) is None
    assert list(outcome_table(done)) == ["outcome", "images"]
    assert "S_R edited" not in relabeled_clients_table(done)
    undecided = made(margins=tuple(np.full((n, 2), np.nan, dtype=np.float32) for n in (5, 2)))
    assert margin_counts(undecided) is None
    assert outcome_table(undecided)["decided"].tolist() == [0, 0, 0, 0]


def test_nobody_to_relabel_gives_empty_tables() -> None:
    nobody = Relabeled(("a", "b"), (), [], [], ((2, []),))
    assert checkpoint_table(nobody)[["images", "edited"]].to_numpy().tolist() == [[0, 0]]
    assert checkpoint_table(nobody)["recovery"].isna().all()
    assert list(relabeled_clients_table(nobody)["client"]) == []
    assert flow_table(nobody)["images"].sum() == 0


def test_scope_is_who_was_judged_noisy_or_everybody(synthetic: Any) -> None:
    started = synthetic.started()
    federation, truth = started.federation, started.truth
    judged = relabeled(federation, truth, synthetic.result(started))
    assert judged is not None
    assert judged.clients == (0, 2, 3, 4)
    assert [r for r, _ in judged.checkpoints] == [1, 2]
    assert judged.margins is not None
    assert len(judged.margins) == 4
    # Without a verdict all clients count, and so they do if labels changed elsewhere.
    everybody = relabeled(federation, truth, synthetic.result(started, identifies=False))
    assert everybody is not None
    assert everybody.clients == (0, 1, 2, 3, 4)
    elsewhere = replace(synthetic.result(started), predicted_noisy=np.array([True, True, False, True, True]))
    widened = relabeled(federation, truth, elsewhere)
    assert widened is not None
    assert widened.clients == (0, 1, 2, 3, 4)
    assert relabeled(federation, truth, synthetic.result(started, relabels=False)) is None


def test_references_list_their_providers(synthetic: Any) -> None:
    table = reference_table(synthetic.result(synthetic.started()).references)
    assert table["providers"].tolist() == ["1", "1", "1", ""]
    assert table["class"].tolist() == list(synthetic.classes)
