"""`fedsir explain`: its sentences on known numbers, and the command on runs that were really recorded."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from mlflow.tracking import MlflowClient
from rich.console import Console

from experiments.explain import (
    boundary_distances,
    client_table,
    identification_sentences,
    relabeling_tables,
    split_table,
)
from mlflow_tracking.explanation import IdentificationRecord, RelabelingRecord


def printed(*renderables: Any) -> str:
    out = StringIO()
    Console(file=out, width=80).print(*renderables)
    return out.getvalue()


def clients(**changes: list[Any]) -> pd.DataFrame:
    """Four clients in a mixture: 0 and 1 clean, 2 and 3 noisy, 1 close to the boundary."""
    columns: dict[str, list[Any]] = {
        "client": [0, 1, 2, 3],
        "images": [90, 80, 70, 60],
        "steps": [30.0, 25.0, 25.0, 20.0],
        "mean": [0.3, 0.45, 0.6, 0.7],
        "energy": [0.1, 0.2, 0.4, 0.5],
        "maximum": [0.4, 0.5, 0.7, 0.8],
        "score": [-1.2, -0.1, 0.6, 0.9],
        "p_clean": [0.999, 0.6, 0.04, 0.0],
        "log_odds": [6.9, 0.405, -3.178, -40.0],
        "distance_clean": [0.5, 1.5, 3.0, 4.0],
        "distance_noisy": [4.0, 1.8, 0.6, 0.4],
        "predicted_noisy": [False, False, True, True],
        "truly_noisy": [False, True, True, True],
    }
    return pd.DataFrame({**columns, **changes})


def record(table: pd.DataFrame | None = None, **facts: Any) -> IdentificationRecord:
    part = {"weight": 0.25, "mean": [0.31], "mean_score": -1.0}
    values = {
        "split": "mixture",
        "threshold": 0.5,
        "descriptors": ["mean"],
        "gap": 0.7,
        "mixture": {"columns": ["mean"], "components": {"clean": part, "noisy": {**part, "weight": 0.75}}},
        "notes": [],
        "settings": {},
        "figures": {"margin": None, "accuracy": 0.75},
        **facts,
    }
    return IdentificationRecord(values, clients() if table is None else table)


def test_the_closest_call_is_explained_with_its_numbers() -> None:
    closest, others = identification_sentences(record())
    for part in (
        "Closest call: client 1: 1.50 SD from the centre of the clean component and 1.80 SD",
        "weights 0.25 and 0.75",
        "posterior of 0.600 for clean (log-odds +0.41), at least the threshold 0.5.",
        "Judged clean; truly noisy *, so the verdict is wrong.",
    ):
        assert part in closest
    assert "outweigh" not in closest
    assert others == "No other client was close to the boundary."


def test_close_is_measured_from_the_threshold() -> None:
    # With this threshold client 2 is closest, and client 1 no longer.
    strict = record(threshold=0.05)
    assert boundary_distances(strict).idxmin() == 2
    assert "Also close to the boundary: client 2 (posterior 0.040)." in identification_sentences(
        record(clients(log_odds=[6.9, 0.405, -2.5, -40.0]))
    )


def test_a_nearer_centre_that_lost_is_told() -> None:
    contrary = clients(distance_clean=[0.5, 1.9, 3.0, 4.0])
    assert "The nearer centre lost" in identification_sentences(record(contrary))[0]


def test_guards_are_told_first_and_named_where_they_overruled() -> None:
    forced = clients(predicted_noisy=[False, True, True, True], truly_noisy=[False, True, True, True])
    sentences = identification_sentences(record(forced, notes=["the split found nobody clean."]))
    assert sentences[0] == "Guard: the split found nobody clean."
    assert "A guard overruled the fit here. Judged noisy; truly noisy *." in sentences[1]


def test_other_splits_are_explained_in_their_terms() -> None:
    nothing = [float("nan")] * 4
    gap = clients(p_clean=[1.0, 1.0, 0.0, 0.0], log_odds=nothing)
    (sentence,) = identification_sentences(record(gap, split="largest_gap", mixture=None))
    # The widest gap is from -0.1 to 0.6; both of its ends are equally close to the middle.
    assert sentence.startswith("Closest call: client 1: its score of -0.10 is the nearest to the middle")
    votes = clients(p_clean=[1.0, 4 / 9, 0.0, 0.0], score=nothing, log_odds=nothing, mean=nothing)
    voted = record(votes, split="class_losses", mixture=None, threshold=None)
    (sentence,) = identification_sentences(voted)
    assert sentence.startswith("Closest call: client 1: 44.4 % of the votes took it for clean")
    assert "votes for clean %" in printed(client_table(voted))
    assert "score" not in printed(client_table(voted))
    assert "class losses" in printed(split_table(voted))
    levels = clients(p_clean=[1.0, 0.7, 0.4, 0.4], score=nothing, log_odds=nothing, mean=nothing, steps=nothing)
    by_dimension = record(levels, split="lid", mixture=None, threshold=None)
    assert identification_sentences(by_dimension) == []
    assert "estimated share of right labels %" in printed(client_table(by_dimension))
    assert "dimensions of predictions" in printed(split_table(by_dimension))
    assert "votes" not in printed(client_table(by_dimension), split_table(by_dimension))
    assert "rule of a plugin" in printed(split_table(record(levels, split="rule of a plugin", mixture=None)))
    alone = record(clients(log_odds=nothing), split="none", mixture=None)
    assert identification_sentences(alone) == []
    assert "nothing could be compared" in printed(split_table(alone))


def test_clients_are_sorted_and_misjudged_ones_marked() -> None:
    shuffled = clients().iloc[[2, 0, 3, 1]]
    text = printed(client_table(record(shuffled)))
    rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert [row[0] for row in rows if row[-1] == "!"] == ["1"]
    assert rows[1] == ["1", "80", "25", "0.450", "0.200", "0.500", "-0.10", "0.600", "clean", "noisy", "!"]
    assert "misjudged" in text
    assert "weight 0.75" in printed(split_table(record()))


def test_relabelling_tables_fit_and_name_classes_without_reference() -> None:
    nan = float("nan")
    shares = {"edit": [0.4], "recovery": [nan], "precision": [0.8], "false_correction": [0.1], "residual": [0.2]}
    counts = {"images": [999], "corrupted": [600], "edited": [500], "recovered": [400], "spoiled": [50]}
    done = RelabelingRecord(
        pd.DataFrame({"after_round": [20], **counts, "still_wrong": [250], **shares}),
        pd.DataFrame(
            {
                "client": [29], **{k: [12345] for k in counts}, "still_wrong": [12345],
                "S_R edited": [0.123], "S_R kept": [nan], "S_N edited": [0.1], "S_N kept": [0.2],
            }
        ),
        pd.DataFrame(
            {"outcome": ["kept right"], "images": [5], "decided": [4], "S_R median": [0.5], "S_N median": [nan]}
        ),
        pd.DataFrame(
            {"class": ["CNV", "DME"], "providers": ["0 2", nan], "directions": [12, 0], "strength": [0.9, nan]}
        ),
    )  # fmt: skip
    text = printed(*relabeling_tables(done))
    assert "…" not in text
    assert ["CNV", "client", "0,", "2", "12", "0.900"] in [line.split() for line in text.splitlines()]
    assert ["DME", "no", "reference", "–", "–"] in [line.split() for line in text.splitlines()]
    assert ["20", "999", "40.0", "–", "80.0", "10.0", "20.0"] in [line.split() for line in text.splitlines()]
    assert "0.123/–" in text
    bare = RelabelingRecord(
        done.checkpoints, done.clients.iloc[:, :7], done.outcomes[["outcome", "images"]], references=None
    )
    text = printed(*relabeling_tables(bare))
    assert "S_R" not in text
    assert "references" not in text


def test_recorded_runs_are_explained(fedsir: Any, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/book/mlflow.db"
    where = ("--tracking-uri", uri)
    refused = fedsir.call("explain", "demo", *where)
    assert refused.code == 2
    assert "no run is recorded" in refused.err
    assert not (tmp_path / "book").exists()

    assert fedsir.tiny_run(f"tracking.uri={uri}", "method.relabeling.every=1").code == 0
    # Switching the method drops the settings of the one before, so those of the tiny run can stay in front.
    assert fedsir.tiny_run(f"tracking.uri={uri}", "training.rounds=1", "method.name=fedavg").code == 0
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    experiment = client.get_experiment_by_name("fedsir")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id], "tags.`fedsir.method` = 'oct_fedsir'")

    ended = fedsir.call("explain", "demo-oct_fedsir-s0", *where)
    assert (ended.code, ended.err) == (0, "")
    for part in (
        "demo-oct_fedsir-s0 (phantom images): phantom-kermany_sym0.6_a2_k4, method oct_fedsir, FINISHED",
        run.info.run_id,
        "How they were split",
        "Closest call: client ",
        "only the evaluator knows",
    ):
        assert part in ended.out
    assert len([line for line in ended.out.splitlines() if line.strip()[:2] in ("0 ", "1 ", "2 ", "3 ")]) >= 4
    for wanted in (run.info.run_id, run.info.run_id[:8], run.data.tags["fedsir.run_id"]):
        assert fedsir.call("explain", wanted, *where).out == ended.out

    for wanted, part in (
        ("demo-oct_fedsir-s1", "Did you mean:\n  demo-oct_fedsir-s0"),
        ("demo-fedavg-s0", "fedavg has neither judged clients nor changed labels"),
        ("demo", "may be any of 2 runs"),
    ):
        refused = fedsir.call("explain", wanted, *where)
        assert refused.code == 2
        assert refused.err.startswith("fedsir: ")
        assert part in refused.err


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--tracking-uri", "mlruns"], "sqlite:///mlruns/mlflow.db"),
        (["--tracking-uri", "http://127.0.0.1:1"], "no server answers at 127.0.0.1:1"),
        (["--experiment", ""], "tracking.experiment"),
        ([], "no run is recorded in experiment 'fedsir'"),
    ],
)
def test_stores_that_cannot_be_read(fedsir: Any, tmp_path: Path, options: list[str], part: str) -> None:
    ended = fedsir.call("explain", "demo", *options)
    assert ended.code == 2
    assert part in ended.err
    assert "Traceback" not in ended.err
    assert list(tmp_path.iterdir()) == []
