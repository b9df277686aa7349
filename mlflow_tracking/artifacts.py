"""Writes the files of a run into a folder, from where the recorder hands them to MLflow.

Everything but the figures (`mlflow_tracking.drawings`), so that a record without them does without matplotlib.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import save_file

from fedsir.events import RunResult, RunStarted
from fedsir.federation.report import federation_table
from fedsir.spectral.identification import Identification
from mlflow_tracking import tables
from mlflow_tracking.config import shown_uri
from mlflow_tracking.describe import condition_name, versions
from mlflow_tracking.identification import (
    compares_spectra,
    descriptor_table,
    identification_facts,
    method_settings,
    similarity_table,
)
from mlflow_tracking.relabeling import (
    Relabeled,
    checkpoint_table,
    flow_table,
    margin_counts,
    margin_table,
    outcome_table,
    reference_table,
    relabeled,
    relabeled_clients_table,
)
from mlflow_tracking.spreadsheets import write_csv

# A PyYAML built without libyaml writes the same values, more slowly.
DUMPER = yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper


def write_start(event: RunStarted, folder: Path) -> None:
    """Resolved configuration, and the federation as CSV."""
    values = event.config.model_dump(mode="json")
    if "tracking" in values:
        # A password in it is nobody's who reads the record.
        values["tracking"]["uri"] = shown_uri(values["tracking"]["uri"])
    config = yaml.dump(values, Dumper=DUMPER, sort_keys=False, allow_unicode=True)
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    table = federation_table(event.federation, event.truth)
    write_csv(table, subfolder(folder, "federation") / "federation.csv", index=True)


def write_finish(event: RunStarted, result: RunResult, notes: Mapping[int, Sequence[str]], folder: Path) -> None:
    """Evaluation, identification, relabelling, labels and summary of the finished run.

    notes: what guards and fallbacks said, by finished rounds.
    """
    federation, truth = event.federation, event.truth
    evaluation = subfolder(folder, "evaluation")
    write_csv(tables.class_table(result.confusion, federation.class_names), evaluation / "per_class.csv")
    write_csv(
        tables.prediction_table(result.test_labels, result.predicted, federation.class_names),
        evaluation / "predictions.csv",
    )
    write_csv(
        tables.client_table(federation, truth, result.labels, result.predicted_noisy, result.identification),
        folder / "clients.csv",
    )
    write_csv(
        tables.label_table(federation, truth, result.labels, result.margins, result.agreement),
        folder / "labels.csv",
        float_format="%.6g",
    )
    if result.identification is not None:
        _write_identification(event, result, result.identification, subfolder(folder, "identification"))
    done = relabeled(federation, truth, result)
    if done is not None:
        _write_relabeling(done, result, subfolder(folder, "relabeling"))
    _write_json(folder / "summary.json", _summary(event, result, notes))


def write_weights(result: RunResult, folder: Path) -> None:
    """The last weights under their `state_dict` names; nothing for methods without a global model."""
    if result.weights is not None:
        weights = {name: value.copy() for name, value in result.schema.named(result.weights)}
        save_file(weights, subfolder(folder, "weights") / "last.safetensors", metadata={"sha256": result.weights_hash})


def _write_identification(event: RunStarted, result: RunResult, verdict: Identification, target: Path) -> None:
    """The verdict on clients; similarities only for methods that compare spectra."""
    settings = method_settings(result.config)
    table = descriptor_table(verdict, event.federation.sizes, event.truth.noisy, settings)
    write_csv(table, target / "descriptors.csv")
    facts = identification_facts(verdict, table, settings)
    facts["figures"] = {key: _number(value) for key, value in result.identification_figures.items()}
    _write_json(target / "identification.json", facts)
    if compares_spectra(verdict):
        write_csv(similarity_table(verdict.similarity, event.federation.class_names), target / "similarity.csv")


def _write_relabeling(done: Relabeled, result: RunResult, target: Path) -> None:
    """What relabelling did; margins and references only for methods that have them."""
    write_csv(checkpoint_table(done), target / "checkpoints.csv")
    write_csv(relabeled_clients_table(done), target / "clients.csv")
    write_csv(outcome_table(done), target / "outcomes.csv")
    write_csv(flow_table(done), target / "flow.csv")
    histogram = margin_counts(done)
    if histogram is not None:
        write_csv(margin_table(*histogram), target / "margins.csv")
    if result.references is not None:
        write_csv(reference_table(result.references), target / "references.csv")


def _summary(event: RunStarted, result: RunResult, notes: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    dataset, verdict = event.dataset, result.identification
    return {
        "run_id": event.run_id,
        "name": result.config.name,
        "method": result.config.method.label,
        "seed": result.config.seed,
        "condition": condition_name(result.config, dataset.name),
        "data": {
            "name": dataset.name,
            "kind": dataset.kind,
            "digest": dataset.digest,
            "classes": list(dataset.class_names),
            "train_images": dataset.train_images,
            "test_images": dataset.test_images,
            "train_patients": dataset.train_patients,
            "test_patients": dataset.test_patients,
            "notes": list(dataset.notes),
        },
        "federation_notes": list(event.facts.notes),
        "final": {key: _number(value) for key, value in result.final.items()},
        "identification": {key: _number(value) for key, value in result.identification_figures.items()},
        "identification_notes": [] if verdict is None else list(verdict.notes),
        "notes": [{"round": round_, "note": note} for round_, texts in sorted(notes.items()) for note in texts],
        "truly_noisy": np.flatnonzero(event.truth.noisy).tolist(),
        "predicted_noisy": (
            None if result.predicted_noisy is None else np.flatnonzero(result.predicted_noisy).tolist()
        ),
        "weights_sha256": result.weights_hash,
        "parameters": result.schema.num_parameters,
        "seconds": _number(result.seconds),
        "versions": versions(),
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _number(value: float) -> float | None:
    """JSON has no NaN; an undefined figure is null."""
    return float(value) if math.isfinite(value) else None


def subfolder(folder: Path, name: str) -> Path:
    """`folder/name`, created if missing."""
    path = folder / name
    path.mkdir(exist_ok=True)
    return path
