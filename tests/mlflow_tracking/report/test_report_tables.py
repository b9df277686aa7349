from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlflow_tracking.report import paper
from mlflow_tracking.report.model import FACETS, Cell, Report, Table
from mlflow_tracking.report.tables import build_report
from mlflow_tracking.report.tables.cells import Candidate, compared

METHODS = ("fedavg", "fedcorr", "oct_fedsir", "spectral_pruning", "all_clean")
LEVEL = {"fedavg": 0.5, "fedcorr": 0.6, "oct_fedsir": 0.8, "spectral_pruning": 0.9, "all_clean": 0.95}


def tables(results: Any) -> tuple[Table, ...]:
    return build_report(results, "t").tables


def table(results: Any, key: str) -> Table:
    return next(t for t in tables(results) if t.key == key)


def cells(found: Table) -> Iterator[tuple[Mapping[str, str], Cell]]:
    """Cells with their facets, and heading and labels under names of their own."""
    for line in found.lines:
        assert len(line.cells) == len(found.columns)
        assert len(line.labels) == len(found.heads)
        for column, cell in zip(found.columns, line.cells, strict=True):
            yield {**line.facets, **column.facets, "head": column.label, "group": " ".join(column.groups)}, cell


def cell(found: Table, **wanted: str) -> Cell:
    matching = [c for facets, c in cells(found) if wanted.items() <= facets.items()]
    assert len(matching) == 1, f"{len(matching)} cells for {wanted}"
    return matching[0]


def leveled(row: Mapping[str, Any]) -> float:
    return LEVEL[row["method"]] + 0.01 * row["seed"] - 0.1 * row["ratio"]


def test_a_cell_is_the_mean_over_conditions_and_seeds_in_percent(frames: Any) -> None:
    found = table(frames.results(frames.grid(METHODS, accuracy=leveled)), "1")
    own = cell(found, task="Kermany", noise="symmetric", method="fedavg")
    # Ratios 0.3 and 0.6, seeds 0 to 2.
    assert own.mean == pytest.approx(100 * (0.5 + 0.01 - 0.1 * 0.45))
    assert own.sd == pytest.approx(1.0)
    assert (own.seeds, own.runs) == ((0, 1, 2), 12)
    assert own.low is not None
    assert own.high is not None
    assert own.low <= own.mean <= own.high
    assert own.warnings == ()


def test_marks_go_to_methods_that_compete(frames: Any) -> None:
    found = table(frames.results(frames.grid(METHODS, accuracy=leveled)), "1")
    marks = {m: cell(found, task="Kermany", noise="symmetric", method=m).mark for m in METHODS}
    assert marks == {"fedavg": "", "fedcorr": "second", "oct_fedsir": "best", "spectral_pruning": "", "all_clean": ""}


def test_equal_looking_cells_share_a_mark() -> None:
    candidates = {m: Candidate(Cell(v), frozenset({1})) for m, v in (("a", 50.001), ("b", 50.004), ("c", 40.0))}
    assert [c.mark for c in compared(candidates).values()] == ["best", "best", "second"]
    assert [c.mark for c in compared(candidates, lowest=True).values()] == ["second", "second", "best"]


def test_the_all_clean_run_stands_for_every_noise_of_its_heterogeneity(frames: Any) -> None:
    rows = frames.grid(METHODS, seeds=(0,), accuracy=lambda row: 0.9 if row["alpha"] == 2.0 else 0.7)
    results = frames.results(rows)
    assert sum(row["method"] == "all_clean" for row in rows) == 2
    for noise in ("symmetric", "asymmetric"):
        own = cell(table(results, "1"), task="Kermany", noise=noise, method="all_clean")
        assert own.mean == pytest.approx(80)
        assert own.runs == 2
    for ratio in ("0.3", "0.6"):
        assert cell(table(results, "S1"), alpha="2", ratio=ratio, method="all_clean").mean == pytest.approx(90)


def test_the_papers_value_is_over_the_same_conditions(frames: Any) -> None:
    results = frames.results(frames.grid(METHODS, noises={"symmetric": (0.3, 0.4)}, alphas=(2.0,)))
    own = cell(table(results, "1"), noise="symmetric", method="fedavg")
    assert own.paper == pytest.approx((95.20 + 94.90) / 2)
    assert own.difference == pytest.approx(80 - own.paper)
    one = cell(table(results, "S1"), ratio="0.3", method="fedavg")
    assert (one.paper, one.paper_sd) == (95.20, 1.25)
    # Of pruning it has the mean over all ratios only.
    assert cell(table(results, "1"), noise="symmetric", method="spectral_pruning").paper is None


