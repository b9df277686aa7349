"""Figures of a report: which runs they show, what they say, and how they become part of a page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

from mlflow_tracking.report import pictures as pictures_module
from mlflow_tracking.report import selection
from mlflow_tracking.report.figures import as_markup, drawing, method_order, method_styles, ratio_figure
from mlflow_tracking.report.figures import markup as markup_module
from mlflow_tracking.report.pictures import draw_pictures

METHODS = ("fedavg", "oct_fedsir", "all_clean")
CLASSES = ("CNV", "NA", "a<b & $c$")


def falling(row: Mapping[str, Any]) -> float:
    return 0.9 - 0.5 * row["ratio"]


@pytest.fixture
def filed(frames: Any, tmp_path: Path) -> Any:
    """Results of one task at two alphas whose runs of oct_fedsir have their files."""
    rows = frames.grid(METHODS, alphas=(2.0, 0.1), seeds=(0, 1), accuracy=falling, dataset="a$b$ <c> & d")
    for number, row in enumerate(rows):
        if row["method"] == "oct_fedsir":
            write_files(tmp_path / str(row["mlflow_id"]), number)
    return frames.results(rows, folder=tmp_path)


def write_files(folder: Path, number: int) -> None:
    """Six clients of which the first two are clean; the last one knows a single class."""
    rng = np.random.default_rng(number)
    noisy = np.arange(6) >= 2
    descriptors = pd.DataFrame(
        {
            "client": range(6),
            "mean": np.where(noisy, 0.9, 0.5) + 0.01 * np.arange(6),
            "energy": rng.random(6),
            "maximum": rng.random(6),
            "predicted_noisy": noisy,
            "truly_noisy": noisy,
        }
    )
    descriptors.loc[5, ["mean", "energy", "maximum"]] = np.nan
    similarity = pd.DataFrame(
        [
            {"client": k, "class_a": a, "class_b": b, "similarity": 1.0 if a == b else np.nan if k == 5 else 0.4}
            for k in range(6)
            for a in CLASSES
            for b in CLASSES
        ]
    )
    flow = pd.DataFrame(
        [
            {"after_round": r, "flow": name, "from": a, "to": b, "images": 3 * r}
            for r in (1, 4)
            for name in ("true to observed", "observed to corrected", "true to corrected")
            for a in CLASSES
            for b in CLASSES
        ]
    )
    for name, table in (
        ("identification/descriptors.csv", descriptors),
        ("identification/similarity.csv", similarity),
        ("relabeling/flow.csv", flow),
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(path, index=False)


def test_all_figures_say_what_the_images_are(filed: Any) -> None:
    before = dict(mpl.rcParams)
    pictures = draw_pictures(filed)
    assert dict(mpl.rcParams) == before
    assert pictures.notes == ()
    keys = [picture.key for picture in pictures.shown]
    assert keys == [
        "figure-f0-identification",
        "figure-f0-ratio-symmetric",
        "figure-f0-curves",
        "figure-f0-flow-symmetric",
        "figure-f0-flow-asymmetric",
        "figure-f0-cost",
    ]
    for picture in pictures.shown:
        # Markup of its own and names with `$`, `<` and `&` as they are.
        assert "PHANTOM DATA (a$b$ &lt;c&gt; &amp; d)" in picture.markup
        assert picture.facets["task"] == "Kermany"
        assert picture.facets.get("alpha", "0.1") == "0.1"
    assert "a&lt;b &amp; $c$" in pictures.shown[0].markup
    assert ">NA<" in pictures.shown[0].markup
    # Lines can be hidden with their method: two panels and two parts of the legend; oct_fedsir has a band besides.
    ratios = pictures.shown[1].markup
    methods = ("fedavg", "oct_fedsir", "all_clean")
    assert [ratios.count(f'data-method="{method}"') for method in methods] == [4, 6, 4]


def test_missing_files_are_said_and_not_an_error(frames: Any) -> None:
    pictures = draw_pictures(frames.results(frames.grid(METHODS, seeds=(0,))))
    sections = {picture.section for picture in pictures.shown}
    assert len(sections) == 3
    assert len(pictures.notes) == 3
    assert "verdict" in pictures.notes[0]
    assert ["flow" in note for note in pictures.notes] == [False, True, True]


def test_budgets_never_share_a_figure(frames: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures_module, "MAX_GROUPS", 2)
    rows = [
        row
        for number in range(3)
        for row in frames.grid(("fedavg", "rofl"), alphas=(2.0,), seeds=(0,), budget=f"{number} rounds")
    ]
    pictures = draw_pictures(frames.results(rows))
    # The newest of those with equally many runs, as in the tables.
    assert {picture.facets["budget"] for picture in pictures.shown} == {"1 rounds", "2 rounds"}
    assert ["0 rounds" in note for note in pictures.notes] == [True]
    assert all(picture.facets["budget"] in picture.title for picture in pictures.shown)


def test_other_maps_of_noise_have_figures_of_their_own(frames: Any) -> None:
    noises = {"asymmetric": (0.4, 0.6), "asymmetric (uic_pair_swap)": (0.4, 0.6)}
    pictures = draw_pictures(frames.results(frames.grid(("fedavg", "rofl"), noises=noises, seeds=(0,))))
    ratios = [picture for picture in pictures.shown if "ratio" in picture.key]
    assert [picture.facets["noise"] for picture in ratios] == list(noises)
    assert [picture.key for picture in ratios] == [
        "figure-f0-ratio-asymmetric",
        "figure-f0-ratio-asymmetric-uic-pair-swap",
    ]


def test_costs_compare_methods_on_equal_conditions(frames: Any) -> None:
    rows = frames.grid(("fedavg", "rofl", "fedcorr"), noises={"symmetric": tuple(np.arange(1, 11) / 10)}, alphas=(2.0,))
    runs = pd.DataFrame(rows)
    hard = runs["ratio"] == 1.0
    runs = runs[~((runs["method"] == "rofl") & hard) & ~((runs["method"] == "fedcorr") & (runs["ratio"] > 0.35))]
    compared = selection.on_equal_conditions(runs)
    # One condition short is a hole for all; seven short are a method left out.
    assert compared.conditions == 9
    assert compared.left_out == ("FedCorr (3 of 10)",)
    assert set(compared.runs["method"]) == {"fedavg", "rofl"}
    assert set(compared.runs["ratio"]) == set(runs["ratio"]) - {1.0}


def test_means_are_over_conditions_not_over_runs() -> None:
    runs = pd.DataFrame(
        {
            "method": "fedavg",
            "noise": "symmetric",
            "alpha": 2.0,
            "ratio": [0.3, 0.3, 0.3, 0.6],
            "accuracy": [90.0, 90.0, 90.0, 50.0],
        }
    )
    assert selection.mean_over_conditions(runs, ["accuracy"])["accuracy"].tolist() == [70.0]


def test_typical_runs_are_at_the_lowest_alpha_and_the_ratio_nearest_to_six_tenths(frames: Any) -> None:
    noises = {"symmetric": (0.3, 0.5, 0.9), "asymmetric": (0.7,)}
    rows = frames.grid(METHODS, noises=noises, alphas=(2.0, 0.5), seeds=(0,))
    chosen = selection.typical_runs(pd.DataFrame(rows))
    assert set(chosen[["noise", "ratio", "alpha"]].itertuples(index=False, name=None)) == {
        ("symmetric", 0.5, 0.5),
        ("asymmetric", 0.7, 0.5),
    }


def test_the_example_is_the_middle_client_among_those_with_most_classes() -> None:
    clients = pd.DataFrame({"client": [0, 1, 2, 3, 4], "mean": [0.1, 0.9, 0.5, 0.95, np.nan]})
    pairs = {0: 9, 1: 9, 2: 9, 3: 4, 4: 1}
    similarity = pd.DataFrame(
        [{"client": k, "similarity": 0.5 if n < known else np.nan} for k, known in pairs.items() for n in range(9)]
    )
    assert selection.middle_client(clients, similarity) == 2
    assert selection.middle_client(clients[clients["client"] == 4], similarity) is None


def test_methods_are_in_the_order_of_the_registry_with_their_presets() -> None:
    shuffled = ["all_clean", "oct_fedsir/no_kd", "zz_plugin", "fedavg", "oct_fedsir", "fedprox", "fedavg"]
    assert method_order(shuffled) == ["fedavg", "fedprox", "oct_fedsir", "oct_fedsir/no_kd", "zz_plugin", "all_clean"]


def test_no_two_methods_look_the_same() -> None:
    labels = [f"method{i}" for i in range(40)] + list(METHODS)
    styles = method_styles(labels)
    looks = {(style.colour, style.marker, style.line) for style in styles.values()}
    assert len(looks) == len(set(labels))


def test_equal_figures_give_equal_markup_and_big_ones_become_images(monkeypatch: pytest.MonkeyPatch) -> None:
    points = pd.DataFrame({"alpha": 2.0, "ratio": [0.3, 0.6], "method": "fedavg", "mean": [80.0, 60.0], "sd": np.nan})

    def draw() -> str:
        with drawing():
            return as_markup(ratio_figure(points, {}, method_styles(["fedavg"]), "T", "L"), "f", 'says "x"')

    assert draw().startswith("<svg ")
    assert draw() == draw()
    monkeypatch.setattr(markup_module, "MAX_SVG", 1000)
    assert draw().startswith('<img alt="says &quot;x&quot;"')
