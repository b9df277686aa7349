"""Pictures of single clients and labels: who was taken for noisy and by what, and what relabelling did."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from fedsir.spectral.descriptors import DESCRIPTOR_NAMES
from mlflow_tracking.figures import flow_figure
from mlflow_tracking.relabeling import FLOWS
from mlflow_tracking.report.figures import Example, identification_figure
from mlflow_tracking.report.paper import shown_method
from mlflow_tracking.report.selection import (
    hardest,
    identifying_method,
    middle_client,
    noises,
    relabeling_method,
    typical_runs,
)
from mlflow_tracking.report.sheet import Picture, Sheet

IDENTIFICATION, FLOW = "Identification of noisy clients", "Relabelling"
MAX_FILES = 60
"""Verdicts of that many runs of a task go into one figure."""


def identification(sheet: Sheet) -> Iterator[Picture]:
    """The paper's Figure 2."""
    method = identifying_method(sheet.group.noisy)
    if method is None:
        return
    runs = hardest(sheet.group.noisy[sheet.group.noisy["method"] == method]).sort_values(["seed", "ratio"])
    # The figure has one kind of asymmetric noise, whatever its map.
    runs = runs.assign(noise=runs["noise"].str.replace(r" \(.*", "", regex=True))
    tables = {
        str(row.mlflow_id): table
        for row in runs.head(MAX_FILES).itertuples()
        if (table := sheet.table(str(row.mlflow_id), "identification/descriptors.csv")) is not None
    }
    if not tables:
        sheet.notes.append(f"{sheet.place}: no verdict on clients drawn; the files of its runs cannot be found")
        return
    noise_of = {str(run): str(noise) for run, noise in zip(runs["mlflow_id"], runs["noise"], strict=True)}
    clients = pd.concat([_labelled(table, noise_of[run]) for run, table in tables.items()])
    if np.isfinite(clients[list(DESCRIPTOR_NAMES)].to_numpy(dtype=np.float64)).any():
        examples, classes, sources = _examples(sheet, runs, tables)
        alpha = f"{runs['alpha'].iloc[0]:g}"
        hard = ", where clients differ most" if sheet.group.noisy["alpha"].nunique() > 1 else ""
        title = f"Figure 2: clients and verdicts, {sheet.place}"
        caption = (
            f"{shown_method(method)} at α = {alpha}{hard}. "
            + (f"Similarities: {sources}. " if examples else "")
            + f"Descriptors and verdicts: all clients of {len(tables)} runs over noise ratios and seeds"
            + (f" (the first of {len(runs)})" if len(tables) < len(runs) else "")
            + "; rows of the verdicts are the truth, which no method sees."
        )
        figure = identification_figure(
            examples,
            clients,
            classes,
            f"Clients and verdicts at α = {alpha}",
            sheet.label(sheet.place, shown_method(method)),
        )
        yield sheet.picture("identification", IDENTIFICATION, title, caption, figure, alpha=alpha, method=method)


def _labelled(descriptors: pd.DataFrame, noise: str) -> pd.DataFrame:
    """Clients of a run with `noise` of the run and `kind` of their labels."""
    kind = np.where(descriptors["truly_noisy"].astype(bool), noise, "clean")
    return descriptors.assign(noise=noise, kind=kind)


def _examples(
    sheet: Sheet, runs: pd.DataFrame, tables: dict[str, pd.DataFrame]
) -> tuple[list[Example], list[str], str]:
    """Similarities of one clean client and one noisy client per noise type: each time the client in the middle."""
    examples: list[Example] = []
    classes: list[str] = []
    words: list[str] = []
    typical = typical_runs(runs[runs["mlflow_id"].isin(list(tables))])
    for noise in ("asymmetric", "symmetric"):
        of_noise = typical[typical["noise"] == noise]
        if of_noise.empty:
            continue
        run = of_noise.iloc[0]
        similarity = sheet.table(str(run["mlflow_id"]), "identification/similarity.csv")
        if similarity is None:
            continue
        classes = list(dict.fromkeys(similarity["class_a"]))
        table = tables[str(run["mlflow_id"])]
        noisy = table["truly_noisy"].astype(bool)
        wanted = [("clean", table[~noisy])] if not examples else []
        for kind, rows in [*wanted, (noise, table[noisy])]:
            client = middle_client(rows, similarity)
            if client is None:
                continue
            matrix = similarity[similarity["client"] == client]["similarity"].to_numpy(dtype=np.float64)
            examples.append(Example(matrix.reshape(len(classes), -1), f"{kind}, client {client}"))
        words.append(f"{noise} noise at η = {run['ratio']:g}, seed {run['seed']}")
    sources = (
        "of each kind, among the clients with most classes, the one in the middle by mean similarity, from "
        + " and ".join(words)
    )
    return examples, classes, sources


def label_flows(sheet: Sheet) -> Iterator[Picture]:
    """True, observed and corrected labels of one run per kind of noise."""
    method = relabeling_method(sheet.group.noisy)
    if method is None:
        return
    typical = typical_runs(sheet.group.noisy[sheet.group.noisy["method"] == method])
    for noise in noises(typical):
        rows = typical[typical["noise"] == noise].sort_values("seed")
        if rows.empty:
            continue
        run = rows.iloc[0]
        table = sheet.table(str(run["mlflow_id"]), "relabeling/flow.csv")
        if table is None or table.empty:
            sheet.notes.append(f"{sheet.place}: no flow of labels under {noise} noise; its file cannot be found")
            continue
        last = table[table["after_round"] == table["after_round"].max()]
        classes = list(dict.fromkeys(last["from"]))
        flows = {
            name: part["images"].to_numpy(dtype=np.int64).reshape(len(classes), -1)
            for name in FLOWS
            if not (part := last[last["flow"] == name]).empty
        }
        after = int(last["after_round"].iloc[0])
        title = f"Flow of labels under {noise} noise, {sheet.place}"
        condition = f"η = {run['ratio']:g}, α = {run['alpha']:g}, seed {run['seed']}"
        caption = (
            f"{shown_method(method)}, {condition}: images of the clients whose labels it may change, after "
            f"the last relabelling (round {after})."
        )
        figure = flow_figure(
            flows, classes, f"Labels after round {after}", sheet.label(sheet.place, shown_method(method), condition)
        )
        yield sheet.picture(
            f"flow-{noise}", FLOW, title, caption, figure, noise=noise, method=method,
            alpha=f"{run['alpha']:g}", ratio=f"{run['ratio']:g}",
        )  # fmt: skip
