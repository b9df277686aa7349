"""Finds a recorded run and reads back what it says about clients and labels."""

from __future__ import annotations

import difflib
import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedsir.errors import BadInput
from mlflow_tracking.config import shown_uri, sqlite_path
from mlflow_tracking.describe import TAG_CONDITION, TAG_DATA_KIND, TAG_ERROR, TAG_GRID, TAG_METHOD, TAG_RUN_ID
from mlflow_tracking.queries import rows_in_sqlite
from mlflow_tracking.store import Store

if TYPE_CHECKING:
    from mlflow.entities import Run

# Of many runs only some are named in a message.
MAX_NAMED = 5


@dataclass(frozen=True)
class RunFacts:
    """What the store says about a run apart from its files."""

    mlflow_id: str
    name: str
    identity: str
    status: str
    condition: str
    method: str
    data_kind: str
    started: str
    error: str


@dataclass(frozen=True)
class IdentificationRecord:
    """facts: see `mlflow_tracking.identification.identification_facts`; clients: rows of `descriptor_table`."""

    facts: dict[str, Any]
    clients: pd.DataFrame


@dataclass(frozen=True)
class RelabelingRecord:
    """Tables of `mlflow_tracking.relabeling`; references are missing where a method has none."""

    checkpoints: pd.DataFrame
    clients: pd.DataFrame
    outcomes: pd.DataFrame
    references: pd.DataFrame | None


@dataclass(frozen=True)
class Explanation:
    """notes: (finished rounds, text) of guards and fallbacks while the run went on."""

    run: RunFacts
    notes: tuple[tuple[int, str], ...]
    identification: IdentificationRecord | None
    relabeling: RelabelingRecord | None


def find_run(store: Store, wanted: str) -> RunFacts:
    """The run whose MLflow id, name or identity is `wanted`, or the only one where one of these begins so.

    Several MLflow runs of one identity have the same result by definition; the latest finished one stands for
    them. Raises BadInput with close names if there is none, with the candidates if there are several.
    """
    found = _matching(_named_runs(store, wanted), wanted)
    if not found:
        runs = _all_named(store)
        near = difflib.get_close_matches(wanted, list(dict.fromkeys(r.name for r in runs)), MAX_NAMED, cutoff=0.5)
        # The closest name first; of the same name the latest run.
        shown = sorted((r for r in runs if r.name in near), key=lambda r: near.index(r.name)) if near else runs
        known = [f"  {r.name}  {r.mlflow_id}" for r in shown[:MAX_NAMED]]
        raise BadInput(
            f"no run {wanted!r} in experiment {store.experiment!r} of {shown_uri(store.uri)}.\n"
            + "\n".join([f"{'Did you mean' if near else 'The latest are'}:", *known])
        )
    if len({r.identity for r in found}) > 1:
        candidates = [_read_facts(store, r) for r in found[:MAX_NAMED]]
        choices = [f"  {r.mlflow_id}  {r.name}  {r.status}  {r.started}" for r in candidates]
        more = [f"  and {len(found) - MAX_NAMED} more"] if len(found) > MAX_NAMED else []
        raise BadInput(
            "\n".join([f"{wanted!r} may be any of {len(found)} runs; give one of these ids:", *choices, *more])
        )
    same = [_read_facts(store, r) for r in found]
    return next((r for r in same if r.status == "FINISHED"), same[0])


@dataclass(frozen=True)
class _Named:
    """What a run may be called by."""

    mlflow_id: str
    name: str
    identity: str


def _matching(runs: Sequence[_Named], wanted: str) -> list[_Named]:
    def pick(matches: Callable[[str], bool]) -> list[_Named]:
        return [r for r in runs if any(matches(known) for known in (r.mlflow_id, r.name, r.identity))]

    return pick(lambda known: known == wanted) or (pick(lambda known: known.startswith(wanted)) if wanted else [])


def _named_runs(store: Store, wanted: str) -> list[_Named]:
    """Runs among which are all that `wanted` may mean, newest first; few of them where MLflow has to be asked."""
    if sqlite_path(store.uri) is not None or not re.fullmatch(r"[\w. +-]+", wanted):
        return _all_named(store)
    # An underscore stands for any character there, so these are too many rather than too few.
    keys = ("attributes.run_id", "attributes.run_name", f"tags.`{TAG_RUN_ID}`")
    found = {run.info.run_id: run for key in keys for run in store.runs(f"{key} LIKE '{wanted}%'")}
    return [_named(run) for run in sorted(found.values(), key=lambda run: -run.info.start_time)]


