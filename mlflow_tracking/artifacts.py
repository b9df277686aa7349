"""Writes the files of a run into a folder, from where the recorder hands them to MLflow."""

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
from mlflow_tracking import figures, tables
from mlflow_tracking.describe import condition_name, plot_label, tags
from mlflow_tracking.identification import descriptor_table, evidence, identification_facts, similarity_table
from mlflow_tracking.relabeling import (
    Relabeled,
    checkpoint_table,
    flow_table,
    label_flows,
    margin_counts,
    margin_medians,
    margin_table,
    outcome_table,
    reference_table,
    relabeled,
    relabeled_clients_table,
)


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


def write_finish(event: RunStarted, result: RunResult, notes: Mapping[int, Sequence[str]], folder: Path) -> None:
    """Evaluation, identification, relabelling, labels, summary and weights of the finished run.

    notes: what guards and fallbacks said, by finished rounds.
    """
    federation, truth, label = event.federation, event.truth, plot_label(event)
    names = federation.class_names
    evaluation = _subfolder(folder, "evaluation")
    figures.save_png(figures.confusion_figure(result.confusion, names, label), evaluation / "confusion.png")
    tables.class_table(result.confusion, names).to_csv(evaluation / "per_class.csv", index=False)
    tables.client_table(federation, truth, result.labels, result.predicted_noisy, result.identification).to_csv(
        folder / "clients.csv", index=False
    )
    tables.label_table(federation, truth, result.labels, result.margins, result.agreement).to_csv(
        folder / "labels.csv", index=False, float_format="%.6g"
    )
    if result.identification is not None:
        _write_identification(event, result, result.identification, _subfolder(folder, "identification"))
    done = relabeled(federation, truth, result)
    if done is not None:
        _write_relabeling(done, result, label, _subfolder(folder, "relabeling"))
    if result.weights is not None:
        weights = {name: value.copy() for name, value in result.schema.named(result.weights)}
        save_file(weights, _subfolder(folder, "weights") / "last.safetensors", metadata={"sha256": result.weights_hash})
    _write_json(folder / "summary.json", _summary(event, result, notes))


def _write_identification(event: RunStarted, result: RunResult, verdict: Identification, target: Path) -> None:
    """The verdict on clients; similarities and descriptors only for methods that compare spectra."""
    noisy, label = event.truth.noisy, plot_label(event)
    settings = result.config.method.model_dump(mode="json")
    settings["training"] = result.config.training.model_dump(mode="json")
    table = descriptor_table(verdict, event.federation.sizes, noisy, settings)
    table.to_csv(target / "descriptors.csv", index=False)
    facts = identification_facts(verdict, table, settings)
    facts["figures"] = {key: _number(value) for key, value in result.identification_figures.items()}
    _write_json(target / "identification.json", facts)
    names, predicted = event.federation.class_names, result.predicted_noisy
    if not np.isfinite(verdict.similarity).any():
        posterior = figures.posterior_figure(verdict.p_clean, noisy, predicted, label, evidence(verdict.split))
        figures.save_png(posterior, target / "posterior.png")
        return
    similarity_table(verdict.similarity, names).to_csv(target / "similarity.csv", index=False)
    figures.save_png(
        figures.similarity_figure(verdict.similarity, noisy, predicted, names, label), target / "similarity.png"
    )
    descriptors = figures.descriptor_figure(
        verdict.descriptors, verdict.p_clean, noisy, predicted, label, verdict.mixture, facts["threshold"]
    )
    figures.save_png(descriptors, target / "descriptors.png")


def _write_relabeling(done: Relabeled, result: RunResult, label: str, target: Path) -> None:
    """What relabelling did; margins and references only for methods that have them."""
    checkpoints = checkpoint_table(done)
    checkpoints.to_csv(target / "checkpoints.csv", index=False)
    relabeled_clients_table(done).to_csv(target / "clients.csv", index=False)
    outcome_table(done).to_csv(target / "outcomes.csv", index=False)
    flow_table(done).to_csv(target / "flow.csv", index=False)
    figures.save_png(figures.checkpoint_figure(checkpoints, label), target / "checkpoints.png")
    title = f"Labels of {len(done.clients)} clients, relabelled after round {done.checkpoints[-1][0]}"
    flows = label_flows(done, done.corrected)
    figures.save_png(figures.flow_figure(flows, done.class_names, title, label), target / "flow.png")
    histogram = margin_counts(done)
    if histogram is not None:
        margin_table(*histogram).to_csv(target / "margins.csv", index=False)
        figures.save_png(figures.margin_figure(*histogram, margin_medians(done), label), target / "margins.png")
    if result.references is not None:
        reference_table(result.references).to_csv(target / "references.csv", index=False)


def _summary(event: RunStarted, result: RunResult, notes: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    dataset, verdict = event.dataset, result.identification
    versions = {k.removeprefix("version."): v for k, v in tags(event).items() if k.startswith("version.")}
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
        "versions": versions,
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _number(value: float) -> float | None:
    """JSON has no NaN; an undefined figure is null."""
    return float(value) if math.isfinite(value) else None


def _subfolder(folder: Path, name: str) -> Path:
    path = folder / name
    path.mkdir(exist_ok=True)
    return path
