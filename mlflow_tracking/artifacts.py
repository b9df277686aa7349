"""Writes the files of a run into a folder, from where the recorder hands them to MLflow."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import save_file

from fedsir.events import RunResult, RunStarted
from fedsir.federation.report import federation_table
from mlflow_tracking import figures, tables
from mlflow_tracking.describe import condition_name, plot_label, tags


def write_start(event: RunStarted, folder: Path) -> None:
    """Resolved configuration, and the federation as CSV and heat map."""
    config = yaml.safe_dump(event.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    target = _subfolder(folder, "federation")
    federation, truth = event.federation, event.truth
    federation_table(federation, truth).to_csv(target / "federation.csv")
    figures.save_png(
        figures.counts_figure(
            tables.class_counts(truth.labels, federation.num_classes),
            federation.observed_counts(),
            truth.noisy,
            federation.class_names,
            plot_label(event),
        ),
        target / "counts.png",
    )


def write_finish(event: RunStarted, result: RunResult, folder: Path) -> None:
    """Evaluation, identification, labels, summary and weights of the finished run."""
    federation, truth, label = event.federation, event.truth, plot_label(event)
    names = federation.class_names
    evaluation = _subfolder(folder, "evaluation")
    figures.save_png(figures.confusion_figure(result.confusion, names, label), evaluation / "confusion.png")
    tables.class_table(result.confusion, names).to_csv(evaluation / "per_class.csv", index=False)
    tables.client_table(federation, truth, result.labels, result.predicted_noisy, result.identification).to_csv(
        folder / "clients.csv", index=False
    )
    tables.label_table(federation, truth, result.labels).to_csv(folder / "labels.csv", index=False)
    verdict = result.identification
    if verdict is not None:
        target = _subfolder(folder, "identification")
        figures.save_png(
            figures.similarity_figure(verdict.similarity, truth.noisy, result.predicted_noisy, names, label),
            target / "similarity.png",
        )
        figures.save_png(
            figures.descriptor_figure(verdict.descriptors, verdict.p_clean, truth.noisy, result.predicted_noisy, label),
            target / "descriptors.png",
        )
    weights = {name: value.copy() for name, value in result.schema.named(result.weights)}
    save_file(weights, _subfolder(folder, "weights") / "last.safetensors", metadata={"sha256": result.weights_hash})
    text = json.dumps(_summary(event, result), indent=2, allow_nan=False, ensure_ascii=False)
    (folder / "summary.json").write_text(text + "\n", encoding="utf-8")


def _summary(event: RunStarted, result: RunResult) -> dict[str, Any]:
    dataset, verdict = event.dataset, result.identification
    versions = {k.removeprefix("version."): v for k, v in tags(event).items() if k.startswith("version.")}
    return {
        "run_id": event.run_id,
        "name": result.config.name,
        "method": result.config.method.name,
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
        "truly_noisy": np.flatnonzero(event.truth.noisy).tolist(),
        "predicted_noisy": (
            None if result.predicted_noisy is None else np.flatnonzero(result.predicted_noisy).tolist()
        ),
        "weights_sha256": result.weights_hash,
        "parameters": result.schema.num_parameters,
        "seconds": _number(result.seconds),
        "versions": versions,
    }


def _number(value: float) -> float | None:
    """JSON has no NaN; an undefined figure is null."""
    return float(value) if math.isfinite(value) else None


def _subfolder(folder: Path, name: str) -> Path:
    path = folder / name
    path.mkdir(exist_ok=True)
    return path
