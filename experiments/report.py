"""What `fedsir report` does: reads the record, writes the files, and stores them with the sweep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError
from rich.console import Console

from experiments import validation_errors
from experiments.console import new_console, say, waiting
from experiments.expansion import Plan, expanded, require_complete, tracking_of
from experiments.sweeps.words import many
from fedsir import __version__
from fedsir.errors import BadInput
from mlflow_tracking.config import TrackingConfig, shown_uri

if TYPE_CHECKING:
    from mlflow_tracking.report.model import Report
    from mlflow_tracking.report.results import Results
    from mlflow_tracking.store import Store

FORMATS = ("html", "md", "tex", "csv")
ARTIFACT_FOLDER = "report"
MAX_NAMED = 8


def write_report(
    source: str | None,
    uri: str | None,
    experiment: str | None,
    out: Path,
    formats: str,
    only: Sequence[str],
    overrides: Sequence[str],
) -> None:
    """Write `report.html`, `.md`, `.tex` and `.csv` into `out`, and say what is in them.

    source: a grid, None for all runs of the experiment; uri, experiment: in place of the grid's. Raises BadInput.
    """
    chosen = parse_formats(formats)
    plan = _plan(source, only, overrides)
    tracking = _tracking(plan, uri, experiment)
    console = new_console()
    with waiting(console, "reading the MLflow store"):
        from mlflow_tracking.report.results import read_results
        from mlflow_tracking.report.tables import build_report
        from mlflow_tracking.store import existing_store

        store = existing_store(tracking)
        results = read_results(store, None if plan is None else {run.identity for run in plan.runs})
        missing = None if plan is None else missing_runs(store, plan)
        if results.runs.empty:
            where = f"experiment {tracking.experiment!r} of {shown_uri(tracking.uri)}"
            raise BadInput(
                f"no run {f'of grid {plan.grid.name} ' if plan else ''}has finished in {where}.\n"
                "Finish one with `fedsir run` or `fedsir sweep run`, or name the store and experiment that hold runs."
            )
        name = tracking.experiment if plan is None else plan.grid.name
        report = build_report(results, f"{'Experiment' if plan is None else 'Grid'} {name}", missing)
    made = f"{many(len(results.runs), 'finished run')}; fedsir {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    with waiting(console, "drawing figures and writing files"):
        files = _write(out, _contents(report, results, made, chosen))
    for file in files:
        say(console, f"{file} ({file.stat().st_size / 1e6:.2f} MB)")
    summarise(console, report, len(results.runs))
    if plan is not None and not only:
        _store_with_sweep(console, store, plan.grid.name, files)


def parse_formats(text: str) -> tuple[str, ...]:
    """Formats from `html,csv`, in order of `FORMATS`. Raises BadInput for unknown ones and for none."""
    wanted = [part.strip().lower() for part in text.split(",") if part.strip()]
    unknown = [part for part in wanted if part not in FORMATS]
    if unknown or not wanted:
        raise BadInput(f"--format {text!r}: expected some of {', '.join(FORMATS)}, separated by commas.")
    return tuple(name for name in FORMATS if name in wanted)


def missing_runs(store: Store, plan: Plan) -> list[str]:
    """Runs of which the store knows nothing: conditions and methods in words, each with its seeds."""
    from mlflow_tracking.states import recorded_states

    states = recorded_states(store, [run.identity for run in plan.runs])
    seeds: dict[str, list[str]] = {}
    for run in plan.runs:
        if run.identity not in states:
            label, _, seed = run.label.rpartition(" s")
            seeds.setdefault(label, []).append(seed)
    return [f"{label}: seed{'' if len(own) == 1 else 's'} {', '.join(own)}" for label, own in seeds.items()]


def summarise(console: Console, report: Report, finished: int) -> None:
    """Counts and the first warnings."""
    kinds = " and ".join(report.data_kinds)
    tables = many(len(report.tables), "table")
    say(console, f"{tables} of {many(finished, 'finished run')} on {kinds} images, from {report.source}")
    for text in report.warnings[:MAX_NAMED]:
        say(console, f"note: {text}", "yellow")
    if len(report.warnings) > MAX_NAMED:
        say(console, f"and {many(len(report.warnings) - MAX_NAMED, 'more note')} in the report")
    if report.missing or report.failed:
        say(console, f"missing: {len(report.missing)}, failed: {len(report.failed)}; listed in the report", "yellow")


def _plan(source: str | None, only: Sequence[str], overrides: Sequence[str]) -> Plan | None:
    if source is None:
        if only or overrides:
            raise BadInput("--only and --set choose runs of a grid; name one, for example `fedsir report rehearsal`.")
        return None
    plan = expanded(source, only, overrides)
    require_complete(plan)
    return plan


def _tracking(plan: Plan | None, uri: str | None, experiment: str | None) -> TrackingConfig:
    given = {key: value for key, value in (("uri", uri), ("experiment", experiment)) if value is not None}
    default = {} if plan is None or len(given) == 2 else tracking_of(plan).model_dump()
    try:
        return TrackingConfig.model_validate({**default, **given})
    except ValidationError as error:
        raise BadInput(
            "the store cannot be used.\n" + validation_errors.explain(error, TrackingConfig, "tracking.")
        ) from error


def _contents(report: Report, results: Results, made: str, formats: Sequence[str]) -> dict[str, Callable[[], str]]:
    """What makes the content, by name of file."""
    from mlflow_tracking.report.text import as_csv, as_latex, as_markdown

    def page() -> str:
        from mlflow_tracking.report.page import as_html
        from mlflow_tracking.report.pictures import draw_pictures

        return as_html(report, draw_pictures(results), made)

    writers: Mapping[str, Callable[[], str]] = {
        "html": page,
        "md": lambda: as_markdown(report),
        "tex": lambda: as_latex(report),
        "csv": lambda: as_csv(report),
    }
    return {f"report.{name}": writers[name] for name in formats}


def _write(folder: Path, contents: Mapping[str, Callable[[], str]]) -> list[Path]:
    try:
        # First, so that nobody waits for figures that cannot be kept.
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_text(content(), encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise BadInput(f"--out {folder}: cannot be written ({reason}); name another folder.") from error
    return [folder / name for name in contents]


def _store_with_sweep(console: Console, store: Store, grid: str, files: Sequence[Path]) -> None:
    from mlflow_tracking.sweep_run import find_sweep_run

    try:
        with store.lock:
            parent = find_sweep_run(store, grid)
            for file in files if parent is not None else ():
                store.client.log_artifact(parent, str(file), ARTIFACT_FOLDER)
    except Exception as error:  # database drivers, MLflow and the network share no base class
        say(console, f"the report could not be stored with the sweep: {type(error).__name__}: {error}", "yellow")
        return
    if parent is not None:
        say(console, f"also stored with the MLflow run `sweep {grid}`, under {ARTIFACT_FOLDER}/")