def test_the_whole_design_has_the_printed_values(frames: Any) -> None:
    results = frames.results(
        frames.grid(
            METHODS, tasks=tuple(paper.TASKS), noises=paper.RATIOS, alphas=paper.ALPHAS, seeds=(0,), accuracy=leveled
        )
    )
    found = table(results, "1")
    assert cell(found, group="Overall", method="oct_fedsir").paper == 86.73
    assert cell(found, group="Overall", method="spectral_pruning").paper == 77.43
    assert cell(found, task="UIC", noise="asymmetric", method="all_clean").paper == 94.47
    assert cell(table(results, "2"), task="Kermany", noise="asymmetric", method="oct_fedsir").paper == 100.0
    recovery = cell(table(results, "3"), task="WF", noise="symmetric", head="Recovery")
    assert (recovery.paper, recovery.paper_sd, recovery.mean) == (70.4, 3.1, pytest.approx(20))
    assert recovery.warnings == ()
    pruned = cell(table(results, "S2"), alpha="0.1", head="mean", method="spectral_pruning")
    assert (pruned.paper, pruned.paper_sd) == (80.70, 2.35)
    assert {t.key for t in tables(results)} == {
        *("1", "2", "3", "S1", "S2", "S3", "S4", "S5", "S6"),
        *("ranks", "tests", "costs"),
    }


def test_on_phantoms_the_caption_says_whose_values_they_are(frames: Any) -> None:
    phantom, real = (table(frames.results(frames.grid(METHODS, data_kind=kind)), "1") for kind in ("phantom", "real"))
    assert phantom.data_kinds == ("phantom",)
    assert "real images" in phantom.caption
    assert "phantom images" in phantom.columns[0].groups[0]
    assert real.data_kinds == ("real",)
    assert "phantom" not in real.caption


def test_a_hole_is_said_and_takes_the_mark(frames: Any) -> None:
    """Without its worst condition the best method's mean would rise."""
    rows = frames.grid(METHODS, accuracy=leveled)
    hole = [r for r in rows if (r["method"], r["ratio"], r["alpha"]) != ("fedcorr", 0.6, 0.1)]
    found = table(frames.results(hole), "1")
    own = cell(found, task="Kermany", noise="symmetric", method="fedcorr")
    assert own.warnings == ("over 3 of 4 conditions",)
    assert own.mark == ""
    assert cell(found, task="Kermany", noise="symmetric", method="oct_fedsir").mark == "best"
    assert cell(found, task="Kermany", noise="symmetric", method="fedavg").mark == "second"
    report = build_report(frames.results(hole), "t")
    assert any("fedcorr" in text and "η 0.6, α 0.1, seed 1" in text for text in report.missing)


def test_a_missing_seed_is_said(frames: Any) -> None:
    rows = frames.grid(METHODS, accuracy=leveled)
    less = [r for r in rows if (r["method"], r["ratio"], r["alpha"], r["seed"]) != ("fedavg", 0.6, 0.1, 2)]
    own = cell(table(frames.results(less), "1"), task="Kermany", noise="symmetric", method="fedavg")
    assert own.warnings == ("seeds 2 lack some of the 4 conditions",)
    fewer = [r for r in rows if (r["method"], r["seed"]) != ("fedavg", 2)]
    own = cell(table(frames.results(fewer), "1"), task="Kermany", noise="symmetric", method="fedavg")
    assert own.warnings == ("seeds 0, 1; others have 0, 1, 2",)


def test_with_one_seed_the_interval_is_that_of_the_test_images(frames: Any) -> None:
    own = cell(
        table(frames.results(frames.grid(METHODS, seeds=(0,))), "1"), noise="symmetric", method="fedavg", task="Kermany"
    )
    assert (own.low, own.high) == pytest.approx((78, 82))
    assert own.sd is None


