"""How a run is named and described in the store: parameters, tags and the note people read first."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from fedsir.config.data import CohortData, KermanyData, MedMnistData, PhantomData
from fedsir.events import DatasetFacts, RunStarted
from fedsir.text import shortened
from mlflow_tracking.config import without_passwords

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

    from fedsir.config.run import RunConfig
    from fedsir.federation.federation import Federation

TAG_RUN_ID = "fedsir.run_id"
TAG_CONDITION = "fedsir.condition"
TAG_METHOD = "fedsir.method"
TAG_DATA_KIND = "fedsir.data_kind"
TAG_FEDERATION = "fedsir.federation"
TAG_ERROR = "fedsir.error"
TAG_RESUMED = "fedsir.resumed"
TAG_SUPERSEDED = "fedsir.superseded_by"
# Marks the run above the runs of a grid, see `mlflow_tracking.sweep_run`; the others name it as their parent.
TAG_GRID = "fedsir.grid"
TAG_PARENT = "mlflow.parentRunId"
TAG_NOTE = "mlflow.note.content"

EXPERIMENT_NOTE = """\
One run per data set, noise, heterogeneity, method and seed, all with the same parameters and tags; `data_kind` says
whether images are phantoms. A run `sweep NAME` stands above the runs of each grid.

- Filter `tags.fedsir.run_id != ''` and sort by a metric: sorted by time of creation, MLflow folds runs under the sweep.
- `attributes.status = 'FINISHED'` leaves complete runs.
- Sort by `final/accuracy` or `test/macro_f1` (the last round); group by `method` and `alpha`.
- Charts over rounds: `test/accuracy`, `relabel/residual`, `ident/accuracy`.
"""

PACKAGES = ("fedsir", "torch", "lightning", "ray", "mlflow")
# Stands where a setting has no meaning, so that every run has the same parameters.
NONE = "-"
MAX_VALUE = 250
MAX_ERROR = 500
MAX_DATASET_DIGEST = 36


def error_text(error: BaseException) -> str:
    """An error as the tag `fedsir.error` holds it."""
    return f"{type(error).__name__}: {without_passwords(str(error))}"[:MAX_ERROR]


def dataset_input(dataset: DatasetFacts) -> DatasetInput:
    """The images of a run as MLflow's input: name, digest, kind, and their numbers as the profile."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    counts = {
        "train_images": dataset.train_images,
        "test_images": dataset.test_images,
        "train_patients": dataset.train_patients,
        "test_patients": dataset.test_patients,
        "classes": len(dataset.class_names),
    }
    entity = Dataset(
        name=dataset.name,
        digest=dataset.digest[:MAX_DATASET_DIGEST],
        source_type=dataset.kind,
        source=json.dumps({"kind": dataset.kind, "classes": list(dataset.class_names)}),
        profile=json.dumps(counts),
    )
    return DatasetInput(entity, [InputTag("mlflow.data.context", "training and evaluation")])


def run_name(config: RunConfig) -> str:
    return f"{config.name}-{config.method.label}-s{config.seed}"


def condition_name(config: RunConfig, dataset: str) -> str:
    """Data set, noise, heterogeneity and federation size in one word; equal for all methods and seeds."""
    federation = config.federation
    noise = federation.noise
    short = {"none": "clean", "symmetric": f"sym{noise.ratio:g}", "asymmetric": f"asym{noise.ratio:g}"}
    partition = federation.partition
    dealt = "sites" if partition.variant == "site" else f"a{partition.alpha:g}"
    return f"{dataset}_{short[noise.type]}_{dealt}_k{federation.clients}"


