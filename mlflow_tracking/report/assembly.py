"""From MLflow runs to the rows of a report: which of them count, and what they are called."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlflow_tracking.describe import TAG_ERROR
from mlflow_tracking.report.budgets import (
    Budget,
    budget_of,
    completed,
    parsed_config,
    said,
    setting_names,
    short_names,
)
from mlflow_tracking.report.paper import ALL_CLEAN, MAPS, task_name
from mlflow_tracking.report.reading import Recorded

CELL = ("task", "budget", "noise", "ratio", "alpha", "method", "seed")
"""Columns that are equal for no two rows of `Results.runs`."""

NEEDED = ("dataset", "data_kind", "noise_type", "noise_ratio", "alpha", "clients", "clean_clients", "method", "seed")
NUMBERS = {"noise_ratio": float, "alpha": float, "clients": int, "clean_clients": int, "seed": int}
NO_ACCURACY = "finished without a final accuracy"

Row = dict[str, Any]


@dataclass(frozen=True)
class Outcomes:
    """One run per identity. failed, unfinished: with the error, or with what it is doing."""

    finished: list[Recorded]
    failed: list[tuple[Recorded, str]]
    unfinished: list[tuple[Recorded, str]]
    warnings: list[str]


def by_outcome(records: Sequence[Recorded]) -> Outcomes:
    """Of runs of one identity a finished one counts, otherwise the latest; `records` are newest first."""
    groups: dict[str, list[Recorded]] = defaultdict(list)
    for record in records:
        groups[record.identity].append(record)
    finished: list[Recorded] = []
    failed: list[tuple[Recorded, str]] = []
    unfinished: list[tuple[Recorded, str]] = []
    repeated: list[str] = []
    for group in groups.values():
        complete = [record for record in group if record.status == "FINISHED"]
        usable = [record for record in complete if _lack(record) is None]
        if len(usable) > 1:
            repeated.append(usable[0].name)
        if usable:
            finished.append(usable[0])
        elif complete:
            unfinished.append((complete[0], _lack(complete[0]) or ""))
        elif group[0].status == "FAILED":
            failed.append((group[0], group[0].tags.get(TAG_ERROR, "")))
        else:
            unfinished.append((group[0], group[0].status.lower()))
    warnings = []
    if repeated:
        named = _listing(sorted(repeated))
        warnings.append(f"{_many(len(repeated), 'run')} finished more than once, the newest counts: {named}.")
    if failed:
        warnings.append(f"{_many(len(failed), 'run')} failed; nothing stands in their place.")
    if unfinished:
        warnings.append(f"{_many(len(unfinished), 'run')} did not finish; nothing stands in their place.")
    return Outcomes(finished, failed, unfinished, warnings)


def _lack(record: Recorded) -> str | None:
    """Why a finished run cannot be used."""
    if "final/accuracy" not in record.metrics:
        return NO_ACCURACY
    missing = [key for key in NEEDED if key not in record.params]
    if missing:
        return f"lacks the parameters {', '.join(missing)}"
    for key, number in NUMBERS.items():
        try:
            number(record.params[key])
        except ValueError:
            return f"its parameter {key} is {record.params[key]!r}, not a number"
    return None


def row_of(record: Recorded, text: str | None) -> Row:
    """Columns of `Results.runs`; `_budget`, `_map`, `_method` and `_recorded` for what is named once all runs
    are known."""
    params = record.params
    config = None if text is None else parsed_config(text)
    clean = params["method"] == "fedavg" and params["noise_type"] == "none"
    return {
        "mlflow_id": record.mlflow_id,
        "run_id": record.identity,
        "name": record.name,
        "task": task_name(params, record.classes),
        "dataset": params["dataset"],
        "data_kind": params["data_kind"],
        "noise": params["noise_type"],
        "ratio": float(params["noise_ratio"]),
        "alpha": float(params["alpha"]),
        "clients": int(params["clients"]),
        "clean_clients": int(params["clean_clients"]),
        "method": ALL_CLEAN if clean else params["method"],
        "seed": int(params["seed"]),
        "started": record.started,
        "seconds": record.seconds,
        "artifact_uri": record.artifact_uri,
        **record.metrics,
        "_map": params.get("label_map", ""),
        "_budget": budget_of(params, config, record.digest),
        "_method": None if config is None else _method_settings(config),
        "_recorded": params.get("method_settings", ""),
    }


def _method_settings(config: Mapping[str, Any]) -> dict[str, str]:
    return {
        key.removeprefix("method."): str(value)
        for key, value in config.items()
        if key.startswith("method.") and key not in ("method.name", "method.preset")
    }


def name_budgets(rows: Sequence[Row]) -> None:
    """Fill in `budget` and `settings`."""
    for row, budget in zip(rows, completed([(row["task"], row["_budget"]) for row in rows]), strict=True):
        row["_budget"] = budget
    of_task: dict[str, list[Budget]] = defaultdict(list)
    for row in rows:
        of_task[row["task"]].append(row["_budget"])
    names = {task: short_names(budgets) for task, budgets in of_task.items()}
    for row in rows:
        row["settings"] = said(row["_budget"])
        row["budget"] = names[row["task"]][row.pop("_budget")]


def tell_maps_apart(rows: Sequence[Row]) -> None:
    """Where a task has several maps of asymmetric noise, name those that are not its usual one."""
    maps: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row["noise"] == "asymmetric":
            maps[row["task"]].add(row["_map"])
    for row in rows:
        own = row.pop("_map")
        if row["noise"] == "asymmetric" and len(maps[row["task"]]) > 1 and own != MAPS.get(row["task"]):
            row["noise"] = f"asymmetric ({own})"


def tell_settings_apart(rows: Sequence[Row]) -> list[str]:
    """Give each settings of a method a label of its own where one condition has several of them."""
    _complete_settings(rows)
    conditions: dict[tuple[Any, ...], dict[str, dict[str, str]]] = defaultdict(dict)
    for row in rows:
        condition = tuple(row[key] for key in CELL if key != "seed")
        conditions[condition].setdefault(_key(row["_method"]), row["_method"])
    mixed: dict[tuple[str, str], dict[str, dict[str, str]]] = defaultdict(dict)
    for condition, several in conditions.items():
        if len(several) > 1:
            named = dict(zip(CELL, condition, strict=False))
            mixed[named["task"], condition[-1]].update(several)
    names: dict[tuple[str, str], dict[str, str]] = {}
    warnings = []
    for (task, method), several in mixed.items():
        for row in rows:
            if (row["task"], row["method"]) == (task, method):
                several.setdefault(_key(row["_method"]), row["_method"])
        told = setting_names(several.values())
        names[task, method] = {key: f"{method} ({name})" for key, name in zip(several, told, strict=True)}
        warnings.append(
            f"{task}: {method} was run with {len(several)} settings of its own; they are shown as methods apart."
        )
    for row in rows:
        own = names.get((row["task"], row["method"]), {})
        row["method"] = own.get(_key(row.pop("_method")), row["method"])
    return warnings


def _complete_settings(rows: Sequence[Row]) -> None:
    """Runs without a configuration have the settings of those whose parameters say the same of them, if these agree.

    Otherwise the parameter stands for the settings; long ones are cut there.
    """
    known: dict[tuple[str, str], dict[str, dict[str, str]]] = defaultdict(dict)
    for row in rows:
        if row["_method"] is not None:
            known[row["method"], row["_recorded"]].setdefault(_key(row["_method"]), row["_method"])
    for row in rows:
        recorded = row.pop("_recorded")
        if row["_method"] is None:
            told = list(known[row["method"], recorded].values())
            row["_method"] = told[0] if len(told) == 1 else {"settings": recorded}


def _key(settings: Mapping[str, str]) -> str:
    return repr(sorted(settings.items()))


def newest_of_cell(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Of runs of one cell and seed with different identities the newest; `rows` are newest first."""
    cells: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        cells[tuple(row[key] for key in CELL)].append(row)
    doubled = [group for group in cells.values() if len(group) > 1]
    warnings = []
    if doubled:
        named = _listing(sorted(group[0]["name"] for group in doubled))
        warnings.append(
            f"{_many(len(doubled), 'result')} from several runs each, which differ in nothing that makes a budget; "
            f"the newest counts: {named}."
        )
    return [group[0] for group in cells.values()], warnings


def _listing(names: Sequence[str], most: int = 5) -> str:
    more = "" if len(names) <= most else f" and {len(names) - most} more"
    return ", ".join(names[:most]) + more


def _many(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
