"""Pictures of methods against each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from mlflow_tracking.report.figures import cost_figure, curve_figure, ratio_figure
from mlflow_tracking.report.paper import ALL_CLEAN, OURS, shown_method
from mlflow_tracking.report.selection import (
    TYPICAL_RATIO,
    mean_over_conditions,
    on_equal_conditions,
    ratio_points,
    references,
    typical_runs,
)
from mlflow_tracking.report.sheet import Picture, Sheet

RATIOS, CURVES, COST = "Macro-F1 against label noise", "Training curves", "Cost against accuracy"
ACCURACY, MACRO_F1 = "final/accuracy", "test/macro_f1"
CLIENT_EPOCHS, BYTES = "cost/client_epochs", ("bytes/up", "bytes/down")


def over_ratios(sheet: Sheet, noise: str) -> Iterator[Picture]:
    """The paper's Figures 3 and 4."""
    runs = sheet.group.noisy[sheet.group.noisy["noise"] == noise]
    points = ratio_points(runs, MACRO_F1) if MACRO_F1 in runs else pd.DataFrame()
    # One ratio is no line, and the tables hold its numbers.
    if points.empty or points["ratio"].nunique() < 2:
        return
    clean = references(sheet.group.runs, MACRO_F1)
    styles = sheet.styles([*points["method"].unique(), *([ALL_CLEAN] if clean else [])])
    number, seeds = (3 if noise == "symmetric" else 4), sorted(runs["seed"].unique())
    title = f"Figure {number}: macro-F1 under {noise} noise, {sheet.place}"
    caption = (
        f"{_seeds(seeds)}."
        + (" Dashed: FedAvg without label noise." if clean else "")
        + (
            " The band is the standard deviation of OCT-FedSIR."
            if points.loc[points["method"] == OURS, "sd"].notna().any()
            else ""
        )
        + _holes(points)
    )
    figure = ratio_figure(points, clean, styles, f"Macro-F1 under {noise} noise", sheet.label(sheet.place))
    yield sheet.picture(f"ratio-{noise}", RATIOS, title, caption, figure, noise=noise)


def over_rounds(sheet: Sheet) -> Iterator[Picture]:
    """Training curves of all methods at one condition per kind of noise."""
    runs = typical_runs(sheet.group.noisy)
    if runs.empty:
        return
    clean = sheet.group.runs[(sheet.group.runs["method"] == ALL_CLEAN) & sheet.group.runs["alpha"].isin(runs["alpha"])]
    ids = [*runs["mlflow_id"], *clean["mlflow_id"]]
    curves = sheet.record.curves((MACRO_F1,), ids)
    panels = {str(r.noise): f"{r.noise}, η = {r.ratio:g}, α = {r.alpha:g}" for r in runs.itertuples()}
    named = pd.concat(
        [
            runs.assign(panel=runs["noise"].map(panels)),
            # The reference has no noise and stands in each panel.
            *(
                clean[clean["alpha"] == r.alpha].assign(panel=panels[str(r.noise)])
                for r in runs.drop_duplicates("noise").itertuples()
            ),
        ]
    )
    joined = named[["mlflow_id", "panel", "method"]].merge(curves, on="mlflow_id")
    if joined.empty or joined["step"].nunique() < 2:
        return
    joined = joined.assign(mean=100 * joined["value"])
    means = joined.groupby(["panel", "method", "step"], sort=False).agg(mean=("mean", "mean")).reset_index()
    title = f"Macro-F1 over rounds, {sheet.place}"
    caption = (
        "Global model on the held-out images after every round, at the lowest α and the noise ratio nearest to "
        f"{TYPICAL_RATIO:g}. {_seeds(sorted(runs['seed'].unique()))}."
    )
    figure = curve_figure(
        means, sheet.styles(means["method"].unique().tolist()), "Macro-F1 over rounds", sheet.label(sheet.place)
    )
    yield sheet.picture("curves", CURVES, title, caption, figure, alpha=f"{runs['alpha'].iloc[0]:g}")


def against_cost(sheet: Sheet) -> Iterator[Picture]:
    """Accuracy against time, client-epochs and bytes."""
    compared = on_equal_conditions(sheet.group.noisy)
    if compared.runs.empty or compared.runs["method"].nunique() < 2:
        return
    costs = _costs(sheet, compared.runs)
    table = mean_over_conditions(costs, ["accuracy", "seconds", "client_epochs", "megabytes"])
    clean = references(sheet.group.runs, ACCURACY)
    alphas = compared.runs.drop_duplicates(["noise", "ratio", "alpha"])["alpha"]
    reference = float(alphas.map(clean).mean()) if set(alphas) <= set(clean) else None
    styles = sheet.styles([*table["method"], *([ALL_CLEAN] if reference is not None else [])])
    title = f"Cost against accuracy, {sheet.place}"
    caption = (
        f"Per method the mean over the {compared.conditions} conditions that all methods shown have. Higher and "
        "further left is better. Seconds are those of the machine that ran them, with what ran beside them; resumed "
        "runs have none."
        + (f" Left out for lack of conditions: {', '.join(compared.left_out)}." if compared.left_out else "")
    )
    figure = cost_figure(table, reference, styles, "Cost against accuracy", sheet.label(sheet.place))
    yield sheet.picture("cost", COST, title, caption, figure)


def _costs(sheet: Sheet, runs: pd.DataFrame) -> pd.DataFrame:
    """Runs with accuracy (%), client_epochs and megabytes of the whole run."""
    totals = sheet.record.totals((CLIENT_EPOCHS, *BYTES), runs["mlflow_id"].tolist()).loc[runs["mlflow_id"]]
    return runs.assign(
        accuracy=100 * runs[ACCURACY],
        client_epochs=totals[CLIENT_EPOCHS].to_numpy(),
        megabytes=totals[list(BYTES)].sum(axis=1, min_count=1).to_numpy() / 1e6,
    )


def _seeds(seeds: Sequence[int]) -> str:
    return f"Seed {seeds[0]}" if len(seeds) == 1 else f"Mean over seeds {', '.join(map(str, seeds))}"


def _holes(points: pd.DataFrame) -> str:
    """Says where lines lack points."""
    complete = len(points[["alpha", "ratio"]].drop_duplicates())
    counts = points.groupby("method").size()
    lacking = [f"{shown_method(str(method))} ({n} of {complete})" for method, n in counts.items() if n < complete]
    return f" Incomplete: {', '.join(lacking)}." if lacking else ""