def test_budgets_have_columns_and_tables_of_their_own(frames: Any) -> None:
    short = frames.grid(METHODS, accuracy=lambda _: 0.2)
    long = frames.grid(("fedavg", "oct_fedsir"), budget="100 rounds × 1 local epoch", accuracy=lambda _: 0.9)
    results = frames.results([*short, *long])
    found = table(results, "1")
    means = {
        (facets["budget"], facets["method"]): c.mean
        for facets, c in cells(found)
        if "budget" in facets and c.mean is not None
    }
    assert len(means) == 7
    for (budget, _), mean in means.items():
        assert mean == pytest.approx(20 if budget == frames.budget else 90)
    assert cell(found, group="Overall", method="fedavg").mean == pytest.approx(20)
    assert "Overall is over the budget with most runs" in found.caption
    assert {t.key for t in tables(results)} >= {"S1", "S1.2", "S2", "S2.2"}
    assert any("2 budgets" in text for text in build_report(results, "t").warnings)


def test_phantoms_and_real_images_have_no_common_mean(frames: Any) -> None:
    rows = [*frames.grid(METHODS), *frames.grid(METHODS, tasks=("UIC",), data_kind="real")]
    found = table(frames.results(rows), "1")
    overall = cell(found, group="Overall", method="fedavg")
    assert overall.mean is None
    assert overall.warnings
    assert cell(found, task="UIC", noise="symmetric", method="fedavg").mean == pytest.approx(80)
    assert found.data_kinds == ("phantom", "real")


GRID = list(itertools.product(("fedavg", "oct_fedsir", "rofl"), (0.3, 0.6), (2.0, 0.1), (0, 1), ("short", "long")))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sets(st.sampled_from(GRID), min_size=1))
def test_no_cell_mixes_budgets_whatever_is_missing(frames: Any, present: set[tuple[Any, ...]]) -> None:
    """Accuracies say which budget a run is of, so a mixture would show; whole means only where nothing is missing."""
    rows = [
        frames.run(
            method=method,
            ratio=ratio,
            alpha=alpha,
            seed=seed,
            budget=budget,
            **{"final/accuracy": 0.25 if budget == "short" else 0.75},
        )
        for method, ratio, alpha, seed, budget in present
    ]
    report = build_report(frames.results(rows), "t")
    for found in report.tables:
        if found.key in ("costs", "ranks", "tests"):
            continue
        for facets, own in cells(found):
            if own.mean is None or facets["head"].endswith("F1") or found.key == "3":
                continue
            assert own.mean == pytest.approx(25) or own.mean == pytest.approx(75)
            if "budget" in facets:
                assert own.mean == pytest.approx(25 if facets["budget"] == "short" else 75)
    first = next(t for t in report.tables if t.key == "1")
    for facets, own in cells(first):
        if "budget" not in facets or own.mean is None:
            continue
        here = [run for run in present if run[4] == facets["budget"]]
        everything = {run[1:3] for run in here}
        mine = {run[1:3] for run in here if run[0] == facets["method"]}
        said = f"over {len(mine)} of {len(everything)} conditions"
        assert (said in own.warnings) == (mine != everything)
        assert own.mark == "" or mine == everything


def test_identification_leaves_undefined_scores_out(frames: Any) -> None:
    rows = frames.grid(("oct_fedsir", "fedsir"), noises={"symmetric": (0.3, 0.6)}, alphas=(2.0,), seeds=(0,))
    rows[0]["ident/clean_f1"] = float("nan")
    rows[1]["ident/clean_f1"] = 0.5
    own = cell(table(frames.results(rows), "2"), method="oct_fedsir", noise="symmetric")
    assert own.mean == pytest.approx(50)
    assert own.runs == 1
    assert "over 1 of 2 conditions" in own.warnings
    assert any("21 conditions" in text for text in own.warnings)


PARTS = tuple(label for label in paper.ABLATIONS.values())


