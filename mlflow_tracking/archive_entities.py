"""MLflow's runs and data sets as archives hold them, and back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mlflow_tracking.archive import ArchivedDataset, ArchivedRun, Point
from mlflow_tracking.store import Store

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Run


def archived(store: Store, run: Run) -> ArchivedRun:
    """What the store says of a run, with every point of its metrics."""
    info, data = run.info, run.data
    metrics: dict[str, tuple[Point, ...]] = {}
    for key in data.metrics:
        points = store.client.get_metric_history(info.run_id, key)
        metrics[key] = tuple((point.value, point.timestamp, point.step) for point in points)
    inputs = [] if run.inputs is None else run.inputs.dataset_inputs
    return ArchivedRun(
        run_id=info.run_id,
        experiment=store.experiment,
        name=info.run_name or "",
        status=info.status,
        start_time=info.start_time,
        end_time=info.end_time,
        params=dict(data.params),
        tags=dict(data.tags),
        metrics=metrics,
        datasets=tuple(_archived_dataset(each) for each in inputs),
    )


def mlflow_dataset(dataset: ArchivedDataset) -> DatasetInput:
    """An archived data set as MLflow logs it."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    entity = Dataset(
        name=dataset.name,
        digest=dataset.digest,
        source_type=dataset.source_type,
        source=dataset.source,
        profile=dataset.profile,
    )
    return DatasetInput(entity, [InputTag(key, value) for key, value in dataset.tags.items()])


def download(store: Store, mlflow_id: str, folder: Path) -> Path | None:
    """The artifacts of a run, put into `folder`; None where it has none."""
    if not store.client.list_artifacts(mlflow_id):
        return None
    return Path(store.client.download_artifacts(mlflow_id, "", str(folder)))


def _archived_dataset(given: DatasetInput) -> ArchivedDataset:
    dataset = given.dataset
    return ArchivedDataset(
        name=dataset.name,
        digest=dataset.digest,
        source_type=dataset.source_type,
        source=dataset.source,
        profile=dataset.profile,
        tags={tag.key: tag.value for tag in given.tags},
    )
