"""`fedsir explain`: what decided about clients and labels in a recorded run, as tables and plain sentences."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isnan, log
from typing import Any

import pandas as pd
from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.table import Table

from experiments import validation_errors
from experiments.console import new_console, percent, say, waiting
from fedsir.errors import BadInput
from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.explanation import Explanation, IdentificationRecord, RelabelingRecord, find_run, read_explanation
from mlflow_tracking.identification import evidence

EVALUATOR = "* from the true labels, which only the evaluator knows; the method never saw them"
# Posteriors between 0.05 and 0.95 with the threshold 0.5.
CLOSE_LOG_ODDS = log(19.0)
MAX_NAMED = 5


def explain_run(wanted: str, uri: str | None, experiment: str | None) -> None:
    """Print the explanation of one run of the store."""
    given = {key: value for key, value in (("uri", uri), ("experiment", experiment)) if value is not None}
    try:
        config = TrackingConfig.model_validate(given)
    except ValidationError as error:
        raise BadInput(
            "the store cannot be used.\n" + validation_errors.explain(error, TrackingConfig, "tracking.")
        ) from error
    console = new_console()
    with waiting(console, "reading the MLflow store"):
        from mlflow_tracking.store import existing_store

        store = existing_store(config)
        explanation = read_explanation(store, find_run(store, wanted))
    show(console, explanation)


def show(console: Console, explanation: Explanation) -> None:
    """Print everything that is known, identification first."""
    run = explanation.run
    say(console, f"{run.name} ({run.data_kind} images): {run.condition}, method {run.method}, {run.status}", "bold")
    say(console, f"MLflow run {run.mlflow_id}, identity {run.identity}, started {run.started}", "dim")
    identification, relabeling = explanation.identification, explanation.relabeling
    if identification is None:
        say(console, f"\n{run.method} records no verdict on clients.")
    else:
        for table in (client_table(identification), split_table(identification)):
            console.print("", table)
        say(console, "")
        for sentence in identification_sentences(identification):
            say(console, sentence)
    if relabeling is None:
        say(console, f"\n{run.method} changed no label in this run.")
    else:
        for table in relabeling_tables(relabeling):
            console.print("", table)
    say(console, f"\n{EVALUATOR}", "dim")
    shown = set() if identification is None else set(identification.facts["notes"])
    for round_, text in explanation.notes:
        # The verdict's own notes were shown with it.
        if text.partition(": ")[2] not in shown:
            say(console, f"round {round_}: {text}", "yellow")


def client_table(record: IdentificationRecord) -> Table:
    """Clients from most like clean to most like noise, with a line where the verdict changes."""
    spectral, steps = bool(record.clients["score"].notna().any()), bool(record.clients["steps"].notna().any())
    rows = record.clients.sort_values("score") if spectral else record.clients.sort_values("p_clean", ascending=False)
    wrong = rows["predicted_noisy"] != rows["truly_noisy"]
    meaning = ["score: mean z-score of the descriptors in the fit; high means that classes look alike"]
    numbers = ["mean", "energy", "maximum", "score"] if spectral else []
    headings = ["client", "images", *(["steps"] if steps else []), *numbers]
    caption = "; ".join([*(meaning if spectral else []), *(["! misjudged"] if wrong.any() else [])])
    table = _table("Clients, from most to least like clean", headings, caption=caption or None)
    table.add_column("p clean" if spectral else f"{evidence(record.facts['split'])} %", justify="right")
    table.add_column("judged")
    table.add_column("truth *")
    before: bool | None = None
    for row in rows.to_dict("records"):
        noisy, truth = bool(row["predicted_noisy"]), bool(row["truly_noisy"])
        if before is not None and noisy != before:
            table.add_section()
        before = noisy
        table.add_row(
            str(row["client"]),
            str(row["images"]),
            *([_number(row["steps"], 0)] if steps else []),
            *(_signed(row[name]) if name == "score" else _number(row[name], 3) for name in numbers),
            _number(row["p_clean"], 3) if spectral else percent(row["p_clean"]),
            _status(noisy),
            _status(truth) + (" !" if truth != noisy else ""),
            style="bold" if truth != noisy else "",
        )
    return table


def split_table(record: IdentificationRecord) -> Table:
    """How the clients were split: rule, threshold, gap, components."""
    facts, mixture = record.facts, record.facts["mixture"]
    table = _table("How they were split", ["figure", "value"], left=("figure", "value"))
    words = {
        "mixture": "mixture of two Gaussians over",
        "largest_gap": "largest gap between neighbouring scores of",
        "none": "none, since nothing could be compared by",
    }
    spectral = facts["split"] in words
    others = {
        "class_losses": "votes of mixtures of class losses",
        "lid": "mixture over dimensions of predictions (LID)",
    }
    by = (
        f"{words[facts['split']]} {', '.join(facts['descriptors'])}"
        if spectral
        else others.get(facts["split"], facts["split"])
    )
    table.add_row("split", by)
    if facts["threshold"] is not None:
        table.add_row("clean from a posterior of", f"{facts['threshold']:g}")
    if spectral:
        for name, value in (
            ("gap between the judged groups (score)", facts["gap"]),
            ("gap between the true groups (SD) *", facts["figures"]["margin"]),
        ):
            table.add_row(name, "–" if value is None else f"{value:+.2f}")
    table.add_row("clients judged correctly % *", percent(facts["figures"].get("accuracy")))
    if mixture is not None:
        for name in ("clean", "noisy"):
            part = mixture["components"][name]
            means = ", ".join(f"{c} {m:.3f}" for c, m in zip(mixture["columns"], part["mean"], strict=True))
            table.add_row(f"{name} component", f"weight {part['weight']:.2f}, score {part['mean_score']:+.2f}, {means}")
    return table


def identification_sentences(record: IdentificationRecord) -> list[str]:
    """Guards that acted, the closest call with its reasons, other close clients and misjudged ones."""
    sentences = [f"Guard: {note}" for note in record.facts["notes"]]
    distance = boundary_distances(record)
    order = distance.sort_values(kind="stable").index
    if not len(order):
        return sentences
    closest = record.clients.loc[order[0]]
    sentences.append(closest_call(record, closest))
    if record.facts["split"] == "mixture":
        near = [k for k in order[1:] if distance[k] < CLOSE_LOG_ODDS]
        shown = [f"{k} (posterior {record.clients.loc[k, 'p_clean']:.3f})" for k in near[:MAX_NAMED]]
        more = f" and {len(near) - MAX_NAMED} more" if len(near) > MAX_NAMED else ""
        others = f"Also close to the boundary: client {', '.join(shown)}{more}."
        sentences.append(others if near else "No other client was close to the boundary.")
    return sentences


def boundary_distances(record: IdentificationRecord) -> pd.Series[float]:
    """Distance of each client in the split from the boundary, indexed by client; empty where there is none.

    In log-odds for a mixture, where posteriors saturate; in scores from the middle of a largest gap; in votes from
    half of them. Other verdicts have recorded nothing to measure it by.
    """
    clients, facts = record.clients, record.facts
    inside = clients[clients["p_clean"].notna()]
    match facts["split"]:
        case "mixture":
            return (inside["log_odds"] - _log_odds(facts["threshold"])).abs()
        case "class_losses":
            return (inside["p_clean"] - 0.5).abs()
        case "largest_gap":
            upper = inside["p_clean"] < 0.5
            middle = float(inside["score"][upper].min() + inside["score"][~upper].max()) / 2
            return (inside["score"] - middle).abs()
        case _:
            return pd.Series(dtype=float)


def closest_call(record: IdentificationRecord, client: pd.Series[float]) -> str:
    """Why the verdict on this client went as it did."""
    split, noisy, truth = record.facts["split"], bool(client["predicted_noisy"]), bool(client["truly_noisy"])
    match split:
        case "mixture":
            reason = _mixture_reason(record.facts, client)
        case "largest_gap":
            side = "above" if client["p_clean"] < 0.5 else "below"
            reason = (
                f"its score of {_signed(client['score'])} is the nearest to the middle of the widest gap between "
                f"neighbouring scores, on the side {side} it."
            )
        case _:
            reason = f"{percent(client['p_clean'])} % of the votes took it for clean; the set most often named decides."
    return (
        f"Closest call: client {int(client['client'])}: {reason} Judged {_status(noisy)}; truly {_status(truth)} *"
        + (", so the verdict is wrong." if truth != noisy else ".")
    )


def _mixture_reason(facts: dict[str, Any], client: pd.Series[float]) -> str:
    components = facts["mixture"]["components"]
    weight = {name: components[name]["weight"] for name in ("clean", "noisy")}
    far = {name: float(client[f"distance_{name}"]) for name in ("clean", "noisy")}
    judged_clean, likely = not client["predicted_noisy"], client["p_clean"] >= facts["threshold"]
    reason = (
        f"{far['clean']:.2f} SD from the centre of the clean component and {far['noisy']:.2f} SD from that of the "
        f"noisy one; with weights {weight['clean']:.2f} and {weight['noisy']:.2f} that makes a posterior of "
        f"{client['p_clean']:.3f} for clean (log-odds {_signed(client['log_odds'])}), "
        f"{'at least' if likely else 'below'} the threshold {facts['threshold']:g}."
    )
    if likely != judged_clean:
        return f"{reason} A guard overruled the fit here."
    if (far["clean"] < far["noisy"]) != judged_clean:
        return f"{reason} The nearer centre lost: weights, widths or the threshold outweigh the distance."
    return reason


def relabeling_tables(record: RelabelingRecord) -> list[Table]:
    """References, figures over checkpoints, margins by outcome, clients."""
    tables = [] if record.references is None else [_reference_table(record.references)]
    names = ("edit", "recovery", "precision", "false_correction", "residual")
    columns = ["after\nround", "images", "labels\nchanged %", "wrong ones\nrecovered % *", "changes\nright % *"]
    shares = _table("Relabelling at each checkpoint", [*columns, "right ones\nspoiled % *", "wrong\nleft % *"])
    for row in record.checkpoints.to_dict("records"):
        shares.add_row(str(row["after_round"]), str(row["images"]), *(percent(row[name]) for name in names))
    tables.append(shares)

    margins = "S_R median" in record.outcomes
    headings = ["outcome *", "images", *(["decided", "median\nmargin S_R", "median\nmargin S_N"] if margins else [])]
    outcomes = _table("Outcome at the last checkpoint", headings, left=("outcome *",))
    for row in record.outcomes.to_dict("records"):
        numbers = [_number(row[name], 4) for name in ("S_R median", "S_N median")] if margins else []
        outcomes.add_row(row["outcome"], str(row["images"]), *([str(row["decided"])] if margins else []), *numbers)
    tables.append(outcomes)
    tables.append(_relabeled_table(record.clients))
    return tables


def _reference_table(references: pd.DataFrame) -> Table:
    table = _table(
        "Class references of the last checkpoint",
        ["class", "providers", "directions", "strength"],
        left=("class", "providers"),
        caption="strength: 1 if all providers agree",
    )
    for row in references.to_dict("records"):
        if not isinstance(row["providers"], str):  # read back as missing
            table.add_row(row["class"], "no reference", "–", "–", style="yellow")
        else:
            providers = row["providers"].replace(" ", ", ")
            table.add_row(row["class"], f"client {providers}", str(row["directions"]), _number(row["strength"], 3))
    return table


def _relabeled_table(clients: pd.DataFrame) -> Table:
    criteria = [name for name in ("S_R", "S_N") if f"{name} edited" in clients]
    headings = ["client", "images", "first\nwrong", "edited", "made\nright", "made\nwrong", "still\nwrong"]
    table = _table(
        "Relabelled clients, last checkpoint *", [*headings, *(f"median {name}\nedited/kept" for name in criteria)]
    )
    for row in clients.to_dict("records"):
        counts = ("client", "images", "corrupted", "edited", "recovered", "spoiled", "still_wrong")
        medians = [f"{_number(row[f'{name} edited'], 3)}/{_number(row[f'{name} kept'], 3)}" for name in criteria]
        table.add_row(*(str(row[name]) for name in counts), *medians)
    return table


def _table(title: str, headings: Sequence[str], left: Sequence[str] = (), caption: str | None = None) -> Table:
    # Without frames the widest of them fits into 80 characters.
    table = Table(
        title=title, title_justify="left", title_style="bold", caption=caption, caption_justify="left",
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    return table


def _log_odds(p: float) -> float:
    return log(p / (1 - p)) if 0 < p < 1 else (inf if p >= 1 else -inf)


def _status(noisy: bool) -> str:
    return "noisy" if noisy else "clean"


def _number(value: float, digits: int) -> str:
    return "–" if isnan(value) else f"{value:.{digits}f}"


def _signed(value: float) -> str:
    return "–" if isnan(value) else f"{value:+.2f}"