def _all_named(store: Store) -> list[_Named]:
    found = rows_in_sqlite(
        store,
        "SELECT runs.run_uuid, COALESCE(runs.name, ''), COALESCE(identities.value, runs.run_uuid) FROM runs"
        " LEFT JOIN tags AS identities ON identities.run_uuid = runs.run_uuid AND identities.key = ?"
        " WHERE runs.experiment_id = ? AND runs.lifecycle_stage = 'active'"
        " AND NOT EXISTS (SELECT 1 FROM tags WHERE tags.run_uuid = runs.run_uuid AND tags.key = ?)"
        " ORDER BY runs.start_time DESC, runs.run_uuid",
        (TAG_RUN_ID, int(store.experiment_id), TAG_GRID),
    )
    return [_named(run) for run in store.runs()] if found is None else [_Named(*values) for values in found]


def _named(run: Run) -> _Named:
    return _Named(run.info.run_id, run.info.run_name or "", run.data.tags.get(TAG_RUN_ID, run.info.run_id))


def _read_facts(store: Store, run: _Named) -> RunFacts:
    with store.lock:
        return _facts(store.client.get_run(run.mlflow_id))


def read_explanation(store: Store, run: RunFacts) -> Explanation:
    """The numbers that decided about clients and labels in a finished run.

    Raises BadInput for a run that has not finished, identifies nobody and relabels nothing, or was recorded
    without these files.
    """
    if run.status != "FINISHED":
        reason = f" ({run.error})" if run.error else ""
        raise BadInput(
            f"run {run.name} ({run.mlflow_id}) is {run.status}{reason}; what decided is recorded at its end.\n"
            "The command that started it continues it after its last finished round."
        )
    files = _Files(store, run.mlflow_id)
    summary = files.json("summary.json")
    identification = relabeling = None
    if files.has("identification", "identification.json"):
        identification = IdentificationRecord(
            files.json("identification/identification.json"), files.table("identification/descriptors.csv")
        )
    if files.has("relabeling", "checkpoints.csv"):
        checkpoints, clients, outcomes = (
            files.table(f"relabeling/{name}.csv") for name in ("checkpoints", "clients", "outcomes")
        )
        with_references = files.has("relabeling", "references.csv")
        references = files.table("relabeling/references.csv") if with_references else None
        relabeling = RelabelingRecord(checkpoints, clients, outcomes, references)
    if identification is None and relabeling is None:
        if files.has("identification", "similarity.png"):
            raise BadInput(
                f"run {run.name} ({run.mlflow_id}) was recorded before its numbers were kept.\n"
                "Run it again with --fresh."
            )
        raise BadInput(
            f"run {run.name} ({run.mlflow_id}) has nothing to explain: "
            f"{run.method} has neither judged clients nor changed labels in it.\n"
            "Take a run of a method that does, such as oct_fedsir (see `fedsir methods`)."
        )
    notes = tuple((int(entry["round"]), str(entry["note"])) for entry in summary["notes"])
    return Explanation(run, notes, identification, relabeling)


class _Files:
    """Artifacts of one run, fetched one by one: the weights beside them may be large."""

    def __init__(self, store: Store, mlflow_id: str) -> None:
        self._client = store.client
        self._run = mlflow_id
        self._folders: dict[str, set[str]] = {}

    def has(self, folder: str, name: str) -> bool:
        if folder not in self._folders:
            listed = self._client.list_artifacts(self._run, folder)
            self._folders[folder] = {Path(entry.path).name for entry in listed}
        return name in self._folders[folder]

    def json(self, path: str) -> dict[str, Any]:
        content: dict[str, Any] = self._read(path, lambda file: json.loads(file.read_text("utf-8")))
        return content

    def table(self, path: str) -> pd.DataFrame:
        # Lists of clients such as `3` are text, and a class may be called `NA` or `None`.
        table: pd.DataFrame = self._read(
            path,
            lambda file: pd.read_csv(
                file, dtype={"class": str, "providers": str}, keep_default_na=False, na_values=[""]
            ),
        )
        return table

    def _read(self, path: str, read: Callable[[Path], Any]) -> Any:
        with tempfile.TemporaryDirectory(prefix="fedsir-") as folder:
            try:
                return read(Path(self._client.download_artifacts(self._run, path, folder)))
            except Exception as error:  # the store, the network and the disk fail in ways of their own
                raise BadInput(
                    f"{path} of run {self._run} cannot be read from the store: {type(error).__name__}: {error}\n"
                    "Artifacts of a store that was moved are still looked for at the old place."
                ) from error


def _facts(run: Run) -> RunFacts:
    tags = run.data.tags
    return RunFacts(
        mlflow_id=run.info.run_id,
        name=run.info.run_name or "",
        identity=tags.get(TAG_RUN_ID, run.info.run_id),
        status=run.info.status,
        condition=tags.get(TAG_CONDITION, "unknown"),
        method=tags.get(TAG_METHOD, "unknown"),
        data_kind=tags.get(TAG_DATA_KIND, "unknown"),
        started=datetime.fromtimestamp(run.info.start_time / 1000).strftime("%Y-%m-%d %H:%M"),
        error=tags.get(TAG_ERROR, ""),
    )