def parameters(event: RunStarted) -> dict[str, str]:
    """At most 40 short values under the same keys for every run, so that the store's table has no holes.

    Settings that only one method has are joined in `method_settings`.
    """
    config, dataset, truth = event.config, event.dataset, event.truth
    federation, training = config.federation, config.training
    partition, noise = federation.partition, federation.noise
    noisy = int(truth.noisy.sum())
    settings = config.method.model_dump(mode="json", exclude={"name", "preset"})
    values: dict[str, object] = {
        "dataset": dataset.name,
        "data_kind": dataset.kind,
        **_source(config),
        "classes": len(dataset.class_names),
        "train_images": dataset.train_images,
        "test_images": dataset.test_images,
        "image_size": config.data.image_size,
        "horizontal_flip": config.data.transform.horizontal_flip,
        "clients": federation.clients,
        # What the draw gave; it may exceed the number asked for (see fedsir.config.federation).
        "clean_clients": federation.clients - noisy,
        "noisy_clients": noisy,
        "clean_selection": federation.clean_selection,
        "public_pool": len(event.federation.public_pool),
        "alpha": NONE if partition.variant == "site" else f"{partition.alpha:g}",
        "partition": f"{partition.variant}, by {partition.unit}",
        "noise_type": noise.type,
        "noise_ratio": 0 if noise.type == "none" else f"{noise.ratio:g}",
        "label_map": _label_map(config),
        "backbone": config.model.backbone,
        "weights": Path(config.model.weights).name,
        "dropout": f"{config.model.dropout:g}",
        "rounds": training.rounds,
        "local_epochs": training.local_epochs,
        "batch_size": training.batch_size,
        "participation": f"{training.participation:g}",
        "lr": f"{training.optimizer.lr:g}",
        "weight_decay": f"{training.optimizer.weight_decay:g}",
        "method": config.method.label,
        "method_settings": ", ".join(f"{k}={v}" for k, v in settings.items()),
        "seed": config.seed,
        "device": config.execution.device,
        "precision": config.execution.precision,
        "deterministic": config.execution.deterministic,
        "compile": config.execution.compile,
        "threads": config.execution.threads,
    }
    return {key: shortened(str(value), MAX_VALUE) or NONE for key, value in values.items()}


def _source(config: RunConfig) -> dict[str, object]:
    data = config.data
    match data:
        case PhantomData():
            return {"source": data.source, "cohort": data.cohort, "data_seed": data.seed}
        case CohortData():
            return {"source": data.source, "cohort": data.manifest.stem, "data_seed": data.split_seed}
        case KermanyData():
            return {"source": data.source, "cohort": data.root.name, "data_seed": NONE}
        case MedMnistData():
            return {"source": data.source, "cohort": data.path.stem, "data_seed": NONE}


def _label_map(config: RunConfig) -> str:
    noise = config.federation.noise
    if noise.type != "asymmetric" or noise.label_map is None:
        return NONE
    if isinstance(noise.label_map, str):
        return noise.label_map
    return ", ".join(f"{source}>{target}" for source, target in noise.label_map.items())


def tags(event: RunStarted, parent: str | None = None) -> dict[str, str]:
    """parent: id of the MLflow run of the sweep that the run belongs to."""
    config, dataset = event.config, event.dataset
    return {
        **({} if parent is None else {TAG_PARENT: parent}),
        TAG_RUN_ID: event.run_id,
        TAG_CONDITION: condition_name(config, dataset.name),
        TAG_METHOD: config.method.label,
        TAG_DATA_KIND: dataset.kind,
        TAG_FEDERATION: federation_digest(event.federation),
        "fedsir.host": platform.node(),
        **{f"version.{package}": number for package, number in versions().items()},
        "mlflow.source.name": "fedsir",
        TAG_NOTE: note(event),
    }


def note(event: RunStarted) -> str:
    """Markdown shown as the run's description."""
    facts = event.facts
    redraws = () if facts.redraws == 0 else (f"The partition was redrawn {facts.redraws} times.",)
    lines: Sequence[str] = (*event.dataset.notes, *facts.notes, *redraws)
    head = f"**{event.dataset.kind} data** ({event.dataset.name}), {run_name(event.config)}"
    return "\n".join([head, "", *(f"- {line}" for line in lines)])[:4000]


def plot_label(event: RunStarted) -> str:
    """Second title line of every plot: first of all whether the images are phantoms."""
    config, dataset = event.config, event.dataset
    return (
        f"{dataset.kind.upper()} DATA ({dataset.name})  ·  {condition_name(config, dataset.name)}"
        f"  ·  {config.method.label}  ·  seed {config.seed}"
    )


def federation_digest(federation: Federation) -> str:
    """16 hex digits; equal exactly when every client holds the same images under the same observed labels."""
    digest = hashlib.sha256(repr(federation.class_names).encode())
    for indices, observed in zip(federation.indices, federation.observed, strict=True):
        digest.update(len(indices).to_bytes(8, "little"))
        digest.update(indices.astype("<i8").tobytes())
        digest.update(observed.astype("<i8").tobytes())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """What is installed of `PACKAGES`."""
    return {package: _version(package) for package in PACKAGES}


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
