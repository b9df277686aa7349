"""Runs of a store in one file, and back: for clusters without a network.

The file is a zip archive of JSON and of the runs' artifacts (`archive.py`). MLflow gives every run a new id where it
is imported; the copy names the original in a tag, so that a second import finds it. A run that has gone on since its
first import replaces its copy.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fedsir.errors import BadInput, RunFailed
from mlflow_tracking.archive import ArchivedExperiment, ArchivedRun, ArchiveReader, ArchiveWriter
from mlflow_tracking.archive_entities import archived, download, mlflow_dataset
from mlflow_tracking.config import TrackingConfig, shown_uri, sqlite_path
from mlflow_tracking.describe import TAG_GRID, TAG_PARENT, TAG_RUN_ID, TAG_SUPERSEDED
from mlflow_tracking.store import Store, check_store, prepare_database, prepare_store
from mlflow_tracking.sweep_run import find_sweep_run

if TYPE_CHECKING:
    from mlflow.entities import Run

TAG_IMPORTED = "fedsir.imported_from"
# Set last: a copy without it is one whose import was interrupted.
TAG_STATE = "fedsir.imported_state"

Report = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True)
class _Listed:
    """Of a run in an archive what decides whether and where it goes; thousands of whole runs would fill the memory."""

    run_id: str
    tags: Mapping[str, str]
    state: str


@dataclass
class Imported:
    """Runs that were added, replaced (they have gone on since their first import) and skipped."""

    added: int = 0
    replaced: int = 0
    skipped: int = 0
    experiments: list[str] = field(default_factory=list)


def export_runs(uri: str, experiments: Sequence[str], target: Path, report: Report) -> int:
    """Write all runs of `experiments` (of every one if none is named) to the archive `target`; how many there were.

    Raises BadInput for a store without such experiments and for files that exist or cannot be written.
    """
    if target.exists():
        raise BadInput(f"{target} exists already.\nName another file, or remove it first.")
    stores = _stores(uri, experiments)
    count = 0
    with _failing_loudly(f"the runs of {shown_uri(uri)} could not be exported"), ArchiveWriter(target) as archive:
        for store in stores:
            runs = store.search()
            # MLflow creates an experiment `Default` in every store.
            if not runs and not experiments:
                continue
            tags = store.client.get_experiment(store.experiment_id).tags
            archive.add_experiment(ArchivedExperiment(name=store.experiment, tags=dict(tags)))
            for run in runs:
                with tempfile.TemporaryDirectory(prefix="fedsir-") as folder:
                    # First the files: what comes in between is newer than what the archive says, never missing.
                    files = download(store, run.info.run_id, Path(folder))
                    archive.add_run(archived(store, run), files)
                count += 1
                if count % 100 == 0:
                    report(f"{count} runs")
    return count


def import_runs(uri: str, source: Path, report: Report) -> Imported:
    """Add the runs of the archive `source` to the store; those that it has already are skipped.

    Raises BadInput for files that are no such archive, RunFailed if the store fails. An import that was interrupted
    is completed by doing it again.
    """
    done = Imported()
    with ArchiveReader(source) as archive:
        listed: dict[str, list[_Listed]] = {}
        for run_id in archive.run_ids:
            run = archive.run(run_id)
            listed.setdefault(run.experiment, []).append(_Listed(run_id, run.tags, run.state))
        for experiment in archive.experiments:
            store = prepare_store(TrackingConfig(uri=uri, experiment=experiment.name))
            done.experiments.append(experiment.name)
            runs = listed.get(experiment.name, [])
            with _failing_loudly(f"{source} could not be imported into {shown_uri(uri)}"):
                known = store.client.get_experiment(store.experiment_id).tags
                for key, value in experiment.tags.items():
                    if key not in known:
                        store.client.set_experiment_tag(store.experiment_id, key, value)
                _Importer(store, archive, done, report).add(runs)
    return done


class _Importer:
    """Adds the runs of one experiment."""

    def __init__(self, store: Store, archive: ArchiveReader, done: Imported, report: Report) -> None:
        self._store = store
        self._client = store.client
        self._archive = archive
        self._done = done
        self._report = report
        self._ids: dict[str, str] = {}
        """Here, by id in the archive."""

    def add(self, runs: Sequence[_Listed]) -> None:
        here = self._store.search()
        own = {run.info.run_id for run in here}
        copies = {run.data.tags[TAG_IMPORTED]: run for run in here if TAG_IMPORTED in run.data.tags}
        self._ids = {original: run.info.run_id for original, run in copies.items()} | {run: run for run in own}
        # By runs that are no copies; results of one identity are the same by definition.
        finished = {
            run.data.tags[TAG_RUN_ID]
            for run in here
            if run.info.status == "FINISHED" and TAG_RUN_ID in run.data.tags and TAG_IMPORTED not in run.data.tags
        }
        # Sweeps first, since other runs name them as their parents.
        for run in sorted(runs, key=lambda run: TAG_GRID not in run.tags):
            copy = copies.get(run.run_id)
            # The second: what was carried away from here comes back.
            there = run.run_id in own or run.tags.get(TAG_IMPORTED) in own or run.tags.get(TAG_RUN_ID) in finished
            if there or (copy is not None and copy.data.tags.get(TAG_STATE) == run.state):
                self._done.skipped += 1
            elif TAG_GRID in run.tags:
                self._add_sweep(run, copy)
            else:
                self._add_run(run, copy)
        self._point_at_successors(runs)

    def _add_sweep(self, run: _Listed, copy: Run | None) -> None:
        """There is one run for each grid here, whoever began it; only a copy follows its original."""
        known = find_sweep_run(self._store, run.tags[TAG_GRID]) if copy is None else None
        if known is not None:
            self._ids[run.run_id] = known
            self._done.skipped += 1
            return
        whole = self._archive.run(run.run_id)
        mlflow_id = self._created(whole) if copy is None else copy.info.run_id
        self._ids[run.run_id] = mlflow_id
        self._fill(whole, mlflow_id)
        self._count(copy is not None)

    def _add_run(self, run: _Listed, copy: Run | None) -> None:
        whole = self._archive.run(run.run_id)
        mlflow_id = self._created(whole)
        self._ids[run.run_id] = mlflow_id
        self._fill(whole, mlflow_id)
        if copy is not None:
            self._client.delete_run(copy.info.run_id)
        self._count(copy is not None)

    def _created(self, run: ArchivedRun) -> str:
        created = self._client.create_run(
            self._store.experiment_id,
            start_time=run.start_time,
            run_name=run.name,
            tags={TAG_IMPORTED: run.run_id},
        )
        return str(created.info.run_id)

    def _fill(self, run: ArchivedRun, mlflow_id: str) -> None:
        from mlflow.entities import Metric, Param, RunTag

        with tempfile.TemporaryDirectory(prefix="fedsir-") as folder:
            if self._archive.extract(run.run_id, Path(folder)):
                self._client.log_artifacts(mlflow_id, folder)
        metrics = [Metric(key, *point) for key, points in run.metrics.items() for point in points]
        # MLflow's limits on one call.
        for some in _batches(metrics, 1000):
            self._client.log_batch(mlflow_id, metrics=some)
        for params in _batches(run.params.items(), 100):
            self._client.log_batch(mlflow_id, params=[Param(*pair) for pair in params])
        if run.datasets:
            self._client.log_inputs(mlflow_id, datasets=[mlflow_dataset(dataset) for dataset in run.datasets])
        tags = {key: value for key, value in run.tags.items() if key not in (TAG_PARENT, TAG_SUPERSEDED, TAG_STATE)}
        parent = self._ids.get(run.tags.get(TAG_PARENT, ""))
        if parent is not None:
            tags[TAG_PARENT] = parent
        for some_tags in _batches({**tags, TAG_IMPORTED: run.run_id}.items(), 100):
            self._client.log_batch(mlflow_id, tags=[RunTag(*pair) for pair in some_tags])
        # Nobody works on the copy, whatever becomes of the original.
        status = "KILLED" if run.status in ("RUNNING", "SCHEDULED") else run.status
        self._client.set_terminated(mlflow_id, status, run.end_time)
        self._client.set_tag(mlflow_id, TAG_STATE, run.state)

    def _point_at_successors(self, runs: Sequence[_Listed]) -> None:
        """Runs that were started anew name the later one, which may have come after them."""
        for run in runs:
            successor = self._ids.get(run.tags.get(TAG_SUPERSEDED, ""))
            mine = self._ids.get(run.run_id)
            if successor is not None and mine is not None and mine != run.run_id:
                self._client.set_tag(mine, TAG_SUPERSEDED, successor)

    def _count(self, again: bool) -> None:
        if again:
            self._done.replaced += 1
        else:
            self._done.added += 1
        done = self._done.added + self._done.replaced
        if done % 100 == 0:
            self._report(f"{done} runs")


def _stores(uri: str, experiments: Sequence[str]) -> list[Store]:
    """The stores of the named experiments, of all that are not deleted if none is named."""
    path = sqlite_path(uri)
    if path is not None and not path.exists():
        raise BadInput(f"nothing is recorded in {shown_uri(uri)}: there is no such file.")
    status = check_store(TrackingConfig(uri=uri))
    if not status.reachable:
        raise BadInput(f"{status.uri}: {status.detail}.")
    prepare_database(uri)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    found = {experiment.name: str(experiment.experiment_id) for experiment in client.search_experiments()}
    unknown = [name for name in experiments if name not in found]
    if unknown:
        raise BadInput(
            f"there is no experiment {', '.join(map(repr, unknown))} in {shown_uri(uri)}.\n"
            f"Experiments: {', '.join(sorted(found)) or 'none'}."
        )
    return [Store(uri, name, found[name], client) for name in sorted(experiments or found)]


def _batches(values: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(values)
    while batch := list(islice(rest, size)):
        yield batch


@contextmanager
def _failing_loudly(what: str) -> Iterator[None]:
    try:
        yield
    except (BadInput, RunFailed):
        raise
    except Exception as error:  # the store, the network and the disk fail in ways of their own
        raise RunFailed(f"{what}: {type(error).__name__}: {error}") from error