def test_the_ablation_compares_what_every_configuration_has(frames: Any) -> None:
    full = frames.grid(
        ("oct_fedsir",), noises={"symmetric": (0.3, 0.6, 0.9)}, alphas=(2.0,), accuracy=lambda r: r["ratio"]
    )
    parts = frames.grid(
        [p for p in PARTS if p != "oct_fedsir"],
        noises={"symmetric": (0.3, 0.6)},
        alphas=(2.0,),
        accuracy=lambda r: r["ratio"] - 0.1,
    )
    found = table(frames.results([*full, *parts]), "4")
    assert cell(found, group="Overall", head="Accuracy", method="oct_fedsir").mean == pytest.approx(45)
    change = cell(found, group="Overall", head="Δ", method="oct_fedsir/no_kd")
    assert change.mean == pytest.approx(-10)
    assert change.paper == -1.82
    assert any("117" in text for text in change.warnings)
    assert cell(found, group="Overall", head="Δ", method="oct_fedsir").mean is None
    missing = build_report(frames.results([*full, *parts[1:]]), "t").missing
    assert [text for text in missing if "no_daagg" in text and "1 of 6 (η 0.3, α 2, seed 0)" in text]
    assert not [text for text in missing if "no_kd" in text or "0.9" in text]
    # They are no methods of their own elsewhere.
    assert {line.facets["method"] for line in table(frames.results([*full, *parts]), "1").lines} == {"oct_fedsir"}


def test_ranks_are_over_common_conditions(frames: Any) -> None:
    rows = frames.grid(("fedavg", "fedcorr", "oct_fedsir"), accuracy=leveled)
    rows += frames.grid(("rofl",), noises={"symmetric": (0.3,)}, alphas=(2.0,))
    found = table(frames.results(rows), "ranks")
    own = {m: cell(found, group="Overall", method=m) for m in ("fedavg", "fedcorr", "oct_fedsir", "rofl")}
    assert [own[m].mean for m in ("fedavg", "fedcorr", "oct_fedsir")] == [3, 2, 1]
    assert own["oct_fedsir"].mark == "best"
    assert own["rofl"].mean is None
    assert own["rofl"].warnings == ("lacks more than half of the conditions",)
    assert "χ²" in found.caption


def test_paired_tests_are_corrected_within_their_scope(frames: Any) -> None:
    methods = ("fedavg", "fedcorr", "fedprox", "oct_fedsir")
    rows = frames.grid(methods, noises=paper.RATIOS, accuracy=lambda r: 0.5 + 0.1 * (r["method"] == "oct_fedsir"))
    found = table(frames.results(rows), "tests")
    line = next(line for line in found.lines if line.labels[:2] == ("Overall all", "FedAvg"))
    assert line.labels[2:] == ("26", "+10.00", "26 / 0 / 0")
    raw, corrected = line.cells
    assert raw.mean is not None
    assert corrected.mean == pytest.approx(3 * raw.mean)


def test_costs_are_totals_over_rounds(frames: Any) -> None:
    found = table(frames.results(frames.grid(("fedavg", "all_clean"), seconds=7.5)), "costs")
    own = cell(found, method="fedavg", head="Seconds per run")
    assert (own.mean, own.sd, own.runs) == (7.5, 0.0, 18)
    assert cell(found, method="all_clean", head="Seconds per run").runs == 6
    assert cell(found, method="fedavg", head="Client-epochs").mean == 1.0
    assert cell(found, method="fedavg", head="MB up").mean == pytest.approx(1e-6)


def test_a_report_says_what_failed_and_what_is_missing(frames: Any) -> None:
    ended = {"mlflow_id": "m", "run_id": "r", "name": "run <x>", "error": "boom"}
    results = frames.results(
        frames.grid(("fedavg",)), failed=[ended], unfinished=[{**ended, "error": "running"}], warnings=["w"]
    )
    report = build_report(results, "t", missing=["asked for: everything"])
    assert report.failed == ("run <x>: boom",)
    assert "asked for: everything" in report.missing
    assert "not finished: run <x>: running" in report.missing
    assert report.warnings[-2] == "w"
    assert report.warnings[-1] == "Of the paper's tables, no run has what 2, 3, 4, S3, S4, S5, S6 would show."
    assert "phantom" in report.warnings[0]


def test_an_empty_store_is_reported_as_such(frames: Any) -> None:
    report = build_report(frames.results([]), "t")
    assert isinstance(report, Report)
    assert report.tables == ()


def test_facets_are_those_of_the_page(frames: Any) -> None:
    for found in tables(frames.results(frames.grid((*METHODS, *PARTS)))):
        for part in (*found.columns, *found.lines):
            assert set(part.facets) <= set(FACETS)
        assert len({len(column.groups) for column in found.columns}) == 1
