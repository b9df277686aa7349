"""Finds a recorded run and reads back what it says about clients and labels."""

from __future__ import annotations

import difflib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedsir.errors import BadInput
from mlflow_tracking.config import shown_uri
from mlflow_tracking.describe import TAG_CONDITION, TAG_DATA_KIND, TAG_ERROR, TAG_METHOD, TAG_RUN_ID
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
    runs = [_facts(run) for run in store.runs()]

    def pick(matches: Callable[[str], bool]) -> list[RunFacts]:
        return [r for r in runs if any(matches(known) for known in (r.mlflow_id, r.name, r.identity))]

    found = pick(lambda known: known == wanted) or (pick(lambda known: known.startswith(wanted)) if wanted else [])
    if not found:
        near = difflib.get_close_matches(wanted, list(dict.fromkeys(r.name for r in runs)), MAX_NAMED, cutoff=0.5)
        # The closest name first; of the same name the latest run.
        shown = sorted((r for r in runs if r.name in near), key=lambda r: near.index(r.name)) if near else runs
        known = [f"  {r.name}  {r.mlflow_id}" for r in shown[:MAX_NAMED]]
        raise BadInput(
            f"no run {wanted!r} in experiment {store.experiment!r} of {shown_uri(store.uri)}.\n"
            + "\n".join([f"{'Did you mean' if near else 'The latest are'}:", *known])
        )
    if len({r.identity for r in found}) > 1:
        choices = [f"  {r.mlflow_id}  {r.name}  {r.status}  {r.started}" for r in found[:MAX_NAMED]]
        more = [f"  and {len(found) - MAX_NAMED} more"] if len(found) > MAX_NAMED else []
        raise BadInput(
            "\n".join([f"{wanted!r} may be any of {len(found)} runs; give one of these ids:", *choices, *more])
        )
    finished = [r for r in found if r.status == "FINISHED"]
    return (finished or found)[0]


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
